"""Source of examples in TFRecord files."""

import concurrent.futures
import mmap
import os
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from tfdist.data.sources.file_access import LocalFile, RemoteFile, expand, is_local, open_to_read, several
from tfdist.data.sources.source import Source, digest, files_named, this_worker
from tfdist.data.sources.tfrecord_index import FOOTER_BYTES, HEADER_BYTES, TFRecordIndex, load_index
from tfdist.errors import SourceError
from tfdist.readable_numbers import counted

_INDEXED_AT_ONCE = 8
_SPAN_BITS = 22  # 4 MB
_BYTES_TOGETHER = 1 << 22


class TFRecordSource(Source):
    """Records of uncompressed TFRecord files, as strings to parse in `map_fn`.

    Indexes the files at first use; see `load_index`. By default, indexing reads the files once and compares all data
    with their CRCs. Later reads compare lengths of records, and sizes and times of last change of files. They do not
    detect a bit that flips on the disk later. Reads of consecutive records are joined. Costs 16 bytes of
    memory per record.

    Args:
      paths: A path or glob pattern, local or for `tf.io.gfile`, or a list of them. A list may also hold
        (file, skip, take), for a part of a file. As in TFDS, a `take` of -1 means all records after `skip`.
      check_data: Whether to compare all data with their CRCs when a file is indexed. If not, indexing reads only
        headers, far fewer bytes if records are large, and does not detect broken data.

    Raises:
      ValueError: If there are no such files, the files have no records, `skip` is negative, or `take` is less than -1.
      SourceError: If a file is broken, with the file and the record; or if it has fewer records than its part, with the
        file.
    """

    element_spec = tf.TensorSpec([], tf.string)

    def __init__(
        self,
        paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str] | tuple[str, int, int]],
        *,
        check_data: bool = True,
    ):
        parts = [part for path in several(paths) for part in _parts(path)]
        expand(path for path, _, _ in parts)
        with concurrent.futures.ThreadPoolExecutor(_INDEXED_AT_ONCE) as pool:
            indices = list(pool.map(lambda part: load_index(part[0], check_data), parts))
        ranges = [_range(part, index) for part, index in zip(parts, indices, strict=True)]
        lengths = [index.lengths[part] for index, part in zip(indices, ranges, strict=True)]
        self._indices = indices
        self._skips = [part.start for part in ranges]
        self._ends = np.cumsum([len(part) for part in lengths])
        if not parts or not self._ends[-1]:
            raise ValueError(
                f"A source needs at least one example, but there are none in {[part[0] for part in parts]}."
            )
        # Places are offsets over all files, with a gap after each file, so that no read joins records of two files.
        self._starts = np.cumsum([0, *(index.size + 1 for index in indices[:-1])])
        offsets = [
            index.offsets[part] + start for index, part, start in zip(indices, ranges, self._starts, strict=True)
        ]
        self._places = np.concatenate(offsets)
        self._lengths = np.concatenate(lengths)
        self.examples_together = int(_BYTES_TOGETHER / max(self._lengths.mean(), 1))

    def __len__(self) -> int:
        return len(self._lengths)

    def read(self, indices: tf.Tensor) -> tf.Tensor:  # noqa: D102
        records = tf.numpy_function(self._read, [indices], tf.string)
        records.set_shape(indices.shape)
        return records

    def read_elsewhere(self, indices: np.ndarray) -> Callable[[tf.Tensor], tf.Tensor]:
        """Returns a function with which a server of a tf.data service reads these examples.

        It reads records one by one, with TensorFlow's own reader, which checks their CRCs.
        """
        places = self._places[indices]
        files = np.searchsorted(self._starts, places, "right") - 1
        offsets = places - self._starts[files]
        paths = [os.path.abspath(index.path) if is_local(index.path) else index.path for index in self._indices]

        def read(place: tf.Tensor) -> tf.Tensor:
            record = tf.raw_ops.TFRecordDatasetV2(
                filenames=[tf.gather(paths, tf.gather(files, place))],
                compression_type="",
                buffer_size=tf.constant(0, tf.int64),  # Reads one record, and nothing after it.
                byte_offsets=[tf.gather(offsets, place)],
            )
            return tf.data.experimental.from_variant(record, self.element_spec).take(1).get_single_element()

        return read

    def describe(self, index: int) -> str:  # noqa: D102
        file = int(np.searchsorted(self._ends, index, "right"))
        first = self._ends[file - 1] if file else 0
        return f"record {self._skips[file] + index - first} of {self._indices[file].path}"

    def origin(self) -> str:  # noqa: D102
        return files_named([os.path.abspath(i.path) if is_local(i.path) else i.path for i in self._indices])

    def fingerprint(self) -> str:  # noqa: D102
        counts = np.diff(self._ends, prepend=0)
        return digest("tfrecord", *zip([i.digest for i in self._indices], self._skips, counts.tolist(), strict=True))

    def _read(self, indices: np.ndarray) -> np.ndarray:
        records = np.full(indices.shape, b"", object)
        is_wanted = indices >= 0
        if np.any(is_wanted):
            records[is_wanted] = self._read_all(indices[is_wanted])
        return records

    def _read_all(self, indices: np.ndarray) -> np.ndarray:
        order = np.argsort(indices, kind="stable")
        wanted = indices[order]
        places, lengths = self._places[wanted], self._lengths[wanted]
        files = np.searchsorted(self._starts, places, "right") - 1
        found: list[bytes] = []
        first = 0
        for file, count in zip(*(each.tolist() for each in np.unique(files, return_counts=True)), strict=True):
            rows = slice(first, first + count)
            found += self._read_file(file, wanted[rows], places[rows] - self._starts[file], lengths[rows])
            first += count
        records = np.empty(len(wanted), object)
        records[order] = found
        return records

    def _read_file(self, file: int, wanted: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> list[bytes]:
        """Returns records of one file, in ascending order of offsets, after a check that it was not changed."""
        opened = self._open(file, wanted[0])
        mapped = opened.mapped
        found = _read_spans(opened, offsets, lengths) if mapped is None else _read_mapped(mapped, offsets, lengths)
        headers, records = found
        if headers != lengths.tobytes() or sum(map(len, records)) != lengths.sum():
            spans = [(offset, 8) for offset in offsets.tolist()]
            wrong = [wanted[i] for i, header in enumerate(opened.read(spans)) if header != lengths[i].tobytes()]
            raise self.failure(
                wrong[0] if wrong else wanted[-1],
                "is not where the index has it: its file has changed. Do not change files while they are read.",
            )
        return records

    def _open(self, file: int, index: int) -> LocalFile | RemoteFile:
        made = self._indices[file]
        try:
            opened = open_to_read(made.path, (made.size, made.mtime))
        except (OSError, SourceError) as error:
            raise self.failure(index, f"cannot be read: {error}.") from error
        if opened.stat() != (made.size, made.mtime):
            raise self.failure(
                index,
                f"cannot be trusted: its file has changed since it was indexed, from {made.size} bytes to "
                f"{opened.stat()[0]}, or in place. Do not change files while they are read, and start again.",
            )
        return opened


def _read_mapped(mapped: mmap.mmap, offsets: np.ndarray, lengths: np.ndarray) -> tuple[bytes, list[bytes]]:
    """Returns records from a file in memory, and the first 8 bytes of all their headers, to check their lengths."""
    headers = np.frombuffer(mapped, np.uint8)[offsets[:, np.newaxis] + np.arange(8)]
    begins = offsets + HEADER_BYTES
    records = [mapped[begin:end] for begin, end in zip(begins.tolist(), (begins + lengths).tolist(), strict=True)]
    return headers.tobytes(), records


def _read_spans(opened: LocalFile | RemoteFile, offsets: np.ndarray, lengths: np.ndarray) -> tuple[bytes, list[bytes]]:
    """Returns the same as `_read_mapped`, by reads from disk. Joins consecutive records, cut every few MB."""
    ends = offsets + lengths + (HEADER_BYTES + FOOTER_BYTES)
    is_first = np.ones(len(offsets), bool)
    is_first[1:] = (offsets[1:] != ends[:-1]) | (offsets[1:] >> _SPAN_BITS != offsets[:-1] >> _SPAN_BITS)
    firsts = np.flatnonzero(is_first)
    begins = offsets[firsts]
    sizes = ends[np.append(firsts[1:], len(offsets)) - 1] - begins
    contents = opened.read(list(zip(begins.tolist(), sizes.tolist(), strict=True)))
    span_of = np.cumsum(is_first) - 1
    starts = offsets - begins[span_of]
    places = list(zip(span_of.tolist(), starts.tolist(), (starts + HEADER_BYTES + lengths).tolist(), strict=True))
    headers = b"".join([contents[span][start : start + 8] for span, start, _ in places])
    return headers, [contents[span][start + HEADER_BYTES : end] for span, start, end in places]


def _parts(path: str | os.PathLike[str] | tuple[str, int, int]) -> list[tuple[str, int, int]]:
    if not isinstance(path, tuple):
        return [(file, 0, -1) for file in expand([path])]
    _, skip, take = path
    if skip < 0 or take < -1:
        raise ValueError(
            "A part of a file is (file, skip, take) with numbers of records that are not negative, or a take of -1 for "
            f"all records after skip, but got {path}. Count skip from the beginning of the file."
        )
    return [path]


def _range(part: tuple[str, int, int], index: TFRecordIndex) -> slice:
    """Returns the records that a part has of its file; raises if the file does not have them."""
    path, skip, take = part
    found, needed = len(index.lengths), skip + max(take, 0)
    if needed > found:
        raise SourceError(
            f"A part (file, skip, take) must lie within its file, but {path} has {counted(found, 'record')}, and a "
            f"skip of {skip} with a take of {take} needs {needed}. Copy the file again, or give a smaller part. Read "
            f"by {this_worker()}."
        )
    return slice(skip, found if take == -1 else needed)
