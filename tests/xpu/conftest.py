"""The twin's tests need a library built with GDN_BACKEND=xpu-twin."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def twin_device():
    import twin

    if not twin.load():
        pytest.skip("built without the XPU twin; rebuild with GDN_BACKEND=xpu-twin")
    return twin.DEVICE
