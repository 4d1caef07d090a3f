// The AMX instructions that the kernels use, in plain C++, so that the level `amx` runs on any
// processor with AVX512-BF16 (and under sanitizers, which do not see what tile loads read):
//   -DGDN_EMULATED_TILES -include tests/native/emulated_tiles.h
// What the hardware would fault on (no configuration, shapes that do not fit) ends the program.
// With GDN_EMULATED_BF16 the conversions to bf16 are emulated as well, and AVX-512 is enough.
#pragma once
#if defined(__x86_64__)
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../../csrc/cpu/kernels/prelude.h"  // the intrinsics

namespace gdn::emulated_tiles {

struct Tile {
  int rows = 0, row_bytes = 0;
  unsigned char data[16][64];
};
struct Registers {
  bool configured = false;
  Tile tile[8];
};
inline thread_local Registers registers;

inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "emulated tiles: %s\n", what);
  std::abort();
}
inline Tile& tile(int i) {
  expect(registers.configured, "no configuration is loaded");
  expect(i >= 0 && i < 8 && registers.tile[i].rows, "a tile that is not configured");
  return registers.tile[i];
}

inline void loadconfig(const void* from) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config;
  static_assert(sizeof config == 64, "as the instruction reads it");
  std::memcpy(&config, from, sizeof config);
  expect(config.palette == 1 && config.start_row == 0, "another palette or start row");
  for (int i = 0; i < 16; ++i) {
    const int rows = config.rows[i], row_bytes = config.row_bytes[i];
    expect(i < 8 ? rows <= 16 && row_bytes <= 64 : !rows && !row_bytes,
           "a shape that is too large");
    if (i < 8) {
      registers.tile[i].rows = rows;
      registers.tile[i].row_bytes = row_bytes;
      std::memset(registers.tile[i].data, 0, sizeof registers.tile[i].data);
    }
  }
  registers.configured = true;
}
inline void release() { registers = {}; }

inline void zero(int i) { std::memset(tile(i).data, 0, sizeof tile(i).data); }
inline void load(int i, const void* base, int64_t stride) {
  zero(i);
  for (int r = 0; r < tile(i).rows; ++r) {
    std::memcpy(tile(i).data[r], static_cast<const char*>(base) + r * stride,
                static_cast<size_t>(tile(i).row_bytes));
  }
}
inline void store(int i, void* base, int64_t stride) {
  for (int r = 0; r < tile(i).rows; ++r) {
    std::memcpy(static_cast<char*>(base) + r * stride, tile(i).data[r],
                static_cast<size_t>(tile(i).row_bytes));
  }
}

// Element i of a row of bf16; subnormal numbers count as zero.
inline float bf16(const unsigned char* row, int i) {
  uint16_t half;
  std::memcpy(&half, row + 2 * i, sizeof half);
  const uint32_t word = static_cast<uint32_t>(half & 0x7f80 ? half : half & 0x8000) << 16;
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}
// Even and odd elements are summed apart and then added to what is there.
inline void dpbf16ps(int to, int left, int right) {
  Tile& c = tile(to);
  const Tile &a = tile(left), &b = tile(right);
  expect(a.rows == c.rows && b.row_bytes == c.row_bytes && b.rows * 4 == a.row_bytes,
         "shapes of a product that do not fit");
  for (int m = 0; m < c.rows; ++m) {
    for (int n = 0; n < c.row_bytes / 4; ++n) {
      float even = 0.f, odd = 0.f, sum;
      for (int k = 0; k < b.rows; ++k) {
        even = __builtin_fmaf(bf16(a.data[m], 2 * k), bf16(b.data[k], 2 * n), even);
        odd = __builtin_fmaf(bf16(a.data[m], 2 * k + 1), bf16(b.data[k], 2 * n + 1), odd);
      }
      std::memcpy(&sum, c.data[m] + 4 * n, sizeof sum);
      sum += even + odd;
      std::memcpy(c.data[m] + 4 * n, &sum, sizeof sum);
    }
  }
}

}  // namespace gdn::emulated_tiles

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) gdn::emulated_tiles::loadconfig(from)
#define _tile_release() gdn::emulated_tiles::release()
#define _tile_zero(i) gdn::emulated_tiles::zero(i)
#define _tile_loadd(i, base, stride) \
  gdn::emulated_tiles::load(i, base, static_cast<int64_t>(stride))
#define _tile_stored(i, base, stride) \
  gdn::emulated_tiles::store(i, base, static_cast<int64_t>(stride))
#define _tile_dpbf16ps(to, left, right) gdn::emulated_tiles::dpbf16ps(to, left, right)

#if GDN_EMULATED_BF16
namespace gdn::emulated_tiles {
// Rounded to nearest even, in the upper halves; subnormal numbers become zero.
__attribute__((target("avx512f,avx512bw"))) inline __m512i rounded(__m512 x) {
  const __m512i u = (__m512i)x, sign = _mm512_set1_epi32(INT32_MIN);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __mmask16 small = _mm512_testn_epi32_mask(u, _mm512_set1_epi32(0x7f800000));
  const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
  return _mm512_mask_and_epi32(_mm512_mask_mov_epi32(up, nan, quiet), small, u, sign);
}
__attribute__((target("avx512f,avx512bw"))) inline __m256bh cvtneps(__m512 x) {
  return (__m256bh)_mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(x), 16));
}
__attribute__((target("avx512f,avx512bw"))) inline __m512bh cvtne2ps(__m512 upper, __m512 lower) {
  const __m512i low = _mm512_castsi256_si512((__m256i)cvtneps(lower));
  return (__m512bh)_mm512_inserti64x4(low, (__m256i)cvtneps(upper), 1);
}
}  // namespace gdn::emulated_tiles
#define _mm512_cvtneps_pbh(x) gdn::emulated_tiles::cvtneps(x)
#define _mm512_cvtne2ps_pbh(upper, lower) gdn::emulated_tiles::cvtne2ps(upper, lower)
#endif
#endif
