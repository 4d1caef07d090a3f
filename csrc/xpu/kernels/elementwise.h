// Vectors of activations in their natural order (lo: elements 0..15 of a chunk, hi: 16..31) for
// every dtype, and the functions the layer applies to them.
#pragma once

#include "common.h"

namespace gdn {
namespace xpu {

// Bytes of `n` elements rounded up to whole chunks.
XPU_INLINE int padded_bytes(int n, int dtype) {
  return (n + kChunk - 1) / kChunk * kChunk * element_bytes(dtype);
}

XPU_INLINE void load_any(lm_ptr<char> p, int dtype, int chunk, const vf32& z, vf32& lo, vf32& hi) {
  load_activation<kF32>(p, dtype, chunk, z, lm_ptr<float>(), lo, hi);
}

// Packs the high halves of 32 lanes in their order. Each merge of a pair moves one bit of a
// halfword's position from the register number to the end of the lane number; after five of them
// the bit that tells high from low has become the register number.
XPU_INLINE vf16 pack_high_halves(const vf32& lo, const vf32& hi) {
  vf16 a, b;
  XPU_ASM(
      "vmerge_l.hf %[a], %[x], %[y]\n"
      "vmerge_h.hf %[b], %[x], %[y]\n",
      (XPU_OP(a, "=&v", a), XPU_OP(b, "=&v", b)), (XPU_OP(x, "v", lo), XPU_OP(y, "v", hi)));
  for (int i = 0; i < 3; ++i) {
    vf16 c, d;
    XPU_ASM(
        "vmerge_l.hf %[c], %[a], %[b]\n"
        "vmerge_h.hf %[d], %[a], %[b]\n",
        (XPU_OP(c, "=&v", c), XPU_OP(d, "=&v", d)), (XPU_OP(a, "v", a), XPU_OP(b, "v", b)));
    a = c;
    b = d;
  }
  vf16 out;
  XPU_ASM("vmerge_h.hf %[out], %[a], %[b]\n", (XPU_OP(out, "=v", out)),
          (XPU_OP(a, "v", a), XPU_OP(b, "v", b)));
  return out;
}

XPU_INLINE void store_any(lm_ptr<char> p, int dtype, int chunk, const vf32& lo, const vf32& hi) {
  if (dtype == kF16) {
    Row<kF16>::store_chunk(p + chunk * 64, lo, hi);
  } else if (dtype == kF32) {
    Row<kF32>::store_chunk(p + chunk * 128, lo, hi);
  } else {
    vf32 a = lo, b = hi;
    round_bf16(a);
    round_bf16(b);
    vf16 packed = pack_high_halves(a, b);
    store(p + chunk * 64, AS_FLOAT(packed));
  }
}

// Rounds a chunk to a 16-bit dtype and back.
XPU_INLINE void round_to(int dtype, vf32& lo, vf32& hi) {
  if (dtype == kF16) {
    vf16 raw;
    XPU_ASM(
        "vfloat2fp16_l.rn %[raw], %[lo]\n"
        "vfloat2fp16_h.rn %[raw], %[hi]\n"
        "vfp162float_l.rn %[lo], %[raw]\n"
        "vfp162float_h.rn %[hi], %[raw]\n",
        (XPU_OP(raw, "=&v", raw), XPU_OP(lo, "+v", lo), XPU_OP(hi, "+v", hi)), ());
  } else if (dtype == kBf16) {
    round_bf16(lo);
    round_bf16(hi);
    XPU_ASM(
        "vand.u.mz %[lo]{mr1}, %[high], %[lo]\n"
        "vand.u.mz %[hi]{mr1}, %[high], %[hi]\n",
        (XPU_OP(lo, "+v", lo), XPU_OP(hi, "+v", hi)),
        (XPU_OP(high, "r", static_cast<int32_t>(0xffff0000u))));
  }
}

XPU_INLINE void horner_step(vf32& e, const vf32& f, sfloat c) {
  e = vvmul_float32x16(e, f);
  XPU_ASM("vadd.f.mz.rn %[e]{mr1}, %[c], %[e]\n", (XPU_OP(e, "+v", e)), (XPU_OP(c, "r", c)));
}

// 1 / (1 + exp(-x)), to a few units in the last place. No vector exponential or division is public,
// so both are made of additions, products and shifts: exp by 2^n and a polynomial of degree 6 on
// [-1/2, 1/2], the reciprocal by three Newton steps from a bit trick.
XPU_INLINE vf32 sigmoid(const vf32& x) {
  // b = -x * log2(e) within [-120, 120]; there is a vector maximum but no minimum in public text.
  // r = b + 1.5 * 2^23 holds round(b) in its low bits; minus_n = -round(b).
  vf32 b, r, minus_n;
  XPU_ASM(
      "vmul.f.mz.rn %[b]{mr1}, %[log2e], %[x]\n"
      "vmax.f.mz %[b]{mr1}, %[bound], %[b]\n"
      "vmul.f.mz.rn %[b]{mr1}, %[minus], %[b]\n"
      "vmax.f.mz %[b]{mr1}, %[bound], %[b]\n"
      "vadd.f.mz.rn %[r]{mr1}, %[magic], %[b]\n"
      "vsub.f.mz.rn %[n]{mr1}, %[magic], %[r]\n",
      (XPU_OP(b, "=&v", b), XPU_OP(r, "=&v", r), XPU_OP(n, "=&v", minus_n)),
      (XPU_OP(x, "v", x), XPU_OP(log2e, "r", sfloat(1.44269504f)),
       XPU_OP(bound, "r", sfloat(-120.0f)), XPU_OP(minus, "r", sfloat(-1.0f)),
       XPU_OP(magic, "r", sfloat(12582912.0f))));
  vf32 f = vvadd_float32x16(b, minus_n);
  // 2^f by Horner's rule. Constants as operands: an array of them may be put into global memory.
  vf32 e;
  broadcast(e, sfloat(1.54035304e-4f));
  horner_step(e, f, 1.33335581e-3f);
  horner_step(e, f, 9.61812911e-3f);
  horner_step(e, f, 5.55041087e-2f);
  horner_step(e, f, 2.40226507e-1f);
  horner_step(e, f, 6.93147181e-1f);
  horner_step(e, f, 1.0f);
  vf32 power = AS_FLOAT(svsll_uint32x16(23, AS_UINT(r)));
  XPU_ASM("vadd.u.mz %[p]{mr1}, %[one], %[p]\n", (XPU_OP(p, "+v", power)),
          (XPU_OP(one, "r", 0x3f800000)));
  vf32 d = vvmul_float32x16(e, power);
  vf32 y;
  XPU_ASM(
      "vadd.f.mz.rn %[d]{mr1}, %[one], %[d]\n"
      "vxor.s.mz %[y]{mr1}, %[ones], %[d]\n"
      "vadd.u.mz %[y]{mr1}, %[trick], %[y]\n",
      (XPU_OP(d, "+v", d), XPU_OP(y, "=&v", y)),
      (XPU_OP(one, "r", sfloat(1.0f)), XPU_OP(ones, "r", -1), XPU_OP(trick, "r", 0x7ef311c8)));
  for (int i = 0; i < 3; ++i) {
    vf32 t = vvmul_float32x16(d, y);
    XPU_ASM("vsub.f.mz.rn %[t]{mr1}, %[two], %[t]\n", (XPU_OP(t, "+v", t)),
            (XPU_OP(two, "r", sfloat(2.0f))));
    y = vvmul_float32x16(y, t);
  }
  return y;
}

XPU_INLINE vf32 silu(const vf32& x) { return vvmul_float32x16(x, sigmoid(x)); }

// One row of the gated norm: y = round(weight * round(x * rs)) * silu(gate), rs from the mean
// square of x. `x` may be shared with `y`. Lanes beyond V are zero in x.
struct GatedNorm {
  // weight: float32, natural order, `chunks` whole chunks. Returns the sum of squares of x.
  template <typename LoadX>
  XPU_INLINE static sfloat row(LoadX load_x, lm_ptr<char> gate, int gate_dtype,
                               lm_ptr<float> weight, bool round_weighted, int x_dtype,
                               lm_ptr<char> y, int y_dtype, int chunks, sfloat inv_v, sfloat eps,
                               lm_ptr<float> scratch) {
    vf32 z, acc, lo, hi;
    zero(z);
    zero(acc);
    for (int c = 0; c < chunks; ++c) {
      load_x(c, z, lo, hi);
      multiply_add(acc, lo, lo);
      multiply_add(acc, hi, hi);
    }
    sfloat total, twice;
    lane_sums(acc, acc, scratch, &total, &twice);
    sfloat rs = s_rsqrt(total * inv_v + eps);
    for (int c = 0; c < chunks; ++c) {
      vf32 w_lo, w_hi, g_lo, g_hi;
      load_x(c, z, lo, hi);
      scale(lo, rs);
      scale(hi, rs);
      round_to(x_dtype, lo, hi);
      Row<kF32>::load_chunk(lm_cast<char>(weight) + c * 128, w_lo, w_hi);
      lo = vvmul_float32x16(lo, w_lo);
      hi = vvmul_float32x16(hi, w_hi);
      if (round_weighted) round_to(x_dtype, lo, hi);
      load_any(gate, gate_dtype, c, z, g_lo, g_hi);
      lo = vvmul_float32x16(lo, silu(g_lo));
      hi = vvmul_float32x16(hi, silu(g_hi));
      store_any(y, y_dtype, c, lo, hi);
    }
    return total;
  }
};

}  // namespace xpu
}  // namespace gdn
