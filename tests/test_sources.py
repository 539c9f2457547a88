"""`tfdist.data.sources`: one table for all kinds of sources, then errors in files and examples."""

import contextlib
import glob
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping

import h5py
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
import tensorflow_datasets as tfds
from array_record.python import array_record_module

from tfdist.data import BalancedSharding
from tfdist.data.sources import ArrayRecordSource, TfdsSource, TFRecordSource, as_source, file_access
from tfdist.data.sources.items import ItemsSource
from tfdist.data.sources.tfrecord_index import INDEX_SUFFIX
from tfdist.errors import SourceError

DEADLINE_SECONDS = 300

COUNT = 23
RECORDS = [bytes([i]) * (i % 7) + b"\0" * (i % 3) for i in range(COUNT)]  # includes empty records, and zeros at the end
ROWS = np.arange(COUNT * 6, dtype=np.float32).reshape(COUNT, 2, 3)

INDEX_AGAIN_AND_AGAIN = """
import contextlib, os, sys
from tfdist.data.sources import as_source
for _ in range(20):
    with contextlib.suppress(FileNotFoundError):
        os.truncate(sys.argv[2], 10)
    source = as_source(sys.argv[1])
print(len(source), source.fingerprint())
"""


class Together:
    """A source that returns several examples per call of `__getitems__`."""

    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        raise IndexError(index)  # `__getitems__` must also be used for example 0.

    def __getitems__(self, indices):
        return [self.examples[index] for index in indices]


class Numbers(tfds.core.GeneratorBasedBuilder):
    """A TFDS dataset with pairs of a row and its number."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        row = tfds.features.Tensor(shape=(2, 3), dtype=np.float32)
        features = tfds.features.FeaturesDict({"row": row, "number": tfds.features.Scalar(np.int64)})
        return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=("row", "number"))

    def _split_generators(self, dl_manager):
        return {"train": ((i, {"row": ROWS[i], "number": i}) for i in range(COUNT))}

    def _generate_examples(self):
        raise NotImplementedError


def write_tfrecord(path, records=RECORDS):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return str(path)


def write_array_record(path, records=RECORDS):
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


def two_tfrecords(folder, count):
    write_tfrecord(folder / "0.tfrecord", RECORDS[:9])
    write_tfrecord(folder / "1.tfrecord", [])
    write_tfrecord(folder / "2.tfrecord", RECORDS[9:count])
    return str(folder / "?.tfrecord")


def two_array_records(folder, count):
    return [
        write_array_record(folder / "a.array_record", RECORDS[:9]),
        write_array_record(folder / "b.array_record", RECORDS[9:count]),
    ]


def part_of_a_file(folder, count):
    path = write_tfrecord(folder / "more.tfrecord", [b"before", *RECORDS, b"after"])
    return TFRecordSource([(path, 1, 9), (path, 10, count - 9)])


def on_disk(folder, count):
    memory = np.memmap(folder / str(count), np.float32, "w+", shape=(count, 2, 3))
    memory[:] = ROWS[:count]
    file = h5py.File(folder / f"{count}.h5", "w")
    return memory, {"again": file.create_dataset("rows", data=ROWS[:count]), "ids": np.arange(count)}


def split_object(folder, count):
    builder, _ = prepared(folder, count, "array_record")
    return builder, tfds.core.ReadInstruction("train", to=count, unit="abs")


def prepared(folder, count, file_format):
    """Returns a builder and a split of `count` examples. TFDS shuffles examples, so numbers identify them."""
    builder = Numbers(data_dir=folder, file_format=file_format)
    builder.download_and_prepare()
    return builder, f"train[:{count}]"


# Sources for tests, created from a folder and the number of examples.
GIVEN = {
    "array": lambda folder, count: ROWS[:count],
    "arrays": lambda folder, count: (
        ROWS[:count],
        {"text": np.array(RECORDS[:count], object), "ids": tf.range(count), "list": list(range(count))},
    ),
    "arrays on disk": on_disk,
    "list": lambda folder, count: [{"row": ROWS[i], "record": RECORDS[i], "id": i} for i in range(count)],
    "items together": lambda folder, count: Together([(ROWS[i], RECORDS[i]) for i in range(count)]),
    "TFRecord": two_tfrecords,
    "part of a TFRecord": part_of_a_file,
    "ArrayRecord": two_array_records,
    "TFDS, TFRecord": lambda folder, count: prepared(folder, count, "tfrecord"),
    "TFDS, ArrayRecord": lambda folder, count: prepared(folder, count, "array_record"),
    "TFDS, a split as an object": split_object,
}


def expected(given, kind, index):
    """Reads example `index` by plain Python."""
    if kind.startswith("TFDS"):
        builder, split = given
        if kind != "TFDS, TFRecord":
            example = builder.as_data_source(split=split)[index]
            return example["row"], example["number"]
        return list(builder.as_dataset(split=split, as_supervised=True).as_numpy_iterator())[index]
    if isinstance(given, list) and not isinstance(given[0], str):
        return given[index]
    if isinstance(given, Together):
        return given.examples[index]
    if kind == "arrays on disk":
        return ROWS[index], {"again": ROWS[index], "ids": index}
    if kind in ("array", "arrays"):
        text = {"text": RECORDS[index], "ids": index, "list": index}
        return ROWS[index] if kind == "array" else (ROWS[index], text)
    return RECORDS[index]


def pipeline(source, indices, batch=5):
    batches = tf.data.Dataset.from_tensor_slices(np.array(indices, np.int64)).batch(batch)
    return batches.map(source.read, num_parallel_calls=2, deterministic=True)


def read(source, indices):
    examples = pipeline(source, indices).unbatch()
    return list((examples.map(source.decode) if source.decodes else examples).as_numpy_iterator())


def assert_same(got, wanted):
    if isinstance(wanted, Mapping):
        assert got.keys() == wanted.keys()
        for key in wanted:
            assert_same(got[key], wanted[key])
    elif isinstance(wanted, tuple):
        assert len(got) == len(wanted)
        for pair in zip(got, wanted, strict=True):
            assert_same(*pair)
    else:
        np.testing.assert_array_equal(got, wanted)


@pytest.fixture(params=GIVEN)
def kind(request):
    return request.param


@pytest.mark.slow
def test_any_order_and_repeats_give_the_plain_data(kind, tmp_path):
    given = GIVEN[kind](tmp_path, COUNT)
    source = as_source(given)
    assert len(source) == COUNT
    orders = [
        [*range(COUNT)],
        [*reversed(range(COUNT))],
        [3, 3, 0, COUNT - 1, 3],
        np.random.default_rng(0).permutation(COUNT).tolist(),
        [8, 9, 10],
    ]
    examples = [expected(given, kind, i) for i in range(COUNT)]
    for order in orders:
        for got, index in zip(read(source, order), order, strict=True):
            assert_same(got, examples[index])


def test_element_spec_matches_the_examples(kind, tmp_path):
    source = as_source(GIVEN[kind](tmp_path, COUNT))
    dataset = pipeline(source, [1, 0, 2])
    assert dataset.unbatch().element_spec == source.element_spec
    (batch,) = dataset
    specs = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape[1:], x.dtype), batch)
    assert specs == source.element_spec
    assert all(x.shape[0] == 3 for x in tf.nest.flatten(batch))
    assert source.decodes or source.decode(batch) is batch


def test_fingerprint_stays_and_changes_with_the_number_of_examples(kind, tmp_path):
    folders = [tmp_path / name for name in ("one", "copy", "less")]
    for folder in folders:
        folder.mkdir()
    one, copy, less = (
        as_source(GIVEN[kind](folder, count)).fingerprint()
        for folder, count in zip(folders, [COUNT, COUNT, COUNT - 1], strict=True)
    )
    assert one == copy != less
    assert len(one) <= 16


def test_arrays_on_disk_are_the_same_source_as_in_memory(tmp_path):
    memory, datasets = on_disk(tmp_path, COUNT)
    strings = datasets["again"].file.create_dataset("text", data=[b"a", b"", b"ccc"])
    sources = [as_source(array) for array in (memory, datasets["again"], ROWS, memory.copy(), memory.astype("f4"))]
    assert len({(source.fingerprint(), source.describe(5)) for source in sources}) == 1
    assert {"PyFunc" in operations_of(source) for source in sources[:2]} == {True}
    assert {"PyFunc" in operations_of(source) for source in sources[2:]} == {False}
    assert_same(read(as_source(memory[3:]), [1, 0]), [ROWS[4], ROWS[3]])
    assert [bytes(text) for text in read(as_source(strings), [2, 0, 2])] == [b"ccc", b"a", b"ccc"]
    datasets["again"].file.close()
    assert_told(failure_of(sources[1], [7, 3]), "Example 7 (row 7", "one of 1 with it cannot be read from arrays")


def operations_of(source):
    graph = tf.function(source.read).get_concrete_function(tf.TensorSpec([None], tf.int64)).graph
    return {operation.type for operation in graph.get_operations()}


def test_fingerprint_of_records_changes_with_their_content(tmp_path):
    paths = [
        write_tfrecord(tmp_path / "a", [b"one", b"two"]),
        write_tfrecord(tmp_path / "b", [b"one", b"too"]),
    ]
    assert len({as_source(path).fingerprint() for path in paths}) == 2


class OutOfOrder:
    """An iterable with unknown length and without access by index."""

    def __iter__(self):
        return iter([1, 2])


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (np.zeros((0, 3)), ValueError, ["at least one example"]),
        ([], ValueError, ["at least one example"]),
        ((), ValueError, ["at least one array"]),
        (np.float32(3), ValueError, ["single value"]),
        ((np.zeros(3), {"y": np.zeros(4)}), ValueError, ["arrays[0] has 3", "arrays[1]['y'] has 4"]),
        (["hello", "world"], ValueError, ["No file hello", "for texts a tuple (texts,)"]),
        (np.array([{}, {}]), TypeError, ["arrays is a ndarray"]),
        (tf.ragged.constant([[1], [2, 3]]), TypeError, ["RaggedTensor", "to_tensor"]),
        (scipy.sparse.eye(3, format="csr"), TypeError, ["csr_matrix", "arrays.toarray()"]),
        ((np.ones(3), scipy.sparse.eye(3)), TypeError, ["arrays[1].toarray()"]),
        ((np.ones(3), None), TypeError, ["arrays[1] is None", "Leave it out"]),
        (np.ma.array([1, 2], mask=[0, 1]), TypeError, ["arrays are masked", "arrays.filled(...)"]),
        (tf.data.Dataset.range(3), TypeError, ["tf.data.Dataset", "map_fn"]),
        (OutOfOrder(), TypeError, ["OutOfOrder", "__len__", "__getitem__"]),
        ([object()], TypeError, ["example 0", "object"]),
        ("nowhere.tfrecord", ValueError, ["No file nowhere.tfrecord", "host"]),
        (["nowhere-*"], ValueError, ["No file matches nowhere-*"]),
        (["a.tfrecord", 3], TypeError, ["3"]),
        (["a.tfrecord", "b.array_record"], ValueError, ["a.tfrecord", "b.array_record"]),
        ([os.path.dirname(__file__)], ValueError, ["is a folder"]),
    ],
)
def test_an_unsuitable_source_is_refused_with_the_reason(given, error, said):
    with pytest.raises(error) as caught:
        as_source(given)
    assert [words for words in said if words not in str(caught.value)] == []


def test_a_source_is_used_unchanged():
    source = as_source(ROWS)
    assert as_source(source) is source


@pytest.mark.parametrize("write", [write_tfrecord, write_array_record])
def test_files_without_records_are_refused(write, tmp_path):
    with pytest.raises(ValueError, match="at least one example"):
        as_source(write(tmp_path / "empty.array_record" if write is write_array_record else tmp_path / "empty", []))


@pytest.mark.parametrize(
    ("skip", "take", "error", "said"),
    [
        (COUNT - 2, 3, SourceError, f"{COUNT} records, and a skip of {COUNT - 2} with a take of 3 needs {COUNT + 1}"),
        (COUNT + 1, -1, SourceError, f"{COUNT} records, .* needs {COUNT + 1}"),
        (-1, 3, ValueError, "not negative"),
        (0, -2, ValueError, "not negative"),
    ],
)
def test_a_part_that_its_file_does_not_have_is_refused(skip, take, error, said, tmp_path):
    path = write_tfrecord(tmp_path / "a.tfrecord")
    with pytest.raises(error, match=rf"{path}.*{said}" if error is SourceError else rf"{said}.*{path}"):
        TFRecordSource([(path, skip, take)])


def test_a_take_of_minus_one_means_all_records_after_skip(tmp_path):
    source = TFRecordSource([(write_tfrecord(tmp_path / "a.tfrecord"), 3, -1)])
    assert read(source, range(len(source))) == RECORDS[3:]


def test_parts_of_a_split_have_each_example_once_and_may_keep_all_features(tmp_path):
    builder, _ = prepared(tmp_path, COUNT, "array_record")
    parts = [as_source((builder, part)) for part in tfds.even_splits("train", 3)]
    numbers = [number for part in parts for _, number in read(part, range(len(part)))]
    assert sorted(numbers) == list(range(COUNT)) and len({part.fingerprint() for part in parts}) == 3
    assert read(TfdsSource(builder, "train", as_supervised=False), [2])[0].keys() == {"row", "number"}


def test_one_file_is_read_by_its_path_and_another_format_is_refused(tmp_path):
    paths = write_tfrecord(tmp_path / "records"), write_array_record(tmp_path / "train.ar")
    assert [len(make(path)) for make, path in zip((TFRecordSource, ArrayRecordSource), paths, strict=True)] == [
        COUNT
    ] * 2
    with pytest.raises(SourceError, match=r"tfdist\.data\.sources\.ArrayRecordSource\(path\)"):
        as_source(paths[1])


def test_builder_without_split_or_files_is_refused(tmp_path):
    builder = Numbers(data_dir=tmp_path)
    with pytest.raises(TypeError, match="needs a split"):
        as_source(builder)
    with pytest.raises(ValueError, match="download_and_prepare"):
        as_source((builder, "train"))


def test_arrays_are_not_stored_in_graphs():
    big = as_source(np.zeros((1000, 1000), np.float32))
    graph = tf.function(big.read).get_concrete_function(tf.TensorSpec([None], tf.int64)).graph
    assert graph.as_graph_def().ByteSize() < 10_000


def failure_of(source, indices):
    """Returns the text of a pipeline's error, as `fit` would raise it."""
    with pytest.raises(tf.errors.OpError) as caught:
        read(source, indices)
    return str(caught.value)


def assert_told(text, *words):
    assert [word for word in (*words, "SourceError", "on host") if word not in text] == []


class Unlike(list):
    def __getitem__(self, index):
        if index == 7:
            raise StopIteration("seven is gone")
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("examples", "said"),
    [
        (Unlike(ROWS), ["Example 7 (item 7 of Unlike)", "StopIteration: seven is gone"]),
        ([*ROWS[:7], ROWS[7].astype(np.float64), *ROWS[8:]], ["Example 7", "float32 of shape [2, 3], but is float64"]),
        ([*ROWS[:7], ROWS[7][:1], *ROWS[8:]], ["Example 7", "shape [1, 3]", "differs from example 0"]),
        ([{"a": 1}] * 7 + [{"b": 1}] * 2, ["Example 7", "['a']", "['b']"]),
        ([(1, 2)] * 7 + [(1,)] * 2, ["Example 7", "tuple of 2"]),
        (Together([1] * 7 + ["x"]), ["Example 7 (item 7 of Together)", "int64"]),
        ([{"a": "b"}] * 7 + [{"a": None}] * 2, ["Example 7", "string", "NoneType"]),
    ],
    ids=["raises", "type", "shape", "keys", "tuple", "together", "none"],
)
def test_a_wrong_example_is_named(examples, said):
    assert_told(failure_of(as_source(examples), range(8)), *said)


def test_items_may_share_a_buffer():
    class Reused(list):
        buffer = np.zeros(2, np.int64)

        def __getitem__(self, index):
            self.buffer[:] = index
            return self.buffer

    assert [list(each) for each in read(as_source(Reused([0] * 4)), range(4))] == [[i, i] for i in range(4)]


def test_the_broken_one_of_several_items_is_named():
    class Broken(Together):
        def __getitem__(self, index):
            return {3: 1}.__getitem__(3) if index != 3 else {}["three"]

        def __getitems__(self, indices):
            return [self[index] for index in indices]

    assert_told(failure_of(as_source(Broken([1] * 5)), range(5)), "Example 3 (item 3 of Broken)", "KeyError")


def test_a_changed_length_is_noticed():
    examples = list(range(5))
    source = as_source(examples)
    examples.append(5)
    assert_told(failure_of(source, range(5)), "had 5 examples", "has 6 now")


def test_worker_of_tf_config_is_named(monkeypatch):
    config = {"cluster": {"worker": ["10.0.0.1:1", "10.0.0.2:2"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert_told(failure_of(as_source([1, "x"]), range(2)), "worker 1 of 2 at 10.0.0.2:2")


def test_items_are_read_by_one_thread_at_a_time():
    class Alone(list):
        busy = False

        def __getitem__(self, index):
            assert not Alone.busy
            Alone.busy = True
            os.sched_yield()
            Alone.busy = False
            return index

    source = ItemsSource(Alone(range(300)))
    batches = tf.data.Dataset.range(300).batch(3).map(source.read, num_parallel_calls=8).unbatch()
    assert list(batches.as_numpy_iterator()) == list(range(300))


def offset_of(record):
    return sum(len(data) + 16 for data in RECORDS[:record])


def damage(path, offset):
    content = bytearray(pathlib.Path(path).read_bytes())
    content[offset] ^= 1
    pathlib.Path(path).write_bytes(content)


@pytest.mark.parametrize(("byte", "what"), [(0, "header"), (9, "header"), (12, "CRC")], ids=["length", "crc", "data"])
def test_broken_record_is_named_by_file_and_number(byte, what, tmp_path):
    path = write_tfrecord(tmp_path / "a.tfrecord")
    damage(path, offset_of(6) + byte)
    with pytest.raises(SourceError, match=rf"(?s)Record 6 of {path}, at byte {offset_of(6)}.*{what}.*on host"):
        as_source(path)


def test_data_checksums_can_be_switched_off(tmp_path):
    path = write_tfrecord(tmp_path / "a.tfrecord")
    damage(path, offset_of(6) + 12)
    assert len(TFRecordSource([path], check_data=False)) == COUNT
    with pytest.raises(SourceError, match="Record 6"):
        as_source(path)


@pytest.mark.parametrize("write", [write_tfrecord, write_array_record])
def test_reading_no_records_gives_none(write, tmp_path):
    source = as_source(write(tmp_path / ("a.tfrecord" if write is write_tfrecord else "a.array_record")))
    assert tf.function(source.read)(tf.zeros([0], tf.int64)).shape == [0]


@pytest.mark.parametrize("cut", [1, 5, len(RECORDS[-1]) + 10])
def test_truncated_file_is_named(cut, tmp_path):
    path = write_tfrecord(tmp_path / "a.tfrecord")
    os.truncate(path, os.path.getsize(path) - cut)
    with pytest.raises(SourceError, match=f"Record {COUNT - 1} of {path}.* cut off"):
        as_source(path)


def test_truncated_array_record_is_named(tmp_path):
    path = write_array_record(tmp_path / "a.array_record")
    os.truncate(path, os.path.getsize(path) // 2)
    with pytest.raises(SourceError, match=path):
        as_source(path)


def test_a_file_of_another_format_is_named(tmp_path):
    path = tmp_path / "a.tfrecord"
    path.write_text("This is a text, and no records are in it.")
    with pytest.raises(SourceError, match="A TFRecord file must not be compressed"):
        as_source(path)


@pytest.mark.parametrize("write", [write_tfrecord, write_array_record])
@pytest.mark.parametrize("change", ["truncated", "touched", "gone"])
def test_file_that_changes_while_it_is_read_is_named(write, change, tmp_path):
    path = write(tmp_path / "a.array_record" if write is write_array_record else tmp_path / "a.tfrecord")
    source = as_source(path)
    if change == "truncated":
        os.truncate(path, offset_of(5) + 3)
    elif change == "touched":
        os.utime(path, ns=(0, 0))
    else:
        os.remove(path)
    assert_told(failure_of(source, [4, 7]), f"Example 4 (record 4 of {path})")


@pytest.mark.parametrize("ours", [True, False], ids=["may write", "may not"])
def test_a_file_that_is_read_often_is_mapped_if_it_is_known_to_be_in_memory(ours, monkeypatch, tmp_path):
    path = write_tfrecord(tmp_path / "a.tfrecord")
    monkeypatch.setattr(file_access.os, "access", lambda *_: ours)
    source = as_source(path)
    for _ in range(5):
        assert read(source, [7, 2, 3, 7]) == [RECORDS[i] for i in (7, 2, 3, 7)]
    (found,) = source._indices
    assert (file_access.open_to_read(path, (found.size, found.mtime)).mapped is not None) == ours
    os.truncate(path, offset_of(5) + 3)
    assert_told(failure_of(source, [4, 7]), f"Example 4 (record 4 of {path})")


@pytest.mark.skipif(
    tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14), reason="Linux reads into maps from 5.14 on."
)
def test_a_file_of_which_a_little_is_not_in_memory_is_mapped(tmp_path):
    records = [bytes([i]) * 4000 for i in range(100)]
    path = write_tfrecord(tmp_path / "a.tfrecord", records)
    source = as_source(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 1 << 17, os.POSIX_FADV_DONTNEED)
        mapped = file_access._map(file.fileno())
        assert file_access._is_in_memory(mapped)
    for _ in range(5):
        assert read(source, [70, 2, 3, 7]) == [records[i] for i in (70, 2, 3, 7)]


def test_an_index_is_made_once_and_again_for_a_changed_file(tmp_path, caplog):
    path = write_tfrecord(tmp_path / "a.tfrecord")
    index = tmp_path / f".a.tfrecord{INDEX_SUFFIX}"
    as_source(path)
    made = index.stat().st_mtime_ns
    as_source(path)
    assert (index.stat().st_mtime_ns, caplog.messages) == (made, [])
    write_tfrecord(path, RECORDS[:4])
    assert read(as_source(path), range(4)) == RECORDS[:4]
    assert "older" in caplog.text


def test_a_replaced_file_is_read(tmp_path):
    path = write_tfrecord(tmp_path / "a.tfrecord")
    assert read(as_source(path), range(4)) == RECORDS[:4]
    os.replace(write_tfrecord(tmp_path / "b.tfrecord", RECORDS[3:]), path)
    assert read(as_source(path), range(4)) == RECORDS[3:7]


@pytest.mark.parametrize("content", [b"", b"nonsense", None, "encrypted"])
def test_a_damaged_index_is_made_again(content, tmp_path, caplog):
    path = write_tfrecord(tmp_path / "a.tfrecord")
    as_source(path)
    index = tmp_path / f".a.tfrecord{INDEX_SUFFIX}"
    sound = index.read_bytes()
    if content == "encrypted":  # a flag of a member in the zip file's directory
        content = bytearray(sound)
        content[sound.index(b"PK\1\2") + 8] |= 1
    index.write_bytes(sound[:-200] if content is None else content)
    assert read(as_source(path), range(COUNT)) == RECORDS
    assert "damaged" in caplog.text
    assert index.read_bytes() == sound


@pytest.mark.slow
def test_processes_may_index_at_once(tmp_path):
    path = write_tfrecord(tmp_path / "a.tfrecord", RECORDS * 50)
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    index = tmp_path / f".a.tfrecord{INDEX_SUFFIX}"
    command = [sys.executable, "-c", INDEX_AGAIN_AND_AGAIN, path, index]
    other = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while other.poll() is None:
            assert time.monotonic() < deadline
            assert read(as_source(path), [COUNT + 5, 3]) == [RECORDS[5], RECORDS[3]]
            with contextlib.suppress(FileNotFoundError):
                index.unlink()
        printed, errors = other.communicate()
    finally:
        other.kill()
        other.wait()
    source = as_source(path)
    assert printed.split() == [str(50 * COUNT), source.fingerprint()], errors
    assert sorted(os.listdir(tmp_path)) == [index.name, "a.tfrecord"]


def test_an_index_is_cached_if_it_cannot_be_beside_the_file(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setenv("TFDIST_CACHE", str(cache))
    with open(write_tfrecord(tmp_path / "a.tfrecord"), "rb") as file:
        # Even root cannot create files in this folder.
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        assert read(as_source(path), [2, 1]) == [RECORDS[2], RECORDS[1]]
        (index,) = cache.iterdir()
        made = index.stat().st_mtime_ns
        as_source(path)
    assert index.stat().st_mtime_ns == made


def test_indices_are_not_read_as_data(tmp_path):
    path = write_tfrecord(tmp_path / "train-0")
    for _ in range(2):
        for pattern in ("train*", "*"):
            assert len(as_source(tmp_path / pattern)) == COUNT
        assert glob.glob(str(tmp_path / "*-0*")) == tf.io.gfile.glob(str(tmp_path / "train*")) == [path]
        assert len(as_source([tmp_path / name for name in os.listdir(tmp_path)])) == COUNT
    with pytest.raises(ValueError, match="are indices"):
        as_source(tmp_path / f".train-0{INDEX_SUFFIX}")


def test_files_of_other_file_systems_are_read(tmp_path):
    path = write_tfrecord("ram://test_sources/a.tfrecord")
    try:
        assert read(as_source(path), [5, 2, 3]) == [RECORDS[5], RECORDS[2], RECORDS[3]]
    finally:
        tf.io.gfile.rmtree("ram://test_sources")


@pytest.mark.slow
@pytest.mark.parametrize("map_fn", [None, lambda record: (record, tf.strings.length(record))], ids=["as is", "mapped"])
@pytest.mark.parametrize("files_together", [True, False], ids=["together", "by batches"])
@pytest.mark.parametrize("last_rows", [0, 1, 3])
def test_parts_of_records_make_up_the_global_batches(last_rows, files_together, map_fn, tmp_path):
    source = as_source(write_tfrecord(tmp_path / "a.tfrecord", RECORDS[: 10 + last_rows]))
    source.examples_together *= files_together
    shardings = [BalancedSharding(source, 5, seed=3, map_fn=map_fn, policy=(1, 3), repeat=True) for _ in range(2)]
    parts = [
        sharding(tf.distribute.InputContext(num_input_pipelines=2, input_pipeline_id=i, num_replicas_in_sync=2))
        for i, sharding in enumerate(shardings)
    ]
    plan, got = shardings[0].plan, []
    steps = 2 * plan.steps_per_epoch + 1
    for both in zip(*(part.take(steps).as_numpy_iterator() for part in parts), strict=True):
        got.append([record for part in both for record in (part[0] if map_fn else part).tolist()])
        if map_fn:
            assert [length for part in both for length in part[1].tolist()] == list(map(len, got[-1]))
    wanted = [plan.batch(*divmod(step, plan.steps_per_epoch)) for step in range(steps)]
    assert got == [[RECORDS[i] for i in batch] for batch in wanted]


def test_an_epoch_of_coalesced_records_ends_with_its_last_batch(tmp_path):
    source = as_source(write_tfrecord(tmp_path / "a.tfrecord", RECORDS[:8]))
    sharding = BalancedSharding(source, 2, seed=3)
    read = iter(sharding())
    for _ in range(3):
        next(read)
    assert sharding.position == (0, 0)
    next(read)
    assert sharding.position == (1, 0)
