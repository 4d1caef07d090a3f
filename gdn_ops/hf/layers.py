"""Subclasses of the Gated DeltaNet layers of transformers that run on the ops of this package.

They own the same parameters under the same names. The rule for falling back to the class of
transformers, checked on every call and announced once for each reason, is
:meth:`PatchedGatedDeltaNet.gdn_unsupported` (facts of the layer) and
:meth:`PatchedGatedDeltaNet.gdn_fallback` (facts of the call); docs/huggingface.md lists it.

What a layer does beside that stands in files of its own: its input projections as one matrix in
``packing.py``, its states in a cache in ``cached.py``, decode steps that look only at what has
changed since the last in ``eager_step.py``.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from gdn_ops import windows
from gdn_ops._compile import constant
from gdn_ops._limits import DTYPES, MAX_CONV_WIDTH, MAX_HEAD_DIM
from gdn_ops._modules import has_hooks, has_own_forward, local, product, project
from gdn_ops._support import missing, trainable
from gdn_ops.hf import cached
from gdn_ops.hf.compat import cache_argument
from gdn_ops.hf.eager_step import Step, continues
from gdn_ops.hf.packing import PackedProjections
from gdn_ops.nn import Heads, Mixer, States, mix, mix_functional

_decode = torch.ops.gdn.decode.default
_announced: set[tuple[str, str]] = set()


@constant
def _announce(layer: str, reason: str) -> bool:
    """Warn once for each layer class and reason; while tracing, at trace time."""
    if (layer, reason) not in _announced:
        _announced.add((layer, reason))
        warnings.warn(f"gdn_ops: {layer} runs the code of transformers: {reason}", stacklevel=2)
    return True


def _only_aligns_devices(module: nn.Module) -> bool:
    """Whether the forward put in place is that of accelerate, which moves tensors between devices:
    :meth:`PatchedGatedDeltaNet.gdn_fallback` looks where the parameters are."""
    return type(getattr(module, "_hf_hook", None)).__name__ == "AlignDevicesHook"


class PatchedGatedDeltaNet(PackedProjections):
    """Mixin in front of a transformers layer; the class made of both is in :data:`CLASSES`."""

    gdn_base: ClassVar[type[nn.Module]]
    gdn_cache_argument: ClassVar[str]

    gdn_state_mode = "full"
    gdn_window = 16
    _gdn_step: Step | None  # what the last eager decode step was decided from

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.gdn_setup()

    def gdn_setup(self) -> None:
        self._gdn_step = None
        super().gdn_setup()

    def gdn_teardown(self) -> None:
        super().gdn_teardown()
        for name in ("_gdn_step", "gdn_state_mode", "gdn_window"):
            vars(self).pop(name, None)

    def _gdn_forget(self) -> None:
        super()._gdn_forget()
        self._gdn_step = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_gdn_step": None}

    # When transformers must run instead.

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
        if has_hooks(self.norm) or (
            has_own_forward(self.norm) and not _only_aligns_devices(self.norm)
        ):
            return "the norm has hooks or a forward of its own"
        if self.norm.activation not in ("silu", "swish"):
            return f"activation {self.norm.activation!r} of the norm is not silu"
        if not (1 <= self.head_k_dim <= MAX_HEAD_DIM and 1 <= self.head_v_dim <= MAX_HEAD_DIM):
            sizes = f"{self.head_k_dim} and {self.head_v_dim}"
            return f"head sizes {sizes} are outside 1 to {MAX_HEAD_DIM}"
        if self.num_v_heads % self.num_k_heads:
            return f"{self.num_v_heads} value heads are no multiple of {self.num_k_heads} key heads"
        if not 1 <= self.conv_kernel_size <= MAX_CONV_WIDTH:
            return f"convolution width {self.conv_kernel_size} is outside 1 to {MAX_CONV_WIDTH}"
        parameters = parameters or self._gdn_parameters()
        for parameter in parameters:
            if parameter.dtype not in DTYPES:
                return f"parameters are {parameter.dtype}"
        return missing(self.gdn_state_mode, parameters[0].device.type)

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
        if hidden_states.dtype not in DTYPES:
            return f"hidden states are {hidden_states.dtype}"
        for parameter in parameters:
            if parameter.device != hidden_states.device:
                return "parameters and hidden states are on different devices (offloading)"
        history = layer is not None and layer.has_previous_state[0]
        if layer is not None and layer.record_past:
            return "the cache records the past of its states"
        if needs_grad and (history or not trainable(hidden_states.device.type)):
            return "gradients are needed"
        packed = kwargs.get("cu_seq_lens_q") is not None
        if packed and (history or hidden_states.shape[0] != 1):
            return "packed sequences that continue a cache or are several rows"
        if kwargs.get("seq_idx") is not None and not packed:
            return "seq_idx without cu_seq_lens_q"
        if history and layer.conv_states[0].dtype not in DTYPES:
            return f"the conv state of the cache is {layer.conv_states[0].dtype}"
        if history and self.gdn_state_mode == "lowrank" and layer.recurrent_states[0] is not None:
            return "the cache holds full states, made before state_mode was 'lowrank'"
        return None

    # What runs on the ops.

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
            cached.fold_window(layer)
            kwargs[self.gdn_cache_argument] = cache
            return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)

        if eager:
            self._gdn_pack()
        if attention_mask is not None:
            masked = hidden_states * attention_mask[:, :, None]
            hidden_states = masked.to(hidden_states.dtype)
        A_log, dt_bias, conv_weight, norm_weight = parameters
        parameters = (
            local(conv_weight).squeeze(1),
            local(self.conv1d.bias),
            local(A_log),
            local(dt_bias),
            local(norm_weight),
        )
        projected = self._gdn_project(hidden_states, packed=not needs_grad)
        if layer is None or not layer.has_previous_state[0]:
            mixer = self._gdn_mixer(parameters)
            y = self._gdn_start(projected, mixer, cache, kwargs.get("cu_seq_lens_q"), needs_grad)
        elif self.gdn_state_mode != "full" or hidden_states.shape[1] != 1:
            y = self._gdn_continue(projected, self._gdn_mixer(parameters), layer)
        else:
            cached.fold_window(layer)
            constants = self.num_k_heads, self.head_k_dim, self.norm.variance_epsilon
            y = self._gdn_decode(projected, layer, parameters, constants)
            if eager and not needs_grad and hidden_states.is_cpu:
                self._gdn_step = Step.of(self, hidden_states.dtype, parameters, constants)
        return project(self.out_proj, y)

    def _gdn_again(
        self, hidden_states: Tensor, layer: Any, kwargs: dict[str, Any]
    ) -> Tensor | None:
        """One more decode step, if nothing that decided the last one has changed; else None."""
        step = self._gdn_step
        if not continues(step.dtype, hidden_states, layer, kwargs):
            return None
        tensors = step.unchanged(self)
        if tensors is None:
            return None
        packed, out_weight = tensors[:2]
        projected = product(hidden_states, packed)
        y = self._gdn_decode(projected, layer, step.parameters, step.constants)
        return product(y, out_weight)

    def _gdn_mixer(self, parameters: tuple[Tensor | None, ...]) -> Mixer:
        heads = Heads(self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim)
        return Mixer(heads, *parameters, self.norm.variance_epsilon)

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
            projected, *parameters, layer.conv_states[0], cached.state_in(layer), heads, dim, None,
            None, None, None, None, True, eps,
        )  # fmt: skip

    def _gdn_start(
        self,
        projected: Tensor,
        mixer: Mixer,
        cache: Any,
        cu_seqlens: Tensor | None,
        needs_grad: bool,
    ) -> Tensor:
        """No history: run from zero, then hand the states to the cache, if there is one."""
        if needs_grad:
            y, conv, state = mix_functional(projected, mixer, cu_seqlens)
            states = States(conv, state)
        else:
            mode = "lowrank" if self.gdn_state_mode == "lowrank" else "full"
            states = States.allocate(
                projected.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1,
                mixer.heads,
                self.conv_kernel_size,
                state_mode=mode,
                window=self.gdn_window,
                dtype=projected.dtype,
                device=projected.device,
            )
            y = mix(projected, mixer, states, None, None, cu_seqlens, state_mode=mode, decode=False)
        if cache is not None:
            # Of packed documents the cache, whose rows are the batch, continues the last.
            rows = slice(None) if cu_seqlens is None else slice(-1, None)
            cached.store_first(cache, self.layer_idx, self.conv_kernel_size, states, rows)
            layer = cache.layers[self.layer_idx]
            if self.gdn_state_mode == "buffered" and not needs_grad:
                self._gdn_empty_window(layer, projected, mixer, self.gdn_window)
            cached.mark_history(layer)
        return y

    def _gdn_continue(self, projected: Tensor, mixer: Mixer, layer: Any) -> Tensor:
        """History: update the tensors of the cache in place."""
        mode = self.gdn_state_mode
        if mode == "buffered":
            self._gdn_empty_window(layer, projected, mixer)
        if mode == "full":
            cached.fold_window(layer)
        state = None if mode == "lowrank" else cached.state_in(layer)
        if mode == "buffered" and not (state.is_cpu or state.is_contiguous()):
            # A reordered or foreign cache, copied once: devices are faster with K together.
            state = state.contiguous()
            layer.recurrent_states[0] = state.transpose(-1, -2)
        window = () if mode == "full" else cached.window_in(layer)
        states = States(layer.conv_states[0], state, *window)
        return mix(projected, mixer, states, state_mode=mode)

    def _gdn_empty_window(
        self, layer: Any, projected: Tensor, mixer: Mixer, size: int | None = None
    ) -> None:
        """A window for a cache that has none (or, with ``size``, an empty one of another size).
        Where it can be before the first step: what is made inside of a CUDA graph does not outlive
        its next replay."""
        if not cached.has_window(layer) or size not in (None, layer.recurrent_states[1].shape[2]):
            rows, device = layer.conv_states[0].shape[0], projected.device
            empty = windows.allocate(rows, *mixer.heads, self.gdn_window, device=device)
            cached.store_window(layer, empty)


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
