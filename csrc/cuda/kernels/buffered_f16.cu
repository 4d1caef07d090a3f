#include "buffered_launch.cuh"

namespace gdn {
namespace cuda {

cudaError_t buffered_f16(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream) {
  return launch_buffered<f16>(a, call, stream);
}

}  // namespace cuda
}  // namespace gdn
