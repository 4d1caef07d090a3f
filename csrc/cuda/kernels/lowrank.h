// The low-rank step of a block a key head, for the calls that it takes (lowrank_heads.cuh).
#pragma once

#include "kernels.h"

namespace gdn {
namespace cuda {

bool lowrank_heads_can(const RecurrentArgs& a, const WindowCall& call);
cudaError_t launch_lowrank_heads(const RecurrentArgs& a, const WindowCall& call,
                                 cudaStream_t stream);

}  // namespace cuda
}  // namespace gdn
