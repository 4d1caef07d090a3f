// Call forms of serving engines, made of the ops of this library. Blocks below `first_row` are
// padding (1: block 0 of the pool is the engine's null block), index tensors may be longer than the
// batch, and other tensors come in the engine's shapes, so that a call is a few views, a shift of
// the indices and one op. Views made in Python would cost more than the whole op does; on the CPU
// they are made without the dispatcher too, for a tenth of what they cost through it.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/as_strided_native.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "checks.h"
#include "typed_op.h"

namespace gdn {
namespace {

using at::Tensor;
using c10::SymInt;

using RecurrentSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                  const Tensor&, Tensor&, const OptTensor&, const OptTensor&,
                                  const OptTensor&, const OptTensor&, std::optional<double>, bool);
using GatedSignature = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                              const Tensor&, const Tensor&, const Tensor&, Tensor&,
                              const OptTensor&, const OptTensor&, const OptTensor&,
                              const OptTensor&, std::optional<double>, bool);
using ConvSignature = Tensor(const Tensor&, const Tensor&, const OptTensor&, Tensor&,
                             const OptTensor&, const OptTensor&, const OptTensor&, const OptTensor&,
                             const std::string&, bool);

// The two ways to make views, to shift rows and to call an op. This one is made of ops, for every
// backend. Explicit, so that tracing keeps the call whole: of its parts, taken below autograd, none
// says that the view which is written is one of the pool, and compiled code would copy the pool.
struct Composed {
  static Tensor slice(const Tensor& t, int64_t dim, const SymInt& start, const SymInt& end) {
    return t.slice_symint(dim, start, end);
  }
  static Tensor insert(const Tensor& t, int64_t dim) { return t.unsqueeze(dim); }
  static Tensor first(const Tensor& t, int64_t dim) { return t.select(dim, 0); }
  static Tensor swap(const Tensor& t, int64_t a, int64_t b) { return t.transpose(a, b); }
  static Tensor split(const Tensor& t, int64_t dim, const SymInt& n, const SymInt& size) {
    return t.unflatten_symint(dim, {n, size});
  }
  static Tensor rows(const char*, const Tensor& indices, const SymInt& N, int64_t first_row,
                     const SymInt&) {
    return (indices.sym_size(0) > N ? indices.slice_symint(0, 0, N) : indices).sub(first_row);
  }
  static void write(Tensor& out, const Tensor& o) { out.copy_(o); }
  template <class Signature, class... Args>
  static Tensor call(const c10::TypedOperatorHandle<Signature>& op, Args&&... args) {
    return op.call(std::forward<Args>(args)...);
  }
};

// The other runs below autograd, on CPU tensors: views are made by hand and the CPU's kernel is
// called. Autograd knows nothing of such views, but nothing that is written here has a gradient
// (csrc/in_place.cpp, which has also counted the writes by then).
struct Direct {
  struct Shape {
    at::DimVector sizes, strides;
    int64_t offset;
    explicit Shape(const Tensor& t)
        : sizes(t.sizes()), strides(t.strides()), offset(t.storage_offset()) {}
    Tensor of(const Tensor& t) const {
      return at::native::as_strided_tensorimpl(t, sizes, strides, offset);
    }
  };
  static Tensor slice(const Tensor& t, int64_t dim, const SymInt& start, const SymInt& end) {
    Shape s(t);
    const int64_t size = s.sizes[dim], last = std::min(end.expect_int(), size);
    s.offset += start.expect_int() * s.strides[dim];
    s.sizes[dim] = last - start.expect_int();
    return s.of(t);
  }
  static Tensor insert(const Tensor& t, int64_t dim) {
    Shape s(t);
    s.strides.insert(s.strides.begin() + dim, dim < t.dim() ? s.sizes[dim] * s.strides[dim] : 1);
    s.sizes.insert(s.sizes.begin() + dim, 1);
    return s.of(t);
  }
  static Tensor first(const Tensor& t, int64_t dim) {
    Shape s(t);
    TORCH_CHECK_INDEX(s.sizes[dim] > 0, "expected an element in dimension ", dim, ", got shape ",
                      t.sizes());
    s.sizes.erase(s.sizes.begin() + dim);
    s.strides.erase(s.strides.begin() + dim);
    return s.of(t);
  }
  static Tensor swap(const Tensor& t, int64_t a, int64_t b) {
    Shape s(t);
    std::swap(s.sizes[a], s.sizes[b]);
    std::swap(s.strides[a], s.strides[b]);
    return s.of(t);
  }
  static Tensor split(const Tensor& t, int64_t dim, const SymInt& n, const SymInt& size) {
    Shape s(t);
    TORCH_CHECK(n * size == s.sizes[dim], "expected ", n, " x ", size, " elements in dimension ",
                dim, ", got shape ", t.sizes());
    s.sizes[dim] = n.expect_int();
    s.sizes.insert(s.sizes.begin() + dim + 1, size.expect_int());
    s.strides.insert(s.strides.begin() + dim, size.expect_int() * s.strides[dim]);
    return s.of(t);
  }
  static Tensor rows(const char* name, const Tensor& indices, const SymInt& N, int64_t first_row,
                     const SymInt& blocks) {
    if (!indices.is_cpu()) {
      return Composed::rows(name, indices, N, first_row, blocks);  // the op will refuse the device
    }
    at::DimVector sizes(indices.sizes());
    sizes[0] = std::min(sizes[0], N.expect_int());
    Tensor shifted = at::detail::empty_cpu(sizes, indices.scalar_type());
    const int64_t end = blocks.expect_int();
    return indices.scalar_type() == at::kInt
               ? shift<int32_t>(name, indices, first_row, end, shifted)
               : shift<int64_t>(name, indices, first_row, end, shifted);
  }
  // Rows outside the pool are refused here: the op would name the shifted number, not the caller's.
  template <class T>
  static Tensor shift(const char* name, const Tensor& indices, int64_t first_row, int64_t blocks,
                      Tensor& shifted) {
    const T* from = indices.const_data_ptr<T>();
    T* to = shifted.mutable_data_ptr<T>();
    const int64_t S = shifted.dim() == 2 ? shifted.size(1) : 1;
    const int64_t s_column = shifted.dim() == 2 ? indices.stride(1) : 0;
    for (int64_t n = 0; n < shifted.size(0); ++n) {
      for (int64_t j = 0; j < S; ++j) {
        const T row = from[n * indices.stride(0) + j * s_column];
        TORCH_CHECK(row < blocks, name, ": state_indices: expected blocks below ", blocks, ", got ",
                    row, " for sequence ", n);
        *to++ = row < first_row ? T(-1) : static_cast<T>(row - first_row);
      }
    }
    return shifted;
  }
  static void write(Tensor& out, const Tensor& o) {
    if (out.scalar_type() != o.scalar_type() || !out.is_contiguous()) {
      out.copy_(o);
    } else if (o.numel() > 0) {
      std::memcpy(out.mutable_data_ptr(), o.const_data_ptr(), o.nbytes());
    }
  }
  template <class Signature, class... Args>
  static Tensor call(const c10::TypedOperatorHandle<Signature>& op, Args&&... args) {
    return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), std::forward<Args>(args)...);
  }
};

// The pool from `first_row` on, and the rows of it that the sequences own: negative where padding.
template <class Form>
struct Paged {
  Tensor pool, rows;

  // `argument`: what the op calls its pool.
  Paged(const char* name, const char* argument, const Tensor& paged, const Tensor& indices,
        const SymInt& N, int64_t first_row) {
    TORCH_CHECK(first_row >= 0, name, ": first_row: expected at least 0, got ", first_row);
    TORCH_CHECK(paged.dim() > 0 && paged.sym_size(0) >= first_row, name, ": ", argument,
                ": expected a pool with a null block, got ", paged.sym_sizes());
    TORCH_CHECK(indices.dim() == 1 || indices.dim() == 2, name,
                ": state_indices: expected shape [N] or [N, S], got ", indices.sym_sizes());
    const auto dtype = indices.scalar_type();
    TORCH_CHECK(dtype == at::kInt || dtype == at::kLong, name,
                ": state_indices: expected int32 or int64, got ", dtype);
    pool = first_row == 0 ? paged : Form::slice(paged, 0, first_row, paged.sym_size(0));
    rows = first_row == 0 && indices.sym_size(0) <= N
               ? indices
               : Form::rows(name, indices, N, first_row, paged.sym_size(0));
  }
};

SymInt sequences(const char* name, const Tensor& batched, const OptTensor& cu_seqlens) {
  if (!cu_seqlens) return batched.sym_size(0);
  TORCH_CHECK(cu_seqlens->dim() == 1 && cu_seqlens->sym_size(0) > 0, name,
              ": cu_seqlens: expected shape [N+1], got ", cu_seqlens->sym_sizes());
  return cu_seqlens->sym_size(0) - 1;
}

// Gates of one row a token, [tokens, HV], as [B, T, HV].
template <class Form>
Tensor per_token(const Tensor& gate, const Tensor& v) {
  if (gate.dim() != 2) return gate;
  if (v.sym_size(0) == 1) return Form::insert(gate, 0);
  return Form::split(gate, 0, v.sym_size(0), v.sym_size(1));
}

template <class Form>
Tensor paged_recurrent(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                       const Tensor& beta, Tensor& state, const Tensor& state_indices,
                       const OptTensor& cu_seqlens, const OptTensor& num_accepted,
                       std::optional<double> scale, bool qk_l2norm) {
  static auto recurrent = typed_op<RecurrentSignature>("gdn::recurrent");
  constexpr auto name = "paged_recurrent";
  TORCH_CHECK(q.dim() == 4, name, ": q: expected [B, T, H, K], got ", q.sym_sizes());
  Paged<Form> p(name, "state", state, state_indices, sequences(name, q, cu_seqlens), 1);
  return Form::call(recurrent, q, k, v, g, beta, p.pool, p.rows, std::nullopt, cu_seqlens,
                    num_accepted, scale, qk_l2norm);
}

// q, k, v [B, T, heads, size], or [T, heads, size] and the result without B, too; a, b one row a
// token or [B, T, HV]. `kv_rows`: the pool is [blocks, HV, K, V].
template <class Form>
Tensor paged_recurrent_gated(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a,
                             const Tensor& b, const Tensor& A_log, const Tensor& dt_bias,
                             Tensor& state, const Tensor& state_indices,
                             const OptTensor& cu_seqlens, const OptTensor& num_accepted,
                             std::optional<double> scale, bool qk_l2norm, int64_t first_row,
                             bool kv_rows) {
  static auto recurrent = typed_op<GatedSignature>("gdn::recurrent_gated");
  constexpr auto name = "paged_recurrent_gated";
  TORCH_CHECK(v.dim() == 4 || v.dim() == 3, name, ": v: expected [B, T, HV, V] or [T, HV, V], got ",
              v.sym_sizes());
  TORCH_CHECK(q.dim() == v.dim() && k.dim() == v.dim(), name, ": q, k: expected ", v.dim(),
              " dimensions, as v has, got ", q.sym_sizes(), " and ", k.sym_sizes());
  TORCH_CHECK(state.dim() == 4, name, ": state: expected a pool of four dimensions, got ",
              state.sym_sizes());
  const bool one_batch = v.dim() == 3;
  const auto batched = [&](const Tensor& t) { return one_batch ? Form::insert(t, 0) : t; };
  const Tensor q4 = batched(q), v4 = batched(v);
  Paged<Form> p(name, "state", state, state_indices, sequences(name, q4, cu_seqlens), first_row);
  if (kv_rows) p.pool = Form::swap(p.pool, 2, 3);
  const Tensor o = Form::call(recurrent, q4, batched(k), v4, per_token<Form>(a, v4),
                              per_token<Form>(b, v4), A_log, dt_bias, p.pool, p.rows, std::nullopt,
                              cu_seqlens, num_accepted, scale, qk_l2norm);
  return one_batch ? Form::first(o, 0) : o;
}

template <class Form>
void paged_decode_packed(const Tensor& mixed_qkv, const Tensor& a, const Tensor& b,
                         const Tensor& A_log, const Tensor& dt_bias, Tensor& state,
                         const Tensor& state_indices, Tensor& out, std::optional<double> scale,
                         bool qk_l2norm, int64_t first_row) {
  static auto recurrent = typed_op<GatedSignature>("gdn::recurrent_gated");
  constexpr auto name = "paged_decode_packed";
  TORCH_CHECK(
      mixed_qkv.dim() == 2 && a.dim() == 2 && b.dim() == 2 && state.dim() == 4, name,
      ": mixed_qkv, a, b, state: expected [B, C], [B, HV], [B, HV], [blocks, HV, V, K], got ",
      mixed_qkv.sym_sizes(), ", ", a.sym_sizes(), ", ", b.sym_sizes(), ", ", state.sym_sizes());
  const auto B = mixed_qkv.sym_size(0), C = mixed_qkv.sym_size(1), HV = state.sym_size(1),
             V = state.sym_size(2), K = state.sym_size(3);
  TORCH_CHECK(K > 0, name, ": state: expected [blocks, HV, V, K] with K >= 1, got ",
              state.sym_sizes());
  const auto H = (C - HV * V) / (K * 2);
  TORCH_CHECK(H > 0 && H * K * 2 + HV * V == C, name,
              ": mixed_qkv: expected 2*H*K + HV*V columns with HV, V, K = ", HV, ", ", V, ", ", K,
              ", got ", C);
  // `out` is checked before the op writes the pool. A ValueError, as compat's check_out() raises.
  TORCH_CHECK_VALUE(out.dim() == 4 && out.sym_size(0) == B && out.sym_size(1) == 1 &&
                        out.sym_size(2) == HV && out.sym_size(3) == V &&
                        out.device() == mixed_qkv.device(),
                    name, ": out: expected shape [", B, ", 1, ", HV, ", ", V, "] on ",
                    mixed_qkv.device(), ", got ", out.sym_sizes(), " on ", out.device());
  TORCH_CHECK(at::isFloatingType(out.scalar_type()), name, ": out: expected a floating dtype, got ",
              out.scalar_type());
  TORCH_CHECK(at::has_internal_overlap(out) != at::MemOverlap::Yes, name,
              ": out: is written, so no two elements may share memory, got strides ",
              out.sym_strides());
  TORCH_CHECK(!out.requires_grad() || !at::GradMode::is_enabled(), name,
              ": out: is written, so it may not require grad");
  // [B, heads * size] -> [B, 1, heads, size]
  const auto heads = [&](const SymInt& start, const SymInt& n, const SymInt& size) {
    return Form::insert(Form::split(Form::slice(mixed_qkv, 1, start, start + n * size), 1, n, size),
                        1);
  };
  Paged<Form> p(name, "state", state, state_indices, B, first_row);
  const Tensor o =
      Form::call(recurrent, heads(0, H, K), heads(H * K, H, K), heads(H * K * 2, HV, V),
                 Form::insert(a, 1), Form::insert(b, 1), A_log, dt_bias, p.pool, p.rows,
                 std::nullopt, std::nullopt, std::nullopt, scale, qk_l2norm);
  Form::write(out, o);
}

// x [B, C] (one token a sequence), [B, T, C] or [tokens, C] with cu_seqlens; `channels_first`: the
// last two turned, except of [B, C]. `channels_last`: the pool is [blocks, L, C].
template <class Form>
Tensor paged_short_conv(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                        Tensor& conv_state, const Tensor& state_indices,
                        const OptTensor& has_initial_state, const OptTensor& cu_seqlens,
                        const OptTensor& num_accepted, const std::string& activation,
                        bool channels_first, bool channels_last, int64_t first_row) {
  static auto short_conv = typed_op<ConvSignature>("gdn::short_conv");
  constexpr auto name = "paged_short_conv";
  TORCH_CHECK(x.dim() == 3 || x.dim() == 2, name, ": x: expected two or three dimensions, got ",
              x.sym_sizes());
  TORCH_CHECK(x.dim() == 2 || !cu_seqlens, name,
              ": x: expected two dimensions with cu_seqlens, got ", x.sym_sizes());
  TORCH_CHECK(conv_state.dim() == 3, name,
              ": conv_state: expected a pool of three dimensions, got ", conv_state.sym_sizes());
  const bool one_token = x.dim() == 2 && !cu_seqlens, packed = x.dim() == 2 && !one_token;
  const bool turned = channels_first && !one_token;
  const int64_t last = x.dim() - 1;
  const Tensor tokens = turned ? Form::swap(x, last - 1, last) : x;  // [.., T, C]
  const Tensor wide = one_token ? Form::insert(tokens, 1)
                      : packed  ? Form::insert(tokens, 0)
                                : tokens;
  Paged<Form> p(name, "conv_state", conv_state,
                state_indices.dim() == 2 ? Form::first(state_indices, 1) : state_indices,
                sequences(name, wide, cu_seqlens), first_row);
  if (channels_last) p.pool = Form::swap(p.pool, 1, 2);
  const Tensor y = Form::call(short_conv, wide, weight, bias, p.pool, p.rows, has_initial_state,
                              cu_seqlens, num_accepted, activation, true);
  const Tensor narrow = one_token ? Form::first(y, 1) : packed ? Form::first(y, 0) : y;
  return turned ? Form::swap(narrow, last - 1, last) : narrow;
}

template <class Form>
void implement(torch::Library& m) {
  m.impl("paged_recurrent", &paged_recurrent<Form>);
  m.impl("paged_recurrent_gated", &paged_recurrent_gated<Form>);
  m.impl("paged_decode_packed", &paged_decode_packed<Form>);
  m.impl("paged_short_conv", &paged_short_conv<Form>);
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CompositeExplicitAutograd, m) { implement<Composed>(m); }
TORCH_LIBRARY_IMPL(gdn, CPU, m) { implement<Direct>(m); }

}  // namespace gdn
