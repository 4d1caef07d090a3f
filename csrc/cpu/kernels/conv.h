// Depthwise causal convolution over a pool of histories (or none).
// Included inside the namespace of one instruction set, after conv_update.h.
//
// A task is a block of channels and a group of sequences: the block's weights are turned into rows
// of taps once and serve the whole group. Inside, kConvStrip channels at a time go through all
// tokens with their history in L1.

constexpr int64_t kConvStrip = 64;   // channels whose window is held at a time
constexpr int64_t kConvTokens = 16;  // tokens widened at a time
constexpr int64_t kConvGroup = 16;   // sequences a task
// Products of tokens (and taps) with channels below which a second thread costs more than it saves.
constexpr int64_t kConvAlone = 16384;

// --- prefill: four taps over many tokens whose rows lie at one stride, no float copy between

constexpr int kConvRows = 4;  // tokens and
constexpr int kConvWide = 2;  // registers of channels whose activation is computed side by side

// y[t] for U tokens and J registers of channels from x[t - 3 .. t]; x[0], x[1], x[2] are the rows
// before, and are left as those before the next token.
template <int U, int J, class XT, class YT>
GDN_INLINE void conv_rows(const float* bias, const float* w, F (*x)[J], const XT* token,
                          int64_t s_x, YT* y, int64_t s_y, bool with_silu) {
  F acc[U * J];
  unrolled<U>(GDN_EACH(t) {
    unrolled<J>(GDN_EACH(v) { x[3 + t][v] = load(token + t * s_x + v * kLanes); });
  });
  unrolled<J>(GDN_EACH(v) {
    unrolled<U>(GDN_EACH(t) { acc[t * J + v] = load(bias + v * kLanes); });
    unrolled<4>(GDN_EACH(i) {
      const F tap = load(w + i * kConvBlock + v * kLanes);
      unrolled<U>(GDN_EACH(t) { acc[t * J + v] = fma(tap, x[t + i][v], acc[t * J + v]); });
    });
  });
  if (with_silu) silu<U * J>(acc);
  unrolled<U>(GDN_EACH(t) {
    if constexpr (J == 2) {
      store2(y + t * s_y, acc[t * J], acc[t * J + 1]);
    } else {
      unrolled<J>(GDN_EACH(v) { store(y + t * s_y + v * kLanes, acc[t * J + v]); });
    }
  });
  unrolled<3>(GDN_EACH(i) { unrolled<J>(GDN_EACH(v) { x[i][v] = x[U + i][v]; }); });
}

// `tokens` rows of n channels, n a multiple of kLanes. x is the first of them, with the three rows
// before it in memory.
template <class XT, class YT>
static void conv_tokens(const Taps& taps, int64_t c_taps, int64_t n, int64_t tokens, const XT* x,
                        int64_t s_x, YT* y, int64_t s_y, bool with_silu) {
  auto channels = [&](int64_t i, auto registers) {
    constexpr int J = decltype(registers)::value;
    const float *bias = taps.bias + c_taps + i, *w = &taps.w[0][c_taps + i];
    F window[3 + kConvRows][J];
    unrolled<3>(GDN_EACH(t) {
      unrolled<J>(GDN_EACH(v) { window[t][v] = load(x + (t - 3) * s_x + i + v * kLanes); });
    });
    int64_t t = 0;
    for (; t + kConvRows <= tokens; t += kConvRows) {
      conv_rows<kConvRows>(bias, w, window, x + t * s_x + i, s_x, y + t * s_y + i, s_y, with_silu);
    }
    for (; t < tokens; ++t) {
      conv_rows<1>(bias, w, window, x + t * s_x + i, s_x, y + t * s_y + i, s_y, with_silu);
    }
  };
  int64_t i = 0;
  for (; i + kConvWide * kLanes <= n; i += kConvWide * kLanes) {
    channels(i, std::integral_constant<int, kConvWide>());
  }
  for (; i < n; i += kLanes) channels(i, std::integral_constant<int, 1>());
}

// A live sequence, W = 4, in tiles of tokens that stay in L1; `window` holds three rows of n
// channels of history and has room for three more. The sink gets no outputs where they can be
// written to a.y as they are.
template <class XT, class Sink>
static void conv_prefill(const ConvArgs& a, const Sequence& seq, const Taps& taps, int64_t c_taps,
                         int64_t c, int64_t n, const View& x, float* window, Sink sink) {
  const bool direct = a.y.ptr && a.y.dtype == x.dtype;
  alignas(64) float rows[kConvTokens * kConvBlock];
  auto out = [&](int64_t t) { return output_row<XT>(a, seq, t, c); };
  auto emit = [&](int64_t t, int64_t count) {
    for (int64_t j = 0; j < count; ++j) sink(t + j, c, n, rows + j * n);
  };
  // The first three tokens see the history.
  const int64_t first = seq.end - seq.start < 3 ? seq.end - seq.start : 3;
  for (int64_t j = 0; j < first; ++j) load_row(x, seq.b, seq.start + j, 0, n, window + (3 + j) * n);
  if (direct) {
    conv_tokens(taps, c_taps, n, first, window + 3 * n, n, out(seq.start), a.y.st, a.silu);
  } else {
    conv_tokens(taps, c_taps, n, first, window + 3 * n, n, rows, n, a.silu);
    emit(seq.start, first);
  }
  for (int64_t t = seq.start + first; t < seq.end; t += kConvTokens) {
    const int64_t tokens = seq.end - t < kConvTokens ? seq.end - t : kConvTokens;
    const XT* from = element<XT>(x, seq.b, t, 0);
    if (direct) {
      conv_tokens(taps, c_taps, n, tokens, from, x.st, out(t), a.y.st, a.silu);
    } else {
      conv_tokens(taps, c_taps, n, tokens, from, x.st, rows, n, a.silu);
      emit(t, tokens);
    }
  }
}

// n <= kConvBlock channels of one live sequence at once. sink(t, c, n, y) takes the outputs (f32,
// may be changed, readable to padded(n)) of token t; c counts from channel 0 of the tensor. An
// update that may write a.y (short_conv) does so itself where no conversion stands between.
template <class ST, class Sink>
GDN_INLINE void conv_strip(const ConvArgs& a, const Sequence& seq, const Taps& taps, int64_t c_taps,
                           int64_t c, int64_t n, Sink sink) {
  const int64_t s = padded(n);
  const int64_t back = a.W - 1;
  const ConvWindow win = conv_window(a, seq);
  const View x = from_column(a.x, c);
  if (is_update(a, seq, win, n)) {
    alignas(64) float y[kConvBlock];
    ST* row = history_row<ST>(a, seq, c);
    if (x.dtype == kDTypeOf<ST> && x.sd == 1) {
      const ST* token = element<ST>(x, seq.b, seq.start, 0);
      if (a.y.ptr && a.y.dtype == x.dtype) {
        const ConvRow<ST, ST, ST> one{row, token, output_row<ST>(a, seq, seq.start, c)};
        conv_update(a, win.old, taps, c_taps, n, &one, 1);
        return;
      }
      const ConvRow<ST, ST, float> one{row, token, y};
      conv_update(a, win.old, taps, c_taps, n, &one, 1);
    } else {
      load_row(x, seq.b, seq.start, 0, n, y);
      const ConvRow<ST, float, float> one{row, y, y};
      conv_update(a, win.old, taps, c_taps, n, &one, 1);
    }
    sink(seq.start, c, n, y);
    return;
  }
  // window: `back` rows of history, then up to kConvTokens rows of tokens
  alignas(64) float window[(kMaxConvWidth - 1 + kConvTokens) * kConvBlock];
  alignas(64) float y[kConvBlock];
  ST* state = nullptr;
  // The old row, widened: whole in the common case of at most kMaxConvWidth columns.
  alignas(64) float old[kMaxConvWidth * kConvBlock];
  const bool narrow_row = win.old <= kMaxConvWidth;
  // Nothing of the old row stays, and the tokens that replace it lie as the row does.
  const bool renewed =
      win.shift >= win.old && x.dtype == kDTypeOf<ST> && x.sd == 1 && a.state.s_c == 1;
  if (a.state.ptr) {
    state = history_row<ST>(a, seq, c);
  }
  if (seq.fresh || !state) {
    std::memset(old, 0, sizeof(float) * kMaxConvWidth * s);
    std::memset(window, 0, sizeof(float) * back * s);
  } else if (narrow_row && !renewed) {
    load_columns(state + win.first * a.state.s_l, a.state.s_c, a.state.s_l, win.old, n, old, s);
    std::memcpy(window, old + (win.history - win.first) * s, sizeof(float) * back * s);
  } else {
    load_columns(state + win.history * a.state.s_l, a.state.s_c, a.state.s_l, back, n, window, s);
  }
  const bool rows = a.W == 4 && x.sd == 1 && n % kLanes == 0;
  if (rows) {
    switch (x.dtype) {
      case DType::f32:
        conv_prefill<float>(a, seq, taps, c_taps, c, n, x, window, sink);
        break;
      case DType::bf16:
        conv_prefill<bf16_t>(a, seq, taps, c_taps, c, n, x, window, sink);
        break;
      case DType::f16:
        conv_prefill<f16_t>(a, seq, taps, c_taps, c, n, x, window, sink);
        break;
    }
  }
  for (int64_t t0 = rows ? seq.end : seq.start; t0 < seq.end; t0 += kConvTokens) {
    const int64_t tokens = seq.end - t0 < kConvTokens ? seq.end - t0 : kConvTokens;
    for (int64_t j = 0; j < tokens; ++j) {
      load_row(x, seq.b, t0 + j, 0, n, window + (back + j) * s);
    }
    for (int64_t j = 0; j < tokens; ++j) {
      for (int64_t i = 0; i < n; i += kLanes) {
        F acc = load(taps.bias + c_taps + i);
        for (int64_t w = 0; w < a.W; ++w) {
          acc = fma(load(&taps.w[w][c_taps + i]), load(window + (j + w) * s + i), acc);
        }
        store(y + i, a.silu ? silu(acc) : acc);
      }
      for (int64_t i = n; i < s; ++i) y[i] = 0.f;
      sink(t0 + j, c, n, y);
    }
    std::memmove(window, window + tokens * s, sizeof(float) * back * s);
  }
  if (!state || win.kept == 0) return;
  if (renewed) {
    for (int64_t j = 0; j < win.kept; ++j) {
      std::memcpy(state + j * a.state.s_l,
                  element<ST>(x, seq.b, seq.start + j + win.shift - win.old, 0), sizeof(ST) * n);
    }
    return;
  }
  if (narrow_row && win.kept <= kMaxConvWidth) {
    // Every kept column from `old` or from the tokens, then one store of the row.
    alignas(64) float kept[kMaxConvWidth * kConvBlock];
    for (int64_t j = 0; j < win.kept; ++j) {
      const int64_t source = j + win.shift;
      if (source < win.old) {
        std::memcpy(kept + j * s, old + source * s, sizeof(float) * s);
      } else {
        load_row(x, seq.b, seq.start + source - win.old, 0, n, kept + j * s);
      }
    }
    store_columns(kept, s, win.kept, n, state, a.state.s_c, a.state.s_l);
    return;
  }
  for (int64_t j = 0; j < win.kept; ++j) {
    // Ascending, and the source lies to the right: no column is read after it was overwritten.
    const int64_t source = j + win.shift;
    if (source >= win.old) {
      load_row(x, seq.b, seq.start + source - win.old, 0, n, y);
    } else if (seq.fresh) {
      std::memset(y, 0, sizeof y);
    } else {
      load_columns(state + (win.first + source) * a.state.s_l, a.state.s_c, a.state.s_l, 1, n, y,
                   s);
    }
    store_columns(y, s, 1, n, state + j * a.state.s_l, a.state.s_c, a.state.s_l);
  }
}

// Channels [c, c + n), n <= kConvBlock, of a live sequence, `width` at a time.
template <class Sink>
static void conv_channels(const ConvArgs& a, const Sequence& seq, const Taps& taps, int64_t c,
                          int64_t n, int64_t width, Sink sink) {
  for (int64_t i = 0; i < n; i += width) {
    const int64_t strip = n - i < width ? n - i : width;
    switch (a.state.dtype) {
      case DType::f32:
        conv_strip<float>(a, seq, taps, i, c + i, strip, sink);
        break;
      case DType::bf16:
        conv_strip<bf16_t>(a, seq, taps, i, c + i, strip, sink);
        break;
      case DType::f16:
        conv_strip<f16_t>(a, seq, taps, i, c + i, strip, sink);
        break;
    }
  }
}

// Channels [c, c + n) of sequence `index`, live or padding.
static void short_conv_block(const ConvArgs& a, int64_t index, int64_t c, int64_t n,
                             const Taps& taps) {
  const Sequence seq = sequence_of(a.seqs, index, 0);
  if (seq.row < 0) {
    const float zeros[kConvBlock] = {};
    for (int64_t t = seq.start; t < seq.end; ++t) store_row(a.y, seq.b, t, 0, c, n, zeros);
    return;
  }
  if (seq.end <= seq.start) return;
  // Whole registers of channels, then the rest; where the window is memory of its own, strips that
  // keep it in L1.
  const bool wide = seq.end - seq.start == 1 || (a.W == 4 && a.x.sd == 1);
  const int64_t width = !wide ? kConvStrip : n < kLanes ? kLanes : n / kLanes * kLanes;
  conv_channels(a, seq, taps, c, n, width,
                [&](int64_t t, int64_t channel, int64_t n_strip, float* y) {
                  store_row(a.y, seq.b, t, 0, channel, n_strip, y);
                });
}

#if GDN_SIMD_AVX512BF16
// Channels [c, c + n) of two sequences side by side: their misses overlap, and the taps serve both.
// y_of(i, seq): where the outputs of sequence i go. False, and nothing done, where they are not two
// updates in pairs of words.
template <class Outputs>
static bool conv_update_two(const ConvArgs& a, int64_t first, int64_t second, int64_t c, int64_t n,
                            const Taps& taps, Outputs y_of) {
  constexpr DType words = DType::bf16;
  if (!has_pairs(a) || a.x.dtype != words || a.x.sd != 1 || a.state.dtype != words) return false;
  using Y = std::remove_pointer_t<decltype(y_of(0, Sequence{}))>;
  ConvRow<bf16_t, bf16_t, Y> rows[2];
  int64_t columns = 0;
  for (int i = 0; i < 2; ++i) {
    const Sequence seq = sequence_of(a.seqs, i == 0 ? first : second, 0);
    if (seq.row < 0) return false;
    const ConvWindow win = conv_window(a, seq);
    if (!is_update(a, seq, win, n)) return false;
    columns = win.old;
    rows[i] = {history_row<bf16_t>(a, seq, c), element<bf16_t>(a.x, seq.b, seq.start, 0) + c,
               y_of(i, seq)};
  }
  conv_update(a, columns, taps, 0, n, rows, 2);
  return true;
}
#endif

// step(n, m, block, taps) over every block of channels and sequence n with another one, m, beside
// it (none: negative); prepare(block, taps) makes a block's taps.
template <class Prepare, class Step>
static void over_blocks(const ConvArgs& a, int64_t blocks, const Parallel& parallel,
                        Prepare prepare, Step step) {
  const int64_t half = (a.seqs.N + 1) / 2;
  auto beside = [&](int64_t n) { return n + half < a.seqs.N ? n + half : -1; };
  if (a.seqs.N <= kConvGroup) {
    auto body = [&](int64_t begin, int64_t end) {
      Taps taps;
      for (int64_t block = begin; block < end; ++block) {
        prepare(block, taps);
        for (int64_t n = 0; n < half; ++n) step(n, beside(n), block, taps);
      }
    };
    parallel_for(parallel, a.seqs.N > 0 ? blocks : 0, body);
    return;
  }
  // Many sequences: all taps first (some 400 KB for 10240 channels), then one sequence after the
  // other from its first channel to its last, because short pieces of many rows would wait for
  // memory.
  const ScopedMemory memory(sizeof(Taps) * blocks);
  Taps* all = static_cast<Taps*>(memory.data);
  auto prepare_all = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) prepare(i, all[i]);
  };
  parallel_for(parallel, blocks, prepare_all);
  auto body = [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t n = task / blocks, block = task % blocks;
      step(n, beside(n), block, all[block]);
    }
  };
  parallel_for(parallel, half * blocks, body);
}

static void short_conv(const ConvArgs& a, const Parallel& threads) {
  Parallel parallel = threads;
  if ((a.seqs.B * a.seqs.T + a.W) * a.C < kConvAlone) parallel.threads = 1;
  // As many blocks as threads can share evenly.
  int64_t blocks = (a.C + kConvBlock - 1) / kConvBlock;
  blocks = (blocks + parallel.threads - 1) / parallel.threads * parallel.threads;
  const int64_t strips = (a.C + kConvStrip - 1) / kConvStrip;
  const int64_t width = (strips + blocks - 1) / blocks * kConvStrip;
  auto channels = [&](int64_t block) {
    return a.C - block * width < width ? a.C - block * width : width;
  };
  over_blocks(
      a, (a.C + width - 1) / width, parallel,
      [&](int64_t block, Taps& taps) { load_taps(a, block * width, channels(block), taps); },
      [&](int64_t n, int64_t m, int64_t block, const Taps& taps) {
        const int64_t c = block * width, count = channels(block);
#if GDN_SIMD_AVX512BF16
        auto y_of = [&](int, const Sequence& seq) {
          return output_row<bf16_t>(a, seq, seq.start, c);
        };
        const bool in_words = a.y.dtype == DType::bf16;
        if (m >= 0 && in_words && conv_update_two(a, n, m, c, count, taps, y_of)) return;
#endif
        short_conv_block(a, n, c, count, taps);
        if (m >= 0) short_conv_block(a, m, c, count, taps);
      });
}
