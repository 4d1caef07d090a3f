"""What stands between the projections and the layers of benchmarks/model.py, as Triton kernels.

Each has its definition in plain torch beside it (``*_plain``), and ``check`` compares the two. Rows
are tokens; 8-bit rows have one scale each. Rounding follows the plain form, where the model rounds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
EPS = 1e-6


def quantize_plain(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=EPS) / FP8_MAX
    return (x.float() / scale).to(FP8), scale


def norm_plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + EPS) * weight).to(x.dtype)


def swiglu_plain(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.float()).to(x.dtype) * up


# A row is two pieces of a power of two each, A and B, in registers.


@triton.jit
def _store_row(a, b, y, scale, row, n, FP8: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """The pieces a and b as a row of y: 8-bit with its scale, or as they are."""
    if FP8:
        s = tl.maximum(tl.maximum(tl.max(tl.abs(a)), tl.max(tl.abs(b))), 1e-6) / 448.0
        tl.store(scale + row, s)
        a, b = a / s, b / s
    at, after = tl.arange(0, A), A + tl.arange(0, B)
    tl.store(y + row * n + at, a.to(y.dtype.element_ty))
    tl.store(y + row * n + after, b.to(y.dtype.element_ty), mask=after < n)


@triton.jit
def _residual(x, delta, row, at, n, ADD: tl.constexpr):
    f = tl.load(x + row * n + at, mask=at < n, other=0.0).to(tl.float32)
    if ADD:
        f += tl.load(delta + row * n + at, mask=at < n, other=0.0).to(tl.float32)
        f = f.to(x.dtype.element_ty)
        tl.store(x + row * n + at, f, mask=at < n)
    return f.to(tl.float32)


@triton.jit
def _norm_row(x, delta, weight, y, scale, n, ADD: tl.constexpr, FP8: tl.constexpr,
              A: tl.constexpr, B: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at, after = tl.arange(0, A), A + tl.arange(0, B)
    a, b = _residual(x, delta, row, at, n, ADD), _residual(x, delta, row, after, n, ADD)
    r = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / n + 1e-6)
    a = (a * r * tl.load(weight + at)).to(x.dtype.element_ty).to(tl.float32)
    b *= r * tl.load(weight + after, mask=after < n, other=0.0)
    b = b.to(x.dtype.element_ty).to(tl.float32)
    _store_row(a, b, y, scale, row, n, FP8, A, B)


@triton.jit
def _silu_product(x, row, at, n):
    gate = tl.load(x + row * 2 * n + at, mask=at < n, other=0.0)
    up = tl.load(x + row * 2 * n + n + at, mask=at < n, other=0.0).to(tl.float32)
    g = gate.to(tl.float32)
    g = (g / (1 + tl.exp(-g))).to(gate.dtype).to(tl.float32)
    return (g * up).to(gate.dtype).to(tl.float32)


@triton.jit
def _swiglu_row_8(x, y, scale, n, A: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    a = _silu_product(x, row, tl.arange(0, A), n)
    b = _silu_product(x, row, A + tl.arange(0, B), n)
    _store_row(a, b, y, scale, row, n, True, A, B)


@triton.jit
def _swiglu_part(x, y, n, N: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, N)
    tl.store(y + row * n + at, _silu_product(x, row, at, n).to(y.dtype.element_ty), mask=at < n)


@triton.jit
def _quantize_row(x, y, scale, n, A: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    a = _residual(x, x, row, tl.arange(0, A), n, False)
    b = _residual(x, x, row, A + tl.arange(0, B), n, False)
    _store_row(a, b, y, scale, row, n, True, A, B)


def _rows(x: torch.Tensor, n: int, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.empty(x.shape[0], n, dtype=FP8 if fp8 else x.dtype, device=x.device)
    return y, torch.empty(x.shape[0], 1, device=x.device) if fp8 else y


def _pieces(n: int) -> tuple[int, int]:
    first = triton.next_power_of_2(n // 2 + 1)
    return first, triton.next_power_of_2(max(n - first, 1))


def norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, fp8: bool):
    """x += delta, in place; then the RMS norm of x, 8-bit with a scale a row where asked."""
    n = x.shape[1]
    y, scale = _rows(x, n, fp8)
    _norm_row[(x.shape[0],)](
        x, x if delta is None else delta, weight, y, scale, n, delta is not None, fp8, *_pieces(n),
        num_warps=8,
    )  # fmt: skip
    return (y, scale) if fp8 else y


def swiglu(x: torch.Tensor, fp8: bool):
    """silu(first half) * second half."""
    n = x.shape[1] // 2
    y, scale = _rows(x, n, fp8)
    if fp8:
        _swiglu_row_8[(x.shape[0],)](x, y, scale, n, *_pieces(n), num_warps=16)
        return y, scale
    _swiglu_part[(x.shape[0], triton.cdiv(n, 2048))](x, y, n, 2048, num_warps=8)
    return y


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n = x.shape[1]
    y, scale = _rows(x, n, True)
    _quantize_row[(x.shape[0],)](x, y, scale, n, *_pieces(n), num_warps=8)
    return y, scale


def _rotate_plain(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, T, heads, D] by the angles [T, D/2 or less] of its tokens."""
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    turned, kept = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = turned.chunk(2, dim=-1)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([turned.to(x.dtype), kept], -1)


def attention_plain(projected, q_weight, k_weight, cos, sin, keys, values, position):
    """Attention of T tokens a sequence to a ring of keys; q | gate | k | v are its inputs.

    The ring is full: a token sees all of it but the places of the call's later tokens, and the
    call's own tokens take the places of the oldest, from ``position[b]`` on.
    """
    B, KH, L, D = keys.shape
    T = cos.shape[0]
    QH = projected.shape[1] // (2 * D) - KH
    G = QH // KH
    q, gate, k, v = projected.split([QH * D, QH * D, KH * D, KH * D], -1)
    q = _rotate_plain(norm_plain(q.view(B, T, QH, D), q_weight), cos, sin)
    k = _rotate_plain(norm_plain(k.view(B, T, KH, D), k_weight), cos, sin)
    step = torch.arange(T, device=keys.device)
    place = (position[:, None] + step) % L
    row = torch.arange(B, device=keys.device)[:, None]
    keys[row, :, place] = k
    values[row, :, place] = v.view(B, T, KH, D)
    age = (torch.arange(L, device=keys.device) - position[:, None]) % L
    seen = (age[:, None] >= T) | (age[:, None] <= step[:, None])
    # The tokens and query heads of a key head are rows of one product.
    q = q.view(B, T, KH, G, D).transpose(1, 2).reshape(B, KH, T * G, D)
    seen = seen[:, None, :, None].expand(B, 1, T, G, L).reshape(B, 1, T * G, L)
    o = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
    o = o.view(B, KH, T, G, D).transpose(1, 2).reshape(B * T, QH * D)
    return o * torch.sigmoid(gate.float()).to(o.dtype)


@triton.jit
def _normed(x, weight, cos, sin, base, at, rotated: tl.constexpr):
    """Rows [base] of x, normalised and their first `rotated` columns rotated, in x's dtype."""
    dtype: tl.constexpr = x.dtype.element_ty
    f = tl.load(x + base + at).to(tl.float32)
    r = tl.rsqrt(tl.sum(f * f, 1)[:, None] / f.shape[1] + 1e-6)
    half: tl.constexpr = rotated // 2
    turned = at < rotated
    pair = tl.where(at < half, at + half, at - half)
    other = tl.load(x + base + pair, mask=turned, other=0.0).to(tl.float32)
    other = (other * r * tl.load(weight + pair, mask=turned, other=0.0)).to(dtype).to(tl.float32)
    f = (f * r * tl.load(weight + at)).to(dtype).to(tl.float32)
    c = tl.load(cos + at % half, mask=turned, other=1.0)
    s = tl.load(sin + at % half, mask=turned, other=0.0)
    return (f * c + tl.where(at < half, -other, other) * s).to(dtype)


@triton.jit
def _attend(projected, q_weight, k_weight, cos, sin, keys, values, position, out, width,
            L: tl.constexpr, T: tl.constexpr, QH: tl.constexpr, KH: tl.constexpr, D: tl.constexpr,
            ROT: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """One program a (sequence, key head): its tokens' query heads are the rows of the products."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    G: tl.constexpr = QH // KH
    dtype: tl.constexpr = projected.dtype.element_ty
    at = tl.arange(0, D)[None, :]
    m = tl.minimum(tl.arange(0, M), T * G - 1)
    token = m // G
    head = h * G + m % G
    angle = (token * (ROT // 2))[:, None]
    first = b * T * width
    q_at = first + (token * width + head * D)[:, None]
    q = _normed(projected, q_weight, cos + angle, sin + angle, q_at, at, ROT)
    new = tl.load(position + b).to(tl.int32)
    base = (b * KH + h) * L * D
    scale: tl.constexpr = 1.4426950408889634 / D**0.5
    # The new tokens from registers: what this program has just stored is not read back.
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    one = tl.zeros((1, 1), tl.int32)
    for t in tl.static_range(T):
        row = projected + first + t * width
        turn = t * (ROT // 2)
        k = _normed(row + (2 * QH + h) * D, k_weight, cos + turn, sin + turn, one, at, ROT)
        v = tl.load(row + (2 * QH + KH + h) * D + at)
        place = base + ((new + t) % L) * D + at
        tl.store(keys + place, k)
        tl.store(values + place, v)
        own = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
        own = tl.where(token >= t, own, float("-inf"))
        above = tl.maximum(top, own)  # finite: every row sees the first token
        weight = tl.exp2(own - above)
        shrink = tl.exp2(top - above)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + weight[:, None] * v.to(tl.float32)
        top = above
    for start in tl.range(0, L, N):
        entry = start + tl.arange(0, N)
        here = base + entry[:, None] * D + at
        score = tl.dot(q, tl.load(keys + here).T) * scale
        score = tl.where(((entry - new + L) % L < T)[None, :], float("-inf"), score)
        above = tl.maximum(top, tl.max(score, 1))
        p = tl.exp2(score - above[:, None])
        shrink = tl.exp2(top - above)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(dtype), tl.load(values + here), acc * shrink[:, None])
        top = above
    o = (acc / total[:, None]).to(dtype).to(tl.float32)
    gate = tl.load(projected + q_at + QH * D + at).to(tl.float32)
    o *= (1 / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    live = tl.arange(0, M)[:, None] < T * G
    to = ((b * T + token) * QH + head)[:, None] * D + at
    tl.store(out + to, o.to(dtype), mask=live)


ENTRIES = 32  # of the cache that are read at once


def attention(projected, q_weight, k_weight, cos, sin, keys, values, position):
    B, KH, L, D = keys.shape
    T, half = cos.shape
    if L % ENTRIES:
        raise ValueError(f"attention: expected a context that is a multiple of {ENTRIES}, got {L}")
    width = projected.shape[1]
    QH = width // (2 * D) - KH
    rows = max(16, triton.next_power_of_2(T * QH // KH))
    out = torch.empty(B * T, QH * D, dtype=projected.dtype, device=projected.device)
    _attend[(B, KH)](
        projected, q_weight, k_weight, cos, sin, keys, values, position, out, width,
        L, T, QH, KH, D, 2 * half, rows, ENTRIES, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def _close(name: str, got: torch.Tensor, want: torch.Tensor, most: float) -> None:
    got, want = got.float(), want.float()
    error = ((got - want).norm() / want.norm()).item()
    if not error <= most:
        raise SystemExit(f"{name}: {error:.1e} from its plain form, more than {most:.0e}")


def check(hidden: int, inter: int, device: str, B: int = 5, L: int = 64) -> None:
    """Each kernel against its plain form on fresh inputs."""

    def randn(*shape):
        return torch.randn(*shape, device=device).bfloat16()

    x, delta, weight = randn(B, hidden), randn(B, hidden), torch.rand(hidden, device=device)
    want = norm_plain(x + delta, weight)
    _close("norm", norm(x.clone(), delta, weight, False), want, 2e-3)
    summed = x.clone()
    y, scale = norm(summed, delta, weight, True)
    _close("residual", summed, x + delta, 0)
    _close("norm, 8 bits", y.float() * scale, want, 4e-2)
    up = randn(B, 2 * inter)
    _close("swiglu", swiglu(up, False), swiglu_plain(up), 2e-3)
    y, scale = swiglu(up, True)
    want, want_scale = quantize_plain(swiglu_plain(up))
    _close("swiglu, 8 bits", y.float() * scale, want.float() * want_scale, 1e-2)
    y, scale = quantize(x)
    want, want_scale = quantize_plain(x)
    _close("quantize", y.float() * scale, want.float() * want_scale, 1e-3)
    QH, KH, D, ROT = 24, 4, 256, 64
    for T in (1, 4):
        projected = randn(B * T, 2 * (QH + KH) * D)
        angle = torch.rand(T, ROT // 2, device=device)
        position = (torch.arange(B, device=device) * (L // 3) - 2) % L  # some run over the end
        caches = [randn(B, KH, L, D) for _ in range(2)]
        weights = [torch.rand(D, device=device) for _ in range(2)]
        plain = [c.clone() for c in caches]
        got = attention(projected, *weights, angle.cos(), angle.sin(), *caches, position)
        want = attention_plain(projected, *weights, angle.cos(), angle.sin(), *plain, position)
        _close(f"attention of {T}", got, want, 8e-3)
        for a, b in zip(caches, plain, strict=True):
            _close(f"attention cache of {T}", a, b, 2e-3)
