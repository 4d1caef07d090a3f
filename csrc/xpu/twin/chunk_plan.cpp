#define GDN_XPU_TWIN 1
#include "../kernels/chunk_plan.xpu"
