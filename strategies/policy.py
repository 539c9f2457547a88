"""Which gradients are compressed, and how: what `compression=` of a strategy means, and the opt-out for one call."""

import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.strategies.compression import Codec, PowerSGD, from_name
from tfdist.strategies.compression.codec import ENCODED

Policy = Callable[[tf.TensorShape, tf.DType, int], Codec | str | None]

_local = threading.local()
_OPENED_AROUND = (
    "tfdist.compression.uncompressed() is opened on each replica, but was opened around strategy.run, `fit` or "
    "`train_on_batch`, or in strategy.scope(). Open it around `optimizer.apply` in the function that strategy.run is "
    "given, or in the model's `train_step`."
)


@contextlib.contextmanager
def uncompressed() -> Iterator[None]:
    """Exchanges the gradients of this block uncompressed.

    For custom loops: open it inside the function that `strategy.run` runs, around `optimizer.apply`. What codecs keep
    from step to step stays as it is. It is looked at while a graph is traced: what is to vary from step to step takes a
    `tf.function` for each way, and one that was traced before, called in the block, exchanges as it was traced.

    Without a strategy there is nothing to compress, and it does nothing.

    Raises:
      RuntimeError: If it is opened inside `strategy.scope()` and not on a replica. Opened around `strategy.run` or
        `fit`, where it would do nothing, these raise it.
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
    """Refuses `uncompressed` around what runs replicas.

    Raises:
      RuntimeError: If this thread is inside `uncompressed` and on no replica.
    """
    if is_uncompressed() and not (tf.distribute.has_strategy() and tf.distribute.get_replica_context()):
        raise RuntimeError(_OPENED_AROUND)


def is_uncompressed() -> bool:
    """Whether this thread is inside `uncompressed`."""
    return getattr(_local, "uncompressed", False)


def policy_of(compression: Any) -> Policy | None:
    """What `compression=` of a strategy means.

    Args:
      compression: `None`, the name of a codec, a codec, or a function (shape, dtype, position) that gives one of these.

    Raises:
      ValueError: If it is a name that no codec has, or something else.
      TypeError: If it is a function of other arguments.
    """
    if callable(compression) and not isinstance(compression, type):
        _check_arguments(compression)
        return compression
    codec = from_name(compression)
    return None if codec is None else OneCodec(codec)


def _check_arguments(policy: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(policy)
    except ValueError:  # of a function that is not written in Python
        return
    try:
        signature.bind(tf.TensorShape([]), tf.float32, 0)
    except TypeError as error:
        raise TypeError(
            f"A `compression` function takes a gradient's (shape, dtype, position), but {policy!r} takes {signature}: "
            f"{error}."
        ) from None


def unfit(codec: Codec, shape: tf.TensorShape, dtype: tf.DType) -> str | None:
    """Why a codec cannot take a gradient of this shape and dtype; `None` if it can."""
    if dtype not in ENCODED:
        return f"only {', '.join(known.name for known in ENCODED)} are compressed"
    if isinstance(codec, PowerSGD) and shape.rank in (0, 1):
        return "only matrices have factors"
    return None


@dataclasses.dataclass(frozen=True)
class OneCodec:
    """The policy of a strategy that is given a codec: whatever it is good for."""

    codec: Codec

    def __call__(self, shape: tf.TensorShape, dtype: tf.DType, position: int) -> Codec | None:
        """The codec, if nothing is against it."""
        del position
        return None if self.objection(shape, dtype) else self.codec

    def objection(self, shape: tf.TensorShape, dtype: tf.DType) -> str | None:
        """Why a gradient travels as it is; `None` if it does not."""
        elements, codec = shape.num_elements(), self.codec
        if why_not := unfit(codec, shape, dtype):
            return why_not
        if elements is None:
            return "its shape is not known"
        if not elements or elements < codec.min_elements:
            return f"min_elements is {codec.min_elements}"
        if isinstance(codec, PowerSGD) and not codec.saves(elements // shape[-1], shape[-1]):
            return f"factors of rank {codec.rank} are not less than half of it"
        return None
