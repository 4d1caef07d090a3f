// Gradients of the chunked gated delta rule. Included inside the namespace of one instruction set,
// after chunk.h, whose notation, tiles and layouts it shares. All arithmetic is f32.
//
// For a chunk with X = beta (v - w S k), U = (1 + A)^-1 X, O = scale w S q + M U and
// S' = w_n S + (D_n U) k^T, where dZ is the gradient of Z:
//   dU = M^T dO + D_n dS' k          dS = w_n dS' + (scale w dO) q^T - (beta w dX) k^T
//   dX = (1 + A)^-T dU               Q = scale D (dO U^T), lower: the gradient of q k^T
//   dv = beta dX                     G = -beta D (dX U^T), strictly lower: that of k k^T
//   dq = scale w S^T dO + Q k
//   dk = D_n dS'^T U - beta w S^T dX + Q^T q + (G + G^T) k
//   dbeta = dX . (v - w S k) - row sums of D (dX U^T) (k k^T)
//   dg_l = the sum of what reaches D_ij for j < l <= i and w_i for l <= i
//
// A head first goes through its chunks for the state before each and for U, then back through them
// with dS. The products with a state that have a row for each token are formed transposed, tokens
// in columns, so that a state needs no second layout; the gradients of w, D_n and beta that S k,
// S q and dS' k would give come out of them as dot products with k and q. What reaches k k^T and
// q k^T is summed over the value heads of a key head before it is multiplied by k and q.

// The sums over the value heads of a key head, in one chunk. Each takes one term from a head, so
// that heads may also be summed on their own first and give the same bits.
struct KeyGradients {
  float *dq_S, *dk_S, *dk_dS;  // [K][ld_t]: what comes through S and dS', transposed
  float *Q, *G;                // [C][ld_c]
  float* all;                  // these five in a row
  int64_t floats;
};
static KeyGradients carve_key_gradients(ScratchCursor& cursor, int64_t C, int64_t K,
                                        const ChunkKeys& keys) {
  KeyGradients s;
  const int64_t before = cursor.used;
  s.all = cursor.take(0);
  for (float** p : {&s.dq_S, &s.dk_S, &s.dk_dS}) *p = cursor.take((K + kSpareRows) * keys.ld_t);
  for (float** p : {&s.Q, &s.G}) *p = cursor.take((C + kSpareRows) * keys.ld_c);
  s.floats = cursor.used - before;
  return s;
}

struct BackwardScratch {
  ChunkScratch chunk;
  KeyGradients sums;
  float* qt;                // [K][ld_t]: transposed q
  float *At, *Mt;           // [C][ld_c]: transposed A and M of the head
  float *OU, *XU;           // [C][ld_c]: lower triangles of dO U^T and dX U^T
  float *v, *dO, *dX;       // [C][ld_v]
  float *dOt, *dXt;         // [strips of V][ld_t]: transposed
  float *wdO, *wdX;         // [C][kStrip]: scale w dO and -beta w dX of the strip at hand
  float *fq, *fk;           // [edge]: scale w, -beta w
  float *k_S, *q_S, *k_dS;  // [edge]: k . S dX, q . S dO and k . dS' U of each token
  float *net, *dbeta;       // [edge]: of each token: of log w less what older D lose; of beta
  float *dq, *dk;           // [C][ld_k]
  int64_t edge, ld_v;
};
// Returns the floats needed; with base null only that.
static int64_t carve_backward(float* base, const ChunkArgs& x, BackwardScratch& s) {
  ScratchCursor cursor{base, (carve_chunk(base, x, Form::f32, 0, 1, s.chunk) + 15) / 16 * 16};
  const ChunkKeys& keys = s.chunk.keys;
  const int64_t rows = x.C + kSpareRows, columns = strips(x.V) * kStrip;
  s.edge = strips(x.C) * kStrip;
  s.ld_v = columns + 16;
  s.sums = carve_key_gradients(cursor, x.C, x.K, keys);
  s.qt = cursor.take((x.K + kSpareRows) * keys.ld_t);
  for (float** p : {&s.At, &s.Mt, &s.OU, &s.XU}) *p = cursor.take(rows * keys.ld_c);
  for (float** p : {&s.v, &s.dO, &s.dX}) *p = cursor.take(rows * s.ld_v);
  for (float** p : {&s.dOt, &s.dXt}) *p = cursor.take(columns * keys.ld_t);
  for (float** p : {&s.wdO, &s.wdX}) *p = cursor.take(rows * kStrip);
  for (float** p : {&s.fq, &s.fk, &s.k_S, &s.q_S, &s.k_dS, &s.net, &s.dbeta}) {
    *p = cursor.take(s.edge);
  }
  for (float** p : {&s.dq, &s.dk}) *p = cursor.take(rows * keys.ld_k);
  return cursor.used;
}

// What one value head keeps from the way forward, for each chunk: the state before it and U^T
// [strips of V][ld_t]. dS follows the last.
struct HeadWork {
  float* base;
  int64_t state, ut;  // floats of each
  float* S(int64_t chunk) const { return base + chunk * (state + ut); }
  float* Ut(int64_t chunk) const { return S(chunk) + state; }
  float* dS(int64_t chunks) const { return S(chunks); }
  int64_t floats(int64_t chunks) const { return chunks * (state + ut) + state; }
};

// dst = src^T for n tokens of `width` values; columns from n to the next strip are zero.
static void transpose_tokens(const float* src, int64_t ld_src, int64_t n, int64_t width, float* dst,
                             int64_t ld_t) {
  transpose(src, ld_src, n, width, dst, ld_t);
  for (int64_t c = 0; c < width; ++c) {
    for (int64_t i = n; i < strips(n) * kStrip; ++i) dst[c * ld_t + i] = 0.f;
  }
}

static void backward_keys(const ChunkArgs& x, int64_t b, int64_t t0, int64_t n, int64_t hk,
                          const BackwardScratch& s) {
  const ChunkKeys& keys = s.chunk.keys;
  ChunkProducts<float, Form::f32>::load_keys(x, b, t0, n, hk, keys);
  transpose_tokens(keys.q, keys.ld_k, n, x.K, s.qt, keys.ld_t);
}

// The head's rows of the chunk as floats, zero up to a whole strip.
static void load_tokens(const View& from, int64_t b, int64_t t0, int64_t n, int64_t h,
                        int64_t width, int64_t ld, float* rows) {
  for (int64_t i = 0; i < n; ++i, rows += ld) {
    load_row(from, b, t0 + i, h, width, rows);
    for (int64_t c = padded(width); c < strips(width) * kStrip; ++c) rows[c] = 0.f;
  }
}

// U of one strip, and D_n U; S null: zero.
static void solve_forward(const ChunkArgs& x, const BackwardScratch& s, int64_t n, int64_t column,
                          const float* S) {
  const ChunkKeys& keys = s.chunk.keys;
  const ChunkHead& h = s.chunk.head;
  auto error = [&](int64_t i, int valid, auto& acc) {
    constexpr int R = sizeof(acc) / sizeof(acc[0]);
    clear(acc);
    tile_product<R>(acc, keys.k + i * keys.ld_k, keys.ld_k, S, kStrip, S ? x.K : 0);
    unrolled<R>(GDN_EACH(r) {
      if (r >= valid) return;
      const F w = broadcast(h.w[i + r]), beta = broadcast(h.beta[i + r]);
      const float* v = s.v + (i + r) * s.ld_v + column;
      unrolled<kTileVectors>(
          GDN_EACH(c) { acc[r][c] = beta * (load(v + c * kLanes) - w * acc[r][c]); });
    });
    return int64_t{0};
  };
  auto decayed = [&](int64_t i, int, auto& acc) {
    constexpr int R = sizeof(acc) / sizeof(acc[0]);
    unrolled<R>(GDN_EACH(r) {
      const F d = broadcast(h.D[i + r]);
      unrolled<kTileVectors>(
          GDN_EACH(c) { store(h.du + (i + r) * kStrip + c * kLanes, d * acc[r][c]); });
    });
  };
  substitute(h.A, keys.ld_c, n, h.u, error, decayed);
}

// The state before each chunk and U^T of heads [h0, h1), which share a key head.
static void keep_states(const ChunkArgs& x, const BackwardScratch& s, const Sequence& seq,
                        int64_t h0, int64_t h1, HeadWork work, int64_t stride) {
  const ChunkKeys& keys = s.chunk.keys;
  const ChunkHead& head = s.chunk.head;
  const int64_t hk = h0 / (x.HV / x.H);
  for (int64_t t = seq.start, chunk = 0; t < seq.end; t += x.C, ++chunk) {
    const int64_t n = seq.end - t < x.C ? seq.end - t : x.C;
    ChunkProducts<float, Form::f32>::load_keys(x, seq.b, t, n, hk, keys);
    for (int64_t h = h0; h < h1; ++h) {
      const HeadWork mine{work.base + (h - h0) * stride, work.state, work.ut};
      float *S = mine.S(chunk), *Ut = mine.Ut(chunk), *next = mine.S(chunk + 1);
      const bool S_is_zero = chunk == 0 && !x.read.ptr;
      if (chunk == 0 && x.read.ptr) {
        load_state(x.read, seq.row, h, 0, x.V, x.K, S, s.chunk.buffer);
      }
      load_gates(x, seq.b, t, n, h, head);
      head_matrices<ChunkProducts<float, Form::f32>>(keys, head, 0, n, x.scale);
      load_tokens(x.v, seq.b, t, n, h, x.V, s.ld_v, s.v);
      for (int64_t p = 0; p < strips(x.V); ++p) {
        const float* strip = S_is_zero ? nullptr : S + p * strip_floats(x.K);
        solve_forward(x, s, n, p * kStrip, strip);
        transpose_tokens(head.u, kStrip, n, kStrip, Ut + p * kStrip * keys.ld_t, keys.ld_t);
        if (t + x.C < seq.end) {
          update_strip(keys, head.du, 0, n, x.K, head.w[n - 1], strip,
                       next + p * strip_floats(x.K));
        }
      }
    }
  }
}

// For Z = S xt, [K][tokens]: out += f Z, and share = the dot products of the columns of Z and y.
static void state_product(const ChunkArgs& x, const ChunkKeys& keys, const float* S,
                          const float* xt, int64_t n, const float* f, const float* y, float* out,
                          float* share) {
  for (int64_t j = 0; j < n; j += kStrip) {
    F factor[kTileVectors], dots[kTileVectors];
    unrolled<kTileVectors>(GDN_EACH(c) {
      factor[c] = load(f + j + c * kLanes);
      dots[c] = zero();
    });
    for_tiles(x.K, [&](int64_t i, auto rows, int valid) {
      constexpr int R = decltype(rows)::value;
      F acc[R][kTileVectors];
      clear(acc);
      for (int64_t v = 0; v < x.V; v += kStrip) {
        tile_product<R>(acc, S + v / kStrip * strip_floats(x.K) + i * kStrip, kStrip,
                        xt + v * keys.ld_t + j, keys.ld_t, x.V - v < kStrip ? x.V - v : kStrip);
      }
      F part[kTileVectors];
      unrolled<kTileVectors>(GDN_EACH(c) { part[c] = zero(); });
      unrolled<R>(GDN_EACH(r) {
        if (r >= valid) return;
        unrolled<kTileVectors>(GDN_EACH(c) {
          const int64_t at = (i + r) * keys.ld_t + j + c * kLanes;
          part[c] = fma(acc[r][c], load(y + at), part[c]);
          store(out + at, load(out + at) + factor[c] * acc[r][c]);
        });
      });
      unrolled<kTileVectors>(GDN_EACH(c) { dots[c] = dots[c] + part[c]; });
    });
    unrolled<kTileVectors>(GDN_EACH(c) { store(share + j + c * kLanes, dots[c]); });
  }
}

// dX of one strip, last token first; dS null: zero.
static void solve_strip(const ChunkArgs& x, const BackwardScratch& s, int64_t n, int64_t column,
                        const float* dS) {
  const ChunkKeys& keys = s.chunk.keys;
  const ChunkHead& h = s.chunk.head;
  const int64_t ld = keys.ld_c;
  int64_t first[kMaxChunk / kSmallTile + 1], tiles = 0;
  for_tiles(n, [&](int64_t i, auto, int) { first[tiles++] = i; });
  while (tiles-- > 0) {
    tile_at(first[tiles], n, [&](int64_t i, auto rows, int valid) {
      constexpr int R = decltype(rows)::value;
      const int64_t after = i + R;
      F acc[R][kTileVectors];
      clear(acc);
      tile_product<R>(acc, keys.k + i * keys.ld_k, keys.ld_k, dS, kStrip, dS ? x.K : 0);
      // Rows that do not count hold whatever the scratch held.
      unrolled<R>(GDN_EACH(r) {
        const F d = broadcast(h.D[i + r]);
        unrolled<kTileVectors>(GDN_EACH(c) { acc[r][c] = r < valid ? d * acc[r][c] : zero(); });
      });
      unrolled<R>(GDN_EACH(m) {
        if (m >= valid) return;
        const float* row = s.dO + (i + m) * s.ld_v + column;
        F value[kTileVectors];
        unrolled<kTileVectors>(GDN_EACH(c) { value[c] = load(row + c * kLanes); });
        unrolled<m + 1>(GDN_EACH(r) {
          const F f = broadcast(h.M[(i + m) * ld + i + r]);
          unrolled<kTileVectors>(GDN_EACH(c) { acc[r][c] = fma(f, value[c], acc[r][c]); });
        });
      });
      tile_product<R>(acc, s.Mt + i * ld + after, ld, s.dO + after * s.ld_v + column, s.ld_v,
                      n - after);
      tile_product<R>(acc, s.At + i * ld + after, ld, s.dX + after * s.ld_v + column, s.ld_v,
                      n - after);
      unrolled<R>(GDN_EACH(below) {
        constexpr int m = R - 1 - below;
        if (m >= valid) return;
        unrolled<m>(GDN_EACH(r) {
          const F f = broadcast(h.A[(i + m) * ld + i + r]);
          unrolled<kTileVectors>(GDN_EACH(c) { acc[r][c] = fma(f, acc[m][c], acc[r][c]); });
        });
      });
      unrolled<R>(GDN_EACH(r) {
        const F fq = broadcast(s.fq[i + r]), fk = broadcast(s.fk[i + r]);
        unrolled<kTileVectors>(GDN_EACH(c) {
          const int64_t at = (i + r) * s.ld_v + column + c * kLanes;
          store(s.dX + at, acc[r][c]);
          store(s.wdX + (i + r) * kStrip + c * kLanes, fk * acc[r][c]);
          store(s.wdO + (i + r) * kStrip + c * kLanes, fq * load(s.dO + at));
        });
      });
    });
  }
}

// dS strip = w dS + q^T (scale w dO) - k^T (beta w dX). Returns the lanes of S . (old dS); S null:
// zero.
static F state_gradient(const ChunkArgs& x, const BackwardScratch& s, int64_t n, const float* S,
                        float* dS, bool dS_is_zero) {
  const ChunkKeys& keys = s.chunk.keys;
  const F decay = broadcast(s.chunk.head.w[n - 1]);
  F dots = zero();
  for_tiles(x.K, [&](int64_t i, auto rows, int valid) {
    constexpr int R = decltype(rows)::value;
    F acc[R][kTileVectors], part = zero();
    unrolled<R>(GDN_EACH(r) {
      unrolled<kTileVectors>(GDN_EACH(c) {
        const int64_t at = (i + r) * kStrip + c * kLanes;
        const F old = dS_is_zero ? zero() : load(dS + at);
        if (S && r < valid) part = fma(old, load(S + at), part);
        acc[r][c] = decay * old;
      });
    });
    dots = dots + part;
    tile_product<R>(acc, s.qt + i * keys.ld_t, keys.ld_t, s.wdO, kStrip, n);
    tile_product<R>(acc, keys.kt + i * keys.ld_t, keys.ld_t, s.wdX, kStrip, n);
    unrolled<R>(GDN_EACH(r) {
      unrolled<kTileVectors>(GDN_EACH(c) { store(dS + (i + r) * kStrip + c * kLanes, acc[r][c]); });
    });
  });
  return dots;
}

// From dO U^T and dX U^T to Q and G, and what reaches D and beta.
static void pair_gradients(const ChunkArgs& x, const BackwardScratch& s, int64_t n,
                           const KeyGradients& sums) {
  const ChunkKeys& keys = s.chunk.keys;
  const ChunkHead& h = s.chunk.head;
  const int64_t ld = keys.ld_c;
  const F scale = broadcast(x.scale);
  for (int64_t j = 0; j < ld; ++j) h.D[j] = 0.f;
  for (int64_t i = 0; i < n; ++i) {
    const F decay = broadcast(h.a[i]), beta = broadcast(h.beta[i]);
    F of_D = zero(), of_beta = zero();
    for (int64_t j = 0; j < i; j += kLanes) {
      const int64_t at = i * ld + j;
      const F d = decay * load(h.D + j);
      store(h.D + j, d);
      const F q = scale * d * load(s.OU + at), g = d * load(s.XU + at);
      const F b = g * load(keys.kk + at);
      const F e = fma(q, load(keys.qk + at), zero() - beta * b);
      of_beta = of_beta + b;
      of_D = of_D + e;
      store(s.net + j, load(s.net + j) - e);
      store(sums.Q + at, load(sums.Q + at) + q);
      store(sums.G + at, load(sums.G + at) - beta * g);
    }
    h.D[i] = 1.f;
    sums.Q[i * ld + i] += x.scale * s.OU[i * ld + i];
    s.net[i] += sum(of_D);
    s.dbeta[i] -= sum(of_beta);
  }
}

// One value head through the chunk [t0, t0 + n) backwards: writes its dv, dg and dbeta, adds to
// `sums`, and turns dS into the gradient of the state before the chunk. S null: that state is zero.
static void backward_head(const ChunkBackwardArgs& a, const BackwardScratch& s, int64_t b,
                          int64_t t0, int64_t n, int64_t hv, const float* S, const float* Ut,
                          float* dS, bool dS_is_zero, const KeyGradients& sums) {
  const ChunkArgs& x = a.forward;
  const ChunkKeys& keys = s.chunk.keys;
  const ChunkHead& h = s.chunk.head;
  load_gates(x, b, t0, n, hv, h);
  head_matrices<ChunkProducts<float, Form::f32>>(keys, h, 0, n, x.scale);
  transpose(h.A, keys.ld_c, n, n, s.At, keys.ld_c);
  transpose(h.M, keys.ld_c, n, n, s.Mt, keys.ld_c);
  for (int64_t i = 0; i < n; ++i) {
    s.fq[i] = x.scale * h.w[i];
    s.fk[i] = -h.beta[i] * h.w[i];
  }
  load_tokens(x.v, b, t0, n, hv, x.V, s.ld_v, s.v);
  load_tokens(a.grad_out, b, t0, n, hv, x.V, s.ld_v, s.dO);
  if (dS_is_zero) {
    std::memset(s.k_dS, 0, s.edge * sizeof(float));
  } else {
    state_product(x, keys, dS, Ut, n, h.D, keys.kt, sums.dk_dS, s.k_dS);
  }
  F dots = zero();
  for (int64_t p = 0; p < strips(x.V); ++p) {
    float* strip = dS + p * strip_floats(x.K);
    solve_strip(x, s, n, p * kStrip, dS_is_zero ? nullptr : strip);
    dots =
        dots + state_gradient(x, s, n, S ? S + p * strip_floats(x.K) : nullptr, strip, dS_is_zero);
  }
  if (S) {
    transpose(s.dO, s.ld_v, n, x.V, s.dOt, keys.ld_t);
    transpose(s.dX, s.ld_v, n, x.V, s.dXt, keys.ld_t);
    state_product(x, keys, S, s.dOt, n, s.fq, s.qt, sums.dq_S, s.q_S);
    state_product(x, keys, S, s.dXt, n, s.fk, keys.kt, sums.dk_S, s.k_S);
  } else {
    std::memset(s.q_S, 0, s.edge * sizeof(float));
    std::memset(s.k_S, 0, s.edge * sizeof(float));
  }
  float last = h.w[n - 1] * sum(dots);
  for (int64_t i = 0; i < n; ++i) {
    s.net[i] = s.fq[i] * s.q_S[i] + s.fk[i] * s.k_S[i];
    s.dbeta[i] = -h.w[i] * s.k_S[i];
    if (i + 1 == n) break;  // D_nn is 1 whatever g is
    const float of_D = h.D[i] * s.k_dS[i];
    s.net[i] -= of_D;
    last += of_D;
  }
  s.net[n - 1] += last;
  ChunkKeys rows = keys;
  rows.kt = const_cast<float*>(Ut);
  rows.ld_k = s.ld_v;
  triangle(s.dO, rows, n, x.V, s.OU);
  triangle(s.dX, rows, n, x.V, s.XU);
  pair_gradients(x, s, n, sums);
  float dg = 0.f;
  for (int64_t i = n; i-- > 0;) {
    dg += s.net[i];
    float* dX = s.dX + i * s.ld_v;
    const float dbeta = s.dbeta[i] + dot(dX, s.v + i * s.ld_v, x.V);
    const F beta = broadcast(h.beta[i]);
    for (int64_t c = 0; c < x.V; c += kLanes) store(dX + c, beta * load(dX + c));
    store_row(a.dv, b, t0 + i, hv, 0, x.V, dX);
    store_row(a.dg, b, t0 + i, hv, 0, 1, &dg);
    store_row(a.dbeta, b, t0 + i, hv, 0, 1, &dbeta);
  }
}

// dq and dk of the chunk's key head from what its value heads have summed.
static void finish_keys(const ChunkBackwardArgs& a, const BackwardScratch& s, int64_t b, int64_t t0,
                        int64_t n, int64_t hk, const KeyGradients& sums) {
  const ChunkArgs& x = a.forward;
  const ChunkKeys& keys = s.chunk.keys;
  const int64_t ld = keys.ld_c, ld_k = keys.ld_k;
  float *Qt = s.Mt, *both = s.At;
  transpose(sums.Q, ld, n, n, Qt, ld);
  transpose(sums.G, ld, n, n, both, ld);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; j += kLanes) {
      store(both + i * ld + j, load(both + i * ld + j) + load(sums.G + i * ld + j));
    }
  }
  for (int64_t e = 0; e < x.K * keys.ld_t; e += kLanes) {
    store(sums.dk_S + e, load(sums.dk_S + e) + load(sums.dk_dS + e));
  }
  transpose(sums.dq_S, keys.ld_t, x.K, n, s.dq, ld_k);
  transpose(sums.dk_S, keys.ld_t, x.K, n, s.dk, ld_k);
  for (int64_t column = 0; column < x.K; column += kStrip) {
    for_tiles(n, [&](int64_t i, auto rows, int valid) {
      constexpr int R = decltype(rows)::value;
      F acc[R][kTileVectors];
      auto each = [&](float* to, auto body) __attribute__((always_inline)) {
        unrolled<R>(GDN_EACH(r) {
          unrolled<kTileVectors>(
              GDN_EACH(c) { body(acc[r][c], to + (i + r) * ld_k + column + c * kLanes); });
        });
      };
      auto read = [](F& x, float* p) __attribute__((always_inline)) { x = load(p); };
      auto write = [](F& x, float* p) __attribute__((always_inline)) { store(p, x); };
      each(s.dq, read);
      tile_product<R>(acc, sums.Q + i * ld, ld, keys.k + column, ld_k, i + valid);
      each(s.dq, write);
      each(s.dk, read);
      tile_product<R>(acc, Qt + i * ld + i, ld, keys.q + i * ld_k + column, ld_k, n - i);
      tile_product<R>(acc, both + i * ld, ld, keys.k + column, ld_k, n);
      each(s.dk, write);
    });
  }
  auto finish = [&](const View& from, const View& to, const float* unit, float* d) {
    float raw[kMaxRow];
    for (int64_t i = 0; i < n; ++i, unit += ld_k, d += ld_k) {
      if (x.l2norm) {
        // The part of the gradient along the unit row changes its length only.
        load_row(from, b, t0 + i, hk, x.K, raw);
        for (int64_t c = x.K; c < padded(x.K); ++c) d[c] = 0.f;
        const F r = broadcast(inverse_norm(raw, x.K)), along = broadcast(dot(unit, d, x.K));
        for (int64_t c = 0; c < x.K; c += kLanes) {
          store(d + c, r * (load(d + c) - along * load(unit + c)));
        }
      }
      store_row(to, b, t0 + i, hk, 0, x.K, d);
    }
  };
  finish(x.q, a.dq, keys.q, s.dq);
  finish(x.k, a.dk, keys.k, s.dk);
}

// Returns the floats of `work` that a call needs; with work null only that.
static int64_t chunk_backward(const ChunkBackwardArgs& a, const Parallel& parallel) {
  const ChunkArgs& x = a.forward;
  const int64_t ratio = x.HV / x.H, N = x.seqs.N;
  int64_t longest = 0;
  for (int64_t n = 0; n < N; ++n) {
    const Sequence seq = sequence_of(x.seqs, n);
    longest = seq.end - seq.start > longest ? seq.end - seq.start : longest;
  }
  const int64_t chunks = (longest + x.C - 1) / x.C;
  // A task is a sequence and a key head; where those are too few for the threads, a value head.
  // Its sums then wait in `work` for a second pass, which adds them in the same order.
  const bool whole = parallel.threads == 1 || ratio == 1 || N * x.H >= 2 * parallel.threads;
  const int64_t heads = whole ? ratio : 1, tasks = N * x.HV / heads;
  const int64_t workers = parallel.threads < tasks ? parallel.threads : tasks;
  BackwardScratch layout;
  const int64_t scratch = carve_backward(nullptr, x, layout);
  const ChunkKeys& keys = layout.chunk.keys;
  const HeadWork sizes{nullptr, strips(x.V) * strip_floats(x.K), strips(x.V) * kStrip * keys.ld_t};
  const int64_t stride = sizes.floats(chunks), all_work = workers * heads * stride;
  // Chunk c of a sequence that starts at token t (of all batch rows) is number t / C + n + c.
  const int64_t numbers = x.seqs.B * x.seqs.T / x.C + N;
  if (!a.work) return all_work + (whole ? 0 : numbers * x.HV * layout.sums.floats);

  auto sums_of = [&](const Sequence& seq, int64_t n, int64_t chunk, int64_t h) {
    const int64_t number = (seq.b * x.seqs.T + seq.start) / x.C + n + chunk;
    ScratchCursor cursor{a.work + all_work + (number * x.HV + h) * layout.sums.floats};
    return carve_key_gradients(cursor, x.C, x.K, keys);
  };
  int64_t next_task = 0;
  auto body = [&](int64_t worker, int64_t) {
    BackwardScratch s;
    float* base = thread_scratch(scratch);
    carve_backward(base, x, s);
    for (;;) {
      const int64_t task = __atomic_fetch_add(&next_task, 1, __ATOMIC_RELAXED);
      if (task >= tasks) return;
      const int64_t n = task / (x.HV / heads), h0 = task % (x.HV / heads) * heads;
      const int64_t hk = h0 / ratio;
      const Sequence seq = sequence_of(x.seqs, n);
      const int64_t mine = (seq.end - seq.start + x.C - 1) / x.C;
      HeadWork work = sizes;
      work.base = a.work + worker * heads * stride;
      auto head_work = [&](int64_t h) {
        HeadWork of_head = work;
        of_head.base += (h - h0) * stride;
        return of_head;
      };
      keep_states(x, s, seq, h0, h0 + heads, work, stride);
      for (int64_t h = h0; h < h0 + heads; ++h) {
        float* dS = head_work(h).dS(mine);
        if (a.grad_state.ptr) {
          load_state(a.grad_state, n, h, 0, x.V, x.K, dS, s.chunk.buffer);
        } else if (mine == 0) {
          std::memset(dS, 0, sizes.state * sizeof(float));
        }
      }
      for (int64_t chunk = mine; chunk-- > 0;) {
        const int64_t t = seq.start + chunk * x.C;
        const int64_t tokens = seq.end - t < x.C ? seq.end - t : x.C;
        backward_keys(x, seq.b, t, tokens, hk, s);
        const KeyGradients sums = whole ? s.sums : sums_of(seq, n, chunk, h0);
        std::memset(sums.all, 0, sums.floats * sizeof(float));
        for (int64_t h = h0; h < h0 + heads; ++h) {
          const HeadWork of_head = head_work(h);
          backward_head(a, s, seq.b, t, tokens, h,
                        chunk == 0 && !x.read.ptr ? nullptr : of_head.S(chunk), of_head.Ut(chunk),
                        of_head.dS(mine), chunk + 1 == mine && !a.grad_state.ptr, sums);
        }
        if (whole) finish_keys(a, s, seq.b, t, tokens, hk, sums);
      }
      for (int64_t h = h0; h < h0 + heads; ++h) {
        store_state(a.dstate, n, h, 0, x.V, x.K, head_work(h).dS(mine), s.chunk.buffer, false);
      }
    }
  };
  parallel_for(parallel, workers, body);
  if (whole) return all_work;

  auto second = [&](int64_t begin, int64_t end) {
    BackwardScratch s;
    float* base = thread_scratch(scratch);
    carve_backward(base, x, s);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t n = task / (x.H * chunks), hk = task / chunks % x.H, chunk = task % chunks;
      const Sequence seq = sequence_of(x.seqs, n);
      const int64_t t = seq.start + chunk * x.C;
      if (t >= seq.end) continue;
      const int64_t tokens = seq.end - t < x.C ? seq.end - t : x.C;
      std::memset(s.sums.all, 0, s.sums.floats * sizeof(float));
      for (int64_t h = hk * ratio; h < (hk + 1) * ratio; ++h) {
        const float* from = sums_of(seq, n, chunk, h).all;
        for (int64_t i = 0; i < s.sums.floats; i += kLanes) {
          store(s.sums.all + i, load(s.sums.all + i) + load(from + i));
        }
      }
      backward_keys(x, seq.b, t, tokens, hk, s);
      finish_keys(a, s, seq.b, t, tokens, hk, s.sums);
    }
  };
  parallel_for(parallel, N * x.H * chunks, second);
  return all_work;
}
