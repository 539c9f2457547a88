"""Which gradients are compressed, and how: the strategies' `compression` argument, and the opt-out for one call."""

import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.strategies.auto_compression import AUTO, Auto, AutoPolicy
from tfdist.strategies.compression import Codec, PowerSGD, from_name
from tfdist.strategies.compression.codec import ENCODED
from tfdist.strategies.compression.power_sgd import as_matrix

Policy = Callable[[tf.TensorShape, tf.DType, str], Codec | str | None]

_local = threading.local()
_OPENED_AROUND = (
    "tfdist.compression.uncompressed() must be opened on each replica, but was opened around strategy.run, `fit` or "
    "`train_on_batch`, or in strategy.scope(). Open it around `optimizer.apply`, in the function passed to "
    "strategy.run or in the model's `train_step`."
)


@contextlib.contextmanager
def uncompressed() -> Iterator[None]:
    """Exchanges gradients applied in this block uncompressed. Residuals and other states of codecs do not change.

    For custom loops: open it around `optimizer.apply`, inside the function passed to `strategy.run`. Without a strategy
    it has no effect.

    The block takes effect while a graph is traced. A `tf.function` that was traced outside of the block compresses
    inside of the block too. To compress in some steps only, use two `tf.function`s.

    Raises:
      RuntimeError: If the block is opened in `strategy.scope()` but not on a replica. `strategy.run` and `fit` raise
        the same error if they are called inside the block, where it would have no effect.
    """
    if tf.distribute.in_cross_replica_context():
        raise RuntimeError(_OPENED_AROUND)
    before = getattr(_local, "uncompressed", False)
    _local.uncompressed = True
    try:
        yield
    finally:
        _local.uncompressed = before


def check_opted_out_inside() -> None:
    """Raises a RuntimeError if `uncompressed` was opened around a call that runs replicas, instead of on a replica."""
    if is_uncompressed() and not (tf.distribute.has_strategy() and tf.distribute.get_replica_context()):
        raise RuntimeError(_OPENED_AROUND)


def is_uncompressed() -> bool:
    """Whether this thread is inside `uncompressed`."""
    return getattr(_local, "uncompressed", False)


def policy_of(compression: Any) -> Policy | None:
    """The function that chooses each gradient's codec, from a strategy's `compression` argument; None for no codecs.

    Args:
      compression: None, a codec, its name, `"auto"`, an `Auto`, or a function `(shape, dtype, path)` that returns None,
        a codec or its name.

    Raises:
      ValueError: If `compression` is an unknown name or another object.
      TypeError: If `compression` is a function with other arguments.
    """
    if isinstance(compression, type) and issubclass(compression, Auto):
        raise ValueError("`compression` must be an object, but got the class Auto. Call it: tfdist.compression.Auto().")
    if callable(compression) and not isinstance(compression, type):
        _check_arguments(compression)
        return compression
    if isinstance(compression, Auto) or compression == AUTO:
        return AutoPolicy.of(compression if isinstance(compression, Auto) else Auto())
    codec = from_name(compression)
    return None if codec is None else OneCodec(codec)


def _check_arguments(policy: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(policy)
    except ValueError:  # A function that is not written in Python has no signature.
        return
    try:
        signature.bind(tf.TensorShape([]), tf.float32, "")
    except TypeError as error:
        raise TypeError(
            f"A `compression` function must take a gradient's (shape, dtype, path), but {policy!r} takes "
            f"{signature}: {error}. Change its arguments."
        ) from None


def unfit(codec: Codec, shape: tf.TensorShape, dtype: tf.DType) -> str | None:
    """The reason why a codec cannot encode a gradient of this shape and dtype, or None if it can."""
    if dtype not in ENCODED:
        return f"only gradients of {', '.join(known.name for known in ENCODED)} can be compressed"
    if isinstance(codec, PowerSGD) and shape.rank in (0, 1):
        return "only matrices have low-rank factors"
    return None


@dataclasses.dataclass(frozen=True)
class OneCodec:
    """Chooses the one codec of a strategy for each gradient that the codec can encode with less traffic."""

    codec: Codec

    def __call__(self, shape: tf.TensorShape, dtype: tf.DType, path: str) -> Codec | None:
        """The codec of a gradient, or None to leave it uncompressed."""
        del path
        return None if self.objection(shape, dtype) else self.codec

    def objection(self, shape: tf.TensorShape, dtype: tf.DType) -> str | None:
        """The reason why a gradient travels uncompressed, or None if it is compressed."""
        elements, codec = shape.num_elements(), self.codec
        if why_not := unfit(codec, shape, dtype):
            return why_not
        if elements is None:
            return "its shape is not known"
        if not elements or elements < codec.min_elements:
            return f"min_elements is {codec.min_elements}"
        if isinstance(codec, PowerSGD) and not codec.saves(*as_matrix(shape)):
            return f"factors of rank {codec.rank} are not smaller than half of it"
        return None
