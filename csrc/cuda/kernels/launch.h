// Host side of a launch: programmatic dependent launch where the device has it.
#pragma once

#include <cuda_runtime.h>

namespace gdn {
namespace cuda {

// Of the current device, asked for once a thread and device.
template <cudaDeviceAttr ATTRIBUTE>
int device_attribute(int otherwise) {
  static thread_local int cached_device = -1, cached = 0;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return otherwise;
  if (device != cached_device) {
    cached = otherwise;
    cudaDeviceGetAttribute(&cached, ATTRIBUTE, device);
    cached_device = device;
  }
  return cached;
}

inline bool has_dependent_launch() {
  return device_attribute<cudaDevAttrComputeCapabilityMajor>(0) >= 9;
}

inline int multiprocessors() { return device_attribute<cudaDevAttrMultiProcessorCount>(1); }

// Bytes of shared memory that a block may ask for.
inline int shared_limit() { return device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(0); }

template <class... P>
cudaError_t allow_shared(void (*kernel)(P...), int bytes) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                              cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
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
