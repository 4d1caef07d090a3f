// 16-bit storage formats as plain bit patterns, with portable conversions. No torch.
#pragma once

#include <cstdint>
#include <cstring>

namespace gdn {

struct bf16_t {
  uint16_t bits;
};
struct f16_t {
  uint16_t bits;
};

inline float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

inline float to_float(float x) { return x; }
inline float to_float(bf16_t x) { return bits_to_float(uint32_t(x.bits) << 16); }
inline float to_float(f16_t x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, mag = x.bits & 0x7fff;
  if (mag >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (mag & 0x3ff) << 13);
  // Multiplying by 2^112 moves the exponent bias and normalises subnormals exactly.
  const float magnitude = bits_to_float(mag << 13) * bits_to_float(0x77800000);
  return bits_to_float(sign | float_to_bits(magnitude));
}

inline bf16_t to_bf16(float f) {
  const uint32_t u = float_to_bits(f);
  if (f != f) return {uint16_t(u >> 16 | 0x40)};
  return {uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
inline f16_t to_f16(float f) {
  const uint32_t u = float_to_bits(f), sign = u >> 16 & 0x8000, mag = u & 0x7fffffff;
  if (mag > 0x7f800000) return {uint16_t(sign | 0x7e00 | (mag >> 13 & 0x1ff))};
  if (mag >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // rounds to 2^16 or more
  if (mag < 0x38800000) {
    // Subnormal: adding 0.5 puts the unit of 2^-24 in the last place, rounding to nearest even.
    const uint32_t r = float_to_bits(bits_to_float(mag) + 0.5f) - 0x3f000000;
    return {uint16_t(sign | r)};
  }
  return {uint16_t(sign | ((mag + 0xfff + (mag >> 13 & 1)) - 0x38000000) >> 13)};
}

template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline bf16_t from_float<bf16_t>(float x) {
  return to_bf16(x);
}
template <>
inline f16_t from_float<f16_t>(float x) {
  return to_f16(x);
}

}  // namespace gdn
