// What one call does to one sequence's window; the step and the append kernels must agree on it.
#pragma once

#include "conv.h"

namespace gdn {
namespace xpu {

constexpr int kMaxWindow = 64;  // R

// The entries in force and the slot the next one takes. A window with a base fills from slot 0 and
// is folded; one without is a ring: win_fill counts every entry ever appended.
struct WindowSpan {
  int count, oldest, size, next;
  __device__ inline int slot(int i) const {
    int at = oldest + i;
    return at >= size ? at - size : at;
  }
};

struct WindowCall {
  bool active;  // this sequence has a token in this launch
  bool fold;
  WindowSpan window;
  int fill_after;
};

__device__ inline void load_gates(const WindowParams& p, lm_ptr<char> lm, int64_t b, int64_t t,
                                  int hv) {
  const int n = element_bytes(p.g.dtype), m = element_bytes(p.beta.dtype);
  XPU_LOAD(p.g.addr + static_cast<gm_addr>((b * p.g.sb + t * p.g.st + hv * p.g.sh) * n), lm, n);
  XPU_LOAD(p.beta.addr + static_cast<gm_addr>((b * p.beta.sb + t * p.beta.st + hv * p.beta.sh) * m),
           lm + 16, m);
}

__device__ inline WindowCall read_call(const WindowParams& p, int n, lm_ptr<char> meta,
                                       SequenceMeta* s) {
  *s = read_sequence(p, n, p.P, p.T, meta);
  WindowCall c;
  c.active = p.flush ? s->live : s->length > p.token;
  c.fold = false;
  c.fill_after = 0;
  c.window = {0, 0, p.R, 0};
  if (!c.active || !s->live) return c;
  XPU_LOAD(p.fill + static_cast<gm_addr>(s->row * p.s_fill * 4), meta + 40, 4);
  XPU_FENCE(XPU_LM_GM);
  int fill = lm_get(lm_cast<int32_t>(meta + 40), 0);
  if (fill < 0) fill = 0;
  if (p.flush) {
    c.fold = p.flush == 1 && fill > 0;
    c.active = c.fold || p.flush == 2;
    c.window = {min_int(fill, p.R), 0, p.R, 0};
    return c;
  }
  // Only the first token of a call drops what was rejected, starts afresh or folds.
  const bool first = p.token == 0;
  if (first && p.accepted.addr) {
    const int64_t drop = s->length - s->accepted;
    if (drop > 0) fill = drop < fill ? fill - static_cast<int>(drop) : 0;
  }
  s->fresh = s->fresh && first;
  if (s->fresh) fill = 0;
  if (p.state) {
    if (fill > p.R) fill = p.R;
    c.fold = s->fresh || (first && fill + s->length > p.R);
    c.window = {fill, 0, p.R, c.fold ? 0 : fill};
    c.fill_after = (c.fold ? 0 : fill) + 1;
    // More tokens than the window holds are refused on the host where lengths are known there.
    if (c.window.next >= p.R) c.active = false;
  } else {
    const int count = min_int(fill, p.R), next = fill % p.R;
    c.window = {count, fill > p.R ? next : 0, p.R, next};
    c.fill_after = fill + 1;
  }
  return c;
}

}  // namespace xpu
}  // namespace gdn
