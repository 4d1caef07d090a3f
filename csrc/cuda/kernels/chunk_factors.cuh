// First kernel of chunked prefill: everything that does not depend on the state, for all chunks at
// once. A block takes one chunk of one key head and walks its value heads: k k^T and q k^T are
// formed once for all of them.
//
// (1 + A)^-1 by blocks of 16 tokens: the diagonal blocks by forward substitution in float32, the
// others by products in 11-bit precision, three bits more than the result is stored in. A warp owns
// a column of blocks and holds it transposed, so that a block just computed is the left operand of
// the next product as it lies in registers.
#pragma once

#include "chunk_plan.cuh"

namespace gdn {
namespace cuda {

constexpr int kTrianglePitch = 72;  // floats; eight rows of float2 in different banks
constexpr int kMaxRatio = 32;       // value heads of a key head

// A decay below exp(-128) is zero in float32; bounding its logarithm keeps every difference of
// totals finite, -inf included.
constexpr float kLeastLogDecay = -128.f;

template <int K>
struct FactorsShared {
  static constexpr int kKeys = 2 * (K / 64) * kPanelBytes;
  // After the products the panels of k and q make room for A and the two results.
  static constexpr int kTriangle = kChunk * kTrianglePitch * 4;
  static constexpr int kWork = kTriangle + 2 * kPanelBytes;
  static constexpr int kReused = kKeys > kWork ? kKeys : kWork;
  static int bytes(int ratio) { return kReused + 4 * kChunk * (2 + 2 * ratio); }
};

// Inclusive sums over 64 values, lane l holding values l and l + 32.
__device__ __forceinline__ void scan64(float& low, float& high, int lane) {
#pragma unroll
  for (int m = 1; m < 32; m <<= 1) {
    const float a = __shfl_up_sync(kFullMask, low, m), b = __shfl_up_sync(kFullMask, high, m);
    if (lane >= m) {
      low += a;
      high += b;
    }
  }
  high += __shfl_sync(kFullMask, low, 31);
}

template <int K>
__global__ void __launch_bounds__(128)
    chunk_factors(const __grid_constant__ ChunkArgs a, const __grid_constant__ ChunkLayout layout) {
  using Shared = FactorsShared<K>;
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const keys = shared;
  unsigned char* const queries = shared + Shared::kKeys / 2;
  float* const A = reinterpret_cast<float*>(shared);
  unsigned char* const inverse = shared + Shared::kTriangle;
  unsigned char* const mixing = inverse + kPanelBytes;
  float* const rk = reinterpret_cast<float*>(shared + Shared::kReused);
  float* const rq = rk + kChunk;
  float* const gates = rq + kChunk;  // [ratio][2][64]: sums of log decays, beta
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int64_t slot = blockIdx.x, hk = blockIdx.y;
  const int ratio = layout.ratio.divisor;

  wait_for_previous_kernel();
  let_next_kernel_start();
  const OwnedChunk own = chunk_of_slot(a, layout, slot);
  if (own.tokens == 0) return;
  copy_rows<K / 8>(shared_address(keys),
                   static_cast<const bf16*>(a.k.ptr) + offset_of(a.k, own.b, own.start, hk), a.k.st,
                   own.tokens);
  copy_rows<K / 8>(shared_address(queries),
                   static_cast<const bf16*>(a.q.ptr) + offset_of(a.q, own.b, own.start, hk), a.q.st,
                   own.tokens);
  commit_copies();

  unsigned char* const out = layout.factors + (slot * a.HV + hk * ratio) * kFactorBytes;
  // Log decays of a value head: sums from the start in `low`, `high`, and to the end for D_n.
  for (int h = warp; h < ratio; h += 4) {
    const int64_t hv = hk * ratio + h;
    float sums[2], after[2], beta[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = lane + 32 * e;
      float x = 0.f;
      beta[e] = 0.f;
      if (i < own.tokens) {
        compute_gates(a.gates, load_gates(a.gates, own.b, own.start + i, hv), &x, &beta[e]);
      }
      sums[e] = x < kLeastLogDecay ? kLeastLogDecay : x;
    }
    // Sums over later tokens: the same scan over the reversed order, each value without its own.
    const float back_low = __shfl_sync(kFullMask, sums[1], 31 - lane);
    const float back_high = __shfl_sync(kFullMask, sums[0], 31 - lane);
    float low = __shfl_up_sync(kFullMask, back_low, 1),
          high = __shfl_up_sync(kFullMask, back_high, 1);
    const float middle = __shfl_sync(kFullMask, back_low, 31);
    if (lane == 0) {
      low = 0.f;
      high = middle;
    }
    scan64(low, high, lane);
    after[0] = __shfl_sync(kFullMask, high, 31 - lane);
    after[1] = __shfl_sync(kFullMask, low, 31 - lane);
    scan64(sums[0], sums[1], lane);
    float* const to = reinterpret_cast<float*>(out + h * kFactorBytes + 2 * kPanelBytes);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = lane + 32 * e;
      gates[h * 2 * kChunk + i] = sums[e];
      gates[h * 2 * kChunk + kChunk + i] = beta[e];
      to[i] = __expf(sums[e]);
      to[kChunk + i] = a.scale * __expf(sums[e]);
      to[2 * kChunk + i] = __expf(after[e]);
    }
    if (lane == 31) to[3 * kChunk] = __expf(sums[1]);
  }
  wait_copies<0>();
  __syncthreads();

  // Inverse norms: a thread for each row of k and of q.
  {
    const int row = threadIdx.x & 63;
    const unsigned char* const from = threadIdx.x < 64 ? keys : queries;
    float sum = 0.f;
    if (a.l2norm) {
#pragma unroll
      for (int p = 0; p < K / 8; p++) {
        float x[8];
        Vec<bf16>::unpack(*reinterpret_cast<const uint4*>(from + (p >> 3) * kPanelBytes +
                                                          panel_offset(row, p & 7)),
                          x);
#pragma unroll
        for (int e = 0; e < 8; e++) sum = __fmaf_rn(x[e], x[e], sum);
      }
    }
    (threadIdx.x < 64 ? rk : rq)[row] = a.l2norm ? rsqrtf(sum + kL2Eps) : 1.f;
  }

  // Rows 16 warp ... of k k^T and q k^T, up to the diagonal.
  float kk[8][4] = {}, qk[8][4] = {};
  {
    const uint32_t left = 16 * warp + (lane & 15), key_base = shared_address(keys);
    const int y = lane >> 4, row = ((lane >> 4) << 3) + (lane & 7), x = (lane >> 3) & 1;
#pragma unroll
    for (int s = 0; s < K / 16; s++) {
      const int panel = (s >> 2) * kPanelBytes, piece = (s & 3) * 2;
      uint32_t ak[4], aq[4];
      load_matrices(ak, key_base + panel + panel_offset(left, piece + y));
      load_matrices(aq, key_base + Shared::kKeys / 2 + panel + panel_offset(left, piece + y));
#pragma unroll
      for (int p = 0; p < 4; p++) {
        if (p > warp) continue;
        uint32_t b[4];
        load_matrices(b, key_base + panel + panel_offset(16 * p + row, piece + x));
        multiply(kk[2 * p], ak, b[0], b[1]);
        multiply(kk[2 * p + 1], ak, b[2], b[3]);
        multiply(qk[2 * p], aq, b[0], b[1]);
        multiply(qk[2 * p + 1], aq, b[2], b[3]);
      }
    }
  }
  __syncthreads();  // the panels of k and q are free; rk and rq are there
#pragma unroll
  for (int p = 0; p < 8; p++) {
    if (p > 2 * warp + 1) continue;
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int i = 16 * warp + g + (e >> 1) * 8, j = 8 * p + 2 * t + (e & 1);
      kk[p][e] *= rk[i] * rk[j];
      qk[p][e] *= a.scale * rq[i] * rk[j];
    }
  }
  if (a.l2norm) {
    for (int i = threadIdx.x; i < ratio * 3 * kChunk; i += 128) {
      const int h = i / (3 * kChunk), x = i - h * 3 * kChunk, token = x & 63;
      reinterpret_cast<float*>(out + h * kFactorBytes + 2 * kPanelBytes)[x] *=
          x >= kChunk && x < 2 * kChunk ? rq[token] : rk[token];
    }
  }

  for (int h = 0; h < ratio; h++) {
    const float* const sums = gates + h * 2 * kChunk;
    const float* const beta = sums + kChunk;
    // A and the mixing panel.
#pragma unroll
    for (int p = 0; p < 8; p++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = 16 * warp + g + half * 8, j = 8 * p + 2 * t;
        float m[2] = {0.f, 0.f};
        if (p <= 2 * warp + 1) {
          float x[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float d = j + e <= i ? __expf(sums[i] - sums[j + e]) : 0.f;
            x[e] = j + e < i ? beta[i] * d * kk[p][half * 2 + e] : 0.f;
            m[e] = d * qk[p][half * 2 + e];
          }
          *reinterpret_cast<float2*>(A + i * kTrianglePitch + j) = make_float2(x[0], x[1]);
        }
        *reinterpret_cast<uint32_t*>(mixing + panel_offset(i, p) + 4 * t) = pack_bf16(m[0], m[1]);
      }
    }
    __syncthreads();
    // The diagonal block of this warp, inverted in place: a lane holds a column.
    {
      float* const block = A + 16 * warp * kTrianglePitch + 16 * warp;
      const int column = lane & 15;
      float x[16];
#pragma unroll
      for (int i = 0; i < 16; i++) {
        x[i] = i == column ? 1.f : 0.f;
#pragma unroll
        for (int k = 0; k < i; k++) x[i] = __fmaf_rn(-block[i * kTrianglePitch + k], x[k], x[i]);
      }
      __syncwarp();
      if (lane < 16) {
#pragma unroll
        for (int i = 0; i < 16; i++) block[i * kTrianglePitch + column] = x[i];
      }
    }
    __syncthreads();
    // Blocks below it, transposed: column j of blocks belongs to warp j.
    float x[4][2][4] = {};  // [block row][half of its 16 rows]
    const int n = g, m = 2 * t;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i == warp) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            x[i][half][e] =
                A[(16 * i + 8 * half + m + (e & 1)) * kTrianglePitch + 16 * i + g + (e >> 1) * 8];
          }
        }
      } else if (i > warp) {
        float sum[2][4] = {};
#pragma unroll
        for (int k = 0; k < i; k++) {
          if (k < warp) continue;
#pragma unroll
          for (int s = 0; s < 2; s++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
              multiply_tf32(sum[half], x[k][s],
                            *reinterpret_cast<const float2*>(
                                A + (16 * i + 8 * half + n) * kTrianglePitch + 16 * k + 8 * s + m));
            }
          }
        }
#pragma unroll
        for (int s = 0; s < 2; s++) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float2 b = *reinterpret_cast<const float2*>(
                A + (16 * i + 8 * half + n) * kTrianglePitch + 16 * i + 8 * s + m);
            b.x = -b.x;
            b.y = -b.y;
            multiply_tf32(x[i][half], sum[s], b);
          }
        }
      }
    }
    {
      const int j = 16 * warp + g;
      const float b0 = beta[j], b1 = beta[j + 8];
#pragma unroll
      for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int piece = 2 * i + half;
          *reinterpret_cast<uint32_t*>(inverse + panel_offset(j, piece) + 4 * t) =
              pack_bf16(b0 * x[i][half][0], b0 * x[i][half][1]);
          *reinterpret_cast<uint32_t*>(inverse + panel_offset(j + 8, piece) + 4 * t) =
              pack_bf16(b1 * x[i][half][2], b1 * x[i][half][3]);
        }
      }
    }
    __syncthreads();
    uint4* const to = reinterpret_cast<uint4*>(out + h * kFactorBytes);
#pragma unroll
    for (int i = 0; i < 2 * kPanelBytes / 16 / 128; i++) {
      const int p = threadIdx.x + 128 * i;
      to[p] = reinterpret_cast<const uint4*>(inverse)[p];
    }
    __syncthreads();
  }
}

}  // namespace cuda
}  // namespace gdn
