// The gated delta rule, token by token, state in place.
// Included inside the namespace of one instruction set, after rows.h.
//
// Both products with the state read the *old* state (u from S k, o from S q and k.q), so a token
// costs one pass that reads a block of rows and one that rewrites it while it is still in L1. Rows
// of V are independent of each other over all tokens: a task is (sequence, value head, block of
// rows), and what a row computes does not depend on the block or the thread it falls into.

// A row's products need the whole row before it can be rewritten, so a block alone leaves the
// memory idle while it computes. The two passes are therefore interleaved: the rewrite of one block
// and the products of the next share a loop, and rows further ahead are prefetched. What was
// measured is in docs/tried/cpu.md.

// Rows ahead of the products that are asked for, into L2. For 16-bit rows of 128, 5 KB: on Zen 4, 2
// KB and 8 KB took 1.25 and 1.4 times as long, while 32-bit rows had no such optimum.
template <class T>
constexpr int64_t kPrefetchRows = sizeof(T) == 4 ? 32 : 20;
// Rows ahead where 32-bit rows are asked for once more: a request that finds the core's queues full
// is dropped. 16-bit rows gained nothing by it.
constexpr int64_t kAgainRows = 8;
// On Intel the whole block that a thread takes next is asked for instead, evenly over the steps of
// this one and from its four quarters in turns: their misses overlap, those in the page tables too,
// and L2 has room for both.
constexpr bool kAsksForNext = kIntel;
constexpr int kRowBlock = 4;          // rows a step: 8 independent sums hide the FMA latency
constexpr int kColumnVectors = 4;     // the same for the transposed pool
constexpr int64_t kScratchRows = 16;  // rows held in f32 over the tokens of a call

// What one token of one head contributes, the same for every row.
struct TokenInput {
  const KeyQuery* kq;
  const float* v;  // [V]
  float decay, beta, scale;
};

// --- rows of K contiguous elements, s_v apart

template <int R>
struct RowSums {
  F k[R], q[R];
};

// One step of the products S k and S q of R rows.
template <int R, class T, class Lanes>
GDN_INLINE void add_products(const T* S, int64_t s_v, F k, F q, RowSums<R>& sums, Lanes lanes) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const F s = load_lanes(S + r * s_v, lanes);
    sums.k[r] = fma(s, k, sums.k[r]);
    sums.q[r] = fma(s, q, sums.q[r]);
  }
}

// One step of S = decay * S + u k^T of R rows.
template <int R, class T, class Lanes>
GDN_INLINE void rewrite(T* S, int64_t s_v, F k, const F* u, F decay, Lanes lanes) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    T* p = S + r * s_v;
    store_lanes(p, fma(u[r], k, decay * load_lanes(p, lanes)), lanes);
  }
}

// From the products with the old rows: outputs, and u for the rewrite. Four floats of v are read,
// whatever R.
template <int R>
GDN_INLINE void finish_rows(const RowSums<R>& sums, const TokenInput& x, const float* v, float* o,
                            F* u) {
  F k_dot, q_dot;
  if constexpr (R == 4) {
    k_dot = quad_sums(sums.k[0], sums.k[1], sums.k[2], sums.k[3]);
    q_dot = quad_sums(sums.q[0], sums.q[1], sums.q[2], sums.q[3]);
  } else {
    k_dot = quad_sums(sums.k[0], sums.k[R - 1], sums.q[0], sums.q[R - 1]);
    q_dot = quad_swap(k_dot);
  }
  const float gain = x.beta * x.decay;
  const F e = fma(broadcast(-gain), k_dot, broadcast(x.beta) * load_quad(v));
  const F out = fma(broadcast(x.scale * x.kq->kq), e, broadcast(x.scale * x.decay) * q_dot);
  __builtin_memcpy(o, &out, R * sizeof(float));
  u[0] = quad_broadcast<0>(e);
  if constexpr (R > 1) u[1] = quad_broadcast<1>(e);
  if constexpr (R > 2) {
    u[2] = quad_broadcast<2>(e);
    u[3] = quad_broadcast<3>(e);
  }
}

// R rows of N registers each, held from the products to the rewrite: every element is loaded,
// widened and stored once. Out-of-order execution overlaps the reduction of one block with the
// next. ask(offset) is called for every line of the rows, counted in bytes.
template <int R, int N, class T, class Ask>
GDN_INLINE void step_held(T* S, int64_t s_v, const TokenInput& x, const float* v, float* o,
                          Ask ask) {
  const float *k = x.kq->k, *q = x.kq->q;
  F s[R][N];
  constexpr int chains = N >= 8 ? 2 : 1;  // of additions, a product
  RowSums<R> part[2] = {};
#pragma GCC unroll 16
  for (int i = 0; i < N; i += 2) {
    const F k0 = load(k + i * kLanes), k1 = load(k + (i + 1) * kLanes);
    const F q0 = load(q + i * kLanes), q1 = load(q + (i + 1) * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      load2(S + r * s_v + i * kLanes, s[r][i], s[r][i + 1]);
      RowSums<R>& second = part[chains - 1];
      part[0].k[r] = fma(s[r][i], k0, part[0].k[r]);
      part[0].q[r] = fma(s[r][i], q0, part[0].q[r]);
      second.k[r] = fma(s[r][i + 1], k1, second.k[r]);
      second.q[r] = fma(s[r][i + 1], q1, second.q[r]);
#pragma GCC unroll 2
      for (size_t line = 0; line < 2 * kLanes * sizeof(T); line += 64) {
        ask((r * N + i) * kLanes * sizeof(T) + line);
      }
    }
  }
  if constexpr (chains == 2) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      part[0].k[r] = part[0].k[r] + part[1].k[r];
      part[0].q[r] = part[0].q[r] + part[1].q[r];
    }
  }
  F u[R];
  finish_rows(part[0], x, v, o, u);
  const F decay = broadcast(x.decay);
#pragma GCC unroll 16
  for (int i = 0; i < N; i += 2) {
    const F k0 = load(k + i * kLanes), k1 = load(k + (i + 1) * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      store2(S + r * s_v + i * kLanes, fma(u[r], k0, decay * s[r][i]),
             fma(u[r], k1, decay * s[r][i + 1]));
    }
  }
}

#if GDN_SIMD_AVX512BF16
// The same with the products in bfloat16 (keys and queries rounded, sums in f32): four rows, and
// the state is read again for the rewrite.
template <int N, class Ask>
GDN_INLINE void step_fast(bf16_t* S, int64_t s_v, const TokenInput& x, const float* v, float* o,
                          Ask ask) {
  RowSums<4> sums = {};
#pragma GCC unroll 8
  for (int i = 0; i < N; i += 2) {
    const __m512bh k = (__m512bh)_mm512_load_si512(x.kq->k16 + i * kLanes);
    const __m512bh q = (__m512bh)_mm512_load_si512(x.kq->q16 + i * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const __m512bh s = (__m512bh)_mm512_loadu_si512(S + r * s_v + i * kLanes);
      sums.k[r] = _mm512_dpbf16_ps(sums.k[r], s, k);
      sums.q[r] = _mm512_dpbf16_ps(sums.q[r], s, q);
      ask((r * N + i) * kLanes * sizeof(bf16_t));
    }
  }
  F u[4];
  finish_rows(sums, x, v, o, u);
  const F decay = broadcast(x.decay);
#pragma GCC unroll 8
  for (int i = 0; i < N; i += 2) {
    const F k0 = load(x.kq->k + i * kLanes), k1 = load(x.kq->k + (i + 1) * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      bf16_t* p = S + r * s_v + i * kLanes;
      F s0, s1;
      load2(p, s0, s1);
      store2(p, fma(u[r], k0, decay * s0), fma(u[r], k1, decay * s1));
    }
  }
}
#endif

constexpr int kHeldRegisters = 16;  // of 32: the rest holds sums, k and q

template <int N, bool asks, class T>
static void step_row_range_held(T* S, int64_t s_v, int64_t n, const TokenInput& x, const float* v,
                                float* o, const T* next) {
  constexpr int R = kHeldRegisters / N;
  int64_t r = 0;
  // What a stream that begins `from` rows further and ends at `end` asks for at its row i, `lead`
  // rows ahead.
  auto ahead_of = [&](int64_t from, int64_t i, int64_t end, int64_t lead) {
    const int64_t target = i + lead;
    return target < end ? S + (from + target) * s_v
           : next       ? next + (from + target - end) * s_v
                        : S + (from + i) * s_v;
  };
  // The requests of a step of `rows` rows from row i on: a quarter of them in each quarter of the
  // next block.
  auto of_next = [&](int64_t i, auto rows) {
    constexpr int64_t row_bytes = N * kLanes * sizeof(T), share = rows * row_bytes / 4;
    const int64_t at = i * row_bytes / 4, pitch = s_v * sizeof(T);
    const char* from = reinterpret_cast<const char*>(next ? next : S);
    from += at / row_bytes * pitch + at % row_bytes;
    const int64_t quarter = next ? n / 4 * pitch : 0;
    return [=](int64_t offset) __attribute__((always_inline)) {
      if (asks) prefetch_l2(from + offset / share * quarter + offset % share);
    };
  };
#if GDN_SIMD_AVX512BF16
  if constexpr (std::is_same_v<T, bf16_t>) {
    // Rows come in fours here whatever the split into tasks, so a row's path does not depend on it.
    for (; x.kq->fast && r + 4 <= n; r += 4) {
      if constexpr (kAsksForNext) {
        step_fast<N>(S + r * s_v, s_v, x, v + r, o + r,
                     of_next(r, std::integral_constant<int, 4>()));
      } else {
        const auto* ahead = reinterpret_cast<const char*>(ahead_of(0, r, n, kPrefetchRows<T>));
        step_fast<N>(S + r * s_v, s_v, x, v + r, o + r,
                     [=](int64_t at) __attribute__((always_inline)) { prefetch_l2(ahead + at); });
      }
    }
  }
#endif
  // Two streams of 32-bit rows took 0.87 to 0.97 of the time of one on Zen 4, of 16-bit rows 1.25.
  constexpr int streams = sizeof(T) == 4 && !kAsksForNext ? 2 : 1;
  const int64_t part = (n - r) / (streams * R) * R;
  for (int64_t i = r; i < r + part; i += R) {
#pragma GCC unroll 2
    for (int j = 0; j < streams; ++j) {
      const int64_t at = i + j * part;
      if constexpr (kAsksForNext) {
        step_held<R, N>(S + at * s_v, s_v, x, v + at, o + at,
                        of_next(at, std::integral_constant<int, R>()));
      } else {
        const auto* ahead =
            reinterpret_cast<const char*>(ahead_of(j * part, i, r + part, kPrefetchRows<T>));
        const auto* again =
            reinterpret_cast<const char*>(ahead_of(j * part, i, r + part, kAgainRows));
        step_held<R, N>(S + at * s_v, s_v, x, v + at, o + at,
                        [=](int64_t at) __attribute__((always_inline)) {
                          if (!asks) return;
                          prefetch_l2(ahead + at);
                          if (sizeof(T) == 4) prefetch_l2(again + at);
                        });
      }
    }
  }
  r += streams * part;
  for (; r < n; ++r) {
    T* row = S + r * s_v;
    step_held<1, N>(row, s_v, x, v + r, o + r, [](int64_t) {});
  }
}

// Rows [0, n) of a head. `next`: the rows that follow in memory order of use, or null. `asks`: they
// are not in the cache yet.
template <bool asks = true, class T>
static void step_row_range(T* S, int64_t s_v, int64_t n, int64_t K, const TokenInput& x,
                           const float* v, float* o, const T* next) {
  if constexpr (kLanes == 16) {
    if (K == 128) return step_row_range_held<8, asks>(S, s_v, n, x, v, o, next);
    if (K == 64) return step_row_range_held<4, asks>(S, s_v, n, x, v, o, next);
    if (K == 256) return step_row_range_held<16, asks>(S, s_v, n, x, v, o, next);
  }
  const float *k = x.kq->k, *q = x.kq->q;
  const F decay = broadcast(x.decay);
  const int64_t whole = n / kRowBlock * kRowBlock;
  RowSums<kRowBlock> sums = {};
  F u[kRowBlock];
  if (whole > 0) {
    for_lanes(K, [&](int64_t i, auto lanes) {
      add_products(S + i, s_v, load(k + i), load(q + i), sums, lanes);
    });
  }
  for (int64_t r = 0; r < whole; r += kRowBlock) {
    finish_rows(sums, x, v + r, o + r, u);
    T* block = S + r * s_v;
    if (r + kRowBlock == whole) {
      for_lanes(K, [&](int64_t i, auto lanes) {
        rewrite<kRowBlock>(block + i, s_v, load(k + i), u, decay, lanes);
      });
      break;
    }
    const T* ahead = block;  // a harmless address where there is nothing to ask for
    if (next) {
      const int64_t target = r + kRowBlock + kPrefetchRows<T>;
      ahead = target < n ? S + target * s_v : next + (target - n) * s_v;
    }
    T* coming = block + kRowBlock * s_v;
    sums = {};
    for_lanes(K, [&](int64_t i, auto lanes) {
      const F kv = load(k + i), qv = load(q + i);
      add_products(coming + i, s_v, kv, qv, sums, lanes);
      rewrite<kRowBlock>(block + i, s_v, kv, u, decay, lanes);
      // The block ahead, in memory order and evenly over the loop: requests in any other order, or
      // many at once, cost a quarter of the time (rows are taken to be K apart here).
#pragma GCC unroll 4
      for (size_t line = 0; line < kRowBlock * kLanes * sizeof(T); line += 64) {
        prefetch_l2(reinterpret_cast<const char*>(ahead + kRowBlock * i) + line);
      }
    });
  }
  for (int64_t r = whole; r < n; ++r) {
    RowSums<1> one = {};
    T* row = S + r * s_v;
    for_lanes(K, [&](int64_t i, auto lanes) {
      add_products(row + i, s_v, load(k + i), load(q + i), one, lanes);
    });
    finish_rows(one, x, v + r, o + r, u);
    for_lanes(
        K, [&](int64_t i, auto lanes) { rewrite<1>(row + i, s_v, load(k + i), u, decay, lanes); });
  }
}

// --- the transposed pool: K rows of V contiguous elements, s_k apart; J registers of columns a
// step

template <int J>
struct ColumnSums {
  F k[J], q[J];
};

template <int J, class T, class Lanes>
GDN_INLINE void load_vectors(const T* S, F* s, Lanes lanes) {
  if constexpr (J == 1) {
    s[0] = load_lanes(S, lanes);
  } else {
#pragma GCC unroll 4
    for (int j = 0; j < J; j += 2) load2(S + j * kLanes, s[j], s[j + 1]);
  }
}

template <int J, class T, class Lanes>
GDN_INLINE void add_column_products(const T* S, F k, F q, ColumnSums<J>& sums, Lanes lanes) {
  F s[J];
  load_vectors<J>(S, s, lanes);
#pragma GCC unroll 4
  for (int j = 0; j < J; ++j) {
    sums.k[j] = fma(s[j], k, sums.k[j]);
    sums.q[j] = fma(s[j], q, sums.q[j]);
  }
}

template <int J, class T, class Lanes>
GDN_INLINE void rewrite_columns(T* S, F k, const F* u, F decay, Lanes lanes) {
  F s[J];
  load_vectors<J>(S, s, lanes);
#pragma GCC unroll 4
  for (int j = 0; j < J; ++j) s[j] = fma(u[j], k, decay * s[j]);
  if constexpr (J == 1) {
    store_lanes(S, s[0], lanes);
  } else {
#pragma GCC unroll 4
    for (int j = 0; j < J; j += 2) store2(S + j * kLanes, s[j], s[j + 1]);
  }
}

template <int J, class Lanes>
GDN_INLINE void finish_columns(const ColumnSums<J>& sums, const TokenInput& x, const float* v,
                               float* o, F* u, Lanes lanes) {
  const F decay = broadcast(x.decay), beta = broadcast(x.beta), scale = broadcast(x.scale);
  const F kq = broadcast(x.kq->kq);
#pragma GCC unroll 4
  for (int j = 0; j < J; ++j) {
    u[j] = beta * (load_lanes(v + j * kLanes, lanes) - decay * sums.k[j]);
    store_lanes(o + j * kLanes, scale * fma(kq, u[j], decay * sums.q[j]), lanes);
  }
}

// Up to one register of columns.
template <class T, class Lanes>
GDN_INLINE void step_few_columns(T* S, int64_t s_k, int64_t K, const TokenInput& x, const float* v,
                                 float* o, Lanes lanes) {
  const float *k = x.kq->k, *q = x.kq->q;
  ColumnSums<1> sums = {};
  F u[1];
  for (int64_t i = 0; i < K; ++i) {
    add_column_products(S + i * s_k, broadcast(k[i]), broadcast(q[i]), sums, lanes);
  }
  finish_columns(sums, x, v, o, u, lanes);
  const F decay = broadcast(x.decay);
  for (int64_t i = 0; i < K; ++i) {
    rewrite_columns<1>(S + i * s_k, broadcast(k[i]), u, decay, lanes);
  }
}

template <int bytes>
GDN_INLINE void prefetch_lines(const char* p) {
#pragma GCC unroll 8
  for (int at = 0; at < bytes; at += 64) prefetch_l2(p + at);
}

// A head whose K rows of J registers lie one behind the other. The sums of a whole row fit the
// registers (16 lanes), so the head is read once in memory order for the products and once more,
// out of L2, for the rewrite.
//
// Of 16-bit rows every step of both passes asks for half a row, in memory order and 16 halves
// ahead. Of 32-bit rows the rewrite, during which memory would rest, asks for two lines of each
// step, 16 KB, of the next head. The others come by the hardware's prefetcher, which keeps more
// lines in flight than requests do but starts anew in every page: the products ask for two lines of
// the page after next, and for what was dropped or not asked for by then, a page ahead.
template <int J, class T>
static void step_whole_rows(T* S, int64_t K, const TokenInput& x, const float* v, float* o,
                            const T* next) {
  constexpr int64_t width = J * kLanes, row_bytes = width * sizeof(T);
  constexpr bool narrow_rows = sizeof(T) == 2;
  constexpr int64_t half = row_bytes / 2, lead = 16;                  // of narrow rows
  constexpr int64_t line = 64, page = 4096, rows = page / row_bytes;  // of the others
  const char* here = reinterpret_cast<const char*>(S);
  const char* after = next ? reinterpret_cast<const char*>(next) : here;  // harmless
  // The t-th of 2 K equal shares of the next head, line by line from its quarters in turns.
  auto ask_next = [&](int64_t t) __attribute__((always_inline)) {
    constexpr int64_t lines = row_bytes / 128;
    static_assert(4 % lines == 0);
    const int64_t quarter = next ? K * row_bytes / 4 : 0, first = t * lines % 4;
    const char* from = after + t * lines / 4 * line + first * quarter;
    for (int i = 0; i < lines; ++i) prefetch_l2(from + i * quarter);
  };

  const float *k = x.kq->k, *q = x.kq->q;
  ColumnSums<J> sums = {};
  for (int64_t i = 0; i < K; ++i) {
    const F kv = broadcast(k[i]), qv = broadcast(q[i]);
    const T* row = S + i * width;
#pragma GCC unroll 8
    for (int j = 0; j < J; j += 2) {
      F a, b;
      load_split(row + j * kLanes, a, b);
      sums.k[j] = fma(a, kv, sums.k[j]);
      sums.q[j] = fma(a, qv, sums.q[j]);
      sums.k[j + 1] = fma(b, kv, sums.k[j + 1]);
      sums.q[j + 1] = fma(b, qv, sums.q[j + 1]);
    }
    if constexpr (kAsksForNext) {
      ask_next(i);
    } else if constexpr (narrow_rows) {
      const int64_t to = K + i + lead;
      prefetch_lines<half>(to < 2 * K ? here + to * half : after + (to - 2 * K) * half);
    } else {
      const int64_t in_page = i % rows, coming = i - in_page + 2 * rows;
      if (in_page < 2 && coming < K) {
        prefetch_lines<line>(here + coming * row_bytes + in_page * line);
      }
      if (i + rows < K) prefetch_lines<row_bytes>(here + (i + rows) * row_bytes);
    }
  }

  const F decay = broadcast(x.decay), beta = broadcast(x.beta), scale = broadcast(x.scale);
  const F key_query = broadcast(x.kq->kq);
  F u[J];
#pragma GCC unroll 8
  for (int j = 0; j < J; j += 2) {
    F v0 = load(v + j * kLanes), v1 = load(v + (j + 1) * kLanes);
    to_split<T>(v0, v1);
    u[j] = beta * (v0 - decay * sums.k[j]);
    u[j + 1] = beta * (v1 - decay * sums.k[j + 1]);
    F o0 = scale * fma(key_query, u[j], decay * sums.q[j]);
    F o1 = scale * fma(key_query, u[j + 1], decay * sums.q[j + 1]);
    from_split<T>(o0, o1);
    store(o + j * kLanes, o0);
    store(o + (j + 1) * kLanes, o1);
  }

  for (int64_t i = 0; i < K; ++i) {
    const F kv = broadcast(k[i]);
    T* row = S + i * width;
#pragma GCC unroll 8
    for (int j = 0; j < J; j += 2) {
      F a, b;
      load_split(row + j * kLanes, a, b);
      store_split(row + j * kLanes, fma(u[j], kv, decay * a), fma(u[j + 1], kv, decay * b));
    }
    if constexpr (kAsksForNext) {
      ask_next(K + i);
    } else if constexpr (narrow_rows) {
      prefetch_lines<half>(after + (i + lead) * half);
    } else {
      prefetch_lines<2 * line>(after + i * 2 * line);
    }
  }
}

template <class T>
static void step_column_range(T* S, int64_t s_k, int64_t n, int64_t K, const TokenInput& x,
                              const float* v, float* o, const T* next) {
  if constexpr (kLanes == 16) {
    if (n == 128 && s_k == n) return step_whole_rows<8>(S, K, x, v, o, next);
    if (n == 64 && s_k == n) return step_whole_rows<4>(S, K, x, v, o, next);
  }
  constexpr std::integral_constant<int, kLanes> full;
  constexpr int J = kColumnVectors;
  constexpr int64_t block = J * kLanes;
  const float *k = x.kq->k, *q = x.kq->q;
  const F decay = broadcast(x.decay);
  const int64_t whole = n / block * block;
  ColumnSums<J> sums = {};
  F u[J];
  if (whole > 0) {
    for (int64_t i = 0; i < K; ++i) {
      add_column_products(S + i * s_k, broadcast(k[i]), broadcast(q[i]), sums, full);
    }
  }
  for (int64_t c = 0; c < whole; c += block) {
    finish_columns(sums, x, v + c, o + c, u, full);
    T* here = S + c;
    // Columns two blocks ahead, or those of the next head: one line or two of every row.
    const T* ahead = c + 3 * block <= n ? here + 2 * block
                     : next             ? next + (c + 2 * block - n)
                                        : here;
    auto prefetch_row = [&](int64_t i) {
#pragma GCC unroll 4
      for (size_t j = 0; j < block * sizeof(T); j += 64) {
        prefetch_l2(reinterpret_cast<const char*>(ahead + i * s_k) + j);
      }
    };
    if (c + block == whole) {
      for (int64_t i = 0; i < K; ++i) {
        rewrite_columns<J>(here + i * s_k, broadcast(k[i]), u, decay, full);
        prefetch_row(i);
      }
      break;
    }
    sums = {};
    for (int64_t i = 0; i < K; ++i) {
      const F kv = broadcast(k[i]), qv = broadcast(q[i]);
      add_column_products(here + block + i * s_k, kv, qv, sums, full);
      rewrite_columns<J>(here + i * s_k, kv, u, decay, full);
      prefetch_row(i);
    }
  }
  int64_t c = whole;
  for (; c + kLanes <= n; c += kLanes) step_few_columns(S + c, s_k, K, x, v + c, o + c, full);
  if (c < n) step_few_columns(S + c, s_k, K, x, v + c, o + c, static_cast<int>(n - c));
}

// Copies rows [r0, r0 + n) of a head between the pool (either layout) and f32 scratch, whose rows
// of K (row layout) or n columns (transposed) are `s` apart.
template <class T>
static void load_block(const T* S, int64_t s_v, int64_t s_k, int64_t n, int64_t K, float* scratch,
                       int64_t s) {
  if (s_k == 1) {
    for (int64_t r = 0; r < n; ++r) {
      for_lanes(K, [&](int64_t i, auto lanes) {
        store_lanes(scratch + r * s + i, load_lanes(S + r * s_v + i, lanes), lanes);
      });
    }
  } else {
    for (int64_t i = 0; i < K; ++i) {
      for_lanes(n, [&](int64_t c, auto lanes) {
        store_lanes(scratch + i * s + c, load_lanes(S + i * s_k + c, lanes), lanes);
      });
    }
  }
}
template <class T>
static void store_block(const float* scratch, int64_t s, T* S, int64_t s_v, int64_t s_k, int64_t n,
                        int64_t K) {
  if (s_k == 1) {
    for (int64_t r = 0; r < n; ++r) {
      for_lanes(K, [&](int64_t i, auto lanes) {
        store_lanes(S + r * s_v + i, load_lanes(scratch + r * s + i, lanes), lanes);
      });
    }
  } else {
    for (int64_t i = 0; i < K; ++i) {
      for_lanes(n, [&](int64_t c, auto lanes) {
        store_lanes(S + i * s_k + c, load_lanes(scratch + i * s + c, lanes), lanes);
      });
    }
  }
}

// Rows of V a task takes when heads alone do not feed every thread.
static int64_t rows_per_task(int64_t heads, int64_t V, int threads) {
  constexpr int64_t unit =
      kRowBlock > kColumnVectors * kLanes ? kRowBlock : kColumnVectors * kLanes;
  if (heads == 0) return unit;
  const int64_t want = heads >= 4 * threads ? 1 : (4 * threads + heads - 1) / heads;
  const int64_t rows = (V + want - 1) / want;
  return (rows + unit - 1) / unit * unit;
}

template <class T>
GDN_INLINE T* head_of(const StatePool& s, int64_t row, int64_t h) {
  return static_cast<T*>(s.ptr) + row * s.s_p + h * s.s_h;
}

// One block of rows of one value head, over all tokens of a sequence that is alive.
struct HeadRows {
  int64_t n, h, first, rows;
};

// `source(t)` gives a token's TokenInput (v from the block's first row on), `sink(t, first, rows,
// o)` takes its outputs. `next`: the state the thread reads after this block, or null.
template <class T, class Source, class Sink>
GDN_INLINE void recurrent_rows(const StatePool& pool, const Sequences& seqs, const Sequence& seq,
                               const HeadRows& x, int64_t K, Source source, Sink sink,
                               const T* next) {
  const bool by_rows = pool.s_k == 1;
  float o[kMaxRow];
  auto target = [&](int64_t j) { return seqs.S > 0 ? at(seqs.state_indices, x.n, j) : seq.row; };

  if (seq.end - seq.start == 1 && target(0) == seq.row) {
    T* S = head_of<T>(pool, seq.row, x.h) + x.first * pool.s_v;
    const TokenInput token = source(seq.start);
    // A decay of zero clears the row whatever it held, infinities included.
    if (seq.fresh || token.decay == 0.f) {
      for (int64_t i = 0; i < (by_rows ? x.rows : K); ++i) {
        std::memset(S + i * (by_rows ? pool.s_v : pool.s_k), 0, (by_rows ? K : x.rows) * sizeof(T));
      }
    }
    if (by_rows) {
      step_row_range(S, pool.s_v, x.rows, K, token, token.v, o, next);
    } else {
      step_column_range(S, pool.s_k, x.rows, K, token, token.v, o, next);
    }
    sink(seq.start, x.first, x.rows, o);
    return;
  }

  // Several tokens: a block of rows stays in f32 from the first token to the last.
  alignas(64) float scratch[kColumnVectors * kLanes * kMaxRow];
  const int64_t unit = by_rows ? kScratchRows : kColumnVectors * kLanes;
  const int64_t s = by_rows ? padded(K) : unit;
  for (int64_t r0 = 0; r0 < x.rows; r0 += unit) {
    const int64_t rows = x.rows - r0 < unit ? x.rows - r0 : unit;
    const int64_t offset = (x.first + r0) * pool.s_v;
    const size_t bytes = sizeof(float) * (by_rows ? rows : K) * s;
    if (seq.fresh) {
      std::memset(scratch, 0, bytes);
    } else {
      load_block(head_of<T>(pool, seq.row, x.h) + offset, pool.s_v, pool.s_k, rows, K, scratch, s);
    }
    for (int64_t t = seq.start; t < seq.end; ++t) {
      const TokenInput token = source(t);
      if (token.decay == 0.f) std::memset(scratch, 0, bytes);
      if (by_rows) {
        step_row_range<false>(scratch, s, rows, K, token, token.v + r0, o, (const float*)nullptr);
      } else {
        step_column_range(scratch, s, rows, K, token, token.v + r0, o, (const float*)nullptr);
      }
      sink(t, x.first + r0, rows, o);
      const bool keep = seqs.S > 0 || t + 1 == seq.end;
      const int64_t row = keep ? target(t - seq.start) : -1;
      if (row >= 0) {
        store_block(scratch, s, head_of<T>(pool, row, x.h) + offset, pool.s_v, pool.s_k, rows, K);
      }
    }
  }
}

template <class T>
static void recurrent_typed(const RecurrentArgs& a, const Parallel& parallel) {
  const int64_t heads = a.seqs.N * a.HV;
  const int64_t rows = rows_per_task(heads, a.V, parallel.threads);
  const int64_t splits = (a.V + rows - 1) / rows;
  auto body = [&](int64_t begin, int64_t end) {
    KeyQuery kq;
    float v[kMaxRow];
    int64_t cached = -1;  // (token, key head) that kq holds
    const float zeros[kMaxRow] = {};
    for (int64_t task = begin; task < end; ++task) {
      const int64_t n = task / (a.HV * splits), h = task / splits % a.HV;
      const int64_t first = task % splits * rows;
      const int64_t count = a.V - first < rows ? a.V - first : rows;
      const Sequence seq = sequence_of(a.seqs, n);
      if (seq.row < 0) {
        for (int64_t t = seq.start; t < seq.end; ++t) {
          store_row(a.out, seq.b, t, h, first, count, zeros);
        }
        continue;
      }
      const T* next = nullptr;
      if (task + 1 < end) {
        const int64_t n1 = (task + 1) / (a.HV * splits), h1 = (task + 1) / splits % a.HV;
        const Sequence s1 = n1 == n ? seq : sequence_of(a.seqs, n1);
        if (s1.row >= 0) {
          next = head_of<T>(a.state, s1.row, h1) + (task + 1) % splits * rows * a.state.s_v;
        }
      }
      const int64_t hk = h / (a.HV / a.H);
      auto source = [&](int64_t t) {
        const int64_t key = (seq.b * a.seqs.T + t) * a.H + hk;
        if (cached != key) {
          load_row(a.k, seq.b, t, hk, a.K, kq.k);
          load_row(a.q, seq.b, t, hk, a.K, kq.q);
          finish_key_query(kq, a.K, a.l2norm, a.fast);
          cached = key;
        }
        load_row(from_column(a.v, first), seq.b, t, h, count, v);
        const TokenGates gates = token_gates(a.gates, seq.b, t, h);
        return TokenInput{&kq, v, gates.decay, gates.beta, a.scale};
      };
      auto sink = [&](int64_t t, int64_t r, int64_t rows_done, const float* o) {
        store_row(a.out, seq.b, t, h, r, rows_done, o);
      };
      recurrent_rows<T>(a.state, a.seqs, seq, {n, h, first, count}, a.K, source, sink, next);
    }
  };
  parallel_for(parallel, heads * splits, body);
}

static void recurrent(const RecurrentArgs& a, const Parallel& parallel) {
  with_type(a.state.dtype, [&](auto* type) {
    recurrent_typed<std::remove_pointer_t<decltype(type)>>(a, parallel);
  });
}
