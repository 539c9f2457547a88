"""Estimates the gradient noise scale from the norms of the gradients of replicas and of their average."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

HORIZONS = (25.0, 50.0, 100.0, 200.0)  # Steps after which a sample has 1/e of its weight.
LARGEST_DIFFERENCE = 2.0  # Between two averages that agree, in standard errors of the shorter one.


@dataclasses.dataclass(frozen=True)
class NoiseSample:
    """Signal and noise of the gradient in one step. Both numbers have no bias, and may be negative by chance.

    Attributes:
      signal: Estimate of the squared norm of the true gradient.
      noise: Estimate of the trace of the covariance of the gradients of single examples.
    """

    signal: float
    noise: float

    @classmethod
    def of(
        cls, rows: Sequence[int], own_squares: Sequence[float], sum_square: float, examples: int | None = None
    ) -> "NoiseSample | None":
        """Returns the sample of a step, or `None` if fewer than two replicas had rows or a norm is not finite.

        Replica r with n_r of N rows has computed the mean gradient g_r of its rows. Its expected squared norm is
        |G|^2 + S / n_r, that of their average over all N rows is |G|^2 + S / N. Weighted by n_r / N, the squared norms
        of the g_r have the mean |G|^2 + S R / N for R replicas, whatever the shares. The difference is S (R - 1) / N.

        Args:
          rows: Rows of each replica.
          own_squares: Squared norm of n_r / N g_r for each replica.
          sum_square: Squared norm of the sum of these vectors.
          examples: Size of the data set if batches are drawn without replacement. The true gradient is then that of the
            data set. By default it is that of an endless stream of examples.

        References:
          McCandlish et al., An Empirical Model of Large-Batch Training, appendix A.1, 2018,
          https://arxiv.org/abs/1812.06162
        """
        total = sum(rows)
        present = [(n, square) for n, square in zip(rows, own_squares, strict=True) if n > 0]
        if len(present) < 2 or not all(map(math.isfinite, (*own_squares, sum_square))):
            return None
        small = sum(total / n * square for n, square in present)
        noise = total * (small - sum_square) / (len(present) - 1)
        return cls(sum_square - noise * (1 / total - (1 / examples if examples else 0.0)), noise)


class _Average:
    """Averages of signal and noise, with weights that fall to 1/e in `horizon` steps."""

    def __init__(self, horizon: float):
        self._horizon = horizon
        self.signal = self.noise = self._variance = 0.0
        self._weight = self._squared_weights = 0.0

    def observe(self, sample: NoiseSample, variance: float) -> None:
        """Adds the sample of one step, and an estimate of the variance of its signal."""
        keep = 1 - 1 / self._horizon
        self._weight = self._weight * keep + 1
        self._squared_weights = self._squared_weights * keep**2 + 1
        self.signal += (sample.signal - self.signal) / self._weight
        self.noise += (sample.noise - self.noise) / self._weight
        self._variance += (variance - self._variance) / self._weight

    @property
    def signal_error(self) -> float:
        """Standard error of the signal."""
        return math.sqrt(self._variance * self._squared_weights) / self._weight if self._weight else math.nan

    def state(self) -> list[float]:
        """Returns numbers for `restore`."""
        return [self.signal, self.noise, self._variance, self._weight, self._squared_weights]

    def restore(self, state: Sequence[Any]) -> None:
        """Restores numbers that `state` has returned."""
        self.signal, self.noise, self._variance, self._weight, self._squared_weights = map(float, state)


class NoiseScale:
    """The gradient noise scale: averages of signal and noise over many steps, and their quotient.

    The scale is the batch size at which the noise of a step is as large as its signal. Much smaller batches waste no
    example, much larger ones hardly make better steps. The quotient of single steps would be far too noisy and biased,
    so numerator and denominator are averaged apart, with weights that fall exponentially.

    At the beginning of training, the signal can fall by a factor of ten within 100 steps. A long average lags behind
    then, and makes the noise scale too small. A short one has a larger error. So there is an average for each of
    `HORIZONS`. The longest one counts that agrees with all shorter ones, within `LARGEST_DIFFERENCE` of their standard
    errors. These follow from the differences of successive steps, which such a fall hardly changes.

    Attributes:
      samples: Number of steps that were observed.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._averages = [_Average(horizon) for horizon in HORIZONS]
        self._latest = 0.0

    def observe(self, sample: NoiseSample) -> None:
        """Adds the sample of one step."""
        variance = (sample.signal - self._latest) ** 2 / 2 if self.samples else 0.0
        self._latest = sample.signal
        self.samples += 1
        for average in self._averages:
            average.observe(sample, variance)

    @property
    def _counting(self) -> _Average:
        """The average that counts, by the method of Lepski."""
        agreeing = self._averages[:1]
        for longer in self._averages[1:]:
            if any(abs(longer.signal - each.signal) > LARGEST_DIFFERENCE * each.signal_error for each in agreeing):
                break
            agreeing.append(longer)
        return agreeing[-1]

    @property
    def signal(self) -> float:
        """Squared norm of the true gradient."""
        return self._counting.signal

    @property
    def noise(self) -> float:
        """Trace of the covariance of the gradients of single examples."""
        return self._counting.noise

    @property
    def signal_error(self) -> float:
        """Standard error of the signal."""
        return self._counting.signal_error

    @property
    def value(self) -> float:
        """The noise scale in examples; infinite if no signal is seen above the noise, NaN before the first step."""
        if not self.samples:
            return math.nan
        return max(self.noise, 0.0) / self.signal if self.signal > 0 else math.inf

    @property
    def least(self) -> float:
        """A cautious noise scale, for a signal that is larger by its standard error. Finite after a few steps."""
        if not self.samples:
            return math.nan
        signal = max(self.signal, 0.0) + self.signal_error
        return max(self.noise, 0.0) / signal if signal > 0 else math.inf

    def state(self) -> dict[str, Any]:
        """Returns the state for `restored`."""
        return {
            "samples": self.samples,
            "latest": self._latest,
            "averages": [each.state() for each in self._averages],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> "NoiseScale":
        """Returns the noise scale of a result of `state`."""
        made = cls()
        made.samples, made._latest = int(state["samples"]), float(state["latest"])
        for average, numbers in zip(made._averages, state["averages"], strict=True):
            average.restore(numbers)
        return made
