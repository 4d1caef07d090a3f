// Taps and histories of a depthwise causal convolution, and the update of a decode step.
// Included inside the namespace of one instruction set, after gates.h.

constexpr int64_t kConvBlock = 512;  // channels a task
static_assert(kConvBlock >= kMaxHeadDim, "a head is one block");

// Taps of a block of channels, time order: w[tap][channel], zero past the block.
struct alignas(64) Taps {
  float w[kMaxConvWidth][kConvBlock];
  float bias[kConvBlock];
#if GDN_SIMD_AVX512BF16
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

#if GDN_SIMD_AVX512BF16
constexpr int kPairChannels = 2 * kLanes;  // the words of a register

static bool has_pairs(const ConvArgs& a) {
  // On Intel, where the instruction takes four times as long, they pay for what they save in moving
  // words about: nothing where the words of a column already lie together.
  if (kIntel && a.state.s_c == 1) return false;
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
#if GDN_SIMD_AVX512BF16
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

#if GDN_SIMD_AVX512BF16
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
#if GDN_SIMD_AVX512BF16
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
