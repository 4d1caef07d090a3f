// A random call of a CPU kernel: sizes, strides and dtypes from a seed, and tensors with nothing
// readable right behind them, of which the written ones are watched (driver.cpp).
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../../csrc/args.h"
#include "../../csrc/half.h"

namespace gdn {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 0x9E3779B97F4A7C15u + 1) {
    for (int i = 0; i < 4; ++i) next();
  }
  uint64_t next() {
    uint64_t z = (state += 0x9E3779B97F4A7C15u);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
  }
  int64_t upto(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t a, int64_t b) { return a + upto(b - a + 1); }
  bool chance(double p) { return uniform() < p; }
  float uniform() { return static_cast<float>(next() >> 40) / (1 << 24); }
  float normal() {
    float sum = 0.f;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum - 6.f;
  }
  template <class T>
  T pick(std::initializer_list<T> of) {
    return of.begin()[upto(static_cast<int64_t>(of.size()))];
  }
};

inline float read(const void* p, DType d, int64_t i) {
  if (d == DType::f32) return static_cast<const float*>(p)[i];
  if (d == DType::bf16) return to_float(static_cast<const bf16_t*>(p)[i]);
  return to_float(static_cast<const f16_t*>(p)[i]);
}
inline void write(void* p, DType d, int64_t i, float x) {
  if (d == DType::f32) static_cast<float*>(p)[i] = x;
  if (d == DType::bf16) static_cast<bf16_t*>(p)[i] = to_bf16(x);
  if (d == DType::f16) static_cast<f16_t*>(p)[i] = to_f16(x);
}

// One tensor: `bytes` bytes and nothing readable right behind them.
class Block {
 public:
  Block(int64_t bytes, bool guarded) : bytes_(bytes) {
    if (!guarded) {
      heap_.reset(static_cast<char*>(std::malloc(static_cast<size_t>(bytes))));
      data_ = heap_.get();
      return;
    }
    const int64_t page = sysconf(_SC_PAGESIZE);
    const int64_t used = (bytes + page - 1) / page * page;
    mapped_ = static_cast<size_t>(used + 2 * page);
    map_ = static_cast<char*>(
        mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (map_ == MAP_FAILED) throw std::runtime_error("mmap");
    if (used && mprotect(map_ + page, static_cast<size_t>(used), PROT_READ | PROT_WRITE)) {
      throw std::runtime_error("mprotect");
    }
    data_ = map_ + page + used - bytes;
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    if (map_) munmap(map_, mapped_);
  }
  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> heap_;
  char *data_ = nullptr, *map_ = nullptr;
  size_t mapped_ = 0;
  int64_t bytes_;
};

// A written tensor: where its elements are, and what the whole block held before.
struct Watched {
  std::string name;
  const Block* block;
  DType dtype;
  bool integers;
  std::vector<int64_t> elements;
  std::vector<char> before;
};

struct Case {
  Random rng;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Watched> watched;
  double tolerance = 1e-4;  // of f32 results against the scalar level
  bool fast = false;        // set before the case is built
  bool plain = false;       // tensors as they are allocated: dimensions in order, no gaps

  explicit Case(uint64_t seed) : rng(seed) {}

  Block& block(int64_t bytes) {
    blocks.push_back(std::make_unique<Block>(bytes, rng.chance(0.5)));
    return *blocks.back();
  }
  DType dtype() { return rng.pick({DType::f32, DType::bf16, DType::f16}); }

  // Strides of a tensor of the given sizes in a random order of dimensions with gaps, the last
  // dimension innermost (`inner` 1), with gaps between its elements (0: perhaps), or wherever (-1).
  std::vector<int64_t> strides(const std::vector<int64_t>& sizes, int inner, bool dense = false) {
    dense = dense || plain;
    const int n = static_cast<int>(sizes.size());
    std::vector<int> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    if (!dense) {
      const int movable = inner < 0 ? n : n - 1;
      for (int i = movable - 1; i > 0; --i) std::swap(order[i], order[rng.upto(i + 1)]);
    }
    std::vector<int64_t> s(sizes.size());
    int64_t step = inner == 0 && !dense && rng.chance(0.25) ? rng.between(2, 3) : 1;
    for (int i = n - 1; i >= 0; --i) {
      s[order[i]] = step;
      step = step * (sizes[order[i]] > 0 ? sizes[order[i]] : 1);
      if (!dense && rng.chance(0.3)) step += rng.between(1, 5);
    }
    return s;
  }
  static std::vector<int64_t> offsets(const std::vector<int64_t>& sizes,
                                      const std::vector<int64_t>& s) {
    std::vector<int64_t> all{0};
    for (size_t d = 0; d < sizes.size(); ++d) {
      std::vector<int64_t> next;
      next.reserve(all.size() * static_cast<size_t>(sizes[d]));
      for (int64_t base : all) {
        for (int64_t i = 0; i < sizes[d]; ++i) next.push_back(base + i * s[d]);
      }
      all = std::move(next);
    }
    return all;
  }
  // A tensor; every element from `value`, gaps NaN. Written ones are watched.
  template <class Value>
  void* tensor(const char* name, DType d, const std::vector<int64_t>& sizes,
               const std::vector<int64_t>& s, bool written, Value value) {
    const std::vector<int64_t> all = offsets(sizes, s);
    int64_t last = -1;
    for (int64_t e : all) last = e > last ? e : last;
    Block& b = block((last + 1) * size_of(d));
    for (int64_t i = 0; i <= last; ++i) write(b.data(), d, i, kNaN);
    for (int64_t e : all) write(b.data(), d, e, value());
    if (written) watch(name, b, d, false, all);
    return b.data();
  }
  void watch(const char* name, const Block& b, DType d, bool integers, std::vector<int64_t> all) {
    watched.push_back({name, &b, d, integers, std::move(all), {}});
  }
  void snapshot() {
    for (Watched& w : watched) w.before.assign(w.block->data(), w.block->data() + w.block->bytes());
  }

  View view(const char* name, DType d, int64_t B, int64_t T, int64_t heads, int64_t n,
            std::function<float()> value) {
    const std::vector<int64_t> sizes{B, T, heads, n}, s = strides(sizes, 0);
    View v;
    v.dtype = d;
    v.ptr = tensor(name, d, sizes, s, false, value);
    v.sb = s[0];
    v.st = s[1];
    v.sh = s[2];
    v.sd = s[3];
    return v;
  }
  // Fresh and contiguous, as glue allocates outputs; NaN until written.
  View output(const char* name, DType d, int64_t B, int64_t T, int64_t heads, int64_t n) {
    const std::vector<int64_t> sizes{B, T, heads, n}, s = strides(sizes, 1, true);
    View v;
    v.dtype = d;
    v.ptr = tensor(name, d, sizes, s, true, [] { return kNaN; });
    v.sb = s[0];
    v.st = s[1];
    v.sh = n;
    v.sd = 1;
    return v;
  }
  Param param(const char* name, DType d, std::vector<int64_t> sizes, std::function<float()> value) {
    const std::vector<int64_t> s = strides(sizes, 0);
    Param p;
    p.dtype = d;
    p.ptr = tensor(name, d, sizes, s, false, value);
    p.s0 = s[0];
    p.s1 = sizes.size() > 1 ? s[1] : 0;
    return p;
  }
  Index index(const std::vector<int64_t>& values, int64_t columns = 0) {
    const int64_t n = static_cast<int64_t>(values.size()), step = rng.between(1, 2);
    Index x;
    x.is64 = rng.chance(0.5);
    x.s0 = (columns ? columns : 1) * step;
    x.s1 = columns ? step : 0;
    const int64_t item = x.is64 ? 8 : 4;
    Block& b = block(((n - 1) * step + 1) * item * (n > 0));
    for (int64_t i = 0; i < n; ++i) {
      const int32_t narrow = static_cast<int32_t>(values[i]);
      if (x.is64) std::memcpy(b.data() + i * step * 8, &values[i], 8);
      if (!x.is64) std::memcpy(b.data() + i * step * 4, &narrow, 4);
    }
    x.ptr = b.data();
    return x;
  }

  float key(int64_t K) { return rng.normal() / std::sqrt(static_cast<float>(K)); }
  float log_decay() {
    if (rng.chance(0.02)) return -std::numeric_limits<float>::infinity();
    return rng.chance(0.05) ? -300.f : rng.chance(0.1) ? 0.f : -rng.uniform();
  }

  int64_t dim() {
    return rng.chance(0.25) ? rng.pick<int64_t>({64, 128, 130, 256}) : rng.between(1, 41);
  }
  void heads(int64_t& H, int64_t& HV, int64_t& K, int64_t& V) {
    H = rng.between(1, 3);
    HV = H * rng.between(1, 3);
    K = dim();
    V = dim();
  }

  // B x T tokens or packed ones, rows of a pool with padding among them.
  std::vector<int64_t> rows;  // of each sequence; negative = padding
  std::vector<uint8_t> fresh;
  Sequences sequences(int64_t most) {
    Sequences s;
    s.N = rng.between(1, 4);
    if (rng.chance(0.05)) s.N = rng.between(70, 90);
    if (rng.chance(0.5)) {
      std::vector<int64_t> cu{0};
      for (int64_t n = 0; n < s.N; ++n) cu.push_back(cu.back() + rng.between(0, most));
      s.B = 1;
      s.T = cu.back();
      s.cu_seqlens = index(cu);
    } else {
      s.B = s.N;
      s.T = rng.between(0, most);
    }
    s.P = s.N + rng.between(0, 2);
    std::vector<int64_t> order(static_cast<size_t>(s.P));
    std::iota(order.begin(), order.end(), 0);
    const bool named = rng.chance(0.8);
    if (named) {
      for (int64_t i = s.P - 1; i > 0; --i) std::swap(order[i], order[rng.upto(i + 1)]);
    }
    rows.assign(order.begin(), order.begin() + s.N);
    if (named) {
      for (int64_t& r : rows) r = rng.chance(0.2) ? -rng.between(1, 9) : r;
      s.state_indices = index(rows);
    }
    fresh.assign(static_cast<size_t>(s.N), 0);
    if (rng.chance(0.5)) {
      s.s_has = rng.between(1, 2);
      Block& b = block((s.N - 1) * s.s_has + 1);
      std::memset(b.data(), 0, static_cast<size_t>(b.bytes()));
      for (int64_t n = 0; n < s.N; ++n) {
        fresh[n] = rng.chance(0.3);
        b.data()[n * s.s_has] = static_cast<char>(!fresh[n]);
      }
      s.has_initial_state = reinterpret_cast<const bool*>(b.data());
    }
    return s;
  }
  // Column j of the state rows of sequence n; the accepted count of the call before.
  void speculative(Sequences& s, int64_t columns) {
    std::vector<int64_t> free(static_cast<size_t>(s.N * columns)), table, accepted;
    std::iota(free.begin(), free.end(), 0);
    for (int64_t i = s.N * columns - 1; i > 0; --i) std::swap(free[i], free[rng.upto(i + 1)]);
    for (int64_t n = 0; n < s.N; ++n) {
      const bool padding = rng.chance(0.2);
      for (int64_t j = 0; j < columns; ++j) {
        const bool skip = padding || (j > 0 && rng.chance(0.1));
        table.push_back(skip ? -1 : free[n * columns + j]);
      }
      accepted.push_back(rng.chance(0.1) ? -rng.upto(3) : rng.between(1, columns));
    }
    s.P = s.N * columns;
    s.S = columns;
    s.state_indices = index(table, columns);
    s.num_accepted = index(accepted);
    rows.clear();
    for (int64_t i = 0; i < s.N * columns; ++i) rows.push_back(table[i]);
    fresh.assign(rows.size(), 0);
  }
  // Whether a pool row is one that the call may read: the others hold NaN.
  bool readable(int64_t row) const {
    for (size_t n = 0; n < rows.size(); ++n) {
      if (rows[n] == row) return !fresh[n];
    }
    return false;
  }

  StatePool state(int64_t P, int64_t HV, int64_t V, int64_t K, DType d) {
    const bool transposed = rng.chance(0.5);
    std::vector<int64_t> sizes{P, HV, V, K};
    std::vector<int64_t> s;
    if (transposed) {
      s = strides({P, HV, K, V}, 1);
      std::swap(s[2], s[3]);
    } else {
      s = strides(sizes, 1);
    }
    StatePool p;
    p.dtype = d;
    p.P = P;
    p.s_p = s[0];
    p.s_h = s[1];
    p.s_v = s[2];
    p.s_k = s[3];
    const int64_t each = HV * V * K;
    int64_t i = 0;
    p.ptr = tensor("state", d, sizes, s, true,
                   [&] { return readable(i++ / each) ? rng.normal() : kNaN; });
    return p;
  }
  ConvPool conv_state(int64_t P, int64_t C, int64_t L, DType d, bool leading) {
    const std::vector<int64_t> sizes{P, C, L};
    std::vector<int64_t> s = strides(sizes, -1);
    if (plain && rng.chance(0.5)) s = {C * L, 1, C};
    ConvPool p;
    p.dtype = d;
    p.P = P;
    p.L = L;
    p.s_p = s[0];
    p.s_c = s[1];
    p.s_l = s[2];
    p.leading = leading;
    int64_t i = 0;
    p.ptr = tensor("conv_state", d, sizes, s, true,
                   [&] { return readable(i++ / (C * L)) ? rng.normal() : kNaN; });
    return p;
  }
  Window window(int64_t P, int64_t H, int64_t HV, int64_t K, int64_t V, int64_t R, bool ring,
                std::vector<int64_t>* drafts) {
    std::vector<int64_t> fill(static_cast<size_t>(P)), head(fill), last(fill);
    for (int64_t p = 0; p < P; ++p) {
      fill[p] = rng.between(0, R);
      head[p] = ring && fill[p] == R ? rng.upto(R) : 0;
      last[p] = drafts && fill[p] > 1 ? rng.upto(fill[p]) : 0;
    }
    auto alive = [&](int64_t p, int64_t r) {
      return readable(p) && (r - head[p] + R) % R < fill[p];
    };
    Window w;
    w.P = P;
    w.R = R;
    w.k_dtype = dtype();
    w.u_dtype = dtype();
    auto fill_with = [&](int64_t heads, int64_t n, float scale) {
      return [=, i = int64_t(0)]() mutable {
        const int64_t p = i / (heads * R * n), r = i / n % R;
        ++i;
        return alive(p, r) ? rng.normal() * scale : kNaN;
      };
    };
    const std::vector<int64_t> k_sizes{P, H, R, K}, u_sizes{P, HV, R, V}, g_sizes{P, HV, R};
    const auto sk = strides(k_sizes, 1), su = strides(u_sizes, 1), sg = strides(g_sizes, 0);
    w.k = tensor("win_k", w.k_dtype, k_sizes, sk, true,
                 fill_with(H, K, 1.f / std::sqrt(static_cast<float>(K))));
    w.u = tensor("win_u", w.u_dtype, u_sizes, su, true, fill_with(HV, V, 1.f));
    int64_t i = 0;
    w.g = static_cast<float*>(tensor("win_g", DType::f32, g_sizes, sg, true, [&] {
      const int64_t p = i / (HV * R), r = i % R;
      ++i;
      return alive(p, r) ? -rng.uniform() : kNaN;
    }));
    w.sk_p = sk[0], w.sk_h = sk[1], w.sk_r = sk[2];
    w.su_p = su[0], w.su_h = su[1], w.su_r = su[2];
    w.sg_p = sg[0], w.sg_h = sg[1], w.sg_r = sg[2];
    w.s_fill = rng.between(1, 2);
    Block& b = block(((P - 1) * w.s_fill + 1) * 4);
    std::memset(b.data(), 0x55, static_cast<size_t>(b.bytes()));
    w.fill = reinterpret_cast<int32_t*>(b.data());
    std::vector<int64_t> all;
    for (int64_t p = 0; p < P; ++p) {
      w.fill[p * w.s_fill] = static_cast<int32_t>(fill[p] | last[p] << 8 | head[p] << 16);
      all.push_back(p * w.s_fill);
    }
    watch("win_fill", b, DType::f32, true, all);
    if (drafts) *drafts = last;
    return w;
  }
  // Counts that the windows of the rows allow.
  void accepted(Sequences& s, const std::vector<int64_t>& drafts) {
    std::vector<int64_t> counts;
    for (int64_t r : rows) {
      counts.push_back(rng.chance(0.1) ? 0 : rng.between(1, r < 0 ? 1 : drafts[r] + 1));
    }
    s.num_accepted = index(counts);
  }

  Gates gates(int64_t B, int64_t T, int64_t HV, bool raw) {
    Gates g;
    g.raw = raw;
    const DType d = raw ? dtype() : DType::f32;
    g.g = view("g", d, B, T, HV, 1, [&] { return raw ? rng.normal() : log_decay(); });
    g.beta = view("beta", dtype(), B, T, HV, 1, [&] { return raw ? rng.normal() : rng.uniform(); });
    if (raw) {
      g.A_log = param("A_log", dtype(), {HV}, [&] { return rng.uniform(); });
      g.dt_bias = param("dt_bias", dtype(), {HV}, [&] { return rng.normal(); });
    }
    return g;
  }
  template <class Args>
  void tokens(Args& a) {
    const Sequences& s = a.seqs;
    const DType d = dtype();
    a.q = view("q", d, s.B, s.T, a.H, a.K, [&] { return key(a.K); });
    a.k = view("k", d, s.B, s.T, a.H, a.K, [&] { return key(a.K); });
    a.v = view("v", d, s.B, s.T, a.HV, a.V, [&] { return rng.normal(); });
    a.out = output("out", d, s.B, s.T, a.HV, a.V);
    a.scale = rng.uniform();
    a.l2norm = rng.chance(0.5);
  }
};

}  // namespace gdn
