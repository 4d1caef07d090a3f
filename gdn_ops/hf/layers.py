"""Subclasses of the Gated DeltaNet layers of transformers that run on the ops of this package.

They own the same parameters under the same names. The rule for falling back to the class of
transformers, checked on every call and announced once for each reason, is
:meth:`PatchedGatedDeltaNet.gdn_unsupported` (facts of the layer) and
:meth:`PatchedGatedDeltaNet.gdn_fallback` (facts of the call); docs/huggingface.md lists it.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from gdn_ops import nn as layers
from gdn_ops import windows
from gdn_ops.hf.compat import cache_argument

# Slots of a cache layer: 0 is the state of transformers, the window follows. Kept there, beam
# reordering, reset and offloading of the cache treat the window like any other state.
WINDOW_SLOTS = (1, 2, 3, 4)

# Attributes of a layer and of its norm, beside modules and parameters, that a step is decided from.
_FACTS = (
    "activation", "gdn_state_mode", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim",
    "conv_kernel_size",
)  # fmt: skip
_NORM_FACTS = ("activation", "variance_epsilon")

_decode = torch.ops.gdn.decode.default
_announced: set[tuple[str, str]] = set()


@torch.compiler.assume_constant_result
def _announce(layer: str, reason: str) -> bool:
    """Warn once for each layer class and reason; while tracing, at trace time."""
    if (layer, reason) not in _announced:
        _announced.add((layer, reason))
        warnings.warn(f"gdn_ops: {layer} runs the code of transformers: {reason}", stacklevel=2)
    return True


_steps_taken = 0  # by optimisers of torch in this process


def _count_step(*_: Any) -> None:
    global _steps_taken
    _steps_taken += 1


# Fused optimisers write weights without a new version of them.
register_optimizer_step_post_hook(_count_step)


def _is_packable(linear: nn.Module, weight: Tensor) -> bool:
    # One that is traced with has no address to compare.
    real = type(weight) is nn.Parameter and not weight.is_meta
    return layers.is_plain(linear) and weight.dtype in layers.DTYPES and real


def _only_aligns_devices(module: nn.Module) -> bool:
    """Whether the forward put in place is that of accelerate, which moves tensors between devices:
    :meth:`PatchedGatedDeltaNet.gdn_fallback` looks where the parameters are."""
    return type(getattr(module, "_hf_hook", None)).__name__ == "AlignDevicesHook"


def _after_load(module: nn.Module, incompatible_keys: Any) -> None:
    module.gdn_refresh()


class _Step(NamedTuple):
    """What an eager decode step was decided from, and what came of it."""

    dtype: torch.dtype
    facts: list[tuple[dict[str, Any], str, Any]]  # entries of dictionaries of the layer's modules
    called: list[tuple[nn.Module, type]]  # what would be called but for the ops
    tensors: list[tuple[dict[str, Any], str, weakref.ref]]
    places: list
    parameters: tuple[Tensor | None, ...]
    constants: tuple


class PatchedGatedDeltaNet:
    """Mixin in front of a transformers layer; the class made of both is in :data:`CLASSES`."""

    gdn_base: ClassVar[type[nn.Module]]
    gdn_cache_argument: ClassVar[str]
    gdn_projections: ClassVar[tuple[str, ...]]
    gdn_reorders: ClassVar[bool]  # whether the class has gdn_rows of its own

    gdn_state_mode = "full"
    gdn_window = 16

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.gdn_reorders = cls.gdn_rows is not PatchedGatedDeltaNet.gdn_rows

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.gdn_setup()

    # --- the packed projection

    def gdn_rows(self, device: torch.device) -> Tensor | None:
        """Rows of the concatenated projections in packed order; None: as they are."""
        return None

    def gdn_setup(self) -> None:
        if "gdn_packed" not in self._buffers:
            self.register_buffer("gdn_packed", None, persistent=False)
            self._gdn_load_hook = self.register_load_state_dict_post_hook(_after_load)
            self._gdn_packed_from = self._gdn_step = None
        self.gdn_refresh()

    def gdn_teardown(self) -> None:
        for weight in self._gdn_weights():
            with torch.inference_mode(weight.is_inference()), torch.no_grad():
                if weight.untyped_storage().nbytes() != weight.numel() * weight.element_size():
                    weight.data = weight.data.clone()
        self._gdn_load_hook.remove()
        del self.gdn_packed, self._gdn_load_hook, self._gdn_packed_from, self._gdn_known
        del self._gdn_step
        for name in ("gdn_state_mode", "gdn_window"):
            vars(self).pop(name, None)

    def _gdn_weights(self) -> list[Tensor]:
        return [getattr(self, name).weight for name in self.gdn_projections]

    def _gdn_adopt(self) -> None:
        """Take the parameters there are for those that may be packed (:meth:`_gdn_pack`)."""
        self._gdn_known = [weakref.ref(w) for w in self._gdn_weights()]

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_gdn_known", "_gdn_step")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._gdn_step = None
        # Copied weights are no views yet, and compiled code would not find out.
        self.gdn_refresh()

    def _gdn_fingerprint(self, weights: list[Tensor]) -> list[tuple[int, int]]:
        """Changes when a weight moves out of the packed matrix or, for a copy of them, when one
        moves or is written."""
        if not self.gdn_reorders:
            start = self.gdn_packed.data_ptr()  # which another process has elsewhere
            return [(w.data_ptr() - start, 0) for w in weights]
        seen = [(w.data_ptr(), 0 if w.is_inference() else w._version) for w in weights]
        return [*seen, (0, _steps_taken)]

    def gdn_refresh(self) -> None:
        """Bring the packed projection up to date with the parameters.

        Called by ``train``, ``eval``, ``to`` and ``load_state_dict``; eager forwards look whether
        it is needed. Compiled code can't look at addresses, and a write through ``weight.data``
        leaves no trace to look at: after assigning ``weight.data`` by hand, or writing through it
        where the buffer is a copy (Qwen3-Next), call this (or ``model.eval()``).
        """
        self._gdn_adopt()
        if self.gdn_reorders:
            self.gdn_packed = None
        self._gdn_pack()

    def _gdn_pack(self) -> None:
        """:meth:`gdn_refresh` for the parameters that are known.

        Others that appear between two calls may be FSDP's: buffers of its own, put in place for a
        forward pass and rewritten behind our back. They are used one by one until the next ``to``,
        ``load_state_dict`` or ``gdn_refresh``.
        """
        # Every eager step comes through here: one look at each attribute of a module.
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
        # An inference tensor whose data is a normal one can be used nowhere.
        with torch.inference_mode(weights[0].is_inference()), torch.no_grad():
            rows = self.gdn_rows(weights[0].device)
            packed = torch.cat([w.detach() for w in weights])
            if shared:
                packed.share_memory_()
            if rows is None:
                for weight, part in zip(
                    weights, packed.split([w.shape[0] for w in weights]), strict=True
                ):
                    weight.data = part
            else:
                packed = packed[rows]
        self.gdn_packed = packed
        self._gdn_packed_from = self._gdn_fingerprint(weights)

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
            if value.dtype not in layers.DTYPES or not (value.is_cuda or value.is_cpu):
                continue
            if value.is_cpu and value.is_shared():
                continue  # other processes find it by its storage
            if value.untyped_storage().nbytes() > value.numel() * value.element_size():
                found[name] = torch.from_dlpack(value)
        return found

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        if self._gdn_known is not None:
            self.gdn_refresh()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        # Dropped first: converting it together with the parameters would need its memory twice.
        self.gdn_packed = None
        # torch swaps no tensor to which there are weak references
        self._gdn_known = self._gdn_step = None
        try:
            super()._apply(fn, recurse)
        finally:
            self.gdn_refresh()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # As in _apply; what is loaded is looked at by _after_load.
        self._gdn_known = self._gdn_step = None
        super()._load_from_state_dict(*args, **kwargs)

    def _gdn_project(self, hidden_states: Tensor, packed: bool) -> Tensor:
        """``[B, T, D]``, columns qkv | z | b | a."""
        if packed and self.gdn_packed is not None:
            return layers.product(hidden_states, self.gdn_packed)
        parts = [
            layers.project(getattr(self, name), hidden_states) for name in self.gdn_projections
        ]
        projected = torch.cat(parts, dim=-1)
        rows = self.gdn_rows(projected.device)
        return projected if rows is None else projected[..., rows]

    # --- when transformers must run instead

    def _gdn_parameters(self) -> tuple[Tensor, ...]:
        """A_log, dt_bias, and the weights of convolution and norm."""
        return self.A_log, self.dt_bias, self.conv1d.weight, self.norm.weight

    def gdn_unsupported(self, parameters: tuple[Tensor, ...] | None = None) -> str | None:
        """Why this layer can never run on the ops as it stands, or None."""
        if self.activation not in ("silu", "swish"):
            return f"activation {self.activation!r} is not silu"
        # Its weight is all that the ops read of it.
        if not type(self.norm).__name__.endswith("RMSNormGated"):
            return f"the norm is a {type(self.norm).__name__}"
        if layers.has_hooks(self.norm) or (
            layers.has_own_forward(self.norm) and not _only_aligns_devices(self.norm)
        ):
            return "the norm has hooks or a forward of its own"
        if self.norm.activation not in ("silu", "swish"):
            return f"activation {self.norm.activation!r} of the norm is not silu"
        if not (1 <= self.head_k_dim <= 512 and 1 <= self.head_v_dim <= 512):
            return f"head sizes {self.head_k_dim} and {self.head_v_dim} are outside 1 to 512"
        if self.num_v_heads % self.num_k_heads:
            return f"{self.num_v_heads} value heads are no multiple of {self.num_k_heads} key heads"
        if not 1 <= self.conv_kernel_size <= 8:
            return f"convolution width {self.conv_kernel_size} is outside 1 to 8"
        parameters = parameters or self._gdn_parameters()
        for parameter in parameters:
            if parameter.dtype not in layers.DTYPES:
                return f"parameters are {parameter.dtype}"
        return layers.missing(self.gdn_state_mode, parameters[0].device.type)

    def gdn_fallback(
        self,
        hidden_states: Tensor,
        layer: Any,
        kwargs: dict[str, Any],
        needs_grad: bool,
        parameters: tuple[Tensor, ...],
    ) -> str | None:
        """Why this call cannot run on the ops, or None."""
        if (reason := self.gdn_unsupported(parameters)) is not None:
            return reason
        if hidden_states.dtype not in layers.DTYPES:
            return f"hidden states are {hidden_states.dtype}"
        for parameter in parameters:
            if parameter.device != hidden_states.device:
                return "parameters and hidden states are on different devices (offloading)"
        history = layer is not None and layer.has_previous_state[0]
        if layer is not None and layer.record_past:
            return "the cache records the past of its states"
        if needs_grad and (history or not layers.trainable(hidden_states.device.type)):
            return "gradients are needed"
        packed = kwargs.get("cu_seq_lens_q") is not None
        if packed and (history or hidden_states.shape[0] != 1):
            return "packed sequences that continue a cache or are several rows"
        if kwargs.get("seq_idx") is not None and not packed:
            return "seq_idx without cu_seq_lens_q"
        if history and layer.conv_states[0].dtype not in layers.DTYPES:
            return f"the conv state of the cache is {layer.conv_states[0].dtype}"
        if history and self.gdn_state_mode == "lowrank" and layer.recurrent_states[0] is not None:
            return "the cache holds full states, made before state_mode was 'lowrank'"
        return None

    # --- forward

    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As in transformers: ``[B, T, hidden]`` to the same shape, ``cache`` updated in place.

        ``cu_seq_lens_q`` (packed documents, B = 1) keeps convolution and state apart at each
        boundary; a cache then continues the last document.
        """
        cache = kwargs.pop("cache_params", None) if cache is None else cache
        layer = None if cache is None else cache.layers[self.layer_idx]
        eager = not torch.compiler.is_compiling()
        if eager and self._gdn_step is not None and layer is not None and attention_mask is None:
            y = self._gdn_again(hidden_states, layer, kwargs)
            if y is not None:
                return y
        needs_grad = torch.is_grad_enabled() and (
            hidden_states.requires_grad or any(p.requires_grad for p in self.parameters())
        )
        parameters = self._gdn_parameters()
        reason = self.gdn_fallback(hidden_states, layer, kwargs, needs_grad, parameters)
        if reason is not None:
            _announce(type(self).__name__, reason)
            self._gdn_fold(layer)
            kwargs[self.gdn_cache_argument] = cache
            return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)

        if eager:
            self._gdn_pack()
        if attention_mask is not None:
            masked = hidden_states * attention_mask[:, :, None]
            hidden_states = masked.to(hidden_states.dtype)
        A_log, dt_bias, conv_weight, norm_weight = parameters
        parameters = (
            layers.local(conv_weight).squeeze(1),
            layers.local(self.conv1d.bias),
            layers.local(A_log),
            layers.local(dt_bias),
            layers.local(norm_weight),
        )
        projected = self._gdn_project(hidden_states, packed=not needs_grad)
        if layer is None or not layer.has_previous_state[0]:
            mixer = self._gdn_mixer(parameters)
            y = self._gdn_start(projected, mixer, cache, kwargs.get("cu_seq_lens_q"), needs_grad)
        elif self.gdn_state_mode != "full" or hidden_states.shape[1] != 1:
            y = self._gdn_continue(projected, self._gdn_mixer(parameters), layer)
        else:
            self._gdn_fold(layer)
            constants = self.num_k_heads, self.head_k_dim, self.norm.variance_epsilon
            y = self._gdn_decode(projected, layer, parameters, constants)
            if eager and not needs_grad and hidden_states.is_cpu:
                self._gdn_note(hidden_states.dtype, parameters, constants)
        return layers.project(self.out_proj, y)

    def _gdn_mixer(self, parameters: tuple[Tensor | None, ...]) -> layers.Mixer:
        heads = layers.Heads(self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim)
        return layers.Mixer(heads, *parameters, self.norm.variance_epsilon)

    def _gdn_decode(
        self,
        projected: Tensor,
        layer: Any,
        parameters: tuple[Tensor | None, ...],
        constants: tuple[int, int, float],
    ) -> Tensor:
        """What :func:`gdn_ops.nn.mix` does for one token and the full state, without the tuples on
        the way: each is some more for torch.compile to guard, and for Python to touch."""
        heads, dim, eps = constants
        return _decode(
            projected, *parameters, layer.conv_states[0], self._gdn_state(layer), heads, dim, None,
            None, None, None, None, True, eps,
        )  # fmt: skip

    # --- eager decode steps that look only at what the last one was decided from

    def _gdn_places(self, tensors: list[Tensor]) -> list:
        """Changes when one of them moves or, where weights are copied, is written."""
        if not self.gdn_reorders:
            return [tensor.data_ptr() for tensor in tensors]
        return self._gdn_fingerprint(tensors)

    def _gdn_note(
        self, dtype: torch.dtype, parameters: tuple[Tensor | None, ...], constants: tuple
    ) -> None:
        """Remember what a decode step was decided from, where all of it can be looked at again."""
        self._gdn_step = None
        norm, conv = self.norm, self.conv1d
        linears = [getattr(self, name) for name in (*self.gdn_projections, "out_proj")]
        parts = [(linear, "weight") for linear in linears]
        parts += [(self, "A_log"), (self, "dt_bias"), (norm, "weight"), (conv, "weight")]
        parts = [(module._parameters, name) for module, name in parts]
        found = [entries.get(name) for entries, name in parts]
        if (
            self.gdn_packed is None
            or not all(map(layers.is_plain, linears))
            or not all(type(w) is nn.Parameter and w.is_cpu for w in found)
            or any(w.dtype != dtype for w in found[: len(linears)])
            or conv.bias is not None
            or layers.has_own_forward(norm)
        ):
            return
        found.append(self.gdn_packed)
        parts.append((self._buffers, "gdn_packed"))
        modules, own, of_norm = self._modules, vars(self), vars(norm)
        children = (*self.gdn_projections, "out_proj", "norm", "conv1d")
        facts = [(modules, name, modules[name]) for name in children]
        facts += [(own, name, own.get(name)) for name in _FACTS]
        facts += [(of_norm, name, of_norm.get(name)) for name in _NORM_FACTS]
        facts += [(module._parameters, "bias", None) for module in (*linears, conv)]
        self._gdn_step = _Step(
            dtype,
            facts,
            [(module, type(module)) for module in (*linears, norm)],
            [(*part, weakref.ref(tensor)) for part, tensor in zip(parts, found, strict=True)],
            self._gdn_places(found),
            parameters,
            constants,
        )

    def _gdn_again(
        self, hidden_states: Tensor, layer: Any, kwargs: dict[str, Any]
    ) -> Tensor | None:
        """One more decode step, if nothing that decided the last one has changed; else None.

        Between two steps the states of a batch go through all caches. What takes the time then is
        how many objects Python has to look at.
        """
        step = self._gdn_step
        if (
            torch.is_grad_enabled()
            or hidden_states.dtype is not step.dtype
            or not hidden_states.is_cpu
            or hidden_states.shape[1] != 1
            or kwargs.get("cu_seq_lens_q") is not None
            or kwargs.get("seq_idx") is not None
            or not layer.has_previous_state[0]
            or layer.record_past
            or layer.number_of_states != 1
            or layer.conv_states[0].dtype not in layers.DTYPES
            or layers.has_global_hooks()
        ):
            return None
        for entries, name, value in step.facts:
            if entries.get(name) is not value:
                return None
        for module, kind in step.called:
            own = module.__dict__
            if (
                type(module) is not kind
                or "forward" in own
                or own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
            ):
                return None
        found = []
        for entries, name, seen in step.tensors:
            tensor = entries.get(name)
            if tensor is None or tensor is not seen():
                return None
            found.append(tensor)
        if self._gdn_places(found) != step.places:
            return None
        projected = layers.product(hidden_states, found[-1])
        y = self._gdn_decode(projected, layer, step.parameters, step.constants)
        return layers.product(y, found[len(self.gdn_projections)])

    # --- what forward is made of

    def _gdn_start(
        self,
        projected: Tensor,
        mixer: layers.Mixer,
        cache: Any,
        cu_seqlens: Tensor | None,
        needs_grad: bool,
    ) -> Tensor:
        """No history: run from zero, then hand the states to the cache, if there is one."""
        mode = "lowrank" if self.gdn_state_mode == "lowrank" and not needs_grad else "full"
        if needs_grad:
            y, conv, state = layers.mix_functional(projected, mixer, cu_seqlens)
            states = layers.States(conv, state)
        else:
            states = layers.States.allocate(
                projected.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1,
                mixer.heads,
                self.conv_kernel_size,
                state_mode=mode,
                window=self.gdn_window,
                dtype=projected.dtype,
                device=projected.device,
            )
            y = layers.mix(
                projected, mixer, states, None, None, cu_seqlens, state_mode=mode, decode=False
            )
        if cache is not None:
            # Of packed documents the cache, whose rows are the batch, continues the last.
            rows = slice(None) if cu_seqlens is None else slice(-1, None)
            index, width = self.layer_idx, self.conv_kernel_size
            cache.update_conv_state(states.conv[rows], index, conv_kernel_size=width)
            if states.state is None:
                # A cache that was reset may have kept one, which nothing would write from now on.
                cache.layers[index].recurrent_states[0] = None
                cache.layers[index].is_recurrent_states_initialized[0] = False
            else:
                # Stored transposed, in the layout of the kernels: the cache keeps its strides.
                cache.update_recurrent_state(states.state[rows].transpose(-1, -2), index)
            if mode == "lowrank":
                self._gdn_store_window(
                    cache.layers[index], [t[rows] for t in layers.window_of(states)]
                )
            elif self.gdn_state_mode == "buffered" and not needs_grad:
                self._gdn_empty_window(cache.layers[index], projected, mixer, self.gdn_window)
            # The cache has a history if all of its states have, also after a reset.
            history = cache.layers[index].has_previous_state
            for slot in history:
                history[slot] = True
        return y

    def _gdn_continue(self, projected: Tensor, mixer: layers.Mixer, layer: Any) -> Tensor:
        """History: update the tensors of the cache in place."""
        mode = self.gdn_state_mode
        if mode == "buffered":
            self._gdn_empty_window(layer, projected, mixer)
        if mode == "full":
            self._gdn_fold(layer)
        state = None if mode == "lowrank" else self._gdn_state(layer)
        if mode == "buffered" and not (state.is_cpu or state.is_contiguous()):
            # A reordered or foreign cache, copied once: devices are faster with K together.
            state = state.contiguous()
            layer.recurrent_states[0] = state.transpose(-1, -2)
        window = () if mode == "full" else tuple(layer.recurrent_states[i] for i in WINDOW_SLOTS)
        return layers.mix(
            projected, mixer, layers.States(layer.conv_states[0], state, *window), state_mode=mode
        )

    def _gdn_empty_window(
        self, layer: Any, projected: Tensor, mixer: layers.Mixer, size: int | None = None
    ) -> None:
        """A window for a cache that has none (or, with ``size``, an empty one of another size).
        Where it can be before the first step: what is made inside of a CUDA graph does not outlive
        its next replay."""
        if layer.number_of_states == 1 or size not in (None, layer.recurrent_states[1].shape[2]):
            rows, device = layer.conv_states[0].shape[0], projected.device
            empty = windows.allocate(rows, *mixer.heads, self.gdn_window, device=device)
            self._gdn_store_window(layer, empty)

    @staticmethod
    def _gdn_store_window(layer: Any, window: Any) -> None:
        for slot, tensor in zip(WINDOW_SLOTS, window, strict=True):
            if slot < layer.number_of_states:
                old = layer.recurrent_states[slot]
                if old.shape == tensor.shape:  # not so once the size of windows was changed
                    old.copy_(tensor)
                    continue
            layer.recurrent_states[slot] = tensor.contiguous()
            layers.keep_address(layer.recurrent_states[slot])
            layer.is_recurrent_states_initialized[slot] = True
            layer.conv_states[slot] = None
            layer.is_conv_states_initialized[slot] = False
            layer.has_previous_state[slot] = layer.has_previous_state[0]
            layer.conv_kernel_size[slot] = None
        layer.number_of_states = 1 + len(WINDOW_SLOTS)

    def _gdn_fold(self, layer: Any) -> None:
        """Before code that reads the state alone: fold a window that the cache may hold into it."""
        if layer is None or layer.number_of_states == 1 or not layer.has_previous_state[0]:
            return
        torch.ops.gdn.window_flush.default(
            self._gdn_state(layer), *(layer.recurrent_states[i] for i in WINDOW_SLOTS)
        )

    @staticmethod
    def _gdn_state(layer: Any) -> Tensor:
        """The state of a cache with a history, as the ops take it."""
        if layer.recurrent_states[0] is None:
            raise RuntimeError(
                "gdn_ops: the cache holds low-rank windows and no state; only a layer patched with "
                "state_mode='lowrank' can continue it, and without gradients"
            )
        return layer.recurrent_states[0].transpose(-1, -2)


class GdnOpsQwen3_5GatedDeltaNet(PatchedGatedDeltaNet, Qwen3_5GatedDeltaNet):
    gdn_base = Qwen3_5GatedDeltaNet
    gdn_cache_argument = cache_argument(Qwen3_5GatedDeltaNet)
    gdn_projections = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


class GdnOpsQwen3_5MoeGatedDeltaNet(PatchedGatedDeltaNet, Qwen3_5MoeGatedDeltaNet):
    gdn_base = Qwen3_5MoeGatedDeltaNet
    gdn_cache_argument = cache_argument(Qwen3_5MoeGatedDeltaNet)
    gdn_projections = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


class GdnOpsQwen3NextGatedDeltaNet(PatchedGatedDeltaNet, Qwen3NextGatedDeltaNet):
    gdn_base = Qwen3NextGatedDeltaNet
    gdn_cache_argument = cache_argument(Qwen3NextGatedDeltaNet)
    gdn_projections = ("in_proj_qkvz", "in_proj_ba")

    def gdn_rows(self, device: torch.device) -> Tensor:
        """The checkpoint groups rows by key head: q, k, its values, its z; then b and a alike."""
        H, K = self.num_k_heads, self.head_k_dim
        group = self.num_v_heads // H
        values = group * self.head_v_dim
        first_ba = 2 * self.key_dim + 2 * self.value_dim
        qkvz = torch.arange(first_ba, device=device).view(H, 2 * K + 2 * values)
        ba = torch.arange(first_ba, first_ba + 2 * self.num_v_heads, device=device)
        ba = ba.view(H, 2 * group)
        q, k, v, z = qkvz.split([K, K, values, values], dim=1)
        b, a = ba.split([group, group], dim=1)
        return torch.cat([part.reshape(-1) for part in (q, k, v, z, b, a)])


CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    ours.gdn_base: ours
    for ours in (
        GdnOpsQwen3_5GatedDeltaNet,
        GdnOpsQwen3_5MoeGatedDeltaNet,
        GdnOpsQwen3NextGatedDeltaNet,
    )
}
