// The recurrence over windows of pending rank-1 updates (docs/windows.md), with a base state
// (buffered, exact) or without one (low-rank).
// Included inside the namespace of one instruction set, after decode.h and window_base.h.
//
// A task is (sequence, key head) with the value heads that share its keys, so that the window's
// keys are read once for all of them; with few such tasks it is one block of rows of one value
// head. Rows of V are independent, and every sum runs from the newest entry to the oldest whatever
// the slots are, so a row's bits depend neither on the task it falls into nor on where its window
// starts. Keys, gates and counts of the new entries are written when no task can read them any
// more.

constexpr int64_t kSegment = 64;  // tokens whose keys and products are held at a time

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
