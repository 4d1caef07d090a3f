#define GDN_XPU_TWIN 1
#include "../kernels/gated_rms_norm.xpu"
