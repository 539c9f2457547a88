"""The file operations that commits need, on a local or mounted disk and on other storage.

All operations raise `OSError` on failure.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tfdist.symlink_safe_file import no_follow

_PIECE_BYTES = 1 << 22

Buffer = bytes | memoryview


class LocalFiles:
    """File operations on a local or mounted disk, with flushed files and atomic renames."""

    renames_at_once = True

    def make_folder(self, path: str) -> None:
        """Makes a folder and its parents, unless they exist."""
        os.makedirs(path, exist_ok=True)

    def names(self, folder: str) -> list[str]:
        """Returns the names of the files and folders in a folder."""
        return os.listdir(folder)

    def size(self, path: str) -> int:
        """Returns the size of a regular file in bytes. Raises for other files: reading a pipe would wait forever."""
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        return status.st_size

    def write(self, path: str, pieces: Iterable[Buffer]) -> dict[str, Any]:
        """Writes and flushes a file, and returns its size and SHA-256."""
        with open(path, "wb", buffering=0, opener=no_follow) as file:
            described = _write_hashed(lambda piece: _write_all(file, piece), pieces)
            os.fsync(file.fileno())
        return described

    def read(self, path: str) -> bytearray:
        """Returns the content of a file."""
        content = bytearray(self.size(path))
        with open(path, "rb", buffering=0) as file:
            filled, view = 0, memoryview(content)
            while filled < len(content):
                count = file.readinto(view[filled : filled + _PIECE_BYTES])
                if not count:
                    raise OSError(f"{path} ends after {filled} of {len(content)} bytes")
                filled += count
        return content

    def digest(self, path: str) -> str:
        """Returns the SHA-256 of a file."""
        self.size(path)
        digest = hashlib.sha256()
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
        return digest.hexdigest()

    def move(self, source: str, target: str) -> None:
        """Renames a folder and flushes the new name to the disk, which completes a commit."""
        os.rename(source, target)
        self.flush_folder(os.path.dirname(target))

    def flush_folder(self, path: str) -> None:
        """Flushes the names of the files in a folder to the disk, so that they survive a crash."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: str) -> None:
        """Removes a file, or a folder and its content."""
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.remove(path)

    def remove_if_empty(self, folder: str) -> None:
        """Removes a folder if it is empty."""
        if not os.listdir(folder):
            os.rmdir(folder)


class RemoteFiles:
    """File operations on storage of `tf.io.gfile`, such as object stores, where a file appears once it is closed."""

    renames_at_once = False

    def __init__(self) -> None:
        import tensorflow as tf  # imported here, because a local disk does not need TensorFlow

        self._gfile, self._error, self._not_found = tf.io.gfile, tf.errors.OpError, tf.errors.NotFoundError

    def make_folder(self, path: str) -> None:
        """Makes a folder and its parents, unless they exist."""
        self._do(self._gfile.makedirs, path)

    def names(self, folder: str) -> list[str]:
        """Returns the names of the files and folders in a folder."""
        return [name.rstrip("/") for name in self._do(self._gfile.listdir, folder)]

    def size(self, path: str) -> int:
        """Returns the size of a file in bytes."""
        return self._do(self._gfile.stat, path).length

    def write(self, path: str, pieces: Iterable[Buffer]) -> dict[str, Any]:
        """Writes a file, and returns its size and SHA-256."""

        def write() -> dict[str, Any]:
            with self._gfile.GFile(path, "wb") as file:
                file.write(b"")  # otherwise an empty file is never made
                return _write_hashed(lambda piece: file.write(piece.tobytes()), pieces)

        return self._do(write)

    def read(self, path: str) -> bytearray:
        """Returns the content of a file."""

        def read() -> bytearray:
            with self._gfile.GFile(path, "rb") as file:
                return bytearray(file.read())

        return self._do(read)

    def digest(self, path: str) -> str:
        """Returns the SHA-256 of a file."""
        return hashlib.sha256(self.read(path)).hexdigest()

    def move(self, source: str, target: str) -> None:
        """Renames a folder by renaming each of its files, because not all storage can rename a folder."""
        self.make_folder(target)
        for name in self.names(source):
            self._do(self._gfile.rename, f"{source}/{name}", f"{target}/{name}")
        self.remove(source)

    def flush_folder(self, path: str) -> None:
        """Does nothing, since a closed file is complete there."""

    def remove(self, path: str) -> None:
        """Removes a file, or a folder and its content."""
        self._do(self._gfile.rmtree if self._do(self._gfile.isdir, path) else self._gfile.remove, path)

    def remove_if_empty(self, folder: str) -> None:
        """Removes a folder if it is empty."""
        if not self.names(folder):
            self.remove(folder)

    def _do(self, function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except self._error as error:
            kind = FileNotFoundError if isinstance(error, self._not_found) else OSError
            raise kind(f"{type(error).__name__} {error.message} ({', '.join(map(str, args))})") from error


def files_of(path: str) -> LocalFiles | RemoteFiles:
    """Returns the file operations for the storage of `path`."""
    return RemoteFiles() if is_remote(path) else LocalFiles()


def is_remote(path: str) -> bool:
    """Whether a path is on storage other than a disk, such as `gs://bucket/folder`."""
    return "://" in path


def _write_hashed(write: Callable[[memoryview], Any], pieces: Iterable[Buffer]) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    for piece in _cut(pieces):
        digest.update(piece)
        write(piece)
        size += len(piece)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _write_all(file: Any, piece: memoryview) -> None:
    while len(piece):
        piece = piece[file.write(piece) :]


def _cut(pieces: Iterable[Buffer]) -> Iterator[memoryview]:
    """Yields pieces of content that stay in the processor's cache between hashing and copying."""
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]
