// The chunked rule: matrix products through torch's own matmul, everything between them in the
// kernels of kernels/chunk*.xpu. Formulas of one chunk (S [K, V] is the old state, D the decay):
//   A = beta D (k k^T),  M = D (q k^T),  X = (1 + A)^-1,  W = X (beta w k),  U = X (beta v) - W S
//   O = (w q) S + M U,   S' = w_n S + (D_n k)^T U
// Nothing on the device is read here: the products have shapes for any lengths that cu_seqlens may
// hold, and kernels/chunk_plan.xpu fills them.
#include <algorithm>
#include <cmath>
#include <vector>

#include <torch/library.h>

#include "../call_forms.h"
#include "glue.h"
#include "kernels/launch.h"

namespace gdn {
namespace xpu {
namespace {

using at::Tensor;

constexpr int64_t kMaxDim = 256;             // K, V: a row of float32 and its neighbours in LM
constexpr int64_t kSolved = 64;              // rows of a diagonal block that chunk_solve inverts
constexpr int64_t kScratchFloats = 1 << 26;  // of one scratch tensor of a group of chunks

uint64_t address(const Tensor& t) { return reinterpret_cast<uint64_t>(t.data_ptr()); }
uint64_t address(const void* p) { return reinterpret_cast<uint64_t>(p); }

IndexVector index_vector(const Index& x) { return {address(x.ptr), x.s0, x.s1, x.is64, 0}; }

Tensor4 tensor4(const View& v, const char* op, const char* name) {
  TORCH_CHECK(v.sd == 1, op, ": ", name, ": the XPU needs contiguous channels, got stride ", v.sd);
  return {address(v.ptr), v.sb, v.st, v.sh, static_cast<int32_t>(v.dtype), 0};
}

// Dense float32 [items, heads, R, D] as a source of rows.
Tensor4 dense(const Tensor& t) {
  const int64_t R = t.size(2), D = t.size(3);
  return {address(t), t.size(1) * R * D, D, R * D, static_cast<int32_t>(DType::f32), 0};
}

// Chunks ordered by (step, sequence), the sequence with most chunks first: step s is [offset[s],
// offset[s + 1]) and holds the first sequences of the order. Only shapes are known here: of packed
// sequences, no more than T / (s C + 1) have more than s chunks of C tokens. Which they are, the
// device finds out; a slot whose sequence has ended is a chunk of no tokens.
struct Plan {
  int64_t N = 0, tokens = 0, C = 0;  // tokens of a chunk as asked for, and padded to 32, 64 or 128
  std::vector<int64_t> offset{0};
  Tensor chunks;     // int32 [chunks, 4]: batch, first token, tokens, sequence
  Tensor sequences;  // int32 [N, 4] in order: sequence, 0, rows, sequence
  int64_t steps() const { return static_cast<int64_t>(offset.size()) - 1; }
  int64_t width(int64_t step) const { return offset[step + 1] - offset[step]; }
  uint64_t of_step(int64_t step) const {
    return address(chunks) + static_cast<uint64_t>(offset[step]) * 16;
  }
};

Plan plan_of(const char* op, const ChunkArgs& a, const at::TensorOptions& ints, void* stream) {
  TORCH_CHECK(a.seqs.T <= INT32_MAX && a.seqs.N <= INT32_MAX, op, ": T = ", a.seqs.T,
              ", N = ", a.seqs.N, ": the XPU takes less than 2^31");
  Plan p;
  p.N = a.seqs.N;
  p.tokens = a.C;
  p.C = a.C <= 32 ? 32 : a.C <= 64 ? 64 : 128;
  for (int64_t from = 0; from < a.seqs.T; from += p.tokens) {
    const int64_t most = a.seqs.cu_seqlens.ptr ? a.seqs.T / (from + 1) : p.N;
    p.offset.push_back(p.offset.back() + std::min(p.N, most));
  }
  p.chunks = at::empty({p.offset.back(), 4}, ints);
  p.sequences = at::empty({p.N, 4}, ints);
  ChunkPlanParams k{};
  k.cu = index_vector(a.seqs.cu_seqlens);
  k.chunks = address(p.chunks);
  k.sequences = address(p.sequences);
  k.N = static_cast<int32_t>(p.N);
  k.T = static_cast<int32_t>(a.seqs.T);
  k.tokens = static_cast<int32_t>(p.tokens);
  k.steps = static_cast<int32_t>(p.steps());
  launch_chunk_plan(k, stream);
  return p;
}

struct Call {
  const char* op;
  const ChunkArgs& a;
  const Plan& plan;
  Tensor g, beta;  // float32 [B, HV, T]
  at::TensorOptions floats;
  void* stream;
};

// Rows of a tensor as dense float32, see ChunkRowsParams.
ChunkRowsParams rows_params(const Tensor4& x, const Tensor& rows, uint64_t table, int64_t ratio) {
  ChunkRowsParams p{};
  p.x = x;
  p.rows = address(rows);
  p.table = table;
  p.P = INT32_MAX;
  p.items = static_cast<int32_t>(rows.size(0));
  p.heads = static_cast<int32_t>(rows.size(1));
  p.ratio = static_cast<int32_t>(ratio);
  p.R = static_cast<int32_t>(rows.size(2));
  p.D = static_cast<int32_t>(rows.size(3));
  p.scale = 1.0f;
  return p;
}

enum Factor { kBeta = 1, kDecay = 2, kLast = 3, kBetaDecay = 4 };  // rows of the gates

// Dense rows times a factor of each row, for every value head.
Tensor scaled(const Call& c, const Tensor4& x, uint64_t table, const Tensor& gates, Factor factor,
              int64_t D, int64_t ratio) {
  Tensor out = at::empty({gates.size(0), c.a.HV, c.plan.C, D}, c.floats);
  ChunkRowsParams p = rows_params(x, out, table, ratio);
  p.factors = address(gates) + static_cast<uint64_t>(factor * c.plan.C * 4);
  p.s_factor = kGateRows * c.plan.C;
  launch_chunk_rows(p, c.stream);
  return out;
}

// What a group of chunks needs, all chunks at once.
struct Group {
  Tensor k;                           // [chunks, H, C, K]: keys as the recurrence uses them
  Tensor q_decayed, k_last, W, U, M;  // [chunks, HV, C, *]
  Tensor gates;                       // [chunks, HV, kGateRows, C]
};

Group group_of(const Call& c, int64_t begin, int64_t count) {
  const ChunkArgs& a = c.a;
  const int64_t C = c.plan.C, ratio = a.HV / a.H;
  const uint64_t table = address(c.plan.chunks) + static_cast<uint64_t>(begin) * 16;
  Group x;
  auto keys = [&](const View& view, const char* name, float scale) {
    Tensor rows = at::empty({count, a.H, C, a.K}, c.floats);
    ChunkRowsParams p = rows_params(tensor4(view, c.op, name), rows, table, 1);
    p.l2norm = a.l2norm;
    p.scale = scale;
    launch_chunk_rows(p, c.stream);
    return rows;
  };
  const Tensor q = keys(a.q, "q", a.scale);
  x.k = keys(a.k, "k", 1.0f);

  ChunkParams p{};
  x.gates = at::empty({count, a.HV, kGateRows, C}, c.floats);
  p.g = address(c.g);
  p.beta = address(c.beta);
  p.table = table;
  p.gates = address(x.gates);
  p.chunks = static_cast<int32_t>(count);
  p.H = static_cast<int32_t>(a.H);
  p.HV = static_cast<int32_t>(a.HV);
  p.T = static_cast<int32_t>(c.g.size(2));
  p.C = static_cast<int32_t>(C);
  launch_chunk_gates(p, c.stream);

  const Tensor k_t = x.k.transpose(2, 3);
  const Tensor kk = at::matmul(x.k, k_t), qk = at::matmul(q, k_t);
  // Of a chunk without tokens the kernels write neither A nor its inverse: with zeros W and U are
  // zero, and what M holds reaches no token.
  const Tensor A = C > kSolved ? at::zeros({count, a.HV, C, C}, c.floats)
                               : at::empty({count, a.HV, C, C}, c.floats);
  x.M = at::empty_like(A);
  p.kk = address(kk);
  p.qk = address(qk);
  p.A = address(A);
  p.M = address(x.M);
  launch_chunk_decay(p, c.stream);
  Tensor inverse = at::zeros_like(A);
  p.inverse = address(inverse);
  launch_chunk_solve(p, c.stream);
  if (C > kSolved) {
    // A holds -A: the block below the diagonal ones is X_22 (-A_21) X_11.
    auto block = [&](const Tensor& t, int64_t i, int64_t j) {
      return t.narrow(2, i * kSolved, kSolved).narrow(3, j * kSolved, kSolved);
    };
    block(inverse, 1, 0)
        .copy_(at::matmul(block(inverse, 1, 1), at::matmul(block(A, 1, 0), block(inverse, 0, 0))));
  }
  x.W = at::matmul(inverse, scaled(c, dense(x.k), 0, x.gates, kBetaDecay, a.K, ratio));
  x.U = at::matmul(inverse, scaled(c, tensor4(a.v, c.op, "v"), table, x.gates, kBeta, a.V, 1));
  x.q_decayed = scaled(c, dense(q), 0, x.gates, kDecay, a.K, ratio);
  x.k_last = scaled(c, dense(x.k), 0, x.gates, kLast, a.K, ratio);
  return x;
}

// The state between chunks, a matrix a head: rows are those of the pool, whichever way it lies.
class MatrixState {
 public:
  explicit MatrixState(const Call& c) : c_(c) {
    const ChunkArgs& a = c.a;
    by_column_ = pool().s_k != 1 && pool().ptr;
    const int64_t R = by_column_ ? a.K : a.V, D = by_column_ ? a.V : a.K;
    if (!a.read.ptr) {
      S_ = at::zeros({c.plan.N, a.HV, R, D}, c.floats);
      return;
    }
    S_ = at::empty({c.plan.N, a.HV, R, D}, c.floats);
    ChunkRowsParams p = moved(a.read, a.seqs.state_indices, c.plan.N);
    p.has_init = address(a.seqs.has_initial_state);
    p.s_has = a.seqs.s_has;
    launch_chunk_rows(p, c.stream);
  }

  Tensor times(const Tensor& x, int64_t) const { return at::matmul(x, columns(x.size(0))); }

  void advance(const Group& x, int64_t begin, int64_t count, int64_t step) {
    const ChunkArgs& a = c_.a;
    const Tensor w = x.gates.narrow(0, begin, count).select(2, kDecay).narrow(2, c_.plan.C - 1, 1);
    Tensor S = columns(count);
    S.mul_(w.unsqueeze(3));
    S.add_(
        at::matmul(x.k_last.narrow(0, begin, count).transpose(2, 3), x.U.narrow(0, begin, count)));
    if (step < a.edges) {
      Index rows = a.edge_rows;
      rows.ptr = static_cast<const char*>(rows.ptr) + step * rows.s1 * (rows.is64 ? 8 : 4);
      store(rows, count, c_.plan.of_step(step));
    }
  }

  void finish() {
    store(c_.a.write_indices.ptr ? c_.a.write_indices : c_.a.seqs.state_indices, c_.plan.N);
  }

 private:
  const StatePool& pool() const { return c_.a.write.ptr ? c_.a.write : c_.a.read; }

  // [count, HV, K, V]
  Tensor columns(int64_t count) const {
    const Tensor S = S_.narrow(0, 0, count);
    return by_column_ ? S : S.transpose(2, 3);
  }

  ChunkRowsParams moved(const StatePool& pool, const Index& rows, int64_t count) const {
    const Tensor4 x = {address(pool.ptr),
                       pool.s_p,
                       by_column_ ? pool.s_k : pool.s_v,
                       pool.s_h,
                       static_cast<int32_t>(pool.dtype),
                       0};
    ChunkRowsParams p = rows_params(x, S_.narrow(0, 0, count), address(c_.plan.sequences), 1);
    p.pool = 1;
    p.index = index_vector(rows);
    p.P = static_cast<int32_t>(pool.P);
    return p;
  }

  // With `edge`, the chunks of a step: only of sequences that have all tokens of theirs.
  void store(const Index& rows, int64_t count, uint64_t edge = 0) const {
    ChunkRowsParams p = moved(c_.a.write, rows, count);
    p.of = edge;
    p.whole = edge ? static_cast<int32_t>(c_.plan.tokens) : 0;
    p.guard = index_vector(c_.a.seqs.state_indices);  // padding writes nothing
    p.out = 1;
    launch_chunk_rows(p, c_.stream);
  }

  const Call& c_;
  bool by_column_;
  Tensor S_;  // [N, HV, V, K], or [N, HV, K, V]
};

// The state as the updates of a window: scratch windows in float32, rounded as the pool stores
// them.
class WindowState {
 public:
  explicit WindowState(const Call& c) : c_(c) {
    const ChunkArgs& a = c.a;
    const int64_t N = c.plan.N, R = a.window.R;
    for (Scratch& s : scratch_) {
      s.k = at::zeros({N, a.H, R, a.K}, c.floats);
      s.u = at::zeros({N, a.HV, R, a.V}, c.floats);
      s.g = at::zeros({N, a.HV, R}, c.floats);
      s.fill = at::zeros({N}, c.floats.dtype(at::kInt));
    }
    weighted_ = at::zeros({N, a.HV, R, a.V}, c.floats);
    ChunkWindowParams p = params(N);
    p.from = pool();
    p.to = place(scratch_[0]);
    p.weighted = address(weighted_);
    p.has_init = address(a.seqs.has_initial_state);
    p.s_has = a.seqs.s_has;
    launch_chunk_window(p, c.stream);
  }

  // x S with S = k^T weighted: two thin products.
  Tensor times(const Tensor& x, int64_t count) const {
    const ChunkArgs& a = c_.a;
    const int64_t C = x.size(2), R = a.window.R;
    const Tensor k = scratch_[now_].k.narrow(0, 0, count).transpose(2, 3);
    const Tensor xk = at::matmul(x.reshape({count, a.H, a.HV / a.H * C, a.K}), k);
    return at::matmul(xk.view({count, a.HV, C, R}), weighted_.narrow(0, 0, count));
  }

  void advance(const Group& x, int64_t begin, int64_t count, int64_t step) {
    const Plan& plan = c_.plan;
    ChunkWindowParams p = params(count);
    p.from = place(scratch_[now_]);
    p.to = place(scratch_[1 - now_]);
    p.weighted = address(weighted_);
    const Tensor k = x.k.narrow(0, begin, count), u = x.U.narrow(0, begin, count);
    p.new_k = address(k);
    p.new_u = address(u);
    p.table = plan.of_step(step);
    launch_chunk_window(p, c_.stream);
    now_ = 1 - now_;
    // Sequences that surely have ended are the last of this step.
    const int64_t next = step + 1 < plan.steps() ? plan.width(step + 1) : 0;
    if (next < count) put(next, count - next);
  }

  void finish() {}

 private:
  struct Scratch {
    Tensor k, u, g, fill;
  };

  ChunkWindowParams params(int64_t items) const {
    const ChunkArgs& a = c_.a;
    ChunkWindowParams p{};
    p.g = address(c_.g);
    p.table = address(c_.plan.sequences);
    p.index = index_vector(a.seqs.state_indices);
    p.round_k = static_cast<int32_t>(a.window.k_dtype);
    p.round_u = static_cast<int32_t>(a.window.u_dtype);
    p.items = static_cast<int32_t>(items);
    p.P = static_cast<int32_t>(a.window.P);
    p.R = static_cast<int32_t>(a.window.R);
    p.H = static_cast<int32_t>(a.H);
    p.HV = static_cast<int32_t>(a.HV);
    p.K = static_cast<int32_t>(a.K);
    p.V = static_cast<int32_t>(a.V);
    p.C = static_cast<int32_t>(c_.plan.C);
    p.T = static_cast<int32_t>(c_.g.size(2));
    return p;
  }

  static void set(int64_t (&to)[3], int64_t x, int64_t y, int64_t z) {
    to[0] = x;
    to[1] = y;
    to[2] = z;
  }

  WindowPlace pool() const {
    const Window& w = c_.a.window;
    WindowPlace at{};
    at.k = address(w.k);
    at.u = address(w.u);
    at.g = address(w.g);
    at.fill = address(w.fill);
    set(at.sk, w.sk_p, w.sk_h, w.sk_r);
    set(at.su, w.su_p, w.su_h, w.su_r);
    set(at.sg, w.sg_p, w.sg_h, w.sg_r);
    at.sf = w.s_fill;
    at.dtype_k = static_cast<int32_t>(w.k_dtype);
    at.dtype_u = static_cast<int32_t>(w.u_dtype);
    at.pool = 1;
    return at;
  }

  // The windows of sequences from `first` on.
  static WindowPlace place(const Scratch& s, int64_t first = 0) {
    WindowPlace at{};
    const auto address_in = [&](const Tensor& x) {
      return address(x.narrow(0, first, x.size(0) - first));
    };
    at.k = address_in(s.k);
    at.u = address_in(s.u);
    at.g = address_in(s.g);
    at.fill = address_in(s.fill);
    set(at.sk, s.k.stride(0), s.k.stride(1), s.k.stride(2));
    set(at.su, s.u.stride(0), s.u.stride(1), s.u.stride(2));
    set(at.sg, s.g.stride(0), s.g.stride(1), s.g.stride(2));
    at.sf = 1;
    at.dtype_k = at.dtype_u = static_cast<int32_t>(DType::f32);
    return at;
  }

  // The windows of `count` sequences in order, from scratch to the pool.
  void put(int64_t first, int64_t count) const {
    ChunkWindowParams p = params(count);
    p.from = place(scratch_[now_], first);
    p.to = pool();
    // First chunks tell which sequences have tokens at all; the others keep what they have.
    p.table = c_.plan.of_step(0) + static_cast<uint64_t>(first) * 16;
    launch_chunk_window(p, c_.stream);
  }

  const Call& c_;
  Scratch scratch_[2];
  int now_ = 0;
  Tensor weighted_;  // [N, HV, R, V]
};

template <typename State>
void run(const Call& c) {
  const ChunkArgs& a = c.a;
  const Plan& plan = c.plan;
  State state(c);
  // Groups of whole steps, so that scratch does not grow with the length of a prompt.
  const int64_t most =
      std::max<int64_t>(1, kScratchFloats / (a.HV * plan.C * std::max({a.K, a.V, plan.C})));
  for (int64_t step = 0; step < plan.steps();) {
    int64_t end = step + 1;
    while (end < plan.steps() && plan.offset[end + 1] - plan.offset[step] <= most) ++end;
    const int64_t begin = plan.offset[step], chunks = plan.offset[end] - begin;
    const Group x = group_of(c, begin, chunks);
    Tensor o = at::empty({chunks, a.HV, plan.C, a.V}, c.floats);
    for (; step < end; ++step) {
      const int64_t at = plan.offset[step] - begin, count = plan.offset[step + 1] - begin - at;
      Tensor U = x.U.narrow(0, at, count);
      U.sub_(state.times(x.W.narrow(0, at, count), count));
      Tensor out = o.narrow(0, at, count);
      out.copy_(at::matmul(x.M.narrow(0, at, count), U));
      out.add_(state.times(x.q_decayed.narrow(0, at, count), count));
      state.advance(x, at, count, step);
    }
    ChunkRowsParams p = rows_params(tensor4(a.out, c.op, "out"), o,
                                    address(plan.chunks) + static_cast<uint64_t>(begin) * 16, 1);
    p.index = index_vector(a.seqs.state_indices);
    p.P = static_cast<int32_t>(std::min<int64_t>(a.seqs.P, INT32_MAX));
    p.out = 1;
    launch_chunk_rows(p, c.stream);
  }
  state.finish();
}

void chunked(const char* op, ChunkArgs& a, const Tensor& v, const Tensor& g, const Tensor& beta) {
  TORCH_CHECK(a.K <= kMaxDim && a.V <= kMaxDim, op, ": K = ", a.K, ", V = ", a.V,
              ": the XPU kernels take up to ", kMaxDim, " (local memory of a core)");
  if (a.seqs.N == 0) return;
  auto by_head = [](const Tensor& t) { return t.to(at::kFloat).transpose(1, 2).contiguous(); };
  launch(op, v, [&](void* stream) {
    const Plan plan = plan_of(op, a, v.options().dtype(at::kInt), stream);
    const Call c{op, a, plan, by_head(g), by_head(beta), v.options().dtype(at::kFloat), stream};
    if (a.window.fill)
      run<WindowState>(c);
    else
      run<MatrixState>(c);
  });
}

std::tuple<Tensor, Tensor> chunk_op(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                    const Tensor& g, const Tensor& beta,
                                    const OptTensor& initial_state, const OptTensor& cu_seqlens,
                                    std::optional<double> scale, bool qk_l2norm,
                                    int64_t chunk_size) {
  const Tensor q = dense_channels(q_in), k = dense_channels(k_in), v = dense_channels(v_in);
  const OptTensor none;
  ChunkArgs a = chunk_args("chunk", q, k, v, g, beta,
                           {initial_state, nullptr, none, none, none, cu_seqlens, none, nullptr},
                           scale, qk_l2norm, chunk_size);
  Tensor out = token_output(v, v.sizes(), cu_seqlens);
  Tensor final_state = at::empty({a.seqs.N, a.HV, a.V, a.K}, v.options().dtype(at::kFloat));
  a.out = view_of(out, a.V);
  a.write = states_of(final_state);
  // The initial state may lie either way; the final one is written as rows of K.
  Tensor initial;
  if (initial_state && a.read.s_k != 1) {
    initial = initial_state->contiguous();
    a.read = a.write;
    a.read.ptr = initial.data_ptr();
  }
  chunked("chunk", a, v, g, beta);
  return {out, final_state};
}

Tensor run_chunk(const char* op, const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                 const Tensor& g, const Tensor& beta, const ChunkTensors& t,
                 std::optional<double> scale, bool qk_l2norm, int64_t chunk_size) {
  const Tensor q = dense_channels(q_in), k = dense_channels(k_in), v = dense_channels(v_in);
  ChunkArgs a = chunk_args(op, q, k, v, g, beta, t, scale, qk_l2norm, chunk_size);
  Tensor out = token_output(v, v.sizes(), t.cu_seqlens);
  a.out = view_of(out, a.V);
  chunked(op, a, v, g, beta);
  return out;
}

}  // namespace
}  // namespace xpu
}  // namespace gdn

TORCH_LIBRARY_IMPL(gdn, GDN_XPU_KEY, m) {
  using namespace gdn::xpu;
  gdn::forms::implement_chunk_pools<run_chunk>(m);
  m.impl("chunk", &chunk_op);
}
