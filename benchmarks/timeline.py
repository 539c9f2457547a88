"""Shows when a worker computes and when it exchanges gradients within a training step of Keras' `fit`.

    python -m benchmarks.timeline                                    # int8, 2 workers at 1 Gbit/s; needs root
    python -m benchmarks.timeline --compression none --png step.png
    python -m benchmarks.timeline --nolab                            # over loopback, which needs no root

Trains the 10 M network of `benchmarks.models`. TensorFlow's profiler records a few steps on worker 0. The output shows
median milliseconds: of a step, of its backward pass, of its exchange of gradients, and of the time in which both
overlap. `--png` draws the median step.
"""

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable

import rich.console
import rich.table
from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_string("compression", "int8", "Compression of the strategy; none for uncompressed.")
flags.DEFINE_string("rate", "1gbit", "Rate of the links.")
flags.DEFINE_bool("nolab", False, "Use loopback instead of a network lab.")
flags.DEFINE_string("png", None, "A file for a picture of the median step.")

_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "1"}
_FOLDER, _WARMUP_STEPS, _STEPS, _DEADLINE_SECONDS = "TFDIST_TIMELINE", 12, 9, 300
# Kinds of operations, by parts of their names in the profile.
_KINDS = {
    "backward": ("gradient_tape/",),
    "forward": ("_MklNativeFusedMatMul",),
    "codec": ("fusion", "reduce-window"),
    "exchange": ("CollectiveGatherV2", "CollectiveReduceV2", "CollectiveAllToAllV2"),
    # Over connections of workers: the beginning of an exchange, and the delivery of its result.
    "begin": (":PyFuncStateless",),
    "delivery": ("EagerLocalExecute: QueueEnqueueV2",),
}
_COLOURS = {"backward": "tab:blue", "forward": "tab:cyan", "codec": "tab:orange", "exchange": "tab:green"}
Span = tuple[float, float]  # begin and end in ms


def main(_) -> None:
    with tempfile.TemporaryDirectory(prefix="timeline-") as folder:
        record(pathlib.Path(folder))
        steps = read_steps(pathlib.Path(folder))
    table = rich.table.Table(title=f"{FLAGS.compression}, {'loopback' if FLAGS.nolab else FLAGS.rate}: ms of a step")
    for column in ("step", "backward pass", "gradients on their way", "both at once"):
        table.add_column(column, justify="right")
    figures = [figures_of(step) for step in steps]
    table.add_row(*(f"{statistics.median(column):.0f}" for column in zip(*figures, strict=True)))
    rich.console.Console().print(table)
    if FLAGS.png:
        median = sorted(zip(figures, range(len(steps)), strict=True))[len(steps) // 2][1]
        draw(steps[median], FLAGS.png)


def record(folder: pathlib.Path) -> None:
    """Trains on two workers. The first writes a profile to `folder`."""
    from benchmarks.netlab import Netlab, end_on_signals
    from tfdist.cluster import free_ports

    end_on_signals()
    with contextlib.ExitStack() as stack:
        lab = None if FLAGS.nolab else stack.enter_context(Netlab(hosts=2, rate=FLAGS.rate))
        addresses = [host.address for host in lab.hosts] if lab else ["localhost"] * 2
        workers = [f"{address}:{port}" for address, port in zip(addresses, free_ports(2), strict=True)]
        processes = []
        for index in range(2):
            command = [sys.executable, "-m", "benchmarks.timeline", FLAGS.compression]
            config = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
            env = {**os.environ, **_THREADS, "TF_CONFIG": config, "TF_CPP_MIN_LOG_LEVEL": "2", _FOLDER: str(folder)}
            processes.append(subprocess.Popen(lab.hosts[index].command(command) if lab else command, env=env))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        if any([process.wait(_DEADLINE_SECONDS) for process in processes]):
            sys.exit("A worker failed. See its output above.")


def read_steps(folder: pathlib.Path) -> list[dict[str, list[Span]]]:
    """The spans of each kind of operation in each step, by kind."""
    # Not public, but the only reader of the files of the public profiler.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    (path,) = folder.rglob("*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    spans: dict[str, list[Span]] = {kind: [] for kind in ("step", *_KINDS)}
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                kind = _kind(plane.event_metadata[event.metadata_id].name)
                if kind is not None:
                    begin = line.timestamp_ns / 1e6 + event.offset_ps / 1e9
                    spans[kind].append((begin, begin + event.duration_ps / 1e9))
    begins, ends = (sorted(begin for begin, _ in spans.pop(kind)) for kind in ("begin", "delivery"))
    # Exchanges may overtake each other, which does not change the time in which any is on its way.
    spans["exchange"] += zip(begins, ends, strict=False)
    steps = sorted({(round(begin, 3), end) for begin, end in spans.pop("step")})[1:]  # the first finds nothing ready
    return [
        {kind: [span for span in own if step[0] <= span[0] < step[1]] for kind, own in spans.items()} for step in steps
    ]


def _kind(name: str) -> str | None:
    if name.startswith("EagerLocalExecute: __inference_multi_step_on_iterator"):
        return "step"
    return next((kind for kind, parts in _KINDS.items() if any(part in name for part in parts)), None)


def figures_of(step: dict[str, list[Span]]) -> tuple[float, float, float, float]:
    """Milliseconds of the step, of the backward pass, of the exchange, and of their overlap."""
    every = [span for own in step.values() for span in own]
    backward, exchange = union(step["backward"]), union(step["exchange"])
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in backward for b in exchange)
    length = max(end for _, end in every) - min(begin for begin, _ in every)
    return length, *(sum(end - begin for begin, end in own) for own in (backward, exchange)), both


def union(spans: Iterable[Span]) -> list[Span]:
    """Spans without overlap that cover the same time."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def draw(step: dict[str, list[Span]], path: str) -> None:
    """Draws one bar per kind of operation. Spans overlap where several operations run at once."""
    from matplotlib.figure import Figure

    start = min(begin for own in step.values() for begin, _ in own)
    figure = Figure(figsize=(9, 2.4), layout="constrained")
    axes = figure.add_subplot()
    for row, (kind, spans) in enumerate(reversed(step.items())):
        bars = [(begin - start, end - begin) for begin, end in spans]
        axes.broken_barh(bars, (row - 0.35, 0.7), color=_COLOURS[kind], alpha=0.6)
    axes.set_yticks(range(len(step)), list(reversed(step)))
    axes.set_xlabel(f"ms of a step; {FLAGS.compression}, {'loopback' if FLAGS.nolab else FLAGS.rate}")
    figure.savefig(path, dpi=120)


# The code below runs in the workers.


def train(folder: pathlib.Path, compression: str) -> None:
    import keras
    import tensorflow as tf

    import tfdist
    from benchmarks import models

    strategy = tfdist.MultiWorkerMirroredStrategy(compression=None if compression == "none" else compression)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = models.keras_model("mlp", keras)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=False)
    batch = models.make_batch("mlp", 0)
    rows = strategy.distribute_datasets_from_function(lambda _: tf.data.Dataset.from_tensors(batch).repeat())
    model.fit(rows, steps_per_epoch=_WARMUP_STEPS, verbose=0)
    if tfdist.cluster.is_chief():
        tf.profiler.experimental.start(str(folder))
    model.fit(rows, steps_per_epoch=_STEPS, verbose=0)
    if tfdist.cluster.is_chief():
        tf.profiler.experimental.stop()


if __name__ == "__main__":
    if _FOLDER in os.environ:
        train(pathlib.Path(os.environ[_FOLDER]), sys.argv[1])
    else:
        app.run(main)
