"""Pytest plug-in: the tests that trace, unchanged, with an NVIDIA device as torch's default one.

PYTHONPATH=tests python -m pytest -p traced_on_cuda tests/test_compile.py tests/test_export.py

A trace has no room for the dispatch mode that moves the calls of the other tests (on_cuda.py).
"""

from __future__ import annotations

import torch


def pytest_configure(config):
    # Before modules are imported: they choose sizes that the device takes.
    torch.set_default_device("cuda")
