// What the host may start. The functions are defined at the end of each .xpu file, because only the
// device compiler understands a launch.
#pragma once

#include "params.h"

namespace gdn {
namespace xpu {

// Throws if the runtime refused a launch, whose code is then not 0.
void check_launch(const char* kernel, int error);

// How many a launch asks for. Kernels use what they are given (core_num, cluster_num).
constexpr int kChipClusters = 12;
constexpr int kClusterCores = 64;

// One token a sequence; rows of one column.
void launch_recurrent(const RecurrentParams& p, int state_dtype, void* stream);
// Any number of tokens, packed sequences, one pool row a token.
void launch_recurrent_seq(const RecurrentParams& p, int state_dtype, void* stream);

// One token: outputs and updates. Then `append` makes its keys, gates and fill count permanent; the
// two are separate launches because cores of one head read what the second writes.
void launch_window_step(const WindowParams& p, void* stream);
void launch_window_append(const WindowParams& p, void* stream);
void launch_conv(const ConvParams& p, void* stream);
void launch_decode(const DecodeParams& p, int state_dtype, void* stream);
void launch_gated_rms_norm(const NormParams& p, void* stream);

// The chunked rule between its matrix products.
void launch_chunk_plan(const ChunkPlanParams& p, void* stream);
void launch_chunk_rows(const ChunkRowsParams& p, void* stream);
void launch_chunk_gates(const ChunkParams& p, void* stream);
void launch_chunk_decay(const ChunkParams& p, void* stream);
void launch_chunk_solve(const ChunkParams& p, void* stream);
void launch_chunk_window(const ChunkWindowParams& p, void* stream);

}  // namespace xpu
}  // namespace gdn
