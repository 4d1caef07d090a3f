// The chunked gated delta rule as batched matrix products over all chunks at once; only the passing
// of the state from chunk to chunk is a loop. Formulas of one chunk (S [K, V] is the old state, n
// tokens, D_ij = exp(sum of g_l for j < l <= i), w_i = exp(sum of g_l for l <= i), A strictly
// lower):
//   A = beta D (k k^T),  M = scale D (q k^T),  X = beta (v - w k S),  U = (1 + A)^-1 X
//   O = scale w q S + M U,  S' = w_n S + k^T (D_n U)
// The backward pass is their transposition, in the notation of the code: dX = gradient of X.
#include "chunk_aten.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "index.h"

namespace gdn {
namespace {

using at::Tensor;

// Chunks ordered by (step, sequence), longest sequence first: step s is rows [offset[s],
// offset[s+1]) and holds the first offset[s+1] - offset[s] sequences of `order`.
struct Layout {
  int64_t N = 0, C = 0, chunks = 0;
  Tensor tokens;  // [chunks * C]: flat token, or B*T for padding
  Tensor order;   // [N]: sequences, longest first
  std::vector<int64_t> offset{0};
};

Layout layout_of(const Tensor& q, const OptTensor& cu_seqlens, int64_t C) {
  const int64_t B = q.size(0), T = q.size(1);
  std::vector<int64_t> start, length;
  if (cu_seqlens) {
    const Tensor cu = cu_seqlens->to(at::kCPU, at::kLong).contiguous();
    const int64_t* p = cu.const_data_ptr<int64_t>();
    for (int64_t n = 0; n + 1 < cu.numel(); ++n) {
      TORCH_CHECK(0 <= p[n] && p[n] <= p[n + 1] && p[n + 1] <= T,
                  "chunk: cu_seqlens: expected ascending offsets from 0 to T = ", T);
      start.push_back(p[n]);
      length.push_back(p[n + 1] - p[n]);
    }
  } else {
    for (int64_t b = 0; b < B; ++b) {
      start.push_back(b * T);
      length.push_back(T);
    }
  }
  Layout x;
  x.N = static_cast<int64_t>(start.size());
  x.C = C;
  std::vector<int64_t> order(x.N);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return length[a] > length[b]; });
  std::vector<int64_t> tokens;
  for (int64_t step = 0;; ++step) {
    int64_t active = 0;
    for (; active < x.N && length[order[active]] > step * C; ++active) {
      const int64_t n = order[active];
      for (int64_t i = step * C; i < (step + 1) * C; ++i) {
        tokens.push_back(i < length[n] ? start[n] + i : B * T);
      }
    }
    if (active == 0) break;
    x.offset.push_back(x.offset.back() + active);
  }
  x.chunks = x.offset.back();
  x.tokens = at::tensor(tokens, at::kLong).to(q.device());
  x.order = at::tensor(order, at::kLong).to(q.device());
  return x;
}

// [B, T, heads, D] -> [chunks, heads * repeat, C, D], zero where a chunk has no token.
Tensor gather(const Tensor& x, const Layout& layout, at::ScalarType dtype, int64_t repeat) {
  Tensor flat = x.reshape({x.size(0) * x.size(1), x.size(2), x.size(3)}).to(dtype);
  flat = at::cat({flat, at::zeros({1, flat.size(1), flat.size(2)}, flat.options())});
  Tensor y = flat.index_select(0, layout.tokens)
                 .view({layout.chunks, layout.C, flat.size(1), flat.size(2)})
                 .transpose(1, 2);
  return repeat == 1 ? y.contiguous() : y.repeat_interleave(repeat, 1);
}

// The inverse, in the dtype of y; value heads of one key head are summed.
Tensor scatter(const Tensor& y, const Layout& layout, const Tensor& like, int64_t repeat) {
  Tensor x = y;
  if (repeat > 1) x = x.view({y.size(0), y.size(1) / repeat, repeat, y.size(2), y.size(3)}).sum(2);
  x = x.transpose(1, 2).reshape({layout.chunks * layout.C, x.size(1), x.size(3)});
  const int64_t total = like.size(0) * like.size(1);
  Tensor flat = at::zeros({total + 1, x.size(1), x.size(2)}, x.options());
  flat.index_copy_(0, layout.tokens, x);
  return flat.narrow(0, 0, total).reshape(like.sizes());
}

Tensor inverse_norm(const Tensor& x) { return (x * x).sum(-1, true).add_(kL2Eps).rsqrt_(); }

// (1 + A)^-1 for strictly lower A [..., C, C]; on a CPU row by row as a substitution, because
// linalg_solve_triangular calls LAPACK there once a matrix, 768 times for 1024 tokens of 48 heads.
template <class T>
void inverse_of(const T* A, T* X, int64_t matrices, int64_t C) {
  at::parallel_for(0, matrices, 1, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const T* a = A + m * C * C;
      T* x = X + m * C * C;
      for (int64_t i = 0; i < C; ++i, a += C) {
        T* row = x + i * C;
        std::fill(row, row + C, T(0));
        for (int64_t j = 0; j < i; ++j) {
          const T* above = x + j * C;
          for (int64_t c = 0; c <= j; ++c) row[c] -= a[j] * above[c];
        }
        row[i] = T(1);
      }
    }
  });
}
Tensor unit_lower_inverse(const Tensor& lower) {
  if (!lower.is_cpu()) {
    const Tensor eye = at::eye(lower.size(-1), lower.options()).expand_as(lower);
    return at::linalg_solve_triangular(lower, eye, /*upper=*/false, /*left=*/true,
                                       /*unitriangular=*/true);
  }
  const Tensor A = lower.contiguous();
  Tensor X = at::empty_like(A);
  const int64_t C = A.size(-1), matrices = C ? A.numel() / (C * C) : 0;
  if (A.scalar_type() == at::kDouble) {
    inverse_of(A.const_data_ptr<double>(), X.data_ptr<double>(), matrices, C);
  } else {
    inverse_of(A.const_data_ptr<float>(), X.data_ptr<float>(), matrices, C);
  }
  return X;
}

struct Forward {
  at::ScalarType dtype;
  int64_t ratio;  // value heads of a key head
  double scale;
  Tensor q, k, v, beta, w;  // [chunks, HV, C, *]
  Tensor rq, rk;            // 1 / norms, with qk_l2norm
  Tensor D, kk, qk, M;      // [chunks, HV, C, C]
  Tensor inverse, W;        // (1 + A)^-1, and that times beta w k
  Tensor D_last, w_last;    // [chunks, HV, C, 1], [chunks, HV, 1, 1]
  Tensor k_last;            // [chunks, HV, C, K]: D_last k
  Tensor S, U;              // [chunks, HV, K, V] before each chunk, [chunks, HV, C, V]
  Tensor final_state;       // [N, HV, K, V]
};

Forward forward(const Layout& x, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                const Tensor& beta, const OptTensor& initial_state, std::optional<double> scale,
                bool qk_l2norm) {
  const int64_t HV = v.size(2), K = q.size(3), V = v.size(3);
  Forward f;
  f.dtype = q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  f.ratio = HV / q.size(2);
  f.scale = scale ? *scale : 1.0 / std::sqrt(static_cast<double>(K));
  const auto options = q.options().dtype(f.dtype);

  Tensor state = initial_state ? initial_state->to(f.dtype).transpose(2, 3).index_select(0, x.order)
                               : at::zeros({x.N, HV, K, V}, options);
  f.q = gather(q, x, f.dtype, f.ratio);
  f.k = gather(k, x, f.dtype, f.ratio);
  if (qk_l2norm) {
    f.rq = inverse_norm(f.q);
    f.rk = inverse_norm(f.k);
    f.q = f.q * f.rq;
    f.k = f.k * f.rk;
  }
  f.v = gather(v, x, f.dtype, 1);
  f.beta = gather(beta.unsqueeze(-1), x, f.dtype, 1);
  const Tensor log_decay = gather(g.unsqueeze(-1), x, f.dtype, 1);
  f.w = log_decay.cumsum(2).exp_();
  // Each entry sums its own g's: no difference of totals, so -inf is as good as any value.
  const Tensor later = at::ones({x.C, x.C}, q.options().dtype(at::kBool)).tril_(-1);
  f.D = at::where(later, log_decay, at::zeros({}, options)).cumsum(2).exp_().tril_();
  f.kk = at::matmul(f.k, f.k.transpose(2, 3));
  f.qk = at::matmul(f.q, f.k.transpose(2, 3));
  f.M = (f.D * f.qk).mul_(f.scale);
  const Tensor A = (f.D * f.kk).mul_(f.beta).tril_(-1);
  f.inverse = unit_lower_inverse(A);
  // Factors of k and v scale the columns of the inverse, which is smaller.
  const Tensor T = f.inverse * f.beta.transpose(2, 3);
  f.W = at::matmul(T * f.w.transpose(2, 3), f.k);
  f.U = at::matmul(T, f.v);
  f.D_last = f.D.select(2, x.C - 1).unsqueeze(-1);
  f.w_last = f.w.narrow(2, x.C - 1, 1);

  f.S = at::empty({x.chunks, HV, K, V}, options);
  f.k_last = f.k * f.D_last;
  const Tensor k_last_t = f.k_last.transpose(2, 3);
  for (size_t step = 0; step + 1 < x.offset.size(); ++step) {
    const int64_t begin = x.offset[step], count = x.offset[step + 1] - begin;
    Tensor S = state.narrow(0, 0, count), U = f.U.narrow(0, begin, count);
    f.S.narrow(0, begin, count).copy_(S);
    U.sub_(at::matmul(f.W.narrow(0, begin, count), S));
    S.mul_(f.w_last.narrow(0, begin, count));
    S.add_(at::matmul(k_last_t.narrow(0, begin, count), U));
  }
  f.final_state = at::empty_like(state);
  f.final_state.index_copy_(0, x.order, state);
  return f;
}

void check_float64(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& g, const Tensor& beta, const OptTensor& initial_state) {
  for (const Named& n :
       {Named{"q", &q}, Named{"k", &k}, Named{"v", &v}, Named{"g", &g}, Named{"beta", &beta}}) {
    TORCH_CHECK(n.t->scalar_type() == at::kDouble, op, ": ", n.name,
                ": expected float64 beside a float64 q, got ", n.t->scalar_type());
  }
  TORCH_CHECK(!initial_state || initial_state->scalar_type() == at::kDouble, op,
              ": initial_state: expected float64 beside a float64 q, got ",
              initial_state->scalar_type());
}

// Shapes, devices and values by the checks that every dtype goes through: on stand-ins of one f32
// element, because those refuse f64.
void check_shapes(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                  const Tensor& g, const Tensor& beta, const OptTensor& initial_state,
                  const OptTensor& cu_seqlens, std::optional<double> scale, bool qk_l2norm,
                  int64_t chunk_size) {
  auto stand_in = [](const Tensor& t) {
    return at::empty({1}, t.options().dtype(at::kFloat))
        .as_strided(t.sizes(), std::vector<int64_t>(t.dim(), 0));
  };
  const OptTensor none;
  OptTensor state;
  if (initial_state) {
    state = at::empty(initial_state->sizes(), initial_state->options().dtype(at::kFloat));
  }
  const ChunkArgs a = chunk_args(
      op, stand_in(q), stand_in(k), stand_in(v), stand_in(g), stand_in(beta),
      {state, nullptr, none, none, none, cu_seqlens, none, nullptr}, scale, qk_l2norm, chunk_size);
  if (q.is_cpu()) check_values(op, a.seqs);
}

using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients backward(const Layout& x, const Tensor& grad_o, const OptTensor& grad_final_state,
                   const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                   const Tensor& beta, const OptTensor& initial_state, std::optional<double> scale,
                   bool qk_l2norm) {
  const Forward f = forward(x, q, k, v, g, beta, initial_state, scale, qk_l2norm);
  const Tensor dO = gather(grad_o, x, f.dtype, 1);
  Tensor d_state = at::zeros_like(f.final_state);
  if (grad_final_state) {
    d_state.copy_(grad_final_state->to(f.dtype).transpose(2, 3).index_select(0, x.order));
  }

  // Through the states, last chunk first: dS[c] is the gradient of the state *after* chunk c.
  const Tensor dqS = dO * (f.w * f.scale);
  const Tensor base = at::matmul(f.q.transpose(2, 3), dqS);
  Tensor dU = at::matmul(f.M.transpose(2, 3), dO);
  const Tensor W_t = f.W.transpose(2, 3);
  Tensor dS = at::empty_like(f.S);
  for (size_t step = x.offset.size() - 1; step-- > 0;) {
    const int64_t begin = x.offset[step], count = x.offset[step + 1] - begin;
    Tensor S = d_state.narrow(0, 0, count), u = dU.narrow(0, begin, count);
    dS.narrow(0, begin, count).copy_(S);
    u.add_(at::matmul(f.k_last.narrow(0, begin, count), S));
    S.mul_(f.w_last.narrow(0, begin, count));
    S.add_(base.narrow(0, begin, count));
    S.sub_(at::matmul(W_t.narrow(0, begin, count), u));
  }

  const Tensor dX = at::matmul(f.inverse.transpose(2, 3), dU);
  const Tensor U_t = f.U.transpose(2, 3), S_t = f.S.transpose(2, 3);
  const Tensor dA = at::matmul(dX, U_t).neg_().tril_(-1);
  const Tensor dM = at::matmul(dO, U_t).mul_(f.scale).tril_();
  const Tensor dqk = dM * f.D;
  const Tensor dkk = (dA * f.D).mul_(f.beta);
  // Gradients of S k and S q times S: what goes to k and q, and dotted with k and q what goes to
  // the factors of S k and S q, which so need not be formed.
  Tensor dk = at::matmul(dX, S_t).mul_(f.w);
  const Tensor k_share = (dk * f.k).sum(-1, true);  // of dX w with S k
  dk.mul_(f.beta.neg());
  Tensor dq = at::matmul(dqS, S_t);
  Tensor log_w = ((dq * f.q).sum(-1, true) - f.beta * k_share).squeeze(-1);
  const Tensor dS_t = dS.transpose(2, 3);
  const Tensor U_dS = at::matmul(f.U, dS_t);  // gradient of D_n k: D_n takes its share below

  dq.add_(at::matmul(dqk, f.k));
  dk.add_(at::matmul(dqk.transpose(2, 3), f.q));
  dk.add_(at::matmul(dkk + dkk.transpose(2, 3), f.k));
  dk.addcmul_(U_dS, f.D_last);
  const Tensor dv = dX * f.beta;
  const Tensor dbeta = (dX * f.v).sum(-1, true) - k_share + (dA * f.D).mul_(f.kk).sum(-1, true);

  // d log D and d log w; then g_l collects every (i, j) with j < l <= i.
  Tensor E = (dqk * f.qk).add_(dkk * f.kk);
  E.diagonal(0, 2, 3).zero_();
  Tensor last = (U_dS * f.k_last).sum(-1);
  last.select(2, x.C - 1).zero_();  // D_nn = 1
  E.select(2, x.C - 1).add_(last);
  log_w.select(2, x.C - 1).add_((dS * f.S).sum({2, 3}).mul_(f.w_last.flatten(1)));
  const Tensor net = E.sum(3) - E.sum(2) + log_w;
  const Tensor dg = net.flip(2).cumsum(2).flip(2).unsqueeze(-1);

  if (qk_l2norm) {
    dq = (dq - f.q * (f.q * dq).sum(-1, true)).mul_(f.rq);
    dk = (dk - f.k * (f.k * dk).sum(-1, true)).mul_(f.rk);
  }
  Tensor d_initial = at::empty_like(d_state);
  d_initial.index_copy_(0, x.order, d_state);
  return {scatter(dq, x, q, f.ratio), scatter(dk, x, k, f.ratio),
          scatter(dv, x, v, 1),       scatter(dg, x, g, 1),
          scatter(dbeta, x, beta, 1), d_initial.transpose(2, 3).contiguous()};
}

}  // namespace

std::tuple<Tensor, Tensor> chunk_forward_aten(const Tensor& q, const Tensor& k, const Tensor& v,
                                              const Tensor& g, const Tensor& beta,
                                              const OptTensor& initial_state,
                                              const OptTensor& cu_seqlens,
                                              std::optional<double> scale, bool qk_l2norm,
                                              int64_t chunk_size) {
  check_float64("chunk", q, k, v, g, beta, initial_state);
  check_shapes("chunk", q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, chunk_size);
  const Layout x = layout_of(q, cu_seqlens, chunk_size);
  const Forward f = forward(x, q, k, v, g, beta, initial_state, scale, qk_l2norm);
  Tensor o = at::matmul(f.q, f.S).mul_(f.w * f.scale);
  o.add_(at::matmul(f.M, f.U));
  return {scatter(o, x, v, 1).contiguous(), f.final_state.transpose(2, 3).contiguous()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> chunk_backward_aten(
    const Tensor& grad_o, const OptTensor& grad_final_state, const Tensor& q, const Tensor& k,
    const Tensor& v, const Tensor& g, const Tensor& beta, const OptTensor& initial_state,
    const OptTensor& cu_seqlens, std::optional<double> scale, bool qk_l2norm, int64_t chunk_size) {
  const char* op = "chunk_backward";
  if (q.scalar_type() == at::kDouble) check_float64(op, q, k, v, g, beta, initial_state);
  check_shapes(op, q, k, v, g, beta, initial_state, cu_seqlens, scale, qk_l2norm, chunk_size);
  const Layout x = layout_of(q, cu_seqlens, chunk_size);
  check_chunk_gradients(op, grad_o, grad_final_state, q, v, x.N);
  const int64_t H = q.size(2), HV = v.size(2), K = q.size(3), ratio = HV / H;
  auto as = [](const Tensor& t, const Tensor& like) {
    return t.to(like.scalar_type()).contiguous();
  };
  // A group of key heads at a time, so that what is alive fits about kAtOnce bytes: `head` counts a
  // key head's states (3 of K x V a chunk), C x C matrices (9) and rows of K and V (12).
  constexpr double kAtOnce = 2e9;
  const int64_t V = v.size(3), C = chunk_size;
  const double head = (q.scalar_type() == at::kDouble ? 8.0 : 4.0) * ratio * (x.chunks * C) *
                      (3.0 * K * V / C + 9 * C + 12 * (K + V));
  const int64_t group =
      std::clamp<int64_t>(static_cast<int64_t>(kAtOnce / std::max(head, 1.0)), 1, H);
  std::vector<std::vector<Tensor>> parts(6);
  for (int64_t h = 0; h < H; h += group) {
    const int64_t heads = std::min(group, H - h);
    auto key = [&](const Tensor& t) { return t.narrow(2, h, heads); };
    auto value = [&](const Tensor& t) { return t.narrow(2, h * ratio, heads * ratio); };
    auto state = [&](const OptTensor& t) {
      return t ? OptTensor(t->narrow(1, h * ratio, heads * ratio)) : OptTensor();
    };
    auto [dq, dk, dv, dg, dbeta, d_initial] =
        backward(x, value(grad_o), state(grad_final_state), key(q), key(k), value(v), value(g),
                 value(beta), state(initial_state), scale, qk_l2norm);
    parts[0].push_back(as(dq, q));
    parts[1].push_back(as(dk, k));
    parts[2].push_back(as(dv, v));
    parts[3].push_back(as(dg, g));
    parts[4].push_back(as(dbeta, beta));
    parts[5].push_back(d_initial);
  }
  auto whole = [&](int i) {
    return parts[i].size() == 1 ? parts[i][0] : at::cat(parts[i], i == 5 ? 1 : 2);
  };
  return {whole(0), whole(1), whole(2), whole(3), whole(4), whole(5)};
}

}  // namespace gdn
