"""The input projections of a patched layer as one matrix, kept true to the parameters.

transformers projects with two (Qwen3-Next) or four (Qwen3.5) linear layers; here one product with
their rows, in the order of :attr:`gdn_ops.nn.Heads.split`, takes their place. Where the order is
that of the concatenated rows, the parameters become views of the matrix, so that there is nothing
to keep true but where they lie. Where rows are reordered (``gdn_reorders``), it is a copy, which a
write to a parameter leaves behind: :meth:`PackedProjections._gdn_fingerprint` is what tells.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from gdn_ops._limits import DTYPES
from gdn_ops._modules import is_plain, product, project

_steps_taken = 0  # by optimisers of torch in this process


def _count_step(*_: Any) -> None:
    global _steps_taken
    _steps_taken += 1


# Fused optimisers write weights without a new version of them.
register_optimizer_step_post_hook(_count_step)


def _is_packable(linear: nn.Module, weight: Tensor) -> bool:
    # One that is traced with has no address to compare.
    real = type(weight) is nn.Parameter and not weight.is_meta
    return is_plain(linear) and weight.dtype in DTYPES and real


def _after_load(module: nn.Module, incompatible_keys: Any) -> None:
    module.gdn_refresh()


class PackedProjections:
    """Mixin in front of a module that owns the linear layers named in ``gdn_projections``."""

    gdn_projections: ClassVar[tuple[str, ...]]
    gdn_reorders: ClassVar[bool]  # whether the class has gdn_rows of its own

    gdn_packed: Tensor | None  # [D, hidden], a buffer; None: the projections run one by one
    # The parameters that may be packed (_gdn_pack); None: others have appeared since.
    _gdn_known: list[weakref.ref] | None
    _gdn_packed_from: list[tuple[int, int]] | None  # fingerprint of the weights in gdn_packed

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.gdn_reorders = cls.gdn_rows is not PackedProjections.gdn_rows

    def gdn_rows(self, device: torch.device) -> Tensor | None:
        """Rows of the concatenated projections in packed order; None: as they are."""
        return None

    def gdn_setup(self) -> None:
        """Begin to pack; what ``__init__`` would do, for a layer that was made before."""
        if "gdn_packed" not in self._buffers:
            self.register_buffer("gdn_packed", None, persistent=False)
            self._gdn_load_hook = self.register_load_state_dict_post_hook(_after_load)
            self._gdn_packed_from = None
        self.gdn_refresh()

    def gdn_teardown(self) -> None:
        """Undo :meth:`gdn_setup`; each weight gets memory of its own again."""
        for weight in self._gdn_weights():
            with torch.inference_mode(weight.is_inference()), torch.no_grad():
                if weight.untyped_storage().nbytes() != weight.numel() * weight.element_size():
                    weight.data = weight.data.clone()
        self._gdn_load_hook.remove()
        del self.gdn_packed, self._gdn_load_hook, self._gdn_packed_from, self._gdn_known

    def gdn_refresh(self) -> None:
        """Bring the packed projection up to date with the parameters.

        Called by ``train``, ``eval``, ``to`` and ``load_state_dict``; eager forwards look whether
        it is needed. Compiled code can't look at addresses, and a write through ``weight.data``
        leaves no trace to look at: after assigning ``weight.data`` by hand, or writing through it
        where the buffer is a copy (Qwen3-Next), call this (or ``model.eval()``).
        """
        self._gdn_known = [weakref.ref(w) for w in self._gdn_weights()]
        if self.gdn_reorders:
            self.gdn_packed = None
        self._gdn_pack()

    def _gdn_weights(self) -> list[Tensor]:
        return [getattr(self, name).weight for name in self.gdn_projections]

    def _gdn_fingerprint(self, weights: list[Tensor]) -> list[tuple[int, int]]:
        """Changes when a weight moves out of the packed matrix or, for a copy of them, when one
        moves or is written."""
        if not self.gdn_reorders:
            start = self.gdn_packed.data_ptr()  # which another process has elsewhere
            return [(w.data_ptr() - start, 0) for w in weights]
        seen = [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        return [*seen, (0, _steps_taken)]

    def _gdn_places(self, tensors: list[Tensor]) -> list:
        """Changes when any of these tensors moves or, where weights are copied, is written."""
        if self.gdn_reorders:
            return self._gdn_fingerprint(tensors)
        return [tensor.data_ptr() for tensor in tensors]

    def _gdn_pack(self) -> None:
        """:meth:`gdn_refresh` for the parameters that are known.

        Others that appear between two calls may be FSDP's: buffers of its own, put in place for a
        forward pass and rewritten behind our back. They are used one by one until the next ``to``,
        ``load_state_dict`` or ``gdn_refresh``.
        """
        # Every eager step that is decided anew comes here: one look at each attribute of a module.
        linears = [getattr(self, name) for name in self.gdn_projections]
        weights = [linear.weight for linear in linears]
        known = self._gdn_known is not None and all(
            seen() is w for seen, w in zip(self._gdn_known, weights, strict=True)
        )
        if not known:
            self._gdn_known = None
        if not known or not all(map(_is_packable, linears, weights)):
            self.gdn_packed = None
            return
        if self.gdn_packed is not None and self._gdn_packed_from == self._gdn_fingerprint(weights):
            return
        kinds = {(w.dtype, w.device, w.is_inference()) for w in weights}
        shared = weights[0].is_cpu and all(w.is_shared() for w in weights)
        # A copy of weights that other processes write would go stale without a trace.
        if len(kinds) > 1 or (shared and self.gdn_reorders):
            self.gdn_packed = None
            return
        self.gdn_packed = self._gdn_join(weights, shared)
        self._gdn_packed_from = self._gdn_fingerprint(weights)

    def _gdn_join(self, weights: list[Tensor], shared: bool) -> Tensor:
        """The packed matrix, of which the weights become views unless it reorders their rows."""
        # An inference tensor whose data is a normal one can be used nowhere.
        with torch.inference_mode(weights[0].is_inference()), torch.no_grad():
            packed = torch.cat([w.detach() for w in weights])
            if shared:
                packed.share_memory_()
            if self.gdn_reorders:
                return packed[self.gdn_rows(packed.device)]
            parts = packed.split([w.shape[0] for w in weights])
            for weight, part in zip(weights, parts, strict=True):
                weight.data = part
            return packed

    def _gdn_project(self, hidden_states: Tensor, packed: bool) -> Tensor:
        """``[B, T, D]``, columns qkv | z | b | a."""
        if packed and self.gdn_packed is not None:
            return product(hidden_states, self.gdn_packed)
        parts = [project(getattr(self, name), hidden_states) for name in self.gdn_projections]
        projected = torch.cat(parts, dim=-1)
        rows = self.gdn_rows(projected.device)
        return projected if rows is None else projected[..., rows]

    # What torch does to a module's parameters, and what the packed matrix needs before or after.

    def _gdn_forget(self) -> None:
        """Drop the weak references to tensors: torch swaps none that has one."""
        self._gdn_known = None

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        if self._gdn_known is not None:
            self.gdn_refresh()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        # Dropped first: converting it together with the parameters would need its memory twice.
        self.gdn_packed = None
        self._gdn_forget()
        try:
            super()._apply(fn, recurse)
        finally:
            self.gdn_refresh()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._gdn_forget()
        super()._load_from_state_dict(*args, **kwargs)  # _after_load looks at what came

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As of any module, but each weight that is part of the packed matrix has, over the same
        memory, a storage of its own: of tensors in one storage savers take the first and leave out
        the others (accelerate), or refuse them all (``safetensors.torch.save_model``)."""
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for name, value in found.items():
            # With keep_vars they are the parameters themselves.
            if not name.startswith(prefix) or type(value) is not Tensor:
                continue
            if value.dtype not in DTYPES or not (value.is_cuda or value.is_cpu):
                continue
            if value.is_cpu and value.is_shared():
                continue  # other processes find it by its storage
            if value.untyped_storage().nbytes() > value.numel() * value.element_size():
                found[name] = torch.from_dlpack(value)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "_gdn_known"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Copied weights are no views yet, and compiled code would not find out.
        self.gdn_refresh()
