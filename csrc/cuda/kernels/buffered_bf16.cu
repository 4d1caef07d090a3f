#include "buffered_launch.cuh"

namespace gdn {
namespace cuda {

cudaError_t buffered_bf16(const RecurrentArgs& a, const WindowCall& call, cudaStream_t stream) {
  return launch_buffered<bf16>(a, call, stream);
}

}  // namespace cuda
}  // namespace gdn
