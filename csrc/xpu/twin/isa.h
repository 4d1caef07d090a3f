// The instruction forms a kernel's assembly text may use, and the interpreter that runs that text.
//
// A block is parsed and checked once: unknown mnemonic, operand of the wrong class, missing mask,
// register read before it is set, output never written, missing early clobber, missing "memory".
// Then it is kept as a short list of decoded instructions.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "machine.h"

namespace gdn {
namespace xpu {
namespace twin {

// A 512-bit vector register.
struct alignas(64) Vec {
  union {
    uint8_t b[64];
    uint16_t h[32];
    int32_t s[16];
    uint32_t u[16];
    float f[16];
  };
  bool defined = false;
  Vec() { enter(); }
  Vec(const Vec& o) : defined(o.defined) {
    std::memcpy(b, o.b, 64);
    enter();
  }
  Vec& operator=(const Vec&) = default;
  ~Vec() { current->vectors_alive -= 1; }

 private:
  static void enter() {
    const int n = ++current->vectors_alive;
    if (static_cast<uint64_t>(n) > current->counters.vectors_alive)
      current->counters.vectors_alive = static_cast<uint64_t>(n);
  }
};

// A scalar float of the device: arithmetic is counted.
struct F32 {
  float v;
  F32() : v(std::numeric_limits<float>::quiet_NaN()) {}  // whatever the register held
  F32(float x) : v(x) {}                                 // NOLINT: implicit, as on the device
  explicit operator float() const { return v; }
};
inline void count_scalar(int n = 1) { current->counters.scalar += n; }
inline F32 operator+(F32 a, F32 b) { return count_scalar(), F32(a.v + b.v); }
inline F32 operator-(F32 a, F32 b) { return count_scalar(), F32(a.v - b.v); }
inline F32 operator*(F32 a, F32 b) { return count_scalar(), F32(a.v * b.v); }
inline F32 operator-(F32 a) { return count_scalar(), F32(-a.v); }
inline bool operator<(F32 a, F32 b) { return count_scalar(), a.v < b.v; }
inline bool operator>(F32 a, F32 b) { return count_scalar(), a.v > b.v; }
inline bool operator==(F32 a, F32 b) { return count_scalar(), a.v == b.v; }
inline bool operator!=(F32 a, F32 b) { return count_scalar(), a.v != b.v; }

// A pointer into local memory. It has no dereference: reads and writes go through lm_get, lm_put,
// vector instructions or DMA, all checked.
template <typename T>
struct LmPtr {
  T* p = nullptr;
  LmPtr() {}
  explicit LmPtr(T* q) : p(q) {}
  LmPtr operator+(int n) const { return LmPtr(p + n); }
};

// One operand of a block as the kernel passes it.
enum class Class : uint8_t { vector, fscalar, iscalar, lm, sm };
struct Operand {
  const char* name;
  const char* constraint;
  Class cls;
  void* p;        // vector: the Vec; fscalar output: the float
  uint64_t bits;  // fscalar, iscalar: the value; lm: host address; sm: offset
};

inline Operand operand(const char* n, const char* c, Vec& v) {
  return {n, c, Class::vector, &v, 0};
}
inline Operand operand(const char* n, const char* c, const Vec& v) {
  return {n, c, Class::vector, const_cast<Vec*>(&v), 0};
}
inline Operand operand(const char* n, const char* c, F32& v) {
  uint32_t u;
  std::memcpy(&u, &v.v, 4);
  return {n, c, Class::fscalar, &v.v, u};
}
inline Operand operand(const char* n, const char* c, const F32& v) {
  return operand(n, c, const_cast<F32&>(v));
}
inline Operand operand(const char* n, const char* c, int32_t v) {
  return {n, c, Class::iscalar, nullptr, static_cast<uint32_t>(v)};
}
inline Operand operand(const char* n, const char* c, uint32_t v) {
  return {n, c, Class::iscalar, nullptr, v};
}
template <typename T>
Operand operand(const char* n, const char* c, const LmPtr<T>& v) {
  return {n, c, Class::lm, nullptr, reinterpret_cast<uint64_t>(v.p)};
}
inline Operand operand(const char* n, const char* c, const SmPtr& v) {
  return {n, c, Class::sm, nullptr, v.at};
}

enum class Op : uint8_t {
  vload,
  vstore,
  vloads,
  vstores,
  vzero,
  vxor,
  vand,
  vaddu,
  vsrl,
  vaddf,
  vsubf,
  vmulf,
  vmaxf,
  vmacf,
  vmacsv,
  cvt_l,
  cvt_h,
  pack_l,
  pack_h,
  merge_l,
  merge_h,
  sqrtf,
  divf,
};

enum class Proof : uint8_t { seen, inferred };

// Operand letters: V vector, V* vector with {mr1}, F scalar float, I scalar integer, A `0(r)` in
// local memory, S `0(r)` in shared memory. The first is the destination, except for stores.
struct Form {
  const char* mnemonic;
  const char* operands;
  Op op;
  Proof proof;
  const char* evidence;
};
const std::vector<Form>& forms();

struct Instr {
  Op op;
  uint8_t a, b, c;
  bool counts_transcendental;
};

// One assembly block in a kernel's source.
class AsmSite {
 public:
  AsmSite(const char* text, const char* file, int line, const char* clobbers);
  // Outputs first, in the order of the block.
  void run(const Operand* ops, int n, int outputs);

 private:
  void decode(const Operand* ops, int n, int outputs);
  const char* text_;
  Where where_;
  std::string clobbers_;
  std::string name_;
  uint64_t epoch_ = ~0ull;
  std::vector<Instr> program_;
  std::vector<uint8_t> check_defined_;  // operands that must be defined on entry
  std::vector<uint8_t> outputs_;        // vector outputs
  int vectors_ = 0, scalars_ = 0, transcendentals_ = 0;
};

template <typename... O>
std::array<Operand, sizeof...(O)> pack(const O&... o) {
  return {{o...}};
}

template <size_t N, size_t M>
void run_asm(AsmSite& site, const std::array<Operand, N>& outs, const std::array<Operand, M>& ins) {
  Operand all[N + M];
  for (size_t i = 0; i < N; ++i) all[i] = outs[i];
  for (size_t i = 0; i < M; ++i) all[N + i] = ins[i];
  site.run(all, static_cast<int>(N + M), static_cast<int>(N));
}

// Throws where the interpreter's host instructions are missing.
void require_host();

// Conversions, shared with the scalar side of the twin. Round to nearest even, subnormals kept.
float half_to_float(uint16_t h);
uint16_t float_to_half(float f);

// The vendor's vector functions that no public assembly spelling exists for.
Vec vvmerge_l_float32x16(const Vec& a, const Vec& b, Where where);
Vec vvmerge_h_float32x16(const Vec& a, const Vec& b, Where where);
Vec vvadd_float32x16(const Vec& a, const Vec& b, Where where);
Vec vvmul_float32x16(const Vec& a, const Vec& b, Where where);
Vec vvor_uint32x16(const Vec& a, const Vec& b, Where where);
Vec svsll_uint32x16(int n, const Vec& a, Where where);
int svneq_int32x16(int s, const Vec& a, Where where);
Vec svadd_uint32x16_mh(int s, const Vec& a, const Vec& hold, int mask, Where where);

}  // namespace twin
}  // namespace xpu
}  // namespace gdn
