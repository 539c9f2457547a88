"""Runs variants that are alive together and take turns, block by block, on links of the lab or over loopback."""

import contextlib
import dataclasses
import itertools
import os
import random
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import rich.console

from benchmarks.netlab import Netlab, NetlabError, parse_rate
from benchmarks.peers.group import Group, GroupError, Host
from benchmarks.peers.messages import Answer, Trials
from benchmarks.record import Record
from benchmarks.report import REFERENCE, Row
from tfdist.cluster import free_ports
from tfdist.launch.memory_limit import free_memory

Log = rich.console.Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

WORKER_BYTES = 1.1e9  # Memory of a worker.
_CORES = len(os.sched_getaffinity(0))
_MIN_STEPS = 3
_WARMUP_STEPS = 4  # DDP rearranges its buckets after the first step, and PowerSGD starts at the third.
_START_SECONDS = 180.0
_BLOCK_SECONDS, _BLOCK_TIMES = 300.0, 10.0  # Deadline of a block: at least these seconds, or times its expected time.
_CHOICE_SECONDS = 900.0  # Deadline of the choice of codecs: up to 160 steps, and the time to compile each codec.
_PATIENCE_SECONDS = (5.0, 15.0, 45.0)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train.

    Attributes:
      peer: A module of `benchmarks.peers`.
      options: Options of its `prepare`.
      packages: A folder of packages that precede the installed ones; None for no folder.
      environment: Environment variables of the workers.
    """

    peer: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    packages: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def chooses_codecs(self) -> bool:
        """Whether it chooses codecs by measured steps. Its models are then made anew for each link."""
        return self.options.get("compression") == "auto"


@dataclasses.dataclass(frozen=True)
class Loopback:
    """Takes the place of a lab's host: this machine. All workers share its loopback interface."""

    address: str = "127.0.0.1"
    interface: str = "lo"

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv`: `argv` itself."""
        return list(argv)


class Network:
    """The hosts of the workers, and their links, with an adjustable rate unless they use loopback.

    Args:
      lab: The lab of the hosts, or None for loopback.
      workers: Number of workers.
      dilations: Factors of time by link. Where time is dilated by K, an emulated accelerator needs K times as long and
        a link has a Kth of its rate, so that the processors of this machine stand for processors that are K times as
        fast. See `Netlab.shape`. 1 for links that are not given.

    Attributes:
      hosts: The hosts, one per worker.
      sharing: Number of workers that share an interface and its byte counters.
    """

    def __init__(self, lab: Netlab | None, workers: int, dilations: Mapping[str, float] | None = None):
        self._lab, self._dilations = lab, dict(dilations or {})
        self.hosts: list[Host] = [Loopback()] * workers if lab is None else list(lab.hosts[:workers])
        self.sharing = workers if lab is None else 1

    def dilation(self, link: str) -> float:
        """The factor of time on a link."""
        return self._dilations.get(link, 1.0)

    def shape(self, link: str) -> float | None:
        """Sets the rate of all links and returns the measured rate in bit/s, undilated; None over loopback.

        Raises:
          NetlabError: If the links miss the rate even after waiting, for example because the machine is busy.
        """
        if self._lab is None:
            return None
        factor = self.dilation(link)
        for patience in (*_PATIENCE_SECONDS, None):
            try:
                self._lab.shape(dilated(link, factor), factor)
                break
            except NetlabError:
                if patience is None:
                    raise
                time.sleep(patience)
        measured = self._lab.bits_per_second
        return measured and measured * factor


def dilated(link: str, factor: float) -> str | None:
    """The rate of a link in dilated time, a `factor`th of its rate; None if it is not shaped."""
    rate = parse_rate(link)
    if rate is None or factor == 1:
        return None if rate is None else link
    return f"{rate / factor / 1e3:.3f}kbit"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much to measure.

    Attributes:
      steps: Largest number of steps in a block.
      seconds: Intended duration of a block.
      rounds: Blocks of each variant.
      starts: Starts of all processes.
      settling: Steps at the begin of a block until caches no longer hold the data of another variant.
      worker_bytes: Memory of a worker.
      most_alive: The largest number of variants that are alive together, if memory holds them.
    """

    steps: int
    seconds: float
    rounds: int
    starts: int
    settling: int = 3
    worker_bytes: float = WORKER_BYTES
    most_alive: int = 100


@dataclasses.dataclass
class Samples:
    """The measurements of one variant on one link."""

    blocks: list[list[float]] = dataclasses.field(default_factory=list)
    stock_blocks: list[float | None] = dataclasses.field(default_factory=list)
    compute: list[float] = dataclasses.field(default_factory=list)
    traffic: list[float] = dataclasses.field(default_factory=list)
    processor: list[float] = dataclasses.field(default_factory=list)
    busy: list[float] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    trials: Trials | None = None
    rounds: int = 0
    is_whole: bool = False
    error: str | None = None

    def end_start(self, rounds: int, error: str | None) -> None:
        """Records the end of one start with its number of rounds, and its error, if any."""
        self.rounds += rounds
        self.error = error or self.error
        self.is_whole |= error is None

    def add(self, together: Sequence[Answer], alone: Sequence[Answer], sharing: int) -> None:
        """Adds one block of all workers."""
        self.blocks.append(periods(together))
        self.compute += [seconds for answer in alone for seconds in answer.step_seconds]
        self.traffic.append(busiest(together) / sharing)
        steps = len(together[0].ends) - 1
        self.processor.append(sum(answer.processor_seconds for answer in together) / steps)
        first = together[0]
        self.busy.append(first.busy_seconds / (first.ends[-1] - first.ends[0]) / _CORES)

    def row(self, model: str, workers: int, link: str, variant: str, dilation: float) -> Row:
        """The row of the report: the measurements, and the error unless at least one start succeeded."""
        rate = statistics.median(self.rates) if self.rates else None
        error = None if self.is_whole else self.error
        if not self.blocks:
            return Row(model, workers, link, variant, rate, error, dilation=dilation)
        if error is not None:
            error = f"crashed after {len(self.blocks)} of {self.rounds} rounds: {error}"
        seconds = [each / dilation for block in self.blocks for each in block]
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return Row(
            model,
            workers,
            link,
            variant,
            rate,
            error,
            step_seconds=(low, middle, high),
            compute_seconds=statistics.median(self.compute) / dilation,
            bytes_per_step=statistics.median(self.traffic),
            block_seconds=tuple(statistics.median(block) / dilation for block in self.blocks),
            stock_block_seconds=tuple(each and each / dilation for each in self.stock_blocks),
            dilation=dilation,
            processor_seconds=statistics.median(self.processor),
            worker_share=statistics.median(self.processor) / (middle * dilation) / _CORES,
            busy_share=statistics.median(self.busy),
            trial_seconds=self.trials and self.trials.seconds / dilation,
            trial_steps=self.trials and self.trials.steps,
            reason=self.trials and self.trials.reason,
        )


def periods(answers: Sequence[Answer]) -> list[float]:
    """Seconds between the ends of successive steps, where the end of a step is that of the last worker.

    They add up to the time of all steps. The longest time of any worker would not, since a worker that begins a step
    early also waits for the other workers.
    """
    ends = [max(each) for each in zip(*(answer.ends for answer in answers), strict=True)]
    return [after - before for before, after in itertools.pairwise(ends)]


def busiest(answers: Sequence[Answer]) -> float:
    """Bytes per step of the worker that sent or received the most."""
    return max(max(answer.sent_bytes, answer.received_bytes) / (len(answer.ends) - 1) for answer in answers)


Cells = dict[tuple[str, str], Samples]  # by link and variant


class Cast:
    """The groups of workers of some variants that are alive together. Groups that fail are removed."""

    def __init__(self, model: str, network: Network, plan: Plan, found: Cells):
        self._model, self._network, self._plan, self._found = model, network, plan, found
        self._groups: dict[str, Group] = {}
        self._choosing: set[str] = set()
        self._errors: dict[str, str] = {}

    @contextlib.contextmanager
    def start(self, variants: Mapping[str, Variant]) -> Iterator[None]:
        """Starts and warms up the groups, and ends them at the end of the block."""
        workers = len(self._network.hosts)
        ports = iter(free_ports(workers * len(variants)))
        with contextlib.ExitStack() as stack:
            for name, variant in variants.items():
                begin = time.monotonic()
                free = [next(ports) for _ in range(workers)]
                hosts, options = self._network.hosts, variant.options
                group = Group(hosts, free, variant.peer, options, variant.packages, variant.environment)
                self._groups[name] = stack.enter_context(group)
                if variant.chooses_codecs:
                    self._choosing.add(name)
                for alone in (True,) if variant.chooses_codecs else (True, False):
                    self._train(name, alone=alone, warmup=_WARMUP_STEPS, steps=1, timeout_seconds=_START_SECONDS)
                if name in self._groups:
                    Log.print(f"  {name} started in {time.monotonic() - begin:.0f} s")
            yield

    def take_turns(self, link: str, rate: float | None, names: Collection[str], order: random.Random) -> None:
        """Measures the groups of the given names on the present link."""
        dilation = self._network.dilation(link)
        probes = {name: self._probe(name, link, dilation) for name in names if name in self._groups}
        steps = {name: self._steps(seconds) for name, seconds in probes.items()}
        for turn in range(self._plan.rounds):
            present = [name for name in steps if name in self._groups]
            medians: dict[str, float] = {}
            for name in order.sample(present, len(present)):
                settling = self._plan.settling
                block: dict[str, Any] = {"warmup": settling, "steps": steps[name], "dilation": dilation}
                slow_seconds = _BLOCK_TIMES * (settling + steps[name]) * probes[name]
                block["timeout_seconds"] = max(_BLOCK_SECONDS, slow_seconds)
                together = self._train(name, alone=False, **block)
                alone = together and self._train(name, alone=True, **block)
                if together and alone:
                    samples = self._found[link, name]
                    samples.add(together, alone, self._network.sharing)
                    medians[name] = statistics.median(samples.blocks[-1])
                    what = f"{1e3 * medians[name] / dilation:.0f} ms, {samples.traffic[-1] / 1e6:.2f} MB"
                    Log.print(f"  {link}, round {turn + 1} of {self._plan.rounds}: {name} {what}")
            for name in medians:
                self._found[link, name].stock_blocks.append(medians.get(REFERENCE))
        for name in names:
            samples = self._found[link, name]
            samples.rates += [rate] if rate else []
            samples.end_start(self._plan.rounds, self._errors.get(name))
        for name in steps.keys() & self._errors:
            self._errors[name] = f"not tried: failed on {link} ({self._errors[name]})"

    def skip(self, link: str, names: Collection[str], why: str) -> None:
        """Records that a link could not be measured."""
        Log.print(f"  {link} failed: {why}")
        for name in names:
            self._found[link, name].end_start(self._plan.rounds, why)

    def _probe(self, name: str, link: str, dilation: float) -> float:
        """Seconds of one step, to plan the size of blocks. A variant that chooses codecs makes its choice before."""
        anew: dict[str, Any] = {}
        if name in self._choosing:
            anew = {"renew": True, "timeout_seconds": _CHOICE_SECONDS}
        answers = self._train(name, alone=False, warmup=1, steps=1, dilation=dilation, **anew)
        if answers and (trials := answers[0].trials):
            self._found[link, name].trials = trials
            Log.print(f"  {link}: {name} chose within {trials.steps} steps and {trials.seconds:.1f} s: {trials.reason}")
        return periods(answers)[0] if answers else 1.0

    def _steps(self, seconds: float) -> int:
        """The number of steps per block if a step takes `seconds`."""
        return max(_MIN_STEPS, min(self._plan.steps, int(self._plan.seconds / seconds)))

    def _train(self, name: str, *, timeout_seconds: float = _BLOCK_SECONDS, **order: Any) -> list[Answer]:
        """The answers of the workers; none if the group has failed."""
        if name not in self._groups:
            return []
        try:
            return self._groups[name].train(self._model, timeout_seconds=timeout_seconds, **order)
        except GroupError as error:
            del self._groups[name]
            self._errors[name] = str(error)
            Log.print(f"  {name} failed: {error}", *error.details.splitlines()[-5:], sep="\n    ")
            return []


def measure(
    record: Record, model: str, network: Network, variants: Mapping[str, Variant], links: Sequence[str], plan: Plan
) -> None:
    """Measures all variants on all links, for one model and as many workers as the network has hosts.

    Rows in the record are not measured again, except the reference if other variants are measured. Rows of a link are
    added to the record when they are complete.
    """
    workers = len(network.hosts)
    missing = {
        link: [name for name in variants if not record.has(model, workers, link, name, network.dilation(link))]
        for link in links
    }
    found: Cells = {(link, name): Samples() for link in links for name in variants}
    order = random.Random(0)
    for start in range(plan.starts):
        size = max(1, min(plan.most_alive, alive(plan.worker_bytes) // workers))
        for names in casts(missing, REFERENCE in variants and size > 1, size):
            cast = Cast(model, network, plan, found)
            network.shape("unshaped")
            with cast.start({name: variants[name] for name in names}):
                for link in links:
                    new = [name for name in names if name in missing[link]]
                    if not new:
                        continue
                    here = [name for name in names if name in new or name == REFERENCE]
                    try:
                        rate = network.shape(link)
                    except NetlabError as error:
                        cast.skip(link, new, str(error))
                    else:
                        cast.take_turns(link, rate, here, order)
                    if start == plan.starts - 1:
                        rows = (
                            found[link, name].row(model, workers, link, name, network.dilation(link)) for name in new
                        )
                        record.add(*(row.to_json() for row in rows))


def alive(worker_bytes: float = WORKER_BYTES) -> int:
    """The number of worker processes that fit into free memory."""
    return int(free_memory() / worker_bytes)


def casts(missing: Mapping[str, Sequence[str]], with_reference: bool, size: int) -> list[list[str]]:
    """Groups of at most `size` variants, each with the reference, of all variants that are missing on any link."""
    names = list(dict.fromkeys(name for here in missing.values() for name in here))
    if not with_reference or not names:
        return [names[first : first + size] for first in range(0, len(names), size)]
    others = [name for name in names if name != REFERENCE]
    size -= 1
    return [[REFERENCE, *others[first : first + size]] for first in range(0, max(1, len(others)), size)]
