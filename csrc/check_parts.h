// What the builders of checks.h are made of: each looks at one tensor, or at a few that belong
// together, and fills its part of an argument block. Messages name the op and the argument, and say
// what was expected and what came.
#pragma once

#include <ATen/core/Tensor.h>

#include "checks.h"

namespace gdn {

// --- one tensor

void check_dim(const char* op, const char* name, const at::Tensor& t, int64_t dim,
               const char* shape);
void check_size(const char* op, const char* name, const at::Tensor& t, int64_t d, int64_t want,
                const char* letter);
void check_device(const char* op, const char* name, const at::Tensor& t, const at::Tensor& like);

// The stride of a dimension of one element means nothing; 0 lets kernels see that it does not move.
inline int64_t stride_of(const at::Tensor& t, int64_t d) { return t.size(d) > 1 ? t.stride(d) : 0; }
// Whether neighbours in dimension d are neighbours in memory.
inline bool unit_stride(const at::Tensor& t, int64_t d) {
  return t.size(d) <= 1 || t.stride(d) == 1;
}
// Whether the dimensions [0, last) of t walk with one stride, and which.
bool one_stride(const at::Tensor& t, int64_t last, int64_t* stride);

// A tensor that is about to be written: no two of its elements may be one. Strides that nest, each
// beyond what the smaller ones reach, are the layouts that pools have; others are refused.
void check_writable(const char* op, const char* name, const at::Tensor& t);
// Two pools may be interleaved in one page (row strides equal, extents apart), never overlap.
void check_apart(const char* op, const char* name_a, const at::Tensor& a, const char* name_b,
                 const at::Tensor& b);

View activation_view(const char* op, const char* name, const at::Tensor& t);
Param param_of(const char* op, const char* name, const at::Tensor& t);
Param head_param(const char* op, const char* name, const at::Tensor& t, int64_t HV,
                 const at::Tensor& like);
Index index_of(const char* op, const char* name, const at::Tensor& t, const at::Tensor& like);

// --- numbers and words

void check_heads(const char* op, int64_t H, int64_t HV, int64_t K, int64_t V);
float scale_of(std::optional<double> scale, int64_t K);
bool silu_of(const char* op, const std::string& activation);

// --- sequences

// How many sequences a call brings, before the rest of it is checked.
int64_t count_sequences(const char* op, const OptTensor& cu_seqlens, int64_t B);
// Shapes of the token tensors and the sequence metadata. B, T as the token tensors have them.
// `rows`: what the op calls its state_indices.
Sequences sequences_of(const char* op, int64_t B, int64_t T, int64_t P, const SeqTensors& t,
                       const at::Tensor& like, const char* rows = "state_indices");
Gates gates_of(const char* op, const GateTensors& t, int64_t B, int64_t T, int64_t HV,
               const at::Tensor& like);

// --- pools

// `initial_state` of the functional op is only read, and may be expanded.
StatePool state_pool(const char* op, const char* name, const at::Tensor& t, int64_t HV, int64_t V,
                     int64_t K, bool read_only = false);
ConvPool conv_pool(const char* op, const at::Tensor& t, const char* name, int64_t C, int64_t W,
                   bool leading);
Window window_of(const char* op, const WindowTensors& w, int64_t H, int64_t HV, int64_t K,
                 int64_t V, const at::Tensor& like);
void check_apart_from_window(const char* op, const char* name, const at::Tensor& pool,
                             const WindowTensors& w);
void check_window_against_state(const char* op, const at::Tensor& state, const WindowTensors& w);

}  // namespace gdn
