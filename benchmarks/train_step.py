"""Measures time and traffic of a training step with tfdist and its alternatives, over links of known rate.

    python -m benchmarks.train_step --quick                    # one model on one link, under 10 minutes on 2 cores
    python -m benchmarks.train_step --json benchmarks/results/train_step.json       # everything, some hours;
                                                                                    # continues an earlier run
    python -m benchmarks.train_step --models mlp --links 100mbit,1gbit --variants stock,tfdist-loop
    python -m benchmarks.train_step --quick --other_packages /tmp/other       # tfdist before and after a change
    python -m benchmarks.train_step --quick --other_environment OMP_NUM_THREADS=2   # and with an environment variable

By default there are 2 and 4 workers, and links of 100mbit, 1gbit and unshaped ones. Workers are processes on hosts of
`benchmarks.netlab`, which needs root; `--nolab` uses loopback instead. All variants
train the same models on the same batches with equal numbers of threads:

    tf_keras     Keras 2 `fit` under TensorFlow's MultiWorkerMirroredStrategy
    stock        a custom loop with Keras 3 under TensorFlow's MultiWorkerMirroredStrategy
    tfdist-loop  the same loop under tfdist.MultiWorkerMirroredStrategy
    tfdist       Keras 3 `fit` under tfdist.MultiWorkerMirroredStrategy; tfdist+<codec> with compression
    tfdist-auto  the same with compression="auto", once it has chosen; its model begins anew on each link
    ddp          PyTorch DistributedDataParallel on gloo; ddp+<hook> with a communication hook

With `--other_packages DIR` each variant of tfdist is measured once more, as `other-<variant>`, with the packages in
DIR: another commit of tfdist (`pip install --no-deps --target DIR <checkout>`) or another version of Keras. With
`--other_environment NAME=VALUE` each is measured once more with this environment variable, as `env-<variant>`.

As many variants as fit into memory stay alive together and take turns in random order, block by block, so that a drift
of the machine affects all alike. Unless `--variants` leaves it out, `stock` is always one of them, and the others are
compared with it in each round. In each turn the workers also train at the same time without an exchange; this is the
"compute" time. The rest of a step is "waiting", a codec's work included. Bytes are those of the network interfaces.
"""

import contextlib
import dataclasses
import importlib.util
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

import rich.console
import rich.table
import rich.text
from absl import app, flags

from benchmarks.choices import LOOPBACK, chosen, chosen_links, chosen_path, chosen_workers
from benchmarks.models import MODELS
from benchmarks.netlab import Netlab, end_on_signals, why_not
from benchmarks.peers.group import THREADS
from benchmarks.record import Record
from benchmarks.report import COLUMNS, KEY, Row, cells, in_order, notes
from benchmarks.turns import Log, Network, Plan, Variant, measure

FLAGS = flags.FLAGS
flags.DEFINE_bool("quick", False, "The mlp on 2 workers at 1 Gbit/s, unless other flags say otherwise.")
flags.DEFINE_list("models", None, f"Some of {', '.join(MODELS)}; all by default.")
flags.DEFINE_list("codecs", None, "Codecs of tfdist; all by default, a few with --quick.")
flags.DEFINE_integer("starts", 1, "Starts of all processes; two starts of the same program can differ by 5 %.", 1)
flags.DEFINE_string("other_packages", None, "A folder of packages with which tfdist is measured once more.")
flags.DEFINE_list("other_environment", [], "Variables NAME=VALUE with which tfdist is measured once more.")

_QUICK_CODECS = ("float16", "int8", "powersgd(4)")
_ROOT = pathlib.Path(__file__).parents[1]


def make_variants(codecs: Sequence[str]) -> dict[str, Variant]:
    """All variants, by name."""
    loops = {"stock": "tensorflow", "tfdist-loop": "tfdist"}
    hooks = ("fp16", "bf16", "powersgd")
    return {
        **{name: Variant("keras_loop", {"library": library}) for name, library in loops.items()},
        "tf_keras": Variant("keras2_fit"),
        "tfdist": Variant("keras_fit"),
        **{f"tfdist+{codec}": Variant("keras_fit", {"compression": codec}) for codec in codecs},
        "tfdist-auto": Variant("keras_fit", {"compression": "auto"}),
        "ddp": Variant("torch_ddp"),
        **{f"ddp+{hook}": Variant("torch_ddp", {"hook": hook}) for hook in hooks},
        # On gloo the hook can abort if several buckets, with messages of several sizes each, travel at once.
        "ddp+powersgd-1-bucket": Variant("torch_ddp", {"hook": "powersgd", "bucket_megabytes": 1000}),
    }


def with_others(variants: dict[str, Variant], folder: str | None, settings: Sequence[str]) -> dict[str, Variant]:
    """Adds the variants of tfdist once more, with other packages or with other environment variables.

    Args:
      variants: Variants by name.
      folder: A folder of packages for variants `other-<name>`; None to leave them out.
      settings: Environment variables NAME=VALUE for variants `env-<name>`; empty to leave them out.

    Raises:
      UsageError: If the folder does not exist, or if a setting has no name or no `=`.
    """
    if folder is not None and not pathlib.Path(folder).is_dir():
        raise app.UsageError(f"--other_packages takes a folder made by `pip install --target`, got {folder}.")
    if wrong := [each for each in settings if each.find("=") < 1]:
        raise app.UsageError(f"--other_environment takes NAME=VALUE, got {', '.join(wrong)}.")
    ours = {name: each for name, each in variants.items() if "tfdist" in name}
    found = dict(variants)
    if folder is not None:
        path = str(pathlib.Path(folder).absolute())
        found |= {f"other-{name}": dataclasses.replace(each, packages=path) for name, each in ours.items()}
    if settings:
        environment = dict(each.split("=", 1) for each in settings)
        found |= {f"env-{name}": dataclasses.replace(each, environment=environment) for name, each in ours.items()}
    return found


def available_codecs() -> list[str]:
    """All values to use for `compression=`, read in a separate process because reading them loads TensorFlow."""
    if importlib.util.find_spec("tfdist.compression") is None:
        return []
    code = "from tfdist.strategies.compression import NAMES; print(*NAMES)"
    done = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"The codecs of tfdist cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    return [*done.stdout.split(), "powersgd(4)"]


def print_table(rows: Sequence[Row]) -> None:
    table = rich.table.Table(*COLUMNS)
    for row in rows:
        table.add_row(*(rich.text.Text(cell) for cell in cells(row)), end_section=row is rows[-1])
    console = rich.console.Console(width=180)
    console.print(table)
    for note in notes(rows):
        console.print(note, markup=False, highlight=False)


def main(arguments: Sequence[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"Only flags are taken, got {' '.join(arguments[1:])}.")
    quick = FLAGS.quick
    workers = chosen_workers(["2"] if quick else ["2", "4"])
    links, path = chosen_links(["1gbit"] if quick else ["100mbit", "1gbit", "unshaped"]), chosen_path()
    codecs = available_codecs() if FLAGS.codecs != [] else []
    if unknown := [name for name in FLAGS.codecs or [] if name not in codecs]:
        raise app.UsageError(f"--codecs takes {', '.join(codecs)}; got {', '.join(unknown)}.")
    few = _QUICK_CODECS if quick else codecs
    others = (FLAGS.other_packages, FLAGS.other_environment)
    everyone = with_others(make_variants(codecs), *others)
    default = with_others(make_variants(few if FLAGS.codecs is None else FLAGS.codecs), *others)
    names = chosen("variants", list(everyone), list(default))
    models = chosen("models", list(MODELS), ["mlp"] if quick else list(MODELS))
    plan = Plan(FLAGS.steps, FLAGS.seconds, FLAGS.rounds, FLAGS.starts)
    if not FLAGS.nolab and (why := why_not()):
        sys.exit(f"{why}\nOr use --nolab to measure over loopback, without links of known rate.")
    settings = {**dataclasses.asdict(plan), **THREADS, "network": LOOPBACK if FLAGS.nolab else "netlab"}
    if FLAGS.other_packages:
        settings["other_packages"] = FLAGS.other_packages
    if FLAGS.other_environment:
        settings["other_environment"] = FLAGS.other_environment
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
