// Small kernels, each with one fault the twin must name. Prints "case: message" or "case: ok".
#define GDN_XPU_TWIN 1
#include "../../csrc/xpu/kernels/common.h"

#include <cstdio>
#include <functional>
#include <string>

using namespace gdn::xpu;

namespace {

alignas(64) float g_a[1024];
alignas(64) float g_b[1024];
gm_addr at(float* p) { return reinterpret_cast<gm_addr>(p); }

void run(const char* name, std::function<void()> body, bool barriers = false, int cores = 1) {
  std::string what = "ok";
  try {
    twin::launch(name, 1, cores, barriers, body);
  } catch (const std::exception& e) {
    what = e.what();
  }
  std::printf("%s: %s\n", name, what.c_str());
}

}  // namespace

int main() {
  twin::gm_register(at(g_a), sizeof(g_a));
  twin::gm_register(at(g_b), sizeof(g_b));

  run("correct", [] {
    XPU_LM(float, x, 32);
    XPU_LOAD(at(g_a), x, 128);
    XPU_FENCE(XPU_LM_GM);
    vf32 lo, hi;
    Row<kF32>::load_chunk(lm_cast<char>(x), lo, hi);
    scale(lo, 2.0f);
    Row<kF32>::store_chunk(lm_cast<char>(x), lo, hi);
    XPU_FENCE(XPU_LM_ONLY);
    XPU_STORE(x, at(g_b), 128);
    XPU_FENCE(XPU_LM_GM);
  });
  run("load before fence", [] {
    XPU_LM(float, x, 16);
    XPU_LOAD(at(g_a), x, 64);
    vf32 v;
    load(v, x);
  });
  run("scalar read before fence", [] {
    XPU_LM(float, x, 16);
    XPU_LOAD(at(g_a), x, 64);
    lm_get(x, 3);
  });
  run("fence of the wrong space", [] {
    XPU_LM(float, x, 16);
    XPU_LOAD(at(g_a), x, 64);
    XPU_FENCE(XPU_LM_ONLY);
    lm_get(x, 3);
  });
  run("store of unfenced vector", [] {
    XPU_LM(float, x, 16);
    vf32 v;
    zero(v);
    store(x, v);
    XPU_STORE(x, at(g_b), 64);
  });
  run("refill while storing", [] {
    XPU_LM(float, x, 16);
    zero_fill(lm_cast<char>(x), 64);
    XPU_FENCE(XPU_LM_ONLY);
    XPU_STORE(x, at(g_b), 64);
    XPU_LOAD(at(g_a), x, 64);
  });
  run("write while storing", [] {
    XPU_LM(float, x, 16);
    zero_fill(lm_cast<char>(x), 64);
    XPU_FENCE(XPU_LM_ONLY);
    XPU_STORE(x, at(g_b), 64);
    zero_fill(lm_cast<char>(x), 64);
  });
  run("two loads, one target", [] {
    XPU_LM(float, x, 16);
    XPU_LOAD(at(g_a), x, 64);
    XPU_LOAD(at(g_b), x, 64);
  });
  run("reload what is being stored", [] {
    XPU_LM(float, x, 32);
    zero_fill(lm_cast<char>(x), 128);
    XPU_FENCE(XPU_LM_ONLY);
    XPU_STORE(x, at(g_b), 64);
    XPU_LOAD(at(g_b), x + 16, 64);
  });
  run("scalar read of vector store", [] {
    XPU_LM(float, x, 16);
    zero_fill(lm_cast<char>(x), 64);
    lm_get(x, 0);
  });
  run("vector read of scalar store", [] {
    XPU_LM(float, x, 16);
    for (int i = 0; i < 16; ++i) lm_put(x, i, 1.0f);
    vf32 v;
    load(v, x);
  });
  run("read of nothing", [] {
    XPU_LM(float, x, 16);
    vf32 v;
    load(v, x);
  });
  run("reused memory", [] {
    {
      XPU_LM(float, x, 16);
      zero_fill(lm_cast<char>(x), 64);
      XPU_FENCE(XPU_LM_ONLY);
    }
    XPU_LM(float, y, 16);
    lm_get(y, 0);
  });
  run("write over unfenced vector", [] {
    {
      XPU_LM(float, x, 16);
      zero_fill(lm_cast<char>(x), 64);
    }
    XPU_LM(float, y, 16);
    lm_put(y, 0, 1.0f);
  });
  run("read of another phase", [] {
    XPU_LM(char, arena, 128);
    {
      Phase lm = {arena, 128};
      const lm_ptr<char> x = lm.take<char>(64);
      zero_fill(x, 64);
      XPU_FENCE(XPU_LM_ONLY);
    }
    Phase lm = {arena, 128};
    lm_get(lm.take<float>(16), 0);
  });
  run("phase while storing", [] {
    XPU_LM(char, arena, 64);
    zero_fill(arena, 64);
    XPU_FENCE(XPU_LM_ONLY);
    XPU_STORE(arena, at(g_b), 64);
    Phase lm = {arena, 64};
    lm.take<char>(64);
  });
  run("phase beyond its arena", [] {
    XPU_LM(char, arena, 64);
    XPU_LM(char, other, 64);
    Phase lm = {arena, 64};
    lm.take<char>(64);
    lm.take<char>(4);
  });
  run("scalar never set", [] {
    sfloat s;
    if (s != s) throw std::runtime_error("a scalar that nobody set is NaN");
  });
  run("unaligned scalar", [] {
    XPU_LM(char, x, 64);
    zero_fill(x, 64);
    XPU_FENCE(XPU_LM_ONLY);
    lm_get(lm_cast<float>(x + 2), 0);
  });
  run("past the array", [] {
    XPU_LM(float, x, 16);
    zero_fill(lm_cast<char>(x), 64);
    vf32 v;
    load(v, x + 16);
  });
  run("unaligned vector", [] {
    XPU_LM(float, x, 32);
    zero_fill(lm_cast<char>(x), 128);
    vf32 v;
    load(v, x + 4);
  });
  run("unaligned transfer", [] {
    XPU_LM(float, x, 48);
    XPU_LOAD(at(g_a), x + 4, 64);
  });
  run("empty transfer", [] {
    XPU_LM(float, x, 16);
    XPU_LOAD(at(g_a), x, 0);
  });
  run("outside global memory", [] {
    XPU_LM(float, x, 16);
    XPU_LOAD(at(g_a) + sizeof(g_a) - 32, x, 64);
  });
  run("too much local memory", [] { XPU_LM(char, x, 7000); });
  run("end before fence", [] {
    XPU_LM(float, x, 16);
    XPU_LOAD(at(g_a), x, 64);
  });
  run(
      "two cores, one address",
      [] {
        XPU_LM(float, x, 16);
        zero_fill(lm_cast<char>(x), 64);
        XPU_FENCE(XPU_LM_ONLY);
        XPU_STORE(x, at(g_b), 64);
        XPU_FENCE(XPU_LM_GM);
      },
      false, 2);
  run(
      "barrier left out by one",
      [] {
        if (core_id() != 1) XPU_SYNC_CLUSTER();
      },
      true, 4);
  run(
      "two different barriers",
      [] {
        if (core_id() == 0) {
          XPU_SYNC_CLUSTER();
        } else {
          XPU_SYNC_CLUSTER();
        }
      },
      true, 2);
  run("barrier without asking", [] { XPU_SYNC_CLUSTER(); });
  run(
      "shared read without barrier",
      [] {
        XPU_SM(sm, 64);
        if (core_id() == 0) sm_put(sm, 0, 1.0f);
        if (core_id() == 1) sm_get(sm, 0);
        XPU_SYNC_CLUSTER();
      },
      true, 2);
  run(
      "shared write after read",
      [] {
        XPU_SM(sm, 64);
        if (core_id() == 0) sm_put(sm, 0, 1.0f);
        XPU_SYNC_CLUSTER();
        if (core_id() == 0) sm_get(sm, 0);
        if (core_id() == 1) sm_put(sm, 0, 2.0f);
        XPU_SYNC_CLUSTER();
      },
      true, 2);
  run(
      "beyond the shared array",
      [] {
        XPU_SM(sm, 64);
        sm_put(sm, 16, 1.0f);
      },
      true);
  run(
      "unaligned shared vector",
      [] {
        XPU_SM(sm, 256);
        vf32 v;
        XPU_ASM_MEM("vloads.mz %[v]{mr1}, 0(%[p])\n", (XPU_OP(v, "=v", v)),
                    (XPU_OP(p, "r", sm + 32)));
      },
      true);
  run("too much shared memory", [] { XPU_SM(sm, kSharedBytes + 64); }, true);
  run(
      "two shared arrays",
      [] {
        XPU_SM(a, 64);
        XPU_SM(b, 64);
      },
      true);
  run("shared memory without asking", [] { XPU_SM(sm, 64); });
  run(
      "shared memory across a barrier",
      [] {
        XPU_SM(sm, 64);
        if (core_id() == 0) sm_put(sm, 0, 1.0f);
        XPU_SYNC_CLUSTER();
        if (core_id() == 1) sm_get(sm, 0);
      },
      true, 2);
  run(
      "shared read of nothing",
      [] {
        XPU_SM(sm, 128);
        sm_get(sm + 64, 0);
      },
      true);

  // Assembly text.
  run("unknown instruction", [] {
    vf32 v;
    XPU_ASM("vdot.f.mz.rn %[v]{mr1}, %[v], %[v]\n", (XPU_OP(v, "=&v", v)), ());
  });
  run("scalar where a vector belongs", [] {
    vf32 v;
    zero(v);
    XPU_ASM("vmac.f.mz.rn %[v]{mr1}, %[v], %[s]\n", (XPU_OP(v, "+v", v)),
            (XPU_OP(s, "r", sfloat(1.0f))));
  });
  run("mask left out", [] {
    vf32 v;
    XPU_ASM("vxor.s.mz %[v], %[v], %[v]\n", (XPU_OP(v, "=&v", v)), ());
  });
  run("mask never set", [] {
    vf32 v;
    XPU_ASM("vxor.s.mz %[v]{mr0}, %[v], %[v]\n", (XPU_OP(v, "=&v", v)), ());
  });
  run("register read before set", [] {
    vf32 v, w;
    XPU_ASM("vadd.f.mz.rn %[v]{mr1}, %[s], %[w]\n", (XPU_OP(v, "=&v", v), XPU_OP(w, "=&v", w)),
            (XPU_OP(s, "r", sfloat(1.0f))));
  });
  run("input never set", [] {
    vf32 v;
    scale(v, 2.0f);
  });
  run("half an output", [] {
    vf32 x, v;
    zero(x);
    XPU_ASM("vfloat2fp16_l.rn %[v], %[x]\n", (XPU_OP(v, "=&v", v)), (XPU_OP(x, "v", x)));
  });
  run("early clobber left out", [] {
    vf32 x, a, b;
    zero(x);
    XPU_ASM(
        "vfp162float_l.rn %[a], %[x]\n"
        "vfp162float_h.rn %[b], %[x]\n",
        (XPU_OP(a, "=v", a), XPU_OP(b, "=v", b)), (XPU_OP(x, "v", x)));
  });
  run("write to an input", [] {
    vf32 x, v;
    zero(x);
    XPU_ASM(
        "vxor.s.mz %[v]{mr1}, %[v], %[v]\n"
        "vadd.f.mz.rn %[x]{mr1}, %[s], %[v]\n",
        (XPU_OP(v, "=&v", v)), (XPU_OP(x, "v", x), XPU_OP(s, "r", sfloat(1.0f))));
  });
  run("operand never used", [] {
    vf32 x, v;
    zero(x);
    XPU_ASM("vxor.s.mz %[v]{mr1}, %[v], %[v]\n", (XPU_OP(v, "=&v", v)), (XPU_OP(x, "v", x)));
  });
  run("memory not declared", [] {
    XPU_LM(float, x, 16);
    zero_fill(lm_cast<char>(x), 64);
    vf32 v;
    XPU_ASM("vload.mz %[v]{mr1}, 0(%[p])\n", (XPU_OP(v, "=v", v)), (XPU_OP(p, "r", x)));
  });
  run("integer where a float belongs", [] {
    vf32 v;
    zero(v);
    XPU_ASM("vmul.f.mz.rn %[v]{mr1}, %[s], %[v]\n", (XPU_OP(v, "+v", v)), (XPU_OP(s, "r", 2)));
  });
  run("zeroing with two registers", [] {
    vf32 v, w;
    zero(w);
    XPU_ASM("vxor.s.mz %[v]{mr1}, %[w], %[v]\n", (XPU_OP(v, "+v", w)), (XPU_OP(w, "v", w)));
  });
  return 0;
}
