"""How fast each replica is, learnt from the run, and the shares of the global batch that follow from it."""

import dataclasses
import math
from collections.abc import Sequence

from tfdist.data.plan import split

WARM_UP_STEPS = 2  # First steps allocate memory and choose kernels.
_MEMORY_STEPS = 8.0
# A time that is so many times longer or shorter than expected, or, if that is more, so many mean deviations off, is an
# accident; when it repeats, a change.
_SURPRISE, _SURPRISE_BY_NOISE = 1.5, 6
_SPREAD = 0.05  # Relative spread of rows from which on a fixed part of the time can be told from the part per row.
# A dead band: shares stay unless the slowest replica is expected to gain this part of its time, and this many times the
# mean deviation of measurements more.
_GAIN, _GAIN_BY_NOISE = 0.04, 0.75
_GAIN_SECONDS = 0.0005  # At least; threads that start sooner or later make so much of a difference.


class SpeedModel:
    """Times t(b) = alpha + beta * b of each replica for b rows, and shares that make them equal.

    A moving average over the last few steps; a single outlier is left out, a repeated one starts the average anew.
    All arithmetic is on numbers that all workers have alike, in float64 and a fixed order, so all decide alike. In
    plain numbers, which is several times faster than arrays of a few replicas.

    References:
      Chen et al., Semi-Dynamic Load Balancing (LB-BSP), 2020, https://arxiv.org/abs/1806.02508
    """

    def __init__(self, replicas: int):
        self.steps = 0
        self._speeds = [_Speed() for _ in range(replicas)]

    def observe(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """Takes the rows and own times of one step, by replica. Replicas without rows say nothing."""
        self.steps += 1
        if self.steps <= WARM_UP_STEPS:
            return
        for speed, b, t in zip(self._speeds, rows, seconds, strict=True):
            if b > 0 and t > 0:
                speed.observe(float(b), float(t))

    def coefficients(self) -> list[tuple[float, float]]:
        """Seconds that a step takes at least and seconds per row, alpha and beta, by replica."""
        return [speed.coefficients() for speed in self._speeds]

    def knows_all(self) -> bool:
        """Whether each replica was measured three times or more."""
        return all(speed.weight > 2 for speed in self._speeds)

    def proposal(self, current: Sequence[int], at_most: Sequence[int]) -> tuple[int, ...]:
        """Shares of the same global batch for which all replicas take equally long; `current` if little is gained.

        Args:
          current: Rows by replica that are in force.
          at_most: The most that each replica takes.
        """
        if not self.knows_all():
            return tuple(current)
        lines = self.coefficients()
        rows, now = sum(current), _slowest(lines, current)
        doubt = sum(speed.doubt() for speed in self._speeds) / len(lines)
        bearable = now - max((_GAIN + _GAIN_BY_NOISE * doubt) * now, _GAIN_SECONDS)
        best = (rows + sum(alpha / beta for alpha, beta in lines)) / sum(1 / beta for _, beta in lines)
        if best >= bearable:  # The best there is, were rows not whole.
            return tuple(current)
        shares = split(rows, _equal_times(rows, lines, [min(most, rows) for most in at_most]), at_most)
        return shares if _slowest(lines, shares) < bearable else tuple(current)

    def state(self) -> list[list[float]]:
        """What `restored` takes: six numbers a replica, rounded."""
        states = [speed.state() for speed in self._speeds]
        return [[float(f"{value:.4g}") for value in row] for row in zip(*states, strict=True)]

    @classmethod
    def restored(cls, state: list[list[float]]) -> "SpeedModel":
        """A model from what `state` gave, that warms up anew."""
        model = cls(0)
        model._speeds = [_Speed.restored(*numbers) for numbers in zip(*state, strict=True)]
        return model


@dataclasses.dataclass
class _Speed:
    """Of one replica: weighted means over its last steps of rows b, seconds t, b * b and b * t."""

    weight: float = 0.0
    noise: float = 0.0  # Mean deviation from what was expected, as a part of it.
    b: float = 0.0
    t: float = 0.0
    bb: float = 0.0
    bt: float = 0.0
    surprise: int = 0  # Of the last step: 1 if it took far too long, -1 if not nearly long enough.

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
        """Alpha and beta.

        Where all steps had about as many rows, alpha cannot be told and counts as 0; repeated corrections still end
        at equal times.
        """
        if not self.b:
            return self.t, 0.0
        variance, plain = self.bb - self.b * self.b, self.t / self.b
        if variance <= (_SPREAD * self.b) ** 2:
            return 0.0, plain
        beta = min(max((self.bt - self.b * self.t) / variance, 0.1 * plain), plain)
        return self.t - beta * self.b, beta

    def doubt(self) -> float:
        """By which part what is expected may be off."""
        return self.noise * math.sqrt(_MEMORY_STEPS / self.weight)

    def state(self) -> tuple[float, ...]:
        # Of squares, the small differences: rounded means of squares would not tell them any more.
        return self.weight, self.noise, self.b, self.t, self.bb - self.b * self.b, self.bt - self.b * self.t

    @classmethod
    def restored(cls, weight: float, noise: float, b: float, t: float, variance: float, covariance: float) -> "_Speed":
        return cls(weight, noise, b, t, variance + b * b, covariance + b * t)


def _slowest(lines, shares):
    return max(alpha + beta * b for (alpha, beta), b in zip(lines, shares, strict=True))


def _equal_times(rows: int, lines: list[tuple[float, float]], at_most: Sequence[int]) -> list[float]:
    """Rows by replica, not whole, 1 <= b <= at_most, that sum to `rows` and take one time T where no bound holds."""
    at_least = min(1.0, rows / len(lines))

    def shares(time: float) -> list[float]:
        within = zip(lines, at_most, strict=True)
        return [min(max((time - alpha) / beta, at_least), most) for (alpha, beta), most in within]

    low, high = min(alpha for alpha, _ in lines), _slowest(lines, at_most)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shares(middle)) < rows else (low, middle)
    return shares(high)
