from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# A library that was built in this tree is the one to test: an older package that is installed, too,
# would be found first by `pytest`, though not by `python -m pytest`.
TREE = Path(__file__).resolve().parent.parent / "gdn_ops"
FOUND = find_spec("gdn_ops")
if FOUND and Path(FOUND.origin).resolve().parent != TREE and any(TREE.glob("_C*.so")):
    raise pytest.UsageError(
        f"tests of {TREE} would run {Path(FOUND.origin).parent}: run `python -m pytest` here, or "
        "install this tree with --editable"
    )


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def fast():
    """Products of the CPU with operands rounded once, until the test ends."""
    torch.ops.gdn.set_precision("fast")
    yield
    torch.ops.gdn.set_precision("exact")
