// Tensor-core fragments of a warp, and the moves that feed them. Everything runs from sm_80 on;
// code built for sm_90a (GDN_WARPGROUP) multiplies four warps at a time with right operands
// straight from shared memory.
//
// A panel is a tile of 64 rows of 64 16-bit elements in shared memory: 128 bytes a row, whose eight
// 16-byte pieces are stored in the order of (piece xor row), so that the eight rows of one ldmatrix
// fall into different banks.
//
// Registers of a warp, with g = lane / 4 and t = lane % 4:
//   accumulator 16 x 8: c[0], c[1] = (row g, columns 2t, 2t + 1), c[2], c[3] = those of row g + 8;
//   left operand 16 x 16: two accumulators side by side, rounded to 16 bits in pairs
#pragma once

#include "common.cuh"
#include "wgmma.cuh"

namespace gdn {
namespace cuda {

constexpr int kPanelBytes = 64 * 64 * 2;  // rows, columns, bytes of an element

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// Byte offset of piece `piece` (8 elements) of row `row` in a panel.
__device__ __forceinline__ int panel_offset(int row, int piece) {
  return row * 128 + ((piece ^ (row & 7)) << 4);
}

// 16 bytes from global to shared memory; zeros where `valid` is false (nothing is read then).
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8. Register m of a lane
// holds elements (g, 2t), (g, 2t + 1) of matrix m, or of its transpose.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// An 8 x 8 matrix of 16-bit elements spread over the warp, transposed.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Stores four 8 x 8 matrices as load_matrices reads them, from the same addresses.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#else
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int m = 0; m < 4; m++) {
    const uint32_t row = __shfl_sync(kFullMask, address, 8 * m + (lane >> 2));
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(row + (lane & 3) * 4), "r"(r[m]) : "memory");
  }
#endif
}

// Stores the transposes of four 8 x 8 matrices held as above; address(l): the 16 bytes of row l % 8
// of transposed matrix l / 8.
template <class Address>
__device__ __forceinline__ void store_transposed(const uint32_t (&r)[4], int lane,
                                                 Address&& address) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                   shared_address(address(lane))),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#else
#pragma unroll
  for (int m = 0; m < 4; m++) {
    reinterpret_cast<uint32_t*>(address(8 * m + (lane >> 2)))[lane & 3] = transpose_matrix(r[m]);
  }
#endif
}

template <class T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_pair<bf16>(float low, float high) {
  const __nv_bfloat162 p = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&p);
}
template <>
__device__ __forceinline__ uint32_t pack_pair<f16>(float low, float high) {
  const __half2 p = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&p);
}
template <class T>
__device__ __forceinline__ float2 unpack_pair(uint32_t x);
template <>
__device__ __forceinline__ float2 unpack_pair<bf16>(uint32_t x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 unpack_pair<f16>(uint32_t x) {
  return __half22float2(*reinterpret_cast<const __half2*>(&x));
}
// Two floats as sums of PARTS numbers of T each: what the first one loses, the second holds.
template <class T, int PARTS>
__device__ __forceinline__ void pack_parts(uint32_t (&r)[PARTS], float low, float high) {
  r[0] = pack_pair<T>(low, high);
  if constexpr (PARTS == 2) {
    const float2 x = unpack_pair<T>(r[0]);
    r[1] = pack_pair<T>(low - x.x, high - x.y);
  }
}

// The power of two that brings a number to 2^target or a little above, and its inverse; both
// between 2^-50 and 2^50.
struct PowerOfTwo {
  float by = 1.f, back = 1.f;
  PowerOfTwo() = default;
  __device__ __forceinline__ PowerOfTwo(float x, int target) {
    const int exponent = min(max(static_cast<int>(__float_as_uint(x) >> 23), 87), 167);
    by = __uint_as_float(static_cast<uint32_t>(254 + target - exponent) << 23);
    back = __uint_as_float(static_cast<uint32_t>(exponent - target) << 23);
  }
};

// c (16 x 8) += a (16 x 16) b (16 x 8); b0, b1 hold rows 2t, 2t + 1 and those plus 8 of column g.
template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1);
template <>
__device__ __forceinline__ void mma_16x8x16<bf16>(float (&c)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16x8x16<f16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c [16 x 8] += a [16 x 8] b [8 x 8] in tf32: the tensor cores drop the low 13 bits of an operand,
// which tf32_rest returns. Lane 4 * g + t holds of a rows g, g + 8 and columns t, t + 4.
__device__ __forceinline__ void mma_16x8x8(float (&c)[4], const float (&a)[4], float b0, float b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
        "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}
__device__ __forceinline__ float tf32_rest(float x) {
  return x - __uint_as_float(__float_as_uint(x) & 0xffffe000u);
}

// What the tensor cores drop of an operand makes a rounding of `nearest_tf32`; `round_tf32` rounds
// a value that is read otherwise too.
__device__ __forceinline__ float nearest_tf32(float x) {
  return __uint_as_float(__float_as_uint(x) + 0x1000u);
}
__device__ __forceinline__ float round_tf32(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
}
// c (16 x 8) += x (16 x 8) b (8 x 8); x an accumulator, b = rows 2t and 2t + 1 of column g. The
// rows of b stand in the order in which an accumulator holds its columns. With one part both are
// rounded; with two a factor is the sum of two roundings.
template <int PARTS>
__device__ __forceinline__ void multiply_tf32(float (&c)[4], const float (&x)[4], float2 b) {
  if constexpr (PARTS == 1) {
    const float a[4] = {nearest_tf32(x[0]), nearest_tf32(x[2]), nearest_tf32(x[1]),
                        nearest_tf32(x[3])};
    mma_16x8x8(c, a, b.x, b.y);
  } else {
    const float a[4] = {round_tf32(x[0]), round_tf32(x[2]), round_tf32(x[1]), round_tf32(x[3])};
    const float rest[4] = {x[0] - a[0], x[2] - a[1], x[1] - a[2], x[3] - a[3]};
    const float2 d = make_float2(round_tf32(b.x), round_tf32(b.y));
    mma_16x8x8(c, rest, d.x, d.y);
    mma_16x8x8(c, a, b.x - d.x, b.y - d.y);
    mma_16x8x8(c, a, d.x, d.y);
  }
}
// 2^x; what would be denormal is zero.
__device__ __forceinline__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The addresses at which the lanes of a warp read right operands from a panel.
struct RightLanes {
  uint32_t plain, plain_x, across, across_x;
  __device__ __forceinline__ explicit RightLanes(int lane) {
    plain = (((lane >> 4) << 3) + (lane & 7)) * 128;
    plain_x = (((lane >> 3) & 1) ^ (lane & 7)) << 4;
    across = (lane & 15) * 128;
    across_x = ((lane >> 4) ^ (lane & 7)) << 4;
  }
};
template <int N>
__device__ __forceinline__ void clear(float (&c)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; i++) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.f;
}
// c (16 x 64 a warp) += (or =) a (16 x 16) times columns 16 s ... of a panel, transposed. Rows of
// the panel before 16 `first` are known to be zero there.
template <class T, bool ADD = true>
__device__ __forceinline__ void multiply_rows(float (&c)[8][4], const uint32_t (&a)[4],
                                              uint32_t base, uint32_t panel, int s, int first,
                                              const RightLanes& lanes) {
#if GDN_WARPGROUP
  multiply_group<T, 0, ADD>(c, a, panel_descriptor(base, panel + s * 32, 16));
#else
  if (!ADD) clear(c);
#pragma unroll
  for (int p = 0; p < 4; p++) {
    if (p < first) continue;
    uint32_t b[4];
    load_matrices(b, base + panel + p * 2048 + lanes.plain + ((s << 5) ^ lanes.plain_x));
    mma_16x8x16<T>(c[2 * p], a, b[0], b[1]);
    mma_16x8x16<T>(c[2 * p + 1], a, b[2], b[3]);
  }
#endif
}
// c (16 x 8 N a warp) += (or =) a (16 x 16) times rows 16 s ... of the panels, which hold 64
// columns each.
template <class T, bool ADD = true, int N>
__device__ __forceinline__ void multiply_columns(float (&c)[N][4], const uint32_t (&a)[4],
                                                 uint32_t base, uint32_t panels, int s, int first,
                                                 const RightLanes& lanes) {
#if GDN_WARPGROUP
  multiply_group<T, 1, ADD>(c, a, panel_descriptor(base, panels + s * 2048, kPanelBytes));
#else
  if (!ADD) clear(c);
#pragma unroll
  for (int p = 0; p < N / 2; p++) {
    if (p < first) continue;
    uint32_t b[4];
    load_transposed(b, base + panels + (p >> 2) * kPanelBytes + s * 2048 + lanes.across +
                           (((p & 3) << 5) ^ lanes.across_x));
    mma_16x8x16<T>(c[2 * p], a, b[0], b[1]);
    mma_16x8x16<T>(c[2 * p + 1], a, b[2], b[3]);
  }
#endif
}

// A left operand of two accumulators side by side, in parts.
template <class T, int PARTS>
__device__ __forceinline__ void pack_left(uint32_t (&a)[PARTS][4], const float (&x)[4],
                                          const float (&y)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float (&from)[4] = i < 2 ? x : y;
    uint32_t r[PARTS];
    pack_parts<T>(r, from[2 * (i & 1)], from[2 * (i & 1) + 1]);
#pragma unroll
    for (int part = 0; part < PARTS; part++) a[part][i] = r[part];
  }
}
// Both factors in parts, those of a panel `step` bytes apart: multiply(whether to add, a part of a,
// panel) for each product; what two second parts give is below rounding.
template <bool ADD, int PARTS, class Multiply>
__device__ __forceinline__ void multiply_parts(const uint32_t (&a)[PARTS][4], uint32_t panel,
                                               uint32_t step, Multiply multiply) {
  if constexpr (PARTS == 1) {
    multiply(std::bool_constant<ADD>(), a[0], panel);
  } else {
    multiply(std::bool_constant<ADD>(), a[1], panel);
    multiply(std::true_type(), a[0], panel + step);
    multiply(std::true_type(), a[0], panel);
  }
}
template <class T, bool ADD = true, int PARTS>
__device__ __forceinline__ void multiply_rows(float (&c)[8][4], const uint32_t (&a)[PARTS][4],
                                              uint32_t base, uint32_t panel, uint32_t step, int s,
                                              int first, const RightLanes& lanes) {
  multiply_parts<ADD>(a, panel, step, [&](auto add, const uint32_t (&part)[4], uint32_t p) {
    multiply_rows<T, decltype(add)::value>(c, part, base, p, s, first, lanes);
  });
}
template <class T, bool ADD = true, int N, int PARTS>
__device__ __forceinline__ void multiply_columns(float (&c)[N][4], const uint32_t (&a)[PARTS][4],
                                                 uint32_t base, uint32_t panels, uint32_t step,
                                                 int s, int first, const RightLanes& lanes) {
  multiply_parts<ADD>(a, panels, step, [&](auto add, const uint32_t (&part)[4], uint32_t p) {
    multiply_columns<T, decltype(add)::value>(c, part, base, p, s, first, lanes);
  });
}

// A float as the sum of two 16-bit numbers: what the first one loses, the second holds.
template <class T>
__device__ __forceinline__ float low_part(float x) {
  return x - to_float(from_float<T>(x));
}

}  // namespace cuda
}  // namespace gdn
