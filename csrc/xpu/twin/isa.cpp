#include "isa.h"

#include <cmath>
#include <map>
#include <sstream>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// After every include: an inline function compiled with these could be the copy the linker keeps.
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define GDN_TWIN_NEEDS_AVX2 1
#endif

namespace gdn {
namespace xpu {
namespace twin {
namespace {

constexpr Proof kSeen = Proof::seen;
constexpr Proof kInferred = Proof::inferred;

// Sources: FT flagos-ai/FlagTree third_party/xpu, IC InfiniTensor/InfiniCore, MK the republished
// vendor headers cluster3_*.h, PD PaddlePaddle/Paddle. docs/xpu.md prints this table.
const std::vector<Form>& table() {
  static const std::vector<Form> t = {
      {"vload.mz", "V*,A", Op::vload, kSeen, "MK cluster3_simd.h"},
      {"vstore.mz", "V*,A", Op::vstore, kSeen, "FT trigonometric.xpu:262"},
      {"vloads.mz", "V*,S", Op::vloads, kSeen, "MK; PD"},
      {"vstores.mz", "V*,S", Op::vstores, kSeen, "MK; PD"},
      {"vxor.s.mz", "V*,V,V", Op::vzero, kSeen,
       "FT VectorizedOpToLLVM.cpp:585,602; only with three times one register"},
      {"vxor.s.mz", "V*,I,V", Op::vxor, kSeen, "FT VectorizedOpToLLVM.cpp:31"},
      {"vand.u.mz", "V*,I,V", Op::vand, kSeen, "FT LoadStoreOpToLLVM.cpp:1595-1712"},
      {"vadd.u.mz", "V*,I,V", Op::vaddu, kSeen, "FT LoadStoreOpToLLVM.cpp:1595-1712"},
      {"vsrl.s.mz", "V*,I,V", Op::vsrl, kSeen, "FT trigonometric.xpu:287-288"},
      {"vadd.f.mz.rn", "V*,F,V", Op::vaddf, kSeen, "FT VectorizedOpToLLVM.cpp:27,260"},
      {"vsub.f.mz.rn", "V*,F,V", Op::vsubf, kSeen, "FT VectorizedOpToLLVM.cpp:29; scalar - vector"},
      {"vmul.f.mz.rn", "V*,F,V", Op::vmulf, kSeen, "FT VectorizedOpToLLVM.cpp:28"},
      {"vmax.f.mz", "V*,F,V", Op::vmaxf, kSeen, "FT VectorizedOpToLLVM.cpp:30"},
      {"vmac.f.mz.rn", "V*,V,V", Op::vmacf, kSeen, "FT VectorizedOpToLLVM.cpp:691-708"},
      {"vmac.f.mz.rn", "V*,F,V", Op::vmacsv, kInferred,
       "the fp16 spelling is MK cluster3_simd.h, the function svmac_float32x16 is public"},
      {"vfp162float_l.rn", "V,V", Op::cvt_l, kSeen, "FT VectorizedOpToLLVM.cpp:743-760"},
      {"vfp162float_h.rn", "V,V", Op::cvt_h, kSeen, "FT VectorizedOpToLLVM.cpp:743-760"},
      {"vfloat2fp16_l.rn", "V,V", Op::pack_l, kSeen, "FT VectorizedOpToLLVM.cpp:857-865"},
      {"vfloat2fp16_h.rn", "V,V", Op::pack_h, kSeen, "FT VectorizedOpToLLVM.cpp:857-865"},
      {"vmerge_l.hf", "V,V,V", Op::merge_l, kSeen, "MK; FT xpu3_vmerge_l_hf"},
      {"vmerge_h.hf", "V,V,V", Op::merge_h, kSeen, "MK; FT xpu3_vmerge_h_hf"},
      {"sqrt.f.rn", "F,F", Op::sqrtf, kSeen, "FT trigonometric.xpu:1231"},
      {"div.f.rn", "F,F,F", Op::divf, kSeen, "FT trigonometric.xpu:1824"},
  };
  return t;
}

std::string trim(const std::string& s) {
  size_t a = s.find_first_not_of(" \t");
  size_t b = s.find_last_not_of(" \t");
  return a == std::string::npos ? "" : s.substr(a, b - a + 1);
}

// One instruction as text: a mnemonic and its operands.
struct Line {
  std::string mnemonic;
  std::vector<std::string> operands;
};

std::vector<Line> split_text(const char* text) {
  std::vector<Line> out;
  std::istringstream in(text);
  std::string raw;
  while (std::getline(in, raw, '\n')) {
    std::string s = trim(raw);
    if (s.empty()) continue;
    size_t sp = s.find_first_of(" \t");
    Line l;
    l.mnemonic = s.substr(0, sp);
    if (sp != std::string::npos) {
      std::istringstream rest(s.substr(sp));
      std::string piece;
      while (std::getline(rest, piece, ',')) l.operands.push_back(trim(piece));
    }
    out.push_back(l);
  }
  return out;
}

const std::map<std::string, std::string>& sibling() {
  static const std::map<std::string, std::string> m = {
      {"vfp162float_l.rn", "vfp162float_h.rn"},
      {"vfp162float_h.rn", "vfp162float_l.rn"},
      {"vfloat2fp16_l.rn", "vfloat2fp16_h.rn"},
      {"vfloat2fp16_h.rn", "vfloat2fp16_l.rn"},
      {"vmerge_l.hf", "vmerge_h.hf"},
      {"vmerge_h.hf", "vmerge_l.hf"},
      {"vmul.f.mz.rn", "vadd.f.mz.rn"},
      {"vadd.f.mz.rn", "vsub.f.mz.rn"},
      {"vsub.f.mz.rn", "vadd.f.mz.rn"},
      {"vand.u.mz", "vadd.u.mz"},
      {"vadd.u.mz", "vand.u.mz"},
      {"vload.mz", "vstore.mz"},
      {"vstore.mz", "vload.mz"},
      {"vloads.mz", "vload.mz"},
      {"vstores.mz", "vstore.mz"},
  };
  return m;
}

// Applies the deliberate defect, if it is this instruction's.
void mutate(const std::string& site, std::vector<Line>& lines) {
  const Mutation& m = mutation();
  if (m.kind.compare(0, 4, "asm-") != 0) return;
  size_t hash = m.site.find('#');
  if (m.site.substr(0, hash) != site) return;
  size_t i = static_cast<size_t>(std::stoi(m.site.substr(hash + 1)));
  if (i >= lines.size()) return;
  Line& l = lines[i];
  if (m.kind == "asm-delete") {
    lines.erase(lines.begin() + static_cast<long>(i));
  } else if (m.kind == "asm-mask") {
    size_t at = l.operands[0].find("{mr1}");
    if (at != std::string::npos) l.operands[0].replace(at, 5, "{mr0}");
  } else if (m.kind == "asm-swap") {
    std::swap(l.operands[l.operands.size() - 2], l.operands.back());
  } else if (m.kind == "asm-other") {
    l.mnemonic = sibling().at(l.mnemonic);
  } else if (m.kind == "asm-repeat") {
    lines.insert(lines.begin() + static_cast<long>(i), Line(l));
  }
}

void note_instructions(const std::string& site, const std::vector<Line>& lines) {
  for (size_t i = 0; i < lines.size(); ++i) {
    const Line& l = lines[i];
    std::string at = site + "#" + std::to_string(i);
    note_site("asm-delete", at);
    if (!l.operands.empty() && l.operands[0].find("{mr1}") != std::string::npos)
      note_site("asm-mask", at);
    if (l.operands.size() >= 2 && l.operands[l.operands.size() - 2] != l.operands.back())
      note_site("asm-swap", at);
    if (sibling().count(l.mnemonic)) note_site("asm-other", at);
    if (l.mnemonic.compare(0, 4, "vmac") == 0) note_site("asm-repeat", at);
  }
}

inline float mac(float a, float b, float c, bool fused) {
  return fused ? std::fmaf(a, b, c) : static_cast<float>(a * b) + c;
}

// Read when the instruction runs, so that a block may use a scalar it has just written.
inline float fval(const Operand& o) { return *static_cast<const float*>(o.p); }

// Every loop below is over the 16 or 32 lanes of one register; the compiler makes them SIMD.
#define LANES(i, n) for (int i = 0; i < (n); ++i)

void widen(float* out, const uint16_t* in) {
#if defined(__F16C__)
  _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in))));
  _mm256_storeu_ps(out + 8,
                   _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 8))));
#else
  LANES(i, 16) out[i] = half_to_float(in[i]);
#endif
}

void narrow(uint16_t* out, const float* in) {
#if defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                   _mm256_cvtps_ph(_mm256_loadu_ps(in), _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 8),
                   _mm256_cvtps_ph(_mm256_loadu_ps(in + 8), _MM_FROUND_TO_NEAREST_INT));
#else
  LANES(i, 16) out[i] = float_to_half(in[i]);
#endif
}

void require(const Vec& v, const char* what, Where where) {
  if (!v.defined) fail(where, std::string(what) + ": a vector operand was never set");
}

}  // namespace

const std::vector<Form>& forms() { return table(); }

void require_host() {
#if defined(GDN_TWIN_NEEDS_AVX2)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("f16c"))
    throw TwinError("the XPU twin needs a CPU with AVX2, FMA and F16C");
#endif
}

float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  uint32_t e = (h >> 10) & 31, m = h & 1023;
  float f;
  if (e == 31) {
    uint32_t u = sign | 0x7f800000u | (m << 13);
    std::memcpy(&f, &u, 4);
    return f;
  }
  if (e == 0) {
    f = std::ldexp(static_cast<float>(m), -24);
    return sign ? -f : f;
  }
  uint32_t u = sign | ((e + 112) << 23) | (m << 13);
  std::memcpy(&f, &u, 4);
  return f;
#endif
}

uint16_t float_to_half(float f) {
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t u;
  std::memcpy(&u, &f, 4);
  uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000);
  uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00);
  if (a >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00);
  if (a < 0x38800000u) {
    float m;
    std::memcpy(&m, &a, 4);
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyintf(std::ldexp(m, 24))));
  }
  a += 0xfffu + ((a >> 13) & 1);
  return static_cast<uint16_t>(sign | ((a - 0x38000000u) >> 13));
#endif
}

AsmSite::AsmSite(const char* text, const char* file, int line, const char* clobbers)
    : text_(text), where_{file, line}, clobbers_(clobbers) {
  const char* slash = std::strrchr(file, '/');
  name_ = std::string(slash ? slash + 1 : file) + ":" + std::to_string(line);
  note_instructions(name_, split_text(text));
}

void AsmSite::decode(const Operand* ops, int n, int outputs) {
  std::vector<Line> lines = split_text(text_);
  mutate(name_, lines);
  program_.clear();
  check_defined_.clear();
  outputs_.clear();
  vectors_ = scalars_ = transcendentals_ = 0;

  std::map<std::string, int> by_name;
  std::vector<int> set(n, 0);  // bit 0 low half, bit 1 high half
  std::vector<int> first_write(n, -1), last_read(n, -1);
  std::vector<bool> used(n, false), early(n, false), writable(n, false), readable(n, true);
  for (int i = 0; i < n; ++i) {
    std::string c = ops[i].constraint;
    bool out = i < outputs;
    if (out != (c[0] == '=' || c[0] == '+'))
      fail(where_, std::string("operand ") + ops[i].name + " has constraint " + c);
    char kind = c.back();
    bool is_vector = ops[i].cls == Class::vector;
    if ((kind == 'v') != is_vector || (kind != 'v' && kind != 'r'))
      fail(where_, std::string("operand ") + ops[i].name + " does not fit constraint " + c);
    writable[i] = out;
    early[i] = c.find('&') != std::string::npos || c[0] == '+';
    readable[i] = c[0] != '=';
    set[i] = readable[i] ? 3 : 0;
    if (is_vector && readable[i]) check_defined_.push_back(static_cast<uint8_t>(i));
    if (is_vector && out) outputs_.push_back(static_cast<uint8_t>(i));
    if (!by_name.emplace(ops[i].name, i).second)
      fail(where_, std::string("two operands are named ") + ops[i].name);
  }

  bool memory = false;
  int at = 0;
  for (const Line& l : lines) {
    // Classes of the operands as written.
    std::vector<int> index;
    std::vector<std::string> cls;
    for (const std::string& o : l.operands) {
      std::string s = o, suffix;
      bool address = false;
      if (s.size() > 3 && s.compare(0, 2, "0(") == 0 && s.back() == ')') {
        address = true;
        s = s.substr(2, s.size() - 3);
      }
      size_t brace = s.find('{');
      if (brace != std::string::npos) {
        suffix = s.substr(brace);
        s = s.substr(0, brace);
      }
      if (s.size() < 4 || s.compare(0, 2, "%[") != 0 || s.back() != ']')
        fail(where_, l.mnemonic + ": operand " + o + " is not a named operand");
      auto it = by_name.find(s.substr(2, s.size() - 3));
      if (it == by_name.end()) fail(where_, l.mnemonic + ": no operand is named " + s);
      if (!suffix.empty() && suffix != "{mr1}")
        fail(where_, l.mnemonic + ": mask " + suffix + " is not set in this block");
      int i = it->second;
      used[i] = true;
      index.push_back(i);
      const char* c = nullptr;
      switch (ops[i].cls) {
        case Class::vector:
          c = suffix.empty() ? "V" : "V*";
          break;
        case Class::fscalar:
          c = "F";
          break;
        case Class::iscalar:
          c = "I";
          break;
        case Class::lm:
          c = "A";
          break;
        case Class::sm:
          c = "S";
          break;
      }
      if (address != (c[0] == 'A' || c[0] == 'S'))
        fail(where_, l.mnemonic + ": operand " + o + " has the wrong class");
      cls.push_back(c);
    }
    std::string shape;
    for (size_t i = 0; i < cls.size(); ++i) shape += (i ? "," : "") + cls[i];
    const Form* form = nullptr;
    bool known = false;
    for (const Form& f : table()) {
      if (l.mnemonic != f.mnemonic) continue;
      known = true;
      if (shape == f.operands) form = &f;
    }
    if (!known) fail(where_, "unknown instruction " + l.mnemonic);
    if (!form) fail(where_, l.mnemonic + " has no form with operands " + shape);
    if (form->op == Op::vzero && (index[0] != index[1] || index[1] != index[2]))
      fail(where_, l.mnemonic + " with different vector registers has no evidence");

    bool store = form->op == Op::vstore || form->op == Op::vstores;
    bool tied = form->op == Op::vmacf || form->op == Op::vmacsv;
    bool half = form->op == Op::pack_l || form->op == Op::pack_h;
    memory |= store || form->op == Op::vload || form->op == Op::vloads;
    for (size_t j = 0; j < index.size(); ++j) {
      int i = index[j];
      bool reads = j > 0 || store || tied;
      if (form->op == Op::vzero) reads = false;
      if (reads) {
        if (set[i] != 3)
          fail(where_, l.mnemonic + " reads %[" + ops[i].name + "] before it is set");
        last_read[i] = at;
      }
    }
    if (!store) {
      int d = index[0];
      if (!writable[d])
        fail(where_, l.mnemonic + " writes %[" + ops[d].name + "], which is an input");
      if (first_write[d] < 0) first_write[d] = at;
      set[d] |= half ? (form->op == Op::pack_l ? 1 : 2) : 3;
    }
    Instr in;
    in.op = form->op;
    in.a = static_cast<uint8_t>(index[0]);
    in.b = static_cast<uint8_t>(index.size() > 1 ? index[1] : 0);
    in.c = static_cast<uint8_t>(index.size() > 2 ? index[2] : 0);
    in.counts_transcendental = form->op == Op::sqrtf || form->op == Op::divf;
    if (in.counts_transcendental)
      ++transcendentals_;
    else
      ++vectors_;
    program_.push_back(in);
    ++at;
  }
  for (int i = 0; i < n; ++i) {
    if (!used[i]) fail(where_, std::string("operand %[") + ops[i].name + "] is never used");
    if (writable[i] && set[i] != 3)
      fail(where_, std::string("output %[") + ops[i].name + "] is not fully written");
    if (!writable[i] || early[i]) continue;
    // The compiler may give a plain output the register of any input.
    for (int j = 0; j < n; ++j) {
      if (j != i && readable[j] && last_read[j] > first_write[i])
        fail(where_, std::string("output %[") + ops[i].name + "] is written before input %[" +
                         ops[j].name + "] is last read and has no early clobber");
    }
  }
  if (memory != (clobbers_.find("memory") != std::string::npos))
    fail(where_, memory ? "block touches memory without saying so"
                        : "block names memory without touching it");
  epoch_ = mutation_epoch();
}

void AsmSite::run(const Operand* ops, int n, int outputs) {
  if (epoch_ != mutation_epoch()) decode(ops, n, outputs);
  for (uint8_t i : check_defined_) {
    if (!static_cast<const Vec*>(ops[i].p)->defined)
      fail(where_, std::string("operand %[") + ops[i].name + "] holds a register never set");
  }
  current->counters.vector += vectors_;
  current->counters.transcendental += transcendentals_;
  const bool fused = config().fused_mac;
  for (const Instr& in : program_) {
    auto vec = [&](uint8_t i) -> Vec& { return *static_cast<Vec*>(ops[i].p); };
    switch (in.op) {
      case Op::vload: {
        size_t o = lm_offset(reinterpret_cast<const void*>(ops[in.b].bits), 64, where_);
        if (o % 64) fail(where_, "vector load at local address " + std::to_string(o));
        lm_check_read(o, 64, Unit::vector, where_);
        std::memcpy(vec(in.a).b, current->lm + o, 64);
        break;
      }
      case Op::vstore: {
        size_t o = lm_offset(reinterpret_cast<const void*>(ops[in.b].bits), 64, where_);
        if (o % 64) fail(where_, "vector store at local address " + std::to_string(o));
        lm_check_write(o, 64, Unit::vector, where_);
        std::memcpy(current->lm + o, vec(in.a).b, 64);
        break;
      }
      case Op::vloads:
      case Op::vstores: {
        uint32_t o = static_cast<uint32_t>(ops[in.b].bits);
        if (in.op == Op::vloads)
          sm_read(o, vec(in.a).b, 64, Unit::vector, where_);
        else
          sm_write(o, vec(in.a).b, 64, Unit::vector, where_);
        break;
      }
      case Op::vzero:
        std::memset(vec(in.a).b, 0, 64);
        break;
      case Op::vxor: {
        uint32_t s = static_cast<uint32_t>(ops[in.b].bits);
        Vec &d = vec(in.a), &x = vec(in.c);
        LANES(i, 16) d.u[i] = s ^ x.u[i];
        break;
      }
      case Op::vand: {
        uint32_t s = static_cast<uint32_t>(ops[in.b].bits);
        Vec &d = vec(in.a), &x = vec(in.c);
        LANES(i, 16) d.u[i] = s & x.u[i];
        break;
      }
      case Op::vaddu: {
        uint32_t s = static_cast<uint32_t>(ops[in.b].bits);
        Vec &d = vec(in.a), &x = vec(in.c);
        LANES(i, 16) d.u[i] = s + x.u[i];
        break;
      }
      case Op::vsrl: {
        // Arithmetic or logical is not public; kernels must not depend on it, so the twin takes the
        // one that fills with sign bits.
        uint32_t s = static_cast<uint32_t>(ops[in.b].bits);
        Vec &d = vec(in.a), &x = vec(in.c);
        LANES(i, 16) d.s[i] = x.s[i] >> s;
        break;
      }
      case Op::vaddf: {
        float s = fval(ops[in.b]);
        Vec &d = vec(in.a), &x = vec(in.c);
        LANES(i, 16) d.f[i] = s + x.f[i];
        break;
      }
      case Op::vsubf: {
        float s = fval(ops[in.b]);
        Vec &d = vec(in.a), &x = vec(in.c);
        LANES(i, 16) d.f[i] = s - x.f[i];
        break;
      }
      case Op::vmulf: {
        float s = fval(ops[in.b]);
        Vec &d = vec(in.a), &x = vec(in.c);
        LANES(i, 16) d.f[i] = s * x.f[i];
        break;
      }
      case Op::vmaxf: {
        float s = fval(ops[in.b]);
        Vec &d = vec(in.a), &x = vec(in.c);
        LANES(i, 16) d.f[i] = s > x.f[i] ? s : x.f[i];
        break;
      }
      case Op::vmacf: {
        Vec &d = vec(in.a), &x = vec(in.b), &y = vec(in.c);
        if (fused) {
          LANES(i, 16) d.f[i] = mac(x.f[i], y.f[i], d.f[i], true);
        } else {
          LANES(i, 16) d.f[i] = mac(x.f[i], y.f[i], d.f[i], false);
        }
        break;
      }
      case Op::vmacsv: {
        float s = fval(ops[in.b]);
        Vec &d = vec(in.a), &y = vec(in.c);
        if (fused) {
          LANES(i, 16) d.f[i] = mac(s, y.f[i], d.f[i], true);
        } else {
          LANES(i, 16) d.f[i] = mac(s, y.f[i], d.f[i], false);
        }
        break;
      }
      case Op::cvt_l:
      case Op::cvt_h: {
        float tmp[16];
        widen(tmp, vec(in.b).h + (in.op == Op::cvt_h ? 16 : 0));
        std::memcpy(vec(in.a).f, tmp, 64);
        break;
      }
      case Op::pack_l:
      case Op::pack_h: {
        uint16_t tmp[16];
        narrow(tmp, vec(in.b).f);
        std::memcpy(vec(in.a).h + (in.op == Op::pack_h ? 16 : 0), tmp, 32);
        break;
      }
      case Op::merge_l:
      case Op::merge_h: {
        const Vec &x = vec(in.b), &y = vec(in.c);
        uint16_t tmp[32];
        int o = in.op == Op::merge_h ? 16 : 0;
        LANES(i, 16) {
          tmp[2 * i] = x.h[o + i];
          tmp[2 * i + 1] = y.h[o + i];
        }
        std::memcpy(vec(in.a).h, tmp, 64);
        break;
      }
      case Op::sqrtf:
        *static_cast<float*>(ops[in.a].p) = std::sqrt(fval(ops[in.b]));
        break;
      case Op::divf:
        *static_cast<float*>(ops[in.a].p) = fval(ops[in.b]) / fval(ops[in.c]);
        break;
      default:
        fail(where_, "instruction without a meaning");
    }
  }
  for (uint8_t i : outputs_) static_cast<Vec*>(ops[i].p)->defined = true;
}

Vec vvmerge_l_float32x16(const Vec& a, const Vec& b, Where where) {
  require(a, "vvmerge_l", where);
  require(b, "vvmerge_l", where);
  current->counters.vector += 1;
  Vec r;
  LANES(i, 8) {
    r.f[2 * i] = a.f[i];
    r.f[2 * i + 1] = b.f[i];
  }
  r.defined = true;
  return r;
}

Vec vvmerge_h_float32x16(const Vec& a, const Vec& b, Where where) {
  require(a, "vvmerge_h", where);
  require(b, "vvmerge_h", where);
  current->counters.vector += 1;
  Vec r;
  LANES(i, 8) {
    r.f[2 * i] = a.f[8 + i];
    r.f[2 * i + 1] = b.f[8 + i];
  }
  r.defined = true;
  return r;
}

Vec vvadd_float32x16(const Vec& a, const Vec& b, Where where) {
  require(a, "vvadd", where);
  require(b, "vvadd", where);
  current->counters.vector += 1;
  Vec r;
  LANES(i, 16) r.f[i] = a.f[i] + b.f[i];
  r.defined = true;
  return r;
}

Vec vvmul_float32x16(const Vec& a, const Vec& b, Where where) {
  require(a, "vvmul", where);
  require(b, "vvmul", where);
  current->counters.vector += 1;
  Vec r;
  LANES(i, 16) r.f[i] = a.f[i] * b.f[i];
  r.defined = true;
  return r;
}

Vec vvor_uint32x16(const Vec& a, const Vec& b, Where where) {
  require(a, "vvor", where);
  require(b, "vvor", where);
  current->counters.vector += 1;
  Vec r;
  LANES(i, 16) r.u[i] = a.u[i] | b.u[i];
  r.defined = true;
  return r;
}

Vec svsll_uint32x16(int n, const Vec& a, Where where) {
  require(a, "svsll", where);
  current->counters.vector += 1;
  Vec r;
  LANES(i, 16) r.u[i] = a.u[i] << n;
  r.defined = true;
  return r;
}

int svneq_int32x16(int s, const Vec& a, Where where) {
  require(a, "svneq", where);
  current->counters.vector += 1;
  int m = 0;
  LANES(i, 16) m |= (a.s[i] != s) << i;
  return m;
}

Vec svadd_uint32x16_mh(int s, const Vec& a, const Vec& hold, int mask, Where where) {
  require(a, "svadd_mh", where);
  require(hold, "svadd_mh", where);
  current->counters.vector += 1;
  Vec r;
  LANES(i, 16) r.u[i] = (mask >> i & 1) ? static_cast<uint32_t>(s) + a.u[i] : hold.u[i];
  r.defined = true;
  return r;
}

#undef LANES

}  // namespace twin
}  // namespace xpu
}  // namespace gdn

#if defined(GDN_TWIN_NEEDS_AVX2)
#pragma GCC pop_options
#endif
