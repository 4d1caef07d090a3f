#include "buffered_launch.cuh"

namespace gdn {
namespace cuda {

cudaError_t buffered_bf16(const RecurrentArgs& a, void* memory, bool flush, cudaStream_t stream) {
  return launch_buffered<bf16>(a, memory, flush, stream);
}

}  // namespace cuda
}  // namespace gdn
