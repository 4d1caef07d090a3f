// The vendor's device language on the host: kernels/lang.h includes this file in place of the
// vendor's headers when GDN_XPU_TWIN is set.
#pragma once

#include <cmath>

#include "isa.h"

#define __global__ static
#define __device__
#define XPU_INLINE inline

namespace gdn {
namespace xpu {

using sfloat = twin::F32;
using vf32 = twin::Vec;
using vf16 = twin::Vec;
template <typename T>
using lm_ptr = twin::LmPtr<T>;
using sm_ptr = twin::SmPtr;
using gm_addr = uint64_t;

namespace twin {

template <typename T>
class LmArray {
 public:
  LmArray(int n, Where where) : top_(current->lm_top), p_(lm_alloc(n * sizeof(T), where)) {}
  ~LmArray() { lm_release(top_); }
  LmArray(const LmArray&) = delete;
  operator LmPtr<T>() const { return LmPtr<T>(static_cast<T*>(p_)); }

 private:
  size_t top_;
  void* p_;
};

template <typename T>
struct Scalar {
  using type = T;
  static T wrap(T v) { return v; }
  static T raw(T v) { return v; }
};
template <>
struct Scalar<float> {
  using type = F32;
  static F32 wrap(float v) { return F32(v); }
  static float raw(F32 v) { return v.v; }
};

template <typename T>
typename Scalar<T>::type lm_get(LmPtr<T> p, int i, Where where) {
  size_t o = lm_scalar_offset(p.p + i, sizeof(T), where);
  lm_check_read(o, sizeof(T), Unit::scalar, where);
  count_scalar();
  T v;
  std::memcpy(&v, current->lm + o, sizeof(T));
  return Scalar<T>::wrap(v);
}

template <typename T>
void lm_put(LmPtr<T> p, int i, typename Scalar<T>::type v, Where where) {
  size_t o = lm_scalar_offset(p.p + i, sizeof(T), where);
  lm_check_write(o, sizeof(T), Unit::scalar, where);
  count_scalar();
  T raw = Scalar<T>::raw(v);
  std::memcpy(current->lm + o, &raw, sizeof(T));
}

inline F32 sm_get(SmPtr p, int i, Where where) {
  float v;
  sm_read(p.at + 4 * static_cast<uint32_t>(i), &v, 4, Unit::scalar, where);
  count_scalar();
  return F32(v);
}
inline void sm_put(SmPtr p, int i, F32 v, Where where) {
  sm_write(p.at + 4 * static_cast<uint32_t>(i), &v.v, 4, Unit::scalar, where);
  count_scalar();
}

}  // namespace twin

template <typename U, typename T>
lm_ptr<U> lm_cast(lm_ptr<T> p) {
  return lm_ptr<U>(reinterpret_cast<U*>(p.p));
}

inline int cluster_id() { return twin::cluster_id(); }
inline int cluster_num() { return twin::cluster_num(); }
inline int core_id() { return twin::core_id(); }
inline int core_num() { return twin::core_num(); }

inline sfloat s_exp(sfloat x) {
  twin::current->counters.transcendental += 1;
  return std::exp(x.v);
}
inline sfloat s_log(sfloat x) {
  twin::current->counters.transcendental += 1;
  return std::log(x.v);
}
inline sfloat s_half_to_float(uint16_t h) { return twin::count_scalar(), twin::half_to_float(h); }
inline uint16_t s_float_to_half(sfloat f) { return twin::count_scalar(), twin::float_to_half(f.v); }
inline sfloat s_bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t s_float_to_bits(sfloat f) {
  uint32_t u;
  std::memcpy(&u, &f.v, 4);
  return u;
}

}  // namespace xpu
}  // namespace gdn

#define XPU_WHERE (::gdn::xpu::twin::Where{__FILE__, __LINE__})
#define XPU_SM(name, n) \
  const ::gdn::xpu::sm_ptr name = ::gdn::xpu::twin::sm_array(static_cast<int>(n), XPU_WHERE)
#define XPU_CUT(at, bytes, left) ::gdn::xpu::twin::lm_cut((at).p, bytes, left, XPU_WHERE)
#define XPU_LM(T, name, n)                                                     \
  ::gdn::xpu::twin::LmArray<T> name##_storage(static_cast<int>(n), XPU_WHERE); \
  const ::gdn::xpu::lm_ptr<T> name = name##_storage
#define lm_get(p, i) ::gdn::xpu::twin::lm_get(p, i, XPU_WHERE)
#define lm_put(p, i, v) ::gdn::xpu::twin::lm_put(p, i, v, XPU_WHERE)
#define sm_get(p, i) ::gdn::xpu::twin::sm_get(p, i, XPU_WHERE)
#define sm_put(p, i, v) ::gdn::xpu::twin::sm_put(p, i, v, XPU_WHERE)

#define XPU_SWITCH(name) (::gdn::xpu::twin::config().name)
#define XPU_SITE(kind) static const ::gdn::xpu::twin::Site xpu_site(kind, __FILE__, __LINE__)
#define XPU_LOAD(gm, lm, bytes)                              \
  do {                                                       \
    XPU_SITE("dma");                                         \
    ::gdn::xpu::twin::dma_load(xpu_site, gm, (lm).p, bytes); \
  } while (0)
#define XPU_STORE(lm, gm, bytes)                              \
  do {                                                        \
    XPU_SITE("dma");                                          \
    ::gdn::xpu::twin::dma_store(xpu_site, (lm).p, gm, bytes); \
  } while (0)
#define XPU_FENCE(spaces)                      \
  do {                                         \
    XPU_SITE("fence");                         \
    ::gdn::xpu::twin::fence(xpu_site, spaces); \
  } while (0)
#define XPU_SYNC_CLUSTER()               \
  do {                                   \
    XPU_SITE("barrier");                 \
    ::gdn::xpu::twin::barrier(xpu_site); \
  } while (0)

#define XPU_LIST(...) __VA_ARGS__
#define XPU_OP(name, constraint, value) ::gdn::xpu::twin::operand(#name, constraint, value)
#define XPU_ASM_(text, outs, ins, clobbers)                                       \
  do {                                                                            \
    static ::gdn::xpu::twin::AsmSite xpu_asm(text, __FILE__, __LINE__, clobbers); \
    ::gdn::xpu::twin::run_asm(xpu_asm, ::gdn::xpu::twin::pack(XPU_LIST outs),     \
                              ::gdn::xpu::twin::pack(XPU_LIST ins));              \
  } while (0)
#define XPU_ASM(text, outs, ins) XPU_ASM_(text, outs, ins, "")
#define XPU_ASM_MEM(text, outs, ins) XPU_ASM_(text, outs, ins, "memory")

#define vvmerge_l_float32x16(a, b) ::gdn::xpu::twin::vvmerge_l_float32x16(a, b, XPU_WHERE)
#define vvmerge_h_float32x16(a, b) ::gdn::xpu::twin::vvmerge_h_float32x16(a, b, XPU_WHERE)
#define vvadd_float32x16(a, b) ::gdn::xpu::twin::vvadd_float32x16(a, b, XPU_WHERE)
#define vvmul_float32x16(a, b) ::gdn::xpu::twin::vvmul_float32x16(a, b, XPU_WHERE)
#define vvor_uint32x16(a, b) ::gdn::xpu::twin::vvor_uint32x16(a, b, XPU_WHERE)
#define svsll_uint32x16(n, a) ::gdn::xpu::twin::svsll_uint32x16(n, a, XPU_WHERE)
#define svneq_int32x16(s, a) ::gdn::xpu::twin::svneq_int32x16(s, a, XPU_WHERE)
#define svadd_uint32x16_mh(s, a, hold, m) \
  ::gdn::xpu::twin::svadd_uint32x16_mh(s, a, hold, m, XPU_WHERE)
// The device needs casts between vector types; the twin has one.
#define AS_INT(v) (v)
#define AS_UINT(v) (v)
#define AS_FLOAT(v) (v)

#define XPU_LAUNCH(name, kernel, clusters, cores, stream, barriers, ...)                     \
  do {                                                                                       \
    (void)(stream);                                                                          \
    ::gdn::xpu::twin::launch(name, clusters, cores, barriers, [&] { kernel(__VA_ARGS__); }); \
  } while (0)
