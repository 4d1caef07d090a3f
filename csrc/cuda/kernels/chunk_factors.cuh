// First kernel of chunked prefill: everything that does not depend on the state, for all chunks at
// once. A block takes one chunk of one key head and walks its value heads: k k^T and q k^T are
// formed once for all of them.
//
// (1 + A)^-1 by blocks of 16 tokens: the diagonal blocks by forward substitution in float32, the
// others by products in 11-bit precision, or in twice that where the result has two parts. A warp
// owns a column of blocks and holds it transposed, so that a block just computed is the left
// operand of the next product as it lies in registers.
#pragma once

#include "chunk_plan.cuh"

namespace gdn {
namespace cuda {

constexpr int kTrianglePitch = 72;  // floats; eight rows of float2 in different banks
constexpr int kTriangle = kChunk * kTrianglePitch;

// A decay below exp(-128) is zero in float32; bounding its logarithm keeps every difference of
// totals finite, -inf included.
constexpr float kLeastLogDecay = -128.f, kLog2e = 1.4426950408889634f;

template <class IN, int K>
struct FactorsShared {
  static constexpr int kParts = Format<IN>::kParts;
  static constexpr int kKeys = 2 * Format<IN>::template key_bytes<K>();
  // After the products the panels of k and q make room for A, twice, and the two results.
  static constexpr int kResults = 2 * kTriangle * 4;
  static constexpr int kWork = kResults + 2 * kParts * kPanelBytes;
  static_assert(kKeys <= kWork, "K is at most 128");
  // Vectors of 64 floats a value head: sums of base-2 log decays from the start, sums over later
  // tokens, beta; with two parts what the first sums lose in float32.
  static constexpr int kGates = kParts == 2 ? 4 : 3;
  static int bytes(int ratio) { return kWork + 4 * kChunk * (2 + kGates * ratio); }
};

// Rows of float32 tokens, four columns at a time; zeros from row `tokens` on.
struct TokenRows {
  const float* from;
  int64_t stride;
  int tokens;
  __device__ __forceinline__ float4 operator()(int row, int column) const {
    return row < tokens ? *reinterpret_cast<const float4*>(from + row * stride + column)
                        : make_float4(0.f, 0.f, 0.f, 0.f);
  }
};
// Rows of K floats, four at a time from `load(row, first column)`, into panels of `rows` rows. Two
// parts: each row multiplied by a power of two that brings its largest element near 8; factor[row]:
// the inverse norm, or 1, over that power. Called by WARPS warps.
template <class IN, int K, int WARPS = 4, class Load>
__device__ __forceinline__ void pack_rows(unsigned char* panels, float* factor, int rows,
                                          bool l2norm, Load&& load, float* norm = nullptr) {
  using Form = Format<IN>;
  using T = typename Form::T;
  constexpr int PARTS = Form::kParts;
  constexpr int LANES = K / 4, ROWS = 32 / LANES;  // lanes a row, rows an access
  constexpr int AT_ONCE = WARPS == 4 ? 8 : kChunk / (WARPS * ROWS);
  const int warp = threadIdx.x >> 5, l = threadIdx.x % LANES, first = (threadIdx.x & 31) / LANES;
  for (int batch = 0; batch < rows; batch += WARPS * ROWS * AT_ONCE) {
    float4 x[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int row = batch + (WARPS * i + warp) * ROWS + first;
      x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (row < rows) x[i] = load(row, 4 * l);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int row = batch + (WARPS * i + warp) * ROWS + first;
      PowerOfTwo scale;
      if constexpr (PARTS == 2) {
        float most =
            fmaxf(fmaxf(fabsf(x[i].x), fabsf(x[i].y)), fmaxf(fabsf(x[i].z), fabsf(x[i].w)));
#pragma unroll
        for (int m = LANES / 2; m; m >>= 1) {
          most = fmaxf(most, __shfl_xor_sync(kFullMask, most, m));
        }
        scale = PowerOfTwo(most, 3);
      }
      float sum =
          __fmaf_rn(x[i].x, x[i].x, x[i].y * x[i].y) + __fmaf_rn(x[i].z, x[i].z, x[i].w * x[i].w);
      sum = lane_sum<LANES>(sum);
      if (row >= rows) continue;
      uint32_t low[PARTS], high[PARTS];
      pack_parts<T>(low, x[i].x * scale.by, x[i].y * scale.by);
      pack_parts<T>(high, x[i].z * scale.by, x[i].w * scale.by);
      unsigned char* const to =
          panels + (l >> 4) * rows * 128 + panel_offset(row, (l & 15) >> 1) + (l & 1) * 8;
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        *reinterpret_cast<uint2*>(to + part * (K / 64) * rows * 128) =
            make_uint2(low[part], high[part]);
      }
      if (l == 0) {
        const float x = l2norm ? rsqrtf(sum + kL2Eps) : 1.f;
        factor[row] = x * scale.back;
        if (norm) norm[row] = x;
      }
    }
  }
}

// Two elements side by side, at once where the memory allows it.
__device__ __forceinline__ float2 load_two(const void* p, DType d, int64_t i, bool vectors) {
  if (!vectors) return make_float2(load_as(p, d, i), load_as(p, d, i + 1));
  if (d == DType::f32) return *reinterpret_cast<const float2*>(static_cast<const float*>(p) + i);
  const uint32_t x = *reinterpret_cast<const uint32_t*>(static_cast<const uint16_t*>(p) + i);
  return d == DType::bf16 ? unpack_pair<bf16>(x) : unpack_pair<f16>(x);
}

// The window that a sequence starts from, slot by slot: the live ones are the `fill` behind `head`.
struct LiveSlots {
  int R = 0, head = 0, fill = 0;
  __device__ __forceinline__ void read(const Window& w, const Sequence& seq) {
    R = static_cast<int>(w.R);
    if (seq.row < 0 || seq.fresh) return;
    const WindowCounts counts = unpack_fill(w.fill[seq.row * w.s_fill]);
    head = counts.head;
    fill = counts.fill < R ? counts.fill : R;
  }
  __device__ __forceinline__ int slot_of(int entry) const {
    const int slot = head + entry;
    return slot < R ? slot : slot - R;
  }
  __device__ __forceinline__ bool live(int slot) const {
    const int entry = slot < head ? slot + R - head : slot - head;
    return slot < R && entry < fill;
  }
};
// The decay from each of its entries to the end of the window, zero where there is none. By a warp.
__device__ __forceinline__ void window_decays(float* to, const float* g, int64_t step,
                                              const LiveSlots& slots, int room, int lane) {
  // Lane l: sums over the entries after l and after l + 32, taken from the newest on.
  const auto log_decay = [&](int e) { return e < slots.fill ? g[slots.slot_of(e) * step] : 0.f; };
  float late = log_decay(64 - lane), early = log_decay(32 - lane);
  scan64(late, early, lane);
  const float x = __shfl_sync(kFullMask, early, 31 - lane);
  const float y = __shfl_sync(kFullMask, late, 31 - lane);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int e = lane + 32 * half;
    if (e >= room) continue;
    to[e < slots.R ? slots.slot_of(e) : e] = e < slots.fill ? expf(half ? y : x) : 0.f;
  }
}

// Vectors of 64 floats for each value head of a key head, see FactorsShared::kGates; a warp takes a
// value head at a time.
template <int PARTS>
__device__ __forceinline__ void load_decays(float* gates, const ChunkArgs& a, const OwnedChunk& own,
                                            int64_t hk, int ratio, int warp, int warps, int lane) {
  constexpr int GATES = PARTS == 2 ? 4 : 3;
  for (int h = warp; h < ratio; h += warps) {
    RawGates raw[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = lane + 32 * e;
      raw[e] = load_gates(a.gates, own.b, own.start + (i < own.tokens ? i : 0), hk * ratio + h);
    }
    float sums[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = lane + 32 * e;
      const float x = bits_to_float(raw[e].g, a.gates.g.dtype);
      const float beta = bits_to_float(raw[e].beta, a.gates.beta.dtype);
      sums[e] = i >= own.tokens ? 0.f : kLog2e * (x < kLeastLogDecay ? kLeastLogDecay : x);
      gates[(h * GATES + 2) * kChunk + i] = i >= own.tokens ? 0.f : beta;
    }
    // Sums over later tokens: the same scan over the reversed order, each value without its own.
    const float back_low = __shfl_sync(kFullMask, sums[1], 31 - lane);
    const float back_high = __shfl_sync(kFullMask, sums[0], 31 - lane);
    float low = __shfl_up_sync(kFullMask, back_low, 1);
    float high = __shfl_up_sync(kFullMask, back_high, 1);
    const float middle = __shfl_sync(kFullMask, back_low, 31);
    if (lane == 0) {
      low = 0.f;
      high = middle;
    }
    scan64(low, high, lane);
    gates[(h * GATES + 1) * kChunk + lane] = __shfl_sync(kFullMask, high, 31 - lane);
    gates[(h * GATES + 1) * kChunk + lane + 32] = __shfl_sync(kFullMask, low, 31 - lane);
    std::conditional_t<PARTS == 2, double, float> totals[2] = {sums[0], sums[1]};
    scan64(totals[0], totals[1], lane);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float x = static_cast<float>(totals[e]);
      gates[h * GATES * kChunk + lane + 32 * e] = x;
      if constexpr (PARTS == 2) {
        gates[(h * GATES + 3) * kChunk + lane + 32 * e] = static_cast<float>(totals[e] - x);
      }
    }
  }
}

// body(integral_constant of this warp): its share of the triangle is then known to the compiler,
// and tiles need no branches.
template <class Body>
__device__ __forceinline__ void by_warp(int warp, Body&& body) {
  switch (warp) {
    case 0:
      return body(std::integral_constant<int, 0>());
    case 1:
      return body(std::integral_constant<int, 1>());
    case 2:
      return body(std::integral_constant<int, 2>());
    default:
      return body(std::integral_constant<int, 3>());
  }
}

// ENTRIES: 0, or low rank with a window of at most so many.
template <class IN, int K, int ENTRIES>
__global__ void __launch_bounds__(128, Format<IN>::kParts == 1 && ENTRIES == 16 ? 4 : 3)
    chunk_factors(const __grid_constant__ ChunkArgs a, const __grid_constant__ ChunkLayout layout) {
  using Shared = FactorsShared<IN, K>;
  using Form = Format<IN>;
  using T = typename Form::T;
  constexpr int PARTS = Form::kParts, GATES = Shared::kGates;
  constexpr int STEP = (K / 64) * kPanelBytes;  // between the parts of keys
  constexpr bool LOWRANK = ENTRIES > 0;
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const keys = shared;
  unsigned char* const queries = shared + Shared::kKeys / 2;
  float* const triangles = reinterpret_cast<float*>(shared);
  unsigned char* const inverse = shared + Shared::kResults;
  unsigned char* const mixing = inverse + Form::kMixing;
  float* const rk = reinterpret_cast<float*>(shared + Shared::kWork);
  float* const rq = rk + kChunk;
  float* const gates = rq + kChunk;  // [ratio][GATES][64]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int64_t slot = blockIdx.x, hk = blockIdx.y;
  const int ratio = layout.ratio.divisor;

  // The next kernel is not let in early: its blocks would take the place of this one's.
  wait_for_previous_kernel();
  const OwnedChunk own = chunk_of_slot(a, layout, slot);
  if (own.tokens == 0) return;
  const IN* const k = static_cast<const IN*>(a.k.ptr) + offset_of(a.k, own.b, own.start, hk);
  const IN* const q = static_cast<const IN*>(a.q.ptr) + offset_of(a.q, own.b, own.start, hk);
  if constexpr (PARTS == 1) {
    copy_rows<K / 8>(shared_address(keys), k, a.k.st, own.tokens, threadIdx.x);
    copy_rows<K / 8>(shared_address(queries), q, a.q.st, own.tokens, threadIdx.x);
    commit_copies();
  } else {
    pack_rows<IN, K>(keys, rk, kChunk, a.l2norm, TokenRows{k, a.k.st, own.tokens});
    pack_rows<IN, K>(queries, rq, kChunk, a.l2norm, TokenRows{q, a.q.st, own.tokens});
  }

  // Low rank: the keys that the chunk starts from, those of the window, slot by slot, or the last
  // of the chunk before; 16 at a time, as left operands are. They are asked for first.
  using Pair = std::conditional_t<PARTS == 2, float2, uint32_t>;
  Pair raw[K / 16][4];
  const Window& w = a.window;
  LiveSlots slots;
  const void* entries = k - static_cast<int64_t>(ENTRIES) * a.k.st;
  int64_t entry_pitch = a.k.st;
  bool plain = true;  // pairs of IN
  const float* decays = nullptr;
  if (LOWRANK && own.first) {
    const Sequence seq = device_sequence(a.seqs, own.n);
    slots.read(w, seq);
    const int64_t at = seq.row * w.sk_p + hk * w.sk_h;
    entries = static_cast<const char*>(w.k) + at * (w.k_dtype == DType::f32 ? 4 : 2);
    entry_pitch = w.sk_r;
    plain = w.k_dtype == TypeOf<IN>::value && layout.window_vectors;
    decays = w.g + seq.row * w.sg_p + hk * ratio * w.sg_h;
  }
  const auto ask_entries = [&](int block) {
    bool there[2];
    int64_t from[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int e = 16 * block + g + 8 * half;
      there[half] = own.first ? slots.live(e) : e >= ENTRIES - static_cast<int>(w.R);
      from[half] = e * entry_pitch + 2 * t;
    }
#pragma unroll
    for (int s = 0; s < K / 16; s++) {
#pragma unroll
      for (int i = 0; i < 4; i++) raw[s][i] = Pair();
    }
    if (plain) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const IN* const row = static_cast<const IN*>(entries) + from[half];
        if (there[half]) {
#pragma unroll
          for (int s = 0; s < K / 8; s++) {
            raw[s / 2][half + 2 * (s & 1)] = *reinterpret_cast<const Pair*>(row + 8 * s);
          }
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (there[i & 1]) {
#pragma unroll
          for (int s = 0; s < K / 16; s++) {
            const float2 x = load_two(entries, w.k_dtype, from[i & 1] + 16 * s + 8 * (i >> 1),
                                      layout.window_vectors);
            if constexpr (PARTS == 2) {
              raw[s][i] = x;
            } else {
              raw[s][i] = pack_pair<T>(x.x, x.y);
            }
          }
        }
      }
    }
  };
  if constexpr (LOWRANK) {
    ask_entries(0);
    for (int h = warp; own.first && h < ratio; h += 4) {
      window_decays(layout.decays + (slot * a.HV + hk * ratio + h) * kChunk, decays + h * w.sg_h,
                    w.sg_r, slots, ENTRIES, lane);
    }
  }

  load_decays<PARTS>(gates, a, own, hk, ratio, warp, 4, lane);
  wait_copies<0>();
  __syncthreads();

  if constexpr (PARTS == 1) {
    // Inverse norms: a thread for each row of k and of q.
    const int row = threadIdx.x & 63;
    const unsigned char* const from = threadIdx.x < 64 ? keys : queries;
    float sum = 0.f;
    if (a.l2norm) {
#pragma unroll
      for (int p = 0; p < K / 8; p++) {
        float x[8];
        Vec<T>::unpack(*reinterpret_cast<const uint4*>(from + (p >> 3) * kPanelBytes +
                                                       panel_offset(row, p & 7)),
                       x);
#pragma unroll
        for (int e = 0; e < 8; e++) sum = __fmaf_rn(x[e], x[e], sum);
      }
    }
    (threadIdx.x < 64 ? rk : rq)[row] = a.l2norm ? rsqrtf(sum + kL2Eps) : 1.f;
  } else if constexpr (!LOWRANK) {
    unsigned char* const to = layout.keys + (slot * a.H + hk) * Shared::kKeys;
    for (int i = threadIdx.x * 16; i < Shared::kKeys; i += 128 * 16) {
      *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(keys + i);
    }
  }

  // Their products with keys and queries of the chunk: columns 16 warp ... belong to a warp.
  constexpr int BLOCKS = LOWRANK ? ENTRIES / 16 : 1;
  float ek[BLOCKS][2][4] = {}, eq[BLOCKS][2][4] = {}, entry_norm[BLOCKS][2];
  if constexpr (LOWRANK) {
    const uint32_t base = shared_address(keys);
    const int right = 16 * warp + ((lane >> 4) << 3) + (lane & 7);
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
      if (block > 0) ask_entries(block);
      float scale[2] = {1.f, 1.f};
      entry_norm[block][0] = entry_norm[block][1] = 1.f;
      if constexpr (PARTS == 2) {
        // As the rows of the chunk before were scaled, which its vectors undo.
        float most[2] = {};
#pragma unroll
        for (int s = 0; s < K / 16; s++) {
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float2 x = raw[s][i];
            most[i & 1] = fmaxf(most[i & 1], fmaxf(fabsf(x.x), fabsf(x.y)));
          }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
          most[half] = fmaxf(most[half], __shfl_xor_sync(kFullMask, most[half], 1));
          most[half] = fmaxf(most[half], __shfl_xor_sync(kFullMask, most[half], 2));
          const PowerOfTwo power(most[half], 3);
          scale[half] = power.by;
          if (own.first) entry_norm[block][half] = power.back;
        }
      } else if (a.l2norm && !own.first) {
        float sum[2] = {};
#pragma unroll
        for (int s = 0; s < K / 16; s++) {
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float2 x = unpack_pair<T>(raw[s][i]);
            sum[i & 1] = __fmaf_rn(x.x, x.x, __fmaf_rn(x.y, x.y, sum[i & 1]));
          }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
          entry_norm[block][half] = rsqrtf(lane_sum<4>(sum[half]) + kL2Eps);
        }
      }
#pragma unroll
      for (int s = 0; s < K / 16; s++) {
        uint32_t left[PARTS][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if constexpr (PARTS == 1) {
            left[0][i] = raw[s][i];
          } else {
            const float by = scale[i & 1];
            uint32_t r[PARTS];
            pack_parts<T>(r, raw[s][i].x * by, raw[s][i].y * by);
#pragma unroll
            for (int part = 0; part < PARTS; part++) left[part][i] = r[part];
          }
        }
        const uint32_t from =
            base + (s >> 2) * kPanelBytes + panel_offset(right, (s & 3) * 2 + ((lane >> 3) & 1));
#pragma unroll
        for (int part = PARTS - 1; part >= 0; part--) {
          uint32_t bk[4], bq[4];
          load_matrices(bk, from + part * STEP);
          load_matrices(bq, from + part * STEP + Shared::kKeys / 2);
#pragma unroll
          for (int x = PARTS - 1 - part; x >= 0; x--) {
#pragma unroll
            for (int p = 0; p < 2; p++) {
              mma_16x8x16<T>(ek[block][p], left[x], bk[2 * p], bk[2 * p + 1]);
              mma_16x8x16<T>(eq[block][p], left[x], bq[2 * p], bq[2 * p + 1]);
            }
          }
        }
      }
    }
  }

  // Rows 16 warp ... of k k^T and q k^T, up to the diagonal.
  float kk[8][4] = {}, qk[8][4] = {};
  by_warp(warp, [&](auto own_warp) {
    constexpr int W = decltype(own_warp)::value;
    const uint32_t base = shared_address(keys);
    const int left = 16 * W + (lane & 15), right = ((lane >> 4) << 3) + (lane & 7);
#pragma unroll
    for (int s = 0; s < K / 16; s++) {
      const uint32_t panel = base + (s >> 2) * kPanelBytes;
      const int piece = (s & 3) * 2;
      uint32_t ak[PARTS][4], aq[PARTS][4];
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        const uint32_t from = panel + part * STEP + panel_offset(left, piece + (lane >> 4));
        load_matrices(ak[part], from);
        load_matrices(aq[part], from + Shared::kKeys / 2);
      }
#pragma unroll
      for (int p = 0; p <= W; p++) {
        const uint32_t from = panel + panel_offset(16 * p + right, piece + ((lane >> 3) & 1));
#pragma unroll
        for (int part = PARTS - 1; part >= 0; part--) {
          uint32_t b[4];
          load_matrices(b, from + part * STEP);
#pragma unroll
          for (int x = PARTS - 1 - part; x >= 0; x--) {
            mma_16x8x16<T>(kk[2 * p], ak[x], b[0], b[1]);
            mma_16x8x16<T>(kk[2 * p + 1], ak[x], b[2], b[3]);
            mma_16x8x16<T>(qk[2 * p], aq[x], b[0], b[1]);
            mma_16x8x16<T>(qk[2 * p + 1], aq[x], b[2], b[3]);
          }
        }
      }
    }
  });
  __syncthreads();  // the panels of k and q are free; rk and rq are there
  if constexpr (LOWRANK) {
    constexpr int BYTES = Form::gram_bytes(ENTRIES);
    unsigned char* const to = layout.keys + (slot * a.H + hk) * 2 * BYTES;
#pragma unroll
    for (int p = 0; p < 2; p++) {
      float2 key = make_float2(1.f, 1.f), query = key;
      if constexpr (PARTS == 1) {
        key = *reinterpret_cast<const float2*>(rk + 16 * warp + 8 * p + 2 * t);
        query = *reinterpret_cast<const float2*>(rq + 16 * warp + 8 * p + 2 * t);
      }
#pragma unroll
      for (int block = 0; block < BLOCKS; block++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float norm = entry_norm[block][half];
          const float (&x)[4] = ek[block][p], (&y)[4] = eq[block][p];
          uint32_t r[PARTS], z[PARTS];
          pack_parts<T>(r, norm * key.x * x[2 * half], norm * key.y * x[2 * half + 1]);
          pack_parts<T>(z, norm * query.x * y[2 * half], norm * query.y * y[2 * half + 1]);
          unsigned char* const at =
              to + panel_offset(16 * block + g + 8 * half, 2 * warp + p) + 4 * t;
#pragma unroll
          for (int part = 0; part < PARTS; part++) {
            *reinterpret_cast<uint32_t*>(at + part * ENTRIES * 128) = r[part];
            *reinterpret_cast<uint32_t*>(at + part * ENTRIES * 128 + BYTES) = z[part];
          }
        }
      }
    }
  }
  by_warp(warp, [&](auto own_warp) {
    constexpr int W = decltype(own_warp)::value;
#pragma unroll
    for (int p = 0; p < 2 * W + 2; p++) {
      const float2 key = *reinterpret_cast<const float2*>(rk + 8 * p + 2 * t);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int i = 16 * W + g + (e >> 1) * 8, j = 8 * p + 2 * t + (e & 1);
        const float scale = e & 1 ? key.y : key.x;
        kk[p][e] = p < 2 * W || j < i ? kk[p][e] * (rk[i] * scale) : 0.f;
        const float query = PARTS == 2 ? scale : a.scale * rq[i] * scale;
        qk[p][e] = p < 2 * W || j <= i ? qk[p][e] * query : 0.f;
      }
    }
  });
  unsigned char* const out = layout.factors + (slot * a.HV + hk * ratio) * Form::kBytes;
  for (int x = threadIdx.x; x < ratio * kChunk; x += 128) {
    const int h = x / kChunk, i = x % kChunk;
    const float w = exp2_flushed(gates[h * GATES * kChunk + i]);
    float* const to = reinterpret_cast<float*>(out + h * Form::kBytes + Form::kVectors);
    constexpr bool APART = LOWRANK && PARTS == 1;  // norms are factors of the products
    const float own_key = APART ? 1.f : rk[i], own_query = APART ? 1.f : rq[i];
    to[i] = w * own_key;
    if (layout.beta) {
      layout.beta[((slot * a.HV + hk * ratio) + h) * kChunk + i] =
          gates[(h * GATES + 2) * kChunk + i];
    }
    to[kChunk + i] = PARTS == 2 ? w : a.scale * w * own_query;
    // Low-rank: of a chunk that another one follows, the newest R tokens are all that is left.
    const bool lost = LOWRANK && i < kChunk - a.window.R;
    to[2 * kChunk + i] = lost ? 0.f : exp2_flushed(gates[(h * GATES + 1) * kChunk + i]) * own_key;
    if constexpr (PARTS == 2) {
      to[3 * kChunk + i] = a.scale * rq[i];
    } else {
      if (i == kChunk - 1) to[Form::kLast] = w;
    }
  }

  // One barrier a value head: what a warp writes before it, all read after it, and the barrier of
  // the next head keeps the one after that from overwriting it.
  for (int h = 0; h < ratio; h++) {
    const float* const sums = gates + h * GATES * kChunk;
    const float* const beta = sums + 2 * kChunk;
    float* const A = triangles + (h & 1) * kTriangle;
    // Rows 16 warp ... of A and of the mixing panel.
    by_warp(warp, [&](auto own_warp) {
      constexpr int W = decltype(own_warp)::value;
      float sum_i[2], rest_i[2], beta_i[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        sum_i[half] = sums[16 * W + g + half * 8];
        rest_i[half] = PARTS == 2 ? sums[3 * kChunk + 16 * W + g + half * 8] : 0.f;
        beta_i[half] = beta[16 * W + g + half * 8];
      }
#pragma unroll
      for (int p = 0; p < 8; p++) {
        if (p > 2 * W + 1 && h > 0) continue;
        const int j = 8 * p + 2 * t;
        const float2 sum_j = *reinterpret_cast<const float2*>(sums + j);
        float2 rest_j = make_float2(0.f, 0.f);
        if constexpr (PARTS == 2) {
          rest_j = *reinterpret_cast<const float2*>(sums + 3 * kChunk + j);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int i = 16 * W + g + half * 8;
          uint32_t m[PARTS] = {};
          if (p <= 2 * W + 1) {
            float d0 = sum_i[half] - sum_j.x, d1 = sum_i[half] - sum_j.y;
            if constexpr (PARTS == 2) {
              d0 += rest_i[half] - rest_j.x;
              d1 += rest_i[half] - rest_j.y;
            }
            if (p >= 2 * W) {
              // Above the diagonal the products are zero; the bound keeps decays from overflowing.
              d0 = fminf(d0, 0.f);
              d1 = fminf(d1, 0.f);
            }
            d0 = exp2_flushed(d0);
            d1 = exp2_flushed(d1);
            pack_parts<T>(m, d0 * qk[p][half * 2], d1 * qk[p][half * 2 + 1]);
            float x0 = beta_i[half] * d0 * kk[p][half * 2];
            float x1 = beta_i[half] * d1 * kk[p][half * 2 + 1];
            if (PARTS == 1 && p < 2 * W) {
              x0 = nearest_tf32(x0);
              x1 = nearest_tf32(x1);
            }
            *reinterpret_cast<float2*>(A + i * kTrianglePitch + j) = make_float2(x0, x1);
          }
#pragma unroll
          for (int part = 0; part < PARTS; part++) {
            *reinterpret_cast<uint32_t*>(mixing + part * kPanelBytes + panel_offset(i, p) + 4 * t) =
                m[part];
          }
        }
      }
    });
    __syncwarp();
    // The diagonal block, inverted in place: a lane holds a column.
    {
      float* const block = A + 16 * warp * kTrianglePitch + 16 * warp;
      const int column = lane & 15;
      float x[16];
#pragma unroll
      for (int i = 0; i < 16; i++) {
        x[i] = i == column ? 1.f : 0.f;
#pragma unroll
        for (int k = 0; k < i; k += 4) {
          const float4 row = *reinterpret_cast<const float4*>(block + i * kTrianglePitch + k);
          x[i] = __fmaf_rn(-row.x, x[k], x[i]);
          if (k + 1 < i) x[i] = __fmaf_rn(-row.y, x[k + 1], x[i]);
          if (k + 2 < i) x[i] = __fmaf_rn(-row.z, x[k + 2], x[i]);
          if (k + 3 < i) x[i] = __fmaf_rn(-row.w, x[k + 3], x[i]);
        }
      }
      __syncwarp();
      if (lane < 16) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
          block[i * kTrianglePitch + column] = PARTS == 2 ? x[i] : round_tf32(x[i]);
        }
      }
    }
    __syncthreads();
    // Blocks below it, transposed: column j of blocks belongs to warp j.
    by_warp(warp, [&](auto own_warp) {
      constexpr int W = decltype(own_warp)::value;
      float x[4][2][4];  // [block row][half of its 16 rows]
      const float* const from = A + g * kTrianglePitch + 2 * t;
      const auto block = [&](int i, int half, int k, int s) {
        return *reinterpret_cast<const float2*>(from + (16 * i + 8 * half) * kTrianglePitch +
                                                16 * k + 8 * s);
      };
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          x[W][half][e] =
              A[(16 * W + 8 * half + 2 * t + (e & 1)) * kTrianglePitch + 16 * W + g + (e >> 1) * 8];
        }
      }
#pragma unroll
      for (int i = W + 1; i < 4; i++) {
        float sum[2][4] = {};
#pragma unroll
        for (int k = W; k < i; k++) {
#pragma unroll
          for (int s = 0; s < 2; s++) {
#pragma unroll
            for (int half = 0; half < 2; half++)
              multiply_tf32<PARTS>(sum[half], x[k][s], block(i, half, k, s));
          }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
          for (int e = 0; e < 4; e++) x[i][half][e] = 0.f;
        }
#pragma unroll
        for (int s = 0; s < 2; s++) {
          const float left[4] = {-sum[s][0], -sum[s][1], -sum[s][2], -sum[s][3]};
#pragma unroll
          for (int half = 0; half < 2; half++)
            multiply_tf32<PARTS>(x[i][half], left, block(i, half, i, s));
        }
      }
      const int j = 16 * W + g;
      const float b0 = Form::kInverseScale * (layout.beta ? 1.f : beta[j]);
      const float b1 = Form::kInverseScale * (layout.beta ? 1.f : beta[j + 8]);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (i < W && h > 0) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int at = panel_offset(j, 2 * i + half) + 4 * t;  // row j + 8 lies 1024 bytes on
          uint32_t upper[PARTS] = {}, lower[PARTS] = {};
          if (i >= W) {
            pack_parts<T>(upper, b0 * x[i][half][0], b0 * x[i][half][1]);
            pack_parts<T>(lower, b1 * x[i][half][2], b1 * x[i][half][3]);
          }
#pragma unroll
          for (int part = 0; part < PARTS; part++) {
            unsigned char* const to = inverse + part * kPanelBytes + at;
            *reinterpret_cast<uint32_t*>(to) = upper[part];
            *reinterpret_cast<uint32_t*>(to + 1024) = lower[part];
          }
        }
      }
    });
    // A warp takes out the rows that it wrote.
    __syncwarp();
    const int mine = warp * 2048 + lane * 16;
#pragma unroll
    for (int panel = 0; panel < 2 * PARTS; panel++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int at = panel * kPanelBytes + mine + i * 512;
        *reinterpret_cast<uint4*>(out + h * Form::kBytes + at) =
            *reinterpret_cast<const uint4*>(inverse + at);
      }
    }
    __syncwarp();
  }
}

}  // namespace cuda
}  // namespace gdn
