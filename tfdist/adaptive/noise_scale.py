"""Estimates the gradient noise scale from the norms of the gradients of replicas and of their average."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

MEMORY_STEPS = 200.0


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


class NoiseScale:
    """The gradient noise scale: averages of signal and noise over many steps, and their quotient.

    The scale is the batch size at which the noise of a step is as large as its signal. Much smaller batches waste no
    example, much larger ones hardly make better steps. The quotient of single steps would be far too noisy and biased,
    so numerator and denominator are averaged apart, with weights that fall exponentially over `MEMORY_STEPS` steps.

    Attributes:
      weight: Number of steps in the averages; at most `MEMORY_STEPS`.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self._signal = self._noise = self._square = 0.0

    def observe(self, sample: NoiseSample) -> None:
        """Adds the sample of one step."""
        self.weight = self.weight * (1 - 1 / MEMORY_STEPS) + 1
        self._noise += (sample.noise - self._noise) / self.weight
        self._signal += (sample.signal - self._signal) / self.weight
        self._square += (sample.signal**2 - self._square) / self.weight

    @property
    def signal(self) -> float:
        """Squared norm of the true gradient."""
        return self._signal

    @property
    def noise(self) -> float:
        """Trace of the covariance of the gradients of single examples."""
        return self._noise

    @property
    def value(self) -> float:
        """The noise scale in examples; infinite if no signal is seen above the noise, NaN before the first step."""
        if not self.weight:
            return math.nan
        return max(self._noise, 0.0) / self._signal if self._signal > 0 else math.inf

    @property
    def least(self) -> float:
        """A cautious noise scale, for a signal that is larger by its standard error. Finite after a few steps."""
        if not self.weight:
            return math.nan
        signal = max(self._signal, 0.0) + self.signal_error
        return max(self._noise, 0.0) / signal if signal > 0 else math.inf

    @property
    def signal_error(self) -> float:
        """Standard error of the signal, from its spread over the steps."""
        return math.sqrt(max(self._square - self._signal**2, 0.0) / self.weight) if self.weight else math.nan

    def state(self) -> list[float]:
        """Returns numbers for `restored`."""
        return [self.weight, self._signal, self._noise, self._square]

    @classmethod
    def restored(cls, state: Sequence[Any]) -> "NoiseScale":
        """Returns a noise scale with the numbers that `state` has returned."""
        made = cls()
        made.weight, made._signal, made._noise, made._square = map(float, state)
        return made
