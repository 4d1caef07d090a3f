// Tensor-core fragments of a warp, and the moves that feed them. Nothing here is newer than sm_80.
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

__device__ __forceinline__ uint32_t to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}
// c (16 x 8) += x (16 x 8) b (8 x 8) with 11-bit factors; x an accumulator, b = rows 2t and 2t + 1
// of column g. The rows of b stand in the order in which an accumulator holds its columns.
__device__ __forceinline__ void multiply_tf32(float (&c)[4], const float (&x)[4], float2 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(to_tf32(x[0])), "r"(to_tf32(x[2])), "r"(to_tf32(x[1])), "r"(to_tf32(x[3])),
        "r"(to_tf32(b.x)), "r"(to_tf32(b.y)));
}

}  // namespace cuda
}  // namespace gdn
