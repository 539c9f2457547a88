"""Checks the arguments of `tfdist.callbacks.Telemetry`. Does not load TensorFlow."""

import contextlib
import numbers
import operator
import os
from typing import Any

_LARGEST_PORT = 65535


def checked_folder(log_dir: Any) -> str | None:
    """Returns the folder for TensorBoard as an absolute path or a URL. Raises `ValueError` if it is invalid."""
    if log_dir is None:
        return None
    folder = os.fsdecode(log_dir)
    if not folder:
        raise ValueError(
            "`log_dir` must be a folder for TensorBoard, got an empty path. Give a path, or None for none."
        )
    # An absolute path, because the working directory may change during training.
    return folder if "://" in folder else os.path.abspath(os.path.expanduser(folder))


def checked_port(port: Any) -> int | None:
    """Returns the port for Prometheus. Raises `ValueError` if it is invalid."""
    if port is None:
        return None
    with contextlib.suppress(TypeError):
        if not isinstance(port, bool) and 0 <= operator.index(port) <= _LARGEST_PORT:
            return operator.index(port)
    raise ValueError(
        f"`prometheus_port` must be a port from 1 to {_LARGEST_PORT}, 0 for any free port, or None for none, got "
        f"{port!r}."
    )


def checked_address(address: Any) -> str:
    """Returns the address at which to listen. Raises `ValueError` if it is invalid."""
    if not isinstance(address, str) or not address:
        raise ValueError(
            f"`prometheus_address` must be an address of this machine such as '127.0.0.1', got {address!r}. Give "
            "'0.0.0.0' to listen at all its addresses."
        )
    return address


def checked_seconds(seconds: Any) -> float:
    """Returns the seconds between two figures. Raises `ValueError` if it is invalid."""
    is_number = isinstance(seconds, numbers.Real) and not isinstance(seconds, bool)
    if not is_number or not 0 < float(seconds) < float("inf"):
        raise ValueError(f"`every_seconds` must be a positive number of seconds, got {seconds!r}.")
    return float(seconds)


def checked_steps(steps: Any, log_dir: str | None) -> tuple[int, int] | None:
    """Returns the first and the last step to trace. Raises `ValueError` if it is invalid."""
    if steps is None:
        return None
    if log_dir is None:
        raise ValueError(
            f"`trace_steps` needs `log_dir`, the folder for the trace, but got {steps!r} and no `log_dir`."
        )
    with contextlib.suppress(TypeError, ValueError):
        first, last = map(operator.index, steps)
        if 1 <= first <= last:
            return first, last
    raise ValueError(
        f"`trace_steps` must be the first and the last step to trace, counted from 1, such as (10, 20), got {steps!r}."
    )


def checked_count(steps: Any, log_dir: str | None) -> int | None:
    """Returns the number of steps to trace at a signal. Raises `ValueError` if it is invalid."""
    if steps is None:
        return None
    if log_dir is None:
        raise ValueError(
            f"`trace_when_asked` needs `log_dir`, the folder for the trace, but got {steps!r} and no `log_dir`."
        )
    with contextlib.suppress(TypeError):
        if not isinstance(steps, bool) and operator.index(steps) >= 1:
            return operator.index(steps)
    raise ValueError(f"`trace_when_asked` must be a number of steps from 1, or None for none, got {steps!r}.")


def checked_workers(workers: Any) -> frozenset[int]:
    """Returns the numbers of the workers that trace. Raises `ValueError` if it is invalid."""
    with contextlib.suppress(TypeError):
        given = frozenset(map(operator.index, workers))
        if all(worker >= 0 for worker in given):
            return given
    raise ValueError(f"`trace_workers` must be numbers of workers, from 0, such as (0, 1), got {workers!r}.")
