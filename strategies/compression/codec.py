"""The interface of all codecs: arithmetic on tensors that compresses a gradient, without devices or network."""

import dataclasses
import numbers
from typing import Any, ClassVar

import tensorflow as tf

State = tuple[tf.Tensor, ...]

# Types of the gradients that are compressed.
ENCODED = (tf.float16, tf.bfloat16, tf.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec:
    """Base class of all codecs. A codec compresses a large gradient before it travels.

    Methods are deterministic and run eagerly, in graphs and under `jit_compile=True`. They take tensors of static
    shape, of which only the number of rows may be unknown while tracing.

    Args:
      min_elements: Tensors with fewer elements travel uncompressed. Ignored where a function chooses the codec of each
        tensor.
      start_step: Number of the first compressed step, counted from 0.
      error_feedback: Whether each replica keeps the error of its encoding (the residual) and adds it to its next
        gradient, so that the error is delayed instead of lost.

    Raises:
      ValueError: If an option has a wrong type or is out of range; the message states the allowed values.
    """

    name: ClassVar[str]
    # Whether the codec delays so much of the gradient that optimizers such as Adam, which divide by a running mean of
    # squared gradients, may diverge.
    for_sgd: ClassVar[bool] = False

    min_elements: int = 16384  # 64 KiB of float32; smaller messages are limited by latency, not bandwidth
    start_step: int = 0
    error_feedback: bool = True

    def __post_init__(self) -> None:
        self._check_integer("min_elements", at_least=0)
        self._check_integer("start_step", at_least=0)
        if not isinstance(self.error_feedback, bool):
            raise self._refusal("error_feedback", "True or False")

    def for_rows(self) -> "WordCodec":
        """The codec for rows of sparse gradients (`tf.IndexedSlices`), without residuals since rows differ by step."""
        raise NotImplementedError

    def round_trip(self, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Encodes and decodes one gradient, as a first step with an empty residual would. For tests without a strategy.

        Args:
          values: float16, bfloat16 or float32, of any static shape; at least two axes for `PowerSGD`.

        Returns:
          The decoded gradient and the error of its encoding, both float32 of the shape of `values`. Their sum is
          `values`. Error feedback adds the error to the next gradient; without error feedback it is lost.

        Raises:
          ValueError: If the codec does not support the type or shape of `values`.
        """
        raise NotImplementedError

    def _check_integer(self, option: str, *, at_least: int, at_most: int | None = None, multiple_of: int = 1) -> None:
        value = getattr(self, option)
        integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if integer and at_least <= value and (at_most is None or value <= at_most) and value % multiple_of == 0:
            return
        kind = "an integer" if multiple_of == 1 else f"a multiple of {multiple_of}"
        span = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise self._refusal(option, f"{kind} {span}")

    def _refusal(self, option: str, allowed: str) -> ValueError:
        return ValueError(f"`{option}` of {type(self).__name__} must be {allowed}, got {getattr(self, option)!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordCodec(Codec):
    """A codec that encodes rows of float32 as rows of int32 words, which every collective can carry.

    Base class for your own codecs: define `granule`, `words`, `encode` and `decode`. The arguments `min_elements`,
    `start_step` and `error_feedback` are those of `Codec`.
    """

    # True: all-to-all of encoded chunks, sum of the decoded chunks, encode again, all-gather. False: one all-gather.
    two_shot: ClassVar[bool] = True
    # Whether zeros decode to zeros. If not, padding repeats values of its block, and its residual is dropped.
    keeps_zeros: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        if not hasattr(cls, "name"):  # For logs and checkpoints. A codec of the user needs no name of its own.
            cls.name = cls.__name__.lower()

    @property
    def granule(self) -> int:
        """Number of elements that are encoded as a unit; gradients are padded to a multiple of it."""
        raise NotImplementedError

    @property
    def states(self) -> int:
        """Number of state tensors (residual, momentum), each float32, shaped like the encoded values, first zeros."""
        return int(self.error_feedback)

    def words(self, elements: int) -> int:
        """Number of int32 words to which a row of `elements` float32 values is encoded."""
        raise NotImplementedError

    def encode(self, values: tf.Tensor) -> tf.Tensor:
        """Encodes rows of gradients: float32 [rows, elements] -> int32 [rows, words]."""
        raise NotImplementedError

    def decode(self, words: tf.Tensor, elements: int) -> tf.Tensor:
        """Decodes what `encode` has returned: int32 [rows, words] -> float32 [rows, elements].

        If a row held an Inf or NaN before it was encoded, so does the decoded row, possibly at another position.
        """
        raise NotImplementedError

    def bound(self, words: tf.Tensor, elements: int) -> tf.Tensor | None:
        """Upper bounds of the magnitudes in encoded rows, float32 [rows, ...], or None if only decoding can tell.

        The sum over rows bounds every sum of decoded rows. Not finite if any encoded value was not, so that a test for
        finite gradients need not look at each value.
        """
        del words, elements
        return None

    def compress(self, values: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        """Encodes `values` plus the residual, and computes the new residual.

        Args:
          values: Float32 [rows, elements].
          state: `states` tensors of the same shape.

        Returns:
          The int32 words [rows, words], and the new state. If a value is Inf or NaN, the new state is unusable, and the
          caller must keep the old one.
        """
        self._check_values(values, state)
        if not self.error_feedback:
            return self.encode(values), ()
        intended = values + state[0]
        words = self.encode(intended)
        return words, (intended - self.decode(as_sent(words, intended), values.shape[-1]),)

    def round_trip(self, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = as_float32(values, type(self).__name__)
        if not values.shape.num_elements():
            return values, values
        flat = tf.reshape(values, [-1])
        elements = flat.shape[0]
        padding = -elements % self.granule
        # Pad like a bucket: with zeros, or by repeating the last elements if the codec does not keep zeros.
        like = tf.zeros([1]) if self.keeps_zeros else flat[-(elements % self.granule) :]
        row = tf.concat([flat, tf.tile(like, [padding])[:padding]], axis=0)[tf.newaxis]
        words, state = self.compress(row, (tf.zeros_like(row),) * self.states)
        received = self.decode(as_sent(words, row), elements + padding)
        rest = state[-1] if state else row - received
        return tuple(tf.reshape(part[0, :elements], values.shape) for part in (received, rest))

    def for_rows(self) -> "WordCodec":
        return dataclasses.replace(self, error_feedback=False)

    # The checks run while tracing, so they cost nothing per step.

    def _check_values(self, values: tf.Tensor, state: State | None = None) -> None:
        """Raises if `values` cannot be encoded or `state` has a wrong number of tensors."""
        rank, dtype = len(values.shape), tf.as_dtype(values.dtype)
        if rank != 2 or dtype != tf.float32 or values.shape[1] is None or values.shape[1] % self.granule:
            raise ValueError(
                f"{type(self).__name__} encodes float32 [rows, elements] with elements a multiple of {self.granule}, "
                f"got {dtype.name} {list(values.shape)}. Cast and pad the values; `round_trip` takes any shape."
            )
        if state is not None and len(state) != self.states:
            raise ValueError(
                f"{type(self).__name__} keeps {self.states} state tensors between steps, got {len(state)}. Start with "
                f"{self.states} tensors of zeros in the shape of the encoded values."
            )

    def _check_words(self, words: tf.Tensor, elements: int) -> None:
        """Raises if `words` cannot be the encoding, by this codec, of rows of `elements`."""
        dtype = tf.as_dtype(words.dtype)
        of_elements = elements % self.granule == 0 and len(words.shape) == 2 and words.shape[1] == self.words(elements)
        if dtype != tf.int32 or not of_elements:
            raise ValueError(
                f"{type(self).__name__} decodes int32 [rows, words(elements)] with elements a multiple of "
                f"{self.granule}, got {dtype.name} {list(words.shape)} for {elements} elements. Pass the result of "
                "`encode` and the number of elements of its rows."
            )


def as_sent(words: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Returns `words`, so that XLA decodes them as they are, in the program that has encoded them from `values`.

    On a GPU, XLA leaves out the conversion of numbers to a shorter type and back, to keep more precision. A residual
    would then be zero. It does not know that the number added here, the sign bit of a magnitude, is always 0.
    """
    magnitude = tf.bitwise.bitwise_and(tf.bitcast(values[:, :1], tf.int32), 0x7FFFFFFF)
    return words + tf.bitwise.right_shift(magnitude, 31)


def as_float32(values: tf.Tensor, codec: str) -> tf.Tensor:
    """Casts `values` to float32; raises if their type is not in `ENCODED` or their shape is not static."""
    values = tf.convert_to_tensor(values)
    if values.dtype not in ENCODED or not values.shape.is_fully_defined():
        allowed = ", ".join(dtype.name for dtype in ENCODED)
        raise ValueError(
            f"{codec} takes {allowed} of static shape, got {values.dtype.name} of shape {values.shape}. Cast it first."
        )
    return tf.cast(values, tf.float32)
