"""Locks of data caches: which locks are removed, and the message about the rest."""

import os
import time

import pytest
import tensorflow as tf

from tfdist.launch.cache_locks import describe, is_left_behind, lock_named_in, locks_in, remove


def begun_cache(path):
    """Returns an iterator that fills a cache, the cache's lock, and the error of a second iterator."""
    first = iter(tf.data.Dataset.range(1000).cache(str(path)))
    next(first)
    with pytest.raises(tf.errors.AlreadyExistsError) as refused:
        next(iter(tf.data.Dataset.range(1000).cache(str(path))))
    return first, lock_named_in(str(refused.value)), str(refused.value)


def test_a_lock_is_found_in_the_error_and_kept_while_the_cache_is_filled(tmp_path):
    first, path, _ = begun_cache(tmp_path / "cache")
    now = time.time()
    assert locks_in(tmp_path) == [path] and not is_left_behind(path, run_start=now - 60, attempt_start=now + 60)
    del first


def test_a_lock_left_by_an_earlier_attempt_is_removed(tmp_path):
    path = tmp_path / "cache_0.lockfile"
    path.write_text("Created at: 1")
    made = path.stat().st_mtime

    def left(run_start, attempt_start):
        return is_left_behind(path, run_start, attempt_start)

    assert left(made - 1, made + 1)
    assert not left(made + 1, made + 2), "made before the run"
    assert not left(made - 2, made - 1), "made in this attempt"
    with open(tmp_path / "cache_0.data-00000-of-00001", "w"):
        assert not left(made - 1, made + 1), "another process fills the cache"
    path.write_text("of another program")
    assert not left(made - 1, time.time() + 60)
    assert remove(path) and not path.exists()
    os.symlink(tmp_path / "elsewhere", path)
    assert not left(0, time.time() + 60), "a link"


@pytest.mark.parametrize(
    ("attempt_start", "words"),
    [(-1, "two iterators fill one data cache"), (1, "remove it: `rm '")],
)
def test_the_description_of_a_lock_names_the_file_and_the_remedy(tmp_path, attempt_start, words):
    path = tmp_path / "cache_0.lockfile"
    path.touch()
    said = describe(path, path.stat().st_mtime + attempt_start)
    assert words in said and str(path) in said and "TFDIST_SLOT" in said


def test_a_lock_on_remote_storage_is_ignored():
    assert lock_named_in("cache lockfile already exists ('gs://bucket/cache_0.lockfile').") is None
    assert lock_named_in("[Errno 17] File exists") is None
