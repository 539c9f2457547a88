"""Serialization of Python values to JSON and arrays. Only known types are supported, so a file cannot run code."""

import base64
import itertools
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._compat import tf_internals

_PLAIN = (type(None), bool, int, float, str)
_OPERATIONS = {"keras.ops": keras.ops, "numpy": np}  # callbacks with `monitor` hold a comparison
_BITS = {
    kind.__name__: kind
    for kind in (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
}
# Random generators by name: the type, and functions to read a state, to set a state, and to make a generator.
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
# The factories that a defaultdict may have, since a file can name them.
_MADE = {
    kind.__name__: kind
    for kind in (bool, int, float, str, bytes, list, tuple, set, frozenset, deque, defaultdict, *_MAPPINGS.values())
}


class AbsentError(Exception):
    """An object that a backup can only restore in place, such as a layer, does not exist."""


def encode(value: Any, arrays: list[np.ndarray], left: Container[int] | None = None) -> Any:
    """Returns `value` as JSON for a backup and appends its arrays to `arrays`. Threads may change `value` meanwhile.

    Args:
      value: None, a number, bool, str, bytes, eager tensor, or a NumPy array or scalar of a TensorFlow type. Also a
        variable, layer, metric or other Keras object with variables, of which the values are saved. Also a random
        generator, or a function of `keras.ops` or NumPy. Also a list, tuple, set, dict or deque of these. Counters,
        OrderedDicts, and defaultdicts of built-in types count as dicts.
      arrays: The list to which the arrays of `value` are appended.
      left: The `id`s of variables that are saved elsewhere, which are not read and not restored. `None` if `decode`
        gets no `present`; then objects that can only be restored in place, such as layers, are not supported.

    Raises:
      TypeError: If `value` contains a value of another type.
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
            in_place = left if name in ("list", "tuple") else None  # Members of sets have no order.
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
    if kind is np.ndarray or isinstance(value, np.generic):  # A subclass may hold more, such as a mask.
        return {"array" if kind is np.ndarray else "scalar": _put(value, arrays)}
    variables = _variables_of(value)
    if variables is not None and left is not None:
        return {"variables": [encode(variable, arrays, left) for variable in variables]}
    for name, module in _OPERATIONS.items():
        for called, operation in list(vars(module).items()) if callable(value) else ():
            if operation is value:  # Not by `__name__`: no attribute of an unknown object is read.
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
    if isinstance(held, tf_internals.SyncOnReadVariable):  # All workers would have to read it together.
        raise TypeError("a variable with a separate part on each replica cannot be saved")
    return variable.numpy()


def _variables_of(value: Any) -> list[Any] | None:
    """Returns the variables to save for an object of Keras or TensorFlow; `None` if it has no such state."""
    if isinstance(value, keras.random.SeedGenerator | tf.random.Generator):
        return [value.state]
    if isinstance(value, keras.Layer | keras.metrics.Metric | keras.optimizers.Optimizer):
        return [variable for variable in value.variables if variable.dtype != "string"]
    return None


def decode(node: Any, arrays: Sequence[np.ndarray], present: Any = None) -> Any:
    """Returns the value that was given to `encode`.

    Args:
      node: The JSON that `encode` returned.
      arrays: The arrays that `encode` appended.
      present: The present value, if any. Its variables, generators and objects with variables, also those in lists and
        dicts, are kept and get new values.

    Raises:
      AbsentError: If an object with variables, or a variable saved elsewhere, has no counterpart in `present`.
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
        except ValueError:  # It has another algorithm.
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
    """Assigns saved values to the variables of `present`. Raises `AbsentError` if it is missing or has others."""
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
    """Returns JSON and small arrays, as `encode` makes them, as one JSON value."""
    return [node, [[array.dtype.name, array.shape, base64.b64encode(array.tobytes()).decode()] for array in arrays]]


def apart(given: Any) -> tuple[Any, list[np.ndarray]]:
    """Returns the JSON and the arrays that were given to `with_arrays`."""
    node, arrays = given
    return node, [
        np.frombuffer(base64.b64decode(text), tf.as_dtype(dtype).as_numpy_dtype).reshape(shape)
        for dtype, shape, text in arrays
    ]


def _is_number(dtype: np.dtype) -> bool:
    """Whether TensorFlow has this NumPy type, so that a backup can hold its arrays. TensorFlow has no long doubles."""
    if dtype.kind not in "biufc":
        return dtype.kind == "V" and dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
    try:
        return tf.as_dtype(dtype).as_numpy_dtype == dtype
    except TypeError:
        return False
