// What only a host can look at: the numbers in a call's metadata.
#include <algorithm>

#include <ATen/ATen.h>

#include "checks.h"
#include "index.h"

namespace gdn {

void check_values(const char* op, const Sequences& s, int64_t most_tokens, const char* rows) {
  if (s.cu_seqlens.ptr) {
    int64_t previous = at(s.cu_seqlens, 0);
    TORCH_CHECK(previous == 0, op, ": cu_seqlens: expected to start at 0, got ", previous);
    for (int64_t n = 1; n <= s.N; ++n) {
      const int64_t next = at(s.cu_seqlens, n);
      TORCH_CHECK(next >= previous, op, ": cu_seqlens: expected ascending offsets, got ", previous,
                  " then ", next, " at sequence ", n - 1);
      TORCH_CHECK(next - previous <= most_tokens, op, ": expected at most ", most_tokens,
                  " tokens a sequence, got ", next - previous, " for sequence ", n - 1);
      TORCH_CHECK(s.S == 0 || next - previous <= s.S, op,
                  ": state_indices: expected S >= ", next - previous, " columns for sequence ",
                  n - 1, ", got ", s.S);
      previous = next;
    }
    TORCH_CHECK(previous == s.T, op, ": cu_seqlens: expected to end at T = ", s.T, ", got ",
                previous);
  }
  for (int64_t n = 0; n < s.N; ++n) {
    if (s.state_indices.ptr) {
      for (int64_t j = 0; j < (s.S > 0 ? s.S : 1); ++j) {
        const int64_t row = at(s.state_indices, n, j);
        TORCH_CHECK(row < s.P, op, ": ", rows, ": expected rows below P = ", s.P, ", got ", row,
                    " for sequence ", n);
      }
    }
    // Without columns the count speaks of the call before; its pool's checks know the limit.
    if (s.num_accepted.ptr && s.S > 0) {
      const int64_t accepted = at(s.num_accepted, n);
      TORCH_CHECK(accepted <= s.S, op, ": num_accepted: expected at most ", s.S, ", got ", accepted,
                  " for sequence ", n);
    }
  }
}

void check_window_values(const char* op, const Sequences& s, const Window& w, bool has_base,
                         int64_t most_tokens) {
  Sequences rows = s;
  rows.num_accepted = {};  // counts tokens of the call before, not columns of this one
  rows.S = 0;              // only the first column is read, however many tokens there are
  check_values(op, rows, most_tokens);
  for (int64_t n = 0; n < s.N; ++n) {
    const Sequence seq = sequence_of(s, n, 0);
    if (seq.row < 0 || seq.fresh) continue;
    const int32_t packed = w.fill[seq.row * w.s_fill];
    const WindowCounts c = unpack_fill(packed);
    TORCH_CHECK(packed >= 0 && packed < 1 << 24 && c.fill <= w.R && (c.head == 0 || c.head < w.R) &&
                    (c.head == 0 || !has_base),
                op, ": win_fill: expected counts that a window of R = ", w.R, " can hold, got ",
                packed, " in row ", seq.row);
    TORCH_CHECK(!s.num_accepted.ptr || c.fill == 0 || seq.accepted <= c.drafts + 1, op,
                ": num_accepted: expected at most the ", c.drafts + 1,
                " tokens of the call before, got ", seq.accepted, " for sequence ", n);
  }
}

void check_conv_values(const char* op, const ConvArgs& c) {
  for (int64_t n = 0; n < c.seqs.N; ++n) {
    const Sequence seq = sequence_of(c.seqs, n, 0);
    if (seq.row < 0) continue;
    TORCH_CHECK(seq.row < c.state.P, op, ": state_indices: expected rows below P = ", c.state.P,
                " of conv_state, got ", seq.row, " for sequence ", n);
    const int64_t tokens = seq.end - seq.start;
    if (!c.seqs.num_accepted.ptr || c.W == 1 || tokens == 0) continue;
    const int64_t need = c.W - 2 + std::max(tokens, seq.accepted);
    TORCH_CHECK(c.state.L >= need, op, ": conv_state: expected L >= ", need, " columns for ",
                tokens, " tokens and ", seq.accepted, " accepted ones in sequence ", n, ", got ",
                c.state.L);
  }
}

void check_chunk_values(const char* op, const ChunkArgs& c) {
  for (int64_t n = 0; n < c.seqs.N; ++n) {
    if (c.write_indices.ptr) {
      const int64_t row = at(c.write_indices, n);
      TORCH_CHECK(row < c.write.P, op, ": write_indices: expected rows below P = ", c.write.P,
                  ", got ", row, " for sequence ", n);
    }
    for (int64_t i = 0; i < c.edges; ++i) {
      const int64_t row = at(c.edge_rows, n, i);
      TORCH_CHECK(row < c.write.P, op, ": edge_rows: expected rows below P = ", c.write.P, ", got ",
                  row, " for sequence ", n);
    }
  }
}

}  // namespace gdn
