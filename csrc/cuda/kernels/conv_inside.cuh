// The convolution of one token inside the kernels of the window: each channel belongs to one block,
// which reads and rolls its history there, so q, k and v never go through memory.
#pragma once

#include "mma.cuh"
#include "select.h"
#include "window.cuh"

namespace gdn {
namespace cuda {

// W = 4, activations, weights and histories of one 16-bit type, channels of a column neighbours in
// memory.
struct ConvInside {
  View x;  // channel = sd, contiguous
  const void* weight = nullptr;
  Param bias;
  ConvPool state;
  bool silu = false;
  int first_k = 0, first_v = 0;  // channels; q starts at 0

  template <class T>
  __device__ __forceinline__ T* column(int64_t row, int64_t l, int channel) const {
    return static_cast<T*>(state.ptr) + row * state.s_p + l * state.s_l + channel;
  }
  template <class T>
  __device__ __forceinline__ uint2 taps_of(int channel) const {
    return *reinterpret_cast<const uint2*>(static_cast<const T*>(weight) + int64_t{4} * channel);
  }
  // From the oldest input to the newest; rounded, as the model rounds it.
  template <class T>
  __device__ __forceinline__ float result(const float (&in)[4], uint2 taps, int channel) const {
    float w[4];
    some_to_float<T, 4>({taps.x, taps.y}, TypeOf<T>::value, w);
    float sum = bias.ptr ? load_param(bias, channel) : 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++) sum = __fmaf_rn(w[i], in[i], sum);
    return to_float(from_float<T>(silu ? cuda::silu(sum) : sum));
  }

  // VB channels of a block, `channels` of them live: history and x to shared memory, three columns
  // and one, in pieces of eight.
  template <class T, int VB>
  __device__ __forceinline__ void fetch(uint4* staged, int64_t n, int64_t row, bool fresh,
                                        int channel, int channels) const {
    for (int i = threadIdx.x; i < VB / 2; i += VB) {
      const int which = i / (VB / 8), c = i % (VB / 8) * 8;
      if (c >= channels || (fresh && which < 3)) continue;
      const T* const from = which < 3 ? column<T>(row, state.L - 3 + which, channel + c)
                                      : static_cast<const T*>(x.ptr) + n * x.sb + channel + c;
      copy_async(shared_address(staged + i), from);
    }
  }
  // The channel of row `row`, once all has arrived.
  template <class T, int VB>
  __device__ __forceinline__ float convolve(const uint4* staged, uint2 taps, bool fresh,
                                            int channel, int row) const {
    const T* const mine = reinterpret_cast<const T*>(staged) + row;
    float in[4];
#pragma unroll
    for (int i = 0; i < 4; i++) in[i] = fresh && i < 3 ? 0.f : to_float(mine[i * VB]);
    return result<T>(in, taps, channel + row);
  }
  template <class T, int VB>
  __device__ __forceinline__ void roll(const uint4* staged, int64_t row, bool fresh, int channel,
                                       int channels) const {
    for (int i = threadIdx.x; i < VB / 2; i += VB) {
      const int which = i / (VB / 8), c = i % (VB / 8) * 8;
      const int64_t l = state.L - 4 + which;
      if (c >= channels || l < 0) continue;
      *reinterpret_cast<uint4*>(column<T>(row, l, channel + c)) =
          fresh && which < 3 ? make_uint4(0, 0, 0, 0) : staged[i];
    }
  }
};

// Whether that is what a call has; otherwise the convolution is a launch of its own.
inline bool conv_fits(const ConvGatingArgs& f, const RecurrentArgs& r) {
  const ConvArgs& c = f.conv;
  const ConvPool& s = c.state;
  const DType d = c.x.dtype;
  return c.W == 4 && d != DType::f32 && c.weight.dtype == d && s.dtype == d && c.weight.s1 == 1 &&
         c.weight.s0 == 4 && aligned(c.weight.ptr, 16) && c.x.sd == 1 && aligned(c.x.ptr, 16) &&
         c.x.sb % 8 == 0 && (s.L == 3 || s.L == 4) &&
         !(s.leading && (s.L != 3 || r.seqs.num_accepted.ptr)) && s.s_c == 1 && s.s_l % 8 == 0 &&
         s.s_p % 8 == 0 && aligned(s.ptr, 16) && s.P >= r.seqs.P && r.V % 8 == 0;
}

inline ConvInside conv_inside(const ConvGatingArgs& front) {
  const ConvArgs& c = front.conv;
  ConvInside r;
  r.x = c.x;
  r.weight = c.weight.ptr;
  r.bias = c.bias;
  r.state = c.state;
  r.silu = c.silu;
  r.first_k = static_cast<int>(front.H * front.K);
  r.first_v = 2 * r.first_k;
  return r;
}

// N neighbouring channels of a lane: loaded first, computed and rolled later.
template <class T, int N>
struct ConvToken {
  static constexpr DType kType = TypeOf<T>::value;
  Some<N> in[4];
  uint2 taps[N];

  __device__ __forceinline__ ConvToken(const ConvInside& c, int64_t n, int64_t row, bool fresh,
                                       int channel) {
    in[3] = load_some<T, N>(static_cast<const T*>(c.x.ptr) + n * c.x.sb + channel, kType, 0);
#pragma unroll
    for (int i = 0; i < 3; i++) {
      in[i] = {};
      if (!fresh) in[i] = load_some<T, N>(c.column<T>(row, c.state.L - 3 + i, channel), kType, 0);
    }
#pragma unroll
    for (int i = 0; i < N; i++) taps[i] = c.taps_of<T>(channel + i);
  }

  __device__ __forceinline__ Some<N> finish(const ConvInside& c, int64_t row, int channel) const {
    float f[4][N];
#pragma unroll
    for (int i = 0; i < 4; i++) some_to_float<T, N>(in[i], kType, f[i]);
    Some<N> y = {};
#pragma unroll
    for (int e = 0; e < N; e += 2) {
      const float one[4] = {f[0][e], f[1][e], f[2][e], f[3][e]};
      const float two[4] = {f[0][e + 1], f[1][e + 1], f[2][e + 1], f[3][e + 1]};
      y.w[e / 2] = pack_pair<T>(c.result<T>(one, taps[e], channel + e),
                                c.result<T>(two, taps[e + 1], channel + e + 1));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int64_t l = c.state.L - 4 + i;
      if (l >= 0) store_some<T, N>(c.column<T>(row, l, channel), kType, 0, in[i]);
    }
    return y;
  }
};

}  // namespace cuda
}  // namespace gdn
