#pragma once
__device__ float exp(float x);
__device__ float log(float x);
