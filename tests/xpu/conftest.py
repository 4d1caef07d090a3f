"""These tests need a library built with GDN_BACKEND=xpu-twin."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

REASON = "built without the XPU twin; rebuild with GDN_BACKEND=xpu-twin"


@pytest.fixture
def device():
    from gdn_ops import xpu_twin

    return xpu_twin.device()


def pytest_collection_modifyitems(items):
    from gdn_ops import xpu_twin

    if xpu_twin.available():
        return
    here = Path(__file__).parent
    for item in items:
        # What needs only the sources and a compiler runs everywhere.
        other = {"needs_no_twin", "runs_on_kunlun"} & set(item.keywords)
        if here in item.path.parents and not other:
            item.add_marker(pytest.mark.skip(reason=REASON))
