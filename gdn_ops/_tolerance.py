"""How far from float64 a result may be, and how far it is: for ``gdn-ops verify``, benchmarks and
tests."""

from __future__ import annotations

import torch
from torch import Tensor

# (rtol, atol) of a value that was computed in float32 and stored in each dtype: a rounding or two
# of the stored value (half a unit is 2**-9 in bfloat16, 2**-12 in float16), and float32 sums behind
# it.
TOLERANCE = {
    torch.float32: (5e-6, 5e-6),
    torch.bfloat16: (2**-7, 2**-8),
    torch.float16: (2**-10, 2**-11),
}
# Tolerances of what is rounded once more than a stored result: products of a 16-bit state in a mode
# other than exact; squared, the outputs of a device's fused step, whose norm scales errors up.
ROUNDED_FACTOR = 4.0


def scaled_error(actual: Tensor, expected: Tensor, rtol: float, atol: float) -> float:
    """Largest ``|actual - expected| / (rtol * |expected| + atol * rms(expected))``.

    The absolute part follows the size of the tensor, so a small one is not waved through. NaN
    counts as infinite.
    """
    if not expected.numel():
        return 0.0
    rms = float(expected.square().mean().sqrt()) or 1.0
    excess = (actual.double() - expected).abs() / (rtol * expected.abs() + atol * rms)
    worst = float(excess.max())
    return worst if worst == worst else float("inf")


def rounded_error(actual: Tensor, expected: Tensor, magnitude: Tensor, K: int) -> float:
    """Largest error of products with operands rounded once to bfloat16, over its limit.

    Beside the rounding of what is stored, ``2**-6 / sqrt(K)`` of ``reference.chunk_magnitudes``: an
    operand is off by up to ``2**-8``, 0.4 of that in the mean square, and a sum over K of them by
    that over ``sqrt(K)`` of its terms' norm; the worst of a hundred thousand is seven times the
    mean. NaN counts as infinite.
    """
    if not expected.numel():
        return 0.0
    limit = _stored(actual) * expected.abs() + 2**-6 * K**-0.5 * magnitude
    return _over(actual, expected, limit)


def column_error(actual: Tensor, expected: Tensor, along: int, factors: torch.dtype) -> float:
    """Largest error of chunks whose factors are of a 16-bit dtype, over its limit.

    Beside the rounding of what is stored, two units of ``factors`` of the largest value ``along``
    that dimension, which runs down a column of V: on a device such factors have one scale a column.
    NaN counts as infinite.
    """
    if not expected.numel():
        return 0.0
    largest = expected.abs().amax(along, keepdim=True)
    limit = _stored(actual) * expected.abs() + 2 * torch.finfo(factors).eps * largest
    return _over(actual, expected, limit)


def _stored(x: Tensor) -> float:
    """Relative error of storing a value in x's dtype."""
    return 0.0 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps / 2


def _over(actual: Tensor, expected: Tensor, limit: Tensor) -> float:
    # Where nothing was ever added there is nothing to be off by.
    worst = float(((actual.double() - expected).abs() / limit.clamp(min=1e-300)).max())
    return worst if worst == worst else float("inf")
