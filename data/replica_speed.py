"""Measures the speed of each replica during training, and derives the shares of the global batch."""

import dataclasses
import math
from collections.abc import Sequence

from tfdist.data.batch_plan import split

WARM_UP_STEPS = 2  # The first steps allocate memory and choose kernels.
_MEMORY_STEPS = 8.0
# A time that differs from the expected one by this factor, or by this many mean deviations if that is more, is an
# outlier. If it repeats, the speed has changed.
_SURPRISE, _SURPRISE_BY_NOISE = 1.5, 6
_SPREAD = 0.05  # Least relative spread of rows for which the fixed part of a time can be told from the part per row.
# A dead band: shares change only if the slowest replica is expected to gain this part of its time, plus this many mean
# deviations of the measurements.
_GAIN, _GAIN_BY_NOISE = 0.04, 0.75
_GAIN_SECONDS = 0.0005  # The least gain; the start of threads varies by this much.


class SpeedModel:
    """Models the time of each replica for b rows as t(b) = alpha + beta * b, and finds shares of equal times.

    Keeps moving averages over the last few steps. A single outlier is left out, a repeated one restarts the averages.
    All workers compute with the same numbers, in float64 and in a fixed order, so all decide alike. Python numbers are
    several times faster here than NumPy arrays of a few replicas.

    References:
      Chen et al., Semi-Dynamic Load Balancing (LB-BSP), 2020, https://arxiv.org/abs/1806.02508
    """

    def __init__(self, replicas: int):
        self.steps = 0
        self._speeds = [_Speed() for _ in range(replicas)]

    def observe(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """Adds measured rows and times of one training step, by replica. Replicas without rows are left out."""
        self.steps += 1
        if self.steps <= WARM_UP_STEPS:
            return
        for speed, b, t in zip(self._speeds, rows, seconds, strict=True):
            if b > 0 and t > 0:
                speed.observe(float(b), float(t))

    def coefficients(self) -> list[tuple[float, float]]:
        """For each replica alpha, the fixed seconds of a step, and beta, the seconds per row, as fitted so far."""
        return [speed.coefficients() for speed in self._speeds]

    def knows_all(self) -> bool:
        """Whether each replica was measured at least three times, so that shares can be proposed."""
        return all(speed.weight > 2 for speed in self._speeds)

    def proposal(self, current: Sequence[int], at_most: Sequence[int]) -> tuple[int, ...]:
        """Shares of a global batch for which all replicas take equally long, or `current` if the gain is small."""
        if not self.knows_all():
            return tuple(current)
        lines = self.coefficients()
        rows, now = sum(current), _slowest(lines, current)
        doubt = sum(speed.doubt() for speed in self._speeds) / len(lines)
        bearable = now - max((_GAIN + _GAIN_BY_NOISE * doubt) * now, _GAIN_SECONDS)
        best = (rows + sum(alpha / beta for alpha, beta in lines)) / sum(1 / beta for _, beta in lines)
        if best >= bearable:  # `best` is a lower bound: the common time if rows need not be integers.
            return tuple(current)
        shares = split(rows, _equal_times(rows, lines, [min(most, rows) for most in at_most]), at_most)
        return shares if _slowest(lines, shares) < bearable else tuple(current)

    def state(self) -> list[list[float]]:
        """Six rounded numbers per replica for a checkpoint, from which `restored` continues to measure."""
        states = [speed.state() for speed in self._speeds]
        return [[float(f"{value:.4g}") for value in row] for row in zip(*states, strict=True)]

    @classmethod
    def restored(cls, state: list[list[float]]) -> "SpeedModel":
        """A model with the given `state` from a checkpoint. It skips the first steps again."""
        model = cls(0)
        model._speeds = [_Speed.restored(*numbers) for numbers in zip(*state, strict=True)]
        return model


@dataclasses.dataclass
class _Speed:
    """The measured speed of one replica: weighted means of rows b, seconds t, b * b and b * t over the last steps."""

    weight: float = 0.0
    noise: float = 0.0  # Mean relative deviation of measured from expected seconds.
    b: float = 0.0
    t: float = 0.0
    bb: float = 0.0
    bt: float = 0.0
    surprise: int = 0  # 1 if the last step took much longer than expected, -1 if much shorter, else 0.

    def observe(self, b: float, t: float) -> None:
        alpha, beta = self.coefficients()
        expected = alpha + beta * b if self.weight else t
        bound = max(_SURPRISE, 1 + _SURPRISE_BY_NOISE * self.noise)
        surprise = (t > bound * expected) - (t * bound < expected)
        if surprise and surprise != self.surprise:
            self.surprise = surprise
            return
        if surprise:
            self.weight, surprise = 0.0, 0
        self.surprise = surprise
        new = self.weight * (1 - 1 / _MEMORY_STEPS) + 1
        if self.weight:
            deviation = abs(t - expected) / max(expected, 1e-9)
            self.noise += (min(deviation, 1) - self.noise) / new
        self.weight = new
        self.b += (b - self.b) / new
        self.t += (t - self.t) / new
        self.bb += (b * b - self.bb) / new
        self.bt += (b * t - self.bt) / new

    def coefficients(self) -> tuple[float, float]:
        """Alpha, the fixed seconds of a step, and beta, the seconds per row, of one replica.

        If all steps had about the same number of rows, alpha cannot be determined and counts as 0. Repeated corrections
        of the shares still converge to equal times.
        """
        if not self.b:
            return self.t, 0.0
        variance, plain = self.bb - self.b * self.b, self.t / self.b
        if variance <= (_SPREAD * self.b) ** 2:
            return 0.0, plain
        beta = min(max((self.bt - self.b * self.t) / variance, 0.1 * plain), plain)
        return self.t - beta * self.b, beta

    def doubt(self) -> float:
        """The relative uncertainty of a replica's expected times, by which a larger gain is demanded of new shares."""
        return self.noise * math.sqrt(_MEMORY_STEPS / self.weight)

    def state(self) -> tuple[float, ...]:
        # Variance and covariance instead of the means of squares, because rounding these would lose the differences.
        return self.weight, self.noise, self.b, self.t, self.bb - self.b * self.b, self.bt - self.b * self.t

    @classmethod
    def restored(cls, weight: float, noise: float, b: float, t: float, variance: float, covariance: float) -> "_Speed":
        return cls(weight, noise, b, t, variance + b * b, covariance + b * t)


def _slowest(lines: list[tuple[float, float]], shares: Sequence[float]) -> float:
    return max(alpha + beta * b for (alpha, beta), b in zip(lines, shares, strict=True))


def _equal_times(rows: int, lines: list[tuple[float, float]], at_most: Sequence[int]) -> list[float]:
    """Fractional rows by replica, from 1 to `at_most`, that sum to `rows` and take all replicas equally long."""
    at_least = min(1.0, rows / len(lines))

    def shares(time: float) -> list[float]:
        within = zip(lines, at_most, strict=True)
        return [min(max((time - alpha) / beta, at_least), most) for (alpha, beta), most in within]

    low, high = min(alpha for alpha, _ in lines), _slowest(lines, at_most)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shares(middle)) < rows else (low, middle)
    return shares(high)
