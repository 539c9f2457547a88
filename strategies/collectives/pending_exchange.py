"""An exchange between workers of which some part has not arrived yet."""

import enum
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.strategies.collectives.ordered_sums import add_in_order
from tfdist.strategies.collectives.received_bytes import empty

FAILED = -1  # In place of a key; keys are positive.
MESSAGE = [tf.uint8, tf.int32]  # In an inbox: received bytes, and the key of their exchange.
MOST_BYTES = (1 << 31) - 1  # Largest message.


class ExchangeForm(enum.Enum):
    """The form of an exchange: what each worker sends, and what it makes of the bytes that it receives."""

    ALL_GATHER = 1  # Each worker sends its rows to all. The result has those of all.
    ALL_TO_ALL = 2  # Each worker sends one row to each. The result has those of all.
    SWAP = 3  # Two workers send a tensor to each other. The result is that of the other.
    SUM_WHOLE = 4  # Each worker sends a tensor to all. The result is the sum of all.
    SUM_PARTS = 5  # Each worker sends one row to each. The sum of all then goes to all, by an exchange ALL_GATHER.

    @property
    def sends_rows(self) -> bool:
        """Whether each worker gets another row of the tensor; otherwise all get the whole tensor."""
        return self in (ExchangeForm.ALL_TO_ALL, ExchangeForm.SUM_PARTS)


class PendingExchange:
    """An exchange between workers of which some part has not arrived yet, with its receive buffer.

    Attributes:
      workers: The numbers of the workers that take part.
      size: Number of bytes that each worker sends to a peer.
      form: The `ExchangeForm` of the exchange.
      missing: Workers with missing bytes.
      inbox: The queue from which this worker's step takes the result; `None` before the step joins.
      dtype: The NumPy type of this worker's part; `None` before the step joins.
      since: Time on the monotonic clock at which the step joined.
    """

    def __init__(self, workers: Sequence[int], size: int, form: ExchangeForm):
        if size > MOST_BYTES:
            raise ValueError(f"an exchange takes less than 2 GiB of each worker, got {size} bytes; split the tensors")
        self.workers, self.size, self.form, self.missing = workers, size, form, set(workers)
        self._tensor: Any = None
        self._bytes: Any = None
        self._lock = threading.Lock()
        self.inbox: Any = None
        self.dtype: Any = None
        self.since = 0.0

    def waits(self, since: float) -> bool:
        """Whether this worker's step has waited for the exchange since before the time `since`."""
        return self.inbox is not None and self.since < since

    def row(self, worker: int) -> Any:
        """Returns the part of the receive buffer for the bytes of a worker."""
        with self._lock:  # This worker's step and the receiving thread fill the buffer.
            if self._bytes is None:
                self._allocate()
        # A swap receives only the other worker's bytes.
        place = 0 if self.form is ExchangeForm.SWAP else self.workers.index(worker)
        return self._bytes[place * self.size : (place + 1) * self.size]

    def _allocate(self) -> None:
        with tf.device("CPU:0"):
            # TensorFlow owns the memory, so that no thread needs the interpreter's lock to free it.
            self._tensor = empty((1 if self.form is ExchangeForm.SWAP else len(self.workers)) * self.size)
        # A view, without a copy. `np.asarray` would make a read-only array.
        self._bytes = self._tensor.__array__().reshape(-1)

    def sum(self) -> np.ndarray:
        """Returns the sum of the received rows, in the order of workers."""
        total = np.empty(self.size // self.dtype.itemsize, self.dtype)
        self._add_into(total)
        return total

    def deliver(self, key: int) -> None:
        """Puts the received bytes, or the sum of them, and the key into the inbox of this worker's step."""
        received = self._tensor
        if self.form is ExchangeForm.SUM_WHOLE:
            received = empty(self.size)
            self._add_into(received.__array__().reshape(-1).view(self.dtype))
        tf.raw_ops.QueueEnqueueV2(handle=self.inbox.queue_ref, components=[received, tf.constant(key, tf.int32)])

    def _add_into(self, total: np.ndarray) -> None:
        add_in_order(self._bytes.view(self.dtype).reshape(len(self.workers), -1), total)
