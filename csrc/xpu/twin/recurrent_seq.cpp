#define GDN_XPU_TWIN 1
#include "../kernels/recurrent_seq.xpu"
