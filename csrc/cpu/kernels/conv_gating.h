// The convolution of a packed projection, its split into q, k and v, and the gates, in one pass.
// Included inside the namespace of one instruction set, after conv.h.

// conv + split + gates (+ l2norm). A task is a sequence and a block: as many whole heads of one
// kind as kConvBlock channels hold, so that a sequence's row is walked in memory order and its taps
// are made once.
static void conv_gating(const ConvGatingArgs& a, const Parallel& parallel) {
  GatingArgs gates;
  gates.rows_b = a.conv.seqs.B;
  gates.rows_t = a.conv.seqs.T;
  gates.HV = a.HV;
  gates.a = a.gates.g;
  gates.b = a.gates.beta;
  gates.A_log = a.gates.A_log;
  gates.dt_bias = a.gates.dt_bias;
  gates.g = a.g;
  gates.beta = a.beta;
  gating(gates, parallel);

  struct Block {
    const View* out;
    int64_t head, heads, dim, channel;
    bool normalise;
  };
  const int64_t k_heads = kConvBlock / a.K, v_heads = kConvBlock / a.V;
  const int64_t k_blocks = (a.H + k_heads - 1) / k_heads, v_blocks = (a.HV + v_heads - 1) / v_heads;
  const int64_t blocks = 2 * k_blocks + v_blocks;
  auto block_of = [&](int64_t i) {
    const bool is_value = i >= 2 * k_blocks, is_key = i >= k_blocks && !is_value;
    Block b;
    b.dim = is_value ? a.V : a.K;
    b.head = is_value ? (i - 2 * k_blocks) * v_heads : i % k_blocks * k_heads;
    const int64_t left = (is_value ? a.HV : a.H) - b.head, most = is_value ? v_heads : k_heads;
    b.heads = left < most ? left : most;
    b.out = is_value ? &a.v : is_key ? &a.k : &a.q;
    b.channel = (is_value ? 2 * a.H * a.K : is_key ? a.H * a.K : 0) + b.head * b.dim;
    b.normalise = a.l2norm && !is_value;
    return b;
  };
  auto step = [&](int64_t n, const Block& b, const Taps& taps) {
    const Sequence seq = sequence_of(a.conv.seqs, n, 0);
    if (seq.row < 0) {
      const float zeros[kMaxRow] = {};
      for (int64_t t = seq.start; t < seq.end; ++t) {
        for (int64_t h = b.head; h < b.head + b.heads; ++h) {
          store_row(*b.out, seq.b, t, h, 0, b.dim, zeros);
          if (b.out != &a.v) continue;
          const int64_t i = (seq.b * a.conv.seqs.T + t) * a.HV + h;
          a.g[i] = a.beta[i] = 0.f;
        }
      }
      return;
    }
    if (seq.end <= seq.start) return;
    conv_channels(a.conv, seq, taps, b.channel, b.heads * b.dim, b.dim,
                  [&](int64_t t, int64_t c, int64_t n_row, float* y) {
                    if (b.normalise) l2_normalise(y, n_row);
                    store_row(*b.out, seq.b, t, b.head + (c - b.channel) / b.dim, 0, n_row, y);
                  });
  };
#if GDN_SIMD_AVX512BF16
  auto two = [&](int64_t n, int64_t m, const Block& b, const Taps& taps) {
    const int64_t channels = b.heads * b.dim;
    if (b.out->dtype != DType::bf16 || b.dim % kLanes != 0) return false;
    if (!b.normalise) {
      auto y_of = [&](int, const Sequence& seq) {
        return const_cast<bf16_t*>(element<bf16_t>(*b.out, seq.b, seq.start, b.head));
      };
      return conv_update_two(a.conv, n, m, b.channel, channels, taps, y_of);
    }
    alignas(64) float y[2][kConvBlock];
    Sequence seqs[2];
    auto y_of = [&](int i, const Sequence& seq) {
      seqs[i] = seq;
      return y[i];
    };
    if (!conv_update_two(a.conv, n, m, b.channel, channels, taps, y_of)) return false;
    for (int i = 0; i < 2; ++i) {
      for (int64_t h = 0; h < b.heads; ++h) {
        l2_normalise(y[i] + h * b.dim, b.dim);
        store_row(*b.out, seqs[i].b, seqs[i].start, b.head + h, 0, b.dim, y[i] + h * b.dim);
      }
    }
    return true;
  };
#endif
  over_blocks(
      a.conv, blocks, parallel,
      [&](int64_t i, Taps& taps) {
        const Block b = block_of(i);
        load_taps(a.conv, b.channel, b.heads * b.dim, taps);
      },
      [&](int64_t n, int64_t m, int64_t i, const Taps& taps) {
        const Block b = block_of(i);
#if GDN_SIMD_AVX512BF16
        if (m >= 0 && two(n, m, b, taps)) return;
#endif
        step(n, b, taps);
        if (m >= 0) step(m, b, taps);
      });
}
