"""Launches collective operations on one replica, under keys that all replicas agree on."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist import _tf
from tfdist.strategies.collectives.wire import Wire

# Away from the keys that TensorFlow gives to the broadcasts of initial values, which count up from 100.
_FIRST_INSTANCE_KEY = 1 << 20
_CARRIERS = {
    tf.bfloat16: tf.float32,
    **dict.fromkeys((tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32),
    tf.uint32: tf.int64,
}
# What no type that collectives know holds: gathered as it lies in memory.
_AS_BITS = (tf.uint64, tf.complex64, tf.complex128)
# What they add up; and as what others are added up: the real and the imaginary part, whole numbers of as many bits.
_KNOWN = (tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64)
_ADDED_AS = {tf.uint64: tf.int64, tf.complex64: tf.float32, tf.complex128: tf.float64}
_IN_ONE_GO_BYTES = 48 << 10  # That a replica sends.
_BYTES = [bytes([byte]) for byte in range(256)]


def carrier_of(dtype: tf.DType | None) -> tf.DType | None:
    """A type that collectives know, to which a value of one that they do not can be cast and back; else `None`."""
    return None if dtype is None else _CARRIERS.get(tf.as_dtype(dtype))


def to_add_up(tensor: tf.Tensor) -> tf.Tensor:
    """`tensor` as one of a type that collectives add up, if there is one for it; back by `added_up`."""
    if tensor.dtype in _ADDED_AS:
        return tf.bitcast(tensor, _ADDED_AS[tensor.dtype])
    return tf.cast(tensor, _CARRIERS[tensor.dtype]) if _is_small(tensor.dtype) else tensor


def added_up(total: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """What a sum of `to_add_up` is in the type of its terms; a whole number that is too large begins anew there."""
    return tf.bitcast(total, dtype) if dtype in _ADDED_AS else tf.cast(total, dtype)


def is_added_up(dtype: tf.DType) -> bool:
    """Whether collectives add up tensors of this type, or of what `to_add_up` makes of it."""
    return dtype in _KNOWN or dtype in _ADDED_AS or _is_small(dtype)


def _is_small(dtype):
    return dtype.is_integer and dtype in _CARRIERS


def sum_in_order(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum, to the bit that of adding one after another."""
    total = terms[0]
    for place, term in enumerate(terms[1:], start=1):
        # TensorFlow would make one `tf.add_n` of it, which begins with whichever term it may overwrite.
        total = tf.add(total if place == 1 else tf.raw_ops.Snapshot(input=total), term)
    return total


class Launcher(_tf.CollectiveReplicaLauncher):
    """A launcher whose instance keys are counted while the step runs.

    Every collective needs a key that is equal on all replicas and that no other collective in flight has. TensorFlow
    feeds the key when a `tf.function` is called, which does not cross nested control flow (`steps_per_execution`,
    gradient accumulation), or fixes it while tracing, which goes wrong when one worker traces again (a short last
    batch) and another does not. Here the key is run-time state: each replica counts its collectives in a variable of
    its own. Automatic control dependencies order the counting as the program is written, so the counts agree wherever
    all replicas run the same collectives in the same order, whoever traced what when, in branches and loops alike.

    Costs one integer addition a collective. The collectives themselves run side by side, except on GPUs, where NCCL
    needs an order.

    Attributes:
      count: The key of the collective that was launched last, int32 [].
      untouched: A variable that nobody reads or writes, on a CPU.
      wire: Carries all but what `all_to_all` does by itself, if there is one.
      is_ordered: Whether sums are added up in the order of replicas, in a graph.
    """

    wire: Wire | None = None
    is_ordered = False

    def __init__(self, group_key, group_size, collective_keys, device, options):
        super().__init__(group_key, group_size, collective_keys, device, options)
        host = tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0)
        with tf.init_scope(), tf.device(host.to_string()):
            self.count = tf.Variable(_FIRST_INSTANCE_KEY, dtype=tf.int32, trainable=False, name="collectives_launched")
        with tf.init_scope(), tf.device(device if "CPU" in device else host.to_string()):
            self.untouched = tf.Variable(0.0, trainable=False, name="untouched")

    def _use_ordering_token(self):
        return "GPU" in self._device

    def _get_ordering_token(self):
        if self._use_ordering_token() or tf.executing_eagerly():
            return super()._get_ordering_token()
        # TensorFlow runs stateful operations that have no resource one after another, also those of two replicas that
        # wait for each other, and those that share one. A handle that it takes for another resource each time keeps a
        # collective out of both orders. (A VarHandleOp each time would not: it is of the first kind itself.)
        return tf.raw_ops.Reshape(tensor=self.untouched.handle, shape=tf.constant([], tf.int32))

    def _next_instance_key(self):
        # As a tensor, at once: what reads the variable later, as in a loop, keeps the next collective waiting.
        return tf.convert_to_tensor(self.count.assign_add(1))

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
        """Gathers strings as bytes, filled up to the longest of all replicas, and their lengths."""
        lengths = tf.strings.length(strings)
        longest = self._all_gather(tf.reduce_max(tf.reshape(lengths, [-1]), keepdims=True), options)
        longest = tf.maximum(tf.reduce_max(longest), 1)  # None are as the least number.
        filled = self._all_gather(tf.io.decode_raw(strings, tf.uint8, fixed_length=longest), options)
        joined = tf.strings.reduce_join(tf.gather(_BYTES, tf.cast(filled, tf.int32)), axis=-1)
        lengths = self._all_gather(lengths, options)
        return tf.strings.substr(joined, tf.zeros_like(lengths), lengths)

    def all_reduce(self, input_tensor, control_input=None, options=None) -> tf.Tensor:
        """Sums tensors of equal shape.

        In order, each replica adds up a part, and sends the sum to all: the same bits on virtual devices and between
        workers, whatever carries it. Traffic a replica: 2 (replicas - 1) / replicas of the tensor, as in a ring; what
        is little, up to 48 KiB to all others together, goes to them whole.
        """
        if not self.is_ordered or tf.executing_eagerly():
            return super().all_reduce(input_tensor, control_input, options)
        with tf.device(self._device), self._control_input(control_input):
            return tf.ensure_shape(self._in_order(input_tensor, options), input_tensor.shape)

    def in_one_go(self, size: int) -> bool:
        """Whether so many bytes go to all at once: between two that is no more, and of little it does not matter."""
        others = self._group_size - 1
        return self.is_ordered and (others == 1 or size * others <= _IN_ONE_GO_BYTES)

    def _in_order(self, tensor, options):
        flat, elements = tf.reshape(tensor, [-1]), tensor.shape.num_elements()

        def whole():
            return sum_in_order(self.rows_of_all(flat, options))

        def by_parts():
            ranks, size = self._group_size, tf.size(flat)
            rows = tf.reshape(tf.pad(flat, [[0, -size % ranks]]), [ranks, -1])
            part = sum_in_order(self.rows_of_all(rows, options, apart=True))
            return tf.concat(self.rows_of_all(part[0], options), axis=0)[:size]

        if self._group_size == 2:
            total = whole()
        elif elements is None:  # Another replica may know, and all must do the same.
            total = tf.cond(self.in_one_go(tf.size(flat) * tensor.dtype.size), whole, by_parts)
        else:
            total = whole() if self.in_one_go(elements * tensor.dtype.size) else by_parts()
        return tf.reshape(total, tf.shape(tensor))

    def all_gather_rows(self, tensor: tf.Tensor, options) -> tf.Tensor:
        """Joins tensors of equal shape along their first axis: [n, ...] -> [replicas * n, ...]."""
        if self._wire_for(tensor, options):
            return tf.concat(self.rows_of_all(tensor, options), axis=0)
        return self._all_gather(tensor, options)

    def all_to_all(self, rows: tf.Tensor, options) -> tf.Tensor:
        """Sends row j to replica j: [replicas, ...] -> [replicas, ...], row i from replica i."""
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

    def rows_of_all(self, rows: tf.Tensor, options, *, apart: bool = False) -> list[tf.Tensor]:
        """What each replica sends, in their order: [n, ...] each; or `apart`, as `all_to_all` does, [1, ...] each."""
        if wire := self._wire_for(rows, options):
            key, token = self._next_instance_key(), self._get_ordering_token()
            return wire.exchange(rows, self._group_key, key, token, apart=apart)
        joined = self.all_to_all(rows, options) if apart else self._all_gather(rows, options)
        parts = tf.split(joined, self._group_size)
        return [tf.ensure_shape(part, [1, *rows.shape[1:]] if apart else rows.shape) for part in parts]

    def _wire_for(self, rows, options) -> Wire | None:
        # TensorFlow alone gives collectives a deadline.
        goes = self.wire is not None and self.wire.carries(rows) and not self._options.merge(options).timeout_seconds
        return self.wire if goes else None
