// Chooses kernel, tile and launch of the recurrence for one state dtype; instantiated once per
// dtype so that the files compile side by side.
#pragma once

#include "launch.h"
#include "recurrent_columns.cuh"
#include "recurrent_rows.cuh"
#include "select.h"

namespace gdn {
namespace cuda {

// `width` rows of V a block of `warps` warps, `resident` of which a multiprocessor holds.
template <class Kernel>
cudaError_t launch_heads(Kernel kernel, const RecurrentArgs& a, int width, int warps, int resident,
                         int shared, bool early, cudaStream_t stream) {
  HeadGrid grid;
  grid.early = early;
  grid.ahead = resident * multiprocessors();  // about the blocks that run at once
  grid.blocks = FastDiv(static_cast<uint32_t>((a.V + width - 1) / width));
  grid.ratio = FastDiv(static_cast<uint32_t>(a.HV / a.H));
  for (; grid.first < a.seqs.N; grid.first += kMaxGridY) {
    const int64_t count = a.seqs.N - grid.first < kMaxGridY ? a.seqs.N - grid.first : kMaxGridY;
    const cudaError_t error = launch(
        kernel,
        dim3(static_cast<unsigned>(a.HV) * grid.blocks.divisor, static_cast<unsigned>(count)),
        dim3(warps * 32), shared, stream, a, grid);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class ST, class AT, int K, int RPW, int LANES, int WARPS, int MIN_BLOCKS, bool ONE>
cudaError_t launch_rows(const RecurrentArgs& a, bool early, cudaStream_t stream) {
  return launch_heads(recurrent_rows<ST, AT, K, RPW, LANES, WARPS, MIN_BLOCKS, ONE>, a, RPW * WARPS,
                      WARPS, 16, 0, early, stream);
}

template <class ST, class AT, int K, bool ONE>
cudaError_t launch_columns(const RecurrentArgs& a, bool early, cudaStream_t stream) {
  // 128 registers a thread, or 168 where tokens follow one another.
  constexpr int warps = Columns::warps(K), blocks = (ONE ? 16 : 12) / warps;
  return launch_heads(recurrent_columns<ST, AT, K, blocks, ONE>, a, Columns::kWidth, warps, blocks,
                      0, early, stream);
}

// Lanes a row are the same in every variant of a (state dtype, K), so that the choice, which
// depends on the batch, changes no bit of a result. docs/tried/cuda.md has what other tiles gave.
template <class ST, class AT, int K>
cudaError_t launch_k(const RecurrentArgs& a, bool early, cudaStream_t stream) {
  const bool one = !a.seqs.cu_seqlens.ptr && a.seqs.T == 1 && a.seqs.S == 0;
  if (a.state.s_k != 1) {
    return one ? launch_columns<ST, AT, K, true>(a, early, stream)
               : launch_columns<ST, AT, K, false>(a, early, stream);
  }
  if constexpr (sizeof(ST) == 4) {
    constexpr int lanes = K == 256 ? 32 : 16;
    if constexpr (K == 128) {
      // As below; faster from 256 sequences of 12 heads on, and where its few blocks, at most eight
      // a multiprocessor, still are three of them.
      const int64_t elements = a.seqs.N * a.HV * a.V * a.K;
      const bool few = elements >= (int64_t{3} << 18) && elements <= (int64_t{1} << 21);
      if (one && (few || elements >= (int64_t{3} << 24))) {
        return launch_rows<ST, AT, K, 16, lanes, 1, 16, true>(a, early, stream);
      }
    }
    return one ? launch_rows<ST, AT, K, 4, lanes, 2, 16, true>(a, early, stream)
               : launch_rows<ST, AT, K, 4, lanes, 2, 12, false>(a, early, stream);
  } else {
    constexpr int lanes = K == 64 ? 8 : 16, rows = K == 256 ? 4 : 8;
    if (!one) return launch_rows<ST, AT, K, rows, lanes, 2, 8, false>(a, early, stream);
    // Large batches run best on tiles that amortise the work of a warp, small ones on many warps.
    const bool large = a.seqs.N * a.HV * a.V * a.K >= (int64_t{1} << 22);
    return large ? launch_rows<ST, AT, K, 2 * rows, lanes, 1, 16, true>(a, early, stream)
                 : launch_rows<ST, AT, K, rows, lanes, 2, 12, true>(a, early, stream);
  }
}

template <class ST, class AT>
cudaError_t launch_activation(const RecurrentArgs& a, bool early, cudaStream_t stream) {
  switch (a.K) {
    case 64:
      return launch_k<ST, AT, 64>(a, early, stream);
    case 128:
      return launch_k<ST, AT, 128>(a, early, stream);
    default:
      return launch_k<ST, AT, 256>(a, early, stream);
  }
}

template <class ST>
cudaError_t launch_state(const RecurrentArgs& a, bool early, cudaStream_t stream) {
  switch (a.q.dtype) {
    case DType::f32:
      return launch_activation<ST, float>(a, early, stream);
    case DType::bf16:
      return launch_activation<ST, bf16>(a, early, stream);
    default:
      return launch_activation<ST, f16>(a, early, stream);
  }
}

cudaError_t recurrent_f32(const RecurrentArgs& a, bool early, cudaStream_t stream);
cudaError_t recurrent_bf16(const RecurrentArgs& a, bool early, cudaStream_t stream);
cudaError_t recurrent_f16(const RecurrentArgs& a, bool early, cudaStream_t stream);

}  // namespace cuda
}  // namespace gdn
