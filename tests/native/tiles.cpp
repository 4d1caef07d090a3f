// Chunked prefill at the level `amx` with emulated tiles, against the recurrence in double, without
// torch and on any processor with AVX-512. tests/test_tiles.py builds it, under sanitizers where
// the compiler has them. Prints what is wrong, and `ok` last if nothing is.
#define GDN_EMULATED_BF16 1
#include "emulated_tiles.h"
//
#include <cmath>
#include <limits>
#include <vector>

#include "../../csrc/cpu/kernels/prelude.h"

#define GDN_SIMD_AVX512 1
#define GDN_SIMD_AVX512BF16 1
#define GDN_SIMD_AMX 1

namespace gdn::cpu {
float* thread_scratch(int64_t floats) {
  // Of the size that was asked for, and NaN: what is read before it is written shows.
  static std::vector<float> block;
  const int64_t spare = 16;
  block.assign(static_cast<size_t>(floats + spare), std::numeric_limits<float>::quiet_NaN());
  const auto at = reinterpret_cast<uintptr_t>(block.data());
  return reinterpret_cast<float*>((at + 63) / 64 * 64);
}
}  // namespace gdn::cpu

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif
namespace gdn::cpu::amx {
#include "../../csrc/cpu/kernels/vec.h"
//
#include "../../csrc/cpu/kernels/rows.h"
//
#include "../../csrc/cpu/kernels/recurrent.h"
//
#include "../../csrc/cpu/kernels/tiles.h"
//
#include "../../csrc/cpu/kernels/chunk_products.h"
//
#include "../../csrc/cpu/kernels/strips.h"
//
#include "../../csrc/cpu/kernels/chunk.h"
}  // namespace gdn::cpu::amx
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

using namespace gdn;

namespace {

uint64_t state = 1;
double uniform() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<double>(state >> 40) / (1 << 24);
}
double normal() {
  double sum = -6;
  for (int i = 0; i < 12; ++i) sum += uniform();
  return sum;
}

struct Shape {
  int64_t T, C, K, V;
  bool l2norm;
  int64_t cut, bad;  // token whose decay is zero, token of NaN; -1: none
};

template <class T>
struct Call {
  Shape s;
  std::vector<T> q, k, v, o;
  std::vector<float> g, beta, S, final;

  explicit Call(Shape shape) : s(shape) {
    auto rows = [](int64_t n, int64_t width, bool unit) {
      std::vector<T> x(static_cast<size_t>(n * width));
      for (int64_t i = 0; i < n; ++i) {
        std::vector<double> row(static_cast<size_t>(width));
        double square = 0;
        for (double& e : row) {
          e = normal();
          square += e * e;
        }
        for (int64_t c = 0; c < width; ++c) {
          const double e = row[static_cast<size_t>(c)] / (unit ? std::sqrt(square) : 1);
          const float f = static_cast<float>(e);
          if constexpr (std::is_same_v<T, bf16_t>)
            x[static_cast<size_t>(i * width + c)] = to_bf16(f);
          if constexpr (std::is_same_v<T, f16_t>) x[static_cast<size_t>(i * width + c)] = to_f16(f);
        }
      }
      return x;
    };
    q = rows(s.T, s.K, true);
    k = rows(s.T, s.K, true);
    v = rows(s.T, s.V, false);
    o.resize(v.size());
    for (int64_t t = 0; t < s.T; ++t) {
      g.push_back(t == s.cut ? -INFINITY : static_cast<float>(-uniform()));
      beta.push_back(static_cast<float>(uniform()));
    }
    for (int64_t i = 0; i < s.V * s.K; ++i) S.push_back(static_cast<float>(normal()));
    final.resize(S.size());
  }

  void run(bool fast) {
    ChunkArgs x;
    x.H = x.HV = 1;
    x.K = s.K;
    x.V = s.V;
    x.C = s.C;
    x.scale = 0.3f;
    x.l2norm = s.l2norm;
    x.fast = fast;
    x.seqs.N = x.seqs.B = x.seqs.P = 1;
    x.seqs.T = s.T;
    const DType d = cpu::amx::kDTypeOf<T>;
    auto view = [&](void* p, DType dtype, int64_t width) {
      return View{p, dtype, s.T * width, width, width, 1};
    };
    x.q = view(q.data(), d, s.K);
    x.k = view(k.data(), d, s.K);
    x.v = view(v.data(), d, s.V);
    x.out = view(o.data(), d, s.V);
    x.gates.g = view(g.data(), DType::f32, 1);
    x.gates.beta = view(beta.data(), DType::f32, 1);
    x.read = {S.data(), DType::f32, 1, s.V * s.K, s.V * s.K, s.K, 1};
    x.write = x.read;
    x.write.ptr = final.data();
    cpu::Parallel alone;
    alone.threads = 1;
    cpu::amx::chunk(x, alone);
  }

  // The largest error over its limit: beside the norms of what is summed, `share / sqrt(K)` of them
  // (gdn_ops/reference.py: chunk_magnitudes), and the rounding of the output.
  double worst(double share) const {
    const double stored = std::is_same_v<T, bf16_t> ? 0x1p-8 : 0x1p-11;
    const size_t K = static_cast<size_t>(s.K), V = static_cast<size_t>(s.V);
    std::vector<double> R(S.begin(), S.end()), energy(V, 0.0);
    for (size_t c = 0; c < V; ++c) {
      for (size_t p = 0; p < K; ++p) energy[c] += R[c * K + p] * R[c * K + p];
    }
    share /= std::sqrt(static_cast<double>(K));
    double most = 0;
    auto judge = [&](double got, double want, double limit) {
      const double over = std::fabs(got - want) / (limit + 1e-300);
      most = over > most || over != over ? over : most;
    };
    const int64_t tokens = s.bad < 0 ? s.T : s.bad;
    for (int64_t t = 0; t < tokens; ++t) {
      const size_t i = static_cast<size_t>(t);
      std::vector<double> key(K), query(K);
      double kk = 0, qq = 0;
      for (size_t p = 0; p < K; ++p) {
        key[p] = to_float(k[i * K + p]);
        query[p] = to_float(q[i * K + p]);
        kk += key[p] * key[p];
        qq += query[p] * query[p];
      }
      const double rk = s.l2norm ? 1 / std::sqrt(kk + 1e-6) : 1;
      const double rq = s.l2norm ? 1 / std::sqrt(qq + 1e-6) : 1;
      const double a = std::exp(static_cast<double>(g[i]));
      for (size_t c = 0; c < V; ++c) {
        double Sk = 0, Sq = 0;
        for (size_t p = 0; p < K; ++p) {
          R[c * K + p] *= a;
          Sk += R[c * K + p] * key[p] * rk;
        }
        const double u = beta[i] * (to_float(v[i * V + c]) - Sk);
        for (size_t p = 0; p < K; ++p) {
          R[c * K + p] += u * key[p] * rk;
          Sq += R[c * K + p] * query[p] * rq;
        }
        energy[c] = a * a * energy[c] + u * u * kk * rk * rk;
        const double want = 0.3f * Sq, size = 0.3f * std::sqrt(energy[c] * qq) * rq;
        judge(to_float(o[i * V + c]), want, stored * std::fabs(want) + share * size);
      }
    }
    if (s.bad >= 0) return most;
    for (size_t c = 0; c < V; ++c) {
      for (size_t p = 0; p < K; ++p) {
        judge(final[c * K + p], R[c * K + p], share * std::sqrt(energy[c]));
      }
    }
    return most;
  }
};

int failed = 0;

template <class T>
void check(Shape s, bool fast) {
  Call<T> call(s);
  if (s.bad >= 0) {
    for (auto* x : {&call.q, &call.k, &call.v}) {
      const size_t width = x->size() / static_cast<size_t>(s.T);
      for (size_t c = 0; c < width; ++c) (*x)[static_cast<size_t>(s.bad) * width + c].bits = 0x7fff;
    }
  }
  call.run(fast);
  const bool rounds = fast && std::is_same_v<T, bf16_t>;
  // Split operands lose what f32 does, or 2^-15 of the largest term of an output.
  const double worst = call.worst(rounds ? 0x1p-6 : 0x1p-14);
  if (worst <= 1) return;
  ++failed;
  std::printf("%s %s T=%lld C=%lld K=%lld V=%lld l2norm=%d cut=%lld bad=%lld: %g of the limit\n",
              std::is_same_v<T, bf16_t> ? "bf16" : "f16", rounds ? "rounded" : "split",
              static_cast<long long>(s.T), static_cast<long long>(s.C), static_cast<long long>(s.K),
              static_cast<long long>(s.V), s.l2norm, static_cast<long long>(s.cut),
              static_cast<long long>(s.bad), worst);
}

}  // namespace

int main() {
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    std::puts("this processor has no AVX-512");
    return 77;
  }
  const Shape shapes[] = {
      {1, 64, 40, 33, false, -1, -1},  {7, 16, 1, 5, false, -1, -1},
      {16, 16, 32, 32, true, -1, -1},  {31, 64, 64, 64, false, -1, -1},
      {33, 17, 40, 72, true, -1, -1},  {50, 64, 100, 20, false, -1, -1},
      {65, 64, 64, 40, true, -1, -1},  {97, 128, 33, 32, false, -1, -1},
      {70, 64, 64, 40, false, 0, -1},  {70, 64, 64, 40, true, 17, -1},
      {70, 64, 40, 24, false, 40, -1}, {70, 64, 40, 24, false, -1, 5},
      {70, 64, 40, 24, false, -1, 16}, {70, 64, 40, 24, true, -1, 37},
      {70, 50, 40, 24, true, -1, 49},
  };
  for (const Shape& s : shapes) {
    check<bf16_t>(s, false);
    check<bf16_t>(s, true);
    check<f16_t>(s, false);
  }
  if (!failed) std::puts("ok");
  return failed != 0;
}
