"""Chooses the global batch size by goodput: the examples in a second, weighted by how much each of them helps."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfdist.adaptive.step_time import StepLine

_LARGEST_FACTOR = 2.0  # In one decision, as in Pollux: the measurements say little about distant sizes.
_GAIN = 0.05  # Smallest expected gain for which the size changes.
_IN_OCTAVE = (4, 5, 6, 7)


class BatchChoice(NamedTuple):
    """A chosen global batch size, and how much better it is expected to be than the present one (0.1 for 10 %)."""

    size: int
    gain: float


def efficiency(size: float, noise_scale: float, base: float) -> float:
    """How much an example helps in a batch of `size`, relative to one in a batch of `base`.

    References:
      Qiao et al., Pollux, OSDI 2021, equation 7, https://arxiv.org/abs/2008.12260
    """
    return 1.0 if math.isinf(noise_scale) else (noise_scale + base) / (noise_scale + size)


def goodput(size: float, line: StepLine, noise_scale: float, base: float) -> float:
    """Examples in a second, weighted by their efficiency."""
    return size / line.seconds(size) * efficiency(size, noise_scale, base)


def by_goodput(
    present: int, sizes: tuple[int, int], replicas: int, line: StepLine, noise_scale: float, base: int
) -> BatchChoice:
    """Returns the size with the largest goodput within `sizes` and near the present one; that one if the gain is small.

    Args:
      present: The present size.
      sizes: The smallest and the largest size.
      replicas: Number of replicas, each of which needs a row.
      line: The time of a step.
      noise_scale: The gradient noise scale in examples.
      base: The size that the learning rate is meant for.
    """
    return _best(present, candidates(present, sizes, replicas), lambda size: goodput(size, line, noise_scale, base))


def by_noise_scale(present: int, sizes: tuple[int, int], replicas: int, noise_scale: float) -> BatchChoice:
    """Returns the size that is nearest the noise scale, within `sizes` and near the present one.

    At this size training takes twice as many examples, and twice as many steps, as the least number possible.
    """
    target = min(max(noise_scale, sizes[0]), sizes[1]) if noise_scale > 0 else sizes[0]
    return _best(present, candidates(present, sizes, replicas), lambda size: min(size / target, target / size))


def candidates(present: int, sizes: tuple[int, int], replicas: int) -> list[int]:
    """Returns the sizes to choose from: the present one, the limits, and round numbers, four for each doubling."""
    low, high = max(sizes[0], replicas, math.ceil(present / _LARGEST_FACTOR)), sizes[1]
    high = min(high, math.floor(present * _LARGEST_FACTOR))
    rounded = [part * 2**octave // 4 for octave in range(high.bit_length() + 1) for part in _IN_OCTAVE]
    return sorted({size for size in [*rounded, low, high] if low <= size <= high} | {present})


def _best(present: int, sizes: Sequence[int], value: Callable[[int], float]) -> BatchChoice:
    now = value(present)
    best = max(sizes, key=lambda size: (value(size), -abs(size - present)))
    gain = value(best) / now - 1
    return BatchChoice(best, gain) if gain >= _GAIN else BatchChoice(present, 0.0)
