// Torch glue of the CPU backend: check, allocate, call the kernel of the active instruction set.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "../checks.h"
#include "table.h"

namespace gdn::cpu {
namespace {

using at::Tensor;

const Parallel& threads() {
  thread_local Parallel p;
  p.threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  p.run = [](int64_t n, void (*body)(void*, int64_t, int64_t), void* data) {
    at::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) { body(data, begin, end); });
  };
  return p;
}

Tensor run_recurrent(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                     const GateTensors& gates, Tensor& state, const SeqTensors& seq,
                     std::optional<double> scale, bool qk_l2norm) {
  RecurrentArgs a = recurrent_args(op, q, k, v, gates, &state, nullptr, seq, scale, qk_l2norm);
  check_values(op, a.seqs);
  Tensor out = new_output(v, v.sizes());
  a.out = view_of(out, a.V);
  kernels().recurrent(a, threads());
  return out;
}

Tensor recurrent(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                 const Tensor& beta, Tensor& state, const OptTensor& state_indices,
                 const OptTensor& has_initial_state, const OptTensor& cu_seqlens,
                 const OptTensor& num_accepted, std::optional<double> scale, bool qk_l2norm) {
  return run_recurrent("recurrent", q, k, v, {g, beta}, state,
                       {state_indices, has_initial_state, cu_seqlens, num_accepted}, scale,
                       qk_l2norm);
}

Tensor recurrent_gated(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& a,
                       const Tensor& b, const Tensor& A_log, const Tensor& dt_bias, Tensor& state,
                       const OptTensor& state_indices, const OptTensor& has_initial_state,
                       const OptTensor& cu_seqlens, const OptTensor& num_accepted,
                       std::optional<double> scale, bool qk_l2norm) {
  return run_recurrent("recurrent_gated", q, k, v, {a, b, &A_log, &dt_bias}, state,
                       {state_indices, has_initial_state, cu_seqlens, num_accepted}, scale,
                       qk_l2norm);
}

void set_precision_op(const std::string& mode) {
  TORCH_CHECK(mode == "exact" || mode == "fast" || mode == "auto",
              "set_precision: expected 'exact', 'fast' or 'auto', got '", mode, "'");
  set_precision(mode == "exact"  ? Precision::exact
                : mode == "fast" ? Precision::fast
                                 : Precision::automatic);
}
std::string get_precision_op() {
  const Precision p = precision();
  return p == Precision::exact ? "exact" : p == Precision::fast ? "fast" : "auto";
}
std::string cpu_isa() { return kernels().name; }
std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const Kernels* k : compiled()) {
    if (k->supported()) names.emplace_back(k->name);
  }
  return names;
}

}  // namespace

TORCH_LIBRARY_IMPL(gdn, CPU, m) {
  m.impl("recurrent", &recurrent);
  m.impl("recurrent_gated", &recurrent_gated);
}

// These take no tensor, so no key selects them.
TORCH_LIBRARY_IMPL(gdn, CompositeExplicitAutograd, m) {
  m.impl("set_precision", &set_precision_op);
  m.impl("get_precision", &get_precision_op);
  m.impl("cpu_isa", &cpu_isa);
  m.impl("cpu_isas", &cpu_isas);
}

}  // namespace gdn::cpu
