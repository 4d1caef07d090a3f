// Rows of activations in and out of float buffers, and the per-head scalars of a token.
// Included inside the namespace of one instruction set, after vec.h.

template <class T>
constexpr DType kDTypeOf = std::is_same_v<T, float>    ? DType::f32
                           : std::is_same_v<T, bf16_t> ? DType::bf16
                                                       : DType::f16;

// body(a null pointer to the element type): for bodies large enough that one choice does not count.
template <class Body>
GDN_INLINE void with_type(DType d, Body body) {
  switch (d) {
    case DType::f32:
      return body(static_cast<float*>(nullptr));
    case DType::bf16:
      return body(static_cast<bf16_t*>(nullptr));
    case DType::f16:
      return body(static_cast<f16_t*>(nullptr));
  }
}

constexpr int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }
constexpr int kMaxRow = kMaxHeadDim + 16;  // a row padded to any register

template <class T>
GDN_INLINE const T* element(const View& x, int64_t b, int64_t t, int64_t h) {
  return static_cast<const T*>(x.ptr) + b * x.sb + t * x.st + h * x.sh;
}

// dst[0, padded(n)) = n elements `stride` apart as floats, zero past the last.
template <class T>
GDN_INLINE void widen(const T* src, int64_t stride, int64_t n, float* dst) {
  if (stride == 1) {
    for_lanes(n, [&](int64_t i, auto lanes) { store(dst + i, load_lanes(src + i, lanes)); });
  } else {
    for (int64_t i = 0; i < n; ++i) dst[i] = to_float(src[i * stride]);
    for (int64_t i = n; i < padded(n); ++i) dst[i] = 0.f;
  }
}

// The same for a row of n elements of a view.
static void load_row(const View& x, int64_t b, int64_t t, int64_t h, int64_t n, float* dst) {
  switch (x.dtype) {
    case DType::f32:
      return widen(element<float>(x, b, t, h), x.sd, n, dst);
    case DType::bf16:
      return widen(element<bf16_t>(x, b, t, h), x.sd, n, dst);
    case DType::f16:
      return widen(element<f16_t>(x, b, t, h), x.sd, n, dst);
  }
}

template <class T>
GDN_INLINE void narrow(const float* src, int64_t n, T* dst) {
  for_lanes(
      n, [&](int64_t i, auto lanes) { store_lanes(dst + i, load_lanes(src + i, lanes), lanes); });
}

// n floats to columns [first, first + n) of a row, rounded once. The last dimension of an output is
// contiguous, so `sd` is not looked at.
static void store_row(const View& y, int64_t b, int64_t t, int64_t h, int64_t first, int64_t n,
                      const float* src) {
  const int64_t offset = b * y.sb + t * y.st + h * y.sh + first;
  switch (y.dtype) {
    case DType::f32:
      return narrow(src, n, static_cast<float*>(y.ptr) + offset);
    case DType::bf16:
      return narrow(src, n, static_cast<bf16_t*>(y.ptr) + offset);
    case DType::f16:
      return narrow(src, n, static_cast<f16_t*>(y.ptr) + offset);
  }
}

// The view whose column 0 is column `c` of x.
GDN_INLINE View from_column(View x, int64_t c) {
  x.ptr = static_cast<char*>(x.ptr) + c * x.sd * size_of(x.dtype);
  return x;
}

static float load_scalar(const void* ptr, DType dtype, int64_t offset) {
  switch (dtype) {
    case DType::f32:
      return static_cast<const float*>(ptr)[offset];
    case DType::bf16:
      return to_float(static_cast<const bf16_t*>(ptr)[offset]);
    default:
      return to_float(static_cast<const f16_t*>(ptr)[offset]);
  }
}
static float load_scalar(const View& x, int64_t b, int64_t t, int64_t h) {
  return load_scalar(x.ptr, x.dtype, b * x.sb + t * x.st + h * x.sh);
}
static float load_scalar(const Param& p, int64_t i, int64_t j = 0) {
  return load_scalar(p.ptr, p.dtype, i * p.s0 + j * p.s1);
}

// a, b buffers of padded(n) floats with zero tails.
static float dot(const float* a, const float* b, int64_t n) {
  F acc = zero();
  for (int64_t i = 0; i < n; i += kLanes) acc = fma(load(a + i), load(b + i), acc);
  return sum(acc);
}

static float inverse_norm(const float* x, int64_t n) {
  return 1.f / __builtin_sqrtf(dot(x, x, n) + kL2Eps);
}
static void l2_normalise(float* x, int64_t n) {
  const F r = broadcast(inverse_norm(x, n));
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, load(x + i) * r);
}

// g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b), all in f32. The rate is per head:
// rows of tokens compute it once.
GDN_INLINE F gate_rate(F A_log) { return zero() - exp(A_log); }
GDN_INLINE F gate_log_decay(F a, F rate, F dt_bias) { return rate * softplus(a + dt_bias); }

struct RawGates {
  float g, beta;
};
static RawGates raw_gates(const Gates& x, int64_t b, int64_t t, int64_t h) {
  float g = load_scalar(x.g, b, t, h), beta = load_scalar(x.beta, b, t, h);
  if (x.raw) {
    g = first_lane(gate_log_decay(broadcast(g), gate_rate(broadcast(load_scalar(x.A_log, h))),
                                  broadcast(load_scalar(x.dt_bias, h))));
    beta = first_lane(sigmoid(broadcast(beta)));
  }
  return {g, beta};
}

struct TokenGates {
  float decay, beta;  // exp(g), beta
};
static TokenGates token_gates(const Gates& x, int64_t b, int64_t t, int64_t h) {
  const RawGates gates = raw_gates(x, b, t, h);
  return {first_lane(exp(broadcast(gates.g))), gates.beta};
}

// Key and query of one key head as the recurrence uses them, and their product.
struct alignas(64) KeyQuery {
  float k[kMaxRow], q[kMaxRow];
  float kq;
  bool fast = false;  // products with the state from the copies below
  alignas(64) bf16_t k16[kMaxRow], q16[kMaxRow];
};
static void finish_key_query(KeyQuery& x, int64_t K, bool l2norm, bool fast = false) {
  if (l2norm) {
    l2_normalise(x.k, K);
    l2_normalise(x.q, K);
  }
  x.kq = dot(x.k, x.q, K);
  x.fast = fast;
  if (fast) {
    for (int64_t i = 0; i < K; i += kLanes) {
      store(x.k16 + i, load(x.k + i));
      store(x.q16 + i, load(x.q + i));
    }
  }
}
