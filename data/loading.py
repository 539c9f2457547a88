"""Loads a TFDS dataset by name and prepares its files, on any number of worker processes at once."""

import contextlib
import fcntl
import os
import pathlib
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import IO

import tensorflow as tf
import tensorflow_datasets as tfds
from absl import logging

from tfdist.data.digits import Digits
from tfdist.kept_random_state import kept_random_state
from tfdist.symlink_safe_file import no_follow

_POLL_SECONDS = 0.2


def load(
    name: str, split: str, data_dir: str | os.PathLike[str] | None = None, *, timeout_seconds: float = 3600
) -> tf.data.Dataset:
    """Reads a split of a TFDS dataset. Prepares its files first if they are missing.

    Workers on one machine may call this at the same time with one `data_dir`: one worker prepares the dataset, and its
    peers wait. If that worker dies, a peer takes over. With a remote `data_dir` (such as `gs://…`) workers do not wait
    for each other: prepare the dataset beforehand.

    Args:
      name: "digits", which needs no network, or a name known to TFDS, such as "mnist" or "cifar10".
      split: A split in the notation of TFDS, such as "train" or "train[:90%]".
      data_dir: Directory of the files. By default the directory of TFDS, `~/tensorflow_datasets`.
      timeout_seconds: Longest time to wait for another process that prepares the same dataset.

    Returns:
      A dataset of (image, label) pairs, or of the dataset's `supervised_keys`; in the same order on all workers.

    Raises:
      ConnectionError: If the files must be downloaded and their servers cannot be found.
      OSError: If the files are missing and `data_dir` cannot be written to.
      TimeoutError: If another process still prepares the dataset after `timeout_seconds`.
    """
    return prepare(name, data_dir, timeout_seconds=timeout_seconds).as_dataset(split=split, as_supervised=True)


def prepare(
    name: str, data_dir: str | os.PathLike[str] | None = None, *, timeout_seconds: float = 3600
) -> tfds.core.DatasetBuilder:
    """Returns the builder of a TFDS dataset, after preparing missing files. Waits for other workers like `load`."""
    builder = _make_builder(name, data_dir)
    if not builder.info.initialized:
        with _lock(builder, timeout_seconds):
            # Another process may have prepared the dataset meanwhile. Only a new builder sees its files.
            builder = _make_builder(name, data_dir)
            if not builder.info.initialized:
                _check_network(builder)
                # TFDS draws the name of a folder. Later seeds shall be those of workers that find the files.
                with kept_random_state():
                    builder.download_and_prepare()
    return builder


def _make_builder(name: str, data_dir: str | os.PathLike[str] | None) -> tfds.core.DatasetBuilder:
    if name == Digits.name:
        return Digits(data_dir=data_dir)
    return tfds.builder(name, data_dir=data_dir)


@contextlib.contextmanager
def _lock(builder: tfds.core.DatasetBuilder, timeout_seconds: float) -> Iterator[None]:
    """Holds `<data_dir>/.<name>.lock`, so that one process prepares a dataset. The kernel releases it if that dies."""
    root = os.fspath(builder.data_dir_root)
    if "://" in root:
        yield
        return
    path = pathlib.Path(root, f".{builder.name}.lock")
    with _open(path, builder.name) as file:
        _wait_for_lock(file, builder.name, timeout_seconds)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _open(path: pathlib.Path, name: str) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a+", opener=no_follow)
    except OSError as error:
        raise OSError(
            error.errno,
            f"Dataset {name!r} is not in {path.parent} and cannot be prepared there ({error.strerror}). Give a "
            "data_dir that holds the dataset or is writable, or set TFDS_DATA_DIR.",
        ) from error


def _wait_for_lock(file: IO[str], name: str, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    told = False
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read() or "another process"
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"Waited {timeout_seconds:g} s for {holder}, which prepares dataset {name!r} and holds {file.name}. "
                "Wait until it finishes or end it, then start again."
            )
        if not told:
            logging.warning("Waiting for %s, which prepares dataset %r.", holder, name)
            told = True
        time.sleep(_POLL_SECONDS)


def _check_network(builder: tfds.core.DatasetBuilder) -> None:
    """Raises an error at once if servers cannot be found; the downloads of TFDS would retry for three minutes."""
    if urllib.request.getproxies():
        return  # The proxy resolves the names.
    hosts = {urllib.parse.urlsplit(url).hostname for url in builder.url_infos or ()}
    for host in sorted(filter(None, hosts)):
        try:
            socket.getaddrinfo(host, 443)
        except OSError as error:
            raise ConnectionError(
                f"Dataset {builder.name!r} is not in {builder.data_dir_root} and must be downloaded from {host}, which "
                f"cannot be found ({error}): this machine seems to have no network. Give a data_dir that holds the "
                'dataset, or load the one that needs no download: `tfdist.data.load("digits", split)`.'
            ) from error
