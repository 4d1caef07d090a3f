"""Fakes of the ``paged`` ops, call forms of serving engines (csrc/paged.cpp), which
:mod:`gdn_ops.compat` wraps. Under ``torch.compile`` each stays one op. As its parts it would write
a view that nothing knows to be one of the pool, and the pool would be copied there and back."""

from __future__ import annotations

from gdn_ops.ops._common import check_same_device, register_fake


@register_fake("gdn::paged_recurrent")
def _(q, k, v, g, beta, state, state_indices, cu_seqlens=None, num_accepted=None, scale=None,
      qk_l2norm=False):  # fmt: skip
    check_same_device("paged_recurrent", q, k=k, v=v, g=g, beta=beta, state=state,
                      state_indices=state_indices, cu_seqlens=cu_seqlens,
                      num_accepted=num_accepted)  # fmt: skip
    return v.new_empty(v.shape)


@register_fake("gdn::paged_recurrent_gated")
def _(q, k, v, a, b, A_log, dt_bias, state, state_indices, cu_seqlens=None, num_accepted=None,
      scale=None, qk_l2norm=False, first_row=1, kv_rows=False):  # fmt: skip
    check_same_device("paged_recurrent_gated", q, k=k, v=v, a=a, b=b, A_log=A_log,
                      dt_bias=dt_bias, state=state, state_indices=state_indices,
                      cu_seqlens=cu_seqlens, num_accepted=num_accepted)  # fmt: skip
    return v.new_empty(v.shape)


@register_fake("gdn::paged_decode_packed")
def _(mixed_qkv, a, b, A_log, dt_bias, state, state_indices, out, scale=None, qk_l2norm=False,
      first_row=1):  # fmt: skip
    check_same_device("paged_decode_packed", mixed_qkv, a=a, b=b, A_log=A_log, dt_bias=dt_bias,
                      state=state, state_indices=state_indices, out=out)  # fmt: skip


@register_fake("gdn::paged_short_conv")
def _(x, weight, bias, conv_state, state_indices, has_initial_state=None, cu_seqlens=None,
      num_accepted=None, activation="silu", channels_first=False, channels_last=False,
      first_row=1):  # fmt: skip
    check_same_device("paged_short_conv", x, weight=weight, bias=bias, conv_state=conv_state,
                      state_indices=state_indices, has_initial_state=has_initial_state,
                      cu_seqlens=cu_seqlens, num_accepted=num_accepted)  # fmt: skip
    if channels_first and (x.dim() == 3 or cu_seqlens is not None):
        return x.new_empty(x.mT.shape).mT
    return x.new_empty(x.shape)
