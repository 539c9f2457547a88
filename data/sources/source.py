"""What every source of examples offers: how many there are, and reading any of them by number."""

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
    """Examples that are read by their number, from 0 to `len(source) - 1`, in any order and as often as asked.

    Attributes:
      element_spec: What `read` gives for one example, without the batch's dimension: a `tf.TensorSpec`, or tuples and
        dicts of them.
      decodes: Whether `decode` does anything.
      examples_together: As many are best read by one call, if they are more than a batch has; then `read` also takes
        numbers of any shape, and -1 for nothing, of which it makes an empty string.
    """

    element_spec: Any
    decodes: bool = False
    examples_together: int = 0

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many examples there are."""

    @abc.abstractmethod
    def read(self, indices: tf.Tensor) -> Any:
        """Reads examples inside a `tf.data` graph; several calls may run at once.

        Args:
          indices: int64 [b], each from 0 to `len(self) - 1`; repeats are allowed.

        Returns:
          The structure of `element_spec`, each tensor with a leading dimension b, which may be unknown in the graph.

        Raises:
          tf.errors.OpError: While the graph runs, if an example cannot be read. The message of the `SourceError` that
            names worker, file and example is in its text.
        """

    def read_elsewhere(self, indices: np.ndarray) -> Callable[[tf.Tensor], Any] | None:
        """How another process reads these examples, int64 [b]: a function of a place in them, int64 [], for a graph.

        None if it cannot.
        """
        return None

    def decode(self, example: Any) -> Any:
        """Makes of one example, as `read` gives it, what the user sees; in a graph, in parallel."""
        return example

    @abc.abstractmethod
    def describe(self, index: int) -> str:
        """Where example `index` comes from, for errors: "record 17 of /data/a.tfrecord"."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """16 hex digits, equal on all workers, that change with the number of examples or the files."""

    def origin(self) -> str:
        """Where the examples come from, for errors: "/data/a.tfrecord and 3 other files"."""
        return f"a {type(self).__name__}"

    def failure(self, index: int, problem: str) -> SourceError:
        """The error for an example that cannot be read.

        Args:
          index: Which example.
          problem: What is wrong with it and what to do, as sentences that follow "Example 3 (record 3 of a.tfrecord)".
        """
        return SourceError(f"Example {index} ({self.describe(index)}) {problem} Read by {this_worker()}.")


def this_worker() -> str:
    """Who this process is, for errors: "worker 1 of 4 at 10.0.0.2:2222 on host node2"."""
    try:
        spec = ClusterSpec.from_env()
    except TFConfigError:  # An error of its own, told elsewhere; here it must not hide the one to be told.
        spec = None
    return f"{spec.describe() if spec else 'a single process'} on host {socket.gethostname()}"


def files_named(paths: list[str]) -> str:
    """Files of a source, for errors: the first, and how many others there are."""
    others = len(paths) - 1
    return paths[0] + (f" and {others} other file{'s' if others > 1 else ''}" if others else "")


def digest(*parts: Any) -> str:
    """16 hex digits of what `parts` print as."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:16]


def map_leaves(fn: Callable[[str, Any], Any], structure: Any, name: str) -> Any:
    """`structure` with each leaf replaced by `fn(name of the leaf, leaf)`.

    As in `tf.data`, tuples and dicts are structure and everything else is a leaf, lists too.
    """
    if isinstance(structure, Mapping):
        return {key: map_leaves(fn, structure[key], f"{name}[{key!r}]") for key in structure}
    if isinstance(structure, tuple):
        parts = [map_leaves(fn, part, f"{name}[{i}]") for i, part in enumerate(structure)]
        return structure._make(parts) if hasattr(structure, "_make") else tuple(parts)
    return fn(name, structure)
