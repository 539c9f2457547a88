"""Policy: which workers and links are slow, and why, by the times of recent steps. No clock, process or network.

A few steps at a time form a block. A worker is slow once it was slow in most of the last blocks. For computation the
number of blocks grows with the variation from step to step. So a single long step makes no verdict. Nor does a second
job on the machine that takes a core from one worker now and from another later. Does not load TensorFlow.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tfdist.events.straggler_file import COMPUTATION, INPUT, LINK

_LEAST_BLOCKS, _MOST_BLOCKS = 4, 24  # Blocks that are looked at, on a quiet and on a noisy machine.
_NEEDED = 0.75  # Part of these blocks in which a worker must be slow.
_QUIET = 0.1  # Jitter of a quiet machine. More jitter needs more blocks, as for the mean of noisy numbers.
_LEAST_SECONDS = 1e-9
_FEWER_ROWS = 0.8  # Rows of a worker, as a part of the median of the others, that count as fewer.


class Link(NamedTuple):
    """A connection from a worker to another; `None` in place of one of them means all peers."""

    sender: int | None
    receiver: int | None


class Subject(NamedTuple):
    """A slow worker or link, with the cause.

    Attributes:
      cause: `COMPUTATION`, `INPUT` or `LINK`.
      worker: The slow worker; for a link, the one that sends, or the receiver if its links from all peers are slow.
      link: The slow link or links; `None` for other causes.
      is_balanced: Whether a worker that computes slower gets fewer rows, so that the others need not wait for it.
    """

    cause: str
    worker: int
    link: Link | None = None
    is_balanced: bool = False


@dataclasses.dataclass(frozen=True)
class LinkSpeed:
    """The links from a worker to its peers.

    Attributes:
      peer: Receiver of the slowest link; `None` if no link limits the exchanges.
      rate: Bytes per second of this link while it is busy; 0 without a `peer`.
      typical: Median rate of the worker's other links; of the same link if it is the only one.
      seconds: Time in which the slowest link carries the bytes of a step; 0 without a `peer`.
    """

    peer: int | None
    rate: float
    typical: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Block:
    """Some successive training steps.

    Attributes:
      first, last: Numbers of its first and last step.
      seconds: Mean time of a step, without Python between steps.
      rows: Rows by worker.
      compute: Mean compute time of a step by worker, without the longest.
      input: Mean time by worker in which it had no batch.
      jitter: By worker, how much the compute time changes from a step to the next: mean difference of logarithms.
      links: Links by worker; `None` if they are not known, or have carried little. Empty if none are known.
    """

    first: int
    last: int
    seconds: float
    rows: Sequence[float]
    compute: Sequence[float]
    input: Sequence[float]
    jitter: Sequence[float]
    links: Sequence[LinkSpeed | None] = ()


@dataclasses.dataclass(frozen=True)
class Limits:
    """When a worker is slow in a block of steps.

    Attributes:
      computation: How many times slower than the median of the other workers, per row.
      computation_part: Part of a step for which the worker computes longer than this median.
      input: Part of a step in which the worker waits for its input.
      input_part: Part of a step for which it waits longer than the median of the others.
      link: Rate of a link, as a part of the median of the others.
      link_of_two: Likewise between two workers. There the only other link is the way back, which carries the
        acknowledgments of this one. Both then slow each other down.
      link_part: Part of a step in which this link carries the bytes of the step.
    """

    computation: float
    computation_part: float
    input: float
    input_part: float
    link: float
    link_of_two: float
    link_part: float


BEGINS = Limits(
    computation=1.5, computation_part=0.15, input=0.3, input_part=0.25, link=0.25, link_of_two=0.4, link_part=0.2
)
"""Limits for a verdict."""

GOES_ON = Limits(
    computation=1.25, computation_part=0.08, input=0.15, input_part=0.12, link=0.5, link_of_two=0.6, link_part=0.1
)
"""Limits below which a verdict ends. They are lower, so that verdicts do not come and go."""


@dataclasses.dataclass(frozen=True)
class StragglerVerdict:
    """A worker or link that is slow, or is no longer slow.

    Attributes:
      subject: The worker or link, and the cause.
      amount: See `StragglerRecord`.
      since: The step since which it is slow.
      step: The last step before the verdict.
      is_over: Whether it is no longer slow.
    """

    subject: Subject
    amount: float
    since: int
    step: int
    is_over: bool = False


class StragglerJudge:
    """Finds slow workers in the blocks of steps that it is given. It knows the last blocks and the present verdicts.

    Attributes:
      verdicts: The present verdicts.
    """

    def __init__(self) -> None:
        self.verdicts: dict[Subject, StragglerVerdict] = {}
        self._blocks: collections.deque[_Judged] = collections.deque(maxlen=_MOST_BLOCKS)

    def add(self, block: Block) -> list[StragglerVerdict]:
        """Takes the newest block. Returns the verdicts that begin, and those that are over."""
        self._blocks.append(_Judged(block, slow_in(block, BEGINS), slow_in(block, GOES_ON)))
        ended = [held for held in self.verdicts.values() if self._is_over(held.subject)]
        for verdict in ended:
            del self.verdicts[verdict.subject]
        begun = [self._verdict(each) for each in self._blocks[-1].slow if self._begins(each)]
        self.verdicts |= {verdict.subject: verdict for verdict in begun}
        return [dataclasses.replace(each, is_over=True, step=block.last) for each in ended] + begun

    def _recent(self, subject: Subject) -> "tuple[list[_Judged], int]":
        """Returns the last blocks in which to look for a slow worker, and how many of them must be slow."""
        if subject.cause != COMPUTATION:
            return list(self._blocks)[-_LEAST_BLOCKS:], math.ceil(_NEEDED * _LEAST_BLOCKS)
        jitters = [each.block.jitter for each in self._blocks]
        own = statistics.fmean(each[subject.worker] for each in jitters)
        others = statistics.fmean(_medians_of_others(each)[subject.worker] for each in jitters)
        count = blocks_for(max(own, others))
        return list(self._blocks)[-count:], math.ceil(_NEEDED * count)

    def _begins(self, subject: Subject) -> bool:
        recent, needed = self._recent(subject)
        return subject not in self.verdicts and sum(subject in each.slow for each in recent) >= needed

    def _is_over(self, subject: Subject) -> bool:
        recent, needed = self._recent(subject)
        return sum(subject not in each.still_slow for each in recent) >= needed

    def _verdict(self, subject: Subject) -> StragglerVerdict:
        found = [each for each in self._recent(subject)[0] if subject in each.slow]
        amount = statistics.median(each.slow[subject] for each in found)
        return StragglerVerdict(subject, amount, found[0].block.first, self._blocks[-1].block.last)


def blocks_for(jitter: float) -> int:
    """Returns how many blocks to look at where compute times have this jitter from step to step."""
    return min(max(math.ceil(_LEAST_BLOCKS * (jitter / _QUIET) ** 2), _LEAST_BLOCKS), _MOST_BLOCKS)


class _Judged(NamedTuple):
    block: Block
    slow: Mapping[Subject, float]
    still_slow: Mapping[Subject, float]


def slow_in(block: Block, limits: Limits) -> dict[Subject, float]:
    """Returns the slow workers and links of a block of steps, with the amount; see `StragglerRecord`."""
    if len(block.compute) < 2 or block.seconds <= 0:
        return {}
    return dict([*_slow_computation(block, limits), *_slow_input(block, limits), *_slow_links(block, limits)])


def _slow_computation(block: Block, limits: Limits) -> Iterator[tuple[Subject, float]]:
    per_row = [seconds / rows if rows else 0.0 for seconds, rows in zip(block.compute, block.rows, strict=True)]
    compute, rows = _medians_of_others(block.compute), _medians_of_others(block.rows)
    for worker, usual in enumerate(_medians_of_others(per_row)):
        if usual <= 0 or per_row[worker] < limits.computation * usual:
            continue
        factor = per_row[worker] / usual
        if block.compute[worker] - compute[worker] >= limits.computation_part * block.seconds:
            # Fewer rows take less time, but not in proportion: each step has a fixed part.
            yield (
                Subject(COMPUTATION, worker),
                min(factor, block.compute[worker] / max(compute[worker], _LEAST_SECONDS)),
            )
        elif block.rows[worker] < _FEWER_ROWS * rows[worker]:
            yield Subject(COMPUTATION, worker, is_balanced=True), factor


def _slow_input(block: Block, limits: Limits) -> Iterator[tuple[Subject, float]]:
    for worker, (own, others) in enumerate(zip(block.input, _medians_of_others(block.input), strict=True)):
        excess = own - others
        if own >= limits.input * block.seconds and excess >= limits.input_part * block.seconds:
            yield Subject(INPUT, worker), min(own / block.seconds, 1.0)


def _slow_links(block: Block, limits: Limits) -> Iterator[tuple[Subject, float]]:
    found: dict[Link, float] = {}
    limit = limits.link if len(block.links) > 2 else limits.link_of_two
    known = [(worker, each) for worker, each in enumerate(block.links) if each is not None]
    if len(known) < 2:
        return
    typical = _medians_of_others([each.typical for _, each in known])
    for (worker, own), usual in zip(known, typical, strict=True):
        if own.peer is None or own.rate >= limit * usual or own.seconds < limits.link_part * block.seconds:
            continue
        are_all = len(block.links) > 2 and own.typical < limit * usual
        found[Link(worker, None if are_all else own.peer)] = own.rate / usual
    for link, amount in _joined(found, len(block.links)).items():
        named = link.sender if link.sender is not None else link.receiver
        if named is not None:
            yield Subject(LINK, named, link), amount


def _joined(found: Mapping[Link, float], workers: int) -> dict[Link, float]:
    """Returns slow links with those from all peers to one worker as a single one."""
    receivers = collections.Counter(link.receiver for link in found if link.receiver is not None)
    joined = dict(found)
    for receiver, count in receivers.items():
        if workers > 2 and count == workers - 1:
            into = [link for link in found if link.receiver == receiver]
            joined[Link(None, receiver)] = statistics.median(joined.pop(link) for link in into)
    return joined


def _medians_of_others(values: Sequence[float]) -> list[float]:
    """Returns for each worker the median of the values of all other workers."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ordered = [values[worker] for worker in order]
    middle = (len(values) - 2) / 2  # Of the others: a place in their order, or between two.
    places = math.floor(middle), math.ceil(middle)
    medians = [0.0] * len(values)
    for rank, worker in enumerate(order):
        medians[worker] = sum(ordered[place + (place >= rank)] for place in places) / 2
    return medians
