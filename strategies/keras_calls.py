"""Records for the watchdog which call of Keras (such as `fit`) this worker is in, and when it runs steps."""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist._compat import dataset_internals, keras_stack
from tfdist.errors import ClusterError
from tfdist.events.event_buffer import EVENTS
from tfdist.events.phase_names import BUILDING
from tfdist.faults.activity import TRAIN, Activity, Call
from tfdist.strategies.distributed_variables import level_counters, variables_of
from tfdist.strategies.first_callback import put_first
from tfdist.strategies.freed_memory import return_small_blocks
from tfdist.strategies.static_rows import needs_static_rows

_FUNCTIONS = {"train_function": TRAIN, "test_function": "test", "predict_function": "predict"}


def note_call(activity: Activity) -> None:
    """Records the innermost running call of Keras in this thread, such as `fit`, and makes its model record its steps.

    Costs a look at the stack of this thread.
    """
    under_way = keras_stack.running_calls()
    activity.begin(under_way)
    if not under_way:
        return
    note_functions(activity, under_way[0].model)
    callbacks, call = under_way[0].callbacks, activity.call
    if callbacks is not None and call is not None:
        others = [each for each in callbacks.callbacks if not isinstance(each, _EndOfCall)]
        callbacks.callbacks = [*others, _EndOfCall(call, activity)]
        put_first(callbacks, under_way[0].model.distribute_strategy)


class _EndOfCall(keras.callbacks.Callback):
    """The last callback of a `fit`, `evaluate` or `predict`, which records that the call is over."""

    def __init__(self, call: Call, activity: Activity):
        super().__init__()
        self._call, self._activity = call, activity

    def _end(self, name: str) -> None:
        if self._call.name == name:  # A `fit` passes its callbacks to its validation.
            for function in self._call.at_end:
                function()
            self._call.is_over = True
            self._activity.count_time()
            EVENTS.note("end of call", call=name, number=self._call.number)

    def on_train_end(self, logs: Any = None) -> None:
        self._end("fit")

    def on_test_end(self, logs: Any = None) -> None:
        self._end("evaluate")

    def on_predict_end(self, logs: Any = None) -> None:
        self._end("predict")


@contextlib.contextmanager
def building(activity: Activity, model: keras.Model, scope: Any, begins_fit: bool) -> Iterator[None]:
    """The scope in which Keras builds a model at the beginning of a `fit` or the like; recorded for the watchdog."""
    with activity.doing(BUILDING), scope:
        yield
    note_functions(activity, model)
    elastic = getattr(model.distribute_strategy, "elastic", None)
    if elastic is not None and begins_fit:
        elastic.begin_fit(model)


def note_functions(activity: Activity, model: keras.Model) -> None:
    """Makes a model record the runs of its `train_function` and the like, also if Keras has not made them yet."""
    for attribute in _FUNCTIONS:
        function = getattr(model, attribute, None)
        if not hasattr(function, "notes"):
            setattr(model, attribute, NotedFunction(model, attribute, function, activity))


@contextlib.contextmanager
def exchanging(activity: Activity) -> Iterator[None]:
    """Records for the watchdog that the block waits for all workers, if Keras waits between steps, as for metrics.

    Raises:
      ClusterError: Instead of the error of a collective, if other workers are in another call.
    """
    name = keras_stack.call_name() if tf.executing_eagerly() else None
    if name is None or (activity.call is not None and activity.call.execution is not None):
        yield
        return
    with activity.exchanging(name) as call, explained(activity, call):
        yield


@contextlib.contextmanager
def explained(activity: Activity, call: Call) -> Iterator[None]:
    """Replaces an error of a collective by a `ClusterError` if workers are in different calls of Keras."""
    try:
        yield
    except tf.errors.OutOfRangeError:
        raise
    except tf.errors.OpError as error:
        fault = activity.explain(call, error)
        if fault is None:
            raise
        raise ClusterError(fault) from error


class NotedFunction:
    """Replaces a `train_function`, `test_function` or `predict_function` of a model, and records when it runs.

    Without a `function`, the model makes it at the first call.

    Raises:
      ClusterError: Instead of the error of a collective, if other workers are in another call.
    """

    notes = True

    def __init__(self, model: keras.Model, attribute: str, function: Callable[[Any], Any] | None, activity: Activity):
        self._model, self._attribute = weakref.ref(model), attribute
        self._function, self._kind, self._activity = function, _FUNCTIONS[attribute], activity
        self._in_graph: Any = None
        self._is_new = True

    def __call__(self, given: Any) -> Any:
        """Runs the function on Keras' argument: an iterator, or batches."""
        reads = isinstance(given, tf.data.Iterator | tf.distribute.DistributedIterator)
        # Other iterators return an Optional that Keras can only evaluate outside of a graph.
        is_noted = isinstance(given, dataset_internals.NotedIterator)
        is_single = getattr(self._model(), "steps_per_execution", None) == 1
        one = is_noted and is_single
        alone = self._alone(given)
        model = self._model()
        if self._kind != TRAIN and model is not None and hasattr(model.distribute_strategy, "synchronize"):
            model.distribute_strategy.synchronize()  # Replicas that train by local steps evaluate equal weights.
        elastic = None if model is None else getattr(model.distribute_strategy, "elastic", None)
        if self._kind == TRAIN and elastic is not None:
            if alone is not None:
                elastic.refuse_loop()
            run = functools.partial(self._executed, given, reads, alone, is_single, one)
            return elastic.train(model, run, given)
        return self._executed(given, reads, alone, is_single, one)

    def _executed(self, given: Any, reads: bool, alone: str | None, is_single: bool, one: bool) -> Any:
        executing = self._activity.executing(self._kind, reads=reads, alone=alone, is_single=is_single)
        with executing as call, explained(self._activity, call):
            if self._function is None:
                self._function = self._made()
            try:
                result = self._traced(self._reading() if one else self._function, given)
            except tf.errors.OutOfRangeError:  # The data have ended, and Keras did not know their length.
                level_counters(variables_of(self._model()))
                raise
        if self._is_new:
            self._is_new = False
            model = self._model()
            if model is not None and getattr(model.distribute_strategy.extended, "model_sharding", None) is not None:
                return_small_blocks()  # TensorFlow's optimizer of graphs has just freed many.
        return result

    def _traced(self, function: Callable[[Any], Any], given: Any) -> Any:
        """Runs `function`, or a new one if its step proves to need a static number of rows."""
        needed_before = needs_static_rows(self._model())
        # A generator gives its batch once, while the function is traced.
        batches = list(given) if inspect.isgenerator(given) else None
        try:
            return function(given if batches is None else (batch for batch in batches))
        except Exception:
            if needed_before or not needs_static_rows(self._model()):
                raise
        self._function = self._made()
        function = self._function if function is not self._in_graph else self._reading()
        return function(given if batches is None else (batch for batch in batches))

    def _reading(self) -> Any:
        """Returns the function with its reading of a batch inside of a graph.

        Up to version 3.15 Keras reads there itself. So a step is traced once for all numbers of rows, and an exchange
        of whether any worker has data left is part of the graph.
        """
        model: Any = self._model()
        if model.run_eagerly or not keras_stack.reads_outside_graph(self._function):
            return self._function
        if self._in_graph is None or self._in_graph.python_function is not self._function:
            self._in_graph = tf.function(self._function, reduce_retracing=True, autograph=False)
        return self._in_graph

    def _made(self) -> Any:
        """Makes the function that this object replaces, and keeps this object as the attribute of the model.

        An override of `make_train_function` may return the function and leave the attribute as it is.
        """
        model = self._model()
        place = getattr(model, self._attribute)
        try:
            setattr(model, self._attribute, None)
            made = getattr(model, f"make_{self._attribute}")()
            return getattr(model, self._attribute) or made
        finally:
            setattr(model, self._attribute, place)

    def _alone(self, given: Any) -> str | None:
        """The name of Keras' call if it runs this function only once, such as `train_on_batch`; else `None`."""
        if inspect.isgenerator(given):
            return "train_on_batch" if self._kind == TRAIN else "test_on_batch"
        call = self._activity.call
        is_predict_on_batch = self._kind == "predict" and (call is None or call.name != "predict")
        return "predict_on_batch" if is_predict_on_batch else None
