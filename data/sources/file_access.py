"""Access to local and remote data files: their names, size and age, and reads at any offset."""

import contextlib
import ctypes
import functools
import io
import mmap
import operator
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.sources.source import this_worker
from tfdist.errors import SourceError

INDEX_SUFFIX = ".tfdist-index"

_READ_AHEAD_BYTES = 1 << 20
_OPEN_FILES = 128  # With their memory maps, at most half of the descriptors that a process may have.
_MAPPED_BYTES = 1 << 32  # Checking whether a larger file is in memory takes long.
_MISSING_BYTES = 1 << 25  # Largest missing part of a mapped file that is read at once, before the map is used.
_LOOKS_BEFORE_MAP, _LOOKS_BETWEEN_MAPS = 3, 100  # Uses of a file before it is mapped, and between checks of its map.
_POPULATE_READ = 22  # MADV_POPULATE_READ of Linux 5.14, for which Python has no name.


def several(paths: Any) -> Any:
    """Returns `paths` as a list, also if it is a single path."""
    return [paths] if isinstance(paths, str | os.PathLike) else paths


def expand(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Returns the data files that paths and glob patterns name. The files of a pattern are in the order of names.

    Raises:
      ValueError: If there are no files, a path does not exist or is a folder, or a pattern matches no file.
    """
    files = [file for path in paths for file in _expand_one(os.fspath(path))]
    if not files:
        raise ValueError("A source needs at least one file, got an empty list.")
    return files


def _expand_one(path: str) -> list[str]:
    if tf.io.gfile.isdir(path):
        raise ValueError(f"Examples are read from files, but {path} is a folder. Name its files: {path}/*.tfrecord*")
    if tf.io.gfile.exists(path):
        return [path]
    if not set("*?[") & set(path):
        raise ValueError(
            f"No file {path} on {this_worker()}, in {os.getcwd()}. Give a path that every worker has; for a dataset of "
            'TFDS a pair such as ("mnist", "train"); for texts a tuple (texts,) or an array.'
        )
    files = sorted(file for file in tf.io.gfile.glob(path) if not is_index(file))  # TF's * matches a leading dot.
    if not files:
        raise ValueError(f"No file matches {path} on {this_worker()}, in {os.getcwd()}.")
    return files


def is_index(path: str) -> bool:
    """Whether a file is an index or the draft of an index, which may lie among the data files and is no data."""
    return INDEX_SUFFIX in os.path.basename(path)


def is_local(path: str) -> bool:
    """Whether the operating system can read a path without TensorFlow's file systems."""
    return "://" not in path


def stat(path: str) -> tuple[int, int]:
    """Returns a file's size in bytes and time of the last change in nanoseconds, or raises a SourceError."""
    try:
        if is_local(path):
            local = os.stat(path)
            return local.st_size, local.st_mtime_ns
        remote = tf.io.gfile.stat(path)
        return remote.length, remote.mtime_nsec
    except (OSError, tf.errors.OpError) as error:
        raise SourceError(f"{path} cannot be read by {this_worker()}: {error}.") from error


@contextlib.contextmanager
def open_to_scan(path: str) -> Iterator[io.BufferedReader | tf.io.gfile.GFile]:
    """Opens a file for many small reads, mostly in ascending order, to index its records."""
    if is_local(path):
        with open(path, "rb", buffering=_READ_AHEAD_BYTES) as local:
            yield local
    else:
        with tf.io.gfile.GFile(path, "rb") as remote:
            yield remote


class LocalFile:
    """A file that any number of threads read at any offset. Closed when its last reference is deleted.

    Attributes:
      mapped: The file as memory while it is in the system's page cache, else None. Reading memory needs no system
        calls. If a small part of the file is missing, it is read first; a virtual machine may lose such parts to its
        host. A file on disk is read with system calls: a map would wait for the disk with Python's lock held. A failing
        disk would kill the process with SIGBUS.
    """

    def __init__(self, path: str):
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._is_ours = os.access(path, os.W_OK)  # Linux reports files that this user cannot write as always cached.
        self._looks = 0
        self._mapped: mmap.mmap | None = None

    @property
    def mapped(self) -> mmap.mmap | None:  # noqa: D102
        self._looks += 1
        if self._is_ours and self._looks % _LOOKS_BETWEEN_MAPS == _LOOKS_BEFORE_MAP:
            mapped = self._mapped or _map(self._descriptor)
            self._mapped = mapped if mapped is not None and _is_in_memory(mapped) else None
        return self._mapped

    def read(self, spans: list[tuple[int, int]]) -> list[bytes]:
        """Returns the bytes of each (offset, size); fewer at the end of the file."""
        pread, descriptor = os.pread, self._descriptor
        contents = [pread(descriptor, size, offset) for offset, size in spans]
        if sum(map(len, contents)) == sum(map(operator.itemgetter(1), spans)):
            return contents
        return [self._read_on(*span, content) for span, content in zip(spans, contents, strict=True)]

    def _read_on(self, offset: int, size: int, content: bytes) -> bytes:
        """Reads what `content` lacks, since the kernel may return fewer bytes of a large read than requested."""
        while len(content) < size:
            more = os.pread(self._descriptor, size - len(content), offset + len(content))
            if not more:
                break
            content += more
        return content

    def stat(self) -> tuple[int, int]:
        """Returns the file's size and time of the last change, to notice changes; costs a microsecond."""
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns


def _map(descriptor: int) -> mmap.mmap | None:
    if os.fstat(descriptor).st_size > _MAPPED_BYTES:
        return None
    with contextlib.suppress(OSError, ValueError):  # Some file systems and empty files have no maps.
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    return None


def _is_in_memory(mapped: mmap.mmap) -> bool:
    """Whether all of a mapped file is in memory, after reading a small missing part. Releases Python's lock."""
    system = ctypes.CDLL(None)
    address = ctypes.c_void_p(np.frombuffer(mapped, np.uint8).ctypes.data)
    size = ctypes.c_size_t(len(mapped))
    pages = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
    if system.mincore(address, size, ctypes.c_void_p(pages.ctypes.data)):
        return False
    missing = int(np.count_nonzero(~pages & 1))
    is_little = missing * mmap.PAGESIZE <= min(_MISSING_BYTES, len(mapped) / 2)
    return not missing or (is_little and not system.madvise(address, size, _POPULATE_READ))


class RemoteFile:
    """A file in one of TensorFlow's file systems. One thread reads at a time."""

    mapped = None

    def __init__(self, path: str):
        self._file = tf.io.gfile.GFile(path, "rb")
        self._lock = threading.Lock()
        self._stat = stat(path)

    def read(self, spans: list[tuple[int, int]]) -> list[bytes]:
        """Returns the bytes of each (offset, size); fewer at the end of the file."""
        with self._lock:
            return [self._read_one(*span) for span in spans]

    def _read_one(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(size)

    def stat(self) -> tuple[int, int]:
        """Returns the file's size and time of the last change as of opening; new values need a round trip."""
        return self._stat


@functools.lru_cache(maxsize=_OPEN_FILES)
def open_to_read(path: str, made: tuple[int, int]) -> LocalFile | RemoteFile:
    """Opens a data file to read at any offset, and keeps it open among the files that were read recently.

    `made` is the expected size and time of the last change, so that a file that replaced another is opened again.
    """
    del made
    return LocalFile(path) if is_local(path) else RemoteFile(path)
