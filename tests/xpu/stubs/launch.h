// Read before everything where the sources are no CUDA: the launch syntax is the one thing no host
// compiler takes. kernels/lang.h defines XPU_LAUNCH only where it is not defined.
#pragma once
#define XPU_LAUNCH(name, kernel, clusters, cores, stream, barriers, ...) \
  (static_cast<void>(stream), kernel(__VA_ARGS__))
