// The vector type a kernel is written over: F, a register of kLanes floats, and its few operations.
//
// Included once per instruction set inside `namespace gdn::cpu::<isa>` (see isa_*.cpp), with
// GDN_SIMD_AVX512, GDN_SIMD_AVX2, GDN_SIMD_NEON or GDN_SIMD_GENERIC defined. Compiler vector types
// give + - * / on F; only what they lack is spelled per instruction set. Every operation treats
// lanes alike, so a value does not depend on the lane or on how many lanes are filled. No #include
// here: the includer brings them in *before* it raises the target, so that no inline function of
// the standard library is compiled for a processor that the program may not run on.

#if GDN_SIMD_AVX512
typedef __m512 F;
typedef __m512i I;
#elif GDN_SIMD_AVX2
typedef __m256 F;
typedef __m256i I;
#else
typedef float F __attribute__((vector_size(16)));
#endif
constexpr int kLanes = sizeof(F) / sizeof(float);
typedef int32_t I32 __attribute__((vector_size(sizeof(F))));
typedef uint32_t U32 __attribute__((vector_size(sizeof(F))));
typedef uint16_t U16 __attribute__((vector_size(sizeof(F) / 2)));

#define GDN_INLINE static inline __attribute__((always_inline))

// body(integral_constant<int, i>) for i in [0, n): constants, so that an array of registers which
// it indexes stays in registers. A loop does not promise that, whatever its pragma. The body is
// written GDN_EACH(i) { ... }.
#define GDN_EACH(i) [&](auto i) __attribute__((always_inline))
template <class Body, int... i>
GDN_INLINE void unrolled_body(Body body, std::integer_sequence<int, i...>) {
  (body(std::integral_constant<int, i>()), ...);
}
template <int n, class Body>
GDN_INLINE void unrolled(Body body) {
  unrolled_body(body, std::make_integer_sequence<int, n>());
}

GDN_INLINE F broadcast(float x) {
#if GDN_SIMD_AVX512
  return _mm512_set1_ps(x);
#elif GDN_SIMD_AVX2
  return _mm256_set1_ps(x);
#else
  return F{x, x, x, x};
#endif
}
GDN_INLINE F zero() { return broadcast(0.f); }

// a * b + c, fused where the instruction set can.
GDN_INLINE F fma(F a, F b, F c) {
#if GDN_SIMD_AVX512
  return _mm512_fmadd_ps(a, b, c);
#elif GDN_SIMD_AVX2
  return _mm256_fmadd_ps(a, b, c);
#elif GDN_SIMD_NEON
  return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

GDN_INLINE F sqrt(F x) {
#if GDN_SIMD_AVX512
  return _mm512_sqrt_ps(x);
#elif GDN_SIMD_AVX2
  return _mm256_sqrt_ps(x);
#else
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

GDN_INLINE F select(I32 mask, F yes, F no) { return mask ? yes : no; }
// Comparisons with NaN are false, so where either operand is NaN the result is a. Callers put the
// operand that may be NaN first, and it stays NaN.
GDN_INLINE F max(F a, F b) {
#if GDN_SIMD_AVX512
  return _mm512_max_ps(b, a);
#elif GDN_SIMD_AVX2
  return _mm256_max_ps(b, a);
#else
  return select((I32)(a < b), b, a);
#endif
}
GDN_INLINE F min(F a, F b) {
#if GDN_SIMD_AVX512
  return _mm512_min_ps(b, a);
#elif GDN_SIMD_AVX2
  return _mm256_min_ps(b, a);
#else
  return select((I32)(a > b), b, a);
#endif
}

// Sum of the lanes, always in the same order.
GDN_INLINE float sum(F x) {
#if GDN_SIMD_AVX512
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x),
                           _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)));
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#elif GDN_SIMD_AVX2
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
#else
  return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

// Sums of four registers at once, each in the order of sum() above.
GDN_INLINE void sum4(const F* x, float* out) {
#if GDN_SIMD_AVX2 || GDN_SIMD_AVX512
  __m128 s[4];
  for (int i = 0; i < 4; ++i) {
#if GDN_SIMD_AVX512
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x[i]),
                             _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x[i]), 1)));
#else
    __m256 h = x[i];
#endif
    s[i] = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  }
  _MM_TRANSPOSE4_PS(s[0], s[1], s[2], s[3]);
  _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(s[0], s[2]), _mm_add_ps(s[1], s[3])));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum(x[i]);
#endif
}

// --- groups of four lanes ("quads"): the sums of four registers in every quad, and the ways in and
// out. One reduction then serves four rows, or two products of two, without a scalar in between.

#if GDN_SIMD_AVX512
#define GDN_QUAD(op, ...) _mm512_##op(__VA_ARGS__)
#elif GDN_SIMD_AVX2
#define GDN_QUAD(op, ...) _mm256_##op(__VA_ARGS__)
#endif

// Lane 4 i + r of the result is the sum of all lanes of the r-th register, always in the same
// order.
GDN_INLINE F quad_sums(F a, F b, F c, F d) {
#if GDN_SIMD_AVX2 || GDN_SIMD_AVX512
  const F ab = GDN_QUAD(unpacklo_ps, a, b) + GDN_QUAD(unpackhi_ps, a, b);
  const F cd = GDN_QUAD(unpacklo_ps, c, d) + GDN_QUAD(unpackhi_ps, c, d);
  F x = GDN_QUAD(shuffle_ps, ab, cd, 0x44) + GDN_QUAD(shuffle_ps, ab, cd, 0xee);
#if GDN_SIMD_AVX512
  x = x + _mm512_shuffle_f32x4(x, x, 0x4e);
  return x + _mm512_shuffle_f32x4(x, x, 0xb1);
#else
  return x + _mm256_permute2f128_ps(x, x, 1);
#endif
#else
  const F ab =
      __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const F cd =
      __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
#endif
}

// Lane r of each quad in all four of its lanes.
template <int r>
GDN_INLINE F quad_broadcast(F x) {
#if GDN_SIMD_AVX2 || GDN_SIMD_AVX512
  return GDN_QUAD(permute_ps, x, r * 0x55);
#else
  return __builtin_shufflevector(x, x, r, r, r, r);
#endif
}
// The halves of each quad swapped.
GDN_INLINE F quad_swap(F x) {
#if GDN_SIMD_AVX2 || GDN_SIMD_AVX512
  return GDN_QUAD(permute_ps, x, 0x4e);
#else
  return __builtin_shufflevector(x, x, 2, 3, 0, 1);
#endif
}
GDN_INLINE F load_quad(const float* p) {
#if GDN_SIMD_AVX512
  return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
#elif GDN_SIMD_AVX2
  return _mm256_broadcast_ps((const __m128*)p);
#else
  F x;
  __builtin_memcpy(&x, p, sizeof(F));
  return x;
#endif
}

// --- even and odd lanes of a pair of registers, and back

template <int... i>
GDN_INLINE F even_of(F a, F b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, (2 * i)...);
}
template <int... i>
GDN_INLINE F odd_of(F a, F b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, (2 * i + 1)...);
}
template <int... i>
GDN_INLINE F low_of(F a, F b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, (i / 2 + (i % 2) * kLanes)...);
}
template <int... i>
GDN_INLINE F high_of(F a, F b, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(a, b, (i / 2 + kLanes / 2 + (i % 2) * kLanes)...);
}
using Lanes = std::make_integer_sequence<int, kLanes>;

// Four columns of kLanes rows stored row by row: x[0..3] hold the rows, on return the columns.
GDN_INLINE void rows_to_columns4(F* x) {
  const F e0 = even_of(x[0], x[1], Lanes()), o0 = odd_of(x[0], x[1], Lanes());
  const F e1 = even_of(x[2], x[3], Lanes()), o1 = odd_of(x[2], x[3], Lanes());
  x[0] = even_of(e0, e1, Lanes());
  x[1] = even_of(o0, o1, Lanes());
  x[2] = odd_of(e0, e1, Lanes());
  x[3] = odd_of(o0, o1, Lanes());
}
GDN_INLINE void columns4_to_rows(F* x) {
  const F e0 = low_of(x[0], x[2], Lanes()), e1 = high_of(x[0], x[2], Lanes());
  const F o0 = low_of(x[1], x[3], Lanes()), o1 = high_of(x[1], x[3], Lanes());
  x[0] = low_of(e0, o0, Lanes());
  x[1] = high_of(e0, o0, Lanes());
  x[2] = low_of(e1, o1, Lanes());
  x[3] = high_of(e1, o1, Lanes());
}

// Element 3 c + j of the three registers x, for every lane c.
template <int j, int... c>
GDN_INLINE F third_of(const F* x, std::integer_sequence<int, c...>) {
  const F front = __builtin_shufflevector(x[0], x[1], ((3 * c + j) % (2 * kLanes))...);
  return __builtin_shufflevector(front, x[2], (3 * c + j < 2 * kLanes ? c : 3 * c + j - kLanes)...);
}
// Register i of the rows whose columns are the registers x.
template <int i, int... p>
GDN_INLINE F row_of_3(const F* x, std::integer_sequence<int, p...>) {
  const F front = __builtin_shufflevector(
      x[0], x[1], ((i * kLanes + p) / 3 + (i * kLanes + p) % 3 % 2 * kLanes)...);
  return __builtin_shufflevector(front, x[2],
                                 ((i * kLanes + p) % 3 < 2 ? p : kLanes + (i * kLanes + p) / 3)...);
}
GDN_INLINE void rows_to_columns3(F* x) {
  const F rows[3] = {x[0], x[1], x[2]};
  x[0] = third_of<0>(rows, Lanes());
  x[1] = third_of<1>(rows, Lanes());
  x[2] = third_of<2>(rows, Lanes());
}
GDN_INLINE void columns3_to_rows(F* x) {
  const F columns[3] = {x[0], x[1], x[2]};
  x[0] = row_of_3<0>(columns, Lanes());
  x[1] = row_of_3<1>(columns, Lanes());
  x[2] = row_of_3<2>(columns, Lanes());
}

// --- memory: float, and the two 16-bit formats as bit patterns of their own type

GDN_INLINE F load(const float* p) {
  F x;
  __builtin_memcpy(&x, p, sizeof(F));
  return x;
}
GDN_INLINE void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof(F)); }

GDN_INLINE F load(const bf16_t* p) {
  U16 h;
  __builtin_memcpy(&h, p, sizeof h);
#if GDN_SIMD_AVX512
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16));
#elif GDN_SIMD_AVX2
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16));
#else
  return (F)(__builtin_convertvector(h, U32) << 16);
#endif
}

#if !GDN_SIMD_AVX512BF16
// The bits of x with its bfloat16 (round to nearest even; a NaN stays a quiet NaN) in the upper
// half.
GDN_INLINE U32 rounded_bf16(F x) {
#if GDN_SIMD_AVX512
  // One instruction makes every NaN the same one, which the addition cannot carry out of.
  x = _mm512_fixupimm_ps(x, x, _mm512_set1_epi32(0x33), 0);
  const U32 u = (U32)x;
  return u + 0x7fff + ((u >> 16) & 1);
#else
  const U32 u = (U32)x, nan = (U32)(x != x);
  return (nan & (u | 0x400000)) | (~nan & (u + 0x7fff + ((u >> 16) & 1)));
#endif
}
#endif
GDN_INLINE void store(bf16_t* p, F x) {
#if GDN_SIMD_AVX512BF16
  // The instruction flushes subnormals to zero, which the other paths do not; both are one
  // rounding.
  __m256bh h = _mm512_cvtneps_pbh(x);
#elif GDN_SIMD_AVX512
  __m256i h = _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)rounded_bf16(x), 16));
#elif GDN_SIMD_AVX2
  __m256i v = (__m256i)(rounded_bf16(x) >> 16);
  __m128i h = _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
#else
  U16 h = __builtin_convertvector(rounded_bf16(x) >> 16, U16);
#endif
  __builtin_memcpy(p, &h, sizeof h);
}

GDN_INLINE F load(const f16_t* p) {
#if GDN_SIMD_AVX512
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif GDN_SIMD_AVX2
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif GDN_SIMD_NEON
  return (F)vcvt_f32_f16(vld1_f16((const __fp16*)p));
#else
  F x;
  for (int i = 0; i < kLanes; ++i) x[i] = to_float(p[i]);
  return x;
#endif
}
GDN_INLINE void store(f16_t* p, F x) {
#if GDN_SIMD_AVX512
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif GDN_SIMD_AVX2
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif GDN_SIMD_NEON
  vst1_f16((__fp16*)p, vcvt_f16_f32((float32x4_t)x));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = to_f16(x[i]);
#endif
}

// Two registers at once: AVX-512 reads a line of bfloat16 with one permute for both, and writes it
// with one conversion or permute.
template <class T>
GDN_INLINE void load2(const T* p, F& a, F& b) {
  a = load(p);
  b = load(p + kLanes);
}
template <class T>
GDN_INLINE void store2(T* p, F a, F b) {
  store(p, a);
  store(p + kLanes, b);
}
#if GDN_SIMD_AVX512
GDN_INLINE I32 lane_numbers() { return I32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
// Words c and kLanes + c side by side, so that a shift and a mask widen both.
GDN_INLINE void load2(const bf16_t* p, F& a, F& b) {
  const I32 at = lane_numbers() | (lane_numbers() + kLanes) << 16;
  const __m512i pairs = _mm512_permutexvar_epi16((__m512i)at, _mm512_loadu_si512(p));
  a = (F)_mm512_slli_epi32(pairs, 16);
  b = (F)((U32)pairs & 0xffff0000u);
}
GDN_INLINE void store2(bf16_t* p, F a, F b) {
#if GDN_SIMD_AVX512BF16
  const __m512bh line = _mm512_cvtne2ps_pbh(b, a);
#else
  const U32 pairs = (rounded_bf16(a) >> 16) | (rounded_bf16(b) & 0xffff0000u);
  const I32 even = ((lane_numbers() & 7) << 2) + (lane_numbers() >> 3);
  const __m512i line = _mm512_permutexvar_epi16((__m512i)(even | (even + 2) << 16), (__m512i)pairs);
#endif
  __builtin_memcpy(p, &line, sizeof line);
}
#endif

#if GDN_SIMD_AMX
// store2 past the caches; `p` begins a line. StreamsEnd (strips.h) makes it visible.
GDN_INLINE void stream2(float* p, F a, F b) {
  _mm512_stream_ps(p, a);
  _mm512_stream_ps(p + kLanes, b);
}
GDN_INLINE void stream2(bf16_t* p, F a, F b) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)_mm512_cvtne2ps_pbh(b, a));
}
GDN_INLINE void stream2(f16_t* p, F a, F b) {
  alignas(64) f16_t line[2 * kLanes];
  store2(line, a, b);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), _mm512_load_si512(line));
}
#endif

// Two registers at once in the order in which they are cheapest to take apart: even and odd words
// of bfloat16 in AVX-512, where a shift and a mask widen them, and as they lie otherwise. For
// values that are treated alike, such as the columns of a row: what goes with them is put into that
// order once, by to_split.
template <class T>
constexpr bool kSplitsWords = std::is_same_v<T, bf16_t> && sizeof(F) == 64;
template <class T>
GDN_INLINE void load_split(const T* p, F& a, F& b) {
  if constexpr (kSplitsWords<T>) {
    U32 words;
    __builtin_memcpy(&words, p, sizeof words);
    a = (F)(words << 16);
    b = (F)(words & 0xffff0000u);
  } else {
    load2(p, a, b);
  }
}
template <class T>
GDN_INLINE void store_split(T* p, F a, F b) {
#if GDN_SIMD_AVX512
  if constexpr (kSplitsWords<T>) {
#if GDN_SIMD_AVX512BF16
    const I32 at = lane_numbers() | (lane_numbers() + kLanes) << 16;
    const __m512i line = _mm512_permutexvar_epi16((__m512i)at, (__m512i)_mm512_cvtne2ps_pbh(b, a));
#else
    const U32 line = (rounded_bf16(a) >> 16) | (rounded_bf16(b) & 0xffff0000u);
#endif
    __builtin_memcpy(p, &line, sizeof line);
    return;
  }
#endif
  store2(p, a, b);
}
template <class T>
GDN_INLINE void to_split(F& a, F& b) {
  if constexpr (kSplitsWords<T>) {
    const F even = even_of(a, b, Lanes());
    b = odd_of(a, b, Lanes());
    a = even;
  }
}
template <class T>
GDN_INLINE void from_split(F& a, F& b) {
  if constexpr (kSplitsWords<T>) {
    const F low = low_of(a, b, Lanes());
    b = high_of(a, b, Lanes());
    a = low;
  }
}

// kLanes rows of three elements: the columns of the old rows into x, and each row moved down by one
// with `newest` behind it.
template <class T>
GDN_INLINE void load_columns3(const T* p, F* x) {
  for (int i = 0; i < 3; ++i) x[i] = load(p + i * kLanes);
  rows_to_columns3(x);
}
template <class T>
GDN_INLINE void roll_columns3(T* p, const F* x, F newest) {
  F y[3] = {x[1], x[2], newest};
  columns3_to_rows(y);
  for (int i = 0; i < 3; ++i) store(p + i * kLanes, y[i]);
}
#if GDN_SIMD_AVX512
// In 16 bits as they lie there: 48 words, 32 of them in a register. Rows that roll are the same
// words one place on, with every third one replaced.
GDN_INLINE void load_columns3(const bf16_t* p, F* x) {
  const __m512i front = _mm512_loadu_si512(p);
  const __m512i back = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(p + 32)));
#pragma GCC unroll 3
  for (int j = 0; j < 3; ++j) {
    // Lane c: word 3 c + j in its upper half, zero below. Lanes up to 10 (9 for j = 2) are in
    // front.
    const I32 at = (lane_numbers() * 3 + j) << 16;
    const __mmask32 upper = 0xaaaaaaaau, first = j == 2 ? 0x000fffffu : 0x003fffffu;
    const __m512i some = _mm512_maskz_permutexvar_epi16(upper & first, (__m512i)at, front);
    x[j] = (F)_mm512_mask_permutexvar_epi16(some, upper & ~first, (__m512i)at, back);
  }
}
template <class T>
GDN_INLINE void roll_words3(T* p, F newest) {
  T words[16];
  store(words, newest);
  const __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)words));
  // Word w of the rows is x[w / 3] where w % 3 is 2, else the word after it.
  const I32 w = lane_numbers() * 2, w_back = w + 32;
  const __m512i front = _mm512_mask_permutexvar_epi16(_mm512_loadu_si512(p + 1), 0x24924924u,
                                                      (__m512i)(w / 3 | (w + 1) / 3 << 16), x);
  const __m512i back = _mm512_mask_permutexvar_epi16(
      _mm512_castsi256_si512(_mm256_maskz_loadu_epi16(0x7fff, p + 33)), 0x9249u,
      (__m512i)(w_back / 3 | (w_back + 1) / 3 << 16), x);
  _mm512_storeu_si512(p, front);
  _mm256_storeu_si256((__m256i*)(p + 32), _mm512_castsi512_si256(back));
}
GDN_INLINE void roll_columns3(bf16_t* p, const F*, F newest) { roll_words3(p, newest); }
GDN_INLINE void roll_columns3(f16_t* p, const F*, F newest) { roll_words3(p, newest); }
#endif

// The first n < kLanes elements; the other lanes read as zero and are not written.
template <class T>
GDN_INLINE F load_n(const T* p, int64_t n) {
  T tmp[kLanes] = {};
  __builtin_memcpy(tmp, p, n * sizeof(T));
  return load(tmp);
}
template <class T>
GDN_INLINE void store_n(T* p, F x, int64_t n) {
  T tmp[kLanes];
  store(tmp, x);
  __builtin_memcpy(p, tmp, n * sizeof(T));
}

// Calls body(i, lanes) over [0, n) in steps of a register; `lanes` is kLanes except for the tail.
template <class Body>
GDN_INLINE void for_lanes(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, std::integral_constant<int, kLanes>());
  if (i < n) body(i, static_cast<int>(n - i));
}
template <class T>
GDN_INLINE F load_lanes(const T* p, std::integral_constant<int, kLanes>) {
  return load(p);
}
template <class T>
GDN_INLINE F load_lanes(const T* p, int n) {
  return load_n(p, n);
}
template <class T>
GDN_INLINE void store_lanes(T* p, F x, std::integral_constant<int, kLanes>) {
  store(p, x);
}
template <class T>
GDN_INLINE void store_lanes(T* p, F x, int n) {
  store_n(p, x, n);
}

// What is tuned to Intel's memory system goes by the level that only Intel's processors have. There
// a request waits where the core's queues are full, instead of being dropped.
#if GDN_SIMD_AMX
constexpr bool kIntel = true;
#else
constexpr bool kIntel = false;
#endif
GDN_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
// Into L2: a line asked for this early would not survive in L1.
GDN_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// --- elementary functions

// e^x to 1 ulp or so: 2^n * P(r), r in [-ln2/2, ln2/2]. -inf gives 0, +inf gives inf, NaN stays.
GDN_INLINE F exp(F x) {
  const F hi = broadcast(88.72283f), lo = broadcast(-103.97208f);
  F c = min(max(x, lo), hi);
  const F magic = broadcast(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  F n = fma(c, broadcast(1.44269504088896341f), magic);
  I32 bits = (I32)n - (I32)magic;
  n = n - magic;
  F r = fma(n, broadcast(-0.693359375f), c);
  r = fma(n, broadcast(2.12194440e-4f), r);
  F p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r + broadcast(1.f));
  // Two factors, so that results near the ends of the range neither overflow early nor lose the
  // subnormals.
  I32 half = bits >> 1;
  F s1 = (F)((half + 127) << 23), s2 = (F)((bits - half + 127) << 23);
  F y = p * s1 * s2;
  y = select((I32)(x < lo), zero(), y);
  y = select((I32)(x > hi), broadcast(__builtin_inff()), y);
  return select((I32)(x != x), x, y);
}

// Functions of several registers are written as one unrolled() a step: J chains side by side hide
// the latency that a single one would wait for.

// e^x for x <= 0: no overflow to guard, and below 2^-126 the result may as well be zero. A NaN
// gives something finite: for callers that multiply by the NaN afterwards.
template <int J>
GDN_INLINE void exp_nonpositive(const F* x, F* y) {
  const F magic = broadcast(12582912.f), least = broadcast(-87.f);
  F n[J], r[J], p[J];
  I32 bits[J];
  unrolled<J>(GDN_EACH(j) { r[j] = max(x[j], least); });
  unrolled<J>(GDN_EACH(j) { n[j] = fma(r[j], broadcast(1.44269504088896341f), magic); });
  unrolled<J>(GDN_EACH(j) { bits[j] = ((I32)n[j] - (I32)magic + 127) << 23; });
  unrolled<J>(GDN_EACH(j) { n[j] = n[j] - magic; });
  unrolled<J>(GDN_EACH(j) { r[j] = fma(n[j], broadcast(-0.693359375f), r[j]); });
  unrolled<J>(GDN_EACH(j) { r[j] = fma(n[j], broadcast(2.12194440e-4f), r[j]); });
  unrolled<J>(
      GDN_EACH(j) { p[j] = fma(broadcast(1.9875691500e-4f), r[j], broadcast(1.3981999507e-3f)); });
  unrolled<J>(GDN_EACH(j) { p[j] = fma(p[j], r[j], broadcast(8.3334519073e-3f)); });
  unrolled<J>(GDN_EACH(j) { p[j] = fma(p[j], r[j], broadcast(4.1665795894e-2f)); });
  unrolled<J>(GDN_EACH(j) { p[j] = fma(p[j], r[j], broadcast(1.6666665459e-1f)); });
  unrolled<J>(GDN_EACH(j) { p[j] = fma(p[j], r[j], broadcast(5.0000001201e-1f)); });
  unrolled<J>(GDN_EACH(j) { p[j] = fma(p[j], r[j] * r[j], r[j] + broadcast(1.f)); });
  unrolled<J>(GDN_EACH(j) { y[j] = select((I32)(x[j] < least), zero(), p[j] * (F)bits[j]); });
}
GDN_INLINE F exp_nonpositive(F x) {
  F y;
  exp_nonpositive<1>(&x, &y);
  return y;
}

GDN_INLINE F sigmoid(F x) {
  // exp of a non-positive number only: no overflow, full precision at both ends.
  F e = exp_nonpositive((F)((U32)x | 0x80000000u));
  e = select((I32)(x != x), x, e);
  F positive = broadcast(1.f) / (broadcast(1.f) + e);
  return select((I32)(x < zero()), e * positive, positive);
}
// x * sigmoid(x) of J registers, in place.
template <int J>
GDN_INLINE void silu(F* x) {
#if GDN_SIMD_AVX512
  // x / (1 + 2^t) with t = -x log2(e): 2^t from its fraction by a polynomial (error 2e-9) and its
  // whole part by one instruction. The rounding of t costs |t| 2^-24, which matters only where the
  // result is small beside the inputs.
  F t[J], p[J], d[J], r[J];
  unrolled<J>(GDN_EACH(j) { t[j] = x[j] * broadcast(-1.44269504088896341f); });
  unrolled<J>(GDN_EACH(j) { r[j] = _mm512_reduce_ps(t[j], _MM_FROUND_TO_NEG_INF); });
  unrolled<J>(
      GDN_EACH(j) { p[j] = fma(broadcast(2.17022534e-4f), r[j], broadcast(1.24396884e-3f)); });
  unrolled<J>(GDN_EACH(j) { p[j] = fma(p[j], r[j], broadcast(9.67884064e-3f)); });
  unrolled<J>(GDN_EACH(j) { p[j] = fma(p[j], r[j], broadcast(5.54833412e-2f)); });
  unrolled<J>(GDN_EACH(j) { p[j] = fma(p[j], r[j], broadcast(2.40229830e-1f)); });
  unrolled<J>(GDN_EACH(j) { p[j] = fma(p[j], r[j], broadcast(6.93147004e-1f)); });
  unrolled<J>(GDN_EACH(j) { p[j] = fma(p[j], r[j], broadcast(1.f)); });
  unrolled<J>(GDN_EACH(j) { d[j] = broadcast(1.f) + _mm512_scalef_ps(p[j], t[j]); });
  unrolled<J>(GDN_EACH(j) { r[j] = _mm512_rcp14_ps(d[j]); });
  unrolled<J>(GDN_EACH(j) { p[j] = fma(zero() - d[j], r[j], broadcast(1.f)); });
  unrolled<J>(GDN_EACH(j) { r[j] = fma(p[j], r[j], r[j]); });
  // Below -87 the result is less than 1e-35, and the reciprocal would leave the normal range.
  unrolled<J>(GDN_EACH(j) {
    const __mmask16 kept = _mm512_cmp_ps_mask(x[j], broadcast(-87.f), _CMP_NLT_UQ);
    x[j] = _mm512_maskz_mul_ps(kept, x[j], r[j]);
  });
#else
  F e[J], d[J];
  unrolled<J>(GDN_EACH(j) { e[j] = (F)((U32)x[j] | 0x80000000u); });
  exp_nonpositive<J>(e, e);
  unrolled<J>(GDN_EACH(j) { d[j] = broadcast(1.f) + e[j]; });
  unrolled<J>(GDN_EACH(j) { e[j] = x[j] * select((I32)(x[j] < zero()), e[j], broadcast(1.f)); });
  // -inf * 0: the limit is 0.
  const F lowest = broadcast(-__builtin_inff());
  unrolled<J>(GDN_EACH(j) { x[j] = select((I32)(x[j] == lowest), zero(), e[j] / d[j]); });
#endif
}
GDN_INLINE F silu(F x) {
  silu<1>(&x);
  return x;
}

// log(1 + y) for y in [0, 1], relative error about 1e-7: log1p(y) = 2 atanh(t), t = y / (2 + y),
// and (atanh(t) / t - 1) / t^2 fitted by a polynomial in t^2 over [0, 1/9].
GDN_INLINE F log1p_unit(F y) {
  F t = y / (broadcast(2.f) + y);
  F z = t * t;
  F p = broadcast(0.11619509f);
  p = fma(p, z, broadcast(0.108516619f));
  p = fma(p, z, broadcast(0.142962918f));
  p = fma(p, z, broadcast(0.199998513f));
  p = fma(p, z, broadcast(0.333333343f));
  return (t + t) * fma(p, z, broadcast(1.f));
}
GDN_INLINE F softplus(F x) {
  F e = exp_nonpositive((F)((U32)x | 0x80000000u));
  return max(x, zero()) + log1p_unit(e);
}

// One value through the vector functions: a head computed alone equals a head computed in a row.
GDN_INLINE float first_lane(F x) {
  float out[kLanes];
  store(out, x);
  return out[0];
}
