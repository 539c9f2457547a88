"""Runs a script or module as `python` does, and adds a guard to it: models of plain Keras refuse to train.

If a script uses no strategy, each worker would train its own model and write the same files. The guard needs Keras, so
it is set once the script has imported Keras. This file is run by its path and loads only the standard library.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import runpy
import sys
import types
from collections.abc import Sequence

_PARTLY_LOADED = ("tfdist._compat", "tfdist.data", "tfdist.strategies")


class _AfterKeras(importlib.abc.MetaPathFinder):
    """An import hook: once the script has imported Keras, sets the guard that makes plain models refuse to train."""

    def __init__(self, workers: int):
        self._workers = workers

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "keras":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _GuardingLoader(spec.loader, self._workers)
        return spec


class _GuardingLoader(importlib.abc.Loader):
    """Imports Keras with its usual loader, which stays the module's `__loader__`, then sets the guard on its models."""

    def __init__(self, loader: importlib.abc.Loader, workers: int):
        self._loader, self._workers = loader, workers

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # If the script imported tfdist before Keras, it creates a strategy, which sets the guard.
        if module.backend.backend() == "tensorflow" and not any(name in sys.modules for name in _PARTLY_LOADED):
            from tfdist.strategies.outside_scope import watch_models_outside

            watch_models_outside(self._workers)


def _number_of_workers() -> int:
    try:
        cluster = json.loads(os.environ.get("TF_CONFIG") or "{}")["cluster"]
        return sum(len(cluster.get(job, ())) for job in ("chief", "worker"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return 1  # The code that needs TF_CONFIG reports the mistake.


def _print_without_this_file(kind: type, error: BaseException, trace: types.TracebackType | None) -> None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


def _run_script(path: str, module: types.ModuleType) -> None:
    file = os.path.abspath(path)
    vars(module).update(
        __file__=file, __cached__=None, __loader__=importlib.machinery.SourceFileLoader("__main__", file)
    )
    with open(path, "rb") as script:
        source = script.read()
    exec(compile(source, file, "exec", dont_inherit=True), vars(module))


if __name__ == "__main__":
    _is_module = sys.argv[1] == "-m"
    sys.argv = sys.argv[1 + _is_module :]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no such flag.
        sys.path[0] = os.getcwd() if _is_module else os.path.dirname(os.path.realpath(sys.argv[0]))
    sys.excepthook = _print_without_this_file
    if (_workers := _number_of_workers()) > 1:
        sys.meta_path.insert(0, _AfterKeras(_workers))
    sys.modules["__main__"] = _main = types.ModuleType("__main__")
    if _is_module:
        # As `python -m` does. The public `run_module` would remove `__main__` at its end.
        runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]
    else:
        _run_script(sys.argv[0], _main)
