"""Which codecs leave the noise scale measurable: their average is close to that of the gradients in each step."""

from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.strategies.auto_compression import AutoPolicy
from tfdist.strategies.compression import Codec, PowerSGD, Sign, TopK, from_name
from tfdist.strategies.compression_policy import policy_of

_DELAYING = (PowerSGD, TopK, Sign)  # They send most of a gradient in later steps only.


def check_measurable_codecs(compression: Any, variables: Iterable[Any]) -> None:
    """Refuses codecs with which the average of a step has another norm than the average of the gradients.

    Args:
      compression: That of the strategy.
      variables: The trainable variables of the model.

    Raises:
      ValueError: If a gradient has such a codec, or `Auto` may choose one.
    """
    for codec, where in _codecs(compression, variables):
        if isinstance(codec, _DELAYING):
            raise ValueError(
                f"AdaptiveBatch compares the gradients of replicas with their average, but {codec!r} sends most of "
                f"{where} in later steps, so the average of a step has another norm. Use float16, bfloat16 or int8, or "
                "leave out AdaptiveBatch."
            )


def _codecs(compression: Any, variables: Iterable[Any]) -> Iterator[tuple[Codec | None, str]]:
    """Yields codecs, each with the gradient that it encodes."""
    policy = policy_of(compression)
    if isinstance(policy, AutoPolicy):
        yield from ((codec, "a gradient") for codec in policy.codecs)
    elif policy is not None:
        for variable in variables:
            chosen = policy(tf.TensorShape(variable.shape), tf.as_dtype(variable.dtype), variable.path)
            yield from_name(chosen), f"the gradient of {variable.path}"
