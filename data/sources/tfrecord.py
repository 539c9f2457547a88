"""Examples in TFRecord files."""

import concurrent.futures
import itertools
import operator
import os
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from tfdist.data.sources.files import LocalFile, RemoteFile, expand, is_local, open_to_read
from tfdist.data.sources.source import Source, digest
from tfdist.data.sources.tfrecord_index import FOOTER_BYTES, HEADER_BYTES, load_index
from tfdist.errors import SourceError

_INDEXED_AT_ONCE = 8
_SPAN_BITS = 22  # 4 MB


class TFRecordSource(Source):
    """Records of uncompressed TFRecord files, as strings: parse them in `map_fn`.

    The first time, the files are indexed (see `load_index`), which by default reads them once, to compare all data with
    their CRCs. Later reads compare lengths, and notice a file that has been changed by its size and time; a bit that
    turns on the disk after that they do not. Neighbours that are asked for together are read together. Costs 16 bytes
    of memory a record.

    Args:
      paths: Files or glob patterns, local or of `tf.io.gfile`; or (file, skip, take) for some of a file's records.
      check_data: Whether all data are compared with their CRCs when a file is indexed. Without, only headers are read,
        which is much less where records are large, and broken data are found by nobody.

    Raises:
      ValueError: If there are no such files, or no records in them.
      SourceError: If a file is broken; names it and the record.
    """

    element_spec = tf.TensorSpec([], tf.string)

    def __init__(self, paths: Iterable[str | os.PathLike | tuple[str, int, int]], *, check_data: bool = True):
        parts = [part for path in paths for part in _parts(path)]
        expand(path for path, _, _ in parts)
        with concurrent.futures.ThreadPoolExecutor(_INDEXED_AT_ONCE) as pool:
            indices = list(pool.map(lambda part: load_index(part[0], check_data), parts))
        ranges = [slice(skip, None if take is None else skip + take) for _, skip, take in parts]
        lengths = [index.lengths[part] for index, part in zip(indices, ranges, strict=True)]
        self._indices = indices
        self._skips = [part.start for part in ranges]
        self._ends = np.cumsum([len(part) for part in lengths])
        if not parts or not self._ends[-1]:
            raise ValueError(
                f"A source needs at least one example, but there are none in {[part[0] for part in parts]}."
            )
        # Places count through all files, with a gap after each, so that those of two files are never neighbours.
        self._starts = np.cumsum([0, *(index.size + 1 for index in indices[:-1])])
        offsets = [
            index.offsets[part] + start for index, part, start in zip(indices, ranges, self._starts, strict=True)
        ]
        self._places = np.concatenate(offsets)
        self._lengths = np.concatenate(lengths)

    def __len__(self) -> int:
        return len(self._lengths)

    def read(self, indices: tf.Tensor) -> tf.Tensor:  # noqa: D102
        records = tf.numpy_function(self._read, [indices], tf.string)
        records.set_shape(indices.shape)
        return records

    def read_elsewhere(self, indices: np.ndarray) -> Callable[[tf.Tensor], tf.Tensor]:
        """See `Source`. Reads record by record, with TensorFlow's own reader, which checks their CRCs."""
        places = self._places[indices]
        files = np.searchsorted(self._starts, places, "right") - 1
        offsets = places - self._starts[files]
        paths = [os.path.abspath(index.path) if is_local(index.path) else index.path for index in self._indices]

        def read(place: tf.Tensor) -> tf.Tensor:
            record = tf.raw_ops.TFRecordDatasetV2(
                filenames=[tf.gather(paths, tf.gather(files, place))],
                compression_type="",
                buffer_size=tf.constant(0, tf.int64),  # One record is read, not what stands behind it.
                byte_offsets=[tf.gather(offsets, place)],
            )
            return tf.data.experimental.from_variant(record, self.element_spec).take(1).get_single_element()

        return read

    def describe(self, index: int) -> str:  # noqa: D102
        file = int(np.searchsorted(self._ends, index, "right"))
        first = self._ends[file - 1] if file else 0
        return f"record {self._skips[file] + index - first} of {self._indices[file].path}"

    def fingerprint(self) -> str:  # noqa: D102
        counts = np.diff(self._ends, prepend=0)
        return digest("tfrecord", *zip([i.digest for i in self._indices], self._skips, counts.tolist(), strict=True))

    def _read(self, indices: np.ndarray) -> np.ndarray:
        if not len(indices):
            return np.empty(0, object)
        order = np.argsort(indices, kind="stable")
        wanted = indices[order]
        places, lengths = self._places[wanted], self._lengths[wanted]
        ends = places + lengths + (HEADER_BYTES + FOOTER_BYTES)
        # Neighbours are read together, as one span; a long run is cut every few MB.
        is_first = np.ones(len(wanted), bool)
        is_first[1:] = (places[1:] != ends[:-1]) | (places[1:] >> _SPAN_BITS != places[:-1] >> _SPAN_BITS)
        firsts = np.flatnonzero(is_first)
        begins = places[firsts]
        sizes = ends[np.append(firsts[1:], len(wanted)) - 1] - begins
        contents = self._read_spans(wanted[firsts], begins, sizes)
        span_of = np.cumsum(is_first) - 1
        starts = places - begins[span_of]
        found = list(
            zip(span_of.tolist(), starts.tolist(), (ends - begins[span_of] - FOOTER_BYTES).tolist(), strict=True)
        )
        headers = b"".join([contents[span][start : start + 8] for span, start, _ in found])
        if headers != lengths.tobytes() or list(map(len, contents)) != sizes.tolist():
            raise self._mismatch(wanted, contents, found)
        records = np.empty(len(wanted), object)
        records[order] = [contents[span][start + HEADER_BYTES : end] for span, start, end in found]
        return records

    def _read_spans(self, wanted: np.ndarray, begins: np.ndarray, sizes: np.ndarray) -> list[bytes]:
        """Bytes from each place on, in ascending order; `wanted` are the examples that they begin with."""
        files = np.searchsorted(self._starts, begins, "right") - 1
        offsets = (begins - self._starts[files]).tolist()
        spans = zip(files.tolist(), wanted.tolist(), zip(offsets, sizes.tolist(), strict=True), strict=True)
        contents: list[bytes] = []
        for file, group in itertools.groupby(spans, operator.itemgetter(0)):
            of_file = list(group)
            contents += self._open(file, of_file[0][1]).read([span for _, _, span in of_file])
        return contents

    def _mismatch(self, wanted: np.ndarray, contents: list[bytes], found: list[tuple[int, int, int]]) -> SourceError:
        """The error for the first record that is not where the index says."""
        wrong = (
            index
            for index, (span, start, end) in zip(wanted.tolist(), found, strict=True)
            if len(contents[span]) < end + FOOTER_BYTES
            or int.from_bytes(contents[span][start : start + 8], "little") != end - start - HEADER_BYTES
        )
        return self.failure(
            next(wrong),
            "is not where the index says: its file has changed. Leave files as they are while they are read.",
        )

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
                f"{opened.stat()[0]}, or in place. Leave files as they are while they are read, and start again.",
            )
        return opened


def _parts(path: str | os.PathLike | tuple[str, int, int]) -> list[tuple[str, int, int | None]]:
    if isinstance(path, tuple):
        return [path]
    return [(file, 0, None) for file in expand([path])]
