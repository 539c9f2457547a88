"""The command `tfdist estimate`: estimates the memory of each replica, and names the option that makes a model fit."""

import argparse
import importlib
import importlib.util
import json
import os
import pathlib
import sys
import zipfile
from collections.abc import Callable
from typing import Any

from absl import logging

from tfdist.launch import arguments

_CONFIG = "config.json"  # The description of the model in a .keras file.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tfdist estimate`."""
    add_job_arguments(parser)
    parser.add_argument("--memory", type=arguments.byte_size, metavar="SIZE", help="memory of a replica, as in 16GB")
    parser.add_argument("--compression", metavar="CODEC", help="the codec of the strategy, as in int8")
    parser.add_argument(
        "--shard-group-size",
        type=arguments.positive_int,
        metavar="N",
        help="number of replicas that divide the model among themselves; all by default. A strategy takes a size that "
        "also fits the devices of a worker",
    )


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the model and the number of replicas, which `tfdist plan` has too."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a .keras file, or a function that returns a compiled model: FILE.py:FUNCTION or MODULE:FUNCTION",
    )
    parser.add_argument(
        "--replicas",
        "-n",
        type=arguments.positive_int,
        required=True,
        metavar="N",
        help="number of replicas: workers times devices of each",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `tfdist estimate`, and returns its exit code: 1 if there is no model or it does not fit into the memory."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Keeps the table readable.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # Nothing is computed.
    from tfdist.strategies.memory_estimate import estimate_memory  # Loads TensorFlow.

    try:
        make = maker_of(args.model)
        estimate = estimate_memory(
            make, args.replicas, compression=args.compression, shard_group_size=args.shard_group_size
        )
    except (ValueError, TypeError, OSError, ImportError) as error:
        logging.error("%s", error)
        return 1
    print(estimate)
    if args.memory is None:
        return 0
    print(estimate.verdict(args.memory))
    return 0 if estimate.fitting(args.memory) else 1


def maker_of(source: str) -> Callable[[], Any]:
    """Returns a function that makes the model that the argument of the command names.

    Raises:
      ValueError: If the argument names no `.keras` file and no function.
    """
    if source.endswith(".keras"):
        config = _config_of(pathlib.Path(source))
        return lambda: _model_of(config, source)
    place, colon, name = source.rpartition(":")
    if not colon:
        raise ValueError(f"MODEL must be a .keras file, FILE.py:FUNCTION or MODULE:FUNCTION, got {source!r}.")
    module = _module_of(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{place} has no function {name!r}. Name one that returns a compiled model.")
    return function  # type: ignore[no-any-return]


def _module_of(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, str(pathlib.Path.cwd()))
        return importlib.import_module(place)
    path = pathlib.Path(place)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"There is no file {place}. Give the path of a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _config_of(path: pathlib.Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            config: dict[str, Any] = json.loads(archive.read(_CONFIG))
            return config
    except FileNotFoundError:
        raise ValueError(f"There is no file {path}. Save the model by `model.save`.") from None
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise ValueError(f"{path} is no file of `model.save`: {error}.") from None


def _model_of(config: dict[str, Any], source: str) -> Any:
    import keras

    try:
        return keras.saving.deserialize_keras_object(config)
    except TypeError as error:
        raise ValueError(
            f"The classes of the model in {source} are not known: {str(error).splitlines()[0]} Name a function that "
            "returns the model instead, as in train.py:make_model."
        ) from None
