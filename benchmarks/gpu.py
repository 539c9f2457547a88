"""Measures codecs, the overhead of a strategy of one worker, and workers that share a GPU.

    python -m benchmarks.gpu                        # all parts; 150 s did not suffice for the transformer
    python -m benchmarks.gpu --parts codecs         # codecs, transformer, transformer_compiled or shared
    python -m benchmarks.gpu --device CPU:0 --elements 1048576 --layers 1 --batch_size 1    # tries the program

- codecs: GB of float32 per second of each codec for one row, as plain operations and compiled by XLA. For comparison, a
  multiplication reads and writes each byte once. Operations are queued one after another. The clock stops when the GPU
  has finished all of them.
- transformer: the time of a step of `fit` of a language model in mixed_bfloat16. It compares plain Keras with
  `tfdist.MirroredStrategy` and with TensorFlow's own on the same GPU. The models stay alive and take turns. A short and
  a long `fit` tell the time of a step apart from the time that a `fit` takes to start. "Keras again" is a second
  measurement of the first model in each round; its ratio is the accuracy. Tracing takes most of the time.
- transformer_compiled: the same with `jit_compile=True`.
- shared: the time of a step of two worker processes on the same GPU, with each codec. They exchange by gRPC, through
  the memory of the host, since NCCL refuses two processes on one GPU.
"""

import functools
import json
import math
import os
import pathlib
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator

# Must be set before TensorFlow starts: the parts share the GPU with worker processes.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import keras
import numpy as np
import rich.console
import rich.table
import tensorflow as tf
from absl import app, flags

import tfdist
from benchmarks.record import describe_run
from tfdist.strategies.compression import NAMES, Codec, PowerSGD
from tfdist.testing import WorkerPool

FLAGS = flags.FLAGS
PARTS = ("shared", "codecs", "transformer", "transformer_compiled")
flags.DEFINE_list("parts", list(PARTS), "The measurements to make.")
flags.DEFINE_string("device", "GPU:0", "The device to measure.")
flags.DEFINE_integer("elements", 100_000_000, "Elements of the row that codecs encode.", 1)
flags.DEFINE_integer(
    "repeats", 10, "Runs of each codec in a block; steps of a short `fit`. A long one has 5 times as many.", 1
)
flags.DEFINE_integer("rounds", 5, "Blocks of each measurement, of which the median counts.", 1)
flags.DEFINE_integer("layers", 12, "Layers of the language model; 12 have 100 M parameters with its embedding.", 1)
flags.DEFINE_integer("batch_size", 32, "Rows of 512 tokens in a step of the language model.", 1)
flags.DEFINE_float("bandwidth", None, "Bytes per second by the data sheet of the GPU; 3.35e12 for an H100 SXM.", 1)
flags.DEFINE_string("json", None, "A file for the results.")

_LENGTH, _WIDTH, _HEADS, _VOCABULARY = 512, 768, 12, 16384
# Codecs of which `moved_bytes` knows the bytes. The others need more than one pass over their input.
_COUNTED = ("float16", "bfloat16", "int8", "int4", "sign")


def seconds_of(call: Callable[[], object], repeats: int, rounds: int) -> float:
    """The median duration of one call, from blocks of calls that end when the device has finished."""
    times = []
    _finish(call())
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeats):
            result = call()
        _finish(result)
        times.append((time.perf_counter() - start) / repeats)
    return statistics.median(times)


def _finish(result: object) -> None:
    tf.reshape(tf.nest.flatten(result)[-1], [-1])[:1].numpy()


def measure_copy() -> float:
    """Bytes per second, read and written, of the fastest simple operation on the device."""
    with tf.device(FLAGS.device):
        values = tf.random.normal([FLAGS.elements])
        double = tf.function(lambda x: x * 2, jit_compile=True)
        return 8 * FLAGS.elements / seconds_of(lambda: double(values), FLAGS.repeats, FLAGS.rounds)


def codec_operations(codec: Codec, compiled: bool) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Yields the name of each operation of a codec, the elements that it processes, and a call that runs it."""

    def bind(fn, *args):
        traced = tf.function(fn, jit_compile=compiled, autograph=False)
        return lambda: traced(*args)

    if isinstance(codec, PowerSGD):
        side = math.isqrt(FLAGS.elements)
        matrix, q = tf.random.normal([side, side]), codec.start(side, 0)

        def factors(gradient, residual):
            intended = gradient + residual
            p = codec.orthonormalise(codec.project(intended, q))
            own_q = codec.back_project(intended, p)
            return p, own_q, intended - codec.decode(p, own_q)

        p, own_q, _ = factors(matrix, matrix)
        yield "compress", side**2, bind(factors, matrix, tf.random.normal([side, side]))
        yield "decode", side**2, bind(codec.decode, p, own_q)
        return
    elements = math.ceil(FLAGS.elements / codec.granule) * codec.granule
    values = tf.random.normal([1, elements])
    state = (tf.random.normal([1, elements], stddev=0.1),) * codec.states
    words = codec.encode(values)
    yield "compress", elements, bind(codec.compress, values, state)
    yield "decode", elements, bind(functools.partial(codec.decode, elements=elements), words)


def measure_codecs() -> list[dict]:
    copied = measure_copy()
    rows = [{"codec": "multiply (a read, a write)", "bytes_per_second": copied}]
    with tf.device(FLAGS.device):
        for name, make in NAMES.items():
            for compiled in (False, True):
                row = {"codec": name, "way": "compiled" if compiled else "plain operations"}
                for operation, elements, call in codec_operations(make(), compiled):
                    seconds = seconds_of(call, FLAGS.repeats, FLAGS.rounds)
                    row[operation] = 4e-9 * elements / seconds
                    row[f"{operation}_ms_per_100M"] = 1e11 * seconds / elements
                if name in _COUNTED:
                    moved = row["compress"] / 4 * moved_bytes(make()) * 1e9
                    row |= {"moved_bytes_per_second": moved, "of_multiplication": moved / copied}
                    if FLAGS.bandwidth:
                        row["of_data_sheet"] = moved / FLAGS.bandwidth
                rows.append(row)
                print(row, flush=True)
    return rows


def moved_bytes(codec: Codec) -> float:
    """Bytes per element that `compress` must move at least: it reads gradient and states, writes states and words.

    A second reading, for the codes after the scales, may find its input in the cache, so it does not count.
    """
    elements = 16 * codec.granule
    return 4 * (1 + codec.states) + 4 * codec.states + 4 * codec.words(elements) / elements


def language_model() -> keras.Model:
    """A causal transformer. Its parameters: 85 M in 12 layers, 12.6 M in each of two tables of the vocabulary."""
    layers = keras.layers
    inputs = layers.Input((_LENGTH,), dtype="int32")
    x = layers.Embedding(_VOCABULARY, _WIDTH)(inputs)
    for _ in range(FLAGS.layers):
        normal = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(_HEADS, _WIDTH // _HEADS)(normal, normal, use_causal_mask=True)])
        hidden = layers.Dense(4 * _WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(_WIDTH)(hidden)])
    return keras.Model(inputs, layers.Dense(_VOCABULARY, dtype="float32")(layers.LayerNormalization()(x)))


def make_training(strategy: tf.distribute.Strategy | None, jit_compile: bool) -> Callable[[int], float]:
    """Builds the model, and returns a function that trains a number of steps and returns the seconds that it took."""
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else tf.device(FLAGS.device):
        model = language_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=jit_compile)
    tokens = np.random.default_rng(0).integers(_VOCABULARY, size=(FLAGS.batch_size, _LENGTH + 1)).astype("int32")
    data = tf.data.Dataset.from_tensors((tokens[:, :-1], tokens[:, 1:])).repeat()

    def train(steps: int) -> float:
        start = time.perf_counter()
        model.fit(data, steps_per_epoch=steps, verbose=0)
        float(keras.ops.convert_to_numpy(model.trainable_variables[0])[0, 0])
        return time.perf_counter() - start

    train.parameters = model.count_params()
    return train


def step_and_start(train: Callable[[int], float]) -> tuple[float, float]:
    """The seconds of a step, and those of a `fit` without its steps, from a short and a long one."""
    few, many = FLAGS.repeats, 5 * FLAGS.repeats
    short, long = train(few), train(many)
    step = (long - short) / (many - few)
    return step, short - few * step


def measure_transformer(jit_compile: bool) -> list[dict]:
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    trainings = {}
    strategies = {"tfdist": tfdist.MirroredStrategy, "tf.distribute": tf.distribute.MirroredStrategy}
    for name, strategy in {"Keras": None, **{key: make([FLAGS.device]) for key, make in strategies.items()}}.items():
        start = time.perf_counter()
        trainings[name] = make_training(strategy, jit_compile)
        trainings[name](FLAGS.repeats)
        print(f"{name}: built, traced and trained a first block in {time.perf_counter() - start:.0f} s", flush=True)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in (*trainings, "Keras again")}
    for _ in range(FLAGS.rounds):
        for name, measured in times.items():
            measured.append(step_and_start(trainings[name.removesuffix(" again")]))
    rows = []
    for name, measured in times.items():
        steps, starts = zip(*measured, strict=True)
        ratios = [own / plain for own, (plain, _) in zip(steps, times["Keras"], strict=True)]
        row = {"training": name, "jit_compile": jit_compile, "parameters": trainings["Keras"].parameters}
        row |= {"step_ms": 1e3 * statistics.median(steps), "ratio": statistics.median(ratios)}
        row |= {"smallest_ratio": min(ratios), "largest_ratio": max(ratios)}
        row |= {"start_ms": 1e3 * statistics.median(starts)}
        rows.append(row)
        print(row, flush=True)
    keras.utils.clear_session()
    keras.mixed_precision.set_global_policy("float32")
    return rows


# The code below runs in the workers.


@functools.cache
def shared_strategy(codec: str | None) -> tf.distribute.Strategy:
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    return tfdist.MultiWorkerMirroredStrategy(communication_options=options, compression=codec)


def shared_block(codec: str | None, repeats: int, rounds: int) -> float:
    """Trains a dense network of 19 M parameters on this worker. Returns the median seconds of a step."""
    keras.utils.set_random_seed(0)
    with shared_strategy(codec).scope():
        model = keras.Sequential([keras.Input((1024,)), *[keras.layers.Dense(2048, "relu") for _ in range(5)]])
        model.compile("sgd", "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensors((np.ones([256, 1024], "float32"), np.ones([256, 2048], "float32"))).repeat()
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        model.fit(data, steps_per_epoch=repeats, verbose=0)
        times.append((time.perf_counter() - start) / repeats)
    return statistics.median(times[1:])


def measure_shared() -> list[dict]:
    rows = []
    with WorkerPool(2, timeout_seconds=300, env=_visible()) as pool:
        for codec in (None, *NAMES):
            seconds = max(pool.run(shared_block, codec, FLAGS.repeats, FLAGS.rounds))
            rows.append({"workers": 2, "codec": codec or "uncompressed", "step_ms": 1e3 * seconds})
            print(rows[-1], flush=True)
    return rows


def _visible() -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")} if "GPU" in FLAGS.device else {}


def describe_gpu() -> dict:
    """Name and driver of the card, and the versions for which TensorFlow was built; empty without a GPU."""
    if "GPU" not in FLAGS.device:
        return {}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    card = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
    build = tf.sysconfig.get_build_info()
    return {"card": card, "cuda": build.get("cuda_version"), "cudnn": build.get("cudnn_version")}


def print_tables(results: dict[str, list[dict]]) -> None:
    for part, rows in results.items():
        names = list(dict.fromkeys(name for row in rows for name in row))
        table = rich.table.Table(*names, title=part)
        for row in rows:
            table.add_row(*(_cell(row.get(name, "")) for name in names))
        rich.console.Console(width=160).print(table)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(_) -> None:
    measures = (measure_shared, measure_codecs, lambda: measure_transformer(False), lambda: measure_transformer(True))
    unknown = sorted(set(FLAGS.parts) - set(PARTS))
    if unknown:
        raise app.UsageError(f"--parts takes {', '.join(PARTS)}, got {', '.join(unknown)}.")
    # The workers start first, before this process takes memory of the GPU.
    results = {name: measure() for name, measure in zip(PARTS, measures, strict=True) if name in FLAGS.parts}
    machine = {**describe_run(), **describe_gpu()}
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    print_tables(results)
    if FLAGS.json:
        pathlib.Path(FLAGS.json).write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
