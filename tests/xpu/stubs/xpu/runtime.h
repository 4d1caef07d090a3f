// The host's part of the vendor's runtime, as far as kernels/lang.h needs it.
#pragma once
typedef void* XPUStream;
