#include "buffered_launch.cuh"

namespace gdn {
namespace cuda {

cudaError_t buffered_f32(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream) {
  return launch_buffered<float>(a, call, stream);
}

}  // namespace cuda
}  // namespace gdn
