"""Decides about the global batch size and the learning rate, from the reports of training steps."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.adaptive.batch_choice import BatchChoice, by_goodput, by_noise_scale
from tfdist.adaptive.learning_rate_rules import learning_rate_scale
from tfdist.adaptive.noise_scale import NoiseSample, NoiseScale
from tfdist.adaptive.step_time import StepLine, StepTime
from tfdist.readable_numbers import counted

LEAST_STEPS = 20  # Samples of the noise, or measured steps after a change of replicas, before a decision.


@dataclasses.dataclass(frozen=True)
class BatchDecision:
    """A decision about the global batch size, and its reasons.

    Attributes:
      before: The global batch size before it.
      size: The global batch size from now on.
      learning_rate_scale: Factor for the learning rate that was chosen for the first global batch size.
      noise_scale: The noise scale that counts: a cautious estimate, lower by its error.
      gain: The expected gain of goodput, or the gain in closeness to the noise scale, 0.1 for 10 %.
      line: The time of a step; `None` if it does not count.
      replicas: Number of replicas.
    """

    before: int
    size: int
    learning_rate_scale: float
    noise_scale: float
    gain: float
    line: StepLine | None
    replicas: int

    def __str__(self) -> str:
        change = f"{self.before} -> {self.size}" if self.size != self.before else f"stays {self.size}"
        text = f"global batch {change}, learning rate x {self.learning_rate_scale:.3g}: noise scale at least "
        text += f"{self.noise_scale:.4g} examples"
        if self.line is not None:
            text += (
                f", a step takes {1000 * self.line.fixed:.3g} ms and {1e6 * self.line.per_row:.3g} us for each row on "
                f"{counted(self.replicas, 'replica')}"
            )
        if self.size != self.before:
            text += f", expected gain {100 * self.gain:.0f} %" if self.line is not None else ""
        return text


class BatchController:
    """Gathers the noise scale and the times of steps, and decides about the global batch size.

    All workers give it the same numbers and decide alike.

    Args:
      sizes: The smallest and the largest global batch size.
      base: The global batch size that the learning rate was chosen for.
      examples: Size of the data set.
      goal: "goodput" or "noise_scale".
      rule: The rule for the learning rate, see `learning_rate_scale`.

    Attributes:
      noise: The noise scale so far.
      scale: The factor of the learning rate by the last decision.
      replicas_changed: Whether no decision was made for this number of replicas.
    """

    def __init__(self, sizes: tuple[int, int], base: int, examples: int, goal: str, rule: str | None):
        self._sizes, self._base, self._examples, self._goal, self._rule = sizes, base, examples, goal, rule
        self.noise, self._times, self.scale = NoiseScale(), StepTime(), 1.0
        self._replicas = self._seen = 0
        self.replicas_changed = False

    def begin(self, replicas: int) -> None:
        """Notes the number of replicas. Step times of another number do not count."""
        if replicas != self._replicas:
            self.replicas_changed = self._replicas > 0
            self._replicas, self._times, self._seen = replicas, StepTime(), 0

    def observe(self, rows: Sequence[int], own_squares: Sequence[float] | None, sum_square: float) -> None:
        """Adds the norms of the gradients of a step; see `NoiseSample.of`."""
        self._seen += 1
        if own_squares is not None:
            sample = NoiseSample.of(rows, own_squares, sum_square, self._examples)
            if sample is not None:
                self.noise.observe(sample)

    def observe_time(self, size: int, seconds: float, compute_seconds: float) -> None:
        """Adds the time of a step with a whole global batch; see `StepTime.observe`."""
        self._times.observe(size, seconds, compute_seconds)

    def follow(self, rule: str | None, size: int) -> None:
        """Takes a rule for the learning rate, and the factor by it for a global batch size."""
        self._rule = rule
        self.scale = learning_rate_scale(rule, size, self._base, self.noise.least)

    @property
    def must_decide_anew(self) -> bool:
        """Whether the number of replicas has changed, and enough steps were measured since."""
        return self.replicas_changed and self._seen >= LEAST_STEPS

    def decide(self, present: int) -> BatchDecision | None:
        """Returns a decision, or `None` if too little is known.

        Args:
          present: The present global batch size, after changes that are decided already.
        """
        noise_scale = self.noise.least
        if self.noise.samples < LEAST_STEPS or math.isnan(noise_scale):
            return None
        line, choice = None, None
        if self._goal == "noise_scale":
            choice = by_noise_scale(present, self._sizes, self._replicas, noise_scale)
        elif (line := self._times.line()) is not None:
            choice = by_goodput(present, self._sizes, self._replicas, line, noise_scale, self._base)
        return None if choice is None else self._decided(present, choice, noise_scale, line)

    def _decided(self, present: int, choice: BatchChoice, noise_scale: float, line: StepLine | None) -> BatchDecision:
        self.replicas_changed = False
        self.scale = learning_rate_scale(self._rule, choice.size, self._base, noise_scale)
        return BatchDecision(present, choice.size, self.scale, noise_scale, choice.gain, line, self._replicas)

    def state(self) -> dict[str, Any]:
        """Returns the state for `restore`."""
        return {
            "noise": self.noise.state(),
            "times": self._times.state(),
            "scale": self.scale,
            "replicas": self._replicas,
            "seen": self._seen,
            "replicas_changed": self.replicas_changed,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a result of `state`. Call `begin` afterwards."""
        self.noise, self._times = NoiseScale.restored(state["noise"]), StepTime.restored(state["times"])
        self.scale, self._replicas, self._seen = float(state["scale"]), int(state["replicas"]), int(state["seen"])
        self.replicas_changed = bool(state["replicas_changed"])
