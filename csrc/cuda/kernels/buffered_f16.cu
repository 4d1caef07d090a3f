#include "buffered_launch.cuh"

namespace gdn {
namespace cuda {

cudaError_t buffered_f16(const RecurrentArgs& a, void* memory, bool flush, cudaStream_t stream) {
  return launch_buffered<f16>(a, memory, flush, stream);
}

}  // namespace cuda
}  // namespace gdn
