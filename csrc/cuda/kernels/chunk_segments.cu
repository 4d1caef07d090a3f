// Chunked prefill of sequences that are cut into segments: the state before each segment, from what
// the scans without outputs made of it, S_next = S step + N. A block takes 16 rows of V of a value
// head, which need no others; each of its warps forms some columns of the product, in float32 as
// sums of products of two tf32 parts.
#include "chunk_plan.cuh"
#include "kernels.h"
#include "launch.h"
#include "select.h"

namespace gdn {
namespace cuda {
namespace {

// A warp that copies waits for its copies to be taken, so others do that.
constexpr int kJoinWarps = 8, kJoinHelpers = 4, kJoinRows = 16;
constexpr int kJoinThreads = (kJoinWarps + kJoinHelpers) * 32;

// What a step takes: its matrix [K][K], and what it adds, kJoinRows rows, where its result goes
// too.
template <int K>
struct JoinShared {
  static constexpr int kPitch = K + 4, kRowsPitch = K + 8;  // no two lanes meet in a bank
  static constexpr int kRows = K * kPitch * 4;
  static constexpr int kStage = kRows + kJoinRows * kRowsPitch * 4;
};

template <int K, int STAGES>
__global__ void __launch_bounds__(kJoinThreads)
    join_rows(const __grid_constant__ ChunkArgs a, const __grid_constant__ ChunkLayout layout) {
  using Shared = JoinShared<K>;
  constexpr int TILES = K / 8, OWN = TILES / kJoinWarps;  // columns of 8: all, of a warp
  constexpr int PIECES = K / 4, AHEAD = STAGES - 1;
  extern __shared__ __align__(16) unsigned char shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int slices = static_cast<int>(a.V) / kJoinRows;
  const int hv = blockIdx.x / slices, v0 = (blockIdx.x - hv * slices) * kJoinRows;
  let_next_kernel_start();  // its blocks come when all of these have started
  const Stretch own = stretch_of(a, layout, layout.first + blockIdx.y);
  if (own.empty || own.seq.row < 0) return leave();
  wait_for_previous_kernel();
  const auto state = [&](int segment) {
    return own.state(layout.starts, a, layout, hv, segment, a.V) + v0 * K;
  };
  const auto load_pairs = [&](float (&x)[4], const float* from, int pitch) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float2 y = *reinterpret_cast<const float2*>(from + (g + 8 * half) * pitch + 2 * t);
      x[2 * half] = y.x;
      x[2 * half + 1] = y.y;
    }
  };
  const int last = own.segments - 2;  // of the steps from 1 on
  const auto ask = [&](int segment) {
    if (segment <= last) {
      const uint32_t to = shared_address(shared) + segment % STAGES * Shared::kStage;
      const float* const step = own.state(layout.steps, a, layout, hv, segment, K);
      const float* const rows = state(segment + 1);
      const int helper = threadIdx.x - kJoinWarps * 32;
      for (int i = helper; i < K * PIECES; i += kJoinHelpers * 32) {
        copy_async(to + (i / PIECES * Shared::kPitch + i % PIECES * 4) * 4, step + 4 * i);
      }
      for (int i = helper; i < kJoinRows * PIECES; i += kJoinHelpers * 32) {
        copy_async(to + Shared::kRows + (i / PIECES * Shared::kRowsPitch + i % PIECES * 4) * 4,
                   rows + 4 * i);
      }
    }
    commit_copies();
  };
  if (warp >= kJoinWarps) {
#pragma unroll
    for (int segment = 1; segment <= AHEAD; segment++) ask(segment);
    for (int segment = 1; segment <= last; segment++) {
      if (STAGES == 1) {
        __syncthreads();
        ask(segment);
      }
      wait_copies<(STAGES > 1 ? STAGES - 2 : 0)>();
      __syncthreads();
      if (STAGES > 1) ask(segment + AHEAD);
      __syncthreads();
    }
    return;
  }
  float S[TILES][4];
#pragma unroll
  for (int p = 0; p < TILES; p++) load_pairs(S[p], state(1) + 8 * p, K);
  uint32_t dropped = 0;
  for (int segment = 1; segment <= last; segment++) {
    dropped |= own.dropped(a, layout, hv, segment) << segment;
  }
  for (int segment = 1; segment <= last; segment++) {
    if (STAGES == 1) __syncthreads();
    __syncthreads();
    unsigned char* const stage = shared + segment % STAGES * Shared::kStage;
    float* const rows = reinterpret_cast<float*>(stage + Shared::kRows) + 8 * OWN * warp;
    float c[OWN][4];
#pragma unroll
    for (int i = 0; i < OWN; i++) load_pairs(c[i], rows + 8 * i, Shared::kRowsPitch);
    // A decay of zero drops what came before, whatever that is.
    if (!(dropped >> segment & 1)) {
      const float* const step =
          reinterpret_cast<const float*>(stage) + 2 * t * Shared::kPitch + 8 * OWN * warp + g;
      // Sums in tensor cores are cut off, not rounded, so they are short; and one product waits for
      // the one before it in the same sum, so others stand between.
      constexpr int AT_ONCE = 4;
#pragma unroll
      for (int first = 0; first < TILES; first += AT_ONCE) {
        float left[AT_ONCE][2][4], sums[AT_ONCE][OWN][4] = {};
        float2 right[AT_ONCE][OWN][2];  // of two parts each
#pragma unroll
        for (int p = 0; p < AT_ONCE; p++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {  // columns 2t, 2t + 1 as t, t + 4
            const float x = S[first + p][(e & 1) << 1 | e >> 1];
            left[p][0][e] = round_tf32(x);
            left[p][1][e] = x - left[p][0][e];
          }
#pragma unroll
          for (int i = 0; i < OWN; i++) {
            const float* const from = step + 8 * (first + p) * Shared::kPitch + 8 * i;
            const float2 x = make_float2(from[0], from[Shared::kPitch]);
            right[p][i][0] = make_float2(round_tf32(x.x), round_tf32(x.y));
            right[p][i][1] = make_float2(x.x - right[p][i][0].x, x.y - right[p][i][0].y);
          }
        }
#pragma unroll
        for (int product = 2; product >= 0; product--) {  // rest with whole, whole with rest, whole
#pragma unroll
          for (int p = 0; p < AT_ONCE; p++) {
#pragma unroll
            for (int i = 0; i < OWN; i++) {
              const float2 y = right[p][i][product == 1];
              mma_16x8x8(sums[p][i], left[p][product == 2], y.x, y.y);
            }
          }
        }
#pragma unroll
        for (int p = 0; p < AT_ONCE; p++) {
#pragma unroll
          for (int i = 0; i < OWN; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) c[i][e] += sums[p][i][e];
          }
        }
      }
    }
    float* const to = state(segment + 1) + 8 * OWN * warp + 2 * t;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = g + 8 * half;
        const float2 x = make_float2(c[i][2 * half], c[i][2 * half + 1]);
        *reinterpret_cast<float2*>(to + row * K + 8 * i) = x;
        *reinterpret_cast<float2*>(rows + row * Shared::kRowsPitch + 8 * i + 2 * t) = x;
      }
    }
    __syncthreads();
    const float* const all = reinterpret_cast<const float*>(stage + Shared::kRows);
#pragma unroll
    for (int p = 0; p < TILES; p++) load_pairs(S[p], all + 8 * p, Shared::kRowsPitch);
  }
}

template <int K, int STAGES>
cudaError_t launch_join(const ChunkArgs& a, ChunkLayout x, cudaStream_t stream) {
  const auto kernel = join_rows<K, STAGES>;
  constexpr int kShared = STAGES * JoinShared<K>::kStage;
  const unsigned blocks = static_cast<unsigned>(a.HV * (a.V / kJoinRows));
  x.count_segments = 1;
  cudaError_t error = allow_shared(kernel, kShared);
  for (; error == cudaSuccess && x.first < x.places; x.first += kMaxGridY) {
    const int64_t count = x.places - x.first < kMaxGridY ? x.places - x.first : kMaxGridY;
    error = launch(kernel, dim3(blocks, static_cast<unsigned>(count)), dim3(kJoinThreads), kShared,
                   stream, a, x);
  }
  return error;
}
template <int K>
cudaError_t join(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream) {
  return 3 * JoinShared<K>::kStage <= shared_limit() ? launch_join<K, 3>(a, x, stream)
                                                     : launch_join<K, 1>(a, x, stream);
}

}  // namespace

cudaError_t join_segments(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream) {
  return a.K == 64 ? join<64>(a, x, stream) : join<128>(a, x, stream);
}

}  // namespace cuda
}  // namespace gdn
