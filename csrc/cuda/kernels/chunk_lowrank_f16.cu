#include "chunk_launch.cuh"

namespace gdn {
namespace cuda {

template cudaError_t lowrank_scan<f16>(const ChunkArgs&, const ChunkLayout&, cudaStream_t);

}  // namespace cuda
}  // namespace gdn
