"""Measurements of `tfdist bench`: the time in which workers sum a gradient, by size of the gradient and by codec.

All workers run the same exchanges in the same order. They first agree through the strategy on each decision that
depends on a clock or on memory: if one worker repeated an exchange less often, its peers would wait forever.
"""

import dataclasses
import math
import os
import pathlib
import platform
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import keras
import numpy as np
import rich.console
import rich.table
import rich.text
import tensorflow as tf
from absl import logging

import tfdist
from tfdist.cluster import ClusterSpec
from tfdist.errors import ClusterError
from tfdist.launch.arguments import BINARY, DECIMAL
from tfdist.launch.memory_limit import free_memory
from tfdist.launch.run_summary import named
from tfdist.strategies.compression import NAMES
from tfdist.strategies.compression_policy import policy_of
from tfdist.strategies.compression_state import TrafficTotals
from tfdist.strategies.reduction_request import ReductionRequest
from tfdist.strategies.step import current_step

_GRACE_SECONDS = 5.0  # Lets the chief, which has the results, end first.
_LONGEST_SECONDS = 1e6
_LEAST_REPETITIONS, _MOST_REPETITIONS = 3, 50
COMPRESSIONS = ("none", *NAMES)
# From the exact exchange to codecs that defer most to later steps. The first of about equally fast codecs is advised.
_BY_LOSS = ("none", "float16", "bfloat16", "int8", "int4", "powersgd", "topk", "sign")
_ABOUT = 1.1


@dataclasses.dataclass(frozen=True)
class BenchPlan:
    """Plan of the measurements of `tfdist bench`: which tensor sizes and codecs, for how long.

    Attributes:
      sizes: Bytes of the float32 tensor on each replica: multiples of 4, ascending. Equal on all workers.
      compressions: Names of codecs, "none" for no codec; None for "none" and all codecs. Equal on all workers.
      seconds: Time limit for one size with one codec, unless 3 repetitions take longer. The chief's value applies.
      deadline: End of all measurements, in the time of `time.monotonic()`. The chief's value applies.
    """

    sizes: tuple[int, ...]
    compressions: tuple[str, ...] | None
    seconds: float
    deadline: float


@dataclasses.dataclass(frozen=True)
class ModelExchange:
    """A model and a network for which `tfdist bench` predicts the time of the gradient exchange.

    Attributes:
      parameters: Number of float32 parameters of the model.
      compute_ms: Time of a step without an exchange, in milliseconds, or None if unknown.
      link: Bits per second that a worker can send, or None to predict for the measured network.
    """

    parameters: int
    compute_ms: float | None = None
    link: float | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """A row in the results of `tfdist bench`: the exchanges of one size with one codec, as timed by this worker.

    Attributes:
      compression: Name of the codec, or "none".
      size: Bytes of the tensor on each replica.
      replicas: Number of replicas.
      times: Seconds of each repetition. Empty if the row was skipped.
      skipped: Reason why the row was skipped.
      sent_bytes: Bytes that this worker sent per exchange.
    """

    compression: str
    size: int
    replicas: int
    times: tuple[float, ...] = ()
    skipped: str = ""
    sent_bytes: float = 0.0

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The lower quartile, median and upper quartile of the times of the exchanges, in seconds."""
        low, middle, high = statistics.quantiles(self.times, n=4, method="inclusive")
        return low, middle, high

    @property
    def median(self) -> float:
        """The median time of the exchanges, in seconds."""
        return self.quartiles[1]

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the summed tensor per second of the median exchange."""
        return self.size / self.median

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second that a link carries in each direction, if replicas send no more than necessary.

        In an all-reduce of S bytes over N replicas, each replica must send 2(N-1)/N S. This rate is comparable between
        rows with different N and with the link; see NCCL tests,
        https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. With a codec, it is the rate of a link that
        would be as fast without the codec.
        """
        return self.algorithm_bandwidth * 2 * (self.replicas - 1) / self.replicas

    def describe(self) -> str:
        """Describes the times of one size with one codec in one line, for the log of `tfdist bench`."""
        what = f"{self.compression}, {_show_bytes(self.size)}: "
        if self.skipped:
            return what + f"skipped, {self.skipped}"
        return what + f"{_ms(self.median)} ms, median of {len(self.times)}"

    def to_json(self) -> dict:
        """Returns the times of one size with one codec for JSON, with units in the names; none if it was skipped."""
        told = {"compression": self.compression, "bytes": self.size, "skipped": self.skipped or None}
        if self.skipped:
            return told
        low, middle, high = self.quartiles
        return told | {
            "repetitions": len(self.times),
            "seconds": {"median": middle, "low": low, "high": high},
            "sent_bytes": round(self.sent_bytes),
            "algorithm_bytes_per_second": self.algorithm_bandwidth,
            "bus_bytes_per_second": self.bus_bandwidth,
        }


def exchange(strategy: tf.distribute.Strategy, optimizer: keras.optimizers.Optimizer, tensor):
    """Sums `tensor` over all replicas, like a gradient of `optimizer`: the exchange that `tfdist bench` times."""

    def on_replica(value):
        request = ReductionRequest(tf.distribute.ReduceOp.SUM, [value], optimizer)
        (total,) = strategy.extended.reducer.reduce(request, current_step())
        return total

    return strategy.run(on_replica, args=(tensor,))


def measure(plan: BenchPlan, spec: ClusterSpec, end_in: Callable[[float], None]) -> Iterator[Row]:
    """Measures the exchange for each codec and size. All workers must call it with the same sizes and codecs.

    Args:
      plan: Plan of the measurements.
      spec: The cluster.
      end_in: Called on each worker except the chief once all have joined, with the chief's remaining seconds plus 5.

    Raises:
      ClusterError: If the workers were started with unequal plans, or a sum is wrong.
    """
    for name in plan.compressions or COMPRESSIONS:
        # The strategy's messages name missing workers and this time. The timer of `bench_command` reports its end.
        seconds = min(_LONGEST_SECONDS, max(0.0, plan.deadline - time.monotonic()) + 1)
        strategy = tfdist.MultiWorkerMirroredStrategy(
            compression=None if name == "none" else name,
            fault_tolerance=tfdist.FaultTolerance(start_timeout_seconds=seconds),
        )
        _check_equal(plan, strategy)
        left = strategy.extended.of_all_workers(math.ceil(plan.deadline - time.monotonic()))[0]
        if not spec.is_chief:
            end_in(max(0, left) + _GRACE_SECONDS)
        rows: list[Row] = []
        for size in plan.sizes:
            reason = _reason_to_skip(size, name, rows, plan, strategy, spec)
            before = strategy.communication.traffic() if strategy.communication else None
            times = () if reason else _time_exchanges(size, name, plan.seconds, strategy)
            sent = _sent_bytes(size, before, strategy)
            rows.append(Row(name, size, strategy.num_replicas_in_sync, times, reason, sent))
            yield rows[-1]


def _sent_bytes(size: int, before: TrafficTotals | None, strategy: tf.distribute.Strategy) -> float:
    """Returns the bytes that this worker sent per exchange since `before`, or must send without a codec."""
    if before is not None:
        return (strategy.communication.traffic() - before).sent_bytes_per_step
    replicas = strategy.num_replicas_in_sync
    return size * len(strategy.extended.worker_devices) * 2 * (replicas - 1) / replicas


def _check_equal(plan: BenchPlan, strategy: tf.distribute.Strategy) -> None:
    digests = strategy.extended.of_all_workers(zlib.crc32(repr((plan.sizes, plan.compressions)).encode()))
    others = [worker for worker, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise ClusterError(
            f"All workers need the same --sizes and --compression, but {named(others)} got other values than the "
            f"chief. Start the same command on every host."
        )


def _reason_to_skip(
    size: int, name: str, rows: Sequence[Row], plan: BenchPlan, strategy: tf.distribute.Strategy, spec: ClusterSpec
) -> str:
    """Returns why all workers skip this tensor size with this codec, or an empty string if they measure it."""
    policy = policy_of(None if name == "none" else name)
    if policy and policy(tf.TensorShape(_shape(size)), tf.float32, "") is None:
        return f"{name} does not compress a tensor of {' x '.join(map(str, _shape(size)))}"
    rooms = strategy.extended.of_all_workers(_room(strategy, spec))
    small = [worker for worker, room in enumerate(rooms) if size > room]
    if small:
        return f"it exceeds an eighth of the free memory of {named(small)}, {_show_bytes(min(rooms))} a replica"
    known = [row for row in rows if row.times]
    seconds = predict(known, size) * (_LEAST_REPETITIONS + 1) + plan.seconds if len(known) > 1 else 0.0
    is_late = time.monotonic() + seconds > plan.deadline
    return "--timeout does not leave enough time for it" if strategy.extended.of_all_workers(int(is_late))[0] else ""


def _room(strategy: tf.distribute.Strategy, spec: ClusterSpec) -> int:
    """Returns the most bytes of a tensor that memory allows. Sum, residuals and buffers need 5 to 8 times as much."""
    replicas_here = len(spec.workers_on_host) * len(strategy.extended.worker_devices)
    return max(0, free_memory()) // 8 // replicas_here


def _time_exchanges(size: int, name: str, seconds: float, strategy: tf.distribute.Strategy) -> tuple[float, ...]:
    """Returns the seconds of each exchange of a tensor, after a first exchange that is checked and not counted."""
    devices, replicas = strategy.extended.worker_devices, strategy.num_replicas_in_sync
    with strategy.scope():
        optimizer = keras.optimizers.SGD()

    def make(context):
        replica = context.replica_id_in_sync_group
        with tf.device(devices[replica % len(devices)]):
            return tf.fill(_shape(size), float(replica + 1))

    @tf.function
    def step(tensor):
        total = exchange(strategy, optimizer, tensor)
        return total, strategy.run(lambda value: value[-1, -1], args=(total,))

    def timed(check: bool = False) -> float:
        start = time.perf_counter()
        total, last = step(tensor)
        for element in strategy.experimental_local_results(last):
            element.numpy()  # Reading a GPU's result waits for it.
        seconds = time.perf_counter() - start
        if check:
            for local in strategy.experimental_local_results(total):
                check_sum(local, replicas, exact=name == "none")
        return seconds

    tensor = strategy.experimental_distribute_values_from_function(make)
    timed(check=True)
    times = [timed()]
    repetitions = min(max(int(seconds / times[0]), _LEAST_REPETITIONS), _MOST_REPETITIONS)
    repetitions = strategy.extended.of_all_workers(repetitions)[0]
    return (*times, *(timed() for _ in range(repetitions - 1)))


def _shape(size: int) -> list[int]:
    """Returns a float32 shape of `size` bytes, as close to square as possible, because PowerSGD compresses matrices."""
    elements = size // tf.float32.size
    rows = next(rows for rows in range(math.isqrt(elements), 0, -1) if elements % rows == 0)
    return [rows, elements // rows]


def check_sum(total: tf.Tensor, replicas: int, *, exact: bool) -> None:
    """Checks the sum of the replicas' tensors, which are filled with 1, 2, ... .

    Args:
      total: The received sum, of any shape.
      replicas: Number of replicas.
      exact: Whether every element must be correct, as without a codec. A codec may send a part of the sum later, but
        all received values must be finite.

    Raises:
      ClusterError: If the sum is wrong.
    """
    low, high, right = float(tf.reduce_min(total)), float(tf.reduce_max(total)), replicas * (replicas + 1) / 2
    if not (math.isfinite(low) and math.isfinite(high)) or (exact and (low, high) != (right, right)):
        raise ClusterError(
            f"The sum over {replicas} replicas must be {right:g} in each of {tf.size(total).numpy()} elements, but "
            f"its elements are {low:g} to {high:g}. Check that all workers run the same versions of TensorFlow and "
            f"tfdist, and that no other job uses the addresses in TF_CONFIG."
        )


def predict(rows: Sequence[Row], size: int) -> float:
    """Predicts the seconds of an exchange of a size not measured, by linear interpolation between measured sizes.

    Below the smallest size, the time is constant. Beyond the largest size, extrapolates the line through the last two.

    Args:
      rows: Rows of one codec that were not skipped, at least one, in ascending order of size.
      size: Bytes of the tensor.
    """
    sizes, times = [row.size for row in rows], [row.median for row in rows]
    if size <= sizes[-1]:
        return float(np.interp(size, sizes, times))
    rise = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]) if len(rows) > 1 else 0.0
    if rise <= 0:  # One row, or noise.
        rise = times[-1] / sizes[-1]
    return times[-1] + rise * (size - sizes[-1])


def _expectations(rows: Sequence[Row], model: ModelExchange) -> list[dict]:
    """Returns the latency and the predicted times of a model's exchange and step for each codec."""
    size, expectations = model.parameters * tf.float32.size, []
    for name in dict.fromkeys(row.compression for row in rows if row.times):
        own = [row for row in rows if row.compression == name and row.times]
        seconds = predict(own, size)
        expectation = {
            "compression": name,
            "latency_seconds": own[0].median,
            "latency_bytes": own[0].size,
            "parameters": model.parameters,
            "exchange_seconds": seconds,
            "beyond_largest_size": size > own[-1].size,
            "sent_bytes": round(own[-1].sent_bytes * size / own[-1].size),
        }
        if model.link is not None:
            # Adds the time on the link to the measured time. Overlapping coding and sending would be faster.
            seconds += expectation["sent_bytes"] * 8 / model.link
            expectation |= {"link_bits_per_second": model.link, "link_exchange_seconds": seconds}
        if model.compute_ms is not None:
            compute = model.compute_ms / 1e3
            # Low: computation and exchange overlap completely. High: they do not overlap.
            expectation["step_seconds"] = {"low": max(compute, seconds), "high": compute + seconds}
        expectations.append(expectation)
    return expectations


def report(rows: Sequence[Row], spec: ClusterSpec, command: str, model: ModelExchange) -> dict:
    """Returns all results of `tfdist bench` for JSON, with the machine, the versions and the user's command line."""
    cpus = [line for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "machine": {
            "cpu": cpus[0].partition(":")[2].strip() if cpus else platform.machine(),
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
            "gpus": len(tf.config.list_physical_devices("GPU")),
        },
        "versions": {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "tfdist": tfdist.__version__,
        },
        "command": command,
        "cluster": spec.to_tf_config()["cluster"],
        "workers": spec.num_workers,
        "replicas": rows[0].replicas,
        "rows": [row.to_json() for row in rows],
        "expectations": (expectations := _expectations(rows, model)),
        "recommended": recommendation(expectations),
    }


def recommendation(expectations: Sequence[Mapping]) -> str | None:
    """Returns the codec with the shortest step on the link, by `_BY_LOSS` among near ones; None without a link."""
    costs = {
        each["compression"]: each["step_seconds"]["high"] if "step_seconds" in each else each["link_exchange_seconds"]
        for each in expectations
        if "link_exchange_seconds" in each
    }
    near = [name for name, cost in costs.items() if cost <= _ABOUT * min(costs.values())]
    by_loss = [*_BY_LOSS, *near]
    return min(near, key=by_loss.index) if near else None


def print_tables(rows: Sequence[Row], expectations: Sequence[Mapping]) -> None:
    """Prints the measured times of `tfdist bench`, and the predictions for a model from the result of `report`."""
    console = rich.console.Console()
    table = _table(
        f"All-reduce of float32 over {rows[0].replicas} replicas",
        ("codec", "size", "median\nms", "quartiles\nms", "algorithm\nGbit/s", "bus\nGbit/s", "times"),
    )
    for row in rows:
        cells = [row.compression, _show_bytes(row.size)]
        if row.times:
            low, middle, high = row.quartiles
            rates = (f"{rate * 8 / 1e9:.3f}" for rate in (row.algorithm_bandwidth, row.bus_bandwidth))
            cells += [_ms(middle), f"{_ms(low)} to {_ms(high)}", *rates, str(len(row.times))]
        table.add_row(*map(rich.text.Text, cells))
    table.caption = (
        "algorithm: bytes of the tensor divided by the median time; bus: rate on a link in each direction, 2(N-1)/N "
        "of the algorithm's; times: number of timed exchanges."
    )
    console.print(table)
    for row in rows:
        if row.skipped:
            console.print(rich.text.Text(row.describe()))
    if expectations:
        console.print(_expectation_table(expectations))
    if name := recommendation(expectations):
        advice = "no compression" if name == "none" else f"compression={name!r}"
        rate = _show_rate(expectations[0]["link_bits_per_second"])
        console.print(rich.text.Text(f"Recommended for workers on links of {rate}: {advice}."))


def _expectation_table(expectations: Sequence[Mapping]) -> rich.table.Table:
    first = expectations[0]
    columns = ["codec", "latency,\nms (of)", "exchange\nms", "MB sent"]
    notes = ["latency: time of the smallest tensor; exchange: time of all gradients, on this network"]
    if "link_exchange_seconds" in first:
        columns += [f"ms on\n{_show_rate(first['link_bits_per_second'])}"]
        notes += ["on the link: the same, plus the time to send the bytes over it"]
    if "step_seconds" in first:
        columns += ["step ms,\nall overlapped", "step ms,\nnone overlapped"]
        notes += ["step: time with --compute-ms, if all or nothing of the exchange overlaps with it"]
    table = _table(f"Expected for {first['parameters'] / 1e6:g} M parameters", columns)
    for expectation in expectations:
        step = expectation.get("step_seconds", {})
        latency = f"{_ms(expectation['latency_seconds'])} ({_show_bytes(expectation['latency_bytes'])})"
        on_link = [expectation["link_exchange_seconds"]] if "link_exchange_seconds" in expectation else []
        here, sent = _ms(expectation["exchange_seconds"]), f"{expectation['sent_bytes'] / 1e6:.4g}"
        cells = (expectation["compression"], latency, here, sent, *map(_ms, (*on_link, *step.values())))
        table.add_row(*map(rich.text.Text, cells))
    if any(expectation["beyond_largest_size"] for expectation in expectations):
        notes += ["the gradients exceed the largest measured size, so the times are extrapolated"]
    table.caption = "; ".join(notes) + "."
    return table


def _table(title: str, columns: Sequence[str]) -> rich.table.Table:
    table = rich.table.Table(title=title, title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == "codec" else "right")
    return table


def measure_aloud(
    plan: BenchPlan, spec: ClusterSpec, keep: Callable[[Row], None], end_in: Callable[[float], None]
) -> None:
    """Runs `measure`, keeps the result of each size and codec at once, and logs it on the chief.

    Raises:
      ClusterError: As in `measure`, and if an exchange fails.
    """
    tf.get_logger().setLevel("WARNING")  # Otherwise each strategy logs its devices.
    if not spec.is_chief:
        logging.info("%s takes part in the measurement; the chief prints the results", spec.describe())
    try:
        for row in measure(plan, spec, end_in):
            keep(row)
            if spec.is_chief:
                logging.info("%s", row.describe())
    except tf.errors.OpError as error:
        reason = error.message.rpartition("\n\n")[2]  # The text after the source locations.
        raise ClusterError(
            f"An exchange failed on {spec.describe()}. It fails on all workers if one has ended or cannot be reached, "
            f"so see the output of the other workers. TensorFlow's error: {reason}"
        ) from error


def _show_bytes(size: int) -> str:
    """Formats a number of bytes, if possible in units in which the number is round: "64 KiB", "1 MB"."""
    shown = []
    for units in (BINARY, DECIMAL):
        unit, factor = max((each for each in units.items() if size >= each[1]), key=lambda each: each[1])
        number = f"{size / factor:.4g}"
        shown.append((float(number) * factor != size, len(number), f"{number} {unit}"))
    return min(shown, key=lambda each: each[:2])[2]


def _show_rate(bits_per_second: float) -> str:
    """Formats a rate: "100 Mbit/s"."""
    units = (("Gbit", 1e9), ("Mbit", 1e6), ("kbit", 1e3), ("bit", 1.0))
    unit, factor = next((each for each in units if bits_per_second >= each[1]), units[-1])
    return f"{bits_per_second / factor:.4g} {unit}/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"
