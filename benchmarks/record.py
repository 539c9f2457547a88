"""Files of results: rows, with what they were measured on, that survive a run cut short and grow piece by piece."""

import contextlib
import datetime
import importlib.metadata
import itertools
import json
import logging
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_ROOT = pathlib.Path(__file__).parents[1]
_VERSIONS = ("tfdist", "tensorflow", "keras", "tf_keras", "torch", "numpy")
# What is measured, and how; a change elsewhere does not make results those of another tree.
_MEASURED = ("tfdist", "strategies", "data", "examples", "setup.cfg", "benchmarks", ":(exclude)benchmarks/results")


class Record:
    """Rows that are comparable, in a JSON file that is written whole after each addition.

    A file holds rows of one commit, machine and setting: a file of others is set aside, and begun anew.

    Args:
      path: The file, which may exist; None keeps rows in memory.
      settings: How everything was measured, as plain values.
      key: Names of the values that tell one row from another.
    """

    def __init__(self, path: pathlib.Path | None, settings: Mapping[str, Any], key: Sequence[str]):
        self._path, self._key = path, tuple(key)
        self._about = json.loads(json.dumps({**describe_place(), "settings": dict(settings)}))
        self._commands: list[str] = []
        self._rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)  # now, not after the first hour
        if path is not None and path.exists():
            self._take_over(json.loads(path.read_text()))
        command = shlex.join(["python", *_program(), *sys.argv[1:]])
        if command not in self._commands:
            self._commands.append(command)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows, in the order in which they came."""
        return list(self._rows.values())

    @property
    def document(self) -> dict[str, Any]:
        """What the file holds."""
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return {"commands": self._commands, "date": date, **self._about, "rows": self.rows}

    def has(self, *key: Any) -> bool:
        """Whether there is a row of these values that is not of a failure."""
        return key in self._rows and not self._rows[key].get("error")

    def add(self, *rows: Mapping[str, Any]) -> None:
        """Adds rows, in place of earlier ones of the same key, and writes the file."""
        for row in rows:
            self._rows[tuple(row[name] for name in self._key)] = dict(row)
        if self._path is not None:
            text = json.dumps(self.document, indent=1) + "\n"
            write_whole(self._path, lambda path: path.write_text(text))

    def _take_over(self, earlier: Mapping[str, Any]) -> None:
        other = [name for name, value in self._about.items() if earlier.get(name) != value]
        if other:
            assert self._path is not None
            names = (f"{self._path.stem}.before-{number}{self._path.suffix}" for number in itertools.count(1))
            aside = next(path for path in map(self._path.with_name, names) if not path.exists())
            self._path.replace(aside)
            logging.warning("%s is of another %s; it is %s now.", self._path, ", ".join(other), aside)
            return
        self._commands = list(earlier["commands"])
        self._rows = {tuple(row[name] for name in self._key): row for row in earlier["rows"]}


def describe_place() -> dict[str, Any]:
    """The commit, machine and versions that something is measured on."""
    versions = {"python": platform.python_version()}
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"commit": describe_commit(), "machine": describe_machine(), "versions": versions}


def describe_machine() -> dict[str, Any]:
    """The processor, memory and kernel."""
    cpus = [line for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": cpus[0].partition(":")[2].strip() if cpus else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
    }


def describe_run() -> dict[str, Any]:
    """What makes one run unlike another on the same machine: the cores it may use, the load, TensorFlow."""
    return {
        **describe_machine(),
        "cores_used": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "tensorflow": importlib.metadata.version("tensorflow"),
    }


def describe_commit() -> str:
    """The commit that is checked out, "+dirty" if what is measured differs from it; "unknown" without git."""

    def git(*arguments):
        done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", *_MEASURED)
        return git("rev-parse", "--short", "HEAD") + ("+dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def write_whole(path: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
    """Lets `write` fill a file beside `path` and moves it there when it is complete."""
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=path.suffix, dir=path.parent)
    try:
        os.fchmod(handle, 0o644)
        write(pathlib.Path(name))
        os.fsync(handle)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    finally:
        os.close(handle)


def _program() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["-m", spec.name] if spec else [sys.argv[0]]
