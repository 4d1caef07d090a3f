#pragma once
typedef float float32x16_t __attribute__((vector_size(64)));
typedef _Float16 float16x32_t __attribute__((vector_size(64)));
typedef int int32x16_t __attribute__((vector_size(64)));
typedef unsigned uint32x16_t __attribute__((vector_size(64)));
__device__ float32x16_t vvadd_float32x16(float32x16_t a, float32x16_t b);
__device__ float32x16_t vvmul_float32x16(float32x16_t a, float32x16_t b);
__device__ float32x16_t vvmerge_l_float32x16(float32x16_t a, float32x16_t b);
__device__ float32x16_t vvmerge_h_float32x16(float32x16_t a, float32x16_t b);
__device__ uint32x16_t vvor_uint32x16(uint32x16_t a, uint32x16_t b);
__device__ uint32x16_t svsll_uint32x16(int n, uint32x16_t v);
__device__ int svneq_int32x16(int s, int32x16_t v);
__device__ uint32x16_t svadd_uint32x16_mh(unsigned s, uint32x16_t v, uint32x16_t hold, int mask);
