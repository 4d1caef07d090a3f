// Inner products and weights of a window's entries, by the block of rows that needs them: for a
// call of 16-bit tokens, at most TG a sequence.
//
// The warps of a block share the columns. Keys [16 entries x columns] times tokens [columns x k, q
// of each] is a product for the tensor cores: tokens are exact there as they come, so normalising
// them is a factor of the sum, and f32 keys are two tf32 parts; f16 keys meet bf16 tokens in tf32.
// The order of columns inside a product is free, so a lane takes eight neighbours of its row of
// either operand.
#pragma once

#include "mma.cuh"
#include "window.cuh"

namespace gdn {
namespace cuda {

__host__ __device__ constexpr int inner_tiles(int R) { return (R + 15) / 16; }  // of 16 entries

// Columns of the products with the base, [token, k or q][pitch]. The tensor cores take those of a
// 16-bit base in two parts of its own type, hi and lo, one after the other. A f32 base has its
// columns in f32, which the tensor cores take as three products of tf32 parts; for a single token
// plain arithmetic is as fast, on four columns of k and of q in turn, [K / 4][k, q][4].
template <class ST, int K, int TG>
struct WindowColumns {
  static constexpr bool k16Bit = sizeof(ST) == 2;
  static constexpr bool kMma = k16Bit || TG > 1;
  static constexpr int kPitch = k16Bit ? K + 8 : K + 4;  // against bank conflicts
  static constexpr int kFloats = kMma ? 2 * TG * kPitch : 2 * K;
};

// What brings a token of a wider range into that of a f16 base: a power of two, from half the
// exponent of its sum of squares.
template <class ST, class AT>
constexpr bool kScalesColumns = TypeOf<ST>::value == DType::f16 && TypeOf<AT>::value != DType::f16;
template <class ST, class AT>
__device__ __forceinline__ PowerOfTwo column_scale(float sum_sq) {
  if constexpr (!kScalesColumns<ST, AT>) return PowerOfTwo();
  const uint32_t exponent = ((__float_as_uint(sum_sq) >> 23) + 127) / 2;
  return PowerOfTwo(__uint_as_float(exponent << 23), 8);
}

// A token's normalising factors, and k.q after them.
struct TokenFactors {
  float rk, rq, kq, kk, qq;
};

// Keys of 16 bits wait in shared memory, as a fold needs them too: [tile][warp][entry][piece], and
// what a warp has taken its products of makes place for their sums. f32 keys wait in registers.
template <class AT, class KT, int K, int WARPS, int TG>
struct InnerProducts {
  static_assert(sizeof(AT) == 2 && !(sizeof(KT) == 2 && TypeOf<AT>::value == DType::f16 &&
                                     TypeOf<KT>::value == DType::bf16),
                "no product for bf16 keys with f16 tokens");
  static_assert(K / WARPS == 32, "eight columns for each lane of four");
  static constexpr int NV = 2 * TG;
  static constexpr bool kStaged = sizeof(KT) == 2;
  // Keys that the window will round have to be rounded before they meet later tokens.
  static constexpr bool kRounds = TG > 1 && kStaged;
  static constexpr int kWarpBytes = kStaged ? 16 * 64 : 16 * TG * 8,
                       kTileBytes = WARPS * kWarpBytes;
  // Sums of k and q of each token, then of the tokens' keys as the window will hold them.
  static constexpr int kRows = NV + (kRounds ? TG : 0), kRestBytes = WARPS * kRows * TG * 8;
  unsigned char *entries, *rest;  // in shared memory
  int warp, group, quad;
  uint4 keys[kStaged ? 1 : 4];  // eight columns of entries group and group + 8
  uint4 tokens;                 // of k or q of one token

  // Piece `c` of K / 8 of an entry's key.
  __device__ __forceinline__ uint4* piece(int e, int c) const {
    return reinterpret_cast<uint4*>(entries + e / 16 * kTileBytes + c / 4 * kWarpBytes +
                                    e % 16 * 64 + ((c ^ e / 2) & 3) * 16);
  }
  __device__ __forceinline__ float2* sums_of(int w, int e) const {
    return reinterpret_cast<float2*>(entries + e / 16 * kTileBytes + w * kWarpBytes +
                                     e % 16 * (TG * 8));
  }
  __device__ __forceinline__ float2* rest_of(int w, int row) const {
    return reinterpret_cast<float2*>(rest + (w * kRows + row) * (TG * 8));
  }

  // The keys of a half of the 16 entries from `first` on, of `count`, `step` elements apart; zeros
  // follow them.
  __device__ __forceinline__ void ask_keys(const KT* from, int step, int count, int first,
                                           int half) {
    const int c = warp * 4 + quad, e = first + 8 * half + group;
    const KT* const at = from + (e < count ? e : 0) * step + c * 8;
    if constexpr (kStaged) {
      copy_async(shared_address(piece(e, c)), at, e < count);
    } else {
      const uint4 zero = make_uint4(0, 0, 0, 0);
      keys[2 * half] = e < count ? reinterpret_cast<const uint4*>(at)[0] : zero;
      keys[2 * half + 1] = e < count ? reinterpret_cast<const uint4*>(at)[1] : zero;
    }
  }
  __device__ __forceinline__ void ask_tokens(const RecurrentArgs& a, int64_t b, int64_t start,
                                             int h, int count) {
    tokens = make_uint4(0, 0, 0, 0);
    if (group < 2 * count) {
      const View& x = group & 1 ? a.q : a.k;
      tokens = *reinterpret_cast<const uint4*>(static_cast<const AT*>(x.ptr) +
                                               offset_of(x, b, start + group / 2, h) + warp * 32 +
                                               quad * 8);
    }
  }

  __device__ __forceinline__ void multiply(const KT* from, int step, int count) {
#pragma unroll 1
    for (int first = 0; first < count; first += 16) {
      float c[4] = {0.f, 0.f, 0.f, 0.f};
      if constexpr (kStaged) {
        const uint4 low = *piece(first + group, warp * 4 + quad);
        const uint4 high = *piece(first + group + 8, warp * 4 + quad);
        multiply_keys(c, low, high);
        __syncwarp();
      } else {
        if (first > 0) {
#pragma unroll
          for (int half = 0; half < 2; half++) ask_keys(from, step, count, first, half);
        }
        float x[8], y[2][8];
        Vec<AT>::unpack(tokens, x);
#pragma unroll
        for (int i = 0; i < 4; i++) Vec<float>::unpack(keys[i], y[i / 2] + i % 2 * 4);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float big[4] = {y[0][e], y[1][e], y[0][e + 4], y[1][e + 4]};
          const float small[4] = {tf32_rest(big[0]), tf32_rest(big[1]), tf32_rest(big[2]),
                                  tf32_rest(big[3])};
          mma_16x8x8(c, small, x[e], x[e + 4]);
          mma_16x8x8(c, big, x[e], x[e + 4]);
        }
      }
      if (quad < TG) {
        sums_of(warp, first + group)[quad] = make_float2(c[0], c[1]);
        sums_of(warp, first + group + 8)[quad] = make_float2(c[2], c[3]);
      }
    }
    float c[4] = {0.f, 0.f, 0.f, 0.f};
    multiply_16(c, tokens, make_uint4(0, 0, 0, 0));
    if (group < NV && quad < TG) rest_of(warp, group)[quad] = make_float2(c[0], c[1]);
  }
  // Tokens as the products with the base take them, a lane its own piece. Scaled ones only when the
  // sums of all warps are there.
  template <class ST>
  __device__ __forceinline__ void write_columns(unsigned char* columns) const {
    using Columns = WindowColumns<ST, K, TG>;
    static_assert(
        sizeof(ST) == 4 || TypeOf<AT>::value == DType::bf16 || TypeOf<ST>::value == DType::f16,
        "bf16 columns do not hold f16 tokens");
    if (group >= NV) return;
    const int c = warp * 32 + quad * 8;
    if constexpr (TypeOf<ST>::value == TypeOf<AT>::value) {
      *reinterpret_cast<uint4*>(reinterpret_cast<ST*>(columns) + group * Columns::kPitch + c) =
          tokens;
    } else {
      float x[8];
      Vec<AT>::unpack(tokens, x);
      if constexpr (Columns::k16Bit) {
        const float2 sums = total(rest_of(0, group) + group / 2, kRows * TG);
        const float by = column_scale<ST, AT>(group & 1 ? sums.y : sums.x).by;
#pragma unroll
        for (int e = 0; e < 8; e++) x[e] *= by;
        *reinterpret_cast<uint4*>(reinterpret_cast<ST*>(columns) + group * Columns::kPitch + c) =
            Vec<ST>::pack(x);
      } else {
#pragma unroll
        for (int e = 0; e < 8; e += 4) {
          float* const to =
              reinterpret_cast<float*>(columns) +
              (Columns::kMma ? group * Columns::kPitch + c + e : (c + e) * 2 + group * 4);
          *reinterpret_cast<float4*>(to) = make_float4(x[e], x[e + 1], x[e + 2], x[e + 3]);
        }
      }
    }
  }
  // Keys of the call's first `count` tokens as the window keeps them: into it where `to` says that
  // this block does, `step` elements apart, and what later tokens of the call make of them.
  __device__ __forceinline__ void finish_keys(KT* to, int step, int count, bool l2norm) const {
    const bool key = group < 2 * count && group % 2 == 0;
    uint4 own = make_uint4(0, 0, 0, 0);
    if (key && (kRounds || to)) {
      const float rk = factors(group / 2, l2norm).rk;
      float y[8];
      Vec<AT>::unpack(tokens, y);
#pragma unroll
      for (int e = 0; e < 8; e++) y[e] *= rk;
      KT* const at = to + group / 2 * step + warp * 32 + quad * 8;
      if constexpr (kStaged) {
        own = Vec<KT>::pack(y);
        if (to) *reinterpret_cast<uint4*>(at) = own;
      } else {
        *reinterpret_cast<float4*>(at) = make_float4(y[0], y[1], y[2], y[3]);
        *reinterpret_cast<float4*>(at + 4) = make_float4(y[4], y[5], y[6], y[7]);
      }
    }
    if constexpr (kRounds) {
      float c[4] = {0.f, 0.f, 0.f, 0.f};
      multiply_keys(c, own, make_uint4(0, 0, 0, 0));
      if (key && quad < TG) rest_of(warp, NV + group / 2)[quad] = make_float2(c[0], c[1]);
    }
  }

  // Keys of 16 bits as right operands of a fold: entries e0 and on, columns 16 s and on.
  __device__ __forceinline__ void right_keys(uint32_t (&right)[2][2], int e0, int s,
                                             int lane) const {
    uint32_t r[4];
    load_transposed(r, shared_address(piece(e0 + (lane & 15), 2 * s + (lane >> 4))));
#pragma unroll
    for (int i = 0; i < 4; i++) right[i / 2][i % 2] = r[i];
  }
  // The first eight keys were asked for before anybody knew how many hold: the others become zero.
  __device__ __forceinline__ void drop_keys(int count) const {
    if (group >= count) *piece(group, warp * 4 + quad) = make_uint4(0, 0, 0, 0);
  }

  __device__ __forceinline__ float2 entry(int e, int t) const {
    return total(sums_of(0, e) + t, kWarpBytes / 8);
  }
  // Of the key of the call's own token `i` with a later one.
  __device__ __forceinline__ float2 own_entry(int i, int t, bool l2norm) const {
    float2 x = total(rest_of(0, kRounds ? NV + i : 2 * i) + t, kRows * TG);
    if (!kRounds) {
      const float rk = factors(i, l2norm).rk;
      x.x *= rk;
      x.y *= rk;
    }
    return x;
  }
  __device__ __forceinline__ TokenFactors factors(int t, bool l2norm) const {
    const float2 k = total(rest_of(0, 2 * t) + t, kRows * TG);
    TokenFactors f;
    f.kk = k.x;
    f.qq = total(rest_of(0, 2 * t + 1) + t, kRows * TG).y;
    f.rk = l2norm ? rsqrtf(f.kk + kL2Eps) : 1.f;
    f.rq = l2norm ? rsqrtf(f.qq + kL2Eps) : 1.f;
    f.kq = l2norm ? k.y * (f.rk * f.rq) : k.y;
    return f;
  }

 private:
  // Keys as the window has them.
  __device__ __forceinline__ void multiply_keys(float (&c)[4], const uint4& low,
                                                const uint4& high) const {
    if constexpr (TypeOf<KT>::value != TypeOf<AT>::value) {
      // tf32 holds either exactly.
      float x[8], y[2][8];
      Vec<AT>::unpack(tokens, x);
      Vec<KT>::unpack(low, y[0]);
      Vec<KT>::unpack(high, y[1]);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float rows[4] = {y[0][e], y[1][e], y[0][e + 4], y[1][e + 4]};
        mma_16x8x8(c, rows, x[e], x[e + 4]);
      }
    } else {
      multiply_16(c, low, high);
    }
  }
  __device__ __forceinline__ void multiply_16(float (&c)[4], const uint4& low,
                                              const uint4& high) const {
    const uint32_t first[4] = {low.x, high.x, low.y, high.y};
    const uint32_t second[4] = {low.z, high.z, low.w, high.w};
    mma_16x8x16<AT>(c, first, tokens.x, tokens.y);
    mma_16x8x16<AT>(c, second, tokens.z, tokens.w);
  }
  static __device__ __forceinline__ float2 total(const float2* from, int step) {
    float2 all = from[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
      const float2 x = from[w * step];
      all.x += x.x;
      all.y += x.y;
    }
    return all;
  }
};

// What a warp works out for one token of a value head: the weights of the base and of each entry.
template <class ST, class AT, class KT, int K, int WARPS, int TG>
struct TokenWeights {
  using Inner = InnerProducts<AT, KT, K, WARPS, TG>;
  float g[2];
  RawGates gates;               // of token `lane`
  float entries[2], own, base;  // weights before the inner products
  float own_g, beta;            // of token `lane`

  __device__ __forceinline__ void ask_decays(const Window& w, const WindowPlan& plan, int hv,
                                             int lane, int count) {
    const float* const from = w.g + plan.row * w.sg_p + hv * w.sg_h;
    const int step = static_cast<int>(w.sg_r);
    g[0] = lane < count ? from[lane * step] : 0.f;
    g[1] = lane + 32 < count ? from[(lane + 32) * step] : 0.f;
  }
  __device__ __forceinline__ void ask_gates(const Gates& x, int64_t b, int64_t start, int hv,
                                            int count, int lane) {
    if (lane < count) gates = load_gates(x, b, start + lane, hv);
  }

  // What needs no inner product. `fold`: the weight of each entry in a fold, and of the base at R.
  __device__ __forceinline__ void weigh(float* fold, const RecurrentArgs& a, const WindowPlan& plan,
                                        int t, int lane) {
    const int R = static_cast<int>(a.window.R);
    float s[2], all;
    suffix_sums(lane < plan.pending ? g[0] : 0.f, lane + 32 < plan.pending ? g[1] : 0.f, lane,
                R > 32, &s[0], &s[1], &all);
    if (plan.fold) {
      if (t == 0) {
        if (lane < plan.pending) fold[lane] = expf(s[0]);
        if (lane + 32 < plan.pending) fold[lane + 32] = expf(s[1]);
        if (lane == 0) fold[R] = expf(all);
      }
      all = 0.f;
    }
    own_g = beta = 0.f;
    if (lane < plan.tokens) compute_gates(a.gates, gates, &own_g, &beta);
    float log = 0.f;
    if (plan.fresh) all = -INFINITY;
#pragma unroll
    for (int i = 0; i < TG; i++) {
      const float decay = __shfl_sync(kFullMask, own_g, i);
      if (i <= t) {
        s[0] += decay;
        s[1] += decay;
        all += decay;
        if (i > lane) log += decay;
      }
    }
    entries[0] = expf(s[0]);
    entries[1] = R > 32 ? expf(s[1]) : 0.f;
    own = expf(log);
    base = expf(all);
  }

  // `record`: a float4 for each token {weight of the base for k, for q, k.q, beta}, then [entry,
  // token] float2 weights.
  __device__ __forceinline__ void write(const Inner& inner, const TokenFactors& f, float4* record,
                                        const RecurrentArgs& a, const WindowPlan& plan, int hv,
                                        bool appends, int t, int lane) const {
    const Window& w = a.window;
    const int count = plan.fold ? 0 : plan.pending;
    float2* const weights = reinterpret_cast<float2*>(record + TG);
    const auto put = [&](int e, float weight, float2 dots) {
      weights[e * TG + t] = make_float2(weight == 0.f ? 0.f : weight * (dots.x * f.rk),
                                        weight == 0.f ? 0.f : weight * (dots.y * f.rq));
    };
    if (lane < count) put(lane, entries[0], inner.entry(lane, t));
    if (lane + 32 < count) put(lane + 32, entries[1], inner.entry(lane + 32, t));
    // The call's own tokens, each an entry for those after it.
    if (TG > 1 && lane < t) put(count + lane, own, inner.own_entry(lane, t, a.l2norm));
    if (lane == t) {
      record[t] = make_float4(base * (f.rk * column_scale<ST, AT>(f.kk).back),
                              base * (f.rq * column_scale<ST, AT>(f.qq).back), f.kq, beta);
      if (appends && !plan.fold) {
        // The first entry of a fresh sequence removes the base from every later weight.
        w.g[plan.row * w.sg_p + hv * w.sg_h + (count + t) * w.sg_r] =
            plan.fresh && t == 0 ? -INFINITY : own_g;
      }
    }
  }
};

}  // namespace cuda
}  // namespace gdn
