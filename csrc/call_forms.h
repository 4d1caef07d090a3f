// Ops that a backend runs in the same way and that differ in their arguments: with gates or what
// gates are made of, with a state, a window or both. Here stands the signature of each, once for
// all backends; it names the op and puts together what belongs together. A backend gives the
// function that runs a family (csrc/<backend>/ops.cpp).
#pragma once

#include <torch/library.h>

#include "checks.h"

namespace gdn::forms {

using at::Tensor;

// --- run(op, q, k, v, gates, state, sequences, scale, qk_l2norm)

template <auto run>
Tensor recurrent(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                 const Tensor& beta, Tensor& state, const OptTensor& state_indices,
                 const OptTensor& has_initial_state, const OptTensor& cu_seqlens,
                 const OptTensor& num_accepted, std::optional<double> scale, bool qk_l2norm) {
  return run("recurrent", q, k, v, {g, beta}, state,
             {state_indices, has_initial_state, cu_seqlens, num_accepted}, scale, qk_l2norm);
}

template <auto run>
Tensor recurrent_gated(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a,
                       const Tensor& b, const Tensor& A_log, const Tensor& dt_bias, Tensor& state,
                       const OptTensor& state_indices, const OptTensor& has_initial_state,
                       const OptTensor& cu_seqlens, const OptTensor& num_accepted,
                       std::optional<double> scale, bool qk_l2norm) {
  return run("recurrent_gated", q, k, v, {a, b, &A_log, &dt_bias}, state,
             {state_indices, has_initial_state, cu_seqlens, num_accepted}, scale, qk_l2norm);
}

template <auto run>
void implement_recurrent(torch::Library& m) {
  m.impl("recurrent", &recurrent<run>);
  m.impl("recurrent_gated", &recurrent_gated<run>);
}

// --- run(op, q, k, v, gates, state or null, window, sequences, scale, qk_l2norm)

template <auto run>
Tensor recurrent_buffered(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                          const Tensor& beta, Tensor& state, Tensor& win_k, Tensor& win_u,
                          Tensor& win_g, Tensor& win_fill, const OptTensor& state_indices,
                          const OptTensor& has_initial_state, const OptTensor& cu_seqlens,
                          const OptTensor& num_accepted, std::optional<double> scale,
                          bool qk_l2norm) {
  return run("recurrent_buffered", q, k, v, {g, beta}, &state, {win_k, win_u, win_g, win_fill},
             {state_indices, has_initial_state, cu_seqlens, num_accepted}, scale, qk_l2norm);
}

template <auto run>
Tensor recurrent_lowrank(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                         const Tensor& beta, Tensor& win_k, Tensor& win_u, Tensor& win_g,
                         Tensor& win_fill, const OptTensor& state_indices,
                         const OptTensor& has_initial_state, const OptTensor& cu_seqlens,
                         const OptTensor& num_accepted, std::optional<double> scale,
                         bool qk_l2norm) {
  return run("recurrent_lowrank", q, k, v, {g, beta}, nullptr, {win_k, win_u, win_g, win_fill},
             {state_indices, has_initial_state, cu_seqlens, num_accepted}, scale, qk_l2norm);
}

template <auto run>
void implement_window(torch::Library& m) {
  m.impl("recurrent_buffered", &recurrent_buffered<run>);
  m.impl("recurrent_lowrank", &recurrent_lowrank<run>);
}

// --- run(op, q, k, v, g, beta, ChunkTensors, scale, qk_l2norm, chunk_size): what writes a pool

template <auto run>
Tensor chunk_prefill(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                     const Tensor& beta, Tensor& state, const OptTensor& read_indices,
                     const OptTensor& write_indices, const OptTensor& has_initial_state,
                     const OptTensor& cu_seqlens, const OptTensor& edge_rows,
                     std::optional<double> scale, bool qk_l2norm, int64_t chunk_size) {
  const OptTensor none;
  return run("chunk_prefill", q, k, v, g, beta,
             {none, &state, read_indices, write_indices, has_initial_state, cu_seqlens, edge_rows,
              nullptr},
             scale, qk_l2norm, chunk_size);
}

template <auto run>
Tensor chunk_lowrank(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                     const Tensor& beta, Tensor& win_k, Tensor& win_u, Tensor& win_g,
                     Tensor& win_fill, const OptTensor& state_indices,
                     const OptTensor& has_initial_state, const OptTensor& cu_seqlens,
                     std::optional<double> scale, bool qk_l2norm, int64_t chunk_size) {
  const OptTensor none;
  const WindowTensors window{win_k, win_u, win_g, win_fill};
  return run("chunk_lowrank", q, k, v, g, beta,
             {none, nullptr, state_indices, none, has_initial_state, cu_seqlens, none, &window},
             scale, qk_l2norm, chunk_size);
}

template <auto run>
void implement_chunk_pools(torch::Library& m) {
  m.impl("chunk_prefill", &chunk_prefill<run>);
  m.impl("chunk_lowrank", &chunk_lowrank<run>);
}

// --- run(op, DecodeTensors, num_k_heads, head_k_dim, sequences, scale, qk_l2norm, eps, activation,
// conv_leading)

template <auto run>
Tensor decode(const Tensor& projected, const Tensor& conv_weight, const OptTensor& conv_bias,
              const Tensor& A_log, const Tensor& dt_bias, const Tensor& norm_weight,
              Tensor& conv_state, Tensor& state, int64_t num_k_heads, int64_t head_k_dim,
              const OptTensor& state_indices, const OptTensor& has_initial_state,
              const OptTensor& cu_seqlens, const OptTensor& num_accepted,
              std::optional<double> scale, bool qk_l2norm, double eps,
              const std::string& activation, bool conv_leading) {
  return run(
      "decode",
      {projected, conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state, &state, nullptr},
      num_k_heads, head_k_dim, {state_indices, has_initial_state, cu_seqlens, num_accepted}, scale,
      qk_l2norm, eps, activation, conv_leading);
}

template <auto run>
Tensor decode_buffered(const Tensor& projected, const Tensor& conv_weight,
                       const OptTensor& conv_bias, const Tensor& A_log, const Tensor& dt_bias,
                       const Tensor& norm_weight, Tensor& conv_state, Tensor& state, Tensor& win_k,
                       Tensor& win_u, Tensor& win_g, Tensor& win_fill, int64_t num_k_heads,
                       int64_t head_k_dim, const OptTensor& state_indices,
                       const OptTensor& has_initial_state, const OptTensor& cu_seqlens,
                       const OptTensor& num_accepted, std::optional<double> scale, bool qk_l2norm,
                       double eps, const std::string& activation, bool conv_leading) {
  const WindowTensors window{win_k, win_u, win_g, win_fill};
  return run(
      "decode_buffered",
      {projected, conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state, &state, &window},
      num_k_heads, head_k_dim, {state_indices, has_initial_state, cu_seqlens, num_accepted}, scale,
      qk_l2norm, eps, activation, conv_leading);
}

template <auto run>
Tensor decode_lowrank(const Tensor& projected, const Tensor& conv_weight,
                      const OptTensor& conv_bias, const Tensor& A_log, const Tensor& dt_bias,
                      const Tensor& norm_weight, Tensor& conv_state, Tensor& win_k, Tensor& win_u,
                      Tensor& win_g, Tensor& win_fill, int64_t num_k_heads, int64_t head_k_dim,
                      const OptTensor& state_indices, const OptTensor& has_initial_state,
                      const OptTensor& cu_seqlens, const OptTensor& num_accepted,
                      std::optional<double> scale, bool qk_l2norm, double eps,
                      const std::string& activation, bool conv_leading) {
  const WindowTensors window{win_k, win_u, win_g, win_fill};
  return run("decode_lowrank",
             {projected, conv_weight, conv_bias, A_log, dt_bias, norm_weight, conv_state, nullptr,
              &window},
             num_k_heads, head_k_dim, {state_indices, has_initial_state, cu_seqlens, num_accepted},
             scale, qk_l2norm, eps, activation, conv_leading);
}

template <auto run>
void implement_decode(torch::Library& m) {
  m.impl("decode", &decode<run>);
  m.impl("decode_buffered", &decode_buffered<run>);
  m.impl("decode_lowrank", &decode_lowrank<run>);
}

}  // namespace gdn::forms
