"""The whole family as an engine uses it, in sequences of calls that hypothesis chooses and, when
one fails, shortens. What a call does and what is checked after it: tests/lifecycle.py. A longer run
of the same machine: scripts/soak.py."""

from __future__ import annotations

import random

import pytest
import torch
from common import ACTIVATIONS
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from lifecycle import Config, Lifecycle

RANDOM = st.randoms(use_true_random=False)


def machine(mode: str, speculative: bool) -> type[RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        @initialize(
            act=st.sampled_from(ACTIVATIONS),
            state_dtype=st.sampled_from(ACTIVATIONS),
            transposed=st.booleans(),
            H=st.sampled_from([1, 2]),
            ratio=st.sampled_from([1, 2, 3]),
            K=st.sampled_from([1, 5, 8, 17]),
            V=st.sampled_from([1, 3, 8, 20]),
            R=st.sampled_from([3, 4, 5, 8]),
            seed=st.integers(0, 2**31 - 1),
        )
        def allocate(self, seed, **kw):
            config = Config(mode=mode, speculative=speculative, **kw)
            self.life = Lifecycle(config, random.Random(seed))

        def do(self, step: str, rng: random.Random) -> None:
            self.life.rng = rng
            getattr(self.life, step)()

        def teardown(self):
            if hasattr(self, "life"):
                counts["calls"] += self.life.calls

    counts = {"calls": 0}
    Machine.counts = counts
    for step in sorted(set(Lifecycle.STEPS)):

        def run(self, rng, step=step):
            self.do(step, rng)

        run.__name__ = step
        setattr(Machine, step, rule(rng=RANDOM)(run))
    return Machine


def live(mode: str, speculative: bool, threads: int, examples: int) -> int:
    """Calls made and checked."""
    Machine = machine(mode, speculative)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            run_state_machine_as_test(
                Machine,
                settings=settings(
                    max_examples=examples,
                    stateful_step_count=40,
                    deadline=None,
                    derandomize=True,
                    database=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
    finally:
        torch.set_num_threads(before)
    return Machine.counts["calls"]


@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "speculative"])
@pytest.mark.parametrize("mode", ["full", "buffered", "lowrank"])
def test_any_life(mode, speculative):
    # A machine that does nothing would pass everything.
    assert live(mode, speculative, threads=1, examples=60) > 500


@pytest.mark.parametrize("mode", ["full", "buffered", "lowrank"])
def test_any_life_on_two_threads(mode):
    assert live(mode, True, threads=2, examples=8) > 20
