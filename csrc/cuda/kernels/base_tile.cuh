// Rows of a base in shared memory.
#pragma once

#include "mma.cuh"
#include "updates.cuh"

namespace gdn {
namespace cuda {

// The rows of a base that a warp owns. 16-byte chunk c of place r stands at chunk
// c ^ (r & 7): no bank conflicts by row or by column. ORDERED: places hold rows in the order of
// row_at.
template <class ST, int K, bool ORDERED>
struct BaseTile {
  static constexpr int E = 16 / sizeof(ST), CH = K / E;
  uint4* chunks;
  int lane;
  uint32_t first_row, first_chunk;

  __device__ __forceinline__ BaseTile(void* memory, int lane)
      : chunks(static_cast<uint4*>(memory)), lane(lane) {
    first_row = shared_address(chunks + (lane & 15) * CH);
    first_chunk = ((lane >> 4) ^ (lane & 7)) * 16;
  }
  static __device__ __forceinline__ int row_of(int place) {
    return ORDERED ? row_at(place) : place;
  }
  __device__ __forceinline__ uint4& chunk_at(int r, int c) const {
    return chunks[r * CH + (c ^ (r & 7))];
  }
  // Places 16 m and on, columns 16 s and on, as the tensor cores take them from a lane: chunk_at(
  // 16 m + (lane & 15), 2 s + (lane >> 4)), in a form that is cheaper to work out than to keep.
  __device__ __forceinline__ uint32_t matrices_at(int m, int s) const {
    return first_row + m * 16 * CH * 16 + (first_chunk ^ (s * 32));
  }
  // The chunks that a lane moves: f(its bytes behind `chunks`, its place in memory). `home`: the
  // first of the warp's rows, `pitch` elements apart, `rows` of them to the end of V. A warp moves
  // whole rows one after another.
  template <class T, class F>
  __device__ __forceinline__ void each_chunk(T* home, int64_t pitch, int rows, const F& f) const {
    constexpr int STEP = CH < 32 ? 32 / CH : 1;   // rows at once
    constexpr int PARTS = CH < 32 ? 1 : CH / 32;  // chunks of a lane in a row
    const int r0 = lane / CH, c0 = lane % CH;
    T* at = home + r0 * pitch + c0 * E;
    const int64_t step = STEP * pitch;
    // r0 < STEP, a power of two, and r a multiple of it: place and swizzle split in two.
    const int p0 = row_of(r0), swizzled = (c0 ^ (p0 & 7)) * 16;
    const auto move = [&](int r) {
      const int p = row_of(r);
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        f(((p0 + p) * CH + part * 32) * 16 + (swizzled ^ ((p & 7) * 16)), at + 32 * part * E);
      }
      at += step;
    };
    if (rows >= 32) {
#pragma unroll
      for (int r = 0; r < 32; r += STEP) move(r);
    } else {
      for (int r = 0; r + r0 < rows && r < 32; r += STEP) move(r);
    }
  }
  __device__ __forceinline__ void ask(const ST* home, int64_t pitch, int rows) const {
    const uint32_t to = shared_address(chunks);
    each_chunk(home, pitch, rows, [&](int at, const ST* from) { copy_async(to + at, from); });
  }
  __device__ __forceinline__ void store(ST* home, int64_t pitch, int rows) const {
    const unsigned char* const from = reinterpret_cast<const unsigned char*>(chunks);
    each_chunk(home, pitch, rows, [&](int at, ST* to) {
      store_evict_first(to, *reinterpret_cast<const uint4*>(from + at));
    });
  }
  __device__ __forceinline__ void clear() const {
    for (int i = lane; i < 32 * CH; i += 32) chunks[i] = make_uint4(0, 0, 0, 0);
    __syncwarp();
  }
};

}  // namespace cuda
}  // namespace gdn
