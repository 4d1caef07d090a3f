// y = x W^T for the few rows x of a decode step: every weight is read once, in the layout in which
// it lies. Included inside the namespace of one instruction set, after tiles.h.
//
// Up to GDN_LINEAR_LIMIT rows, a row of y has the same bits whichever rows it shares the call with:
// each product is summed over K in an order that depends on K alone.

// Rows of x, by DType, up to which this beat torch's product (docs/cpu.md). AVX512-BF16 without AMX
// is AMD's, where torch's float32 product is slow.
#if GDN_SIMD_AMX
#define GDN_LINEAR_LIMIT {32, 32, 16}
#elif GDN_SIMD_AVX512BF16
#define GDN_LINEAR_LIMIT {64, 32, 8}
#else
#define GDN_LINEAR_LIMIT {8, 32, 32}
#endif

constexpr int64_t kLinearBlock = 16;  // rows of weights that a task takes

// One thread for less than a parallel region costs to start.
static Parallel linear_threads(const Parallel& parallel, int64_t weights_read) {
  Parallel few = parallel;
  if (weights_read < 1 << 16) few.threads = 1;
  return few;
}

// --- any instruction set: rows of weights and rows of x whose sums stay in registers

constexpr int kLinearRows = 4, kLinearColumns = kLanes >= 16 ? 4 : 2;

// How a step multiplies: elements widened to f32, whatever K.
template <class T>
struct WideProducts {
  using Input = float;  // x as the step reads it
  template <class Body>
  GDN_INLINE void steps(int64_t K, Body body) {
    for_lanes(K, body);
  }
  template <class Lanes>
  GDN_INLINE F weights(const T* p, Lanes lanes) {
    return load_lanes(p, lanes);
  }
  template <class Lanes>
  GDN_INLINE F inputs(const float* p, Lanes lanes) {
    // Rows of float32 are read where they lie; those that were widened end in zeros.
    if constexpr (std::is_same_v<T, float>) return load_lanes(p, lanes);
    return load(p);
  }
  GDN_INLINE F add(F w, F x, F sum) { return fma(w, x, sum); }
};
#if GDN_SIMD_AVX512BF16
// Pairs of bfloat16 as they lie, by the instruction for it; K a multiple of kPairStep.
constexpr int64_t kPairStep = 2 * kLanes;
struct PairProducts {
  using Input = bf16_t;
  template <class Body>
  GDN_INLINE void steps(int64_t K, Body body) {
    for (int64_t k = 0; k < K; k += kPairStep) body(k, 0);
  }
  GDN_INLINE __m512bh weights(const bf16_t* p, int) { return (__m512bh)_mm512_loadu_si512(p); }
  GDN_INLINE __m512bh inputs(const bf16_t* p, int) { return (__m512bh)_mm512_loadu_si512(p); }
  GDN_INLINE F add(__m512bh w, __m512bh x, F sum) { return _mm512_dpbf16_ps(sum, w, x); }
};
#endif

// Elements ahead in each of the rows that are read together: further along it, or in a row that
// follows it in its place. Into L2: into L1 took 1.2 to 1.4 times as long on Zen 4.
constexpr int64_t kLinearAhead = 2048;

// R rows of weights by J rows of x, `ld` apart. The first rows of x ask for weights ahead.
template <class Products, int R, int J, class T>
GDN_INLINE void linear_rows(const T* w, int64_t s_w, const typename Products::Input* x, int64_t ld,
                            int64_t K, bool ask, T* y, int64_t s_y) {
  const int64_t ahead = K > kLinearAhead ? kLinearAhead : kLinearAhead / K * R * s_w;
  F acc[R][J];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < J; ++j) acc[r][j] = zero();
  }
  Products::steps(K, [&](int64_t k, auto lanes) {
    decltype(Products::weights(w, lanes)) row[R];
    for (int r = 0; r < R; ++r) {
      const T* at = w + r * s_w + k;
      if (ask) prefetch_l2(at + ahead);
      row[r] = Products::weights(at, lanes);
    }
    for (int j = 0; j < J; ++j) {
      const auto v = Products::inputs(x + j * ld + k, lanes);
      for (int r = 0; r < R; ++r) acc[r][j] = Products::add(row[r], v, acc[r][j]);
    }
  });
  for (int j = 0; j < J; ++j) {
    const F sums = quad_sums(acc[0][j], acc[R > 1][j], acc[R > 2 ? 2 : 0][j], acc[R - 1][j]);
    store_n(y + j * s_y, sums, R);
  }
}

// Rows of weights from `first` on.
template <class Products, class T>
static void linear_vectors(const LinearArgs& a, int64_t first, const Parallel& parallel) {
  using Input = typename Products::Input;
  const T* w = static_cast<const T*>(a.w);
  T* y = static_cast<T*>(a.y);
  auto body = [&](int64_t begin, int64_t end) {
    const Input* x = static_cast<const Input*>(a.x);
    int64_t ld = a.s_x;
    if constexpr (!std::is_same_v<Input, T>) {
      ld = padded(a.K);
      float* wide = thread_scratch(a.M * ld);
      for (int64_t m = 0; m < a.M; ++m) {
        widen(static_cast<const T*>(a.x) + m * a.s_x, 1, a.K, wide + m * ld);
      }
      x = wide;
    }
    auto rows = [&](int64_t n, auto R) {
      const T* at = w + n * a.s_w;
      int64_t m = 0;
      for (; m + kLinearColumns <= a.M; m += kLinearColumns) {
        linear_rows<Products, R, kLinearColumns>(at, a.s_w, x + m * ld, ld, a.K, m == 0,
                                                 y + m * a.N + n, a.N);
      }
      for (; m < a.M; ++m) {
        linear_rows<Products, R, 1>(at, a.s_w, x + m * ld, ld, a.K, m == 0, y + m * a.N + n, a.N);
      }
    };
    int64_t n = first + begin * kLinearBlock;
    const int64_t last = first + end * kLinearBlock < a.N ? first + end * kLinearBlock : a.N;
    for (; n + kLinearRows <= last; n += kLinearRows) {
      rows(n, std::integral_constant<int, kLinearRows>());
    }
    for (; n < last; ++n) rows(n, std::integral_constant<int, 1>());
  };
  const int64_t passes = (a.M + kLinearColumns - 1) / kLinearColumns;
  parallel_for(linear_threads(parallel, passes * (a.N - first) * a.K),
               (a.N - first + kLinearBlock - 1) / kLinearBlock, body);
}

#if GDN_SIMD_AMX
// --- AMX: 16 rows of weights are the left operand, pairs of x the right one

// Steps of kTileDepth that weights take together through a buffer in L1. Tile loads straight from
// the weights wait for each line that is not in L1, and rows whose distance is a multiple of 4 KB
// share one set of it.
constexpr int64_t kLinearSteps = 8;
constexpr int64_t kTiledRows = 32;  // of x

// x as the right operand: [tile of 16 rows][K / 2] words of the 16 rows, those past M zero. One row
// is that as it lies.
static void linear_pairs(const LinearArgs& a, float* to) {
  const bf16_t* x = static_cast<const bf16_t*>(a.x);
  for (int64_t m = 0; m < a.M; m += 16) {
    for (int64_t k = 0; k < a.K; k += kTileDepth, to += 256) {
      __m512i words[16];
      unrolled<16>(GDN_EACH(i) {
        words[i] = _mm512_setzero_si512();
        if (m + i < a.M) words[i] = _mm512_loadu_si512(x + (m + i) * a.s_x + k);
      });
      transpose_words(words);
      unrolled<16>(GDN_EACH(i) { _mm512_storeu_si512(to + 16 * i, words[i]); });
    }
  }
}

// out [J][16][columns] = rows of weights times rows of x, which has J tiles of `columns` words.
template <int J>
GDN_INLINE void linear_tile(const LinearArgs& a, const bf16_t* w, const float* x, int64_t columns,
                            bf16_t* stage, float* out) {
  constexpr int64_t tile = kTileRow * kTileDepth, span = kLinearSteps * kTileDepth;
  const int64_t second = a.K / 2 * columns, row_bytes = columns * sizeof(float);
  _tile_zero(0);
  if (J > 1) _tile_zero(1);
  for (int64_t k = 0; k < a.K; k += span) {
    const int64_t steps = a.K - k < span ? (a.K - k) / kTileDepth : kLinearSteps;
    // The span after the next, in these rows or in those of the next tile.
    const int64_t ahead = k + 2 * span < a.K ? 2 * span : 2 * span - a.K + kTileRow * a.s_w;
    for (int64_t r = 0; r < kTileRow; ++r) {
      const bf16_t* row = w + r * a.s_w + k;
      for (int64_t i = 0; i < steps; ++i) {
        prefetch_l2(row + ahead + i * kTileDepth);
        __builtin_memcpy(stage + i * tile + r * kTileDepth, row + i * kTileDepth, 64);
      }
    }
    // The compiler does not know that tile loads read memory.
    asm volatile("" ::: "memory");
    for (int64_t i = 0; i < steps; ++i) {
      const float* pairs = x + (k + i * kTileDepth) / 2 * columns;
      _tile_loadd(4, stage + i * tile, 64);
      _tile_loadd(6, pairs, row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      if (J > 1) _tile_loadd(7, pairs + second, row_bytes);
      if (J > 1) _tile_dpbf16ps(1, 4, 7);
    }
  }
  _tile_stored(0, out, row_bytes);
  if (J > 1) _tile_stored(1, out + 256, row_bytes);
  asm volatile("" ::: "memory");
}

static void linear_tiles(const LinearArgs& a, const Parallel& parallel) {
  const bf16_t* w = static_cast<const bf16_t*>(a.w);
  bf16_t* y = static_cast<bf16_t*>(a.y);
  auto body = [&](int64_t begin, int64_t end) {
    const int64_t columns = a.M == 1 ? 1 : 16;
    const ThreadTiles<true> tiles(columns);
    alignas(64) bf16_t stage[kLinearSteps * kTileRow * kTileDepth];
    alignas(64) float out[2 * 256];
    const float* x = static_cast<const float*>(a.x);
    if (a.M > 1) {
      float* pairs = thread_scratch((a.M > 16 ? 32 : 16) * a.K / 2);
      linear_pairs(a, pairs);
      x = pairs;
    }
    for (int64_t n = begin * kTileRow; n < end * kTileRow; n += kTileRow) {
      if (a.M > 16) {
        linear_tile<2>(a, w + n * a.s_w, x, columns, stage, out);
      } else {
        linear_tile<1>(a, w + n * a.s_w, x, columns, stage, out);
      }
      if (a.M == 1) {
        store(y + n, load(out));
        continue;
      }
      for (int64_t m = 0; m < a.M; m += 16) {
        __m512i rows[16];
        unrolled<16>(GDN_EACH(i) { rows[i] = _mm512_load_si512(out + 16 * (m + i)); });
        transpose_words(rows);
        unrolled<16>(GDN_EACH(i) {
          if (m + i < a.M) store(y + (m + i) * a.N + n, (F)rows[i]);
        });
      }
    }
  };
  parallel_for(linear_threads(parallel, a.N * a.K), a.N / kTileRow, body);
}
#endif

static void linear(const LinearArgs& a, const Parallel& parallel) {
#if GDN_SIMD_AMX
  if (a.dtype == DType::bf16 && a.K % kTileDepth == 0 && a.M <= kTiledRows) {
    linear_tiles(a, parallel);
    const int64_t whole = a.N / kTileRow * kTileRow;
    if (whole < a.N) linear_vectors<WideProducts<bf16_t>, bf16_t>(a, whole, parallel);
    return;
  }
#endif
#if GDN_SIMD_AVX512BF16 && !GDN_SIMD_AMX
  if (a.dtype == DType::bf16 && a.K % kPairStep == 0) {
    return linear_vectors<PairProducts, bf16_t>(a, 0, parallel);
  }
#endif
  with_type(a.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    linear_vectors<WideProducts<T>, T>(a, 0, parallel);
  });
}
