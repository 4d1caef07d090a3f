#include "chunk_rows.cuh"
#include "kernels.h"
#include "launch.h"
#include "select.h"

namespace gdn {
namespace cuda {
namespace {

// What the tensor-core kernels take; everything else goes token by token in float32.
bool products_can(const ChunkArgs& a) {
  const auto view = [&](const View& x) { return x.dtype == a.q.dtype && vector_view(x, 8); };
  // What a chunk starts from depends on the cut in the low-rank form only; edges lie on cuts.
  const bool cut =
      a.window.fill ? a.C == kChunk && a.window.R <= kChunk : a.edges == 0 || a.C % kChunk == 0;
  return (a.K == 64 || a.K == 128) && a.V % kScanRows == 0 && a.V > 0 && a.HV / a.H <= kMaxRatio &&
         a.seqs.T > 0 && view(a.q) && view(a.k) && view(a.v) && view(a.out) && cut;
}

int64_t slots_of(const ChunkArgs& a) {
  return a.seqs.cu_seqlens.ptr ? a.seqs.T / kChunk + a.seqs.N
                               : a.seqs.N * ((a.seqs.T + kChunk - 1) / kChunk);
}
// call(an IN of this call, K as a constant)
template <class Call>
auto with_format(const ChunkArgs& a, Call&& call) {
  const auto with_keys = [&](auto in) {
    return a.K == 64 ? call(in, std::integral_constant<int, 64>())
                     : call(in, std::integral_constant<int, 128>());
  };
  return a.q.dtype == DType::f32    ? with_keys(float())
         : a.q.dtype == DType::bf16 ? with_keys(bf16())
                                    : with_keys(f16());
}
// The scan of all segments but the first fills a card of 132 multiprocessors once, with blocks
// alone on theirs. Shorter sequences than these would make a call of 16384 tokens slower.
Segments segments_of(const ChunkArgs& a) {
  constexpr int64_t kBlocks = 132, kMost = 12, kLeast = 64;
  Segments s;
  if (a.window.fill || !products_can(a)) return s;
  const int64_t slices = a.HV * (a.V / kScanRows), most = kBlocks / slices + 1;
  if (most < 3) return s;  // the first is on its way while others, but the last, are prepared
  s.most = static_cast<int>(most < kMost ? most : kMost);
  s.chunks = slices * 16 / 3 < kLeast ? kLeast : slices * 16 / 3;
  return s;
}
struct Scratch {
  size_t factors = 0, keys = 0, decays = 0, updates = 0, starts = 0, steps = 0, dropped = 0;
  size_t all() const { return factors + keys + decays + updates + starts + steps + dropped; }
};
Scratch scratch_of(const ChunkArgs& a) {
  Scratch s;
  if (products_can(a)) {
    const size_t slots = static_cast<size_t>(slots_of(a));
    with_format(a, [&](auto in, auto k) {
      using Form = Format<decltype(in)>;
      s.factors = slots * a.HV * Form::kBytes;
      if (a.window.fill) {
        s.keys = slots * a.H * 2 * Form::gram_bytes(window_room(a.window.R));
        s.decays = slots * a.HV * kChunk * 4;
      } else if (Form::kParts == 2) {
        s.keys = slots * a.H * 2 * Form::template key_bytes<k()>();
      }
    });
    const Segments segments = segments_of(a);
    const size_t heads = static_cast<size_t>(places_of(a, segments)) * segments.most * a.HV;
    s.starts = heads * a.V * a.K * 4;
    s.steps = heads * a.K * a.K * 4;
    s.dropped = heads * 4;
  } else if (a.window.fill) {
    s.updates = static_cast<size_t>(a.seqs.N) * a.HV * a.window.R * a.V * 4;
  }
  return s;
}

template <int COLUMNS>
cudaError_t launch_tokens(const ChunkArgs& a, ChunkLayout x, cudaStream_t stream) {
  constexpr int rows = 4, block = rows * kRowsWarps;
  const unsigned blocks = static_cast<unsigned>(a.HV * ((a.V + block - 1) / block));
  for (; x.first < a.seqs.N; x.first += kMaxGridY) {
    const int64_t count = a.seqs.N - x.first < kMaxGridY ? a.seqs.N - x.first : kMaxGridY;
    const dim3 grid(blocks, static_cast<unsigned>(count));
    const cudaError_t error = a.window.fill ? launch(chunk_rows<COLUMNS, rows, true>, grid,
                                                     dim3(kRowsWarps * 32), 0, stream, a, x)
                                            : launch(chunk_rows<COLUMNS, rows, false>, grid,
                                                     dim3(kRowsWarps * 32), 0, stream, a, x);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_forward(const ChunkArgs& a, const ChunkLayout& x, cudaStream_t stream) {
  if (products_can(a)) {
    return with_format(
        a, [&](auto in, auto k) { return chunk_products<decltype(in), k()>(a, x, stream); });
  }
  if (a.K <= 128) return launch_tokens<4>(a, x, stream);
  if (a.K <= 256) return launch_tokens<8>(a, x, stream);
  return launch_tokens<16>(a, x, stream);
}

}  // namespace

size_t chunk_workspace(const ChunkArgs& a) { return scratch_of(a).all(); }

cudaError_t chunk(const ChunkArgs& a, void* workspace, cudaStream_t stream) {
  if (a.seqs.N == 0 || a.V == 0) return cudaSuccess;
  ChunkLayout x;
  const Scratch s = scratch_of(a);
  x.factors = static_cast<unsigned char*>(workspace);
  x.keys = x.factors + s.factors;
  x.decays = reinterpret_cast<float*>(x.keys + s.keys);
  x.updates = x.decays + s.decays / 4;
  x.starts = x.updates + s.updates / 4;
  x.steps = x.starts + s.starts / 4;
  x.dropped = reinterpret_cast<uint32_t*>(x.steps + s.steps / 4);
  x.segments = segments_of(a);
  x.places = places_of(a, x.segments);
  x.slots = slots_of(a);
  x.chunks = (a.seqs.T + kChunk - 1) / kChunk;
  x.ratio = FastDiv(static_cast<uint32_t>(a.HV / a.H));
  x.read_vectors = vector_pool(a.read);
  x.write_vectors = vector_pool(a.write);
  x.window_vectors = a.window.fill && vector_entries(a.window);
  x.window_beside = products_can(a);
  cudaError_t error = launch_forward(a, x, stream);
  if (!a.window.fill) return error;
  for (; error == cudaSuccess && x.first < a.seqs.N; x.first += kMaxGridY) {
    const int64_t count = a.seqs.N - x.first < kMaxGridY ? a.seqs.N - x.first : kMaxGridY;
    error = launch(chunk_window, dim3(static_cast<unsigned>(a.H), static_cast<unsigned>(count)),
                   dim3(kWindowWarps * 32), 0, stream, a, x);
  }
  if (error != cudaSuccess) return error;
  return launch(chunk_fill, dim3(static_cast<unsigned>((a.seqs.N + 127) / 128)), dim3(128), 0,
                stream, a);
}

}  // namespace cuda
}  // namespace gdn
