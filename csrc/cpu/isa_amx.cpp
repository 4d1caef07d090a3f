// AVX-512 with BF16, and AMX tiles for products of matrices
#include "kernels/prelude.h"

#if GDN_WITH_AMX
#include <sys/syscall.h>
#include <unistd.h>

#define GDN_ISA amx
#define GDN_ISA_DESCRIPTION "AVX-512 with BF16, AMX tiles of bf16"
#define GDN_SIMD_AVX512 1
#define GDN_SIMD_AVX512BF16 1
#define GDN_SIMD_AMX 1

#include <cpuid.h>

#if defined(__clang__)
#pragma clang attribute push(                                                            \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16," \
                          "amx-tile,amx-bf16"))),                                        \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#pragma GCC target("amx-tile,amx-bf16")
#endif
namespace gdn::cpu::amx {
// The tiles are 8 KB of state a thread: the kernel hands them out on request only.
static bool tiles_granted() {
#if GDN_EMULATED_TILES  // tests/native/emulated_tiles.h
  return true;
#else
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
  if (!(edx & amx_bf16) || !(edx & amx_tile)) return false;
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#endif
}
static bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16") &&
         tiles_granted();
}
#include "kernels/all.h"
}  // namespace gdn::cpu::amx
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
