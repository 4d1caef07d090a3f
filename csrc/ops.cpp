// Every schema of the library, and nothing else. Semantics: docs/ops and the docstrings in
// gdn_ops/ops. Kernels are registered by csrc/<backend>/ops.cpp, fakes by gdn_ops/ops.
#include <torch/library.h>

// The shared tail of every op that walks sequences.
#define GDN_SEQ                                                                           \
  "Tensor? state_indices=None, Tensor? has_initial_state=None, Tensor? cu_seqlens=None, " \
  "Tensor? num_accepted=None"
#define GDN_PACKED "Tensor? cu_seqlens=None, Tensor? num_accepted=None"
#define GDN_WINDOW "Tensor(b!) win_k, Tensor(c!) win_u, Tensor(d!) win_g, Tensor(e!) win_fill"
#define GDN_SCALE "float? scale=None, bool qk_l2norm=False"
#define GDN_DECODE_PARAMS                                                                   \
  "Tensor projected, Tensor conv_weight, Tensor? conv_bias, Tensor A_log, Tensor dt_bias, " \
  "Tensor norm_weight"
#define GDN_DECODE_TAIL                                                                 \
  "SymInt num_k_heads, SymInt head_k_dim, " GDN_SEQ                                     \
  ", float? scale=None, bool qk_l2norm=True, float eps=1e-6, str activation=\"silu\", " \
  "bool conv_leading=False"

TORCH_LIBRARY(gdn, m) {
  // --- recurrence, one token after the other, state in place
  m.def("recurrent(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, " GDN_SEQ
        ", " GDN_SCALE ") -> Tensor");
  m.def(
      "recurrent_gated(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, "
      "Tensor dt_bias, Tensor(a!) state, " GDN_SEQ ", " GDN_SCALE ") -> Tensor");

  // --- windows of pending rank-1 updates
  m.def(
      "recurrent_buffered(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
      "Tensor(a!) state, " GDN_WINDOW ", " GDN_SEQ ", " GDN_SCALE ") -> Tensor");
  m.def("window_flush(Tensor(a!) state, " GDN_WINDOW ", Tensor? state_indices=None) -> ()");
  m.def("window_reset(Tensor(a!) win_fill, Tensor? state_indices=None) -> ()");
  m.def("recurrent_lowrank(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, " GDN_WINDOW
        ", " GDN_SEQ ", " GDN_SCALE ") -> Tensor");

  // --- chunked prefill
  m.def(
      "chunk(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state=None, "
      "Tensor? cu_seqlens=None, " GDN_SCALE
      ", SymInt chunk_size=64) -> (Tensor o, Tensor final_state)");
  m.def(
      "chunk_backward(Tensor grad_o, Tensor? grad_final_state, Tensor q, Tensor k, Tensor v, "
      "Tensor g, Tensor beta, Tensor? initial_state, Tensor? cu_seqlens, float? scale, "
      "bool qk_l2norm, SymInt chunk_size) -> "
      "(Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state)");
  m.def(
      "chunk_prefill(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, "
      "Tensor? read_indices=None, Tensor? write_indices=None, Tensor? has_initial_state=None, "
      "Tensor? cu_seqlens=None, Tensor? edge_rows=None, " GDN_SCALE
      ", SymInt chunk_size=64) -> Tensor");
  m.def("chunk_lowrank(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, " GDN_WINDOW
        ", Tensor? state_indices=None, Tensor? has_initial_state=None, Tensor? "
        "cu_seqlens=None, " GDN_SCALE ", SymInt chunk_size=64) -> Tensor");

  // --- short convolution and gates
  m.def(
      "conv1d(Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, "
      "Tensor? cu_seqlens=None, str activation=\"silu\", SymInt? state_len=None) -> "
      "(Tensor y, Tensor final_state)");
  m.def(
      "conv1d_backward(Tensor grad_y, Tensor? grad_final_state, Tensor x, Tensor weight, "
      "Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens, str activation, SymInt state_len) "
      "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)");
  m.def("short_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_state, " GDN_SEQ
        ", str activation=\"silu\", bool conv_leading=False) -> Tensor");
  m.def("gating(Tensor a, Tensor b, Tensor A_log, Tensor dt_bias) -> (Tensor g, Tensor beta)");
  m.def(
      "gating_backward(Tensor grad_g, Tensor grad_beta, Tensor a, Tensor b, Tensor A_log, "
      "Tensor dt_bias) -> (Tensor da, Tensor db, Tensor dA_log, Tensor ddt_bias)");
  m.def(
      "conv_gating(Tensor mixed_qkv, Tensor a, Tensor b, Tensor conv_weight, Tensor? conv_bias, "
      "Tensor A_log, Tensor dt_bias, Tensor(a!) conv_state, SymInt num_k_heads, "
      "SymInt head_k_dim, " GDN_SEQ
      ", bool qk_l2norm=False, str activation=\"silu\", bool conv_leading=False) -> "
      "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta)");

  // --- call forms of serving engines: rows of a pool below the first are padding (csrc/paged.cpp)
  m.def(
      "paged_recurrent(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, "
      "Tensor state_indices, " GDN_PACKED ", " GDN_SCALE ") -> Tensor");
  m.def(
      "paged_recurrent_gated(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, "
      "Tensor dt_bias, Tensor(a!) state, Tensor state_indices, " GDN_PACKED ", " GDN_SCALE
      ", int first_row=1, bool kv_rows=False) -> Tensor");
  m.def(
      "paged_decode_packed(Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, "
      "Tensor(a!) state, Tensor state_indices, Tensor(b!) out, " GDN_SCALE
      ", int first_row=1) -> ()");
  m.def(
      "paged_short_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_state, "
      "Tensor state_indices, Tensor? has_initial_state=None, " GDN_PACKED
      ", str activation=\"silu\", bool channels_first=False, bool channels_last=False, "
      "int first_row=1) -> Tensor");

  // --- output norm
  m.def("gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps=1e-6) -> Tensor");
  m.def(
      "gated_rms_norm_backward(Tensor grad_y, Tensor x, Tensor gate, Tensor weight, float eps) "
      "-> (Tensor dx, Tensor dgate, Tensor dweight)");

  // --- the projections around it, for the few tokens of a decode step
  m.def("linear(Tensor x, Tensor weight) -> Tensor");

  // --- the layer between its two projections
  m.def("decode(" GDN_DECODE_PARAMS ", Tensor(a!) conv_state, Tensor(b!) state, " GDN_DECODE_TAIL
        ") -> Tensor");
  m.def("decode_buffered(" GDN_DECODE_PARAMS
        ", Tensor(f!) conv_state, Tensor(a!) state, " GDN_WINDOW ", " GDN_DECODE_TAIL
        ") -> Tensor");
  m.def("decode_lowrank(" GDN_DECODE_PARAMS ", Tensor(f!) conv_state, " GDN_WINDOW
        ", " GDN_DECODE_TAIL ") -> Tensor");

  // --- what benchmarks compare with: each byte of x read and written back, unchanged
  m.def("sweep(Tensor(a!) x) -> ()");

  // --- the library itself (no tensors, so these run on any backend)
  m.def("set_precision(str mode) -> ()");
  m.def("get_precision() -> str");
  m.def("cpu_isa() -> str");
  m.def("cpu_isas() -> str[]");
}
