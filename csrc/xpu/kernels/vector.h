// The inner loops, as instruction text. A "chunk" is 32 consecutive elements of a row: two float
// registers, `lo` and `hi`. For 16-bit float and for float32 rows lo holds elements 0..15 and hi
// 16..31; for bfloat16 rows lo holds the even and hi the odd elements, because that order needs no
// lane crossing to store (see docs/xpu.md, "bfloat16").
#pragma once

#include "lang.h"

namespace gdn {
namespace xpu {

enum { kF32 = 0, kBf16 = 1, kF16 = 2 };  // the values of gdn::DType

constexpr int kChunk = 32;

XPU_INLINE int element_bytes(int dtype) { return dtype == kF32 ? 4 : 2; }

XPU_INLINE void zero(vf32& v) {
  XPU_ASM("vxor.s.mz %[v]{mr1}, %[v], %[v]\n", (XPU_OP(v, "=&v", v)), ());
}

XPU_INLINE void broadcast(vf32& v, sfloat s) {
  XPU_ASM(
      "vxor.s.mz %[v]{mr1}, %[v], %[v]\n"
      "vadd.f.mz.rn %[v]{mr1}, %[s], %[v]\n",
      (XPU_OP(v, "=&v", v)), (XPU_OP(s, "r", s)));
}

XPU_INLINE void scale(vf32& v, sfloat s) {
  XPU_ASM("vmul.f.mz.rn %[v]{mr1}, %[s], %[v]\n", (XPU_OP(v, "+v", v)), (XPU_OP(s, "r", s)));
}

XPU_INLINE void multiply_add(vf32& acc, const vf32& a, const vf32& b) {
  XPU_ASM("vmac.f.mz.rn %[acc]{mr1}, %[a], %[b]\n", (XPU_OP(acc, "+v", acc)),
          (XPU_OP(a, "v", a), XPU_OP(b, "v", b)));
}

template <typename T>
XPU_INLINE void load(vf32& v, lm_ptr<T> p) {
  XPU_ASM_MEM("vload.mz %[v]{mr1}, 0(%[p])\n", (XPU_OP(v, "=v", v)), (XPU_OP(p, "r", p)));
}

template <typename T>
XPU_INLINE void store(lm_ptr<T> p, const vf32& v) {
  XPU_ASM_MEM("vstore.mz %[v]{mr1}, 0(%[p])\n", (), (XPU_OP(v, "v", v), XPU_OP(p, "r", p)));
}

XPU_INLINE sfloat s_sqrt(sfloat x) {
  sfloat r;
  XPU_ASM("sqrt.f.rn %[r], %[x]\n", (XPU_OP(r, "=r", r)), (XPU_OP(x, "r", x)));
  return r;
}

XPU_INLINE sfloat s_div(sfloat a, sfloat b) {
  sfloat r;
  XPU_ASM("div.f.rn %[r], %[a], %[b]\n", (XPU_OP(r, "=r", r)),
          (XPU_OP(a, "r", a), XPU_OP(b, "r", b)));
  return r;
}

XPU_INLINE sfloat s_rsqrt(sfloat x) { return s_div(1.0f, s_sqrt(x)); }

// Sums of the lanes of two accumulators; `scratch`: 32 floats. Both store and let the scalar unit
// finish. With merges: after two levels of merge and add, lane 4i holds a partial sum of `a` and
// lane 4i + 2 one of `b`, i = 0..3.
#if !defined(GDN_XPU_NO_MERGE32) || defined(GDN_XPU_TWIN)
XPU_INLINE void lane_sums_merged(const vf32& a, const vf32& b, lm_ptr<float> scratch, sfloat* sum_a,
                                 sfloat* sum_b) {
  vf32 s = vvadd_float32x16(vvmerge_l_float32x16(a, b), vvmerge_h_float32x16(a, b));
  s = vvadd_float32x16(vvmerge_l_float32x16(s, s), vvmerge_h_float32x16(s, s));
  store(scratch, s);
  XPU_FENCE(XPU_LM_ONLY);
  *sum_a = (lm_get(scratch, 0) + lm_get(scratch, 4)) + (lm_get(scratch, 8) + lm_get(scratch, 12));
  *sum_b = (lm_get(scratch, 2) + lm_get(scratch, 6)) + (lm_get(scratch, 10) + lm_get(scratch, 14));
}
#endif

XPU_INLINE void lane_sums_stored(const vf32& a, const vf32& b, lm_ptr<float> scratch, sfloat* sum_a,
                                 sfloat* sum_b) {
  store(scratch, a);
  store(scratch + 16, b);
  XPU_FENCE(XPU_LM_ONLY);
  sfloat ta[4], tb[4];
  for (int i = 0; i < 4; ++i) {
    ta[i] = (lm_get(scratch, i) + lm_get(scratch, i + 8)) +
            (lm_get(scratch, i + 4) + lm_get(scratch, i + 12));
    tb[i] = (lm_get(scratch, i + 16) + lm_get(scratch, i + 24)) +
            (lm_get(scratch, i + 20) + lm_get(scratch, i + 28));
  }
  *sum_a = (ta[0] + ta[2]) + (ta[1] + ta[3]);
  *sum_b = (tb[0] + tb[2]) + (tb[1] + tb[3]);
}

XPU_INLINE void lane_sums(const vf32& a, const vf32& b, lm_ptr<float> scratch, sfloat* sum_a,
                          sfloat* sum_b) {
  XPU_IF_NO_MERGE32(lane_sums_stored(a, b, scratch, sum_a, sum_b),
                    lane_sums_merged(a, b, scratch, sum_a, sum_b));
}

// A scalar that vectors are multiplied by and added: in all lanes of a register, or where vmac
// takes a scalar, as it is.
struct Factor {
  vf32 lanes;
  sfloat scalar;
};

XPU_INLINE void set_factor(Factor& f, sfloat s) {
  f.scalar = s;
  XPU_IF_SCALAR_MAC((void)0, broadcast(f.lanes, s));
}

XPU_INLINE void multiply_add_scalar(vf32& acc, sfloat s, const vf32& v) {
  XPU_ASM("vmac.f.mz.rn %[acc]{mr1}, %[s], %[v]\n", (XPU_OP(acc, "+v", acc)),
          (XPU_OP(s, "r", s), XPU_OP(v, "v", v)));
}

XPU_INLINE void multiply_add(vf32& acc, const Factor& f, const vf32& v) {
  XPU_IF_SCALAR_MAC(multiply_add_scalar(acc, f.scalar, v), multiply_add(acc, f.lanes, v));
}

// Both halves of a chunk: d * row + u * k. The factor u is a register or, behind a switch, a
// scalar.
#define XPU_DECAY_ADD                      \
  "vmul.f.mz.rn %[lo]{mr1}, %[d], %[lo]\n" \
  "vmul.f.mz.rn %[hi]{mr1}, %[d], %[hi]\n" \
  "vmac.f.mz.rn %[lo]{mr1}, %[u], %[kl]\n" \
  "vmac.f.mz.rn %[hi]{mr1}, %[u], %[kh]\n"

// One chunk of a state row per dtype. `load_dot` widens the chunk and adds its products with k and
// q to two accumulators; `update_store` replaces it by d * row + u * k and rounds it once.
template <int kDtype>
struct Row;

template <>
struct Row<kF16> {
  static constexpr int kBytes = 2;

  XPU_INLINE static void load_chunk(lm_ptr<char> p, vf32& lo, vf32& hi) {
    vf16 raw;
    XPU_ASM_MEM(
        "vload.mz %[raw]{mr1}, 0(%[p])\n"
        "vfp162float_l.rn %[lo], %[raw]\n"
        "vfp162float_h.rn %[hi], %[raw]\n",
        (XPU_OP(raw, "=&v", raw), XPU_OP(lo, "=&v", lo), XPU_OP(hi, "=&v", hi)),
        (XPU_OP(p, "r", p)));
  }

  XPU_INLINE static void store_chunk(lm_ptr<char> p, const vf32& lo, const vf32& hi) {
    vf16 raw;
    XPU_ASM_MEM(
        "vfloat2fp16_l.rn %[raw], %[lo]\n"
        "vfloat2fp16_h.rn %[raw], %[hi]\n"
        "vstore.mz %[raw]{mr1}, 0(%[p])\n",
        (XPU_OP(raw, "=&v", raw)), (XPU_OP(lo, "v", lo), XPU_OP(hi, "v", hi), XPU_OP(p, "r", p)));
  }

  XPU_INLINE static void load_dot(lm_ptr<char> p, vf32& lo, vf32& hi, vf32& dot_k, vf32& dot_q,
                                  const vf32& k_lo, const vf32& k_hi, const vf32& q_lo,
                                  const vf32& q_hi) {
    vf16 raw;
    XPU_ASM_MEM(
        "vload.mz %[raw]{mr1}, 0(%[p])\n"
        "vfp162float_l.rn %[lo], %[raw]\n"
        "vfp162float_h.rn %[hi], %[raw]\n"
        "vmac.f.mz.rn %[dk]{mr1}, %[lo], %[kl]\n"
        "vmac.f.mz.rn %[dq]{mr1}, %[lo], %[ql]\n"
        "vmac.f.mz.rn %[dk]{mr1}, %[hi], %[kh]\n"
        "vmac.f.mz.rn %[dq]{mr1}, %[hi], %[qh]\n",
        (XPU_OP(raw, "=&v", raw), XPU_OP(lo, "=&v", lo), XPU_OP(hi, "=&v", hi),
         XPU_OP(dk, "+v", dot_k), XPU_OP(dq, "+v", dot_q)),
        (XPU_OP(p, "r", p), XPU_OP(kl, "v", k_lo), XPU_OP(kh, "v", k_hi), XPU_OP(ql, "v", q_lo),
         XPU_OP(qh, "v", q_hi)));
  }

  XPU_INLINE static void update_store(lm_ptr<char> p, vf32& lo, vf32& hi, sfloat d, const Factor& u,
                                      const vf32& k_lo, const vf32& k_hi) {
    XPU_IF_SCALAR_MAC(update_store_scalar(p, lo, hi, d, u.scalar, k_lo, k_hi),
                      update_store_lanes(p, lo, hi, d, u.lanes, k_lo, k_hi));
  }

  XPU_INLINE static void update_store_lanes(lm_ptr<char> p, vf32& lo, vf32& hi, sfloat d,
                                            const vf32& u, const vf32& k_lo, const vf32& k_hi) {
    vf16 raw;
    XPU_ASM_MEM(XPU_DECAY_ADD
                "vfloat2fp16_l.rn %[raw], %[lo]\n"
                "vfloat2fp16_h.rn %[raw], %[hi]\n"
                "vstore.mz %[raw]{mr1}, 0(%[p])\n",
                (XPU_OP(raw, "=&v", raw), XPU_OP(lo, "+v", lo), XPU_OP(hi, "+v", hi)),
                (XPU_OP(p, "r", p), XPU_OP(d, "r", d), XPU_OP(u, "v", u), XPU_OP(kl, "v", k_lo),
                 XPU_OP(kh, "v", k_hi)));
  }

  XPU_INLINE static void update_store_scalar(lm_ptr<char> p, vf32& lo, vf32& hi, sfloat d, sfloat u,
                                             const vf32& k_lo, const vf32& k_hi) {
    vf16 raw;
    XPU_ASM_MEM(XPU_DECAY_ADD
                "vfloat2fp16_l.rn %[raw], %[lo]\n"
                "vfloat2fp16_h.rn %[raw], %[hi]\n"
                "vstore.mz %[raw]{mr1}, 0(%[p])\n",
                (XPU_OP(raw, "=&v", raw), XPU_OP(lo, "+v", lo), XPU_OP(hi, "+v", hi)),
                (XPU_OP(p, "r", p), XPU_OP(d, "r", d), XPU_OP(u, "r", u), XPU_OP(kl, "v", k_lo),
                 XPU_OP(kh, "v", k_hi)));
  }
};

XPU_INLINE void decay_add_lanes(vf32& lo, vf32& hi, sfloat d, const vf32& u, const vf32& k_lo,
                                const vf32& k_hi) {
  XPU_ASM(XPU_DECAY_ADD, (XPU_OP(lo, "+v", lo), XPU_OP(hi, "+v", hi)),
          (XPU_OP(d, "r", d), XPU_OP(u, "v", u), XPU_OP(kl, "v", k_lo), XPU_OP(kh, "v", k_hi)));
}

XPU_INLINE void decay_add_scalar(vf32& lo, vf32& hi, sfloat d, sfloat u, const vf32& k_lo,
                                 const vf32& k_hi) {
  XPU_ASM(XPU_DECAY_ADD, (XPU_OP(lo, "+v", lo), XPU_OP(hi, "+v", hi)),
          (XPU_OP(d, "r", d), XPU_OP(u, "r", u), XPU_OP(kl, "v", k_lo), XPU_OP(kh, "v", k_hi)));
}

XPU_INLINE void decay_add(vf32& lo, vf32& hi, sfloat d, const Factor& u, const vf32& k_lo,
                          const vf32& k_hi) {
  XPU_IF_SCALAR_MAC(decay_add_scalar(lo, hi, d, u.scalar, k_lo, k_hi),
                    decay_add_lanes(lo, hi, d, u.lanes, k_lo, k_hi));
}

// Both halves of a chunk against k and q.
XPU_INLINE void dot_chunk(const vf32& lo, const vf32& hi, vf32& dot_k, vf32& dot_q,
                          const vf32& k_lo, const vf32& k_hi, const vf32& q_lo, const vf32& q_hi) {
  XPU_ASM(
      "vmac.f.mz.rn %[dk]{mr1}, %[lo], %[kl]\n"
      "vmac.f.mz.rn %[dq]{mr1}, %[lo], %[ql]\n"
      "vmac.f.mz.rn %[dk]{mr1}, %[hi], %[kh]\n"
      "vmac.f.mz.rn %[dq]{mr1}, %[hi], %[qh]\n",
      (XPU_OP(dk, "+v", dot_k), XPU_OP(dq, "+v", dot_q)),
      (XPU_OP(lo, "v", lo), XPU_OP(hi, "v", hi), XPU_OP(kl, "v", k_lo), XPU_OP(kh, "v", k_hi),
       XPU_OP(ql, "v", q_lo), XPU_OP(qh, "v", q_hi)));
}

template <>
struct Row<kF32> {
  static constexpr int kBytes = 4;

  XPU_INLINE static void load_chunk(lm_ptr<char> p, vf32& lo, vf32& hi) {
    XPU_ASM_MEM(
        "vload.mz %[lo]{mr1}, 0(%[p0])\n"
        "vload.mz %[hi]{mr1}, 0(%[p1])\n",
        (XPU_OP(lo, "=&v", lo), XPU_OP(hi, "=&v", hi)),
        (XPU_OP(p0, "r", p), XPU_OP(p1, "r", p + 64)));
  }

  XPU_INLINE static void store_chunk(lm_ptr<char> p, const vf32& lo, const vf32& hi) {
    XPU_ASM_MEM(
        "vstore.mz %[lo]{mr1}, 0(%[p0])\n"
        "vstore.mz %[hi]{mr1}, 0(%[p1])\n",
        (),
        (XPU_OP(lo, "v", lo), XPU_OP(hi, "v", hi), XPU_OP(p0, "r", p), XPU_OP(p1, "r", p + 64)));
  }

  XPU_INLINE static void load_dot(lm_ptr<char> p, vf32& lo, vf32& hi, vf32& dot_k, vf32& dot_q,
                                  const vf32& k_lo, const vf32& k_hi, const vf32& q_lo,
                                  const vf32& q_hi) {
    load_chunk(p, lo, hi);
    dot_chunk(lo, hi, dot_k, dot_q, k_lo, k_hi, q_lo, q_hi);
  }

  XPU_INLINE static void update_store(lm_ptr<char> p, vf32& lo, vf32& hi, sfloat d, const Factor& u,
                                      const vf32& k_lo, const vf32& k_hi) {
    decay_add(lo, hi, d, u, k_lo, k_hi);
    store_chunk(p, lo, hi);
  }
};

// Rounds 16 floats to bfloat16, to nearest even, in the high halves of their lanes.
XPU_INLINE void round_bf16(vf32& v) {
  vf32 odd, up;
  XPU_ASM(
      "vand.u.mz %[odd]{mr1}, %[bit], %[v]\n"
      "vadd.u.mz %[up]{mr1}, %[half], %[v]\n",
      (XPU_OP(odd, "=&v", odd), XPU_OP(up, "=&v", up)),
      (XPU_OP(bit, "r", 0x10000), XPU_OP(half, "r", 0x7fff), XPU_OP(v, "v", v)));
  int mask = svneq_int32x16(0, AS_INT(odd));
  v = AS_FLOAT(svadd_uint32x16_mh(1, AS_UINT(up), AS_UINT(up), mask));
}

template <>
struct Row<kBf16> {
  static constexpr int kBytes = 2;

  XPU_INLINE static void load_chunk(lm_ptr<char> p, vf32& even, vf32& odd) {
    vf32 raw;
    XPU_ASM_MEM(
        "vload.mz %[raw]{mr1}, 0(%[p])\n"
        "vand.u.mz %[odd]{mr1}, %[high], %[raw]\n",
        (XPU_OP(raw, "=&v", raw), XPU_OP(odd, "=&v", odd)),
        (XPU_OP(p, "r", p), XPU_OP(high, "r", static_cast<int32_t>(0xffff0000u))));
    even = AS_FLOAT(svsll_uint32x16(16, AS_UINT(raw)));
  }

  XPU_INLINE static void store_chunk(lm_ptr<char> p, const vf32& even, const vf32& odd) {
    vf32 e = even, o = odd;
    round_bf16(e);
    round_bf16(o);
    XPU_ASM(
        "vsrl.s.mz %[e]{mr1}, %[n], %[e]\n"
        "vand.u.mz %[e]{mr1}, %[low], %[e]\n"
        "vand.u.mz %[o]{mr1}, %[high], %[o]\n",
        (XPU_OP(e, "+v", e), XPU_OP(o, "+v", o)),
        (XPU_OP(n, "r", 16), XPU_OP(low, "r", 0xffff),
         XPU_OP(high, "r", static_cast<int32_t>(0xffff0000u))));
    vf32 both = AS_FLOAT(vvor_uint32x16(AS_UINT(e), AS_UINT(o)));
    store(p, both);
  }

  XPU_INLINE static void load_dot(lm_ptr<char> p, vf32& lo, vf32& hi, vf32& dot_k, vf32& dot_q,
                                  const vf32& k_lo, const vf32& k_hi, const vf32& q_lo,
                                  const vf32& q_hi) {
    load_chunk(p, lo, hi);
    dot_chunk(lo, hi, dot_k, dot_q, k_lo, k_hi, q_lo, q_hi);
  }

  XPU_INLINE static void update_store(lm_ptr<char> p, vf32& lo, vf32& hi, sfloat d, const Factor& u,
                                      const vf32& k_lo, const vf32& k_hi) {
    decay_add(lo, hi, d, u, k_lo, k_hi);
    store_chunk(p, lo, hi);
  }
};

// Element i of an array of a run-time dtype.
XPU_INLINE sfloat get_element(lm_ptr<char> p, int dtype, int i) {
  if (dtype == kF32) return lm_get(lm_cast<float>(p), i);
  uint16_t h = lm_get(lm_cast<uint16_t>(p), i);
  if (dtype == kF16) return s_half_to_float(h);
  return s_bits_to_float(static_cast<uint32_t>(h) << 16);
}

XPU_INLINE void put_element(lm_ptr<char> p, int dtype, int i, sfloat v) {
  if (dtype == kF32) {
    lm_put(lm_cast<float>(p), i, v);
  } else if (dtype == kF16) {
    lm_put(lm_cast<uint16_t>(p), i, s_float_to_half(v));
  } else {
    uint32_t u = s_float_to_bits(v);
    uint32_t r = u + 0x7fffu + ((u >> 16) & 1u);
    if ((u & 0x7fffffffu) > 0x7f800000u) r = u | 0x400000u;
    lm_put(lm_cast<uint16_t>(p), i, static_cast<uint16_t>(r >> 16));
  }
}

}  // namespace xpu
}  // namespace gdn
