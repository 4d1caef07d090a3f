// The kernels of one instruction set, and the choice among those compiled in.
#pragma once

#include <string>
#include <vector>

#include "../args.h"
#include "parallel.h"

// AMX needs a compiler that knows it and a kernel that hands out its registers.
#if defined(__x86_64__) && defined(__linux__) && defined(__has_include)
#if __has_include(<amxbf16intrin.h>)
#define GDN_WITH_AMX 1
#endif
#endif

namespace gdn::cpu {

// gdn_ops.set_precision: exact = products of f32 operands; fast = operands rounded once, to the
// 16-bit dtype a state is stored in or to the bf16 of a chunk's inputs, where the processor has
// such products; automatic = fast where it was measured to pay.
enum class Precision { exact, fast, automatic };

struct Kernels {
  const char* name;  // what GDN_CPU_ISA accepts
  const char* description;
  bool (*supported)();  // by the processor this runs on
  void (*recurrent)(const RecurrentArgs&, const Parallel&);
  void (*gating)(const GatingArgs&, const Parallel&);
  void (*short_conv)(const ConvArgs&, const Parallel&);
  void (*conv_gating)(const ConvGatingArgs&, const Parallel&);
  void (*gated_rms_norm)(const NormArgs&, const Parallel&);
  void (*decode)(const DecodeArgs&, const Parallel&);
  void (*sweep)(char* data, int64_t bytes, uint32_t zero, const Parallel&);
  void (*recurrent_window)(const RecurrentArgs&, const Parallel&);
  void (*window_flush)(const RecurrentArgs&, const Parallel&);
  void (*decode_window)(const DecodeArgs&, const Parallel&);
  void (*chunk)(const ChunkArgs&, const Parallel&);
  void (*chunk_lowrank)(const ChunkArgs&, const Parallel&);
  // Returns the floats of `work` that it needs; with work null it does only that.
  int64_t (*chunk_backward)(const ChunkBackwardArgs&, const Parallel&);
  void (*linear)(const LinearArgs&, const Parallel&);
  int64_t linear_limit[3];  // by DType: rows of x up to which `linear` beats torch's product
};

// Every level compiled in, best first; the last one runs anywhere.
const std::vector<const Kernels*>& compiled();

// The level in use: GDN_CPU_ISA if set (an error if unknown or unsupported here), else the best.
const Kernels& kernels();

Precision precision();
void set_precision(Precision p);

}  // namespace gdn::cpu
