// AVX-512 F, BW, DQ, VL: 16 floats a register
#include "kernels/prelude.h"

#if defined(__x86_64__)
#define GDN_ISA avx512
#define GDN_ISA_DESCRIPTION "AVX-512 F, BW, DQ, VL: 16 floats a register"
#define GDN_SIMD_AVX512 1

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif
namespace gdn::cpu::avx512 {
static bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#include "kernels/all.h"
}  // namespace gdn::cpu::avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
