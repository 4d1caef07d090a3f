"""Eager decode steps of a patched layer that look only at what the last one was decided from.

Between two steps of one layer the states of a batch go through all caches; what takes the time
before the first op is then how many objects Python has to look at. So a step that was decided in
full leaves a :class:`Step` behind, and as long as nothing it was decided from has changed, the next
one is a product, the decode op and a product. What a decision rests on, and how a change shows:

* the call: grad mode, dtype, device and number of tokens, packed sequences, what kind of cache:
  looked at again (:func:`continues`);
* the layer's children, attributes of it and of its norm, biases that are absent: the same objects
  under the same names (``Step.facts``);
* that to call a child is to run the ``forward`` of its class (``Step.called``);
* parameters and the packed matrix: the same tensors, referred to weakly, at the same addresses
  and, where the matrix is a copy, unwritten (``Step.tensors``, ``Step.places``).

A new condition of ``gdn_unsupported``, ``gdn_fallback`` or of what is packed belongs here too, and
its change into ``CHANGES`` of ``tests/test_hf.py``.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gdn_ops._limits import DTYPES
from gdn_ops._modules import has_global_hooks, has_own_forward, has_own_hooks, is_plain
from gdn_ops.hf.cached import has_window

# Attributes of a layer and of its norm, beside modules and parameters, that a step is decided from.
_FACTS = (
    "activation", "gdn_state_mode", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim",
    "conv_kernel_size",
)  # fmt: skip
_NORM_FACTS = ("activation", "variance_epsilon")


def continues(
    dtype: torch.dtype, hidden_states: Tensor, layer: Any, kwargs: dict[str, Any]
) -> bool:
    """Whether a call without a mask is one more decode step of ``dtype`` on a full state."""
    return not (
        torch.is_grad_enabled()
        or hidden_states.dtype is not dtype
        or not hidden_states.is_cpu
        or hidden_states.shape[1] != 1
        or kwargs.get("cu_seq_lens_q") is not None
        or kwargs.get("seq_idx") is not None
        or not layer.has_previous_state[0]
        or layer.record_past
        or has_window(layer)
        or layer.conv_states[0].dtype not in DTYPES
        or has_global_hooks()
    )


class Step(NamedTuple):
    """What an eager decode step was decided from, and what came of it."""

    dtype: torch.dtype
    facts: list[tuple[dict[str, Any], str, Any]]  # entries of dictionaries of the layer's modules
    called: list[tuple[nn.Module, type]]  # what would be called but for the ops
    # The packed matrix, the weight of the output projection, then what else must stay.
    tensors: list[tuple[dict[str, Any], str, weakref.ref]]
    places: list
    parameters: tuple[Tensor | None, ...]  # the decode op's, beside what changes from step to step
    constants: tuple

    @classmethod
    def of(
        cls,
        layer: nn.Module,
        dtype: torch.dtype,
        parameters: tuple[Tensor | None, ...],
        constants: tuple,
    ) -> Step | None:
        """The step that ``layer`` has just taken, or None where not all of it can be looked at."""
        norm, conv = layer.norm, layer.conv1d
        names = ("out_proj", *layer.gdn_projections)
        linears = [getattr(layer, name) for name in names]
        owned = [(linear, "weight") for linear in linears]
        owned += [(layer, "A_log"), (layer, "dt_bias"), (norm, "weight"), (conv, "weight")]
        parts = [(module._parameters, name) for module, name in owned]
        found = [entries.get(name) for entries, name in parts]
        if (
            layer.gdn_packed is None
            or not all(map(is_plain, linears))
            or not all(type(w) is nn.Parameter and w.is_cpu for w in found)
            or any(w.dtype != dtype for w in found[: len(linears)])
            or conv.bias is not None
            or has_own_forward(norm)
        ):
            return None
        parts.insert(0, (layer._buffers, "gdn_packed"))
        found.insert(0, layer.gdn_packed)
        children, own, of_norm = layer._modules, vars(layer), vars(norm)
        facts = [(children, name, children[name]) for name in (*names, "norm", "conv1d")]
        facts += [(own, name, own.get(name)) for name in _FACTS]
        facts += [(of_norm, name, of_norm.get(name)) for name in _NORM_FACTS]
        facts += [(module._parameters, "bias", None) for module in (*linears, conv)]
        return cls(
            dtype,
            facts,
            [(module, type(module)) for module in (*linears, norm)],
            [(*part, weakref.ref(tensor)) for part, tensor in zip(parts, found, strict=True)],
            layer._gdn_places(found),
            parameters,
            constants,
        )

    def unchanged(self, layer: nn.Module) -> list[Tensor] | None:
        """``tensors`` as they are, or None if anything of ``layer`` has changed."""
        for entries, name, value in self.facts:
            if entries.get(name) is not value:
                return None
        for module, kind in self.called:
            if type(module) is not kind or has_own_forward(module) or has_own_hooks(module):
                return None
        found = []
        for entries, name, seen in self.tensors:
            tensor = entries.get(name)
            if tensor is None or tensor is not seen():
                return None
            found.append(tensor)
        return found if layer._gdn_places(found) == self.places else None
