#include "buffered_launch.cuh"

namespace gdn {
namespace cuda {

template <>
cudaError_t buffered_usual<float, bf16, float>(const RecurrentArgs& a, const WindowCall& call,
                                               cudaStream_t stream) {
  return launch_buffered_k<float, bf16, float, float, 128>(a, call, stream);
}

}  // namespace cuda
}  // namespace gdn
