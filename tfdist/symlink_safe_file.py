"""How a file is opened that is written under a name which others can predict."""

import errno
import os

__all__ = ["no_follow"]


def no_follow(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file for the built-in `open`, unless a symbolic link has its name.

    Whoever can write to a folder that others use could otherwise put a link there, and have another user's process
    overwrite the link's target. Links among the folders above are followed.

        open(path, "a", opener=no_follow)

    Raises:
      OSError: If the name is that of a symbolic link, or the file cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            path = os.fspath(path)
            problem = "a symbolic link, which tfdist does not write through; remove it"
            raise OSError(errno.ELOOP, problem, path) from error
        raise
