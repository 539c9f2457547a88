"""The versions of TensorFlow and Keras that tfdist was tested with, and those that are known to fail."""

import importlib
from typing import NamedTuple

from absl import logging

from tfdist.errors import VersionError
from tfdist.package_version import version_of

__all__ = ["installed_version", "refuse_failing_versions", "remedy", "warn_of_untested_versions"]


class _TestedVersions(NamedTuple):
    """The tested minor versions of a library. `setup.cfg` has the same bounds.

    Attributes:
      first: Oldest tested version, as major and minor number.
      last: Newest tested version.
      works_from: The oldest version in which tfdist is not known to fail.
      lacks: The part that is missing in versions before `works_from`.
    """

    first: tuple[int, int]
    last: tuple[int, int]
    works_from: tuple[int, int]
    lacks: str


_TESTED = {
    "keras": _TestedVersions(
        (3, 12), (3, 16), (3, 7), "the position of `fit` in its data (`EpochIterator._steps_seen`)"
    ),
    "tensorflow": _TestedVersions((2, 20), (2, 21), (2, 16), "Keras 3"),
}


def installed_version(library: str) -> str:
    """Returns the version of "keras" or "tensorflow" that this process imports, and imports it."""
    importlib.import_module(library)  # Another version may be installed beside it, as a nightly build.
    return version_of(library)


def remedy() -> str:
    """Returns the command that installs tested versions."""
    bounds = (f"'{name}>={_text(each.first)},<{_text(_next(each.last))}'" for name, each in _TESTED.items())
    return f"Install tested versions: pip install {' '.join(bounds)}"


def refuse_failing_versions() -> None:
    """Refuses versions that are known to fail.

    Raises:
      VersionError: If TensorFlow or Keras is such a version.
    """
    for library, tested in _TESTED.items():
        version = installed_version(library)
        if _minor(version) < tested.works_from:
            raise VersionError(
                f"tfdist needs {library} {_text(tested.first)} or newer, but {version} is installed. "
                f"Versions before {_text(tested.works_from)} lack {tested.lacks}. {remedy()}."
            )


def warn_of_untested_versions() -> None:
    """Warns of versions that are older or newer than the tested ones."""
    for library, tested in _TESTED.items():
        version = installed_version(library)
        if not tested.first <= _minor(version) <= tested.last:
            logging.warning(
                "tfdist is not tested with %s %s. Its tests have run with %s to %s. This version has all private names "
                "that tfdist uses, but some may have another meaning, so compare a short training with one device. %s.",
                *(library, version, _text(tested.first), _text(tested.last), remedy()),
            )


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _next(version: tuple[int, int]) -> tuple[int, int]:
    return version[0], version[1] + 1
