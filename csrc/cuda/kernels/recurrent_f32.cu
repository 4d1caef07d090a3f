#include "recurrent_launch.cuh"

namespace gdn {
namespace cuda {

cudaError_t recurrent_f32(const RecurrentArgs& a, bool early, cudaStream_t stream) {
  return launch_state<float>(a, early, stream);
}

}  // namespace cuda
}  // namespace gdn
