// The window of pending rank-1 updates: where a call's entries go, and how they are read.
#pragma once

#include "kernels.h"
#include "norm.cuh"

namespace gdn {
namespace cuda {

static_assert(kMaxWindow <= 64, "a warp holds the entries of a window, two a lane");

// Where a sequence stands at the start of a call (docs/windows.md), worked out from the fill count,
// which is replaced once all have read it.
struct WindowPlan {
  int64_t row;    // pool row, negative = padding
  int64_t start;  // first token
  int tokens;     // of this call
  int pending;    // entries that hold before it, after dropping what was rejected
  int head;       // slot of the oldest (a full low-rank window is a ring)
  bool fold;      // they go into the base first
  bool fresh;     // starts from zero: no entries, and the base is not read
};

// What can be known without the fill count. ONE: no sequence has more than one token, and there
// are no packed ones.
struct WindowRow {
  int64_t row, start, accepted;
  int tokens;
  bool fresh;
};
template <bool ONE>
__device__ __forceinline__ WindowRow window_row(const RecurrentArgs& a, int64_t n) {
  WindowRow s;
  if constexpr (ONE) {
    s.accepted = a.seqs.num_accepted.ptr ? at(a.seqs.num_accepted, n) : 1;
    s.fresh = a.seqs.has_initial_state && !a.seqs.has_initial_state[n * a.seqs.s_has];
    s.row = a.seqs.state_indices.ptr ? at(a.seqs.state_indices, n) : n;
    if (s.row >= a.seqs.P || s.accepted < 1) s.row = -1;
    s.start = 0;
    s.tokens = 1;
  } else {
    const Sequence q = device_sequence(a.seqs, n, 0);
    s.accepted = q.accepted;
    s.fresh = q.fresh;
    s.row = q.row;
    s.start = q.start;
    s.tokens = q.end > q.start ? static_cast<int>(q.end - q.start) : 0;
  }
  return s;
}

// `packed`: the word of counts. Blocks count themselves in its top byte (arrive_last).
__device__ __forceinline__ WindowPlan plan_of(const RecurrentArgs& a, const WindowRow& s,
                                              int32_t packed, bool flush) {
  WindowPlan p;
  p.row = s.row;
  p.start = s.start;
  p.tokens = flush ? 0 : s.tokens;
  p.pending = p.head = 0;
  p.fold = false;
  p.fresh = s.fresh;
  if (p.row < 0) return p;
  const int R = static_cast<int>(a.window.R);
  if (a.state.ptr && p.tokens > R) {  // the host refuses it where it can know
    p.row = -1;
    return p;
  }
  if (s.fresh) return p;
  const WindowCounts kept = kept_entries(packed, a.seqs.num_accepted.ptr ? s.accepted : -1);
  p.pending = kept.fill > R ? R : kept.fill;
  p.head = kept.head < R ? kept.head : 0;
  p.fold = a.state.ptr && p.pending > 0 && (flush || p.pending + p.tokens > R);
  return p;
}
template <bool ONE>
__device__ __forceinline__ WindowPlan plan_window(const RecurrentArgs& a, int64_t n, bool flush) {
  const WindowRow s = window_row<ONE>(a, n);
  int32_t packed = 0;
  if (s.row >= 0 && !s.fresh) {
    packed = *static_cast<const volatile int32_t*>(a.window.fill + s.row * a.window.s_fill);
  }
  return plan_of(a, s, packed, flush);
}

// Element i of memory of dtype d, as an address.
__device__ __forceinline__ const char* element_of(const void* p, DType d, int64_t i) {
  return static_cast<const char*>(p) + i * (d == DType::f32 ? 4 : 2);
}

// Elements of type T, or of a dtype known at run time only where T is Any. Loads are split from
// conversions, so that none waits for another.
struct Any {};

template <class T>
constexpr bool kIsAny = false;
template <>
constexpr bool kIsAny<Any> = true;

template <class T>
__device__ __forceinline__ uint32_t load_one(const void* p, DType d, int i) {
  if constexpr (kIsAny<T>) {
    return load_bits(p, d, i);
  } else if constexpr (sizeof(T) == 4) {
    return static_cast<const uint32_t*>(p)[i];
  } else {
    return static_cast<const uint16_t*>(p)[i];
  }
}
template <class T>
__device__ __forceinline__ float one_to_float(uint32_t x, DType d) {
  if constexpr (kIsAny<T>) {
    return bits_to_float(x, d);
  } else if constexpr (TypeOf<T>::value == DType::f32) {
    return __uint_as_float(x);
  } else if constexpr (TypeOf<T>::value == DType::bf16) {
    return __uint_as_float(x << 16);
  } else {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(x)));
  }
}
template <class T>
__device__ __forceinline__ void store_one(void* p, DType d, int i, float x) {
  if constexpr (kIsAny<T>) {
    store_as(p, d, i, x);
  } else {
    static_cast<T*>(p)[i] = from_float<T>(x);
  }
}
template <class T>
__device__ __forceinline__ float round_one(DType d, float x) {
  if constexpr (kIsAny<T>) {
    return round_as(d, x);
  } else {
    return to_float(from_float<T>(x));
  }
}

// N = 2, 4, 8 neighbours, aligned to as many elements or 16 bytes.
template <int N>
struct Some {
  uint32_t w[N];
};
template <int N, int BYTES>
__device__ __forceinline__ void load_words(const void* p, Some<N>* r) {
  constexpr int W = N * BYTES / 4;
  const uint32_t* const from = static_cast<const uint32_t*>(p);
  if constexpr (W % 4 == 0) {
#pragma unroll
    for (int j = 0; j < W; j += 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(from + j);
      r->w[j] = x.x;
      r->w[j + 1] = x.y;
      r->w[j + 2] = x.z;
      r->w[j + 3] = x.w;
    }
  } else if constexpr (W == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    r->w[0] = x.x;
    r->w[1] = x.y;
  } else {
    r->w[0] = *from;
  }
}
template <class T, int N>
__device__ __forceinline__ Some<N> load_some(const void* p, DType d, int i) {
  Some<N> r;
  if constexpr (kIsAny<T>) {
    if (d == DType::f32) {
      load_words<N, 4>(static_cast<const float*>(p) + i, &r);
    } else {
      load_words<N, 2>(static_cast<const uint16_t*>(p) + i, &r);
    }
  } else {
    load_words<N, sizeof(T)>(static_cast<const T*>(p) + i, &r);
  }
  return r;
}
template <class T, int N>
__device__ __forceinline__ void store_some(void* p, DType d, int i, const Some<N>& r) {
  bool wide = d == DType::f32;
  if constexpr (!kIsAny<T>) wide = sizeof(T) == 4;
  uint32_t* const to = reinterpret_cast<uint32_t*>(static_cast<char*>(p) + i * (wide ? 4 : 2));
#pragma unroll
  for (int j = 0; j < N; j++) {
    if (wide || j < N / 2) to[j] = r.w[j];
  }
}
template <class T, int N>
__device__ __forceinline__ void some_to_float(const Some<N>& r, DType d, float* f) {
  const auto is = [&](DType x) {
    if constexpr (kIsAny<T>) {
      return d == x;
    } else {
      return TypeOf<T>::value == x;
    }
  };
#pragma unroll
  for (int j = 0; j < N; j += 2) {
    const uint32_t pair = r.w[j / 2];
    if (is(DType::f32)) {
      f[j] = __uint_as_float(r.w[j]);
      f[j + 1] = __uint_as_float(r.w[j + 1]);
    } else if (is(DType::bf16)) {
      f[j] = __uint_as_float(pair << 16);
      f[j + 1] = __uint_as_float(pair & 0xffff0000u);
    } else {
      const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&pair));
      f[j] = x.x;
      f[j + 1] = x.y;
    }
  }
}

// A token's key and query across a warp, PER columns a lane, normalised where the call asks for it.
template <int PER>
struct WarpToken {
  float k[PER], q[PER];
  float kq, kk, qq;  // inner products; kk and qq of what came in

  template <class AT>
  __device__ __forceinline__ void prepare(const Some<PER>& raw_k, const Some<PER>& raw_q, DType d,
                                          bool l2norm, int lane) {
    some_to_float<AT, PER>(raw_k, d, k);
    some_to_float<AT, PER>(raw_q, d, q);
    float sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < PER; j++) {
      sums[0] = __fmaf_rn(k[j], k[j], sums[0]);
      sums[1] = __fmaf_rn(q[j], q[j], sums[1]);
      sums[2] = __fmaf_rn(k[j], q[j], sums[2]);
    }
    const float total = transpose_sum<4, 32>(sums, lane);
    kk = __shfl_sync(kFullMask, total, 0);
    qq = __shfl_sync(kFullMask, total, 8);
    kq = __shfl_sync(kFullMask, total, 16);
    if (l2norm) {
      const float rk = rsqrtf(kk + kL2Eps), rq = rsqrtf(qq + kL2Eps);
      kq *= rk * rq;
#pragma unroll
      for (int j = 0; j < PER; j++) {
        k[j] *= rk;
        q[j] *= rq;
      }
    }
  }
};

// The key of an entry: as stored, or of this call and then as the window will store it.
template <class AT, class KT, int PER>
__device__ __forceinline__ void entry_key(const Some<PER>& raw, bool stored, const RecurrentArgs& a,
                                          float (&y)[PER]) {
  const DType d = a.window.k_dtype;
  if (stored) {
    some_to_float<KT, PER>(raw, d, y);
    return;
  }
  some_to_float<AT, PER>(raw, a.q.dtype, y);
  float r = 1.f;
  if (a.l2norm) {
    float yy = 0.f;
#pragma unroll
    for (int j = 0; j < PER; j++) yy = __fmaf_rn(y[j], y[j], yy);
    r = rsqrtf(lane_sum(yy) + kL2Eps);
  }
#pragma unroll
  for (int j = 0; j < PER; j++) y[j] = round_one<KT>(d, y[j] * r);
}

// Inner products of an entry's key with key and query of TG tokens. Lane l ends with value
// l / (32 / (2 * TG)) of {k, q of the first token, k, q of the second, ..}.
template <int TG, int PER>
__device__ __forceinline__ float entry_dots(const float (&y)[PER],
                                            const WarpToken<PER> (&tokens)[TG], int lane) {
  float x[2 * TG];
#pragma unroll
  for (int t = 0; t < TG; t++) {
    x[2 * t] = x[2 * t + 1] = 0.f;
#pragma unroll
    for (int j = 0; j < PER; j++) {
      x[2 * t] = __fmaf_rn(y[j], tokens[t].k[j], x[2 * t]);
      x[2 * t + 1] = __fmaf_rn(y[j], tokens[t].q[j], x[2 * t + 1]);
    }
  }
  return transpose_sum<2 * TG, 32>(x, lane);
}

__device__ __forceinline__ WindowCounts counts_after(const WindowPlan& plan, int R) {
  const int total = plan.pending + plan.tokens;
  const int drafts = plan.tokens > 256 ? 255 : plan.tokens > 0 ? plan.tokens - 1 : 0;
  return {total > R ? R : total, drafts, total > R ? (plan.head + total - R) % R : plan.head};
}

// New keys, log decays and counts of a sequence, by one block that is the only reader left.
template <int K>
__device__ __forceinline__ void append_entries(const RecurrentArgs& a, const WindowPlan& plan,
                                               int64_t n) {
  const Window& w = a.window;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
  const int R = static_cast<int>(w.R), H = static_cast<int>(a.H);
  const int HV = static_cast<int>(a.HV);
  const int64_t b = a.seqs.cu_seqlens.ptr ? 0 : n;
  const int pending = plan.pending, head = plan.head;
  const int skip = plan.tokens > R ? plan.tokens - R : 0;  // overwritten within the call
  const int kept = plan.tokens - skip;
  const auto slot_of = [&](int t) { return (head + pending + t) % R; };
  // Four keys of a warp are under way at a time: memory is far, and the block waits for this.
  constexpr int PER = K / 32, AHEAD = 4;
  for (int i0 = warp; i0 < kept * H; i0 += warps * AHEAD) {
    Some<PER> raw[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      const int i = i0 + j * warps;
      if (i < kept * H) {
        const int64_t from = offset_of(a.k, b, plan.start + skip + i / H, i % H);
        raw[j] = load_some<Any, PER>(element_of(a.k.ptr, a.k.dtype, from), a.k.dtype, lane * PER);
      }
    }
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      const int i = i0 + j * warps;
      if (i < kept * H) {
        const int t = skip + i / H, h = i % H;
        float k[PER], kk = 0.f;
        some_to_float<Any, PER>(raw[j], a.k.dtype, k);
#pragma unroll
        for (int c = 0; c < PER; c++) kk = __fmaf_rn(k[c], k[c], kk);
        const float r = a.l2norm ? rsqrtf(lane_sum(kk) + kL2Eps) : 1.f;
        const int64_t to = plan.row * w.sk_p + h * w.sk_h + slot_of(t) * w.sk_r + lane * PER;
#pragma unroll
        for (int c = 0; c < PER; c++) store_as(w.k, w.k_dtype, to + c, k[c] * r);
      }
    }
  }
  for (int i = threadIdx.x; i < kept * HV; i += blockDim.x) {
    const int t = skip + i / HV, hv = i % HV;
    float g, beta;
    compute_gates(a.gates, load_gates(a.gates, b, plan.start + t, hv), &g, &beta);
    w.g[plan.row * w.sg_p + hv * w.sg_h + slot_of(t) * w.sg_r] = g;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    *static_cast<volatile int32_t*>(w.fill + plan.row * w.s_fill) =
        pack_fill(counts_after(plan, R));
  }
}

// Suffix sums of the log decays of up to 64 entries, two a lane: after entry `lane` and
// `lane + 32`, and over all of them. Sums only, never a difference: g may be -inf.
__device__ __forceinline__ void suffix_sums(float g0, float g1, int lane, bool wide, float* s0,
                                            float* s1, float* all) {
  float lower = g0, upper = g1, upper_total = 0.f;
#pragma unroll
  for (int m = 1; m < 32; m <<= 1) {
    const float x = __shfl_down_sync(kFullMask, lower, m);
    if (lane + m < 32) lower += x;
  }
  *s1 = 0.f;
  if (wide) {
#pragma unroll
    for (int m = 1; m < 32; m <<= 1) {
      const float x = __shfl_down_sync(kFullMask, upper, m);
      if (lane + m < 32) upper += x;
    }
    upper_total = __shfl_sync(kFullMask, upper, 0);
    *s1 = __shfl_down_sync(kFullMask, upper, 1);
    if (lane == 31) *s1 = 0.f;
  }
  *s0 = __shfl_down_sync(kFullMask, lower, 1);
  *s0 = (lane == 31 ? 0.f : *s0) + upper_total;
  *all = __shfl_sync(kFullMask, lower, 0) + upper_total;
}

// The block's place among those of its sequence: true for the last one. Call once all threads of
// the block have read what append_entries overwrites. Only reads come before it, and a read that
// has returned cannot see a later write, so the count needs no ordering of its own.
__device__ __forceinline__ bool arrive_last(const RecurrentArgs& a, const WindowPlan& plan,
                                            int blocks) {
  unsigned* const word = reinterpret_cast<unsigned*>(a.window.fill + plan.row * a.window.s_fill);
  return (atomicAdd(word, 1u << 24) >> 24) + 1 == static_cast<unsigned>(blocks);
}

// What the norm reads besides the outputs, asked for ahead.
template <int TG>
struct NormInputs {
  uint32_t weight, z[TG];

  __device__ __forceinline__ void load(const NormTail& norm, int tokens, int64_t b, int64_t first,
                                       int hv, int row) {
    weight = load_bits(norm.weight.ptr, norm.weight.dtype, row * norm.weight.s0);
#pragma unroll
    for (int t = 0; t < TG; t++) {
      z[t] = load_bits(norm.z.ptr, norm.z.dtype,
                       offset_of(norm.z, b, first + (t < tokens ? t : 0), hv) + row * norm.z.sd);
    }
  }
};

// The gated norm of a head whose rows are the threads of this block: out[t] is a thread's row of
// token `first + t`. Every thread calls it.
template <int TG, int WARPS>
__device__ __forceinline__ void norm_tail(const NormTail& norm, float (&out)[TG],
                                          const NormInputs<TG>& in, int tokens, int64_t b,
                                          int64_t first, int hv, int row, bool live, int V,
                                          DType dtype, float (&parts)[TG][WARPS]) {
#pragma unroll
  for (int t = 0; t < TG; t++) {
    out[t] = t < tokens && live ? round_as(dtype, out[t]) : 0.f;
    const float sum = lane_sum(out[t] * out[t]);
    if ((threadIdx.x & 31) == 0) parts[t][threadIdx.x >> 5] = sum;
  }
  __syncthreads();
  if (!live) return;
  const float weight = bits_to_float(in.weight, norm.weight.dtype);
#pragma unroll
  for (int t = 0; t < TG; t++) {
    if (t < tokens) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < WARPS; i++) sum += parts[t][i];
      const float y = gated_norm(out[t], sum, V, norm.eps, weight, norm.weight.dtype,
                                 bits_to_float(in.z[t], norm.z.dtype), dtype);
      store_as(norm.y.ptr, norm.y.dtype, offset_of(norm.y, b, first + t, hv) + row * norm.y.sd, y);
    }
  }
}

}  // namespace cuda
}  // namespace gdn
