// Tensor-core pieces of the window kernels: operands of either 16-bit type or f32 in parts.
#pragma once

#include "mma.cuh"

namespace gdn {
namespace cuda {

// A float as the sum of two 16-bit numbers: what the first one loses, the second holds.
template <class T>
__device__ __forceinline__ float low_part(float x) {
  return x - to_float(from_float<T>(x));
}

}  // namespace cuda
}  // namespace gdn
