// Second kernel of chunked prefill: the state through the chunks of a sequence.
//
// A warp owns 16 rows of V of one value head and never needs another warp: the state is held as
// S [16, K] in accumulators, so that it is the left operand of both products with it as it lies in
// registers, and what comes out, transposed (rows of V, columns of tokens), is the left operand of
// the next. Per chunk, with X, U, O [16, 64]:
//   X = v^T - w rk (S k^T)      U = X inverse^T      O = scale w rq (S q^T) + U mixing^T
//   S = w_n S + (D_n rk U) k
// Right operands come from shared memory, filled by asynchronous copies. Products take 16-bit
// factors and sum in float32; the state itself stays float32.
#pragma once

#include "chunk_plan.cuh"

namespace gdn {
namespace cuda {

constexpr int kScanRows = 64;  // of V, a block; 16 a warp

template <int K>
struct ScanShared {
  static constexpr int kKeys = (K / 64) * kPanelBytes;
  static constexpr int kQueries = kKeys, kValues = 2 * kKeys;
  static constexpr int kFactors = kValues + kPanelBytes;
  static constexpr int kVectors = kFactors + 2 * kPanelBytes;
  static constexpr int kStage = kVectors + kFactorVectors * 4 + 128 - (kFactorVectors * 4) % 128;
};

// Two neighbours along K of a pool, in any layout and dtype.
__device__ __forceinline__ float2 load_pair(const StatePool& p, int64_t i) {
  if (p.s_k == 1 && p.dtype == DType::f32) {
    return *reinterpret_cast<const float2*>(static_cast<const float*>(p.ptr) + i);
  }
  return make_float2(load_as(p.ptr, p.dtype, i), load_as(p.ptr, p.dtype, i + p.s_k));
}
__device__ __forceinline__ void store_pair(const StatePool& p, int64_t i, float x, float y) {
  if (p.s_k == 1 && p.dtype == DType::f32) {
    *reinterpret_cast<float2*>(static_cast<float*>(p.ptr) + i) = make_float2(x, y);
  } else {
    store_as(p.ptr, p.dtype, i, x);
    store_as(p.ptr, p.dtype, i + p.s_k, y);
  }
}

template <int K>
struct ScanState {
  float s[K / 8][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int p = 0; p < K / 8; p++) s[p][0] = s[p][1] = s[p][2] = s[p][3] = 0.f;
  }
  // `at`: offset of row g, column 2t of this warp's 16 rows.
  __device__ __forceinline__ void load(const StatePool& pool, int64_t at) {
#pragma unroll
    for (int p = 0; p < K / 8; p++) {
      const float2 x = load_pair(pool, at + 8 * p * pool.s_k);
      const float2 y = load_pair(pool, at + 8 * p * pool.s_k + 8 * pool.s_v);
      s[p][0] = x.x;
      s[p][1] = x.y;
      s[p][2] = y.x;
      s[p][3] = y.y;
    }
  }
  __device__ __forceinline__ void store(const StatePool& pool, int64_t at) const {
#pragma unroll
    for (int p = 0; p < K / 8; p++) {
      store_pair(pool, at + 8 * p * pool.s_k, s[p][0], s[p][1]);
      store_pair(pool, at + 8 * p * pool.s_k + 8 * pool.s_v, s[p][2], s[p][3]);
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
  for (int i = threadIdx.x; i < kChunk; i += 128) {
    float sum = 0.f;
    for (int j = i + 1; j < fill; j++) {
      sum += w.g[row * w.sg_p + hv * w.sg_h + (counts.head + j) % R * w.sg_r];
    }
    decay[i] = i < fill ? expf(sum) : 0.f;
  }
  for (int i = threadIdx.x; i < kChunk * K; i += 128) {
    const int e = i / K, c = i % K, slot = (counts.head + e) % R;
    const float x =
        e < fill ? load_as(w.k, w.k_dtype, row * w.sk_p + hk * w.sk_h + slot * w.sk_r + c) : 0.f;
    reinterpret_cast<bf16*>(stage + (c >> 6) * kPanelBytes +
                            panel_offset(e, (c & 63) >> 3))[c & 7] = from_float<bf16>(x);
  }
  for (int i = threadIdx.x; i < kChunk * kScanRows; i += 128) {
    const int e = i / kScanRows, c = i % kScanRows, slot = (counts.head + e) % R;
    const float x =
        e < fill ? load_as(w.u, w.u_dtype, row * w.su_p + hv * w.su_h + slot * w.su_r + v0 + c)
                 : 0.f;
    reinterpret_cast<bf16*>(stage + Shared::kValues + panel_offset(e, c >> 3))[c & 7] =
        from_float<bf16>(x);
  }
  return true;
}

template <int K, int STAGES, int MIN_BLOCKS, bool LOWRANK>
__global__ void __launch_bounds__(128, MIN_BLOCKS)
    chunk_scan(const __grid_constant__ ChunkArgs a, const __grid_constant__ ChunkLayout layout) {
  using Shared = ScanShared<K>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
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
    for (int64_t i = threadIdx.x; i < length * 8; i += 128) {
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
    copy_rows<K / 8>(stage, k + done * a.k.st, a.k.st, tokens);
    copy_rows<K / 8>(stage + Shared::kQueries, q + done * a.q.st, a.q.st, tokens);
    copy_rows<8>(stage + Shared::kValues, v + done * a.v.st, a.v.st, tokens);
  };
  const auto ask_factors = [&](int c, uint32_t stage) {
    const unsigned char* const from = factors + static_cast<int64_t>(c) * a.HV * kFactorBytes;
#pragma unroll
    for (int i = 0; i < 2 * kPanelBytes / 16 / 128; i++) {
      const int p = (threadIdx.x + 128 * i) * 16;
      copy_async(stage + Shared::kFactors + p, from + p, true);
    }
    if (threadIdx.x < kFactorVectors / 4) {
      const int p = 2 * kPanelBytes + threadIdx.x * 16;
      copy_async(stage + Shared::kFactors + p, from + p, true);
    }
  };

  // Addresses of the right operands: rows of eight lanes, and a piece that steps along the product.
  const int row_n = ((lane >> 4) << 3) + (lane & 7), piece_n = (lane >> 3) & 1;  // plain
  const int row_k = lane & 15, piece_k = lane >> 4;                              // transposed
  const uint32_t plain = row_n * 128, across = row_k * 128;
  const uint32_t plain_x = (piece_n ^ (lane & 7)) << 4, across_x = (piece_k ^ (lane & 7)) << 4;

  ScanState<K> S;
  // S += (decay U) k, U as accumulators.
  const auto update = [&](const float (&u)[8][4], uint32_t stage, const float* decay) {
#pragma unroll
    for (int s = 0; s < 4; s++) {
      const float2 d = *reinterpret_cast<const float2*>(decay + 16 * s + 2 * t);
      const float2 e = *reinterpret_cast<const float2*>(decay + 16 * s + 8 + 2 * t);
      const float (&x)[4] = u[2 * s];
      const float (&y)[4] = u[2 * s + 1];
      const uint32_t left[4] = {
          pack_bf16(d.x * x[0], d.y * x[1]), pack_bf16(d.x * x[2], d.y * x[3]),
          pack_bf16(e.x * y[0], e.y * y[1]), pack_bf16(e.x * y[2], e.y * y[3])};
#pragma unroll
      for (int p = 0; p < K / 16; p++) {
        uint32_t b[4];
        load_transposed(
            b, stage + (p >> 2) * kPanelBytes + s * 2048 + across + (((p & 3) << 5) ^ across_x));
        multiply(S.s[2 * p], left, b[0], b[1]);
        multiply(S.s[2 * p + 1], left, b[2], b[3]);
      }
    }
  };
  // v^T of this warp's rows, tokens 16 p ...: registers (g, tokens), (g + 8, tokens), next 8
  // tokens.
  const auto load_values = [&](uint32_t (&r)[4], uint32_t stage, int p) {
    const int row = 16 * p + row_n;
    load_transposed(r, stage + Shared::kValues + panel_offset(row, 2 * warp + piece_n));
  };

  const int64_t row_offset = static_cast<int64_t>(v0 + 16 * warp + g);
  const auto keep = [&](int64_t row) {
    S.store(a.write,
            row * a.write.s_p + hv * a.write.s_h + row_offset * a.write.s_v + 2 * t * a.write.s_k);
  };

  if (LOWRANK) {
    S.clear();
    wait_for_previous_kernel();
    if (!seq.fresh && chunks > 0 && load_window<K>(a, seq.row, hk, hv, v0, shared)) {
      __syncthreads();
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
      __syncthreads();
    }
    if (chunks > 0) {
      ask_inputs(0, base);
      ask_factors(0, base);
    }
  } else {
    if (chunks > 0) ask_inputs(0, base);
    // Inputs are older than the first kernel, which has waited for all that came before it.
    if (a.read.ptr && !seq.fresh) {
      S.load(a.read,
             seq.row * a.read.s_p + hv * a.read.s_h + row_offset * a.read.s_v + 2 * t * a.read.s_k);
    } else {
      S.clear();
    }
    wait_for_previous_kernel();
    if (chunks > 0) ask_factors(0, base);
  }
  commit_copies();

  for (int c = 0; c < chunks; c++) {
    wait_copies<0>();
    __syncthreads();
    const uint32_t stage = base + (c % STAGES) * Shared::kStage;
    unsigned char* const stage_memory = shared + (c % STAGES) * Shared::kStage;
    if (STAGES > 1 && c + 1 < chunks) {
      const uint32_t next = base + ((c + 1) % STAGES) * Shared::kStage;
      ask_inputs(c + 1, next);
      ask_factors(c + 1, next);
      commit_copies();
    }
    const float* const vectors = reinterpret_cast<const float*>(stage_memory + Shared::kVectors);
    const int64_t done = static_cast<int64_t>(c) * kChunk;
    const int tokens = length - done < kChunk ? static_cast<int>(length - done) : kChunk;

    float O[8][4] = {}, U[8][4] = {};
    uint32_t X[4][4];
    {
      float P[8][4] = {};
#pragma unroll
      for (int s = 0; s < K / 16; s++) {
        uint32_t left[4];
        pack_left(left, S.s[2 * s], S.s[2 * s + 1]);
        const uint32_t at = stage + (s >> 2) * kPanelBytes + plain + (((s & 3) << 5) ^ plain_x);
#pragma unroll
        for (int p = 0; p < 4; p++) {
          uint32_t b[4];
          load_matrices(b, at + p * 2048);
          multiply(P[2 * p], left, b[0], b[1]);
          multiply(P[2 * p + 1], left, b[2], b[3]);
          load_matrices(b, at + Shared::kQueries + p * 2048);
          multiply(O[2 * p], left, b[0], b[1]);
          multiply(O[2 * p + 1], left, b[2], b[3]);
        }
      }
#pragma unroll
      for (int p = 0; p < 4; p++) {
        uint32_t r[4];
        load_values(r, stage, p);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int i = 16 * p + 8 * half + 2 * t;
          const float2 wk = *reinterpret_cast<const float2*>(vectors + i);
          const float2 wq = *reinterpret_cast<const float2*>(vectors + kChunk + i);
          const float (&x)[4] = P[2 * p + half];
          float (&o)[4] = O[2 * p + half];
          const float2 low = unpack_bf16(r[2 * half]), high = unpack_bf16(r[2 * half + 1]);
          // A decay of zero drops the old state, whatever it holds.
          X[p][2 * half] = pack_bf16(wk.x == 0.f ? low.x : low.x - wk.x * x[0],
                                     wk.y == 0.f ? low.y : low.y - wk.y * x[1]);
          X[p][2 * half + 1] = pack_bf16(wk.x == 0.f ? high.x : high.x - wk.x * x[2],
                                         wk.y == 0.f ? high.y : high.y - wk.y * x[3]);
          o[0] = wq.x == 0.f ? 0.f : wq.x * o[0];
          o[1] = wq.y == 0.f ? 0.f : wq.y * o[1];
          o[2] = wq.x == 0.f ? 0.f : wq.x * o[2];
          o[3] = wq.y == 0.f ? 0.f : wq.y * o[3];
        }
      }
    }
    // U = X inverse^T: rows j of the panel, columns i >= j only.
#pragma unroll
    for (int s = 0; s < 4; s++) {
#pragma unroll
      for (int p = s; p < 4; p++) {
        uint32_t b[4];
        load_transposed(b, stage + Shared::kFactors + s * 2048 + across + ((p << 5) ^ across_x));
        multiply(U[2 * p], X[s], b[0], b[1]);
        multiply(U[2 * p + 1], X[s], b[2], b[3]);
      }
    }
    if (LOWRANK) {
      // The newest R updates of the sequence, for the window, and as the window stores them.
      const int64_t R = a.window.R;
      float* const to = layout.updates + (n * a.HV + hv) * R * a.V + v0 + 16 * warp + g;
#pragma unroll
      for (int p = 0; p < 8; p++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int64_t token = done + 8 * p + 2 * t + (e & 1);
          if (token >= length - R && token < length) {
            to[token % R * a.V + 8 * (e >> 1)] = U[p][e];
          }
        }
      }
    }
    // O += U mixing^T: rows i of the panel, columns j <= i only.
#pragma unroll
    for (int s = 0; s < 4; s++) {
      uint32_t left[4];
      pack_left(left, U[2 * s], U[2 * s + 1]);
#pragma unroll
      for (int p = s; p < 4; p++) {
        uint32_t b[4];
        load_matrices(
            b, stage + Shared::kFactors + kPanelBytes + p * 2048 + plain + ((s << 5) ^ plain_x));
        multiply(O[2 * p], left, b[0], b[1]);
        multiply(O[2 * p + 1], left, b[2], b[3]);
      }
    }
    // Over the values of this warp, which nobody else reads, and out in 16-byte pieces.
    __syncwarp();
#pragma unroll
    for (int p = 0; p < 8; p++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint32_t x = transpose_matrix(pack_bf16(O[p][2 * half], O[p][2 * half + 1]));
        *reinterpret_cast<uint32_t*>(stage_memory + Shared::kValues +
                                     panel_offset(8 * p + g, 2 * warp + half) + 4 * t) = x;
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = 16 * i + (lane >> 1), piece = 2 * warp + (lane & 1);
      if (token < tokens) {
        *reinterpret_cast<uint4*>(out + (done + token) * a.out.st + piece * 8) =
            *reinterpret_cast<const uint4*>(stage_memory + Shared::kValues +
                                            panel_offset(token, piece));
      }
    }

    if (LOWRANK) {
      if (c + 1 < chunks) {
        // What the next chunk starts from: the newest R updates alone.
        S.clear();
        const int first = kChunk - static_cast<int>(a.window.R);
#pragma unroll
        for (int p = 0; p < 8; p++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const float u = U[p][e];
            U[p][e] = 8 * p + 2 * t + (e & 1) < first ? 0.f : round_as(a.window.u_dtype, u);
          }
        }
        update(U, stage, vectors + 2 * kChunk);
      }
    } else {
      const float w = vectors[3 * kChunk];
#pragma unroll
      for (int p = 0; p < K / 8; p++) {
#pragma unroll
        for (int e = 0; e < 4; e++) S.s[p][e] = w == 0.f ? 0.f : w * S.s[p][e];
      }
      update(U, stage, vectors + 2 * kChunk);
      const int64_t end = done + kChunk;
      if (a.edges > 0 && end <= length && end % a.C == 0 && end / a.C <= a.edges) {
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
  if (!LOWRANK) {
    const int64_t row = a.write_indices.ptr ? at(a.write_indices, n) : seq.row;
    if (row >= 0 && row < a.write.P) keep(row);
  }
}

}  // namespace cuda
}  // namespace gdn
