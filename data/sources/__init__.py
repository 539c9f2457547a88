"""Sources of examples for `tfdist.data`, read by index. `as_source` chooses the source for what the user gives.

| Argument | Source |
|---|---|
| a `Source` | itself |
| NumPy array, tensor, or any object that NumPy converts to an array | `ArraysSource` |
| `np.memmap` or h5py dataset, which stays on disk | `ArraysSource` |
| tuple or dict of these, with any nesting | `ArraysSource` |
| `(builder, "train[:90%]")`: a prepared TFDS builder and any TFDS split | `TfdsSource` |
| `("mnist", "train")`: a name and a split for `tfdist.data.load`, prepared if necessary | `TfdsSource` |
| path, glob pattern, or list of them, with "array_record" or "arrayrecord" in each name | `ArrayRecordSource` |
| path, glob pattern, or list of them, with any other name | `TFRecordSource` |
| any other object with `__len__` and `__getitem__`, such as a list of examples | `ItemsSource` |

Other arguments raise an error: a `tf.data.Dataset`, which has no random access; an iterator; a table of columns; None.
"""

import importlib
import operator
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.data.sources.arrays import ArraysSource
from tfdist.data.sources.file_access import is_index
from tfdist.data.sources.items import ItemsSource
from tfdist.data.sources.source import Source

if TYPE_CHECKING:
    from tfdist.data.sources.array_record import ArrayRecordSource
    from tfdist.data.sources.tfds import TfdsSource
    from tfdist.data.sources.tfrecord import TFRecordSource

__all__ = ["ArrayRecordSource", "ArraysSource", "ItemsSource", "Source", "TFRecordSource", "TfdsSource", "as_source"]

_HOMES = {
    "ArrayRecordSource": "tfdist.data.sources.array_record",
    "TFRecordSource": "tfdist.data.sources.tfrecord",
    "TfdsSource": "tfdist.data.sources.tfds",  # TensorFlow Datasets takes a second to load.
}

_BUILDER = "tensorflow_datasets", "core.DatasetBuilder"
_SPLIT = "tensorflow_datasets", "core.splits.AbstractSplit"
_PY_DATASET = "keras", "utils.PyDataset"


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tfdist.data.sources' has no attribute {name!r}; it has {', '.join(__all__)}")


def as_source(examples: Any) -> Source:
    """Returns the source that reads `examples`: arrays, files, a TFDS split or a list, by the module's table.

    Args:
      examples: The examples, or the paths of their files.

    Raises:
      TypeError: If no source reads such an argument.
      ValueError: If there are no examples, arrays have unequal lengths, or files do not exist.
    """
    if isinstance(examples, Source):
        return examples
    if isinstance(examples, str | os.PathLike):
        return _files([examples])
    if isinstance(examples, list) and examples and isinstance(examples[0], str | os.PathLike):
        return _files(examples)
    if isinstance(examples, tuple) and examples and all(map(_is_path, examples)):
        raise TypeError(f"Several files must be in a list, got a tuple. Give list({examples!r}).")
    if _is_split(examples):
        from tfdist.data.sources.tfds import TfdsSource  # TensorFlow Datasets takes a second to load.

        return TfdsSource(*examples)
    _refuse(examples)
    if isinstance(examples, tuple | Mapping) or _is_array(examples):
        return ArraysSource(examples)
    if hasattr(examples, "__len__") and hasattr(examples, "__getitem__"):
        return ItemsSource(examples)
    raise TypeError(
        f"A source needs __len__ and __getitem__, to read examples by number, but {type(examples).__name__} does not "
        'have both. Give arrays, files, (TFDS builder, "train"), or an object with both methods, such as a list.'
    )


def _files(paths: list[Any]) -> Source:
    strange = [path for path in paths if not isinstance(path, str | os.PathLike)]
    if strange:
        raise TypeError(
            f"A list that starts with a path must hold only paths, got {strange[0]!r} among them. If the entries are "
            "examples, put each in a tuple."
        )
    given, paths = paths, [path for path in paths if not is_index(os.fspath(path))]  # Listings contain them.
    if not paths:
        raise ValueError(f"A source needs at least one file, but {given} are indices. Give the files themselves.")
    names = [os.path.basename(os.fspath(path)) for path in paths]
    of_array_records = ["array_record" in name or "arrayrecord" in name for name in names]
    if all(of_array_records):
        from tfdist.data.sources.array_record import ArrayRecordSource

        return ArrayRecordSource(paths)
    if any(of_array_records):
        raise ValueError(
            f"Files of one source must have one format, but {names[of_array_records.index(True)]} is an ArrayRecord "
            f"file by its name and {names[of_array_records.index(False)]} is not. Make one source for each format."
        )
    from tfdist.data.sources.tfrecord import TFRecordSource

    return TFRecordSource(paths)


def _is_path(example: Any) -> bool:
    """Whether `example` is a path of a data file and cannot be the name of a dataset or split."""
    signs = ("/", "*", ".tfrecord", "array_record", "arrayrecord")
    return isinstance(example, os.PathLike) or (isinstance(example, str) and any(sign in example for sign in signs))


def _is_split(examples: Any) -> bool:
    if not isinstance(examples, tuple) or len(examples) != 2:
        return False
    return _is_of(_BUILDER, examples[0]) or (isinstance(examples[0], str) and _names_split(examples[1]))


def _names_split(split: Any) -> bool:
    return isinstance(split, str) or _is_of(_SPLIT, split)


def _is_of(kind: tuple[str, str], given: Any) -> bool:
    """Whether `given` is of a class of a module that may not be loaded. Without the module, no such object exists."""
    module, name = kind
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(given, operator.attrgetter(name)(loaded))


def _is_array(examples: Any) -> bool:
    tensors = (tf.Tensor, tf.Variable, tf.RaggedTensor, tf.SparseTensor)
    return isinstance(examples, tensors) or hasattr(examples, "__array__") or hasattr(examples, "toarray")


def _refuse(examples: Any) -> None:
    """Raises an error for objects that have a length and items but are no sequence of examples."""
    if isinstance(examples, tf.data.Dataset):
        raise TypeError(
            "Balanced shares need each example by its number, but a tf.data.Dataset is read in its own order. Give "
            "the source of the dataset (arrays, files, a TFDS builder and a split), and its operations on each "
            "example as `map_fn`."
        )
    if _is_of(_BUILDER, examples):
        raise TypeError(f'A TFDS builder needs a split ({", ".join(examples.info.splits)}): give (builder, "train").')
    if _is_of(_PY_DATASET, examples):
        raise TypeError(
            "Balanced shares need each example by its number, but the items of a PyDataset are batches. Give the data "
            "that it reads, or an object whose items are examples."
        )
    if hasattr(examples, "iloc"):
        raise TypeError(
            f"A source needs rows as items, but the items of a {type(examples).__name__} are its columns. Give "
            "dict(table), or table.to_numpy()."
        )
