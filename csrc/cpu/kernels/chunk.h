// Chunked gated delta rule (WY form without W: the old state is multiplied by k once).
// Included inside the namespace of one instruction set, after recurrent.h.
//
// For the n tokens of a chunk, with D_ij = a_{j+1} ... a_i, w_i = a_1 ... a_i and the old state S:
//   u_i = beta_i (v_i - w_i S k_i) - sum_{j<i} beta_i D_ij (k_i . k_j) u_j
//   o_i = scale (w_i S q_i + sum_{j<=i} D_ij (q_i . k_j) u_j)
//   S'  = w_n S + sum_j D_nj u_j k_j^T
// Columns of V never mix, so a strip of kStrip columns goes through a whole chunk in the
// first-level cache: S^T is held as strips [K][kStrip], u as [n][kStrip], and every product is a
// register tile of kTileRows x kStrip whose left operand is broadcast from plain rows. k k^T and q
// k^T are formed once for all value heads of a key head. The order of every sum depends on the row
// alone.
//
// 16-bit inputs go through AMX tiles where there are some (tiles.h): the products of keys, queries
// and state. An f32 operand goes in as bf16 parts (three where the state depends on it, two where
// only an output does); the state itself stays f32 and each chunk's sum is added to it in f32. The
// triangles are f32 then: half of each is zeros, which tiles would multiply six times over.
//
// With `fast`, bf16 inputs go through products whose operands are rounded once to bf16, in tiles or
// in dot products of pairs: k, q and, but for their blocks on the diagonal, the triangles too. The
// state is still f32 and added to in f32.
//
// Decays are products of exp(g), never quotients or exponentials of differences of totals. A decay
// of exactly zero cuts the chunk for that head: nothing older is multiplied by anything.

#if GDN_SIMD_AVX512
constexpr int kTileRows = 8, kTileVectors = 2;
#elif GDN_SIMD_NEON
constexpr int kTileRows = 6, kTileVectors = 4;
#else
constexpr int kTileRows = 6, kTileVectors = 2;
#endif
constexpr int kStrip = kTileVectors * kLanes;
// Floats of state one task may hold; a task takes fewer value heads of a key head rather than more.
constexpr int64_t kTaskState = 1 << 18;
constexpr int64_t kMaxGroup = 64;  // value heads of a task, however small they are

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

// Decays exp(g) and betas of tokens [t0, t0 + n).
static void load_gates(const ChunkArgs& x, int64_t b, int64_t t0, int64_t n, int64_t hv,
                       const ChunkHead& h) {
  for (int64_t i = 0; i < n; ++i) {
    const RawGates gates = raw_gates(x.gates, b, t0 + i, hv);
    h.a[i] = gates.g;
    h.beta[i] = gates.beta;
  }
  for (int64_t i = 0; i < n; i += kLanes) store(h.a + i, exp(load(h.a + i)));
}

// Decays and the two triangular matrices of tokens [first, end) of the chunk; rows and columns
// count from `first`.
template <class Products>
static void head_matrices(const ChunkKeys& s, const ChunkHead& h, int64_t first, int64_t end,
                          float scale) {
  const int64_t n = end - first;
  for (int64_t j = 0; j < s.ld_c; ++j) h.D[j] = 0.f;
  float total = 1.f;
  for (int64_t i = 0; i < n; ++i) {
    const float a = h.a[first + i];
    total *= a;
    h.w[i] = total;
    const float* kk = s.kk + (first + i) * s.ld_c + first;
    const float* qk = s.qk + (first + i) * s.ld_c + first;
    float *A = h.A + i * s.ld_c, *M = h.M + i * s.ld_c;
    const F decay = broadcast(a), minus_beta = broadcast(-h.beta[first + i]), f = broadcast(scale);
    for (int64_t j = 0; j < i; j += kLanes) {
      const F d = decay * load(h.D + j);
      const F below = minus_beta * d * load(kk + j), out = f * d * load(qk + j);
      store(h.D + j, d);
      store(A + j, below);
      store(M + j, out);
      Products::keep_row(s, i, j, below, out);
    }
    Products::end_row(s, i);
    h.D[i] = 1.f;
    M[i] = scale * qk[i];
  }
}

// One strip of one head through tokens [first, first + n) of a chunk that starts at token t0.
template <class T, Form form>
static void strip_segment(const ChunkArgs& x, const ChunkKeys& s, const ChunkHead& h, int64_t b,
                          int64_t t0, int64_t hv, int64_t first, int64_t n, int64_t column,
                          const float* S, bool S_is_zero, float* u) {
  const int64_t cols = x.V - column < kStrip ? x.V - column : kStrip;
  const bool direct = cols == kStrip && x.v.sd == 1;
  const int64_t depth = S_is_zero ? 0 : x.K;
  using Products = ChunkProducts<T, form>;
  auto error = [&](int64_t i, int valid, auto& acc) __attribute__((always_inline)) {
    constexpr int R = sizeof(acc) / sizeof(acc[0]);
    Products::template state_rows<R>(s, h, true, first + i, depth, S, acc);
    for (int r = 0; r < valid; ++r) {
      alignas(64) float buffer[kStrip];
      if (!direct) {
        for (int e = 0; e < kStrip; ++e) buffer[e] = 0.f;
        load_row(from_column(x.v, column), b, t0 + first + i + r, hv, cols, buffer);
      }
      const T* row = element<T>(x.v, b, t0 + first + i + r, hv) + column;
      for (int c = 0; c < kTileVectors; ++c) {
        store(u + (i + r) * kStrip + c * kLanes,
              direct ? load(row + c * kLanes) : load(buffer + c * kLanes));
      }
    }
    unrolled<R>(GDN_EACH(r) {
      const F w = broadcast(h.wk[i + r]), beta = broadcast(h.beta[first + i + r]);
      unrolled<kTileVectors>(GDN_EACH(c) {
        acc[r][c] = beta * (load(u + (i + r) * kStrip + c * kLanes) - w * acc[r][c]);
      });
    });
    return Products::template earlier_rows<R>(s, true, i, acc);
  };
  auto output = [&](int64_t i, int valid, auto& acc) __attribute__((always_inline)) {
    constexpr int R = sizeof(acc) / sizeof(acc[0]);
    if (form == Form::f32) {
      unrolled<R>(GDN_EACH(r) {
        const F d = broadcast(h.D[i + r]);
        unrolled<kTileVectors>(
            GDN_EACH(c) { store(h.du + (i + r) * kStrip + c * kLanes, d * acc[r][c]); });
      });
    }
    Products::template keep_u<R>(s, i, acc);
    Products::template state_rows<R>(s, h, false, first + i, depth, S, acc);
    unrolled<R>(GDN_EACH(r) {
      const F w = broadcast(h.wq[i + r]);
      unrolled<kTileVectors>(GDN_EACH(c) { acc[r][c] = w * acc[r][c]; });
    });
    const float* M = h.M + i * s.ld_c;
    const int64_t added = Products::template earlier_rows<R>(s, false, i, acc);
    tile_product<R>(acc, M + added, s.ld_c, u + added * kStrip, kStrip, i - added);
    unrolled<R>(GDN_EACH(m) {
      F value[kTileVectors];
      unrolled<kTileVectors>(GDN_EACH(c) { value[c] = load(u + (i + m) * kStrip + c * kLanes); });
      unrolled<R - m>(GDN_EACH(below) {
        constexpr int r = m + below;
        const F f = broadcast(M[r * s.ld_c + i + m]);
        unrolled<kTileVectors>(GDN_EACH(c) { acc[r][c] = fma(f, value[c], acc[r][c]); });
      });
    });
    unrolled<R>(GDN_EACH(r) {
      if (r >= valid) return;
      T* out = static_cast<T*>(x.out.ptr) + b * x.out.sb + (t0 + first + i + r) * x.out.st +
               hv * x.out.sh + column;
      if (cols == kStrip) {
        unrolled<kTileVectors>(GDN_EACH(c) { store(out + c * kLanes, acc[r][c]); });
      } else {
        alignas(64) float buffer[kStrip];
        unrolled<kTileVectors>(GDN_EACH(c) { store(buffer + c * kLanes, acc[r][c]); });
        narrow(buffer, cols, out);
      }
    });
  };
  substitute(h.A, s.ld_c, n, u, error, output);
}

// Columns [column, V) of one head of a pool row into strips, and back (rounded once). `buffer`:
// scratch for a strip the other way round, [kStrip][padded(K)].
template <class T>
static void load_strips(const StatePool& pool, int64_t row, int64_t h, int64_t column, int64_t V,
                        int64_t K, float* S, float* buffer) {
  const T* base = head_of<T>(pool, row, h);
  for (int64_t c = column; c < V; c += kStrip, S += strip_floats(K)) {
    const int64_t cols = V - c < kStrip ? V - c : kStrip;
    if (cols < kStrip) std::memset(S, 0, K * kStrip * sizeof(float));
    if (pool.s_k == 1) {
      const int64_t ld = padded(K);
      for (int64_t i = 0; i < cols; ++i) widen(base + (c + i) * pool.s_v, 1, K, buffer + i * ld);
      transpose(buffer, ld, cols, K, S, kStrip);
    } else {
      for (int64_t i = 0; i < K; ++i) {
        widen(base + i * pool.s_k + c * pool.s_v, pool.s_v, cols, S + i * kStrip);
      }
    }
  }
}
template <class T>
static void store_strips(const StatePool& pool, int64_t row, int64_t h, int64_t column, int64_t V,
                         int64_t K, const float* S, float* buffer) {
  T* base = head_of<T>(pool, row, h);
  for (int64_t c = column; c < V; c += kStrip, S += strip_floats(K)) {
    const int64_t cols = V - c < kStrip ? V - c : kStrip;
    if (pool.s_k == 1) {
      const int64_t ld = padded(K);
      transpose(S, kStrip, K, cols, buffer, ld);
      for (int64_t i = 0; i < cols; ++i) narrow(buffer + i * ld, K, base + (c + i) * pool.s_v);
    } else {
      for (int64_t i = 0; i < K; ++i) narrow(S + i * kStrip, cols, base + i * pool.s_k + c);
    }
  }
}
static void load_state(const StatePool& pool, int64_t row, int64_t h, int64_t column, int64_t V,
                       int64_t K, float* S, float* buffer) {
  with_type(pool.dtype, [&](auto* type) {
    load_strips<std::remove_pointer_t<decltype(type)>>(pool, row, h, column, V, K, S, buffer);
  });
}
static void store_state(const StatePool& pool, int64_t row, int64_t h, int64_t column, int64_t V,
                        int64_t K, const float* S, float* buffer) {
  with_type(pool.dtype, [&](auto* type) {
    store_strips<std::remove_pointer_t<decltype(type)>>(pool, row, h, column, V, K, S, buffer);
  });
}

struct ChunkScratch {
  ChunkKeys keys;
  ChunkHead head;
  float* buffer;  // a transposed strip of state
  float* S;       // [heads][strips][K][kStrip]
};
// Returns the floats needed; with base null only that.
static int64_t carve_chunk(float* base, const ChunkArgs& x, Form form, int64_t state_floats,
                           int64_t u_strips, ChunkScratch& s) {
  ScratchCursor cursor{base};
  const int64_t C = x.C, edge = strips(C) * kStrip;
  // 16 floats more than a power of two: columns of a strip then fall into different cache sets.
  s.keys.ld_k = padded(x.K) + 16;
  s.keys.ld_t = edge + 16;
  s.keys.ld_c = edge + 16;
  // Spare rows also cover the register that a segment starting inside the chunk reads past its
  // last.
  const int64_t rows = C + kSpareRows;
  s.keys.k = cursor.take(rows * s.keys.ld_k);
  s.keys.q = cursor.take(rows * s.keys.ld_k);
  s.keys.kt = cursor.take((x.K + kSpareRows) * s.keys.ld_t);
  s.keys.kk = cursor.take(rows * s.keys.ld_c);
  s.keys.qk = cursor.take(rows * s.keys.ld_c);
  s.head.A = cursor.take(rows * s.keys.ld_c);
  s.head.M = cursor.take(rows * s.keys.ld_c);
  s.head.D = cursor.take(s.keys.ld_c);
  s.head.a = cursor.take(rows);
  s.head.beta = cursor.take(rows);
  s.head.w = cursor.take(rows);
  s.head.wk = cursor.take(rows);
  s.head.wq = cursor.take(rows);
  s.head.u = cursor.take(u_strips * rows * kStrip);
  s.head.s_u = u_strips > 1 ? rows * kStrip : 0;
  s.head.du = cursor.take(rows * kStrip);
  s.head.Sk = cursor.take(rows * kStrip);
  s.head.Sq = cursor.take(rows * kStrip);
  s.keys.operands.carve(cursor, form, C, x.K, s.keys.ld_c, x.q.dtype);
  s.buffer = cursor.take(kStrip * padded(x.K));
  s.S = cursor.take(state_floats);
  return cursor.used;
}

// The chunk [t0, t0 + n) of one value head, columns [column, column + count strips). `zero_state`
// says that S holds nothing yet. With `update`, S becomes the state after the chunk. before(p) is
// called once a strip.
template <class T, Form form, class Before>
static void chunk_of_head(const ChunkArgs& x, const ChunkScratch& s, int64_t b, int64_t t0,
                          int64_t n, int64_t hv, int64_t column, int64_t count, float* S,
                          bool zero_state, bool update, Before before) {
  using Products = ChunkProducts<T, form>;
  const ChunkHead& h = s.head;
  load_gates(x, b, t0, n, hv, h);
  for (int64_t first = 0, end; first < n; first = end) {
    end = first + 1;
    while (end < n && h.a[end] != 0.f) ++end;
    if (h.a[first] == 0.f) zero_state = true;
    head_matrices<Products>(s.keys, h, first, end, x.scale);
    Products::factors(s.keys, h, first, end - first, x.scale);
    for (int64_t p = 0; p < count; ++p) {
      float* strip = S + p * strip_floats(x.K);
      float* u = h.u + p * h.s_u + first * kStrip;
      if (first == 0) before(p);
      if (!zero_state) Products::old_state(s.keys, h, n, x.K, strip);
      strip_segment<T, form>(x, s.keys, h, b, t0, hv, first, end - first, column + p * kStrip,
                             strip, zero_state, u);
      // What follows a cut starts from nothing.
      if (update && end == n) {
        Products::update(s.keys, h, u, first, end - first, x.K, h.w[end - first - 1], strip,
                         zero_state);
      }
    }
  }
}

// Asks for share `part` of `parts` of what the heads [h0, h1) of key head hk read in the chunk at
// t. The rows of a head lie a token apart, each in a page of its own, so nothing but a request
// hides their latency; all that lies in a page is asked for at once, because finding the page is
// most of it.
template <class T>
static void prefetch_chunk(const ChunkArgs& x, int64_t b, int64_t t, int64_t end, int64_t hk,
                           int64_t h0, int64_t h1, int64_t column, int64_t columns, int64_t part,
                           int64_t parts) {
  constexpr int64_t line = 64 / static_cast<int64_t>(sizeof(T));
  const int64_t n = end - t < x.C ? end - t : x.C;
  for (int64_t i = t + n * part / parts; i < t + n * (part + 1) / parts; ++i) {
    for (int64_t p = 0; p < x.K; p += line) prefetch_l2(element<T>(x.k, b, i, hk) + p);
    for (int64_t p = 0; p < x.K; p += line) prefetch_l2(element<T>(x.q, b, i, hk) + p);
    for (int64_t h = h0; h < h1; ++h) {
      const T* v = element<T>(x.v, b, i, h) + column;
      for (int64_t p = 0; p < columns; p += line) prefetch_l2(v + p);
    }
  }
}

template <class T, Form form>
static void chunk_typed(const ChunkArgs& x, const Parallel& parallel) {
  const int64_t ratio = x.HV / x.H, V_strips = strips(x.V);
  // Heads of a task share k k^T and q k^T; with too few tasks for the threads they part, and then
  // the columns of V do.
  int64_t heads = kTaskState / (V_strips * strip_floats(x.K));
  heads = heads < 1 ? 1 : heads > ratio ? ratio : heads;
  if (heads > kMaxGroup) heads = kMaxGroup;
  const int64_t enough = parallel.threads == 1 ? 1 : 2 * parallel.threads;
  while (heads > 1 && x.seqs.N * x.H * ((ratio + heads - 1) / heads) < enough)
    heads = (heads + 1) / 2;
  const int64_t groups = (ratio + heads - 1) / heads;
  int64_t count = V_strips;
  while (count > 1 && x.seqs.N * x.H * groups * ((V_strips + count - 1) / count) < enough) {
    count = (count + 1) / 2;
  }
  const int64_t splits = (V_strips + count - 1) / count;
  const int64_t tasks = x.seqs.N * x.H * groups * splits;
  int64_t next_task = 0;
  auto body = [&](int64_t, int64_t) {
    [[maybe_unused]] const ThreadTiles<kTiled<T>> tiles;
    ChunkScratch s;
    const int64_t state_floats = heads * count * strip_floats(x.K);
    float* base = thread_scratch(carve_chunk(nullptr, x, form, state_floats, 1, s));
    carve_chunk(base, x, form, state_floats, 1, s);
    // Sequences differ in length: whoever is free takes the next task.
    for (;;) {
      const int64_t task = __atomic_fetch_add(&next_task, 1, __ATOMIC_RELAXED);
      if (task >= tasks) return;
      const int64_t n = task / (x.H * groups * splits), hk = task / (groups * splits) % x.H;
      const int64_t h0 = hk * ratio + task / splits % groups * heads;
      const int64_t h1 = h0 + heads < (hk + 1) * ratio ? h0 + heads : (hk + 1) * ratio;
      const int64_t column = task % splits * count * kStrip;
      const int64_t end_column = column + count * kStrip < x.V ? column + count * kStrip : x.V;
      const int64_t mine = strips(end_column - column);
      const Sequence seq = sequence_of(x.seqs, n);
      if (seq.row < 0) {
        const float zeros[kMaxRow] = {};
        for (int64_t t = seq.start; t < seq.end; ++t) {
          for (int64_t h = h0; h < h1; ++h) {
            store_row(x.out, seq.b, t, h, column, end_column - column, zeros);
          }
        }
        continue;
      }
      prefetch_chunk<T>(x, seq.b, seq.start, seq.end, hk, h0, h1, column, end_column - column, 0,
                        1);
      const bool fresh = seq.fresh || !x.read.ptr;
      bool zero_state[kMaxGroup];
      for (int64_t h = h0; h < h1; ++h) {
        zero_state[h - h0] = fresh;
        if (!fresh) {
          load_state(x.read, seq.row, h, column, end_column, x.K,
                     s.S + (h - h0) * count * strip_floats(x.K), s.buffer);
        }
      }
      auto keep = [&](int64_t row) {
        for (int64_t h = h0; h < h1; ++h) {
          float* S = s.S + (h - h0) * count * strip_floats(x.K);
          if (zero_state[h - h0]) std::memset(S, 0, mine * strip_floats(x.K) * sizeof(float));
          store_state(x.write, row, h, column, end_column, x.K, S, s.buffer);
        }
      };
      for (int64_t t = seq.start, edge = 0; t < seq.end; t += x.C, ++edge) {
        const int64_t tokens = seq.end - t < x.C ? seq.end - t : x.C;
        ChunkProducts<T, form>::load_keys(x, seq.b, t, tokens, hk, s.keys);
        for (int64_t h = h0; h < h1; ++h) {
          chunk_of_head<T, form>(
              x, s, seq.b, t, tokens, h, column, mine, s.S + (h - h0) * count * strip_floats(x.K),
              zero_state[h - h0], true, [&](int64_t p) {
                if (t + x.C >= seq.end) return;
                prefetch_chunk<T>(x, seq.b, t + x.C, seq.end, hk, h0, h1, column,
                                  end_column - column, (h - h0) * mine + p, (h1 - h0) * mine);
              });
          zero_state[h - h0] = false;
        }
        if (tokens == x.C && edge < x.edges) {
          const int64_t row = at(x.edge_rows, n, edge);
          if (row >= 0) keep(row);
        }
      }
      const int64_t row = x.write_indices.ptr ? at(x.write_indices, n) : seq.row;
      if (row >= 0) keep(row);
    }
  };
  parallel_for(parallel, parallel.threads, body);
}

// run(value of the element type, integral_constant<Form>) for what the call asks for.
template <class Run>
GDN_INLINE void with_form(const ChunkArgs& x, Run run) {
  with_type(x.q.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if constexpr (kRounds<T>) {
      if (x.fast) return run(T(), std::integral_constant<Form, Form::rounded>());
    }
    run(T(), std::integral_constant<Form, kExactForm<T>>());
  });
}

static void chunk(const ChunkArgs& x, const Parallel& parallel) {
  with_form(
      x, [&](auto t, auto form) { chunk_typed<decltype(t), decltype(form)::value>(x, parallel); });
}

// --- low-rank: between chunks only the window

struct LowrankScratch {
  ChunkScratch chunk;
  float *k, *u, *g;  // entries oldest first: [R][ld_k], [heads][R][ld_u], [heads][R]
  float* kt;         // [K][ld_r], transposed k
  float *w, *wu;     // [R], [R][kStrip]
  int64_t ld_u, ld_r;
};
static int64_t carve_lowrank(float* base, const ChunkArgs& x, Form form, int64_t heads,
                             LowrankScratch& s) {
  const int64_t count = strips(x.V);
  const int64_t used = carve_chunk(base, x, form, count * strip_floats(x.K), count, s.chunk);
  ScratchCursor cursor{base, (used + 15) / 16 * 16};
  const int64_t R = x.window.R;
  s.ld_u = count * kStrip;
  s.ld_r = strips(R) * kStrip + 16;
  s.k = cursor.take(R * s.chunk.keys.ld_k);
  s.u = cursor.take(heads * R * s.ld_u);
  s.g = cursor.take(heads * R);
  s.kt = cursor.take((x.K + kSpareRows) * s.ld_r);
  s.w = cursor.take(R);
  s.wu = cursor.take(R * kStrip);
  return cursor.used;
}

static void load_entry(const void* src, DType dtype, int64_t offset, int64_t n, float* dst) {
  with_type(dtype, [&](auto* type) {
    widen(static_cast<const std::remove_pointer_t<decltype(type)>*>(src) + offset, 1, n, dst);
  });
}
static void store_entry(void* dst, DType dtype, int64_t offset, int64_t n, const float* src) {
  with_type(dtype, [&](auto* type) { narrow(src, n, static_cast<decltype(type)>(dst) + offset); });
}
// x as it reads after being stored.
static void round_entry(float* x, DType dtype, int64_t n) {
  if (dtype == DType::f32) return;
  uint16_t stored[kMaxRow];
  store_entry(stored, dtype, 0, n, x);
  load_entry(stored, dtype, 0, n, x);
}

// The `keep` newest of `old` rows move to the front.
static void shift_rows(float* rows, int64_t ld, int64_t old, int64_t keep) {
  if (keep > 0 && keep < old)
    std::memmove(rows, rows + (old - keep) * ld, keep * ld * sizeof(float));
}

template <class T, Form form>
static void chunk_lowrank_sequence(const ChunkArgs& x, const LowrankScratch& s, const Sequence& seq,
                                   int64_t hk) {
  const Window& win = x.window;
  const int64_t R = win.R, ratio = x.HV / x.H, h0 = hk * ratio;
  const ChunkKeys& keys = s.chunk.keys;
  const ChunkHead& head = s.chunk.head;
  const WindowCounts found = unpack_fill(seq.fresh ? 0 : win.fill[seq.row * win.s_fill]);
  int64_t fill = found.fill;
  for (int64_t i = 0; i < fill; ++i) {
    const int64_t slot = (found.head + i) % R;
    load_entry(win.k, win.k_dtype, seq.row * win.sk_p + hk * win.sk_h + slot * win.sk_r, x.K,
               s.k + i * keys.ld_k);
    for (int64_t h = 0; h < ratio; ++h) {
      float* u = s.u + (h * R + i) * s.ld_u;
      for (int64_t c = x.V / kStrip * kStrip; c < s.ld_u; ++c) u[c] = 0.f;
      load_entry(win.u, win.u_dtype, seq.row * win.su_p + (h0 + h) * win.su_h + slot * win.su_r,
                 x.V, u);
      s.g[h * R + i] = win.g[seq.row * win.sg_p + (h0 + h) * win.sg_h + slot * win.sg_r];
    }
  }
  for (int64_t t = seq.start; t < seq.end; t += x.C) {
    const int64_t n = seq.end - t < x.C ? seq.end - t : x.C;
    ChunkProducts<T, form>::load_keys(x, seq.b, t, n, hk, keys);
    transpose(s.k, keys.ld_k, fill, x.K, s.kt, s.ld_r);
    const int64_t fresh = n < R ? n : R, keep = fill < R - fresh ? fill : R - fresh;
    for (int64_t h = 0; h < ratio; ++h) {
      float *u = s.u + h * R * s.ld_u, *g = s.g + h * R;
      // Entry i has decayed by the own decays of the entries after it.
      float weight = 1.f;
      for (int64_t i = fill; i-- > 0;) {
        s.w[i] = weight;
        weight *= first_lane(exp(broadcast(g[i])));
      }
      int64_t first = fill;
      while (first > 0 && s.w[first - 1] != 0.f) --first;
      const int64_t live = fill - first;
      ChunkKeys entries = keys;
      entries.kt = s.kt;
      entries.ld_t = s.ld_r;
      for (int64_t p = 0; live > 0 && p < strips(x.V); ++p) {
        for (int64_t i = 0; i < live; ++i) {
          const F w = broadcast(s.w[first + i]);
          for (int v = 0; v < kTileVectors; ++v) {
            const float* row = u + (first + i) * s.ld_u + p * kStrip + v * kLanes;
            store(s.wu + i * kStrip + v * kLanes, w * load(row));
          }
        }
        update_strip(entries, s.wu, first, live, x.K, 1.f, nullptr,
                     s.chunk.S + p * strip_floats(x.K));
      }
      chunk_of_head<T, form>(x, s.chunk, seq.b, t, n, h0 + h, 0, strips(x.V), s.chunk.S, live == 0,
                             false, [](int64_t) {});
      shift_rows(g, 1, fill, keep);
      shift_rows(u, s.ld_u, fill, keep);
      for (int64_t i = 0; i < fresh; ++i) {
        const int64_t token = n - fresh + i;
        g[keep + i] = raw_gates(x.gates, seq.b, t + token, h0 + h).g;
        float* row = u + (keep + i) * s.ld_u;
        for (int64_t p = 0; p < strips(x.V); ++p) {
          std::memcpy(row + p * kStrip, head.u + p * head.s_u + token * kStrip,
                      kStrip * sizeof(float));
        }
        round_entry(row, win.u_dtype, x.V);
      }
    }
    shift_rows(s.k, keys.ld_k, fill, keep);
    for (int64_t i = 0; i < fresh; ++i) {
      float* row = s.k + (keep + i) * keys.ld_k;
      load_row(x.k, seq.b, t + n - fresh + i, hk, x.K, row);
      if (x.l2norm) l2_normalise(row, x.K);
      round_entry(row, win.k_dtype, x.K);
    }
    fill = keep + fresh;
  }
  for (int64_t i = 0; i < fill; ++i) {
    store_entry(win.k, win.k_dtype, seq.row * win.sk_p + hk * win.sk_h + i * win.sk_r, x.K,
                s.k + i * keys.ld_k);
    for (int64_t h = 0; h < ratio; ++h) {
      store_entry(win.u, win.u_dtype, seq.row * win.su_p + (h0 + h) * win.su_h + i * win.su_r, x.V,
                  s.u + (h * R + i) * s.ld_u);
      win.g[seq.row * win.sg_p + (h0 + h) * win.sg_h + i * win.sg_r] = s.g[h * R + i];
    }
  }
}

template <class T, Form form>
static void chunk_lowrank_typed(const ChunkArgs& x, const Parallel& parallel) {
  // A task is (sequence, key head): its value heads share the keys of the window.
  const int64_t tasks = x.seqs.N * x.H, ratio = x.HV / x.H;
  int64_t next_task = 0;
  auto body = [&](int64_t, int64_t) {
    [[maybe_unused]] const ThreadTiles<kTiled<T>> tiles;
    LowrankScratch s;
    float* base = thread_scratch(carve_lowrank(nullptr, x, form, ratio, s));
    carve_lowrank(base, x, form, ratio, s);
    for (;;) {
      const int64_t task = __atomic_fetch_add(&next_task, 1, __ATOMIC_RELAXED);
      if (task >= tasks) return;
      const int64_t hk = task % x.H;
      const Sequence seq = sequence_of(x.seqs, task / x.H);
      if (seq.row >= 0) {
        if (seq.end > seq.start) chunk_lowrank_sequence<T, form>(x, s, seq, hk);
        continue;
      }
      const float zeros[kMaxRow] = {};
      for (int64_t t = seq.start; t < seq.end; ++t) {
        for (int64_t h = hk * ratio; h < (hk + 1) * ratio; ++h) {
          store_row(x.out, seq.b, t, h, 0, x.V, zeros);
        }
      }
    }
  };
  parallel_for(parallel, parallel.threads, body);
  // Every key head read the old count; only now may it change.
  for (int64_t n = 0; n < x.seqs.N; ++n) {
    const Sequence seq = sequence_of(x.seqs, n);
    const int64_t tokens = seq.end - seq.start;
    if (seq.row < 0 || tokens == 0) continue;
    int32_t* fill = x.window.fill + seq.row * x.window.s_fill;
    const int64_t total = (seq.fresh ? 0 : unpack_fill(*fill).fill) + tokens;
    *fill = static_cast<int32_t>(total < x.window.R ? total : x.window.R);
  }
}

static void chunk_lowrank(const ChunkArgs& x, const Parallel& parallel) {
  with_form(x, [&](auto t, auto form) {
    chunk_lowrank_typed<decltype(t), decltype(form)::value>(x, parallel);
  });
}
