#include "buffered_launch.cuh"

namespace gdn {
namespace cuda {

template <>
cudaError_t buffered_usual<f16, bf16, float>(const RecurrentArgs& a, const WindowCall& call,
                                             cudaStream_t stream) {
  return launch_alone<f16, bf16, float, float, 128>(a, call, stream);
}

}  // namespace cuda
}  // namespace gdn
