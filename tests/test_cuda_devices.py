"""Two NVIDIA devices: ops follow their tensors, not the current device; heads split over both."""

from __future__ import annotations

import copy
import traceback

import pytest
import torch
from common import make_layer, make_qkv

from gdn_ops import _native
from gdn_ops.nn import GatedDeltaNet, Heads

_native.load()
ops = torch.ops.gdn

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA devices")

HEADS = Heads(2, 6, 128, 128)
R = 8


def calls(device: str) -> dict[str, torch.Tensor]:
    """One call of each family on ``device``; every output and everything that was written."""
    H, HV, K, V = HEADS
    q, k, v, g, beta = (t.to(device) for t in make_qkv(3, 2, H, HV, K, V))
    layer = {n: t.to(device) for n, t in make_layer(3, 1, H, HV, K, V).items()}
    layer["conv_state"] = torch.zeros(4, HEADS.conv_dim, 3, device=device)
    window = (
        torch.zeros(4, H, R, K, device=device),
        torch.zeros(4, HV, R, V, device=device),
        torch.zeros(4, HV, R, device=device),
        torch.zeros(4, dtype=torch.int32, device=device),
    )
    pools = [torch.zeros(4, HV, V, K, device=device) for _ in range(4)]
    rows = torch.tensor([2, 0, 3], dtype=torch.int32, device=device)
    named = {"state_indices": rows}
    done = {
        "recurrent": ops.recurrent(q, k, v, g, beta, pools[0], **named),
        "buffered": ops.recurrent_buffered(q, k, v, g, beta, pools[1], *window, **named),
        "chunk": ops.chunk(q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta)[0],
        "prefill": ops.chunk_prefill(
            q, k, v, g, beta, pools[2], read_indices=rows, write_indices=rows
        ),
        "decode": ops.decode(
            **layer, state=pools[3], num_k_heads=H, head_k_dim=K, **named,
        ),
    }  # fmt: skip
    ops.window_flush(pools[1], *window)
    done |= {f"pool {i}": pool for i, pool in enumerate(pools)}
    return done | {"conv_state": layer["conv_state"], "win_fill": window[3]}


def test_other_than_the_current_device():
    with torch.cuda.device(0):
        want = calls("cuda:0")
        got = calls("cuda:1")
    for name, tensor in got.items():
        assert tensor.device.index == 1, name
        assert torch.equal(tensor.cpu(), want[name].cpu()), name


def test_tensors_of_two_devices_are_refused():
    H, HV, K, V = HEADS
    args = [t.to("cuda:0") for t in make_qkv(3, 1, H, HV, K, V)]
    state = torch.zeros(3, HV, V, K, device="cuda:1")
    with pytest.raises(RuntimeError, match="device"):
        ops.recurrent(*args, state)
    assert not state.any()


@torch.no_grad()
def rank_main(rank: int, store: str, results: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from gdn_ops.distributed import HeadParallel

    error = ""
    try:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
        mesh = init_device_mesh("cuda", (2,))
        for state_mode in ("full", "buffered"):
            torch.manual_seed(1)
            whole = GatedDeltaNet(256, *HEADS, state_mode=state_mode, window=R).cuda()
            layer = parallelize_module(copy.deepcopy(whole), mesh, HeadParallel())
            x = torch.randn(2, 70, 256, generator=torch.Generator().manual_seed(2)).cuda()
            rows = torch.tensor([2, 0], dtype=torch.int32, device="cuda")
            pools = [net.allocate(3) for net in (whole, layer)]
            for a, b in ((0, 64), *((i, i + 1) for i in range(64, 70))):
                step = "prefill" if a == 0 else "decode"
                want = getattr(whole, step)(x[:, a:b], pools[0], rows)
                got = getattr(layer, step)(x[:, a:b], pools[1], rows)
                distance = ((got - want).abs().max() / want.abs().max()).item()
                assert distance < 1e-5, f"{state_mode}, token {a}: {distance:.1e}"
        dist.destroy_process_group()
    except Exception:
        error = traceback.format_exc()
    torch.save(error, f"{results}.{rank}")


def test_heads_over_two_devices(tmp_path):
    torch.multiprocessing.spawn(
        rank_main, (str(tmp_path / "store"), str(tmp_path / "errors")), nprocs=2
    )
    assert [torch.load(tmp_path / f"errors.{rank}") for rank in range(2)] == ["", ""]
