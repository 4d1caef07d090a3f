// AVX2, FMA, F16C: 8 floats a register
#include "kernels/prelude.h"

#if defined(__x86_64__)
#define GDN_ISA avx2
#define GDN_ISA_DESCRIPTION "AVX2, FMA, F16C: 8 floats a register"
#define GDN_SIMD_AVX2 1

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace gdn::cpu::avx2 {
static bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
#include "kernels/all.h"
}  // namespace gdn::cpu::avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
