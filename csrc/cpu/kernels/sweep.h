// Every byte of a buffer read and written back unchanged: the traffic that benchmarks take as the
// floor of a call that updates a state in place. Included inside the namespace of one instruction
// set, after vec.h.

typedef uint32_t LooseU32 __attribute__((vector_size(sizeof(F)), aligned(4), may_alias));

// `zero` is 0; the compiler must not know it, or it would drop the stores.
static void sweep(char* data, int64_t bytes, uint32_t zero, const Parallel& parallel) {
  constexpr int64_t line = 64;
  // Two streams a thread: in memory 1.15 times as fast as one on a 2-core Zen 3.
  const int64_t half = bytes / (2 * line * parallel.threads) * line;
  const U32 flip = (U32){} + zero;
  auto body = [&](int64_t begin, int64_t end) {
    // Copies: what is captured may lie under the stores, and would be read again for every line.
    const U32 mask = flip;
    const int64_t stream = half;
    for (int64_t task = begin; task < end; ++task) {
      char* p = data + task * 2 * stream;
      for (int64_t i = 0; i < stream; i += sizeof(F)) {
        LooseU32* a = reinterpret_cast<LooseU32*>(p + i);
        LooseU32* b = reinterpret_cast<LooseU32*>(p + stream + i);
        *a ^= mask;
        *b ^= mask;
      }
    }
  };
  parallel_for(parallel, parallel.threads, body);
  for (int64_t i = 2 * half * parallel.threads; i < bytes; ++i) data[i] ^= static_cast<char>(zero);
}
