#include "append.cuh"
#include "lowrank.cuh"
#include "lowrank.h"
#include "select.h"

namespace gdn {
namespace cuda {
namespace {

template <int K, int TG>
cudaError_t launch_rows(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream) {
  constexpr int VB = 128;
  LowrankGrid grid;
  grid.row_blocks = FastDiv(static_cast<uint32_t>((a.V + VB - 1) / VB));
  grid.ratio = FastDiv(static_cast<uint32_t>(a.HV / a.H));
  grid.norm = call.norm;
  const int64_t blocks = a.HV * grid.row_blocks.divisor;
  grid.blocks = countable_blocks(blocks);
  cudaError_t error = cudaSuccess;
  for (; error == cudaSuccess && grid.first < a.seqs.N; grid.first += kMaxGridY) {
    const int64_t count = a.seqs.N - grid.first < kMaxGridY ? a.seqs.N - grid.first : kMaxGridY;
    error = launch(lowrank_rows<K, VB, TG>,
                   dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(count)), dim3(VB), 0,
                   stream, a, grid);
  }
  if (error == cudaSuccess && grid.blocks == 0) error = launch_append<K>(a, stream);
  return error;
}

template <int K>
cudaError_t launch_k(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream) {
  const bool one = !a.seqs.cu_seqlens.ptr && a.seqs.T == 1;
  return one ? launch_rows<K, 1>(a, call, stream) : launch_rows<K, 4>(a, call, stream);
}

}  // namespace

cudaError_t lowrank(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream) {
  if (lowrank_heads_can(a, call)) return launch_lowrank_heads(a, call, stream);
  switch (a.K) {
    case 64:
      return launch_k<64>(a, call, stream);
    case 128:
      return launch_k<128>(a, call, stream);
    default:
      return launch_k<256>(a, call, stream);
  }
}

}  // namespace cuda
}  // namespace gdn
