"""The tests of the CPU ops with every call of ours moved to another device, for pytest plug-ins."""

from __future__ import annotations

import pytest

from gdn_ops import _on_device


class OnDevice(_on_device.OnDevice):
    """A call that the device refuses by name skips its test."""

    def failed(self, error: RuntimeError) -> None:
        if _on_device.refused(error):
            pytest.skip(str(error).splitlines()[0])
        raise error


def skip(items, not_here: dict[str, tuple[str, ...]]) -> None:
    """Skip the tests whose name has one of the words of a reason in it."""
    for item in items:
        for reason, words in not_here.items():
            if any(word in item.nodeid for word in words):
                item.add_marker(pytest.mark.skip(reason=reason))
                break
