"""Describes models and their `compile` arguments in words, equal on all workers for equal models, to compare them."""

import os
import warnings
from collections.abc import Iterator
from typing import Any

import keras

from tfdist._compat import keras_internals

# Settings that differ between processes: counters, random numbers, addresses and file names.
_OWN = {"name", "seed", "registered_name", "build_config", "compile_config", "shared_object_id", "code", "closure"}
_LONG = 64


def described_layers(model: keras.Model) -> list[str]:
    """One line for each layer of a model and each setting of Keras' own layers. Costs `get_config` of each layer."""
    lines = []
    for number, layer in enumerate(keras_internals.layers_of(model)):
        where = f"layer {number}, {type(layer).__name__}"
        # Settings of a user's layer may rightly differ, such as the number of its worker.
        is_keras_own = type(layer).__module__.startswith("keras.") and not isinstance(layer, keras.Model)
        settings = _config_of(layer) if is_keras_own else {}
        lines += [f"{type(layer).__name__} as layer {number}", *_lines(where, settings)]
    return lines


def described_compile(model: keras.Model) -> list[str]:
    """One line for each setting of a model's `compile`: optimizer, losses, metrics and options."""
    if not getattr(model, "compiled", False):
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns of saving lambdas, but nothing is saved here.
            settings = model.get_compile_config() or {}
    except Exception:  # A user's losses and metrics that cannot be serialized may raise any error.
        settings = {name: getattr(model, name, None) for name in ("run_eagerly", "steps_per_execution", "jit_compile")}
    optimizer = type(getattr(model, "optimizer", None)).__name__
    return [f"the optimizer {optimizer}", *_lines("compile", settings)]


def _config_of(layer: Any) -> dict[str, Any]:
    try:
        return layer.get_config()
    except Exception:  # A layer may have no configuration.
        return {}


def _lines(where: str, settings: Any) -> Iterator[str]:
    for name, value in _flat(settings, ""):
        yield f"{name}={value} in {where}"


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yields the path and value of each setting, without settings that may differ between processes."""
    if isinstance(value, dict) and "DTypePolicy" in str(value.get("class_name")):
        yield path, str(value["config"].get("name"))
    elif isinstance(value, dict):
        for key in sorted(map(str, value)):
            if key not in _OWN and key in value:
                yield from _flat(value[key], f"{path}.{key}" if path and key != "config" else path or key)
    elif isinstance(value, list | tuple):
        if len(value) > _LONG:
            yield path, f"a list of {len(value)}"
            return
        for place, each in enumerate(value):
            yield from _flat(each, f"{path}[{place}]")
    elif isinstance(value, str):
        yield path, "a path" if os.sep in value else value
    elif isinstance(value, bool | int | float | type(None)):
        yield path, repr(value)
    elif callable(value):
        yield path, getattr(value, "__name__", type(value).__name__)
    else:
        yield path, type(value).__name__
