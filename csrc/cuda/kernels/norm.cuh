// weight * rmsnorm(x) * silu(gate), one warp a row.
#pragma once

#include "mma.cuh"

namespace gdn {
namespace cuda {

// rms over V elements; rounds where the model rounds: the normalised value to x's dtype, and its
// product with the weight where the weight has that dtype too.
__device__ __forceinline__ float gated_norm(float x, float sum_sq, int V, float eps, float weight,
                                            DType weight_dtype, float z, DType d) {
  float y = round_as(d, x * rsqrtf(sum_sq / V + eps)) * weight;
  if (weight_dtype == d) y = round_as(d, y);
  return y * (d == DType::f32 ? silu(z) : silu16(z));
}

// PER_LANE > 0: a row is 32 * PER_LANE elements, contiguous and aligned to four of them; else those
// of the gate are `step` apart.
// QUIET: a row of zeros gives zeros whatever the gate holds (padding rows of the fused decode).
template <class XT, class GT, int PER_LANE, bool QUIET>
__device__ __forceinline__ void norm_row(const NormArgs& a, const XT* px, const GT* pg,
                                         int64_t step, XT* py, int lane) {
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
      store_floats<XT, 4>(py + c, y);
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
                                 a.weight.dtype, to_float(pg[c * step]), a.dtype);
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
    int64_t token = row, head = 0;
    if (a.heads > 1) {
      token = row / a.heads;
      head = row - token * a.heads;
    }
    norm_row<XT, GT, PER_LANE, false>(
        a, static_cast<const XT*>(a.x) + token * a.s_x + head * a.s_x_head,
        static_cast<const GT*>(a.gate) + token * a.s_gate + head * a.s_gate_head, 1,
        static_cast<XT*>(a.y) + row * a.V, threadIdx.x & 31);
  }
}

// The heads of a token: x and y are contiguous [tokens, HV, V], the gate is a view of the packed
// projection. blockIdx = (four heads, token).
template <class T>
__global__ void __launch_bounds__(128)
    norm_heads(const __grid_constant__ NormArgs a, const __grid_constant__ View gate, int HV,
               int steps, int64_t tokens) {
  const int hv = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (hv >= HV) return;
  for (int64_t token = blockIdx.y; token < tokens; token += gridDim.y) {
    const int64_t b = steps == 1 ? token : token / steps, t = token - b * steps;
    const int64_t row = (token * HV + hv) * a.V;
    norm_row<T, T, 0, true>(a, static_cast<const T*>(a.x) + row,
                            static_cast<const T*>(gate.ptr) + offset_of(gate, b, t, hv), gate.sd,
                            static_cast<T*>(a.y) + row, lane);
  }
}

// The same for V = 128 and at most kMaxGridY tokens, half a warp a head and blockIdx = (eight
// heads, token): all of a step runs at once then, and only x is read after the wait. Gate and
// weight are older than the kernel before this one, which waited for those before it.
template <class T>
__global__ void __launch_bounds__(128, sizeof(T) == 2 ? 12 : 8)
    norm_heads_128(const __grid_constant__ NormArgs a, const __grid_constant__ View gate, int HV,
                   int steps) {
  constexpr int W = RawVec<T, 8>::W, PER = 8 / W;  // words of a lane, elements of a word
  const unsigned hv = blockIdx.x * 8 + (threadIdx.x >> 4), c = (threadIdx.x & 15) * 8;
  const unsigned token = blockIdx.y, b = token / static_cast<unsigned>(steps);
  const bool live = hv < static_cast<unsigned>(HV);
  uint32_t raw_w[8];
#pragma unroll
  for (int e = 0; e < 8; e++) {
    raw_w[e] = load_bits(a.weight.ptr, a.weight.dtype, (c + e) * a.weight.s0);
  }
  RawVec<T, 8> x = {}, z = {};
  if (live) {
    z = load_raw<T, 8>(static_cast<const T*>(gate.ptr) +
                       offset_of(gate, b, token - b * static_cast<unsigned>(steps), hv) + c);
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t at = (int64_t{token} * HV + hv) * 128 + c;
  if (live) x = load_raw<T, 8>(static_cast<const T*>(a.x) + at);
  float f[8], sum = 0.f;
  raw_to_float<T, 8>(x, f);
#pragma unroll
  for (int e = 0; e < 8; e++) sum = __fmaf_rn(f[e], f[e], sum);
  sum = lane_sum<16>(sum);
#pragma unroll
  for (int i = 0; i < W; i++) {
    RawVec<T, 8> one = {};
    float y[8], gates[8];
    one.w[0] = x.w[i];
    raw_to_float<T, 8>(one, y);
    one.w[0] = z.w[i];
    raw_to_float<T, 8>(one, gates);
#pragma unroll
    for (int e = 0; e < PER; e++) {
      y[e] = gated_norm(y[e], sum, 128, a.eps, bits_to_float(raw_w[i * PER + e], a.weight.dtype),
                        a.weight.dtype, gates[e], TypeOf<T>::value);
      if (sum == 0.f) y[e] = 0.f;  // padding rows are zeros whatever the gate holds
    }
    if constexpr (PER == 2) {
      x.w[i] = pack_pair<T>(y[0], y[1]);
    } else {
      x.w[i] = __float_as_uint(y[0]);
    }
  }
  if (!live) return;
#pragma unroll
  for (int i = 0; i < W; i += 4) {
    *reinterpret_cast<uint4*>(static_cast<T*>(a.y) + at + i * PER) =
        make_uint4(x.w[i], x.w[i + 1], x.w[i + 2], x.w[i + 3]);
  }
}

}  // namespace cuda
}  // namespace gdn
