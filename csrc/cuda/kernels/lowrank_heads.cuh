// The low-rank step, K = V = 128, four tokens of a sequence at a time. A block owns a key head of a
// sequence, a warp each of its value heads, so whoever overwrites a slot is its only reader: for
// four tokens the window is read once, for the first of them before its counts are known, and
// blocks meet in the count alone.
#pragma once

#include "kernels.h"
#include "mma.cuh"
#include "updates.cuh"
#include "window.cuh"

namespace gdn {
namespace cuda {

constexpr int kMaxHeads = 4;  // value heads of a key head

struct LowrankHeadsGrid {
  int64_t first = 0;   // sequence of blockIdx.y == 0
  bool early = false;  // the window before the wait
  bool ahead = false;  // its lines are asked for before the wait, into L2
  NormTail norm;
};

// The shared memory of a block; keys and updates have the type WT.
template <class WT, int TG>
struct HeadsShared {
  static constexpr int kRow = 128 * static_cast<int>(sizeof(WT)), kPieces = kRow / 16;
  // Keys in tiles of 16, then the updates of each head, then the weights of each head.
  static __host__ __device__ int keys(int R) { return (R + 15) / 16 * 16 * kRow; }
  static __host__ __device__ int weights(int R) { return (R + TG) * TG * 8; }
  static __host__ __device__ int bytes(int R, int heads) {
    return keys(R) + heads * (R * kRow + weights(R)) + 16;
  }
  // Piece `c` of 16 bytes of a row, against bank conflicts.
  static __device__ __forceinline__ int key(int e, int c) {
    return e * kRow + (sizeof(WT) == 2 ? c ^ (e & 1) * 4 : c ^ (e & 1)) * 16;
  }
  static __device__ __forceinline__ int update(int e, int c) {
    return e * kRow + (sizeof(WT) == 2 && TG > 1 ? c ^ (e & 7) : c) * 16;
  }
};

// Four floats rounded to T, in one access.
template <class T>
__device__ __forceinline__ void store_four(T* p, const float (&f)[4]) {
  if constexpr (sizeof(T) == 4) {
    store_state(p, Vec<float>::pack(f));
  } else {
    asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(pack_pair<T>(f[0], f[1])),
                 "r"(pack_pair<T>(f[2], f[3]))
                 : "memory");
  }
}

// An index as it lies in memory, so that nothing waits for it before its use.
struct RawIndex {
  uint32_t low, high;
};
__device__ __forceinline__ RawIndex ask_index(const Index& x, int64_t i) {
  const uint32_t* const from = static_cast<const uint32_t*>(x.ptr) + i * x.s0 * (x.is64 ? 2 : 1);
  return {from[0], x.is64 ? from[1] : 0};
}
__device__ __forceinline__ int64_t index_value(const Index& x, const RawIndex& r) {
  return x.is64 ? static_cast<int64_t>(r.low | static_cast<uint64_t>(r.high) << 32)
                : static_cast<int64_t>(static_cast<int32_t>(r.low));
}

// A token's key or query across the eight groups of a warp's lanes: group 2 t and 2 t + 1 hold
// those of token t, a lane eight columns of every 32. Right operand of the products with keys, and
// rows of a left one.
template <class AT, int TG>
struct HeadTokens {
  uint4 raw[4];

  __device__ __forceinline__ void ask(const RecurrentArgs& a, int64_t b, int64_t start, int h,
                                      int count, int group, int quad) {
    const View& x = group & 1 ? a.q : a.k;
    const AT* const from =
        static_cast<const AT*>(x.ptr) + offset_of(x, b, start + group / 2, h) + quad * 8;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      raw[j] = make_uint4(0, 0, 0, 0);
      if (group < 2 * count) raw[j] = *reinterpret_cast<const uint4*>(from + 32 * j);
    }
  }
  // c += rows of 16 bits, piece j of rows group and group + 8, times the tokens.
  __device__ __forceinline__ void multiply(float (&c)[4], int j, const uint4& low,
                                           const uint4& high) const {
    const uint32_t first[4] = {low.x, high.x, low.y, high.y};
    const uint32_t second[4] = {low.z, high.z, low.w, high.w};
    mma_16x8x16<AT>(c, first, raw[j].x, raw[j].y);
    mma_16x8x16<AT>(c, second, raw[j].z, raw[j].w);
  }
  // Eight rows alone: rows(j) is piece j of row `group`.
  template <class Rows>
  __device__ __forceinline__ void multiply_rows(float (&c)[4], Rows&& rows) const {
    float x[2][4] = {};
#pragma unroll
    for (int j = 0; j < 4; j++)
      multiply(x[TG == 1 ? j & 1 : 0], j, rows(j), make_uint4(0, 0, 0, 0));
#pragma unroll
    for (int i = 0; i < 4; i++) c[i] = x[0][i] + x[1][i];
  }
  // The same of rows of f32, as two tf32 parts; a token of 16 bits is one.
  __device__ __forceinline__ void multiply(float (&c)[4], float (&rest)[4], int j,
                                           const float (&low)[8], const float (&high)[8]) const {
    float x[8];
    Vec<AT>::unpack(raw[j], x);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float big[4] = {low[e], high[e], low[e + 4], high[e + 4]};
      const float small[4] = {tf32_rest(big[0]), tf32_rest(big[1]), tf32_rest(big[2]),
                              tf32_rest(big[3])};
      mma_16x8x8(rest, small, x[e], x[e + 4]);
      mma_16x8x8(c, big, x[e], x[e + 4]);
    }
  }
};

// Weights may leave the range of f16: tf32 holds an update exactly, a weight in two parts.
template <>
struct WeightColumn<f16> {
  float w[4];
  __device__ __forceinline__ explicit WeightColumn(const float (&x)[4])
      : w{x[0], x[1], x[2], x[3]} {}
  __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float2 x = unpack_pair<f16>(a[2 * i]), y = unpack_pair<f16>(a[2 * i + 1]);
      const float u[4] = {x.x, y.x, x.y, y.y};
      mma_16x8x8(c, u, tf32_rest(w[2 * i]), tf32_rest(w[2 * i + 1]));
      mma_16x8x8(c, u, w[2 * i], w[2 * i + 1]);
    }
  }
};

// More registers let fewer blocks in, fewer spill (docs/tried/cuda.md). MOST: MANY and NORM.
template <class WT, int TG, bool MOST>
constexpr int heads_registers() {
  return sizeof(WT) == 4 ? (MOST ? 128 : 112) : TG == 1 ? 72 : 96;
}
#if CUDART_VERSION >= 12040
#define GDN_HEADS_BOUNDS __maxnreg__((heads_registers<WT, TG, MANY && NORM>()))
#else
#define GDN_HEADS_BOUNDS \
  __launch_bounds__(32 * kMaxHeads, 512 / heads_registers<WT, TG, MANY && NORM>())
#endif

// blockIdx.x = key head, blockIdx.y = sequence; as many warps as a key head has value heads.
// MANY: packed sequences, or more than TG tokens of each; otherwise there is a single turn of the
// loop.
template <class AT, class WT, int TG, bool NORM, bool MANY>
__global__ void GDN_HEADS_BOUNDS lowrank_heads(const __grid_constant__ RecurrentArgs a,
                                               const __grid_constant__ LowrankHeadsGrid grid) {
  using Shared = HeadsShared<WT, TG>;
  constexpr bool k16Bit = sizeof(WT) == 2;
  // For a single token plain arithmetic is as fast, and a trip through shared memory shorter.
  constexpr bool kTensor = k16Bit && TG > 1;
  // What the norm reads is asked for when it is needed, where its registers would spill.
  constexpr bool kNormLate = NORM && MANY && k16Bit;
  constexpr int PER = 32 / Shared::kPieces;  // rows that a warp copies at once
  constexpr int E = 16 / static_cast<int>(sizeof(WT));
  extern __shared__ __align__(128) unsigned char shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  const int group = lane >> 2, quad = lane & 3;
  const int h = blockIdx.x, hv = h * warps + warp;
  const int64_t n = grid.first + blockIdx.y;
  const Window& w = a.window;
  const int R = static_cast<int>(w.R);
  const int64_t batch = MANY && a.seqs.cu_seqlens.ptr ? 0 : n;
  int64_t start = 0;  // of the turn's tokens, of which there are T
  int total = TG == 1 ? 1 : static_cast<int>(a.seqs.T);
  const bool wide = R > 32;
  unsigned char* const updates = shared + Shared::keys(R) + warp * R * Shared::kRow;
  float* const weights =
      reinterpret_cast<float*>(shared + Shared::keys(R) + warps * R * Shared::kRow +
                               warp * Shared::weights(R));  // [slot, then token][token][k, q]
  int32_t* const word = reinterpret_cast<int32_t*>(shared + Shared::keys(R) +
                                                   warps * (R * Shared::kRow + Shared::weights(R)));

  int T = total;
  HeadTokens<AT, TG> tokens;
  RawVec<AT, 4> raw_v[TG];
  RawGates raw_gates = {};
  const auto ask_tokens = [&] {
    tokens.ask(a, batch, start, h, T, group, quad);
#pragma unroll
    for (int t = 0; t < TG; t++) {
      raw_v[t] = load_raw<AT, 4>(static_cast<const AT*>(a.v.ptr) +
                                 offset_of(a.v, batch, start + (t < T ? t : 0), hv) + lane * 4);
    }
    if (lane < T) raw_gates = load_gates(a.gates, batch, start + lane, hv);
  };
  if (grid.ahead) {
    const int64_t row = guess_row(a.seqs, n);
    if (row >= 0) {
      constexpr int LINES = Shared::kRow / 128;
      const char* const k =
          static_cast<const char*>(w.k) + (row * w.sk_p + h * w.sk_h) * sizeof(WT);
      const char* const u =
          static_cast<const char*>(w.u) + (row * w.su_p + hv * w.su_h) * sizeof(WT);
      for (int i = threadIdx.x; i < R * LINES; i += blockDim.x) {
        prefetch_line(k + i / LINES * w.sk_r * sizeof(WT) + i % LINES * 128);
      }
      for (int i = lane; i < R * LINES; i += 32) {
        prefetch_line(u + i / LINES * w.su_r * sizeof(WT) + i % LINES * 128);
      }
    }
  }
  if (!grid.early) wait_for_previous_kernel();
  RawIndex raw_row = {}, raw_accepted = {1, 0};
  bool has = true;
  if (a.seqs.state_indices.ptr) raw_row = ask_index(a.seqs.state_indices, n);
  if (a.seqs.num_accepted.ptr) raw_accepted = ask_index(a.seqs.num_accepted, n);
  if (a.seqs.has_initial_state) has = a.seqs.has_initial_state[n * a.seqs.s_has];
  if constexpr (MANY) {
    const Sequence s = device_sequence(a.seqs, n, 0);
    start = s.start;
    total = static_cast<int>(s.end - s.start);
    if (total <= 0) {
      if (grid.early) wait_for_previous_kernel();
      let_next_kernel_start();
      return;
    }
    T = total < TG ? total : TG;
  }
  if (!grid.early) ask_tokens();
  WindowRow seq;
  seq.accepted = a.seqs.num_accepted.ptr ? index_value(a.seqs.num_accepted, raw_accepted) : 1;
  seq.row = a.seqs.state_indices.ptr ? index_value(a.seqs.state_indices, raw_row) : n;
  if (seq.accepted < 1 || seq.row >= a.seqs.P) seq.row = -1;
  seq.fresh = !has;
  seq.start = start;
  seq.tokens = total;
  const View& result = NORM ? grid.norm.y : a.out;
  AT* result_row = static_cast<AT*>(result.ptr) + offset_of(result, batch, start, hv) + lane * 4;
  const int result_step = static_cast<int>(result.st);
  if (seq.row < 0) {
    if (grid.early) wait_for_previous_kernel();
    let_next_kernel_start();
    const float zeros[4] = {0.f, 0.f, 0.f, 0.f};
    for (int t = 0; t < total; t++) {
      store_four<AT>(result_row + int64_t{t} * result_step, zeros);
    }
    return;
  }

  WT* const pk = static_cast<WT*>(w.k) + seq.row * w.sk_p + h * w.sk_h;
  WT* const pu = static_cast<WT*>(w.u) + seq.row * w.su_p + hv * w.su_h;
  float* const pg = w.g + seq.row * w.sg_p + hv * w.sg_h;
  int32_t* const fill = w.fill + seq.row * w.s_fill;
  const int sk = static_cast<int>(w.sk_r), su = static_cast<int>(w.su_r);
  const int sg = static_cast<int>(w.sg_r);
  // The block's place among those of its sequence, and the counts, which the last one replaces.
  unsigned counted = 0;
  if (threadIdx.x == 0) counted = atomicAdd(reinterpret_cast<unsigned*>(fill), 1u << 24);
  const int piece = lane % Shared::kPieces, row_of_lane = lane / Shared::kPieces;
  const NormTail& norm = grid.norm;
  int count = 0, head = 0;  // entries that hold, and the slot of the oldest
  bool first = true;
#pragma unroll 1
  do {
    {
      const uint32_t to = shared_address(shared);
      const WT* from = pk + (warp * PER + row_of_lane) * sk + piece * E;
#pragma unroll 4
      for (int e = warp * PER + row_of_lane; e < R; e += warps * PER) {
        copy_async(to + Shared::key(e, piece), from);
        from += int64_t{warps * PER} * sk;
      }
    }
    commit_copies();
    const float g0 = lane < R ? pg[lane * sg] : 0.f;
    const float g1 = lane + 32 < R ? pg[(lane + 32) * sg] : 0.f;
    {
      const uint32_t to = shared_address(updates);
      const WT* from = pu + row_of_lane * su + piece * E;
#pragma unroll 8
      for (int e = row_of_lane; e < R; e += PER) {
        copy_async(to + Shared::update(e, piece), from);
        from += PER * su;
      }
    }
    commit_copies();
    if (first) {
      let_next_kernel_start();
      if (grid.early) {
        wait_for_previous_kernel();
        ask_tokens();
      }
    }
    RawVec<AT, 4> raw_z[TG];
    uint32_t raw_weight[4];
    const auto z_at = [&](int t) {
      return static_cast<const AT*>(norm.z.ptr) +
             offset_of(norm.z, batch, start + (t < T ? t : 0), hv);
    };
    const auto ask_norm = [&] {
#pragma unroll
      for (int t = 0; t < TG; t++) raw_z[t] = load_raw<AT, 4>(z_at(t) + lane * 4);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        raw_weight[i] =
            load_bits(norm.weight.ptr, norm.weight.dtype, (lane * 4 + i) * norm.weight.s0);
      }
    };
    if constexpr (kNormLate) {
      if (lane < 2 * TG) prefetch_line(z_at(lane % TG) + lane / TG * 64);
    } else if constexpr (NORM) {
      ask_norm();
    }

    // Inner products of the tokens with each other: row and column 2 t are k, 2 t + 1 q of token t.
    float own[4];
    tokens.multiply_rows(own, [&](int j) { return tokens.raw[j]; });
    // Factors and log decays of token `quad`, of token 0 where TG = 1.
    const int due = TG == 1 ? 0 : quad;
    const float kk = __shfl_sync(kFullMask, own[0], 9 * due);
    const float qq = __shfl_sync(kFullMask, own[1], 9 * due + 4);
    const float rk = a.l2norm ? rsqrtf(kk + kL2Eps) : 1.f;
    const float rq = a.l2norm ? rsqrtf(qq + kL2Eps) : 1.f;
    const float kq = __shfl_sync(kFullMask, own[1], 9 * due) * (rk * rq);
    // The key of token group / 2 as the window will hold it.
    const float row_rk = __shfl_sync(kFullMask, rk, group / 2);
    const auto stored_key = [&](int j, float (&y)[8]) {
      Vec<AT>::unpack(tokens.raw[j], y);
#pragma unroll
      for (int e = 0; e < 8; e++) y[e] *= row_rk;
    };
    if (TG > 1) {
      if constexpr (k16Bit) {
        tokens.multiply_rows(own, [&](int j) {
          float y[8];
          stored_key(j, y);
          return Vec<AT>::pack(y);
        });
      } else {
        own[0] *= row_rk;
        own[1] *= row_rk;
      }
    }
    float own_g = 0.f, beta = 0.f;
    if (lane < T) compute_gates(a.gates, raw_gates, &own_g, &beta);
    float g[TG], until = 0.f;
#pragma unroll
    for (int t = 0; t < TG; t++) {
      g[t] = __shfl_sync(kFullMask, own_g, t);
      if (t <= due) until += g[t];
    }

    if (first && threadIdx.x == 0) *word = static_cast<int32_t>(counted);
    wait_copies<1>();
    __syncthreads();
    if (first) {
      const int32_t packed = *word;
      const WindowPlan plan = plan_of(a, seq, packed, false);
      count = plan.pending, head = plan.head;
      if (threadIdx.x == 0 && static_cast<uint32_t>(packed) >> 24 == gridDim.x - 1) {
        *static_cast<volatile int32_t*>(fill) = pack_fill(counts_after(plan, R));
      }
    }

    // The new keys and log decays take slots that the block has read.
    if (lane < T) {
      int slot = head + count + lane;
      while (slot >= R) slot -= R;
      pg[slot * sg] = own_g;
    }
    if (warp == 0 && group % 2 == 0 && group / 2 < T) {
      int slot = head + count + group / 2;
      while (slot >= R) slot -= R;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float y[8];
        stored_key(j, y);
#pragma unroll
        for (int i = 0; i < 8 / E; i++) {
          store_state(pk + slot * sk + 32 * j + quad * 8 + i * E, Vec<WT>::pack(y + i * E));
        }
      }
    }

    // Sums of the log decays after each entry, in the order of their age.
    const auto of_slot = [&](float low, float high, int s) {
      const float x = __shfl_sync(kFullMask, low, s & 31);
      if (!wide) return x;
      const float y = __shfl_sync(kFullMask, high, s & 31);
      return s < 32 ? x : y;
    };
    const auto slot_of = [&](int e) { return head + e < R ? head + e : head + e - R; };
    float s0, s1 = 0.f, all;
    {
      const float d0 = of_slot(g0, g1, slot_of(lane < R ? lane : 0));
      float d1 = 0.f;
      if (wide) d1 = of_slot(g0, g1, slot_of(lane + 32 < R ? lane + 32 : 0));
      suffix_sums(lane < count ? d0 : 0.f, lane + 32 < count ? d1 : 0.f, lane, wide, &s0, &s1,
                  &all);
    }
    bool odd = count < R || R % 16 != 0;  // not all slots weigh something
#pragma unroll 1
    for (int m = 0; m < R; m += 16) {
      float c[2][4] = {};
      const unsigned char* const keys = shared + m * Shared::kRow;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if constexpr (k16Bit) {
          const uint4 low =
              *reinterpret_cast<const uint4*>(keys + Shared::key(group, 4 * j + quad));
          const uint4 high =
              *reinterpret_cast<const uint4*>(keys + Shared::key(group + 8, 4 * j + quad));
          tokens.multiply(c[j & 1], j, low, high);
        } else {
          float low[8], high[8];
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int p = 8 * j + 2 * quad + i;
            Vec<float>::unpack(*reinterpret_cast<const uint4*>(keys + Shared::key(group, p)),
                               low + 4 * i);
            Vec<float>::unpack(*reinterpret_cast<const uint4*>(keys + Shared::key(group + 8, p)),
                               high + 4 * i);
          }
          tokens.multiply(c[0], c[1], j, low, high);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int s = m + group + 8 * i;
        const int e = s - head + (s < head ? R : 0);
        const float after = of_slot(s0, s1, e);
        const float weight = expf(after + until);
        const bool held = s < R && e < count && (TG == 1 || quad < T);
        if (held && weight == 0.f) odd = true;
        // A full window drops its oldest.
        const bool used = held && weight != 0.f && (TG == 1 || e >= count + quad - R);
        const float x = used ? weight * ((c[0][2 * i] + c[1][2 * i]) * rk) : 0.f;
        const float y = used ? weight * ((c[0][2 * i + 1] + c[1][2 * i + 1]) * rq) : 0.f;
        if (s < R && quad < TG) {
          *reinterpret_cast<float2*>(weights + (s * TG + quad) * 2) = make_float2(x, y);
        }
      }
    }
    if (TG > 1 && group % 2 == 0) {  // tokens as entries for later ones
      const int j = group / 2;
      float log = 0.f;
#pragma unroll
      for (int t = 1; t < TG; t++) {
        if (t > j && t <= quad) log += g[t];
      }
      const float weight = expf(log);
      const bool used = j < quad && quad < T && weight != 0.f;
      *reinterpret_cast<float2*>(weights + ((R + j) * TG + quad) * 2) =
          used ? make_float2(weight * (own[0] * rk), weight * (own[1] * rq))
               : make_float2(0.f, 0.f);
    }
    if (kTensor) odd = __any_sync(kFullMask, odd);
    wait_copies<0>();
    __syncwarp();

    // What the entries add to S k and S q of the lane's four rows.
    float p[TG][4], o[TG][4];
#pragma unroll
    for (int t = 0; t < TG; t++) {
#pragma unroll
      for (int i = 0; i < 4; i++) p[t][i] = o[t][i] = 0.f;
    }
    const auto add = [&](const float* row, const float (&u)[4], int from) {
      alignas(16) float2 factors[TG];
      if constexpr (TG == 1) {
        factors[0] = *reinterpret_cast<const float2*>(row);
      } else {
#pragma unroll
        for (int t = 0; t < TG; t += 2) {
          *reinterpret_cast<float4*>(factors + t) = *reinterpret_cast<const float4*>(row + 2 * t);
        }
      }
#pragma unroll
      for (int t = 0; t < TG; t++) {
        if (t >= from) {
          const float2 c = factors[t];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            if (c.x != 0.f) p[t][i] = __fmaf_rn(c.x, u[i], p[t][i]);
            if (c.y != 0.f) o[t][i] = __fmaf_rn(c.y, u[i], o[t][i]);
          }
        }
      }
    };
    const bool tensor = kTensor && !odd;
    if constexpr (kTensor) {
      if (tensor) {
        float c[8][4];
        clear(c);
#pragma unroll 1
        for (int e0 = 0; e0 < R; e0 += 16) {
          float x[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int e = e0 + 2 * quad + (i & 1) + 8 * (i >> 1);
            x[i] = group < 2 * TG ? weights[e * TG * 2 + group] : 0.f;
          }
          const WeightColumn<WT> column(x);
          const int e = e0 + (lane & 7) + (lane >> 4) * 8;
#pragma unroll
          for (int m = 0; m < 8; m++) {
            uint32_t left[4];
            load_transposed(left,
                            shared_address(updates + Shared::update(e, 2 * m + (lane >> 3 & 1))));
            column.multiply(c[m], left);
          }
        }
        // Through shared memory to the lanes that own the rows, where the updates stood.
        __syncwarp();
        float2* const sums = reinterpret_cast<float2*>(updates);
        if (quad < TG) {
#pragma unroll
          for (int m = 0; m < 8; m++) {
            const int r = 16 * m + group;
            sums[quad * 128 + (r ^ quad << 2)] = make_float2(c[m][0], c[m][1]);
            sums[quad * 128 + (r + 8 ^ quad << 2)] = make_float2(c[m][2], c[m][3]);
          }
        }
        __syncwarp();
#pragma unroll
        for (int t = 0; t < TG; t++) {
          const float4* const from =
              reinterpret_cast<const float4*>(sums + t * 128 + (lane * 4 ^ t << 2));
          const float4 x = from[0], y = from[1];
          p[t][0] = x.x;
          o[t][0] = x.y;
          p[t][1] = x.z;
          o[t][1] = x.w;
          p[t][2] = y.x;
          o[t][2] = y.y;
          p[t][3] = y.z;
          o[t][3] = y.w;
        }
      }
    }
    if (!tensor) {
      int s = head;
#pragma unroll 4
      for (int e = 0; e < count; e++) {
        float u[4];
        RawVec<WT, 4> raw;
        if constexpr (k16Bit) {
          raw = load_raw<WT, 4>(
              reinterpret_cast<const WT*>(updates + Shared::update(s, lane >> 1) + (lane & 1) * 8));
        } else {
          raw = load_raw<WT, 4>(reinterpret_cast<const WT*>(updates + Shared::update(s, lane)));
        }
        raw_to_float<WT, 4>(raw, u);
        add(weights + s * TG * 2, u, 0);
        s = s + 1 < R ? s + 1 : 0;
      }
    }

    if constexpr (kNormLate) ask_norm();
#pragma unroll
    for (int t = 0; t < TG; t++) {
      if (t < T) {
        const float b = __shfl_sync(kFullMask, beta, t);
        const float own_kq = TG == 1 ? kq : __shfl_sync(kFullMask, kq, t);
        float v[4], u[4], out[4];
        raw_to_float<AT, 4>(raw_v[t], v);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          u[i] = b * (v[i] - p[t][i]);
          out[i] = a.scale * __fmaf_rn(own_kq, u[i], o[t][i]);
        }
        int slot = head + count + t;
        while (slot >= R) slot -= R;
        store_four<WT>(pu + slot * su + lane * 4, u);
        if constexpr (NORM) {
          float sum = 0.f, z[4];
          raw_to_float<AT, 4>(raw_z[t], z);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            out[i] = to_float(from_float<AT>(out[i]));
            sum = __fmaf_rn(out[i], out[i], sum);
          }
          sum = lane_sum(sum);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            out[i] = gated_norm(out[i], sum, 128, norm.eps,
                                bits_to_float(raw_weight[i], norm.weight.dtype), norm.weight.dtype,
                                z[i], TypeOf<AT>::value);
          }
        }
        store_four<AT>(result_row + t * result_step, out);
        if (t + 1 < TG && t + 1 < T) {
#pragma unroll
          for (int i = 0; i < 4; i++) u[i] = to_float(from_float<WT>(u[i]));
          add(weights + (R + t) * TG * 2, u, t + 1);
        }
      }
    }

    if constexpr (MANY) {
      total -= T;
      start += T;
      result_row += T * result_step;
      count += T;
      if (count > R) {
        head += count - R;
        if (head >= R) head -= R;
        count = R;
      }
      T = total < TG ? total : TG;
      first = false;
      if (total > 0) {
        ask_tokens();
        __syncthreads();  // what the block has appended is read next, and the keys' place written
      }
    }
  } while (MANY && total > 0);
}

#undef GDN_HEADS_BOUNDS

}  // namespace cuda
}  // namespace gdn
