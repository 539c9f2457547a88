"""The gradients of a model, as a strategy would exchange them with each codec."""

import math
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.plan.exchange_costs import NONE
from tfdist.plan.planned_buckets import Gradient
from tfdist.strategies.compression import Codec, PowerSGD, WordCodec, from_name
from tfdist.strategies.compression.power_sgd import as_matrix
from tfdist.strategies.compression_policy import Policy, policy_of
from tfdist.strategies.memory_estimate import unallocated


def gradients_of(make_model: Callable[[], keras.Model], codecs: Sequence[str]) -> dict[str, list[Gradient]]:
    """Returns the gradients of a model in the order of its layers, by name of the codec that encodes them.

    Makes the model without memory for its weights. All gradients count as dense.

    Raises:
      ValueError: If a codec is unknown, or the function returns no built model.
    """
    policies = {name: policy_of(None if name == NONE else name) for name in codecs}
    with unallocated(make_model) as model:
        weights = [
            (tf.TensorShape(each.shape), tf.as_dtype(each.dtype), each.path) for each in model.trainable_variables
        ]
    if not weights:
        raise ValueError("The model has no trainable weights, so its replicas exchange nothing.")
    return {name: [_gradient(policy, *weight) for weight in weights] for name, policy in policies.items()}


def _gradient(policy: Policy | None, shape: tf.TensorShape, dtype: tf.DType, path: str) -> Gradient:
    codec = None if policy is None else from_name(policy(shape, dtype, path))
    sizes = tuple(shape.as_list())
    raw = float(math.prod(sizes) * dtype.size)
    return Gradient(raw, raw if codec is None else _sent_bytes(codec, sizes, raw))


def _sent_bytes(codec: Codec, shape: tuple[int, ...], raw: float) -> float:
    """Returns the bytes of one encoding of a gradient."""
    elements = math.prod(shape)
    if isinstance(codec, WordCodec):
        padded = -(-elements // codec.granule) * codec.granule
        return 4.0 * codec.words(padded)
    assert isinstance(codec, PowerSGD)
    if len(shape) < 2 or not codec.saves(*as_matrix(shape)):
        return raw
    return 4.0 * codec.rank * sum(as_matrix(shape))
