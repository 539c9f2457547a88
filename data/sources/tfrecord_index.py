"""Index of the records in a TFRecord file, to read any one: built once, stored in a file, checked when loaded."""

import contextlib
import dataclasses
import hashlib
import io
import os
import uuid

import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.data.sources.file_access import INDEX_SUFFIX, is_local, open_to_scan, stat
from tfdist.data.sources.source import this_worker
from tfdist.errors import SourceError

HEADER_BYTES = 12  # The length of the data, and the CRC of the length.
FOOTER_BYTES = 4  # The CRC of the data.

_OTHER_FILES = (
    "A TFRecord file must not be compressed. An ArrayRecord file must have array_record in its name, or be given as "
    "tfdist.data.sources.ArrayRecordSource(path)."
)
_BATCH = 1024
_POLYNOMIAL = 0x82F63B78  # CRC32C, reflected
_MASK_DELTA = 0xA282EAD8


@dataclasses.dataclass(frozen=True, eq=False)
class TFRecordIndex:
    """The offsets of the records of one TFRecord file, and the file's size and age when it was indexed."""

    path: str  # Path of the file.
    size: int  # Size of the file in bytes when it was indexed.
    mtime: int  # Time of the last change before indexing, in nanoseconds.
    lengths: np.ndarray  # Bytes of data in each record, int64 [n].
    digest: str  # 16 hex digits of the lengths and the CRCs of all data, so they depend on the contents of the file.
    checked: bool  # Whether the data of all records were checked and match their CRCs.

    @property
    def offsets(self) -> np.ndarray:
        """Offset of the header of each record in the file, int64 [n]."""
        ends = np.cumsum(self.lengths + (HEADER_BYTES + FOOTER_BYTES))
        return np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else ends


def load_index(path: str, check_data: bool) -> TFRecordIndex:
    """Loads the stored index of a TFRecord file if it fits the file; if not, builds the index and stores it.

    The index is stored in the folder of the file, as `.<name>.tfdist-index`. If that is not writable, the index is
    stored in $TFDIST_CACHE or `~/.cache/tfdist`. Building reads the headers of all records, in Python, a million in two
    seconds. With `check_data` it reads the whole file, with `tf.data`. Any number of processes may build an index at
    the same time; each writes its own draft and renames it.

    Raises:
      SourceError: If the file is missing, truncated or no TFRecord file. The message names the first broken record.
    """
    size, mtime = stat(path)
    for place in _places(path):
        index = _read(place, path, size, mtime)
        if index is not None and index.checked >= check_data:
            return index
    index = _make(path, size, mtime)
    if check_data:
        _check_data(index)
        index = dataclasses.replace(index, checked=True)
    if stat(path) != (size, mtime):
        raise SourceError(
            f"{path} changed while {this_worker()} counted its records. Start again when the file is complete."
        )
    _keep(index)
    return index


def _places(path: str) -> list[str]:
    cache = os.environ.get("TFDIST_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "tfdist")
    full = os.path.abspath(path) if is_local(path) else path
    folder, name = os.path.split(path)
    in_cache = f"{name}-{hashlib.sha256(full.encode()).hexdigest()[:16]}{INDEX_SUFFIX}"
    # The dot hides the index from other programs that expand a pattern such as "train-*-of-*".
    return [os.path.join(folder, f".{name}{INDEX_SUFFIX}"), os.path.join(cache, in_cache)]


def _read(place: str, path: str, size: int, mtime: int) -> TFRecordIndex | None:
    """Returns the file index stored in `place`; None if it is missing, damaged, or of another state of the data."""
    try:
        with tf.io.gfile.GFile(place, "rb") as file:
            content = file.read()
    except tf.errors.OpError:
        return None
    try:
        with np.load(io.BytesIO(content)) as kept:  # A zip file with checksums.
            index = TFRecordIndex(
                path=path,
                size=int(kept["size"]),
                mtime=int(kept["mtime"]),
                lengths=kept["lengths"].astype(np.int64),
                digest=str(kept["digest"]),
                checked=bool(kept["checked"]),
            )
    except Exception as error:  # A flipped bit can cause many errors: encryption, another version, another type.
        logging.warning("%s is damaged (%s), so it is made again.", place, error)
        return None
    if (index.size, index.mtime) != (size, mtime):
        logging.warning("%s is older than the last change of its file, so it is made again.", place)
        return None
    return index


def _keep(index: TFRecordIndex) -> None:
    lengths = index.lengths.astype(np.uint32) if index.lengths.max(initial=0) < 2**32 else index.lengths
    content = io.BytesIO()
    facts = dataclasses.asdict(index)
    del facts["path"]  # Files may be moved together with their indices.
    np.savez_compressed(content, **{**facts, "lengths": lengths})
    for place in _places(index.path):
        try:
            tf.io.gfile.makedirs(os.path.dirname(place) or ".")
            _write(place, content.getvalue())
        except tf.errors.OpError as error:
            logging.info("The index of %s cannot be stored in %s: %s", index.path, place, error.message)
        else:
            return
    logging.warning("The index of %s cannot be stored, so it is made at each start. Set $TFDIST_CACHE.", index.path)


def _write(place: str, content: bytes) -> None:
    draft = f"{place}.{uuid.uuid4().hex}"
    try:
        with tf.io.gfile.GFile(draft, "wb") as file:
            file.write(content)
        tf.io.gfile.rename(draft, place, overwrite=True)
    except tf.errors.OpError:
        with contextlib.suppress(tf.errors.OpError):
            tf.io.gfile.remove(draft)
        raise


def _make(path: str, size: int, mtime: int) -> TFRecordIndex:
    headers, data_crcs, end = _scan(path, size)
    lengths = headers["length"].astype(np.int64)
    broken = np.flatnonzero(_masked_crc(headers["length"]) != headers["crc"])
    if len(broken):  # After the first wrong length, offsets are wrong, so only the first broken header counts.
        hint = "Copy or write the file again." if broken[0] else _OTHER_FILES
        raise _fault(path, lengths, int(broken[0]), f"has a broken header. {hint}")
    if end != size:
        record = len(lengths) - 1 if end > size else len(lengths)
        raise _fault(path, lengths, record, f"is cut off by the end of the file at byte {size}. Copy the file again.")
    digest = hashlib.sha256(headers["length"].tobytes() + data_crcs.tobytes()).hexdigest()[:16]
    return TFRecordIndex(path, size, mtime, lengths, digest, checked=False)


def _check_data(index: TFRecordIndex) -> None:
    """Reads the whole TFRecord file with `tf.data`, which compares all data with their CRCs, to find damage."""
    records = tf.data.TFRecordDataset(index.path)
    try:
        for _ in records.batch(_BATCH).prefetch(1):
            pass
    except tf.errors.DataLossError:
        good = records.ignore_errors().reduce(np.int64(0), lambda count, _: count + 1)
        raise _fault(
            index.path, index.lengths, int(good), "is broken: its data do not match their CRC. Copy the file again."
        ) from None


def _fault(path: str, lengths: np.ndarray, record: int, problem: str) -> SourceError:
    offset = int((lengths[:record] + (HEADER_BYTES + FOOTER_BYTES)).sum())
    return SourceError(f"Record {record} of {path}, at byte {offset}, {problem} Read by {this_worker()}.")


def _scan(path: str, size: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns all complete record headers of a file, the CRCs of all data, and the end that the last header gives."""
    headers, data_crcs = bytearray(), bytearray()
    end = 0
    with open_to_scan(path) as file:
        while end + HEADER_BYTES <= size:
            file.seek(end)
            header = file.read(HEADER_BYTES)
            headers += header
            end += HEADER_BYTES + int.from_bytes(header[:8], "little") + FOOTER_BYTES
            if end > size:
                break
            file.seek(end - FOOTER_BYTES)
            data_crcs += file.read(FOOTER_BYTES)
    layout = np.dtype([("length", "<u8"), ("crc", "<u4")])
    return np.frombuffer(bytes(headers), layout), np.frombuffer(bytes(data_crcs), "<u4"), end


def _crc_table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


def _masked_crc(lengths: np.ndarray) -> np.ndarray:
    """Returns the checksums that TFRecord headers with these lengths must have: uint64 [n] -> uint32 [n].

    References:
      https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
    """
    table = _crc_table()
    crc = np.full(len(lengths), 0xFFFFFFFF, np.uint32)
    for byte in lengths.astype("<u8").view(np.uint8).reshape(-1, 8).T:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc = ~crc
    return ((crc >> 15) | (crc << 17)) + np.uint32(_MASK_DELTA)
