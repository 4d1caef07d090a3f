#include "recurrent_launch.cuh"

namespace gdn {
namespace cuda {

cudaError_t recurrent_f32(const RecurrentArgs& a, cudaStream_t stream) {
  return launch_state<float>(a, stream);
}

}  // namespace cuda
}  // namespace gdn
