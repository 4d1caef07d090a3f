// Products of four warps at a time (wgmma), left operands from registers, right ones straight from
// shared memory; code for sm_90a only, elsewhere the waits are empty.
#pragma once

#include "common.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define GDN_WARPGROUP 1
#else
#define GDN_WARPGROUP 0
#endif

namespace gdn {
namespace cuda {

// Products in flight: `settle` what they read or add to, so that nothing of it is computed behind
// `open_products`; `open_products` after the last change of a register that they read or add to,
// `close_products` behind a batch, `await_products` before its sums are read; it leaves PENDING
// batches running. Where a warp multiplies alone nothing is ever in flight.
#if GDN_WARPGROUP
template <int N>
__device__ __forceinline__ void settle(float (&c)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
  }
}
template <int N, int PARTS>
__device__ __forceinline__ void settle(uint32_t (&a)[N][PARTS][4]) {
#pragma unroll
  for (int i = 0; i < N * PARTS; i++) {
    uint32_t (&x)[4] = a[i / PARTS][i % PARTS];
    asm volatile("" : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])::"memory");
  }
}
__device__ __forceinline__ void open_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void close_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING, int N>
__device__ __forceinline__ void await_products(float (&c)[N][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
  settle(c);
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
// The registers of an accumulator as operands that a product adds to or sets.
#define GDN_ADDED(x) "+f"(x)
#define GDN_SET(x) "=f"(x)
#define GDN_TILE(M, c, i) M(c[i][0]), M(c[i][1]), M(c[i][2]), M(c[i][3])
#define GDN_TILES_8(M, c, i)                                                              \
  GDN_TILE(M, c, i), GDN_TILE(M, c, i + 1), GDN_TILE(M, c, i + 2), GDN_TILE(M, c, i + 3), \
      GDN_TILE(M, c, i + 4), GDN_TILE(M, c, i + 5), GDN_TILE(M, c, i + 6), GDN_TILE(M, c, i + 7)
#define GDN_WGMMA_64(TYPE, M, ADD)                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE           \
               " {"                                                                  \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "   \
               "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "   \
               "%28, %29, %30, %31}, {%32, %33, %34, %35}, %36, " ADD ", 1, 1, %37;" \
               : GDN_TILES_8(M, c, 0)                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED))
#define GDN_WGMMA_128(TYPE, M, ADD)                                                \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE        \
               " {"                                                                \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, " \
               "%15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, " \
               "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, " \
               "%41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
               "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "               \
               "{%64, %65, %66, %67}, %68, " ADD ", 1, 1, %69;"                    \
               : GDN_TILES_8(M, c, 0), GDN_TILES_8(M, c, 8)                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANSPOSED))
#define GDN_WGMMA(SHAPE)                                  \
  if constexpr (TypeOf<T>::value == DType::bf16 && ADD) { \
    SHAPE("bf16", GDN_ADDED, "1");                        \
  } else if constexpr (TypeOf<T>::value == DType::bf16) { \
    SHAPE("bf16", GDN_SET, "0");                          \
  } else if constexpr (ADD) {                             \
    SHAPE("f16", GDN_ADDED, "1");                         \
  } else {                                                \
    SHAPE("f16", GDN_SET, "0");                           \
  }

// c (64 x 64 or 64 x 128, 16 rows a warp) += a b, or = a b without ADD; b a descriptor. TRANSPOSED:
// its rows run along the sum.
template <class T, int TRANSPOSED, bool ADD>
__device__ __forceinline__ void multiply_group(float (&c)[8][4], const uint32_t (&a)[4],
                                               uint64_t b) {
  GDN_WGMMA(GDN_WGMMA_64)
}
template <class T, int TRANSPOSED, bool ADD>
__device__ __forceinline__ void multiply_group(float (&c)[16][4], const uint32_t (&a)[4],
                                               uint64_t b) {
  GDN_WGMMA(GDN_WGMMA_128)
}

#undef GDN_ADDED
#undef GDN_SET
#undef GDN_TILE
#undef GDN_TILES_8
#undef GDN_WGMMA_64
#undef GDN_WGMMA_128
#undef GDN_WGMMA
#else
template <class A>
__device__ __forceinline__ void settle(A&) {}
__device__ __forceinline__ void open_products() {}
__device__ __forceinline__ void close_products() {}
template <int PENDING, int N>
__device__ __forceinline__ void await_products(float (&)[N][4]) {}
__device__ __forceinline__ void publish_shared() {}
#endif

}  // namespace cuda
}  // namespace gdn
