// g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b).
// Included inside the namespace of one instruction set, after rows.h.

constexpr int64_t kGateHeads = 64;  // heads a task, so that its parameters stay in registers and L1

static void load_params(const Param& p, int64_t first, int64_t n, float* dst) {
  View x;
  x.ptr = const_cast<void*>(p.ptr);
  x.dtype = p.dtype;
  x.sd = p.s0;
  load_row(from_column(x, first), 0, 0, 0, n, dst);
}

static void gating(const GatingArgs& x, const Parallel& parallel) {
  const int64_t rows = x.rows_b * x.rows_t;
  constexpr int64_t rows_each = 32;
  const int64_t head_blocks = (x.HV + kGateHeads - 1) / kGateHeads;
  const int64_t row_blocks = (rows + rows_each - 1) / rows_each;
  auto body = [&](int64_t begin, int64_t end) {
    float A[kGateHeads + kLanes], dt[kGateHeads + kLanes];
    float a[kGateHeads + kLanes], b[kGateHeads + kLanes];
    int64_t loaded = -1;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t h0 = task / row_blocks * kGateHeads;
      const int64_t n = x.HV - h0 < kGateHeads ? x.HV - h0 : kGateHeads;
      if (loaded != h0) {
        load_params(x.A_log, h0, n, A);
        for (int64_t i = 0; i < n; i += kLanes) store(A + i, gate_rate(load(A + i)));
        load_params(x.dt_bias, h0, n, dt);
        loaded = h0;
      }
      View va = x.a, vb = x.b;
      va.sd = x.a.sh;
      vb.sd = x.b.sh;
      const int64_t first = task % row_blocks * rows_each;
      const int64_t last = first + rows_each < rows ? first + rows_each : rows;
      for (int64_t r = first; r < last; ++r) {
        load_row(from_column(va, h0), r / x.rows_t, r % x.rows_t, 0, n, a);
        load_row(from_column(vb, h0), r / x.rows_t, r % x.rows_t, 0, n, b);
        for_lanes(n, [&](int64_t i, auto lanes) {
          const F g = gate_log_decay(load(a + i), load(A + i), load(dt + i));
          store_lanes(x.g + r * x.HV + h0 + i, g, lanes);
          store_lanes(x.beta + r * x.HV + h0 + i, sigmoid(load(b + i)), lanes);
        });
      }
    }
  };
  // Below this much work a second thread costs more than it brings.
  if (rows * x.HV < 2048) {
    if (rows > 0 && x.HV > 0) body(0, head_blocks * row_blocks);
  } else {
    parallel_for(parallel, head_blocks * row_blocks, body);
  }
}
