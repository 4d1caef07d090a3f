#include "window_any.cuh"

#include "buffered_launch.cuh"
#include "launch.h"
#include "select.h"

namespace gdn {
namespace cuda {
namespace {

template <bool BASE>
cudaError_t launch_any(const RecurrentArgs& a, bool flush, cudaStream_t stream) {
  const int shared = any_window_floats(static_cast<int>(a.K), BASE) * 4;
  cudaError_t error = shared > 48 * 1024 ? allow_shared(window_any<BASE>, shared) : cudaSuccess;
  AnyWindowGrid grid;
  constexpr int rows = any_window_rows(BASE);
  grid.row_blocks = FastDiv(static_cast<uint32_t>((a.V + rows - 1) / rows));
  grid.ratio = FastDiv(static_cast<uint32_t>(a.HV / a.H));
  grid.flush = flush;
  const unsigned blocks = static_cast<unsigned>(a.HV) * grid.row_blocks.divisor;
  for (; error == cudaSuccess && grid.first < a.seqs.N; grid.first += kMaxGridY) {
    const int64_t count = a.seqs.N - grid.first < kMaxGridY ? a.seqs.N - grid.first : kMaxGridY;
    error = launch(window_any<BASE>, dim3(blocks, static_cast<unsigned>(count)),
                   dim3(kAnyWindowWarps * 32), shared, stream, a, grid);
  }
  constexpr int64_t kMaxGridX = 2147483647;
  for (int64_t first = 0; error == cudaSuccess && first < a.seqs.N; first += kMaxGridX) {
    const int64_t count = a.seqs.N - first < kMaxGridX ? a.seqs.N - first : kMaxGridX;
    error = launch(append_any, dim3(static_cast<unsigned>(count)), dim3(256), 0, stream, a, first,
                   flush);
  }
  return error;
}

}  // namespace

cudaError_t window_of_any_shape(const RecurrentArgs& a, const WindowCall& call,
                                cudaStream_t stream) {
  return a.state.ptr ? launch_any<true>(a, call.flush, stream)
                     : launch_any<false>(a, call.flush, stream);
}

}  // namespace cuda
}  // namespace gdn
