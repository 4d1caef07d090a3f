// What one call does to one sequence's window; the step and the append kernels must agree on it.
#pragma once

#include "conv.h"

namespace gdn {
namespace xpu {

constexpr int kMaxWindow = 64;  // R

// win_fill packs three counts (docs/windows.md): live entries, tokens of the last call minus one,
// slot of the oldest entry.
__device__ inline int pack_fill(int fill, int drafts, int head) {
  return fill + 256 * drafts + 65536 * head;
}

// The live entries and the slot the next one takes.
struct WindowSpan {
  int count, oldest, size, next;
  __device__ inline int slot(int i) const {
    int at = oldest + i;
    return at >= size ? at - size : at;
  }
  // So many slots from 0 on hold all live entries. In a ring that came round and then dropped
  // drafts some of them are dead.
  __device__ inline int reach() const { return count > 0 ? min_int(oldest + count, size) : 0; }
};

struct WindowCall {
  bool active;  // this sequence has a token in this launch, or is to be flushed
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
  const int word = lm_get(lm_cast<int32_t>(meta + 40), 0);
  int fill = min_int(word & 255, p.R), head = (word >> 16) & 255;
  if (head >= p.R) head = 0;
  if (p.flush) {
    c.fold = p.flush == 1 && fill > 0;
    c.window = {fill, head, p.R, 0};
    return c;
  }
  // Only the first token of a call drops what was rejected, starts afresh or folds.
  const bool first = p.token == 0;
  s->fresh = s->fresh && first;
  if (s->fresh) {
    fill = 0;
    head = 0;
  } else if (first && p.accepted.addr) {
    const int64_t drop = ((word >> 8) & 255) + 1 - s->accepted;
    if (drop > 0) fill = drop < fill ? fill - static_cast<int>(drop) : 0;
  }
  const int drafts = min_int(s->length, 256) - 1;
  int next = head + fill;
  if (next >= p.R) next -= p.R;
  c.window = {fill, head, p.R, next};
  if (p.state) {
    c.fold = first && fill > 0 && fill + s->length > p.R;
    if (c.fold) {
      c.window.next = 0;
      fill = 0;
      head = 0;
    }
    // More tokens than the window holds are refused on the host where lengths are known there.
    if (fill >= p.R) c.active = false;
    c.fill_after = pack_fill(fill + 1, drafts, head);
  } else if (fill < p.R) {
    c.fill_after = pack_fill(fill + 1, drafts, head);
  } else {
    c.fill_after = pack_fill(fill, drafts, head + 1 < p.R ? head + 1 : 0);
  }
  return c;
}

}  // namespace xpu
}  // namespace gdn
