// What several kernels share: lengths and pool rows of sequences, gates, keys.
#pragma once

#include "params.h"
#include "vector.h"

namespace gdn {
namespace xpu {

constexpr int kBlockBytes = 1024;  // of state a transfer moves, rows permitting
constexpr int kTile = 64;          // rows of v and o a transfer moves at most

// Local memory that the phases of a kernel share, cut into the arrays of one of them. Arrays of
// disjoint scopes would do if the compiler surely gave them the same bytes.
struct Phase {
  lm_ptr<char> at;
  int left;
  template <typename T>
  XPU_INLINE lm_ptr<T> take(int n) {
    const lm_ptr<char> p = at;
    const int bytes = (n * static_cast<int>(sizeof(T)) + 63) / 64 * 64;
    at = at + bytes;
    left -= bytes;
    XPU_CUT(p, bytes, left);
    return lm_cast<T>(p);
  }
};

XPU_INLINE int min_int(int a, int b) { return a < b ? a : b; }

// Fills `bytes` (a multiple of 64) with zeros.
XPU_INLINE void zero_fill(lm_ptr<char> p, int bytes) {
  vf32 z;
  zero(z);
  for (int i = 0; i < bytes; i += 64) store(p + i, z);
}

XPU_INLINE int64_t get_index(lm_ptr<char> p, int wide) {
  if (wide) return lm_get(lm_cast<int64_t>(p), 0);
  return lm_get(lm_cast<int32_t>(p), 0);
}

XPU_INLINE gm_addr index_at(const IndexVector& x, int64_t i, int64_t j) {
  return x.addr + static_cast<gm_addr>((i * x.s0 + j * x.s1) * (x.wide ? 8 : 4));
}

XPU_INLINE gm_addr tensor_at(const Tensor4& x, int64_t b, int64_t t, int64_t h) {
  return x.addr + static_cast<gm_addr>((b * x.sb + t * x.st + h * x.sh) * element_bytes(x.dtype));
}

// One sequence as a kernel sees it.
struct SequenceMeta {
  int64_t batch, t0, row, accepted;
  int length;
  bool live, fresh;
};

// Reads what describes sequence n; `meta` is 64 bytes of local memory. `column`: of a two-column
// index, -1 the one the accepted count names.
template <typename P>
__device__ inline SequenceMeta read_sequence(const P& p, int n, int64_t rows_in_pool, int T,
                                             lm_ptr<char> meta) {
  SequenceMeta s;
  if (p.cu.addr) {
    XPU_LOAD(index_at(p.cu, n, 0), meta, p.cu.wide ? 8 : 4);
    XPU_LOAD(index_at(p.cu, n + 1, 0), meta + 8, p.cu.wide ? 8 : 4);
  }
  if (p.rows.addr) XPU_LOAD(index_at(p.rows, n, 0), meta + 16, p.rows.wide ? 8 : 4);
  if (p.accepted.addr) XPU_LOAD(index_at(p.accepted, n, 0), meta + 24, p.accepted.wide ? 8 : 4);
  if (p.has_init) XPU_LOAD(p.has_init + static_cast<gm_addr>(n * p.s_has), meta + 32, 1);
  XPU_FENCE(XPU_LM_GM);
  s.batch = n;
  s.t0 = 0;
  s.length = T;
  if (p.cu.addr) {
    s.batch = 0;
    s.t0 = get_index(meta, p.cu.wide);
    s.length = static_cast<int>(get_index(meta + 8, p.cu.wide) - s.t0);
    // Lengths that leave the tensor are the caller's error; nothing may be touched there.
    if (s.t0 < 0 || s.length < 0 || s.t0 + s.length > T) s.length = 0;
  }
  s.row = p.rows.addr ? get_index(meta + 16, p.rows.wide) : n;
  s.accepted = p.accepted.addr ? get_index(meta + 24, p.accepted.wide) : 1;
  s.live = s.accepted >= 1 && s.row >= 0 && s.row < rows_in_pool;
  s.fresh = p.has_init && lm_get(meta, 32) == 0;
  XPU_FENCE(XPU_LM_ONLY);
  return s;
}

// Softplus as torch computes it: linear above 20.
XPU_INLINE sfloat softplus(sfloat x) {
  if (x > 20.0f) return x;
  sfloat e = s_exp(x);
  sfloat u = 1.0f + e;
  if (u == 1.0f) return e;
  // log(u) is off by what 1 + e rounded away; e / (u - 1) puts it back.
  return s_log(u) * s_div(e, u - 1.0f);
}

XPU_INLINE sfloat sigmoid(sfloat x) { return s_div(1.0f, 1.0f + s_exp(-x)); }

// The two gates of one head: 64 bytes of local memory, four slots of 16.
struct Gates {
  template <typename P>
  XPU_INLINE static void issue(const P& p, lm_ptr<char> lm, int64_t b, int64_t t, int hv) {
    int n = element_bytes(p.g.dtype), m = element_bytes(p.beta.dtype);
    XPU_LOAD(p.g.addr + static_cast<gm_addr>((b * p.g.sb + t * p.g.st + hv * p.g.sh) * n), lm, n);
    XPU_LOAD(
        p.beta.addr + static_cast<gm_addr>((b * p.beta.sb + t * p.beta.st + hv * p.beta.sh) * m),
        lm + 16, m);
    if (p.raw_gates) {
      int al = element_bytes(p.a_log.dtype), dt = element_bytes(p.dt_bias.dtype);
      XPU_LOAD(p.a_log.addr + static_cast<gm_addr>(hv * p.a_log.s0 * al), lm + 32, al);
      XPU_LOAD(p.dt_bias.addr + static_cast<gm_addr>(hv * p.dt_bias.s0 * dt), lm + 48, dt);
    }
  }

  // The log decay g and the step size beta.
  template <typename P>
  XPU_INLINE static void read(const P& p, lm_ptr<char> lm, sfloat* g, sfloat* beta) {
    sfloat a = get_element(lm, p.g.dtype, 0), b = get_element(lm + 16, p.beta.dtype, 0);
    if (p.raw_gates) {
      sfloat a_log = get_element(lm + 32, p.a_log.dtype, 0);
      sfloat dt = get_element(lm + 48, p.dt_bias.dtype, 0);
      a = -s_exp(a_log) * softplus(a + dt);
      b = sigmoid(b);
    }
    *g = a;
    *beta = b;
  }
};

// One chunk of q or k from raw activations, in the element order of the state's dtype.
// `z` is a zero register.
template <int ST>
XPU_INLINE void load_activation(lm_ptr<char> raw, int dtype, int chunk, const vf32& z,
                                lm_ptr<float> ordered, vf32& lo, vf32& hi) {
  if (ST == kBf16) {
    if (dtype == kBf16) {
      Row<kBf16>::load_chunk(raw + chunk * 64, lo, hi);
    } else {
      Row<kF32>::load_chunk(lm_cast<char>(ordered) + chunk * 128, lo, hi);
    }
    return;
  }
  if (dtype == kF16) {
    Row<kF16>::load_chunk(raw + chunk * 64, lo, hi);
  } else if (dtype == kF32) {
    Row<kF32>::load_chunk(raw + chunk * 128, lo, hi);
  } else {
    vf16 bits;
    XPU_ASM_MEM(
        "vload.mz %[bits]{mr1}, 0(%[p])\n"
        "vmerge_l.hf %[lo], %[z], %[bits]\n"
        "vmerge_h.hf %[hi], %[z], %[bits]\n",
        (XPU_OP(bits, "=&v", bits), XPU_OP(lo, "=&v", lo), XPU_OP(hi, "=&v", hi)),
        (XPU_OP(p, "r", raw + chunk * 64), XPU_OP(z, "v", z)));
  }
}

// Even elements of each chunk first, then the odd ones: the order of bfloat16 rows.
XPU_INLINE void split_even_odd(lm_ptr<char> raw, int dtype, int n, lm_ptr<float> out) {
  for (int i = 0; i < n; ++i)
    lm_put(out, (i & ~31) + (i & 1) * 16 + ((i & 31) >> 1), get_element(raw, dtype, i));
}

// q and k of one key head in registers, normalised; q is scaled.
template <int NG, int ST>
struct Keys {
  vf32 k[2 * NG], q[2 * NG];
  sfloat kq;          // k . q
  sfloat by_k, by_q;  // factors: the norms and the scale

  // raw_q, raw_k: NG * 32 elements of the activations, zero beyond K. `ordered`: NG * 32 floats,
  // used only by bfloat16 states. `scratch`: 32 floats.
  XPU_INLINE void prepare(lm_ptr<char> raw_q, int q_dtype, lm_ptr<char> raw_k, int k_dtype,
                          bool l2norm, sfloat scale_q, lm_ptr<float> ordered,
                          lm_ptr<float> scratch) {
    load(raw_q, q_dtype, raw_k, k_dtype, ordered);
    measure(l2norm, scale_q, scratch);
    for (int i = 0; i < 2 * NG; ++i) {
      if (l2norm) scale(k[i], by_k);
      scale(q[i], by_q);
    }
  }

  // The same for keys that were prepared before and whose three scalars are at `found`.
  XPU_INLINE void prepare_again(lm_ptr<char> raw_q, int q_dtype, lm_ptr<char> raw_k, int k_dtype,
                                bool l2norm, lm_ptr<float> ordered, lm_ptr<float> found) {
    load(raw_q, q_dtype, raw_k, k_dtype, ordered);
    by_k = lm_get(found, 0);
    by_q = lm_get(found, 1);
    kq = lm_get(found, 2);
    for (int i = 0; i < 2 * NG; ++i) {
      if (l2norm) scale(k[i], by_k);
      scale(q[i], by_q);
    }
  }

  XPU_INLINE void load(lm_ptr<char> raw_q, int q_dtype, lm_ptr<char> raw_k, int k_dtype,
                       lm_ptr<float> ordered) {
    vf32 z;
    zero(z);
    if (ST == kBf16 && q_dtype != kBf16) {
      split_even_odd(raw_q, q_dtype, NG * 32, ordered);
      XPU_FENCE(XPU_LM_ONLY);
    }
    for (int c = 0; c < NG; ++c)
      load_activation<ST>(raw_q, q_dtype, c, z, ordered, q[2 * c], q[2 * c + 1]);
    if (ST == kBf16 && k_dtype != kBf16) {
      split_even_odd(raw_k, k_dtype, NG * 32, ordered);
      XPU_FENCE(XPU_LM_ONLY);
    }
    for (int c = 0; c < NG; ++c)
      load_activation<ST>(raw_k, k_dtype, c, z, ordered, k[2 * c], k[2 * c + 1]);
  }

  XPU_INLINE void measure(bool l2norm, sfloat scale_q, lm_ptr<float> scratch) {
    vf32 acc_kq;
    zero(acc_kq);
    for (int i = 0; i < 2 * NG; ++i) multiply_add(acc_kq, k[i], q[i]);
    by_k = 1.0f;
    by_q = 1.0f;
    if (l2norm) {
      vf32 acc_k, acc_q;
      zero(acc_k);
      zero(acc_q);
      for (int i = 0; i < 2 * NG; ++i) {
        multiply_add(acc_k, k[i], k[i]);
        multiply_add(acc_q, q[i], q[i]);
      }
      sfloat sk, sq;
      lane_sums(acc_k, acc_q, scratch, &sk, &sq);
      by_k = s_rsqrt(sk + 1e-6f);
      by_q = s_rsqrt(sq + 1e-6f);
    }
    by_q = by_q * scale_q;
    sfloat twice;
    // This sum's fence also ends all reads of the raw buffers: they may be refilled from here on.
    lane_sums(acc_kq, acc_kq, scratch, &kq, &twice);
    kq = kq * (by_k * by_q);
  }
};

}  // namespace xpu
}  // namespace gdn
