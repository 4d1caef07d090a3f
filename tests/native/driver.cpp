// The CPU kernels without torch: odd sizes, odd strides, every dtype, padding, at every instruction
// set that this processor has. scripts/check_sanitizers.sh builds it under sanitizers.
//
//   driver CASES [SEED] [THREADS]
//
// Every tensor is a block of its own that ends with its last element, either on the heap (where
// AddressSanitizer watches both ends) or against a page that may not be touched (which also stops
// what instrumentation does not see: masked loads, builtins). A case is built from its seed once
// for each instruction set; what the kernels wrote must agree with the scalar level, and whatever
// is not an element of a written view must keep its bytes.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/cpu/table.h"
#include "random_case.h"

using namespace gdn;

namespace {

using Kernel = std::function<void(const cpu::Kernels&, const cpu::Parallel&)>;

// --- one builder for each kernel of the table

Kernel build_recurrent(Case& c) {
  auto a = std::make_shared<RecurrentArgs>();
  c.heads(a->H, a->HV, a->K, a->V);
  const int64_t most = c.rng.between(1, 6);
  a->seqs = c.sequences(most);
  if (c.rng.chance(0.4)) c.speculative(a->seqs, most + c.rng.upto(2));
  c.tokens(*a);
  a->gates = c.gates(a->seqs.B, a->seqs.T, a->HV, c.rng.chance(0.4));
  a->state = c.state(a->seqs.P, a->HV, a->V, a->K, c.dtype());
  a->fast = c.fast;
  return [a](const cpu::Kernels& k, const cpu::Parallel& p) { k.recurrent(*a, p); };
}

Kernel build_window(Case& c) {
  auto a = std::make_shared<RecurrentArgs>();
  c.heads(a->H, a->HV, a->K, a->V);
  const int64_t R = c.rng.chance(0.2) ? 64 : c.rng.between(1, 9);
  const bool base = c.rng.chance(0.5);
  a->seqs = c.sequences(base ? R < 6 ? R : 6 : 12);
  c.tokens(*a);
  a->gates = c.gates(a->seqs.B, a->seqs.T, a->HV, false);
  std::vector<int64_t> drafts;
  a->window = c.window(a->seqs.P, a->H, a->HV, a->K, a->V, R, !base, &drafts);
  if (base) a->state = c.state(a->seqs.P, a->HV, a->V, a->K, c.dtype());
  if (c.rng.chance(0.5)) c.accepted(a->seqs, drafts);
  // Later tokens read what earlier ones stored, and a sum near the middle between two 16-bit
  // numbers may be rounded to either.
  if (a->window.k_dtype != DType::f32 || a->window.u_dtype != DType::f32) c.tolerance = 1e-3;
  return [a](const cpu::Kernels& k, const cpu::Parallel& p) { k.recurrent_window(*a, p); };
}

Kernel build_flush(Case& c) {
  auto a = std::make_shared<RecurrentArgs>();
  c.heads(a->H, a->HV, a->K, a->V);
  Sequences s = c.sequences(1);
  a->seqs.N = a->seqs.B = s.N;
  a->seqs.P = s.P;
  a->seqs.state_indices = s.state_indices;
  c.fresh.assign(c.fresh.size(), 0);
  a->window = c.window(s.P, a->H, a->HV, a->K, a->V, c.rng.between(1, 12), false, nullptr);
  a->state = c.state(s.P, a->HV, a->V, a->K, c.dtype());
  return [a](const cpu::Kernels& k, const cpu::Parallel& p) { k.window_flush(*a, p); };
}

// Chunked prefill without a pool: every sequence is its own row.
void functional(Case& c, ChunkArgs& a) {
  a.seqs.state_indices = {};
  std::iota(c.rows.begin(), c.rows.end(), 0);
  a.seqs.P = a.seqs.N;
  if (c.rng.chance(0.5)) a.read = c.state(a.seqs.N, a.HV, a.V, a.K, DType::f32);
}
StatePool states(Case& c, const char* name, const ChunkArgs& a) {
  const View w = c.output(name, DType::f32, a.seqs.N, a.HV, a.V, a.K);
  return {w.ptr, DType::f32, a.seqs.N, w.sb, w.st, w.sh, 1};
}

Kernel build_chunk(Case& c) {
  auto a = std::make_shared<ChunkArgs>();
  c.heads(a->H, a->HV, a->K, a->V);
  a->C = c.rng.pick<int64_t>({16, 17, 32, 64, 128});
  a->seqs = c.sequences(c.rng.chance(0.3) ? 2 * a->C + 3 : a->C / 2 + 3);
  c.tokens(*a);
  a->gates = c.gates(a->seqs.B, a->seqs.T, a->HV, false);
  if (c.rng.chance(0.4)) {
    functional(c, *a);
    a->write = states(c, "final_state", *a);
  } else {
    const int64_t N = a->seqs.N, edges = c.rng.upto(3), first = a->seqs.P;
    const int64_t P = first + N * (1 + edges);
    a->seqs.P = P;
    a->read = a->write = c.state(P, a->HV, a->V, a->K, c.dtype());
    std::vector<int64_t> to, edge;
    for (int64_t n = 0; n < N; ++n) {
      to.push_back(c.rng.chance(0.1) ? -1 : first + n);
      for (int64_t e = 0; e < edges; ++e) {
        edge.push_back(c.rng.chance(0.2) ? -1 : first + N + n * edges + e);
      }
    }
    if (c.rng.chance(0.5)) a->write_indices = c.index(to);
    a->edges = edges;
    if (edges) a->edge_rows = c.index(edge, edges);
  }
  a->fast = c.fast;
  return [a](const cpu::Kernels& k, const cpu::Parallel& p) { k.chunk(*a, p); };
}

Kernel build_chunk_backward(Case& c) {
  auto a = std::make_shared<ChunkBackwardArgs>();
  ChunkArgs& x = a->forward;
  c.heads(x.H, x.HV, x.K, x.V);
  x.C = c.rng.pick<int64_t>({16, 17, 32, 64, 128});
  x.seqs = c.sequences(c.rng.chance(0.3) ? 2 * x.C + 3 : x.C / 2 + 3);
  c.tokens(x);
  x.gates = c.gates(x.seqs.B, x.seqs.T, x.HV, false);
  functional(c, x);
  const int64_t B = x.seqs.B, T = x.seqs.T;
  a->grad_out = c.view("grad_o", c.dtype(), B, T, x.HV, x.V, [&] { return c.rng.normal(); });
  if (c.rng.chance(0.5)) a->grad_state = c.state(x.seqs.N, x.HV, x.V, x.K, DType::f32);
  a->dq = c.output("dq", x.q.dtype, B, T, x.H, x.K);
  a->dk = c.output("dk", x.k.dtype, B, T, x.H, x.K);
  a->dv = c.output("dv", x.v.dtype, B, T, x.HV, x.V);
  a->dg = c.output("dg", x.gates.g.dtype, B, T, x.HV, 1);
  a->dbeta = c.output("dbeta", x.gates.beta.dtype, B, T, x.HV, 1);
  a->dstate = states(c, "dstate", x);
  return [a](const cpu::Kernels& k, const cpu::Parallel& p) {
    ChunkBackwardArgs call = *a;
    const auto bytes = static_cast<size_t>(k.chunk_backward(call, p)) * sizeof(float);
    // NaN, so that what is read before it is written shows.
    const std::unique_ptr<void, void (*)(void*)> work(
        std::aligned_alloc(64, (bytes + 127) / 64 * 64), std::free);
    std::memset(work.get(), 0xff, bytes);
    call.work = static_cast<float*>(work.get());
    k.chunk_backward(call, p);
  };
}

Kernel build_chunk_lowrank(Case& c) {
  auto a = std::make_shared<ChunkArgs>();
  c.heads(a->H, a->HV, a->K, a->V);
  a->C = c.rng.pick<int64_t>({16, 33, 64});
  a->seqs = c.sequences(c.rng.chance(0.3) ? 2 * a->C + 3 : a->C / 2 + 3);
  c.tokens(*a);
  a->gates = c.gates(a->seqs.B, a->seqs.T, a->HV, false);
  const int64_t R = c.rng.chance(0.2) ? 64 : c.rng.between(1, 20);
  a->window = c.window(a->seqs.P, a->H, a->HV, a->K, a->V, R, true, nullptr);
  a->fast = c.fast;
  return [a](const cpu::Kernels& k, const cpu::Parallel& p) { k.chunk_lowrank(*a, p); };
}

Kernel build_gating(Case& c) {
  auto a = std::make_shared<GatingArgs>();
  a->rows_b = c.rng.between(0, 3);
  a->rows_t = c.rng.between(0, 40);
  a->HV = c.rng.between(1, 50);
  const Gates g = c.gates(a->rows_b, a->rows_t, a->HV, true);
  a->a = g.g;
  a->b = g.beta;
  a->A_log = g.A_log;
  a->dt_bias = g.dt_bias;
  const View x = c.output("g", DType::f32, a->rows_b, a->rows_t, 1, a->HV);
  const View y = c.output("beta", DType::f32, a->rows_b, a->rows_t, 1, a->HV);
  a->g = static_cast<float*>(x.ptr);
  a->beta = static_cast<float*>(y.ptr);
  return [a](const cpu::Kernels& k, const cpu::Parallel& p) { k.gating(*a, p); };
}

// Everything of a convolution but its input and output.
void fill_conv(Case& c, ConvArgs& a, int64_t C, int64_t most, DType d, bool count) {
  a.C = C;
  a.W = c.plain ? 4 : c.rng.between(1, kMaxConvWidth);
  const bool leading = c.rng.chance(0.5), speculative = leading && count && c.rng.chance(0.5);
  const int64_t L = a.W - 1 + (speculative ? most - 1 + c.rng.upto(2) : c.rng.upto(3));
  a.state = c.conv_state(a.seqs.P, C, L, c.rng.chance(0.5) ? d : DType::f32, leading);
  a.weight =
      c.param("conv_weight", c.plain ? d : c.dtype(), {C, a.W}, [&] { return c.rng.normal() / 2; });
  if (c.rng.chance(0.5)) {
    a.bias = c.param("conv_bias", c.dtype(), {C}, [&] { return c.rng.normal() / 8; });
  }
  a.silu = c.rng.chance(0.7);
  if (!speculative) return;
  std::vector<int64_t> accepted;
  for (int64_t n = 0; n < a.seqs.N; ++n) {
    accepted.push_back(c.rng.chance(0.1) ? 0 : c.rng.between(1, L - (a.W - 1) + 1));
  }
  a.seqs.num_accepted = c.index(accepted);
}

// Half of the convolutions are what a model decodes: four taps, one token, one dtype (bf16 half the
// time), tensors as they are allocated. Updates like that have code of their own.
DType as_decoded(Case& c) {
  c.plain = c.rng.chance(0.5);
  return c.plain && c.rng.chance(0.5) ? DType::bf16 : c.dtype();
}

Kernel build_short_conv(Case& c) {
  auto a = std::make_shared<ConvArgs>();
  const DType d = as_decoded(c);
  const int64_t C = c.rng.chance(0.2) ? c.rng.between(200, 700)
                    : c.plain         ? 16 * c.rng.between(1, 20)
                                      : c.rng.between(1, 70);
  const int64_t most = c.plain ? 1 : c.rng.chance(0.3) ? 40 : 4;
  a->seqs = c.sequences(most);
  fill_conv(c, *a, C, most, d, true);
  a->x = c.view("x", d, a->seqs.B, a->seqs.T, 1, C, [&] { return c.rng.normal(); });
  a->y = c.output("y", d, a->seqs.B, a->seqs.T, 1, C);
  return [a](const cpu::Kernels& k, const cpu::Parallel& p) { k.short_conv(*a, p); };
}

Kernel build_conv_gating(Case& c) {
  auto a = std::make_shared<ConvGatingArgs>();
  c.heads(a->H, a->HV, a->K, a->V);
  const DType d = as_decoded(c);
  if (c.plain) {
    a->K = 16 * c.rng.between(1, 9);
    a->V = 16 * c.rng.between(1, 9);
  }
  const int64_t C = 2 * a->H * a->K + a->HV * a->V, most = c.plain ? 1 : 4;
  a->conv.seqs = c.sequences(most);
  const Sequences& s = a->conv.seqs;
  fill_conv(c, a->conv, C, most, d, true);
  a->conv.x = c.view("x", d, s.B, s.T, 1, C, [&] { return c.rng.normal(); });
  a->gates = c.gates(s.B, s.T, a->HV, true);
  a->l2norm = c.rng.chance(0.5);
  a->q = c.output("q", d, s.B, s.T, a->H, a->K);
  a->k = c.output("k", d, s.B, s.T, a->H, a->K);
  a->v = c.output("v", d, s.B, s.T, a->HV, a->V);
  a->g = static_cast<float*>(c.output("g", DType::f32, s.B, s.T, 1, a->HV).ptr);
  a->beta = static_cast<float*>(c.output("beta", DType::f32, s.B, s.T, 1, a->HV).ptr);
  c.tolerance = 1e-3;  // l2norm of a short row
  return [a](const cpu::Kernels& k, const cpu::Parallel& p) { k.conv_gating(*a, p); };
}

Kernel build_norm(Case& c) {
  auto a = std::make_shared<NormArgs>();
  a->V = c.dim();
  a->heads = c.rng.chance(0.5) ? 1 : c.rng.between(2, 5);
  const int64_t outer = c.rng.between(0, 90);
  a->rows = outer * a->heads;
  a->dtype = c.dtype();
  a->gate_dtype = c.dtype();
  auto rows = [&](const char* name, DType d, int64_t& s_row, int64_t& s_head) {
    const std::vector<int64_t> sizes{outer, a->heads, a->V}, s = c.strides(sizes, 1);
    s_row = s[0];
    s_head = s[1];
    return c.tensor(name, d, sizes, s, false, [&] { return c.rng.normal(); });
  };
  a->x = rows("x", a->dtype, a->s_x, a->s_x_head);
  a->gate = rows("gate", a->gate_dtype, a->s_gate, a->s_gate_head);
  a->y = c.output("y", a->dtype, 1, 1, a->rows, a->V).ptr;
  const DType w = c.rng.chance(0.5) ? a->dtype : c.dtype();
  a->weight = c.param("weight", w, {a->V}, [&] { return c.rng.normal(); });
  return [a](const cpu::Kernels& k, const cpu::Parallel& p) { k.gated_rms_norm(*a, p); };
}

Kernel build_linear(Case& c) {
  auto a = std::make_shared<LinearArgs>();
  a->dtype = c.rng.chance(0.7) ? DType::bf16 : DType::f16;
  a->M = c.rng.between(1, 40);
  a->N = c.rng.between(1, 90);
  a->K = c.rng.chance(0.5) ? 32 * c.rng.between(1, 20) : c.rng.between(1, 700);
  auto rows = [&](const char* name, int64_t n, int64_t& stride) {
    const std::vector<int64_t> sizes{n, a->K}, s = c.strides(sizes, 1);
    stride = s[0];
    return c.tensor(name, a->dtype, sizes, s, false, [&] { return c.rng.normal(); });
  };
  a->x = rows("x", a->M, a->s_x);
  a->w = rows("weight", a->N, a->s_w);
  a->y = c.output("y", a->dtype, 1, 1, a->M, a->N).ptr;
  return [a](const cpu::Kernels& k, const cpu::Parallel& p) { k.linear(*a, p); };
}

Kernel build_decode_of(Case& c, bool window) {
  auto a = std::make_shared<DecodeArgs>();
  RecurrentArgs& r = a->recurrent;
  ConvGatingArgs& f = a->front;
  c.heads(r.H, r.HV, r.K, r.V);
  const int64_t R = c.rng.between(1, 9);
  const bool base = !window || c.rng.chance(0.5);
  const int64_t most = window && base ? R < 4 ? R : 4 : 4;
  const int64_t C = 2 * r.H * r.K + r.HV * r.V, D = C + r.HV * r.V + 2 * r.HV;
  const DType d = c.dtype();
  r.seqs = c.sequences(most);
  f.conv.seqs = r.seqs;
  fill_conv(c, f.conv, C, most, d, false);
  if (window) r.window = c.window(r.seqs.P, r.H, r.HV, r.K, r.V, R, !base, nullptr);
  if (base) r.state = c.state(r.seqs.P, r.HV, r.V, r.K, c.dtype());
  f.H = r.H, f.HV = r.HV, f.K = r.K, f.V = r.V;
  f.l2norm = r.l2norm = c.rng.chance(0.7);
  r.scale = c.rng.uniform();
  const Sequences& s = r.seqs;
  f.conv.x = c.view("projected", d, s.B, s.T, 1, D, [&] { return c.rng.normal(); });
  auto column = [&](int64_t first, int64_t head_dim) {
    View v = f.conv.x;
    v.ptr = static_cast<char*>(v.ptr) + first * v.sd * size_of(d);
    v.sh = head_dim * v.sd;
    return v;
  };
  if (s.B * s.T > 0) {
    a->z = column(C, r.V);
    f.gates.beta = column(C + r.HV * r.V, 1);
    f.gates.g = column(C + r.HV * r.V + r.HV, 1);
  }
  f.gates.raw = true;
  f.gates.A_log = c.param("A_log", c.dtype(), {r.HV}, [&] { return c.rng.uniform(); });
  f.gates.dt_bias = c.param("dt_bias", c.dtype(), {r.HV}, [&] { return c.rng.normal(); });
  r.gates = f.gates;
  r.out = c.output("y", d, s.B, s.T, r.HV, r.V);
  a->norm_weight = c.param("norm_weight", c.dtype(), {r.V}, [&] { return c.rng.normal(); });
  c.tolerance = 2e-2;  // the norm divides by what may be small
  return [a, window](const cpu::Kernels& k, const cpu::Parallel& p) {
    window ? k.decode_window(*a, p) : k.decode(*a, p);
  };
}
Kernel build_decode(Case& c) { return build_decode_of(c, false); }
Kernel build_decode_window(Case& c) { return build_decode_of(c, true); }

Kernel build_sweep(Case& c) {
  const int64_t n = c.rng.between(1, 3000);
  float* x = static_cast<float*>(
      c.tensor("x", DType::f32, {n}, {1}, true, [&] { return c.rng.normal(); }));
  return [=](const cpu::Kernels& k, const cpu::Parallel& p) {
    k.sweep(reinterpret_cast<char*>(x), n * 4, 0, p);
  };
}

// Those with products that `fast` rounds.
const std::set<std::string> kFast = {"recurrent", "chunk", "chunk_lowrank"};

const std::map<std::string, Kernel (*)(Case&)> kBuilders = {
    {"recurrent", build_recurrent},
    {"recurrent_window", build_window},
    {"window_flush", build_flush},
    {"chunk", build_chunk},
    {"chunk_lowrank", build_chunk_lowrank},
    {"gating", build_gating},
    {"short_conv", build_short_conv},
    {"conv_gating", build_conv_gating},
    {"gated_rms_norm", build_norm},
    {"decode", build_decode},
    {"decode_window", build_decode_window},
    {"sweep", build_sweep},
    {"linear", build_linear},
    {"chunk_backward", build_chunk_backward},
};

// Threads of this call only, so that a thread sanitizer sees every one begin and end.
void run_threads(int64_t n, void (*body)(void*, int64_t, int64_t), void* data);
int g_threads = 1;
void run_threads(int64_t n, void (*body)(void*, int64_t, int64_t), void* data) {
  const int64_t count = n < g_threads ? n : g_threads, each = (n + count - 1) / count;
  std::vector<std::thread> all;
  for (int64_t begin = each; begin < n; begin += each) {
    all.emplace_back(body, data, begin, begin + each < n ? begin + each : n);
  }
  body(data, 0, each < n ? each : n);
  for (std::thread& t : all) t.join();
}

// 0 if all is well.
int compare(const std::string& what, const Case& c, const Case* truth) {
  for (size_t i = 0; i < c.watched.size(); ++i) {
    const Watched& w = c.watched[i];
    const char* data = w.block->data();
    std::vector<bool> element(w.before.size() / (w.integers ? 4 : size_of(w.dtype)), false);
    for (int64_t e : w.elements) element[static_cast<size_t>(e)] = true;
    const int64_t item = w.integers ? 4 : size_of(w.dtype);
    for (size_t e = 0; e < element.size(); ++e) {
      const size_t at = e * static_cast<size_t>(item);
      if (!element[e]) {
        if (std::memcmp(data + at, w.before.data() + at, static_cast<size_t>(item)) == 0) continue;
        std::printf("%s: %s: a gap at element %zu was written\n", what.c_str(), w.name.c_str(), e);
        return 1;
      }
      if (!truth) continue;
      const char* other = truth->watched[i].block->data();
      if (w.integers) {
        if (std::memcmp(data + at, other + at, 4) == 0) continue;
        std::printf("%s: %s: other counts\n", what.c_str(), w.name.c_str());
        return 1;
      }
      const int64_t k = static_cast<int64_t>(e);
      const float got = read(data, w.dtype, k), want = read(other, w.dtype, k);
      const double unit = w.dtype == DType::f32 ? 0 : w.dtype == DType::bf16 ? 0x1p-6 : 0x1p-9;
      const double limit = (c.tolerance + unit) * (1 + std::fabs(want));
      if ((got != got && want != want) || got == want || std::fabs(got - want) <= limit) continue;
      std::printf("%s: %s: element %zu: %g, at the scalar level %g\n", what.c_str(), w.name.c_str(),
                  e, got, want);
      return 1;
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t cases = argc > 1 ? std::atoll(argv[1]) : 100;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  g_threads = argc > 3 ? std::atoi(argv[3]) : 1;
  cpu::Parallel parallel;
  parallel.threads = g_threads;
  parallel.run = run_threads;
  const cpu::Kernels& scalar = *cpu::compiled().back();
  int failed = 0;
  std::map<std::string, int64_t> runs;
  for (uint64_t seed = first; seed < first + static_cast<uint64_t>(cases); ++seed) {
    for (const auto& [name, build] : kBuilders) {
      std::unique_ptr<Case> truth;
      for (auto level = cpu::compiled().rbegin(); level != cpu::compiled().rend(); ++level) {
        if (!(*level)->supported()) continue;
        for (const bool fast : {false, true}) {
          if (fast && (!kFast.count(name) || *level == &scalar)) continue;
          auto c = std::make_unique<Case>(seed);
          c->fast = fast;
          const Kernel kernel = build(*c);
          c->snapshot();
          if (fast) c->tolerance = 0.1;
          kernel(**level, parallel);
          const std::string what = name + ", " + (*level)->name + (fast ? ", fast" : "") +
                                   ", seed " + std::to_string(seed);
          failed += compare(what, *c, truth.get());
          ++runs[(*level)->name];
          if (!truth) truth = std::move(c);
        }
      }
    }
  }
  for (const auto& [level, n] : runs) {
    std::printf("%s: %lld calls\n", level.c_str(), static_cast<long long>(n));
  }
  std::printf("%s: %lld cases of %zu kernels, %d threads, %d failed\n", failed ? "FAILED" : "ok",
              static_cast<long long>(cases), kBuilders.size(), g_threads, failed);
  return failed != 0;
}
