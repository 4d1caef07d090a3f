"""Ops, layers and patched models over 2 and 4 processes against one process."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch without gloo", allow_module_level=True)
if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
    pytest.skip("this torch has no fully_shard", allow_module_level=True)

import distributed_checks

from gdn_ops import distributed

LIMIT_S = 300
CASES = [(world, name) for world in (2, 4) for name in distributed_checks.checks(world)]


@pytest.fixture(scope="module")
def errors(request, tmp_path_factory):
    """``errors(world)``: the errors of each rank by check; the processes run once."""
    found: dict[int, list[dict[str, str]]] = {}

    def of(world: int) -> list[dict[str, str]]:
        if world not in found:
            where = tmp_path_factory.mktemp(f"world{world}")
            context = torch.multiprocessing.spawn(
                distributed_checks.rank_main,
                (world, str(where / "store"), str(where / "errors")),
                nprocs=world,
                join=False,
            )
            end = time.monotonic() + LIMIT_S
            try:
                while not context.join(1):
                    assert time.monotonic() < end, f"{world} processes took over {LIMIT_S} s"
            finally:
                for process in context.processes:
                    process.kill()
            found[world] = [torch.load(where / f"errors.{rank}") for rank in range(world)]
        return found[world]

    return of


@pytest.mark.parametrize("world, name", CASES, ids=[f"{w}-{n}" for w, n in CASES])
def test_as_one_process(errors, world, name):
    failed = {rank: found[name] for rank, found in enumerate(errors(world)) if name in found}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())


def test_every_op_and_argument_has_a_rule():
    """A new op or argument must say how it shards, or be numbered over the whole batch."""
    schemas = {
        s.name.split("::")[1]: s
        for s in torch._C._jit_get_all_schemas()
        if s.name.startswith("gdn::")
        and any("Tensor" in str(a.type) for a in s.arguments)
        # Made of other ops (csrc/paged.cpp): they come apart before DTensor sees them.
        and not s.name.startswith("gdn::paged_")
    }
    del schemas["sweep"]  # of the benchmarks
    del schemas["linear"]  # torch's own product, and torch's own rule
    assert set(schemas) == set(distributed._RULES)
    for op, schema in schemas.items():
        rule = distributed._RULES[op]
        assert len(schema.returns) == len(rule.outputs), op
        for argument in schema.arguments:
            if "Tensor" in str(argument.type):
                assert argument.name in (*rule.inputs, *distributed._NUMBERED), (op, argument.name)


def test_importing_the_package_loads_none_of_it():
    """The rules cost an import of DTensor; the ops must not."""
    code = "import torch, sys; before = set(sys.modules); import gdn_ops; " + (
        "print(*sorted(m for m in set(sys.modules) - before if not m.startswith('gdn_ops')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = ("torch.distributed", "torch._dynamo", "torch._inductor", "transformers", "rich")
    assert not [m for m in run.stdout.split() if m.startswith(heavy)], run.stdout
