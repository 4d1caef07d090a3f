#include "buffered_launch.cuh"

namespace gdn {
namespace cuda {

template <>
cudaError_t buffered_usual<float, bf16, bf16>(const RecurrentArgs& a, const WindowCall& call,
                                              cudaStream_t stream) {
  return launch_alone<float, bf16, bf16, bf16, 128>(a, call, stream);
}

}  // namespace cuda
}  // namespace gdn
