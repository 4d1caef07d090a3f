// weight * rmsnorm(x) * silu(gate), one warp a row.
#pragma once

#include "common.cuh"

namespace gdn {
namespace cuda {

// rms over V elements; rounds where the model rounds: the normalised value to x's dtype, and its
// product with the weight where the weight has that dtype too.
__device__ __forceinline__ float gated_norm(float x, float sum_sq, int V, float eps, float weight,
                                            DType weight_dtype, float z, DType d) {
  float y = round_as(d, x * rsqrtf(sum_sq / V + eps)) * weight;
  if (weight_dtype == d) y = round_as(d, y);
  return y * z * sigmoid(z);
}

// PER_LANE > 0: a row is 32 * PER_LANE elements, contiguous and aligned to four of them.
// QUIET: a row of zeros gives zeros whatever the gate holds (padding rows of the fused decode).
template <class XT, class GT, int PER_LANE, bool QUIET>
__device__ __forceinline__ void norm_row(const NormArgs& a, const XT* px, const GT* pg, XT* py,
                                         int lane) {
  const int V = static_cast<int>(a.V);
  if constexpr (PER_LANE > 0) {
    RawVec<XT, 4> raw_x[PER_LANE / 4];
    RawVec<GT, 4> raw_z[PER_LANE / 4];
#pragma unroll
    for (int j = 0; j < PER_LANE / 4; j++) {
      raw_x[j] = load_raw<XT, 4>(px + lane * 4 + 128 * j);
      raw_z[j] = load_raw<GT, 4>(pg + lane * 4 + 128 * j);
    }
    float x[PER_LANE], z[PER_LANE], sum = 0.f;
#pragma unroll
    for (int j = 0; j < PER_LANE / 4; j++) {
      raw_to_float<XT, 4>(raw_x[j], x + 4 * j);
      raw_to_float<GT, 4>(raw_z[j], z + 4 * j);
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) sum = __fmaf_rn(x[j], x[j], sum);
    sum = lane_sum(sum);
#pragma unroll
    for (int j = 0; j < PER_LANE; j += 4) {
      const int c = lane * 4 + 32 * j;
      float y[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        y[e] = gated_norm(x[j + e], sum, V, a.eps, load_param(a.weight, c + e), a.weight.dtype,
                          z[j + e], a.dtype);
        if (QUIET && sum == 0.f) y[e] = 0.f;
      }
      if constexpr (sizeof(XT) == 4) {
        *reinterpret_cast<float4*>(py + c) = make_float4(y[0], y[1], y[2], y[3]);
      } else {
        alignas(8) XT h[4];
#pragma unroll
        for (int e = 0; e < 4; e++) h[e] = from_float<XT>(y[e]);
        *reinterpret_cast<uint2*>(py + c) = *reinterpret_cast<const uint2*>(h);
      }
    }
  } else {
    float sum = 0.f;
    for (int c = lane; c < V; c += 32) {
      const float x = to_float(px[c]);
      sum = __fmaf_rn(x, x, sum);
    }
    sum = lane_sum(sum);
    for (int c = lane; c < V; c += 32) {
      const float y = gated_norm(to_float(px[c]), sum, V, a.eps, load_param(a.weight, c),
                                 a.weight.dtype, to_float(pg[c]), a.dtype);
      py[c] = from_float<XT>(QUIET && sum == 0.f ? 0.f : y);
    }
  }
}

template <class XT, class GT, int PER_LANE>
__global__ void __launch_bounds__(128) norm_rows(const __grid_constant__ NormArgs a) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * 4 + (threadIdx.x >> 5); row < a.rows;
       row += static_cast<int64_t>(gridDim.x) * 4) {
    norm_row<XT, GT, PER_LANE, false>(a, static_cast<const XT*>(a.x) + row * a.s_x,
                                      static_cast<const GT*>(a.gate) + row * a.s_gate,
                                      static_cast<XT*>(a.y) + row * a.V, threadIdx.x & 31);
  }
}

// The heads of a token: x and y are contiguous [tokens, HV, V], the gate is a view of the packed
// projection. blockIdx = (four heads, token).
template <class XT, class GT, int PER_LANE>
__global__ void __launch_bounds__(128)
    norm_heads(const __grid_constant__ NormArgs a, const __grid_constant__ View gate, int HV, int T,
               int64_t tokens) {
  const int hv = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  // The gate is older than the kernel before this one: it may be on its way already.
  if (hv < HV && blockIdx.y < tokens) {
    const int64_t token = blockIdx.y, b = T == 1 ? token : token / T, t = token - b * T;
    const GT* const z = static_cast<const GT*>(gate.ptr) + offset_of(gate, b, t, hv);
    for (int c = lane * 128 / static_cast<int>(sizeof(GT)); c < a.V; c += 32 * 128) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(z + c * gate.sd));
    }
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (hv >= HV) return;
  for (int64_t token = blockIdx.y; token < tokens; token += gridDim.y) {
    const int64_t b = T == 1 ? token : token / T, t = token - b * T;
    const int64_t row = (token * HV + hv) * a.V;
    norm_row<XT, GT, PER_LANE, true>(a, static_cast<const XT*>(a.x) + row,
                                     static_cast<const GT*>(gate.ptr) + offset_of(gate, b, t, hv),
                                     static_cast<XT*>(a.y) + row, lane);
  }
}

}  // namespace cuda
}  // namespace gdn
