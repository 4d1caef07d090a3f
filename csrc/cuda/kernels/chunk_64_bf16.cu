#include "chunk_launch.cuh"

namespace gdn {
namespace cuda {

template cudaError_t chunk_products<bf16, 64>(const ChunkArgs&, const ChunkLayout&, cudaStream_t);

}  // namespace cuda
}  // namespace gdn
