// Second kernel of chunked prefill: the state through the chunks of a sequence.
//
// A warp owns 16 rows of V of one value head and never needs another warp: the state is held as
// S [16, K] in accumulators, so that it is the left operand of both products with it as it lies in
// registers, and what comes out, transposed (rows of V, columns of tokens), is the left operand of
// the next. Per chunk, with X, U, O [16, 64]:
//   X = v^T - w rk (S k^T)      U = X inverse^T      O = scale w rq (S q^T) + U mixing^T
//   S = w_n S + (D_n rk U) k
// Right operands come from shared memory, filled by asynchronous copies: by the same warps, or,
// where a block is alone on its multiprocessor, by four helpers, which also take the outputs out.
// Products take 16-bit factors and sum in float32; the state itself stays float32.
#pragma once

#include "chunk_plan.cuh"

namespace gdn {
namespace cuda {

constexpr int kScanRows = 64;  // of V, a block; 16 a warp

// What a scan is compiled for.
enum class Scan {
  lone,     // a block alone on its multiprocessor: helpers fetch two chunks ahead
  ahead,    // fetches the next chunk while it works on one
  among,    // one chunk at a time, others fill the wait
  general,  // the same over pools that are not plain
};
template <Scan KIND>
struct ScanShape {
  static constexpr bool kHelpers = KIND == Scan::lone;
  static constexpr int kStages = kHelpers ? 3 : KIND == Scan::ahead ? 2 : 1;
  static constexpr int kThreads = kHelpers ? 256 : 128, kMinBlocks = kHelpers ? 1 : 2;
};

template <int K>
struct ScanShared {
  static constexpr int kKeys = (K / 64) * kPanelBytes;
  static constexpr int kQueries = kKeys, kValues = 2 * kKeys;
  static constexpr int kFactors = kValues + kPanelBytes;
  static constexpr int kVectors = kFactors + 2 * kPanelBytes;
  static constexpr int kStage = kVectors + 1024;  // panels start at multiples of 1024
  static_assert(kFactorVectors * 4 <= 1024, "the vectors fit");
  // With helpers the outputs have two panels of their own; among others the state passes through
  // shared memory, 64 rows of K floats.
  template <Scan KIND, bool LOWRANK>
  static constexpr int bytes() {
    return ScanShape<KIND>::kStages * kStage + (ScanShape<KIND>::kHelpers ? 2 * kPanelBytes : 0) +
           (KIND == Scan::among && !LOWRANK ? kScanRows * K * 4 : 0);
  }
};

// 16 rows of V of a state, as accumulators. PLAIN: pools are float32 with K contiguous; a kernel of
// its own takes other pools, because their addresses alone fill the registers.
template <int K, bool PLAIN>
struct ScanState {
  float s[K / 8][4];

  // `at`: offset of row g, column 2t.
  __device__ __forceinline__ void load(const StatePool& pool, int64_t at) {
#pragma unroll
    for (int p = 0; p < K / 8; p++) {
      if constexpr (PLAIN) {
        const float* const from = static_cast<const float*>(pool.ptr) + at + 8 * p;
        const float2 x = *reinterpret_cast<const float2*>(from);
        const float2 y = *reinterpret_cast<const float2*>(from + 8 * pool.s_v);
        s[p][0] = x.x;
        s[p][1] = x.y;
        s[p][2] = y.x;
        s[p][3] = y.y;
      } else {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          s[p][e] = load_as(pool.ptr, pool.dtype,
                            at + (8 * p + (e & 1)) * pool.s_k + 8 * (e >> 1) * pool.s_v);
        }
      }
    }
  }
  __device__ __forceinline__ void store(const StatePool& pool, int64_t at) const {
#pragma unroll
    for (int p = 0; p < K / 8; p++) {
      if constexpr (PLAIN) {
        float* const to = static_cast<float*>(pool.ptr) + at + 8 * p;
        *reinterpret_cast<float2*>(to) = make_float2(s[p][0], s[p][1]);
        *reinterpret_cast<float2*>(to + 8 * pool.s_v) = make_float2(s[p][2], s[p][3]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          store_as(pool.ptr, pool.dtype,
                   at + (8 * p + (e & 1)) * pool.s_k + 8 * (e >> 1) * pool.s_v, s[p][e]);
        }
      }
    }
  }
};

// The same through shared memory, for blocks among many: what a lane holds is eight bytes here and
// there, and a request of eight lines an eighth each keeps the second-level cache busier than one
// of four whole lines. `rows`: those of the warp, K floats each, 16-byte pieces in the order of
// (piece xor 2 (row mod 4)), so that half a warp meets all banks.
template <int K>
struct StagedRows {
  static __device__ __forceinline__ int offset(int row, int piece) {
    return row * K * 4 + ((piece ^ ((row & 3) << 1)) << 4);
  }
  // `from`: row 0 of the warp's rows.
  static __device__ __forceinline__ void ask(uint32_t rows, const float* from, int64_t pitch,
                                             int lane) {
    constexpr int PIECES = K / 4, AT_ONCE = 32 / PIECES;
    static_assert(PIECES <= 32, "a row in one request");
    const int piece = lane % PIECES, first = lane / PIECES;
#pragma unroll
    for (int i = 0; i < 16 / AT_ONCE; i++) {
      const int row = first + i * AT_ONCE;
      copy_async(rows + offset(row, piece), from + row * pitch + piece * 4, true);
    }
  }
  static __device__ __forceinline__ void read(float (&s)[K / 8][4], const unsigned char* rows,
                                              int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int p = 0; p < K / 8; p++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 x = *reinterpret_cast<const float2*>(
            rows + offset(g + 8 * half, 2 * p + (t >> 1)) + 8 * (t & 1));
        s[p][2 * half] = x.x;
        s[p][2 * half + 1] = x.y;
      }
    }
  }
  static __device__ __forceinline__ void write(const float (&s)[K / 8][4], unsigned char* rows,
                                               float* to, int64_t pitch, int lane) {
    const int g = lane >> 2, t = lane & 3;
    __syncwarp();
#pragma unroll
    for (int p = 0; p < K / 8; p++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        *reinterpret_cast<float2*>(rows + offset(g + 8 * half, 2 * p + (t >> 1)) + 8 * (t & 1)) =
            make_float2(s[p][2 * half], s[p][2 * half + 1]);
      }
    }
    __syncwarp();
    constexpr int PIECES = K / 4, AT_ONCE = 32 / PIECES;
    const int piece = lane % PIECES, first = lane / PIECES;
#pragma unroll
    for (int i = 0; i < 16 / AT_ONCE; i++) {
      const int row = first + i * AT_ONCE;
      *reinterpret_cast<float4*>(to + row * pitch + piece * 4) =
          *reinterpret_cast<const float4*>(rows + offset(row, piece));
    }
  }
};

// The window that a low-rank sequence starts from, laid out as a chunk whose updates are known:
// keys into the panels of k, updates into the panel of v, decays into the vector D_n. Returns
// whether there is any entry.
template <int K>
__device__ __forceinline__ bool load_window(const ChunkArgs& a, int64_t row, int64_t hk, int64_t hv,
                                            int v0, unsigned char* stage) {
  using Shared = ScanShared<K>;
  const Window& w = a.window;
  const int R = static_cast<int>(w.R);
  const WindowCounts counts = unpack_fill(w.fill[row * w.s_fill]);
  const int fill = counts.fill < R ? counts.fill : R;
  if (fill == 0) return false;
  float* const decay = reinterpret_cast<float*>(stage + Shared::kVectors) + 2 * kChunk;
  for (int i = threadIdx.x; i < kChunk; i += blockDim.x) {
    float sum = 0.f;
    for (int j = i + 1; j < fill; j++) {
      sum += w.g[row * w.sg_p + hv * w.sg_h + (counts.head + j) % R * w.sg_r];
    }
    decay[i] = i < fill ? expf(sum) : 0.f;
  }
  for (int i = threadIdx.x; i < kChunk * K; i += blockDim.x) {
    const int e = i / K, c = i % K, slot = (counts.head + e) % R;
    const float x =
        e < fill ? load_as(w.k, w.k_dtype, row * w.sk_p + hk * w.sk_h + slot * w.sk_r + c) : 0.f;
    reinterpret_cast<bf16*>(stage + (c >> 6) * kPanelBytes +
                            panel_offset(e, (c & 63) >> 3))[c & 7] = from_float<bf16>(x);
  }
  for (int i = threadIdx.x; i < kChunk * kScanRows; i += blockDim.x) {
    const int e = i / kScanRows, c = i % kScanRows, slot = (counts.head + e) % R;
    const float x =
        e < fill ? load_as(w.u, w.u_dtype, row * w.su_p + hv * w.su_h + slot * w.su_r + v0 + c)
                 : 0.f;
    reinterpret_cast<bf16*>(stage + Shared::kValues + panel_offset(e, c >> 3))[c & 7] =
        from_float<bf16>(x);
  }
  return true;
}

template <int K, Scan KIND, bool LOWRANK>
__global__ void __launch_bounds__(ScanShape<KIND>::kThreads, ScanShape<KIND>::kMinBlocks)
    chunk_scan(const __grid_constant__ ChunkArgs a, const __grid_constant__ ChunkLayout layout) {
  using Shared = ScanShared<K>;
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr bool HELPERS = ScanShape<KIND>::kHelpers;
  constexpr int STAGES = ScanShape<KIND>::kStages;
  constexpr bool STAGED = KIND == Scan::among && !LOWRANK;
  constexpr int AHEAD = STAGES > 1 ? STAGES - 1 : 1;  // chunks
  constexpr bool LATE = STAGES == 1;
  const int thread = threadIdx.x & 127;
  const bool helper = HELPERS && threadIdx.x >= 128, copies = helper || !HELPERS;
  const int warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const int slices = static_cast<int>(a.V) / kScanRows;
  const int hv = blockIdx.x / slices, v0 = (blockIdx.x - hv * slices) * kScanRows;
  const int hk = layout.ratio(hv);
  const int64_t n = layout.first + blockIdx.y;
  const Sequence seq = device_sequence(a.seqs, n);
  const int64_t length = seq.end > seq.start ? seq.end - seq.start : 0;
  const int chunks = static_cast<int>((length + kChunk - 1) / kChunk);
  bf16* const out = static_cast<bf16*>(a.out.ptr) + offset_of(a.out, seq.b, seq.start, hv) + v0;
  if (seq.row < 0) {
    wait_for_previous_kernel();
    for (int64_t i = threadIdx.x; i < length * 8; i += blockDim.x) {
      *reinterpret_cast<uint4*>(out + (i >> 3) * a.out.st + (i & 7) * 8) = make_uint4(0, 0, 0, 0);
    }
    return;
  }
  const bf16* const k = static_cast<const bf16*>(a.k.ptr) + offset_of(a.k, seq.b, seq.start, hk);
  const bf16* const q = static_cast<const bf16*>(a.q.ptr) + offset_of(a.q, seq.b, seq.start, hk);
  const bf16* const v =
      static_cast<const bf16*>(a.v.ptr) + offset_of(a.v, seq.b, seq.start, hv) + v0;
  const unsigned char* const factors =
      layout.factors + (first_slot(a, layout, n, seq.start) * a.HV + hv) * kFactorBytes;
  const uint32_t base = shared_address(shared);

  // What the first kernel wrote is asked for after the rest, behind its end.
  const auto ask_inputs = [&](int c, uint32_t stage) {
    const int64_t done = static_cast<int64_t>(c) * kChunk;
    const int tokens = length - done < kChunk ? static_cast<int>(length - done) : kChunk;
    copy_rows<K / 8>(stage, k + done * a.k.st, a.k.st, tokens, thread);
    copy_rows<K / 8>(stage + Shared::kQueries, q + done * a.q.st, a.q.st, tokens, thread);
    copy_rows<8>(stage + Shared::kValues, v + done * a.v.st, a.v.st, tokens, thread);
  };
  const auto ask_factors = [&](int c, uint32_t stage) {
    const unsigned char* const from = factors + static_cast<int64_t>(c) * a.HV * kFactorBytes;
#pragma unroll
    for (int i = 0; i < 2 * kPanelBytes / 16 / 128; i++) {
      const int p = (thread + 128 * i) * 16;
      copy_async(stage + Shared::kFactors + p, from + p, true);
    }
    if (thread < kFactorVectors / 4) {
      const int p = 2 * kPanelBytes + thread * 16;
      copy_async(stage + Shared::kFactors + p, from + p, true);
    }
  };

  const RightLanes lanes(lane);
  ScanState<K, KIND != Scan::general> S;
  // S += (decay U) k, U as accumulators; left running.
  const auto update = [&](const float (&u)[8][4], uint32_t stage, const float* decay) {
    uint32_t left[4][4];
#pragma unroll
    for (int s = 0; s < 4; s++) {
      const float2 d = *reinterpret_cast<const float2*>(decay + 16 * s + 2 * t);
      const float2 e = *reinterpret_cast<const float2*>(decay + 16 * s + 8 + 2 * t);
      const float (&x)[4] = u[2 * s];
      const float (&y)[4] = u[2 * s + 1];
      left[s][0] = pack_bf16(d.x * x[0], d.y * x[1]);
      left[s][1] = pack_bf16(d.x * x[2], d.y * x[3]);
      left[s][2] = pack_bf16(e.x * y[0], e.y * y[1]);
      left[s][3] = pack_bf16(e.x * y[2], e.y * y[3]);
    }
    open_products();
#pragma unroll
    for (int s = 0; s < 4; s++) multiply_columns(S.s, left[s], stage, 0, s, 0, lanes);
    close_products();
  };
  // v^T of this warp's rows, tokens 16 p ...: registers (g, tokens), (g + 8, tokens), next 8
  // tokens.
  const auto load_values = [&](uint32_t (&r)[4], uint32_t stage, int p) {
    const int row = 16 * p + ((lane >> 4) << 3) + (lane & 7);
    load_transposed(r, stage + Shared::kValues + panel_offset(row, 2 * warp + ((lane >> 3) & 1)));
  };

  const auto home = [&](const StatePool& pool, int64_t row, int64_t r) {
    return row * pool.s_p + hv * pool.s_h + (v0 + 16 * warp + r) * pool.s_v;
  };
  unsigned char* const staged = shared + STAGES * Shared::kStage + warp * 16 * K * 4;
  const auto keep = [&](int64_t row) {
    if constexpr (STAGED) {
      StagedRows<K>::write(S.s, staged, static_cast<float*>(a.write.ptr) + home(a.write, row, 0),
                           a.write.s_v, lane);
    } else {
      S.store(a.write, home(a.write, row, g) + 2 * t * a.write.s_k);
    }
  };
  const bool read_state = !LOWRANK && a.read.ptr && !seq.fresh && !helper;

  clear(S.s);
  if (LOWRANK) {
    wait_for_previous_kernel();
    if (!seq.fresh && chunks > 0 && load_window<K>(a, seq.row, hk, hv, v0, shared)) {
      publish_shared();
      __syncthreads();
      if (!helper) {
        float u[8][4];
#pragma unroll
        for (int p = 0; p < 4; p++) {
          uint32_t r[4];
          load_values(r, base, p);
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const float2 x = unpack_bf16(r[e]);
            u[2 * p + (e >> 1)][2 * (e & 1)] = x.x;
            u[2 * p + (e >> 1)][2 * (e & 1) + 1] = x.y;
          }
        }
        update(u, base, reinterpret_cast<const float*>(shared + Shared::kVectors) + 2 * kChunk);
        await_products<0>(S.s);
      }
      __syncthreads();
    }
    if (copies && chunks > 0) ask_inputs(0, base);
  } else {
    // Inputs are older than the first kernel, which has waited for all that came before it.
    if (copies && chunks > 0) ask_inputs(0, base);
    if (read_state && STAGED) {
      StagedRows<K>::ask(shared_address(staged),
                         static_cast<const float*>(a.read.ptr) + home(a.read, seq.row, 0),
                         a.read.s_v, lane);
    } else if (read_state) {
      S.load(a.read, home(a.read, seq.row, g) + 2 * t * a.read.s_k);
    }
    wait_for_previous_kernel();
  }
  if (copies) {
    if (chunks > 0) ask_factors(0, base);
    commit_copies();
#pragma unroll
    for (int c = 1; c < AHEAD; c++) {
      if (c < chunks) {
        ask_inputs(c, base + c * Shared::kStage);
        ask_factors(c, base + c * Shared::kStage);
      }
      commit_copies();
    }
  }
  if (STAGED && read_state) {
    wait_copies<0>();
    __syncwarp();
    StagedRows<K>::read(S.s, staged, lane);
  }
  // Rows of 16-byte pieces of a finished output, 128 bytes a token.
  unsigned char* const results = shared + STAGES * Shared::kStage;
  const auto take_out = [&](int c) {
    const int64_t done = static_cast<int64_t>(c) * kChunk;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = 16 * i + (thread >> 3), piece = thread & 7;
      if (token < length - done) {
        *reinterpret_cast<uint4*>(out + (done + token) * a.out.st + piece * 8) =
            *reinterpret_cast<const uint4*>(results + (c & 1) * kPanelBytes +
                                            panel_offset(token, piece));
      }
    }
  };

  for (int c = 0; c < chunks; c++) {
    if (copies) {
      wait_copies<AHEAD - 1>();
      publish_shared();
    }
    __syncthreads();
    if (STAGES > 1 && copies) {
      if (c + AHEAD < chunks) {
        const uint32_t next = base + ((c + AHEAD) % STAGES) * Shared::kStage;
        ask_inputs(c + AHEAD, next);
        ask_factors(c + AHEAD, next);
      }
      commit_copies();
    }
    if (helper) {
      if (c > 0) take_out(c - 1);
      continue;
    }
    const uint32_t stage = base + (c % STAGES) * Shared::kStage;
    unsigned char* const stage_memory = shared + (c % STAGES) * Shared::kStage;
    const float* const vectors = reinterpret_cast<const float*>(stage_memory + Shared::kVectors);
    const int64_t done = static_cast<int64_t>(c) * kChunk;

    // The last decay from the start is zero if any is: then what the old state gave is dropped,
    // whatever it holds.
    const float w_last = vectors[3 * kChunk];
    const auto drop = [&](float (&c)[8][4], const float* w) {
      if (w_last != 0.f) return;
#pragma unroll
      for (int p = 0; p < 8; p++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if (w[8 * p + 2 * t + (e & 1)] == 0.f) c[p][e] = 0.f;
        }
      }
    };
    float O[8][4], U[8][4];
    uint32_t X[4][4];
    // The products with the old state, rounded: by k or by q.
    const auto multiply_state = [&](float (&c)[8][4], uint32_t panels) {
      uint32_t left[K / 16][4];
#pragma unroll
      for (int s = 0; s < K / 16; s++) pack_left(left[s], S.s[2 * s], S.s[2 * s + 1]);
      open_products();
      multiply_rows<false>(c, left[0], stage, panels, 0, 0, lanes);
#pragma unroll
      for (int s = 1; s < K / 16; s++) {
        multiply_rows(c, left[s], stage, panels + (s >> 2) * kPanelBytes, s & 3, 0, lanes);
      }
      close_products();
    };
    {
      float P[8][4];
      multiply_state(P, 0);
      // Alone on its multiprocessor a block fills the wait with the second product; among others it
      // forms that later and needs fewer registers.
      if (!LATE) multiply_state(O, Shared::kQueries);
      await_products<!LATE>(P);
      drop(P, vectors);
#pragma unroll
      for (int p = 0; p < 4; p++) {
        uint32_t r[4];
        load_values(r, stage, p);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float2 w = *reinterpret_cast<const float2*>(vectors + 16 * p + 8 * half + 2 * t);
          const float (&x)[4] = P[2 * p + half];
          const float2 low = unpack_bf16(r[2 * half]), high = unpack_bf16(r[2 * half + 1]);
          X[p][2 * half] = pack_bf16(low.x - w.x * x[0], low.y - w.y * x[1]);
          X[p][2 * half + 1] = pack_bf16(high.x - w.x * x[2], high.y - w.y * x[3]);
        }
      }
    }
    // Row j of the panel has zeros before column j.
    open_products();
    multiply_columns<false>(U, X[0], stage, Shared::kFactors, 0, 0, lanes);
#pragma unroll
    for (int s = 1; s < 4; s++) multiply_columns(U, X[s], stage, Shared::kFactors, s, s, lanes);
    close_products();
    if (LATE) {
      await_products<0>(U);
      multiply_state(O, Shared::kQueries);
    }
    await_products<!LATE>(O);
    drop(O, vectors);
#pragma unroll
    for (int p = 0; p < 8; p++) {
      const float2 w = *reinterpret_cast<const float2*>(vectors + kChunk + 8 * p + 2 * t);
#pragma unroll
      for (int e = 0; e < 4; e++) O[p][e] *= e & 1 ? w.y : w.x;
    }
    if (!LATE) await_products<0>(U);
    if (LOWRANK) {
      // The newest R updates of the sequence, for the window.
      const int R = static_cast<int>(a.window.R);
      if (done + kChunk > length - R) {
        float* const to = layout.updates + (n * a.HV + hv) * R * a.V + v0 + 16 * warp + g;
        const int base = static_cast<int>(done % R);
#pragma unroll
        for (int p = 0; p < 8; p++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int i = 8 * p + 2 * t + (e & 1);
            if (done + i >= length - R && done + i < length) {
              to[(base + i) % R * a.V + 8 * (e >> 1)] = U[p][e];
            }
          }
        }
      }
    }
    uint32_t left[4][4];
#pragma unroll
    for (int s = 0; s < 4; s++) pack_left(left[s], U[2 * s], U[2 * s + 1]);
    open_products();
#pragma unroll
    for (int s = 0; s < 4; s++) {
      multiply_rows(O, left[s], stage, Shared::kFactors + kPanelBytes, s, s, lanes);
    }
    close_products();
    if (LOWRANK) {
      // The next chunk starts from the newest R updates alone, as the window stores them; D_n is
      // zero for the others.
      clear(S.s);
      if (a.window.u_dtype != DType::f32) {
#pragma unroll
        for (int p = 0; p < 8; p++) {
#pragma unroll
          for (int e = 0; e < 4; e++) U[p][e] = round_as(a.window.u_dtype, U[p][e]);
        }
      }
    } else if (w_last == 0.f) {
      clear(S.s);
    } else {
#pragma unroll
      for (int p = 0; p < K / 8; p++) {
#pragma unroll
        for (int e = 0; e < 4; e++) S.s[p][e] *= w_last;
      }
    }
    update(U, stage, vectors + 2 * kChunk);
    await_products<1>(O);
    // Without helpers over the values of this warp, which nobody else reads.
    unsigned char* const result =
        HELPERS ? results + (c & 1) * kPanelBytes : stage_memory + Shared::kValues;
    __syncwarp();
#pragma unroll
    for (int p = 0; p < 8; p += 2) {
      uint32_t x[4];
#pragma unroll
      for (int m = 0; m < 4; m++) {
        x[m] = pack_bf16(O[p + (m >> 1)][2 * (m & 1)], O[p + (m >> 1)][2 * (m & 1) + 1]);
      }
      store_transposed(x, lane, [&](int l) {
        return result + panel_offset(8 * (p + (l >> 4)) + (l & 7), 2 * warp + ((l >> 3) & 1));
      });
    }
    if (!HELPERS) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int token = 16 * i + (lane >> 1), piece = 2 * warp + (lane & 1);
        if (token < length - done) {
          *reinterpret_cast<uint4*>(out + (done + token) * a.out.st + piece * 8) =
              *reinterpret_cast<const uint4*>(result + panel_offset(token, piece));
        }
      }
    }

    await_products<0>(S.s);
    if (!LOWRANK && a.edges > 0) {
      const int64_t end = done + kChunk;
      if (end <= length && end % a.C == 0 && end / a.C <= a.edges) {
        const int64_t row = at(a.edge_rows, n, end / a.C - 1);
        if (row >= 0 && row < a.write.P) keep(row);
      }
    }
    if (STAGES == 1 && c + 1 < chunks) {
      __syncthreads();
      ask_inputs(c + 1, base);
      ask_factors(c + 1, base);
      commit_copies();
    }
  }
  if (HELPERS) {
    __syncthreads();
    if (helper) {
      if (chunks > 0) take_out(chunks - 1);
      return;
    }
  }
  if (!LOWRANK) {
    const int64_t row = a.write_indices.ptr ? at(a.write_indices, n) : seq.row;
    if (row >= 0 && row < a.write.P) keep(row);
  }
}

}  // namespace cuda
}  // namespace gdn
