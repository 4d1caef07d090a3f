// A head of a state pool into strips of columns and back (chunk.h holds S^T as [strip][K][kStrip]).
// Included inside the namespace of one instruction set, after chunk_products.h.

// What a call writes goes past the caches where it is more than they hold and nothing reads it
// soon: a line that is stored need not be read first then, which halves its traffic, and a core
// does not wait for it. Measured, and done, on Intel only (docs/tried/chunk.md).
constexpr int64_t kStreamBytes = kIntel ? int64_t{4} << 20 : INT64_MAX;
// `steps`: of the strides between pieces that are whole lines themselves.
static bool streams(const void* ptr, int64_t bytes, std::initializer_list<int64_t> steps) {
  if (bytes <= kStreamBytes) return false;
  uint64_t misplaced = reinterpret_cast<uint64_t>(ptr);
  for (int64_t step : steps) misplaced |= static_cast<uint64_t>(step);
  return misplaced % 64 == 0;
}

// Ends what a thread has stored past the caches, so that others see it.
struct StreamsEnd {
  ~StreamsEnd() {
#if GDN_SIMD_AMX
    _mm_sfence();
#endif
  }
};

#if GDN_SIMD_AMX
// 16 columns of as many rows of a strip as 32 bits of T hold, as words and back.
GDN_INLINE __m512i words_of(const float* S, float*) { return (__m512i)load(S); }
GDN_INLINE __m512i words_of(const float* S, bf16_t*) { return pair_of(load(S), load(S + kStrip)); }
GDN_INLINE __m512i words_of(const float* S, f16_t*) {
  auto half = [](F x) {
    return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  };
  return _mm512_or_si512(half(load(S)), _mm512_slli_epi32(half(load(S + kStrip)), 16));
}
GDN_INLINE void store_words(float* S, __m512i x, float*) { store(S, (F)x); }
GDN_INLINE void store_words(float* S, __m512i x, bf16_t*) {
  store(S, (F)_mm512_slli_epi32(x, 16));
  store(S + kStrip, (F)((U32)x & 0xffff0000u));
}
GDN_INLINE void store_words(float* S, __m512i x, f16_t*) {
  auto widened = [](__m512i words) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)); };
  store(S, widened(x));
  store(S + kStrip, widened(_mm512_srli_epi32(x, 16)));
}

// A strip of whole columns whose rows of K are whole lines: 16 columns and a line at a time. Lines
// of the next 16 columns are asked for before these are read, because the hardware does not see
// this order coming.
template <class T>
static void load_lines(const T* columns, int64_t s_v, int64_t K, float* S) {
  constexpr int64_t line = 64 / sizeof(T), rows = 4 / sizeof(T);
  for (int64_t c = 0; c < kStrip; c += 16, columns += 16 * s_v) {
    for (int64_t j = 16; j < 32; ++j) {
      for (int64_t i = 0; i < K; i += line) prefetch(columns + j * s_v + i);
    }
    for (int64_t i = 0; i < K; i += line) {
      __m512i x[16];
      unrolled<16>(GDN_EACH(j) { x[j] = _mm512_loadu_si512(columns + j * s_v + i); });
      transpose_words(x);
      unrolled<16>(GDN_EACH(m) {
        store_words(S + (i + m * rows) * kStrip + c, x[m], static_cast<T*>(nullptr));
      });
    }
  }
}
template <class T>
static void store_lines(T* columns, int64_t s_v, int64_t K, const float* S, bool past_caches) {
  constexpr int64_t line = 64 / sizeof(T), rows = 4 / sizeof(T);
  for (int64_t c = 0; c < kStrip; c += 16, columns += 16 * s_v) {
    for (int64_t i = 0; i < K; i += line) {
      __m512i x[16];
      unrolled<16>(GDN_EACH(m) {
        x[m] = words_of(S + (i + m * rows) * kStrip + c, static_cast<T*>(nullptr));
      });
      transpose_words(x);
      unrolled<16>(GDN_EACH(j) {
        auto* to = reinterpret_cast<__m512i*>(columns + j * s_v + i);
        past_caches ? _mm512_stream_si512(to, x[j]) : _mm512_storeu_si512(to, x[j]);
      });
    }
  }
}
template <class T>
static bool in_lines(const StatePool& pool, int64_t cols, int64_t K) {
  return pool.s_k == 1 && cols == kStrip && K * sizeof(T) % 64 == 0;
}
#endif

// Columns [column, V) of one head of a pool row into strips, and back (rounded once). `buffer`:
// scratch for a strip the other way round, [kStrip][padded(K)].
template <class T>
static void load_strips(const StatePool& pool, int64_t row, int64_t h, int64_t column, int64_t V,
                        int64_t K, float* S, float* buffer) {
  const T* base = head_of<T>(pool, row, h);
  for (int64_t c = column; c < V; c += kStrip, S += strip_floats(K)) {
    const int64_t cols = V - c < kStrip ? V - c : kStrip;
#if GDN_SIMD_AMX
    if (in_lines<T>(pool, cols, K)) {
      load_lines(base + c * pool.s_v, pool.s_v, K, S);
      continue;
    }
#endif
    if (cols < kStrip) std::memset(S, 0, K * kStrip * sizeof(float));
    if (pool.s_k == 1) {
      const int64_t ld = padded(K);
      for (int64_t i = 0; i < cols; ++i) widen(base + (c + i) * pool.s_v, 1, K, buffer + i * ld);
      transpose(buffer, ld, cols, K, S, kStrip);
    } else {
      for (int64_t i = 0; i < K; ++i) {
        widen(base + i * pool.s_k + c * pool.s_v, pool.s_v, cols, S + i * kStrip);
      }
    }
  }
}
template <class T>
static void store_strips(const StatePool& pool, int64_t row, int64_t h, int64_t column, int64_t V,
                         int64_t K, const float* S, float* buffer, bool past_caches) {
  T* base = head_of<T>(pool, row, h);
  for (int64_t c = column; c < V; c += kStrip, S += strip_floats(K)) {
    const int64_t cols = V - c < kStrip ? V - c : kStrip;
#if GDN_SIMD_AMX
    if (in_lines<T>(pool, cols, K)) {
      store_lines(base + c * pool.s_v, pool.s_v, K, S, past_caches);
      continue;
    }
#endif
    if (pool.s_k == 1) {
      const int64_t ld = padded(K);
      transpose(S, kStrip, K, cols, buffer, ld);
      for (int64_t i = 0; i < cols; ++i) narrow(buffer + i * ld, K, base + (c + i) * pool.s_v);
    } else {
      for (int64_t i = 0; i < K; ++i) narrow(S + i * kStrip, cols, base + i * pool.s_k + c);
    }
  }
}
static void load_state(const StatePool& pool, int64_t row, int64_t h, int64_t column, int64_t V,
                       int64_t K, float* S, float* buffer) {
  with_type(pool.dtype, [&](auto* type) {
    load_strips<std::remove_pointer_t<decltype(type)>>(pool, row, h, column, V, K, S, buffer);
  });
}
static void store_state(const StatePool& pool, int64_t row, int64_t h, int64_t column, int64_t V,
                        int64_t K, const float* S, float* buffer, bool past_caches) {
  with_type(pool.dtype, [&](auto* type) {
    store_strips<std::remove_pointer_t<decltype(type)>>(pool, row, h, column, V, K, S, buffer,
                                                        past_caches);
  });
}
