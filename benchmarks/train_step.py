"""Time and traffic of a training step: tfdist beside what a user would take instead, over links of known width.

    python -m benchmarks.train_step --quick                    # one model on one link, under 10 minutes on 2 cores
    python -m benchmarks.train_step --json benchmarks/results/train_step.json       # all of it, some hours; goes on
                                                                                    # where an earlier run ended
    python -m benchmarks.train_step --models mlp --links 100mbit,1gbit --variants stock,tfdist-loop

Workers are processes on hosts of `benchmarks.netlab`, which needs root; `--nolab` does without, over loopback. Every
variant trains the same model on the same batch with as many threads:

    tf_keras     Keras 2 `fit` under TensorFlow's MultiWorkerMirroredStrategy
    stock        Keras 3, a custom loop, under the same
    tfdist-loop  the same loop under tfdist.MultiWorkerMirroredStrategy
    tfdist       Keras 3 `fit` under it; tfdist+<codec> with compression
    ddp          PyTorch DistributedDataParallel on gloo; ddp+<hook> with a communication hook

As many variants as the machine can hold stay alive together and take turns in random order, block by block, so that a
drift of the machine hits all alike; `stock` is one of them, unless `--variants` leaves it out, and is what the others
are held against, round by round. In each turn the workers also train by themselves, side by side but with nothing to
exchange: that is compute. The rest of a step is waiting, a codec's work included. Bytes are read off the interfaces.
"""

import contextlib
import dataclasses
import importlib.util
import pathlib
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import rich.console
import rich.table
import rich.text
from absl import app, flags

from benchmarks.models import MODELS
from benchmarks.netlab import MAX_HOSTS, Netlab, NetlabError, end_on_signals, parse_rate, why_not
from benchmarks.peers.group import THREADS, Group, GroupError, Host
from benchmarks.peers.messages import Answer
from benchmarks.record import Record, check_writable
from benchmarks.report import COLUMNS, KEY, REFERENCE, Row, cells, in_order, notes
from tfdist.cluster import free_ports
from tfdist.launch.memory import free_memory

FLAGS = flags.FLAGS
flags.DEFINE_bool("quick", False, "The mlp on 2 workers at 1 Gbit/s, unless other flags say otherwise.")
flags.DEFINE_list("models", None, f"Some of {', '.join(MODELS)}; all by default.")
flags.DEFINE_list("workers", None, f"How many workers, 2 to {MAX_HOSTS}; 2,4 by default.")
flags.DEFINE_list("links", None, "Rates such as 100mbit, or unshaped (also none); 100mbit,1gbit,unshaped by default.")
flags.DEFINE_list("variants", None, "Who trains; all by default.")
flags.DEFINE_list("codecs", None, "Codecs of tfdist; all it has by default, with --quick a few.")
flags.DEFINE_integer("steps", 20, "Steps in a block, at most.", 3)
flags.DEFINE_float(
    "seconds", 4.0, "How long a block should take; slow steps make it longer, as it has at least 3.", 0.0
)
flags.DEFINE_integer("rounds", 3, "Blocks of each variant in one start.", 1)
flags.DEFINE_integer("starts", 1, "Starts of all processes; two starts of the same program can differ by 5 %.", 1)
flags.DEFINE_bool("nolab", False, "Over loopback: no root needed, but no link of known width either.")
flags.DEFINE_string("json", None, "A file for the results, which `benchmarks.report` draws.")

_WORKER_BYTES = 1.1e9
_QUICK_CODECS = ("float16", "int8", "powersgd")
_MIN_STEPS = 3
_WARMUP_STEPS = 4  # DDP arranges its buckets anew after the first, PowerSGD starts at the third
_SETTLE_STEPS = 3  # caches and memory hold what another variant left
_START_SECONDS = 180.0
_BLOCK_SECONDS, _BLOCK_TIMES = 300.0, 10.0  # for a block, at least, and in times of what it should take
_PATIENCE_SECONDS = (5.0, 15.0, 45.0)
_LOOPBACK = "loopback, not shaped"
_ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to train: a module of `benchmarks.peers`, and what its `prepare` takes."""

    peer: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def make_variants(codecs: Sequence[str]) -> dict[str, Variant]:
    """All variants, by name."""
    loops = {"stock": "tensorflow", "tfdist-loop": "tfdist"}
    hooks = ("fp16", "bf16", "powersgd")
    return {
        **{name: Variant("keras_loop", {"library": library}) for name, library in loops.items()},
        "tf_keras": Variant("keras2_fit"),
        "tfdist": Variant("keras_fit"),
        **{f"tfdist+{codec}": Variant("keras_fit", {"codec": codec}) for codec in codecs},
        "ddp": Variant("torch_ddp"),
        **{f"ddp+{hook}": Variant("torch_ddp", {"hook": hook}) for hook in hooks},
        # On gloo the hook can abort when several buckets are under way, each with messages of several sizes.
        "ddp+powersgd-1-bucket": Variant("torch_ddp", {"hook": "powersgd", "bucket_megabytes": 1000}),
    }


def available_codecs() -> list[str]:
    """The names that `compression=` takes; asked in a process of its own, since they come with TensorFlow."""
    if importlib.util.find_spec("tfdist.compression") is None:
        return []
    code = "from tfdist.strategies.compression import NAMES; print(*NAMES)"
    done = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        sys.exit(f"The codecs of tfdist cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.split()


@dataclasses.dataclass(frozen=True)
class Loopback:
    """Stands in for a host of the lab: this machine, in which all workers share one interface."""

    address: str = "127.0.0.1"
    interface: str = "lo"

    def command(self, argv: Sequence[str]) -> list[str]:
        """What to run: the same."""
        return list(argv)


class Network:
    """Hosts, and links between them that can be given a rate; over loopback they cannot.

    Attributes:
      hosts: Where workers run.
      sharing: Workers whose bytes one interface counts.
    """

    def __init__(self, lab: Netlab | None, workers: int):
        self._lab = lab
        self.hosts: list[Host] = [Loopback()] * workers if lab is None else list(lab.hosts[:workers])
        self.sharing = workers if lab is None else 1

    def shape(self, link: str) -> float | None:
        """Gives all links a rate and returns what was measured, in bit/s; None over loopback.

        Raises:
          NetlabError: If the links miss the rate even after some waiting: other programs may keep the machine busy.
        """
        if self._lab is None:
            return None
        for patience in (*_PATIENCE_SECONDS, None):
            try:
                self._lab.shape(None if link == "unshaped" else link)
                break
            except NetlabError:
                if patience is None:
                    raise
                time.sleep(patience)
        return self._lab.bits_per_second


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much to measure."""

    steps: int
    seconds: float
    rounds: int
    starts: int


@dataclasses.dataclass
class Samples:
    """What one variant showed on one link."""

    blocks: list[list[float]] = dataclasses.field(default_factory=list)
    stock_blocks: list[float | None] = dataclasses.field(default_factory=list)
    compute: list[float] = dataclasses.field(default_factory=list)
    traffic: list[float] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    rounds: int = 0
    is_whole: bool = False
    error: str | None = None

    def end_start(self, rounds: int, error: str | None) -> None:
        """Notes that one start is over, of so many rounds."""
        self.rounds += rounds
        self.error = error or self.error
        self.is_whole |= error is None

    def add(self, together: Sequence[Answer], alone: Sequence[Answer], sharing: int) -> None:
        """Takes in one block of all workers."""
        self.blocks.append(slowest(together))
        self.compute += [seconds for answer in alone for seconds in answer.step_seconds]
        self.traffic.append(busiest(together) / sharing)

    def row(self, model: str, workers: int, link: str, variant: str) -> Row:
        """What is reported of it: what was measured, and why it failed unless it got through a whole start."""
        rate = statistics.median(self.rates) if self.rates else None
        error = None if self.is_whole else self.error
        if not self.blocks:
            return Row(model, workers, link, variant, rate, error)
        if error is not None:
            error = f"crashed after {len(self.blocks)} of {self.rounds} rounds: {error}"
        low, middle, high = statistics.quantiles([s for block in self.blocks for s in block], n=4, method="inclusive")
        return Row(
            model,
            workers,
            link,
            variant,
            rate,
            error,
            step_seconds=(low, middle, high),
            compute_seconds=statistics.median(self.compute),
            bytes_per_step=statistics.median(self.traffic),
            block_seconds=tuple(statistics.median(block) for block in self.blocks),
            stock_block_seconds=tuple(self.stock_blocks),
        )


def slowest(answers: Sequence[Answer]) -> list[float]:
    """Seconds of each step, of the worker that took longest."""
    return [max(times) for times in zip(*(answer.step_seconds for answer in answers), strict=True)]


def busiest(answers: Sequence[Answer]) -> float:
    """Bytes a step of the worker that sent or received most."""
    return max(max(answer.sent_bytes, answer.received_bytes) / len(answer.step_seconds) for answer in answers)


Log = rich.console.Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
Cells = dict[tuple[str, str], Samples]  # by link and variant


class Cast:
    """The groups of some variants, alive together, of which some may have failed."""

    def __init__(self, model: str, network: Network, plan: Plan, found: Cells):
        self._model, self._network, self._plan, self._found = model, network, plan, found
        self._groups: dict[str, Group] = {}
        self._errors: dict[str, str] = {}

    @contextlib.contextmanager
    def start(self, variants: Mapping[str, Variant]) -> Iterator[None]:
        """Starts the groups, trains each a little, and ends them in the end."""
        workers = len(self._network.hosts)
        ports = iter(free_ports(workers * len(variants)))
        with contextlib.ExitStack() as stack:
            for name, variant in variants.items():
                begin = time.monotonic()
                group = Group(self._network.hosts, [next(ports) for _ in range(workers)], variant.peer, variant.options)
                self._groups[name] = stack.enter_context(group)
                for alone in (True, False):
                    self._train(name, alone=alone, warmup=_WARMUP_STEPS, steps=1, timeout_seconds=_START_SECONDS)
                if name in self._groups:
                    Log.print(f"  {name} started in {time.monotonic() - begin:.0f} s")
            yield

    def take_turns(self, link: str, rate: float | None, names: Collection[str], order: random.Random) -> None:
        """Measures the groups of some names on a link that has been shaped."""
        probes = {name: self._probe(name) for name in names if name in self._groups}
        steps = {name: self._steps(seconds) for name, seconds in probes.items()}
        for turn in range(self._plan.rounds):
            present = [name for name in steps if name in self._groups]
            medians: dict[str, float] = {}
            for name in order.sample(present, len(present)):
                block: dict[str, Any] = {"warmup": _SETTLE_STEPS, "steps": steps[name]}
                slow_seconds = _BLOCK_TIMES * (_SETTLE_STEPS + steps[name]) * probes[name]
                block["timeout_seconds"] = max(_BLOCK_SECONDS, slow_seconds)
                together = self._train(name, alone=False, **block)
                alone = together and self._train(name, alone=True, **block)
                if together and alone:
                    samples = self._found[link, name]
                    samples.add(together, alone, self._network.sharing)
                    medians[name] = statistics.median(samples.blocks[-1])
                    what = f"{1e3 * medians[name]:.0f} ms, {samples.traffic[-1] / 1e6:.2f} MB"
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
        """Notes that a link could not be measured."""
        Log.print(f"  {link} failed: {why}")
        for name in names:
            self._found[link, name].end_start(self._plan.rounds, why)

    def _probe(self, name: str) -> float:
        """Seconds of a step."""
        answers = self._train(name, alone=False, warmup=1, steps=1)
        return slowest(answers)[0] if answers else 1.0

    def _steps(self, seconds: float) -> int:
        """How many steps of so many seconds make a block."""
        return max(_MIN_STEPS, min(self._plan.steps, int(self._plan.seconds / seconds)))

    def _train(self, name: str, *, timeout_seconds: float = _BLOCK_SECONDS, **order: Any) -> list[Answer]:
        """What the workers answer; nothing if the group has failed."""
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
    """All variants on all links, for one model and the workers that the network has hosts for.

    What the record holds already is not measured again, but for the reference where others are. It gets each link's
    rows when they are complete.
    """
    workers = len(network.hosts)
    missing = {link: [name for name in variants if not record.has(model, workers, link, name)] for link in links}
    found: Cells = {(link, name): Samples() for link in links for name in variants}
    order = random.Random(0)
    for start in range(plan.starts):
        for names in casts(missing, REFERENCE in variants, max(2, alive() // workers)):
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
                        record.add(*(found[link, name].row(model, workers, link, name).to_json() for name in new))


def alive() -> int:
    """How many worker processes the memory that is free now can hold."""
    return int(free_memory() / _WORKER_BYTES)


def casts(missing: Mapping[str, Sequence[str]], with_reference: bool, size: int) -> list[list[str]]:
    """Variants that are missing on any link, in groups of at most `size`, each group with the reference."""
    names = list(dict.fromkeys(name for here in missing.values() for name in here))
    if not with_reference or not names:
        return [names[first : first + size] for first in range(0, len(names), size)]
    others = [name for name in names if name != REFERENCE]
    size -= 1
    return [[REFERENCE, *others[first : first + size]] for first in range(0, max(1, len(others)), size)]


def print_table(rows: Sequence[Row]) -> None:
    table = rich.table.Table(*COLUMNS)
    for row in rows:
        table.add_row(*(rich.text.Text(cell) for cell in cells(row)), end_section=row is rows[-1])
    console = rich.console.Console(width=180)
    console.print(table)
    for note in notes(rows):
        console.print(note, markup=False, highlight=False)


def chosen(flag: str, known: Sequence[str], default: Sequence[str]) -> list[str]:
    """What a flag chooses.

    Raises:
      app.UsageError: If it names something unknown, or nothing.
    """
    names = FLAGS[flag].value
    if names == []:
        raise app.UsageError(f"--{flag} takes {', '.join(known)}; got nothing. Leave it out for the default.")
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        raise app.UsageError(f"--{flag} takes {', '.join(known)}; got {', '.join(unknown)}.")
    return list(default) if names is None else list(names)


def chosen_workers(quick: bool) -> list[int]:
    """The numbers of workers that --workers chooses.

    Raises:
      app.UsageError: If one cannot be.
    """
    given = (["2"] if quick else ["2", "4"]) if FLAGS.workers is None else FLAGS.workers
    workers = [int(number) if number.isdecimal() else 0 for number in given]
    if not workers or not 2 <= min(workers) <= max(workers) <= MAX_HOSTS:
        raise app.UsageError(f"--workers takes numbers from 2 to {MAX_HOSTS}, got {','.join(given) or 'nothing'}.")
    if max(workers) > alive():
        raise app.UsageError(f"--workers takes as many as free memory holds, {alive()} here, got {max(workers)}.")
    return workers


def chosen_links(quick: bool) -> list[str]:
    """The links that --links chooses.

    Raises:
      app.UsageError: If one cannot be.
    """
    if FLAGS.nolab and FLAGS.links is not None:
        raise app.UsageError("--links needs the lab, and --nolab does without: leave one of them out.")
    if FLAGS.nolab:
        return [_LOOPBACK]
    links = (["1gbit"] if quick else ["100mbit", "1gbit", "unshaped"]) if FLAGS.links is None else FLAGS.links
    try:
        links = ["unshaped" if parse_rate(link) is None else link.lower() for link in links]
    except ValueError as error:
        raise app.UsageError(f"--links takes rates, or unshaped. {error}") from error
    if not links:
        raise app.UsageError("--links takes rates, or unshaped; got nothing. Leave it out for the default.")
    return list(dict.fromkeys(links))


def chosen_path() -> pathlib.Path | None:
    """The file that --json chooses.

    Raises:
      app.UsageError: If it cannot be written.
    """
    if FLAGS.json is None:
        return None
    path = pathlib.Path(FLAGS.json)
    try:
        check_writable(path)
    except OSError as error:
        raise app.UsageError(f"--json takes a file that can be written, got {path}: {error.strerror}.") from error
    return path


def main(arguments: Sequence[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"Only flags are taken, got {' '.join(arguments[1:])}.")
    quick = FLAGS.quick
    workers, links, path = chosen_workers(quick), chosen_links(quick), chosen_path()
    codecs = available_codecs() if FLAGS.codecs != [] else []
    if unknown := [name for name in FLAGS.codecs or [] if name not in codecs]:
        raise app.UsageError(f"--codecs takes {', '.join(codecs)}; got {', '.join(unknown)}.")
    few = _QUICK_CODECS if quick else codecs
    everyone = make_variants(codecs)
    default = make_variants(few if FLAGS.codecs is None else FLAGS.codecs)
    names = chosen("variants", list(everyone), list(default))
    models = chosen("models", list(MODELS), ["mlp"] if quick else list(MODELS))
    plan = Plan(FLAGS.steps, FLAGS.seconds, FLAGS.rounds, FLAGS.starts)
    if not FLAGS.nolab and (why := why_not()):
        sys.exit(f"{why}\nOr measure over loopback, without links of known width: --nolab")
    settings = {**dataclasses.asdict(plan), **THREADS, "network": _LOOPBACK if FLAGS.nolab else "netlab"}
    record = Record(path, settings, KEY)
    begin = time.monotonic()
    with contextlib.nullcontext() if FLAGS.nolab else Netlab(hosts=max(workers), rate=None) as lab:
        for model in models:
            for count in workers:
                Log.print(f"{model}, {count} workers:")
                variants = {name: everyone[name] for name in names}
                measure(record, model, Network(lab, count), variants, links, plan)
    print_table(in_order([Row.from_json(values) for values in record.rows]))
    print(f"Took {(time.monotonic() - begin) / 60:.1f} minutes.")


if __name__ == "__main__":
    end_on_signals()
    app.run(main)
