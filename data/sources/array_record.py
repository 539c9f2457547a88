"""Source of examples in ArrayRecord files."""

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from tfdist.data.sources.file_access import expand, is_local, several, stat
from tfdist.data.sources.items import ItemsSource
from tfdist.data.sources.source import digest, files_named, this_worker
from tfdist.errors import SourceError


class ArrayRecordSource(ItemsSource):
    """Records of ArrayRecord files, as strings to parse in `map_fn`. Read by the package `array_record`.

    ArrayRecord has its own index and checksums. Reading is fast if the files were written with `group_size:1`. The
    fingerprint depends on the sizes of the files.

    Args:
      paths: A path or glob pattern, or a list of them. A list may also hold (file, skip, take), for a part of a file.

    Raises:
      ModuleNotFoundError: If `array_record` is not installed.
      ValueError: If there are no such files, or no records in them.
      SourceError: If a file is no ArrayRecord file, or is truncated.
    """

    def __init__(self, paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str] | tuple[str, int, int]]):
        module = _array_record()
        parts = [part for path in several(paths) for part in _parts(path, module)]
        self._ends = np.cumsum([take for _, _, take in parts])
        self._files = [(path, skip) for path, skip, _ in parts]
        self._stats = [stat(path) for path, _ in self._files]
        if not parts or not self._ends[-1]:
            raise ValueError(
                f"A source needs at least one example, but there are none in {[part[0] for part in parts]}."
            )
        named = [f"{path}[{skip}:{skip + take}]" for path, skip, take in parts if take]
        super().__init__(module.ArrayRecordDataSource(named), thread_safe=True)

    def describe(self, index: int) -> str:  # noqa: D102
        file = int(np.searchsorted(self._ends, index, "right"))
        path, skip = self._files[file]
        return f"record {skip + index - (self._ends[file - 1] if file else 0)} of {path}"

    def origin(self) -> str:  # noqa: D102
        return files_named([path for path, _ in self._files])

    def fingerprint(self) -> str:  # noqa: D102
        sizes = [size for size, _ in self._stats]
        skips = [skip for _, skip in self._files]
        return digest("array_record", *zip(sizes, skips, self._ends.tolist(), strict=True))

    def _read(self, indices: np.ndarray) -> list[np.ndarray]:
        self._check_files(indices)
        records = np.empty(len(indices), object)
        records[:] = list(self._examples(indices.tolist()))
        return [records]

    def _check_files(self, indices: np.ndarray) -> None:
        files, firsts = np.unique(np.searchsorted(self._ends, indices, "right"), return_index=True)
        for file, first in zip(files.tolist(), firsts.tolist(), strict=True):
            path = self._files[file][0]
            if not _is_unchanged(path, self._stats[file]):
                raise self.failure(
                    int(indices[first]),
                    f"cannot be trusted: its file has changed since it was opened, when it had {self._stats[file][0]} "
                    "bytes. Do not change files while they are read, and start again.",
                )


def _is_unchanged(path: str, before: tuple[int, int]) -> bool:
    try:
        return not is_local(path) or stat(path) == before  # `stat` of a remote file needs a network round trip.
    except SourceError:
        return False


def _array_record() -> Any:
    try:
        from array_record.python import array_record_data_source
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "ArrayRecord files need the package array_record, which is not installed. Install it with: pip install "
            "array_record",
            name=error.name,
        ) from error
    return array_record_data_source


def _parts(path: str | os.PathLike[str] | tuple[str, int, int], module: Any) -> list[tuple[str, int, int]]:
    if isinstance(path, tuple):
        expand([path[0]])
        return [path]
    return [(file, 0, _count(file, module)) for file in expand([path])]


def _count(path: str, module: Any) -> int:
    try:
        return len(module.ArrayRecordDataSource(path))
    except Exception as error:  # The type of the error depends on the problem of the file.
        raise SourceError(
            f"{path} cannot be read by {this_worker()}: {error}. If it is an ArrayRecord file, write it again."
        ) from error
