"""Opens files with predictable names for writing, without following symbolic links."""

import errno
import os

__all__ = ["no_follow"]


def no_follow(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file for the built-in `open`, unless its path is a symbolic link.

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
