// weight * rmsnorm(x) * silu(gate), rounded where the model rounds.
// Included inside the namespace of one instruction set, after rows.h.

GDN_INLINE F rounded(F x, DType d) {
  if (d == DType::bf16) {
    bf16_t tmp[kLanes];
    store(tmp, x);
    return load(tmp);
  }
  if (d == DType::f16) {
    f16_t tmp[kLanes];
    store(tmp, x);
    return load(tmp);
  }
  return x;
}

// x, gate, weight: padded(V) floats with zero tails; the result replaces x. `round_normed` and
// `round_weighted` are the dtypes the two intermediates live in (f32 = no rounding).
static void norm_row(float* x, const float* gate, const float* weight, int64_t V, float eps,
                     DType round_normed, DType round_weighted) {
  const float mean = dot(x, x, V) / static_cast<float>(V);
  const F r = broadcast(1.f / __builtin_sqrtf(mean + eps));
  auto registers = [&](int64_t i, auto count) {
    constexpr int J = decltype(count)::value;
    F g[J];
    unrolled<J>(GDN_EACH(j) { g[j] = load(gate + i + j * kLanes); });
    silu<J>(g);
    unrolled<J>(GDN_EACH(j) {
      float* p = x + i + j * kLanes;
      const F normed = rounded(load(p) * r, round_normed);
      store(p, rounded(load(weight + i + j * kLanes) * normed, round_weighted) * g[j]);
    });
  };
  int64_t i = 0;
  for (; i + 4 * kLanes <= V; i += 4 * kLanes) registers(i, std::integral_constant<int, 4>());
  for (; i < V; i += kLanes) registers(i, std::integral_constant<int, 1>());
}

static void gated_rms_norm(const NormArgs& a, const Parallel& parallel) {
  constexpr int64_t rows_each = 64;
  View x, gate, y;
  x.ptr = const_cast<void*>(a.x);
  x.dtype = y.dtype = a.dtype;
  x.st = a.s_x;
  x.sh = a.s_x_head;
  gate.ptr = const_cast<void*>(a.gate);
  gate.dtype = a.gate_dtype;
  gate.st = a.s_gate;
  gate.sh = a.s_gate_head;
  y.ptr = a.y;
  y.st = a.V;
  const DType round_weighted = a.weight.dtype == a.dtype ? a.dtype : DType::f32;
  auto body = [&](int64_t begin, int64_t end) {
    float xr[kMaxRow], gr[kMaxRow], w[kMaxRow];
    load_params(a.weight, 0, a.V, w);
    const int64_t last = end * rows_each < a.rows ? end * rows_each : a.rows;
    for (int64_t r = begin * rows_each; r < last; ++r) {
      load_row(x, 0, r / a.heads, r % a.heads, a.V, xr);
      load_row(gate, 0, r / a.heads, r % a.heads, a.V, gr);
      norm_row(xr, gr, w, a.V, a.eps, a.dtype, round_weighted);
      store_row(y, 0, r, 0, 0, a.V, xr);
    }
  };
  parallel_for(parallel, (a.rows + rows_each - 1) / rows_each, body);
}
