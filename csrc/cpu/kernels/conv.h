// Depthwise causal convolution over a pool of histories (or none).
// Included inside the namespace of one instruction set, after gates.h.
//
// A task is a block of channels and a group of sequences: the block's weights are turned into rows
// of taps once and serve the whole group. Inside, kConvStrip channels at a time go through all
// tokens with their history in L1.

constexpr int64_t kConvBlock = 512;  // channels a task
constexpr int64_t kConvStrip = 64;   // channels whose window is held at a time
constexpr int64_t kConvTokens = 16;  // tokens widened at a time
constexpr int64_t kConvGroup = 16;   // sequences a task

// Taps of a block of channels, time order: w[tap][channel], zero past the block.
struct alignas(64) Taps {
  float w[kMaxConvWidth][kConvBlock];
  float bias[kConvBlock];
};

// dst[j * dst_stride + c] = column j of channel c, for channels [0, n) and columns [0, columns).
template <class T>
static void load_columns(const T* p, int64_t s_c, int64_t s_l, int64_t columns, int64_t n,
                         float* dst, int64_t dst_stride) {
  if (s_c == 1) {
    for (int64_t j = 0; j < columns; ++j) widen(p + j * s_l, 1, n, dst + j * dst_stride);
    return;
  }
  int64_t c = 0;
  if (s_l == 1 && s_c == 4 && columns == 4) {
    for (; c + kLanes <= n; c += kLanes) {
      F x[4];
      for (int i = 0; i < 4; ++i) x[i] = load(p + c * 4 + i * kLanes);
      rows_to_columns4(x);
      for (int j = 0; j < 4; ++j) store(dst + j * dst_stride + c, x[j]);
    }
  }
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t i = c; i < n; ++i) dst[j * dst_stride + i] = to_float(p[i * s_c + j * s_l]);
    for (int64_t i = n; i < padded(n); ++i) dst[j * dst_stride + i] = 0.f;
  }
}
template <class T>
static void store_columns(const float* src, int64_t src_stride, int64_t columns, int64_t n, T* p,
                          int64_t s_c, int64_t s_l) {
  if (s_c == 1) {
    for (int64_t j = 0; j < columns; ++j) narrow(src + j * src_stride, n, p + j * s_l);
    return;
  }
  int64_t c = 0;
  if (s_l == 1 && s_c == 4 && columns == 4) {
    for (; c + kLanes <= n; c += kLanes) {
      F x[4];
      for (int j = 0; j < 4; ++j) x[j] = load(src + j * src_stride + c);
      columns4_to_rows(x);
      for (int i = 0; i < 4; ++i) store(p + c * 4 + i * kLanes, x[i]);
    }
  }
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t i = c; i < n; ++i) p[i * s_c + j * s_l] = from_float<T>(src[j * src_stride + i]);
  }
}

static void load_taps(const ConvArgs& a, int64_t c0, int64_t n, Taps& taps) {
  const int64_t offset = c0 * a.weight.s0;
  float* dst = &taps.w[0][0];
  switch (a.weight.dtype) {
    case DType::f32:
      load_columns(static_cast<const float*>(a.weight.ptr) + offset, a.weight.s0, a.weight.s1, a.W,
                   n, dst, kConvBlock);
      break;
    case DType::bf16:
      load_columns(static_cast<const bf16_t*>(a.weight.ptr) + offset, a.weight.s0, a.weight.s1, a.W,
                   n, dst, kConvBlock);
      break;
    case DType::f16:
      load_columns(static_cast<const f16_t*>(a.weight.ptr) + offset, a.weight.s0, a.weight.s1, a.W,
                   n, dst, kConvBlock);
      break;
  }
  if (a.bias.ptr) {
    load_params(a.bias, c0, n, taps.bias);
  } else {
    std::memset(taps.bias, 0, sizeof(float) * padded(n));
  }
}

// Which columns of a pool row are history, and what a call leaves there: column j of the new row is
// entry j + shift of [old columns first .. first + old, the call's tokens].
struct ConvWindow {
  int64_t first, old, kept, shift;
  int64_t history;  // column of the oldest live entry
};
static ConvWindow conv_window(const ConvArgs& a, const Sequence& seq) {
  const int64_t taps = a.W - 1, T = seq.end - seq.start;
  if (a.W == 1) return {0, 0, 0, 0, 0};
  if (!a.state.leading) return {0, a.state.L, a.state.L, T, a.state.L - taps};
  if (!a.seqs.num_accepted.ptr) return {0, taps, taps, T, 0};
  return {seq.accepted - 1, taps, taps - 1 + T, 1, seq.accepted - 1};
}

// The update of a decode step: four taps, one token, a row of three or four live columns that
// shifts by one. Everything stays in registers from the old columns to the new; y goes in as the
// token and comes out as the result.
enum class ConvLayout { columns, rows, strided };

template <int kColumns, ConvLayout layout, class ST>
static void conv_update(const ConvArgs& a, const Taps& taps, int64_t c_taps, int64_t n, ST* state,
                        float* y) {
  const int64_t s_c = a.state.s_c, s_l = a.state.s_l;
  const bool silu_on = a.silu;
  for (int64_t i = 0; i < n; i += kLanes) {
    ST* p = state + i * s_c;
    F x[kColumns + 1];
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) {
      if constexpr (layout == ConvLayout::columns) {
        x[j] = load(p + j * s_l);
      } else if constexpr (layout == ConvLayout::rows) {
        x[j] = load(p + j * kLanes);
      } else {
        float tmp[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) tmp[lane] = to_float(p[lane * s_c + j * s_l]);
        x[j] = load(tmp);
      }
    }
    if constexpr (layout == ConvLayout::rows) rows_to_columns4(x);
    x[kColumns] = load(y + i);
    F acc = load(taps.bias + c_taps + i);
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) {
      acc = fma(load(&taps.w[w][c_taps + i]), x[kColumns - 3 + w], acc);
    }
    store(y + i, silu_on ? silu(acc) : acc);
    if constexpr (layout == ConvLayout::rows) columns4_to_rows(x + 1);
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; ++j) {
      if constexpr (layout == ConvLayout::columns) {
        store(p + j * s_l, x[j + 1]);
      } else if constexpr (layout == ConvLayout::rows) {
        store(p + j * kLanes, x[j + 1]);
      } else {
        float tmp[kLanes];
        store(tmp, x[j + 1]);
        for (int lane = 0; lane < kLanes; ++lane) {
          p[lane * s_c + j * s_l] = from_float<ST>(tmp[lane]);
        }
      }
    }
  }
}

template <class ST>
static void conv_update(const ConvArgs& a, int64_t columns, const Taps& taps, int64_t c_taps,
                        int64_t n, ST* state, float* y) {
  if (a.state.s_c == 1) {
    columns == 3 ? conv_update<3, ConvLayout::columns>(a, taps, c_taps, n, state, y)
                 : conv_update<4, ConvLayout::columns>(a, taps, c_taps, n, state, y);
  } else if (columns == 4 && a.state.s_l == 1 && a.state.s_c == 4) {
    conv_update<4, ConvLayout::rows>(a, taps, c_taps, n, state, y);
  } else {
    columns == 3 ? conv_update<3, ConvLayout::strided>(a, taps, c_taps, n, state, y)
                 : conv_update<4, ConvLayout::strided>(a, taps, c_taps, n, state, y);
  }
}

// n <= kConvBlock channels of one live sequence at once. sink(t, c, n, y) takes the outputs (f32,
// may be changed, readable to padded(n)) of token t; c counts from channel 0 of the tensor.
template <class ST, class Sink>
GDN_INLINE void conv_strip(const ConvArgs& a, const Sequence& seq, const Taps& taps, int64_t c_taps,
                           int64_t c, int64_t n, Sink sink) {
  const int64_t s = padded(n);
  const int64_t back = a.W - 1;
  const ConvWindow win = conv_window(a, seq);
  const View x = from_column(a.x, c);
  if (a.state.ptr && a.W == 4 && seq.end - seq.start == 1 && !seq.fresh && n % kLanes == 0 &&
      win.first == 0 && win.kept == win.old && (win.old == 3 || win.old == 4)) {
    alignas(64) float token[kConvBlock];
    load_row(x, seq.b, seq.start, 0, n, token);
    ST* row = static_cast<ST*>(a.state.ptr) + seq.row * a.state.s_p + c * a.state.s_c;
    conv_update(a, win.old, taps, c_taps, n, row, token);
    sink(seq.start, c, n, token);
    return;
  }
  // window: `back` rows of history, then up to kConvTokens rows of tokens
  alignas(64) float window[(kMaxConvWidth - 1 + kConvTokens) * kConvBlock];
  alignas(64) float y[kConvBlock];
  ST* state = nullptr;
  // The old row, widened: whole in the common case of at most kMaxConvWidth columns.
  alignas(64) float old[kMaxConvWidth * kConvBlock];
  const bool narrow_row = win.old <= kMaxConvWidth;
  if (a.state.ptr) {
    state = static_cast<ST*>(a.state.ptr) + seq.row * a.state.s_p + c * a.state.s_c;
  }
  if (seq.fresh || !state) {
    std::memset(old, 0, sizeof(float) * kMaxConvWidth * s);
    std::memset(window, 0, sizeof(float) * back * s);
  } else if (narrow_row) {
    load_columns(state + win.first * a.state.s_l, a.state.s_c, a.state.s_l, win.old, n, old, s);
    std::memcpy(window, old + (win.history - win.first) * s, sizeof(float) * back * s);
  } else {
    load_columns(state + win.history * a.state.s_l, a.state.s_c, a.state.s_l, back, n, window, s);
  }
  for (int64_t t0 = seq.start; t0 < seq.end; t0 += kConvTokens) {
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
  // A window of many tokens wants narrow strips; one token has nothing to keep in L1.
  const int64_t width = seq.end - seq.start == 1 ? kConvBlock : kConvStrip;
  conv_channels(a, seq, taps, c, n, width,
                [&](int64_t t, int64_t channel, int64_t n_strip, float* y) {
                  store_row(a.y, seq.b, t, 0, channel, n_strip, y);
                });
}

static void short_conv(const ConvArgs& a, const Parallel& parallel) {
  const int64_t blocks = (a.C + kConvBlock - 1) / kConvBlock;
  auto channels = [&](int64_t block) {
    return a.C - block * kConvBlock < kConvBlock ? a.C - block * kConvBlock : kConvBlock;
  };
  if (a.seqs.N <= kConvGroup) {
    auto body = [&](int64_t begin, int64_t end) {
      Taps taps;
      for (int64_t block = begin; block < end; ++block) {
        load_taps(a, block * kConvBlock, channels(block), taps);
        for (int64_t n = 0; n < a.seqs.N; ++n) {
          short_conv_block(a, n, block * kConvBlock, channels(block), taps);
        }
      }
    };
    parallel_for(parallel, a.seqs.N > 0 ? blocks : 0, body);
    return;
  }
  // Many sequences: all taps first (some 400 KB for 10240 channels), then one sequence after the
  // other from its first channel to its last, because short pieces of many rows would wait for
  // memory.
  Taps* all = static_cast<Taps*>(std::aligned_alloc(64, sizeof(Taps) * blocks));
  auto prepare = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) load_taps(a, i * kConvBlock, channels(i), all[i]);
  };
  parallel_for(parallel, blocks, prepare);
  auto body = [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t block = task % blocks;
      short_conv_block(a, task / blocks, block * kConvBlock, channels(block), all[block]);
    }
  };
  parallel_for(parallel, a.seqs.N * blocks, body);
  std::free(all);
}

// conv + split + gates (+ l2norm): a task is one head's channels (query, key or value head) and a
// group of sequences; the gates ride along with the value heads.
static void conv_gating(const ConvGatingArgs& a, const Parallel& parallel) {
  const int64_t heads = 2 * a.H + a.HV;
  const int64_t groups = (a.conv.seqs.N + kConvGroup - 1) / kConvGroup;
  auto body = [&](int64_t begin, int64_t end) {
    Taps taps;
    alignas(64) float row[kMaxRow];
    int64_t loaded = -1;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t head = task / groups;
      const bool is_value = head >= 2 * a.H;
      const bool is_key = head >= a.H && !is_value;
      const int64_t h = is_value ? head - 2 * a.H : head % a.H;
      const int64_t n_channels = is_value ? a.V : a.K;
      const int64_t c = is_value ? 2 * a.H * a.K + h * a.V : head * a.K;
      const View& out = is_value ? a.v : is_key ? a.k : a.q;
      if (loaded != head) {
        load_taps(a.conv, c, n_channels, taps);
        loaded = head;
      }
      const int64_t first = task % groups * kConvGroup;
      const int64_t last = first + kConvGroup < a.conv.seqs.N ? first + kConvGroup : a.conv.seqs.N;
      for (int64_t n = first; n < last; ++n) {
        const Sequence seq = sequence_of(a.conv.seqs, n, 0);
        for (int64_t t = seq.start; t < seq.end && is_value; ++t) {
          const int64_t i = (seq.b * a.conv.seqs.T + t) * a.HV + h;
          const RawGates gates = raw_gates(a.gates, seq.b, t, h);
          a.g[i] = seq.row < 0 ? 0.f : gates.g;
          a.beta[i] = seq.row < 0 ? 0.f : gates.beta;
        }
        if (seq.row < 0) {
          std::memset(row, 0, sizeof row);
          for (int64_t t = seq.start; t < seq.end; ++t)
            store_row(out, seq.b, t, h, 0, n_channels, row);
          continue;
        }
        if (seq.end <= seq.start) continue;
        conv_channels(a.conv, seq, taps, c, n_channels, n_channels,
                      [&](int64_t t, int64_t, int64_t n_row, float* y) {
                        if (a.l2norm && !is_value) l2_normalise(y, n_row);
                        store_row(out, seq.b, t, h, 0, n_row, y);
                      });
      }
    }
  };
  parallel_for(parallel, heads * groups, body);
}
