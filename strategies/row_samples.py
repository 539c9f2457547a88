"""Takes samples of a batch's rows and compares the samples of two workers. Needs no TensorFlow and no network."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["Sample", "digest", "sample"]

_ELEMENTS = 1 << 16  # Number of sampled elements of a tensor, spread evenly over its rows.
_LEAST = 16  # Smallest number of sampled elements of a row, if it has that many.
_MOST_GROUPS = 1024  # Groups of neighbouring rows that one worker describes to another.
_SHOWN = 4  # Number of elements of a row that a message shows.
_SHOWN_CHARACTERS = 40  # Largest length of a shown element: a string may be a whole image.
_ROUNDING = 1e-3  # Relative tolerance. Rounding differs between processors; other rows differ by more.


@dataclasses.dataclass(frozen=True)
class Sample:
    """A part of each row of one tensor in a batch, to compare the rows that two workers read.

    Attributes:
      shape: Shape of the tensor.
      dtype: Name of the tensor's dtype.
      values: Evenly spaced elements of each row, [rows, elements].
    """

    shape: tuple[int, ...]
    dtype: str
    values: np.ndarray

    @property
    def group_size(self) -> int:
        """Number of neighbouring rows of the batch that share one description; 1 in batches of up to 1,024 rows."""
        return max(1, -(-len(self.values) // _MOST_GROUPS))

    @property
    def distinct(self) -> int:
        """Number of different groups of rows; if 1, the tensor (such as labels) does not tell rows apart."""
        return len({repr(group) for group in self.groups()})

    def groups(self) -> list[Any]:
        """Describes each group of rows, for a comparison with another worker: exact, or within rounding for floats."""
        size, values = self.group_size, self.values
        if values.dtype.kind not in "fc":
            return [zlib.crc32(_bytes(values[first : first + size])) for first in range(0, len(values), size)]
        wide = np.abs(values).astype(np.float64) if values.dtype.kind == "c" else values.astype(np.float64)
        if not wide.size:
            return [[0.0, 0.0]] * -(-len(wide) // size)
        # A projection on fixed weights: an error of rounding stays small, and other rows, or another order, are far.
        random = np.random.RandomState(0)
        weights = random.choice([-1.0, 1.0], size * wide.shape[1]) * random.uniform(0.5, 1, size * wide.shape[1])
        whole = np.zeros((-(-len(wide) // size), size * wide.shape[1]))
        whole.reshape(-1)[: wide.size] = wide.reshape(-1)
        with np.errstate(all="ignore"):
            return np.stack([whole @ weights, np.sqrt(np.sum(whole * whole, axis=1))], axis=1).tolist()

    def described(self) -> dict[str, Any]:
        """Returns what another worker needs to compare its own rows with these, in types of JSON."""
        firsts = self.values[:: self.group_size]
        shown = [" ".join(str(each)[:_SHOWN_CHARACTERS] for each in row[:_SHOWN]) for row in firsts]
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "group_size": self.group_size,
            "groups": self.groups(),
            "shown": shown,
        }


def sample(array: Any) -> Sample:
    """Samples each row of a tensor. Costs a copy of at most 131,072 elements, or of 32 per row if that is more."""
    array = np.asarray(array)
    rows = array.reshape(array.shape[0], -1) if array.ndim and array.size else array.reshape(-1, 1)
    count = rows.shape[1]
    stride = max(1, count // max(_LEAST, _ELEMENTS // max(1, len(rows))))
    # A copy: TensorFlow reuses the memory of a tensor that `tf.numpy_function` passes.
    return Sample(array.shape, array.dtype.name, rows[:, ::stride].copy())


def digest(samples: Sequence[Sample], bits: int = 24) -> int:
    """Returns a checksum, of `bits` bits, of samples of a batch, by which workers see whether their rows differ."""
    total = 0
    for each in samples:
        total = zlib.crc32(repr((each.shape, each.dtype)).encode(), total)
        total = zlib.crc32(_bytes(each.values), total)
    return total & ((1 << bits) - 1)


def difference(own: dict[str, Any], other: dict[str, Any]) -> str | int | None:
    """Returns the first difference of two `Sample.described`: a shape or dtype in words, a row's number, or `None`."""
    if own["dtype"] != other["dtype"] or own["shape"] != other["shape"]:
        return f"is {own['dtype']}{own['shape']}"
    pairs = enumerate(zip(own["groups"], other["groups"], strict=True))
    return next((number for number, pair in pairs if _are_unlike(*pair)), None)


def _are_unlike(own: Any, other: Any) -> bool:
    if not isinstance(own, list):
        return own != other
    a, b = np.array(own), np.array(other)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return repr(own) != repr(other)
    return bool(np.abs(a - b).max() > _ROUNDING * max(a[1], b[1]))


def _bytes(values: np.ndarray) -> Any:
    if values.dtype.kind == "O":  # Strings.
        return b"\0".join(each if isinstance(each, bytes) else str(each).encode() for each in values.reshape(-1))
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
