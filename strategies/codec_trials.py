"""Policy of `compression="auto"`: tries codecs in training steps, and keeps the best. No clock, process or network.

    uncompressed ─ is its exchange hidden? ─ yes ───────────────────────────┐
                        │ no                                                ├─ keep, and watch the time of steps
                 each codec, some steps ─ the best ─ with fewer groups encoded ─────┘          │ it has changed
        ▲                                                                              │
        └──────────────────────────────────────────────────────────────────────────────┘

Every replica runs the policy by itself. All get the same numbers, so all make the same choice. Does not load
TensorFlow.
"""

import dataclasses
import math
import statistics
from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple

from tfdist.strategies.codec_mixtures import MeasuredStep, MixtureModel, UnitBytes, mixtures

# While the choice stays, the policy takes the least numbers of this many steps. In trials it takes those of each step.
WINDOW = 4

_FIRST = 4  # Calls before the first trial: the first step is traced, and the next ones may allocate memory.
_LAG = 2  # Calls after an order. Their numbers are of steps before the order, or of the first step after it.
_FIRST_LAG = 4  # The same for a codec that has not been tried: it is compiled in the first step, and then gets memory.
_SAMPLES, _SLOW_SAMPLES = 5, 3  # Least steps of a trial; of steps that take longer than `_SLOW_SECONDS`.
_SLOW_SECONDS = 0.5
_QUICK_SAMPLES, _QUICK_SECONDS = 9, 0.5  # Most steps of a trial, while they take less than this time together.
_ROUNDS = 3  # Most trials of a choice.
_MIXTURES = 2  # Most mixtures of codecs that are tried.
# Choices that take at most this many times the time of the best one are tried again. In its first trial a codec may be
# slower than later.
_CLOSE_AT_FIRST, _CLOSE = 1.25, 1.06
_UNSURE = 1.1  # If another choice takes at most this many times the time of the best one, all are tried again later.
_LATER = 300  # Steps until then. The first steps of a program do not show its later speed.
# A trial ends early if each of its first two steps takes twice the time of the best choice, or each of its first three
# 1.25 times that time. A pause of a machine may slow down two steps.
_HOPELESS = {2: 2.0, 3: 1.25}
_UNFAIR = 1.25  # The first trial, without a codec, is repeated if it takes at most this many times the best time.
_HIDDEN = 0.03  # Part of a step. If the replicas wait less for the exchange, no codec is worth its arithmetic.
_EQUAL = 1.04  # Choices that take at most this many times the time of the best one are as fast.
_WINDOWS = 3  # Windows in a row that must differ.
_CHANGED, _CHANGED_MUCH = 1.2, 2.0  # Change of the time that counts after a pause; that counts at any time.
_PAUSE, _LONGEST_PAUSE = 128, 1 << 15  # Steps. The pause doubles when the choice stays the same.

Choice = tuple[int, ...]  # For each group of gradients 0, uncompressed, or the number of one of its codecs.


class Numbers(NamedTuple):
    """Measured numbers of a step, or the least of several steps; equal on all replicas.

    Attributes:
      seconds: Time from the end of the exchange of the step before to that of this one.
      exposed: Time from the last gradient to the end of the exchange, on the replica that waits least. The others also
        wait for this one.
    """

    seconds: float
    exposed: float


class TrialOrder(NamedTuple):
    """Tells the replicas how to go on.

    Attributes:
      choice: How gradients travel.
      is_final: Whether the choice stays until something changes. The policy then takes numbers once in `WINDOW` steps,
        otherwise in each step.
      reason: A sentence that says why; empty unless the choice has become final with this order.
    """

    choice: Choice
    is_final: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Alternatives:
    """The ways to exchange each group of gradients.

    Attributes:
      codecs: Names of all codecs, the least lossy one first.
      of_groups: For each group, the positions in `codecs` of the codecs that it can use. Groups are in the order of
        the layers.
      units: The bytes of the units of the groups, in the order of the layers; empty to leave out trials of mixtures.
      replicas: Number of replicas.
    """

    codecs: Sequence[str]
    of_groups: Sequence[Sequence[int]]
    units: Sequence[UnitBytes] = ()
    replicas: int = 2

    @property
    def uncompressed(self) -> Choice:
        """The choice without codecs."""
        return (0,) * len(self.of_groups)

    def uniform(self, codec: int) -> Choice:
        """The choice of one codec for all groups that can use it."""
        return tuple(1 + list(known).index(codec) if codec in known else 0 for known in self.of_groups)

    def all_uniform(self) -> list[Choice]:
        """All different choices of no codec or one codec, the least lossy first."""
        return list(dict.fromkeys([self.uncompressed, *map(self.uniform, range(len(self.codecs)))]))

    def describe(self, choice: Choice) -> str:
        """Names a choice: "int8", "no codec", or "int8 for 2 of 3 groups (2, 3)"."""
        used = {self.codecs[known[place - 1]] for known, place in zip(self.of_groups, choice, strict=True) if place}
        names = " and ".join(sorted(used, key=list(self.codecs).index)) or "no codec"
        if choice in self.all_uniform():
            return names
        encoded = [str(number) for number, place in enumerate(choice, 1) if place]
        return f"{names} for {len(encoded)} of {len(choice)} groups ({', '.join(encoded)})"


_Steps = Generator[TrialOrder, Numbers, None]


class CodecTrials:
    """Chooses codecs by measured steps.

    Args:
      alternatives: The ways to exchange gradients.
      settled: A choice that was made earlier, as in a backup. By default the first steps are trials.
    """

    def __init__(self, alternatives: Alternatives, settled: Choice | None = None):
        self._alternatives = alternatives
        self._tried = {alternatives.uncompressed, settled or alternatives.uncompressed}  # By this process.
        self._life = self._run(settled)
        self.order = next(self._life)

    def take(self, numbers: Numbers) -> TrialOrder:
        """Takes the numbers of the newest measured steps. Returns what to do from the next step on."""
        self.order = self._life.send(numbers)
        return self.order

    def _run(self, settled: Choice | None) -> _Steps:
        reason, pause, later = "", _PAUSE, math.inf
        expected: dict[Choice, float] = {}
        if settled is None:
            yield from _idle(TrialOrder(self._alternatives.uncompressed, False), _FIRST)
        while True:
            if settled is None or expected:
                before = settled
                settled, reason, is_sure = yield from self._look(expected)
                pause = _PAUSE if settled != before else min(2 * pause, _LONGEST_PAUSE)
                later = math.inf if is_sure or expected else _LATER
            seconds = yield from self._watch(settled, reason, pause, later)
            expected = {settled: seconds}

    def _look(self, expected: dict[Choice, float]) -> Generator[TrialOrder, Numbers, tuple[Choice, str, bool]]:
        """Tries the choices; returns the best one, the reason, and whether it is the best one by far.

        `expected` has the present choice and its time.
        """
        raw, *coded = self._alternatives.all_uniform()
        samples: dict[Choice, list[float]] = {}
        fastest = min(expected.values(), default=math.inf)
        numbers = yield from _trial(raw, fastest, _LAG if expected else 0)  # Without it all steps were uncompressed.
        samples[raw] = [each.seconds for each in numbers]
        exposed = statistics.median(each.exposed for each in numbers)
        seconds = statistics.median(samples[raw])
        if exposed < _HIDDEN * seconds:
            return (
                raw,
                f"the exchange is hidden behind the computation: replicas wait {_ms(exposed)} of a step of "
                f"{_ms(seconds)} for it",
                True,
            )
        rivals = coded
        has_new = not self._tried.issuperset(coded)
        for turn in range(_ROUNDS):
            for choice in rivals:
                fastest = min([fastest, *map(statistics.median, samples.values())])
                lag = _LAG if choice in self._tried else _FIRST_LAG
                self._tried.add(choice)
                numbers = yield from _trial(choice, fastest, lag)
                samples.setdefault(choice, []).extend(each.seconds for each in numbers)
            times = {choice: statistics.median(each) for choice, each in samples.items()}
            fastest = min(times.values())
            if not turn and not expected and fastest < seconds <= _UNFAIR * fastest:
                # The first steps of a program are slower than later ones, so the first trial was not fair.
                numbers = yield from _trial(raw, fastest)
                samples[raw] = [each.seconds for each in numbers]
                times[raw] = statistics.median(samples[raw])
            close = _CLOSE_AT_FIRST if has_new and not turn else _CLOSE
            rivals = [choice for choice in [raw, *coded] if times[choice] <= close * min(times.values())]
            if len(rivals) == 1:
                break
        chosen = _least_lossy(times)
        if chosen != raw:
            chosen = yield from self._mix(times, exposed, chosen, is_new=not expected)
        told = ", ".join(f"{self._alternatives.describe(each)} {_ms(times[each])}" for each in times)
        others = [seconds for choice, seconds in times.items() if choice != chosen]
        is_sure = min(others, default=math.inf) > _UNSURE * times[chosen]
        return chosen, f"a step takes with {told}", is_sure

    def _mix(
        self, times: dict[Choice, float], exposed: float, chosen: Choice, *, is_new: bool
    ) -> Generator[TrialOrder, Numbers, Choice]:
        """Tries mixtures of codecs, and returns the best choice. Adds the times of trials to `times`.

        `exposed` is the wait for the exchange without a codec, and `chosen` the choice without mixtures.
        """
        raw = times[self._alternatives.uncompressed]
        for choice in self._promising(MeasuredStep(raw, raw - exposed), times, chosen):
            best = min(times, key=times.__getitem__)
            times[choice] = _median((yield from _trial(choice, times[best])))
            if is_new and times[choice] < times[best]:
                # The steps of a new program become faster, so the earlier trials may not compare.
                for each in dict.fromkeys([best, chosen]):
                    times[each] = _median((yield from _trial(each, times[choice])))
            if times[choice] <= _EQUAL * min(times.values()):
                return choice
        return _least_lossy(times)

    def _promising(self, raw: MeasuredStep, times: dict[Choice, float], chosen: Choice) -> list[Choice]:
        """Returns mixtures that encode fewer groups than a choice, but should be as fast; the least lossy first."""
        units = self._alternatives.units
        if sum(map(bool, chosen)) < 2 or not units:
            return []
        model = MixtureModel(units, self._alternatives.replicas, raw, times)
        fewer = [each for each in mixtures(units, chosen) if each not in times]
        return [each for each in fewer if model.seconds(each) <= _EQUAL * times[chosen]][:_MIXTURES]

    def _watch(self, choice: Choice, reason: str, pause: int, later: float) -> Generator[TrialOrder, Numbers, float]:
        """Keeps a choice until the time of a step has changed, or for `later` steps. Returns the present time."""
        order = TrialOrder(choice, True)
        yield order._replace(reason=reason)  # The first window begins with a step of the trial.
        first = []
        for _ in range(_WINDOWS):
            first.append((yield order).seconds)
        usual, steps = statistics.median(first), WINDOW * _WINDOWS
        changed: list[float] = []
        while True:
            numbers = yield order
            steps += WINDOW
            if steps >= later:
                return numbers.seconds
            limit = _CHANGED if steps >= pause else _CHANGED_MUCH
            changed = [*changed, numbers.seconds] if not 1 / limit < numbers.seconds / usual < limit else []
            if len(changed) >= _WINDOWS:
                return statistics.median(changed)


def _idle(order: TrialOrder, calls: int) -> _Steps:
    for _ in range(calls):
        yield order


def _trial(choice: Choice, fastest: float, lag: int = _LAG) -> Generator[TrialOrder, Numbers, list[Numbers]]:
    """Measures some steps with a choice; fewer if they are much slower than the `fastest` known ones."""
    order = TrialOrder(choice, False)
    yield from _idle(order, lag)
    taken: list[Numbers] = []
    while True:
        taken.append((yield order))
        is_hopeless = min(each.seconds for each in taken) > _HOPELESS.get(len(taken), math.inf) * fastest
        if is_hopeless or _is_enough([each.seconds for each in taken]):
            return taken


def _median(numbers: Sequence[Numbers]) -> float:
    """Returns the median duration of steps, in seconds."""
    return statistics.median(each.seconds for each in numbers)


def _least_lossy(times: Mapping[Choice, float]) -> Choice:
    """Returns the first of the choices that are as fast as the fastest one."""
    return next(each for each in times if times[each] <= _EQUAL * min(times.values()))


def _is_enough(seconds: Sequence[float]) -> bool:
    """Whether a trial has enough steps."""
    if min(seconds) > _SLOW_SECONDS:
        return len(seconds) >= _SLOW_SAMPLES
    return len(seconds) >= (_SAMPLES if sum(seconds) >= _QUICK_SECONDS else _QUICK_SAMPLES)


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"
