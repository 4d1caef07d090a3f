// Host side of the backward of chunked prefill.
#include "chunk_backward.cuh"

#include "launch.h"
#include "select.h"

namespace gdn {
namespace cuda {
namespace {

int64_t slots_of(const ChunkArgs& a) {
  return a.seqs.cu_seqlens.ptr ? a.seqs.T / kChunk + a.seqs.N
                               : a.seqs.N * ((a.seqs.T + kChunk - 1) / kChunk);
}

struct Scratch {
  size_t factors, keys, states, rows, beta, scales;
  explicit Scratch(const ChunkArgs& a) {
    const size_t slots = static_cast<size_t>(slots_of(a)), heads = slots * a.HV;
    const bool two = a.q.dtype == DType::f32;
    const size_t parts = two ? 2 : 1;
    factors = heads * (two ? Format<float>::kBytes : Format<bf16>::kBytes);  // of float16 too
    keys = two ? slots * a.H * 4 * (a.K / 64) * kPanelBytes : 0;
    states = parts * heads * (a.V / 64) * (a.K / 64) * kPanelBytes;
    rows = parts * heads * (a.V / 64) * kPanelBytes;
    beta = heads * kBetaBytes;
    scales = a.q.dtype == DType::bf16 ? 0 : heads * (a.V / 64) * 16;
  }
  size_t all() const { return factors + keys + 2 * states + 2 * rows + beta + scales; }
};

}  // namespace

bool chunk_backward_can(const ChunkBackwardArgs& a) {
  const ChunkArgs& f = a.forward;
  const auto view = [&](const View& x) { return x.dtype == f.q.dtype && vector_view(x, 8); };
  const auto fits = [&](auto k) {
    const int ratio = static_cast<int>(f.HV / f.H), limit = shared_limit();
    if (f.q.dtype != DType::f32) return GradientsShared<bf16, k(), 1>::bytes(ratio) <= limit;
    return GradientsShared<float, k(), 1>::bytes(ratio) <= limit &&
           StatesShared<float, k()>::template kBytes<2> <= limit &&
           ReverseShared<float, k()>::template kBytes<1> <= limit;
  };
  return (f.K == 64 || f.K == 128) && f.V % kScanRows == 0 && f.V > 0 && f.HV / f.H <= kMaxRatio &&
         f.seqs.T > 0 && f.seqs.N > 0 && view(f.q) && view(f.k) && view(f.v) && view(a.grad_out) &&
         (f.K == 64 ? fits(std::integral_constant<int, 64>())
                    : fits(std::integral_constant<int, 128>()));
}

size_t chunk_backward_workspace(const ChunkBackwardArgs& a) { return Scratch(a.forward).all(); }

cudaError_t chunk_backward(const ChunkBackwardArgs& a, void* workspace, cudaStream_t stream) {
  const ChunkArgs& f = a.forward;
  const Scratch s(f);
  BackwardLayout x;
  x.forward.factors = static_cast<unsigned char*>(workspace);
  x.forward.keys = x.forward.factors + s.factors;
  x.states = x.forward.keys + s.keys;
  x.state_gradients = x.states + s.states;
  x.updates = x.state_gradients + s.states;
  x.target_gradients = x.updates + s.rows;
  x.forward.beta = reinterpret_cast<float*>(x.target_gradients + s.rows);
  x.scales = x.forward.beta + s.beta / 4;
  x.forward.slots = slots_of(f);
  x.forward.chunks = (f.seqs.T + kChunk - 1) / kChunk;
  x.forward.ratio = FastDiv(static_cast<uint32_t>(f.HV / f.H));
  const auto with_keys = [&](auto in) {
    using IN = decltype(in);
    return f.K == 64 ? chunk_backward_products<IN, 64>(a, x, stream)
                     : chunk_backward_products<IN, 128>(a, x, stream);
  };
  return f.q.dtype == DType::f32    ? with_keys(float())
         : f.q.dtype == DType::bf16 ? with_keys(bf16())
                                    : with_keys(f16());
}

}  // namespace cuda
}  // namespace gdn
