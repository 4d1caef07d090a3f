#include "recurrent_launch.cuh"

namespace gdn {
namespace cuda {

cudaError_t recurrent_bf16(const RecurrentArgs& a, bool early, cudaStream_t stream) {
  return launch_state<bf16>(a, early, stream);
}

}  // namespace cuda
}  // namespace gdn
