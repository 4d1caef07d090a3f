#include "chunk_launch.cuh"

namespace gdn {
namespace cuda {

template cudaError_t lowrank_scan<float>(const ChunkArgs&, const ChunkLayout&, cudaStream_t);

}  // namespace cuda
}  // namespace gdn
