// Updates of 16 bits on the tensor cores: rows of V times entries, the left operand of what every
// token reads of them and of a fold.
#pragma once

#include "mma.cuh"

namespace gdn {
namespace cuda {

// c += updates [16 rows x 16 entries] times the weights of a column, those of entries 2 * quad,
// + 1, + 8, + 9.
template <class WT>
struct WeightColumn {
  uint32_t low[2], high[2];
  __device__ __forceinline__ explicit WeightColumn(const float (&w)[4]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint32_t parts[2];
      pack_parts<WT>(parts, w[2 * i], w[2 * i + 1]);
      high[i] = parts[0];
      low[i] = parts[1];
    }
  }
  __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4]) const {
    mma_16x8x16<WT>(c, a, low[0], low[1]);
    mma_16x8x16<WT>(c, a, high[0], high[1]);
  }
};

// A lane loads eight neighbouring rows of an entry at once. The four 8 x 8 matrices of a warp's 32
// rows, transposed, are left operands whose rows stand in another order: place p of the products
// is row row_at(p), and the other way round, as it exchanges two pairs of bits.
__host__ __device__ constexpr int row_at(int p) {
  return (p & 1) | (p >> 3 & 3) << 1 | (p >> 1 & 3) << 3;
}

// The updates of 16 entries in the 32 rows of a warp.
template <class UT>
struct UpdateTile {
  uint4 raw[2];  // rows 8 * quad and on of entries group and group + 8

  // Entries first and on of `count`, `step` elements apart; zeros follow them, and the rows past
  // `rows`, a multiple of eight.
  __device__ __forceinline__ void load(const UT* from, int step, int first, int count, int rows,
                                       int group, int quad) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int e = first + group + 8 * i;
      raw[i] = make_uint4(0, 0, 0, 0);
      if (e < count && quad * 8 < rows) {
        raw[i] = *reinterpret_cast<const uint4*>(from + e * step + quad * 8);
      }
    }
  }
  __device__ __forceinline__ void clear() { raw[0] = raw[1] = make_uint4(0, 0, 0, 0); }

  // Places 16 m and on.
  __device__ __forceinline__ void left(int m, uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      a[2 * i] = transpose_matrix(m ? raw[i].z : raw[i].x);
      a[2 * i + 1] = transpose_matrix(m ? raw[i].w : raw[i].y);
    }
  }

  // c += updates times the weights of a column, those of entries 2 * quad, + 1, + 8, + 9.
  __device__ __forceinline__ void multiply(float (&c)[2][4], const float (&weight)[4]) const {
    if constexpr (TypeOf<UT>::value == DType::bf16) {
      const WeightColumn<bf16> column(weight);
#pragma unroll
      for (int m = 0; m < 2; m++) {
        uint32_t a[4];
        left(m, a);
        column.multiply(c[m], a);
      }
    } else {
      // Weights may leave the range of f16. tf32 holds an update exactly, a weight in two parts.
#pragma unroll
      for (int m = 0; m < 2; m++) {
        uint32_t a[4];
        left(m, a);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float2 x = unpack_pair<UT>(a[2 * i]), y = unpack_pair<UT>(a[2 * i + 1]);
          const float u[4] = {x.x, y.x, x.y, y.y};
          mma_16x8x8(c[m], u, tf32_rest(weight[2 * i]), tf32_rest(weight[2 * i + 1]));
          mma_16x8x8(c[m], u, weight[2 * i], weight[2 * i + 1]);
        }
      }
    }
  }
};

}  // namespace cuda
}  // namespace gdn
