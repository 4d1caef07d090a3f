// Launch arguments. Plain data, no type whose size differs between host and device (there size_t
// and pointers to local memory have 32 bits), and no padding but `pad`: a device whose registers
// have 32 bits may align 64 to 4 bytes. Addresses are global-memory addresses; strides count
// elements.
#pragma once

#include <cstdint>

namespace gdn {
namespace xpu {

static_assert(sizeof(int64_t) == 8 && sizeof(float) == 4, "the same blocks on host and device");

// Of a launch: the 128 words seen for xpu2, less three for the ids of a kernel.
constexpr int kArgumentBytes = 500;

struct Tensor4 {  // [batch, token, head, channel], channels contiguous
  uint64_t addr;
  int64_t sb, st, sh;
  int32_t dtype, pad;
};

struct Gate {  // [batch, token, head]
  uint64_t addr;
  int64_t sb, st, sh;
  int32_t dtype, pad;
};

struct IndexVector {  // int32 or int64; addr 0: absent
  uint64_t addr;
  int64_t s0, s1;
  int32_t wide, pad;
};

struct GateParam {
  uint64_t addr;
  int64_t s0;
  int32_t dtype, pad;
};

struct RecurrentParams {
  Tensor4 q, k, v, out;
  Gate g, beta;  // raw gates: a and b
  GateParam a_log, dt_bias;
  uint64_t state;
  int64_t s_p, s_h, s_v;
  IndexVector rows, cu, accepted;
  uint64_t has_init;
  int64_t s_has;
  int64_t units;  // pieces of work of `unit` state rows each
  int32_t unit, units_per_head;
  int32_t N, T, S, P;
  int32_t H, HV, K, V;
  int32_t raw_gates, l2norm;
  float scale;
  int32_t guarded;  // with S > 0: a sequence whose first column is no row is padding
};
static_assert(sizeof(RecurrentParams) <= kArgumentBytes, "launch arguments");

// Windows of pending updates, with a base state (state != 0) or without (low-rank).
struct WindowParams {
  Tensor4 q, k, v, out;
  Gate g, beta;
  uint64_t state;
  int64_t s_p, s_h, s_v;
  uint64_t win_k, win_u, win_g, fill;
  int32_t sk_p, sk_h, sk_r, su_p, su_h, su_r, sg_p, sg_h, sg_r, s_fill;
  IndexVector rows, cu, accepted;
  uint64_t has_init;
  int32_t s_has, P, N, T, H, HV;
  float scale;
  int16_t K, V, R, unit, units_per_head;
  int16_t token;  // its index within its sequence
  int8_t state_dtype, k_dtype, u_dtype, l2norm;
  int8_t flush;  // 1: fold what there is; 2: forget it
  int8_t pad[3];
};
static_assert(sizeof(WindowParams) <= kArgumentBytes, "launch arguments");

// The convolution alone (H = 0: y = conv(x)) or with split, gates and norm (q, k, v in y, k, v).
struct ConvParams {
  Tensor4 x;                  // [B, T, C]
  uint64_t y, k, v, g, beta;  // contiguous; y, k, v of x's dtype, g and beta float32
  GateParam weight;           // [C, W]: s0 over channels, weight_s1 over taps
  int64_t weight_s1;
  GateParam bias;
  uint64_t pool;  // 0: no history, nothing kept
  int64_t s_p, s_c, s_l;
  IndexVector rows, cu, accepted;
  uint64_t has_init;
  int64_t s_has;
  Gate a, b;
  GateParam a_log, dt_bias;
  int32_t pool_dtype, P, L;
  int32_t leading, silu, l2norm;
  int32_t N, T, C, W, H, HV, K, V;
  int32_t blocks, tiles, tile;  // channel blocks; pieces of `tile` tokens a sequence is cut into
  int32_t gate_units;           // 0 or 1: whether gates are computed
};
static_assert(sizeof(ConvParams) <= kArgumentBytes, "launch arguments");

// One token a sequence, the layer between its projections. `x` is the packed projection, its
// columns q | k | v | z | b | a; the fields the convolution reads have the names of ConvParams.
struct DecodeParams {
  Tensor4 x;
  uint64_t out;  // [N, HV, V] contiguous, of x's dtype
  GateParam weight;
  int64_t weight_s1;
  GateParam bias;
  uint64_t pool;
  int64_t s_p, s_c, s_l;
  uint64_t state;
  int64_t state_sp, state_sh, state_sv;
  IndexVector rows, cu, accepted;
  uint64_t has_init;
  int64_t s_has;
  GateParam a_log, dt_bias, norm_weight;
  int16_t pool_dtype, leading, silu, l2norm;
  int32_t P, L, N, C, H, HV, K, V;
  int16_t W, pad;
  float scale, eps, inv_v;
};
static_assert(sizeof(DecodeParams) <= kArgumentBytes, "launch arguments");

// x and gate are rows of V channels; y is contiguous, of x's dtype.
struct NormParams {
  uint64_t x, gate, y;
  int64_t s_x, s_gate, rows;
  GateParam weight;
  int64_t s_gate_head;  // row r: gate row at (r / heads) * s_gate + (r % heads) * s_gate_head
  int32_t V, dtype, gate_dtype, heads;
  int32_t quiet;  // rows of zeros give zeros, whatever their gate holds: padding
  float eps, inv_v;
  int32_t pad;
};

// Where the chunks of a prefill are. Both tables: int32 [*, 4], see kernels/chunk_plan.xpu.
struct ChunkPlanParams {
  IndexVector cu;               // absent: N sequences of T tokens
  uint64_t chunks;              // batch, first token, tokens, sequence; steps follow each other
  uint64_t sequences;           // sequence, 0, every row, sequence; most chunks first
  int32_t N, T, tokens, steps;  // `tokens` of a chunk
};

// Rows of D channels between a strided tensor of any dtype and dense float32 rows, for the chunked
// rule. Item n is a chunk, or with `pool` a sequence whose rows are those of its pool row.
struct ChunkRowsParams {
  Tensor4 x;       // [batch, row, head, D]; with `pool` the batch is the pool row
  uint64_t rows;   // float32 [items, heads, R, D], contiguous
  uint64_t table;  // int32 [items, 4]: batch, first row, rows, sequence; absent: item, 0, R, item
  uint64_t
      factors;  // float32, absent: none; of row r of a head at (item * heads + head) * s_factor
  int64_t s_factor;
  IndexVector index, guard;  // of sequences: rows below 0 or from P on are padding
  uint64_t has_init;
  int64_t s_has;
  int32_t P, items, heads, ratio;  // head h of `rows` reads head h / ratio of x
  int32_t R, D, l2norm, pool;
  int32_t out;    // 0: x to rows, zero where x has no row; 1: rows to x
  int32_t whole;  // only items whose entry of `of` has this many rows; 0: all
  uint64_t of;    // a table of chunks
  float scale;
  int32_t pad;
};
static_assert(sizeof(ChunkRowsParams) <= kArgumentBytes, "launch arguments");

constexpr int kGateRows = 5;  // decay, beta, w, D_last, beta w of the tokens of a chunk

// What a chunk needs besides matrix products. C, tokens of a chunk, is 32, 64 or 128.
struct ChunkParams {
  uint64_t g, beta;  // float32 [B, HV, T]
  uint64_t table;    // int32 [chunks, 4], as above
  uint64_t gates;    // float32 [chunks, HV, kGateRows, C]
  uint64_t kk, qk;   // float32 [chunks, H, C, C]
  uint64_t A, M;     // float32 [chunks, HV, C, C]
  uint64_t inverse;  // the same; only its diagonal blocks are written
  int32_t chunks, H, HV, T, C, pad;
};

// Windows in a pool, or in scratch, where they are dense and float32.
struct WindowPlace {
  uint64_t k, u, g, fill;
  int64_t sk[3], su[3], sg[3];  // row, head, entry
  int64_t sf;
  int32_t dtype_k, dtype_u;
  int32_t pool;  // whether rows are pool rows; otherwise they are items
  int32_t pad;
};

// Windows of the low-rank form, moved and extended (to a pool: only those of sequences with a
// token). Logical entry e of `from` is its e-th oldest.
struct ChunkWindowParams {
  WindowPlace from, to;
  // float32 [items, HV, R, V], u times the decay of all later entries; or absent
  uint64_t weighted;
  // Of a chunk: float32 [chunks, H, C, K], [chunks, HV, C, V], [B, HV, T].
  uint64_t new_k, new_u, g;
  uint64_t table;     // int32 [items, 4]: batch, first token, tokens, sequence
  IndexVector index;  // pool rows of sequences
  uint64_t has_init;
  int64_t s_has;
  int32_t round_k, round_u;
  int32_t items, P, R, H, HV, K, V, C, T, pad;
};
static_assert(sizeof(ChunkWindowParams) <= kArgumentBytes, "launch arguments");

}  // namespace xpu
}  // namespace gdn
