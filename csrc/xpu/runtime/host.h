// Argument blocks in, launches out: what the chip can take, how work is cut, which kernel runs. No
// torch here, so that the same file serves the twin and the vendor's toolchain.
#pragma once

#include <stdexcept>

#include "../../args.h"

namespace gdn {
namespace xpu {

// A call the XPU kernels do not take; the message names the argument.
class Unsupported : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

constexpr int64_t kConvNormMax = 128;  // widest head conv_gating can normalise

// How many rows of state one unit of work has: large units share q and k, small ones fill the chip.
struct Cut {
  int unit;            // rows
  int units_per_head;  // of V
  int64_t units;
};
Cut cut_rows(int64_t heads, int64_t V);

// `guarded`: with rows of several columns, a sequence whose first is no row is padding, as it is
// for the convolution of a fused step.
void recurrent(const RecurrentArgs& a, void* stream, bool guarded = false);
// Both forms of the window decode: with a base (a.state.ptr) or without.
void recurrent_window(const RecurrentArgs& a, void* stream);
void window_flush(const RecurrentArgs& a, void* stream);
void window_reset(const RecurrentArgs& a, void* stream);
void short_conv(const ConvArgs& a, void* stream);
void conv_gating(const ConvGatingArgs& a, void* stream);
void gating(const GatingArgs& a, void* stream);
// `heads` rows of the gate share a token of stride s_gate and lie s_gate_head apart.
// Rows of x lie in one stride, those of the gate as NormArgs says. `quiet`: rows of zeros, which is
// what padding leaves, give zeros whatever their gate holds.
void gated_rms_norm(const NormArgs& a, void* stream, bool quiet = false);
// Throw what the calls of those names would: a step of several launches is refused before the
// first.
void check_recurrent(const RecurrentArgs& a);
void check_recurrent_window(const RecurrentArgs& a);
void check_gated_rms_norm(const NormArgs& a);
// Whether one launch can do the whole layer; otherwise the caller chains the ops above.
bool decode_fits(const DecodeArgs& a);
void decode(const DecodeArgs& a, void* out, void* stream);

}  // namespace xpu
}  // namespace gdn
