"""What each rank runs for test_distributed.py: shards against the same call in one process.

A check is a function of a mesh, run by every rank; its error, if any, goes to the parent.
"""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from common import make_layer, make_qkv
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module

import gdn_ops
from gdn_ops.distributed import HeadParallel, packed_rows, shard_packed
from gdn_ops.nn import GatedDeltaNet, Heads

B, T, K, V, R = 4, 3, 16, 20, 4
ops = torch.ops.gdn

# The dimension of each argument that has heads, and the dimension of each that has the batch.
QKV_HEADS = "q2 k2 v2 g2 beta2 "
QKV_BATCH = "q0 k0 v0 g0 beta0 "
WINDOW_HEADS = "win_k1 win_u1 win_g1 "
WINDOW_BATCH = "win_k0 win_u0 win_g0 win_fill0 "
GATES_HEADS = "a2 b2 A_log0 dt_bias0 "
HEADS = {
    "recurrent": QKV_HEADS + "state1",
    "recurrent_gated": "q2 k2 v2 state1 " + GATES_HEADS,
    "recurrent_buffered": QKV_HEADS + WINDOW_HEADS + "state1",
    "recurrent_lowrank": QKV_HEADS + WINDOW_HEADS,
    "window_flush": WINDOW_HEADS + "state1",
    "window_reset": "",
    "chunk": QKV_HEADS + "initial_state1",
    "chunk_prefill": QKV_HEADS + "state1",
    "chunk_lowrank": QKV_HEADS + WINDOW_HEADS,
    "gating": GATES_HEADS,
    "gated_rms_norm": "x2 gate2",
    "conv1d": "x2 weight0 bias0 initial_state1",
    "short_conv": "x2 weight0 bias0 conv_state1",
    "conv_gating": GATES_HEADS + "mixed_qkv2 conv_weight0 conv_bias0 conv_state1",
    "decode": "projected2 conv_weight0 conv_bias0 A_log0 dt_bias0 conv_state1 state1",
    "decode_buffered": "projected2 conv_weight0 conv_bias0 A_log0 dt_bias0 conv_state1 state1 "
    + WINDOW_HEADS,
    "decode_lowrank": "projected2 conv_weight0 conv_bias0 A_log0 dt_bias0 conv_state1 "
    + WINDOW_HEADS,
}
BATCH = {
    "recurrent": QKV_BATCH + "state0 has_initial_state0",
    "recurrent_gated": "q0 k0 v0 a0 b0 state0",
    "recurrent_buffered": QKV_BATCH + WINDOW_BATCH + "state0",
    "recurrent_lowrank": QKV_BATCH + WINDOW_BATCH,
    "window_flush": WINDOW_BATCH + "state0",
    "window_reset": "win_fill0",
    "chunk": QKV_BATCH + "initial_state0",
    "chunk_prefill": QKV_BATCH + "state0",
    "chunk_lowrank": QKV_BATCH + WINDOW_BATCH,
    "gating": "a0 b0",
    "gated_rms_norm": "x0 gate0",
    "conv1d": "x0 initial_state0",
    "short_conv": "x0 conv_state0",
    "conv_gating": "a0 b0 mixed_qkv0 conv_state0",
    "decode": "projected0 conv_state0 state0",
    "decode_buffered": "projected0 conv_state0 state0 " + WINDOW_BATCH,
    "decode_lowrank": "projected0 conv_state0 " + WINDOW_BATCH,
}
# Arguments with a packed dimension, for the ops that know its parts.
PACKED_OPS = ("conv_gating", "decode", "decode_buffered", "decode_lowrank")
PACKED = {"projected": 2, "mixed_qkv": 2, "conv_weight": 0, "conv_bias": 0, "conv_state": 1}
DIFFERENTIABLE = ("chunk", "conv1d", "gating", "gated_rms_norm")


def placements_of(text: str) -> dict[str, int]:
    return {word[:-1]: int(word[-1]) for word in text.split()}


def arguments(op: str, heads: Heads) -> dict[str, object]:
    """Random arguments of an op by name: B sequences, B rows, some of them fresh."""
    H, HV = heads[:2]
    q, k, v, g, beta = make_qkv(B, T, H, HV, K, V)
    layer = make_layer(B, T, H, HV, K, V)
    qkv, z, b, a = layer["projected"].split(heads.split, -1)
    gen = torch.Generator().manual_seed(5)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    known: dict[str, object] = {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "a": a.contiguous(), "b": b.contiguous(),
        "A_log": layer["A_log"], "dt_bias": layer["dt_bias"], "state": randn(B, HV, V, K),
        "initial_state": randn(B, HV, V, K), "win_k": randn(B, H, R, K) / K**0.5,
        "win_u": randn(B, HV, R, V), "win_g": -randn(B, HV, R).abs(),
        "win_fill": torch.tensor([0, 1, 3, 4], dtype=torch.int32),
        "has_initial_state": torch.tensor([True, False, True, True]),
        "projected": layer["projected"], "mixed_qkv": qkv.contiguous(),
        "conv_weight": layer["conv_weight"], "conv_bias": layer["conv_bias"],
        "conv_state": randn(B, heads.conv_dim, 4), "norm_weight": layer["norm_weight"],
        "num_k_heads": H, "head_k_dim": K, "qk_l2norm": True, "chunk_size": 16,
        "gate": z.reshape(B, T, HV, V), "x": v, "weight": layer["norm_weight"],
    }  # fmt: skip
    if op in ("conv1d", "short_conv"):
        known |= {"x": qkv, "weight": layer["conv_weight"], "bias": layer["conv_bias"]}
        known["initial_state"] = randn(B, heads.conv_dim, 3)
    names = [a.name for a in getattr(ops, op).default._schema.arguments]
    return {n: known[n] for n in names if n in known}


def call(op: str, args: dict[str, object]) -> tuple[Tensor, ...]:
    out = getattr(ops, op).default(**args)
    return out if isinstance(out, tuple) else () if out is None else (out,)


def clone(args: dict[str, object]) -> dict[str, object]:
    return {n: t.clone() if isinstance(t, Tensor) else t for n, t in args.items()}


def full(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def check_op(mesh: DeviceMesh, op: str, split: str, replicated: bool, heads: Heads) -> None:
    """``split`` names what each dimension of the mesh shards: h, b.

    With ``replicated`` only what the op writes, and one input, is sharded; it cuts the rest.
    """
    args = arguments(op, heads)
    if "b" not in split and op not in DIFFERENTIABLE and op != "window_reset":
        args["state_indices"] = torch.tensor([2, -1, 0, 3], dtype=torch.int32)
        if op == "chunk_prefill":
            args["read_indices"] = args["write_indices"] = args.pop("state_indices")
    want_args = clone(args)
    want = call(op, want_args)
    schema = getattr(ops, op).default._schema
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    dims = [placements_of({"h": HEADS, "b": BATCH}[s][op]) for s in split]
    first = next(iter(dims[0]), None)
    got_args: dict[str, object] = {}
    for name, t in args.items():
        if not isinstance(t, Tensor):
            got_args[name] = t
            continue
        keep = name in written or name == first or not replicated
        placed = [Shard(d[name]) if keep and name in d else Replicate() for d in dims]
        if op in PACKED_OPS and name in PACKED and "h" in split and placed != [Replicate()]:
            axis = split.index("h")
            if isinstance(placed[axis], Shard):
                rows = packed_rows(heads, mesh.size(axis), projected=name == "projected")
                t = t.index_select(PACKED[name], rows.flatten())
        got_args[name] = distribute_tensor(t.clone(), mesh, placed)
    with CommDebugMode() as comms:
        got = call(op, got_args)
    assert comms.get_total_counts() == 0, comms.get_comm_counts()
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert any(isinstance(p, Shard) for p in g.placements) or dims[0] == {}, g.placements
        assert g.shape == w.shape and g.dtype == w.dtype, (g.shape, w.shape)
        assert torch.equal(full(g), w), f"output {i} of {op}"
    for name in written:
        w = want_args[name]
        if op in PACKED_OPS and name in PACKED and "h" in split:
            groups = mesh.size(split.index("h"))
            rows = packed_rows(heads, groups, projected=False).flatten()
            w = w.index_select(PACKED[name], rows)
        assert torch.equal(full(got_args[name]), w), f"{name} of {op}"


def check_gradients(mesh: DeviceMesh, op: str, split: str, heads: Heads) -> None:
    """Of a loss that uses every output, and of losses that use one alone."""
    outputs = len(getattr(ops, op).default._schema.returns)
    for used in dict.fromkeys([tuple(range(outputs)), *((i,) for i in range(outputs))]):
        check_gradients_of(mesh, op, split, heads, used)


def check_gradients_of(
    mesh: DeviceMesh, op: str, split: str, heads: Heads, used: tuple[int, ...]
) -> None:
    args = arguments(op, heads)
    dims = placements_of({"h": HEADS, "b": BATCH}[split][op])
    floats = [n for n, t in args.items() if isinstance(t, Tensor) and t.is_floating_point()]

    def gradients(args: dict[str, object], place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaves = [args[n].requires_grad_() for n in floats]
        loss, found = 0, call(op, args)
        for i in used:
            gen = torch.Generator().manual_seed(i)
            weight = torch.randn(found[i].shape, generator=gen)
            loss = loss + (found[i].float() * place(weight)).sum()
        return torch.autograd.grad(loss, leaves)

    want = gradients(clone(args), lambda t: t)
    shared = [Replicate()] * mesh.ndim
    got = gradients(
        {
            n: distribute_tensor(t.clone(), mesh, [Shard(dims[n]) if n in dims else Replicate()])
            if isinstance(t, Tensor)
            else t
            for n, t in args.items()
        },
        lambda t: distribute_tensor(t, mesh, shared),
    )
    for name, g, w in zip(floats, got, want, strict=True):
        error = (full(g) - w).abs().max() / w.abs().max().clamp(min=1)
        assert error < 3e-6, f"gradient of {name}, outputs {used}: {error:.1e}"


def check_linear(mesh: DeviceMesh) -> None:
    """Split by columns, by rows and by batch, with and without gradients; torch's rules."""
    gen = torch.Generator().manual_seed(3)
    x, weight = torch.randn(4, 3, 16, generator=gen), torch.randn(12, 16, generator=gen)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    y = gdn_ops.linear(*leaves)
    want = (y, *torch.autograd.grad(y.square().sum(), leaves))
    for name, places in {
        "columns": (Replicate(), Shard(0)),
        "rows": (Shard(2), Shard(1)),
        "batch": (Shard(0), Replicate()),
        "replicated": (Replicate(), Replicate()),
    }.items():
        parts = [distribute_tensor(t, mesh, [p]) for t, p in zip((x, weight), places, strict=True)]
        close(name, full(gdn_ops.linear(*parts)), want[0])
        for part in parts:
            part.requires_grad_()
        got = gdn_ops.linear(*parts)
        grads = torch.autograd.grad(
            got.redistribute(placements=[Replicate()]).square().sum(), parts
        )
        for what, a, b in zip(("y", "dx", "dw"), (got, *grads), want, strict=True):
            close(f"{name}: {what}", full(a), b)


def refused(message: str, function: Callable[[], object]) -> None:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        assert message in str(error), error
        return
    raise AssertionError(f"not refused: {message}")


def check_refusals(mesh: DeviceMesh) -> None:
    heads = Heads(mesh.size(), 3 * mesh.size(), K, V)
    args = arguments("recurrent", heads)
    placed = placements_of(HEADS["recurrent"])

    def run(*, index: Tensor | None = None, h: int = heads.num_k_heads, **changes: object) -> None:
        own = dict(args)
        own |= {n: own[n][:, :, :h] for n in ("q", "k")}
        if index is not None:
            own["state_indices"] = index
        for name, t in own.items():
            if isinstance(t, Tensor) and name not in changes:
                place = Shard(placed[name]) if name in placed else Replicate()
                own[name] = distribute_tensor(t.clone(), mesh, [place])
        before = full(own["state"]).clone() if "state" not in changes else None
        try:
            ops.recurrent.default(**(own | changes))
        except RuntimeError:
            assert before is None or torch.equal(full(own["state"]), before), "written"
            raise

    def dt(name: str, *placements: object) -> DTensor:
        return distribute_tensor(args[name].clone(), mesh, placements)

    run()
    refused("state: expected placements", lambda: run(state=dt("state", Replicate())))
    refused("k: expected the sharding of q", lambda: run(k=dt("k", Shard(0))))
    refused("v: expected Replicate, or Shard of", lambda: run(v=dt("v", Shard(1))))
    partial_g = DTensor.from_local(args["g"], mesh, [Partial()], run_check=False)
    refused("g: expected Replicate, or Shard of", lambda: run(g=partial_g))
    refused("g: expected a DTensor", lambda: run(g=args["g"]))
    refused("q: expected heads that divide", lambda: run(h=1))
    grad = dt("q", Shard(2)).requires_grad_()
    refused("q requires grad", lambda: run(q=grad))
    by_rows = placements_of(BATCH["recurrent"])
    batch = {n: dt(n, Shard(d)) for n, d in by_rows.items()}
    rows = torch.arange(B, dtype=torch.int32)
    refused("state_indices: expected None", lambda: run(**batch, index=rows))
    wide = distribute_tensor(torch.zeros(2 * B, *args["state"].shape[1:]), mesh, [Shard(0)])
    refused("state: expected 4 rows", lambda: run(**(batch | {"state": wide})))


@torch.no_grad()
def check_pool_of_dtensors(mesh: DeviceMesh) -> None:
    """A pool that stays sharded by head through a decode loop is written in place, by any rows."""
    heads = Heads(mesh.size(), 3 * mesh.size(), K, V)
    pool = torch.zeros(6, heads.num_v_heads, V, K)
    sharded = distribute_tensor(pool, mesh, [Shard(1)])
    address = sharded.to_local().data_ptr()
    rows = torch.tensor([5, -1, 0], dtype=torch.int32)
    for step in range(3):
        q, k, v, g, beta = make_qkv(3, 1, *heads, seed=step)
        want = gdn_ops.recurrent(q, k, v, g, beta, pool, rows)
        by_head = [distribute_tensor(t, mesh, [Shard(2)]) for t in (q, k, v, g, beta)]
        got = gdn_ops.recurrent(*by_head, sharded, rows)
        assert got.placements == (Shard(2),) and torch.equal(full(got), want)
    assert sharded.to_local().data_ptr() == address and torch.equal(full(sharded), pool)


@torch.no_grad()
def check_compiled_op(mesh: DeviceMesh) -> None:
    args = arguments("recurrent", Heads(mesh.size(), 3 * mesh.size(), K, V))
    want_args = clone(args)
    (want,) = call("recurrent", want_args)
    placed = placements_of(HEADS["recurrent"])
    got_args = {
        n: distribute_tensor(t, mesh, [Shard(placed[n]) if n in placed else Replicate()])
        if isinstance(t, Tensor)
        else t
        for n, t in args.items()
    }
    step = torch.compile(lambda **a: ops.recurrent.default(**a) * 2, backend="aot_eager")
    got = step(**got_args)
    assert torch.equal(full(got), 2 * want)
    assert torch.equal(full(got_args["state"]), want_args["state"])


# --- layers


def make_net(heads: Heads, **options: object) -> GatedDeltaNet:
    torch.manual_seed(1)
    layer = GatedDeltaNet(24, *heads, **options)
    with torch.no_grad():
        layer.norm_weight.add_(0.1 * torch.randn(heads.head_v_dim))
        layer.A_log.copy_(torch.linspace(-3, 1, heads.num_v_heads))
    return layer


def close(what: str, got: Tensor, want: Tensor, limit: float = 2e-6) -> None:
    assert got.shape == want.shape, (what, got.shape, want.shape)
    error = (got - want).abs().max() / want.abs().max().clamp(min=1)
    assert error < limit, f"{what}: {error:.1e}"


@torch.no_grad()
def check_layer(mesh: DeviceMesh, state_mode: str) -> None:
    heads = Heads(mesh.size(), 3 * mesh.size(), K, V)
    whole = make_net(heads, state_mode=state_mode, window=R)
    layer = parallelize_module(copy.deepcopy(whole), mesh, HeadParallel())
    x = torch.randn(2, 19, 24, generator=torch.Generator().manual_seed(2))
    rows = torch.tensor([2, 0], dtype=torch.int32)
    pools = [net.allocate(3) for net in (whole, layer)]
    for one, many in zip(pools[0], pools[1], strict=True):
        if one is not None and one.dim() > 1:
            assert many.numel() * mesh.size() == one.numel()
    for part, step in ((x[:, :17], "prefill"), (x[:, 17:18], "decode"), (x[:, 18:], "decode")):
        want = getattr(whole, step)(part, pools[0], rows)
        close(step, getattr(layer, step)(part, pools[1], rows), want)
    with CommDebugMode() as comms:
        layer.decode(x[:, :1], pools[1], rows)
    assert comms.get_total_counts() == 1, comms.get_comm_counts()
    refused("with all its", lambda: parallelize_module(layer, mesh, HeadParallel()))


def train(layer: torch.nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return y


def compare_gradients(layer: GatedDeltaNet, whole: GatedDeltaNet, rows: dict[str, Tensor]) -> None:
    for (name, got), want in zip(layer.named_parameters(), whole.parameters(), strict=True):
        w = want.grad[rows[name]] if name in rows else want.grad
        close(f"gradient of {name}", full(got.grad), w, 1e-5)


def check_training(mesh: DeviceMesh) -> None:
    heads = Heads(mesh.size(), 3 * mesh.size(), K, V)
    whole = make_net(heads)
    layer = parallelize_module(copy.deepcopy(whole), mesh, HeadParallel())
    x = torch.randn(2, 18, 24, generator=torch.Generator().manual_seed(3))
    xs = [x.clone().requires_grad_() for _ in range(2)]
    close("output", train(layer, xs[1]), train(whole, xs[0]))
    close("gradient of x", xs[1].grad, xs[0].grad, 1e-5)
    order = partial(packed_rows, heads, mesh.size())
    compare_gradients(
        layer,
        whole,
        {
            "in_proj.weight": order(projected=True).flatten(),
            "conv_weight": order(projected=False).flatten(),
        },
    )


def check_fsdp(mesh: DeviceMesh) -> None:
    """Each rank trains on its own rows; gradients are the mean over ranks."""
    whole = make_net(Heads(2, 6, K, V))
    layer = copy.deepcopy(whole)
    fully_shard(layer, mesh=mesh)
    for method in ("prefill", "decode"):
        register_fsdp_forward_method(layer, method)
    x = torch.randn(mesh.size(), 2, 18, 24, generator=torch.Generator().manual_seed(3))
    for part in x:
        want = train(whole, part)
    got = train(layer, x[mesh.get_local_rank()])
    if mesh.get_local_rank() == mesh.size() - 1:
        close("output", got, want)
    for (name, p), q in zip(layer.named_parameters(), whole.parameters(), strict=True):
        close(f"gradient of {name}", full(p.grad), q.grad / mesh.size(), 1e-5)
    with torch.no_grad():
        states = [net.allocate(2) for net in (whole, layer)]
        for step, tokens in (("prefill", x[0]), ("decode", x[0, :, :1])):
            want = getattr(whole, step)(tokens, states[0])
            close(step, getattr(layer, step)(tokens, states[1]), want)


def check_fsdp_of_heads(mesh: DeviceMesh) -> None:
    """Two dimensions: the batch over the first with FSDP, heads over the second."""
    heads = Heads(2, 6, K, V)
    whole = make_net(heads)
    layer = parallelize_module(copy.deepcopy(whole), mesh["tp"], HeadParallel())
    fully_shard(layer, mesh=mesh["dp"])
    x = torch.randn(2, 2, 18, 24, generator=torch.Generator().manual_seed(3))
    for part in x:
        train(whole, part)
    train(layer, x[mesh.get_local_rank("dp")])
    order = partial(packed_rows, heads, 2)
    rows = {
        "in_proj.weight": order(projected=True).flatten(),
        "conv_weight": order(projected=False).flatten(),
    }
    for (name, p), q in zip(layer.named_parameters(), whole.parameters(), strict=True):
        want = q.grad[rows[name]] if name in rows else q.grad
        close(f"gradient of {name}", full(p.grad), want / 2, 1e-5)


def check_packed_helper(mesh: DeviceMesh) -> None:
    heads = Heads(mesh.size(), 3 * mesh.size(), 2, 3)
    own = heads.part(mesh.size())
    labels = torch.cat(
        [
            torch.arange(n).repeat_interleave(size)
            for n, size in (
                (heads.num_k_heads, 2), (heads.num_k_heads, 2), (heads.num_v_heads, 3),
                (heads.num_v_heads, 3), (heads.num_v_heads, 1), (heads.num_v_heads, 1),
            )
        ]
    )  # fmt: skip
    got = shard_packed(labels, mesh, heads, 0, projected=True).to_local()
    rank = mesh.get_local_rank()
    parts = got.split([own.key_dim] * 2 + [own.value_dim] * 2 + [own.num_v_heads] * 2)
    for part, n in zip(parts, [own.num_k_heads] * 2 + [own.num_v_heads] * 4, strict=True):
        assert part.unique().tolist() == list(range(rank * n, (rank + 1) * n)), (rank, part)


# --- transformers


def tiny(family: str, mesh: DeviceMesh) -> torch.nn.Module:
    from gdn_ops.hf.tiny import tiny_model

    return tiny_model(
        family, layers=2, num_k_heads=mesh.size(), num_v_heads=3 * mesh.size(), head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip


@torch.no_grad()
def check_patched_heads(mesh: DeviceMesh, family: str, state_mode: str) -> None:
    whole = gdn_ops.patch(tiny(family, mesh), state_mode=state_mode)
    model = copy.deepcopy(whole)
    parallelize_module(model, mesh, {"model.layers.0.linear_attn": HeadParallel()})
    prompt = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(4))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want = whole.generate(prompt, **options)
    assert torch.equal(model.generate(prompt, **options), want)
    close("logits", model(prompt).logits, whole(prompt).logits, 1e-5)
    plan = {"model.layers.0.linear_attn": HeadParallel()}
    refused("with all its", lambda: parallelize_module(model, mesh, plan))
    refused("sharded by heads", lambda: gdn_ops.unpatch(model))
    assert torch.equal(model.generate(prompt, **options), want)


def check_patched_fsdp(mesh: DeviceMesh, family: str) -> None:
    """A step of the optimiser between two forward passes must show in the second."""
    whole = gdn_ops.patch(tiny(family, mesh)).train()
    model = copy.deepcopy(whole)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tokens = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(4))
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, model)]
    for _ in range(2):
        outputs = []
        for m, optimiser in zip((whole, model), optimisers, strict=True):
            with torch.no_grad():
                outputs.append(m(tokens).logits)
            m(tokens, labels=tokens).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        close("logits", outputs[1], outputs[0], 1e-5)
    with torch.no_grad():
        close("logits after eval", model.eval()(tokens).logits, whole.eval()(tokens).logits, 1e-5)


def checks(world: int) -> dict[str, tuple[Callable[[DeviceMesh], None], bool]]:
    """Checks of a world size by name, and whether each wants the mesh of two dimensions."""
    heads = Heads(world, 3 * world, K, V)
    found: dict[str, tuple[Callable[[DeviceMesh], None], bool]] = {}
    for op in HEADS:
        # Two ranks see every variant, four the ones that four can break.
        variants = [("h", False)]
        if world == 2:
            variants += [("b", False), ("h", True), ("b", True)]
        for split, replicated in variants:
            name = f"{op}-{split}" + ("-replicated" if replicated else "")
            run = partial(check_op, op=op, split=split, replicated=replicated, heads=heads)
            found[name] = (run, False)
        if world == 4 and op not in ("window_reset", "gated_rms_norm"):
            both = partial(check_op, op=op, split="bh", replicated=False, heads=Heads(2, 6, K, V))
            found[f"{op}-bh"] = (both, True)
    plain = {
        "refusals": check_refusals,
        "pool": check_pool_of_dtensors,
        "packed": check_packed_helper,
        "training": check_training,
        "linear": check_linear,
        "layer-full": partial(check_layer, state_mode="full"),
    }
    if world == 2:
        for op in DIFFERENTIABLE:
            for split in ("h", "b"):
                plain[f"gradients-{op}-{split}"] = partial(
                    check_gradients, op=op, split=split, heads=heads
                )
        plain |= {
            "layer-buffered": partial(check_layer, state_mode="buffered"),
            "layer-lowrank": partial(check_layer, state_mode="lowrank"),
            "fsdp": check_fsdp,
            "compiled": check_compiled_op,
        }
        for family in ("qwen3_5", "qwen3_next"):
            plain[f"patched-fsdp-{family}"] = partial(check_patched_fsdp, family=family)
            plain[f"patched-heads-{family}"] = partial(
                check_patched_heads, family=family, state_mode="full"
            )
        plain["patched-heads-buffered"] = partial(
            check_patched_heads, family="qwen3_5", state_mode="buffered"
        )
    found |= {name: (run, False) for name, run in plain.items()}
    if world == 4:
        found["fsdp-of-heads"] = (check_fsdp_of_heads, True)
    return found


def rank_main(rank: int, world: int, store: str, results: str) -> None:
    """Runs every check; rank r leaves its errors in ``<results>.r``."""
    import traceback

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # DTensor on the collectives of full_tensor()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        # A rank that failed leaves the others waiting.
        timeout=timedelta(seconds=30),
    )
    line = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    errors: dict[str, str] = {}
    for name, (run, two_dims) in checks(world).items():
        if errors:
            errors[name] = "not run: an earlier check failed"
            continue
        try:
            run(square if two_dims else line)
            dist.all_reduce(torch.zeros(1))  # a barrier: each check starts on every rank
        except Exception:
            # The other ranks may wait inside a collective; there is no way back into step.
            errors[name] = traceback.format_exc()
    torch.save(errors, f"{results}.{rank}")
    # At once: after an error other ranks may wait for this one; without any, torch's threads have
    # aborted a process that ended under load: "terminate called without an active exception".
    os._exit(0)
