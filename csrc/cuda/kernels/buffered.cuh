// Exact decode that does not write the state each step: base + window of pending updates.
//
// With s_i the sum of the log decays after entry i, the state before a token is
//   S = exp(s) S0 + sum_i exp(s_i) u_i k_i^T,
// so both products of a token need S0 once and, for each entry, two inner products of keys, which
// every row and every value head of a key head share. Two kernels make a call:
//
// prepare_window, a warp for each key head, turns keys, queries and gates into what the rows need:
// the operand columns of the products with S0 and, for each value head, the weight of each entry.
//
// buffered_rows owns rows of one value head, a thread each. What bounds it is how long a block
// holds its shared memory, so it does little else than read: the base comes by asynchronous copies
// that take no registers and start before prepare_window is done.
//
// prepare_window also appends the new keys and log decays. Before a fold, which reads the old keys
// and whose slots the new ones take, it copies them to the workspace.
//
// Where the dtypes are the usual ones and a sequence has few tokens the rows' blocks do without it
// (ALONE): inner.cuh has what they share then. Where there are many of those, a small kernel before
// them reads the counts for all (PLANNED, order.cuh).
#pragma once

#include <type_traits>

#include "base_tile.cuh"
#include "buffered_prepare.cuh"
#include "inner.cuh"
#include "kernels.h"
#include "mma.cuh"
#include "norm.cuh"
#include "order.cuh"
#include "updates.cuh"
#include "window.cuh"

namespace gdn {
namespace cuda {

// In place of InnerProducts where prepare_window does their work.
struct NoProducts {
  static constexpr bool kStaged = false;
};

struct BufferedGrid {
  int64_t first = 0;  // sequence of blockIdx.y == 0
  FastDiv row_blocks, ratio;
  bool flush = false;
  unsigned wave = 0;             // blocks that may start before the kernel before is done
  int blocks = 0;                // alone: of a sequence
  const uint4* order = nullptr;  // planned: [sequences], what each blockIdx.y does
  NormTail norm;
};

// Where things stand in the shared memory of a block of VB rows.
template <class ST, class AT, class KT, int K, int VB, int TG, bool ALONE>
struct BufferedShared {
  using Columns = WindowColumns<ST, K, TG>;
  static constexpr int kTile = VB * K * static_cast<int>(sizeof(ST));
  // Tokens of 16 bits have no second part.
  static constexpr int kColumns =
      ALONE && Columns::k16Bit ? 2 * TG * Columns::kPitch * 2 : Columns::kFloats * 4;
  // The products of a row; before them, eight updates of a row for the fold of a f32 base, and
  // before those the keys of the window or their inner products.
  static constexpr int kScratch = Columns::k16Bit ? VB * TG * 8 : VB * 8 * 4;
  static_assert(TG <= 4, "float2 products of a row fit where its eight updates were");
  static constexpr int kProducts = kTile + kColumns;
  static __host__ __device__ int rest_at(int R) {
    int bytes = kScratch;
    if constexpr (ALONE) {
      const int entries = inner_tiles(R) * InnerProducts<AT, KT, K, VB / 32, TG>::kTileBytes;
      bytes = entries > bytes ? entries : bytes;
    }
    return kProducts + bytes;
  }
  static __host__ __device__ int record_at(int R) {
    if constexpr (ALONE) return rest_at(R) + InnerProducts<AT, KT, K, VB / 32, TG>::kRestBytes;
    return rest_at(R);
  }
  static __host__ __device__ int folds_at(int R) { return record_at(R) + record_floats(R, TG) * 4; }
  static __host__ __device__ int bytes(int R) {
    return folds_at(R) + (ALONE ? (R + 4) / 4 * 16 : 0);
  }
};

// A block of buffered_rows: VB rows of one value head of one sequence, a thread each, and the steps
// of a call in the order in which the kernel takes them.
template <class ST, class AT, class KT, class UT, int K, int VB, int TG, bool ALONE, bool PLANNED>
struct BufferedBlock {
  static_assert(ALONE || !PLANNED, "prepare_window makes plans of its own");
  using Shared = BufferedShared<ST, AT, KT, K, VB, TG, ALONE>;
  using Columns = WindowColumns<ST, K, TG>;
  static constexpr int WARPS = VB / 32, NV = 2 * TG;
  static constexpr int PRE = 16;  // entries of u in flight
  // Updates of 16 bits beside such a base go through the tensor cores too, and the rows of a warp
  // stand in their order.
  static constexpr bool kUpdateTiles = Columns::k16Bit && !kIsAny<UT> && sizeof(UT) == 2;
  // Updates are asked for before the base where their registers cost no other block its place.
  static constexpr bool kUpdatesFirst = sizeof(ST) == 4 || kUpdateTiles;
  using Tile = BaseTile<ST, K, kUpdateTiles>;
  using Inner = std::conditional_t<ALONE, InnerProducts<AT, KT, K, WARPS, TG>, NoProducts>;
  static constexpr int E = Tile::E, CH = Tile::CH;

  const RecurrentArgs& a;
  const BufferedGrid& grid;
  const WindowWorkspace& ws;
  const Window& w;
  // Which rows these are: of value head `hv`, key head `h`, sequence `n`; the block's from row0 on,
  // the warp's from warp_row on, and the thread's own behind row0. The place of its products:
  // `tid`.
  const int tid, warp, lane, group, quad;
  const unsigned hv;
  const int row0, h;
  int64_t n;
  const int V, R, own_row, warp_row;
  const bool live;
  const bool first_wave;  // blocks that may start before the kernel before is done
  // What a call does with the sequence; `count`: entries that hold so far.
  WindowPlan plan;
  int T, count;
  int64_t b;
  // Shared memory. `record`: a float4 for each token {weight of the base for k, for q, k.q, beta};
  // weights: [entry, token] for k and q.
  const Tile tile;
  unsigned char* const columns;
  float2* const products;
  float4* const record;
  const float2* const weights;
  // What a fold reads: keys `key_step` elements apart, and the weight of each entry, of the base at
  // R.
  const char* fold_keys = nullptr;
  int key_step = K;
  float* fold = nullptr;
  // The head's base, then that of the row.
  ST* home;
  // Pointers once; inside a row offsets fit 32 bits (window_refusal).
  DType at;
  char* pu;
  const char* pv;
  int su, v_st, v_sd, o_st, o_sd;
  // On their way: values of the tokens, updates of the first `held` entries.
  uint32_t raw_v[TG], raw_u[kUpdateTiles ? 1 : PRE];
  UpdateTile<std::conditional_t<kUpdateTiles, UT, bf16>> tile_u;
  int held;
  Inner inner;

  __device__ __forceinline__ BufferedBlock(const RecurrentArgs& a, const BufferedGrid& grid,
                                           const WindowWorkspace& ws, unsigned char* shared)
      : a(a),
        grid(grid),
        ws(ws),
        w(a.window),
        tid(threadIdx.x),
        warp(tid >> 5),
        lane(tid & 31),
        group(lane >> 2),
        quad(lane & 3),
        hv(grid.row_blocks(blockIdx.x)),
        row0(static_cast<int>(blockIdx.x - hv * grid.row_blocks.divisor) * VB),
        h(static_cast<int>(grid.ratio(hv))),
        n(grid.first + blockIdx.y),
        V(static_cast<int>(a.V)),
        R(ALONE ? static_cast<int>(w.R) : ws.R),
        own_row(warp * 32 + Tile::row_of(lane)),
        warp_row(row0 + warp * 32),
        live(row0 + own_row < V),
        first_wave(blockIdx.y * gridDim.x + blockIdx.x < grid.wave),
        tile(shared + warp * (32 * CH * 16), lane),
        columns(shared + Shared::kTile),
        products(reinterpret_cast<float2*>(shared + Shared::kProducts)),
        record(reinterpret_cast<float4*>(shared + Shared::record_at(R))),
        weights(reinterpret_cast<const float2*>(record + TG)),
        home(static_cast<ST*>(a.state.ptr) + hv * a.state.s_h) {
    at = a.q.dtype;
    if constexpr (!kIsAny<AT>) at = TypeOf<AT>::value;
    if constexpr (ALONE) {
      fold = reinterpret_cast<float*>(shared + Shared::folds_at(R));
      inner.entries = shared + Shared::kProducts;
      inner.rest = shared + Shared::rest_at(R);
      inner.warp = warp;
      inner.group = group;
      inner.quad = quad;
    }
  }

  // What is worked out from such a copy is not kept from where it was needed before.
  static __device__ __forceinline__ int64_t again(int64_t x) {
    asm volatile("" : "+l"(x));
    return x;
  }
  static __device__ __forceinline__ void arrived() {
    asm volatile("cp.async.wait_all;" ::: "memory");
  }
  __device__ __forceinline__ int tokens_of(int t0) const {
    return TG == 1 ? 1 : T - t0 < TG ? T - t0 : TG;
  }

  // Before the wait for the kernel before. The first blocks start while prepare_window runs. What
  // runs with it writes neither base nor indices (`early`), so they ask for the base before they
  // wait for the plan; the others find the plan, and ask for all that depends on it first, as it
  // would queue behind the base. ALONE, where the kernel before may write them, they only fetch
  // into L2 what the row as it is now would need.
  __device__ __forceinline__ void start_early() {
    if (!first_wave) return;
    if constexpr (ALONE) {
      constexpr int LINE = 128 / sizeof(ST), LINES = K / LINE;
      const int64_t row = guess_row(a.seqs, n);
      const ST* const from = home + row * a.state.s_p + warp_row * a.state.s_v;
      for (int i = lane; row >= 0 && i < 32 * LINES; i += 32) {
        if (warp_row + i / LINES < V) {
          prefetch_line(from + i / LINES * a.state.s_v + i % LINES * LINE);
        }
      }
    } else {
      const WindowRow s = window_row<TG == 1>(a, n);
      home += s.row * a.state.s_p;
      if (wanted(s.row, s.tokens, s.fresh)) ask_base();
    }
  }
  __device__ __forceinline__ bool wanted(int64_t row, int tokens, bool fresh) const {
    return row >= 0 && tokens > 0 && !fresh && !grid.flush;
  }
  __device__ __forceinline__ void ask_base() const {
    tile.ask(home + warp_row * a.state.s_v, a.state.s_v, V - warp_row);
  }

  // What the call does with this sequence: false where that is nothing more. ALONE, the counts come
  // later unless they are PLANNED.
  WindowRow held_by;
  __device__ __forceinline__ bool find_plan() {
    if constexpr (PLANNED) {
      plan = unpack_order(grid.order[n], TG == 1 ? 1 : static_cast<int>(a.seqs.T), &n);
    } else if constexpr (ALONE) {
      held_by = window_row<TG == 1>(a, n);
      held_by.start = 0;  // no packed sequences
      held_by.tokens = static_cast<int>(a.seqs.T);
      plan = plan_of(a, held_by, 0, false);
    } else {
      plan = ws.plans[n];
    }
    if (ALONE || !first_wave) home += plan.row * a.state.s_p;
    T = plan.tokens;
    b = TG == 1 || ALONE ? n : a.seqs.cu_seqlens.ptr ? 0 : n;
    if (plan.row < 0) {  // padding
      const View& result = !ALONE && grid.norm.on ? grid.norm.y : a.out;
      const WindowRow s = window_row<TG == 1>(a, n);
      for (int t = 0; live && !grid.flush && t < s.tokens; t++) {
        store_as(result.ptr, result.dtype,
                 offset_of(result, b, s.start + t, hv) + (row0 + own_row) * result.sd, 0.f);
      }
      return false;
    }
    if (T == 0 && !plan.fold) return false;
    if (!ALONE && blockIdx.x == 0 && tid == 0) {
      w.fill[plan.row * w.s_fill] =
          pack_fill({(plan.fold ? 0 : plan.pending) + T, T > 0 ? T - 1 : 0, 0});
    }
    count = plan.fold ? 0 : plan.pending;
    pu = updates_of(plan.row);
    pv = element_of(a.v.ptr, at, offset_of(a.v, b, plan.start, hv) + row0 * a.v.sd);
    su = static_cast<int>(w.su_r);
    v_st = static_cast<int>(a.v.st), v_sd = static_cast<int>(a.v.sd);
    o_st = static_cast<int>(a.out.st), o_sd = static_cast<int>(a.out.sd);
    held = kUpdateTiles ? plan.pending : count;
    return true;
  }
  __device__ __forceinline__ char* updates_of(int64_t row) const {
    return const_cast<char*>(element_of(w.u, w.u_dtype, row * w.su_p + hv * w.su_h + row0));
  }

  // Threads past V and tokens past the last read others' values: never used, and no branch a load.
  __device__ __forceinline__ void load_v(int t0, int tokens) {
    const int row = (live ? own_row : 0) * v_sd;
#pragma unroll
    for (int t = 0; t < TG; t++) {
      raw_v[t] = load_one<AT>(pv, at, (t0 + (t < tokens ? t : 0)) * v_st + row);
    }
  }
  // So are entries past the last.
  __device__ __forceinline__ void load_four(int e0, int to, int count) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int e = e0 + i < count ? e0 + i : count - 1;
      raw_u[to + i] = load_one<UT>(pu, w.u_dtype, e * su + (live ? own_row : 0));
    }
  }
  __device__ __forceinline__ void load_tile(int first, int count) {
    if constexpr (kUpdateTiles) {
      tile_u.load(reinterpret_cast<const UT*>(pu) + warp * 32, su, first, count, V - warp_row,
                  group, quad);
    }
  }
  __device__ __forceinline__ void load_u() {
    if constexpr (kUpdateTiles) {
      load_tile(0, held);
    } else {
#pragma unroll
      for (int e = 0; e < PRE; e += 4) {
        if (e < held) load_four(e, e, held);
      }
    }
  }

  // With a kernel before: asks for what it prepared, for values, updates and the base.
  __device__ __forceinline__ void ask_prepared() {
    const bool base_due = first_wave ? grid.flush && plan.fold
                                     : plan.fold || wanted(plan.row, plan.tokens, plan.fresh);
    if (!kUpdatesFirst && base_due) ask_base();
    if (T > 0) {
      copy_prepared(0);
      if (kUpdatesFirst) {
        load_v(0, tokens_of(0));
        load_u();
      }
    }
    if (kUpdatesFirst && base_due) ask_base();
  }
  __device__ __forceinline__ void copy_prepared(int t0) const {
    const float* const from = ws.column_of(n, h, t0 / TG);
    for (int i = tid; i < Columns::kFloats / 4; i += VB) {
      copy_async(shared_address(columns) + i * 16, from + i * 4);
    }
    const float* const head = ws.record_of(n, hv, t0 / TG);
    const int used = TG + ((count + TG) * TG + 1) / 2;  // in 16 bytes
    for (int i = tid; i < used; i += VB) {
      copy_async(shared_address(record) + i * 16, head + i * 4);
    }
  }

  // ALONE: asks for everything, and works out columns and weights while the base is on its way.
  //
  // Unless PLANNED, what is small is asked for before the counts are known: log decays and f32 keys
  // of every slot, but only eight keys of 16 bits, as those behind them would often be read for
  // nothing. The base comes last, as what is asked for after it arrives after it.
  __device__ __forceinline__ void weigh_alone() {
    KT* const keys = static_cast<KT*>(w.k) + plan.row * w.sk_p + h * w.sk_h;
    fold_keys = reinterpret_cast<const char*>(keys);
    key_step = static_cast<int>(w.sk_r);
    __shared__ unsigned counts;
    // Each token has a warp; a single one takes them in turn, block by block. Another asks for the
    // counts then, which would be waited for with all that the first one asks for.
    const int token = TG == 1 ? (warp + static_cast<int>(blockIdx.x)) % WARPS : warp;
    const bool counter = lane == 0 && token == (TG == 1 ? 1 : 0);
    unsigned word = 0;
    if (!PLANNED && counter) {
      // The lane is zero, which the compiler cannot know from here: for one address for all it
      // would pass the result round the warp, and wait for it at once.
      unsigned zero;
      asm volatile("mov.u32 %0, %%laneid;" : "=r"(zero));
      word = atomicAdd(reinterpret_cast<unsigned*>(w.fill + plan.row * w.s_fill + zero), 1u << 24);
    }
    const int slots = PLANNED ? plan.pending : R;
    inner.ask_keys(keys, key_step, slots, 0, 0);
    if (PLANNED || !Inner::kStaged) inner.ask_keys(keys, key_step, slots, 0, 1);
    TokenWeights<ST, AT, KT, K, WARPS, TG> own_weights;
    inner.ask_tokens(a, b, plan.start, h, T);
    if (token < T) {
      own_weights.ask_decays(w, plan, hv, lane, slots);
      own_weights.ask_gates(a.gates, b, plan.start, hv, T, lane);
    }
    if constexpr (!PLANNED) {
      if (counter) counts = word;
      __syncthreads();
      plan = plan_of(a, held_by, static_cast<int32_t>(counts), false);
    }
    count = plan.fold ? 0 : plan.pending;
    held = kUpdatesFirst ? plan.pending : count;  // the fold of a f32 base needs them too
    if constexpr (Inner::kStaged) {
      if (!PLANNED) inner.ask_keys(keys, key_step, plan.pending, 0, 1);
      for (int first = 16; first < plan.pending; first += 16) {
        inner.ask_keys(keys, key_step, plan.pending, first, 0);
        inner.ask_keys(keys, key_step, plan.pending, first, 1);
      }
      commit_copies();
    }
    load_v(0, T);
    load_u();
    if (!plan.fresh) ask_base();
    commit_copies();
    // The last block to ask writes the counts; after a fold the last to have read what it folded.
    if (!PLANNED && tid == 0 && !plan.fold &&
        (counts >> 24) + 1 == static_cast<unsigned>(grid.blocks)) {
      w.fill[plan.row * w.s_fill] = pack_fill({count + T, T - 1, 0});
    }
    if (token < T) own_weights.weigh(fold, a, plan, token, lane);
    if (Inner::kStaged) wait_copies<1>();
    inner.multiply(keys, key_step, count);
    if (!kScalesColumns<ST, AT>) inner.template write_columns<ST>(columns);
    __syncthreads();
    if (kScalesColumns<ST, AT>) inner.template write_columns<ST>(columns);
    const bool keeps = !plan.fold && row0 == 0 && hv == h * grid.ratio.divisor;
    inner.finish_keys(keeps ? keys + count * key_step : nullptr, key_step, T, a.l2norm);
    if (Inner::kRounds) __syncthreads();
    if (token < T) {
      const TokenFactors f = inner.factors(token, a.l2norm);
      own_weights.write(inner, f, record, a, plan, hv, row0 == 0, token, lane);
    }
  }

  // base = whole * base + sum over entries of weight * u k^T, in the tile and in memory.
  __device__ __forceinline__ void fold_window() {
    if constexpr (ALONE) {
      if constexpr (Columns::k16Bit && Inner::kStaged) inner.drop_keys(plan.pending);
      __syncthreads();
    } else {
      fold_keys = ws.keys_of(n, h);
      fold = ws.fold_of(n, hv);
    }
    if constexpr (Columns::k16Bit) {
      fold_on_tensor_cores(plan.pending, fold[R]);
    } else {
      fold_row_by_row(plan.pending, fold[R]);
    }
    // Beside a f32 base read again rather than held all the while: a value that is spilled is
    // waited for at once.
    if (ALONE && !kUpdateTiles) load_v(0, T);
    // No entries are left; saying so keeps registers from being held for them up there.
    if constexpr (kUpdateTiles) {
      tile_u.clear();
    } else {
#pragma unroll
      for (int e = 0; e < PRE; e++) raw_u[e] = 0;
    }
  }

  // A base of 16 bits: rows x entries times entries x keys, 32 columns at a time. A lane's pairs of
  // neighbours are the accumulator's.
  __device__ __forceinline__ void fold_on_tensor_cores(int folded, float whole) {
    uint32_t big[2][4], small[2][4];  // weighted updates in two parts
    weigh_updates(big, small, 0, folded);
    arrived();
    __syncwarp();
    if (whole == 0.f) tile.clear();  // skipped, whatever it holds
#pragma unroll 1
    for (int block = 0; block < K / 32; block++) {
      float c[2][4][4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int m = i / 2, s = i % 2;
        uint32_t base[4];
        load_matrices(base, tile.matrices_at(m, 2 * block + s));
#pragma unroll
        for (int x = 0; x < 4; x++) {
          const float2 pair = unpack_pair<ST>(base[x]);
          c[m][2 * s + x / 2][x % 2 * 2] = whole * pair.x;
          c[m][2 * s + x / 2][x % 2 * 2 + 1] = whole * pair.y;
        }
      }
#pragma unroll 1
      for (int e0 = 0; e0 < folded; e0 += 16) {
        if (folded > 16) {
          load_tile(e0, folded);
          weigh_updates(big, small, e0, folded);
        }
#pragma unroll
        for (int s = 0; s < 2; s++) {
          uint32_t keys[2][2], rest[2][2] = {};
          const bool exact = right_keys(keys, rest, e0, 2 * block + s, folded);
#pragma unroll
          for (int j = 0; j < 2; j++) {
#pragma unroll
            for (int m = 0; m < 2; m++) {
              mma_16x8x16<ST>(c[m][2 * s + j], big[m], keys[j][0], keys[j][1]);
              mma_16x8x16<ST>(c[m][2 * s + j], small[m], keys[j][0], keys[j][1]);
              if (!exact) mma_16x8x16<ST>(c[m][2 * s + j], big[m], rest[j][0], rest[j][1]);
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int m = i / 2, s = i % 2;
        uint32_t base[4];
#pragma unroll
        for (int x = 0; x < 4; x++) {
          const float (&pair)[4] = c[m][2 * s + x / 2];
          base[x] = pack_pair<ST>(pair[x % 2 * 2], pair[x % 2 * 2 + 1]);
        }
        store_matrices(tile.matrices_at(m, 2 * block + s), base);
      }
    }
    __syncwarp();
    ST* const head =
        static_cast<ST*>(a.state.ptr) + again(plan.row) * a.state.s_p + hv * a.state.s_h;
    tile.store(head + warp_row * a.state.s_v, a.state.s_v, V - warp_row);
  }
  // Entries e0 and on as left operands, in two parts. An update of weight zero is skipped, whatever
  // it holds.
  __device__ __forceinline__ void weigh_updates(uint32_t (&big)[2][4], uint32_t (&small)[2][4],
                                                int e0, int folded) const {
    float weight[4];  // of entries 2 * quad, + 1, + 8, + 9
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int e = e0 + 2 * quad + (i & 1) + (i & 2) * 4;
      weight[i] = e < folded ? fold[e] : 0.f;
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
      uint32_t left[4];
      if constexpr (kUpdateTiles) tile_u.left(m, left);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float first = weight[i & 2], second = weight[(i & 2) + 1];
        float2 u;
        if constexpr (kUpdateTiles) {
          const uint32_t heavy = (first != 0.f ? 0xffffu : 0u) | (second != 0.f ? 0xffff0000u : 0u);
          u = unpack_pair<UT>(left[i] & heavy);
        } else {
          const int e = e0 + 2 * quad + (i & 2) * 4, r = m * 16 + group + (i & 1) * 8;
          const auto update = [&](int e, float weight) {
            if (weight == 0.f || warp_row + r >= V) return 0.f;
            return one_to_float<UT>(load_one<UT>(pu, w.u_dtype, e * su + warp * 32 + r), w.u_dtype);
          };
          u = make_float2(update(e, first), update(e + 1, second));
        }
        uint32_t parts[2];
        pack_parts<ST>(parts, first * u.x, second * u.y);
        big[m][i] = parts[0];
        small[m][i] = parts[1];
      }
    }
  }
  // Keys of entries e0 and on as right operands, columns 16 s and on. Those of another type leave a
  // rest: of bf16 in f16 only where they are very small. True where none does.
  __device__ __forceinline__ bool right_keys(uint32_t (&keys)[2][2], uint32_t (&rest)[2][2], int e0,
                                             int s, int folded) const {
    if constexpr (Inner::kStaged) {
      inner.right_keys(keys, e0, s, lane);
      return true;
    } else if constexpr (std::is_same_v<KT, ST>) {
      // Pairs of neighbouring columns become pairs of neighbouring entries.
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int e = e0 + i % 2 * 8 + group;
        const KT* const from = reinterpret_cast<const KT*>(fold_keys) + e * key_step + s * 16;
        const uint32_t pair =
            e < folded ? reinterpret_cast<const uint32_t*>(from)[i / 2 * 4 + quad] : 0;
        keys[i / 2][i % 2] = transpose_matrix(pair);
      }
      return true;
    } else {
      uint32_t any = 0;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        uint32_t raw[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int e = e0 + 2 * quad + (i & 1) + (i & 2) * 4;
          const int from = e * key_step + s * 16 + j * 8 + group;
          raw[i] = e < folded ? load_one<KT>(fold_keys, w.k_dtype, from) : 0;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float x = one_to_float<KT>(raw[2 * half], w.k_dtype);
          const float y = one_to_float<KT>(raw[2 * half + 1], w.k_dtype);
          uint32_t parts[2];
          pack_parts<ST>(parts, x, y);
          keys[j][half] = parts[0];
          rest[j][half] = parts[1];
          any |= parts[1];
        }
      }
      return !__any_sync(kFullMask, any & 0x7fff7fffu);
    }
  }

  // A f32 base: STEP entries at a time. A lane keeps their keys at its columns and walks down the
  // rows, whose updates come in as many parts as there is room for.
  __device__ __forceinline__ void fold_row_by_row(int folded, float whole) {
    constexpr int STEP = ALONE && (TG > 1 || sizeof(KT) == 2) ? 16 : 8, HELD = 32 * 8 / STEP;
    float* const mine = reinterpret_cast<float*>(products) + warp * HELD * STEP;
    for (int e0 = 0; e0 < folded; e0 += STEP) {
      float x[STEP];
#pragma unroll
      for (int i = 0; i < STEP; i++) {
        const int e = e0 + i;
        x[i] = 0.f;
        if (e < folded && live) {
          const float weight = fold[e];
          uint32_t raw = ALONE ? raw_u[i] : 0;
          if (!ALONE || e0 >= PRE) raw = load_one<UT>(pu, w.u_dtype, e * su + tid);
          const float u = one_to_float<UT>(raw, w.u_dtype);
          x[i] = weight == 0.f ? 0.f : weight * u;
        }
      }
      if (ALONE) {
#pragma unroll
        for (int i = 0; i < STEP; i++) raw_u[i] = raw_u[(i + STEP) % PRE];
      }
      const bool final = e0 + STEP >= folded;
      const float keep = e0 == 0 ? whole : 1.f;
#pragma unroll 1
      for (int c0 = 0; c0 < CH; c0 += 32) {
        const int c = c0 + (CH < 32 ? lane % CH : lane);
        constexpr int ROWS = CH < 32 ? 32 / CH : 1;  // rows that the warp takes at once
        float k[STEP][E];
#pragma unroll
        for (int i = 0; i < STEP; i++) {
          // Past the last entry any finite key does, as its factor is zero.
          const int e = e0 + i < folded ? e0 + i : folded - 1;
          some_to_float<KT, E>(load_some<KT, E>(fold_keys, w.k_dtype, e * key_step + c * E),
                               w.k_dtype, k[i]);
          // Converted once and here: what the compiler makes of it otherwise spills.
#pragma unroll
          for (int j = 0; sizeof(KT) == 2 && j < E; j++) asm volatile("" : "+f"(k[i][j]));
        }
        arrived();
        ST* to_row = home + (warp_row + lane / (CH < 32 ? CH : 32)) * a.state.s_v + c * E;
        const int64_t step = ROWS * a.state.s_v;
#pragma unroll 1
        for (int part = 0; part < 32; part += HELD) {
          __syncwarp();
          if (lane / HELD * HELD == part) {
            float4* const to = reinterpret_cast<float4*>(mine + lane % HELD * STEP);
#pragma unroll
            for (int i = 0; i < STEP; i += 4) {
              to[i / 4] = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
            }
          }
          __syncwarp();
#pragma unroll 4
          for (int r0 = 0; r0 < HELD; r0 += ROWS) {
            const int held = r0 + (CH < 32 ? lane / CH : 0), r = part + held;
            float f[E];
            Vec<ST>::unpack(tile.chunk_at(r, c), f);
#pragma unroll
            for (int j = 0; j < E; j++) f[j] = keep == 0.f ? 0.f : keep * f[j];
#pragma unroll
            for (int i = 0; i < STEP; i += 4) {
              const float4 u = *reinterpret_cast<const float4*>(mine + held * STEP + i);
#pragma unroll
              for (int j = 0; j < E; j++) {
                f[j] = __fmaf_rn(u.x, k[i][j], f[j]);
                f[j] = __fmaf_rn(u.y, k[i + 1][j], f[j]);
                f[j] = __fmaf_rn(u.z, k[i + 2][j], f[j]);
                f[j] = __fmaf_rn(u.w, k[i + 3][j], f[j]);
              }
            }
            const uint4 packed = Vec<ST>::pack(f);
            tile.chunk_at(r, c) = packed;
            if (final && warp_row + r < V) store_evict_first(to_row, packed);
            to_row += step;
          }
        }
      }
    }
  }

  // A group of tokens from t0 on: what entries and base give each row, then token by token.
  __device__ __forceinline__ void take_tokens(int t0, float (&parts)[TG][WARPS]) {
    const int tokens = tokens_of(t0);
    if (!ALONE && (!kUpdatesFirst || t0 > 0)) {
      load_v(t0, tokens);
      held = count;
      if (kUpdateTiles) __syncwarp();  // other lanes stored what this one reads
      load_u();
    }
    const bool norm = !ALONE && grid.norm.on;
    NormInputs<TG> norm_in;
    if (TG == 1 && norm && live) norm_in.load(grid.norm, 1, b, plan.start, hv, own_row);
    // What the entries give: places 16 m + group and 8 below, columns k and q of token `quad`. What
    // it takes is there before the base where this block worked it out itself.
    float sums[kUpdateTiles ? 2 : 1][4] = {};
    if (!(ALONE && kUpdateTiles)) arrived();
    __syncthreads();
    if constexpr (kUpdateTiles) entry_sums(sums, tokens);
    if (ALONE && kUpdateTiles) {
      arrived();
      __syncwarp();
    }
    // What the base gives k and q of each token, with the entries' share where they have tiles;
    // then what the entries give where they have none.
    float x[TG], y[TG], p[TG], o[TG];
#pragma unroll
    for (int t = 0; t < TG; t++) p[t] = o[t] = x[t] = y[t] = 0.f;
    if (kUpdateTiles || !plan.fresh) base_products(sums, x, y);
    if (!kUpdateTiles) add_entries(p, o);

    char* const late_pu = kUpdateTiles ? updates_of(again(plan.row)) : pu;
    char* const po = const_cast<char*>(element_of(
        a.out.ptr, at,
        offset_of(a.out, kUpdateTiles ? again(b) : b, plan.start, hv) + row0 * a.out.sd));
    float out[TG];
#pragma unroll
    for (int t = 0; t < TG; t++) {
      out[t] = 0.f;
      // Converted no sooner: the wait for a value must not stand before what is asked for after it.
      asm volatile("" : "+r"(raw_v[t]));
      if (t < tokens) {
        const float4 token = record[t];
        if constexpr (kUpdateTiles) {
          p[t] += x[t];
          o[t] += y[t];
        } else {
          // A base of weight zero is skipped, whatever it holds.
          if (token.x != 0.f) p[t] = __fmaf_rn(token.x, x[t], p[t]);
          if (token.y != 0.f) o[t] = __fmaf_rn(token.y, y[t], o[t]);
        }
        const float u = token.w * (one_to_float<AT>(raw_v[t], at) - p[t]);
        out[t] = a.scale * __fmaf_rn(token.z, u, o[t]);
        if (live) {
          store_one<UT>(late_pu, w.u_dtype, (count + t) * su + own_row, u);
          if (!norm) store_one<AT>(po, at, (t0 + t) * o_st + own_row * o_sd, out[t]);
        }
        if (t + 1 < TG && t + 1 < tokens) {
          add_entry(count + t, round_one<UT>(w.u_dtype, u), t + 1, p, o);
        }
      }
    }
    if (norm) {
      const int64_t token = plan.start + t0;
      if (TG > 1 && live) norm_in.load(grid.norm, tokens, b, token, hv, own_row);
      norm_tail<TG, WARPS>(grid.norm, out, norm_in, tokens, b, token, hv, own_row, live, V, at,
                           parts);
    }
    count += tokens;
    if (!ALONE && t0 + TG < T) {
      __syncthreads();
      copy_prepared(t0 + TG);
    }
  }

  // Updates of 16 bits times the weights of their entries.
  __device__ __forceinline__ void entry_sums(float (&sums)[2][4], int tokens) {
    const float* const from = reinterpret_cast<const float*>(weights) + group;
#pragma unroll 1
    for (int e0 = 0; e0 < count; e0 += PRE) {
      if (e0 > 0) load_tile(e0, count);
      float weight[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int e = e0 + 2 * quad + (i & 1) + (i & 2) * 4;
        weight[i] = group < 2 * tokens && e < count ? from[e * NV] : 0.f;
      }
      tile_u.multiply(sums, weight);
    }
    // An entry of weight zero is skipped, whatever it holds: what is not finite is summed again one
    // by one.
    float odd = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) odd += (sums[0][i] + sums[1][i]) * 0.f;
    if (!__any_sync(kFullMask, odd != 0.f)) return;
#pragma unroll
    for (int i = 0; i < 4; i++) sums[0][i] = sums[1][i] = 0.f;
#pragma unroll 1
    for (int e = 0; quad < tokens && e < count; e++) {
      const float2 weight = weights[e * TG + quad];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int r = warp * 32 + Tile::row_of(i * 8 + group);
        if (row0 + r >= V) continue;
        const float u = to_float(reinterpret_cast<const UT*>(pu)[e * su + r]);
        float (&sum)[4] = sums[i / 2];
        const int at = i % 2 * 2;
        if (weight.x != 0.f) sum[at] = __fmaf_rn(weight.x, u, sum[at]);
        if (weight.y != 0.f) sum[at + 1] = __fmaf_rn(weight.y, u, sum[at + 1]);
      }
    }
  }
  // One entry's share in the tokens from `from` on.
  __device__ __forceinline__ void add_entry(int e, float u, int from, float (&p)[TG],
                                            float (&o)[TG]) const {
#pragma unroll
    for (int t = 0; t < TG; t++) {
      if (t >= from) {
        const float2 c = weights[e * TG + t];
        if (c.x != 0.f) p[t] = __fmaf_rn(c.x, u, p[t]);
        if (c.y != 0.f) o[t] = __fmaf_rn(c.y, u, o[t]);
      }
    }
  }
  __device__ __forceinline__ void add_entries(float (&p)[TG], float (&o)[TG]) {
#pragma unroll 1
    for (int e0 = 0; e0 < count; e0 += PRE) {
#pragma unroll
      for (int i = 0; i < PRE; i += 4) {
        if (e0 + i < count) {
          if (e0 > 0) load_four(e0 + i, i, count);
#pragma unroll
          for (int j = i; j < i + 4; j++) {
            if (e0 + j < count) add_entry(e0 + j, one_to_float<UT>(raw_u[j], w.u_dtype), 0, p, o);
          }
        }
      }
    }
  }

  // The thread's row of the base times k (x) and q (y) of each token.
  __device__ __forceinline__ void base_products(const float (&sums)[kUpdateTiles ? 2 : 1][4],
                                                float (&x)[TG], float (&y)[TG]) const {
    if constexpr (!Columns::kMma) {
      plain_products(x, y);
    } else {
      if constexpr (Columns::k16Bit) {
        products_of_16_bits(sums);
      } else {
        products_of_f32(sums);
      }
      __syncwarp();
#pragma unroll
      for (int t = 0; t < TG; t++) {
        const float2 both = products[tid * TG + t];
        x[t] = both.x;
        y[t] = both.y;
      }
    }
  }
  __device__ __forceinline__ void products_of_16_bits(
      const float (&sums)[kUpdateTiles ? 2 : 1][4]) const {
    const int column = lane & 7, low = NV * Columns::kPitch * 2;
    const uint32_t column_at = shared_address(reinterpret_cast<const ST*>(columns) +
                                              (column < NV ? column : 0) * Columns::kPitch) +
                               (lane >> 3) * 16;
    // Two sums each, of every other step where there is no second part: a product waits for the one
    // before it.
    float c[2][2][4] = {};
#pragma unroll
    for (int s0 = 0; s0 < K / 16; s0 += 2) {
      uint32_t high[4], rest[4];
      load_matrices(high, column_at + s0 * 32);
      if (!ALONE) load_matrices(rest, column_at + s0 * 32 + low);
#pragma unroll
      for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
          uint32_t rows[4];
          load_matrices(rows, tile.matrices_at(m, s0 + i));
          mma_16x8x16<ST>(c[m][ALONE ? i : 0], rows, high[2 * i], high[2 * i + 1]);
          if (!ALONE) mma_16x8x16<ST>(c[m][1], rows, rest[2 * i], rest[2 * i + 1]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < 2; m++) keep_products(m, c[m][0], c[m][1], sums);
  }
  // In tf32 parts. Contracted column t of step (s, e) is column 32 s + 8 t + e, t + 4 the one four
  // further: then a lane's operands are 16-byte pieces.
  __device__ __forceinline__ void products_of_f32(
      const float (&sums)[kUpdateTiles ? 2 : 1][4]) const {
    const float* const column =
        reinterpret_cast<const float*>(columns) + (group < NV ? group : 0) * Columns::kPitch;
    float c[2][4] = {}, d[2][4] = {};
#pragma unroll 2
    for (int s = 0; s < K / 32; s++) {
      float b0[4], b1[4], rows[2][4][4];
      Vec<float>::unpack(*reinterpret_cast<const uint4*>(column + 32 * s + 8 * quad), b0);
      Vec<float>::unpack(*reinterpret_cast<const uint4*>(column + 32 * s + 8 * quad + 4), b1);
#pragma unroll
      for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int row = m * 16 + group + (i & 1) * 8;
          Vec<float>::unpack(tile.chunk_at(row, 8 * s + 2 * quad + i / 2), rows[m][i]);
        }
      }
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float rest0 = tf32_rest(b0[e]), rest1 = tf32_rest(b1[e]);
#pragma unroll
        for (int m = 0; m < 2; m++) {
          float big[4], small[4];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            big[i] = rows[m][i][e];
            small[i] = tf32_rest(big[i]);
          }
          mma_16x8x8(c[m], big, b0[e], b1[e]);
          mma_16x8x8(d[m], small, b0[e], b1[e]);
          if (!ALONE) mma_16x8x8(d[m], big, rest0, rest1);  // 16-bit tokens have none
        }
      }
    }
#pragma unroll
    for (int m = 0; m < 2; m++) keep_products(m, c[m], d[m], sums);
  }
  // Rows and columns as those of the entries' sums; in two parts.
  __device__ __forceinline__ void keep_products(
      int m, const float (&c)[4], const float (&d)[4],
      const float (&sums)[kUpdateTiles ? 2 : 1][4]) const {
    if (quad >= TG) return;
    float r[4];
#pragma unroll
    for (int i = 0; i < 4; i++) r[i] = c[i] + d[i];
    if constexpr (kUpdateTiles) {
      // A base of weight zero is skipped, whatever it holds.
      const float4 token = record[quad];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float weight = i & 1 ? token.y : token.x;
        r[i] = weight != 0.f && !plan.fresh ? __fmaf_rn(weight, r[i], sums[m][i]) : sums[m][i];
      }
    }
    float2* const to = products + (warp * 32 + m * 16 + group) * TG + quad;
    to[0] = make_float2(r[0], r[1]);
    to[8 * TG] = make_float2(r[2], r[3]);
  }
  // For a single token of a f32 base: a row a lane.
  __device__ __forceinline__ void plain_products(float (&x)[TG], float (&y)[TG]) const {
    float sums[4] = {0.f, 0.f, 0.f, 0.f};
    const float4* const column = reinterpret_cast<const float4*>(columns);
#pragma unroll 8
    for (int c = 0; c < CH; c++) {
      float f[4];
      Vec<float>::unpack(tile.chunk_at(lane, c), f);
      const float4 k = column[2 * c], q = column[2 * c + 1];
      sums[0] = __fmaf_rn(f[1], k.y, __fmaf_rn(f[0], k.x, sums[0]));
      sums[1] = __fmaf_rn(f[3], k.w, __fmaf_rn(f[2], k.z, sums[1]));
      sums[2] = __fmaf_rn(f[1], q.y, __fmaf_rn(f[0], q.x, sums[2]));
      sums[3] = __fmaf_rn(f[3], q.w, __fmaf_rn(f[2], q.z, sums[3]));
    }
    x[0] = sums[0] + sums[1];
    y[0] = sums[2] + sums[3];
  }

  // ALONE, after a fold: the last block of a sequence to have read what was folded writes the new
  // entries, which take its slots.
  __device__ __forceinline__ void append_after_fold() const {
    if (!plan.fold) return;
    __shared__ bool last;
    if (tid == 0) last = arrive_last(a, plan, PLANNED ? grid.blocks : 2 * grid.blocks);
    __syncthreads();
    if (last) {
      WindowPlan empty = plan;
      empty.pending = empty.head = 0;
      append_entries<K>(a, empty, n);
    }
  }
};

// blockIdx.x = head * row_blocks + row block, blockIdx.y = sequence. VB rows, a thread each; TG
// tokens are taken together. ST, AT, KT, UT: state, activations, keys and updates of the window.
// ALONE: no prepare_window, and no norm; a sequence has at most TG tokens. PLANNED: an order
// before.
template <class ST, class AT, class KT, class UT, int K, int VB, int TG, int MIN_BLOCKS, bool ALONE,
          bool PLANNED>
__global__ void __launch_bounds__(VB, MIN_BLOCKS)
    buffered_rows(const __grid_constant__ RecurrentArgs a,
                  const __grid_constant__ BufferedGrid grid,
                  const __grid_constant__ WindowWorkspace ws) {
  using Block = BufferedBlock<ST, AT, KT, UT, K, VB, TG, ALONE, PLANNED>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ float parts[TG][Block::WARPS];  // of a norm's sums
  Block block(a, grid, ws, shared);
  block.start_early();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (!block.find_plan()) return;
  if constexpr (ALONE) {
    block.weigh_alone();
  } else {
    block.ask_prepared();
  }
  if (block.plan.fold) block.fold_window();
  for (int t0 = 0; t0 < (TG == 1 ? (block.T > 0 ? 1 : 0) : block.T); t0 += TG) {
    block.take_tokens(t0, parts);
  }
  if constexpr (ALONE) block.append_after_fold();
}

}  // namespace cuda
}  // namespace gdn
