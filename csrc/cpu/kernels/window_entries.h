// The entries of a window: which are live, which task reads them and asks memory for them ahead of
// time, their products with a token's key and query, and what each weighs.
// Included inside the namespace of one instruction set, after recurrent.h.

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
constexpr bool kAsksTwice = !kIntel;  // two tasks ahead too, where no base is read

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
// read, the entries are few beside it and are asked for once, as all are on Intel.
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
    return {Requests(next_, parts),
            a_.state.ptr || !kAsksTwice ? Requests() : Requests(second_, parts)};
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

// --- products and weights

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
