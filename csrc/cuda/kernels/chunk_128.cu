#include "chunk_launch.cuh"

namespace gdn {
namespace cuda {

cudaError_t chunk_128(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream) {
  return launch_chunk<128>(a, x, stream);
}

}  // namespace cuda
}  // namespace gdn
