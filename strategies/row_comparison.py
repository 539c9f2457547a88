"""Compares the first batch of data that all workers read, since each worker keeps only its own rows of every batch.

The rule depends on the origin of a tensor in the batch (`tensor_origin`):

| origin | if two workers differ |
|---|---|
| stored, or computed by TensorFlow | an error |
| labels made by Python code; in `predict`, each tensor made by Python code | an error; for endless data a warning |
| other tensors made by Python code | a warning, unless labels that tell the rows apart are alike |
| random operations of TensorFlow | never compared |

The first batch of the first pass is compared before any worker gets a row of it. For later passes of a `fit` a checksum
travels with the report of each step (`RowsRead`).
"""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfdist._compat import dataset_internals
from tfdist.errors import ClusterError
from tfdist.faults.worker_comparison import WorkerComparison
from tfdist.strategies import row_samples
from tfdist.strategies.stand_in_rows import identity
from tfdist.strategies.tensor_origin import Origin

__all__ = ["CUSTOM_LOOP", "RowComparison", "RowsRead"]

CUSTOM_LOOP = "a custom loop"
"""The purpose of a dataset that no method of Keras reads."""

# TensorFlow never frees a Python function that a dataset calls, so the function gets the comparison's number.
_numbers = itertools.count()
_alive: "weakref.WeakValueDictionary[int, RowComparison]" = weakref.WeakValueDictionary()
_kept: "dict[int, RowComparison]" = {}  # Kept until compared: an iterator may outlive its dataset.

_PARTS = ("features", "labels", "sample weights")
_LABELS = 1
_STOPS = {"evaluate": "stop_evaluating", "predict": "stop_predicting"}  # Attributes of a model that callbacks set.
_FIRST_BATCH_SECONDS = 2.0  # Longest wait for a first batch, which may fail or never come.
_PASSES = 1 << 20  # Numbers of passes start again here: float32 holds them exactly.
_REMEDIES = (
    "Each worker reads the whole data and keeps its part of every batch. Remove `.shard(n, i)`, `x[i::n]` and similar "
    "code; give a seed to code that shuffles, such as `image_dataset_from_directory` or a NumPy generator; load the "
    "same files and arrays on all workers. If each worker shall read its own data, use a tfdist.data.BalancedSharding, "
    "AutoShardPolicy.OFF, or strategy.distribute_datasets_from_function with a function of its input context."
)


class RowsRead:
    """Identifies the rows that this worker trains on by two numbers in each step's report: the pass, and a checksum.

    Args:
      host: The CPU of this worker, with its job and task. `tf.data` reads variables of its own worker's CPU only.
      replicas_per_worker: Number of replicas of each worker.

    Attributes:
      host: As given.
      numbers: The number of the pass and the checksum, float32 [2].
      latest: The comparison that noted the numbers last.
    """

    def __init__(self, host: str, replicas_per_worker: int) -> None:
        self.host, self._replicas_per_worker = host, replicas_per_worker
        with tf.device(host):
            self.numbers = tf.Variable(tf.zeros([2]), trainable=False)
        self.latest: RowComparison | None = None
        self._passes = self._refused = 0

    def forget(self) -> None:
        """Forgets the rows of a `fit`, before another one reads its first batch, and at its end."""
        self.latest = None
        self.numbers.assign([0.0, 0.0])

    def note(self, comparison: "RowComparison", checksum: int) -> None:
        """Records the first batch of a pass over the data: numbers the pass and stores the checksum for reports."""
        self._passes = self._passes % _PASSES + 1
        self.latest = comparison
        self.numbers.assign([self._passes, checksum])

    def check(self, model: Any, rows: np.ndarray, passes: np.ndarray, checksums: np.ndarray) -> None:
        """Compares the rows that workers read, unless workers are in different passes over the data.

        Args:
          model: The model that took the step.
          rows: Rows in the step, by replica.
          passes: Number of the pass over the data, by replica; 0 except for the first replica of each worker.
          checksums: Checksum of the first batch of that pass, by replica.

        Raises:
          ClusterError: If workers read different rows in the same pass, or the data of a worker ended before others'.
        """
        number = int(passes.max())
        of_workers = passes[:: self._replicas_per_worker]
        if self.latest is None or self.latest.model() is not model or (of_workers != number).any():
            return
        if number != self._refused and len(set(checksums[:: self._replicas_per_worker])) != 1:
            self._refused = number
            self.latest.explain(number)
        # A short last batch leaves a worker without rows only if the replicas of others have fewer rows than this.
        if rows.max() >= len(of_workers) and not self.latest.is_endless:
            of_worker = rows.reshape(len(of_workers), -1).sum(axis=1)
            if not of_worker.all():
                self.latest.refuse_end(int(of_worker.argmax()), int(of_worker.argmin()))


class RowComparison:
    """Compares the first batch of a dataset that all workers read, since each keeps only its own rows of it.

    Costs a read of one number for each batch, and a copy of a part of each row for the first batch of a pass. Before
    the first pass each worker sends two messages.

    Args:
      agreement: Exchanges the descriptions of the workers.
      origins: Origins of the tensors of a batch.
      model: Model that reads the dataset; `None` in a custom loop.
      purpose: Reader of the dataset, such as "fit", "evaluate", "predict", or "a custom loop".
      is_endless: Whether the data may have no end. Workers may then draw different rows.
      rows_read: Takes the checksum of the first batch of each pass over the data.
      compares_passes: Whether later passes over the data are compared too.
      counts_batches: Whether `check_batches` will compare the number of batches at the end of a pass.

    Attributes:
      model: Function that returns the model that reads the dataset, if it is alive.
      is_endless: As given.
      counts_batches: As given; false once Keras reads only one batch to learn shapes.
    """

    def __init__(
        self,
        agreement: WorkerComparison,
        origins: Sequence[Origin],
        model: Any,
        purpose: str,
        is_endless: bool,
        rows_read: RowsRead,
        compares_passes: bool,
        counts_batches: bool,
    ):
        self.model: Callable[[], Any] = weakref.ref(model) if model is not None else lambda: None
        self._agreement, self._purpose, self.is_endless = agreement, purpose, is_endless
        self._name = agreement.next_name("rows")
        self._origins = origins
        self._places: list[tuple[int, str]] = []  # Leaf and name of each compared tensor.
        self._parts: list[int] = []
        self._rows_read, self._compares_passes = rows_read, compares_passes
        self._samples: list[row_samples.Sample] = []
        self._iterators = 0
        self._has_begun = self._has_recorded = self._is_awaited = False
        self._has_come = threading.Event()
        self._lock = threading.Lock()
        self._number = next(_numbers)
        _alive[self._number] = self
        if purpose == CUSTOM_LOOP:
            _kept[self._number] = self
        self.counts_batches = counts_batches
        with ThreadPoolExecutor(1) as pool:  # Outside of the scope, which would make a copy per replica.
            self._left, self._batches = pool.submit(_numbers_on, rows_read.host).result()

    def watch(self, dataset: tf.data.Dataset, note: Callable[[Any], tf.Tensor]) -> tf.data.Dataset:
        """Returns `dataset` with a stage that compares the first batch before it passes the batch on.

        Args:
          dataset: Dataset that all workers read.
          note: Function that takes the first batch of each pass over the data too, in the graph, and returns True.
        """
        is_tuple = type(dataset.element_spec) is tuple

        @tf.autograph.experimental.do_not_convert
        def compare(*batch):
            leaves = tf.nest.flatten(batch, expand_composites=True)
            places = [place for place, leaf in enumerate(leaves) if leaf is not None]

            def look(*tensors):
                given = dict(zip(places, tensors, strict=True))
                whole = [given.get(place) for place in range(len(leaves))]
                whole = tf.nest.pack_sequence_as(batch, whole, expand_composites=True)
                arguments = [tf.constant(self._number, tf.int64), *self._tensors_of(whole)]
                return tf.logical_and(tf.numpy_function(_record, arguments, tf.bool), note(whole))

            looked = _once_if(self._left > 0, look, [leaves[place] for place in places])
            counted = [self._batches.assign_add(1)] if self.counts_batches else []
            with tf.control_dependencies([looked, *counted]):
                passed = tf.nest.map_structure(identity, batch)
            return passed if is_tuple else passed[0]

        return dataset_internals.map_in_place(dataset, compare)

    @contextlib.contextmanager
    def beginning(self) -> Iterator[bool]:
        """Context in which Keras makes an iterator. Waits for the first batch of the first iterator and compares it.

        If the batch does not come soon, the pipeline compares it later by itself. The program must have read the
        iterator before to its end.

        Yields:
          Whether the iterator must read at once.

        Raises:
          ClusterError: If workers read different rows.
        """
        is_first = not self._has_begun
        self._has_begun = True
        self._is_awaited = is_first
        if self._compares_passes and self._has_recorded:
            self._left.assign(1)  # Before the iterator is made, which may read at once.
        self._batches.assign(0)
        yield is_first
        if is_first:
            has_come = self._has_come.wait(_FIRST_BATCH_SECONDS)
            with self._lock:
                self._is_awaited = False
                has_come = has_come or self._has_come.is_set()
            if has_come:
                self._compare()
            else:
                self._agreement.say_late(self._name)

    def begins(self, iterator: Any) -> None:
        """Counts an iterator of Keras until it is freed; without iterators the comparison does not wait for peers."""
        self._iterators += 1
        weakref.finalize(iterator, self._ends).atexit = False

    def compare_no_more(self) -> None:
        """Stops the comparison of later passes over the data, where Keras reads only one batch to learn shapes."""
        self._compares_passes = self.counts_batches = False

    def _ends(self) -> None:
        self._iterators -= 1

    def explain(self, number: int) -> None:
        """Compares rows in detail with other workers, after the checksums of pass `number` over the data differed.

        Raises:
          ClusterError: If rows differ by more than rounding.
        """
        said = self._agreement.exchange_described(f"{self._name}-pass-{number}", self._described())
        self._judge(said, f"the first batch of pass {number}")

    def check_batches(self, of_all_workers: Callable[[int], list[int]]) -> None:
        """Compares how many batches workers have read in a pass over data whose length was unknown.

        Args:
          of_all_workers: Exchanges a number with all workers.

        Raises:
          ClusterError: If workers have read different numbers of batches.
        """
        has_stopped = getattr(self.model(), _STOPS[self._purpose], False)
        counts = of_all_workers(-1 if has_stopped else int(self._batches))
        if len(set(counts)) > 1 and min(counts) >= 0:  # After a callback has stopped the call, workers read ahead.
            self.refuse_end(counts.index(max(counts)), counts.index(min(counts)))

    def refuse_end(self, longer: int, shorter: int) -> None:
        """Raises an error that names a worker with more data, and one whose data has ended before."""
        raise ClusterError(
            f"All workers must read the same rows in the same order, but in `{self._purpose}` the data of worker "
            f"{shorter} ends before that of worker {longer}. This is {self._agreement.here}. {_REMEDIES}"
        )

    def _tensors_of(self, batch: tuple[Any, ...]) -> list[tf.Tensor]:
        has_parts = 1 < len(batch) <= len(_PARTS)
        tensors, self._places, self._parts, leaf = [], [], [], 0
        for part, value in enumerate(batch):
            for each in tf.nest.flatten(value):
                name = _PARTS[part] if has_parts else _PARTS[0]
                for tensor in tf.nest.flatten(each, expand_composites=True):
                    if self._origins[leaf] != Origin.RANDOM and tensor.dtype not in (tf.variant, tf.resource):
                        tensors.append(tensor)
                        self._places.append((leaf, name))
                        self._parts.append(part if has_parts else 0)
                leaf += 1
        return tensors

    def record(self, arrays: Sequence[np.ndarray]) -> None:
        """Records samples of the first batch of a pass over the data. Compares them in the first pass.

        Raises:
          ClusterError: If workers read different rows.
        """
        with self._lock:
            if not self._left.numpy():
                return
            self._left.assign(0)
            self._samples = [row_samples.sample(array) for array in arrays]
            is_first, self._has_recorded = not self._has_recorded, True
            if self._compares_passes:
                self._rows_read.note(self, row_samples.digest(self._of_kind(self._is_hard)))
            is_awaited = self._is_awaited
            self._has_come.set()
        if is_first and not is_awaited:
            self._compare()
            _kept.pop(self._number, None)

    def _compare(self) -> None:
        checksum, waits = row_samples.digest(self._samples, bits=32), self._purpose != CUSTOM_LOOP
        if self._agreement.is_alike(self._name, checksum, waits, lambda: waits and not self._iterators):
            return
        said = self._agreement.exchange_described(f"{self._name}-described", self._described())
        self._judge(said, "the first batch")

    def _described(self) -> dict[str, Any]:
        labels = [each for each, part in zip(self._samples, self._parts, strict=True) if part == _LABELS]
        return {
            "tensors": [each.described() for each in self._samples],
            "labels_tell": any(each.distinct > 1 for each in labels),
        }

    def _judge(self, said: Mapping[int, Any], which: str) -> None:
        """Raises an error, warns or does nothing, by the differences between the rows that workers describe."""
        workers = sorted(said)
        first = said[workers[0]]
        for worker in workers[1:]:
            pairs = zip(first["tensors"], said[worker]["tensors"], strict=False)
            compared = enumerate(row_samples.difference(*pair) for pair in pairs)
            unlike = {place: what for place, what in compared if what is not None}
            hard = [place for place in unlike if self._is_hard(place)]
            labels_alike = not any(self._parts[place] == _LABELS for place in unlike)
            named = [workers[0], worker]
            if hard:
                self._refuse(which, named, self._in_words(hard[0], unlike[hard[0]], first, said[worker]))
            if unlike and not (labels_alike and first["labels_tell"] and self._purpose != "predict"):
                place = next(iter(unlike))
                self._warn(which, named, self._in_words(place, unlike[place], first, said[worker]))
                return

    def _is_hard(self, place: int) -> bool:
        """Whether a difference between workers in the tensor number `place` of a batch is certainly a mistake."""
        origin = self._origins[self._places[place][0]]
        if origin == Origin.GRAPH:
            return True
        decides = self._purpose == "predict" or self._parts[place] == _LABELS
        return origin == Origin.PYTHON and decides and not self.is_endless

    def _of_kind(self, holds: Callable[[int], bool]) -> list[row_samples.Sample]:
        return [each for place, each in enumerate(self._samples) if holds(place)]

    def _in_words(self, place: int, difference: str | int, one: Any, other: Any) -> tuple[str, str]:
        name = f"the {self._places[place][1]}"
        a, b = one["tensors"][place], other["tensors"][place]
        if isinstance(difference, str):
            return f"{name} of type {a['dtype']}, shape {a['shape']}", f"type {b['dtype']}, shape {b['shape']}"
        size, first = a["group_size"], a["group_size"] * difference
        rows = f"row {first}" if size == 1 else f"rows {first} to {first + size - 1}"
        as_ = "as" if size == 1 else "that begin with"
        return f"{rows} of {name} {as_} {a['shown'][difference]}", b["shown"][difference]

    def _refuse(self, which: str, workers: list[int], words: tuple[str, str]) -> None:
        raise ClusterError(
            f"All workers must read the same rows in the same order, but in {which} of `{self._purpose}` worker "
            f"{workers[0]} has {words[0]}, worker {workers[1]} has {words[1]}. This is {self._agreement.here}. "
            f"{_REMEDIES}"
        )

    def _warn(self, which: str, workers: list[int], words: tuple[str, str]) -> None:
        if self._agreement.speaks:
            logging.warning(
                "Workers may read different rows: in %s of `%s` worker %d has %s, worker %d has %s. This is right if "
                "random augmentation, or draws from endless data, make the rows differ. If not: %s",
                *(which, self._purpose, workers[0], words[0], workers[1], words[1], _REMEDIES),
            )


def _record(number: np.ndarray, *arrays: np.ndarray) -> bool:
    comparison = _alive.get(int(number))
    if comparison is not None:
        comparison.record(arrays)
    return True


def _numbers_on(host: str) -> tuple[tf.Variable, tf.Variable]:
    with tf.device(host):
        return tf.Variable(1, trainable=False, dtype=tf.int64), tf.Variable(0, trainable=False, dtype=tf.int64)


def _once_if(condition: tf.Tensor, function: Callable[..., tf.Tensor], arguments: Sequence[tf.Tensor]) -> tf.Tensor:
    """Runs `function(*arguments)`, which returns true, if `condition` holds when the graph runs; both of type bool [].

    It is a loop of no turn or one turn. TensorFlow runs the condition of a `While` in the same thread. It would run the
    branches of an `If` in a thread pool, which costs more than the rest of the comparison.
    """

    def continues(goes_on: tf.Tensor, *tensors: tf.Tensor) -> tf.Tensor:  # TensorFlow names the inputs after these.
        return goes_on

    def turn(goes_on: tf.Tensor, *tensors: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return tf.logical_not(function(*tensors)), *tensors

    inputs = [condition, *arguments]
    specs = [tf.TensorSpec(each.shape, each.dtype) for each in inputs]
    cond, body = (tf.function(each, autograph=False).get_concrete_function(*specs) for each in (continues, turn))
    return tf.raw_ops.While(input=inputs, cond=cond, body=body, output_shapes=[spec.shape for spec in specs])[0]
