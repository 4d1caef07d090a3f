// Argument blocks: everything a kernel may know about a call, with no torch in it.
//
// csrc/checks.cpp turns tensors into these blocks after every check has passed; each backend's glue
// file fills in the outputs and hands the block to a kernel. All strides count elements.
#pragma once

#include <cstdint>

namespace gdn {

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2 };
inline int64_t size_of(DType d) { return d == DType::f32 ? 4 : 2; }  // bytes of an element

constexpr int kMaxHeadDim = 512;                // largest K or V any kernel accepts
constexpr int kMaxWindow = 64;                  // largest R
constexpr int kMaxConvWidth = 8;                // largest W
constexpr int kMinChunk = 16, kMaxChunk = 128;  // tokens of a chunk
constexpr int kDecodeTokens = 16;  // most tokens a sequence may bring to the fused decode step
constexpr float kL2Eps = 1e-6f;    // x * rsqrt(sum(x^2) + kL2Eps), as in the model

// A tensor indexed [batch, token, head, channel]; an absent axis has stride 0.
struct View {
  void* ptr = nullptr;
  DType dtype = DType::f32;
  int64_t sb = 0, st = 0, sh = 0, sd = 1;
};

// A vector or matrix of parameters (A_log, dt_bias, weights), f32 or an activation dtype.
struct Param {
  const void* ptr = nullptr;  // null = absent
  DType dtype = DType::f32;
  int64_t s0 = 0, s1 = 0;
};

// An int32 or int64 tensor of one or two dimensions.
struct Index {
  const void* ptr = nullptr;  // null = absent
  bool is64 = false;
  int64_t s0 = 0, s1 = 0;
};

// Which tokens form which sequence, and which pool row each sequence owns.
struct Sequences {
  int64_t N = 0;         // sequences
  int64_t B = 0, T = 0;  // token tensor: B x T; with cu_seqlens B == 1 and T is the total
  int64_t P = 0;         // pool rows
  Index cu_seqlens;      // [N+1]; absent: sequence n is batch row n, all T tokens
  Index state_indices;   // [N] or [N, S]; negative = padding; absent: row n
  int64_t S = 0;         // columns of state_indices; 0 = one row a sequence
  const bool* has_initial_state = nullptr;  // [N]; false = start from zero without reading
  int64_t s_has = 0;
  Index num_accepted;  // [N]; below 1 = padding
};

// Pool of states, logically [P, HV, V, K]; either s_k or s_v is 1.
struct StatePool {
  void* ptr = nullptr;
  DType dtype = DType::f32;
  int64_t P = 0;
  int64_t s_p = 0, s_h = 0, s_v = 0, s_k = 0;
};

// Pool of conv histories, logically [P, C, L].
struct ConvPool {
  void* ptr = nullptr;
  DType dtype = DType::f32;
  int64_t P = 0, L = 0;
  int64_t s_p = 0, s_c = 0, s_l = 0;
  bool leading = false;  // false: live columns are the last W-1 (newest last); true: the first W-1
};

// Pending rank-1 updates: win_k [P,H,R,K], win_u [P,HV,R,V], win_g [P,HV,R] f32, win_fill [P]
// int32. Last dimensions are contiguous.
struct Window {
  void* k = nullptr;
  void* u = nullptr;
  float* g = nullptr;
  int32_t* fill = nullptr;
  DType k_dtype = DType::f32, u_dtype = DType::f32;
  int64_t P = 0, R = 0;
  int64_t sk_p = 0, sk_h = 0, sk_r = 0;
  int64_t su_p = 0, su_h = 0, su_r = 0;
  int64_t sg_p = 0, sg_h = 0, sg_r = 1;
  int64_t s_fill = 1;
};

// Gates: either ready (g, beta) or raw (a, b with A_log, dt_bias), see `raw`.
struct Gates {
  bool raw = false;
  View g, beta;  // raw: g holds a, beta holds b; indexed [batch, token, head]
  Param A_log, dt_bias;
};

struct RecurrentArgs {
  Sequences seqs;
  int64_t H = 0, HV = 0, K = 0, V = 0;
  View q, k, v, out;
  Gates gates;
  StatePool state;  // ptr null in the low-rank form
  Window window;    // fill null in the full form
  float scale = 1.f;
  bool l2norm = false;
  bool fast = false;  // products of a 16-bit state may be made in 16 bits
};

// Chunked prefill. seqs.state_indices are the rows of `read`; rows of `write` are `write_indices`,
// or the same where absent. `read` with a null pointer: every sequence starts from zero.
struct ChunkArgs {
  Sequences seqs;
  int64_t H = 0, HV = 0, K = 0, V = 0, C = 64;  // C = tokens of a chunk
  View q, k, v, out;
  Gates gates;
  StatePool read, write;
  Index write_indices;
  Index edge_rows;  // [N, edges]: row that receives the state after token C * (i + 1)
  int64_t edges = 0;
  Window window;  // chunk_lowrank only; read and write are null then
  float scale = 1.f;
  bool l2norm = false;
  bool fast = false;  // operands of products may be rounded to the dtype of q, k, v
};

// Gradients of `chunk`. forward.read is the initial state, if any; forward.out and write are
// unused.
struct ChunkBackwardArgs {
  ChunkArgs forward;
  View grad_out;
  StatePool grad_state;        // of the final state; ptr null: zero
  View dq, dk, dv, dg, dbeta;  // outputs, contiguous
  StatePool dstate;            // of the initial state, contiguous
  float* work = nullptr;       // scratch of the CPU kernel, which says how much: linear in T
};

struct GatingArgs {
  int64_t rows_b = 0, rows_t = 0, HV = 0;
  View a, b;
  Param A_log, dt_bias;
  float* g = nullptr;     // [rows_b, rows_t, HV] contiguous
  float* beta = nullptr;  // same
};

struct ConvArgs {
  Sequences seqs;
  int64_t C = 0, W = 0;
  View x, y;  // [B, T, C]: no heads, channels are `sd` apart
  Param weight, bias;
  ConvPool state;  // ptr null: no history, nothing kept
  bool silu = false;
};

// y [M, N] = x [M, K] W^T with W [N, K], bf16 or f16; rows are contiguous, y throughout.
struct LinearArgs {
  int64_t M = 0, N = 0, K = 0;
  const void* x = nullptr;
  const void* w = nullptr;
  void* y = nullptr;
  DType dtype = DType::bf16;
  int64_t s_x = 0, s_w = 0;
};

// conv + SiLU + split + gating (+ l2norm) in one pass.
struct ConvGatingArgs {
  ConvArgs conv;  // x = mixed_qkv; y unused
  int64_t H = 0, HV = 0, K = 0, V = 0;
  Gates gates;  // raw
  bool l2norm = false;
  View q, k, v;           // outputs, contiguous
  float* g = nullptr;     // [B, T, HV]
  float* beta = nullptr;  // [B, T, HV]
};

struct NormArgs {
  int64_t rows = 0, V = 0;
  const void* x = nullptr;
  const void* gate = nullptr;
  void* y = nullptr;  // rows contiguous
  DType dtype = DType::f32, gate_dtype = DType::f32;
  int64_t s_x = 0, s_gate = 0;
  // Row r stands at (r / heads) * s + (r % heads) * s_head; with heads = 1 at r * s.
  int64_t heads = 1, s_x_head = 0, s_gate_head = 0;
  Param weight;
  float eps = 1e-6f;
};

// The layer between its two projections. projected [B, T, D], D = C + HV*V + 2*HV: qkv | z | b | a.
struct DecodeArgs {
  ConvGatingArgs front;     // conv.x is `projected` (its first C columns)
  RecurrentArgs recurrent;  // q, k, v unused; state, window, scale, seqs used; out = y [B,T,HV,V]
  View z;
  Param norm_weight;
  float norm_eps = 1e-6f;
};

}  // namespace gdn
