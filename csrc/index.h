// Reading the metadata of csrc/args.h. Host and device code share it.
#pragma once

#include <cstdint>

#include "args.h"

#if defined(__CUDACC__)
#define GDN_HD __host__ __device__ inline
#else
#define GDN_HD inline
#endif

namespace gdn {

GDN_HD int64_t at(const Index& x, int64_t i, int64_t j = 0) {
  const int64_t offset = i * x.s0 + j * x.s1;
  return x.is64 ? static_cast<const int64_t*>(x.ptr)[offset]
                : static_cast<const int32_t*>(x.ptr)[offset];
}

// One sequence: tokens [start, end) of batch row b; `row` = pool row read first, negative =
// padding.
struct Sequence {
  int64_t b, start, end, row;
  bool fresh;        // start from zero, read nothing
  int64_t accepted;  // 1 where num_accepted is absent
};

// `row_column`: which column of state_indices holds the row; -1 = the one num_accepted names.
GDN_HD Sequence sequence_of(const Sequences& s, int64_t n, int64_t row_column = -1) {
  Sequence q;
  if (s.cu_seqlens.ptr) {
    q.b = 0;
    q.start = at(s.cu_seqlens, n);
    q.end = at(s.cu_seqlens, n + 1);
  } else {
    q.b = n;
    q.start = 0;
    q.end = s.T;
  }
  q.accepted = s.num_accepted.ptr ? at(s.num_accepted, n) : 1;
  q.fresh = s.has_initial_state && !s.has_initial_state[n * s.s_has];
  if (q.accepted < 1 || (s.S > 0 && row_column < 0 && q.accepted > s.S)) {
    q.row = -1;
  } else if (s.state_indices.ptr) {
    q.row = at(s.state_indices, n, s.S > 0 ? (row_column < 0 ? q.accepted - 1 : row_column) : 0);
  } else {
    q.row = n;
  }
  return q;
}

// win_fill unpacked (docs/windows.md): live entries, tokens of the last call beyond the first, and
// the slot of the oldest entry.
struct WindowCounts {
  int32_t fill, drafts, head;
};
GDN_HD WindowCounts unpack_fill(int32_t x) { return {x & 255, (x >> 8) & 255, (x >> 16) & 255}; }
GDN_HD int32_t pack_fill(WindowCounts c) { return c.fill | c.drafts << 8 | c.head << 16; }

// The entries that stay when the last call's tokens after the first `accepted` were rejected
// (`accepted` below 1: none were).
GDN_HD WindowCounts kept_entries(int32_t packed, int64_t accepted) {
  WindowCounts c = unpack_fill(packed);
  const int64_t rejected = accepted < 1 ? 0 : c.drafts + 1 - accepted;
  if (rejected > 0) c.fill -= static_cast<int32_t>(rejected < c.fill ? rejected : c.fill);
  return c;
}

}  // namespace gdn
