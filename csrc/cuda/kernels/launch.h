// Host side of a launch: programmatic dependent launch where the device has it.
#pragma once

#include <cuda_runtime.h>

namespace gdn {
namespace cuda {

inline bool has_dependent_launch() {
  static thread_local int cached_device = -1;
  static thread_local bool cached = false;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (device != cached_device) {
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cached = major >= 9;
    cached_device = device;
  }
  return cached;
}

inline int multiprocessors() {
  static thread_local int cached_device = -1, cached = 1;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  if (device != cached_device) {
    cudaDeviceGetAttribute(&cached, cudaDevAttrMultiProcessorCount, device);
    cached_device = device;
  }
  return cached;
}

// Bytes of shared memory that a block may ask for.
inline int shared_limit() {
  static thread_local int cached_device = -1, cached = 0;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (device != cached_device) {
    cudaDeviceGetAttribute(&cached, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cached_device = device;
  }
  return cached;
}

// Every kernel launched here calls wait_for_previous_kernel, before it touches memory unless it
// says why not.
template <class... P, class... A>
cudaError_t launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                   A&&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attribute;
  config.numAttrs = has_dependent_launch() ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
}

}  // namespace cuda
}  // namespace gdn
