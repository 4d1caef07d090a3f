"""Records the signatures that gdn_ops.compat mirrors, from a source tree, without importing it.

    python scripts/record_signatures.py "vllm 0.32.0" site-packages/vllm tests/data/signatures.json

Module-level functions and static methods of the names below are written under the given label, as
``path:function`` -> list of ``name`` or ``name=default``. Entries of other labels stay.
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path

NAMES = {
    "causal_conv1d_fn",
    "causal_conv1d_fwd_cpu",
    "causal_conv1d_update",
    "causal_conv1d_update_cpu",
    "causal_conv1d_weight_pack",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_cpu",
    "fused_gdn_gating",
    "fused_gdn_gating_cpu",
    "fused_post_conv_prep",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule_packed_decode",
    "fused_sigmoid_gating_delta_rule_update",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_gating_delta_rule_update_spec_cpu",
}
# Other models' and devices' functions of the same names, and what engines call behind them.
PASSED_OVER = (
    "/models/", "/olmo", "/kimi", "mamba/ops/cpu/", "/hardware_backend/",
    "/kernels/ops/mamba/__init__", "/kernels/ops/mamba/causal_conv1d.py",
)  # fmt: skip


def signature(function: ast.FunctionDef) -> list[str]:
    arguments = function.args
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    pairs = [*zip(positional, defaults, strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [a.arg if d is None else f"{a.arg}={ast.unparse(d)}" for a, d in pairs]


def signatures(root: Path) -> dict[str, list[str]]:
    found = {}
    for path in sorted(root.rglob("*.py")):
        name = str(path.relative_to(root))
        text = path.read_text()
        if any(part in f"/{name}" for part in PASSED_OVER) or "def " not in text:
            continue
        if not any(f"def {function}(" in text for function in NAMES):
            continue
        for node in ast.parse(text).body:
            inside = node.body if isinstance(node, ast.ClassDef) else [node]
            for function in inside:
                if isinstance(function, ast.FunctionDef) and function.name in NAMES:
                    found[f"{name}:{function.name}"] = signature(function)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("label", help="package and version, for example 'vllm 0.32.0'")
    parser.add_argument("root", type=Path, help="directory of the package's sources")
    parser.add_argument("data", type=Path, help="the JSON file to update")
    args = parser.parse_args()
    data = json.loads(args.data.read_text()) if args.data.exists() else {}
    data[args.label] = signatures(args.root)
    args.data.write_text(json.dumps(data, indent=1) + "\n")
    print(f"{args.label}: {len(data[args.label])} signatures")


if __name__ == "__main__":
    main()
