"""Result files: rows of results with machine and settings, written after each addition, and continued by later runs."""

import contextlib
import datetime
import errno
import hashlib
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

from tfdist.package_version import version_of

_ROOT = pathlib.Path(__file__).parents[1]
_VERSIONS = ("tfdist", "tensorflow", "keras", "tf_keras", "torch", "numpy")
# Files that affect results. A change of any other file leaves the results comparable.
_MEASURED = (*(f"{folder}/*.py" for folder in ("tfdist", "strategies", "data", "examples", "benchmarks")), "setup.cfg")
_UNKNOWN = "unknown"


class Record:
    """Comparable rows in a JSON file, which is replaced atomically after each addition.

    A file holds rows of one commit, one machine and equal settings. If an existing file differs in these, or its commit
    is unknown, it is renamed and a new file begins. Each row holds the command, time and commit of its measurement.

    Args:
      path: The file, which may exist; None keeps rows in memory.
      settings: The settings of the measurements, as plain values.
      key: Names of the values that identify a row.

    Raises:
      OSError: If the file cannot be written.
    """

    def __init__(self, path: pathlib.Path | None, settings: Mapping[str, Any], key: Sequence[str]):
        self._path, self._key = path, tuple(key)
        self._about = json.loads(json.dumps({**describe_place(), "settings": dict(settings)}))
        self._commands: list[str] = []
        self._rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        if path is not None:
            check_writable(path)  # before the first measurement, not after it
        if path is not None and path.exists():
            self._take_over(path)
        self._command = shlex.join(["python", *_program(), *sys.argv[1:]])
        if self._command not in self._commands:
            self._commands.append(self._command)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows, in the order of their addition."""
        return list(self._rows.values())

    @property
    def document(self) -> dict[str, Any]:
        """The content of the file."""
        return {"commands": self._commands, "date": _now(), **self._about, "rows": self.rows}

    def has(self, *key: Any) -> bool:
        """Whether there is a row with this key that does not report an error."""
        return key in self._rows and not self._rows[key].get("error")

    def add(self, *rows: Mapping[str, Any]) -> None:
        """Adds rows, which replace earlier ones with the same key, and writes the file."""
        origin = {"command": self._command, "commit": self._about["commit"], "date": _now()}
        for row in rows:
            self._rows[tuple(row[name] for name in self._key)] = {**row, **origin}
        if self._path is not None:
            text = json.dumps(self.document, indent=1) + "\n"
            write_whole(self._path, lambda path: path.write_text(text))

    def _take_over(self, path: pathlib.Path) -> None:
        try:
            earlier = json.loads(path.read_text())
            other = [name for name, value in self._about.items() if earlier.get(name) != value]
            reason = f"of another {', '.join(other)}" if other else ""
            reason = "of an unknown commit" if earlier.get("commit") == _UNKNOWN else reason
            commands = list(earlier.get("commands", ()))
            rows = {tuple(row[name] for name in self._key): row for row in earlier.get("rows", ())}
        except (ValueError, AttributeError, TypeError, KeyError):
            reason = "not a file of these results"
        if reason:
            names = (f"{path.stem}.before-{number}{path.suffix}" for number in itertools.count(1))
            aside = next(each for each in map(path.with_name, names) if not each.exists())
            path.replace(aside)
            logging.warning("%s is %s. It was renamed to %s.", path, reason, aside)
        else:
            self._commands, self._rows = commands, rows


def describe_place() -> dict[str, Any]:
    """The commit, machine and versions of a measurement."""
    versions = {"python": platform.python_version()}
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = version_of(name)
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
    """The machine, and properties that differ between runs on it: usable cores, load, version of TensorFlow."""
    return {
        **describe_machine(),
        "cores_used": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "tensorflow": version_of("tensorflow"),
    }


def describe_commit() -> str:
    """The commit that is checked out; "unknown", with a warning, if git fails.

    If measured files differ from the commit, "+dirty." and an eight-digit hash of the difference follow.
    """
    try:
        difference = _difference()
        return _git("rev-parse", "--short", "HEAD").decode().strip() + (difference and f"+dirty.{difference}")
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error).encode()
        logging.warning("The commit is unknown, because git failed: %s", reason.decode(errors="replace").strip())
        return _UNKNOWN


def _difference() -> str:
    """A short hash of the uncommitted changes; empty if there are none."""
    changed = _git("diff", "--no-ext-diff", "HEAD", "--", *_MEASURED)
    others = _git("ls-files", "--others", "--exclude-standard", "-z", "--", *_MEASURED).decode().split("\0")[:-1]
    if not changed and not others:
        return ""
    digest = hashlib.sha256(changed)
    for name in others:
        digest.update(f"{name}\0".encode() + (_ROOT / name).read_bytes())
    return digest.hexdigest()[:8]


def _git(*arguments: str) -> bytes:
    # In a container the tree may belong to another user, which git refuses by default.
    command = ["git", "-c", f"safe.directory={_ROOT.resolve()}", *arguments]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, timeout=30, check=True).stdout


def check_writable(path: pathlib.Path) -> None:
    """Checks that a file can be written, and creates its folder.

    Raises:
      OSError: If the file cannot be written.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()


def write_whole(path: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
    """Calls `write` with a temporary file beside `path`, and renames it to `path` when it is complete."""
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


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _program() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["-m", spec.name] if spec else [sys.argv[0]]
