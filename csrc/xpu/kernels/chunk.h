// What the kernels of the chunked rule share: the table that says where a chunk's tokens are, and a
// pipeline of loads, arithmetic and stores.
#pragma once

#include "elementwise.h"

namespace gdn {
namespace xpu {

struct ChunkItem {
  int batch, first, rows, sequence;
};

// Entry `item` of the table; `meta` is 64 bytes of local memory. Waits for its transfer.
XPU_INLINE ChunkItem read_item(uint64_t table, int item, int rows, lm_ptr<char> meta) {
  ChunkItem x = {item, 0, rows, item};
  if (!table) return x;
  XPU_LOAD(table + static_cast<gm_addr>(item) * 16, meta, 16);
  XPU_FENCE(XPU_LM_GM);
  lm_ptr<int32_t> t = lm_cast<int32_t>(meta);
  x = {lm_get(t, 0), lm_get(t, 1), lm_get(t, 2), lm_get(t, 3)};
  XPU_FENCE(XPU_LM_ONLY);
  return x;
}

// The row of an index vector, or -1 where it is no row of the pool.
XPU_INLINE int64_t read_row(const IndexVector& index, int sequence, int P, lm_ptr<char> meta) {
  int64_t row = sequence;
  if (index.addr) {
    XPU_LOAD(index_at(index, sequence, 0), meta, index.wide ? 8 : 4);
    XPU_FENCE(XPU_LM_GM);
    row = get_index(meta, index.wide);
    XPU_FENCE(XPU_LM_ONLY);
  }
  return row >= 0 && row < P ? row : -1;
}

XPU_INLINE bool read_flag(uint64_t flags, int64_t stride, int sequence, lm_ptr<char> meta) {
  XPU_LOAD(flags + static_cast<gm_addr>(sequence * stride), meta, 1);
  XPU_FENCE(XPU_LM_GM);
  const bool set = lm_get(meta, 0) != 0;
  XPU_FENCE(XPU_LM_ONLY);
  return set;
}

// Work items through two input and two output buffers: while item i is computed, i + 1 loads and
// i - 1 stores; one fence an item ends all three. `describe` may wait for transfers of its own.
template <typename Describe, typename Load, typename Compute, typename Store>
XPU_INLINE void pipeline(int64_t first, int64_t last, Describe describe, Load fetch,
                         Compute compute, Store put) {
  if (first >= last) return;
  auto item = describe(first);
  auto before = item;
  fetch(item, 0);
  XPU_FENCE(XPU_LM_GM);
  int slot = 0;
  for (int64_t i = first;; ++i) {
    if (i > first) put(before, 1 - slot);
    auto next = item;
    if (i + 1 < last) {
      next = describe(i + 1);
      fetch(next, 1 - slot);
    }
    compute(item, slot);
    XPU_FENCE(XPU_LM_GM);
    before = item;
    if (i + 1 == last) break;
    item = next;
    slot = 1 - slot;
  }
  put(before, slot);
  XPU_FENCE(XPU_LM_GM);
}

}  // namespace xpu
}  // namespace gdn
