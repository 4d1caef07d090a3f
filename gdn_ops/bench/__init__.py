"""Benchmarks of every op family: ``gdn-ops bench``, or
``gdn_ops.bench.family("recurrent").run(...)``.

A family is a module here whose name does not start with an underscore. It has ``TITLE`` (a line for
``gdn-ops bench --list``) and ``run(options) -> list[dict]``, which builds its cases and hands each
to :func:`gdn_ops.bench._timing.measure`; rows reach ``options.emit`` as they are made. Buffers are
made on torch's default device, unless the family says ``ON_DEVICE = False``. A family that counts
instead of timing (an accelerator's host twin, ``gdn-ops bench --device``) has ``records() ->
list[dict]`` in its place.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from gdn_ops.bench._timing import Candidate, Options, machine, measure

__all__ = ["Candidate", "Options", "families", "family", "machine", "measure"]


def families() -> list[str]:
    """Names of the families there are, found in this package."""
    names = (m.name for m in pkgutil.iter_modules(__path__))
    return sorted(n for n in names if not n.startswith("_"))


def family(name: str) -> ModuleType:
    """The module of one family.

    Raises:
        ValueError: there is no such family; the message names those there are.
    """
    if name not in families():
        raise ValueError(f"no benchmark family {name!r}; there are: {', '.join(families())}")
    return importlib.import_module(f"{__name__}.{name}")
