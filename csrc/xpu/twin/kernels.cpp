// The device sources, compiled for the twin.
#define GDN_XPU_TWIN 1
#include "../kernels/recurrent.xpu"
