"""Compares balanced training steps with the ideal on unequal workers, and measures their overhead on equal workers.

    python benchmarks/balance.py                  # about 9 minutes on 2 cores
    python benchmarks/balance.py --quick          # smaller and fewer steps

Each worker on this machine is slowed by a quota of CPU time (control groups, as root); together they get less than the
machine has. In the middle of a run the quotas rotate. The model computes much and exchanges little, so that the shares
determine the time of a step. All ways to share a global batch take turns on the same workers:

- "equal" shares; "oracle", the weights that match the quotas, also after the change; "speed", balanced by measurement;
- "DYNAMIC", a tf.data service in DYNAMIC mode, in which the next worker that asks gets the next batch.

The ideal is N / sum of speeds: the rows of a step divided by the rows per second of all replicas together, as measured
in the same steps. A step also exchanges gradients, runs callbacks and gets data, which the ideal leaves out. This takes
some 35 ms on a worker with a fifth of a core, so short steps stay further from the ideal.

On equal workers, balanced shares are compared with `AutoShardPolicy.DATA`. Planning is timed separately.
"""

import contextlib
import functools
import itertools
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfdist
from tfdist.testing import WorkerPool

FLAGS = flags.FLAGS
flags.DEFINE_list("parts", ["0.8", "0.4", "0.2"], "The part of a core that each worker gets.")
flags.DEFINE_integer("rows", 1920, "Rows of a global batch.", 1)
flags.DEFINE_integer("filters", 32, "Filters of each of the three convolutions.", 1)
flags.DEFINE_integer("steps", 30, "Steps before the change, and steps after it.", 25)
flags.DEFINE_integer("rounds", 1, "Turns of each way to share.", 1)
flags.DEFINE_bool("quick", False, "25 steps, 240 rows, unless other flags say otherwise.")

_SETTLED = 20  # steps after a start or a change
_SIDE, _CLASSES, _STEPS_PER_EPOCH = 24, 10, 8
_PERIOD_MICROSECONDS = 10_000
_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}
_GROUP = "tfdist-balance-"
_WAYS = ["equal", "oracle", "speed", "DYNAMIC"]


# The code below runs in the workers.


class Counted(keras.layers.Layer):
    """Counts how often the model is traced."""

    traces = 0

    def call(self, x):
        """Returns its input."""
        Counted.traces += 1
        return x


@functools.cache
def make_model(filters: int) -> tuple[tfdist.MultiWorkerMirroredStrategy, keras.Model]:
    strategy = tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        hidden = [keras.layers.Conv2D(filters, 3, padding="same", activation="relu") for _ in range(3)]
        pool = keras.layers.GlobalAveragePooling2D()
        model = keras.Sequential(
            [keras.Input((_SIDE, _SIDE, 1)), Counted(), *hidden, pool, keras.layers.Dense(_CLASSES)]
        )
        model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return strategy, model


@functools.cache
def make_examples(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    number = _STEPS_PER_EPOCH * rows
    return rng.standard_normal((number, _SIDE, _SIDE, 1), dtype=np.float32), rng.integers(_CLASSES, size=number)


def make_data(way: str, rows: int, weights: Sequence[float], service: str | None, filters: int):
    """Returns the dataset for `fit`."""
    strategy, _ = make_model(filters)
    examples = tf.data.Dataset.from_tensor_slices(make_examples(rows))
    examples = examples.shuffle(_STEPS_PER_EPOCH * rows, seed=0).repeat()
    if way == "DATA":
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
        return examples.batch(rows).with_options(options)
    if way == "DYNAMIC":
        batches = examples.batch(rows // strategy.num_replicas_in_sync)
        batches = batches.apply(tf.data.experimental.service.distribute("distributed_epoch", service, job_name="train"))
        return strategy.distribute_datasets_from_function(lambda _: batches.prefetch(1))
    policy = list(weights) if way == "oracle" else way
    return strategy.distribute_datasets_from_function(
        tfdist.data.BalancedSharding(make_examples(rows), rows, policy=policy, repeat=True)
    )


_data: dict[str, object] = {}


def train(way: str, steps: int, fresh: bool, rows: int, weights: Sequence[float], service: str | None, filters: int):
    """Returns the seconds [steps], the rows and compute seconds by replica of each step, and the number of traces."""
    strategy, model = make_model(filters)
    if fresh or way == "oracle":
        _data[way] = make_data(way, rows, weights, service, filters)
    ends, reports = [], []
    strategy.reports.listeners.append(reports.append)
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
    model.fit(_data[way], steps_per_epoch=steps + 1, verbose=0, callbacks=[clock])
    strategy.reports.listeners.remove(reports.append)
    by_replica = [(report.rows.tolist(), report.compute_seconds.tolist()) for report in reports[1:]]
    return np.diff(ends).tolist(), by_replica, Counted.traces


# The code below runs in the process that the user starts.


class Quotas:
    """Control groups of processes, each limited to a part of a core. The parts can change at any time.

    Needs root, and the cpu controller of control groups version 1 or 2. The processes must end before the `with` block.
    """

    def __init__(self, number: int):
        version_1 = pathlib.Path("/sys/fs/cgroup/cpu")
        self._is_version_1 = version_1.exists()
        self._root = version_1 if self._is_version_1 else pathlib.Path("/sys/fs/cgroup")
        self._groups = [self._root / f"{_GROUP}{os.getpid()}-{i}" for i in range(number)]

    def __enter__(self):
        for left in self._root.glob(f"{_GROUP}*"):  # left by a run that was killed
            with contextlib.suppress(OSError):  # in use
                left.rmdir()
        with contextlib.ExitStack() as undo:
            try:
                if not self._is_version_1:
                    (self._root / "cgroup.subtree_control").write_text("+cpu")
                for group in self._groups:
                    group.mkdir()
                    undo.callback(group.rmdir)
                self.set([None] * len(self._groups))
            except OSError as error:
                sys.exit(
                    f"This benchmark needs control groups, which cannot be created here: {error}. Run it as root, in a "
                    "container with --privileged, on a kernel with the cpu controller."
                )
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_):
        self._undo.close()

    def take(self, processes: Sequence[int]) -> None:
        """Moves one process into each group."""
        for group, process in zip(self._groups, processes, strict=True):
            (group / "cgroup.procs").write_text(str(process))

    def set(self, parts: Sequence[float | None]) -> None:
        """Limits each group to a part of a core; None removes the limit."""
        for group, part in zip(self._groups, parts, strict=True):
            quota = None if part is None else round(part * _PERIOD_MICROSECONDS)
            if self._is_version_1:
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD_MICROSECONDS))
                (group / "cpu.cfs_quota_us").write_text(str(quota or -1))
            else:
                (group / "cpu.max").write_text(f"{quota or 'max'} {_PERIOD_MICROSECONDS}")


@contextlib.contextmanager
def input_service() -> Iterator[str]:
    dispatcher = tf.data.experimental.service.DispatchServer()
    address = dispatcher.target.partition("://")[2]
    worker = tf.data.experimental.service.WorkerServer(
        tf.data.experimental.service.WorkerConfig(dispatcher_address=address)
    )
    try:
        yield dispatcher.target
    finally:
        worker.stop()
        dispatcher.stop()


def settled(result) -> dict[str, float]:
    """Returns medians over the steps from `_SETTLED` on: time, ideal, and computation of the slowest replica."""
    times, by_replica, _ = result
    ideals = [sum(rows) / sum(n / t for n, t in zip(rows, seconds, strict=True)) for rows, seconds in by_replica]
    slowest = [max(seconds) for _, seconds in by_replica]
    return {
        name: statistics.median(values[_SETTLED:])
        for name, values in {"step": times, "ideal": ideals, "compute": slowest}.items()
    }


def unequal(parts: list[float], setting: dict, rounds: int, steps: int) -> None:
    found: dict[tuple[str, str], list[dict]] = {}
    with (
        Quotas(len(parts)) as quotas,
        WorkerPool(len(parts), env=_THREADS, timeout_seconds=600) as pool,
        input_service() as service,
    ):
        setting = {**setting, "service": service}
        for way in _WAYS:  # to trace and warm up
            pool.run(train, way, 3, True, weights=parts, **setting)
        quotas.take(pool.run(os.getpid))
        for _ in range(rounds):
            for way in _WAYS:
                for phase, now in (("start", parts), ("change", [*parts[1:], parts[0]])):
                    quotas.set(now)
                    results = pool.run(train, way, steps, phase == "start", weights=now, **setting)
                    found.setdefault((way, phase), []).append(settled(results[0]))
                quotas.set([None] * len(parts))
    print(f"\nWorkers that get {parts} of a core, in turn; steps {_SETTLED} and on after the start and the change.\n")
    print(
        "| shares | step, ms | computes, ms (slowest) | ideal, ms | computes / ideal | step / ideal | step / oracle's |"
    )
    print("|---|---|---|---|---|---|---|")
    for phase in ("start", "change"):
        oracle = statistics.median(each["step"] for each in found["oracle", phase])
        for way in _WAYS:
            step, compute, ideal = (
                statistics.median(each[name] for each in found[way, phase]) for name in ("step", "compute", "ideal")
            )
            cells = [f"{1e3 * seconds:.0f}" for seconds in (step, compute, ideal)]
            cells += [f"{ratio:.2f}" for ratio in (compute / ideal, step / ideal, step / oracle)]
            print(f"| {way}, {phase} | {' | '.join(cells)} |")


def equal(workers: int, setting: dict, rounds: int, steps: int) -> None:
    """Compares balanced shares with TensorFlow's sharding on workers without quotas."""
    ratios, changes, traces = [], [], 0
    with WorkerPool(workers, env=_THREADS, timeout_seconds=600) as pool:
        setting = {**setting, "service": None, "weights": [1.0] * workers}
        for way in ("DATA", "speed"):
            pool.run(train, way, 3, True, **setting)
        before = pool.run(train, "speed", 3, False, **setting)[0][2]
        for number in range(2 * rounds):
            medians = {}
            for way in ("DATA", "speed") if number % 2 else ("speed", "DATA"):
                times, by_replica, traces = pool.run(train, way, steps, False, **setting)[0]
                medians[way] = statistics.median(times)
                if way == "speed":
                    rows = [rows for rows, _ in by_replica]
                    changes.append(sum(a != b for a, b in itertools.pairwise(rows)))
            ratios.append(medians["speed"] / medians["DATA"])
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    print(
        f"\n{workers} equal workers, last step {1e3 * medians['speed']:.1f} ms: balanced / DATA {middle:.3f} "
        f"[{low:.3f} to {high:.3f}, of {len(ratios)}]; changes of shares in {steps} steps: {changes}; "
        f"traces after the first: {traces - before}"
    )


def planning(replicas: int, rows: int, steps: int = 500) -> None:
    """Measures the time per step to plan batches, assign rows and decide shares, without TensorFlow."""
    from tfdist.data.batch_assignment import BatchAssignment
    from tfdist.data.batch_plan import BatchPlan, split
    from tfdist.data.example_order import Shuffled
    from tfdist.data.replica_speed import SpeedModel
    from tfdist.data.topology import ReplicaTopology

    shares, at_most = split(rows, [1] * replicas), [rows] * replicas
    plan, model = BatchPlan(steps * rows, rows, Shuffled(steps * rows, 0)), SpeedModel(replicas)
    place = ReplicaTopology(replicas, range(1), tuple(range(replicas)), tuple(at_most))
    handout = BatchAssignment(plan, 0, 0, shares, place, repeat=False, lead=4)
    batches = handout.batches()
    rng = np.random.default_rng(0)
    start = time.thread_time()
    for _ in range(steps):
        next(batches)
        handout.has_trained(np.asarray(shares))
        model.observe(shares, 0.1 + 0.01 * rng.random(replicas))
        if handout.may_change():
            model.proposal(shares, at_most)
        handout.decide(shares)
    print(
        f"\nPlanning, handing out and deciding: {1e6 * (time.thread_time() - start) / steps:.0f} us a step.", flush=True
    )


def main(_) -> None:
    parts = [float(part) for part in FLAGS.parts]
    steps = 25 if FLAGS.quick and not FLAGS["steps"].present else FLAGS.steps
    rows = 240 if FLAGS.quick and not FLAGS["rows"].present else FLAGS.rows
    setting = {"rows": rows, "filters": FLAGS.filters}
    print(f"{setting}, {steps} steps, {FLAGS.rounds} rounds, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    planning(len(parts), rows)
    unequal(parts, setting, FLAGS.rounds, steps)
    equal(2, setting, FLAGS.rounds, steps)


if __name__ == "__main__":
    app.run(main)
