// Tensors in, argument blocks out: every check of every op, shared by all backends.
//
// A builder throws before anything is written. `check_values` looks at lengths and indices and is
// for backends whose data lives on the host; device backends never read them
// (docs/architecture.md).
#pragma once

#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include "args.h"

namespace gdn {

using OptTensor = std::optional<at::Tensor>;

// What every op that walks sequences shares.
struct SeqTensors {
  const OptTensor& state_indices;
  const OptTensor& has_initial_state;
  const OptTensor& cu_seqlens;
  const OptTensor& num_accepted;
};

struct WindowTensors {
  const at::Tensor &k, &u, &g, &fill;
};

struct Named {
  const char* name;
  const at::Tensor* t;
};

// None for an argument that is no option arrives as a tensor without anything.
void check_given(const char* op, const char* name, const at::Tensor& t);

// Of a tensor whose dtype a kernel can read; an error for any other.
DType dtype_of(const char* op, const char* name, const at::Tensor& t);

// `gates` = {g, beta} or, with A_log and dt_bias, {a, b}. Output not set.
struct GateTensors {
  const at::Tensor &g, &beta;
  const at::Tensor* A_log = nullptr;
  const at::Tensor* dt_bias = nullptr;
};

// `state` null: low-rank; `window` null: full. The caller sets `out`.
RecurrentArgs recurrent_args(const char* op, const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& v, const GateTensors& gates, const at::Tensor* state,
                             const WindowTensors* window, const SeqTensors& seq,
                             std::optional<double> scale, bool qk_l2norm);

// Chunked prefill. Functional: `state` null and `initial_state` [N, HV, V, K] f32 or absent; the
// caller sets `write`. Pool form: `state` is read and written.
struct ChunkTensors {
  const OptTensor& initial_state;
  const at::Tensor* state;
  const OptTensor &read_indices, &write_indices, &has_initial_state, &cu_seqlens, &edge_rows;
  const WindowTensors* window;
};
ChunkArgs chunk_args(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& g, const at::Tensor& beta, const ChunkTensors& t,
                     std::optional<double> scale, bool qk_l2norm, int64_t chunk_size);

// The caller sets the outputs and `work`.
ChunkBackwardArgs chunk_backward_args(const char* op, const at::Tensor& grad_o,
                                      const OptTensor& grad_final_state, const at::Tensor& q,
                                      const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                                      const at::Tensor& beta, const OptTensor& initial_state,
                                      const OptTensor& cu_seqlens, std::optional<double> scale,
                                      bool qk_l2norm, int64_t chunk_size);

// What both forms of the backward ask of the gradients that they are given: `N` sequences.
void check_chunk_gradients(const char* op, const at::Tensor& grad_o,
                           const OptTensor& grad_final_state, const at::Tensor& q,
                           const at::Tensor& v, int64_t N);

// Host-readable metadata only: the rows of chunk_prefill exist.
void check_chunk_values(const char* op, const ChunkArgs& c);

// Only the pool, the window and the rows (window_flush, window_reset).
RecurrentArgs window_args(const char* op, const at::Tensor* state, const WindowTensors* window,
                          const at::Tensor& fill, const OptTensor& state_indices);

GatingArgs gating_args(const char* op, const at::Tensor& a, const at::Tensor& b,
                       const at::Tensor& A_log, const at::Tensor& dt_bias);

// Pool form; the caller sets `y`.
ConvArgs conv_args(const char* op, const at::Tensor& x, const at::Tensor& weight,
                   const OptTensor& bias, const at::Tensor& conv_state, const SeqTensors& seq,
                   const std::string& activation, bool conv_leading);

// Functional form: `initial_state` [N, C, L] or absent, `L` = columns of the final state.
ConvArgs conv1d_args(const char* op, const at::Tensor& x, const at::Tensor& weight,
                     const OptTensor& bias, const OptTensor& initial_state,
                     const OptTensor& cu_seqlens, const std::string& activation,
                     std::optional<int64_t> state_len);

ConvGatingArgs conv_gating_args(const char* op, const at::Tensor& mixed_qkv, const at::Tensor& a,
                                const at::Tensor& b, const at::Tensor& conv_weight,
                                const OptTensor& conv_bias, const at::Tensor& A_log,
                                const at::Tensor& dt_bias, const at::Tensor& conv_state,
                                int64_t num_k_heads, int64_t head_k_dim, const SeqTensors& seq,
                                bool qk_l2norm, const std::string& activation, bool conv_leading);

// x and gate [..., V] with rows of one stride, or heads of one stride inside tokens of another
// (NormArgs::heads above 1: a backend whose kernel cannot take those must copy). The caller sets
// `y`.
NormArgs norm_args(const char* op, const at::Tensor& x, const at::Tensor& gate,
                   const at::Tensor& weight, double eps);

// x [..., K], weight [N, K] of one dtype; the caller sets `y`. `plain`: whether the kernels can run
// it (16 bits, rows contiguous and of one stride).
LinearArgs linear_args(const char* op, const at::Tensor& x, const at::Tensor& weight, bool* plain);

struct DecodeTensors {
  const at::Tensor &projected, &conv_weight;
  const OptTensor& conv_bias;
  const at::Tensor &A_log, &dt_bias, &norm_weight, &conv_state;
  const at::Tensor* state;
  const WindowTensors* window;
};
DecodeArgs decode_args(const char* op, const DecodeTensors& t, int64_t num_k_heads,
                       int64_t head_k_dim, const SeqTensors& seq, std::optional<double> scale,
                       bool qk_l2norm, double eps, const std::string& activation,
                       bool conv_leading);

// Host-readable metadata only: lengths ascend and end at T, rows exist, accepted counts fit, and no
// sequence brings more than `most_tokens`. `rows` is what the op calls its state_indices.
void check_values(const char* op, const Sequences& s, int64_t most_tokens = INT64_MAX,
                  const char* rows = "state_indices");

// The same for sequences that own a window: counts that a window can hold (`has_base`: one that is
// folded into a state, and so never goes round), and no more accepted than the last call brought.
void check_window_values(const char* op, const Sequences& s, const Window& w, bool has_base,
                         int64_t most_tokens = INT64_MAX);

// The same for a conv pool: its rows exist, and a speculative call's columns fit.
void check_conv_values(const char* op, const ConvArgs& c);

// Fresh contiguous output with the device and dtype of `like`.
at::Tensor new_output(const at::Tensor& like, at::IntArrayRef sizes);
// A contiguous output [B, T, heads * head_dim] or [B, T, heads, head_dim].
View view_of(at::Tensor& t, int64_t head_dim);
// float32 states [N, HV, V, K] as a pool of N rows.
StatePool states_of(const at::Tensor& t);
// Conv histories [N, C, L], newest column last, as a pool of N rows.
ConvPool histories_of(const char* op, const char* name, const at::Tensor& t);

}  // namespace gdn
