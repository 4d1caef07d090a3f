// Operands of bf16 for products with sums in f32, and those products in AMX tiles, 16 x 32 elements
// at a time. Included inside the namespace of one instruction set, after rows.h.
//
// An f32 operand goes in as parts of bf16 that add up to it: three hold its 24 bits of significand,
// two hold 16. A bf16 operand is one part and an f16 one two, both exact. A product takes the pairs
// of parts whose orders add up to less than a limit: 3 loses no more than f32 does, 2 loses 2^-15
// of the largest term, which is enough for what is stored in 16 bits. Where the caller asked for
// speed an f32 operand is rounded to one part.

template <class T>
constexpr bool kTiled = false;
template <bool tiled>
struct ThreadTiles {};

#if GDN_SIMD_AVX512BF16
constexpr int kParts = 3;
constexpr int kExact = 3, kForOutput = 2;          // limits
constexpr int64_t kTileRow = 16, kTileDepth = 32;  // rows of a tile; bf16 elements of a row
// f32 columns of a block of products: two tiles, two registers.
constexpr int64_t kTileColumns = 2 * kLanes;

GDN_INLINE int64_t whole_depth(int64_t n) { return (n + kTileDepth - 1) / kTileDepth * kTileDepth; }

// The left operand: rows of bf16, `ld` elements apart.
struct TileRows {
  bf16_t* part[kParts];
  int64_t ld;
  int parts;
  TileRows from_row(int64_t i) const {
    return {{part[0] + i * ld, part[1] + i * ld, part[2] + i * ld}, ld, parts};
  }
};
// The right operand: word [m][c] holds elements 2m and 2m + 1 of column c; rows of `ld` words.
struct TilePairs {
  uint32_t* part[kParts];
  int64_t ld;
  int parts;
  TilePairs from(int64_t m, int64_t c) const {
    const int64_t i = m * ld + c;
    return {{part[0] + i, part[1] + i, part[2] + i}, ld, parts};
  }
};

// A row of n floats as parts, zero up to `end`, a whole number of registers.
static void split_row(const float* x, int64_t n, int64_t end, const TileRows& to) {
  for (int64_t i = 0; i < end; i += kLanes) {
    F v = i + kLanes <= n ? load(x + i) : i < n ? load_n(x + i, n - i) : zero();
    for (int p = 0; p < to.parts; ++p) {
      store(to.part[p] + i, v);
      v = v - load(to.part[p] + i);
    }
  }
}

// A register of words whose halves are `even` and `odd`, rounded once.
GDN_INLINE __m512i pair_of(F even, F odd) {
  typedef int16_t I16 __attribute__((vector_size(64)));
  const I16 interleaved = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
  return _mm512_permutexvar_epi16((__m512i)interleaved, halves);
}
GDN_INLINE void store_pair(uint32_t* to, F even, F odd) {
  _mm512_storeu_si512(to, pair_of(even, odd));
}

// row(i, c), a register of kTileColumns floats from column c, for i in [first, end): as pairs of
// rows from 0 to `rows`, the others zero. Three parts hold every bit even if they are cut off
// instead of rounded, and the halves of a pair then need no conversion.
template <class Row>
GDN_INLINE void split_pairs(int64_t first, int64_t end, int64_t rows, Row row,
                            const TilePairs& to) {
  const U32 upper = (U32)zero() + 0xffff0000u;
  auto split = [&](int64_t i, F a, F b, int64_t c) __attribute__((always_inline)) {
    if (to.parts == 1) return store_pair(to.part[0] + i / 2 * to.ld + c, a, b);
    unrolled<kParts>(GDN_EACH(p) {
      const F a_upper = (F)((U32)a & upper), b_upper = (F)((U32)b & upper);
      const U32 pair = ((U32)a >> 16) | (U32)b_upper;
      __builtin_memcpy(to.part[p] + i / 2 * to.ld + c, &pair, sizeof pair);
      a = a - a_upper;
      b = b - b_upper;
    });
  };
  const auto outside = [&](int64_t i) { return i < first || i >= end; };
  for (int64_t i = 0; i < rows; i += 2) {
    const bool whole = i >= first && i + 2 <= end;
    unrolled<2>(GDN_EACH(v) {
      constexpr int64_t c = v * kLanes;
      split(i, whole || !outside(i) ? row(i, c) : zero(),
            whole || !outside(i + 1) ? row(i + 1, c) : zero(), c);
    });
  }
}
#endif

#if GDN_SIMD_AMX
template <>
constexpr bool kTiled<bf16_t> = true;
template <>
constexpr bool kTiled<f16_t> = true;

// Words of 32 bits: lane c of x[r] becomes lane r of x[c].
GDN_INLINE void transpose_words(__m512i (&x)[16]) {
  __m512i y[16];
  unrolled<8>(GDN_EACH(i) {
    y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  });
  unrolled<4>(GDN_EACH(i) {
    x[4 * i] = _mm512_unpacklo_epi64(y[4 * i], y[4 * i + 2]);
    x[4 * i + 1] = _mm512_unpackhi_epi64(y[4 * i], y[4 * i + 2]);
    x[4 * i + 2] = _mm512_unpacklo_epi64(y[4 * i + 1], y[4 * i + 3]);
    x[4 * i + 3] = _mm512_unpackhi_epi64(y[4 * i + 1], y[4 * i + 3]);
  });
  unrolled<4>(GDN_EACH(i) {
    y[i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88);
    y[4 + i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd);
    y[8 + i] = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
    y[12 + i] = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
  });
  unrolled<8>(GDN_EACH(i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[8 + i], 0x88);
    x[8 + i] = _mm512_shuffle_i32x4(y[i], y[8 + i], 0xdd);
  });
}

// The thread's tile registers: 16 rows of 64 bytes, but for the right operands 6 and 7 and the
// results 0 and 1, which may have fewer columns. Given back at the end: a processor with live tiles
// neither sleeps deeply nor switches threads cheaply.
template <>
struct ThreadTiles<true> {
  explicit ThreadTiles(int64_t columns = kLanes) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = i < 2 || i > 5 ? columns * 4 : 64;
      config.rows[i] = 16;
    }
    _tile_loadconfig(&config);
  }
  ThreadTiles(const ThreadTiles&) = delete;
  ThreadTiles& operator=(const ThreadTiles&) = delete;
  ~ThreadTiles() { _tile_release(); }
};

// C = A * B for R tiles of rows and kTileColumns columns; depth in whole tiles.
template <int R>
GDN_INLINE void tile_block(const TileRows& A, const TilePairs& B, int64_t depth, int limit,
                           float* C, int64_t ld_c) {
  // The compiler does not know that tile loads read memory.
  asm volatile("" ::: "memory");
  _tile_zero(0);
  _tile_zero(1);
  if (R == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t p = 0; p < depth; p += kTileDepth) {
    for (int i = 0; i < A.parts; ++i) {
      const bf16_t* a = A.part[i] + p;
      _tile_loadd(4, a, A.ld * sizeof(bf16_t));
      if (R == 2) _tile_loadd(5, a + kTileRow * A.ld, A.ld * sizeof(bf16_t));
      for (int j = 0; j < B.parts && i + j < limit; ++j) {
        const uint32_t* b = B.part[j] + p / 2 * B.ld;
        _tile_loadd(6, b, B.ld * sizeof(uint32_t));
        _tile_loadd(7, b + kLanes, B.ld * sizeof(uint32_t));
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (R == 2) {
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
    }
  }
  _tile_stored(0, C, ld_c * sizeof(float));
  _tile_stored(1, C + kLanes, ld_c * sizeof(float));
  if (R == 2) {
    _tile_stored(2, C + kTileRow * ld_c, ld_c * sizeof(float));
    _tile_stored(3, C + kTileRow * ld_c + kLanes, ld_c * sizeof(float));
  }
  asm volatile("" ::: "memory");
}
// The same for n rows; C has rows up to the next whole tile.
static void tile_rows(const TileRows& A, const TilePairs& B, int64_t n, int64_t depth, int limit,
                      float* C, int64_t ld_c) {
  for (int64_t i = 0; i < n; i += 2 * kTileRow) {
    if (n - i > kTileRow) {
      tile_block<2>(A.from_row(i), B, depth, limit, C + i * ld_c, ld_c);
    } else {
      tile_block<1>(A.from_row(i), B, depth, limit, C + i * ld_c, ld_c);
    }
  }
}
#endif
