#include "chunk_launch.cuh"

namespace gdn {
namespace cuda {

cudaError_t chunk_64(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream) {
  return launch_chunk<64>(a, x, stream);
}

}  // namespace cuda
}  // namespace gdn
