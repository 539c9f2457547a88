"""State of the step that one replica runs, such as the number of its rows and the statistics it has updated."""

import dataclasses
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
from tfdist.errors import LossReductionError
from tfdist.strategies import not_finite
from tfdist.strategies.collectives.buckets import bucket_bytes, fill_buckets
from tfdist.strategies.gradient_norms import GradientNorms
from tfdist.strategies.reduction_request import ReductionRequest
from tfdist.strategies.row_count import has_any
from tfdist.strategies.row_degree import RowDegrees
from tfdist.strategies.sharding.step_gathers import StepGathers
from tfdist.strategies.step_clock import SHARE, Clock

_local = threading.local()


@dataclasses.dataclass
class Exchanges:
    """Exchanges between replicas in one step."""

    count: int = 0  # Number of exchanges that optimizers and the user's code have begun.
    by_user: bool = False  # Whether the user's code has called a collective itself.
    # References to the tensors that replicas have exchanged, including those of the step itself.
    results: set[Any] = dataclasses.field(default_factory=set)
    shown_replicas: bool = False  # Whether the user's code has read the number of replicas.


@dataclasses.dataclass
class Observed:
    """Values that a replica's step records as it runs, to average, report or check them at its end."""

    # Variables of layer statistics that the step has assigned, in order, without repeats.
    statistics: list[Any] = dataclasses.field(default_factory=list)
    results: list[Any] = dataclasses.field(default_factory=list)  # Results of metrics, see `metrics.Result`.
    # Losses of this replica that optimizers have received.
    losses: list[tf.Tensor] = dataclasses.field(default_factory=list)
    # Elements of this replica's gradients before the sum over replicas; see `not_finite`.
    gradient_samples: list[tf.Tensor] = dataclasses.field(default_factory=list)
    # Gradients of optimizers, summed over all replicas.
    summed_gradients: list[tf.Tensor | tf.IndexedSlices] = dataclasses.field(default_factory=list)
    # Moments, such as the arrival of data, whose time `Step.mark` has noted.
    moments: set[int] = dataclasses.field(default_factory=set)


class Step:
    """One run of a step function, such as a `train_step`, on one replica: what tfdist knows and records meanwhile.

    Constant attributes:
      replica: Index of the replica within its worker; `None` outside of `strategy.run`.
      model: The Keras model that runs the step, if any.
      rows: Rows of the global batch that this replica holds, int or int32 []; `None` if unknown. In a step without a
        Keras model: 1 if the replica has rows, else 0.
      is_plain: Whether each loss is the loss of one device on the rows of this replica, as in a `train_step` or
        `compute_loss` of the user. The strategy then shows 1 replica, so that no loss is divided by the number of
        replicas. Losses of Keras, losses of `tf.nn` and means that the step computes are then alike, and `weight` is
        right for all of them. In Keras' own steps losses are divided by the number of replicas.
      weights_loss: Whether the step multiplies the loss by `share`. Otherwise it weights the gradients.
      exchanges: Record of the exchanges that its code has begun.
      observed: Record of the values that are used at its end.

    Mutable attributes:
      share: Weight of this replica's mean relative to an equal share, float32 []: R * n / N for n of N rows and R
        replicas, so 1 for equal shares. `None` until `exchange_rows`.
      clock: Clock of this replica in a training step of Keras; else `None`.
      reduction: Reduction that the user has declared for the losses, see `loss_weight.step_losses_are`.
      has_static_rows: Whether the step was traced for a static number of rows, because it needs one. The graph then
        does not tell means from sums.
      weighs: Whether an optimizer that runs now has already weighted its gradients by rows.
      variables: Variables that an optimizer is about to update, in the order of its gradients.
      whole_states: The `WholeStates` of an optimizer with sharded state that runs now; else `None`.
      table_rows: The `TableRows` of a table that an optimizer updates now; else `None`.
      sharded_update: The update of an optimizer with sharded state that runs now, a `ShardedUpdate`; else `None`.
      gathers: The gathers of divided weights in this step.
      trained: The `TrainedWeights` of the step, if replicas train by local steps; else `None`.
      applies_sums: Whether an optimizer applies sums over all replicas now, and must not sum them again.
      norms: Takes the norms of the gradients, if the model's `StepReports` measure them; else `None`.
    """

    def __init__(self, rows: int | tf.Tensor | None, model: keras.Model | None = None, is_plain: bool = False):
        self.rows, self.model, self.is_plain = rows, model, is_plain
        self.replica: int = tf_internals.get_current_replica_id_as_int()
        # A step of Keras' own has one loss for all gradients. Weighting the loss saves one product per gradient.
        self.weights_loss = model is not None and not self.is_plain
        self.exchanges, self.observed = Exchanges(), Observed()
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self.share: tf.Tensor | None = None
        self.clock: Clock | None = None
        self.reduction: str | None = None
        self.has_static_rows = False
        self.weighs = False
        self.variables: list[Any] = []
        self.sharded_update: Any = None
        self.whole_states: Any = None
        self.table_rows: Any = None
        self.gathers = StepGathers()
        self.trained: Any = None
        self.applies_sums = False
        self.norms: GradientNorms | None = None

    @property
    def in_loop(self) -> bool:
        """Whether the operations traced now belong to a `tf.while_loop` in the step."""
        loops = tf_internals.WhileBodyFuncGraph, tf_internals.WhileCondFuncGraph
        return any(isinstance(graph, loops) for graph in self._inner_graphs())

    @property
    def in_branch(self) -> bool:
        """Whether the operations traced now belong to a branch of a `tf.cond` in the step."""
        return any(isinstance(graph, tf_internals.CondBranchFuncGraph) for graph in self._inner_graphs())

    def _inner_graphs(self) -> Iterator[Any]:
        """Yields the graphs inside the step to which the operations traced now belong, innermost first."""
        graph = None if self._graph is None else tf.compat.v1.get_default_graph()
        while graph is not None and graph is not self._graph:
            yield graph
            graph = getattr(graph, "outer_graph", None)

    @property
    def arrived(self) -> list[tf.Tensor]:
        """Summed gradients outside of branches. Once they exist, the gradients of all replicas have arrived."""
        return self._outside_of_branches(self.observed.summed_gradients)

    @property
    def not_finite(self) -> tf.Tensor:
        """Number that tells, for the step's report, if losses or gradients of this replica have an Inf or NaN."""
        losses = self._outside_of_branches(self.observed.losses)
        gradients = self._outside_of_branches(self.observed.gradient_samples)
        return not_finite.told(losses, gradients, self.has_rows)

    def _outside_of_branches(self, tensors: list[Any]) -> list[tf.Tensor]:
        tensors = [each.values if isinstance(each, tf.IndexedSlices) else each for each in tensors]
        return [tensor for tensor in tensors if getattr(tensor, "graph", None) is self._graph]

    def mark(self, moment: int, after: Any) -> None:
        """Notes, for the step's report, when the tensors in `after` are computed; only the first call counts."""
        if self.clock is not None and moment not in self.observed.moments:
            self.observed.moments.add(moment)
            # The share comes from the host. A copy from a GPU would wait for the kernels of the forward pass.
            note = self.clock.known if moment == SHARE else self.clock.mark
            note(moment, after)

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
        """How tensors of the step grow with the rows of this replica, which tells mean losses from sums."""
        share: Any = self.share
        return RowDegrees(self.exchanges.results, {share.ref()})

    def shown_replicas(self, strategy: Any, *, by_user: bool) -> int:
        """Returns the `num_replicas_in_sync` that code in the step sees: 1 if the step `is_plain`."""
        if not self.is_plain:
            return strategy.extended.replicas
        self.exchanges.shown_replicas |= by_user
        self._check_means_by_hand()
        return 1

    def note_user_exchange(self) -> None:
        """Records that the user's code calls a collective itself; it may not also divide by the number of replicas."""
        self.exchanges.by_user = True
        self._check_means_by_hand()

    def _check_means_by_hand(self) -> None:
        if self.is_plain and self.exchanges.by_user and self.exchanges.shown_replicas:
            raise LossReductionError(
                "In a custom training or test step `num_replicas_in_sync` is 1, since its losses are those of one "
                "device, but this step reads it and also exchanges a value, perhaps to divide it by the number of "
                "replicas. Use `all_reduce('MEAN', value)`, or read the number outside of the step."
            )

    @property
    def has_rows(self) -> bool | tf.Tensor:
        """Whether this replica has rows of the global batch: True, also if unknown, or a tensor bool []."""
        return has_any(self.rows)

    def exchange_rows(self) -> None:
        """Computes `share`, the weight of this replica's loss, from the rows of all. Costs an all-reduce of one number.

        Keras divides every loss by the number of replicas R, which is right only for equal shares. The exact weight of
        a replica's mean over n of N rows is n / N, so the factor R * n / N corrects the loss.
        """
        if self.rows is not None:
            rows = tf.cast(self.rows, tf.float32)
            self.share = rows / self.all_reduce(tf.distribute.ReduceOp.MEAN, rows)

    def all_reduce(self, reduce_op: tf.distribute.ReduceOp, value: Any) -> Any:
        """Reduces a value of tfdist's own, such as rows, over all replicas; those without rows contribute theirs too.

        The gradient of the reduction is the same reduction of the gradients.
        """
        reducer = tf.distribute.get_strategy().extended.reducer
        known = weakref.ref(self)  # TensorFlow never releases gradient functions. They must not keep the model.

        def reduce(*values):
            return reducer.reduce(ReductionRequest(reduce_op, values), known() or Step(None))

        @tf.custom_gradient
        def reduced(*own):
            return reduce(*own), reduce

        totals = tf.nest.flatten(reduced(*tf.nest.flatten(value)))
        self.exchanges.results |= {total.ref() for total in totals if tf.is_symbolic_tensor(total)}
        return tf.nest.pack_sequence_as(value, totals)

    def or_zeros(self, values: list[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """Returns gradients, or zeros on a replica without rows, which has computed them on a stand-in row."""
        if self.has_rows is True:
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
        def zeros():
            # `rows` is 0 here. A literal 0 would become constants as large as the gradients, which TensorFlow keeps.
            return [tf.fill(tf.shape(tensor), tf.cast(self.rows, tensor.dtype)) for tensor in group]

        return tf.cond(self.has_rows, lambda: group, zeros)


def replicas() -> int:
    """The number of replicas of the current strategy, whatever number it shows to a step."""
    return tf.distribute.get_strategy().extended.replicas


def current_step() -> Step | None:
    """The step that this thread runs on a replica, or `None`."""
    return getattr(_local, "step", None)


@contextmanager
def running(rows: int | tf.Tensor | None, model: keras.Model | None = None, is_plain: bool = False) -> Iterator[Step]:
    """Context in which this thread runs a step on a replica: makes a new `Step` the current one."""
    before = current_step()
    _local.step = Step(rows, model, is_plain)
    try:
        yield _local.step
    finally:
        _local.step = before


def is_keras_own(model: keras.Model, method: str) -> bool:
    """Whether a model uses a method of `keras.Model` unchanged, such as `train_step`."""
    return method not in vars(model) and getattr(type(model), method) is getattr(keras.Model, method)


def _with_values(like, values):
    """Returns `values` as a gradient like `like`: with its indices if it is sparse."""
    return tf.IndexedSlices(values, like.indices, like.dense_shape) if isinstance(like, tf.IndexedSlices) else values
