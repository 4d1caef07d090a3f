// 64-bit Arm: NEON is part of the architecture, so no target needs raising.
#include "kernels/prelude.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define GDN_ISA neon
#define GDN_ISA_DESCRIPTION "64-bit Arm NEON: 4 floats a register"
#define GDN_SIMD_NEON 1
namespace gdn::cpu::neon {
static bool supported() { return true; }
#include "kernels/all.h"
}  // namespace gdn::cpu::neon
#endif
