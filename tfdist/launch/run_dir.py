"""The folder of a run, with logs and failure reports of all attempts. It stays until later runs remove old folders."""

import argparse
import contextlib
import os
import pathlib
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator

from tfdist.cluster import ClusterSpec
from tfdist.folder_lock import held, way_out
from tfdist.run_files import RunFiles

KEPT_RUNS = 20
"""Number of folders of this user's runs that stay in the temporary directory, including the newest."""

_PREFIX = "tfdist-run-"
_LOCK = "tfdist-run.lock"
_OF_MKDTEMP = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")  # Other names were chosen by the user.


@contextlib.contextmanager
def folder_of_run(args: argparse.Namespace, spec: ClusterSpec | None) -> Iterator[pathlib.Path]:
    """Locks and yields the folder of this run: `--log-dir`, or a new folder in the temporary directory."""
    if args.log_dir is None:
        with contextlib.ExitStack() as stack:
            try:
                temporary = pathlib.Path(tempfile.mkdtemp(prefix=_PREFIX))
                stack.enter_context(held(temporary / _LOCK))
            except OSError as error:
                args.parser.error(f"the temporary directory is not writable ({error}); give --log-dir")
            _remove_old(temporary.parent)
            yield temporary
        return
    # Hosts may share a disk, so each host gets its own folder.
    run_dir: pathlib.Path = args.log_dir.absolute() / (f"worker-{spec.worker_id}" if spec else "")
    with contextlib.ExitStack() as stack:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(held(run_dir / _LOCK))
            _set_aside(run_dir)
            tempfile.TemporaryFile(dir=run_dir).close()
        except BlockingIOError as error:
            args.parser.error(
                f"--log-dir {args.log_dir} serves one run at a time, but {error.strerror} is using {run_dir}; wait for "
                f"it or end it, or give another --log-dir.{way_out(error)}"
            )
        except OSError as error:
            args.parser.error(f"--log-dir {args.log_dir} must be writable: {error}")
        yield run_dir


def _remove_old(directory: pathlib.Path) -> None:
    """Removes this user's oldest folders of finished runs, and keeps `KEPT_RUNS`. Ignores errors."""
    found = []
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()  # Another user may have put a link in the shared directory.
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_own and _OF_MKDTEMP.fullmatch(path.name):
                found.append((status.st_mtime, path))
    for _, path in sorted(found, reverse=True)[KEPT_RUNS:]:
        with contextlib.suppress(OSError), held(path / _LOCK, other_host_seconds=0):  # A running run holds the lock.
            shutil.rmtree(path)


def _set_aside(run_dir: pathlib.Path) -> None:
    """Moves logs and reports of the previous run in this folder to `earlier`, in place of that folder's old files."""
    earlier = run_dir / "earlier"
    left = RunFiles(run_dir).for_user
    for path in RunFiles(earlier).for_user if left else ():
        path.unlink()
    for path in left:
        place = earlier / path.relative_to(run_dir)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    RunFiles(run_dir).forget_messages()
    for path in (*run_dir.glob("attempt-*"), *earlier.glob("attempt-*")):
        with contextlib.suppress(OSError):  # A folder with other files, which are not ours, stays.
            path.rmdir()
