// Any processor: four floats at a time in whatever the compiler's baseline offers.
#include "kernels/prelude.h"

#define GDN_ISA scalar
#define GDN_ISA_DESCRIPTION "portable: the compiler's baseline"
#define GDN_SIMD_GENERIC 1
namespace gdn::cpu::scalar {
static bool supported() { return true; }
#include "kernels/all.h"
}  // namespace gdn::cpu::scalar
