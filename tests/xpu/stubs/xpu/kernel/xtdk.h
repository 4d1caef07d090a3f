// Declarations of the vendor's device language, as public sources use it, for a syntax check.
#pragma once
#include <cstdint>
#define __global__ static
#define __device__
#define __simd__ alignas(64)
#define __shared__ static
#define __global_ptr__
#define _shared_ptr_
typedef void* XPUStream;
int core_id();
int core_num();
int cluster_id();
int cluster_num();
void GM2LM_ASYNC(const char* gm, void* lm, int bytes);
void LM2GM_ASYNC(const void* lm, char* gm, int bytes);
void sync_cluster();
void __builtin_xpu2_mfence(int spaces);
