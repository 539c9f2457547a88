"""What every codec offers: arithmetic on tensors that makes a gradient smaller. A codec knows no device, no network."""

import dataclasses
import numbers
from typing import ClassVar, Self

import tensorflow as tf

__all__ = ["ENCODED", "Codec", "WordCodec", "as_float32"]

State = tuple[tf.Tensor, ...]

# Of gradients that are compressed.
ENCODED = (tf.float16, tf.bfloat16, tf.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec:
    """How a large gradient is made smaller before it travels. The base of all codecs.

    Every function of a codec is deterministic and runs eagerly, in a graph and under `jit_compile=True`, on tensors of
    static shape.

    Args:
      min_elements: Tensors with fewer elements travel as they are; does not count where a function chooses the codec of
        each tensor.
      start_step: Gradients travel as they are until this step, the first being 0.
      error_feedback: Whether what encoding loses is kept on each replica and added to the next gradient, so that
        nothing is lost, only delayed.

    Raises:
      ValueError: If an option is out of range or of another type; the message says what is allowed.
    """

    name: ClassVar[str]
    # Whether so much is delayed that optimizers which divide by running squares of gradients, as Adam, go astray.
    for_sgd: ClassVar[bool] = False

    min_elements: int = 16384  # 64 KiB of float32: less is bound by latency, not by bytes
    start_step: int = 0
    error_feedback: bool = True

    def __post_init__(self) -> None:
        self._check_integer("min_elements", at_least=0)
        self._check_integer("start_step", at_least=0)
        if not isinstance(self.error_feedback, bool):
            raise self._refusal("error_feedback", "True or False")

    def for_rows(self) -> "WordCodec":
        """The codec without state for the rows of `tf.IndexedSlices`, which are other rows in every step."""
        raise NotImplementedError

    def round_trip(self, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """What others would receive of one gradient, and what would be left behind; for tests without any strategy.

        A first step, in which nothing was left behind before. Takes any number of elements.

        Args:
          values: float16, bfloat16 or float32, of any shape; of two axes at least for `PowerSGD`.

        Returns:
          What is received, and the rest, both float32 of the shape of `values`, which is their sum. Error feedback adds
          the rest to the next gradient; without it, it is lost.

        Raises:
          ValueError: If no codec takes such values.
        """
        raise NotImplementedError

    def _check_integer(self, option: str, *, at_least: int, at_most: int | None = None, multiple_of: int = 1) -> None:
        value = getattr(self, option)
        integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        if integer and at_least <= value and (at_most is None or value <= at_most) and value % multiple_of == 0:
            return
        kind = "an integer" if multiple_of == 1 else f"a multiple of {multiple_of}"
        span = f"from {at_least} up" if at_most is None else f"from {at_least} to {at_most}"
        raise self._refusal(option, f"{kind} {span}")

    def _refusal(self, option: str, allowed: str) -> ValueError:
        return ValueError(f"`{option}` of {type(self).__name__} must be {allowed}, got {getattr(self, option)!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WordCodec(Codec):
    """A codec that turns rows of float32 into rows of int32 words, a form that every collective carries.

    The base of codecs of one's own, which have a `granule`, `words`, `encode` and `decode`.
    """

    # All-to-all, sum of what is decoded, encoded again, all-gather; or else one all-gather of words.
    two_shot: ClassVar[bool] = True
    # Whether a zero arrives as zero. Otherwise padding is to be like the rest of its block, and its residual dropped.
    keeps_zeros: ClassVar[bool] = True

    @property
    def granule(self) -> int:
        """The number of elements in a row must be a multiple of this."""
        raise NotImplementedError

    @property
    def states(self) -> int:
        """Float32 tensors of state, each of the shape of what is encoded, all zeros at first."""
        return int(self.error_feedback)

    def words(self, elements: int) -> int:
        """Words that a row of `elements` takes."""
        raise NotImplementedError

    def encode(self, values: tf.Tensor) -> tf.Tensor:
        """Float32 [rows, elements] -> int32 [rows, words]."""
        raise NotImplementedError

    def decode(self, words: tf.Tensor, elements: int) -> tf.Tensor:
        """Int32 [rows, words] -> float32 [rows, elements].

        If a row of what was encoded had an Inf or NaN, its decoded row has one too, not always at the same place.
        """
        raise NotImplementedError

    def bound(self, words: tf.Tensor, elements: int) -> tf.Tensor | None:
        """Float32 [rows, ...], the sum of whose rows no sum of decoded rows exceeds; `None` if only decoding can tell.

        Not finite if a value of what was encoded was not, so that all need not be looked at to find that they are.
        """
        del words, elements
        return None

    def compress(self, values: tf.Tensor, state: State) -> tuple[tf.Tensor, State]:
        """Encodes, and keeps what was lost.

        Args:
          values: Float32 [rows, elements].
          state: As many tensors of that shape as `states` says.

        Returns:
          The words, and the new state. If a value is Inf or NaN, the new state is worthless: keep the old one then.
        """
        self._check_values(values, state)
        if not self.error_feedback:
            return self.encode(values), ()
        intended = values + state[0]
        words = self.encode(intended)
        return words, (intended - self.decode(words, values.shape[-1]),)

    def round_trip(self, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """See `Codec`."""
        values = as_float32(values, type(self).__name__)
        if not values.shape.num_elements():
            return values, values
        flat = tf.reshape(values, [-1])
        elements = flat.shape[0]
        padding = -elements % self.granule
        # As a bucket is padded: where zeros do not stay zeros, by the last elements again.
        like = tf.zeros([1]) if self.keeps_zeros else flat[-(elements % self.granule) :]
        row = tf.concat([flat, tf.tile(like, [padding])[:padding]], axis=0)[tf.newaxis]
        words, state = self.compress(row, (tf.zeros_like(row),) * self.states)
        received = self.decode(words, elements + padding)
        rest = state[-1] if state else row - received
        return tuple(tf.reshape(part[0, :elements], values.shape) for part in (received, rest))

    def for_rows(self) -> "WordCodec":
        """This codec without error feedback: rows of `tf.IndexedSlices` are other rows in every step."""
        return self._without_error_feedback()

    def _without_error_feedback(self) -> Self:
        return dataclasses.replace(self, error_feedback=False)

    # While tracing: a step does not pay for them.

    def _check_values(self, values: tf.Tensor, state: State | None = None) -> None:
        """Refuses what cannot be encoded, and another number of states than are kept."""
        rank, dtype = len(values.shape), tf.as_dtype(values.dtype)
        if rank != 2 or dtype != tf.float32 or values.shape[1] is None or values.shape[1] % self.granule:
            raise ValueError(
                f"{type(self).__name__} encodes float32 [rows, elements], elements a multiple of {self.granule}, not "
                f"{dtype.name} {list(values.shape)}. Pad and cast it; `round_trip` takes any shape."
            )
        if state is not None and len(state) != self.states:
            raise ValueError(
                f"{type(self).__name__} keeps {self.states} tensors from step to step, got {len(state)}; begin with as "
                "many of zeros, in the shape of what is encoded."
            )

    def _check_words(self, words: tf.Tensor, elements: int) -> None:
        """Refuses what was not encoded by this codec from as many elements."""
        dtype = tf.as_dtype(words.dtype)
        of_elements = elements % self.granule == 0 and len(words.shape) == 2 and words.shape[1] == self.words(elements)
        if dtype != tf.int32 or not of_elements:
            raise ValueError(
                f"{type(self).__name__} decodes int32 [rows, words(elements)], elements a multiple of {self.granule}, "
                f"not {dtype.name} {list(words.shape)} to {elements} elements."
            )


def as_float32(values: tf.Tensor, codec: str) -> tf.Tensor:
    """`values`, of any type that is compressed, as float32."""
    values = tf.convert_to_tensor(values)
    if values.dtype not in ENCODED or not values.shape.is_fully_defined():
        allowed = ", ".join(dtype.name for dtype in ENCODED)
        raise ValueError(
            f"{codec} takes {allowed} of static shape, not {values.dtype.name} of shape {values.shape}. Cast it first."
        )
    return tf.cast(values, tf.float32)
