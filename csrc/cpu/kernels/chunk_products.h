// The products of a chunk (chunk.h): register tiles, the triangles k k^T and q k^T, the triangular
// solve, and what a strip of state takes and gives, from operands of f32 or bf16.
// Included inside the namespace of one instruction set, after tiles.h.

#if GDN_SIMD_AVX512
constexpr int kTileRows = 8, kTileVectors = 2;
#elif GDN_SIMD_NEON
constexpr int kTileRows = 6, kTileVectors = 4;
#else
constexpr int kTileRows = 6, kTileVectors = 2;
#endif
constexpr int kStrip = kTileVectors * kLanes;

// How the products of a chunk are formed: from f32 operands; from operands split into bf16 parts,
// which lose nothing; from operands rounded once to bf16.
enum class Form { f32, split, rounded };
template <class T>
constexpr Form kExactForm = kTiled<T> ? Form::split : Form::f32;
#if GDN_SIMD_AVX512BF16
template <class T>
constexpr bool kRounds = std::is_same_v<T, bf16_t>;
#else
template <class T>
constexpr bool kRounds = false;
#endif

GDN_INLINE int64_t strips(int64_t n) { return (n + kStrip - 1) / kStrip; }

template <int R>
GDN_INLINE void clear(F (&acc)[R][kTileVectors]) {
  unrolled<R>(GDN_EACH(r) { unrolled<kTileVectors>(GDN_EACH(c) { acc[r][c] = zero(); }); });
}

// acc[r] += sum_p A[r][p] * B[p], B in rows of `ldb` floats.
template <int R>
GDN_INLINE void tile_product(F (&acc)[R][kTileVectors], const float* A, int64_t lda, const float* B,
                             int64_t ldb, int64_t depth) {
  for (int64_t p = 0; p < depth; ++p) {
    F b[kTileVectors];
    unrolled<kTileVectors>(GDN_EACH(c) { b[c] = load(B + p * ldb + c * kLanes); });
    unrolled<R>(GDN_EACH(r) {
      const F x = broadcast(A[r * lda + p]);
      unrolled<kTileVectors>(GDN_EACH(c) { acc[r][c] = fma(x, b[c], acc[r][c]); });
    });
  }
}

#if GDN_SIMD_AVX512BF16
// The same for operands of bf16, B in rows of pairs; an odd depth counts as the next even one.
template <int R>
GDN_INLINE void tile_product(F (&acc)[R][kTileVectors], const bf16_t* A, int64_t lda,
                             const uint32_t* B, int64_t ldb, int64_t depth) {
  for (int64_t p = 0; p < depth; p += 2, B += ldb) {
    __m512bh b[kTileVectors];
    unrolled<kTileVectors>(GDN_EACH(c) { b[c] = (__m512bh)_mm512_loadu_si512(B + c * kLanes); });
    unrolled<R>(GDN_EACH(r) {
      int32_t pair;
      __builtin_memcpy(&pair, A + r * lda + p, sizeof pair);
      const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
      unrolled<kTileVectors>(GDN_EACH(c) { acc[r][c] = _mm512_dpbf16_ps(acc[r][c], x, b[c]); });
    });
  }
}
#endif

// A smaller tile for what kTileRows leaves over: 64 = 10 * 6 + 4, 128 = 20 * 6 + 2 * 4.
constexpr int kSmallTile = 4;
// Rows past the last that a tile may compute; buffers have them, nobody reads them.
#if GDN_SIMD_AMX
constexpr int64_t kSpareRows = 2 * kTileRow;
#else
constexpr int64_t kSpareRows = kTileRows;
#endif

GDN_INLINE int64_t strip_floats(int64_t K) { return (K + kSpareRows) * kStrip; }

// body(first row, integral_constant<rows of the tile>, rows of it that count) for the tile at row i
// of n; returns its rows.
template <class Body>
GDN_INLINE int64_t tile_at(int64_t i, int64_t n, Body body) {
  const int64_t left = n - i;
  if (left <= kSmallTile || (left > kTileRows && left <= 2 * kSmallTile)) {
    const int64_t valid = left < kSmallTile ? left : kSmallTile;
    body(i, std::integral_constant<int, kSmallTile>(), static_cast<int>(valid));
    return kSmallTile;
  }
  const int64_t valid = left < kTileRows ? left : kTileRows;
  body(i, std::integral_constant<int, kTileRows>(), static_cast<int>(valid));
  return kTileRows;
}
// The tiles of [0, n). The last one may be too large. Which tile a row falls into does not change
// the order of its sums.
template <class Body>
GDN_INLINE void for_tiles(int64_t n, Body body) {
  for (int64_t i = 0; i < n;) i += tile_at(i, n, body);
}

// Carves a thread's scratch; every piece starts on a cache line.
struct ScratchCursor {
  float* base;
  int64_t used = 0;
  float* take(int64_t floats) {
    float* p = base ? base + used : nullptr;
    used += (floats + 15) / 16 * 16;
    return p;
  }
};

// Operands of a chunk in bf16; none with Form::f32.
struct ChunkOperands {
#if GDN_SIMD_AVX512BF16
  TileRows k, q, kt;  // [C][K], [C][K], [K][C], sides padded to whole tiles
  TilePairs k_pairs;  // transposed k
  float *rk, *rq;     // [C]: 1 / norm, or 1
  TilePairs S, du;    // of the strip at hand: [K / 2][kStrip], [C / 2][kStrip]
  float* block;       // [2 kTileRow][kStrip]: a product, on its way from tiles to registers
  // Form::rounded only: A and M of the head, u of the strip, and their products for the block of
  // rows at hand.
  TileRows A, M;   // [C][ld_c]
  TilePairs u;     // [C / 2][kStrip]
  float *Au, *Mu;  // [kTileRow][kStrip]

  void carve(ScratchCursor& cursor, Form form, int64_t C, int64_t K, int64_t ld_c, DType dtype) {
    if (form == Form::f32) return;
    const int left = dtype == DType::bf16 ? 1 : 2, right = form == Form::rounded ? 1 : kParts;
    const int64_t Cp = whole_depth(C), Kp = whole_depth(K), spare = kTileRows;
    auto rows = [&](int64_t n, int64_t width, int parts) {
      TileRows x{{}, width, parts};
      for (int i = 0; i < parts; ++i) {
        x.part[i] = reinterpret_cast<bf16_t*>(cursor.take(n * width / 2));
      }
      return x;
    };
    auto pairs = [&](int64_t n, int64_t width, int parts) {
      TilePairs x{{}, width, parts};
      for (int i = 0; i < parts; ++i) {
        x.part[i] = reinterpret_cast<uint32_t*>(cursor.take(n / 2 * width));
      }
      return x;
    };
    k = rows(Cp + spare, Kp, left);
    q = rows(Cp + spare, Kp, left);
    kt = rows(Kp, Cp, left);
    k_pairs = pairs(Kp, Cp, left);
    rk = cursor.take(Cp);
    rq = cursor.take(Cp);
    S = pairs(Kp, kStrip, right);
    du = pairs(Cp, kStrip, right);
    block = cursor.take(2 * kTileRow * kStrip);
    if (form != Form::rounded) return;
    A = rows(Cp, ld_c, 1);
    M = rows(Cp, ld_c, 1);
    u = pairs(Cp, kStrip, 1);
    Au = cursor.take(kTileRow * kStrip);
    Mu = cursor.take(kTileRow * kStrip);
  }
#else
  void carve(ScratchCursor&, Form, int64_t, int64_t, int64_t, DType) {}
#endif
};

// What the value heads of one key head share in a chunk. All buffers belong to the task's thread.
struct ChunkKeys {
  float *k, *q;    // [n][ld_k], as the recurrence uses them; Form::f32 only
  float* kt;       // [K][ld_t], transposed k, zero from column n on; likewise
  float *kk, *qk;  // [n][ld_c], lower triangles
  int64_t ld_k, ld_t, ld_c;
  ChunkOperands operands;
};

// Per value head and segment (the tokens of a chunk from one cut to the next, see the head of this
// file).
struct ChunkHead {
  float *A, *M;         // [n][ld_c]: -beta_i D_ij k_i.k_j (j < i); scale D_ij q_i.k_j (j <= i)
  float* D;             // [ld_c]: the last row of D
  float *a, *beta, *w;  // [n]: decays exp(g), betas, products of the decays up to each token
  float *wk, *wq;       // [n]: factors of the products of the old state with k and q
  float *Sk, *Sq;       // [n][kStrip]: those products of the strip at hand, where tiles make them
  float *u, *du;        // [n][kStrip]: u, and D_nj u_j, of the strip at hand
  int64_t s_u;          // from the u of one strip to the next; 0: they share a buffer
};

// Lower triangle of x k^T: out[i][j] for j <= i, whole strips.
static void triangle(const float* x, const ChunkKeys& s, int64_t n, int64_t K, float* out) {
  for (int64_t j = 0; j < n; j += kStrip) {
    for_tiles(n, [&](int64_t i, auto rows, int) {
      constexpr int R = decltype(rows)::value;
      if (i + R <= j) return;
      F acc[R][kTileVectors];
      clear(acc);
      tile_product<R>(acc, x + i * s.ld_k, s.ld_k, s.kt + j, s.ld_t, K);
      unrolled<R>(GDN_EACH(r) {
        unrolled<kTileVectors>(
            GDN_EACH(c) { store(out + (i + r) * s.ld_c + j + c * kLanes, acc[r][c]); });
      });
    });
  }
}

// dst[c][r] = src[r][c] for `rows` x `cols`, in square blocks that stay in the first-level cache.
static void transpose(const float* src, int64_t ld_src, int64_t rows, int64_t cols, float* dst,
                      int64_t ld_dst) {
  int64_t r = 0;
#if GDN_SIMD_AVX2 || GDN_SIMD_AVX512
  for (; r + 8 <= rows; r += 8) {
    int64_t c = 0;
    for (; c + 8 <= cols; c += 8) {
      __m256 x[8], y[8];
      for (int i = 0; i < 8; ++i) x[i] = _mm256_loadu_ps(src + (r + i) * ld_src + c);
      for (int i = 0; i < 4; ++i) {
        y[2 * i] = _mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]);
      }
      for (int i = 0; i < 2; ++i) {
        x[4 * i] = _mm256_shuffle_ps(y[4 * i], y[4 * i + 2], 0x44);
        x[4 * i + 1] = _mm256_shuffle_ps(y[4 * i], y[4 * i + 2], 0xee);
        x[4 * i + 2] = _mm256_shuffle_ps(y[4 * i + 1], y[4 * i + 3], 0x44);
        x[4 * i + 3] = _mm256_shuffle_ps(y[4 * i + 1], y[4 * i + 3], 0xee);
      }
      for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(dst + (c + i) * ld_dst + r, _mm256_permute2f128_ps(x[i], x[i + 4], 0x20));
        _mm256_storeu_ps(dst + (c + 4 + i) * ld_dst + r,
                         _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
      }
    }
    for (; c < cols; ++c) {
      for (int i = 0; i < 8; ++i) dst[c * ld_dst + r + i] = src[(r + i) * ld_src + c];
    }
  }
#endif
  for (; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) dst[c * ld_dst + r] = src[r * ld_src + c];
  }
}

// S^T strip = w times that of `from` + kt[:, first .. first+n) du; `from` null: zero.
static void update_strip(const ChunkKeys& s, const float* du, int64_t first, int64_t n, int64_t K,
                         float w, const float* from, float* S) {
  for_tiles(K, [&](int64_t i, auto rows, int) {
    constexpr int R = decltype(rows)::value;
    F acc[R][kTileVectors];
    const F decay = broadcast(w);
    unrolled<R>(GDN_EACH(r) {
      unrolled<kTileVectors>(GDN_EACH(c) {
        acc[r][c] = from ? decay * load(from + (i + r) * kStrip + c * kLanes) : zero();
      });
    });
    tile_product<R>(acc, s.kt + i * s.ld_t + first, s.ld_t, du, kStrip, n);
    unrolled<R>(GDN_EACH(r) {
      unrolled<kTileVectors>(GDN_EACH(c) { store(S + (i + r) * kStrip + c * kLanes, acc[r][c]); });
    });
  });
}

// Solves (1 - A) u = x for the n rows of a strip, A strictly lower triangular: start(i, rows, acc)
// sets rows of x plus what the first rows of u add to them, and returns how many; done(i, rows,
// acc) has those of u, which are stored by then.
template <class Start, class Done>
GDN_INLINE void substitute(const float* A, int64_t ld, int64_t n, float* u, Start start,
                           Done done) {
  for_tiles(n, [&](int64_t i, auto rows, int valid) {
    constexpr int R = decltype(rows)::value;
    F acc[R][kTileVectors];
    const int64_t added = start(i, valid, acc);
    const float* a = A + i * ld;
    tile_product<R>(acc, a + added, ld, u + added * kStrip, kStrip, i - added);
    unrolled<R>(GDN_EACH(r) {
      unrolled<r>(GDN_EACH(m) {
        const F f = broadcast(a[r * ld + i + m]);
        unrolled<kTileVectors>(GDN_EACH(c) { acc[r][c] = fma(f, acc[m][c], acc[r][c]); });
      });
    });
    unrolled<R>(GDN_EACH(r) {
      unrolled<kTileVectors>(GDN_EACH(c) { store(u + (i + r) * kStrip + c * kLanes, acc[r][c]); });
    });
    done(i, valid, acc);
  });
}

// The products of a chunk with its keys, its queries, the state of a strip and what is below the
// diagonal.
template <class T, Form form>
struct ChunkProducts {
  // Keys and queries of tokens [t0, t0 + n), k k^T and q k^T.
  static void load_keys(const ChunkArgs& x, int64_t b, int64_t t0, int64_t n, int64_t hk,
                        const ChunkKeys& s) {
    for (int64_t i = 0; i < n; ++i) {
      load_row(x.k, b, t0 + i, hk, x.K, s.k + i * s.ld_k);
      load_row(x.q, b, t0 + i, hk, x.K, s.q + i * s.ld_k);
      if (x.l2norm) {
        l2_normalise(s.k + i * s.ld_k, x.K);
        l2_normalise(s.q + i * s.ld_k, x.K);
      }
    }
    transpose(s.k, s.ld_k, n, x.K, s.kt, s.ld_t);
    for (int64_t p = 0; p < x.K; ++p) {
      for (int64_t j = n; j < s.ld_t; ++j) s.kt[p * s.ld_t + j] = 0.f;
    }
    triangle(s.k, s, n, x.K, s.kk);
    triangle(s.q, s, n, x.K, s.qk);
  }
  // Factors of the segment's products with the old state, from its decays.
  static void factors(const ChunkKeys&, const ChunkHead& h, int64_t, int64_t n, float scale) {
    for (int64_t i = 0; i < n; ++i) {
      h.wk[i] = h.w[i];
      h.wq[i] = scale * h.w[i];
    }
  }
  // Row i of the triangles, from column j.
  static void keep_row(const ChunkKeys&, int64_t, int64_t, F, F) {}
  static void end_row(const ChunkKeys&, int64_t) {}
  static void old_state(const ChunkKeys&, const ChunkHead&, int64_t, int64_t, const float*) {}
  // acc = rows from i on of the products of the old state with the chunk's keys or queries.
  template <int R>
  GDN_INLINE void state_rows(const ChunkKeys& s, const ChunkHead&, bool keys, int64_t i, int64_t K,
                             const float* S, F (&acc)[R][kTileVectors]) {
    clear(acc);
    tile_product<R>(acc, (keys ? s.k : s.q) + i * s.ld_k, s.ld_k, S, kStrip, K);
  }
  // Adds to rows from i on of A u, or M u, what the first rows of u give, and returns how many.
  template <int R>
  GDN_INLINE int64_t earlier_rows(const ChunkKeys&, bool, int64_t, F (&)[R][kTileVectors]) {
    return 0;
  }
  template <int R>
  GDN_INLINE void keep_u(const ChunkKeys&, int64_t, const F (&)[R][kTileVectors]) {}
  // S^T strip = w S^T + kt[:, first .. first + n) du.
  static void update(const ChunkKeys& s, const ChunkHead& h, const float*, int64_t first, int64_t n,
                     int64_t K, float w, float* S, bool S_is_zero) {
    update_strip(s, h.du, first, n, K, w, S_is_zero ? nullptr : S, S);
  }
};

#if GDN_SIMD_AVX512BF16
static_assert(kStrip == kTileColumns, "a strip is a block of two tiles");

#if !GDN_SIMD_AMX
// C = A B for n rows, and up to the next whole tile.
static void tile_rows(const TileRows& A, const TilePairs& B, int64_t n, int64_t depth, int,
                      float* C, int64_t ld_c) {
  for_tiles(n, [&](int64_t i, auto rows, int) {
    constexpr int R = decltype(rows)::value;
    F acc[R][kTileVectors];
    clear(acc);
    tile_product<R>(acc, A.part[0] + i * A.ld, A.ld, B.part[0], B.ld, depth);
    unrolled<R>(GDN_EACH(r) {
      unrolled<kTileVectors>(GDN_EACH(c) { store(C + (i + r) * ld_c + c * kLanes, acc[r][c]); });
    });
  });
}
#endif

template <class T, Form form>
struct ChunkOperandProducts {
  static void load_keys(const ChunkArgs& x, int64_t b, int64_t t0, int64_t n, int64_t hk,
                        const ChunkKeys& s) {
    const ChunkOperands& m = s.operands;
    const int64_t depth = whole_depth(n), Kp = m.k.ld;
    // Lengths are factors of rows and columns, so that the operands stay as they came.
    auto load_rows = [&](const View& view, const TileRows& to, float* r) {
      const bool as_is = std::is_same_v<T, bf16_t> && view.sd == 1 && x.K == Kp;
      alignas(64) float row[kMaxRow];
      for (int64_t i = 0; i < n; ++i) {
        if (!as_is || x.l2norm) load_row(view, b, t0 + i, hk, x.K, row);
        if (as_is) {
          std::memcpy(to.part[0] + i * Kp, element<T>(view, b, t0 + i, hk), Kp * sizeof(T));
        } else {
          split_row(row, x.K, Kp, to.from_row(i));
        }
        r[i] = x.l2norm ? inverse_norm(row, x.K) : 1.f;
      }
      for (int64_t i = n; i < depth; ++i) split_row(nullptr, 0, Kp, to.from_row(i));
    };
    load_rows(x.k, m.k, m.rk);
    load_rows(x.q, m.q, m.rq);
    for (int part = 0; part < m.k.parts; ++part) {
      uint32_t* pairs = m.k_pairs.part[part];
      transpose(reinterpret_cast<const float*>(m.k.part[part]), Kp / 2, depth, Kp / 2,
                reinterpret_cast<float*>(pairs), m.k_pairs.ld);
      for (int64_t p = 0; p < Kp / 2; ++p) {
        bf16_t* even = m.kt.part[part] + 2 * p * m.kt.ld;
        for (int64_t j = 0; j < depth; j += kLanes) {
          const __m512i x = _mm512_loadu_si512(pairs + p * m.k_pairs.ld + j);
          const __m256i lo = _mm512_cvtepi32_epi16(x);
          const __m256i hi = _mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16));
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(even + j), lo);
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(even + m.kt.ld + j), hi);
        }
      }
    }
    auto triangle = [&](const TileRows& rows, const float* r, float* out) {
      for (int64_t j = 0; j < n; j += kStrip) {
        tile_rows(rows.from_row(j), m.k_pairs.from(0, j), n - j, Kp, kExact, out + j * s.ld_c + j,
                  s.ld_c);
      }
      if (!x.l2norm) return;
      for (int64_t i = 0; i < n; ++i) {
        float* row = out + i * s.ld_c;
        for (int64_t j = 0; j <= i; j += kLanes) {
          store(row + j, broadcast(r[i]) * load(m.rk + j) * load(row + j));
        }
      }
    };
    triangle(m.k, m.rk, s.kk);
    triangle(m.q, m.rq, s.qk);
  }
  static void factors(const ChunkKeys& s, const ChunkHead& h, int64_t first, int64_t n,
                      float scale) {
    const ChunkOperands& m = s.operands;
    for (int64_t i = 0; i < n; ++i) {
      h.wk[i] = h.w[i] * m.rk[first + i];
      h.wq[i] = scale * h.w[i] * m.rq[first + i];
      h.D[i] *= m.rk[first + i];
    }
  }
  static void keep_row(const ChunkKeys& s, int64_t i, int64_t j, F A, F M) {
    if (form != Form::rounded) return;
#if GDN_SIMD_AMX
    // Tiles take what lies before the block of rows that i is in; the rest of a tile is zero.
    if (j + kTileRow > i) A = M = zero();
#endif
    store(s.operands.A.part[0] + i * s.ld_c + j, A);
    store(s.operands.M.part[0] + i * s.ld_c + j, M);
  }
  static void end_row(const ChunkKeys& s, int64_t i) {
#if GDN_SIMD_AMX
    if (i % kTileDepth == kTileRow) keep_row(s, i, i, zero(), zero());
#endif
  }
  static void old_state(const ChunkKeys& s, const ChunkHead& h, int64_t n, int64_t K,
                        const float* S) {
    const ChunkOperands& m = s.operands;
    auto row = [&](int64_t i, int64_t c) { return load(S + i * kStrip + c); };
    split_pairs(0, K, m.k.ld, row, m.S);
#if GDN_SIMD_AMX
    tile_rows(m.k, m.S, n, m.k.ld, kExact, h.Sk, kStrip);
    tile_rows(m.q, m.S, n, m.k.ld, kForOutput, h.Sq, kStrip);
#endif
  }
  template <int R>
  GDN_INLINE void state_rows(const ChunkKeys& s, const ChunkHead& h, bool keys, int64_t i,
                             int64_t K, const float*, F (&acc)[R][kTileVectors]) {
#if GDN_SIMD_AMX
    const float* row = (keys ? h.Sk : h.Sq) + i * kStrip;
    unrolled<R>(GDN_EACH(r) {
      unrolled<kTileVectors>(
          GDN_EACH(c) { acc[r][c] = K ? load(row + r * kStrip + c * kLanes) : zero(); });
    });
#else
    const TileRows& rows = keys ? s.operands.k : s.operands.q;
    clear(acc);
    tile_product<R>(acc, rows.part[0] + i * rows.ld, rows.ld, s.operands.S.part[0], kStrip, K);
#endif
  }
  template <int R>
  GDN_INLINE int64_t earlier_rows(const ChunkKeys& s, bool A, int64_t i,
                                  F (&acc)[R][kTileVectors]) {
    if (form != Form::rounded) return 0;
    const ChunkOperands& m = s.operands;
#if GDN_SIMD_AMX
    const int64_t block = i / kTileRow * kTileRow;
    if (block == 0) return 0;
    if (A && i == block) {
      // Both before there is any u of this block: it may be NaN, and zeros times that.
      tile_block<1>(m.A.from_row(i), m.u, whole_depth(i), 1, m.Au, kStrip);
      tile_block<1>(m.M.from_row(i), m.u, whole_depth(i), 1, m.Mu, kStrip);
    }
    const float* product = (A ? m.Au : m.Mu) + (i - block) * kStrip;
    unrolled<R>(GDN_EACH(r) {
      unrolled<kTileVectors>(
          GDN_EACH(c) { acc[r][c] = acc[r][c] + load(product + r * kStrip + c * kLanes); });
    });
    return block;
#else
    const TileRows& rows = A ? m.A : m.M;
    tile_product<R>(acc, rows.part[0] + i * rows.ld, rows.ld, m.u.part[0], kStrip, i);
    return i;
#endif
  }
  template <int R>
  GDN_INLINE void keep_u(const ChunkKeys& s, int64_t i, const F (&u)[R][kTileVectors]) {
    if (form != Form::rounded) return;
    uint32_t* to = s.operands.u.part[0] + i / 2 * kStrip;
#if GDN_SIMD_AMX
    if (i % kTileDepth == 0) std::memset(to, 0, kTileDepth / 2 * kStrip * sizeof *to);
#endif
    unrolled<R / 2>(GDN_EACH(r) {
      unrolled<kTileVectors>(
          GDN_EACH(c) { store_pair(to + r * kStrip + c * kLanes, u[2 * r][c], u[2 * r + 1][c]); });
    });
  }
  static void update(const ChunkKeys& s, const ChunkHead& h, const float* u, int64_t first,
                     int64_t n, int64_t K, float w, float* S, bool S_is_zero) {
    const ChunkOperands& m = s.operands;
    const int64_t depth = whole_depth(first + n);
    auto row = [&](int64_t i, int64_t c) {
      i -= first;
      return broadcast(h.D[i]) * load(u + i * kStrip + c);
    };
    split_pairs(first, first + n, depth, row, m.du);
    const F decay = broadcast(w);
    auto add = [&](F sum, float* to) { store(to, S_is_zero ? sum : fma(decay, load(to), sum)); };
#if GDN_SIMD_AMX
    for (int64_t i = 0; i < K; i += 2 * kTileRow) {
      tile_block<2>(m.kt.from_row(i), m.du, depth, kExact, m.block, kStrip);
      for (int64_t e = 0; e < 2 * kTileRow * kStrip; e += kLanes) {
        add(load(m.block + e), S + i * kStrip + e);
      }
    }
#else
    for_tiles(K, [&](int64_t i, auto rows, int) {
      constexpr int R = decltype(rows)::value;
      F acc[R][kTileVectors];
      clear(acc);
      tile_product<R>(acc, m.kt.part[0] + i * m.kt.ld, m.kt.ld, m.du.part[0], kStrip, first + n);
      unrolled<R>(GDN_EACH(r) {
        unrolled<kTileVectors>(GDN_EACH(c) { add(acc[r][c], S + (i + r) * kStrip + c * kLanes); });
      });
    });
#endif
  }
};
template <class T>
struct ChunkProducts<T, Form::split> : ChunkOperandProducts<T, Form::split> {};
template <class T>
struct ChunkProducts<T, Form::rounded> : ChunkOperandProducts<T, Form::rounded> {};
#endif
