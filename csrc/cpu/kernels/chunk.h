// Chunked gated delta rule (WY form without W: the old state is multiplied by k once).
// Included inside the namespace of one instruction set, after chunk_products.h.
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

// Floats of state one task may hold; a task takes fewer value heads of a key head rather than more.
constexpr int64_t kTaskState = 1 << 18;
constexpr int64_t kMaxGroup = 64;  // value heads of a task, however small they are

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

template <class T>
static bool streams_output(const ChunkArgs& x) {
  constexpr int64_t size = sizeof(T);
  return streams(x.out.ptr, x.seqs.B * x.seqs.T * x.HV * x.V * size,
                 {x.out.sb * size, x.out.st * size, x.out.sh * size});
}
static bool streams_states(const ChunkArgs& x) {
  const int64_t size = size_of(x.write.dtype);
  return streams(x.write.ptr, x.seqs.N * x.HV * x.V * x.K * size,
                 {x.write.s_p * size, x.write.s_h * size, x.write.s_v * size});
}

// One strip of one head through tokens [first, first + n) of a chunk that starts at token t0.
template <class T, Form form>
static void strip_segment(const ChunkArgs& x, const ChunkKeys& s, const ChunkHead& h, int64_t b,
                          int64_t t0, int64_t hv, int64_t first, int64_t n, int64_t column,
                          const float* S, bool S_is_zero, float* u) {
  const int64_t cols = x.V - column < kStrip ? x.V - column : kStrip;
  const bool direct = cols == kStrip && x.v.sd == 1;
  [[maybe_unused]] const bool past_caches = streams_output<T>(x);
  const int64_t depth = S_is_zero ? 0 : x.K;
  using Products = ChunkProducts<T, form>;
  auto error = [&](int64_t i, int valid, auto& acc) __attribute__((always_inline)) {
    constexpr int R = sizeof(acc) / sizeof(acc[0]);
    // On Intel the rows of v reach L1 while the products with the state are formed.
    for (int r = 0; kIntel && direct && r < valid; ++r) {
      const T* row = element<T>(x.v, b, t0 + first + i + r, hv) + column;
      for (int64_t e = 0; e < kStrip; e += 64 / sizeof(T)) prefetch(row + e);
    }
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
#if GDN_SIMD_AMX
      if (past_caches && cols == kStrip) return stream2(out, acc[r][0], acc[r][1]);
#endif
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
  const bool past_caches = streams_states(x);
  int64_t next_task = 0;
  auto body = [&](int64_t, int64_t) {
    [[maybe_unused]] const ThreadTiles<kTiled<T>> tiles;
    [[maybe_unused]] const StreamsEnd streams_end;
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
          store_state(x.write, row, h, column, end_column, x.K, S, s.buffer, past_caches);
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
