"""More than one device: sharding rules of every op for DTensor, and a parallel style for the layer.

Importing this module registers the rules. Heads are independent of each other and so are the
sequences of a batch, so an op runs on each rank's shards as it stands: nothing is communicated, and
a pool is written where it lies. An input that is replicated is cut locally; one whose placement
would need communication is an error that names it. :class:`HeadParallel` shards a layer, its
parameters and its pools by heads, for ``parallelize_module``.

A *packed* dimension (``projected``, the channels of the convolution) holds parts that each have
heads: q | k | v | z | b | a. Sharded, it means that every rank holds the packed layout of its own
heads (:func:`shard_packed`), not that it holds a contiguous piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, library, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

from gdn_ops.nn import GatedDeltaNet, Heads

__all__ = ["HeadParallel", "packed_rows", "shard_packed"]

# What each dimension of an argument is: b, a sequence or its row; h, a head; p, packed heads; a
# digit, a dimension of an elementwise op; -, never sharded. Heads and packed heads shard together.
_QKV = {"q": "b-h-", "k": "b-h-", "v": "b-h-", "g": "b-h", "beta": "b-h"}
_GATES = {"a": "b-h", "b": "b-h", "A_log": "h", "dt_bias": "h"}
_STATE = {"state": "bh--"}
_WINDOW = {"win_k": "bh--", "win_u": "bh--", "win_g": "bh-", "win_fill": "b"}
_SEQUENCES = {"has_initial_state": "b", "num_accepted": "b"}
_CONV = {"x": "b-p", "weight": "p-", "bias": "p", "initial_state": "bp-"}
_PACKED = {"conv_weight": "p-", "conv_bias": "p", "conv_state": "bp-"}
_DECODE = {
    "projected": "b-p", "norm_weight": "-", "A_log": "h", "dt_bias": "h", **_PACKED, **_SEQUENCES,
}  # fmt: skip
_CHUNK = {**_QKV, "initial_state": "bh--", "grad_o": "b-h-", "grad_final_state": "bh--"}
_CHUNK_GRADS = ("b-h-", "b-h-", "b-h-", "b-h", "b-h", "bh--")
_CONV1D = {**_CONV, "grad_y": "b-p", "grad_final_state": "bp-"}

# Rows and offsets that are numbered over the whole batch: with them a batch cannot be sharded.
_NUMBERED = ("state_indices", "read_indices", "write_indices", "cu_seqlens", "edge_rows")


class _Rule(NamedTuple):
    inputs: dict[str, str]
    outputs: tuple[str, ...]


_RULES = {
    "recurrent": _Rule(_QKV | _STATE | _SEQUENCES, ("b-h-",)),
    "recurrent_gated": _Rule(_QKV | _GATES | _STATE | _SEQUENCES, ("b-h-",)),
    "recurrent_buffered": _Rule(_QKV | _STATE | _WINDOW | _SEQUENCES, ("b-h-",)),
    "recurrent_lowrank": _Rule(_QKV | _WINDOW | _SEQUENCES, ("b-h-",)),
    "window_flush": _Rule(_STATE | _WINDOW, ()),
    "window_reset": _Rule(_WINDOW, ()),
    "chunk": _Rule(_CHUNK, ("b-h-", "bh--")),
    "chunk_backward": _Rule(_CHUNK, _CHUNK_GRADS),
    "chunk_prefill": _Rule(_QKV | _STATE | _SEQUENCES, ("b-h-",)),
    "chunk_lowrank": _Rule(_QKV | _WINDOW | _SEQUENCES, ("b-h-",)),
    "conv1d": _Rule(_CONV1D, ("b-p", "bp-")),
    "conv1d_backward": _Rule(_CONV1D, ("b-p", "p-", "p", "bp-")),
    "short_conv": _Rule(_CONV | _PACKED | _SEQUENCES, ("b-p",)),
    "gating": _Rule(_GATES, ("b-h", "b-h")),
    "gating_backward": _Rule(
        _GATES | {"grad_g": "b-h", "grad_beta": "b-h"}, ("b-h", "b-h", "h", "h")
    ),
    "conv_gating": _Rule(
        {"mixed_qkv": "b-p"} | _GATES | _PACKED | _SEQUENCES,
        ("b-h-", "b-h-", "b-h-", "b-h", "b-h"),
    ),
    "gated_rms_norm": _Rule({"x": "0123-", "gate": "0123-", "weight": "-"}, ("0123-",)),
    "gated_rms_norm_backward": _Rule(
        {"x": "0123-", "gate": "0123-", "weight": "-", "grad_y": "0123-"},
        ("0123-", "0123-", "-"),
    ),
    "decode": _Rule(_DECODE | _STATE, ("b-h",)),
    "decode_buffered": _Rule(_DECODE | _STATE | _WINDOW, ("b-h",)),
    "decode_lowrank": _Rule(_DECODE | _WINDOW, ("b-h",)),
}


def packed_rows(heads: Heads, groups: int, *, projected: bool) -> Tensor:
    """Order of the entries of a packed dimension that puts each group of heads together.

    Args:
        heads: sizes of the whole layer.
        groups: number of groups of heads, that is, of ranks.
        projected: the columns of the packed projection, q | k | v | z | b | a; false: the channels
            of the convolution, q | k | v.

    Returns:
        ``[groups, D / groups]`` int64; row r is the packed layout of the heads of group r.

    Raises:
        ValueError: the key heads do not divide by ``groups``.
    """
    if heads.num_k_heads % groups:
        raise ValueError(
            f"expected a number of key heads that is a multiple of the {groups} ranks, "
            f"got {heads.num_k_heads}"
        )
    sizes = [heads.key_dim, heads.key_dim, heads.value_dim]
    if projected:
        sizes += [heads.value_dim, heads.num_v_heads, heads.num_v_heads]
    parts = torch.arange(sum(sizes)).split(sizes)
    return torch.cat([part.view(groups, -1) for part in parts], dim=1)


def _coordinate(mesh: DeviceMesh, dims: Sequence[int]) -> tuple[int, int]:
    """This rank's place among the ranks along ``dims`` of the mesh, and how many they are."""
    place, count = 0, 1
    for dim in dims:
        place = place * mesh.size(dim) + mesh.get_local_rank(dim)
        count *= mesh.size(dim)
    return place, count


def shard_packed(
    tensor: Tensor, mesh: DeviceMesh, heads: Heads, dim: int, *, projected: bool
) -> DTensor:
    """Shard a packed dimension by heads: each rank gets the packed layout of its own heads.

    Args:
        tensor: the whole tensor; that of the mesh's first rank is what counts, as in
            ``distribute_tensor``. dim: its packed dimension.
        mesh: of one dimension.
        heads, projected: as in :func:`packed_rows`.

    Returns:
        A DTensor with placement ``Shard(dim)``, its packed dimension in the order of
        ``packed_rows(...).flatten()``.
    """
    rows = packed_rows(heads, mesh.size(), projected=projected).flatten().to(tensor.device)
    return distribute_tensor(tensor.index_select(dim, rows), mesh, [Shard(dim % tensor.dim())])


def _letter(dims: str, tensor: Tensor, dim: int) -> str:
    """What dimension ``dim`` of a tensor is: the last is the last, whatever their number."""
    if dim == tensor.dim() - 1:
        return dims[-1]
    return dims[:-1][dim] if dim < len(dims) - 1 else "-"


def _kind(letter: str) -> str:
    return "h" if letter == "p" else letter


@dataclass
class _Call:
    """One call of an op, about to be run on local shards."""

    op: str
    rule: _Rule
    mesh: DeviceMesh
    arguments: dict[str, Any]
    mutated: set[str]
    # What is sharded along each dimension of the mesh, or None.
    kinds: list[str | None]

    def dims_of(self, name: str, tensor: Tensor) -> str:
        return self.rule.inputs.get(name, "-" * max(1, tensor.dim()))

    def fail(self, name: str, expected: str, got: object) -> None:
        raise RuntimeError(
            f"{self.op}: {name}: expected {expected}, got {got}; nothing is communicated inside an "
            "op, so redistribute it first"
        )

    def read_kinds(self) -> None:
        said: list[str | None] = [None] * self.mesh.ndim
        for name, t in self.arguments.items():
            # Gradients follow the inputs: they arrive as what came after the op left them.
            if not isinstance(t, DTensor) or name.startswith("grad_"):
                continue
            if t.device_mesh != self.mesh:
                self.fail(name, f"mesh {self.mesh}", t.device_mesh)
            for axis, placement in enumerate(t.placements):
                if isinstance(placement, Replicate):
                    continue
                letter = "-"
                if isinstance(placement, Shard):
                    letter = _letter(self.dims_of(name, t), t, placement.dim % t.dim())
                kind = _kind(letter)
                if kind == "-":
                    self.fail(name, "Replicate, or Shard of a batch or head dimension", placement)
                if self.kinds[axis] not in (None, kind):
                    self.fail(name, f"the sharding of {said[axis]}", placement)
                self.kinds[axis], said[axis] = kind, name
        if "b" in self.kinds:
            for name in _NUMBERED:
                if self.arguments.get(name) is not None:
                    raise RuntimeError(
                        f"{self.op}: {name}: expected None where the batch is sharded: its numbers "
                        "count over the whole batch"
                    )

    def axes(self, kind: str) -> list[int]:
        return [axis for axis, k in enumerate(self.kinds) if k is not None and k == kind]

    def placements(self, dims: str, tensor: Tensor) -> list[Placement]:
        """Where a tensor with these dimensions must lie; what it lacks is replicated."""
        letters = [_kind(_letter(dims, tensor, d)) for d in range(tensor.dim())]
        return [Shard(letters.index(k)) if k in letters else Replicate() for k in self.kinds]

    def check_sizes(self) -> None:
        batch, group = None, 1
        for axis in self.axes("h"):
            group *= self.mesh.size(axis)
        for name, t in self.arguments.items():
            if not isinstance(t, Tensor):
                continue
            dims = self.dims_of(name, t)
            for d in range(t.dim()):
                letter = _letter(dims, t, d)
                if _kind(letter) == "h" and t.shape[d] % group:
                    self.fail(name, f"heads that divide by {group} ranks", tuple(t.shape))
                if letter == "b" and self.axes("b"):
                    batch = batch or (name, t.shape[d])
                    if t.shape[d] != batch[1]:
                        self.fail(name, f"{batch[1]} rows, as {batch[0]} has", t.shape[d])
        H = self.arguments.get("num_k_heads")
        if H is not None and H % group:
            self.fail("num_k_heads", f"a multiple of {group} ranks", H)

    def local(self, name: str, value: Any) -> Any:
        if name == "num_k_heads":
            return value // _coordinate(self.mesh, self.axes("h"))[1]
        if not isinstance(value, Tensor):
            return value
        dims = self.dims_of(name, value)
        want = self.placements(dims, value)
        if not isinstance(value, DTensor):
            if value.dtype.is_floating_point:
                self.fail(name, "a DTensor", "a Tensor")
            value = DTensor.from_local(
                value, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False
            )
        have = [Shard(p.dim % value.dim()) if isinstance(p, Shard) else p for p in value.placements]
        if have == want:
            return value.to_local()
        if name in self.mutated:
            self.fail(name, f"placements {tuple(want)}", value.placements)
        packed = [a for a in self.axes("h") if "p" in dims and isinstance(have[a], Replicate)]
        if packed and "num_k_heads" in self.arguments and not name.startswith("grad_"):
            return self.local_packed(name, value, dims.index("p"), packed)
        return value.redistribute(self.mesh, want).to_local()

    def local_packed(self, name: str, value: DTensor, dim: int, axes: list[int]) -> Tensor:
        """The packed layout of this rank's heads, out of the whole packed tensor."""
        if axes != self.axes("h"):
            self.fail(name, "one sharding over all dimensions of the mesh", value.placements)
        place, count = _coordinate(self.mesh, axes)
        rows = packed_rows(self.heads(), count, projected=name == "projected")[place]
        want = self.placements(self.dims_of(name, value), value)
        whole = [Replicate() if axis in axes else p for axis, p in enumerate(want)]
        local = value.redistribute(self.mesh, whole).to_local()
        return local.index_select(dim, rows.to(local.device))

    def heads(self) -> Heads:
        """Sizes of the layer, from the arguments that conv_gating and the decode ops have."""
        H, K = self.arguments["num_k_heads"], self.arguments["head_k_dim"]
        HV = self.arguments["A_log"].shape[0]
        C = self.arguments["conv_weight"].shape[0]
        return Heads(H, HV, K, (C - 2 * H * K) // HV)

    def wrap(self, dims: str, local: Tensor) -> DTensor:
        """An output: sharded where it has the dimension, otherwise a sum over the ranks."""
        letters = [_kind(_letter(dims, local, d)) for d in range(local.dim())]
        placements: list[Placement] = []
        shape = list(local.shape)
        for axis, kind in enumerate(self.kinds):
            if kind is None:
                placements.append(Replicate())
            elif kind in letters:
                placements.append(Shard(letters.index(kind)))
                if kind == "h":
                    shape[letters.index(kind)] *= self.mesh.size(axis)
                else:
                    shape[letters.index(kind)] = self.size_of(kind)
            else:
                placements.append(Partial())
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    def size_of(self, kind: str) -> int:
        """Whole size of the batch, or of a dimension of an elementwise op."""
        for name, t in self.arguments.items():
            if isinstance(t, Tensor):
                for d in range(t.dim()):
                    if _letter(self.dims_of(name, t), t, d) == kind:
                        return t.shape[d]
        raise AssertionError(kind)


class HeadParallel(ParallelStyle):
    """Shards a Gated DeltaNet layer by heads: :class:`gdn_ops.nn.GatedDeltaNet`, or a layer of
    transformers that :func:`gdn_ops.patch` switched.

    For ``parallelize_module``, on a mesh of one dimension whose size divides the key heads. The
    layer takes and returns what it did, equal on every rank; between its projections it runs on
    plain local tensors, and one reduction after the output projection is all the communication of
    the forward pass. ``allocate`` and the caches of transformers then hold this rank's heads.

    Parameters become DTensors, so ``fully_shard`` and optimisers take them. Those with a packed
    dimension (``in_proj.weight``, ``in_proj_qkv.weight``, the weight of the convolution) are
    sharded as :func:`shard_packed` does: load a checkpoint before parallelizing.

    Example::

        parallelize_module(model, mesh, {"layers.*.linear_attn": HeadParallel()})
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, GatedDeltaNet):
            own, shard = module.heads.num_v_heads, self._shard_layer
        elif hasattr(module, "gdn_projections"):
            own, shard = module.num_v_heads, self._shard_patched
        else:
            raise NotImplementedError(
                "HeadParallel: expected gdn_ops.nn.GatedDeltaNet or a layer that gdn_ops.patch "
                f"switched, got {type(module).__name__}"
            )
        if own != module.A_log.shape[0]:
            raise ValueError(
                f"HeadParallel: expected a layer with all its {module.A_log.shape[0]} value heads, "
                f"got one that is sharded, with {own} on each rank"
            )
        return shard(module, device_mesh)

    @torch.no_grad()
    def _shard_layer(self, layer: GatedDeltaNet, mesh: DeviceMesh) -> nn.Module:
        heads, groups = layer.heads, mesh.size()
        rows = packed_rows(heads, groups, projected=True)
        layer.in_proj.weight.copy_(layer.in_proj.weight[rows.flatten()])
        ColwiseParallel()._apply(layer.in_proj, mesh)
        RowwiseParallel()._apply(layer.out_proj, mesh)
        channels = packed_rows(heads, groups, projected=False)
        _shard(layer, "conv_weight", mesh, Shard(0), channels)
        _shard(layer, "A_log", mesh, Shard(0))
        _shard(layer, "dt_bias", mesh, Shard(0))
        _shard(layer, "norm_weight", mesh, Replicate())
        layer.heads = heads.part(groups)
        return layer

    @torch.no_grad()
    def _shard_patched(self, layer: nn.Module, mesh: DeviceMesh) -> nn.Module:
        heads = Heads(layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
        channels = packed_rows(heads, mesh.size(), projected=False)
        for name in layer.gdn_projections:
            linear = getattr(layer, name)
            # Qwen3-Next groups the rows of its projections by key head already.
            if name == "in_proj_qkv":
                linear.weight.copy_(linear.weight[channels.flatten()])
            ColwiseParallel()._apply(linear, mesh)
        RowwiseParallel()._apply(layer.out_proj, mesh)
        _shard(layer.conv1d, "weight", mesh, Shard(0), channels)
        if layer.conv1d.bias is not None:
            _shard(layer.conv1d, "bias", mesh, Shard(0), channels)
        _shard(layer, "A_log", mesh, Shard(0))
        _shard(layer, "dt_bias", mesh, Shard(0))
        _shard(layer.norm, "weight", mesh, Replicate())
        own = heads.part(mesh.size())
        layer.num_k_heads, layer.num_v_heads = own.num_k_heads, own.num_v_heads
        layer.key_dim, layer.value_dim, layer.conv_dim = own.key_dim, own.value_dim, own.conv_dim
        layer.gdn_refresh()
        return layer


def _shard(
    module: nn.Module,
    name: str,
    mesh: DeviceMesh,
    placement: Placement,
    rows: Tensor | None = None,
) -> None:
    """Make a parameter a DTensor, its first dimension put in the order of ``rows`` before."""
    parameter = getattr(module, name)
    whole = parameter.detach()
    if rows is not None:
        whole = whole[rows.flatten().to(whole.device)]
    sharded = distribute_tensor(whole, mesh, [placement])
    module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def _dispatch(cls: type, func: Any, types: Any, args: tuple, kwargs: dict | None) -> Any:
    """Run ``func`` on the shards of its arguments and say how its outputs lie."""
    schema = func._schema
    arguments = {a.name: a.default_value for a in schema.arguments}
    arguments |= dict(zip(arguments, args, strict=False)) | (kwargs or {})
    op = schema.name.split("::")[1]
    mesh = next(t.device_mesh for t in arguments.values() if isinstance(t, DTensor))
    mutated = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    if mutated and torch.is_grad_enabled():
        for name, t in arguments.items():
            if isinstance(t, Tensor) and t.requires_grad:
                raise RuntimeError(
                    f"{op}: {name} requires grad, but the op writes in place and has no backward; "
                    "run it under torch.no_grad()"
                )
    call = _Call(op, _RULES[op], mesh, arguments, mutated, [None] * mesh.ndim)
    call.read_kinds()
    call.check_sizes()
    with torch.no_grad():
        result = func(*(call.local(name, value) for name, value in arguments.items()))
        if not call.rule.outputs:
            return None
        if isinstance(result, Tensor):
            return call.wrap(call.rule.outputs[0], result)
        return tuple(map(call.wrap, call.rule.outputs, result))


def _linear(cls: type, func: Any, types: Any, args: tuple, kwargs: dict | None) -> Any:
    """Torch's own product, which has its own rules."""
    return torch.nn.functional.linear(*args, **(kwargs or {}))


library.register_torch_dispatch("gdn::linear", DTensor, _linear)
for _name in _RULES:
    library.register_torch_dispatch(f"gdn::{_name}", DTensor, _dispatch)
