"""Half of what a process takes to start and to end, saved in all processes that tests start; it is on their PYTHONPATH.

Keras imports some packages only because they are there: they are hidden from it, and from nobody else. Thousands of
modules make no garbage: it is collected less often, and not once more among all of them at the end.
"""

import atexit
import gc
import importlib.abc
import sys

OPTIONAL = {"matplotlib", "sklearn"}


class HiddenFromKeras(importlib.abc.MetaPathFinder):
    """Finds no optional package for Keras."""

    def find_spec(self, name, path=None, target=None):
        if name in OPTIONAL and self._asked_by_keras():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

    def _asked_by_keras(self):
        frame = sys._getframe(2)
        while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib."):
            frame = frame.f_back
        return frame is not None and frame.f_globals.get("__name__", "").startswith("keras.")


sys.meta_path.insert(0, HiddenFromKeras())
gc.set_threshold(100_000, 50, 50)
atexit.register(gc.freeze)  # the first registered, so the last called
