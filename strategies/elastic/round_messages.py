"""Messages between worker 0 and a member of a round: a kind, JSON, and arrays as raw bytes."""

import dataclasses
import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.strategies.elastic.member_socket import MemberSocket

_SIZES = struct.Struct("!IQ")  # Bytes of the header, bytes of all arrays.
_MOST_HEADER_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True)
class Message:
    """A message on a member's connection.

    Attributes:
      kind: Name of its kind, such as "weights".
      fields: JSON.
      arrays: Arrays of numbers.
    """

    kind: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    arrays: Sequence[np.ndarray] = ()


def send_message(connection: MemberSocket, message: Message) -> None:
    """Sends a message. Raises `OSError` if the connection fails."""
    arrays = [np.asarray(array, order="C") for array in message.arrays]
    described = [[array.dtype.name, list(array.shape)] for array in arrays]
    header = json.dumps({"kind": message.kind, "fields": message.fields, "arrays": described}).encode()
    connection.send_all(_SIZES.pack(len(header), sum(array.nbytes for array in arrays)) + header)
    for array in arrays:
        if array.nbytes:
            connection.send_all(array.reshape(-1).view(np.uint8).data)


def receive_message(connection: MemberSocket) -> Message:
    """Receives a message.

    Raises:
      OSError: If the connection fails or ends.
      ValueError: If the other end sends something else.
    """
    header_bytes, array_bytes = _SIZES.unpack(connection.receive_exactly(_SIZES.size))
    if header_bytes > _MOST_HEADER_BYTES:
        raise ValueError(f"a header of {header_bytes} bytes is no message of tfdist")
    connection.is_in_message = True
    header = json.loads(bytes(connection.receive_exactly(header_bytes)))
    content, arrays, offset = connection.receive_exactly(array_bytes), [], 0
    for name, shape in header["arrays"]:
        dtype = np.dtype(tf.as_dtype(name).as_numpy_dtype)
        size = int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(content, dtype, size, offset).reshape(shape))
        offset += size * dtype.itemsize
    return Message(header["kind"], header["fields"], arrays)
