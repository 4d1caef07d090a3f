"""The plug-ins of vLLM and sglang, on engines of empty modules: what they put in place, take out
again and refuse."""

import importlib.metadata
import sys
import types
from pathlib import Path

import pytest
from engines import contents, functions_like, put_modules

from gdn_ops.compat import plugin, sglang, vllm, vllm_cpu, vllm_kunlun


def named(source, names, extra=""):
    return functions_like({name: getattr(source, name) for name in names}, extra)


def forget(monkeypatch, *packages):
    for name in [n for n in sys.modules if n.split(".")[0] in packages]:
        monkeypatch.delitem(sys.modules, name)


# --- vLLM


@pytest.fixture
def vllm_modules(monkeypatch):
    """Builds modules named as vLLM's; everything is gone after the test."""

    def build(cpu=True, layout=(1, 3, 2), extra=""):
        forget(monkeypatch, "vllm", "vllm_kunlun")
        layers = "vllm.model_executor.layers"
        fla = named(vllm, plugin._FLA, extra)
        conv = named(vllm, plugin._CONV, extra)
        calculator = type("MambaStateShapeCalculator", (), {
            "gated_delta_net_state_shape": classmethod(lambda cls, *sizes: ((4, 3), layout)),
        })  # fmt: skip
        put_modules(monkeypatch, {
            "vllm": {},
            "vllm.platforms": {"current_platform": types.SimpleNamespace(is_cpu=lambda: cpu)},
            "vllm._custom_ops": named(vllm_cpu, vllm_cpu.__all__, extra),
            "vllm.third_party": {},
            "vllm.third_party.flash_linear_attention": {},
            "vllm.third_party.flash_linear_attention.ops": fla,
            "vllm.model_executor": {},
            layers: {},
            f"{layers}.mamba": {},
            f"{layers}.mamba.ops": {},
            f"{layers}.mamba.ops.causal_conv1d": conv,
            f"{layers}.mamba.mamba_utils": {"MambaStateShapeCalculator": calculator},
            # a layer that imported by name before the plug-in came
            f"{layers}.gdn": {"fla_chunk": fla["chunk_gated_delta_rule"], **conv},
        })  # fmt: skip
        return sys.modules

    yield build
    plugin.uninstall()


@pytest.mark.parametrize("cpu", [True, False])
def test_vllm_in_and_out(vllm_modules, cpu):
    modules = vllm_modules(cpu)
    before = contents("vllm")
    replaced = plugin.install()
    assert plugin.install() == replaced == plugin.installed()  # a second call does nothing
    layer_module = modules["vllm.model_executor.layers.gdn"]
    assert layer_module.causal_conv1d_fn is vllm.causal_conv1d_fn
    assert layer_module.fla_chunk is vllm.chunk_gated_delta_rule
    ops = modules["vllm._custom_ops"]
    if cpu:
        assert ops.chunk_gated_delta_rule_cpu is vllm_cpu.chunk_gated_delta_rule_cpu
    else:
        assert ops.chunk_gated_delta_rule_cpu is not vllm_cpu.chunk_gated_delta_rule_cpu
    own = len(vllm_cpu.__all__) if cpu else 0
    assert len(replaced) == own + len(plugin._FLA) + 1 + 2 * len(plugin._CONV)
    plugin.uninstall()
    assert contents("vllm") == before and plugin.installed() == []
    plugin.uninstall()


def test_vllm_is_left_alone_unless_asked(vllm_modules, monkeypatch):
    vllm_modules()
    before = contents("vllm")
    for value in (None, "", "0"):
        monkeypatch.delenv(plugin.ENVIRONMENT["vllm"], raising=False)
        if value is not None:
            monkeypatch.setenv(plugin.ENVIRONMENT["vllm"], value)
        plugin.register()
        assert contents("vllm") == before
    monkeypatch.setenv(plugin.ENVIRONMENT["vllm"], "yes")
    with pytest.raises(ValueError, match=plugin.ENVIRONMENT["vllm"]):
        plugin.register()
    monkeypatch.setenv(plugin.ENVIRONMENT["vllm"], "1")
    plugin.register()
    assert contents("vllm") != before


def test_vllm_that_ours_does_not_fit_is_refused(vllm_modules):
    vllm_modules(cpu=False, extra=", keyword_of_a_later_version=None")
    before = contents("vllm")
    with pytest.raises(RuntimeError, match="keyword_of_a_later_version"):
        plugin.install()
    assert contents("vllm") == before
    vllm_modules(cpu=False, layout=(1, 2, 3))
    with pytest.raises(RuntimeError, match="0.16"):
        plugin.install()
    assert plugin.installed() == []


def test_kunlun_in_and_out(vllm_modules, monkeypatch):
    modules = vllm_modules(cpu=False, layout=(1, 2, 3))
    before = contents("vllm")

    class KunlunOps:
        def fused_gdn_gating(A_log, a, dt_bias, beta=1.0, threshold=20.0):
            raise AssertionError

    original = KunlunOps.__dict__["fused_gdn_gating"]
    fla = named(vllm_kunlun, ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"))
    put_modules(monkeypatch, {
        "vllm_kunlun": {},
        "vllm_kunlun.ops": {},
        "vllm_kunlun.ops.fla": fla,
        "vllm_kunlun.ops.mamba": {},
        "vllm_kunlun.ops.mamba.causal_conv1d": named(vllm_kunlun, plugin._CONV),
        "vllm_kunlun.ops._kunlun_ops": {"KunlunOps": KunlunOps},
        "vllm_kunlun.models": fla,
    })  # fmt: skip
    plugin.install()
    assert KunlunOps.fused_gdn_gating is vllm_kunlun.fused_gdn_gating
    assert modules["vllm_kunlun.models"].chunk_gated_delta_rule is (
        vllm_kunlun.chunk_gated_delta_rule
    )
    assert contents("vllm") == before  # vLLM's own modules are left alone
    plugin.uninstall()
    assert KunlunOps.__dict__["fused_gdn_gating"] is original


# --- sglang


@pytest.fixture
def sglang_modules(monkeypatch):
    def build(cpu=False, extra=""):
        forget(monkeypatch, "sglang")
        made = {
            module: functions_like(functions, f"{extra}, **kwargs")
            for module, functions in plugin._SGLANG.items()
        }
        made["sglang.srt.utils"] = {"is_cpu": lambda: cpu, "is_npu": lambda: False}
        # A backend that imported by name before the plug-in came.
        made["sglang.srt.backend"] = {
            "fn": made["sglang.srt.layers.attention.mamba.causal_conv1d"]["causal_conv1d_fn"],
            "gates": made["sglang.kernels.ops.attention.linear.fused_gdn_gating"][
                "fused_gdn_gating"
            ],
        }
        for name in list(made):
            parts = name.split(".")
            for end in range(1, len(parts)):
                made.setdefault(".".join(parts[:end]), {})
        put_modules(monkeypatch, made)
        return sys.modules

    yield build
    plugin.uninstall()


def test_sglang_in_and_out(sglang_modules, monkeypatch):
    modules = sglang_modules()
    before = contents("sglang")
    monkeypatch.delenv(plugin.ENVIRONMENT["sglang"], raising=False)
    plugin.register_sglang()
    assert contents("sglang") == before
    monkeypatch.setenv(plugin.ENVIRONMENT["sglang"], "1")
    plugin.register_sglang()
    backend = modules["sglang.srt.backend"]
    assert backend.fn is sglang.causal_conv1d_fn_cuda and backend.gates is sglang.fused_gdn_gating
    assert modules["sglang.kernels.ops.mamba.causal_conv1d_triton"].causal_conv1d_fn is (
        sglang.causal_conv1d_fn
    )
    assert len(plugin.installed()) == sum(map(len, plugin._SGLANG.values())) + 2
    assert plugin.install_sglang() == plugin.installed()
    plugin.uninstall()
    assert contents("sglang") == before and plugin.installed() == []


def test_sglang_ends_the_process_rather_than_serve_without_what_was_asked(
    sglang_modules, monkeypatch
):
    sglang_modules(extra=", keyword_of_a_later_version=None")
    before = contents("sglang")
    monkeypatch.setenv(plugin.ENVIRONMENT["sglang"], "1")
    with pytest.raises(SystemExit, match="sglang has keywords .* keyword_of_a_later_version"):
        plugin.register_sglang()
    assert contents("sglang") == before
    sglang_modules(cpu=True)
    with pytest.raises(SystemExit, match="CPUs and NPUs"):
        plugin.register_sglang()
    monkeypatch.setenv(plugin.ENVIRONMENT["sglang"], "yes")
    with pytest.raises(SystemExit, match="GDN_OPS_SGLANG: expected 0 or 1"):
        plugin.register_sglang()
    assert plugin.installed() == []


# --- both


@pytest.mark.parametrize(
    "group, register",
    [("vllm.general_plugins", plugin.register), ("sglang.srt.plugins", plugin.register_sglang)],
)
def test_entry_point_is_declared(group, register):
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    value = f"{register.__module__}:{register.__name__}"
    assert f'[project.entry-points."{group}"]\ngdn_ops = "{value}"' in text
    assert importlib.metadata.EntryPoint("gdn_ops", value, group).load() is register
