// AVX-512 with BF16 conversions and dot products
#include "kernels/prelude.h"

#if defined(__x86_64__)
#define GDN_ISA avx512bf16
#define GDN_ISA_DESCRIPTION "AVX-512 with BF16 conversions and dot products"
#define GDN_SIMD_AVX512 1
#define GDN_SIMD_AVX512BF16 1

#if defined(__clang__)
#pragma clang attribute push(                                                               \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif
namespace gdn::cpu::avx512bf16 {
static bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
}
#include "kernels/all.h"
}  // namespace gdn::cpu::avx512bf16
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
