"""Policy: which mixtures of codecs to try, by a cost model that the measured times of uniform choices calibrate.

With one codec for all gradients, a step has taken a measured time. The cost model of `tfdist plan` explains it by the
computation, the rate of the link and the time of coding. It then predicts steps in which groups of gradients travel
with different codecs. Does not load TensorFlow.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from tfdist.plan.exchange_costs import NONE, ExchangeCosts
from tfdist.plan.planned_buckets import Gradient
from tfdist.plan.step_prediction import PlannedStep, predict_step

Choice = tuple[int, ...]

_MOST_MIXTURES = 512  # Mixtures that are predicted.
_SLOWEST_LINK, _FASTEST_LINK = 1e5, 1e13  # Bits per second.
_LONGEST_CODING = 1e-6  # Seconds to code a byte of float32.
_HALVINGS = 60
_LATENCY, _MESSAGE = 200e-6, 5e-6  # Seconds of an exchange of almost no bytes, and to send a message.


@dataclasses.dataclass(frozen=True)
class UnitBytes:
    """The bytes of a unit of gradients, which travel together.

    Attributes:
      group: Number of its group. The units of a group have the same choice.
      float_bytes: Bytes of the gradients.
      sent_bytes: Bytes of their encoding with each choice of the group: no codec, then each codec.
    """

    group: int
    float_bytes: float
    sent_bytes: Sequence[float]


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """Measured times of a step.

    Attributes:
      seconds: Time of the uncompressed step.
      compute_seconds: The part of it in which a replica computes.
    """

    seconds: float
    compute_seconds: float


class MixtureModel:
    """Predicts the time of a step in which groups of gradients travel with different codecs.

    Args:
      units: The units in the order of the layers. The backward pass makes the last one first.
      replicas: Number of replicas.
      raw: The measured step without codecs.
      times: The measured times of uniform choices, by the choice.
    """

    def __init__(self, units: Sequence[UnitBytes], replicas: int, raw: MeasuredStep, times: Mapping[Choice, float]):
        self._units, self._replicas, self._compute = units, replicas, raw.compute_seconds
        self._coding: dict[tuple[int, int], float] = {}  # Seconds to code a byte, by group and place of the codec.
        uncompressed = (0,) * len(next(iter(times)))
        # More bits per second make a step shorter, more seconds per byte longer.
        self._link = _argument(
            lambda bits: -self._seconds(uncompressed, bits), -raw.seconds, _SLOWEST_LINK, _FASTEST_LINK
        )
        for choice, seconds in times.items():
            self._calibrate(choice, seconds)

    def seconds(self, choice: Choice) -> float:
        """Returns the predicted time of a step."""
        return self._seconds(choice, self._link)

    def _calibrate(self, choice: Choice, seconds: float) -> None:
        """Finds the time of coding with which the time of a uniform choice is the measured one."""
        used = [(group, place) for group, place in enumerate(choice) if place]

        def predicted(per_byte: float) -> float:
            self._coding.update(dict.fromkeys(used, per_byte))
            return self._seconds(choice, self._link)

        predicted(_argument(predicted, seconds, 1e-13, _LONGEST_CODING))

    def _seconds(self, choice: Choice, link_bits: float) -> float:
        gradients = [
            Gradient(each.float_bytes, each.sent_bytes[place], each.float_bytes * coding)
            for each in self._units
            for place in [choice[each.group]]
            for coding in [self._coding.get((each.group, place), 0.0)]
        ]
        costs = ExchangeCosts(_LATENCY, _MESSAGE, {NONE: 0.0}, "measured steps")
        return predict_step(PlannedStep(self._compute, gradients, NONE), self._replicas, link_bits, costs).seconds


def mixtures(units: Sequence[UnitBytes], best: Choice) -> list[Choice]:
    """Returns the mixtures of the codecs of `best` and of no codec, those that encode the fewest bytes first."""
    options = [sorted({0, place}) for place in best]
    found = itertools.islice(itertools.product(*options), _MOST_MIXTURES)
    encoded = {choice: sum(each.float_bytes for each in units if choice[each.group]) for choice in found}
    return sorted(encoded, key=encoded.__getitem__)


def _argument(rising: Callable[[float], float], value: float, low: float, high: float) -> float:
    """Returns the argument at which a function that rises has a value, or the nearest end of the range."""
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        if rising(middle) < value:
            low = middle
        else:
            high = middle
    return (low * high) ** 0.5
