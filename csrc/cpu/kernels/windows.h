// The recurrence over windows of pending rank-1 updates (docs/windows.md), with a base state
// (buffered, exact) or without one (low-rank).
// Included inside the namespace of one instruction set, after norm.h and decode.h.
//
// A task is (sequence, key head) with the value heads that share its keys, so that the window's
// keys are read once for all of them; with few such tasks it is one block of rows of one value
// head. Rows of V are independent, and every sum runs from the newest entry to the oldest whatever
// the slots are, so a row's bits depend neither on the task it falls into nor on where its window
// starts. Keys, gates and counts of the new entries are written when no task can read them any
// more.

constexpr int64_t kSegment = 64;      // tokens whose keys and products are held at a time
constexpr int64_t kLeadBytes = 2048;  // how far ahead a stream of the base asks for its lines
constexpr int64_t kPageBytes = 4096;
// Registers of a line that the fold holds, of four lines.
#if GDN_SIMD_AVX512 || GDN_SIMD_NEON
constexpr int kFoldVectors = 4;
#else
constexpr int kFoldVectors = 2;
#endif

// The live entries; entry p counts from the newest.
struct Entries {
  int64_t fill = 0, head = 0;
};
GDN_INLINE int64_t slot_of(const Entries& e, int64_t R, int64_t p) {
  const int64_t s = e.head + e.fill - 1 - p;
  return s >= R ? s - R : s;
}
// body(p, slot) for every live entry, newest first.
template <class Body>
GDN_INLINE void for_live(const Entries& e, int64_t R, Body body) {
  int64_t p = 0;
  if (e.fill == 0) return;
  for (int64_t s = slot_of(e, R, 0); p < e.fill && s >= 0; ++p, --s) body(p, s);
  for (int64_t s = R - 1; p < e.fill; ++p, --s) body(p, s);
}
// Makes room for one entry and returns its slot; a full window gives up its oldest.
GDN_INLINE int64_t append(Entries& e, int64_t R) {
  if (e.fill < R) {
    ++e.fill;
    return slot_of(e, R, 0);
  }
  const int64_t slot = e.head;
  e.head = slot + 1 == R ? 0 : slot + 1;
  return slot;
}

// What a call finds: nothing for a fresh sequence, else the entries that were not rejected.
GDN_INLINE Entries live_entries(const Window& w, const Sequence& seq, bool speculative) {
  if (seq.fresh) return {};
  const WindowCounts c = kept_entries(w.fill[seq.row * w.s_fill], speculative ? seq.accepted : -1);
  return {c.fill, c.head};
}

template <class T>
GDN_INLINE T* window_keys(const Window& w, int64_t row, int64_t hk) {
  return static_cast<T*>(w.k) + row * w.sk_p + hk * w.sk_h;
}
template <class T>
GDN_INLINE T* window_updates(const Window& w, int64_t row, int64_t h) {
  return static_cast<T*>(w.u) + row * w.su_p + h * w.su_h;
}
GDN_INLINE float* window_gates(const Window& w, int64_t row, int64_t h) {
  return w.g + row * w.sg_p + h * w.sg_h;
}

// --- tasks

// Value heads [h0, h1) of key head hk, rows [first, first + rows).
struct WindowTask {
  int64_t n, hk, h0, h1, first, rows;
};

// Pieces a key head falls into: all of it, or blocks of rows of one value head.
struct WindowPieces {
  int64_t rows, blocks, count;
  bool whole;
  WindowPieces(const RecurrentArgs& a, int threads) {
    const int64_t ratio = a.HV / a.H, tasks = a.seqs.N * a.H;
    whole = threads == 1 || tasks >= 4 * threads || tasks % threads == 0;
    rows = whole ? a.V : rows_per_task(tasks * ratio, a.V, threads);
    blocks = (a.V + rows - 1) / rows;
    count = whole ? 1 : ratio * blocks;
  }
  WindowTask task(const RecurrentArgs& a, int64_t i) const {
    const int64_t ratio = a.HV / a.H;
    if (whole) return {i / a.H, i % a.H, i % a.H * ratio, (i % a.H + 1) * ratio, 0, a.V};
    const int64_t key = i / count, piece = i % count, n = key / a.H, hk = key % a.H;
    const int64_t h = hk * ratio + piece / blocks, first = piece % blocks * rows;
    return {n, hk, h, h + 1, first, a.V - first < rows ? a.V - first : rows};
  }
};

// --- what will be read next: asked for while something else is computed

constexpr int64_t kPieceBytes = 512;  // what one request covers

// Where the live entries of a task lie, in pieces: bytes from the keys of its key head (pool 0) or
// from the updates of its first value head (pool 1). Key head and value heads take turns, each in
// the order in which its rows lie: streams in pages of their own. Tasks of one sequence share it.
struct EntryPieces {
  struct Piece {
    int64_t offset, pool;
  };
  static constexpr int64_t most = 512;  // what is beyond is not asked for
  Entries e;
  int64_t heads = 0, rows = 0, count = 0;
  bool wide = false;  // some row is longer than half a piece
  Piece piece[most];

  bool suits(const Entries& x, const WindowTask& task) const {
    return e.fill == x.fill && e.head == x.head && heads == task.h1 - task.h0 && rows == task.rows;
  }
  void set(const RecurrentArgs& a, const Entries& x, const WindowTask& task) {
    e = x;
    heads = task.h1 - task.h0;
    rows = task.rows;
    count = 0;
    const Window& w = a.window;
    const int64_t k_size = size_of(w.k_dtype), u_size = size_of(w.u_dtype);
    auto add = [&](int64_t offset, int64_t pool, int64_t bytes) {
      for (int64_t b = 0; b < bytes && count < most; b += kPieceBytes) {
        piece[count++] = {offset + b, pool};
      }
    };
    for (int64_t p = e.fill - 1; p >= 0; --p) {
      const int64_t slot = slot_of(e, w.R, p);
      add(slot * w.sk_r * k_size, 0, a.K * k_size);
      for (int64_t h = 0; h < heads; ++h) {
        add((h * w.su_h + slot * w.su_r) * u_size, 1, rows * u_size);
      }
    }
    wide = 2 * a.K * k_size > kPieceBytes || 2 * rows * u_size > kPieceBytes;
  }
};

// What a task will read: its first base, and its entries.
struct Upcoming {
  const void* state = nullptr;
  const char* pool[2] = {nullptr, nullptr};
  const EntryPieces* entries = nullptr;

  // False where there is nothing to read.
  bool set(const RecurrentArgs& a, const WindowTask& x, Entries* e) {
    *this = {};
    const Sequence seq = sequence_of(a.seqs, x.n, 0);
    if (seq.row < 0) return false;
    const StatePool& s = a.state;
    if (s.ptr) {
      state = static_cast<const char*>(s.ptr) +
              (seq.row * s.s_p + x.h0 * s.s_h + x.first * s.s_v) * size_of(s.dtype);
    }
    const Window& w = a.window;
    pool[0] =
        static_cast<const char*>(w.k) + (seq.row * w.sk_p + x.hk * w.sk_h) * size_of(w.k_dtype);
    pool[1] = static_cast<const char*>(w.u) +
              (seq.row * w.su_p + x.h0 * w.su_h + x.first) * size_of(w.u_dtype);
    *e = live_entries(w, seq, a.seqs.num_accepted.ptr != nullptr);
    return true;
  }
};

// The requests that are due from one task's entries. Loops take a copy, which stays in registers.
struct Requests {
  const EntryPieces::Piece *at = nullptr, *end = nullptr, *all = nullptr;
  int64_t part = 0;
  bool wide = false;
  const char* pool[2] = {nullptr, nullptr};

  Requests() = default;
  // Falling due in `parts` equal parts.
  Requests(const Upcoming& x, int64_t parts) {
    if (!x.entries) return;
    const EntryPieces& y = *x.entries;
    at = end = y.piece;
    all = y.piece + y.count;
    part = (y.count + parts - 1) / parts;
    wide = y.wide;
    pool[0] = x.pool[0];
    pool[1] = x.pool[1];
  }
  void due() { end = all - end < part ? all : end + part; }
  inline __attribute__((always_inline)) void ask() {
    if (at == end) return;
    const char* line = pool[at->pool] + at->offset;
    ++at;
    for (int64_t b = 0; b < kPieceBytes / 2; b += 64) prefetch_l2(line + b);
    if (!wide) return;
    for (int64_t b = kPieceBytes / 2; b < kPieceBytes; b += 64) prefetch_l2(line + b);
  }
};
struct TwoRequests {
  Requests next, second;

  void due() {
    next.due();
    second.due();
  }
  inline __attribute__((always_inline)) void ask() {
    second.ask();
    next.ask();
  }
  void go_on_from(const TwoRequests& copy) {
    next.at = copy.next.at;
    second.at = copy.second.at;
  }
  void rest() {
    while (next.at != next.end || second.at != second.end) ask();
  }
};

// The tasks [begin, end) of a thread seen from each in turn. While one is computed, the entries of
// the task after next are asked for, and once more those of the next: a request that finds the
// core's queues full is dropped. That is also why they are spread over a task. Where a base is
// read, the entries are few beside it and are asked for once.
class Ahead {
 public:
  Ahead(const RecurrentArgs& a, const WindowPieces& pieces, int64_t begin, int64_t end)
      : a_(a), pieces_(pieces), task_(begin), end_(end) {
    move_on();
    move_on();
  }
  // To be called after each task.
  void move_on() {
    next_ = second_;
    second_ = {};
    if (++task_ >= end_) return;
    const WindowTask x = pieces_.task(a_, task_);
    Entries e;
    if (!second_.set(a_, x, &e)) return;
    if (!next_.entries || !next_.entries->suits(e, x)) {
      latest_ = next_.entries == &entries_[0] ? &entries_[1] : &entries_[0];
      if (!latest_->suits(e, x)) latest_->set(a_, e, x);
    }
    second_.entries = latest_;
  }
  const void* state() const { return next_.state; }
  TwoRequests requests(int64_t parts) const {
    return {Requests(next_, parts), a_.state.ptr ? Requests() : Requests(second_, parts)};
  }

 private:
  const RecurrentArgs& a_;
  const WindowPieces& pieces_;
  int64_t task_;  // the last one that was looked at
  const int64_t end_;
  Upcoming next_, second_;
  EntryPieces entries_[2];
  EntryPieces* latest_ = &entries_[0];
};

// Products of every live key with the token's key and query, newest first.
template <class T>
static void key_dots(const T* keys, int64_t stride, const Entries& e, int64_t R, int64_t K,
                     const KeyQuery& x, float* dk, float* dq, TwoRequests& asking) {
  TwoRequests requests = asking;
  for (int64_t p = 0; p < e.fill; p += 4) {
    const T* row[4];
    for (int i = 0; i < 4; ++i) {
      row[i] = keys + slot_of(e, R, p + i < e.fill ? p + i : e.fill - 1) * stride;
    }
    RowSums<4> sums = {};
    for_lanes(K, [&](int64_t i, auto lanes) {
      const F kv = load(x.k + i), qv = load(x.q + i);
      unrolled<4>(GDN_EACH(r) {
        const F s = load_lanes(row[r] + i, lanes);
        sums.k[r] = fma(s, kv, sums.k[r]);
        sums.q[r] = fma(s, qv, sums.q[r]);
      });
    });
    for (int i = 0; i < 4; ++i) requests.ask();
    sum4(sums.k, dk + p);
    sum4(sums.q, dq + p);
  }
  asking.go_on_from(requests);
}

// For each of `heads` value heads, whose rows of g_ring are kMaxWindow and of w are `ld` apart,
// w[0, fill): what the live entries, newest first, weigh for a token of log decay g; w[fill]: what
// the base weighs. Where a weight is zero the entry is left out: what it holds must not matter. A
// head is one long chain of additions, so four go side by side.
static void weigh(const float* g_ring, const Entries& e, int64_t R, const float* g, int64_t heads,
                  float* w, int64_t ld) {
  for (int64_t h = 0; h < heads; h += 4) {
    const float* ring[4];
    float* out[4];
    float total[4];
    for (int i = 0; i < 4; ++i) {
      const int64_t head = h + i < heads ? h + i : heads - 1;
      ring[i] = g_ring + head * kMaxWindow;
      out[i] = w + head * ld;
      total[i] = g[head];
    }
    for_live(e, R, [&](int64_t p, int64_t slot) {
      unrolled<4>(GDN_EACH(i) {
        out[i][p] = total[i];
        total[i] += ring[i][slot];
      });
    });
    for (int i = 0; i < 4; ++i) {
      out[i][e.fill] = total[i];
      for (int64_t p = e.fill + 1; p % kLanes != 0; ++p) out[i][p] = 0.f;
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t p = 0; p <= e.fill; p += kLanes) store(w + h * ld + p, exp(load(w + h * ld + p)));
  }
}

// --- the base: products with keys and queries, and the fold

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
        if (fetch && i * sizeof(T) % 64 == 0) prefetch_l2(fetch + r * pitch + i);
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
// streams overlap. Each stream asks for its lines a little ahead; one line of every page of the
// next base is asked for at once, so that the walks overlap too (docs/tried/windows.md).
template <class T>
static void base_products(const StatePool& pool, T* S, int64_t rows, int64_t K, const Fold* fold,
                          const KeyQuery* x, int64_t tokens, float* P, float* Q, int64_t ld,
                          const T* next, TwoRequests* asking) {
  if (pool.s_k == 1) {
    const int64_t length = rows / kRowBlock, pitch = length * pool.s_v;
    const int64_t row_bytes = K * sizeof(T);
    const int64_t lead = row_bytes < kLeadBytes ? kLeadBytes / row_bytes : 1;
    const int64_t page = row_bytes < kPageBytes ? kPageBytes / row_bytes : 1;
    for (int64_t r = 0; next && tokens > 0 && r < rows; r += page) prefetch_l2(next + r * pool.s_v);
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

// --- one token of one value head

struct WindowToken {
  const float* weights;  // of weigh()
  Entries entries;
  const float *c, *d;  // weight * (k_i . k), weight * (k_i . q), newest first
  const float *P, *Q;  // base products of these rows, or null
  const float* v;
  float beta, kq, scale;
};

// J registers of rows: the entry's update into `fresh_u`, the outputs into o.
template <int J, class U, class Lanes>
GDN_INLINE void mix_rows(const U* u, int64_t s_r, int64_t R, const WindowToken& x, int64_t r,
                         U* fresh_u, float* o, TwoRequests& asking, Lanes lanes) {
  // Of so many entries, as many bytes are asked for as are read here.
  constexpr int64_t every = J * sizeof(F) < kPieceBytes ? kPieceBytes / (J * sizeof(F)) : 1;
  F p[J], q[J];
  const float weight = x.weights[x.entries.fill];
  const F base = broadcast(weight);
  const bool keep = x.P && weight != 0.f;
  unrolled<J>(GDN_EACH(j) {
    p[j] = keep ? base * load_lanes(x.P + r + j * kLanes, lanes) : zero();
    q[j] = keep ? base * load_lanes(x.Q + r + j * kLanes, lanes) : zero();
  });
  TwoRequests requests = asking;
  for (int64_t i = 0; i < x.entries.fill; ++i) {
    if (x.weights[i] == 0.f) continue;
    const U* row = u + slot_of(x.entries, R, i) * s_r + r;
    const F c = broadcast(x.c[i]), d = broadcast(x.d[i]);
    // The last line first: from the first to the last, against the order of the rows, took longer.
    unrolled<J>(GDN_EACH(i) {
      constexpr int j = (i + J - 1) % J;
      const F s = load_lanes(row + j * kLanes, lanes);
      p[j] = fma(c, s, p[j]);
      q[j] = fma(d, s, q[j]);
    });
    if (i % every == 0) requests.ask();
  }
  asking.go_on_from(requests);
  const F beta = broadcast(x.beta), kq = broadcast(x.kq), scale = broadcast(x.scale);
  unrolled<J>(GDN_EACH(j) {
    const F e = beta * (load_lanes(x.v + r + j * kLanes, lanes) - p[j]);
    store_lanes(o + r + j * kLanes, scale * fma(kq, e, q[j]), lanes);
    store_lanes(fresh_u + r + j * kLanes, e, lanes);
  });
}
// `u`: the head's window from the first row of the block on; the entry goes to `slot`.
template <class U>
static void mix_head(U* u, int64_t s_r, int64_t R, const WindowToken& x, int64_t rows, int64_t slot,
                     float* o, TwoRequests& asking) {
  using Full = std::integral_constant<int, kLanes>;
  U* fresh_u = u + slot * s_r;
  int64_t r = 0;
#if GDN_SIMD_AVX512 || GDN_SIMD_NEON
  for (; r + 8 * kLanes <= rows; r += 8 * kLanes) {
    mix_rows<8>(u, s_r, R, x, r, fresh_u, o, asking, Full());
  }
#endif
  for (; r + 4 * kLanes <= rows; r += 4 * kLanes) {
    mix_rows<4>(u, s_r, R, x, r, fresh_u, o, asking, Full());
  }
  for (; r + kLanes <= rows; r += kLanes) {
    mix_rows<1>(u, s_r, R, x, r, fresh_u, o, asking, Full());
  }
  if (r < rows) {
    mix_rows<1>(u, s_r, R, x, r, fresh_u, o, asking, static_cast<int>(rows - r));
  }
}

// --- a sequence

struct WindowScratch {
  KeyQuery* kq;     // [tokens]
  float* ring;      // [R][padded(K)]: keys of the live entries as floats, by slot
  float* folded;    // the same, of the entries that are folded
  float *dk, *dq;   // [tokens][kMaxWindow]: products of live keys with each token's key and query
  float *P, *Q;     // [tokens][kMaxRow]: products of the base with them
  float* g;         // [ratio][kMaxWindow]: log decays of the entries, by slot
  float* weights;   // [tokens + 1][ratio][weights_ld]: of weigh(); the last: of the fold
  float* beta;      // [tokens][ratio]
  float* gate;      // [ratio]: log decays of one token
  float* wu;        // [R][kMaxRow]: updates that are folded, times their weights
  Entries* before;  // [tokens]: what was live before each
  int64_t ratio, weights_ld;
  ScopedMemory memory;

  // `base`: with room for its products and for folding into it.
  WindowScratch(int64_t tokens, int64_t R, int64_t K, int64_t ratio, bool base)
      : ratio(ratio),
        weights_ld(padded(R + 1)),
        memory(sizeof(float) * (R * padded(K) + 2 * tokens * kMaxWindow +
                                ratio * (kMaxWindow + (tokens + 1) * (weights_ld + 1)) +
                                (base ? 2 * tokens * kMaxRow + R * (kMaxRow + padded(K)) : 0)) +
               (sizeof(KeyQuery) + sizeof(Entries)) * tokens) {
    kq = static_cast<KeyQuery*>(memory.data);
    before = reinterpret_cast<Entries*>(kq + tokens);
    float* f = reinterpret_cast<float*>(before + tokens);
    auto take = [&](int64_t n) {
      float* p = f;
      f += n;
      return p;
    };
    ring = take(R * padded(K));
    dk = take(tokens * kMaxWindow);
    dq = take(tokens * kMaxWindow);
    g = take(ratio * kMaxWindow);
    weights = take(ratio * (tokens + 1) * weights_ld);
    beta = take(ratio * tokens);
    gate = take(ratio);
    P = base ? take(tokens * kMaxRow) : nullptr;
    Q = base ? take(tokens * kMaxRow) : nullptr;
    wu = base ? take(R * kMaxRow) : nullptr;
    folded = base ? take(R * padded(K)) : nullptr;
  }
  float* weights_of(int64_t j, int64_t head) const {
    return weights + (j * ratio + head) * weights_ld;
  }
};

static void load_ring(const Window& w, int64_t row, int64_t hk, const Entries& e, int64_t K,
                      float* ring) {
  with_type(w.k_dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* keys = window_keys<T>(w, row, hk);
    for_live(e, w.R, [&](int64_t, int64_t slot) {
      widen(keys + slot * w.sk_r, 1, K, ring + slot * padded(K));
    });
  });
}
GDN_INLINE bool folds(const RecurrentArgs& a, const Entries& e, int64_t tokens) {
  return a.state.ptr && e.fill > 0 && e.fill + tokens > a.window.R;
}
// The log decay an entry keeps: the first one of a sequence that starts from zero removes the base.
GDN_INLINE float kept_gate(const RecurrentArgs& a, const Sequence& seq, int64_t t, float g) {
  return a.state.ptr && seq.fresh && t == seq.start ? -__builtin_inff() : g;
}
static void store_key(const Window& w, int64_t row, int64_t hk, int64_t slot, int64_t K,
                      const float* k) {
  with_type(w.k_dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    narrow(k, K, window_keys<T>(w, row, hk) + slot * w.sk_r);
  });
}

// Tokens supplies a task's inputs and takes its outputs:
//   const KeyQuery* keys(t, n, hk, KeyQuery* scratch)   n tokens from t on
//   const float* value(t, h, first, rows)               valid until the next call
//   RawGates gates(t, h)
//   void output(t, h, first, rows, const float* o)
// `last`: no other task reads the keys and gates of this one, so they may be written now.
// `ahead`: what the thread reads after this task.
template <class Tokens>
static void window_task(const RecurrentArgs& a, const Sequence& seq, const WindowTask& x,
                        Tokens& tokens, WindowScratch& s, bool last, const Ahead& ahead) {
  const Window& w = a.window;
  const int64_t T = seq.end - seq.start, R = w.R, K = a.K, Kp = padded(K);
  Entries start = live_entries(w, seq, a.seqs.num_accepted.ptr != nullptr);
  const bool fold = folds(a, start, T), ring = T > 1 || fold;
  if (ring) load_ring(w, seq.row, x.hk, start, K, fold ? s.folded : s.ring);
  for (int64_t h = x.h0; h < x.h1; ++h) {
    const float* g = window_gates(w, seq.row, h);
    float* g_ring = s.g + (h - x.h0) * kMaxWindow;
    for_live(start, R, [&](int64_t, int64_t slot) { g_ring[slot] = g[slot * w.sg_r]; });
  }
  const Entries folded = start;
  const int64_t heads = x.h1 - x.h0;
  TwoRequests asking = ahead.requests(heads + 1);
  asking.due();
  if (fold) start = {};

  float o[kMaxRow];
  alignas(64) float c[kMaxWindow + 16], d[kMaxWindow + 16];
  for (int64_t t0 = seq.start; t0 < seq.end; t0 += kSegment) {
    const int64_t count = seq.end - t0 < kSegment ? seq.end - t0 : kSegment;
    const KeyQuery* kq = tokens.keys(t0, count, x.hk, s.kq);
    Entries e = start;
    for (int64_t j = 0; j < count; ++j) {
      s.before[j] = e;
      float *dk = s.dk + j * kMaxWindow, *dq = s.dq + j * kMaxWindow;
      if (ring) {
        key_dots(s.ring, Kp, e, R, K, kq[j], dk, dq, asking);
      } else {
        with_type(w.k_dtype, [&](auto* type) {
          using D = std::remove_pointer_t<decltype(type)>;
          key_dots(window_keys<D>(w, seq.row, x.hk), w.sk_r, e, R, K, kq[j], dk, dq, asking);
        });
      }
      const int64_t slot = append(e, R);
      if (ring) {
        for (int64_t i = 0; i < Kp; i += kLanes) {
          store(s.ring + slot * Kp + i, rounded(load(kq[j].k + i), w.k_dtype));
        }
      }
    }
    if (fold) {
      for (int64_t i = 0; i < heads; ++i) s.gate[i] = 0.f;
      weigh(s.g, folded, R, s.gate, heads, s.weights_of(count, 0), s.weights_ld);
    }
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t i = 0; i < heads; ++i) {
        const RawGates gates = tokens.gates(t0 + j, x.h0 + i);
        s.gate[i] = gates.g;
        s.beta[j * heads + i] = gates.beta;
      }
      weigh(s.g, s.before[j], R, s.gate, heads, s.weights_of(j, 0), s.weights_ld);
      Entries after = s.before[j];
      const int64_t slot = append(after, R);
      for (int64_t i = 0; i < heads; ++i) {
        s.g[i * kMaxWindow + slot] = kept_gate(a, seq, t0 + j, s.gate[i]);
      }
    }
    for (int64_t h = x.h0; h < x.h1; ++h) {
      const bool base = a.state.ptr && !seq.fresh;
      const int64_t head = h - x.h0;
      if (t0 == seq.start) asking.due();
      if (base) {
        // A call that folds has no more tokens than the window entries: this is its only segment.
        Fold f;
        if (fold) {
          prepare_fold(w, seq.row, h, x.first, x.rows, K, folded, s.folded,
                       s.weights_of(count, head), s.wu, f);
        }
        with_type(a.state.dtype, [&](auto* type) {
          using D = std::remove_pointer_t<decltype(type)>;
          D* S = head_of<D>(a.state, seq.row, h) + x.first * a.state.s_v;
          const D* next = h + 1 < x.h1 ? S + a.state.s_h : static_cast<const D*>(ahead.state());
          base_products(a.state, S, x.rows, K, fold ? &f : nullptr, kq, count, s.P, s.Q, kMaxRow,
                        next, &asking);
        });
      }
      for (int64_t j = 0; j < count; ++j) {
        const int64_t t = t0 + j;
        const float* weights = s.weights_of(j, head);
        const float *dk = s.dk + j * kMaxWindow, *dq = s.dq + j * kMaxWindow;
        for (int64_t i = 0; i < s.before[j].fill; i += kLanes) {
          store(c + i, load(weights + i) * load(dk + i));
          store(d + i, load(weights + i) * load(dq + i));
        }
        const WindowToken token{weights,
                                s.before[j],
                                c,
                                d,
                                base ? s.P + j * kMaxRow : nullptr,
                                base ? s.Q + j * kMaxRow : nullptr,
                                tokens.value(t, h, x.first, x.rows),
                                s.beta[j * heads + head],
                                kq[j].kq,
                                a.scale};
        Entries after = s.before[j];
        const int64_t slot = append(after, R);
        with_type(w.u_dtype, [&](auto* type) {
          using U = std::remove_pointer_t<decltype(type)>;
          U* u = window_updates<U>(w, seq.row, h) + x.first;
          mix_head(u, w.su_r, R, token, x.rows, slot, o, asking);
        });
        tokens.output(t, h, x.first, x.rows, o);
      }
      asking.rest();
    }
    if (last) {
      for (int64_t j = 0; j < count; ++j) {
        Entries after = s.before[j];
        const int64_t slot = append(after, R);
        store_key(w, seq.row, x.hk, slot, K, kq[j].k);
        for (int64_t h = x.h0; h < x.h1; ++h) {
          window_gates(w, seq.row, h)[slot * w.sg_r] = s.g[(h - x.h0) * kMaxWindow + slot];
        }
      }
    }
    start = e;
  }
}

// Keys and gates of a sequence whose key head was computed by several tasks.
template <class Tokens>
static void store_entries(const RecurrentArgs& a, const Sequence& seq, int64_t hk, Tokens& tokens,
                          KeyQuery* scratch) {
  const Window& w = a.window;
  const int64_t T = seq.end - seq.start, ratio = a.HV / a.H;
  Entries e = live_entries(w, seq, a.seqs.num_accepted.ptr != nullptr);
  if (folds(a, e, T)) e = {};
  for (int64_t t = seq.start; t < seq.end; ++t) {
    const int64_t slot = append(e, w.R);
    if (t < seq.end - w.R) continue;  // overwritten by a later token of this call
    store_key(w, seq.row, hk, slot, a.K, tokens.keys(t, 1, hk, scratch)->k);
    for (int64_t h = hk * ratio; h < (hk + 1) * ratio; ++h) {
      window_gates(w, seq.row, h)[slot * w.sg_r] = kept_gate(a, seq, t, tokens.gates(t, h).g);
    }
  }
}

// The counts, once every task of every sequence is done.
static void store_fills(const RecurrentArgs& a) {
  const Window& w = a.window;
  for (int64_t n = 0; n < a.seqs.N; ++n) {
    const Sequence seq = sequence_of(a.seqs, n, 0);
    const int64_t T = seq.end - seq.start;
    if (seq.row < 0 || T <= 0) continue;
    Entries e = live_entries(w, seq, a.seqs.num_accepted.ptr != nullptr);
    if (folds(a, e, T)) e = {};
    const int64_t over = e.fill + T - w.R;
    if (over > 0)
      e = {w.R, (e.head + over) % w.R};
    else
      e.fill += T;
    w.fill[seq.row * w.s_fill] =
        pack_fill({static_cast<int32_t>(e.fill), static_cast<int32_t>(T < 256 ? T - 1 : 255),
                   static_cast<int32_t>(e.head)});
  }
}

static int64_t most_tokens(const Sequences& s) {
  int64_t most = s.cu_seqlens.ptr ? 0 : s.T;
  for (int64_t n = 0; s.cu_seqlens.ptr && n < s.N; ++n) {
    const int64_t T = at(s.cu_seqlens, n + 1) - at(s.cu_seqlens, n);
    most = T > most ? T : most;
  }
  return most < kSegment ? most : kSegment;
}

// Inputs straight from tensors.
struct TensorTokens {
  const RecurrentArgs& a;
  int64_t b = 0;
  float v[kMaxRow];

  const KeyQuery* keys(int64_t t, int64_t n, int64_t hk, KeyQuery* scratch) const {
    for (int64_t j = 0; j < n; ++j) {
      load_row(a.k, b, t + j, hk, a.K, scratch[j].k);
      load_row(a.q, b, t + j, hk, a.K, scratch[j].q);
      finish_key_query(scratch[j], a.K, a.l2norm);
    }
    return scratch;
  }
  const float* value(int64_t t, int64_t h, int64_t first, int64_t rows) {
    load_row(from_column(a.v, first), b, t, h, rows, v);
    return v;
  }
  RawGates gates(int64_t t, int64_t h) const { return raw_gates(a.gates, b, t, h); }
  void output(int64_t t, int64_t h, int64_t first, int64_t rows, const float* o) const {
    store_row(a.out, b, t, h, first, rows, o);
  }
};

// recurrent_buffered and recurrent_lowrank.
static void recurrent_window(const RecurrentArgs& a, const Parallel& parallel) {
  const WindowPieces pieces(a, parallel.threads);
  const int64_t most = most_tokens(a.seqs), ratio = a.HV / a.H;
  if (most == 0) return;
  auto body = [&](int64_t begin, int64_t end) {
    WindowScratch scratch(most, a.window.R, a.K, ratio, a.state.ptr != nullptr);
    TensorTokens tokens{a};
    Ahead ahead(a, pieces, begin, end);
    const float zeros[kMaxRow] = {};
    for (int64_t i = begin; i < end; ++i, ahead.move_on()) {
      const WindowTask x = pieces.task(a, i);
      const Sequence seq = sequence_of(a.seqs, x.n, 0);
      tokens.b = seq.b;
      if (seq.row < 0) {
        for (int64_t t = seq.start; t < seq.end; ++t) {
          for (int64_t h = x.h0; h < x.h1; ++h) tokens.output(t, h, x.first, x.rows, zeros);
        }
      } else if (seq.end > seq.start) {
        window_task(a, seq, x, tokens, scratch, pieces.whole, ahead);
      }
    }
  };
  parallel_for(parallel, a.seqs.N * a.H * pieces.count, body);
  if (!pieces.whole) {
    auto finish = [&](int64_t begin, int64_t end) {
      TensorTokens tokens{a};
      KeyQuery scratch;
      for (int64_t i = begin; i < end; ++i) {
        const Sequence seq = sequence_of(a.seqs, i / a.H, 0);
        tokens.b = seq.b;
        if (seq.row >= 0) store_entries(a, seq, i % a.H, tokens, &scratch);
      }
    };
    parallel_for(parallel, a.seqs.N * a.H, finish);
  }
  store_fills(a);
}

static void window_flush(const RecurrentArgs& a, const Parallel& parallel) {
  const Window& w = a.window;
  auto body = [&](int64_t begin, int64_t end) {
    WindowScratch s(0, w.R, a.K, 1, true);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t h = i % a.HV, hk = h / (a.HV / a.H);
      const Sequence seq = sequence_of(a.seqs, i / a.HV);
      if (seq.row < 0) continue;
      const Entries e = live_entries(w, seq, false);
      if (e.fill == 0) continue;
      load_ring(w, seq.row, hk, e, a.K, s.folded);
      const float *g = window_gates(w, seq.row, h), zero = 0.f;
      for_live(e, w.R, [&](int64_t, int64_t slot) { s.g[slot] = g[slot * w.sg_r]; });
      Fold f;
      weigh(s.g, e, w.R, &zero, 1, s.weights, s.weights_ld);
      prepare_fold(w, seq.row, h, 0, a.V, a.K, e, s.folded, s.weights, s.wu, f);
      with_type(a.state.dtype, [&](auto* type) {
        using D = std::remove_pointer_t<decltype(type)>;
        D* S = head_of<D>(a.state, seq.row, h);
        base_products<D>(a.state, S, a.V, a.K, &f, nullptr, 0, nullptr, nullptr, 0, nullptr,
                         nullptr);
      });
    }
  };
  parallel_for(parallel, a.seqs.N * a.HV, body);
}

// decode_buffered and decode_lowrank: the inputs come from the convolution of decode.h, the outputs
// go through its gated norm.
struct DecodedTokens {
  const RecurrentArgs& a;
  const Sequence& seq;
  int64_t h0;          // first value head of the key head
  const KeyQuery* kq;  // [tokens]
  const float* v;      // [ratio][tokens][kMaxRow]
  float* o;            // same

  int64_t row(int64_t t, int64_t h) const {
    return ((h - h0) * (seq.end - seq.start) + t - seq.start) * kMaxRow;
  }
  const KeyQuery* keys(int64_t t, int64_t, int64_t, KeyQuery*) const {
    return kq + (t - seq.start);
  }
  const float* value(int64_t t, int64_t h, int64_t first, int64_t) const {
    return v + row(t, h) + first;
  }
  RawGates gates(int64_t t, int64_t h) const { return raw_gates(a.gates, seq.b, t, h); }
  void output(int64_t t, int64_t h, int64_t first, int64_t rows, const float* y) const {
    std::memcpy(o + row(t, h) + first, y, sizeof(float) * rows);
  }
};

static void decode_window(const DecodeArgs& a, const Parallel& parallel) {
  const RecurrentArgs& r = a.recurrent;
  const DecodeHead head{a, r.HV / r.H};
  const WindowPieces pieces(r, parallel.threads);
  const int64_t ratio = head.ratio, keys = r.seqs.N * r.H, most = most_tokens(r.seqs);
  const bool has_base = r.state.ptr != nullptr;
  if (most == 0) return;
  const int64_t v_floats = ratio * most * kMaxRow;  // of one key head
  struct Buffers {
    ScopedMemory keys, values;
    KeyQuery* kq = static_cast<KeyQuery*>(keys.data);
    float *v = static_cast<float*>(values.data), *o;
    Buffers(int64_t tokens, int64_t floats)
        : keys(sizeof(KeyQuery) * tokens), values(sizeof(float) * 2 * floats), o(v + floats) {}
  };
  auto alive = [&](const Sequence& seq, int64_t key) {
    if (seq.row >= 0 && seq.end > seq.start) return true;
    head.zeros(seq, key % r.H);
    return false;
  };
  auto norm = [&](const Sequence& seq, int64_t hk, float* o, const float* weight) {
    const int64_t T = seq.end - seq.start;
    for (int64_t j = 0; j < ratio * T; ++j) {
      head.finish(seq, seq.start + j % T, hk * ratio + j / T, o + j * kMaxRow, weight);
    }
  };
  float weight[kMaxRow];
  load_params(a.norm_weight, 0, r.V, weight);

  if (pieces.whole) {
    auto body = [&](int64_t begin, int64_t end) {
      WindowScratch scratch(most, r.window.R, r.K, ratio, has_base);
      Buffers buffers(most, v_floats);
      Taps taps;
      Ahead ahead(r, pieces, begin, end);
      for (int64_t key = begin; key < end; ++key, ahead.move_on()) {
        const WindowTask x = pieces.task(r, key);
        const Sequence seq = sequence_of(r.seqs, x.n, 0);
        if (!alive(seq, key)) continue;
        head.inputs(conv_sequence(a, x.n), x.hk, taps, buffers.kq, buffers.v);
        DecodedTokens tokens{r, seq, x.h0, buffers.kq, buffers.v, buffers.o};
        window_task(r, seq, x, tokens, scratch, true, ahead);
        norm(seq, x.hk, buffers.o, weight);
      }
    };
    parallel_for(parallel, keys, body);
    store_fills(r);
    return;
  }

  Buffers buffers(most * keys, v_floats * keys);
  auto tokens_of = [&](const Sequence& seq, int64_t key) {
    return DecodedTokens{r,
                         seq,
                         key % r.H * ratio,
                         buffers.kq + key * most,
                         buffers.v + key * v_floats,
                         buffers.o + key * v_floats};
  };
  auto front = [&](int64_t begin, int64_t end) {
    Taps taps;
    for (int64_t key = begin; key < end; ++key) {
      const Sequence seq = sequence_of(r.seqs, key / r.H, 0);
      if (!alive(seq, key)) continue;
      head.inputs(conv_sequence(a, key / r.H), key % r.H, taps, buffers.kq + key * most,
                  buffers.v + key * v_floats);
    }
  };
  parallel_for(parallel, keys, front);
  auto middle = [&](int64_t begin, int64_t end) {
    WindowScratch scratch(most, r.window.R, r.K, 1, has_base);
    Ahead nothing(r, pieces, end, end);
    for (int64_t i = begin; i < end; ++i) {
      const WindowTask x = pieces.task(r, i);
      const Sequence seq = sequence_of(r.seqs, x.n, 0);
      if (seq.row < 0 || seq.end <= seq.start) continue;
      DecodedTokens tokens = tokens_of(seq, i / pieces.count);
      window_task(r, seq, x, tokens, scratch, false, nothing);
    }
  };
  parallel_for(parallel, keys * pieces.count, middle);
  auto back = [&](int64_t begin, int64_t end) {
    for (int64_t key = begin; key < end; ++key) {
      const Sequence seq = sequence_of(r.seqs, key / r.H, 0);
      if (seq.row < 0 || seq.end <= seq.start) continue;
      DecodedTokens tokens = tokens_of(seq, key);
      store_entries(r, seq, key % r.H, tokens, nullptr);
      norm(seq, key % r.H, tokens.o, weight);
    }
  };
  parallel_for(parallel, keys, back);
  store_fills(r);
}
