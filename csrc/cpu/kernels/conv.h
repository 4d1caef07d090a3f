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
// Products of tokens (and taps) with channels below which a second thread costs more than it saves.
constexpr int64_t kConvAlone = 16384;

// An update in bfloat16 by products of pairs where the processor makes one a cycle: AVX512-BF16
// without AMX is AMD's.
#if GDN_SIMD_AVX512BF16 && !GDN_SIMD_AMX
#define GDN_CONV_PAIRS 1
#endif

// Taps of a block of channels, time order: w[tap][channel], zero past the block.
struct alignas(64) Taps {
  float w[kMaxConvWidth][kConvBlock];
  float bias[kConvBlock];
#if GDN_CONV_PAIRS
  uint32_t pairs[2][kConvBlock];  // of four in bfloat16; the older of two in the upper half
#endif
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

#if GDN_CONV_PAIRS
constexpr int kPairChannels = 2 * kLanes;  // the words of a register

static bool has_pairs(const ConvArgs& a) {
  return a.W == 4 && a.weight.dtype == DType::bf16 && a.weight.s0 == 4 && a.weight.s1 == 1;
}
// Words `lower` and `upper` of the 64 in two registers side by side.
GDN_INLINE __m512i pick_pairs(__m512i a, __m512i b, I32 lower, I32 upper) {
  return _mm512_permutex2var_epi16(a, (__m512i)(lower | upper << 16), b);
}
// Of whole registers of channels.
static void load_pairs(const ConvArgs& a, int64_t c0, int64_t n, Taps& taps) {
  const bf16_t* w = static_cast<const bf16_t*>(a.weight.ptr) + c0 * 4;
  const I32 first = lane_numbers() * 4;
  for (int64_t i = 0; i + kLanes <= n; i += kLanes) {
    const __m512i front = _mm512_loadu_si512(w + i * 4), back = _mm512_loadu_si512(w + i * 4 + 32);
    unrolled<2>(GDN_EACH(j) {
      const I32 older = first + 2 * j;
      _mm512_store_si512(taps.pairs[j] + i, pick_pairs(front, back, older + 1, older));
    });
  }
}
#endif

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
#if GDN_CONV_PAIRS
  if (has_pairs(a)) load_pairs(a, c0, n, taps);
#endif
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

// --- the update of a decode step: four taps, one token, a row of three or four live columns that
// shifts by one, in registers from the old columns to the new

// `rows`: the columns of a channel are neighbours, as Hugging Face keeps them.
enum class ConvLayout { columns, rows, strided };

template <int kColumns, ConvLayout layout, class ST>
GDN_INLINE void load_history(const ST* p, int64_t s_c, int64_t s_l, F* x) {
  if constexpr (layout == ConvLayout::rows && kColumns == 3) return load_columns3(p, x);
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
}

// x: the old columns and the new one.
template <int kColumns, ConvLayout layout, class ST>
GDN_INLINE void roll_history(ST* p, int64_t s_c, int64_t s_l, F* x) {
  if constexpr (layout == ConvLayout::rows && kColumns == 3) return roll_columns3(p, x, x[3]);
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

// Bytes ahead in a row of channels that are asked for: the hardware stops at every page.
constexpr int64_t kConvAhead = 2048;
constexpr int kConvVectors = 4;  // registers of channels whose activation is computed side by side

// J registers of channels: `token` in, `y` out (which may be the same memory).
template <int J, int kColumns, ConvLayout layout, class ST, class XT, class YT>
GDN_INLINE void conv_update_vectors(const ConvArgs& a, const float* bias, const float* w, ST* p,
                                    const XT* token, YT* y) {
  const int64_t s_c = a.state.s_c, s_l = a.state.s_l;
  F acc[J];
  if constexpr (layout == ConvLayout::rows) {
    const char* ahead = reinterpret_cast<const char*>(p) + kConvAhead;
#pragma GCC unroll 8
    for (size_t line = 0; line < J * kColumns * kLanes * sizeof(ST); line += 64) {
      prefetch(ahead + line);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < J; ++v) {
    const int64_t i = v * kLanes;
    F x[kColumns + 1];
    load_history<kColumns, layout>(p + i * s_c, s_c, s_l, x);
    x[kColumns] = load(token + i);
    acc[v] = load(bias + i);
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      acc[v] = fma(load(w + t * kConvBlock + i), x[kColumns - 3 + t], acc[v]);
    }
    roll_history<kColumns, layout>(p + i * s_c, s_c, s_l, x);
  }
  if (a.silu) silu<J>(acc);
  if constexpr (J % 2 == 0) {
#pragma GCC unroll 4
    for (int v = 0; v < J; v += 2) store2(y + v * kLanes, acc[v], acc[v + 1]);
  } else {
    store(y, acc[0]);
  }
}

#if GDN_CONV_PAIRS
// Sums of 32 channels. A word stays a word, from the old columns to the new. Of a pair the
// instruction adds the upper product first, and here that is the older one: the sums have the bits
// of four multiply-adds (where none of them is subnormal, which the instruction takes as zero).
template <int kColumns, ConvLayout layout>
GDN_INLINE void conv_update_words(const ConvArgs& a, const float* bias, const uint32_t* pairs,
                                  bf16_t* p, const bf16_t* token, F* acc) {
  constexpr int words = kPairChannels;
  const I32 c = lane_numbers();
  const __m512i x = _mm512_loadu_si512(token);
  __m512i front[2], back[2];  // the two older entries of 16 channels, and the two newer
  if constexpr (layout == ConvLayout::columns) {
    const int64_t s = a.state.s_l;
    __m512i h[kColumns + 1];
    unrolled<kColumns>(GDN_EACH(j) { h[j] = _mm512_loadu_si512(p + j * s); });
    h[kColumns] = x;
    unrolled<kColumns>(GDN_EACH(j) { _mm512_storeu_si512(p + j * s, h[j + 1]); });
    unrolled<2>(GDN_EACH(i) {
      const I32 older = c + i * kLanes, newer = older + words;
      front[i] = pick_pairs(h[kColumns - 3], h[kColumns - 2], newer, older);
      back[i] = pick_pairs(h[kColumns - 1], x, newer, older);
    });
  } else if constexpr (kColumns == 4) {
    // Four words of a channel, one place on; its newest behind them.
    __m512i h[4];
    unrolled<4>(GDN_EACH(i) {
      const __m512i moved = _mm512_srli_epi64(_mm512_loadu_si512(p + i * words), 16);
      const I32 channel = c / 2 + i * 8;
      h[i] = _mm512_mask_permutexvar_epi16(moved, 0x88888888u, (__m512i)(channel << 16), x);
      _mm512_storeu_si512(p + i * words, h[i]);
    });
    unrolled<2>(GDN_EACH(i) {
      front[i] = pick_pairs(h[2 * i], h[2 * i + 1], 4 * c + 1, 4 * c);
      back[i] = pick_pairs(h[2 * i], h[2 * i + 1], 4 * c + 3, 4 * c + 2);
    });
  } else {
    __m512i old[3], h[3];
    unrolled<3>(GDN_EACH(i) { old[i] = _mm512_loadu_si512(p + i * words); });
    unrolled<3>(GDN_EACH(i) {
      // Word w of the rows is x[w / 3] where w % 3 is 2, else the word after it.
      constexpr uint32_t newest = 0x92492492u >> (i == 0 ? 2 : i == 1 ? 1 : 0);
      const __m512i moved = i < 2 ? _mm512_loadu_si512(p + i * words + 1)
                                  : _mm512_maskz_loadu_epi16(0x7fffffffu, p + i * words + 1);
      const I32 w = c * 2 + i * words;
      h[i] = _mm512_mask_permutexvar_epi16(moved, newest, (__m512i)(w / 3 | (w + 1) / 3 << 16), x);
    });
    unrolled<2>(GDN_EACH(i) {
      const I32 oldest = 3 * c + i * kLanes;
      front[i] = pick_pairs(old[i], old[i + 1], oldest + 1, oldest);
      back[i] = pick_pairs(h[i], h[i + 1], oldest + 2, oldest + 1);
    });
    unrolled<3>(GDN_EACH(i) { _mm512_storeu_si512(p + i * words, h[i]); });
  }
  unrolled<2>(GDN_EACH(i) {
    const __m512bh first = (__m512bh)_mm512_loadu_si512(pairs + i * kLanes);
    const __m512bh second = (__m512bh)_mm512_loadu_si512(pairs + kConvBlock + i * kLanes);
    acc[i] = _mm512_dpbf16_ps(load(bias + i * kLanes), first, (__m512bh)front[i]);
    acc[i] = _mm512_dpbf16_ps(acc[i], second, (__m512bh)back[i]);
  });
}

// J registers of words.
template <int J, int kColumns, ConvLayout layout, class YT>
GDN_INLINE void conv_update_pairs(const ConvArgs& a, const float* bias, const uint32_t* pairs,
                                  bf16_t* p, const bf16_t* token, YT* y) {
  if constexpr (layout == ConvLayout::rows) {
    const char* ahead = reinterpret_cast<const char*>(p) + kConvAhead;
    unrolled<J * kColumns>(GDN_EACH(line) { prefetch(ahead + line * 64); });
  }
  F acc[2 * J];
  unrolled<J>(GDN_EACH(j) {
    constexpr int c = j * kPairChannels;
    conv_update_words<kColumns, layout>(a, bias + c, pairs + c, p + c * a.state.s_c, token + c,
                                        acc + 2 * j);
  });
  if (a.silu) silu<2 * J>(acc);
  unrolled<J>(GDN_EACH(j) { store2(y + j * kPairChannels, acc[2 * j], acc[2 * j + 1]); });
}
#endif

// What the update of a sequence reads and writes.
template <class ST, class XT, class YT>
struct ConvRow {
  ST* state;
  const XT* token;
  YT* y;
};

// n channels of `count` sequences, in turns: a step of each.
template <int kColumns, ConvLayout layout, class ST, class XT, class YT>
static void conv_update(const ConvArgs& a, const Taps& taps, int64_t c_taps, int64_t n,
                        const ConvRow<ST, XT, YT>* rows, int count) {
  const float *bias = taps.bias + c_taps, *w = &taps.w[0][c_taps];
  const int64_t s_c = a.state.s_c;
  // Absent, its zeros at the first channels serve all of them: taps come from L2, and a fifth of
  // them less is 1 to 4 % of the time at 256 sequences.
  const int64_t s_bias = a.bias.ptr ? 1 : 0;
  int64_t i = 0;
#if GDN_CONV_PAIRS
  if constexpr (layout != ConvLayout::strided && std::is_same_v<ST, bf16_t> &&
                std::is_same_v<XT, bf16_t>) {
    auto pairs = [&](auto registers) {
      constexpr int64_t step = registers * kPairChannels;
      for (; i + step <= n; i += step) {
        for (int r = 0; r < count; ++r) {
          const auto [state, token, y] = rows[r];
          conv_update_pairs<registers, kColumns, layout>(
              a, bias + i * s_bias, taps.pairs[0] + c_taps + i, state + i * s_c, token + i, y + i);
        }
      }
    };
    if (has_pairs(a)) {
      pairs(std::integral_constant<int, 2>());
      pairs(std::integral_constant<int, 1>());
    }
  }
#endif
  auto vectors = [&](auto registers) {
    constexpr int64_t step = registers * kLanes;
    for (; i + step <= n; i += step) {
      for (int r = 0; r < count; ++r) {
        const auto [state, token, y] = rows[r];
        conv_update_vectors<registers, kColumns, layout>(a, bias + i * s_bias, w + i,
                                                         state + i * s_c, token + i, y + i);
      }
    }
  };
  vectors(std::integral_constant<int, kConvVectors>());
  vectors(std::integral_constant<int, 1>());
}

template <class ST, class XT, class YT>
static void conv_update(const ConvArgs& a, int64_t columns, const Taps& taps, int64_t c_taps,
                        int64_t n, const ConvRow<ST, XT, YT>* rows, int count) {
  auto run = [&](auto number) {
    constexpr int kColumns = decltype(number)::value;
    if (a.state.s_c == 1) {
      conv_update<kColumns, ConvLayout::columns>(a, taps, c_taps, n, rows, count);
    } else if (a.state.s_l == 1 && a.state.s_c == kColumns) {
      conv_update<kColumns, ConvLayout::rows>(a, taps, c_taps, n, rows, count);
    } else {
      conv_update<kColumns, ConvLayout::strided>(a, taps, c_taps, n, rows, count);
    }
  };
  columns == 3 ? run(std::integral_constant<int, 3>()) : run(std::integral_constant<int, 4>());
}

// Whether n channels of a live sequence are a decode step's: a row of three or four columns.
static bool is_update(const ConvArgs& a, const Sequence& seq, const ConvWindow& win, int64_t n) {
  return a.state.ptr && a.W == 4 && seq.end - seq.start == 1 && !seq.fresh && n % kLanes == 0 &&
         win.first == 0 && win.kept == win.old && (win.old == 3 || win.old == 4);
}
template <class ST>
GDN_INLINE ST* history_row(const ConvArgs& a, const Sequence& seq, int64_t c) {
  return static_cast<ST*>(a.state.ptr) + seq.row * a.state.s_p + c * a.state.s_c;
}
template <class T>
GDN_INLINE T* output_row(const ConvArgs& a, const Sequence& seq, int64_t t, int64_t c) {
  return const_cast<T*>(element<T>(a.y, seq.b, t, 0)) + c;
}

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

#if GDN_CONV_PAIRS
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
#if GDN_CONV_PAIRS
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

// conv + split + gates (+ l2norm). A task is a sequence and a block: as many whole heads of one
// kind as kConvBlock channels hold, so that a sequence's row is walked in memory order and its taps
// are made once.
static void conv_gating(const ConvGatingArgs& a, const Parallel& parallel) {
  GatingArgs gates;
  gates.rows_b = a.conv.seqs.B;
  gates.rows_t = a.conv.seqs.T;
  gates.HV = a.HV;
  gates.a = a.gates.g;
  gates.b = a.gates.beta;
  gates.A_log = a.gates.A_log;
  gates.dt_bias = a.gates.dt_bias;
  gates.g = a.g;
  gates.beta = a.beta;
  gating(gates, parallel);

  struct Block {
    const View* out;
    int64_t head, heads, dim, channel;
    bool normalise;
  };
  const int64_t k_heads = kConvBlock / a.K, v_heads = kConvBlock / a.V;
  const int64_t k_blocks = (a.H + k_heads - 1) / k_heads, v_blocks = (a.HV + v_heads - 1) / v_heads;
  const int64_t blocks = 2 * k_blocks + v_blocks;
  auto block_of = [&](int64_t i) {
    const bool is_value = i >= 2 * k_blocks, is_key = i >= k_blocks && !is_value;
    Block b;
    b.dim = is_value ? a.V : a.K;
    b.head = is_value ? (i - 2 * k_blocks) * v_heads : i % k_blocks * k_heads;
    const int64_t left = (is_value ? a.HV : a.H) - b.head, most = is_value ? v_heads : k_heads;
    b.heads = left < most ? left : most;
    b.out = is_value ? &a.v : is_key ? &a.k : &a.q;
    b.channel = (is_value ? 2 * a.H * a.K : is_key ? a.H * a.K : 0) + b.head * b.dim;
    b.normalise = a.l2norm && !is_value;
    return b;
  };
  auto step = [&](int64_t n, const Block& b, const Taps& taps) {
    const Sequence seq = sequence_of(a.conv.seqs, n, 0);
    if (seq.row < 0) {
      const float zeros[kMaxRow] = {};
      for (int64_t t = seq.start; t < seq.end; ++t) {
        for (int64_t h = b.head; h < b.head + b.heads; ++h) {
          store_row(*b.out, seq.b, t, h, 0, b.dim, zeros);
          if (b.out != &a.v) continue;
          const int64_t i = (seq.b * a.conv.seqs.T + t) * a.HV + h;
          a.g[i] = a.beta[i] = 0.f;
        }
      }
      return;
    }
    if (seq.end <= seq.start) return;
    conv_channels(a.conv, seq, taps, b.channel, b.heads * b.dim, b.dim,
                  [&](int64_t t, int64_t c, int64_t n_row, float* y) {
                    if (b.normalise) l2_normalise(y, n_row);
                    store_row(*b.out, seq.b, t, b.head + (c - b.channel) / b.dim, 0, n_row, y);
                  });
  };
#if GDN_CONV_PAIRS
  auto two = [&](int64_t n, int64_t m, const Block& b, const Taps& taps) {
    const int64_t channels = b.heads * b.dim;
    if (b.out->dtype != DType::bf16 || b.dim % kLanes != 0) return false;
    if (!b.normalise) {
      auto y_of = [&](int, const Sequence& seq) {
        return const_cast<bf16_t*>(element<bf16_t>(*b.out, seq.b, seq.start, b.head));
      };
      return conv_update_two(a.conv, n, m, b.channel, channels, taps, y_of);
    }
    alignas(64) float y[2][kConvBlock];
    Sequence seqs[2];
    auto y_of = [&](int i, const Sequence& seq) {
      seqs[i] = seq;
      return y[i];
    };
    if (!conv_update_two(a.conv, n, m, b.channel, channels, taps, y_of)) return false;
    for (int i = 0; i < 2; ++i) {
      for (int64_t h = 0; h < b.heads; ++h) {
        l2_normalise(y[i] + h * b.dim, b.dim);
        store_row(*b.out, seqs[i].b, seqs[i].start, b.head + h, 0, b.dim, y[i] + h * b.dim);
      }
    }
    return true;
  };
#endif
  over_blocks(
      a.conv, blocks, parallel,
      [&](int64_t i, Taps& taps) {
        const Block b = block_of(i);
        load_taps(a.conv, b.channel, b.heads * b.dim, taps);
      },
      [&](int64_t n, int64_t m, int64_t i, const Taps& taps) {
        const Block b = block_of(i);
#if GDN_CONV_PAIRS
        if (m >= 0 && two(n, m, b, taps)) return;
#endif
        step(n, b, taps);
        if (m >= 0) step(m, b, taps);
      });
}
