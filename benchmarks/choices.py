"""The flags that benchmarks of steps share: workers, links, variants, how much to measure, and the file of the results.

A benchmark reads them with the functions below, which refuse values that have no meaning before any work begins.
"""

import pathlib
from collections.abc import Sequence

from absl import app, flags

from benchmarks.netlab import MAX_HOSTS, parse_rate
from benchmarks.record import check_writable
from benchmarks.turns import WORKER_BYTES, alive

FLAGS = flags.FLAGS
flags.DEFINE_list("workers", None, f"Numbers of workers, 2 to {MAX_HOSTS}.")
flags.DEFINE_list("links", None, "Rates such as 100mbit, or unshaped (also none).")
flags.DEFINE_list("variants", None, "Variants to measure; all by default.")
flags.DEFINE_integer("steps", 20, "Largest number of steps in a block.", 3)
flags.DEFINE_float(
    "seconds", 4.0, "Intended duration of a block; with slow steps it is longer, since it has at least 3 steps.", 0.0
)
flags.DEFINE_integer("rounds", 3, "Blocks of each variant in one start.", 1)
flags.DEFINE_bool("nolab", False, "Use loopback: needs no root, but has no link of known rate.")
flags.DEFINE_string("json", None, "A file for the results, for `benchmarks.report`.")

LOOPBACK = "loopback, not shaped"


def chosen(flag: str, known: Sequence[str], default: Sequence[str]) -> list[str]:
    """The names that a list flag chooses.

    Raises:
      app.UsageError: If a name is unknown, or the list is empty.
    """
    names = FLAGS[flag].value
    if names == []:
        raise app.UsageError(f"--{flag} takes {', '.join(known)}; got nothing. Leave it out for the default.")
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        raise app.UsageError(f"--{flag} takes {', '.join(known)}; got {', '.join(unknown)}.")
    return list(default) if names is None else list(names)


def chosen_workers(default: Sequence[str], worker_bytes: float = WORKER_BYTES) -> list[int]:
    """The numbers of workers that --workers chooses, if a worker needs `worker_bytes` of memory.

    Raises:
      app.UsageError: If a number is out of range.
    """
    given = default if FLAGS.workers is None else FLAGS.workers
    fitting = alive(worker_bytes)
    workers = [int(number) if number.isdecimal() else 0 for number in given]
    if not workers or not 2 <= min(workers) <= max(workers) <= MAX_HOSTS:
        raise app.UsageError(f"--workers takes numbers from 2 to {MAX_HOSTS}, got {','.join(given) or 'nothing'}.")
    if max(workers) > fitting:
        raise app.UsageError(f"--workers takes as many as free memory holds, {fitting} here, got {max(workers)}.")
    return workers


def chosen_links(default: Sequence[str]) -> list[str]:
    """The links that --links chooses.

    Raises:
      app.UsageError: If an entry is not a rate, or the list is empty.
    """
    if FLAGS.nolab and FLAGS.links is not None:
        raise app.UsageError("--links needs the lab, and --nolab does without: leave one of them out.")
    if FLAGS.nolab:
        return [LOOPBACK]
    links = default if FLAGS.links is None else FLAGS.links
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
