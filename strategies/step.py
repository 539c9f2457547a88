"""What one replica knows about the step it runs: how many rows it holds, which statistics it has updated."""

import functools
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist import _tf
from tfdist.errors import LossReductionError, TfdistError
from tfdist.strategies import not_finite
from tfdist.strategies.collectives.buckets import bucket_bytes, fill_buckets
from tfdist.strategies.row_degree import RowDegrees
from tfdist.strategies.step_report import Clock

_local = threading.local()
# Models whose training step can only be traced where the number of rows is static.
_needing_static_rows: "weakref.WeakSet[keras.Model]" = weakref.WeakSet()


class Step:
    """One run of a step function on one replica.

    Attributes:
      model: Whose step it is, of Keras' steps.
      rows: Rows of the global batch that this replica holds, int or int32 []; in steps other than of Keras' models 1 if
        it holds any; `None` if nobody knows.
      statistics: Variables of layer statistics that the step has assigned, in order, without repeats.
      is_plain: Whether losses are those of one device on the rows of this replica, as in a step or a `compute_loss` of
        the user's own. There the strategy shows 1 replica, so that nothing divides a loss by their number: losses of
        Keras and of `tf.nn`, and means that the step takes itself, are then alike, and `weight` is right for all.
        In Keras' own steps losses are divided by the number of replicas.
      has_static_rows: Whether the step was traced for a static number of rows, because it needs one. The graph then
        does not tell means from sums.
      weights_loss: Whether the optimizer's loss is weighted by `share`, and not gradients as they are applied.
      reduction: What the user says of losses, see `loss_weight.step_losses_are`.
      exchanged: References to the tensors that replicas have exchanged.
      user_exchanges: Whether the user's code has exchanged anything itself.
      weighs: Whether an optimizer under way has weighted its gradients by `share` already.
      exchanges: How many exchanges of optimizers and of the user's code have been begun.
      in_own_exchange: Whether the step itself exchanges something, in which no gradients are.
      variables: Those that an optimizer is about to update, in the order of its gradients.
      summed: Gradients as optimizers have them of all replicas.
      share: The weight of this replica's mean in the mean over the global batch, float32 []; 1 for equal shares.
        `None` until `exchange_rows`.
      clock: Of this replica, in Keras' training steps; else `None`.
      results: What metrics have given, see `metrics.Result`.
      losses: Those of this replica that optimizers have been told.
      samples: Of this replica's gradients, before they are summed; see `not_finite`.
    """

    def __init__(self, rows: int | tf.Tensor | None, model: keras.Model | None = None, is_plain: bool = False):
        self.rows, self.model, self.is_plain = rows, model, is_plain
        self.has_static_rows = False
        self.statistics: list[Any] = []
        # One of Keras' own has one loss, of which all gradients are: one product for each gradient less.
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
        """Whether what is traced now belongs to a `tf.while_loop` in the step."""
        graph = None if self._graph is None else tf.compat.v1.get_default_graph()
        while graph is not None and graph is not self._graph:
            if isinstance(graph, _tf.WhileBodyFuncGraph | _tf.WhileCondFuncGraph):
                return True
            graph = getattr(graph, "outer_graph", None)
        return False

    @property
    def arrived(self) -> list[tf.Tensor]:
        """What of `summed` is to be had outside of branches; once it is there, nobody's gradients are waited for."""
        return self._outside_of_branches(self.summed)

    @property
    def not_finite(self) -> tf.Tensor:
        """What of this replica's losses and gradients is not finite, as `not_finite.told` says it."""
        losses, gradients = (self._outside_of_branches(each) for each in (self.losses, self.samples))
        return not_finite.told(losses, gradients, self.has_rows)

    def _outside_of_branches(self, tensors: list[Any]) -> list[tf.Tensor]:
        tensors = [each.values if isinstance(each, tf.IndexedSlices) else each for each in tensors]
        return [tensor for tensor in tensors if getattr(tensor, "graph", None) is self._graph]

    def mark(self, moment: int, after: Any) -> None:
        """Notes when the tensors in `after` are there, the first time that `moment` comes in a step."""
        if self.clock is not None and moment not in self._marked:
            self._marked.add(moment)
            self.clock.mark(moment, after)

    @contextmanager
    def losses_kept(self) -> Iterator[None]:
        """Keeps what the model's layers have added to the loss apart from what other replicas of the process add.

        Keras gathers it in lists of the layers, which replicas share; of those that run one after another, others go
        on while this one waits for them.
        """
        kept = [] if self.model is None else _tf.kept_losses(self.model)
        try:
            yield
        finally:
            _tf.put_losses_back(kept)

    @property
    def weight(self) -> tf.Tensor:
        """By what to multiply a loss of this replica, or its gradients: n / N if it is one device's, else R * n / N."""
        share: Any = self.share
        return share / replicas() if self.is_plain else share

    @functools.cached_property
    def degrees(self) -> RowDegrees:
        """How tensors of the step grow with the rows of this replica."""
        share: Any = self.share
        return RowDegrees(self.exchanged, {share.ref()})

    def shown_replicas(self, strategy: Any, *, by_user: bool) -> int:
        """What `num_replicas_in_sync` shows in the step; see `is_plain`."""
        if not self.is_plain:
            return strategy.extended.replicas
        self._shown_to_user |= by_user
        self._check_means_by_hand()
        return 1

    def note_user_exchange(self) -> None:
        """Notes that the user's code exchanges something itself."""
        self.user_exchanges = True
        self._check_means_by_hand()

    def _check_means_by_hand(self) -> None:
        if self.is_plain and self.user_exchanges and self._shown_to_user:
            raise LossReductionError(
                "In a training or test step of your own `num_replicas_in_sync` is 1, since losses there are those of "
                "one device. This one reads it and also exchanges something, which it may want to divide by the number "
                "of replicas. Use `all_reduce('MEAN', value)`, or read the number outside of the step."
            )

    @property
    def has_rows(self) -> bool | tf.Tensor:
        """See `has_any`."""
        return has_any(self.rows)

    def exchange_rows(self) -> None:
        """Finds the `share` of this replica, by an exchange of one number.

        Keras divides every loss by the number of replicas R, which is right for equal rows only. With n of N rows here
        the exact weight of this replica's mean is n / N, so R * n / N mends it.
        """
        if self.rows is not None:
            rows = tf.cast(self.rows, tf.float32)
            self.share = rows / self.all_reduce(tf.distribute.ReduceOp.MEAN, rows)

    def all_reduce(self, reduce_op: tf.distribute.ReduceOp, value: Any) -> Any:
        """An exchange of the step itself, in which a replica without rows takes part as any other."""
        self.in_own_exchange = True
        try:
            return tf.distribute.get_replica_context().all_reduce(reduce_op, value)
        finally:
            self.in_own_exchange = False

    def or_zeros(self, values: list[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """`values`, but zeros on a replica without rows, whose row stands in for none."""
        if self.in_own_exchange or self.has_rows is True:
            return values
        # A branch begins when all that it takes is there: no bucket shall wait for what is in another. Indices stay out
        # of it, whose graph tells where they come from.
        kept = [value.values if isinstance(value, tf.IndexedSlices) else value for value in values]
        for bucket in fill_buckets(kept, bucket_bytes(kept), part_bytes=sys.maxsize):  # None of them in parts.
            group = [segment.tensor for segment in bucket]
            for i, tensor in zip(group, self._group_or_zeros([kept[i] for i in group]), strict=True):
                kept[i] = tensor
        return [_with_values(*each) for each in zip(values, kept, strict=True)]

    def _group_or_zeros(self, group):
        return tf.cond(self.has_rows, lambda: group, lambda: [tf.zeros_like(tensor) for tensor in group])


def replicas() -> int:
    """The number of replicas of the current strategy, whatever it shows to a step."""
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
    """Whether a method of a model is the one of `keras.Model`."""
    return method not in vars(model) and getattr(type(model), method) is getattr(keras.Model, method)


def has_any(rows: int | tf.Tensor | None) -> bool | tf.Tensor:
    """Whether there is any row, True or bool []; taken for granted where rows are not known."""
    return True if rows is None or (isinstance(rows, int) and rows > 0) else tf.convert_to_tensor(rows) > 0


def _with_values(like, values):
    """`values`, with the indices of what they are `like`, if it has any."""
    return tf.IndexedSlices(values, like.indices, like.dense_shape) if isinstance(like, tf.IndexedSlices) else values


def of_any_rows(data: Any) -> Any:
    """`data`, of which the graph no longer knows the number of rows: so it tells what is divided by that number."""

    def forget(leaf):
        if not tf.is_symbolic_tensor(leaf) or not leaf.shape.rank or leaf.shape[0] is None:
            return leaf
        return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])

    return keras.tree.map_structure(forget, data)


def trace_for_any_rows(step: Step, fn: Any, data: Any) -> Any:
    """What `fn` makes of `data` in a training step of the user's own, traced without the number of rows if possible.

    A step that reads a static `x.shape[0]` may fail to trace without it. What it has added to the graph by then must
    not run, so the error is raised, and the model noted: its step has to be traced once more, in a new graph, which
    then has the static number. See `needs_static_rows`.
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
    """`data`, of which the graph no longer knows more dimensions beside the rows than the spec of its dataset.

    A graph that is traced on a batch knows the dimensions of that batch, which may be others on each replica. What
    replicas decide by the shapes in the graph must not depend on that.
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
    """A model's outputs, but none on a replica without rows, which ran on one that stood in."""
    has_rows = has_any(rows)
    if has_rows is True:
        return outputs

    def cut(leaf):
        if not isinstance(leaf, tf.Tensor | tf.RaggedTensor) or leaf.shape.rank in (0, None):
            return leaf
        return tf.cond(has_rows, lambda: leaf, lambda: leaf[:0])

    return keras.tree.map_structure(cut, outputs)


def any_rows(values: list[Any]) -> int | tf.Tensor | None:
    """1 if one of several batches has rows, else 0; `None` if none of them is one."""
    kinds = tf.Tensor | tf.RaggedTensor | tf.SparseTensor
    counts = [count_rows(value) for value in values if isinstance(value, kinds)]
    counts = [count for count in counts if count is not None]
    if any(isinstance(count, int) and count for count in counts):
        return 1
    return tf.minimum(tf.reduce_max(tf.stack(counts)), 1) if counts else None


def count_rows(data: Any) -> int | tf.Tensor | None:
    """Rows in a batch as Keras counts them: the first dimension of the first input; `None` where it has none."""
    try:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    except ValueError:  # a batch that only a custom step can take apart
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
