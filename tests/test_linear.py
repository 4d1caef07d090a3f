"""``linear`` against the float64 oracle, in the shapes of a decode step and around its limits."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from common import TOLERANCE, assert_close, at_thread_counts

import gdn_ops
from gdn_ops import reference

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Few rows run on the kernels, many on torch's product; 16 and 32 are tiles of rows.
ROWS = (1, 2, 3, 4, 5, 15, 16, 17, 32, 33, 64, 70)
# (N, K): whole tiles, a part of one, odd rows of weights, long rows, less than a register.
SHAPES = ((64, 256), (48, 32), (100, 96), (37, 64), (33, 1000), (16, 6144), (7, 5), (1, 1))


def operands(M: int, N: int, K: int, dtype: torch.dtype):
    gen = torch.Generator().manual_seed(M * N + K)
    x = torch.randn(M, K, generator=gen).to(dtype)
    return x, (torch.randn(N, K, generator=gen) / K**0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N, K", SHAPES)
def test_against_oracle(N, K, dtype):
    for M in ROWS:
        x, weight = operands(M, N, K, dtype)
        assert_close(f"{M} rows", gdn_ops.linear(x, weight), reference.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", [1, 4, 20])
def test_strided(M, dtype):
    """Rows inside wider ones, tokens between others, and what only torch's product can take."""
    x, weight = operands(M, 48, 96, dtype)
    expected = reference.linear(x, weight)
    wide = torch.full((M, 200), float("nan"), dtype=dtype)
    wide[:, 50:146] = x
    weights = torch.full((60, 2, 100), float("nan"), dtype=dtype)
    weights[5:53, 1, 3:99] = weight
    forms = {
        "wide rows": (wide[:, 50:146], weight),
        "wide weights": (x, weights[5:53, 1, 3:99]),
        "tokens": (wide[:, None, 50:146], weight),
        "columns": (x.t().contiguous().t(), weight),
        "columns of weights": (x, weight.t().contiguous().t()),
        "two strides": (torch.stack([wide, wide])[:, :, 50:146], weight),
    }
    for name, (a, w) in forms.items():
        got = gdn_ops.linear(a, w)
        assert got.is_contiguous() and got.shape == (*a.shape[:-1], 48)
        assert_close(name, got.reshape(-1, 48)[:M], expected)


@pytest.mark.parametrize("N, K", [(100, 96), (37, 64), (33, 250), (80, 2048)])
def test_bits_depend_on_the_row_alone(N, K):
    """Not on the other rows, the threads, or which rows of weights stand beside."""
    few = 4  # as many as run on the kernels of every instruction set
    for dtype in DTYPES:
        x, weight = operands(few, N, K, dtype)
        together = gdn_ops.linear(x, weight)
        call = functools.partial(gdn_ops.linear, x, weight)
        for other in at_thread_counts((1, 2, 3), call):
            assert torch.equal(other, together)
        for m in range(few):
            assert torch.equal(gdn_ops.linear(x[m : m + 1], weight), together[m : m + 1])
        if torch.ops.gdn.cpu_isa() == "amx" and dtype == torch.bfloat16:
            many, _ = operands(32, N, K, dtype)
            many[7:11] = x
            assert torch.equal(gdn_ops.linear(many, weight)[7:11], together)


def test_sums_are_float32():
    """A large and a small term that a 16-bit sum would lose."""
    for dtype, large in ((torch.bfloat16, 4096.0), (torch.float16, 2048.0)):
        x = torch.ones(2, 64, dtype=dtype)
        weight = torch.zeros(16, 64, dtype=dtype)
        weight[:, 0], weight[:, 1:41], weight[:, 63] = large, 0.25, -large
        assert torch.equal(gdn_ops.linear(x, weight), torch.full((2, 16), 10.0, dtype=dtype))


def test_not_finite_stays_where_it_is():
    x, weight = operands(3, 40, 64, torch.bfloat16)
    clean = gdn_ops.linear(x, weight)
    x[1, 5] = float("nan")
    weight[17, 3] = float("inf")
    got = gdn_ops.linear(x, weight)
    assert got[1].isnan().all() and not got[0, 17].isfinite() and not got[2, 17].isfinite()
    rest = torch.arange(40) != 17
    assert torch.equal(got[0, rest], clean[0, rest]) and torch.equal(got[2, rest], clean[2, rest])


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty(dtype):
    for M, N, K in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        y = gdn_ops.linear(torch.ones(M, K, dtype=dtype), torch.ones(N, K, dtype=dtype))
        assert y.shape == (M, N) and y.dtype == dtype and not y.any()


def pair(M: int, dtype: torch.dtype):
    """Equal operands twice, wanting gradients: for ours and for torch's product."""
    x, weight = operands(M, 20, 32, dtype)
    return [[t.clone().requires_grad_() for t in (x, weight)] for _ in range(2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", ROWS)
def test_wanting_gradients_changes_no_bit(M, dtype):
    x, weight = operands(M, 48, 96, dtype)
    expected = gdn_ops.linear(x, weight)
    for wanted in ((True, True), (True, False), (False, True)):
        a, w = (t.clone().requires_grad_(r) for t, r in zip((x, weight), wanted, strict=True))
        got = gdn_ops.linear(a, w)
        assert got.requires_grad and torch.equal(got, expected)
        with torch.no_grad():
            assert torch.equal(gdn_ops.linear(a, w), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_with_gradients(dtype):
    torch._dynamo.reset()
    eager, traced = pair(3, dtype)
    compiled = torch.compile(gdn_ops.linear, backend="aot_eager", fullgraph=True)
    y, z = gdn_ops.linear(*eager), compiled(*traced)
    assert torch.equal(y, z)
    y.float().square().sum().backward(), z.float().square().sum().backward()
    for a, b in zip(eager, traced, strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", [1, 3, 70])
def test_gradients_are_those_of_torch(M, dtype):
    ours, theirs = pair(M, dtype)
    both = []
    for product, leaves in ((gdn_ops.linear, ours), (F.linear, theirs)):
        y = product(*leaves)
        gen = torch.Generator().manual_seed(1)
        grad = torch.randn(y.shape, generator=gen).to(dtype)
        first = torch.autograd.grad(y, leaves, grad, create_graph=True)
        # Of the gradients again, which depend on the other operand.
        again = torch.autograd.grad(sum(g.float().square().sum() for g in first), leaves)
        both.append((*first, *again))
    for a, b in zip(*both, strict=True):
        assert torch.equal(a, b)


def test_gradients_of_any_shape():
    """Sequences and single vectors, against the difference quotients of float64; a float64 product
    is torch's, its gradients are ours."""
    for shape in ((3, 8), (2, 3, 8), (8,), (0, 8)):
        gen = torch.Generator().manual_seed(len(shape))
        x = torch.randn(shape, generator=gen, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(4, 8, generator=gen, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(gdn_ops.linear, (x, weight), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(gdn_ops.linear, (x, weight), check_fwd_over_rev=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tangents_are_those_of_torch(dtype):
    x, weight = operands(3, 20, 32, dtype)
    tangents = torch.ones_like(x), torch.ones_like(weight)

    def dual(product, operands, tangents):
        with forward_ad.dual_level():
            made = [forward_ad.make_dual(t, d) for t, d in zip(operands, tangents, strict=True)]
            return tuple(forward_ad.unpack_dual(product(*made)))

    for jvp in (torch.func.jvp, dual):
        got, want = (jvp(f, (x, weight), tangents) for f in (gdn_ops.linear, F.linear))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.filterwarnings("error:There is a performance drop")
def test_transforms_of_torch_func():
    x, weight = operands(3, 5, 8, torch.float32)
    many = torch.stack([x, x + 1])

    def loss(product):
        return lambda x, w: product(x, w).square().sum()

    transforms = {
        "grad": lambda f: torch.func.grad(loss(f), (0, 1))(x, weight),
        "vmap": lambda f: torch.vmap(f, (0, None))(many, weight),
        "vmap of weights": lambda f: torch.vmap(f, (None, 0))(x, torch.stack([weight, -weight])),
        "gradient of each": lambda f: torch.vmap(torch.func.grad(loss(f), 1), (0, None))(
            many, weight
        ),
        "jacfwd of jacrev": lambda f: torch.func.hessian(loss(f))(x, weight),
        "jacrev of jacfwd": lambda f: torch.func.jacrev(torch.func.jacfwd(loss(f)))(x, weight),
    }
    for name, transform in transforms.items():
        torch.testing.assert_close(
            transform(gdn_ops.linear), transform(F.linear), msg=lambda m, name=name: f"{name}: {m}"
        )
    # Tensors of outside that want gradients of their own.
    ours, theirs = pair(3, torch.float32)
    for product, leaves in ((gdn_ops.linear, ours), (F.linear, theirs)):
        y = torch.vmap(lambda t, f=product, a=leaves: f(*a).sum() * t)(torch.ones(2))
        y.sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_frozen_weights_keep_no_activation():
    x, weight = operands(4, 20, 32, torch.float32)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = gdn_ops.linear(x.requires_grad_(), weight)
    assert [t.data_ptr() for t in kept] == [weight.data_ptr()]
    y.sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, weight.sum(0).expand_as(x))
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gdn_ops.linear(x.detach(), weight.requires_grad_())
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


def test_gradients_keep_their_dtype_under_autocast():
    ours, theirs = pair(3, torch.float32)
    y = gdn_ops.linear(*ours)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(y.sum(), ours)
    want = torch.autograd.grad(F.linear(*theirs).sum(), theirs)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_as_close_as_torch():
    """The kernels round once: no further from float64 than torch's product is, by root mean
    square."""
    x, weight = operands(4, 512, 2048, torch.bfloat16)
    exact = reference.linear(x, weight)
    both = gdn_ops.linear(x, weight), F.linear(x, weight)
    rms = [float((y.double() - exact).square().mean().sqrt()) for y in both]
    assert rms[0] <= 1.05 * rms[1] and rms[0] < TOLERANCE[torch.bfloat16]


def test_raises():
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="weight: expected K = 8 in dimension 1, got 7"):
        gdn_ops.linear(x, torch.zeros(3, 7, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="weight: expected the dtype of x"):
        gdn_ops.linear(x, torch.zeros(3, 8))
    with pytest.raises(RuntimeError, match=r"weight: expected shape \[N, K\]"):
        gdn_ops.linear(x, torch.zeros(8, dtype=torch.bfloat16))
