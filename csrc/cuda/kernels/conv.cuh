// Depthwise causal convolution over a pool of histories, with SiLU, and the split into q, k, v.
#pragma once

#include "common.cuh"

namespace gdn {
namespace cuda {

constexpr int64_t kNoPart = INT32_MAX;  // no channel is the first of it

// Where channel c goes: up to three tensors, cut at channels first[1] and first[2].
struct ConvTarget {
  View part[3];
  int64_t first[3] = {0, kNoPart, kNoPart};
  __device__ __forceinline__ int of(int64_t c) const {
    return c >= first[2] ? 2 : c >= first[1] ? 1 : 0;
  }
};

// First live column of the history: of the newest W - 1 (trailing) or of those that num_accepted
// names, which the host checks where it can know. A count that a row cannot hold means its last.
__device__ __forceinline__ int64_t history_column(const ConvArgs& a, const Sequence& s) {
  const int64_t last = a.state.L - (a.W - 1);
  if (!a.state.leading) return last;
  if (!a.seqs.num_accepted.ptr) return 0;
  return s.accepted - 1 < last ? s.accepted - 1 : last;
}

// Packed sequences in pieces of 1 << cut tokens. The number of a piece is its place among those of
// its sequence, plus the number of that sequence n, plus cu_seqlens[n] >> cut. So no two have the
// same number, and few numbers have no piece.
__device__ __forceinline__ int64_t first_piece(const Sequences& s, int64_t n, int cut) {
  return (at(s.cu_seqlens, n) >> cut) + n;
}
// The sequence of a piece, found by the 128 threads of a block together; negative: there is none.
// `number` becomes the place in the sequence, which may be behind the last token.
__device__ __forceinline__ int64_t sequence_of_piece(const Sequences& s, int cut, int64_t* number) {
  int64_t low = 0, high = s.N;  // the first `low` sequences begin at or before the piece
  while (low < high) {
    const int64_t step = (high - low + 127) / 128;
    const int64_t n = low + threadIdx.x * step;
    const int count = __syncthreads_count(n < high && first_piece(s, n, cut) <= *number);
    const int64_t next = low + count * step;
    if (next < high) high = next;
    if (count == 0) break;
    low = next - step + 1;
  }
  if (low > 0) *number -= first_piece(s, low - 1, cut);
  return low - 1;
}
// The sequence and the place in it of the piece whose number y and z of the block are. False: there
// is none.
__device__ __forceinline__ bool take_piece(const Sequences& s, int cut, int64_t* n,
                                           int64_t* piece) {
  *piece = int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
  *n = sequence_of_piece(s, cut, piece);
  return *n >= 0;
}

// One thread a channel; blockIdx = (channels / 128, sequence, chunk of tokens), or, where `cut` is
// not negative, (channels / 128, number of a piece in two parts). The history of a sequence that
// several blocks share is written by a launch of its own (`outputs` false), as the others still
// read it.
__global__ void __launch_bounds__(128, 8)
    conv_channels(const __grid_constant__ ConvArgs a, const __grid_constant__ ConvTarget to,
                  const __grid_constant__ ConvPool state_out, int64_t first, int64_t chunk, int cut,
                  bool outputs) {
  int64_t n = first + blockIdx.y, piece = blockIdx.z;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * 128 + threadIdx.x;
  wait_for_previous_kernel();
  if (cut >= 0 && !take_piece(a.seqs, cut, &n, &piece)) return;
  const Sequence s = device_sequence(a.seqs, n, 0);
  let_next_kernel_start();
  if (c >= a.C) return;
  const int64_t begin = s.start + piece * chunk;
  const int64_t end = begin + chunk < s.end ? begin + chunk : s.end;
  const int p = to.of(c);
  const View& y = to.part[p];
  const int64_t cy = (c - to.first[p]) * y.sd;
  const DType dx = a.x.dtype;
  if (s.row < 0) {
    for (int64_t t = begin; outputs && t < end; t++) {
      store_as(y.ptr, y.dtype, s.b * y.sb + t * y.st + cy, 0.f);
    }
    return;
  }
  if (s.end <= s.start && a.state.ptr == state_out.ptr) return;
  const int W = static_cast<int>(a.W);
  const int64_t x0 = s.b * a.x.sb + c * a.x.sd;
  const int64_t old = s.row * a.state.s_p + c * a.state.s_c;
  const int64_t column = history_column(a, s);
  const bool history = a.state.ptr && !s.fresh;
  float h[kMaxConvWidth];  // the last W - 1 inputs, oldest first, then the current one
  if (outputs && begin < end) {
    float w[kMaxConvWidth];
#pragma unroll
    for (int i = 0; i < kMaxConvWidth; i++) {
      w[i] = i < W ? load_as(a.weight.ptr, a.weight.dtype, c * a.weight.s0 + i * a.weight.s1) : 0.f;
      const int64_t t = begin - (W - 1) + i;
      h[i] = 0.f;
      if (i < W - 1) {
        if (t >= s.start) {
          h[i] = load_as(a.x.ptr, dx, x0 + t * a.x.st);
        } else if (history) {
          h[i] = load_as(a.state.ptr, a.state.dtype,
                         old + (column + (W - 1) + t - s.start) * a.state.s_l);
        }
      }
    }
    const float bias = a.bias.ptr ? load_param(a.bias, c) : 0.f;
    for (int64_t t = begin; t < end; t++) {
      const float x = load_as(a.x.ptr, dx, x0 + t * a.x.st);
      float sum = bias;
#pragma unroll
      for (int i = 0; i < kMaxConvWidth; i++) {
        if (i == W - 1) h[i] = x;
        if (i < W) sum = __fmaf_rn(w[i], h[i], sum);
      }
#pragma unroll
      for (int i = 0; i + 1 < kMaxConvWidth; i++) h[i] = h[i + 1];
      // The same bits as those of the kernels in vectors.
      if (a.silu) sum = y.dtype == DType::f32 ? silu(sum) : silu16(sum);
      store_as(y.ptr, y.dtype, s.b * y.sb + t * y.st + cy, sum);
    }
  }
  const int64_t T = s.end - s.start;
  const bool keep = state_out.ptr && piece == 0 && outputs == (T <= chunk);
  if (!keep || (W == 1 && a.state.ptr == state_out.ptr)) return;
  const int64_t to_row = s.row * state_out.s_p + c * state_out.s_c;
  // Column l becomes element l + shift of [history, tokens]; shift >= 1, so going up is safe.
  const bool whole = !a.state.leading;
  const int64_t held = whole ? a.state.L : W - 1;
  const int64_t from = whole ? 0 : column;
  const bool appended = a.state.leading && a.seqs.num_accepted.ptr;
  const int64_t shift = appended ? 1 : T;
  int64_t columns = appended ? W - 1 + T - 1 : held;
  if (columns > state_out.L) columns = state_out.L;
  for (int64_t l = 0; l < columns; l++) {
    const int64_t j = l + shift;
    float v = 0.f;
    if (j >= held) {
      v = load_as(a.x.ptr, dx, x0 + (s.start + j - held) * a.x.st);
    } else if (history) {
      v = load_as(a.state.ptr, a.state.dtype, old + (from + j) * a.state.s_l);
    }
    store_as(state_out.ptr, state_out.dtype, to_row + l * state_out.s_l, v);
  }
}

// What gates are made of, and where they go (conv_gating, decode).
struct GateOutputs {
  Gates gates;
  float* g = nullptr;  // [B, T, HV]; null: no gates here
  float* beta = nullptr;
  int64_t HV = 0;
};

// The bias of N neighbouring channels.
template <int N>
__device__ __forceinline__ void load_bias(const Param& bias, int64_t c, float (&b)[N]) {
#pragma unroll
  for (int e = 0; e < N; e++) b[e] = 0.f;
  if (!bias.ptr) return;
#pragma unroll
  for (int e = 0; e < N; e++) b[e] = load_param(bias, c + e);
}

// One branch for all of a thread's values, so that they are under way together.
template <class T, int N>
__device__ __forceinline__ void activate(float (&r)[N], bool on) {
  if (!on) return;
#pragma unroll
  for (int e = 0; e < N; e++) r[e] = sizeof(T) == 2 ? silu16(r[e]) : silu(r[e]);
}

// q or k of a head over `lanes` neighbouring threads, N channels each. The model rounds the
// convolution before it normalises.
template <class T, int N>
__device__ __forceinline__ void normalise_head(float (&r)[N], int lanes) {
  float sum = 0.f;
#pragma unroll
  for (int e = 0; e < N; e++) {
    r[e] = to_float(from_float<T>(r[e]));
    sum = __fmaf_rn(r[e], r[e], sum);
  }
  const unsigned mask = __activemask();
  for (int m = lanes / 2; m; m >>= 1) sum += __shfl_xor_sync(mask, sum, m);
  const float scale = rsqrtf(sum + kL2Eps);
#pragma unroll
  for (int e = 0; e < N; e++) r[e] *= scale;
}

// One token, W = 4, 16-bit x and state of the same type, eight channels a thread. TAPS: the L
// columns of a channel are neighbours in memory ([P, C, L]); else the channels of a column are
// ([P, L, C]). `norm_lanes` > 0: q and k leave normalised, that many threads share a head.
template <class T, int L, bool TAPS>
__global__ void __launch_bounds__(128)
    conv_token(const __grid_constant__ ConvArgs a, const __grid_constant__ ConvTarget to,
               const __grid_constant__ GateOutputs gate, int64_t first, int norm_lanes,
               bool ahead) {
  constexpr int W = 4;
  const int64_t n = first + blockIdx.y;
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * 128 + threadIdx.x) * 8;
  const int64_t step = TAPS ? 8 : a.state.s_l;  // elements between the L vectors of this thread
  const T* const x_at = static_cast<const T*>(a.x.ptr) + n * a.x.sb + c;
  // `ahead`: what will be read goes to L2 while the kernel before ends, if the row is as it was.
  if (ahead && c < a.C && threadIdx.x % (TAPS ? 2 : 8) == 0) {
    const int64_t row = guess_row(a.seqs, n);
    const T* const state = static_cast<const T*>(a.state.ptr) + row * a.state.s_p + c * a.state.s_c;
#pragma unroll
    for (int i = 0; i < (TAPS ? 1 : L); i++) {
      if (row >= 0) prefetch_line(state + i * step);
    }
    prefetch_line(x_at);
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  const Sequence s = device_sequence(a.seqs, n, 0);
  if (c >= a.C) {
    // The threads past the last channel take the gates.
    for (int64_t hv = (c - a.C) / 8; gate.g && hv < gate.HV;
         hv += (static_cast<int64_t>(gridDim.x) * 128 * 8 - a.C) / 8) {
      float g = 0.f, beta = 0.f;
      if (s.row >= 0) {
        compute_gates(gate.gates, load_gates(gate.gates, n, 0, hv), &g, &beta);
      }
      gate.g[n * gate.HV + hv] = g;
      gate.beta[n * gate.HV + hv] = beta;
    }
    return;
  }
  const int p = to.of(c);
  const View& y = to.part[p];
  T* const out = static_cast<T*>(y.ptr) + n * y.sb + (c - to.first[p]);
  if (s.row < 0) {
    *reinterpret_cast<uint4*>(out) = make_uint4(0, 0, 0, 0);
    return;
  }
  const uint4 raw_x = *reinterpret_cast<const uint4*>(x_at);
  T* const state = static_cast<T*>(a.state.ptr) + s.row * a.state.s_p + c * a.state.s_c;
  uint4 raw[L];
#pragma unroll
  for (int i = 0; i < L; i++) {
    raw[i] = make_uint4(0, 0, 0, 0);
    if (!s.fresh) raw[i] = *reinterpret_cast<const uint4*>(state + i * step);
  }
  const T* const weight = static_cast<const T*>(a.weight.ptr) + c * W;
  uint4 raw_w[W];
#pragma unroll
  for (int i = 0; i < W; i++) raw_w[i] = *reinterpret_cast<const uint4*>(weight + 8 * i);
  float x[8], h[8 * L], w[8 * W], bias[8], r[8];
  load_bias(a.bias, c, bias);
  Vec<T>::unpack(raw_x, x);
#pragma unroll
  for (int i = 0; i < L; i++) Vec<T>::unpack(raw[i], h + 8 * i);
#pragma unroll
  for (int i = 0; i < W; i++) Vec<T>::unpack(raw_w[i], w + 8 * i);
  // Element (channel e, column l) of the history.
  const auto column = [&](int e, int l) -> float& { return h[TAPS ? e * L + l : l * 8 + e]; };
  constexpr int kFirst = L - (W - 1);  // trailing; leading pools have L = 3 here
#pragma unroll
  for (int e = 0; e < 8; e++) {
    float sum = bias[e];
#pragma unroll
    for (int i = 0; i < W - 1; i++) sum = __fmaf_rn(w[e * W + i], column(e, kFirst + i), sum);
    r[e] = __fmaf_rn(w[e * W + W - 1], x[e], sum);
#pragma unroll
    for (int l = 0; l + 1 < L; l++) column(e, l) = column(e, l + 1);
    column(e, L - 1) = x[e];
  }
#pragma unroll
  for (int i = 0; i < L; i++) {
    *reinterpret_cast<uint4*>(state + i * step) = Vec<T>::pack(h + 8 * i);
  }
  activate<T>(r, a.silu);
  if (norm_lanes > 0 && p < 2) normalise_head<T>(r, norm_lanes);
  *reinterpret_cast<uint4*>(out) = Vec<T>::pack(r);
}

// A sequence that is batch row n, in arithmetic of 32 bits: the host has seen that strides fit
// (short_strides). Addresses in 64 bits are half of what conv_vectors executes.
struct ConvRow {
  int64_t row, accepted;
  bool fresh;
};
__device__ __forceinline__ int64_t short_at(const Index& x, int n) {
  const int offset = n * static_cast<int>(x.s0);
  return x.is64 ? static_cast<const int64_t*>(x.ptr)[offset]
                : static_cast<const int32_t*>(x.ptr)[offset];
}
__device__ __forceinline__ ConvRow conv_row(const Sequences& s, int n) {
  ConvRow r;
  r.accepted = s.num_accepted.ptr ? short_at(s.num_accepted, n) : 1;
  r.row = s.state_indices.ptr ? short_at(s.state_indices, n) : n;
  r.fresh = s.has_initial_state && !s.has_initial_state[n * static_cast<int>(s.s_has)];
  if (r.accepted < 1 || r.row >= s.P) r.row = -1;
  return r;
}
// i steps of `stride` elements, both of 32 bits.
__device__ __forceinline__ int64_t far(int i, int64_t stride) {
  return int64_t{i} * static_cast<int>(stride);
}
// Where channel c of sequence n goes; `part`: which of q, k, v that is.
template <class T>
__device__ __forceinline__ T* conv_output(const ConvTarget& to, int n, int c, int* part,
                                          int* step) {
  const int second = static_cast<int>(to.first[1]), third = static_cast<int>(to.first[2]);
  *part = c >= third ? 2 : c >= second ? 1 : 0;
  const View& y = *part == 2 ? to.part[2] : *part == 1 ? to.part[1] : to.part[0];
  *step = static_cast<int>(y.st);
  return static_cast<T*>(y.ptr) + far(n, y.sb) + (c - (*part == 2 ? third : *part ? second : 0));
}

// As conv_vectors for at most NT tokens of every sequence, not packed, whose history keeps nothing
// that they do not meet: all that a thread reads is under way at once. Registers for ten blocks a
// multiprocessor (f32: eight), as a block waits for its row, then for its history
// (docs/tried/cuda.md). blockIdx = (channels / 512, sequence).
template <class T, int NT>
__global__ void __launch_bounds__(128, sizeof(T) == 2 ? 10 : 8)
    conv_few(const __grid_constant__ ConvArgs a, const __grid_constant__ ConvTarget to,
             const __grid_constant__ GateOutputs gate, int64_t first, int norm_lanes) {
  constexpr int W = 4, N = 4;
  using Some = RawVec<T, N>;
  const int n = static_cast<int>(first) + blockIdx.y, length = static_cast<int>(a.seqs.T);
  const int c = static_cast<int>(blockIdx.x * 128 + threadIdx.x) * N, C = static_cast<int>(a.C);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const ConvRow s = conv_row(a.seqs, n);
  if (c >= C) {
    // The threads past the last channel take the gates.
    const int HV = static_cast<int>(gate.HV);
    for (int i = (c - C) / N; gate.g && i < length * HV; i += gridDim.x * 128 - C / N) {
      const int t = i / HV, hv = i - t * HV;
      float g = 0.f, beta = 0.f;
      if (s.row >= 0) compute_gates(gate.gates, load_gates(gate.gates, n, t, hv), &g, &beta);
      gate.g[far(n, length * HV) + i] = g;
      gate.beta[far(n, length * HV) + i] = beta;
    }
    return;
  }
  const T* x = static_cast<const T*>(a.x.ptr) + far(n, a.x.sb) + c;
  const T* const weight = static_cast<const T*>(a.weight.ptr) + W * c;
  Some raw[W - 1 + NT];  // [live columns, tokens]
  RawVec<T, N * W> raw_w;
#pragma unroll
  for (int t = 0; t < NT; t++) {
    raw[W - 1 + t] = load_raw<T, N>(x);
    if (t + 1 < length) x += static_cast<int>(a.x.st);
  }
  raw_w = load_raw<T, N * W>(weight);
  int p, step;
  T* out = conv_output<T>(to, n, c, &p, &step);
  if (s.row < 0) {
#pragma unroll 1
    for (int t = 0; t < length; t++, out += step) store_raw<T, N>(out, {});
    return;
  }
  T* const state = static_cast<T*>(a.state.ptr) + far(static_cast<int>(s.row), a.state.s_p) + c;
  const bool appended = a.state.leading && a.seqs.num_accepted.ptr;
  const int L = static_cast<int>(a.state.L), held = a.state.leading ? W - 1 : L;
  const int newest = L - (W - 1);  // as history_column
  const int column = !a.state.leading       ? newest
                     : !appended            ? 0
                     : s.accepted <= newest ? static_cast<int>(s.accepted) - 1
                                            : newest;
  const int s_l = static_cast<int>(a.state.s_l);
  const T* from = state + column * s_l;
#pragma unroll
  for (int i = 0; i < W - 1; i++, from += s_l) {
    raw[i] = {};
    if (!s.fresh) raw[i] = load_raw<T, N>(from);
  }
  float h[W - 1][N], w[N * W], bias[N], r[NT][N];
  load_bias(a.bias, c, bias);
  raw_to_float<T, N * W>(raw_w, w);
#pragma unroll
  for (int i = 0; i < W - 1; i++) raw_to_float<T, N>(raw[i], h[i]);
  // Element i of [live columns, tokens] becomes column i - dropped.
  const int dropped = (appended ? 1 : length) - (held - (W - 1));
  const int wanted = appended ? W - 1 + length - 1 : held;
  const int last = (wanted < L ? wanted : L) + dropped;
  T* into = state - dropped * s_l;
#pragma unroll
  for (int i = 0; i < W - 1 + NT; i++, into += s_l) {
    if (i >= dropped && i < last) store_raw<T, N>(into, raw[i]);
  }
#pragma unroll
  for (int t = 0; t < NT; t++) {
    float now[N];
    raw_to_float<T, N>(raw[W - 1 + t], now);
#pragma unroll
    for (int e = 0; e < N; e++) {
      float sum = bias[e];
#pragma unroll
      for (int j = 0; j < W - 1; j++) sum = __fmaf_rn(w[e * W + j], h[j][e], sum);
      r[t][e] = __fmaf_rn(w[e * W + W - 1], now[e], sum);
#pragma unroll
      for (int j = 0; j + 1 < W - 1; j++) h[j][e] = h[j + 1][e];
      h[W - 2][e] = now[e];
    }
  }
  if (a.silu) {
#pragma unroll
    for (int t = 0; t < NT; t++) activate<T>(r[t], true);
  }
  if (norm_lanes > 0 && p < 2) {
#pragma unroll
    for (int t = 0; t < NT; t++) normalise_head<T>(r[t], norm_lanes);
  }
#pragma unroll
  for (int t = 0; t < NT; t++, out += step) {
    if (t < length) store_raw<T, N>(out, floats_to_raw<T, N>(r[t]));
  }
}

// W = 4, x, weights and histories of one type, channels of a column and of a token neighbours in
// memory, N of them a thread; blockIdx as in conv_channels. Four tokens are asked for while the
// four before them are worked on.
template <class T, int N>
__global__ void __launch_bounds__(128, sizeof(T) == 2 ? 7 : 5)
    conv_vectors(const __grid_constant__ ConvArgs a, const __grid_constant__ ConvTarget to,
                 const __grid_constant__ GateOutputs gate, int64_t first, int chunk, int cut,
                 int norm_lanes, bool outputs) {
  constexpr int W = 4, NT = 4;
  using Some = RawVec<T, N>;
  int64_t n = first + blockIdx.y, piece = blockIdx.z;
  const int c = static_cast<int>(blockIdx.x * 128 + threadIdx.x) * N;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (cut >= 0 && !take_piece(a.seqs, cut, &n, &piece)) return;
  const Sequence s = device_sequence(a.seqs, n, 0);
  // Tokens of this block, counted from the sequence's first.
  const int length = static_cast<int>(s.end - s.start);
  int begin = static_cast<int>(piece) * chunk;
  const int end = !outputs || length - begin < chunk ? length : begin + chunk;
  if (c >= a.C) {
    // The threads past the last channel take the gates.
    const int HV = static_cast<int>(gate.HV), step = (gridDim.x * 128 * N - a.C) / N;
    for (int i = (c - a.C) / N + begin * HV; gate.g && i < end * HV; i += step) {
      const int64_t t = s.start + i / HV, hv = i % HV, at = (s.b * a.seqs.T + t) * HV + hv;
      float g = 0.f, beta = 0.f;
      if (s.row >= 0) compute_gates(gate.gates, load_gates(gate.gates, s.b, t, hv), &g, &beta);
      gate.g[at] = g;
      gate.beta[at] = beta;
    }
    return;
  }
  if (begin >= end || (!outputs && length <= chunk)) return;
  const int p = to.of(c);
  const View& y = to.part[p];
  const T* x = static_cast<const T*>(a.x.ptr) + s.b * a.x.sb + (s.start + begin) * a.x.st + c;
  T* out = static_cast<T*>(y.ptr) + s.b * y.sb + (s.start + begin) * y.st + (c - to.first[p]);
  // Column l of the history becomes element l + shift of [live columns, tokens].
  const bool appended = a.state.leading && a.seqs.num_accepted.ptr;
  const int L = static_cast<int>(a.state.L), held = a.state.leading ? W - 1 : L;
  const int shift = appended ? 1 : length, wanted = appended ? W - 1 + length - 1 : held;
  const bool keep = outputs == (length <= chunk);
  const int columns = !keep ? 0 : wanted < L ? wanted : L;
  if (!outputs && shift > held) {
    begin = shift - held;  // the first that stays
    x += begin * a.x.st;
  }
  Some next[NT], live[W - 1], raw_w[W];
  const auto ask = [&](int count) {
#pragma unroll
    for (int i = 0; i < NT; i++) {
      if (i < count) next[i] = load_raw<T, N>(x + i * a.x.st);
    }
  };
  ask(end - begin);
  const T* const weight = static_cast<const T*>(a.weight.ptr) + int64_t{W} * c;
#pragma unroll
  for (int i = 0; i < W; i++) raw_w[i] = load_raw<T, N>(weight + N * i);
  if (s.row < 0) {
    for (int t = begin; outputs && t < end; t++, out += y.st) store_raw<T, N>(out, {});
    return;
  }
  T* const state = static_cast<T*>(a.state.ptr) + s.row * a.state.s_p + c;
  const auto column_at = [&](int l) { return state + l * a.state.s_l; };
  const int column = static_cast<int>(history_column(a, s));
#pragma unroll
  for (int i = 0; i < W - 1; i++) {
    const int t = begin - (W - 1) + i;
    live[i] = {};
    if (t >= 0) {
      live[i] = load_raw<T, N>(x + (i - (W - 1)) * a.x.st);
    } else if (!s.fresh) {
      live[i] = load_raw<T, N>(column_at(column + W - 1 + t));
    }
  }
  // What stays of the history; going up, no column is overwritten before it is read.
  if (columns > 0) {
    for (int j = shift; j < held - (W - 1); j++) {
      Some old = {};
      if (!s.fresh) old = load_raw<T, N>(column_at(j));
      store_raw<T, N>(column_at(j - shift), old);
    }
#pragma unroll
    for (int i = 0; i < W - 1; i++) {
      const int l = held - (W - 1) + i - shift;
      if (l >= 0 && l < columns) store_raw<T, N>(column_at(l), live[i]);
    }
  }
  float h[W - 1][N], w[N * W], bias[N];
  load_bias(a.bias, c, bias);
#pragma unroll
  for (int i = 0; i < W; i++) raw_to_float<T, N>(raw_w[i], w + N * i);
#pragma unroll
  for (int i = 0; i < W - 1; i++) raw_to_float<T, N>(live[i], h[i]);
  for (int t0 = begin; t0 < end; t0 += NT, out += NT * y.st) {
    Some raw[NT];
#pragma unroll
    for (int i = 0; i < NT; i++) raw[i] = next[i];
    x += NT * a.x.st;
    ask(end - t0 - NT);
#pragma unroll
    for (int i = 0; i < NT; i++) {
      if (t0 + i >= end) break;
      const int l = held - shift + t0 + i;
      if (l >= 0 && l < columns) store_raw<T, N>(column_at(l), raw[i]);
      if (!outputs) continue;
      float now[N], r[N];
      raw_to_float<T, N>(raw[i], now);
#pragma unroll
      for (int e = 0; e < N; e++) {
        float sum = bias[e];
#pragma unroll
        for (int j = 0; j < W - 1; j++) sum = __fmaf_rn(w[e * W + j], h[j][e], sum);
        r[e] = __fmaf_rn(w[e * W + W - 1], now[e], sum);
#pragma unroll
        for (int j = 0; j + 1 < W - 1; j++) h[j][e] = h[j + 1][e];
        h[W - 2][e] = now[e];
      }
      activate<T>(r, a.silu);
      if (norm_lanes > 0 && p < 2) normalise_head<T>(r, norm_lanes);
      store_floats<T, N>(out + i * y.st, r);
    }
  }
}

// Normalises rows of q and k in place: one warp a head and token.
__global__ void __launch_bounds__(128)
    normalize_heads(const __grid_constant__ View x, int64_t B, int64_t T, int64_t H, int64_t K) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 4 + (threadIdx.x >> 5);
  const int lane = threadIdx.x & 31;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (i >= B * T * H) return;
  const int64_t row = i / H, h = i - row * H, b = row / T, t = row - b * T;
  const int64_t base = b * x.sb + t * x.st + h * x.sh;
  float sum = 0.f;
  for (int64_t c = lane; c < K; c += 32) {
    const float v = load_as(x.ptr, x.dtype, base + c * x.sd);
    sum = __fmaf_rn(v, v, sum);
  }
  const float scale = rsqrtf(lane_sum(sum) + kL2Eps);
  for (int64_t c = lane; c < K; c += 32) {
    store_as(x.ptr, x.dtype, base + c * x.sd, load_as(x.ptr, x.dtype, base + c * x.sd) * scale);
  }
}

// Gates of every token; a token of a padding row gets zeros. blockIdx = (token and head, sequence),
// or, where `cut` is not negative, the number of a piece in two parts.
__global__ void __launch_bounds__(128)
    sequence_gates(const __grid_constant__ Sequences seqs, const __grid_constant__ GateOutputs to,
                   int64_t first, int cut) {
  int64_t n = first + blockIdx.y, piece = 0;
  int64_t i = int64_t{blockIdx.x} * 128 + threadIdx.x, step = int64_t{gridDim.x} * 128;
  wait_for_previous_kernel();
  if (cut >= 0) {
    piece = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
    n = sequence_of_piece(seqs, cut, &piece);
    if (n < 0) return;
    i = (piece << cut) * to.HV + threadIdx.x;
    step = 128;
  }
  const Sequence s = device_sequence(seqs, n, 0);
  let_next_kernel_start();
  int64_t tokens = s.end - s.start;
  if (cut >= 0 && tokens > (piece + 1) << cut) tokens = (piece + 1) << cut;
  for (; i < tokens * to.HV; i += step) {
    const int64_t t = s.start + i / to.HV, hv = i % to.HV;
    float g = 0.f, beta = 0.f;
    if (s.row >= 0) compute_gates(to.gates, load_gates(to.gates, s.b, t, hv), &g, &beta);
    const int64_t at = (s.b * seqs.T + t) * to.HV + hv;
    to.g[at] = g;
    to.beta[at] = beta;
  }
}

__global__ void __launch_bounds__(256) plain_gates(const __grid_constant__ GatingArgs a) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t all = a.rows_b * a.rows_t * a.HV;
  Gates gates;
  gates.raw = true;
  gates.g = a.a;
  gates.beta = a.b;
  gates.A_log = a.A_log;
  gates.dt_bias = a.dt_bias;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < all;
       i += static_cast<int64_t>(gridDim.x) * 256) {
    const int64_t row = i / a.HV, hv = i - row * a.HV, b = row / a.rows_t, t = row - b * a.rows_t;
    float g, beta;
    compute_gates(gates, load_gates(gates, b, t, hv), &g, &beta);
    a.g[i] = g;
    a.beta[i] = beta;
  }
}

}  // namespace cuda
}  // namespace gdn
