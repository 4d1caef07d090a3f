// Gradients of chunked prefill on tensor cores. With the factors of the forward
// kernels, the rows of X and U those of tokens, and dZ the gradient of Z:
//   X = v - w rk (S k)                      dU = M^T dO + D_n rk (dS k)
//   U = (1 + A)^-1 (beta X)                 dY = (1 + A)^-T dU          Y = beta X
//   O = scale w rq (S q) + M U              dv = beta dY
//   S' = w_n S + (D_n rk U) k^T             dS <- w_n dS + dO (scale w rq q)^T - dY (beta w rk k)^T
// chunk_factors as in the forward pass, then
//   chunk_states     first chunk to last: keeps S before each chunk, and U
//   chunk_reverse    last chunk to first: keeps dS after each chunk, and dY
//   chunk_gradients  all chunks at once: everything else
// What is kept is rounded to the dtype of the inputs or, of float32, to two float16 parts; sums and
// the states that the scans carry are float32. As in chunk_scan a warp of a scan owns 16 rows of V
// and needs no other.
#pragma once

#include "chunk_factors.cuh"
#include "kernels.h"

namespace gdn {
namespace cuda {

// Everything kept lies as panels, the parts of a whole behind one another, so that whole blocks of
// memory are copied.
struct BackwardLayout {
  ChunkLayout forward;
  // [slots][HV][V / 64][K / 64] panels: rows of V, columns of K
  unsigned char* states = nullptr;
  unsigned char* state_gradients = nullptr;
  // [slots][HV][V / 64] panels: rows of tokens, columns of V
  unsigned char* updates = nullptr;
  unsigned char* target_gradients = nullptr;  // dY
  // float16 parts: [slots][HV][V / 64][4]: what each of the four above is to be multiplied by
  float* scales = nullptr;
};

// For inputs of type IN; instantiated in files of their own (chunk_backward_launch.cuh).
template <class IN, int K>
cudaError_t chunk_backward_products(const ChunkBackwardArgs& a, const BackwardLayout& x,
                                    cudaStream_t stream);

template <int BYTES, int THREADS>
__device__ __forceinline__ void copy_block(uint32_t to, const void* from, int thread) {
  static_assert(BYTES % 16 == 0, "whole pieces");
#pragma unroll
  for (int i = 0; i < (BYTES + 16 * THREADS - 1) / (16 * THREADS); i++) {
    const int p = (thread + THREADS * i) * 16;
    if (p < BYTES) copy_async(to + p, static_cast<const unsigned char*>(from) + p);
  }
}

template <int K>
__host__ __device__ constexpr int state_bytes() {  // of a part
  return (K / 64) * kPanelBytes;
}

// Which rows of V of which value head of which sequence a block of a scan owns.
struct ScanPlace {
  int hv, hk, slice, slices, chunks;
  int64_t n, b, start, length, slot;
  __device__ __forceinline__ ScanPlace(const ChunkArgs& a, const ChunkLayout& x) {
    slices = static_cast<int>(a.V) / kScanRows;
    hv = blockIdx.x / slices;
    slice = blockIdx.x - hv * slices;
    hk = x.ratio(hv);
    n = x.first + blockIdx.y;
    const Sequence seq = device_sequence(a.seqs, n);
    b = seq.b;
    start = seq.start;
    length = seq.end > seq.start ? seq.end - seq.start : 0;
    chunks = static_cast<int>((length + kChunk - 1) / kChunk);
    slot = first_slot(a, x, n, seq.start);
  }
  __device__ __forceinline__ int tokens(int c) const {
    const int64_t left = length - static_cast<int64_t>(c) * kChunk;
    return left < kChunk ? static_cast<int>(left) : kChunk;
  }
  // Of what is kept for chunk c: head, and slice of a head.
  __device__ __forceinline__ int64_t head(const ChunkArgs& a, int c) const {
    return (slot + c) * a.HV + hv;
  }
  __device__ __forceinline__ int64_t part(const ChunkArgs& a, int c) const {
    return head(a, c) * slices + slice;
  }
};

// 16 rows of V of a state in accumulators, from and to [N, HV, V, K] float32.
template <int K, class Access>
__device__ __forceinline__ void each_pair(float (&s)[K / 8][4], int lane, Access&& access) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int p = 0; p < K / 8; p++) {
    access((g * K) + 8 * p + 2 * t, s[p][0], s[p][1]);
    access((g + 8) * K + 8 * p + 2 * t, s[p][2], s[p][3]);
  }
}
template <int K>
__device__ __forceinline__ void read_state(float (&s)[K / 8][4], const float* from, int lane) {
  each_pair<K>(s, lane, [&](int at, float& x, float& y) {
    const float2 z = *reinterpret_cast<const float2*>(from + at);
    x = z.x;
    y = z.y;
  });
}
template <int K>
__device__ __forceinline__ void write_state(float (&s)[K / 8][4], float* to, int lane) {
  each_pair<K>(s, lane, [&](int at, float& x, float& y) {
    *reinterpret_cast<float2*>(to + at) = make_float2(x, y);
  });
}

// A packed state out, through its warp's rows of shared panels.
template <int K, int PARTS>
__device__ __forceinline__ void keep_state(const uint32_t (&left)[K / 16][PARTS][4],
                                           unsigned char* panels, unsigned char* to, int warp,
                                           int lane) {
  const int g = lane >> 2, t = lane & 3;
  __syncwarp();
#pragma unroll
  for (int s = 0; s < K / 16; s++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int p = 2 * s + (i >> 1), row = 16 * warp + g + 8 * (i & 1);
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        *reinterpret_cast<uint32_t*>(panels + part * state_bytes<K>() + (p >> 3) * kPanelBytes +
                                     panel_offset(row, p & 7) + 4 * t) = left[s][part][i];
      }
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < PARTS * K / 16; i++) {
    const int at = (i >> 2) * kPanelBytes + warp * 2048 + (i & 3) * 512 + lane * 16;
    *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(panels + at);
  }
}
// The transpose of 16 rows of V of all tokens, through its warp's columns of shared panels.
template <class IN>
__device__ __forceinline__ void keep_rows(const float (&x)[8][4], float by, unsigned char* panels,
                                          unsigned char* to, int warp, int lane) {
  using Form = Format<IN>;
  using T = typename Form::T;
  constexpr int PARTS = Form::kParts;
  __syncwarp();
#pragma unroll
  for (int p = 0; p < 8; p += 2) {
    uint32_t r[PARTS][4];
#pragma unroll
    for (int m = 0; m < 4; m++) {
      const float (&from)[4] = x[p + (m >> 1)];
      const float times = Form::kScaled ? by : 1.f;
      uint32_t y[PARTS];
      pack_parts<T>(y, times * from[2 * (m & 1)], times * from[2 * (m & 1) + 1]);
#pragma unroll
      for (int part = 0; part < PARTS; part++) r[part][m] = y[part];
    }
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      store_transposed(r[part], lane, [&](int l) {
        return panels + part * kPanelBytes +
               panel_offset(8 * (p + (l >> 4)) + (l & 7), 2 * warp + ((l >> 3) & 1));
      });
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4 * PARTS; i++) {
    const int at =
        (i >> 2) * kPanelBytes + panel_offset(16 * (i & 3) + (lane >> 1), 2 * warp + (lane & 1));
    *reinterpret_cast<uint4*>(to + at) = *reinterpret_cast<const uint4*>(panels + at);
  }
}
// Left operand: 16 rows of V, tokens 16 s ..., of a panel of tokens.
__device__ __forceinline__ void load_across(uint32_t (&r)[4], uint32_t panel, int s, int warp,
                                            int lane) {
  const int row = 16 * s + ((lane >> 4) << 3) + (lane & 7);
  load_transposed(r, panel + panel_offset(row, 2 * warp + ((lane >> 3) & 1)));
}
// x *= factor of its column (a token).
__device__ __forceinline__ void scale_columns(float (&x)[8][4], const float* factor, int t) {
#pragma unroll
  for (int p = 0; p < 8; p++) {
    const float2 f = *reinterpret_cast<const float2*>(factor + 8 * p + 2 * t);
#pragma unroll
    for (int e = 0; e < 4; e++) x[p][e] *= e & 1 ? f.y : f.x;
  }
}
template <int N>
__device__ __forceinline__ void scale_all(float (&x)[N][4], float by) {
#pragma unroll
  for (int p = 0; p < N; p++) {
#pragma unroll
    for (int e = 0; e < 4; e++) x[p][e] *= by;
  }
}
template <int N>
__device__ __forceinline__ void decay_all(float (&x)[N][4], float by) {
  if (by == 0.f) {  // infinities go too
    clear(x);
  } else {
    scale_all(x, by);
  }
}
// c (16 x 64) = or += left (16 x 16 N) times the rows of panels, as many for each part; left
// running.
template <class T, bool ADD, int N, int PARTS>
__device__ __forceinline__ void times_rows(float (&c)[8][4], const uint32_t (&left)[N][PARTS][4],
                                           uint32_t base, uint32_t panels,
                                           const RightLanes& lanes) {
  constexpr int STEP = N / 4 * kPanelBytes;
  multiply_rows<T, ADD>(c, left[0], base, panels, STEP, 0, 0, lanes);
#pragma unroll
  for (int s = 1; s < N; s++) {
    multiply_rows<T>(c, left[s], base, panels + (s >> 2) * kPanelBytes, STEP, s & 3, 0, lanes);
  }
}

// float16 factors are multiplied by a power of two that brings the largest one near 16: of the rows
// of a warp where nobody else reads them, of the block where they are kept.
template <int N>
__device__ __forceinline__ float most_of(const float (&c)[N][4]) {
  float most = 0.f;
#pragma unroll
  for (int p = 0; p < N; p++) {
#pragma unroll
    for (int e = 0; e < 4; e++) most = fmaxf(most, fabsf(c[p][e]));
  }
  return most;
}
__device__ __forceinline__ PowerOfTwo warp_scale(float most) {
#pragma unroll
  for (int m = 16; m; m >>= 1) most = fmaxf(most, __shfl_xor_sync(kFullMask, most, m));
  return PowerOfTwo(most, 4);
}
// The largest of a warp, for `block_scale` behind the next barrier.
__device__ __forceinline__ void note_most(float* most_of_warps, float most, int warp, int lane) {
#pragma unroll
  for (int m = 16; m; m >>= 1) most = fmaxf(most, __shfl_xor_sync(kFullMask, most, m));
  if (lane == 0) most_of_warps[warp] = most;
}
template <int WARPS>
__device__ __forceinline__ PowerOfTwo block_scale(const float* most_of_warps) {
  float most = most_of_warps[0];
#pragma unroll
  for (int w = 1; w < WARPS; w++) most = fmaxf(most, most_of_warps[w]);
  return PowerOfTwo(most, 4);
}
// Left operands of x times `by`.
template <class T, int N, int PARTS>
__device__ __forceinline__ void pack_scaled(uint32_t (&left)[N / 2][PARTS][4],
                                            const float (&x)[N][4], float by) {
#pragma unroll
  for (int s = 0; s < N / 2; s++) {
    if constexpr (TypeOf<T>::value == DType::bf16) {
      pack_left<T>(left[s], x[2 * s], x[2 * s + 1]);
    } else {
      const float (&a)[4] = x[2 * s], (&b)[4] = x[2 * s + 1];
      const float y[4] = {a[0] * by, a[1] * by, a[2] * by, a[3] * by};
      const float z[4] = {b[0] * by, b[1] * by, b[2] * by, b[3] * by};
      pack_left<T>(left[s], y, z);
    }
  }
}

// 1 / x for a power of two.
__device__ __forceinline__ float inverse_power(float x) {
  return __uint_as_float(0x7f000000u - __float_as_uint(x));
}

constexpr int kBetaBytes = kChunk * 4;

template <class IN, int K>
struct StatesShared {
  static constexpr int kParts = Format<IN>::kParts, kState = kParts * state_bytes<K>();
  static constexpr int kRows = kParts * kPanelBytes;
  static constexpr int kInverse = kState, kValues = kInverse + kRows;
  static constexpr int kVectors = kValues + kRows, kBeta = kVectors + 1024;
  static constexpr int kStage = kBeta + 1024;  // panels start at multiples of 1024
  template <int STAGES>
  static constexpr int kBytes = STAGES * kStage + kState + 32;  // and the largest values
};

// Keys of a chunk, rows of 16-bit elements or the parts that chunk_factors left.
template <class IN, int K>
__device__ __forceinline__ void copy_keys(uint32_t to, const IN* from, int64_t stride, int tokens,
                                          const unsigned char* parts, int thread) {
  if constexpr (Format<IN>::kParts == 1) {
    copy_rows<K / 8>(to, from, stride, tokens, thread);
  } else {
    copy_block<Format<IN>::kParts * state_bytes<K>(), 128>(to, parts, thread);
  }
}

template <class IN, int K, int STAGES>
__global__ void __launch_bounds__(128, Format<IN>::kParts == 1 ? 2 : 1)
    chunk_states(const __grid_constant__ ChunkBackwardArgs args,
                 const __grid_constant__ BackwardLayout x) {
  using Form = Format<IN>;
  using Shared = StatesShared<IN, K>;
  using T = typename Form::T;
  constexpr bool SCALED = Form::kScaled;
  constexpr int PARTS = Form::kParts;
  extern __shared__ __align__(1024) unsigned char shared[];
  const ChunkArgs& a = args.forward;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, t = lane & 3;
  const uint32_t base = shared_address(shared);
  unsigned char* const panels = shared + STAGES * Shared::kStage;
  wait_for_previous_kernel();
  let_next_kernel_start();  // chunk_reverse, which reads nothing of what this one writes
  const ScanPlace own(a, x.forward);
  const int v0 = own.slice * kScanRows;
  const IN* const k = static_cast<const IN*>(a.k.ptr) + offset_of(a.k, own.b, own.start, own.hk);
  const IN* const v =
      static_cast<const IN*>(a.v.ptr) + offset_of(a.v, own.b, own.start, own.hv) + v0;
  const auto ask = [&](int c) {
    const uint32_t stage = base + (c % STAGES) * Shared::kStage;
    const int64_t done = static_cast<int64_t>(c) * kChunk, head = own.head(a, c);
    const unsigned char* const factors = x.forward.factors + head * Form::kBytes;
    copy_keys<IN, K>(stage, k + done * a.k.st, a.k.st, own.tokens(c),
                     x.forward.keys + ((own.slot + c) * a.H + own.hk) * 2 * Shared::kState, thread);
    copy_values(stage + Shared::kValues, v + done * a.v.st, a.v.st, own.tokens(c), thread);
    copy_block<Shared::kRows, 128>(stage + Shared::kInverse, factors, thread);
    copy_block<Form::kFloats * 4, 128>(stage + Shared::kVectors, factors + Form::kVectors, thread);
    copy_block<kBetaBytes, 128>(stage + Shared::kBeta, x.forward.beta + head * kChunk, thread);
  };
#pragma unroll
  for (int c = 0; c < STAGES - 1; c++) {
    if (c < own.chunks) ask(c);
    commit_copies();
  }
  const RightLanes lanes(lane);
  float S[K / 8][4];
  clear(S);
  if (a.read.ptr) {
    const int64_t row = (own.n * a.HV + own.hv) * a.V + v0 + 16 * warp;
    read_state<K>(S, static_cast<const float*>(a.read.ptr) + row * K, lane);
  }
  float* const most_of_states =
      reinterpret_cast<float*>(shared + STAGES * Shared::kStage + Shared::kState);
  float* const most_of_rows = most_of_states + 4;
  if (SCALED) note_most(most_of_states, most_of(S), warp, lane);
  for (int c = 0; c < own.chunks; c++) {
    wait_copies<STAGES - 2>();
    publish_shared();
    __syncthreads();
    if (c + STAGES - 1 < own.chunks) ask(c + STAGES - 1);
    commit_copies();
    const uint32_t stage = base + (c % STAGES) * Shared::kStage;
    unsigned char* const memory = shared + (c % STAGES) * Shared::kStage;
    const float* const vectors = reinterpret_cast<const float*>(memory + Shared::kVectors);
    const float* const beta = reinterpret_cast<const float*>(memory + Shared::kBeta);
    const float w_last = vectors[Form::kLast];

    float* const scales = x.scales + own.part(a, c) * 4;
    PowerOfTwo s_scale, x_scale;
    if constexpr (SCALED) {
      s_scale = block_scale<4>(most_of_states);
      if (thread == 0) scales[0] = s_scale.back;
    }
    float X[8][4];
    uint32_t left[K / 16][PARTS][4];
    pack_scaled<T>(left, S, s_scale.by);
    settle(left);
    open_products();
    times_rows<T, false>(X, left, stage, 0, lanes);
    close_products();
    keep_state<K>(left, panels, x.states + own.part(a, c) * Shared::kState, warp, lane);
    await_products<0>(X);
    uint32_t y[4][PARTS][4];
#pragma unroll
    for (int s = 0; s < 4; s++) {
      float values[2][2][2];
      load_values<IN>(values, memory + Shared::kValues, s, warp, lane);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int at = 16 * s + 8 * half + 2 * t;
        const float2 b = *reinterpret_cast<const float2*>(beta + at);
        const float2 w = *reinterpret_cast<const float2*>(vectors + at);
        float (&z)[4] = X[2 * s + half];
#pragma unroll
        for (int row = 0; row < 2; row++) {
          const float (&value)[2] = values[half][row];
          if constexpr (SCALED) {
            z[2 * row] *= s_scale.back;
            z[2 * row + 1] *= s_scale.back;
          }
          // Where nothing of the old state is left, infinities are not either.
          z[2 * row] = b.x * (value[0] - (w.x == 0.f ? 0.f : w.x * z[2 * row]));
          z[2 * row + 1] = b.y * (value[1] - (w.y == 0.f ? 0.f : w.y * z[2 * row + 1]));
        }
      }
    }
    if constexpr (SCALED) x_scale = warp_scale(most_of(X));
    pack_scaled<T>(y, X, x_scale.by);
    float U[8][4];
    settle(y);
    open_products();
    multiply_columns<T, false>(U, y[0], stage, Shared::kInverse, kPanelBytes, 0, 0, lanes);
#pragma unroll
    for (int s = 1; s < 4; s++) {
      multiply_columns<T>(U, y[s], stage, Shared::kInverse, kPanelBytes, s, s, lanes);
    }
    close_products();
    decay_all(S, w_last);
    await_products<0>(U);
    PowerOfTwo u_scale, next_scale;
    if constexpr (SCALED) {
      scale_all(U, x_scale.back * (1.f / Form::kInverseScale));
      note_most(most_of_rows, most_of(U), warp, lane);
      __syncthreads();
      u_scale = block_scale<4>(most_of_rows);
      if (thread == 0) scales[2] = u_scale.back;
    }
    keep_rows<IN>(U, u_scale.by, memory + Shared::kValues,
                  x.updates + own.part(a, c) * Shared::kRows, warp, lane);
    scale_columns(U, vectors + 2 * kChunk, t);
    if constexpr (SCALED) {
      next_scale = warp_scale(fmaxf(most_of(S), most_of(U)));
      scale_all(S, next_scale.by);
    }
    pack_scaled<T>(y, U, next_scale.by);
    settle(S);
    settle(y);
    open_products();
#pragma unroll
    for (int s = 0; s < 4; s++)
      multiply_columns<T>(S, y[s], stage, 0, state_bytes<K>(), s, 0, lanes);
    close_products();
    await_products<0>(S);
    if constexpr (SCALED) {
      scale_all(S, next_scale.back);
      note_most(most_of_states, most_of(S), warp, lane);
    }
  }
}

template <class IN, int K>
struct ReverseShared {
  static constexpr int kParts = Format<IN>::kParts, kState = kParts * state_bytes<K>();
  static constexpr int kRows = kParts * kPanelBytes;
  static constexpr int kQueries = kState, kOutputs = 2 * kState;
  // As chunk_factors leaves them: inverse, mixing, vectors.
  static constexpr int kInverse = kOutputs + kRows, kMixing = kInverse + kRows;
  static constexpr int kVectors = kMixing + kRows, kBeta = kVectors + 1024;
  static constexpr int kStage = kBeta + 1024;
  // Behind the stages the state on its way out, dY (of two parts; else over dO), largest values.
  template <int STAGES>
  static constexpr int kTargets = STAGES * kStage + kState;
  template <int STAGES>
  static constexpr int kMost = kTargets<STAGES> + (kParts == 2 ? kRows : 0);
  template <int STAGES>
  static constexpr int kBytes = kMost<STAGES> + 32;
};

template <class IN, int K, int STAGES>
__global__ void __launch_bounds__(128, STAGES > 1 || Format<IN>::kParts == 2 ? 1 : 2)
    chunk_reverse(const __grid_constant__ ChunkBackwardArgs args,
                  const __grid_constant__ BackwardLayout x) {
  using Form = Format<IN>;
  using Shared = ReverseShared<IN, K>;
  using T = typename Form::T;
  constexpr bool SCALED = Form::kScaled;
  constexpr int PARTS = Form::kParts;
  extern __shared__ __align__(1024) unsigned char shared[];
  const ChunkArgs& a = args.forward;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, t = lane & 3;
  const uint32_t base = shared_address(shared);
  unsigned char* const panels = shared + STAGES * Shared::kStage;
  // It starts beside chunk_states: that kernel lets it in once the factors are there. So it waits
  // at its end only, for the kernel after it.
  const ScanPlace own(a, x.forward);
  const int v0 = own.slice * kScanRows;
  const IN* const k = static_cast<const IN*>(a.k.ptr) + offset_of(a.k, own.b, own.start, own.hk);
  const IN* const q = static_cast<const IN*>(a.q.ptr) + offset_of(a.q, own.b, own.start, own.hk);
  const View& grad_o = args.grad_out;
  const IN* const d =
      static_cast<const IN*>(grad_o.ptr) + offset_of(grad_o, own.b, own.start, own.hv) + v0;
  const auto ask = [&](int c) {
    const uint32_t stage = base + (c % STAGES) * Shared::kStage;
    const int64_t done = static_cast<int64_t>(c) * kChunk, head = own.head(a, c);
    const unsigned char* const parts =
        x.forward.keys + ((own.slot + c) * a.H + own.hk) * 2 * Shared::kState;
    copy_keys<IN, K>(stage, k + done * a.k.st, a.k.st, own.tokens(c), parts, thread);
    copy_keys<IN, K>(stage + Shared::kQueries, q + done * a.q.st, a.q.st, own.tokens(c),
                     parts + Shared::kState, thread);
    copy_values(stage + Shared::kOutputs, d + done * grad_o.st, grad_o.st, own.tokens(c), thread);
    copy_block<Form::kVectors + Form::kFloats * 4, 128>(
        stage + Shared::kInverse, x.forward.factors + head * Form::kBytes, thread);
    copy_block<kBetaBytes, 128>(stage + Shared::kBeta, x.forward.beta + head * kChunk, thread);
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (i < own.chunks) ask(own.chunks - 1 - i);
    commit_copies();
  }
  const RightLanes lanes(lane);
  float S[K / 8][4];  // dS
  clear(S);
  const int64_t home = ((own.n * a.HV + own.hv) * a.V + v0 + 16 * warp) * K;
  if (args.grad_state.ptr) {
    read_state<K>(S, static_cast<const float*>(args.grad_state.ptr) + home, lane);
  }
  float* const most_of_states = reinterpret_cast<float*>(shared + Shared::template kMost<STAGES>);
  float* const most_of_rows = most_of_states + 4;
  if (SCALED) note_most(most_of_states, most_of(S), warp, lane);
  for (int c = own.chunks - 1; c >= 0; c--) {
    if (STAGES == 1) {
      __syncthreads();
      ask(c);
      commit_copies();
    }
    wait_copies<(STAGES > 1 ? STAGES - 2 : 0)>();
    publish_shared();
    __syncthreads();
    if (STAGES > 1) {
      if (c - (STAGES - 1) >= 0) ask(c - (STAGES - 1));
      commit_copies();
    }
    const uint32_t stage = base + (c % STAGES) * Shared::kStage;
    unsigned char* const memory = shared + (c % STAGES) * Shared::kStage;
    const float* const vectors = reinterpret_cast<const float*>(memory + Shared::kVectors);
    const float* const beta = reinterpret_cast<const float*>(memory + Shared::kBeta);
    const float w_last = vectors[Form::kLast];

    float* const scales = x.scales + own.part(a, c) * 4;
    PowerOfTwo s_scale, u_scale;
    if constexpr (SCALED) {
      s_scale = block_scale<4>(most_of_states);
      if (thread == 0) scales[1] = s_scale.back;
    }
    float U[8][4];  // dU
    {
      uint32_t left[K / 16][PARTS][4];
      pack_scaled<T>(left, S, s_scale.by);
      settle(left);
      open_products();
      times_rows<T, false>(U, left, stage, 0, lanes);
      close_products();
      keep_state<K>(left, panels, x.state_gradients + own.part(a, c) * Shared::kState, warp, lane);
      await_products<0>(U);
    }
    if constexpr (SCALED) scale_all(U, s_scale.back);
    scale_columns(U, vectors + 2 * kChunk, t);
    uint32_t outputs[4][PARTS][4];  // dO; of two parts times what M lacks, and a power of two
    // Two parts: dO times that and the decay from the start, as accumulators.
    const auto load_outputs = [&](float (&o)[8][4], bool decayed) {
#pragma unroll
      for (int s = 0; s < 4; s++) {
        float given[2][2][2];
        load_values<IN>(given, memory + Shared::kOutputs, s, warp, lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float* const at = vectors + 16 * s + 8 * half + 2 * t;
          float2 f = *reinterpret_cast<const float2*>(at + 3 * kChunk);
          if (decayed) {
            const float2 w = *reinterpret_cast<const float2*>(at + kChunk);
            f = make_float2(f.x * w.x, f.y * w.y);
          }
#pragma unroll
          for (int row = 0; row < 2; row++) {
            o[2 * s + half][2 * row] = f.x * given[half][row][0];
            o[2 * s + half][2 * row + 1] = f.y * given[half][row][1];
          }
        }
      }
    };
    PowerOfTwo o_scale;
    if constexpr (PARTS == 1) {
#pragma unroll
      for (int s = 0; s < 4; s++) {
        load_across(outputs[s][0], stage + Shared::kOutputs, s, warp, lane);
      }
    } else {
      float o[8][4];
      load_outputs(o, false);
      o_scale = warp_scale(most_of(o));
      pack_scaled<T>(outputs, o, o_scale.by);
      scale_all(U, o_scale.by);
    }
    settle(U);
    settle(outputs);
    open_products();
#pragma unroll
    for (int s = 0; s < 4; s++) {
      multiply_columns<T>(U, outputs[s], stage, Shared::kMixing, kPanelBytes, s, 0, lanes);
    }
    close_products();
    decay_all(S, w_last);
    await_products<0>(U);
    if constexpr (PARTS == 2) scale_all(U, o_scale.back);
    float Y[8][4];  // dY
    uint32_t y[4][PARTS][4];
    if constexpr (SCALED) u_scale = warp_scale(most_of(U));
    pack_scaled<T>(y, U, u_scale.by);
    settle(y);
    open_products();
    times_rows<T, false>(Y, y, stage, Shared::kInverse, lanes);
    close_products();
    // dO times what q is multiplied by, tokens being columns; added to S.
    const auto each_output = [&](auto&& take) {
#pragma unroll
      for (int s = 0; s < 4; s++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float2 f =
              *reinterpret_cast<const float2*>(vectors + kChunk + 16 * s + 8 * half + 2 * t);
#pragma unroll
          for (int row = 0; row < 2; row++) {
            uint32_t& r = outputs[s][0][2 * half + row];
            const float2 o = unpack_pair<T>(r);
            take(r, f.x * o.x, f.y * o.y);
          }
        }
      }
    };
    const auto add_outputs = [&] {
      settle(S);
      settle(outputs);
      open_products();
#pragma unroll
      for (int s = 0; s < 4; s++) {
        multiply_columns<T>(S, outputs[s], stage, Shared::kQueries, state_bytes<K>(), s, 0, lanes);
      }
      close_products();
    };
    if constexpr (SCALED) {
      await_products<0>(Y);
      scale_all(Y, u_scale.back * (1.f / Form::kInverseScale));
      note_most(most_of_rows, most_of(Y), warp, lane);
      __syncthreads();
      u_scale = block_scale<4>(most_of_rows);
      if (thread == 0) scales[3] = u_scale.back;
    } else {
      each_output([](uint32_t& r, float low, float high) { r = pack_pair<T>(low, high); });
      add_outputs();
      await_products<1>(Y);
    }
    keep_rows<IN>(
        Y, u_scale.by,
        PARTS == 1 ? memory + Shared::kOutputs : shared + Shared::template kTargets<STAGES>,
        x.target_gradients + own.part(a, c) * Shared::kRows, warp, lane);
#pragma unroll
    for (int p = 0; p < 8; p++) {
      const float2 w = *reinterpret_cast<const float2*>(vectors + 8 * p + 2 * t);
      const float2 b = *reinterpret_cast<const float2*>(beta + 8 * p + 2 * t);
#pragma unroll
      for (int e = 0; e < 4; e++) Y[p][e] *= e & 1 ? -w.y * b.y : -w.x * b.x;
    }
    PowerOfTwo next_scale;
    if constexpr (SCALED) {
      float most = fmaxf(most_of(S), most_of(Y));
      if constexpr (PARTS == 1) {
        each_output([&](uint32_t&, float low, float high) {
          most = fmaxf(most, fmaxf(fabsf(low), fabsf(high)));
        });
        next_scale = warp_scale(most);
        each_output([&](uint32_t& r, float low, float high) {
          r = pack_pair<T>(next_scale.by * low, next_scale.by * high);
        });
      } else {
        float o[8][4];
        load_outputs(o, true);
        next_scale = warp_scale(fmaxf(most, most_of(o)));
        pack_scaled<T>(outputs, o, next_scale.by);
      }
      scale_all(S, next_scale.by);
      add_outputs();
    }
    pack_scaled<T>(y, Y, next_scale.by);
    settle(y);
    open_products();
#pragma unroll
    for (int s = 0; s < 4; s++)
      multiply_columns<T>(S, y[s], stage, 0, state_bytes<K>(), s, 0, lanes);
    close_products();
    await_products<0>(S);
    if constexpr (SCALED) {
      scale_all(S, next_scale.back);
      note_most(most_of_states, most_of(S), warp, lane);
    }
  }
  write_state<K>(S, static_cast<float*>(args.dstate.ptr) + home, lane);
  wait_for_previous_kernel();
}

// Sums that cross warps, of one value head; `quarter` of the columns of K.
struct GradientSums {
  float decay[4][kChunk];       // gradient of the log decay from the start, and of rows of D
  float last[4][kChunk];        // of D_n
  float beta[5][kChunk];        // the last: of values
  float columns[2][4][kChunk];  // of columns of D, by the rows of a warp
  float states[16];             // of w_n, by warps
};

template <class IN, int K, int STAGES>
struct GradientsShared {
  static constexpr int kThreads = 512;
  static constexpr int kParts = Format<IN>::kParts, kWhole = kParts * state_bytes<K>();
  static constexpr int kRows = kParts * kPanelBytes;
  static constexpr int kKeys = 0, kQueries = kWhole, kStages = 2 * kWhole;
  // A stage: 64 rows of V of a value head.
  static constexpr int kState = 0, kStateGradient = kWhole;
  static constexpr int kOutputs = 2 * kWhole, kTargets = kOutputs + kRows;
  static constexpr int kUpdates = kTargets + kRows, kValues = kUpdates + kRows;
  static constexpr int kStage = kValues + (kParts == 1 ? kPanelBytes : 0);
  static constexpr int kProducts = kStages + STAGES * kStage;
  static constexpr int kFloats = kProducts + 16 * kThreads * 4;  // norms, sums, scales, gates
  // rk, rq and, with two parts, those without powers of two, and what rows of dO are divided by.
  static constexpr int kSums = kFloats + (kParts == 1 ? 2 : 5) * kChunk * 4;
  static constexpr int kScales = kSums + 2 * static_cast<int>(sizeof(GradientSums));
  static constexpr int kGates = kScales + 2 * 16;
  static constexpr int kVectors = kParts == 1 ? 3 : 4;  // of gates
  static int bytes(int ratio) { return kGates + kVectors * kChunk * 4 * ratio; }
};

// Sums over the lanes that hold the same columns (eight of a warp): lane 4 g + t ends with that of
// column 8 (g / 2) + 2 t + g % 2.
__device__ __forceinline__ float column_sums(const float (&x)[4][2], int lane) {
  float a[2][2], b[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float low = x[i][e], high = x[i + 2][e];
      a[i][e] = (lane & 16 ? high : low) + __shfl_xor_sync(kFullMask, lane & 16 ? low : high, 16);
    }
  }
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const float low = a[0][e], high = a[1][e];
    b[e] = (lane & 8 ? high : low) + __shfl_xor_sync(kFullMask, lane & 8 ? low : high, 8);
  }
  return (lane & 4 ? b[1] : b[0]) + __shfl_xor_sync(kFullMask, lane & 4 ? b[0] : b[1], 4);
}

// Two tiles += left, in parts, times right operands at `from`, `step` bytes to
// the next part.
template <class T, bool TRANSPOSED, int PARTS>
__device__ __forceinline__ void multiply_two(float (&c0)[4], float (&c1)[4],
                                             const uint32_t (&left)[PARTS][4], uint32_t from,
                                             uint32_t step) {
#pragma unroll
  for (int part = PARTS - 1; part >= 0; part--) {
    uint32_t b[4];
    if constexpr (TRANSPOSED) {
      load_transposed(b, from + part * step);
    } else {
      load_matrices(b, from + part * step);
    }
#pragma unroll
    for (int y = PARTS - 1 - part; y >= 0; y--) {
      mma_16x8x16<T>(c0, left[y], b[0], b[1]);
      mma_16x8x16<T>(c1, left[y], b[2], b[3]);
    }
  }
}

// Products of a warp alone. Warp 4 x + r owns tokens 16 r ... and quarter x of the
// columns of K; of the products between tokens, columns 32 (x % 2) ... of those with keys (x < 2)
// or with queries on the left.
template <class IN, int K, int STAGES>
__global__ void __launch_bounds__(512, 1)
    chunk_gradients(const __grid_constant__ ChunkBackwardArgs args,
                    const __grid_constant__ BackwardLayout x) {
  using Form = Format<IN>;
  using Shared = GradientsShared<IN, K, STAGES>;
  using T = typename Form::T;
  constexpr bool SCALED = Form::kScaled;
  constexpr int PARTS = Form::kParts, GATES = Shared::kVectors;
  constexpr int THREADS = Shared::kThreads;
  constexpr int N = K / 32;  // tiles of 8 columns of K
  extern __shared__ __align__(1024) unsigned char shared[];
  const ChunkArgs& a = args.forward;
  const int thread = threadIdx.x, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const int quarter = thread >> 7, side = quarter >> 1, half_of = quarter & 1;
  const int warp = (thread >> 5) & 3, row0 = 16 * warp + g;
  const int64_t slot = blockIdx.x, hk = blockIdx.y;
  const int ratio = x.forward.ratio.divisor, slices = static_cast<int>(a.V) / kScanRows;
  const int items = ratio * slices;
  const uint32_t base = shared_address(shared);
  float* const rk = reinterpret_cast<float*>(shared + Shared::kFloats);
  float* const rq = rk + kChunk;
  float* const norms = PARTS == 1 ? rk : rq + kChunk;  // of keys, then queries: no powers of two
  float* const output_back = norms + 2 * kChunk;       // two parts only
  GradientSums* const sums = reinterpret_cast<GradientSums*>(shared + Shared::kSums);
  float* const gates = reinterpret_cast<float*>(shared + Shared::kGates);
  wait_for_previous_kernel();
  const OwnedChunk own = chunk_of_slot(a, x.forward, slot);
  if (own.tokens == 0) return;
  const RightLanes lanes(lane);

  const auto ask = [&](int item) {
    const uint32_t stage = base + Shared::kStages + item % STAGES * Shared::kStage;
    const int64_t part = (slot * a.HV + hk * ratio) * slices + item;
    const int h = item / slices, v0 = (item - h * slices) * kScanRows;
    if (SCALED && thread == 0) {
      copy_async(base + Shared::kScales + item % STAGES * 16, x.scales + part * 4);
    }
    copy_block<Shared::kWhole, THREADS>(stage + Shared::kState, x.states + part * Shared::kWhole,
                                        thread);
    copy_block<Shared::kWhole, THREADS>(stage + Shared::kStateGradient,
                                        x.state_gradients + part * Shared::kWhole, thread);
    copy_block<Shared::kRows, THREADS>(stage + Shared::kTargets,
                                       x.target_gradients + part * Shared::kRows, thread);
    copy_block<Shared::kRows, THREADS>(stage + Shared::kUpdates, x.updates + part * Shared::kRows,
                                       thread);
    if constexpr (PARTS == 2) {
      const IN* const from = static_cast<const IN*>(args.grad_out.ptr) +
                             offset_of(args.grad_out, own.b, own.start, hk * ratio + h) + v0;
      pack_rows<IN, kScanRows, THREADS / 32>(shared + (stage - base) + Shared::kOutputs,
                                             output_back, kChunk, false,
                                             TokenRows{from, args.grad_out.st, own.tokens});
    } else if (quarter < 2) {
      const View& from = quarter ? args.grad_out : a.v;
      const int64_t at = offset_of(from, own.b, own.start, hk * ratio + h) + v0;
      copy_rows<8>(stage + (quarter ? Shared::kOutputs : Shared::kValues),
                   static_cast<const IN*>(from.ptr) + at, from.st, own.tokens, thread & 127);
    }
  };
  if constexpr (PARTS == 2) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const View& from = i ? a.q : a.k;
      pack_rows<IN, K, THREADS / 32>(
          shared + (i ? Shared::kQueries : Shared::kKeys), rk + i * kChunk, kChunk, a.l2norm,
          TokenRows{static_cast<const IN*>(from.ptr) + offset_of(from, own.b, own.start, hk),
                    from.st, own.tokens},
          norms + i * kChunk);
    }
  } else if (quarter < 2) {
    const View& from = quarter ? a.q : a.k;
    copy_rows<K / 8>(base + (quarter ? Shared::kQueries : Shared::kKeys),
                     static_cast<const IN*>(from.ptr) + offset_of(from, own.b, own.start, hk),
                     from.st, own.tokens, thread & 127);
  }
  commit_copies();
  ask(0);
  commit_copies();
  load_decays<PARTS>(gates, a, own, hk, ratio, thread >> 5, THREADS / 32, lane);
  wait_copies<1>();
  __syncthreads();
  if (PARTS == 1 && thread < 2 * kChunk) {
    // Inverse norms: a thread for each row of k and of q.
    const int row = thread & 63;
    const unsigned char* const from = shared + (thread < kChunk ? Shared::kKeys : Shared::kQueries);
    float sum = 0.f;
    if (a.l2norm) {
#pragma unroll
      for (int p = 0; p < K / 8; p++) {
        float y[8];
        Vec<T>::unpack(*reinterpret_cast<const uint4*>(from + (p >> 3) * kPanelBytes +
                                                       panel_offset(row, p & 7)),
                       y);
#pragma unroll
        for (int e = 0; e < 8; e++) sum = __fmaf_rn(y[e], y[e], sum);
      }
    }
    rk[thread] = a.l2norm ? rsqrtf(sum + kL2Eps) : 1.f;  // rq lies behind
  }

  // Rows 16 warp ... of a panel as left operands; `step` bytes to the next part.
  const auto load_rows = [&](uint32_t (&r)[PARTS][4], uint32_t panel, int step, int s) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      load_matrices(r[part], panel + part * step +
                                 panel_offset(16 * warp + (lane & 15), 2 * s + (lane >> 4)));
    }
  };
  // Of rows of a panel, its part of the 64, as right operands along the sum.
  const auto times_tokens = [&](float (&c)[4][4], const uint32_t (&left)[PARTS][4], uint32_t panel,
                                int step, int s) {
#pragma unroll
    for (int p = 0; p < 2; p++) {
      multiply_two<T, false>(
          c[2 * p], c[2 * p + 1], left,
          panel + (2 * half_of + p) * 2048 + lanes.plain + ((s << 5) ^ lanes.plain_x), step);
    }
  };
  // c += left times rows 16 s ... of panels of K columns, its quarter of them.
  const auto times_columns = [&](float (&c)[N][4], const uint32_t (&left)[PARTS][4],
                                 uint32_t panels, int s) {
#pragma unroll
    for (int p = 0; p < N / 2; p++) {
      const int pair = quarter * (N / 2) + p;
      multiply_two<T, true>(c[2 * p], c[2 * p + 1], left,
                            panels + (pair >> 2) * kPanelBytes + s * 2048 + lanes.across +
                                (((pair & 3) << 5) ^ lanes.across_x),
                            state_bytes<K>());
    }
  };
  // The pair of k or q that a lane holds in accumulators of its quarter.
  const auto pair_of = [&](int panels, int p, int half) {
    const int tile = quarter * N + p;
    const unsigned char* const at = shared + panels + (tile >> 3) * kPanelBytes +
                                    panel_offset(row0 + 8 * half, tile & 7) + 4 * t;
    float2 y = unpack_pair<T>(*reinterpret_cast<const uint32_t*>(at));
    if constexpr (PARTS == 2) {
      const float2 z = unpack_pair<T>(*reinterpret_cast<const uint32_t*>(at + state_bytes<K>()));
      y = make_float2(y.x + z.x, y.y + z.y);
    }
    return y;
  };
  // Whether any of its products between tokens is not above the diagonal.
  const bool below = 2 * half_of <= warp;

  // k k^T or q k^T, normalised, zero above the diagonal; a thread keeps its own.
  float* const products = reinterpret_cast<float*>(shared + Shared::kProducts) + thread;
  float row_norm[2];
  {
    float c[4][4];
    clear(c);
    if (below) {
#pragma unroll
      for (int s = 0; s < K / 16; s++) {
        const uint32_t panel = (s >> 2) * kPanelBytes;
        uint32_t left[PARTS][4];
        load_rows(left, base + (side ? Shared::kQueries : Shared::kKeys) + panel, state_bytes<K>(),
                  s & 3);
        times_tokens(c, left, base + Shared::kKeys + panel, state_bytes<K>(), s & 3);
      }
    }
    __syncthreads();  // rk and rq are there
#pragma unroll
    for (int half = 0; half < 2; half++) row_norm[half] = (side ? rq : rk)[row0 + 8 * half];
#pragma unroll
    for (int p = 0; p < 4; p++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int i = row0 + 8 * (e >> 1), j = 32 * half_of + 8 * p + 2 * t + (e & 1);
        // The diagonal of a decay is one, so it takes no part.
        products[(4 * p + e) * THREADS] = j < i ? c[p][e] * row_norm[e >> 1] * rk[j] : 0.f;
      }
    }
  }

  float dq[N][4], dk[N][4], shared_by_heads[4][4];
  clear(dq);
  clear(dk);
  clear(shared_by_heads);

  // What a value head adds to log decays and beta, after its last slice.
  const auto finish_head = [&](int h) {
    const GradientSums& s = sums[h & 1];
    const float* const decays = gates + h * GATES * kChunk;
    float net[2], later = 0.f;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = lane + 32 * e;
      float last = 0.f, rows = 0.f, columns = 0.f;
#pragma unroll
      for (int r = 0; r < 4; r++) {
        last += s.last[r][i];
        rows += s.decay[r][i];
        columns += s.columns[0][r][i] + s.columns[1][r][i];
      }
      if (i == kChunk - 1) last = 0.f;
      net[e] = rows - columns - last;
      later += last;
    }
    later = lane_sum(later);
    const float states = lane_sum(lane < THREADS / 32 ? s.states[lane & 15] : 0.f);
    if (lane == 31) net[1] += later + exp2_flushed(decays[kChunk - 1]) * states;
    // Sums over this and later tokens: a scan over the reversed order.
    float low = __shfl_sync(kFullMask, net[1], 31 - lane);
    float high = __shfl_sync(kFullMask, net[0], 31 - lane);
    scan64(low, high, lane);
    const float back[2] = {__shfl_sync(kFullMask, high, 31 - lane),
                           __shfl_sync(kFullMask, low, 31 - lane)};
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = lane + 32 * e;
      if (i >= own.tokens) continue;
      const int64_t hv = hk * ratio + h;
      float beta = 0.f;
#pragma unroll
      for (int r = 0; r < 5; r++) beta += s.beta[r][i];
      store_as(args.dg.ptr, args.dg.dtype, offset_of(args.dg, own.b, own.start + i, hv), back[e]);
      store_as(args.dbeta.ptr, args.dbeta.dtype, offset_of(args.dbeta, own.b, own.start + i, hv),
               beta);
    }
  };

  float pairs[4][4];  // dY U^T or dO U^T
  float from_start[2], beta_share[2], to_end[2], dots, values_share;
  for (int item = 0; item < items; item++) {
    const int h = item / slices, slice = item - h * slices;
    if (STAGES == 1 && item > 0) {
      __syncthreads();
      ask(item);
      commit_copies();
    }
    wait_copies<0>();
    __syncthreads();
    if (STAGES > 1) {
      if (item + 1 < items) ask(item + 1);
      commit_copies();
    }
    if (slice == 0) {
      if (h > 0 && (thread >> 5) == ((h - 1) & 15)) finish_head(h - 1);
      clear(pairs);
#pragma unroll
      for (int half = 0; half < 2; half++) from_start[half] = beta_share[half] = to_end[half] = 0.f;
      dots = values_share = 0.f;
    }
    const uint32_t stage = base + Shared::kStages + item % STAGES * Shared::kStage;
    const unsigned char* const memory = shared + Shared::kStages + item % STAGES * Shared::kStage;
    const float* const decays = gates + h * GATES * kChunk;
    const float* const beta = decays + 2 * kChunk;
    // What S, dS, U and dY are to be multiplied by.
    float4 by = make_float4(1.f, 1.f, 1.f, 1.f);
    if constexpr (SCALED) {
      by = *reinterpret_cast<const float4*>(shared + Shared::kScales + item % STAGES * 16);
    }
    // c += factor x, a row each; dots of x with k or q.
    const auto add_rows = [&](float (&c)[N][4], const float (&x)[N][4], const float (&factor)[2],
                              int panels, float (&dot)[2]) {
      dot[0] = dot[1] = 0.f;
#pragma unroll
      for (int p = 0; p < N; p++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float2 y = pair_of(panels, p, half);
          const float x0 = x[p][2 * half], x1 = x[p][2 * half + 1];
          dot[half] = __fmaf_rn(x1, y.y, __fmaf_rn(x0, y.x, dot[half]));
          c[p][2 * half] = __fmaf_rn(factor[half], x0, c[p][2 * half]);
          c[p][2 * half + 1] = __fmaf_rn(factor[half], x1, c[p][2 * half + 1]);
        }
      }
    };
    float dot[2], factor[2];

    float by_output[2] = {1.f, 1.f};  // what dO is to be multiplied by, a row each
    if constexpr (PARTS == 2) {
#pragma unroll
      for (int half = 0; half < 2; half++) by_output[half] = output_back[row0 + 8 * half];
    }
    if (below) {
      float scale[2];
#pragma unroll
      for (int half = 0; half < 2; half++) scale[half] = by.z * (side ? by_output[half] : by.w);
      if constexpr (SCALED) {
#pragma unroll
        for (int p = 0; p < 4; p++) {
#pragma unroll
          for (int e = 0; e < 4; e++) pairs[p][e] *= inverse_power(scale[e >> 1]);
        }
      }
#pragma unroll
      for (int s = 0; s < 4; s++) {
        uint32_t left[PARTS][4];
        load_rows(left, stage + (side ? Shared::kOutputs : Shared::kTargets), kPanelBytes, s);
        times_tokens(pairs, left, stage + Shared::kUpdates, kPanelBytes, s);
      }
      if constexpr (SCALED) {
#pragma unroll
        for (int p = 0; p < 4; p++) {
#pragma unroll
          for (int e = 0; e < 4; e++) pairs[p][e] *= scale[e >> 1];
        }
      }
    }
    {
      // Through the old state, to q and to k.
      float to_q[N][4], to_k[N][4];
      clear(to_q);
      clear(to_k);
#pragma unroll
      for (int s = 0; s < 4; s++) {
        uint32_t outputs[PARTS][4], targets[PARTS][4];
        load_rows(outputs, stage + Shared::kOutputs, kPanelBytes, s);
        load_rows(targets, stage + Shared::kTargets, kPanelBytes, s);
#pragma unroll
        for (int p = 0; p < N / 2; p++) {
          const int pair = quarter * (N / 2) + p;
#pragma unroll
          for (int part = PARTS - 1; part >= 0; part--) {
            uint32_t b[4];
            load_transposed(b, stage + Shared::kState + part * state_bytes<K>() +
                                   (pair >> 2) * kPanelBytes + s * 2048 + lanes.across +
                                   (((pair & 3) << 5) ^ lanes.across_x));
#pragma unroll
            for (int y = PARTS - 1 - part; y >= 0; y--) {
              mma_16x8x16<T>(to_q[2 * p], outputs[y], b[0], b[1]);
              mma_16x8x16<T>(to_q[2 * p + 1], outputs[y], b[2], b[3]);
              mma_16x8x16<T>(to_k[2 * p], targets[y], b[0], b[1]);
              mma_16x8x16<T>(to_k[2 * p + 1], targets[y], b[2], b[3]);
            }
          }
        }
      }
      float w[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        w[half] = exp2_flushed(decays[row0 + 8 * half]);
        factor[half] = a.scale * w[half] * by.x * by_output[half];
      }
      add_rows(dq, to_q, factor, Shared::kQueries, dot);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        from_start[half] += factor[half] * rq[row0 + 8 * half] * dot[half];
        factor[half] = -beta[row0 + 8 * half] * w[half] * (by.x * by.w);
      }
      add_rows(dk, to_k, factor, Shared::kKeys, dot);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float share = rk[row0 + 8 * half] * dot[half];
        from_start[half] += factor[half] * share;
        beta_share[half] -= w[half] * (by.x * by.w) * share;
      }
    }
    {
      // Through the new state, to k.
      float to_k[N][4];
      clear(to_k);
#pragma unroll
      for (int s = 0; s < 4; s++) {
        uint32_t updates[PARTS][4];
        load_rows(updates, stage + Shared::kUpdates, kPanelBytes, s);
        times_columns(to_k, updates, stage + Shared::kStateGradient, s);
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        factor[half] = exp2_flushed(decays[kChunk + row0 + 8 * half]) * (by.y * by.z);
      }
      add_rows(dk, to_k, factor, Shared::kKeys, dot);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        to_end[half] += factor[half] * rk[row0 + 8 * half] * dot[half];
      }
    }
    {
      // dv, dY . v and dS . S
      const int row = thread >> 3, piece = thread & 7, at = panel_offset(row, piece);
      IN* const out = static_cast<IN*>(args.dv.ptr) +
                      offset_of(args.dv, own.b, own.start + row, hk * ratio + h) +
                      slice * kScanRows;
      // Eight kept numbers, `step` bytes from one part to the next.
      const auto read_kept = [&](float (&y)[8], int place, int step) {
        Vec<T>::unpack(*reinterpret_cast<const uint4*>(memory + place), y);
        if constexpr (PARTS == 2) {
          float z[8];
          Vec<T>::unpack(*reinterpret_cast<const uint4*>(memory + place + step), z);
#pragma unroll
          for (int e = 0; e < 8; e++) y[e] += z[e];
        }
      };
      float y[8], z[8] = {}, share = 0.f;
      read_kept(y, Shared::kTargets + at, kPanelBytes);
      if constexpr (PARTS == 1) {
        Vec<T>::unpack(*reinterpret_cast<const uint4*>(memory + Shared::kValues + at), z);
      } else if (row < own.tokens) {
        const IN* const from = static_cast<const IN*>(a.v.ptr) +
                               offset_of(a.v, own.b, own.start + row, hk * ratio + h) +
                               slice * kScanRows + 8 * piece;
        Vec<IN>::unpack(*reinterpret_cast<const uint4*>(from), z);
        Vec<IN>::unpack(*reinterpret_cast<const uint4*>(from + 4), z + 4);
      }
      const float times = beta[row] * by.w;
#pragma unroll
      for (int e = 0; e < 8; e++) {
        share = __fmaf_rn(y[e], z[e], share);
        y[e] *= times;
      }
      if (row < own.tokens) {
#pragma unroll
        for (int e = 0; e < 8; e += Vec<IN>::E) {
          *reinterpret_cast<uint4*>(out + 8 * piece + e) = Vec<IN>::pack(y + e);
        }
      }
      values_share += by.w * share;
      share = 0.f;
#pragma unroll
      for (int i = 0; i < state_bytes<K>() / (16 * THREADS); i++) {
        const int place = (thread + THREADS * i) * 16;
        read_kept(y, Shared::kState + place, state_bytes<K>());
        read_kept(z, Shared::kStateGradient + place, state_bytes<K>());
#pragma unroll
        for (int e = 0; e < 8; e++) share = __fmaf_rn(y[e], z[e], share);
      }
      dots += by.x * by.y * share;
    }

    if (slice + 1 < slices) continue;
    // Through the products between tokens.
    float columns[4][2] = {};
    if (below) {
#pragma unroll
      for (int p = 0; p < 4; p++) {
        const int j = 32 * half_of + 8 * p + 2 * t;
        const float2 sum = *reinterpret_cast<const float2*>(decays + j);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int half = e >> 1, i = row0 + 8 * half;
          const bool in = side ? j + (e & 1) <= i : j + (e & 1) < i;
          float difference = decays[i] - (e & 1 ? sum.y : sum.x);
          if constexpr (PARTS == 2) {
            const float* const rest = decays + 3 * kChunk;
            difference += rest[i] - rest[j + (e & 1)];
          }
          const float decay = in ? exp2_flushed(fminf(difference, 0.f)) : 0.f;
          const float y = decay * pairs[p][e];
          const float z = (side ? a.scale : -beta[i]) * y;
          shared_by_heads[p][e] += z;
          const float product = products[(4 * p + e) * THREADS], share = z * product;
          from_start[half] += share;
          columns[p][e & 1] += share;
          if (!side) beta_share[half] -= y * product;
        }
      }
    }
    GradientSums& s = sums[h & 1];
    s.columns[side][warp][32 * half_of + 8 * (g >> 1) + 2 * t + (g & 1)] =
        column_sums(columns, lane);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = row0 + 8 * half;
      const float x0 = lane_sum<4>(from_start[half]), x1 = lane_sum<4>(beta_share[half]),
                  x2 = lane_sum<4>(to_end[half]);
      if (t == 0) {
        s.decay[quarter][i] = x0;
        s.beta[quarter][i] = x1;
        s.last[quarter][i] = x2;
      }
    }
    const float of_values = lane_sum<8>(values_share), of_states = lane_sum(dots);
    if ((thread & 7) == 0) s.beta[4][thread >> 3] = of_values;
    if (lane == 0) s.states[thread >> 5] = of_states;
  }
  __syncthreads();  // the stages are free
  if ((thread >> 5) == ((ratio - 1) & 15)) finish_head(ratio - 1);

  // The products between tokens, summed over the heads: each side leaves its own, times the norms
  // of columns and times those of rows.
  PowerOfTwo of_side[2];
  GradientSums& spare = sums[ratio & 1];  // not that of the last head
  if constexpr (SCALED) {
    float most = 0.f;
#pragma unroll
    for (int p = 0; p < 4; p++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float norm = fmaxf(rk[32 * half_of + 8 * p + 2 * t + (e & 1)], row_norm[e >> 1]);
        most = fmaxf(most, fabsf(norm * shared_by_heads[p][e]));
      }
    }
    note_most(spare.states, most, thread >> 5, lane);
    __syncthreads();
    of_side[0] = block_scale<8>(spare.states);
    of_side[1] = block_scale<8>(spare.states + 8);
    scale_all(shared_by_heads, side ? of_side[1].by : of_side[0].by);
  }
#pragma unroll
  for (int p = 0; p < 4; p++) {
    const int tile = 4 * half_of + p;
    const float2 column = *reinterpret_cast<const float2*>(rk + 8 * tile + 2 * t);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float y = shared_by_heads[p][2 * half], z = shared_by_heads[p][2 * half + 1];
      unsigned char* const at = shared + Shared::kStages + 2 * side * Shared::kRows +
                                panel_offset(row0 + 8 * half, tile) + 4 * t;
      uint32_t r[PARTS], c[PARTS];
      pack_parts<T>(c, column.x * y, column.y * z);
      pack_parts<T>(r, row_norm[half] * y, row_norm[half] * z);
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        *reinterpret_cast<uint32_t*>(at + part * kPanelBytes) = c[part];
        *reinterpret_cast<uint32_t*>(at + Shared::kRows + part * kPanelBytes) = r[part];
      }
    }
  }
  __syncthreads();
  // c += a panel of those, or its transpose, times k or q.
  const auto add_product = [&](float (&c)[N][4], uint32_t panel, bool transposed, uint32_t right,
                               const PowerOfTwo& scale) {
    if constexpr (SCALED) scale_all(c, scale.by);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      uint32_t left[PARTS][4];
      if (transposed) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
          load_across(left[part], panel + part * kPanelBytes, s, warp, lane);
        }
      } else {
        load_rows(left, panel, kPanelBytes, s);
      }
      times_columns(c, left, base + right, s);
    }
    if constexpr (SCALED) scale_all(c, scale.back);
  };
  const uint32_t of_keys = base + Shared::kStages, of_queries = of_keys + 2 * Shared::kRows;
  add_product(dq, of_queries, false, Shared::kKeys, of_side[1]);
  add_product(dk, of_keys, false, Shared::kKeys, of_side[0]);
  add_product(dk, of_keys + Shared::kRows, true, Shared::kKeys, of_side[0]);
  add_product(dk, of_queries + Shared::kRows, true, Shared::kQueries, of_side[1]);

  // Through the norms: dk = rk (dk - rk^2 k (k . dk)).
  float q_dot[2] = {}, k_dot[2] = {};
  if (a.l2norm) {
#pragma unroll
    for (int p = 0; p < N; p++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 y = pair_of(Shared::kQueries, p, half), z = pair_of(Shared::kKeys, p, half);
        q_dot[half] += y.x * dq[p][2 * half] + y.y * dq[p][2 * half + 1];
        k_dot[half] += z.x * dk[p][2 * half] + z.y * dk[p][2 * half + 1];
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float y = lane_sum<4>(q_dot[half]), z = lane_sum<4>(k_dot[half]);
      if (t == 0) {
        spare.decay[quarter][row0 + 8 * half] = y;
        spare.beta[quarter][row0 + 8 * half] = z;
      }
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = row0 + 8 * half;
      q_dot[half] = k_dot[half] = 0.f;
#pragma unroll
      for (int r = 0; r < 4; r++) {
        q_dot[half] += spare.decay[r][i];
        k_dot[half] += spare.beta[r][i];
      }
      q_dot[half] *= rq[i] * rq[i];
      k_dot[half] *= rk[i] * rk[i];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int i = row0 + 8 * half;
    if (i >= own.tokens) continue;
    const float nk = norms[i], nq = norms[kChunk + i];
    const int column = quarter * (K / 4) + 2 * t;
    IN* const to_q =
        static_cast<IN*>(args.dq.ptr) + offset_of(args.dq, own.b, own.start + i, hk) + column;
    IN* const to_k =
        static_cast<IN*>(args.dk.ptr) + offset_of(args.dk, own.b, own.start + i, hk) + column;
#pragma unroll
    for (int p = 0; p < N; p++) {
      const float2 y = pair_of(Shared::kQueries, p, half), z = pair_of(Shared::kKeys, p, half);
      const auto put = [](IN* to, float low, float high) {
        if constexpr (PARTS == 1) {
          *reinterpret_cast<uint32_t*>(to) = pack_pair<T>(low, high);
        } else {
          *reinterpret_cast<float2*>(to) = make_float2(low, high);
        }
      };
      put(to_q + 8 * p, nq * (dq[p][2 * half] - y.x * q_dot[half]),
          nq * (dq[p][2 * half + 1] - y.y * q_dot[half]));
      put(to_k + 8 * p, nk * (dk[p][2 * half] - z.x * k_dot[half]),
          nk * (dk[p][2 * half + 1] - z.y * k_dot[half]));
    }
  }
}

}  // namespace cuda
}  // namespace gdn
