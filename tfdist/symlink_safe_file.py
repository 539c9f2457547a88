"""Writes files with predictable names, without following symbolic links."""

import errno
import os
import pathlib


def no_follow(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file unless its path is a symbolic link; an `opener` for the built-in `open`.

    In a shared folder, another user could put a link at the path and make this process overwrite the link's target.
    Links among the parent folders are followed.

        open(path, "a", opener=no_follow)

    Raises:
      OSError: If the path is a symbolic link, or the file cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            path = os.fspath(path)
            problem = "a symbolic link, which tfdist does not write through; remove it"
            raise OSError(errno.ELOOP, problem, path) from error
        raise


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file atomically: completely or not at all.

    The text may hold a path with bytes that are not UTF-8, as `os.fsdecode` returns it. Such text must be read with
    `errors="surrogateescape"`.

    Raises:
      OSError: If the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with partial.open("x", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
