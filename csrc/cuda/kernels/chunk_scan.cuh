// Second kernel of chunked prefill: the state through the chunks of a sequence.
//
// A warp owns 16 rows of V of one value head and never needs another warp: the state is held as
// S [16, K] in accumulators, so that it is the left operand of both products with it as it lies in
// registers, and what comes out, transposed (rows of V, columns of tokens), is the left operand of
// the next. Per chunk, with X, U, O [16, 64]:
//   X = v^T - w rk (S k^T)      U = X inverse^T      O = scale w rq (S q^T) + U mixing^T
//   S = w_n S + (D_n rk U) k
// Right operands come from shared memory, filled by asynchronous copies: by the same warps, or,
// where a block is alone on its multiprocessor, by four helpers, which also take the outputs out.
// Products sum in float32, and the state stays float32. Their factors are rounded to 16 bits, or
// (float32 inputs) split in two float16 parts; float16 factors S, X, U and D U are brought near 1
// before that by a power of two for each row of V, so that no value leaves their range.
#pragma once

#include "chunk_plan.cuh"

namespace gdn {
namespace cuda {

// What a scan is compiled for.
enum class Scan {
  lone,     // a block alone on its multiprocessor, with helpers that fetch two chunks ahead; pools
            // in vectors
  ahead,    // fetches the next chunk while it works on one; plain pools
  among,    // one chunk at a time, others fill the wait; plain pools
  general,  // the same over any pools
  through,  // no outputs: what a segment of a sequence that is cut makes of a state
};
template <Scan KIND, int PARTS>
struct ScanShape {
  static constexpr bool kHelpers = KIND == Scan::lone, kOutputs = KIND != Scan::through;
  static constexpr bool kThree = kHelpers || (KIND == Scan::through && PARTS == 1);
  static constexpr int kStages = kThree ? 3 : KIND == Scan::ahead ? 2 : 1;
  static constexpr int kThreads = kHelpers ? 256 : 128;
};

// ENTRIES: 0, or low rank with a window of at most so many.
template <class IN, int K, Scan KIND, int ENTRIES>
constexpr int scan_blocks() {  // a multiprocessor, at least
  if (ScanShape<KIND, 1>::kHelpers) return 1;
  if (ENTRIES == 0) return 2;
  return (ENTRIES == 16 ? 3 : 2) + (Format<IN>::kParts == 1);
}

template <class IN, int K, int ENTRIES, bool OUTPUTS = true>
struct ScanShared {
  using Form = Format<IN>;
  // Low rank: what takes the place of keys and queries, see Format::gram_bytes.
  static constexpr int kKeys = ENTRIES ? Form::gram_bytes(ENTRIES) : Form::template key_bytes<K>();
  // Without outputs there are no queries and no mixing panel.
  static constexpr int kQueries = kKeys, kValues = OUTPUTS ? 2 * kKeys : kKeys;
  static constexpr int kFactors = kValues + Form::kParts * kPanelBytes;
  static constexpr int kMixing = kFactors + Form::kMixing;
  static constexpr int kVectors = OUTPUTS ? kFactors + Form::kVectors : kMixing;
  static constexpr int kStage = kVectors + 1024;  // panels start at multiples of 1024
  template <Scan KIND>
  static constexpr bool kStaged = ENTRIES == 0 && OUTPUTS && KIND != Scan::ahead &&
                                  (Form::kParts == 1 || KIND == Scan::general);
  // Behind the stages: with helpers two panels of outputs; the state on its way, 64 rows of K
  // floats.
  template <Scan KIND>
  static constexpr int kOwned = ScanShape<KIND, Form::kParts>::kStages * kStage +
                                (ScanShape<KIND, Form::kParts>::kHelpers ? 2 * kPanelBytes : 0);
  template <Scan KIND>
  static constexpr int kBytes = kOwned<KIND> + (kStaged<KIND> ? kScanRows * K * 4 : 0);
};

// 16 rows of V of a state, as accumulators. PLAIN: pools are float32 with K contiguous.
template <int K, bool PLAIN>
struct ScanState {
  float s[K / 8][4];

  // `at`: offset of row g, column 2t.
  __device__ __forceinline__ void load(const StatePool& pool, int64_t at) {
#pragma unroll
    for (int p = 0; p < K / 8; p++) {
      if constexpr (PLAIN) {
        const float* const from = static_cast<const float*>(pool.ptr) + at + 8 * p;
        const float2 x = *reinterpret_cast<const float2*>(from);
        const float2 y = *reinterpret_cast<const float2*>(from + 8 * pool.s_v);
        s[p][0] = x.x;
        s[p][1] = x.y;
        s[p][2] = y.x;
        s[p][3] = y.y;
      } else {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          s[p][e] = load_as(pool.ptr, pool.dtype,
                            at + (8 * p + (e & 1)) * pool.s_k + 8 * (e >> 1) * pool.s_v);
        }
      }
    }
  }
  __device__ __forceinline__ void store(const StatePool& pool, int64_t at) const {
#pragma unroll
    for (int p = 0; p < K / 8; p++) {
      if constexpr (PLAIN) {
        float* const to = static_cast<float*>(pool.ptr) + at + 8 * p;
        *reinterpret_cast<float2*>(to) = make_float2(s[p][0], s[p][1]);
        *reinterpret_cast<float2*>(to + 8 * pool.s_v) = make_float2(s[p][2], s[p][3]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          store_as(pool.ptr, pool.dtype,
                   at + (8 * p + (e & 1)) * pool.s_k + 8 * (e >> 1) * pool.s_v, s[p][e]);
        }
      }
    }
  }
};

// The same through shared memory: what a lane holds is a few bytes here and there, and a request of
// eight lines an eighth each keeps the second-level cache busier than one of four whole lines. A
// warp moves its 16 rows of V by itself. ACROSS: pools [P, HV, K, V], lines of 16 rows of V; else
// lines of K. Pieces of 16 bytes stand so that half a warp meets all banks.
template <class T, int K, bool ACROSS>
struct StagedState {
  static constexpr int PER = 16 / sizeof(T);  // elements of a piece
  static constexpr int PIECES = (ACROSS ? 16 : K) / PER, ALL = 16 * K / PER;

  static __device__ __forceinline__ int offset(int row, int column) {
    const int in_piece = (ACROSS ? row : column) % PER * sizeof(T);
    if constexpr (!ACROSS) {
      const int x = sizeof(T) == 4 ? (row & 3) << 1 : row & 7;
      return row * K * sizeof(T) + ((column / PER ^ x) << 4) + in_piece;
    } else if constexpr (sizeof(T) == 4) {
      const int half = (column ^ column >> 2) & 1;
      return (column >> 1) * 128 + half * 64 + ((row / PER ^ (column & 2)) << 4) + in_piece;
    } else {
      return column * 32 + ((row / PER ^ (column >> 2 & 1)) << 4) + in_piece;
    }
  }
  // Piece i of all: where it stands here, and in a pool.
  static __device__ __forceinline__ int piece(int i) {
    const int line = i / PIECES, first = i % PIECES * PER;
    return ACROSS ? offset(first, line) : offset(line, first);
  }
  static __device__ __forceinline__ int64_t home(const StatePool& pool, int i) {
    return i / PIECES * (ACROSS ? pool.s_k : pool.s_v) + i % PIECES * PER;
  }
  // `at`: offset of row 0 of the warp's rows.
  static __device__ __forceinline__ void ask(uint32_t rows, const StatePool& pool, int64_t at,
                                             int lane) {
    const T* const from = static_cast<const T*>(pool.ptr) + at;
#pragma unroll
    for (int i = 0; i < ALL / 32; i++) {
      copy_async(rows + piece(32 * i + lane), from + home(pool, 32 * i + lane), true);
    }
  }
  static __device__ __forceinline__ void read(float (&s)[K / 8][4], const unsigned char* rows,
                                              int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int p = 0; p < K / 8; p++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = g + 8 * half, column = 8 * p + 2 * t;
        const unsigned char* const at = rows + offset(row, column);
        if constexpr (ACROSS) {
          s[p][2 * half] = to_float(*reinterpret_cast<const T*>(at));
          s[p][2 * half + 1] =
              to_float(*reinterpret_cast<const T*>(rows + offset(row, column + 1)));
        } else {
          float2 x;
          if constexpr (sizeof(T) == 4) {
            x = *reinterpret_cast<const float2*>(at);
          } else {
            x = unpack_pair<T>(*reinterpret_cast<const uint32_t*>(at));
          }
          s[p][2 * half] = x.x;
          s[p][2 * half + 1] = x.y;
        }
      }
    }
  }
  static __device__ __forceinline__ void write(const float (&s)[K / 8][4], unsigned char* rows,
                                               const StatePool& pool, int64_t to, int lane) {
    const int g = lane >> 2, t = lane & 3;
    __syncwarp();
#pragma unroll
    for (int p = 0; p < K / 8; p++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = g + 8 * half, column = 8 * p + 2 * t;
        unsigned char* const at = rows + offset(row, column);
        const float x = s[p][2 * half], y = s[p][2 * half + 1];
        if constexpr (ACROSS) {
          *reinterpret_cast<T*>(at) = from_float<T>(x);
          *reinterpret_cast<T*>(rows + offset(row, column + 1)) = from_float<T>(y);
        } else if constexpr (sizeof(T) == 4) {
          *reinterpret_cast<float2*>(at) = make_float2(x, y);
        } else {
          *reinterpret_cast<uint32_t*>(at) = pack_pair<T>(x, y);
        }
      }
    }
    __syncwarp();
    T* const out = static_cast<T*>(pool.ptr) + to;
#pragma unroll
    for (int i = 0; i < ALL / 32; i++) {
      *reinterpret_cast<uint4*>(out + home(pool, 32 * i + lane)) =
          *reinterpret_cast<const uint4*>(rows + piece(32 * i + lane));
    }
  }
};
// call(StagedState of this pool); without ANY it is plain.
template <int K, bool ANY, class Call>
__device__ __forceinline__ void with_staging(const StatePool& pool, Call&& call) {
  if constexpr (!ANY) {
    call(StagedState<float, K, false>());
  } else {
    const auto with_layout = [&](auto type) {
      using T = decltype(type);
      if (pool.s_k == 1) {
        call(StagedState<T, K, false>());
      } else {
        call(StagedState<T, K, true>());
      }
    };
    if (pool.dtype == DType::f32) {
      with_layout(0.f);
    } else if (pool.dtype == DType::bf16) {
      with_layout(bf16());
    } else {
      with_layout(f16());
    }
  }
}

// The largest absolute values of a lane's two rows.
template <int N>
__device__ __forceinline__ void row_most(float (&most)[2], const float (&c)[N][4]) {
  most[0] = most[1] = 0.f;
#pragma unroll
  for (int p = 0; p < N; p++) {
#pragma unroll
    for (int e = 0; e < 4; e++) most[e >> 1] = fmaxf(most[e >> 1], fabsf(c[p][e]));
  }
#pragma unroll
  for (int row = 0; row < 2; row++) {
    most[row] = fmaxf(most[row], __shfl_xor_sync(kFullMask, most[row], 1));
    most[row] = fmaxf(most[row], __shfl_xor_sync(kFullMask, most[row], 2));
  }
}

// CUT: sequences may be cut into segments.
template <class IN, int K, Scan KIND, int ENTRIES, bool CUT>
__global__ void __launch_bounds__(ScanShape<KIND, 1>::kThreads, scan_blocks<IN, K, KIND, ENTRIES>())
    chunk_scan(const __grid_constant__ ChunkArgs a, const __grid_constant__ ChunkLayout layout) {
  using Form = Format<IN>;
  using Shape = ScanShape<KIND, Form::kParts>;
  constexpr bool OUTPUTS = Shape::kOutputs;
  using Shared = ScanShared<IN, K, ENTRIES, OUTPUTS>;
  using T = typename Form::T;
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr int PARTS = Form::kParts;
  constexpr bool SCALED = Form::kScaled;
  constexpr bool HELPERS = Shape::kHelpers;
  constexpr int STAGES = Shape::kStages;
  constexpr bool LOWRANK = ENTRIES > 0;
  constexpr bool STAGED = Shared::template kStaged<KIND>;
  constexpr bool ANY = KIND == Scan::lone || KIND == Scan::general;  // pools of any layout
  constexpr int AHEAD = STAGES > 1 ? STAGES - 1 : 1;                 // chunks
  // S q fills the wait for S k; among others, or with factors in parts, it is formed later and
  // fewer registers are needed.
  constexpr bool LATE = STAGES == 1 || PARTS == 2;
  // Between the parts of what the old state is multiplied by.
  constexpr int KEY_STEP = LOWRANK ? ENTRIES * 128 : (K / 64) * kPanelBytes;
  static_assert(!HELPERS || PARTS == 1, "the stages of two parts leave no room for outputs");
  const int thread = threadIdx.x & 127;
  // The same for a whole warp, which the compiler has to know: products in a branch that it takes
  // for divergent would wait for one another.
  const bool helper = HELPERS && uniform(threadIdx.x >> 7) == 1, copies = helper || !HELPERS;
  const int warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  // Without outputs two things are taken through a segment: rows of V from zero, and, with values
  // of zero, those of the identity.
  const int values_slices = static_cast<int>(a.V) / kScanRows;
  const int slices = values_slices + (OUTPUTS ? 0 : K / kScanRows);
  const int hv = blockIdx.x / slices, slice = blockIdx.x - hv * slices;
  const bool identity = !OUTPUTS && slice >= values_slices;
  const int v0 = (identity ? slice - values_slices : slice) * kScanRows;
  const int hk = layout.ratio(hv);
  Stretch own;
  if constexpr (!CUT) {
    own.n = layout.first + blockIdx.y;
    own.seq = device_sequence(a.seqs, own.n);
    own.first_chunk = first_slot(a, layout, own.n, own.seq.start);
  } else {
    own = stretch_of(a, layout, layout.first + blockIdx.y);
    if (!OUTPUTS && own.last()) own.empty = true;  // nobody wants its end
  }
  const Sequence& seq = own.seq;
  if (CUT && (own.empty || (!OUTPUTS && seq.row < 0))) return leave();
  const auto kept_row = [&](int64_t row) { return row >= 0 && row < a.write.P ? row : -1; };
  // What is wanted again where a state is stored: registers are few until then. One part leaves
  // room behind the vectors of a stage.
  struct Later {
    int n, row, before;
  };
  constexpr int HAND_ON = -2;  // to the segment after the first one
  constexpr bool ASIDE = PARTS == 1 && OUTPUTS && CUT;
  static_assert(!ASIDE || Form::kFloats * 4 + sizeof(Later) <= 1024, "there is room");
  Later* const aside = reinterpret_cast<Later*>(shared + Shared::kVectors + Form::kFloats * 4);
  Later kept_here = {};
  if constexpr (OUTPUTS && CUT) {
    if (!ASIDE || threadIdx.x == 0) {
      const int64_t row = a.write_indices.ptr ? at(a.write_indices, own.n) : seq.row;
      kept_here = {static_cast<int>(own.n),
                   own.last()         ? static_cast<int>(kept_row(row))
                   : own.segment == 0 ? HAND_ON
                                      : -1,
                   static_cast<int>(own.before)};
      if (ASIDE) *aside = kept_here;
    }
  }
  const Later& later = ASIDE ? *aside : kept_here;
  const int64_t length = own.tokens();
  const int chunks = static_cast<int>((length + kChunk - 1) / kChunk);
  constexpr int OUT_PIECES = PARTS * 8;  // of 16 bytes, 64 columns
  IN* const out = static_cast<IN*>(a.out.ptr) + offset_of(a.out, seq.b, seq.start, hv) + v0;
  const auto out_piece = [&](int64_t token, int piece) -> uint4& {
    return *reinterpret_cast<uint4*>(out + token * a.out.st + piece * (16 / sizeof(IN)));
  };
  if (seq.row < 0) {
    wait_for_previous_kernel();
    for (int64_t i = threadIdx.x; i < length * OUT_PIECES; i += blockDim.x) {
      out_piece(i / OUT_PIECES, static_cast<int>(i % OUT_PIECES)) = make_uint4(0, 0, 0, 0);
    }
    return;
  }
  const IN* const k = static_cast<const IN*>(a.k.ptr) + offset_of(a.k, seq.b, seq.start, hk);
  const IN* const q = static_cast<const IN*>(a.q.ptr) + offset_of(a.q, seq.b, seq.start, hk);
  const IN* const v = static_cast<const IN*>(a.v.ptr) + offset_of(a.v, seq.b, seq.start, hv) + v0;
  const int64_t first_chunk = own.first_chunk;
  const unsigned char* const factors = layout.factors + (first_chunk * a.HV + hv) * Form::kBytes;
  const unsigned char* const keys = layout.keys + (first_chunk * a.H + hk) * 2 * Shared::kKeys;
  const uint32_t base = shared_address(shared);

  const auto copy_block = [&](uint32_t to, const unsigned char* from, auto bytes) {
    constexpr int BYTES = decltype(bytes)::value;
#pragma unroll
    for (int i = 0; i < (BYTES + 2047) / 2048; i++) {
      const int p = (thread + 128 * i) * 16;
      if (p < BYTES) copy_async(to + p, from + p, true);
    }
  };
  // What the first kernel wrote is asked for after the rest, behind its end.
  const auto ask_inputs = [&](int c, uint32_t stage) {
    const int64_t done = static_cast<int64_t>(c) * kChunk;
    const int tokens = length - done < kChunk ? static_cast<int>(length - done) : kChunk;
    if constexpr (PARTS == 1 && !LOWRANK) {
      copy_rows<K / 8>(stage, k + done * a.k.st, a.k.st, tokens, thread);
      if constexpr (OUTPUTS) {
        copy_rows<K / 8>(stage + Shared::kQueries, q + done * a.q.st, a.q.st, tokens, thread);
      }
    }
    copy_values(stage + Shared::kValues, v + done * a.v.st, a.v.st, identity ? 0 : tokens, thread);
  };
  const auto ask_factors = [&](int c, uint32_t stage) {
    if constexpr (PARTS == 2 || LOWRANK) {
      copy_block(stage, keys + static_cast<int64_t>(c) * a.H * 2 * Shared::kKeys,
                 std::integral_constant<int, Shared::kValues>());
    }
    const unsigned char* const from = factors + static_cast<int64_t>(c) * a.HV * Form::kBytes;
    if constexpr (OUTPUTS) {
      copy_block(stage + Shared::kFactors, from,
                 std::integral_constant<int, Form::kVectors + Form::kFloats * 4>());
    } else {
      copy_block(stage + Shared::kFactors, from, std::integral_constant<int, Form::kMixing>());
      copy_block(stage + Shared::kVectors, from + Form::kVectors,
                 std::integral_constant<int, Form::kFloats * 4>());
    }
  };

  const RightLanes lanes(lane);
  ScanState<K, KIND != Scan::general> S;
  constexpr int TILES = LOWRANK ? ENTRIES / 8 : 2;
  uint32_t W[TILES / 2][PARTS][4];  // low rank: in place of S, a left operand
  PowerOfTwo s_scale[2];            // S.s, or W, is the state times these, a row each
  const auto rescale = [&] {
    if constexpr (SCALED) {
      float most[2];
      row_most(most, S.s);
#pragma unroll
      for (int row = 0; row < 2; row++) s_scale[row] = PowerOfTwo(most[row], 4);
#pragma unroll
      for (int p = 0; p < K / 8; p++) {
#pragma unroll
        for (int e = 0; e < 4; e++) S.s[p][e] *= s_scale[e >> 1].by;
      }
    }
  };
  // The step from one state to the next, S = last S + (decay U) k. First `last`, which needs no U.
  float s_most[2] = {0.f, 0.f};  // of S.s
  const auto decay_state = [&](float last) {
    if constexpr (SCALED) {
      row_most(s_most, S.s);
#pragma unroll
      for (int row = 0; row < 2; row++) s_most[row] = last == 0.f ? 0.f : last * s_most[row];
    }
    if (last == 0.f) {
      clear(S.s);
    } else {
#pragma unroll
      for (int p = 0; p < K / 8; p++) {
#pragma unroll
        for (int e = 0; e < 4; e++) S.s[p][e] *= last;
      }
    }
  };
  // U as accumulators, times u_scale; `decay` may carry what was taken out of k. Left running.
  const auto update = [&](float (&u)[8][4], const PowerOfTwo(&u_scale)[2], uint32_t stage,
                          const float* decay) {
#pragma unroll
    for (int p = 0; p < 8; p++) {
      const float2 d = *reinterpret_cast<const float2*>(decay + 8 * p + 2 * t);
#pragma unroll
      for (int e = 0; e < 4; e++) u[p][e] *= e & 1 ? d.y : d.x;
    }
    if constexpr (SCALED) {
      // The scale of S stays while the largest of what is added is between 4 and 64 in it.
      float most[2];
      row_most(most, u);
      bool outside = false;
#pragma unroll
      for (int row = 0; row < 2; row++) {
        most[row] = fmaxf(s_most[row] * s_scale[row].back, most[row] * u_scale[row].back);
        const float x = most[row] * s_scale[row].by;
        outside = outside || (x < 4.f && x > 0.f) || x > 64.f;
      }
      if (__any_sync(kFullMask, outside)) {
        float factor[2];
#pragma unroll
        for (int row = 0; row < 2; row++) {
          const PowerOfTwo next(most[row], 4);
          factor[row] = next.by * s_scale[row].back;
          s_scale[row] = next;
        }
#pragma unroll
        for (int p = 0; p < K / 8; p++) {
#pragma unroll
          for (int e = 0; e < 4; e++) S.s[p][e] *= factor[e >> 1];
        }
      }
      const float factor[2] = {s_scale[0].by * u_scale[0].back, s_scale[1].by * u_scale[1].back};
#pragma unroll
      for (int p = 0; p < 8; p++) {
#pragma unroll
        for (int e = 0; e < 4; e++) u[p][e] *= factor[e >> 1];
      }
    }
    uint32_t left[4][PARTS][4];
#pragma unroll
    for (int s = 0; s < 4; s++) pack_left<T>(left[s], u[2 * s], u[2 * s + 1]);
    settle(S.s);
    settle(left);
    open_products();
#pragma unroll
    for (int s = 0; s < 4; s++) {
      multiply_columns<T>(S.s, left[s], stage, 0, KEY_STEP, s, 0, lanes);
    }
    close_products();
  };
  // Low rank: W = the updates of the window, TILES accumulators to be multiplied by `back`, a row
  // each, times their decays. A decay of zero drops what it meets, whatever that is.
  const auto set_window = [&](const float (*u)[4], const float* decay, const float (&back)[2]) {
    float x[TILES][4];
#pragma unroll
    for (int p = 0; p < TILES; p++) {
      const float2 d = *reinterpret_cast<const float2*>(decay + 8 * p + 2 * t);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float by = e & 1 ? d.y : d.x;
        x[p][e] = by == 0.f ? 0.f : by * u[p][e];
        if constexpr (SCALED) x[p][e] *= back[e >> 1];
      }
    }
    if constexpr (SCALED) {
      float most[2];
      row_most(most, x);
#pragma unroll
      for (int row = 0; row < 2; row++) s_scale[row] = PowerOfTwo(most[row], 4);
#pragma unroll
      for (int p = 0; p < TILES; p++) {
#pragma unroll
        for (int e = 0; e < 4; e++) x[p][e] *= s_scale[e >> 1].by;
      }
    }
#pragma unroll
    for (int s = 0; s < TILES / 2; s++) pack_left<T>(W[s], x[2 * s], x[2 * s + 1]);
  };
  const auto home = [&](const StatePool& pool, int64_t row, int64_t r) {
    return row * pool.s_p + hv * pool.s_h + (v0 + 16 * warp + r) * pool.s_v;
  };
  unsigned char* const staged = shared + Shared::template kOwned<KIND> + warp * 16 * K * 4;
  const auto keep = [&](int64_t row) {
    const auto multiply = [&](float x, float y) {
#pragma unroll
      for (int p = 0; p < K / 8; p++) {
#pragma unroll
        for (int e = 0; e < 4; e++) S.s[p][e] *= e & 2 ? y : x;
      }
    };
    if constexpr (SCALED) multiply(s_scale[0].back, s_scale[1].back);
    if (STAGED && (!ANY || layout.write_vectors)) {
      with_staging<K, ANY>(a.write, [&](auto pool) {
        decltype(pool)::write(S.s, staged, a.write, home(a.write, row, 0), lane);
      });
    } else {
      S.store(a.write, home(a.write, row, g) + 2 * t * a.write.s_k);
    }
    if constexpr (SCALED) multiply(s_scale[0].by, s_scale[1].by);
  };
  const bool read_state =
      OUTPUTS && !LOWRANK && own.segment <= 0 && a.read.ptr && !seq.fresh && !helper;
  // States of segments lie apart, in float32.
  const auto rows_of = [](float* from) {
    StatePool pool;
    pool.ptr = from;
    pool.s_v = K;
    pool.s_k = 1;
    return pool;
  };
  const int64_t row_home = (v0 + 16 * warp + g) * K + 2 * t;

  if (!LOWRANK) clear(S.s);
  const int R = LOWRANK ? static_cast<int>(a.window.R) : 1;
  const int news = LOWRANK && length > R ? R : static_cast<int>(length);
  int kept = 0;  // low rank: entries of the window that stay
  // Updates of the window slot by slot, live or not: the first kernel gives the others no weight.
  uint32_t stored[TILES][4] = {};
  if (LOWRANK && !helper && !seq.fresh) {
    const Window& w = a.window;
    const int64_t from = seq.row * w.su_p + hv * w.su_h + v0 + 16 * warp + g;
#pragma unroll
    for (int p = 0; p < TILES; p++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int slot = 8 * p + 2 * t + (e & 1);
        if (slot < R) stored[p][e] = load_bits(w.u, w.u_dtype, from + slot * w.su_r + 8 * (e >> 1));
      }
    }
  }
  // Inputs are older than the first kernel, which has waited for all that came before it.
  if (copies && chunks > 0) ask_inputs(0, base);
  const bool stage_in = read_state && STAGED && (!ANY || layout.read_vectors);
  if (stage_in) {
    with_staging<K, ANY>(a.read, [&](auto pool) {
      decltype(pool)::ask(shared_address(staged), a.read, home(a.read, seq.row, 0), lane);
    });
    commit_copies();
  } else if (read_state) {
    S.load(a.read, home(a.read, seq.row, g) + 2 * t * a.read.s_k);
  }
  // Without outputs: beside the scan of the first segments, which lets this one in when the first
  // kernel has ended; then it waits at its end only, for the kernel after it.
  if (OUTPUTS) wait_for_previous_kernel();
  if (LOWRANK || (CUT && layout.scan_beside)) let_next_kernel_start();  // chunk_window or segments
  if constexpr (!OUTPUTS) {
    if (identity) {
      const int row = v0 + 16 * warp + g;
#pragma unroll
      for (int p = 0; p < K / 8; p++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          S.s[p][e] = row + 8 * (e >> 1) == 8 * p + 2 * t + (e & 1) ? 1.f : 0.f;
        }
      }
    }
    rescale();
  } else if (CUT && own.segment > 0 && !helper) {
    S.load(rows_of(own.state(layout.starts, a, layout, hv, own.segment, a.V)), row_home);
    rescale();
  }
  if (copies) {
    if (chunks > 0) ask_factors(0, base);
    commit_copies();
#pragma unroll
    for (int c = 1; c < AHEAD; c++) {
      if (c < chunks) {
        ask_inputs(c, base + c * Shared::kStage);
        ask_factors(c, base + c * Shared::kStage);
      }
      commit_copies();
    }
  }
  if constexpr (LOWRANK) {
    if (!helper && chunks > 0) {
      float u[TILES][4];
#pragma unroll
      for (int p = 0; p < TILES; p++) {
#pragma unroll
        for (int e = 0; e < 4; e++) u[p][e] = bits_to_float(stored[p][e], a.window.u_dtype);
      }
      const float one[2] = {1.f, 1.f};
      set_window(u, layout.decays + (first_chunk * a.HV + hv) * kChunk, one);
    }
    if (news < R && !seq.fresh) {
      // Few tokens: what stays of the window moves to its start, once everyone has read it.
      const Window& w = a.window;
      const WindowCounts counts = unpack_fill(w.fill[seq.row * w.s_fill]);
      const int fill = counts.fill < R ? counts.fill : R;
      kept = fill < R - news ? fill : R - news;
      __syncthreads();
      if (threadIdx.x < kScanRows && news > 0 && kept > 0) {
        move_entries(w.u, w.u_dtype, seq.row * w.su_p + hv * w.su_h + v0 + threadIdx.x, w.su_r,
                     counts.head + fill - kept, R, kept);
      }
    }
  }
  if (stage_in) {
    wait_copies<0>();
    __syncwarp();
    with_staging<K, ANY>(a.read, [&](auto pool) { decltype(pool)::read(S.s, staged, lane); });
  }
  if (read_state) rescale();
  // Rows of 16-byte pieces of a finished output, 128 bytes a token.
  unsigned char* const results = shared + STAGES * Shared::kStage;
  const auto take_out = [&](int c) {
    const int64_t done = static_cast<int64_t>(c) * kChunk;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int token = 16 * i + (thread >> 3), piece = thread & 7;
      if (token < length - done) {
        out_piece(done + token, piece) = *reinterpret_cast<const uint4*>(
            results + (c & 1) * kPanelBytes + panel_offset(token, piece));
      }
    }
  };

  bool dropped = false;
  for (int c = 0; c < chunks; c++) {
    if (copies) {
      wait_copies<AHEAD - 1>();
      publish_shared();
    }
    __syncthreads();
    if (STAGES > 1 && copies) {
      if (c + AHEAD < chunks) {
        const uint32_t next = base + ((c + AHEAD) % STAGES) * Shared::kStage;
        ask_inputs(c + AHEAD, next);
        ask_factors(c + AHEAD, next);
      }
      commit_copies();
    }
    if (helper) {
      if (c > 0) take_out(c - 1);
      continue;
    }
    const uint32_t stage = base + (c % STAGES) * Shared::kStage;
    unsigned char* const stage_memory = shared + (c % STAGES) * Shared::kStage;
    const float* const vectors = reinterpret_cast<const float*>(stage_memory + Shared::kVectors);
    const int64_t done = static_cast<int64_t>(c) * kChunk;

    // The last decay from the start is zero if any is: then what the old state gave is dropped,
    // whatever it holds.
    const float w_last = vectors[Form::kLast];
    dropped = dropped || w_last == 0.f;
    const auto drop = [&](float (&c)[8][4], const float* w) {
      if (w_last != 0.f) return;
#pragma unroll
      for (int p = 0; p < 8; p++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if (w[8 * p + 2 * t + (e & 1)] == 0.f) c[p][e] = 0.f;
        }
      }
    };
    // O, the products of S with q, as the first part of the outputs.
    const auto scale_outputs = [&](float (&O)[8][4], const float (&factor)[2]) {
      drop(O, vectors + kChunk);
#pragma unroll
      for (int p = 0; p < 8; p++) {
        const float2 w = *reinterpret_cast<const float2*>(vectors + kChunk + 8 * p + 2 * t);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          O[p][e] *= e & 1 ? w.y : w.x;
          if constexpr (SCALED) O[p][e] *= factor[e >> 1];
        }
      }
    };
    // Adds what U gives; left running.
    const auto mix = [&](float (&O)[8][4], uint32_t (&left)[4][PARTS][4]) {
      settle(O);
      settle(left);
      open_products();
#pragma unroll
      for (int s = 0; s < 4; s++) {
        multiply_rows<T>(O, left[s], stage, Shared::kMixing, kPanelBytes, s, s, lanes);
      }
      close_products();
    };
    // Finished outputs in shared memory. Without helpers over the values of this warp, which nobody
    // else reads.
    unsigned char* const result =
        HELPERS ? results + (c & 1) * kPanelBytes : stage_memory + Shared::kValues;
    const auto put_outputs = [&](float (&O)[8][4], const float (&factor)[2]) {
      if constexpr (SCALED) {
#pragma unroll
        for (int p = 0; p < 8; p++) {
          float2 m = make_float2(1.f, 1.f);
          if constexpr (PARTS == 2) {
            m = *reinterpret_cast<const float2*>(vectors + 3 * kChunk + 8 * p + 2 * t);
          }
#pragma unroll
          for (int e = 0; e < 4; e++) {
            if constexpr (PARTS == 2) O[p][e] *= e & 1 ? m.y : m.x;
            O[p][e] *= factor[e >> 1];
          }
        }
      }
      __syncwarp();
      if constexpr (PARTS == 1) {
#pragma unroll
        for (int p = 0; p < 8; p += 2) {
          uint32_t x[4];
#pragma unroll
          for (int m = 0; m < 4; m++) {
            x[m] = pack_pair<T>(O[p + (m >> 1)][2 * (m & 1)], O[p + (m >> 1)][2 * (m & 1) + 1]);
          }
          store_transposed(x, lane, [&](int l) {
            return result + panel_offset(8 * (p + (l >> 4)) + (l & 7), 2 * warp + ((l >> 3) & 1));
          });
        }
      } else {
#pragma unroll
        for (int p = 0; p < 8; p++) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int token = 8 * p + 2 * t + (e & 1), row = g + 8 * (e >> 1);
            *reinterpret_cast<float*>(result + tile_offset(token, 4 * warp + (row >> 2)) +
                                      (row & 3) * 4) = O[p][e];
          }
        }
      }
    };
    // The products with the old state, by k or by q; left running.
    const auto multiply_state = [&](float (&c)[8][4], const uint32_t (&left)[K / 16][PARTS][4],
                                    uint32_t panels) {
      open_products();
      if constexpr (LOWRANK) {
        multiply_columns<T, false>(c, W[0], stage, panels, KEY_STEP, 0, 0, lanes);
#pragma unroll
        for (int s = 1; s < TILES / 2; s++) {
          multiply_columns<T>(c, W[s], stage, panels, KEY_STEP, s, 0, lanes);
        }
      } else {
        multiply_rows<T, false>(c, left[0], stage, panels, KEY_STEP, 0, 0, lanes);
#pragma unroll
        for (int s = 1; s < K / 16; s++) {
          multiply_rows<T>(c, left[s], stage, panels + (s >> 2) * kPanelBytes, KEY_STEP, s & 3, 0,
                           lanes);
        }
      }
      close_products();
    };
    const auto pack_state = [&](uint32_t (&left)[K / 16][PARTS][4]) {
      if constexpr (LOWRANK) {
        settle(W);
      } else {
#pragma unroll
        for (int s = 0; s < K / 16; s++) pack_left<T>(left[s], S.s[2 * s], S.s[2 * s + 1]);
      }
    };
    constexpr bool EARLY = !LATE && OUTPUTS;
    float O[8][4], U[8][4];
    uint32_t X[4][PARTS][4];
    PowerOfTwo u_scale[2];  // U is that of the state times these
    {
      float P[8][4];
      uint32_t left[K / 16][PARTS][4];
      pack_state(left);
      multiply_state(P, left, 0);
      if (EARLY) multiply_state(O, left, Shared::kQueries);
      float values[4][2][2][2];
      float2 weights[4][2];
      const auto fetch = [&](int p) {
        load_values<IN>(values[p], stage_memory + Shared::kValues, p, warp, lane);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          weights[p][half] = *reinterpret_cast<const float2*>(vectors + 16 * p + 8 * half + 2 * t);
        }
      };
      // A block with registers to spare reads while it waits.
#pragma unroll
      for (int p = 0; p < 4; p++) {
        if (!LATE) fetch(p);
      }
      await_products<EARLY>(P);
      drop(P, vectors);
#pragma unroll
      for (int p = 0; p < 4; p++) {
        if (LATE) fetch(p);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float (&x)[2][2] = values[p][half];
          const float2 w = weights[p][half];
          float (&y)[4] = P[2 * p + half];
#pragma unroll
          for (int row = 0; row < 2; row++) {
            if constexpr (SCALED) {
              y[2 * row] *= s_scale[row].back;
              y[2 * row + 1] *= s_scale[row].back;
            }
            y[2 * row] = x[row][0] - w.x * y[2 * row];
            y[2 * row + 1] = x[row][1] - w.y * y[2 * row + 1];
          }
        }
      }
      if constexpr (SCALED) {
        float most[2];
        row_most(most, P);
#pragma unroll
        for (int row = 0; row < 2; row++) u_scale[row] = PowerOfTwo(most[row], -1);
#pragma unroll
        for (int p = 0; p < 8; p++) {
#pragma unroll
          for (int e = 0; e < 4; e++) P[p][e] *= u_scale[e >> 1].by;
        }
#pragma unroll
        for (int row = 0; row < 2; row++) {
          u_scale[row].by *= Form::kInverseScale;
          u_scale[row].back *= 1.f / Form::kInverseScale;
        }
      }
#pragma unroll
      for (int s = 0; s < 4; s++) pack_left<T>(X[s], P[2 * s], P[2 * s + 1]);
    }
    // Row j of the panel has zeros before column j.
    settle(X);
    open_products();
    multiply_columns<T, false>(U, X[0], stage, Shared::kFactors, kPanelBytes, 0, 0, lanes);
#pragma unroll
    for (int s = 1; s < 4; s++) {
      multiply_columns<T>(U, X[s], stage, Shared::kFactors, kPanelBytes, s, s, lanes);
    }
    close_products();
    if constexpr (!OUTPUTS) {
      decay_state(w_last);  // S has been packed, no product reads it
      await_products<0>(U);
      update(U, u_scale, stage, vectors + 2 * kChunk);
      await_products<0>(S.s);
      if (STAGES == 1 && c + 1 < chunks) {
        __syncthreads();
        ask_inputs(c + 1, base);
        ask_factors(c + 1, base);
        commit_copies();
      }
      continue;
    }
    const float o_first[2] = {s_scale[0].back * u_scale[0].by, s_scale[1].back * u_scale[1].by};
    const float o_last[2] = {u_scale[0].back, u_scale[1].back};
    if (LATE) {
      await_products<0>(U);
      uint32_t left[K / 16][PARTS][4];
      pack_state(left);
      multiply_state(O, left, Shared::kQueries);
    }
    await_products<!LATE>(O);
    scale_outputs(O, o_first);
    if (!LATE) {
      if (!LOWRANK) decay_state(w_last);  // S has been packed, no product reads it
      await_products<0>(U);
    }
    uint32_t left[4][PARTS][4];
#pragma unroll
    for (int s = 0; s < 4; s++) pack_left<T>(left[s], U[2 * s], U[2 * s + 1]);
    mix(O, left);
    if (LOWRANK) {
      // The next chunk starts from the newest R updates alone, as the window stores them; D_n is
      // zero for the others.
      const DType dtype = a.window.u_dtype;
      const auto round_pairs = [&](auto type) {
        using W = decltype(type);
#pragma unroll
        for (int p = 0; p < 8; p++) {
#pragma unroll
          for (int row = 0; row < 2; row++) {
            float* const x = U[p] + 2 * row;
            const float by = SCALED ? u_scale[row].by : 1.f,
                        back = SCALED ? u_scale[row].back : 1.f;
            const float2 y = unpack_pair<W>(pack_pair<W>(x[0] * back, x[1] * back));
            x[0] = y.x * by;
            x[1] = y.y * by;
          }
        }
      };
      if (dtype == DType::bf16) round_pairs(bf16());
      if (dtype == DType::f16) round_pairs(f16());
      if (done + kChunk > length - news) {
        // The newest of the sequence, tokens first to end of this chunk, go into the window behind
        // what stays there.
        const Window& w = a.window;
        const int64_t before = length - news - done;
        const int first = before > 0 ? static_cast<int>(before) : 0;
        const int end = length - done < kChunk ? static_cast<int>(length - done) : kChunk;
        const int64_t to = seq.row * w.su_p + hv * w.su_h + v0 + 16 * warp;
        const int entry = kept - static_cast<int>(before);  // of token 0
        if (PARTS == 1 && dtype != DType::f32 && layout.window_vectors) {
          // Through the values of this warp, as outputs.
          unsigned char* const panel = stage_memory + Shared::kValues;
          __syncwarp();
#pragma unroll
          for (int p = 0; p < 8; p += 2) {
            uint32_t x[4];
#pragma unroll
            for (int m = 0; m < 4; m++) {
              const float back = SCALED ? u_scale[m & 1].back : 1.f;
              const float low = back * U[p + (m >> 1)][2 * (m & 1)];
              const float high = back * U[p + (m >> 1)][2 * (m & 1) + 1];
              x[m] = dtype == DType::bf16 ? pack_pair<bf16>(low, high) : pack_pair<f16>(low, high);
            }
            store_transposed(x, lane, [&](int l) {
              return panel + panel_offset(8 * (p + (l >> 4)) + (l & 7), 2 * warp + ((l >> 3) & 1));
            });
          }
          __syncwarp();
          for (int i = 4 * first + lane; i < 4 * end; i += 32) {
            const int token = i >> 2, part = i & 3;
            *reinterpret_cast<uint2*>(static_cast<uint16_t*>(w.u) + to + (entry + token) * w.su_r +
                                      4 * part) =
                *reinterpret_cast<const uint2*>(
                    panel + panel_offset(token, 2 * warp + (part >> 1)) + (part & 1) * 8);
          }
        } else {
#pragma unroll
          for (int p = 0; p < 8; p++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
              const int token = 8 * p + 2 * t + (e & 1);
              if (token >= first && token < end) {
                const int64_t at = to + (entry + token) * w.su_r + g + 8 * (e >> 1);
                store_as(w.u, dtype, at, SCALED ? U[p][e] * u_scale[e >> 1].back : U[p][e]);
              }
            }
          }
        }
      }
    }
    if constexpr (LOWRANK) {
      if (c + 1 < chunks) set_window(U + (8 - TILES), vectors + 3 * kChunk - 8 * TILES, o_last);
      await_products<0>(O);
    } else {
      if (LATE) decay_state(w_last);
      update(U, u_scale, stage, vectors + 2 * kChunk);
      await_products<1>(O);
    }
    put_outputs(O, o_last);
    if (!HELPERS) {
      __syncwarp();
      constexpr int OWN = OUT_PIECES / 4, AT_ONCE = 32 / OWN;  // pieces of this warp, tokens
#pragma unroll
      for (int i = 0; i < kChunk / AT_ONCE; i++) {
        const int token = AT_ONCE * i + lane / OWN, piece = OWN * warp + lane % OWN;
        if (token < length - done) {
          out_piece(done + token, piece) = *reinterpret_cast<const uint4*>(
              result + (PARTS == 1 ? panel_offset(token, piece) : tile_offset(token, piece)));
        }
      }
    }

    if (!LOWRANK) await_products<0>(S.s);
    if (!LOWRANK && a.edges > 0) {
      const int64_t end = (CUT ? later.before : 0) + done + kChunk;
      if (done + kChunk <= length && end % a.C == 0 && end / a.C <= a.edges) {
        const int64_t n = CUT ? later.n : own.n;
        const int64_t row = kept_row(at(a.edge_rows, n, end / a.C - 1));
        if (row >= 0) keep(row);
      }
    }
    if (STAGES == 1 && c + 1 < chunks) {
      __syncthreads();
      ask_inputs(c + 1, base);
      ask_factors(c + 1, base);
      commit_copies();
    }
  }
  if (HELPERS) {
    __syncthreads();
    if (helper) {
      if (chunks > 0) take_out(chunks - 1);
      return;
    }
  }
  const auto unscale = [&] {
    if constexpr (SCALED) {
#pragma unroll
      for (int p = 0; p < K / 8; p++) {
#pragma unroll
        for (int e = 0; e < 4; e++) S.s[p][e] *= s_scale[e >> 1].back;
      }
    }
  };
  if constexpr (!OUTPUTS) {
    unscale();
    if (identity) {
      S.store(rows_of(own.state(layout.steps, a, layout, hv, own.segment, K)), row_home);
      if (v0 == 0 && threadIdx.x == 0) own.dropped(a, layout, hv, own.segment) = dropped;
    } else {
      S.store(rows_of(own.state(layout.starts, a, layout, hv, own.segment + 1, a.V)), row_home);
    }
    wait_for_previous_kernel();
  } else if constexpr (!CUT && !LOWRANK) {
    const int64_t row = kept_row(a.write_indices.ptr ? at(a.write_indices, own.n) : seq.row);
    if (row >= 0) keep(row);
  } else if constexpr (CUT) {
    if (ASIDE && !HELPERS && chunks == 0) __syncthreads();
    if (later.row >= 0) keep(later.row);
    if (later.row == HAND_ON) {
      own.place = layout.first + blockIdx.y;
      unscale();
      S.store(rows_of(own.state(layout.starts, a, layout, hv, 1, a.V)), row_home);
    }
  }
}

}  // namespace cuda
}  // namespace gdn
