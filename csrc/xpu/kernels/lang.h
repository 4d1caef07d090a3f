// The few words kernels are written in. On the device they expand to the vendor's language (every
// call is listed with its evidence in docs/xpu.md); on the host to the twin, which checks them.
#pragma once

#include <cstdint>

#if defined(GDN_XPU_TWIN)
#include "../twin/lang.h"
#else

#include "xpu/runtime.h"
// After what declares XPUStream.
#include "xpu/kernel/xtdk.h"
#include "xpu/kernel/xtdk_math.h"
#include "xpu/kernel/xtdk_simd.h"

// Of what takes vectors or holds them: a call that stays one would pass them through local memory,
// whose stack has no room for them.
#define XPU_INLINE __device__ inline __attribute__((always_inline))

namespace gdn {
namespace xpu {

typedef float sfloat;
typedef float32x16_t vf32;
typedef float16x32_t vf16;
template <typename T>
using lm_ptr = T*;
typedef _shared_ptr_ char* sm_ptr;
typedef uint64_t gm_addr;

template <typename U, typename T>
XPU_INLINE U* lm_cast(T* p) {
  return reinterpret_cast<U*>(p);
}
XPU_INLINE sfloat s_exp(sfloat x) { return exp(x); }
XPU_INLINE sfloat s_log(sfloat x) { return log(x); }
XPU_INLINE uint32_t s_float_to_bits(sfloat f) {
  union {
    float f;
    uint32_t u;
  } c;
  c.f = f;
  return c.u;
}
XPU_INLINE sfloat s_bits_to_float(uint32_t u) {
  union {
    uint32_t u;
    float f;
  } c;
  c.u = u;
  return c.f;
}
XPU_INLINE sfloat s_half_to_float(uint16_t h) {
  union {
    uint16_t u;
    _Float16 h;
  } c;
  c.u = h;
  return static_cast<float>(c.h);
}
XPU_INLINE uint16_t s_float_to_half(sfloat f) {
  union {
    uint16_t u;
    _Float16 h;
  } c;
  c.h = static_cast<_Float16>(f);
  return c.u;
}

}  // namespace xpu
}  // namespace gdn

// A kernel's array in its cluster's shared memory, declared in the kernel itself.
#define XPU_SM(name, n)                     \
  __simd__ __shared__ char name##_array[n]; \
  const sm_ptr name = reinterpret_cast<sm_ptr>(name##_array)
#define XPU_CUT(at, bytes, left) (void)(left)  // the twin checks
#define XPU_GM(addr) (reinterpret_cast<__global_ptr__ char*>(addr))
#define XPU_LM(T, name, n)      \
  __simd__ T name##_storage[n]; \
  T* const name = name##_storage
#define lm_get(p, i) ((p)[i])
#define lm_put(p, i, v) ((p)[i] = (v))
#define sm_get(p, i) (reinterpret_cast<_shared_ptr_ float*>(p)[i])
#define sm_put(p, i, v) (reinterpret_cast<_shared_ptr_ float*>(p)[i] = (v))
// The vendor's may be macros of several statements.
#define XPU_LOAD(gm, lm, bytes)           \
  do {                                    \
    GM2LM_ASYNC(XPU_GM(gm), (lm), bytes); \
  } while (0)
#define XPU_STORE(lm, gm, bytes)          \
  do {                                    \
    LM2GM_ASYNC((lm), XPU_GM(gm), bytes); \
  } while (0)
#define XPU_FENCE(spaces) __builtin_xpu2_mfence(spaces)
#define XPU_SYNC_CLUSTER() \
  do {                     \
    sync_cluster();        \
  } while (0)

#define XPU_LIST(...) __VA_ARGS__
#define XPU_OP(name, constraint, value) [name] constraint(value)
#define XPU_ASM(text, outs, ins) __asm__ __volatile__(text : XPU_LIST outs : XPU_LIST ins)
#define XPU_ASM_MEM(text, outs, ins) \
  __asm__ __volatile__(text : XPU_LIST outs : XPU_LIST ins : "memory")

#define AS_INT(v) ((int32x16_t)(v))
#define AS_UINT(v) ((uint32x16_t)(v))
#define AS_FLOAT(v) ((float32x16_t)(v))

// A launch is an error code, or, from a compiler without -fxpu-launch-return, nothing: the comma
// operator makes either a Launched.
namespace gdn {
namespace xpu {
struct Launched {
  int error;
};
inline Launched operator,(int error, Launched) { return {error}; }
}  // namespace xpu
}  // namespace gdn
#if !defined(XPU_LAUNCH)  // a syntax check on a host compiler brings its own
#define XPU_LAUNCH(name, kernel, clusters, cores, stream, barriers, ...)                        \
  check_launch(name, (kernel<<<clusters, cores, static_cast<XPUStream>(stream)>>>(__VA_ARGS__), \
                      Launched{0})                                                              \
                         .error)
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

constexpr int kSharedBytes = 256 * 1024;  // of a cluster

// Spaces a fence waits for, the operand of the vendor's mfence.
#define XPU_LM_ONLY 1  // between vector and scalar accesses to the same local bytes
#define XPU_LM_GM 5    // and for every transfer between local and global memory
