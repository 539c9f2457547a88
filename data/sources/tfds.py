"""Source of the examples of a dataset from TensorFlow Datasets (TFDS)."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from tfdist.data.loading import prepare
from tfdist.data.sources.array_record import ArrayRecordSource
from tfdist.data.sources.source import Source, digest, map_leaves
from tfdist.data.sources.tfrecord import TFRecordSource


class TfdsSource(Source):
    """The examples of a split of a TFDS dataset, decoded by the dataset's own features.

    Reads ArrayRecord and TFRecord files in any order. TFRecord files are indexed at first use. If a dataset has
    supervised keys, its examples are pairs such as (image, label), as in `tfdist.data.load`; otherwise they are dicts
    of all features.

    Args:
      dataset: A prepared TFDS builder; or a name for `tfdist.data.load`, which prepares the dataset if necessary.
      split: A split in the notation of TFDS, such as "train" or "train[:90%]", or a split object of TFDS, such as
        `tfds.core.ReadInstruction`.
      data_dir: Directory of the files if `dataset` is a name. By default the directory of TFDS.
      as_supervised: Whether examples are pairs if the dataset has supervised keys. If not, they are dicts.

    Raises:
      ValueError: If the builder has not been prepared, its files have another format, or the split has no examples.
    """

    decodes = True

    def __init__(
        self,
        dataset: str | tfds.core.DatasetBuilder,
        split: tfds.typing.SplitArg,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        as_supervised: bool = True,
    ):
        builder = _prepared(dataset, split, data_dir)
        self._name = f"{builder.info.full_name} {split}"
        self._features = builder.info.features
        self._keys = builder.info.supervised_keys if as_supervised else None
        self._records = _records(builder, split)
        self.element_spec = self._records.element_spec
        self.examples_together = self._records.examples_together

    def __len__(self) -> int:
        return len(self._records)

    def read(self, indices: tf.Tensor) -> tf.Tensor:  # noqa: D102
        return self._records.read(indices)

    def read_elsewhere(self, indices: np.ndarray) -> Callable[[tf.Tensor], Any] | None:  # noqa: D102
        return self._records.read_elsewhere(indices)

    def decode(self, example: tf.Tensor) -> Any:
        """Returns the features of one serialized example, such as (image, label)."""
        features = self._features.deserialize_example(example)
        return map_leaves(lambda _, key: features[key], self._keys, "") if self._keys else features

    def describe(self, index: int) -> str:  # noqa: D102
        return f"{self._name}, {self._records.describe(index)}"

    def origin(self) -> str:  # noqa: D102
        return f"{self._name}, {self._records.origin()}"

    def fingerprint(self) -> str:  # noqa: D102
        return digest("tfds", self._name, self._records.fingerprint())


def _prepared(
    dataset: str | tfds.core.DatasetBuilder, split: tfds.typing.SplitArg, data_dir: str | os.PathLike[str] | None
) -> tfds.core.DatasetBuilder:
    if isinstance(dataset, str):
        return prepare(dataset, data_dir)
    if not dataset.info.splits:
        raise ValueError(
            f"Dataset {dataset.info.full_name} has no files in {dataset.data_dir}. Call download_and_prepare() of the "
            f"builder first, on one worker, or give its name: ({dataset.name!r}, {split!r})."
        )
    return dataset


def _records(builder: tfds.core.DatasetBuilder, split: tfds.typing.SplitArg) -> Source:
    parts = [(part.filename, part.skip, part.take) for part in builder.info.splits[split].file_instructions]
    if not parts:
        raise ValueError(
            f"A source needs at least one example, but {builder.info.full_name} has none in split {split!r}."
        )
    file_format = builder.info.file_format
    if file_format == tfds.core.FileFormat.ARRAY_RECORD:
        return ArrayRecordSource(parts)
    if file_format == tfds.core.FileFormat.TFRECORD:
        return TFRecordSource(parts)
    raise ValueError(
        f"A dataset must be in files of ArrayRecord or TFRecord, to read examples by number, but "
        f"{builder.info.full_name} is in files of {file_format and file_format.value}. Prepare it again, in another "
        'data_dir, with file_format="array_record".'
    )
