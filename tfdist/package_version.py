"""Finds out the version of a package without loading it."""

import contextlib
import importlib.metadata
import sys

__all__ = ["version_of"]

# Names under which other builds of a package are installed.
_OTHER_BUILDS = {
    "tensorflow": ("tensorflow-cpu", "tf-nightly", "tf-nightly-cpu"),
    "keras": ("keras-nightly",),
}


def version_of(package: str) -> str:
    """Returns the version of a package: of the loaded one, otherwise of the installed one.

    Raises:
      importlib.metadata.PackageNotFoundError: If no build of the package is installed.
    """
    loaded = getattr(sys.modules.get(package), "__version__", None)
    if loaded is not None:
        return str(loaded)
    for build in (package, *_OTHER_BUILDS.get(package, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(build)
    raise importlib.metadata.PackageNotFoundError(package)
