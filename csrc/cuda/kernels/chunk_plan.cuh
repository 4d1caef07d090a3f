// What the kernels of chunked prefill share: where a chunk's factors lie, which chunk a block owns.
#pragma once

#include "common.cuh"
#include "mma.cuh"

namespace gdn {
namespace cuda {

constexpr int kChunk = 64;  // tokens that the tensor-core kernels take at once

// Factors of one chunk of one value head, written by chunk_factors and read by chunk_scan. With
// D_ij the decay from token j to token i, w_i the decay from the start of the chunk, and rk, rq the
// inverse norms (or 1):
//   inverse^T, panel: row j, column i: ((1 + A)^-1)_ij beta_j, A_ij = beta_i D_ij (k_i . k_j), j <
//   i mixing, panel: row i, column j: scale D_ij (q_i . k_j), j <= i vectors of 64 floats: w_i
//   rk_i; scale w_i rq_i; D_nj rk_j; then w_n
constexpr int kFactorVectors = 3 * kChunk + 4;
constexpr int kFactorBytes = 2 * kPanelBytes + 1024;

struct ChunkLayout {
  unsigned char* factors = nullptr;  // [slots][HV][kFactorBytes]
  float* updates = nullptr;          // low-rank: [N][HV][R][V], token p of a sequence at p % R
  int64_t slots = 0;
  int64_t chunks = 0;  // of every sequence, without cu_seqlens
  int64_t first = 0;   // sequence of blockIdx.y == 0
  FastDiv ratio;       // value heads of a key head
};

// Chunks of packed sequences lie at start / 64 + n and after: unique, ascending, at most
// T / 64 + N, and known without a sum over the sequences before.
__device__ __forceinline__ int64_t first_slot(const ChunkArgs& a, const ChunkLayout& x, int64_t n,
                                              int64_t start) {
  return a.seqs.cu_seqlens.ptr ? start / kChunk + n : n * x.chunks;
}
__device__ __forceinline__ int64_t clipped(const Sequences& s, int64_t n) {
  const int64_t t = at(s.cu_seqlens, n);
  return t < 0 ? 0 : t > s.T ? s.T : t;
}

struct OwnedChunk {
  int64_t b, start;  // first token of the chunk
  int tokens;        // 0: the slot is empty
};
// The chunk of a slot; every lane of the warp takes part and gets the answer.
__device__ __forceinline__ OwnedChunk chunk_of_slot(const ChunkArgs& a, const ChunkLayout& x,
                                                    int64_t slot) {
  OwnedChunk r = {0, 0, 0};
  int64_t end;
  if (!a.seqs.cu_seqlens.ptr) {
    r.b = slot / x.chunks;
    r.start = (slot - r.b * x.chunks) * kChunk;
    end = a.seqs.T;
  } else {
    // Largest n whose first slot is not above `slot`, 32 candidates at a time.
    const int lane = threadIdx.x & 31;
    int64_t low = 0, count = a.seqs.N;
    while (count > 1) {
      const int64_t step = (count + 31) / 32, n = low + lane * step;
      const bool below = n < low + count && clipped(a.seqs, n) / kChunk + n <= slot;
      const unsigned found = __ballot_sync(kFullMask, below);
      const int last = found ? 31 - __clz(found) : 0;
      const int64_t past = low + count;
      low += last * step;
      count = past - low < step ? past - low : step;
    }
    const int64_t start = clipped(a.seqs, low);
    end = clipped(a.seqs, low + 1);
    r.start = start + (slot - (start / kChunk + low)) * kChunk;
    if (r.start < start) end = r.start;
  }
  const int64_t left = end - r.start;
  r.tokens = left <= 0 ? 0 : left < kChunk ? static_cast<int>(left) : kChunk;
  return r;
}

// One panel or several of rows of 16-bit elements into shared memory: `pieces` of 16 bytes a row,
// zeros from row `tokens` on. Called by 128 threads.
template <int PIECES>
__device__ __forceinline__ void copy_rows(uint32_t to, const bf16* from, int64_t stride, int tokens,
                                          int thread) {
  static_assert(PIECES == 8 || PIECES == 16 || PIECES == 32, "64, 128 or 256 columns");
  constexpr int ROWS = 128 / PIECES;  // at once
  const int piece = thread % PIECES, row0 = thread / PIECES;
#pragma unroll
  for (int i = 0; i < kChunk / ROWS; i++) {
    const int row = row0 + i * ROWS;
    const bool valid = row < tokens;
    copy_async(to + (piece >> 3) * kPanelBytes + panel_offset(row, piece & 7),
               from + (valid ? row * stride : 0) + piece * 8, valid);
  }
}

}  // namespace cuda
}  // namespace gdn
