"""Python values as JSON and arrays, and back: what is known here, and nothing that a file could make a program run.

Arrays go to files of raw bytes, one after another; an index says which is where.
"""

import base64
import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import _tf

_PLAIN = (type(None), bool, int, float, str)
_OPERATIONS = {"keras.ops": keras.ops, "numpy": np}  # monitors hold a comparison
_SAME_SIZE = {1: np.uint8, 2: np.uint16}  # Python's buffers know no bfloat16
_BITS = {
    kind.__name__: kind
    for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}
# Of generators of random numbers: how a state is read, how it is given back, and what takes it if there is none.
_GENERATORS: dict[str, tuple[type, Any, Any, Any]] = {
    "random.Random": (random.Random, random.Random.getstate, random.Random.setstate, lambda _: random.Random()),
    "numpy.random.Generator": (
        np.random.Generator,
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
        lambda state: np.random.Generator(_BITS[state["bit_generator"]]()),
    ),
    "numpy.random.RandomState": (
        np.random.RandomState,
        lambda generator: generator.get_state(legacy=False),
        np.random.RandomState.set_state,
        lambda state: np.random.RandomState(_BITS[state["bit_generator"]]()),
    ),
}
_GROUPS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS = {"dict": dict, "Counter": Counter, "OrderedDict": OrderedDict}
# What a defaultdict may be told to make: what a file can name.
_MADE = {
    kind.__name__: kind
    for kind in (bool, int, float, str, bytes, list, tuple, set, frozenset, deque, defaultdict, *_MAPPINGS.values())
}


class AbsentError(Exception):
    """What can only be given back in place is not there."""


def encode(value: Any, arrays: list[np.ndarray], left: Container[int] | None = None) -> Any:
    """`value` as JSON; arrays in it are put at the end of `arrays`. Another thread may change it meanwhile.

    Args:
      value: To be encoded.
      arrays: Takes those in it.
      left: By `id`, variables that others save: they are not looked at, and stay as they are. `None` if `decode` is
        told of nothing in its place: what can only be given back in place is refused then, as are layers.

    Raises:
      TypeError: If it holds anything but None, bool, int, float, str, bytes, NumPy arrays and scalars of types that
        TensorFlow knows, eager tensors, variables, layers and metrics and what else Keras has with variables (of which
        it takes the values), generators of random numbers, functions of `keras.ops` and NumPy, and lists, tuples, sets,
        dicts, and what `collections` has of deques, Counters, OrderedDicts, and defaultdicts of built-in types, of
        these.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    for name, mapping in _MAPPINGS.items():
        if kind is mapping:
            return {name: _encode_items(value, arrays, left)}
    if kind is defaultdict and (value.default_factory is None or value.default_factory in _MADE.values()):
        return {"defaultdict": [getattr(value.default_factory, "__name__", None), _encode_items(value, arrays, left)]}
    if kind is deque:
        return {"deque": [value.maxlen, [encode(own, arrays, left) for own in list(value)]]}
    for name, group in _GROUPS.items():
        if kind is group:
            in_place = left if name in ("list", "tuple") else None  # Members of sets have no places.
            return {name: [encode(own, arrays, in_place) for own in list(value)]}
    for name, (generator, state, _, _) in _GENERATORS.items():
        if kind is generator:
            return {name: _encode_state(state(value), arrays)}
    if isinstance(value, tf.Variable | keras.Variable):
        if left is not None and id(value) in left:
            return {"left": None}
        return {"variable": [isinstance(value, keras.Variable), _put(_value_of(value), arrays)]}
    if isinstance(value, tf.Tensor) and hasattr(value, "numpy"):
        return {"tensor": _put(value.numpy(), arrays)}
    if kind is np.ndarray or isinstance(value, np.generic):  # A subclass may hold more, as a mask.
        return {"array" if kind is np.ndarray else "scalar": _put(value, arrays)}
    variables = _variables_of(value)
    if variables is not None and left is not None:
        return {"variables": [encode(variable, arrays, left) for variable in variables]}
    for name, module in _OPERATIONS.items():
        for called, operation in list(vars(module).items()) if callable(value) else ():
            if operation is value:  # Not by its `__name__`: of what is not known here no attribute is looked at.
                return {name: called}
    raise TypeError(f"{kind.__name__} cannot be saved")


def _encode_items(value: Mapping[Any, Any], arrays: list[np.ndarray], left: Container[int] | None) -> list[list[Any]]:
    return [[encode(key, arrays), encode(own, arrays, left)] for key, own in list(value.items())]


def _encode_state(state: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(state, dict) and state["bit_generator"] not in _BITS:
        raise TypeError(f"random numbers of {state['bit_generator']} cannot be saved")
    return encode(state, arrays)


def _put(value: Any, arrays: list[np.ndarray]) -> int:
    array = np.asarray(value)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not _is_number(array.dtype):
        raise TypeError(f"{array.dtype} cannot be saved")
    arrays.append(array)
    return len(arrays) - 1


def _value_of(variable: tf.Variable | keras.Variable) -> np.ndarray:
    held = variable.value if isinstance(variable, keras.Variable) else variable
    if isinstance(held, _tf.SyncOnReadVariable):  # All workers would have to read it, and not all may have it.
        raise TypeError("a variable of which each replica has its own part cannot be saved")
    return variable.numpy()


def _variables_of(value: Any) -> list[Any] | None:
    """The variables that are the state of an object of Keras' or TensorFlow's."""
    if isinstance(value, keras.random.SeedGenerator | tf.random.Generator):
        return [value.state]
    if isinstance(value, keras.Layer | keras.metrics.Metric | keras.optimizers.Optimizer):
        return [variable for variable in value.variables if variable.dtype != "string"]
    return None


def decode(node: Any, arrays: Sequence[np.ndarray], present: Any = None) -> Any:
    """What `encode` was given.

    Args:
      node: What it made of that.
      arrays: That were in it.
      present: What is in its place. Variables, generators and objects with variables, also in its lists and dicts, are
        the same, with new values.

    Raises:
      AbsentError: If it held an object with variables, or something that was left, and there is none in its place.
    """
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "bytes":
        return base64.b64decode(content)
    if kind in _MAPPINGS:
        return _MAPPINGS[kind](_decoded_items(content, arrays, present))
    if kind == "defaultdict":
        made, items = content
        return defaultdict(None if made is None else _MADE[made], _decoded_items(items, arrays, present))
    if kind == "deque":
        most, own = content
        return deque(_decoded(own, arrays, present if type(present) is deque else ()), most)
    if kind in _OPERATIONS:
        return getattr(_OPERATIONS[kind], content)
    if kind in _GROUPS:
        is_alike = kind in ("list", "tuple") and type(present) is _GROUPS[kind]
        return _GROUPS[kind](_decoded(content, arrays, present if is_alike else ()))
    if kind in _GENERATORS:
        return _generator(kind, decode(content, arrays), present)
    if kind in ("left", "variables"):
        _assign_in_place(content, arrays, present)
        return present
    if kind == "variable":
        is_keras, place = content
        return _variable(is_keras, arrays[place], present)
    if kind == "tensor":
        return tf.constant(arrays[content])
    return np.array(arrays[content]) if kind == "array" else arrays[content][()]


def _decoded(nodes: Sequence[Any], arrays: Sequence[np.ndarray], present: Collection[Any]) -> list[Any]:
    places = itertools.chain(present, itertools.repeat(None))
    return [decode(node, arrays, own) for node, own in zip(nodes, places, strict=False)]


def _decoded_items(items: Sequence[Any], arrays: Sequence[np.ndarray], present: Any) -> dict[Any, Any]:
    there = present if isinstance(present, dict) else {}
    keys = [decode(key, arrays) for key, _ in items]
    return {key: decode(own, arrays, there.get(key)) for key, (_, own) in zip(keys, items, strict=True)}


def _generator(kind: str, state: Any, present: Any) -> Any:
    generator, _, put, make = _GENERATORS[kind]
    if type(present) is generator:
        try:
            put(present, state)
            return present
        except ValueError:  # It draws in another way.
            pass
    made = make(state)
    put(made, state)
    return made


def _variable(is_keras: bool, value: np.ndarray, present: Any) -> Any:
    if _takes(present, value):
        present.assign(value)
        return present
    return keras.Variable(value, dtype=value.dtype.name) if is_keras else tf.Variable(value)


def _assign_in_place(nodes: Sequence[Any] | None, arrays: Sequence[np.ndarray], present: Any) -> None:
    """Gives the variables of an object their values, if it has the same ones; or looks whether there is an object."""
    if nodes is None:
        if present is None:
            raise AbsentError("a variable of the model")
        return
    variables = _variables_of(present) or []
    values = [None if "left" in node else arrays[node["variable"][1]] for node in nodes]
    if len(variables) != len(values) or not all(
        value is None or _takes(variable, value) for variable, value in zip(variables, values, strict=True)
    ):
        raise AbsentError("an object with the variables that it had")
    for variable, value in zip(variables, values, strict=True):
        if value is not None:
            variable.assign(value)


def _takes(present: Any, value: np.ndarray) -> bool:
    if not isinstance(present, tf.Variable | keras.Variable):
        return False
    return tuple(present.shape) == value.shape and tf.as_dtype(present.dtype) == tf.as_dtype(value.dtype)


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
    """Whether TensorFlow knows a type, by which arrays are read again; not so of long doubles."""
    if dtype.kind not in "biufc":
        return dtype.kind == "V" and dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    try:
        return tf.as_dtype(dtype).as_numpy_dtype == dtype
    except TypeError:
        return False
