"""Views of Keras optimizers that sum gradients over all replicas before they clip, scale and apply them."""

import collections
import contextlib
import enum
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.strategies import step_clock
from tfdist.strategies.collectives.sparse import sum_duplicates
from tfdist.strategies.gradient_norms import check_measurable
from tfdist.strategies.gradient_structure import of_one_kind
from tfdist.strategies.graph_analysis import may_differ
from tfdist.strategies.local_steps.local_training import local_training
from tfdist.strategies.loss_weight import weighted
from tfdist.strategies.not_finite import sampled
from tfdist.strategies.reduction_request import ReductionRequest
from tfdist.strategies.sharding.muon_update import MuonInParts, is_muon, refuse_without_paths
from tfdist.strategies.sharding.part_tensors import Division
from tfdist.strategies.sharding.sharded_update import ShardedUpdate, updates_parts
from tfdist.strategies.sharding.sharded_weight import is_sharded_weight
from tfdist.strategies.sharding.table_update import at_owners, table_of
from tfdist.strategies.sharding.weight_averages import are_sharded, assign_averages, update_averages
from tfdist.strategies.sharding.whole_states import whole_states
from tfdist.strategies.step import current_step, replicas


def distributed(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """A view of `optimizer` that sums gradients over all replicas before it clips and applies them.

    Keras clips each replica's gradients and sums the results, unlike one device, and its `LossScaleOptimizer` checks
    only one replica's gradients. The view shares the optimizer's whole state and is an instance of its class; only the
    moment of the sum differs. `fit` uses the view automatically. A custom loop that clips gradients or scales its loss
    gets the view from `strategy.distributed_optimizer`.
    """
    return optimizer if isinstance(optimizer, _Weigh) else _view(optimizer, _Note, _Weigh, _exchange_of(optimizer))


def noting(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """A view of `optimizer` for a job of one replica: records when gradients exist, for the report of the step."""
    return _view(optimizer, _Note)


@contextlib.contextmanager
def viewed_optimizers(model: keras.Model, view: Callable[[Any], Any]) -> Iterator[None]:
    """Gives `model`, and models inside it, views of their optimizers while a step is traced or run."""
    places = list(_optimizers_in(model))
    try:
        for put, optimizer in places:
            put(view(optimizer))
        yield
    finally:
        for put, optimizer in places:
            put(optimizer)


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The optimizers of a model and of the objects inside it, in the order of their attributes."""
    return list({id(optimizer): optimizer for _, optimizer in _optimizers_in(model)}.values())


def exchanging_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """All optimizers that may exchange gradients: those of `optimizers_of` and the optimizers inside them."""
    found: dict[int, Any] = {}
    ahead = collections.deque(optimizers_of(model))
    while ahead:
        optimizer = ahead.popleft()
        if id(optimizer) not in found:
            found[id(optimizer)] = optimizer
            inner = [each for value in vars(optimizer).values() for each in (value if _is_list(value) else [value])]
            ahead.extend(each for each in inner if isinstance(each, keras.optimizers.Optimizer))
    return list(found.values())


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _optimizers_in(model: Any) -> Iterator[tuple[Callable[[Any], None], Any]]:
    """Yields, for each optimizer in a model and in its objects, a function that replaces it, and the optimizer."""
    seen = {id(model): model}  # Holding the objects keeps their ids unique.
    ahead = collections.deque([(model, _put_into(model))])
    while ahead:
        owner, put = ahead.popleft()
        for key, value in _items(owner):
            if isinstance(value, keras.optimizers.Optimizer):
                yield functools.partial(put, key), value
            elif isinstance(value, tuple):
                members = list(value)
                replace = functools.partial(_put_in_tuple, functools.partial(put, key), type(value), members)
                ahead.append((members, replace))
            elif id(value) not in seen and (isinstance(value, keras.Model | list | dict) or _is_of_user(value)):
                seen[id(value)] = value
                ahead.append((value, _put_into(value)))


def _items(owner: Any) -> list[tuple[Any, Any]]:
    if isinstance(owner, list):
        return list(enumerate(owner))
    return list((owner if isinstance(owner, dict) else vars(owner)).items())


def _put_into(owner: Any) -> Callable[[Any, Any], None]:
    if isinstance(owner, keras.layers.Layer):
        return functools.partial(setattr, owner)
    return (owner if isinstance(owner, list | dict) else vars(owner)).__setitem__  # Works for frozen objects.


def _put_in_tuple(put, kind, members, index, optimizer):
    """Puts an optimizer into a tuple that an object of the model holds: replaces the tuple by a new one."""
    members[index] = optimizer
    put(kind(*members) if hasattr(kind, "_fields") else tuple(members))


def _is_of_user(value: Any) -> bool:
    """Whether `value` is an object with attributes and a class outside of Keras, TensorFlow, NumPy and tfdist."""
    libraries = {"builtins", "keras", "tensorflow", "numpy", "tfdist"}
    if isinstance(value, type | enum.Enum) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return type(value).__module__.split(".")[0] not in libraries


def _exchange_of(optimizer: keras.optimizers.Optimizer) -> type:
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _GlobalLossScale
    if is_muon(optimizer):
        return _ExchangeOfMuon
    return _ExchangeEach if hasattr(optimizer, "_inner_optimizers") else _Exchange


def _view(optimizer: keras.optimizers.Optimizer, *mixins: type) -> Any:
    base: Any = type(optimizer)
    view: Any = object.__new__(_view_class(base, mixins))
    object.__setattr__(view, "__dict__", optimizer.__dict__)  # Keras' `__setattr__` fails before `__init__`.
    return view


@functools.cache
def _view_class(base: Any, mixins: tuple[type, ...]) -> type:
    return type(f"Distributed{base.__name__}", (*mixins, base), {})


class _Note:
    """Mixin for views of optimizers: records when the gradients of a replica exist, for the report of the step."""

    @tf_internals.unconverted
    def apply(self, grads, *args, **kwargs):
        step = current_step()
        if step is not None:
            step.mark(step_clock.GRADIENTS, grads)
        return super().apply(grads, *args, **kwargs)


class _Weigh:
    """Mixin for views of optimizers: weights the loss by rows, or the gradients in a user's step with any losses."""

    def scale_loss(self, loss, *args, **kwargs):
        step = current_step()
        if step is not None:
            step.observed.losses.append(loss)
        loss = super().scale_loss(loss, *args, **kwargs)
        if step is None or step.share is None:
            return loss
        step.mark(step_clock.LOSS, loss)
        step.mark(step_clock.SHARE, step.share)
        return loss * tf.cast(step.share, loss.dtype) if step.weights_loss else loss

    @tf_internals.unconverted
    def apply(self, grads, trainable_variables=None, *args, **kwargs):
        step, grads = current_step(), list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if trainable_variables is not None or args:
            args = (trainable_variables, *args)
        variables = self._trainable_variables if trainable_variables is None else trainable_variables
        summed = {i for i, variable in enumerate(variables) if is_sharded_weight(variable)}  # In the backward pass.
        if step is not None and local_training() is None:
            of_others = [variable for i, variable in enumerate(variables) if i not in summed]
            grads = _except(summed, lambda own: of_one_kind(step, own, of_others), grads)
        given, scales = grads, _scales(grads, variables)
        if step is not None and step.share is not None:
            if not step.weights_loss:
                grads = _except(summed | set(scales), lambda own: weighted(step, own, self), grads)
            grads = _except(summed, functools.partial(_to_present, step.or_zeros), grads)
        if step is not None and scales:
            _check_exchanges(self)
            grads = _largest_of_all(step, grads, scales)
        if step is None:
            return super().apply(grads, *args, **kwargs)
        before, step.weighs = step.weighs, True
        exchanges = step.exchanges.count
        try:
            result = super().apply(grads, *args, **kwargs)
        finally:
            step.weighs = before
        if step.exchanges.count == exchanges:
            _check_alike(self, [grad for i, grad in enumerate(given) if grad is not None and i not in scales])
        return result


class _Exchange:
    """Mixin for views of optimizers: sums gradients over replicas once accumulated, just before they are clipped."""

    def _backend_apply_gradients(self, grads, trainable_variables):
        step = current_step()
        if step is not None:
            step.variables = list(trainable_variables)
            grads = at_owners(self, grads, step.variables, step)
        super()._backend_apply_gradients(grads, trainable_variables)

    def _clip_gradients(self, grads):
        step = current_step()
        if step is None or not updates_parts(self, step.variables):
            return super()._clip_gradients(_exchange(self, grads))
        step.sharded_update = ShardedUpdate(self, step.variables, step)
        return step.sharded_update.clipped(_exchange(self, grads, step.sharded_update.partitions))

    def _apply_weight_decay(self, variables):
        update = _sharded_update()
        super()._apply_weight_decay(variables if update is None else update.in_parts(variables)[1])

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        update = _sharded_update()
        if update is None:
            refuse_without_paths(self)
            with whole_states(self):
                super()._backend_update_step(grads, trainable_variables, learning_rate)
            return
        places, parts = update.in_parts(trainable_variables)
        super()._backend_update_step([grads[i] for i in places], parts, learning_rate)
        current_step().sharded_update = None
        update.store()

    def _distributed_tf_update_step(self, distribution, grads_and_vars, learning_rate):
        update, whole = _sharded_update(), super()._distributed_tf_update_step
        if update is None:
            whole(distribution, grads_and_vars, learning_rate)
            return
        for grad, variable in grads_and_vars:
            with update.after_earlier_updates(variable):
                update.apply(grad, variable, lambda *one: whole(distribution, [one], learning_rate))

    def _update_model_variables_moving_average(self, trainable_variables):
        step = current_step()
        if step is None or not self.use_ema or not are_sharded(self._model_variables_moving_average):
            super()._update_model_variables_moving_average(trainable_variables)
        else:
            update_averages(self, self._model_variables_moving_average, trainable_variables, step)

    def _overwrite_model_variables_with_average_value(self, trainable_variables):
        step = current_step()
        if step is None or not are_sharded(self._model_variables_moving_average):
            super()._overwrite_model_variables_with_average_value(trainable_variables)
        else:
            assign_averages(self._model_variables_moving_average, trainable_variables, step)

    def _backend_reset_gradient_accumulators(self):
        for accumulator in self._accumulated_gradients:
            if accumulator is not None:  # Keras assigns zeros of the weight's shape, but it may be a part.
                accumulator.value.assign(tf.zeros_like(accumulator.value))

    def _all_reduce_sum_gradients(self, grads_and_vars):
        if not isinstance(self, keras.optimizers.SGD):
            return list(grads_and_vars)
        # SGD scatters rows of sparse gradients into the weights in parallel and in no fixed order, so replicas would
        # drift apart by rounding. SGD is linear, so rows of equal index may be summed first.
        return [(sum_duplicates(grad), variable) for grad, variable in grads_and_vars]


class _ExchangeOfMuon(MuonInParts, _Exchange):
    """Mixin for views of `Muon`."""


class _ExchangeEach:
    """Mixin for a view of a `MultiOptimizer`, whose inner optimizers each exchange the gradients of their variables."""

    @property
    def _inner_optimizers(self):
        inner = self.__dict__["_inner_optimizers"]
        return [_view(optimizer, _exchange_of(optimizer)) for optimizer in inner] if self.built else inner


class _GlobalLossScale:
    """Mixin for a view of a `LossScaleOptimizer`: decides by the gradients of all replicas whether to skip a step."""

    @property
    def inner_optimizer(self):
        inner = self.__dict__["inner_optimizer"]
        return _view(inner, _exchange_of(inner))

    @inner_optimizer.setter
    def inner_optimizer(self, optimizer):
        self.__dict__["inner_optimizer"] = optimizer

    def check_finite(self, grads):
        step, finite = current_step(), super().check_finite(grads)
        if step is None or local_training() is not None:  # Outside `strategy.run` there is one copy of everything.
            return finite
        finite = tf.cast(finite, tf.float32)
        return step.all_reduce(tf.distribute.ReduceOp.SUM, finite) > replicas() - 0.5


def _sharded_update() -> ShardedUpdate | None:
    """Returns the update of an optimizer with sharded state that runs on this replica; `None` if there is none."""
    step = current_step()
    return None if step is None else step.sharded_update


def _exchange(optimizer: Any, grads: list[Any], partitions: Sequence[Division | None] = ()) -> list[Any]:
    """Sums an optimizer's gradients over all replicas, encoded if the strategy compresses; `None` stays `None`.

    This replica gets its part of each gradient with a partition. Gradients of sharded tables have been summed before.
    """
    step = current_step()
    if step is None:  # Outside `strategy.run` there is one copy of everything.
        return grads
    step.exchanges.count += 1
    step.observed.gradient_samples += sampled(grads)
    local = local_training()
    if local is not None:
        of_present = [variable for grad, variable in zip(grads, step.variables, strict=True) if grad is not None]
        return _to_present(lambda present: local.gradients(step, optimizer, present, of_present), grads)
    reduce, op = tf.distribute.get_strategy().extended.reducer.reduce, tf.distribute.ReduceOp.SUM
    are_summed = {i for i, each in enumerate(step.variables) if is_sharded_weight(each) or table_of(each) is not None}
    present_at = [i for i, grad in enumerate(grads) if grad is not None and i not in are_summed]
    of = [step.variables[i] for i in present_at]
    divided = [partitions[i] for i in present_at] if partitions else []

    def sum_of(present):
        return reduce(ReductionRequest(op, present, optimizer, of, partitions=divided), step)

    summed = _except(are_summed, functools.partial(_to_present, sum_of), grads)
    if step.norms is not None:
        check_measurable(step)
        step.norms.note(grads, summed, {i for i, part in enumerate(partitions) if part is not None}, are_summed)
    step.observed.summed_gradients += [grad for grad in summed if grad is not None]
    return summed


def _check_exchanges(optimizer: Any) -> None:
    if local_training() is not None:
        raise ValueError(
            f"Optimizer {optimizer.name!r} trains a layer with float8 scales, which all replicas exchange in each "
            "step, but the strategy has `synchronization`. Train the layer in another precision."
        )


def _check_alike(optimizer: Any, gradients: list[Any]) -> None:
    """Refuses an optimizer that took gradients and exchanged nothing, since each replica would train its own model."""
    # In eager mode some steps only accumulate gradients. A graph has both branches.
    if tf.executing_eagerly() or not any(may_differ(gradient) for gradient in gradients):
        return
    raise ValueError(
        f"An optimizer must exchange gradients with the other replicas, but `apply` of {optimizer.name!r} updated the "
        "weights with the gradients of one replica, so replicas would drift apart. Override `update_step` instead, or "
        "sum gradients in `apply` by `tf.distribute.get_replica_context().all_reduce('SUM', grads)`."
    )


def decides_for_all(scaler: keras.optimizers.LossScaleOptimizer) -> bool:
    """Whether a `LossScaleOptimizer` is a view, which decides by the gradients of all replicas to skip a step."""
    return isinstance(scaler, _GlobalLossScale)


def sums_rows_in_place(optimizer: Any) -> bool:
    """Whether an optimizer, used without a view, adds rows of sparse gradients to weights in no fixed order (SGD)."""
    return isinstance(optimizer, keras.optimizers.SGD) and not isinstance(optimizer, _Exchange)


def _to_present(fn, grads: list[Any]) -> list[Any]:
    """Applies `fn` to the list of gradients that are not `None`; `None` stays `None`."""
    present = [grad for grad in grads if grad is not None]
    results = iter(fn(present) if present else [])
    return [None if grad is None else next(results) for grad in grads]


def _except(places: Collection[int], fn, grads: list[Any]) -> list[Any]:
    """Applies `fn` to the list of gradients, except for those at `places`, which stay as they are."""
    results = iter(fn([grad for i, grad in enumerate(grads) if i not in places]))
    return [grad if i in places else next(results) for i, grad in enumerate(grads)]


def _scales(grads, variables):
    """The indices in `grads` of "gradients" that are really new values: Keras overwrites the variables with them.

    These are the scales of float8 layers, and the largest numbers that the layers have seen.
    """
    pairs = enumerate(zip(grads, variables, strict=False))
    return [i for i, (grad, of) in pairs if grad is not None and getattr(of, "overwrite_with_gradient", False)]


def _largest_of_all(step, grads, places):
    """Replaces gradients, those with the indices `places`, by the maxima over replicas, as in the whole batch."""
    context = tf.distribute.get_replica_context()
    own = tf.concat([tf.reshape(grads[i], [-1]) for i in places], axis=0)
    row = tf.one_hot(context.replica_id_in_sync_group, replicas(), dtype=own.dtype)
    largest = tf.reduce_max(step.all_reduce(tf.distribute.ReduceOp.SUM, row[:, None] * own), axis=0)
    grads = list(grads)
    for i, value in zip(places, tf.split(largest, [tf.size(grads[i]) for i in places]), strict=True):
        grads[i] = tf.reshape(value, tf.shape(grads[i]))
    return grads
