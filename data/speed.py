"""How fast each replica is, learnt from the run, and the shares of the global batch that follow from it."""

from collections.abc import Sequence

import numpy as np

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
    All arithmetic is on numbers that all workers have alike, in float64 and a fixed order, so all decide alike.

    References:
      Chen et al., Semi-Dynamic Load Balancing (LB-BSP), 2020, https://arxiv.org/abs/1806.02508
    """

    def __init__(self, replicas: int):
        self.replicas = replicas
        self.steps = 0
        # Weight, and weighted means of b, t, b*b, b*t, by replica.
        self._weight = np.zeros(replicas)
        self._means = np.zeros((4, replicas))
        self._noise = np.zeros(replicas)  # Mean deviation from what was expected, as a part of it.
        self._surprises = np.zeros(replicas, np.int64)

    def observe(self, rows: Sequence[int], seconds: Sequence[float]) -> None:
        """Takes the rows and compute times of one step, by replica. Replicas without rows say nothing."""
        self.steps += 1
        if self.steps <= WARM_UP_STEPS:
            return
        b, t = np.asarray(rows, np.float64), np.asarray(seconds, np.float64)
        alpha, beta = self.coefficients()
        expected = np.where(self._weight > 0, alpha + beta * b, t)
        surprise = np.maximum(_SURPRISE, 1 + _SURPRISE_BY_NOISE * self._noise)
        high, low = t > surprise * expected, t * surprise < expected
        direction = high.astype(np.int64) - low.astype(np.int64)
        again = (direction != 0) & (np.sign(self._surprises) == direction)
        self._surprises = np.where(again, self._surprises + direction, direction)
        changed = again & (direction != 0)
        usable = (b > 0) & (t > 0) & ((direction == 0) | changed)
        self._weight[changed & usable] = 0
        self._surprises[changed & usable] = 0
        grown = self._weight * (1 - 1 / _MEMORY_STEPS) + 1
        new = np.stack([b, t, b * b, b * t])
        deviation = np.abs(t - expected) / np.maximum(expected, 1e-9)
        known = usable & (self._weight > 0)
        self._noise = np.where(known, self._noise + (np.minimum(deviation, 1) - self._noise) / grown, self._noise)
        self._means = np.where(usable, self._means + (new - self._means) / grown, self._means)
        self._weight = np.where(usable, grown, self._weight)

    def coefficients(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds that a step takes at least and seconds per row, alpha and beta, float64 [R] each.

        Where all steps had about as many rows, alpha cannot be told and counts as 0; repeated corrections still end
        at equal times.
        """
        b, t, bb, bt = self._means
        variance, covariance = bb - b * b, bt - b * t
        told = variance > (_SPREAD * b) ** 2
        beta = np.divide(covariance, variance, out=np.zeros_like(b), where=told)
        plain = np.divide(t, b, out=np.zeros_like(b), where=b > 0)
        beta = np.where(told, np.clip(beta, 0.1 * plain, plain), plain)
        return t - beta * b, beta

    def knows_all(self) -> bool:
        """Whether each replica was measured three times or more."""
        return bool(np.all(self._weight > 2))

    def proposal(self, current: Sequence[int], at_most: Sequence[int]) -> tuple[int, ...]:
        """Shares of the same global batch for which all replicas take equally long; `current` if little is gained.

        Args:
          current: Rows by replica that are in force.
          at_most: The most that each replica takes.
        """
        if not self.knows_all():
            return tuple(current)
        alpha, beta = self.coefficients()
        rows, now = sum(current), float(np.max(alpha + beta * np.asarray(current)))
        doubt = float(np.mean(self._noise * np.sqrt(_MEMORY_STEPS / self._weight)))
        bearable = now - max((_GAIN + _GAIN_BY_NOISE * doubt) * now, _GAIN_SECONDS)
        if (rows + np.sum(alpha / beta)) / np.sum(1 / beta) >= bearable:  # The best there is, were rows not whole.
            return tuple(current)
        shares = split(rows, _equal_times(rows, alpha, beta, np.minimum(at_most, rows)).tolist(), at_most)
        return shares if np.max(alpha + beta * np.asarray(shares)) < bearable else tuple(current)

    def state(self) -> list[list[float]]:
        """What `restored` takes: six numbers a replica, rounded."""
        b, t, bb, bt = self._means
        # Of squares, the small differences: rounded means of squares would not tell them any more.
        rows = [self._weight, self._noise, b, t, bb - b * b, bt - b * t]
        return [[float(f"{value:.4g}") for value in row] for row in rows]

    @classmethod
    def restored(cls, state: list[list[float]]) -> "SpeedModel":
        """A model from what `state` gave, that warms up anew."""
        weight, noise, b, t, variance, covariance = (np.array(row, np.float64) for row in state)
        model = cls(len(weight))
        model._weight, model._noise = weight, noise
        model._means = np.stack([b, t, variance + b * b, covariance + b * t])
        return model


def _equal_times(rows: int, alpha: np.ndarray, beta: np.ndarray, at_most: np.ndarray) -> np.ndarray:
    """Rows by replica, not whole, 1 <= b <= at_most, that sum to `rows` and take one time T where no bound holds."""
    at_least = min(1.0, rows / len(beta))

    def shares(time: float) -> np.ndarray:
        return np.clip((time - alpha) / beta, at_least, at_most)

    low, high = float(np.min(alpha)), float(np.max(alpha + beta * at_most))
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if np.sum(shares(middle)) < rows else (low, middle)
    return shares(high)
