// The twin as a torch device under PrivateUse1: memory of its own, one stream, and every operator
// of torch that is not ours run on the CPU. Compiled for the twin only.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "twin/machine.h"
#include "twin/memory.h"
#include "twin/report.h"

namespace gdn {
namespace xpu {
namespace {

using at::Tensor;

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

struct TwinAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* p = twin::allocate(bytes);
    return {p, p, &twin::release, c10::Device(kType, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &twin::release; }
  void copy_data(void* dst, const void* src, std::size_t bytes) const override {
    twin::copy(dst, src, bytes);
  }
};

TwinAllocator& allocator() {
  static TwinAllocator a;
  return a;
}

struct TwinGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device d) const override {
    setDevice(d);
    return c10::Device(kType, 0);
  }
  c10::Device getDevice() const override { return c10::Device(kType, 0); }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.type() == kType && d.index() <= 0, "the twin has one device, got ", d);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device d) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return getStream(d); }
  // No `override`: torch 2.5 has no such function.
  void synchronizeDevice(const c10::DeviceIndex) const {}
};

struct TwinHooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  // No `override`: torch 2.5 lacks some of these.
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  c10::DeviceIndex deviceCount() const { return 1; }
  c10::DeviceIndex getCurrentDevice() const { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const { return 0; }
  // Copies are never asynchronous, so any host memory will do.
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(kType, 0); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr fresh = allocator().allocate(bytes);
    const size_t keep = std::min(bytes, storage.nbytes());
    if (keep) twin::copy(fresh.get(), storage.data(), keep);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// The same bytes as a CPU tensor: only here is the twin's memory the host's.
Tensor on_host(const Tensor& t) {
  if (t.device().is_cpu()) return t;
  void* p = twin::gm_host(reinterpret_cast<uint64_t>(t.data_ptr()));
  return at::from_blob(p, t.sizes(), t.strides(),
                       at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU));
}

Tensor empty_memory_format(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                           std::optional<at::Layout>, std::optional<at::Device>,
                           std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// Operators that run on the CPU copy as they please; a copy outside of them was asked for, and
// inside a call of ours it would be what no launch may do.
thread_local int cpu_operators = 0;

Tensor copy_from(const Tensor& self, const Tensor& dst, bool) {
  if (cpu_operators == 0 && self.device() != dst.device()) twin::count_host_copy();
  on_host(dst).copy_(on_host(self));
  return dst;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  if (dst.sizes() != self.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const int64_t bytes = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(),
                                                                   self.storage_offset());
  if (bytes > static_cast<int64_t>(self.storage().nbytes()))
    TwinHooks().resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                    at::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data() == nullptr)
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  else
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}

Tensor& set_source(Tensor& self, at::Storage source) {
  const int64_t n = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, n, {});
}

at::Scalar local_scalar(const Tensor& self) {
  if (cpu_operators == 0) twin::count_host_copy();
  return on_host(self).item();
}

Tensor& zero_(Tensor& self) {
  on_host(self).zero_();
  return self;
}

Tensor& fill_(Tensor& self, const at::Scalar& value) {
  on_host(self).fill_(value);
  return self;
}

struct InsideCpuOperator {
  InsideCpuOperator() { ++cpu_operators; }
  ~InsideCpuOperator() { --cpu_operators; }
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  InsideCpuOperator inside;
  at::native::cpu_fallback(op, stack);
}

// A convolution of a device torch does not know is an operator of its own, which no CPU has.
Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation,
                   bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  InsideCpuOperator inside;
  std::optional<Tensor> b;
  if (bias && bias->defined()) b = on_host(*bias);
  return at::convolution(on_host(x), on_host(weight), b, stride, padding, dilation, transposed,
                         output_padding, groups)
      .to(x.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  InsideCpuOperator inside;
  auto [dx, dw, db] = at::convolution_backward(
      on_host(grad), on_host(x), on_host(weight), at::IntArrayRef{weight.size(transposed ? 1 : 0)},
      stride, padding, dilation, transposed, output_padding, groups, wanted);
  auto back = [&](const Tensor& t) { return t.defined() ? t.to(x.device()) : t; };
  return {back(dx), back(dw), back(db)};
}

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator())
C10_REGISTER_GUARD_IMPL(PrivateUse1, TwinGuard)

const bool hooks_registered = [] {
  static TwinHooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace
}  // namespace xpu
}  // namespace gdn

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace gdn::xpu;
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_source);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("zero_", &zero_);
  m.impl("fill_.Scalar", &fill_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&gdn::xpu::run_on_cpu>());
}
