"""Launches TensorFlow's collectives on one replica, under instance keys that are equal on all replicas."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.strategies.collectives.host_device import host_of

# Far above TensorFlow's keys for broadcasts of initial values, which count up from 100.
_FIRST_INSTANCE_KEY = 1 << 20
FIRST_KEY_BESIDE = 1 << 30  # Keys of exchanges that run beside steps begin here.
# Keys begin anew after so many, far more than run at a time. So the keys of steps stay below those beside steps, and
# no key is negative: with `compression="auto"` a large model counts thousands of keys in a step.
_NUMBER_OF_KEYS = 1 << 29
_CARRIERS = {
    tf.bfloat16: tf.float32,
    **dict.fromkeys((tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32),
    tf.uint32: tf.int64,
}
# Types that cannot be cast to one that collectives support. They are gathered as raw bits.
_AS_BITS = (tf.uint64, tf.complex64, tf.complex128)
# Types that collectives can sum; and types that are summed as another type: complex numbers as their real and imaginary
# part, unsigned integers as integers of the same width.
_KNOWN = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)
_ADDED_AS = {tf.uint64: tf.int64, tf.complex64: tf.float32, tf.complex128: tf.float64}
_BYTES = [bytes([byte]) for byte in range(256)]


def carrier_of(dtype: tf.DType | None) -> tf.DType | None:
    """A type that collectives support, to which an unsupported `dtype` can be cast without loss, or None."""
    return None if dtype is None else _CARRIERS.get(tf.as_dtype(dtype))


def to_add_up(tensor: tf.Tensor) -> tf.Tensor:
    """Converts `tensor` to a type that collectives can sum, if needed and possible; `added_up` converts sums back."""
    if tensor.dtype in _ADDED_AS:
        return tf.bitcast(tensor, _ADDED_AS[tensor.dtype])
    return tf.cast(tensor, _CARRIERS[tensor.dtype]) if _is_small(tensor.dtype) else tensor


def added_up(total: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Converts a sum of `to_add_up` results back to `dtype`. Integers that are too large wrap around."""
    return tf.bitcast(total, dtype) if dtype in _ADDED_AS else tf.cast(total, dtype)


def is_added_up(dtype: tf.DType) -> bool:
    """Whether collectives can sum tensors of this type, directly or through `to_add_up`."""
    return dtype in _KNOWN or dtype in _ADDED_AS or _is_small(dtype)


def _is_small(dtype):
    return dtype.is_integer and dtype in _CARRIERS


class CollectiveLauncher(tf_internals.CollectiveReplicaLauncher):
    """Launches the collectives of one replica, with instance keys that it computes while the step runs.

    Every collective needs an instance key that is equal on all replicas and that no other running collective has.
    TensorFlow feeds the key when a `tf.function` is called, which fails in nested control flow (`steps_per_execution`,
    gradient accumulation). Or it fixes the key while tracing, which fails when only some workers trace again (a short
    last batch). Here each replica counts its collectives in a variable, in the order of the program, also in branches
    and loops. The counts agree if all replicas run the same collectives in the same order, whenever they traced them.

    Costs a few integer operations per collective. The collectives run concurrently, except on GPUs, where NCCL needs an
    order.

    The argument `first_key` is the key before that of the first collective.

    Attributes:
      count: The number of collectives launched so far, int64 [].
      untouched: A variable on a CPU, for operations that need a resource; none reads or writes it.
    """

    def __init__(self, group_key, group_size, collective_keys, device, options, first_key=_FIRST_INSTANCE_KEY):
        super().__init__(group_key, group_size, collective_keys, device, options)
        self._host = host = host_of(device)
        with tf.init_scope(), tf.device(host):
            self.count = tf.Variable(0, dtype=tf.int64, trainable=False, name="collectives_launched")
        self._first_key = first_key
        with tf.init_scope(), tf.device(device if "CPU" in device else host):
            self.untouched = tf.Variable(0.0, trainable=False, name="untouched")
        self._reserved: tuple[Iterator[tf.Tensor], tf.Tensor] | None = None  # Keys, and a resource; see `reserve`.

    def reserve(self, most: int) -> Callable[[], AbstractContextManager[None]]:
        """Reserves keys for up to `most` collectives of a branch, and returns a context for tracing each branch.

        A branch is one operation. If it counted its collectives in the variable, the count of the next collective, and
        with it this collective, would wait until the whole branch has run. In the context a branch takes keys that are
        counted before it. Contexts for other branches of the same operation take the same keys, since one branch runs.
        """
        last = self._counted(most)
        token = self._get_ordering_token()

        @contextlib.contextmanager
        def branch() -> Iterator[None]:
            self._reserved = (self._key_before(last, place) for place in reversed(range(most))), token
            try:
                yield
            finally:
                self._reserved = None

        return branch

    def _use_ordering_token(self):
        return "GPU" in self._device

    def _get_ordering_token(self):
        if self._use_ordering_token() or tf.executing_eagerly():
            return super()._get_ordering_token()
        # TensorFlow runs stateful operations without a resource one after another, which would block two replicas that
        # wait for each other. The same holds for operations that share a resource. A reshaped handle counts as a new
        # resource each time, which avoids both orders. (A new VarHandleOp would be stateful without a resource.)
        handle = self.untouched.handle if self._reserved is None else self._reserved[1]
        return tf.raw_ops.Reshape(tensor=handle, shape=tf.constant([], tf.int32))

    def _next_instance_key(self, count=1):
        if self._reserved is not None:
            return [next(self._reserved[0]) for _ in range(count)][-1]
        # Convert to a tensor now: a later read of the variable, as in a loop, would delay the next collective.
        with tf.device(self._host):
            return self._first_key + self._counted(count)

    def _counted(self, count: int) -> tf.Tensor:
        """Counts collectives. Returns the number of the last one within all keys, int32 []."""
        # On the host, also in steps on a GPU: a copy from the GPU would wait for all that the GPU has been given.
        with tf.device(self._host):
            number = tf.convert_to_tensor(self.count.assign_add(count))
            return tf.cast(tf.bitwise.bitwise_and(number, _NUMBER_OF_KEYS - 1), tf.int32)

    def _key_before(self, number: tf.Tensor, count: int) -> tf.Tensor:
        """Returns the key of the collective that is `count` before the one with a number, both int32 []."""
        with tf.device(self._host):  # The numbers before the first one have the last keys.
            return self._first_key + tf.bitwise.bitwise_and(number - count, _NUMBER_OF_KEYS - 1)

    def _all_gather(self, input_tensor, options):
        dtype = input_tensor.dtype
        if dtype == tf.string:
            return self._all_gather_strings(input_tensor, options)
        if dtype in _AS_BITS:
            bits = super()._all_gather(tf.bitcast(input_tensor, tf.int64), options)
            return tf.bitcast(bits, dtype)
        carrier = carrier_of(dtype) or dtype
        return tf.cast(super()._all_gather(tf.cast(input_tensor, carrier), options), dtype)

    def _all_gather_strings(self, strings, options):
        """Gathers strings as bytes, padded to the longest string of all replicas, and their lengths."""
        lengths = tf.strings.length(strings)
        longest = self._all_gather(tf.reduce_max(tf.reshape(lengths, [-1]), keepdims=True), options)
        longest = tf.maximum(tf.reduce_max(longest), 1)  # The maximum of no strings is the least integer.
        filled = self._all_gather(tf.io.decode_raw(strings, tf.uint8, fixed_length=longest), options)
        joined = tf.strings.reduce_join(tf.gather(_BYTES, tf.cast(filled, tf.int32)), axis=-1)
        lengths = self._all_gather(lengths, options)
        return tf.strings.substr(joined, tf.zeros_like(lengths), lengths)

    def next_exchange(self, count: int = 1) -> tuple[int, tf.Tensor]:
        """Counts `count` exchanges over own connections. Returns their group, and the key of the last one.

        The others have the keys before it.
        """
        return self._group_key, self._next_instance_key(count)

    def has_timeout(self, options: Any) -> bool:
        """Whether the options ask for a `timeout_seconds`, which only TensorFlow's collectives support."""
        return bool(self._options.merge(options).timeout_seconds)

    def all_to_all(self, rows: tf.Tensor, options: Any) -> tf.Tensor:
        """Sends row j of a tensor to replica j: [replicas, ...] -> [replicas, ...] with row i from replica i."""
        key, token = self._next_instance_key(), self._get_ordering_token()
        options = self._options.merge(options)
        with tf.device(self._device):
            return tf.raw_ops.CollectiveAllToAllV2(
                input=rows,
                group_size=self._group_size,
                group_key=self._group_key,
                instance_key=key,
                ordering_token=[] if token is None else [token],
                communication_hint=options.implementation.value,
                timeout_seconds=options.timeout_seconds or 0,
            )
