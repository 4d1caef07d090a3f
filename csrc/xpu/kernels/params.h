// Launch arguments. Plain data, at most 512 bytes a kernel, no type whose size differs between host
// and device (there size_t and pointers to local memory have 32 bits). Addresses are global-memory
// addresses; strides count elements.
#pragma once

#include <cstdint>

namespace gdn {
namespace xpu {

struct Tensor4 {  // [batch, token, head, channel], channels contiguous
  uint64_t addr;
  int64_t sb, st, sh;
  int32_t dtype, pad;
};

struct Gate {  // [batch, token, head]
  uint64_t addr;
  int64_t sb, st, sh;
  int32_t dtype, pad;
};

struct IndexVector {  // int32 or int64; addr 0: absent
  uint64_t addr;
  int64_t s0, s1;
  int32_t wide, pad;
};

struct GateParam {
  uint64_t addr;
  int64_t s0;
  int32_t dtype, pad;
};

struct RecurrentParams {
  Tensor4 q, k, v, out;
  Gate g, beta;  // raw gates: a and b
  GateParam a_log, dt_bias;
  uint64_t state;
  int64_t s_p, s_h, s_v;
  IndexVector rows, cu, accepted;
  uint64_t has_init;
  int64_t s_has;
  int64_t units;  // pieces of work of `unit` state rows each
  int32_t unit, units_per_head;
  int32_t N, T, S, P;
  int32_t H, HV, K, V;
  int32_t raw_gates, l2norm;
  float scale;
  int32_t pad;
};
static_assert(sizeof(RecurrentParams) <= 512, "launch arguments");

}  // namespace xpu
}  // namespace gdn
