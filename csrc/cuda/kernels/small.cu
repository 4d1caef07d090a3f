// Convolution, gates and norm: the passes around the recurrence.
#include "conv.cuh"
#include "kernels.h"
#include "launch.h"
#include "norm.cuh"
#include "select.h"

namespace gdn {
namespace cuda {
namespace {

constexpr int kLogChunk = 8;  // 256 tokens a thread walks at most
constexpr int kLogGates = 3;  // 8 tokens a block of gates takes
constexpr int kChannels = 4;  // that a thread of conv_vectors takes

unsigned blocks_for(int64_t items, int64_t each, int64_t most = 1 << 20) {
  const int64_t n = (items + each - 1) / each;
  return static_cast<unsigned>(n < 1 ? 1 : n > most ? most : n);
}

// One block for each number that a piece of a packed sequence may have (sequence_of_piece), in y
// and z.
dim3 piece_grid(unsigned across, const Sequences& s, int cut) {
  const int64_t pieces = (s.T >> cut) + s.N;
  const unsigned y = static_cast<unsigned>(pieces < kMaxGridY ? pieces : kMaxGridY);
  return dim3(across, y, static_cast<unsigned>((pieces + y - 1) / y));
}

// Launches a convolution whose sequences have at most `a.seqs.T` tokens, as far as the host knows,
// in chunks of 1 << log_chunk: outputs, then the histories of sequences that were cut.
// launched(grid, first sequence, tokens of a chunk, cut, outputs).
template <class Launch>
cudaError_t in_chunks(const ConvArgs& a, unsigned across, int log_chunk, Launch&& launched) {
  const int64_t most = a.seqs.T;
  int64_t chunk = int64_t{1} << log_chunk;
  const bool cut = most > chunk, pieces = cut && a.seqs.cu_seqlens.ptr;
  if (!cut) chunk = most > 0 ? most : 1;
  int64_t z = cut && !pieces ? (most + chunk - 1) / chunk : 1;
  if (z > 32768) {  // blockIdx.z is limited
    z = 32768;
    chunk = (most + z - 1) / z;
  }
  cudaError_t error = cudaSuccess;
  if (pieces) error = launched(piece_grid(across, a.seqs, log_chunk), 0, chunk, log_chunk, true);
  for (int64_t first = 0; first < a.seqs.N && error == cudaSuccess; first += kMaxGridY) {
    const int64_t count = a.seqs.N - first < kMaxGridY ? a.seqs.N - first : kMaxGridY;
    const dim3 grid(across, static_cast<unsigned>(count), static_cast<unsigned>(z));
    if (!pieces) error = launched(grid, first, chunk, -1, true);
    if (error == cudaSuccess && cut) {
      error = launched(dim3(grid.x, grid.y), first, chunk, -1, false);
    }
  }
  return error;
}

cudaError_t channels(const ConvArgs& a, const ConvTarget& to, const ConvPool& out,
                     cudaStream_t stream) {
  if (a.seqs.N == 0 || a.C == 0) return cudaSuccess;
  return in_chunks(a, blocks_for(a.C, 128), kLogChunk,
                   [&](dim3 grid, int64_t first, int64_t chunk, int cut, bool outputs) {
                     if (!outputs && !out.ptr) return cudaSuccess;
                     return launch(conv_channels, grid, dim3(128), 0, stream, a, to, out, first,
                                   chunk, cut, outputs);
                   });
}

// Whether all is of one type and channels stand in vectors of eight, in tokens and in outputs.
bool vector_channels(const ConvArgs& a, const ConvTarget& to) {
  const ConvPool& s = a.state;
  const DType d = a.x.dtype;
  if (a.W != 4 || !s.ptr || s.dtype != d || a.weight.dtype != d || a.weight.s1 != 1 ||
      a.weight.s0 != 4 || !aligned(a.weight.ptr, 16) || a.C % 8 != 0 || s.s_p % 8 != 0 ||
      !aligned(s.ptr, 16) || !vector_view(a.x, 8)) {
    return false;
  }
  for (int p = 0; p < 3; p++) {
    if (to.first[p] == kNoPart) continue;
    const View& y = to.part[p];
    if (y.dtype != d || to.first[p] % 8 != 0 || !vector_view(y, 8)) return false;
  }
  return true;
}

bool channels_last(const ConvPool& s) { return s.s_c == 1 && s.s_l % 8 == 0; }

// Whether 32 bits hold what conv_row and conv_output multiply.
bool short_strides(const ConvArgs& a, const ConvTarget& to) {
  const Sequences& s = a.seqs;
  const auto fits = [](int64_t x, int64_t y) {
    return x < INT32_MAX && y < INT32_MAX && -y < INT32_MAX && x * (y < 0 ? -y : y) < INT32_MAX;
  };
  bool can = fits(s.N, s.state_indices.s0) && fits(s.N, s.num_accepted.s0) && fits(s.N, s.s_has) &&
             fits(s.P, 1) && fits(a.C, a.W) && fits(1, a.x.sb) && fits(a.seqs.T, a.x.st) &&
             fits(1, a.state.s_p) && fits(a.state.L, a.state.s_l);
  for (const View& y : to.part) can = can && fits(1, y.sb) && fits(a.seqs.T, y.st);
  return can;
}

bool token_can(const ConvArgs& a, const ConvTarget& to) {
  const ConvPool& s = a.state;
  if (a.seqs.cu_seqlens.ptr || a.seqs.T != 1 || a.x.dtype == DType::f32) return false;
  if (!vector_channels(a, to)) return false;
  if (s.leading ? s.L != 3 || a.seqs.num_accepted.ptr != nullptr : s.L != 3 && s.L != 4) {
    return false;
  }
  return channels_last(s) || (s.s_l == 1 && s.s_c == s.L);
}

// One to four tokens, and a history of which nothing stays but what they meet.
bool few_can(const ConvArgs& a, const ConvTarget& to) {
  return !a.seqs.cu_seqlens.ptr && a.seqs.T >= 1 && a.seqs.T <= 4 && short_strides(a, to) &&
         (a.state.leading || a.state.L - (a.W - 1) <= a.seqs.T);
}

template <class T>
cudaError_t few(const ConvArgs& a, const ConvTarget& to, const GateOutputs& gate, int norm_lanes,
                cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  for (int64_t first = 0; first < a.seqs.N && error == cudaSuccess; first += kMaxGridY) {
    const int64_t count = a.seqs.N - first < kMaxGridY ? a.seqs.N - first : kMaxGridY;
    const dim3 grid(blocks_for(a.C / kChannels + (gate.g ? gate.HV : 0), 128),
                    static_cast<unsigned>(count));
    const auto kernel = a.seqs.T <= 2 ? conv_few<T, 2> : conv_few<T, 4>;
    error = launch(kernel, grid, dim3(128), 0, stream, a, to, gate, first, norm_lanes);
  }
  return error;
}

template <class T>
cudaError_t vectors(const ConvArgs& a, const ConvTarget& to, const GateOutputs& gate,
                    int norm_lanes, cudaStream_t stream) {
  if (few_can(a, to)) return few<T>(a, to, gate, norm_lanes, stream);
  constexpr int N = kChannels;
  const unsigned across = blocks_for(a.C / N + (gate.g ? gate.HV : 0), 128);
  const int64_t sequences = a.seqs.cu_seqlens.ptr ? 1 : a.seqs.N;
  int log_chunk = kLogChunk;
  while (log_chunk > 5 &&
         across * sequences * ((a.seqs.T >> log_chunk) + 1) < 8 * multiprocessors()) {
    log_chunk--;
  }
  return in_chunks(a, across, log_chunk,
                   [&](dim3 grid, int64_t first, int64_t chunk, int cut, bool outputs) {
                     return launch(conv_vectors<T, N>, grid, dim3(128), 0, stream, a, to,
                                   outputs ? gate : GateOutputs(), first, static_cast<int>(chunk),
                                   cut, outputs ? norm_lanes : 0, outputs);
                   });
}

cudaError_t vectors_of(const ConvArgs& a, const ConvTarget& to, const GateOutputs& gate,
                       int norm_lanes, cudaStream_t stream) {
  switch (a.x.dtype) {
    case DType::f32:
      return vectors<float>(a, to, gate, norm_lanes, stream);
    case DType::bf16:
      return vectors<bf16>(a, to, gate, norm_lanes, stream);
    default:
      return vectors<f16>(a, to, gate, norm_lanes, stream);
  }
}

template <class T, int L, bool TAPS>
cudaError_t token_launch(const ConvArgs& a, const ConvTarget& to, const GateOutputs& gate,
                         int norm_lanes, cudaStream_t stream) {
  for (int64_t first = 0; first < a.seqs.N; first += kMaxGridY) {
    const int64_t count = a.seqs.N - first < kMaxGridY ? a.seqs.N - first : kMaxGridY;
    const dim3 grid(blocks_for(a.C / 8 + (gate.g ? gate.HV : 0), 128),
                    static_cast<unsigned>(count));
    // Worth it where all blocks wait at once (docs/tried/cuda.md).
    const bool ahead = int64_t{grid.x} * grid.y <= 16 * multiprocessors();
    const cudaError_t error = launch(conv_token<T, L, TAPS>, grid, dim3(128), 0, stream, a, to,
                                     gate, first, norm_lanes, ahead);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class T>
cudaError_t token(const ConvArgs& a, const ConvTarget& to, const GateOutputs& gate, int norm_lanes,
                  cudaStream_t stream) {
  const bool taps = a.state.s_l == 1 && a.state.s_c == a.state.L;
  if (a.state.L == 3) {
    return taps ? token_launch<T, 3, true>(a, to, gate, norm_lanes, stream)
                : token_launch<T, 3, false>(a, to, gate, norm_lanes, stream);
  }
  return taps ? token_launch<T, 4, true>(a, to, gate, norm_lanes, stream)
              : token_launch<T, 4, false>(a, to, gate, norm_lanes, stream);
}

template <class XT, class GT>
cudaError_t norm_launch(const NormArgs& a, cudaStream_t stream) {
  const bool vec = aligned(a.x, 16) && aligned(a.gate, 16) && aligned(a.y, 16) && a.s_x % 4 == 0 &&
                   a.s_gate % 4 == 0 && a.s_x_head % 4 == 0 && a.s_gate_head % 4 == 0;
  const dim3 grid(blocks_for(a.rows, 4));
  if (vec && a.V == 128) return launch(norm_rows<XT, GT, 4>, grid, dim3(128), 0, stream, a);
  if (vec && a.V == 256) return launch(norm_rows<XT, GT, 8>, grid, dim3(128), 0, stream, a);
  return launch(norm_rows<XT, GT, 0>, grid, dim3(128), 0, stream, a);
}

template <class XT>
cudaError_t norm_gate(const NormArgs& a, cudaStream_t stream) {
  switch (a.gate_dtype) {
    case DType::f32:
      return norm_launch<XT, float>(a, stream);
    case DType::bf16:
      return norm_launch<XT, bf16>(a, stream);
    default:
      return norm_launch<XT, f16>(a, stream);
  }
}

template <class XT>
cudaError_t heads_launch(const NormArgs& a, const View& gate, int64_t B, int64_t T, int64_t HV,
                         cudaStream_t stream) {
  const int64_t tokens = B * T;
  const unsigned rows = static_cast<unsigned>(tokens < kMaxGridY ? tokens : kMaxGridY);
  const int hv = static_cast<int>(HV), t = static_cast<int>(T);
  const bool vectors = aligned(a.x, 16) && aligned(a.y, 16) && vector_view(gate, 8);
  if (a.V == 128 && tokens <= kMaxGridY && vectors) {
    return launch(norm_heads_128<XT>, dim3(blocks_for(HV, 8), rows), dim3(128), 0, stream, a, gate,
                  hv, t);
  }
  return launch(norm_heads<XT>, dim3(blocks_for(HV, 4), rows), dim3(128), 0, stream, a, gate, hv, t,
                tokens);
}

}  // namespace

cudaError_t gating(const GatingArgs& a, cudaStream_t stream) {
  const int64_t all = a.rows_b * a.rows_t * a.HV;
  if (all == 0) return cudaSuccess;
  return launch(plain_gates, dim3(blocks_for(all, 256)), dim3(256), 0, stream, a);
}

cudaError_t short_conv(const ConvArgs& a, cudaStream_t stream) {
  ConvTarget to;
  to.part[0] = a.y;
  if (a.seqs.N > 0 && token_can(a, to)) {
    return a.x.dtype == DType::bf16 ? token<bf16>(a, to, GateOutputs(), 0, stream)
                                    : token<f16>(a, to, GateOutputs(), 0, stream);
  }
  if (a.seqs.N > 0 && vector_channels(a, to) && channels_last(a.state)) {
    return vectors_of(a, to, GateOutputs(), 0, stream);
  }
  return channels(a, to, a.state, stream);
}

cudaError_t conv1d(const ConvArgs& a, const ConvPool& final_state, cudaStream_t stream) {
  ConvTarget to;
  to.part[0] = a.y;
  return channels(a, to, final_state, stream);
}

cudaError_t conv_gating(const ConvGatingArgs& a, cudaStream_t stream) {
  const ConvArgs& c = a.conv;
  if (c.seqs.N == 0 || c.seqs.B * c.seqs.T == 0) return cudaSuccess;
  ConvTarget to;
  to.part[0] = a.q;
  to.part[1] = a.k;
  to.part[2] = a.v;
  to.first[1] = a.H * a.K;
  to.first[2] = 2 * a.H * a.K;
  GateOutputs gate;
  gate.gates = a.gates;
  gate.g = a.g;
  gate.beta = a.beta;
  gate.HV = a.HV;
  const auto norm_lanes = [&](int64_t channels) {  // of a head, where they can share its norm
    const int64_t lanes = a.l2norm && a.K % channels == 0 ? a.K / channels : 0;
    return lanes <= 32 && (lanes & (lanes - 1)) == 0 ? static_cast<int>(lanes) : 0;
  };
  const bool norm_inside = !a.l2norm || norm_lanes(8) > 0;
  if (token_can(c, to) && norm_inside) {
    return c.x.dtype == DType::bf16 ? token<bf16>(c, to, gate, norm_lanes(8), stream)
                                    : token<f16>(c, to, gate, norm_lanes(8), stream);
  }
  // A few gates are taken beside the channels.
  const bool vector = vector_channels(c, to) && channels_last(c.state),
             gates_apart = !vector || c.seqs.T > kDecodeTokens;
  const int lanes = vector ? norm_lanes(kChannels) : 0;
  cudaError_t error = cudaSuccess;
  if (vector) {
    error = vectors_of(c, to, gates_apart ? GateOutputs() : gate, lanes, stream);
  } else {
    error = channels(c, to, c.state, stream);
  }
  for (int p = 0; p < 2 && a.l2norm && lanes == 0 && error == cudaSuccess; p++) {
    error =
        launch(normalize_heads, dim3(blocks_for(c.seqs.B * c.seqs.T * a.H, 4, INT64_C(2147483647))),
               dim3(128), 0, stream, to.part[p], c.seqs.B, c.seqs.T, a.H, a.K);
  }
  if (!gates_apart || error != cudaSuccess) return error;
  if (c.seqs.cu_seqlens.ptr) {
    const dim3 grid = piece_grid(1, c.seqs, kLogGates);
    return launch(sequence_gates, dim3(grid.y, grid.z), dim3(128), 0, stream, c.seqs, gate,
                  int64_t{0}, kLogGates);
  }
  for (int64_t first = 0; first < c.seqs.N && error == cudaSuccess; first += kMaxGridY) {
    const int64_t count = c.seqs.N - first < kMaxGridY ? c.seqs.N - first : kMaxGridY;
    error = launch(sequence_gates,
                   dim3(blocks_for(c.seqs.T * a.HV, 128, 1024), static_cast<unsigned>(count)),
                   dim3(128), 0, stream, c.seqs, gate, first, -1);
  }
  return error;
}

cudaError_t gated_rms_norm(const NormArgs& a, cudaStream_t stream) {
  if (a.rows == 0 || a.V == 0) return cudaSuccess;
  switch (a.dtype) {
    case DType::f32:
      return norm_gate<float>(a, stream);
    case DType::bf16:
      return norm_gate<bf16>(a, stream);
    default:
      return norm_gate<f16>(a, stream);
  }
}

cudaError_t gated_norm_heads(const NormArgs& a, const View& gate, int64_t B, int64_t T, int64_t HV,
                             cudaStream_t stream) {
  if (B * T == 0 || a.V == 0) return cudaSuccess;
  switch (a.dtype) {
    case DType::f32:
      return heads_launch<float>(a, gate, B, T, HV, stream);
    case DType::bf16:
      return heads_launch<bf16>(a, gate, B, T, HV, stream);
    default:
      return heads_launch<f16>(a, gate, B, T, HV, stream);
  }
}

}  // namespace cuda
}  // namespace gdn
