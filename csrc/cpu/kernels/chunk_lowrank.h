// Chunked prefill without a base state: between chunks there is only the window, and its entries
// make the state that a chunk starts from (docs/windows.md).
// Included inside the namespace of one instruction set, after chunk.h.

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
    [[maybe_unused]] const StreamsEnd streams_end;
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
