"""State of the step that one replica runs, such as the number of its rows and the statistics it has updated."""

import functools
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist._compat import keras_internals, tf_internals
from tfdist.errors import LossReductionError, TfdistError
from tfdist.strategies import not_finite
from tfdist.strategies.collectives.buckets import bucket_bytes, fill_buckets
from tfdist.strategies.row_degree import RowDegrees
from tfdist.strategies.step_report import Clock

_local = threading.local()
# Models with a training step that can only be traced for a static number of rows.
_needing_static_rows: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()


class Step:
    """One run of a step function on one replica.

    Attributes:
      model: The Keras model that runs the step, if any.
      rows: Rows of the global batch that this replica holds, int or int32 []; `None` if unknown. In a step without a
        Keras model: 1 if the replica has rows, else 0.
      statistics: Variables of layer statistics that the step has assigned, in order, without repeats.
      is_plain: Whether each loss is the loss of one device on the rows of this replica, as in a `train_step` or
        `compute_loss` of the user. The strategy then shows 1 replica, so that no loss is divided by the number of
        replicas. Losses of Keras, losses of `tf.nn` and means that the step computes are then alike, and `weight` is
        right for all of them. In Keras' own steps losses are divided by the number of replicas.
      has_static_rows: Whether the step was traced for a static number of rows, because it needs one. The graph then
        does not tell means from sums.
      weights_loss: Whether the step multiplies the loss by `share`. Otherwise it weights the gradients.
      reduction: Reduction that the user has declared for the losses, see `loss_weight.step_losses_are`.
      exchanged: References to the tensors that replicas have exchanged.
      user_exchanges: Whether the user's code has called a collective itself.
      weighs: Whether an optimizer that runs now has already weighted its gradients by rows.
      exchanges: Number of exchanges that optimizers and the user's code have begun.
      in_own_exchange: Whether an exchange of the step itself runs, which carries no gradients.
      variables: Variables that an optimizer is about to update, in the order of its gradients.
      summed: Gradients of optimizers, summed over all replicas.
      share: Weight of this replica's mean relative to an equal share, float32 []: R * n / N for n of N rows and R
        replicas, so 1 for equal shares. `None` until `exchange_rows`.
      clock: Clock of this replica in a training step of Keras; else `None`.
      results: Results of metrics, see `metrics.Result`.
      losses: Losses of this replica that optimizers have received.
      samples: Elements of this replica's gradients before the sum over replicas; see `not_finite`.
    """

    def __init__(self, rows: int | tf.Tensor | None, model: keras.Model | None = None, is_plain: bool = False):
        self.rows, self.model, self.is_plain = rows, model, is_plain
        self.has_static_rows = False
        self.statistics: list[Any] = []
        # A step of Keras' own has one loss for all gradients. Weighting the loss saves one product per gradient.
        self.weights_loss = model is not None and not self.is_plain
        self.reduction: str | None = None
        self.exchanged: set[Any] = set()
        self.user_exchanges = False
        self._shown_to_user = False
        self.variables: list[Any] = []
        self.summed: list[tf.Tensor | tf.IndexedSlices] = []
        self.share: tf.Tensor | None = None
        self.weighs = False
        self.exchanges = 0
        self.in_own_exchange = False
        self.clock: Clock | None = None
        self.results: list[Any] = []
        self.losses: list[tf.Tensor] = []
        self.samples: list[tf.Tensor] = []
        self._marked: set[int] = set()
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    @property
    def in_loop(self) -> bool:
        """Whether the operations traced now belong to a `tf.while_loop` in the step."""
        graph = None if self._graph is None else tf.compat.v1.get_default_graph()
        while graph is not None and graph is not self._graph:
            if isinstance(graph, tf_internals.WhileBodyFuncGraph | tf_internals.WhileCondFuncGraph):
                return True
            graph = getattr(graph, "outer_graph", None)
        return False

    @property
    def arrived(self) -> list[tf.Tensor]:
        """The tensors of `summed` outside of branches. Once they exist, the gradients of all replicas have arrived."""
        return self._outside_of_branches(self.summed)

    @property
    def not_finite(self) -> tf.Tensor:
        """Number that tells which losses and gradients of this replica are not finite; see `not_finite.told`."""
        losses, gradients = (self._outside_of_branches(each) for each in (self.losses, self.samples))
        return not_finite.told(losses, gradients, self.has_rows)

    def _outside_of_branches(self, tensors: list[Any]) -> list[tf.Tensor]:
        tensors = [each.values if isinstance(each, tf.IndexedSlices) else each for each in tensors]
        return [tensor for tensor in tensors if getattr(tensor, "graph", None) is self._graph]

    def mark(self, moment: int, after: Any) -> None:
        """Notes the time at which the tensors in `after` exist. Only the first call for a `moment` of a step counts."""
        if self.clock is not None and moment not in self._marked:
            self._marked.add(moment)
            self.clock.mark(moment, after)

    @contextmanager
    def losses_kept(self) -> Iterator[None]:
        """Separates losses that the model's layers add on this replica from losses of other replicas of the process.

        Keras collects these losses in lists of the layers, and replicas share the layers. Where replicas run one after
        another, the next replica runs while this one waits.
        """
        kept = [] if self.model is None else keras_internals.kept_losses(self.model)
        try:
            yield
        finally:
            keras_internals.put_losses_back(kept)

    @property
    def weight(self) -> tf.Tensor:
        """Factor for a loss of this replica, or its gradients: n / N if the step `is_plain`, else R * n / N."""
        share: Any = self.share
        return share / replicas() if self.is_plain else share

    @functools.cached_property
    def degrees(self) -> RowDegrees:
        """How tensors of the step grow with the rows of this replica."""
        share: Any = self.share
        return RowDegrees(self.exchanged, {share.ref()})

    def shown_replicas(self, strategy: Any, *, by_user: bool) -> int:
        """Returns the `num_replicas_in_sync` that code in the step sees; see `is_plain`."""
        if not self.is_plain:
            return strategy.extended.replicas
        self._shown_to_user |= by_user
        self._check_means_by_hand()
        return 1

    def note_user_exchange(self) -> None:
        """Notes that the user's code calls a collective itself."""
        self.user_exchanges = True
        self._check_means_by_hand()

    def _check_means_by_hand(self) -> None:
        if self.is_plain and self.user_exchanges and self._shown_to_user:
            raise LossReductionError(
                "In a custom training or test step `num_replicas_in_sync` is 1, since its losses are those of one "
                "device, but this step reads it and also exchanges a value, perhaps to divide it by the number of "
                "replicas. Use `all_reduce('MEAN', value)`, or read the number outside of the step."
            )

    @property
    def has_rows(self) -> bool | tf.Tensor:
        """Whether this replica has rows; see `has_any`."""
        return has_any(self.rows)

    def exchange_rows(self) -> None:
        """Computes the `share` of this replica. Costs an all-reduce of one number.

        Keras divides every loss by the number of replicas R, which is right only for equal shares. The exact weight of
        a replica's mean over n of N rows is n / N, so the factor R * n / N corrects the loss.
        """
        if self.rows is not None:
            rows = tf.cast(self.rows, tf.float32)
            self.share = rows / self.all_reduce(tf.distribute.ReduceOp.MEAN, rows)

    def all_reduce(self, reduce_op: tf.distribute.ReduceOp, value: Any) -> Any:
        """Reduces a value of the step itself over all replicas. Replicas without rows contribute their value too."""
        self.in_own_exchange = True
        try:
            return tf.distribute.get_replica_context().all_reduce(reduce_op, value)
        finally:
            self.in_own_exchange = False

    def or_zeros(self, values: list[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """Returns `values`, or zeros on a replica without rows, which has computed them on a stand-in row."""
        if self.in_own_exchange or self.has_rows is True:
            return values
        # A branch starts once all of its inputs exist, so each bucket has its own branch and waits for no other bucket.
        # Indices stay outside of the branches, since their graph tells where they come from.
        kept = [value.values if isinstance(value, tf.IndexedSlices) else value for value in values]
        for bucket in fill_buckets(kept, bucket_bytes(kept), part_bytes=sys.maxsize):  # Split no tensor.
            group = [segment.tensor for segment in bucket]
            for i, tensor in zip(group, self._group_or_zeros([kept[i] for i in group]), strict=True):
                kept[i] = tensor
        return [_with_values(*each) for each in zip(values, kept, strict=True)]

    def _group_or_zeros(self, group):
        return tf.cond(self.has_rows, lambda: group, lambda: [tf.zeros_like(tensor) for tensor in group])


def replicas() -> int:
    """The number of replicas of the current strategy, whatever number it shows to a step."""
    return tf.distribute.get_strategy().extended.replicas


def current_step() -> Step | None:
    """The step that this thread runs on a replica, or `None`."""
    return getattr(_local, "step", None)


@contextmanager
def running(rows: int | tf.Tensor | None, model: keras.Model | None = None, is_plain: bool = False) -> Iterator[Step]:
    """Opens a `Step` for this thread."""
    before = current_step()
    _local.step = Step(rows, model, is_plain)
    try:
        yield _local.step
    finally:
        _local.step = before


def is_keras_own(model: keras.Model, method: str) -> bool:
    """Whether a model uses a method of `keras.Model` unchanged."""
    return method not in vars(model) and getattr(type(model), method) is getattr(keras.Model, method)


def has_any(rows: int | tf.Tensor | None) -> bool | tf.Tensor:
    """Whether there are rows, True or bool []; True if their number is unknown."""
    return True if rows is None or (isinstance(rows, int) and rows > 0) else tf.convert_to_tensor(rows) > 0


def _with_values(like, values):
    """Returns `values`, with the indices of `like` if it has indices."""
    return tf.IndexedSlices(values, like.indices, like.dense_shape) if isinstance(like, tf.IndexedSlices) else values


def of_any_rows(data: Any) -> Any:
    """Removes the static number of rows from `data`, so that the graph shows which values are divided by it."""

    def forget(leaf):
        if not tf.is_symbolic_tensor(leaf) or not leaf.shape.rank or leaf.shape[0] is None:
            return leaf
        return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])

    return keras.tree.map_structure(forget, data)


def trace_for_any_rows(step: Step, fn: Any, data: Any) -> Any:
    """Runs `fn` on `data` in a training step of the user, traced without the number of rows if possible.

    A step that reads a static `x.shape[0]` may fail to trace without it. The operations that it has already added to
    the graph must not run, so the error is raised and the model noted. Its step must then be traced again in a new
    graph, with the static number of rows. See `needs_static_rows`.
    """
    of_any = of_any_rows(data)
    pairs = zip(keras.tree.flatten(of_any), keras.tree.flatten(data), strict=True)
    if all(one is other for one, other in pairs):
        return fn(data)
    step.has_static_rows = needs_static_rows(step.model)
    if step.has_static_rows:
        return fn(data)
    try:
        return fn(of_any)
    except TfdistError:
        raise
    except Exception:
        _needing_static_rows.add(step.model)
        raise


def needs_static_rows(model: keras.Model | None) -> bool:
    """Whether a training step of the model has failed to trace without a static number of rows."""
    return model in _needing_static_rows


def of_shapes_in(data: Any, spec: Any) -> Any:
    """Gives `data` the static dimensions of its dataset's spec, except for the number of rows.

    A graph that is traced on a batch knows the dimensions of that batch, which may differ between replicas. Decisions
    of replicas that use the shapes in the graph must not depend on them.
    """
    leaves, specs = tf.nest.flatten(data), tf.nest.flatten(spec)
    if len(leaves) != len(specs):
        return data
    return tf.nest.pack_sequence_as(data, [_of_shape_in(*each) for each in zip(leaves, specs, strict=True)])


def _of_shape_in(leaf, spec):
    if not tf.is_symbolic_tensor(leaf) or not isinstance(spec, tf.TensorSpec) or not leaf.shape.rank:
        return leaf
    if spec.shape.rank != leaf.shape.rank or spec.shape[1:].as_list() == leaf.shape[1:].as_list():
        return leaf
    return tf.compat.v1.placeholder_with_default(leaf, [leaf.shape[0], *spec.shape[1:]])


def only_rows(outputs: Any, rows: int | tf.Tensor | None) -> Any:
    """Returns a model's outputs, without the outputs for a stand-in row on a replica without rows."""
    has_rows = has_any(rows)
    if has_rows is True:
        return outputs

    def cut(leaf):
        if not isinstance(leaf, tf.Tensor | tf.RaggedTensor) or leaf.shape.rank in (0, None):
            return leaf
        return tf.cond(has_rows, lambda: leaf, lambda: leaf[:0])

    return keras.tree.map_structure(cut, outputs)


def any_rows(values: list[Any]) -> int | tf.Tensor | None:
    """Returns 1 if one of several batches has rows, else 0; `None` if no value is a batch."""
    kinds = tf.Tensor | tf.RaggedTensor | tf.SparseTensor
    counts = [count_rows(value) for value in values if isinstance(value, kinds)]
    counts = [count for count in counts if count is not None]
    if any(isinstance(count, int) and count for count in counts):
        return 1
    return tf.minimum(tf.reduce_max(tf.stack(counts)), 1) if counts else None


def count_rows(data: Any) -> int | tf.Tensor | None:
    """Counts the rows of a batch as Keras does: the first dimension of the first input; `None` if it has none."""
    try:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    except ValueError:  # Only a custom step can unpack this batch.
        x = data
    first = next((leaf for leaf in keras.tree.flatten(x) if leaf is not None), None)
    if first is None:
        return None
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    first = tf.convert_to_tensor(first)
    if first.shape.rank == 0:
        return None
    return first.shape[0] if first.shape.rank and first.shape[0] is not None else tf.shape(first)[0]
