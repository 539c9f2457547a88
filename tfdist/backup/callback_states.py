"""Saves the attributes that training has changed in the other callbacks of a `fit`, and restores them."""

import hashlib
import types
import weakref
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from absl import logging

from tfdist.backup import variable_states
from tfdist.backup.serialization import AbsentError, apart, decode, encode, with_arrays
from tfdist.backup.state_provider import CapturedState, SavedState, StateProvider, TrainedFit

Plain = tuple[Any, list[np.ndarray]]  # the JSON and the arrays of `encode`
Digest = tuple[Any, ...]
Start = tuple[Any, list[np.ndarray | Digest]]  # the same, with digests of large arrays

_COPIED_BYTES = 1 << 20

_OF_PROCESS = ("acquire", "cancel", "close", "is_alive", "savefig", "wait", "write", "writerow")
_NOT_STATE = ("_model", "params", "_is_tracing", "_writers")  # Two of TensorBoard's: profile and files of one process.


class CallbackStates(StateProvider):
    """Saves and restores the attributes that training changes in the callbacks of a `fit`.

    An unchanged attribute, such as an argument of `__init__`, is not saved: a restarted script may pass another value.
    A callback with `get_state` and `set_state` defines its own state, of values that `encode` accepts, without layers.
    Collections, variables and objects with variables, and random generators are restored in place. The model's
    variables are not saved here. A skipped `fit` gets only its history back. A warning is logged once for an attribute
    that can no longer be saved, and for an attribute that cannot be saved and has replaced `None` or another object.

    Create it after all callbacks have begun. It keeps copies of arrays up to 1 MiB. Larger arrays are read completely
    in each save; a restart does not restore them if training has not changed them.

    If a callback was also in the previous `fit` of this process, it is compared with its start in that `fit`. A new
    process does not know the changes of that `fit`. `TrainedFit.starts` keeps neither callbacks nor model alive.
    """

    name = "callbacks"

    def __init__(self, fit: TrainedFit):
        super().__init__(fit)
        self._callbacks = dict(_named(fit.callbacks))
        of_model = variable_states.Identities(fit.model)
        known = {id(callback): start for made, start in fit.starts if (callback := made()) is not None}
        self._at_start: dict[str, dict[str, Start]] = {
            name: known.get(id(callback)) or {key: _kept(own) for key, own in _attributes(callback, of_model)}
            for name, callback in self._callbacks.items()
        }
        fit.starts[:] = [(weakref.ref(self._callbacks[name]), start) for name, start in self._at_start.items()]
        self._objects_at_start = {
            name: {key: value for key, value in self._objects(name) if value is None or key not in start}
            for name, start in self._at_start.items()
        }
        self._told: set[tuple[str, str]] = set()

    def capture(self) -> CapturedState:
        """Returns the changed attributes of callbacks, and the histories of finished `fit`s, for a commit."""
        own: dict[str, np.ndarray] = {}
        plain: dict[str, dict[str, Any]] = {}
        for name, attributes in self.changes().items():
            plain[name] = {}
            for key, (node, arrays) in attributes.items():
                named = {f"{name}/{key}/{i}": array for i, array in enumerate(arrays)}
                plain[name][key] = [node, list(named)]
                own.update(named)
        return CapturedState(own=own, plain=list(self._fit.histories), own_plain=plain)

    def restore(self, saved: SavedState) -> None:
        """Restores the callbacks' attributes from a commit. A skipped `fit` gets only its history back."""
        self._fit.histories[:] = saved.plain
        if saved.is_of_later_fit:
            history = saved.plain[saved.finished]
            self.put_back({name: {key: apart(own) for key, own in kept.items()} for name, kept in history.items()})
            return
        arrays = saved.own.arrays
        self.put_back(
            {
                name: {key: (node, [arrays[each] for each in names]) for key, (node, names) in attributes.items()}
                for name, attributes in saved.own.plain.items()
            }
        )

    def add_history(self) -> None:
        """Adds this finished `fit`'s Keras history to those that commits keep, for a restart that skips it."""
        changes = self.changes(name for name in self._callbacks if "History:" in name)
        self._fit.histories.append(
            {name: {key: with_arrays(*own) for key, own in attributes.items()} for name, attributes in changes.items()}
        )

    def changes(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Plain]]:
        """Returns the attributes that differ from the start of training, by callback. Copies their arrays."""
        captured, of_model = {}, variable_states.Identities(self._fit.model)
        for name in self._callbacks if names is None else names:
            now = dict(_attributes(self._callbacks[name], of_model))
            self._tell_of_lost(name, self._callbacks[name], now)
            captured[name] = {
                key: (node, [np.array(array) for array in arrays])
                for key, (node, arrays) in now.items()
                if not _is_same((node, arrays), self._at_start[name].get(key))
            }
        return captured

    def _tell_of_lost(self, name: str, callback: keras.callbacks.Callback, now: Mapping[str, Plain]) -> None:
        lost = [key for key, (node, _) in self._at_start[name].items() if key not in now and node is not None]
        before = self._objects_at_start[name]
        lost += [key for key, value in self._objects(name) if key not in now and before.get(key, value) is not value]
        if _speaks_for_itself(callback) and "state" not in now:
            lost = ["state"]
        for key in lost:
            is_there = key == "state" or key in vars(callback)
            if is_there and (name, key) not in self._told:
                self._told.add((name, key))
                what = "the result of its get_state()" if _speaks_for_itself(callback) else f"its attribute {key!r}"
                logging.warning(
                    "The callback %s is not saved completely: %s holds a value that a backup cannot hold. A backup can "
                    "hold numbers, text, arrays, variables, metrics, layers, generators of random numbers, and lists, "
                    "tuples, sets, deques and dicts of them. get_state and set_state choose the saved state.",
                    *(type(callback).__name__, what),
                )

    def put_back(self, captured: Mapping[str, Mapping[str, Plain]]) -> None:
        """Restores the saved attributes of callbacks, and sets other changed ones to their values at the start."""
        of_model = variable_states.Identities(self._fit.model)
        for name, callback in self._callbacks.items():
            if name not in captured:
                continue
            now = dict(_attributes(callback, of_model))  # Savable attributes only: no opened file or progress bar.
            changed = {
                key: own
                for key, start in self._at_start[name].items()
                if key in now and not _is_same(now[key], start) and (own := _copied(start)) is not None
            }
            for key, own in {**changed, **captured[name]}.items():
                self._give_back(name, callback, key, own)

    def _give_back(self, name: str, callback: Any, key: str, own: Plain) -> None:
        try:
            if _speaks_for_itself(callback):
                if key == "state":
                    callback.set_state(decode(*own))
            else:
                _put_in_place(vars(callback), key, decode(*own, vars(callback).get(key)))
        except AbsentError as error:
            if (name, key) not in self._told:
                self._told.add((name, key))
                logging.warning(
                    "The callback %s starts over with its attribute %r: %s does not exist when it is restored. Make it "
                    "in __init__ or on_train_begin.",
                    *(type(callback).__name__, key, error),
                )

    def _objects(self, name: str) -> Iterator[tuple[str, Any]]:
        """Yields attributes of a callback that may be unsavable, to warn of them. Skips Keras' and tfdist's."""
        callback = self._callbacks[name]
        if not _speaks_for_itself(callback) and not type(callback).__module__.startswith(("keras.", "tfdist.")):
            for key, value in list(vars(callback).items()):
                if key not in _NOT_STATE and not _is_made_anew(value):
                    yield key, value


def _put_in_place(attributes: dict[str, Any], key: str, value: Any) -> None:
    """Sets a callback's attribute; updates a list, deque, dict or set in place, since other objects may hold it."""
    present: Any = attributes.get(key)
    if present is value:
        return
    if isinstance(value, list) and type(present) is list:
        present[:] = value
    elif isinstance(value, deque) and type(present) is deque:
        present.clear()
        present.extend(value)
    elif isinstance(value, dict | set) and type(present) is type(value):
        present.clear()
        present.update(value)
    else:
        attributes[key] = value


def _is_made_anew(value: Any) -> bool:
    """Whether a new process makes the value again, so that no warning is due: a function, file, thread or date."""
    kind = type(value)  # The type is asked, because reading attributes of the value may run any code.
    if callable(value) or issubclass(kind, types.ModuleType) or kind.__module__ == "datetime":
        return True
    return any(hasattr(kind, name) for name in _OF_PROCESS)


def _kept(now: Plain) -> Start:
    """Copies small arrays of an attribute and digests large ones, to compare it later with its start."""
    node, arrays = now
    return node, [np.array(array) if array.nbytes <= _COPIED_BYTES else _digest(array) for array in arrays]


def _copied(start: Start) -> Plain | None:
    """Returns an attribute's value at the start, to restore it, or `None` if only digests of its arrays are kept."""
    node, arrays = start
    copies = [array for array in arrays if isinstance(array, np.ndarray)]
    return (node, copies) if len(copies) == len(arrays) else None


def _is_same(now: Plain, start: Start | None) -> bool:
    """Whether the present value of an attribute equals its value at the start, so that it need not be saved."""
    if start is None or now[0] != start[0] or len(now[1]) != len(start[1]):
        return False
    digests = [_digest(kept) if isinstance(kept, np.ndarray) else kept for kept in start[1]]
    return [_digest(array) for array in now[1]] == digests


def _digest(array: np.ndarray) -> Digest:
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return array.dtype.name, array.shape, hashlib.sha256(content.data).digest()


def _named(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[tuple[str, keras.callbacks.Callback]]:
    """Yields each callback with its name in a commit: its class and its index among callbacks of that class."""
    count: Counter[str] = Counter()
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.ProgbarLogger | keras.callbacks.BackupAndRestore):
            kind = f"{type(callback).__module__}.{type(callback).__qualname__}"
            yield f"{kind}:{count[kind]}", callback
            count[kind] += 1


def _speaks_for_itself(callback: Any) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _attributes(callback: Any, of_model: Container[int] | None) -> Iterator[tuple[str, Plain]]:
    if _speaks_for_itself(callback):
        attributes, of_model = {"state": callback.get_state()}, None
    else:
        attributes = vars(callback)
    for key, value in list(attributes.items()):  # a copy: a thread of the callback may change attributes
        arrays: list[np.ndarray] = []
        try:
            if key not in _NOT_STATE:
                yield key, (encode(value, arrays, of_model), arrays)
        except (TypeError, RecursionError, ReferenceError):
            continue  # a file, a function, a weak proxy: a new process makes it again
