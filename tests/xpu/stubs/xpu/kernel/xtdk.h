// Declarations of the vendor's device language, as public sources use it, for a syntax check. Read
// as CUDA (`-x cuda`), host and device functions, shared memory and launches mean what they say.
#pragma once
#include <cstdint>
#if defined(__CUDA__)
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
extern "C" int cudaConfigureCall(int clusters, int cores, void* stream);
extern "C" int __cudaPushCallConfiguration(int clusters, int cores, void* stream);
#else
#define __global__ static
#define __device__
#define __shared__ static
#endif
#define __simd__ __attribute__((aligned(64)))
#define __global_ptr__
#define _shared_ptr_
__device__ int core_id();
__device__ int core_num();
__device__ int cluster_id();
__device__ int cluster_num();
// Of two statements: the vendor's may be.
__device__ void stub_load(const char* gm, void* lm, int bytes);
__device__ void stub_store(const void* lm, char* gm, int bytes);
__device__ void stub_issue();
#define GM2LM_ASYNC(gm, lm, bytes) \
  stub_load(gm, lm, bytes);        \
  stub_issue()
#define LM2GM_ASYNC(lm, gm, bytes) \
  stub_store(lm, gm, bytes);       \
  stub_issue()
__device__ void sync_cluster();
__device__ void __builtin_xpu2_mfence(int spaces);
