"""Python values as JSON and arrays, and back: what is known here, and nothing that a file could make a program run.

Arrays go to files of raw bytes, one after another; an index says which is where.
"""

import base64
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_PLAIN = (type(None), bool, int, float, str)
_OPERATIONS = {"keras.ops": keras.ops, "numpy": np}  # monitors hold a comparison
_SAME_SIZE = {1: np.uint8, 2: np.uint16}  # Python's buffers know no bfloat16
_GROUPS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
# What a defaultdict may be told to make: what a file can name.
_MADE = {
    kind.__name__: kind
    for kind in (bool, int, float, str, bytes, list, tuple, set, frozenset, deque, defaultdict, *_MAPPINGS.values())
}


def encode(value: Any, arrays: list[np.ndarray]) -> Any:
    """`value` as JSON; arrays in it are put at the end of `arrays`. Another thread may change it meanwhile.

    Raises:
      TypeError: If it holds anything but None, bool, int, float, str, bytes, NumPy arrays and scalars, eager tensors
        and variables (of which it takes the value), functions of `keras.ops` and NumPy, and lists, tuples, sets, dicts,
        and what `collections` has of deques, Counters, OrderedDicts, and defaultdicts of built-in types, of these.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    for name, mapping in _MAPPINGS.items():
        if kind is mapping:
            return {name: _encode_items(value, arrays)}
    if kind is defaultdict and (value.default_factory is None or value.default_factory in _MADE.values()):
        return {"defaultdict": [getattr(value.default_factory, "__name__", None), _encode_items(value, arrays)]}
    if kind is deque:
        return {"deque": [value.maxlen, [encode(own, arrays) for own in list(value)]]}
    for name, group in _GROUPS.items():
        if kind is group:
            return {name: [encode(own, arrays) for own in list(value)]}
    if tf.is_tensor(value) and hasattr(value, "numpy"):
        value = value.numpy()
    if isinstance(value, np.ndarray | np.generic) and _is_number(value.dtype):
        arrays.append(np.asarray(value))
        return {"array" if isinstance(value, np.ndarray) else "scalar": len(arrays) - 1}
    for name, module in _OPERATIONS.items():
        called = getattr(value, "__name__", "")
        if callable(value) and getattr(module, called, None) is value:
            return {name: called}
    raise TypeError(f"{kind.__name__} cannot be saved")


def _encode_items(value: Mapping[Any, Any], arrays: list[np.ndarray]) -> list[list[Any]]:
    return [[encode(key, arrays), encode(own, arrays)] for key, own in list(value.items())]


def decode(node: Any, arrays: Sequence[np.ndarray]) -> Any:
    """What `encode` was given."""
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "bytes":
        return base64.b64decode(content)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind](_decoded_items(content, arrays))
    if kind == "defaultdict":
        made, items = content
        return defaultdict(None if made is None else _MADE[made], _decoded_items(items, arrays))
    if kind == "deque":
        most, own = content
        return deque([decode(each, arrays) for each in own], most)
    if kind in _OPERATIONS:
        return getattr(_OPERATIONS[kind], content)
    if kind in _GROUPS:
        return _GROUPS[kind](decode(own, arrays) for own in content)
    return np.array(arrays[content]) if kind == "array" else arrays[content][()]


def _decoded_items(items: Sequence[Any], arrays: Sequence[np.ndarray]) -> dict[Any, Any]:
    return {decode(key, arrays): decode(own, arrays) for key, own in items}


def with_arrays(node: Any, arrays: Sequence[np.ndarray]) -> Any:
    """What `encode` gave as one piece of JSON, for arrays that are small."""
    return [node, [[array.dtype.name, array.shape, base64.b64encode(array.tobytes()).decode()] for array in arrays]]


def apart(given: Any) -> tuple[Any, list[np.ndarray]]:
    """What `with_arrays` was given."""
    node, arrays = given
    return node, [
        np.frombuffer(base64.b64decode(text), tf.as_dtype(dtype).as_numpy_dtype).reshape(shape)
        for dtype, shape, text in arrays
    ]


Packed = tuple[list[Any], list[memoryview]]


def pack(arrays: Mapping[str, Any], buffers: dict[str, np.ndarray]) -> Packed:
    """An index of tensors and arrays, and their bytes.

    Copies them, into the buffers that the time before has left: memory that is new to a process costs several times a
    copy.
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
    """The arrays by name, as views of `content`."""
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


def _is_number(dtype: np.dtype) -> bool:
    return dtype.kind in "biufc" or (dtype.kind == "V" and dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"))
