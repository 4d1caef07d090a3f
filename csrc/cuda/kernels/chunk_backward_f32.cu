#include "chunk_backward_launch.cuh"

namespace gdn {
namespace cuda {

template cudaError_t chunk_backward_products<float, 64>(const ChunkBackwardArgs&,
                                                        const BackwardLayout&, cudaStream_t);
template cudaError_t chunk_backward_products<float, 128>(const ChunkBackwardArgs&,
                                                         const BackwardLayout&, cudaStream_t);

}  // namespace cuda
}  // namespace gdn
