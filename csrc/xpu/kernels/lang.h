// The few words kernels are written in. On the device they expand to the vendor's language (every
// call is listed with its evidence in docs/xpu.md); on the host to the twin, which checks them.
#pragma once

#include <cstdint>

#if defined(GDN_XPU_TWIN)
#include "../twin/lang.h"
#else

#include "xpu/kernel/xtdk.h"
#include "xpu/kernel/xtdk_math.h"
#include "xpu/kernel/xtdk_simd.h"

namespace gdn {
namespace xpu {

typedef float sfloat;
typedef float32x16_t vf32;
typedef float16x32_t vf16;
template <typename T>
using lm_ptr = T*;
typedef _shared_ptr_ char* sm_ptr;
typedef uint64_t gm_addr;

// The cluster's shared memory, all of it, as one array.
__shared__ char cluster_memory[256 * 1024];
__device__ inline sm_ptr sm_at(int offset) {
  return reinterpret_cast<sm_ptr>(&cluster_memory[offset]);
}

template <typename U, typename T>
__device__ inline U* lm_cast(T* p) {
  return reinterpret_cast<U*>(p);
}
__device__ inline sfloat s_exp(sfloat x) { return exp(x); }
__device__ inline sfloat s_log(sfloat x) { return log(x); }
__device__ inline uint32_t s_float_to_bits(sfloat f) {
  union {
    float f;
    uint32_t u;
  } c;
  c.f = f;
  return c.u;
}
__device__ inline sfloat s_bits_to_float(uint32_t u) {
  union {
    uint32_t u;
    float f;
  } c;
  c.u = u;
  return c.f;
}
__device__ inline sfloat s_half_to_float(uint16_t h) {
  union {
    uint16_t u;
    _Float16 h;
  } c;
  c.u = h;
  return static_cast<float>(c.h);
}
__device__ inline uint16_t s_float_to_half(sfloat f) {
  union {
    uint16_t u;
    _Float16 h;
  } c;
  c.h = static_cast<_Float16>(f);
  return c.u;
}

}  // namespace xpu
}  // namespace gdn

#define XPU_GM(addr) (reinterpret_cast<__global_ptr__ char*>(addr))
#define XPU_LM(T, name, n)      \
  __simd__ T name##_storage[n]; \
  T* const name = name##_storage
#define lm_get(p, i) ((p)[i])
#define lm_put(p, i, v) ((p)[i] = (v))
#define sm_get(p, i) (reinterpret_cast<_shared_ptr_ float*>(p)[i])
#define sm_put(p, i, v) (reinterpret_cast<_shared_ptr_ float*>(p)[i] = (v))
#define XPU_LOAD(gm, lm, bytes) GM2LM_ASYNC(XPU_GM(gm), lm, bytes)
#define XPU_STORE(lm, gm, bytes) LM2GM_ASYNC(lm, XPU_GM(gm), bytes)
#define XPU_FENCE(spaces) __builtin_xpu2_mfence(spaces)
#define XPU_SYNC_CLUSTER() sync_cluster()

#define XPU_LIST(...) __VA_ARGS__
#define XPU_OP(name, constraint, value) [name] constraint(value)
#define XPU_ASM(text, outs, ins) __asm__ __volatile__(text : XPU_LIST outs : XPU_LIST ins)
#define XPU_ASM_MEM(text, outs, ins) \
  __asm__ __volatile__(text : XPU_LIST outs : XPU_LIST ins : "memory")

#define AS_INT(v) ((int32x16_t)(v))
#define AS_UINT(v) ((uint32x16_t)(v))
#define AS_FLOAT(v) ((float32x16_t)(v))

#if !defined(XPU_LAUNCH)  // a syntax check on a host compiler brings its own
#define XPU_LAUNCH(name, kernel, clusters, cores, stream, barriers, ...) \
  kernel<<<clusters, cores, static_cast<XPUStream>(stream)>>>(__VA_ARGS__)
#endif
#endif

// Forms that public sources do not show for this chip, or show as a function only, each with what
// replaces it: XPU_IF_x(with, without) is one of two statements. On the device a switch of the
// build decides and the other statement is never seen; the twin has both and decides when it runs.
#if defined(GDN_XPU_TWIN)
#define XPU_IF(name, with, without) \
  do {                              \
    if (XPU_SWITCH(name))           \
      with;                         \
    else                            \
      without;                      \
  } while (0)
#define XPU_IF_SCALAR_MAC(with, without) XPU_IF(scalar_mac, with, without)
#define XPU_IF_NO_MERGE32(with, without) XPU_IF(no_merge32, with, without)
#else
#if defined(GDN_XPU_SCALAR_MAC)  // vmac.f with a scalar factor
#define XPU_IF_SCALAR_MAC(with, without) with
#else
#define XPU_IF_SCALAR_MAC(with, without) without
#endif
#if defined(GDN_XPU_NO_MERGE32)  // no interleaving of 32-bit lanes
#define XPU_IF_NO_MERGE32(with, without) with
#else
#define XPU_IF_NO_MERGE32(with, without) without
#endif
#endif

// Spaces a fence waits for, the operand of the vendor's mfence.
#define XPU_LM_ONLY 1  // between vector and scalar accesses to the same local bytes
#define XPU_LM_GM 5    // and for every transfer between local and global memory
