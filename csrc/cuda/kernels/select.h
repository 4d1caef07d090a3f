// Host-side questions about an argument block: may a vector kernel take it?
#pragma once

#include <cstdint>

#include "../../args.h"

namespace gdn {
namespace cuda {

inline bool aligned(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(bytes) == 0;
}

// Vectors of `elements` along the contiguous last axis of a view.
inline bool vector_view(const View& x, int64_t elements) {
  const int64_t bytes = elements * size_of(x.dtype) < 16 ? elements * size_of(x.dtype) : 16;
  const int64_t step = bytes / size_of(x.dtype);
  return x.sd == 1 && aligned(x.ptr, bytes) && x.sb % step == 0 && x.st % step == 0 &&
         x.sh % step == 0;
}

// Rows of K contiguous elements, each readable in 16-byte vectors.
inline bool vector_state(const StatePool& s) {
  const int64_t e = 16 / size_of(s.dtype);
  return s.s_k == 1 && aligned(s.ptr, 16) && s.s_p % e == 0 && s.s_h % e == 0 && s.s_v % e == 0;
}

// Either layout of a pool in 16-byte vectors along its contiguous axis.
inline bool vector_pool(const StatePool& s) {
  const int64_t e = 16 / size_of(s.dtype);
  const bool lines = s.s_k == 1 ? s.s_v % e == 0 : s.s_v == 1 && s.s_k % e == 0;
  return lines && aligned(s.ptr, 16) && s.s_p % e == 0 && s.s_h % e == 0;
}

// Keys and updates of a window readable four at a time.
inline bool vector_entries(const Window& w) {
  return aligned(w.k, 4 * size_of(w.k_dtype)) && aligned(w.u, 4 * size_of(w.u_dtype)) &&
         w.sk_p % 4 == 0 && w.sk_h % 4 == 0 && w.sk_r % 4 == 0 && w.su_p % 4 == 0 &&
         w.su_h % 4 == 0 && w.su_r % 4 == 0;
}

// Updates of 16 bits readable eight rows at a time.
inline bool vector_updates(const RecurrentArgs& a) {
  const Window& w = a.window;
  return a.V % 8 == 0 && aligned(w.u, 16) && w.su_p % 8 == 0 && w.su_h % 8 == 0 && w.su_r % 8 == 0;
}

// Grid limits: blockIdx.y carries sequences, at most this many a launch.
constexpr int64_t kMaxGridY = 65535;

}  // namespace cuda
}  // namespace gdn
