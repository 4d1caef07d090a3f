// The layer between its two projections: conv + gates + l2norm + recurrence + gated norm.
// Included inside the namespace of one instruction set, after recurrent.h, conv.h and norm.h.
//
// A task is (sequence, key head) with the value heads that share it: they are the only readers of
// that head's conv columns, so the task may roll them, and nothing between the projections leaves
// its cache. When there are fewer such tasks than threads can share evenly, the same steps run as
// two passes, with the recurrence split by rows of V between them; every value is computed by the
// same code either way.

struct DecodeHead {
  const DecodeArgs& a;
  int64_t ratio;

  // The inputs of the recurrence from the convolution of the key head's channels: keys and queries
  // of each token to `kq` [T], rows of its value heads to `v` [ratio][T][kMaxRow]. `taps` is
  // scratch; between(i) runs before each of the 2 + ratio groups of channels.
  template <class Between>
  void inputs(const Sequence& seq, int64_t hk, Taps& taps, KeyQuery* kq, float* v,
              Between between) const {
    const ConvArgs& conv = a.front.conv;
    const int64_t H = a.front.H, K = a.front.K, V = a.front.V;
    const int64_t T = seq.end - seq.start;
    auto run = [&](int64_t c, int64_t n, auto row_of) {
      load_taps(conv, c, n, taps);
      conv_channels(conv, seq, taps, c, n, n, [&](int64_t t, int64_t, int64_t n_row, float* y) {
        std::memcpy(row_of(t - seq.start), y, sizeof(float) * padded(n_row));
      });
    };
    between(0);
    run(hk * K, K, [&](int64_t j) { return kq[j].q; });
    between(1);
    run((H + hk) * K, K, [&](int64_t j) { return kq[j].k; });
    for (int64_t j = 0; j < T; ++j) {
      finish_key_query(kq[j], K, a.front.l2norm, a.recurrent.fast);
    }
    for (int64_t i = 0; i < ratio; ++i) {
      between(2 + i);
      run(2 * H * K + (hk * ratio + i) * V, V,
          [&](int64_t j) { return v + (i * T + j) * kMaxRow; });
    }
  }

  void inputs(const Sequence& seq, int64_t hk, Taps& taps, KeyQuery* kq, float* v) const {
    inputs(seq, hk, taps, kq, v, [](int64_t) {});
  }

  // Gated norm of one output row, from f32 to the output tensor.
  void finish(const Sequence& seq, int64_t t, int64_t h, float* o, const float* weight) const {
    const int64_t V = a.front.V;
    float z[kMaxRow];
    load_row(a.z, seq.b, t, h, V, z);
    for (int64_t i = V; i < padded(V); ++i) o[i] = 0.f;
    norm_row(o, z, weight, V, a.norm_eps, DType::f32, DType::f32);
    store_row(a.recurrent.out, seq.b, t, h, 0, V, o);
  }

  void zeros(const Sequence& seq, int64_t hk) const {
    const float zero_row[kMaxRow] = {};
    for (int64_t t = seq.start; t < seq.end; ++t) {
      for (int64_t i = 0; i < ratio; ++i) {
        store_row(a.recurrent.out, seq.b, t, hk * ratio + i, 0, a.front.V, zero_row);
      }
    }
  }
};

// A sequence with the row of its state: in a speculative call that of the last accepted token.
GDN_INLINE Sequence decode_sequence(const DecodeArgs& a, int64_t n) {
  return sequence_of(a.recurrent.seqs, n);
}
// The same sequence with its row of the conv pool: that is in column 0 whatever was accepted.
GDN_INLINE Sequence conv_sequence(const DecodeArgs& a, int64_t n) {
  return sequence_of(a.front.conv.seqs, n, 0);
}

// Bytes of state that are prefetched during a key head's convolution.
constexpr int64_t kStateAhead = 32 * 1024;

template <class T>
static void decode_typed(const DecodeArgs& a, const Parallel& parallel) {
  const RecurrentArgs& r = a.recurrent;
  const DecodeHead head{a, r.HV / r.H};
  const int64_t ratio = head.ratio, tasks = r.seqs.N * r.H;
  const int64_t most = r.seqs.cu_seqlens.ptr ? kDecodeTokens : r.seqs.T;  // tokens a sequence
  const int64_t v_floats = ratio * most * kMaxRow;                        // of one task

  auto recur = [&](const Sequence& seq, int64_t n, int64_t h, int64_t first, int64_t rows,
                   const KeyQuery* kq, const float* v, float* o, const T* next) {
    auto source = [&](int64_t t) {
      const TokenGates gates = token_gates(r.gates, seq.b, t, h);
      const int64_t j = t - seq.start;
      return TokenInput{kq + j, v + j * kMaxRow + first, gates.decay, gates.beta, r.scale};
    };
    auto sink = [&](int64_t t, int64_t row, int64_t n_rows, const float* y) {
      std::memcpy(o + (t - seq.start) * kMaxRow + row, y, sizeof(float) * n_rows);
    };
    recurrent_rows<T>(r.state, r.seqs, seq, {n, h, first, rows}, r.K, source, sink, next);
  };

  // Only a head that lies in one piece can be prefetched in the order in which the recurrence walks
  // over it; of that, the recurrence of the head before has asked for the first `asked` bytes.
  const bool dense = r.state.s_k == 1 && r.state.s_v == r.K;
  const int64_t whole = r.V * r.K * sizeof(T), asked = kPrefetchRows<T> * r.K * sizeof(T);

  const bool split = tasks < 4 * parallel.threads && tasks % parallel.threads != 0;
  if (!split) {
    auto body = [&](int64_t begin, int64_t end) {
      Taps taps;
      float weight[kMaxRow];
      load_params(a.norm_weight, 0, r.V, weight);
      const ScopedMemory keys(sizeof(KeyQuery) * most);
      const ScopedMemory values(sizeof(float) * (v_floats + most * kMaxRow));
      KeyQuery* kq = static_cast<KeyQuery*>(keys.data);
      float *v = static_cast<float*>(values.data), *o = v + v_floats;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t n = task / r.H, hk = task % r.H;
        const Sequence seq = decode_sequence(a, n), conv = conv_sequence(a, n);
        if (seq.end <= seq.start) continue;
        if (seq.row < 0 || conv.row < 0) {
          head.zeros(seq, hk);
          continue;
        }
        // The state keeps coming while the convolution computes: behind the rows that the head
        // before asked for, as much as arrives meanwhile.
        const char* rows = reinterpret_cast<const char*>(head_of<T>(r.state, seq.row, hk * ratio));
        head.inputs(conv, hk, taps, kq, v, [&](int64_t i) {
          const int64_t part = kStateAhead / (2 + ratio) / 64 * 64;
          const int64_t first = i * part + (task > begin ? asked : 0);
          for (int64_t byte = first; dense && byte < first + part && byte < whole; byte += 64) {
            prefetch_l2(rows + byte);
          }
        });
        const int64_t tokens = seq.end - seq.start;
        for (int64_t i = 0; i < ratio; ++i) {
          const int64_t h = hk * ratio + i;
          const T* next = nullptr;
          if (i + 1 < ratio || hk + 1 < r.H) {
            next = head_of<T>(r.state, seq.row, h + 1);
          } else if (task + 1 < end) {
            const Sequence after = decode_sequence(a, n + 1);
            if (after.row >= 0) next = head_of<T>(r.state, after.row, 0);
          }
          recur(seq, n, h, 0, r.V, kq, v + i * tokens * kMaxRow, o, next);
          for (int64_t j = 0; j < tokens; ++j) {
            head.finish(seq, seq.start + j, h, o + j * kMaxRow, weight);
          }
        }
      }
    };
    parallel_for(parallel, tasks, body);
    return;
  }

  const ScopedMemory keys(sizeof(KeyQuery) * most * tasks);
  const ScopedMemory values(sizeof(float) * 2 * v_floats * tasks);
  KeyQuery* kq = static_cast<KeyQuery*>(keys.data);
  float *v = static_cast<float*>(values.data), *o = v + v_floats * tasks;
  auto front = [&](int64_t begin, int64_t end) {
    Taps taps;
    for (int64_t task = begin; task < end; ++task) {
      const Sequence seq = decode_sequence(a, task / r.H), conv = conv_sequence(a, task / r.H);
      if (seq.end <= seq.start || seq.row < 0 || conv.row < 0) continue;
      head.inputs(conv, task % r.H, taps, kq + task * most, v + task * v_floats);
    }
  };
  parallel_for(parallel, tasks, front);
  const int64_t rows = rows_per_task(tasks * ratio, r.V, parallel.threads);
  const int64_t splits = (r.V + rows - 1) / rows;
  auto middle = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t task = i / (ratio * splits), j = i / splits % ratio;
      const int64_t n = task / r.H, first = i % splits * rows;
      const Sequence seq = decode_sequence(a, n);
      if (seq.end <= seq.start || seq.row < 0 || conv_sequence(a, n).row < 0) continue;
      const int64_t offset = task * v_floats + j * (seq.end - seq.start) * kMaxRow;
      recur(seq, n, task % r.H * ratio + j, first, r.V - first < rows ? r.V - first : rows,
            kq + task * most, v + offset, o + offset, (const T*)nullptr);
    }
  };
  parallel_for(parallel, tasks * ratio * splits, middle);
  float weight[kMaxRow];
  load_params(a.norm_weight, 0, r.V, weight);
  for (int64_t task = 0; task < tasks; ++task) {
    const Sequence seq = decode_sequence(a, task / r.H);
    if (seq.row < 0 || conv_sequence(a, task / r.H).row < 0) {
      head.zeros(seq, task % r.H);
      continue;
    }
    const int64_t tokens = seq.end - seq.start;
    for (int64_t j = 0; j < ratio * tokens; ++j) {
      head.finish(seq, seq.start + j % tokens, task % r.H * ratio + j / tokens,
                  o + task * v_floats + j * kMaxRow, weight);
    }
  }
}

static void decode(const DecodeArgs& a, const Parallel& parallel) {
  with_type(a.recurrent.state.dtype,
            [&](auto* type) { decode_typed<std::remove_pointer_t<decltype(type)>>(a, parallel); });
}
