"""Where a cache layer of transformers holds the states of a patched layer.

Slot 0 is what transformers keeps: the history of the convolution, and the state, stored transposed
and so in the layout of the kernels. The four tensors of a window follow in slots of their own:
there beam reordering, reset and offloading of the cache treat them like any other state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gdn_ops._compile import keep_address
from gdn_ops.nn import States, window_of

WINDOW_SLOTS = (1, 2, 3, 4)


def has_window(layer: Any) -> bool:
    """Whether a cache layer holds a window, be it of a sequence that was reset."""
    return layer.number_of_states != 1


def window_in(layer: Any) -> tuple[Tensor, ...]:
    """The window of a cache layer that has one, in the order in which every op takes it."""
    return tuple(layer.recurrent_states[slot] for slot in WINDOW_SLOTS)


def state_in(layer: Any) -> Tensor:
    """The state of a cache layer with a history, as the ops take it."""
    if layer.recurrent_states[0] is None:
        raise RuntimeError(
            "gdn_ops: the cache holds low-rank windows and no state; only a layer patched with "
            "state_mode='lowrank' can continue it, and without gradients"
        )
    return layer.recurrent_states[0].transpose(-1, -2)


def fold_window(layer: Any) -> None:
    """Before code that reads the state alone: fold a window that the cache may hold into it."""
    if layer is None or not has_window(layer) or not layer.has_previous_state[0]:
        return
    torch.ops.gdn.window_flush.default(state_in(layer), *window_in(layer))


def store_window(layer: Any, window: Sequence[Tensor]) -> None:
    """Put a window into a cache layer: over the one there if it fits, else in its place."""
    for slot, tensor in zip(WINDOW_SLOTS, window, strict=True):
        if slot < layer.number_of_states:
            old = layer.recurrent_states[slot]
            if old.shape == tensor.shape:  # not so once the size of windows was changed
                old.copy_(tensor)
                continue
        layer.recurrent_states[slot] = tensor.contiguous()
        keep_address(layer.recurrent_states[slot])
        layer.is_recurrent_states_initialized[slot] = True
        layer.conv_states[slot] = None
        layer.is_conv_states_initialized[slot] = False
        layer.has_previous_state[slot] = layer.has_previous_state[0]
        layer.conv_kernel_size[slot] = None
    layer.number_of_states = 1 + len(WINDOW_SLOTS)


def store_first(cache: Any, index: int, conv_width: int, states: States, rows: slice) -> None:
    """Hand the states of a first call to layer ``index`` of a cache: those of ``rows``.

    The convolution, the state or that there is none, and a window if ``states`` has one.
    """
    layer = cache.layers[index]
    cache.update_conv_state(states.conv[rows], index, conv_kernel_size=conv_width)
    if states.state is None:
        # A cache that was reset may have kept one, which nothing would write from now on.
        layer.recurrent_states[0] = None
        layer.is_recurrent_states_initialized[0] = False
    else:
        # The cache keeps the strides of what it is given.
        cache.update_recurrent_state(states.state[rows].transpose(-1, -2), index)
    if states.win_k is not None:
        store_window(layer, [t[rows] for t in window_of(states)])


def mark_history(layer: Any) -> None:
    """A cache layer has a history if all of its states have, also after a reset."""
    history = layer.has_previous_state
    for slot in history:
        history[slot] = True
