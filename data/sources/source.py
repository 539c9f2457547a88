"""The interface of all sources of examples: their number, and reading any of them by index."""

import abc
import hashlib
import socket
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.cluster import ClusterSpec
from tfdist.errors import SourceError, TFConfigError


class Source(abc.ABC):
    """Examples that a data set reads by index, from 0 to `len(source) - 1`, in any order and any number of times.

    Attributes:
      element_spec: Spec of one example as `read` returns it, without the batch dimension: a `tf.TensorSpec`, or tuples
        and dicts of specs.
      decodes: Whether `decode` changes examples.
      examples_together: Number of examples that are best read in one call, if it exceeds the size of a batch. `read`
        then also accepts indices of any shape, and returns an empty string for an index of -1.
    """

    element_spec: Any
    decodes: bool = False
    examples_together: int = 0

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of examples."""

    @abc.abstractmethod
    def read(self, indices: tf.Tensor) -> Any:
        """Reads examples inside a `tf.data` graph; several calls may run at the same time.

        Args:
          indices: int64 [b], each from 0 to `len(self) - 1`; repeats are allowed.

        Returns:
          The structure of `element_spec`, each tensor with a leading dimension b, which may be unknown in the graph.

        Raises:
          tf.errors.OpError: While the graph runs, if an example cannot be read. Its text contains the message of a
            `SourceError`, which names the worker, the file and the example.
        """

    def read_elsewhere(self, indices: np.ndarray) -> Callable[[tf.Tensor], Any] | None:
        """Returns a function with which another process reads these examples in a graph, or None if it cannot.

        The function maps a position in `indices`, int64 [], to an example. `indices` are int64 [b].
        """
        return None

    def decode(self, example: Any) -> Any:
        """Converts an example from the form that `read` returns to the form for the user; in a graph, in parallel."""
        return example

    @abc.abstractmethod
    def describe(self, index: int) -> str:
        """Returns the origin of an example for errors, such as "record 17 of /data/a.tfrecord"."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Returns 16 hex digits, equal on all workers, to notice another number of examples or other files."""

    def origin(self) -> str:
        """Returns the origin of all examples for errors, such as "/data/a.tfrecord and 3 other files"."""
        return f"a {type(self).__name__}"

    def failure(self, index: int, problem: str) -> SourceError:
        """Returns the error for an example that cannot be read.

        The problem and its remedy are sentences that follow "Example 3 (record 3 of a.tfrecord)".
        """
        return SourceError(f"Example {index} ({self.describe(index)}) {problem} Read by {this_worker()}.")


def this_worker() -> str:
    """Describes this process for errors, such as "worker 1 of 4 at 10.0.0.2:2222 on host node2"."""
    try:
        spec = ClusterSpec.from_env()
    except TFConfigError:  # Raised elsewhere. Here it must not hide the error in progress.
        spec = None
    return f"{spec.describe() if spec else 'a single process'} on host {socket.gethostname()}"


def files_named(paths: list[str]) -> str:
    """Describes the files of a source for errors: the first path, and the number of further files."""
    others = len(paths) - 1
    return paths[0] + (f" and {others} other file{'s' if others > 1 else ''}" if others else "")


def digest(*parts: Any) -> str:
    """Returns 16 hex digits of a hash of the strings `parts`, for a source's fingerprint."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def map_leaves(fn: Callable[[str, Any], Any], structure: Any, name: str) -> Any:
    """Replaces each leaf of an example's or spec's `structure` by `fn(name of the leaf, leaf)`.

    As in `tf.data`, tuples and dicts are structure. Everything else is a leaf, also a list.
    """
    if isinstance(structure, Mapping):
        return {key: map_leaves(fn, structure[key], f"{name}[{key!r}]") for key in structure}
    if isinstance(structure, tuple):
        parts = [map_leaves(fn, part, f"{name}[{i}]") for i, part in enumerate(structure)]
        return structure._make(parts) if hasattr(structure, "_make") else tuple(parts)
    return fn(name, structure)
