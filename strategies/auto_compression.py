"""The argument `compression="auto"` of the strategies: which codecs tfdist may choose while a program trains."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies.compression import NAMES, BFloat16, Codec, Float16, from_name

AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class Auto:
    """Lets tfdist choose a codec by the measured time of training steps.

    The first steps travel uncompressed. If replicas wait for the exchange, each codec that is safe for the optimizer
    then encodes a few steps. The fastest way stays. If others are about as fast, the least lossy of them stays. All
    workers change at the same step. If the time of a step changes later, tfdist tries again.

    `Sign` and `TopK` delay most of a gradient, so they are used under `keras.optimizers.SGD` only. `Float16` and
    `BFloat16` send as many bytes, so only the first one in `allow` is used. The choice is a part of checkpoints and
    backups.

    Costs two timestamps a step, and the memory of the residuals of all allowed codecs. Steps that try a slow codec take
    longer. The choice depends on time, so two runs round gradients differently.

    Args:
      allow: Codecs or their names, such as `("float16", "int8", "powersgd(4)")`.

    Raises:
      ValueError: If `allow` is empty, has something else than codecs and names, or a codec with a `start_step`.
    """

    allow: Iterable[Codec | str] = ("float16", "bfloat16", "int8")

    def __post_init__(self) -> None:
        codecs = _codecs_of(self.allow)
        if not codecs:
            raise ValueError(
                "`allow` of Auto must have at least one codec, got none. Leave it out for the default, or pass "
                "compression=None to the strategy."
            )
        for codec in codecs:
            if codec.start_step:
                raise ValueError(
                    f"Auto starts uncompressed and decides by itself when a codec begins, but `allow` has {codec!r}. "
                    "Leave out its `start_step`."
                )
        object.__setattr__(self, "allow", tuple(codecs))


@dataclasses.dataclass(frozen=True)
class AutoPolicy:
    """The codecs that an `Auto` allows."""

    codecs: Sequence[Codec]

    @classmethod
    def of(cls, auto: Auto) -> "AutoPolicy":
        """Returns the policy of an `Auto`: its codecs, the least lossy first, without a second one of 16 bits."""
        order = list(NAMES)
        codecs: list[Any] = list(dict.fromkeys(auto.allow))
        halves = [codec for codec in codecs if isinstance(codec, Float16 | BFloat16)]
        codecs = [codec for codec in codecs if codec not in halves[1:]]
        return cls(sorted(codecs, key=lambda each: order.index(each.name) if each.name in order else len(order)))

    def safe_for(self, optimizer: Any) -> list[Codec]:
        """Returns the codecs that are safe for an optimizer."""
        is_sgd = isinstance(optimizer, keras.optimizers.SGD)
        return [codec for codec in self.codecs if is_sgd or not codec.for_sgd]

    def __call__(self, shape: tf.TensorShape, dtype: tf.DType, path: str) -> None:
        """Chooses no codec before the first step."""
        del shape, dtype, path


def _codecs_of(allow: Any) -> list[Codec]:
    """Returns the codecs of an argument `allow`.

    Raises:
      ValueError: If it has something else than codecs and their names.
    """
    if isinstance(allow, str | Codec) or not isinstance(allow, Iterable):
        raise ValueError(
            f"`allow` of Auto must be a tuple or list of codecs and names, such as ('float16', 'int8'), got {allow!r}."
        )
    codecs = []
    for each in allow:
        if each == AUTO or isinstance(each, Auto):
            raise ValueError(
                f"`allow` of Auto must be codecs and names, such as ('float16', 'int8'), got {each!r}. Leave it out."
            )
        try:
            codec = from_name(each)
        except ValueError as error:
            raise ValueError(f"`allow` of Auto has {each!r}, which is no codec. {error}") from None
        if codec is None:
            raise ValueError(
                "`allow` of Auto must not have None, since Auto may always send gradients uncompressed. Leave it out."
            )
        codecs.append(codec)
    return codecs
