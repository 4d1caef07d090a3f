// The base state under a window: its products with keys and queries, and the fold of entries into
// it. Included inside the namespace of one instruction set, after window_entries.h.

// How far ahead a stream of the base asks for its lines, whether into L1, and whether the pages of
// the next base are touched first.
constexpr int64_t kLeadBytes = kIntel ? 1024 : 2048;
constexpr bool kTouchesPages = !kIntel;
GDN_INLINE void prefetch_base(const void* p) { kIntel ? prefetch(p) : prefetch_l2(p); }
constexpr int64_t kPageBytes = 4096;
// Registers of a line that the fold holds, of four lines.
#if GDN_SIMD_AVX512 || GDN_SIMD_NEON
constexpr int kFoldVectors = 4;
#else
constexpr int kFoldVectors = 2;
#endif

// P, Q [token][ld]: old state times key and query for R rows of K contiguous elements, `pitch`
// apart; their places in P and Q are `step` apart. `ahead`: the R rows to ask for meanwhile, or
// null.
template <int R, class T>
GDN_INLINE void product_rows(const T* S, int64_t pitch, int64_t K, const KeyQuery* x,
                             int64_t tokens, float* P, float* Q, int64_t ld, int64_t step,
                             const T* ahead) {
  for (int64_t j = 0; j < tokens; ++j) {
    RowSums<R> sums = {};
    const float *k = x[j].k, *q = x[j].q;
    const T* fetch = j == 0 ? ahead : nullptr;
    for_lanes(K, [&](int64_t i, auto lanes) {
      const F kv = load(k + i), qv = load(q + i);
      unrolled<R>(GDN_EACH(r) {
        const F s = load_lanes(S + r * pitch + i, lanes);
        sums.k[r] = fma(s, kv, sums.k[r]);
        sums.q[r] = fma(s, qv, sums.q[r]);
        if (fetch && i * sizeof(T) % 64 == 0) prefetch_base(fetch + r * pitch + i);
      });
    });
    float out[2][4];
    if constexpr (R == 4) {
      sum4(sums.k, out[0]);
      sum4(sums.q, out[1]);
    } else {
      unrolled<R>(GDN_EACH(r) {
        out[0][r] = sum(sums.k[r]);
        out[1][r] = sum(sums.q[r]);
      });
    }
    unrolled<R>(GDN_EACH(r) {
      P[j * ld + r * step] = out[0][r];
      Q[j * ld + r * step] = out[1][r];
    });
  }
}

// The same for a block of J registers of columns of the transposed pool.
template <int J, class T, class Lanes>
GDN_INLINE void product_columns(const T* S, int64_t s_k, int64_t K, const KeyQuery* x,
                                int64_t tokens, float* P, float* Q, int64_t ld, const T* ahead,
                                Lanes lanes) {
  for (int64_t j = 0; j < tokens; ++j) {
    ColumnSums<J> sums = {};
    const float *k = x[j].k, *q = x[j].q;
    for (int64_t i = 0; i < K; ++i) {
      const F kv = broadcast(k[i]), qv = broadcast(q[i]);
      unrolled<J>(GDN_EACH(c) {
        const F s = load_lanes(S + i * s_k + c * kLanes, lanes);
        sums.k[c] = fma(s, kv, sums.k[c]);
        sums.q[c] = fma(s, qv, sums.q[c]);
      });
      if (ahead && j == 0) {
        for (size_t b = 0; b < J * kLanes * sizeof(T); b += 64) {
          prefetch(reinterpret_cast<const char*>(ahead + i * s_k) + b);
        }
      }
    }
    unrolled<J>(GDN_EACH(c) {
      store_lanes(P + j * ld + c * kLanes, sums.k[c], lanes);
      store_lanes(Q + j * ld + c * kLanes, sums.q[c], lanes);
    });
  }
}

// The entries that a head folds into its base.
struct Fold {
  int64_t n;                                            // entries that count
  float base;                                           // weight of the base
  int64_t key_row[kMaxWindow], update_row[kMaxWindow];  // of entry p in `keys` and `updates`
  const float* keys;                                    // [slot][padded(K)]
  float* updates;                                       // [entry][ld], times their weights
  int64_t ld;
};
// The factors of an entry across the lines of a tile: entries are `s_p` apart, lines `s_n`.
struct Across {
  const float* x;
  int64_t s_p, s_n;
};

// One tile of the fold: `along` the contiguous direction of the pool, `across` N lines.
// S[line][i] = base * S[line][i] + sum_p across[p][line] * along[p][i].
template <int N, int J, class T, class Lanes>
GDN_INLINE void fold_tile(T* S, int64_t stride, const Fold& f, const float* along,
                          const int64_t* along_row, Across across, Lanes lanes) {
  F acc[N][J];
  const F base = broadcast(f.base);
  unrolled<N>(GDN_EACH(n) {
    unrolled<J>(GDN_EACH(j) {
      acc[n][j] = f.base == 0.f ? zero() : base * load_lanes(S + n * stride + j * kLanes, lanes);
    });
  });
  for (int64_t p = 0; p < f.n; ++p) {
    F x[J];
    unrolled<J>(GDN_EACH(j) { x[j] = load_lanes(along + along_row[p] + j * kLanes, lanes); });
    unrolled<N>(GDN_EACH(n) {
      const F c = broadcast(across.x[p * across.s_p + n * across.s_n]);
      unrolled<J>(GDN_EACH(j) { acc[n][j] = fma(c, x[j], acc[n][j]); });
    });
  }
  unrolled<N>(GDN_EACH(n) {
    unrolled<J>(GDN_EACH(j) { store_lanes(S + n * stride + j * kLanes, acc[n][j], lanes); });
  });
}
// N lines; a tile takes a quarter or half of the registers, whatever the instruction set.
template <int N, class T>
GDN_INLINE void fold_lines(T* S, int64_t stride, int64_t length, const Fold& f, const float* along,
                           const int64_t* along_row, Across across) {
  using Full = std::integral_constant<int, kLanes>;
  int64_t i = 0;
  for (; i + kFoldVectors * kLanes <= length; i += kFoldVectors * kLanes) {
    fold_tile<N, kFoldVectors>(S + i, stride, f, along + i, along_row, across, Full());
  }
  for (; i + kLanes <= length; i += kLanes) {
    fold_tile<N, 1>(S + i, stride, f, along + i, along_row, across, Full());
  }
  if (i < length) {
    fold_tile<N, 1>(S + i, stride, f, along + i, along_row, across, static_cast<int>(length - i));
  }
}
template <class T>
static void fold_columns(T* S, int64_t s_k, int64_t rows, int64_t K, const Fold& f) {
  float across[kMaxWindow * 4];
  int64_t i = 0;
  for (; i + 4 <= K; i += 4) {
    for (int64_t p = 0; p < f.n; ++p) {
      std::memcpy(across + p * 4, f.keys + f.key_row[p] + i, 4 * sizeof(float));
    }
    fold_lines<4>(S + i * s_k, s_k, rows, f, f.updates, f.update_row, {across, 4, 1});
  }
  for (; i < K; ++i) {
    for (int64_t p = 0; p < f.n; ++p) across[p] = f.keys[f.key_row[p] + i];
    fold_lines<1>(S + i * s_k, s_k, rows, f, f.updates, f.update_row, {across, 1, 1});
  }
}

// Rows [first, first + rows) of a head. `ring` [slot][padded(K)] holds the keys, `weights` are
// those of weigh(), `wu` [entry][padded(rows)] is scratch.
static void prepare_fold(const Window& w, int64_t row, int64_t h, int64_t first, int64_t rows,
                         int64_t K, const Entries& e, const float* ring, const float* weights,
                         float* wu, Fold& f) {
  f.n = 0;
  f.base = weights[e.fill];
  f.keys = ring;
  f.updates = wu;
  f.ld = padded(rows);
  with_type(w.u_dtype, [&](auto* type) {
    using U = std::remove_pointer_t<decltype(type)>;
    const U* u = window_updates<U>(w, row, h) + first;
    for (int64_t p = 0; p < e.fill; ++p) {
      if (weights[p] == 0.f) continue;
      const int64_t slot = slot_of(e, w.R, p);
      f.key_row[f.n] = slot * padded(K);
      f.update_row[f.n] = f.n * f.ld;
      const F weight = broadcast(weights[p]);
      for_lanes(rows, [&](int64_t i, auto lanes) {
        store(wu + f.n * f.ld + i, weight * load_lanes(u + slot * w.su_r + i, lanes));
      });
      ++f.n;
    }
  });
}

// Folds where there is something to fold, and then, with tokens, P and Q: rows are multiplied while
// they are in the cache. `next`: the base the thread reads after this one, or null.
//
// Rows are taken from four streams, a quarter of the base apart: what limits a thread that only
// reads is the latency of its misses, those in the page tables above all, and those of separate
// streams overlap. Each stream asks for its lines a little ahead; but on Intel one line of every
// page of the next base is asked for at once, so that the walks overlap too
// (docs/tried/windows.md).
template <class T>
static void base_products(const StatePool& pool, T* S, int64_t rows, int64_t K, const Fold* fold,
                          const KeyQuery* x, int64_t tokens, float* P, float* Q, int64_t ld,
                          const T* next, TwoRequests* asking) {
  if (pool.s_k == 1) {
    const int64_t length = rows / kRowBlock, pitch = length * pool.s_v;
    const int64_t row_bytes = K * sizeof(T);
    const int64_t lead = row_bytes < kLeadBytes ? kLeadBytes / row_bytes : 1;
    const int64_t page = row_bytes < kPageBytes ? kPageBytes / row_bytes : 1;
    if (kTouchesPages && next && tokens > 0) {
      for (int64_t r = 0; r < rows; r += page) prefetch_l2(next + r * pool.s_v);
    }
    for (int64_t r = 0; r < length; ++r) {
      T* block = S + r * pool.s_v;
      if (fold) {
        fold_lines<kRowBlock>(block, pitch, K, *fold, fold->keys, fold->key_row,
                              {fold->updates + r, fold->ld, length});
      }
      if (tokens == 0) continue;
      const T* ahead = r + lead < length ? block + lead * pool.s_v
                       : next            ? next + (r + lead - length) * pool.s_v
                                         : nullptr;
      product_rows<kRowBlock>(block, pitch, K, x, tokens, P + r, Q + r, ld, length, ahead);
      asking->ask();
    }
    for (int64_t r = length * kRowBlock; r < rows; ++r) {
      T* row = S + r * pool.s_v;
      if (fold) {
        fold_lines<1>(row, pool.s_v, K, *fold, fold->keys, fold->key_row,
                      {fold->updates + r, fold->ld, 0});
      }
      if (tokens == 0) continue;
      product_rows<1>(row, pool.s_v, K, x, tokens, P + r, Q + r, ld, 0, (const T*)nullptr);
    }
    return;
  }
  if (fold) fold_columns(S, pool.s_k, rows, K, *fold);
  if (tokens == 0) return;
  using Full = std::integral_constant<int, kLanes>;
  constexpr int64_t block = kColumnVectors * kLanes;
  int64_t c = 0;
  for (; c + block <= rows; c += block) {
    const T* ahead = c + 2 * block <= rows ? S + c + block : next;
    product_columns<kColumnVectors>(S + c, pool.s_k, K, x, tokens, P + c, Q + c, ld, ahead, Full());
  }
  for (; c + kLanes <= rows; c += kLanes) {
    product_columns<1>(S + c, pool.s_k, K, x, tokens, P + c, Q + c, ld, (const T*)nullptr, Full());
  }
  if (c < rows) {
    product_columns<1>(S + c, pool.s_k, K, x, tokens, P + c, Q + c, ld, (const T*)nullptr,
                       static_cast<int>(rows - c));
  }
}
