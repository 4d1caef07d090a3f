// Device helpers shared by every CUDA kernel: typed access, warp sums, gates, launches.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cfloat>
#include <cstdint>

#include "../../args.h"
#include "../../index.h"

namespace gdn {
namespace cuda {

using bf16 = __nv_bfloat16;
using f16 = __half;

constexpr unsigned kFullMask = 0xffffffffu;

template <class T>
struct TypeOf;
template <>
struct TypeOf<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct TypeOf<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct TypeOf<f16> {
  static constexpr DType value = DType::f16;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ f16 from_float<f16>(float x) {
  return __float2half_rn(x);
}

// A 16-byte vector of the storage type as floats and back (one rounding).
template <class T>
struct Vec;
template <>
struct Vec<float> {
  static constexpr int E = 4;
  static __device__ __forceinline__ void unpack(const uint4& a, float* f) {
    f[0] = __uint_as_float(a.x);
    f[1] = __uint_as_float(a.y);
    f[2] = __uint_as_float(a.z);
    f[3] = __uint_as_float(a.w);
  }
  static __device__ __forceinline__ uint4 pack(const float* f) {
    return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]),
                      __float_as_uint(f[3]));
  }
};
template <>
struct Vec<bf16> {
  static constexpr int E = 8;
  static __device__ __forceinline__ void unpack(const uint4& a, float* f) {
    const uint32_t w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      f[2 * i] = __uint_as_float(w[i] << 16);
      f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
  }
  static __device__ __forceinline__ uint4 pack(const float* f) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const __nv_bfloat162 p = __floats2bfloat162_rn(f[2 * i], f[2 * i + 1]);
      w[i] = *reinterpret_cast<const uint32_t*>(&p);
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
  }
};
template <>
struct Vec<f16> {
  static constexpr int E = 8;
  static __device__ __forceinline__ void unpack(const uint4& a, float* f) {
    const uint32_t w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 p = __half22float2(*reinterpret_cast<const __half2*>(&w[i]));
      f[2 * i] = p.x;
      f[2 * i + 1] = p.y;
    }
  }
  static __device__ __forceinline__ uint4 pack(const float* f) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const __half2 p = __floats2half2_rn(f[2 * i], f[2 * i + 1]);
      w[i] = *reinterpret_cast<const uint32_t*>(&p);
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
  }
};

// Element `i` of memory whose dtype is known at run time (the branch is uniform over the grid).
__device__ __forceinline__ float load_as(const void* p, DType d, int64_t i) {
  switch (d) {
    case DType::f32:
      return static_cast<const float*>(p)[i];
    case DType::bf16:
      return to_float(static_cast<const bf16*>(p)[i]);
    default:
      return to_float(static_cast<const f16*>(p)[i]);
  }
}
__device__ __forceinline__ void store_as(void* p, DType d, int64_t i, float x) {
  switch (d) {
    case DType::f32:
      static_cast<float*>(p)[i] = x;
      break;
    case DType::bf16:
      static_cast<bf16*>(p)[i] = from_float<bf16>(x);
      break;
    default:
      static_cast<f16*>(p)[i] = from_float<f16>(x);
  }
}
__device__ __forceinline__ float round_as(DType d, float x) {
  if (d == DType::bf16) return to_float(from_float<bf16>(x));
  if (d == DType::f16) return to_float(from_float<f16>(x));
  return x;
}

// A load split from its conversion: a dtype known at run time only must not make every load wait
// for the one before it.
__device__ __forceinline__ uint32_t load_bits(const void* p, DType d, int64_t i) {
  return d == DType::f32 ? static_cast<const uint32_t*>(p)[i] : static_cast<const uint16_t*>(p)[i];
}
__device__ __forceinline__ float bits_to_float(uint32_t x, DType d) {
  const float f = __uint_as_float(x), b = __uint_as_float(x << 16);
  const float h = __half2float(__ushort_as_half(static_cast<unsigned short>(x)));
  return d == DType::f32 ? f : d == DType::bf16 ? b : h;
}

// N consecutive elements of T as stored; the caller knows that they are contiguous and aligned.
template <class T, int N>
struct RawVec {
  static constexpr int W = N * sizeof(T) / 4;
  uint32_t w[W];
};
template <class T, int N>
__device__ __forceinline__ RawVec<T, N> load_raw(const T* p) {
  RawVec<T, N> r;
  constexpr int W = RawVec<T, N>::W;
  if constexpr (W % 4 == 0) {
#pragma unroll
    for (int j = 0; j < W; j += 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(reinterpret_cast<const uint32_t*>(p) + j);
      r.w[j] = x.x;
      r.w[j + 1] = x.y;
      r.w[j + 2] = x.z;
      r.w[j + 3] = x.w;
    }
  } else {
    static_assert(W == 2, "a lane owns at least eight bytes");
    const uint2 x = *reinterpret_cast<const uint2*>(p);
    r.w[0] = x.x;
    r.w[1] = x.y;
  }
  return r;
}
template <class T, int N>
__device__ __forceinline__ void store_raw(T* p, const RawVec<T, N>& r) {
  constexpr int W = RawVec<T, N>::W;
  // The compiler takes a plain store of a packed vector apart, into words.
  if constexpr (W == 4) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(r.w[0]), "r"(r.w[1]),
                 "r"(r.w[2]), "r"(r.w[3])
                 : "memory");
  } else {
    static_assert(W == 2, "eight or sixteen bytes");
    asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(r.w[0]), "r"(r.w[1]) : "memory");
  }
}
template <class T, int N>
__device__ __forceinline__ void raw_to_float(const RawVec<T, N>& r, float* f) {
#pragma unroll
  for (int j = 0; j < RawVec<T, N>::W; j++) {
    if constexpr (sizeof(T) == 4) {
      f[j] = __uint_as_float(r.w[j]);
    } else if constexpr (TypeOf<T>::value == DType::bf16) {
      f[2 * j] = __uint_as_float(r.w[j] << 16);
      f[2 * j + 1] = __uint_as_float(r.w[j] & 0xffff0000u);
    } else {
      const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&r.w[j]));
      f[2 * j] = x.x;
      f[2 * j + 1] = x.y;
    }
  }
}
template <class T, int N>
__device__ __forceinline__ RawVec<T, N> floats_to_raw(const float* f) {
  RawVec<T, N> r;
  alignas(16) T x[N];
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = from_float<T>(f[i]);
#pragma unroll
  for (int j = 0; j < RawVec<T, N>::W; j++) r.w[j] = reinterpret_cast<const uint32_t*>(x)[j];
  return r;
}
// N floats rounded to T where they lie together and aligned.
template <class T, int N>
__device__ __forceinline__ void store_floats(T* p, const float* f) {
  constexpr int BYTES = N * sizeof(T);
  alignas(16) T x[N];
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = from_float<T>(f[i]);
  if constexpr (BYTES % 16 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; i++) {
      reinterpret_cast<uint4*>(p)[i] = reinterpret_cast<const uint4*>(x)[i];
    }
  } else {
    static_assert(BYTES == 8, "at least eight bytes");
    *reinterpret_cast<uint2*>(p) = *reinterpret_cast<const uint2*>(x);
  }
}

// Division of n < 2^16 by a divisor fixed per launch.
struct FastDiv {
  uint32_t divisor = 1, magic = 0;
  FastDiv() = default;
  explicit FastDiv(uint32_t d) : divisor(d), magic(d > 1 ? 0xffffffffu / d + 1 : 0) {}
  __device__ __forceinline__ uint32_t operator()(uint32_t n) const {
    return magic ? __umulhi(n, magic) : n;
  }
};

__device__ __forceinline__ int64_t offset_of(const View& x, int64_t b, int64_t t, int64_t h) {
  return b * x.sb + t * x.st + h * x.sh;
}
__device__ __forceinline__ float load_param(const Param& p, int64_t i) {
  return load_as(p.ptr, p.dtype, i * p.s0);
}

// Log decay and beta of one token and value head, loaded first and computed later.
struct RawGates {
  uint32_t g, beta, A_log, dt_bias;
};
__device__ __forceinline__ RawGates load_gates(const Gates& x, int64_t b, int64_t t, int64_t hv) {
  RawGates r;
  r.g = load_bits(x.g.ptr, x.g.dtype, offset_of(x.g, b, t, hv));
  r.beta = load_bits(x.beta.ptr, x.beta.dtype, offset_of(x.beta, b, t, hv));
  r.A_log = r.dt_bias = 0;
  if (x.raw) {
    r.A_log = load_bits(x.A_log.ptr, x.A_log.dtype, hv * x.A_log.s0);
    r.dt_bias = load_bits(x.dt_bias.ptr, x.dt_bias.dtype, hv * x.dt_bias.s0);
  }
  return r;
}
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }
// Gates divide plainly: without the branch of that division ptxas spills registers of the window of
// four tokens, a tenth of its time.
__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
// The branch of a plain division would keep the values of a thread from being under way together.
// Zero at minus infinity, which the bound keeps from being multiplied by zero.
__device__ __forceinline__ float silu(float x) {
  return fmaxf(x, -FLT_MAX) * __fdividef(1.f, 1.f + expf(-x));
}
// The same within 1e-5 in a third of the instructions, for results of 16 bits.
__device__ __forceinline__ float silu16(float x) {
  float power, part;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(part) : "f"(1.f + power));
  return fmaxf(x, -FLT_MAX) * part;
}
__device__ __forceinline__ void compute_gates(const Gates& x, const RawGates& r, float* g,
                                              float* beta) {
  *g = bits_to_float(r.g, x.g.dtype);
  *beta = bits_to_float(r.beta, x.beta.dtype);
  if (x.raw) {
    *g = -expf(bits_to_float(r.A_log, x.A_log.dtype)) *
         softplus(*g + bits_to_float(r.dt_bias, x.dt_bias.dtype));
    *beta = sigmoid(*beta);
  }
}

// A value that all lanes of a warp share, in a form that tells the compiler so.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(kFullMask, x, 0); }

// Sum over groups of LANES consecutive lanes; every lane gets it.
template <int LANES = 32>
__device__ __forceinline__ float lane_sum(float x) {
#pragma unroll
  for (int m = LANES / 2; m; m >>= 1) x += __shfl_xor_sync(kFullMask, x, m);
  return x;
}

// The grid of a recurrence: blockIdx.x = head * blocks + block of it, blockIdx.y = sequence.
struct HeadGrid {
  int64_t first = 0;  // sequence of blockIdx.y == 0
  FastDiv blocks, ratio;
  bool early = false;  // state and indices before the wait
  unsigned ahead = 0;  // blocks that fetch their part of the state into L2 before the wait
};

// Sums NV values at once over groups of LANES lanes: each step halves the values a lane still
// carries, so NV sums cost about NV shuffles. Lane l of a group ends with the sum of value
// l / (LANES / NV), or, of more values than lanes, with the NV / LANES sums from l * NV / LANES on.
// A recursion, because an index that the compiler does not fold would move the array to local
// memory.
template <int NV, int LANES>
__device__ __forceinline__ void scatter_sum(const float (&x)[NV], int lane,
                                            float (&sums)[NV < LANES ? 1 : NV / LANES]) {
  static_assert((NV & (NV - 1)) == 0 && (LANES & (LANES - 1)) == 0, "powers of two");
  if constexpr (NV == 1) {
    sums[0] = lane_sum<LANES>(x[0]);
  } else if constexpr (LANES == 1) {
#pragma unroll
    for (int i = 0; i < NV; i++) sums[i] = x[i];
  } else {
    float half[NV / 2];
    const bool upper = lane & (LANES / 2);
#pragma unroll
    for (int i = 0; i < NV / 2; i++) {
      const float low = x[i], high = x[i + NV / 2];
      half[i] = (upper ? high : low) + __shfl_xor_sync(kFullMask, upper ? low : high, LANES / 2);
    }
    scatter_sum<NV / 2, LANES / 2>(half, lane, sums);
  }
}
template <int NV, int LANES>
__device__ __forceinline__ float transpose_sum(const float (&x)[NV], int lane) {
  static_assert(NV <= LANES, "one sum a lane");
  float sum[1];
  scatter_sum<NV, LANES>(x, lane, sum);
  return sum[0];
}

// sequence_of with rows outside the pool turned into padding, so that a stale index cannot reach
// memory that is not the pool's, and token ranges clipped to the tensor.
__device__ __forceinline__ Sequence device_sequence(const Sequences& s, int64_t n,
                                                    int64_t row_column = -1) {
  // The row is asked for beside the count of accepted tokens, not behind it, unless that names its
  // column: each is a trip to memory.
  const bool named = s.S > 0 && row_column < 0;
  Sequences rest = s;
  int64_t row = n;
  if (!named && s.state_indices.ptr) {
    row = at(s.state_indices, n, s.S > 0 ? row_column : 0);
    rest.state_indices.ptr = nullptr;
  }
  Sequence q = sequence_of(rest, n, row_column);
  if (!named && q.row >= 0) q.row = row;
  if (q.row >= s.P) q.row = -1;
  if (s.cu_seqlens.ptr) {
    q.start = q.start < 0 ? 0 : q.start;
    q.end = q.end > s.T ? s.T : q.end;
  }
  return q;
}

// The row that sequence `n` of a pool call reads, or a negative value for padding.
__device__ __forceinline__ int64_t device_row(const Sequences& s, int64_t n) {
  int64_t column = 0;
  if (s.num_accepted.ptr) {
    column = at(s.num_accepted, n) - 1;
    if (column < 0 || (s.S > 0 && column >= s.S)) return -1;
  }
  if (!s.state_indices.ptr) return n;
  const int64_t row = at(s.state_indices, n, s.S > 0 ? column : 0);
  return row < s.P ? row : -1;
}
// The sequence of a block. ONE: every sequence has one token, so no lengths are read.
template <bool ONE>
__device__ __forceinline__ Sequence block_sequence(const Sequences& s, int64_t n) {
  if constexpr (!ONE) return device_sequence(s, n);
  Sequence q;
  q.b = n;
  q.start = 0;
  q.end = 1;
  q.fresh = s.has_initial_state && !s.has_initial_state[n * s.s_has];
  q.row = device_row(s, n);
  return q;
}

// The same read past the caches of this multiprocessor, while a kernel before this one may still
// write what it reads: good for a guess only.
__device__ __forceinline__ int64_t guess_at(const Index& x, int64_t i) {
  const int64_t offset = i * x.s0;
  return x.is64 ? static_cast<const volatile int64_t*>(x.ptr)[offset]
                : static_cast<const volatile int32_t*>(x.ptr)[offset];
}
__device__ __forceinline__ int64_t guess_row(const Sequences& s, int64_t n) {
  const int64_t row = s.state_indices.ptr ? guess_at(s.state_indices, n) : n;
  return row < s.P ? row : -1;
}
__device__ __forceinline__ void prefetch_line(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

// Programmatic dependent launch: nothing a kernel before this one wrote may be touched above the
// wait; below it everything is visible. A no-op where the launch did not ask for it.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// State traffic. L1 need not keep it, as each byte is read once and written once. L2 keeps what a
// step read until the step has written it (evict_last; a plain store leaves it so): 3 % of a step.
// docs/tried/cuda.md has the comparison behind this.
__device__ __forceinline__ uint4 load_state(const void* p) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  uint4 r;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p), "l"(policy)
               : "memory");
  return r;
}
// Eight bytes of it.
__device__ __forceinline__ uint2 load_state_half(const void* p) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  uint2 r;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0,%1}, [%2], %3;"
               : "=r"(r.x), "=r"(r.y)
               : "l"(p), "l"(policy)
               : "memory");
  return r;
}
__device__ __forceinline__ void store_state(void* p, const uint4& v) {
  // The compiler takes a plain store of a packed vector apart, into words.
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
// What was read by other means leaves L2 first.
__device__ __forceinline__ void store_evict_first(void* p, const uint4& v) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1,%2,%3,%4}, %5;" ::"l"(p), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy)
               : "memory");
}

}  // namespace cuda
}  // namespace gdn
