// What the kernels of chunked prefill share: where a chunk's factors lie, which chunk a block owns.
#pragma once

#include <type_traits>

#include "common.cuh"
#include "mma.cuh"

namespace gdn {
namespace cuda {

constexpr int kChunk = 64;     // tokens that the tensor-core kernels take at once
constexpr int kScanRows = 64;  // of V, a block of chunk_scan; 16 a warp
constexpr int kMaxRatio = 32;  // value heads of a key head

// How inputs of a dtype are multiplied. bfloat16 factors cover every range; float16 ones are kept
// near 1 by powers of two of their own for each row (kScaled); a float32 factor is the sum of two
// float16 numbers.
template <class IN>
struct Format {
  static constexpr bool kScaled = !std::is_same_v<IN, bf16>;
  static constexpr int kParts = sizeof(IN) / 2;
  using T = std::conditional_t<kParts == 2, f16, IN>;  // of a part

  // Factors of one chunk of one value head, written by chunk_factors and read by chunk_scan. With
  // D_ij the decay from token j to token i, w_i the decay from the start of the chunk, and rk, rq
  // the inverse norms (or 1), panels, the parts of each behind one another:
  //   inverse^T, row j, column i: kInverseScale ((1 + A)^-1)_ij beta_j with
  //     A_ij = beta_i D_ij (k_i . k_j), j < i
  //   mixing, row i, column j: D_ij (q_i . k_j), j <= i, times `scale` where there is one part
  // and vectors of 64 floats:
  //   one part: w_i rk_i; scale w_i rq_i; D_nj rk_j; then w_n
  //   two parts: w_i rk_i; w_i; D_nj rk_j; scale rq_i
  // Keys and queries of two parts are written too, their rows multiplied by a power of two that rk
  // and rq undo.
  // Low rank: with e an entry that the chunk starts from, an update of the window or of the chunk
  // before, the products k_e . k_i and k_e . q_i are written in place of keys and queries; of one
  // part they are multiplied by the norms, rk_e rk_i and rk_e rq_i, which the vectors then lack.
  // The weights of what is in the window lie apart (decays).
  static constexpr float kInverseScale = kScaled ? 512.f : 1.f;
  static constexpr int kMixing = kParts * kPanelBytes, kVectors = 2 * kParts * kPanelBytes;
  static constexpr int kBytes = kVectors + 1024;
  static constexpr int kLast = kParts == 2 ? 2 * kChunk - 1 : 3 * kChunk;  // w_n
  static constexpr int kFloats = kParts == 2 ? 4 * kChunk : 3 * kChunk + 4;
  static_assert(kVectors + kFloats * 4 <= kBytes, "the vectors fit");

  template <int K>
  static constexpr int key_bytes() {  // of a chunk of one key head; those of its queries follow
    return kParts * (K / 64) * kPanelBytes;
  }
  // Low rank: the products of the keys that a chunk starts from with its keys, and behind them
  // those with its queries; `entries` rows of 64 columns.
  __host__ __device__ static constexpr int gram_bytes(int entries) {
    return kParts * entries * 128;
  }
};

// Where a layer has few value heads, the state's way through a long sequence would leave most of
// the card idle, so such a sequence is cut into segments. Whether and where depends on its own
// length and on the heads alone: its bits are those of a call of its own.
struct Segments {
  int most = 1;                       // of a sequence; 1: none is cut
  int64_t chunks = 0;                 // a sequence of fewer is not cut
  static constexpr int kChunks = 21;  // of a segment, at least
  // Less than a sequence has that is cut.
  __host__ __device__ int64_t tokens() const { return (chunks - 1) * kChunk; }
};

struct ChunkLayout {
  unsigned char* factors = nullptr;  // [slots][HV][Format::kBytes]
  unsigned char* keys = nullptr;     // two parts or low rank: [slots][H][keys, queries]
  float* decays = nullptr;           // low rank: [slots][HV][64], those of first chunks
  float* beta = nullptr;             // backward: [slots][HV][64]; the inverse is then without it
  float* updates = nullptr;          // low rank by tokens: [N][HV][R][V], token p at p % R
  Segments segments;
  // Segments of a sequence that has a place of its own among `places`:
  float* starts = nullptr;      // [places][HV][most][V][K]: the state before each
  float* steps = nullptr;       // [places][HV][most][K][K]: what multiplies it up to the next
  uint32_t* dropped = nullptr;  // [places][HV][most]: whether nothing of it is left then
  int64_t places = 0;
  int from_segment = 0, count_segments = 0;  // which of them a scan takes, of each place
  int64_t slots = 0;
  int64_t chunks = 0;                                // of every sequence, without cu_seqlens
  int64_t first = 0;                                 // sequence of blockIdx.y == 0
  FastDiv ratio;                                     // value heads of a key head
  bool read_vectors = false, write_vectors = false;  // pools may be read in 16-byte pieces
  bool window_vectors = false;  // keys and updates of the window may be read four at a time
  bool window_beside = false;   // chunk_window may run beside the kernel before it
  bool scan_beside = false;     // the next kernel may run beside this scan
};

// For inputs of type IN; instantiated in files of their own (chunk_launch.cuh).
template <class IN, int K>
cudaError_t chunk_products(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream);
// The states before segments, from what chunk_scan made of each.
cudaError_t join_segments(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream);
// The second kernel of the low-rank form.
template <class IN>
cudaError_t lowrank_scan(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream);

// Sequences that are cut, at most: the places that hold their segments.
inline int64_t places_of(const ChunkArgs& a, const Segments& s) {
  if (s.most == 1 || a.seqs.T <= s.tokens()) return 0;
  const int64_t by_start = a.seqs.T / s.tokens();
  return a.seqs.cu_seqlens.ptr && by_start < a.seqs.N ? by_start : a.seqs.N;
}

// Low rank: entries of the window that there is room for, a multiple of 16.
__host__ __device__ constexpr int window_room(int64_t R) { return R <= 16 ? 16 : kChunk; }

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

// The largest n of which before(n) is true, 0 if it is of none, where it is of all up to one; 32
// candidates at a time, by all lanes of a warp.
template <class Before>
__device__ __forceinline__ int64_t last_sequence(const Sequences& s, Before&& before) {
  const int lane = threadIdx.x & 31;
  int64_t low = 0, count = s.N;
  while (count > 1) {
    const int64_t step = (count + 31) / 32, n = low + lane * step;
    const bool is = n < low + count && before(n);
    const unsigned found = __ballot_sync(kFullMask, is);
    const int last = found ? 31 - __clz(found) : 0;
    const int64_t past = low + count;
    low += last * step;
    count = past - low < step ? past - low : step;
  }
  return low;
}

struct OwnedChunk {
  int64_t n, b, start;  // sequence; first token of the chunk
  int tokens;           // 0: the slot is empty
  bool first;           // of the sequence
};
// The chunk of a slot; every lane of the warp takes part and gets the answer.
__device__ __forceinline__ OwnedChunk chunk_of_slot(const ChunkArgs& a, const ChunkLayout& x,
                                                    int64_t slot) {
  OwnedChunk r = {0, 0, 0, 0, false};
  int64_t end;
  if (!a.seqs.cu_seqlens.ptr) {
    r.n = r.b = slot / x.chunks;
    r.start = (slot - r.b * x.chunks) * kChunk;
    r.first = r.start == 0;
    end = a.seqs.T;
  } else {
    const int64_t low =
        last_sequence(a.seqs, [&](int64_t n) { return clipped(a.seqs, n) / kChunk + n <= slot; });
    const int64_t start = clipped(a.seqs, low);
    end = clipped(a.seqs, low + 1);
    r.n = low;
    r.start = start + (slot - (start / kChunk + low)) * kChunk;
    r.first = r.start == start;
    if (r.start < start) end = r.start;
  }
  const int64_t left = end - r.start;
  r.tokens = left <= 0 ? 0 : left < kChunk ? static_cast<int>(left) : kChunk;
  return r;
}

// The end of a block that has nothing to do. One of them waits, so that the kernel does not end
// before the one that it comes after.
__device__ __forceinline__ void leave() {
  if (blockIdx.x == 0 && blockIdx.y == 0) wait_for_previous_kernel();
}

// What a block takes of a sequence: all of it, or a segment.
struct Stretch {
  Sequence seq;             // its own tokens
  int64_t n = 0;            // the sequence
  int64_t before = 0;       // tokens of the sequence before them
  int64_t first_chunk = 0;  // its slot
  int64_t place = 0;        // of a sequence that is cut
  int segment = -1, segments = 0;
  bool empty = false;  // nothing to do here

  __device__ __forceinline__ int64_t tokens() const {
    return seq.end > seq.start ? seq.end - seq.start : 0;
  }
  __device__ __forceinline__ bool last() const { return segment + 1 >= segments; }
  // The float32 state [rows][K] of a segment of value head `hv`.
  __device__ __forceinline__ float* state(float* states, const ChunkArgs& a, const ChunkLayout& x,
                                          int64_t hv, int segment, int64_t rows) const {
    return states + ((place * a.HV + hv) * x.segments.most + segment) * rows * a.K;
  }
  __device__ __forceinline__ uint32_t& dropped(const ChunkArgs& a, const ChunkLayout& x, int64_t hv,
                                               int segment) const {
    return x.dropped[(place * a.HV + hv) * x.segments.most + segment];
  }
};
__device__ __forceinline__ int64_t chunks_of(int64_t tokens) {
  return (tokens + kChunk - 1) / kChunk;
}
// The sequence at a place, all of its tokens; `empty` where none is cut there.
__device__ __forceinline__ Stretch cut_sequence(const ChunkArgs& a, const ChunkLayout& x,
                                                int64_t place) {
  Stretch r;
  r.n = r.place = place;
  // Two sequences that are cut start further apart than the tokens that make one of them.
  const bool by_start = x.places != a.seqs.N;
  const int64_t tokens = x.segments.tokens();
  if (by_start) {
    r.n = last_sequence(a.seqs, [&](int64_t n) { return clipped(a.seqs, n) / tokens <= place; });
  }
  r.seq = device_sequence(a.seqs, r.n);
  r.empty = r.tokens() <= tokens || (by_start && r.seq.start / tokens != place);
  return r;
}
// Index `index` of the grid of a scan: the segments it takes of all places, then, beside the first
// ones, the sequences.
__device__ __forceinline__ Stretch stretch_of(const ChunkArgs& a, const ChunkLayout& x,
                                              int64_t index) {
  const int64_t pieces = x.places * x.count_segments;
  Stretch r;
  if (index >= pieces) {
    r.n = index - pieces;
    r.seq = device_sequence(a.seqs, r.n);
    r.first_chunk = first_slot(a, x, r.n, r.seq.start);
    r.empty = x.places > 0 && r.tokens() > x.segments.tokens();
    return r;
  }
  const int64_t place = static_cast<uint32_t>(index) / static_cast<uint32_t>(x.count_segments);
  r = cut_sequence(a, x, place);
  if (r.empty) return r;
  r.segment = x.from_segment + static_cast<int>(index - place * x.count_segments);
  const int64_t chunks = chunks_of(r.tokens());
  const int64_t most = chunks / Segments::kChunks;
  const int64_t count = most < x.segments.most ? most : x.segments.most;
  const int64_t each = (chunks + count - 1) / count;
  r.segments = static_cast<int>((chunks + each - 1) / each);
  r.empty = r.segment >= r.segments;
  r.first_chunk = first_slot(a, x, r.n, r.seq.start) + r.segment * each;
  r.before = r.segment * each * kChunk;
  r.seq.start += r.before;
  if (!r.last()) r.seq.end = r.seq.start + each * kChunk;
  return r;
}

// Inclusive sums over 64 values, lane l holding values l and l + 32.
template <class T>
__device__ __forceinline__ void scan64(T& low, T& high, int lane) {
#pragma unroll
  for (int m = 1; m < 32; m <<= 1) {
    const T a = __shfl_up_sync(kFullMask, low, m), b = __shfl_up_sync(kFullMask, high, m);
    if (lane >= m) {
      low += a;
      high += b;
    }
  }
  high += __shfl_sync(kFullMask, low, 31);
}

// Low rank: entries of the window that stay are moved to its start. A thread owns a column.
__device__ __forceinline__ void move_entries(void* p, DType dtype, int64_t home, int64_t pitch,
                                             int oldest, int R, int kept) {
  float entries[64];
  for (int e = 0; e < kept; e++) {
    entries[e] = load_as(p, dtype, home + (oldest + e) % R * pitch);
  }
  for (int e = 0; e < kept; e++) store_as(p, dtype, home + e * pitch, entries[e]);
}

// One panel or several of rows of 16-bit elements into shared memory: `pieces` of 16 bytes a row,
// zeros from row `tokens` on. Called by 128 threads.
template <int PIECES, class T>
__device__ __forceinline__ void copy_rows(uint32_t to, const T* from, int64_t stride, int tokens,
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

// Where piece `piece` (4 floats) of float32 row `row` of a [64][64] tile stands: a warp that reads
// or writes eight rows of V of four pairs of tokens meets all banks.
__device__ __forceinline__ int tile_offset(int row, int piece) {
  return row * 256 + ((piece ^ (row & 6)) << 4);
}

// 64 rows of values: a panel or, with two parts, a float32 tile. Called by 128 threads.
template <class IN>
__device__ __forceinline__ void copy_values(uint32_t to, const IN* from, int64_t stride, int tokens,
                                            int thread) {
  if constexpr (Format<IN>::kParts == 1) {
    copy_rows<8>(to, from, stride, tokens, thread);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int row = (thread >> 4) + 8 * i, piece = thread & 15;
      const bool valid = row < tokens;
      copy_async(to + tile_offset(row, piece), from + (valid ? row : 0) * stride + 4 * piece,
                 valid);
    }
  }
}
// Their transpose, 16 rows of V of warp `warp`, tokens 16 p ...: x[half][row][e] is row g + 8 row,
// token 16 p + 8 half + 2 t + e.
template <class IN>
__device__ __forceinline__ void load_values(float (&x)[2][2][2], const unsigned char* values, int p,
                                            int warp, int lane) {
  using Form = Format<IN>;
  if constexpr (Form::kParts == 1) {
    uint32_t r[4];
    const int row = 16 * p + ((lane >> 4) << 3) + (lane & 7);
    load_transposed(r, shared_address(values) + panel_offset(row, 2 * warp + ((lane >> 3) & 1)));
#pragma unroll
    for (int m = 0; m < 4; m++) {
      const float2 y = unpack_pair<typename Form::T>(r[m]);
      x[m >> 1][m & 1][0] = y.x;
      x[m >> 1][m & 1][1] = y.y;
    }
  } else {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int m = 0; m < 8; m++) {
      const int token = 16 * p + 8 * (m >> 2) + 2 * t + (m & 1), row = g + 8 * ((m >> 1) & 1);
      x[m >> 2][(m >> 1) & 1][m & 1] = *reinterpret_cast<const float*>(
          values + tile_offset(token, 4 * warp + (row >> 2)) + (row & 3) * 4);
    }
  }
}

}  // namespace cuda
}  // namespace gdn
