// The short convolution of one block of at most 128 channels of one sequence.
//
// The window of the last W-1 inputs lives in local memory as float32, one row of 128 a column, as a
// ring. Pools with contiguous channels move by column; pools with contiguous columns (Hugging Face)
// are transposed by the scalar unit, 64 channels at a time.
#pragma once

#include "elementwise.h"

namespace gdn {
namespace xpu {

constexpr int kConvBlock = 128;
constexpr int kConvHalf = 64;
constexpr int kConvMaxW = 4;
constexpr int kConvStaging = 1024;  // 64 channels of at most 16 bytes

__device__ inline int chunks(int width) { return (width + kChunk - 1) / kChunk; }

struct ConvBlock {
  int channel, width;  // of the convolution
  int region;          // 0 q or a plain convolution, 1 k, 2 v
  int offset;          // first channel within the region
};

// Local memory of the convolution: window, weights, bias, x and y as rows of floats, and the rest.
constexpr int kConvBytes = (kConvMaxW - 1 + kConvMaxW + 3) * kConvBlock * 4 + kConvStaging + 128;

template <typename P>
struct ConvUnit {
  lm_ptr<float> win, weight, bias;
  lm_ptr<char> staging, x;
  lm_ptr<float> y, scratch;
  int held;  // first channel whose weights are loaded, -1 none

  __device__ explicit inline ConvUnit(Phase& lm)
      : win(lm.take<float>((kConvMaxW - 1) * kConvBlock)),
        weight(lm.take<float>(kConvMaxW * kConvBlock)),
        bias(lm.take<float>(kConvBlock)),
        staging(lm.take<char>(kConvStaging)),
        x(lm.take<char>(kConvBlock * 4)),
        y(lm.take<float>(kConvBlock)),
        scratch(lm.take<float>(32)),
        held(-1) {}

  // weight[w][c], bias[c] as float32.
  __device__ inline void load_weights(const P& p, const ConvBlock& b) {
    if (held == b.channel) return;
    held = b.channel;
    zero_fill(lm_cast<char>(weight), kConvMaxW * kConvBlock * 4);
    zero_fill(lm_cast<char>(bias), kConvBlock * 4);
    const int eb = element_bytes(p.weight.dtype);
    const int most = kConvStaging / kConvMaxW / eb;  // channels at a time
    for (int h = 0; h < b.width; h += most) {
      const int n = min_int(most, b.width - h);
      const gm_addr at = p.weight.addr + static_cast<gm_addr>((b.channel + h) * p.weight.s0 * eb);
      const bool by_column = p.weight.s0 == 1 && p.W > 1;
      if (by_column) {
        for (int w = 0; w < p.W; ++w)
          XPU_LOAD(at + static_cast<gm_addr>(w * p.weight_s1 * eb), staging + w * most * eb,
                   n * eb);
      } else {
        XPU_LOAD(at, staging, n * p.W * eb);
      }
      XPU_FENCE(XPU_LM_GM);
      for (int w = 0; w < p.W; ++w)
        for (int c = 0; c < n; ++c)
          lm_put(weight, w * kConvBlock + h + c,
                 by_column ? get_element(staging + w * most * eb, p.weight.dtype, c)
                           : get_element(staging, p.weight.dtype, c * p.W + w));
      XPU_FENCE(XPU_LM_ONLY);
    }
    if (p.bias.addr) {
      XPU_LOAD(p.bias.addr + static_cast<gm_addr>(b.channel * element_bytes(p.bias.dtype)), staging,
               b.width * element_bytes(p.bias.dtype));
      XPU_FENCE(XPU_LM_GM);
      for (int c = 0; c < b.width; ++c) lm_put(bias, c, get_element(staging, p.bias.dtype, c));
      XPU_FENCE(XPU_LM_ONLY);
    }
  }

  __device__ inline gm_addr pool_at(const P& p, int64_t row, int64_t c, int64_t l) const {
    return p.pool + static_cast<gm_addr>((row * p.s_p + c * p.s_c + l * p.s_l) *
                                         element_bytes(p.pool_dtype));
  }

  __device__ inline gm_addr x_at(const P& p, const SequenceMeta& s, int64_t t,
                                 int64_t channel) const {
    return tensor_at(p.x, s.batch, s.t0 + t, 0) +
           static_cast<gm_addr>(channel * element_bytes(p.x.dtype));
  }

  // Widens `width` elements at `from` into the float32 row `to`; lanes beyond are zero.
  __device__ inline void widen_row(lm_ptr<char> from, int dtype, int width, lm_ptr<float> to) {
    vf32 z, lo, hi;
    zero(z);
    for (int c = 0; c < chunks(width); ++c) {
      load_any(from, dtype, c, z, lo, hi);
      Row<kF32>::store_chunk(lm_cast<char>(to) + c * 128, lo, hi);
    }
  }

  // Columns first .. first + W - 2 of the pool into the window.
  __device__ inline void load_window(const P& p, const ConvBlock& b, int64_t row, int first) {
    const int eb = element_bytes(p.pool_dtype);
    zero_fill(lm_cast<char>(win), (kConvMaxW - 1) * kConvBlock * 4);
    if (p.s_c == 1) {
      const int row_bytes = padded_bytes(b.width, p.pool_dtype), fit = kConvStaging / row_bytes;
      for (int j0 = 0; j0 < p.W - 1; j0 += fit) {
        const int n = min_int(fit, p.W - 1 - j0);
        for (int j = 0; j < n; ++j) clear_tail(staging + j * row_bytes, b.width, p.pool_dtype);
        for (int j = 0; j < n; ++j)
          XPU_LOAD(pool_at(p, row, b.channel, first + j0 + j), staging + j * row_bytes,
                   b.width * eb);
        XPU_FENCE(XPU_LM_GM);
        for (int j = 0; j < n; ++j)
          widen_row(staging + j * row_bytes, p.pool_dtype, b.width, win + (j0 + j) * kConvBlock);
        XPU_FENCE(XPU_LM_ONLY);
      }
      return;
    }
    for (int h = 0; h < b.width; h += kConvHalf) {
      const int n = min_int(kConvHalf, b.width - h);
      load_columns(p, row, b.channel + h, n);
      for (int j = 0; j < p.W - 1; ++j)
        for (int c = 0; c < n; ++c)
          lm_put(win, j * kConvBlock + h + c,
                 get_element(staging, p.pool_dtype, c * pitch(p) + first + j));
      XPU_FENCE(XPU_LM_ONLY);
    }
  }

  // Elements from a staged channel to the next: L, or, where each is a transfer of its own, as many
  // more as it takes, since local addresses have to be multiples of 4 bytes.
  __device__ inline int pitch(const P& p) const {
    const int eb = element_bytes(p.pool_dtype);
    return p.s_c == p.L ? p.L : (p.L * eb + 3) / 4 * 4 / eb;
  }

  // n channels of all L columns into staging.
  __device__ inline void load_columns(const P& p, int64_t row, int channel, int n) {
    const int bytes = p.L * element_bytes(p.pool_dtype);
    const int step = pitch(p) * element_bytes(p.pool_dtype);
    if (p.s_c == p.L) {
      XPU_LOAD(pool_at(p, row, channel, 0), staging, n * bytes);
    } else {
      for (int c = 0; c < n; ++c)
        XPU_LOAD(pool_at(p, row, channel + c, 0), staging + c * step, bytes);
    }
    XPU_FENCE(XPU_LM_GM);
  }
  __device__ inline void store_columns(const P& p, int64_t row, int channel, int n) {
    const int bytes = p.L * element_bytes(p.pool_dtype);
    const int step = pitch(p) * element_bytes(p.pool_dtype);
    XPU_FENCE(XPU_LM_ONLY);
    if (p.s_c == p.L) {
      XPU_STORE(staging, pool_at(p, row, channel, 0), n * bytes);
    } else {
      for (int c = 0; c < n; ++c)
        XPU_STORE(staging + c * step, pool_at(p, row, channel + c, 0), bytes);
    }
    XPU_FENCE(XPU_LM_GM);
  }

  // A transfer of `width` elements leaves the rest of the last chunk as it was; make that zero.
  __device__ inline void clear_tail(lm_ptr<char> p, int width, int dtype) {
    if (width % kChunk == 0) return;
    zero_fill(p, padded_bytes(width, dtype));
    XPU_FENCE(XPU_LM_ONLY);
  }

  // Starts the transfer of token t's input into x.
  __device__ inline void issue_token(const P& p, const SequenceMeta& s, const ConvBlock& b, int t) {
    clear_tail(x, b.width, p.x.dtype);
    XPU_LOAD(x_at(p, s, t, b.channel), x, b.width * element_bytes(p.x.dtype));
  }

  // The input of token t as a float32 row.
  __device__ inline void load_token(const P& p, const SequenceMeta& s, const ConvBlock& b, int t,
                                    lm_ptr<float> to) {
    issue_token(p, s, b, t);
    XPU_FENCE(XPU_LM_GM);
    widen_row(x, p.x.dtype, b.width, to);
    XPU_FENCE(XPU_LM_ONLY);
  }

  // Rounds a float32 row of local memory into `to` as the pool stores it.
  __device__ inline void narrow_row(const P& p, const ConvBlock& b, lm_ptr<float> from,
                                    lm_ptr<char> to) {
    vf32 lo, hi;
    for (int c = 0; c < chunks(b.width); ++c) {
      Row<kF32>::load_chunk(lm_cast<char>(from) + c * 128, lo, hi);
      store_any(to, p.pool_dtype, c, lo, hi);
    }
  }

  // Writes a float32 row of local memory as column l of the pool (contiguous channels).
  __device__ inline void store_column(const P& p, const ConvBlock& b, int64_t row, int l,
                                      lm_ptr<float> from) {
    narrow_row(p, b, from, staging);
    XPU_FENCE(XPU_LM_ONLY);
    XPU_STORE(staging, pool_at(p, row, b.channel, l), b.width * element_bytes(p.pool_dtype));
    XPU_FENCE(XPU_LM_GM);
  }

  // Sets column l of n staged channels (contiguous columns) from a float32 row.
  __device__ inline void put_column(const P& p, int n, int l, lm_ptr<float> from) {
    for (int c = 0; c < n; ++c)
      put_element(staging, p.pool_dtype, c * pitch(p) + l, lm_get(from, c));
  }

  // Leaves the pool as docs/ops/conv.md says; `total` tokens were given. Before the tokens of a
  // speculative call `oldest` is 0 and the window holds the history.
  __device__ inline void store_window(const P& p, const ConvBlock& b, const SequenceMeta& s,
                                      int oldest) {
    const int keep = p.W - 1;
    const bool shift_all = !p.leading && p.L > keep;
    if (!shift_all) {
      if (p.s_c == 1) {
        const int row_bytes = padded_bytes(b.width, p.pool_dtype), fit = kConvStaging / row_bytes;
        for (int j0 = 0; j0 < keep; j0 += fit) {
          const int n = min_int(fit, keep - j0);
          for (int j = 0; j < n; ++j)
            narrow_row(p, b, win + (oldest + j0 + j) % keep * kConvBlock, staging + j * row_bytes);
          XPU_FENCE(XPU_LM_ONLY);
          for (int j = 0; j < n; ++j)
            XPU_STORE(staging + j * row_bytes, pool_at(p, s.row, b.channel, j0 + j),
                      b.width * element_bytes(p.pool_dtype));
          XPU_FENCE(XPU_LM_GM);
        }
      } else {
        for (int h = 0; h < b.width; h += kConvHalf) {
          const int n = min_int(kConvHalf, b.width - h);
          if (p.L > keep) load_columns(p, s.row, b.channel + h, n);
          for (int j = 0; j < keep; ++j)
            put_column(p, n, j, win + (oldest + j) % keep * kConvBlock + h);
          store_columns(p, s.row, b.channel + h, n);
        }
      }
      return;
    }
    // A row wider than the window moves as a whole by the number of tokens.
    const int T = s.length;
    if (p.s_c == 1) {
      const int bytes = b.width * element_bytes(p.pool_dtype);
      for (int l = 0; l < p.L; ++l) {
        if (l + T >= p.L) {
          load_token(p, s, b, l + T - p.L, y);
          store_column(p, b, s.row, l, y);
        } else if (s.fresh) {
          zero_fill(staging, padded_bytes(b.width, p.pool_dtype));
          XPU_FENCE(XPU_LM_ONLY);
          XPU_STORE(staging, pool_at(p, s.row, b.channel, l), bytes);
          XPU_FENCE(XPU_LM_GM);
        } else {
          XPU_LOAD(pool_at(p, s.row, b.channel, l + T), staging, bytes);
          XPU_FENCE(XPU_LM_GM);
          XPU_STORE(staging, pool_at(p, s.row, b.channel, l), bytes);
          XPU_FENCE(XPU_LM_GM);
        }
      }
      return;
    }
    for (int h = 0; h < b.width; h += kConvHalf) {
      const int n = min_int(kConvHalf, b.width - h);
      if (s.fresh) {
        zero_fill(staging, padded_bytes(n * pitch(p), p.pool_dtype));
        XPU_FENCE(XPU_LM_ONLY);
      } else {
        load_columns(p, s.row, b.channel + h, n);
      }
      for (int l = 0; l + T < p.L; ++l)
        for (int c = 0; c < n; ++c)
          put_element(staging, p.pool_dtype, c * pitch(p) + l,
                      get_element(staging, p.pool_dtype, c * pitch(p) + l + T));
      for (int l = T < p.L ? p.L - T : 0; l < p.L; ++l) {
        load_token(p, s, b, l + T - p.L, y);
        put_column(p, n, l, y + h);
      }
      store_columns(p, s.row, b.channel + h, n);
    }
  }

  // y <- the convolution of the token in x, whose input replaces the oldest row of the window.
  __device__ inline void token(const P& p, const ConvBlock& b, int oldest) {
    const int keep = p.W - 1;
    vf32 z;
    zero(z);
    for (int c = 0; c < chunks(b.width); ++c) {
      vf32 lo, hi, w_lo, w_hi, h_lo, h_hi, x_lo, x_hi;
      Row<kF32>::load_chunk(lm_cast<char>(bias) + c * 128, lo, hi);
      for (int j = 0; j < keep; ++j) {
        int slot = oldest + j < keep ? oldest + j : oldest + j - keep;
        Row<kF32>::load_chunk(lm_cast<char>(win + slot * kConvBlock) + c * 128, h_lo, h_hi);
        Row<kF32>::load_chunk(lm_cast<char>(weight + j * kConvBlock) + c * 128, w_lo, w_hi);
        multiply_add(lo, w_lo, h_lo);
        multiply_add(hi, w_hi, h_hi);
      }
      load_any(x, p.x.dtype, c, z, x_lo, x_hi);
      Row<kF32>::load_chunk(lm_cast<char>(weight + keep * kConvBlock) + c * 128, w_lo, w_hi);
      multiply_add(lo, w_lo, x_lo);
      multiply_add(hi, w_hi, x_hi);
      if (keep)
        Row<kF32>::store_chunk(lm_cast<char>(win + oldest * kConvBlock) + c * 128, x_lo, x_hi);
      if (p.silu) {
        lo = silu(lo);
        hi = silu(hi);
      }
      Row<kF32>::store_chunk(lm_cast<char>(y) + c * 128, lo, hi);
    }
    XPU_FENCE(XPU_LM_ONLY);
  }

  // y <- y / sqrt(sum(y^2) + 1e-6).
  __device__ inline void normalise(int width) {
    vf32 acc, lo, hi;
    zero(acc);
    for (int c = 0; c < chunks(width); ++c) {
      Row<kF32>::load_chunk(lm_cast<char>(y) + c * 128, lo, hi);
      multiply_add(acc, lo, lo);
      multiply_add(acc, hi, hi);
    }
    sfloat sum, twice;
    lane_sums(acc, acc, scratch, &sum, &twice);
    sfloat r = s_rsqrt(sum + 1e-6f);
    for (int c = 0; c < chunks(width); ++c) {
      Row<kF32>::load_chunk(lm_cast<char>(y) + c * 128, lo, hi);
      scale(lo, r);
      scale(hi, r);
      Row<kF32>::store_chunk(lm_cast<char>(y) + c * 128, lo, hi);
    }
    XPU_FENCE(XPU_LM_ONLY);
  }

  // Tokens [from, to) of sequence s; `sink(t)` takes y. The pool is written when from is 0.
  template <typename Sink>
  __device__ inline void run(const P& p, const ConvBlock& b, const SequenceMeta& s, int from,
                             int to, Sink sink) {
    const int keep = p.W - 1;
    load_weights(p, b);
    bool ready = false;  // whether x holds token `from`
    if (keep) {
      if (from > 0) {
        for (int j = 0; j < keep; ++j) load_token(p, s, b, from - keep + j, win + j * kConvBlock);
      } else if (s.fresh || !p.pool) {
        zero_fill(lm_cast<char>(win), (kConvMaxW - 1) * kConvBlock * 4);
      } else {
        int first = p.leading ? static_cast<int>(s.accepted) - 1 : p.L - keep;
        issue_token(p, s, b, from);
        // An accepted count beyond the row is the caller's error; stay inside the row.
        load_window(p, b, s.row, min_int(first, p.L - keep));
        ready = true;
      }
    }
    const bool drafts = p.leading && p.accepted.addr;
    int oldest = 0;
    if (drafts && keep) {
      // [history shifted by one, the new tokens]: token t becomes column W - 2 + t.
      save_shifted(p, b, s, 0);
    }
    for (int t = from; t < to; ++t) {
      if (t > from || !ready) {
        issue_token(p, s, b, t);
        XPU_FENCE(XPU_LM_GM);
      }
      token(p, b, oldest);
      sink(t);
      if (drafts && keep && keep - 1 + t < p.L) save_token(p, b, s, oldest, keep - 1 + t);
      oldest = oldest + 1 < keep ? oldest + 1 : 0;
    }
    if (from == 0 && p.pool && keep && !drafts) {
      if (to < s.length) {
        for (int j = 0; j < keep; ++j)
          load_token(p, s, b, s.length - keep + j, win + j * kConvBlock);
        oldest = 0;
      }
      store_window(p, b, s, oldest);
    }
  }

  // Columns 0 .. W-3 <- the window without its oldest row.
  __device__ inline void save_shifted(const P& p, const ConvBlock& b, const SequenceMeta& s,
                                      int oldest) {
    for (int j = 1; j < p.W - 1; ++j) save_row(p, b, s, (oldest + j) % (p.W - 1), j - 1);
  }
  __device__ inline void save_token(const P& p, const ConvBlock& b, const SequenceMeta& s, int slot,
                                    int column) {
    save_row(p, b, s, slot, column);
  }
  // Column `column` of the pool <- row `slot` of the window.
  __device__ inline void save_row(const P& p, const ConvBlock& b, const SequenceMeta& s, int slot,
                                  int column) {
    if (p.s_c == 1) {
      store_column(p, b, s.row, column, win + slot * kConvBlock);
      return;
    }
    for (int h = 0; h < b.width; h += kConvHalf) {
      const int n = min_int(kConvHalf, b.width - h);
      load_columns(p, s.row, b.channel + h, n);
      put_column(p, n, column, win + slot * kConvBlock + h);
      store_columns(p, s.row, b.channel + h, n);
    }
  }
};

}  // namespace xpu
}  // namespace gdn
