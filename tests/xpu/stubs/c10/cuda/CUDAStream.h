// What csrc/xpu/glue.h asks of a torch with CUDA, for a syntax check without its headers.
#pragma once
namespace c10 {
namespace cuda {
struct CUDAStream {
  struct CUstream_st* stream() const;
};
CUDAStream getCurrentCUDAStream(signed char device = -1);
}  // namespace cuda
}  // namespace c10
