"""Writes and reads the two files of a worker in a commit: the raw bytes of all arrays, and JSON with their offsets."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.backup.commit_store import Commit, Draft

_SAME_SIZE = {1: np.uint8, 2: np.uint16}  # Python's buffers do not support bfloat16

Packed = tuple[list[Any], list[memoryview]]


def pack(arrays: Mapping[str, Any], buffers: dict[str, np.ndarray]) -> Packed:
    """Returns an index of the tensors and arrays of a commit's file, and copies of their bytes.

    Reuses the buffers of the previous call, because memory that is new to a process costs several times a copy.
    """
    index: list[Any] = []
    pieces, offset = [], 0
    for name, array in arrays.items():
        dtype, view = _on_host(array)
        index.append([name, dtype, list(view.shape or ()), offset])
        offset += view.nbytes
        if view.nbytes:
            if name not in buffers or buffers[name].nbytes != view.nbytes:
                buffers[name] = np.empty([view.nbytes], np.uint8)
            np.copyto(buffers[name], np.frombuffer(view, np.uint8))
            pieces.append(buffers[name].data)
    return index, pieces


def unpack(index: Sequence[Any], content: bytearray) -> dict[str, np.ndarray]:
    """Returns the arrays that `pack` has packed, by name, as views of the file's `content`."""
    arrays = {}
    for name, dtype, shape, offset in index:
        kind = tf.as_dtype(dtype).as_numpy_dtype
        arrays[name] = np.frombuffer(content, kind, int(np.prod(shape)), offset).reshape(shape)
    return arrays


def _on_host(array: Any) -> tuple[str, memoryview]:
    name = array.dtype.name
    if isinstance(array, np.ndarray):
        array = np.asarray(array, order="C")
        return name, (array.view(_SAME_SIZE[array.itemsize]) if array.dtype.kind == "V" else array).data
    if "GPU" in array.device:
        with tf.device("CPU"):
            array = tf.identity(array)
    if np.dtype(array.dtype.as_numpy_dtype).kind == "V":
        array = tf.bitcast(array, _SAME_SIZE[array.dtype.size])
    return name, memoryview(array)


def write_part(draft: Draft, name: str, packed: Packed, plain: Any) -> dict[str, Any]:
    """Writes a worker's arrays and JSON as two files of a draft. Returns the results of `Draft.write` by file name."""
    index, pieces = packed
    text = json.dumps({"arrays": index, "plain": plain}).encode()
    return {f"{name}.bin": draft.write(f"{name}.bin", pieces), f"{name}.json": draft.write(f"{name}.json", [text])}


def read_part(commit: Commit, name: str) -> tuple[dict[str, Any], Any]:
    """Returns the arrays and the JSON that `write_part` has written to a commit.

    Raises:
      BackupError: If a file cannot be read or has changed.
    """
    text = json.loads(commit.read(f"{name}.json"))
    return unpack(text["arrays"], commit.read(f"{name}.bin")), text["plain"]
