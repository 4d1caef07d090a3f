// Tensor-core fragments of a warp, and the moves that feed them. Everything runs from sm_80 on;
// code built for sm_90a (GDN_WARPGROUP) multiplies four warps at a time with right operands
// straight from shared memory.
//
// A panel is a tile of 64 rows of 64 16-bit elements in shared memory: 128 bytes a row, whose eight
// 16-byte pieces are stored in the order of (piece xor row), so that the eight rows of one ldmatrix
// fall into different banks.
//
// Registers of a warp, with g = lane / 4 and t = lane % 4:
//   accumulator 16 x 8: c[0], c[1] = (row g, columns 2t, 2t + 1), c[2], c[3] = the same of row g +
//   8 left operand 16 x 16: two accumulators side by side, rounded to 16 bits in pairs
#pragma once

#include "common.cuh"

namespace gdn {
namespace cuda {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GDN_WARPGROUP 1
#else
#define GDN_WARPGROUP 0
#endif

constexpr int kPanel = 64;  // rows and columns
constexpr int kPanelBytes = 64 * 64 * 2;

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Byte offset of piece `piece` (8 elements) of row `row` in a panel.
__device__ __forceinline__ int panel_offset(int row, int piece) {
  return row * 128 + ((piece ^ (row & 7)) << 4);
}

// 16 bytes from global to shared memory, zeros where `valid` is false (nothing is read then).
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

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 p = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&p);
}
__device__ __forceinline__ float2 unpack_bf16(uint32_t x) {
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
// Two accumulators side by side as a left operand.
__device__ __forceinline__ void pack_left(uint32_t (&a)[4], const float (&x)[4],
                                          const float (&y)[4]) {
  a[0] = pack_bf16(x[0], x[1]);
  a[1] = pack_bf16(x[2], x[3]);
  a[2] = pack_bf16(y[0], y[1]);
  a[3] = pack_bf16(y[2], y[3]);
}

// c (16 x 8) += a (16 x 16) b (16 x 8); b0, b1 hold rows 2t, 2t + 1 and those plus 8 of column g.
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The products below drop all but 11 bits. `nearest_tf32` makes that a rounding; `round_tf32`
// rounds a value that is read otherwise too.
__device__ __forceinline__ float nearest_tf32(float x) {
  return __uint_as_float(__float_as_uint(x) + 0x1000u);
}
__device__ __forceinline__ float round_tf32(float x) {
  return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u);
}
// c (16 x 8) += x (16 x 8) b (8 x 8), both rounded; x an accumulator, b = rows 2t and 2t + 1 of
// column g. The rows of b stand in the order in which an accumulator holds its columns.
__device__ __forceinline__ void multiply_tf32(float (&c)[4], const float (&x)[4], float2 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(x[0])), "r"(__float_as_uint(x[2])), "r"(__float_as_uint(x[1])),
        "r"(__float_as_uint(x[3])), "r"(__float_as_uint(b.x)), "r"(__float_as_uint(b.y)));
}
// 2^x; what would be denormal is zero.
__device__ __forceinline__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Products in flight: `open_products` after the last change of a register that they read or add to,
// `close_products` behind a batch, `await_products` before its sums are read; it leaves PENDING
// batches running. Where a warp multiplies alone nothing is ever in flight.
#if GDN_WARPGROUP
__device__ __forceinline__ void open_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void close_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING, int N>
__device__ __forceinline__ void await_products(float (&c)[N][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
  for (int i = 0; i < N; i++) {
    asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
  }
}
// What threads wrote to shared memory becomes visible to the products after the next barrier.
__device__ __forceinline__ void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The panel `offset` bytes behind `base` as right operand; `next`: bytes to the panel with the next
// 64 columns. Constant offsets cost one addition each.
__device__ __forceinline__ uint64_t panel_descriptor(uint32_t base, uint32_t offset,
                                                     uint32_t next) {
  const uint32_t low = (base >> 4) + ((offset >> 4) | (next >> 4) << 16);
  return static_cast<uint64_t>(1024 >> 4 | 1u << 30) << 32 | low;
}
// c (64 x 64, 16 rows a warp) += a b, or = a b without ADD; b a descriptor. TRANSPOSED: its rows
// run along the sum.
template <int TRANSPOSED, bool ADD>
__device__ __forceinline__ void multiply_group(float (&c)[8][4], const uint32_t (&a)[4],
                                               uint64_t b) {
  if constexpr (ADD) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, 1, 1, 1, %37;"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]),
          "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
          "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]),
          "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
          "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]),
          "+f"(c[7][2]), "+f"(c[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED));
  } else {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, 0, 1, 1, %37;"
        : "=f"(c[0][0]), "=f"(c[0][1]), "=f"(c[0][2]), "=f"(c[0][3]), "=f"(c[1][0]), "=f"(c[1][1]),
          "=f"(c[1][2]), "=f"(c[1][3]), "=f"(c[2][0]), "=f"(c[2][1]), "=f"(c[2][2]), "=f"(c[2][3]),
          "=f"(c[3][0]), "=f"(c[3][1]), "=f"(c[3][2]), "=f"(c[3][3]), "=f"(c[4][0]), "=f"(c[4][1]),
          "=f"(c[4][2]), "=f"(c[4][3]), "=f"(c[5][0]), "=f"(c[5][1]), "=f"(c[5][2]), "=f"(c[5][3]),
          "=f"(c[6][0]), "=f"(c[6][1]), "=f"(c[6][2]), "=f"(c[6][3]), "=f"(c[7][0]), "=f"(c[7][1]),
          "=f"(c[7][2]), "=f"(c[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED));
  }
}
// c (64 x 128, 16 rows a warp) += a b, or = a b without ADD; b a descriptor. TRANSPOSED: its rows
// run along the sum.
template <int TRANSPOSED, bool ADD>
__device__ __forceinline__ void multiply_group(float (&c)[16][4], const uint32_t (&a)[4],
                                               uint64_t b) {
  if constexpr (ADD) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, "
        "%56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, 1, 1, 1, %69;"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]),
          "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]),
          "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]),
          "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]),
          "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]),
          "+f"(c[7][2]), "+f"(c[7][3]), "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3]),
          "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3]), "+f"(c[10][0]),
          "+f"(c[10][1]), "+f"(c[10][2]), "+f"(c[10][3]), "+f"(c[11][0]), "+f"(c[11][1]),
          "+f"(c[11][2]), "+f"(c[11][3]), "+f"(c[12][0]), "+f"(c[12][1]), "+f"(c[12][2]),
          "+f"(c[12][3]), "+f"(c[13][0]), "+f"(c[13][1]), "+f"(c[13][2]), "+f"(c[13][3]),
          "+f"(c[14][0]), "+f"(c[14][1]), "+f"(c[14][2]), "+f"(c[14][3]), "+f"(c[15][0]),
          "+f"(c[15][1]), "+f"(c[15][2]), "+f"(c[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED));
  } else {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, "
        "%8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, "
        "%24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, "
        "%56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, 0, 1, 1, %69;"
        : "=f"(c[0][0]), "=f"(c[0][1]), "=f"(c[0][2]), "=f"(c[0][3]), "=f"(c[1][0]), "=f"(c[1][1]),
          "=f"(c[1][2]), "=f"(c[1][3]), "=f"(c[2][0]), "=f"(c[2][1]), "=f"(c[2][2]), "=f"(c[2][3]),
          "=f"(c[3][0]), "=f"(c[3][1]), "=f"(c[3][2]), "=f"(c[3][3]), "=f"(c[4][0]), "=f"(c[4][1]),
          "=f"(c[4][2]), "=f"(c[4][3]), "=f"(c[5][0]), "=f"(c[5][1]), "=f"(c[5][2]), "=f"(c[5][3]),
          "=f"(c[6][0]), "=f"(c[6][1]), "=f"(c[6][2]), "=f"(c[6][3]), "=f"(c[7][0]), "=f"(c[7][1]),
          "=f"(c[7][2]), "=f"(c[7][3]), "=f"(c[8][0]), "=f"(c[8][1]), "=f"(c[8][2]), "=f"(c[8][3]),
          "=f"(c[9][0]), "=f"(c[9][1]), "=f"(c[9][2]), "=f"(c[9][3]), "=f"(c[10][0]),
          "=f"(c[10][1]), "=f"(c[10][2]), "=f"(c[10][3]), "=f"(c[11][0]), "=f"(c[11][1]),
          "=f"(c[11][2]), "=f"(c[11][3]), "=f"(c[12][0]), "=f"(c[12][1]), "=f"(c[12][2]),
          "=f"(c[12][3]), "=f"(c[13][0]), "=f"(c[13][1]), "=f"(c[13][2]), "=f"(c[13][3]),
          "=f"(c[14][0]), "=f"(c[14][1]), "=f"(c[14][2]), "=f"(c[14][3]), "=f"(c[15][0]),
          "=f"(c[15][1]), "=f"(c[15][2]), "=f"(c[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED));
  }
}
#else
__device__ __forceinline__ void open_products() {}
__device__ __forceinline__ void close_products() {}
template <int PENDING, int N>
__device__ __forceinline__ void await_products(float (&)[N][4]) {}
__device__ __forceinline__ void publish_shared() {}
#endif

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
template <bool ADD = true>
__device__ __forceinline__ void multiply_rows(float (&c)[8][4], const uint32_t (&a)[4],
                                              uint32_t base, uint32_t panel, int s, int first,
                                              const RightLanes& lanes) {
#if GDN_WARPGROUP
  multiply_group<0, ADD>(c, a, panel_descriptor(base, panel + s * 32, 16));
#else
  if (!ADD) clear(c);
#pragma unroll
  for (int p = 0; p < 4; p++) {
    if (p < first) continue;
    uint32_t b[4];
    load_matrices(b, base + panel + p * 2048 + lanes.plain + ((s << 5) ^ lanes.plain_x));
    multiply(c[2 * p], a, b[0], b[1]);
    multiply(c[2 * p + 1], a, b[2], b[3]);
  }
#endif
}
// c (16 x 8 N a warp) += (or =) a (16 x 16) times rows 16 s ... of the panels, which hold 64
// columns each.
template <bool ADD = true, int N>
__device__ __forceinline__ void multiply_columns(float (&c)[N][4], const uint32_t (&a)[4],
                                                 uint32_t base, uint32_t panels, int s, int first,
                                                 const RightLanes& lanes) {
#if GDN_WARPGROUP
  multiply_group<1, ADD>(c, a, panel_descriptor(base, panels + s * 2048, kPanelBytes));
#else
  if (!ADD) clear(c);
#pragma unroll
  for (int p = 0; p < N / 2; p++) {
    if (p < first) continue;
    uint32_t b[4];
    load_transposed(b, base + panels + (p >> 2) * kPanelBytes + s * 2048 + lanes.across +
                           (((p & 3) << 5) ^ lanes.across_x));
    multiply(c[2 * p], a, b[0], b[1]);
    multiply(c[2 * p + 1], a, b[2], b[3]);
  }
#endif
}

}  // namespace cuda
}  // namespace gdn
