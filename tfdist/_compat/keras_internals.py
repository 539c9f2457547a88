"""Private attributes and names of Keras that tfdist reads or sets.

Each function states what breaks without it.
"""

import functools
import types
from typing import Any

import keras
import tensorflow as tf

# The name scopes of Keras, which show the object that creates a variable (an optimizer, a seed generator). Without it:
# optimizer state is averaged needlessly like layer statistics, and random layers are equal on all replicas.
from keras.src.backend.common import global_state

# Whether Keras computes shapes, on tensors without values. Without it: workers exchange weights for that.
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

# The generator of unseeded random operations. Without it: random numbers start anew after a restore.
from keras.src.random import seed_generator as keras_seed_generator
from keras.src.random.seed_generator import global_seed_generator

# The types of models and of what reads their input, for annotations; see `keras_stack`.
from keras.src.trainers import epoch_iterator as keras_epoch_iterator

# Keras' adapters of input data, to distinguish a user's dataset from a dataset that Keras creates. Without them: `fit`
# on arrays returns a minute late, or a user's pipeline is not autotuned.
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

# The mask that layers attach to an output. Without it: a masked loss is a mean over one replica's unmasked positions.
from keras.src.backend.common.masking import get_keras_mask

# Whether Keras only computes shapes. Without it: a model with a ShardedEmbedding cannot be built by `fit`.
from keras.src.backend.common.stateless_scope import in_stateless_scope

__all__ = [
    "ReplacedLosses",
    "begin_with_epoch",
    "call_in_step",
    "count_as_seen",
    "count_steps_of",
    "counter_of",
    "dataset_of",
    "end_with_input",
    "finds_state_by_path",
    "get_keras_mask",
    "global_seed_generator",
    "goes_on_with",
    "has_global_seed_generator",
    "in_stateless_scope",
    "in_symbolic_scope",
    "is_made_in_scope",
    "is_matrix_of_muon",
    "kept_losses",
    "layers_of",
    "look_up_rows",
    "made_value",
    "match_anew",
    "open_scopes",
    "paths_in_optimizer",
    "places_in_optimizer",
    "put_losses_back",
    "set_global_seed_generator",
    "source_of",
    "states_of_weight",
    "sums_activity_over_rows",
    "table_variable",
    "trained_variables",
    "unmatched_compiled",
    "updates_as_muon",
]


# The name of that generator in Keras' global state. Keras 3.12 has no constant for it.
_GLOBAL_SEED_GENERATOR = getattr(keras_seed_generator, "GLOBAL_SEED_GENERATOR", "global_seed_generator")


def unmatched_compiled(model: keras.Model) -> list[Any]:
    """Returns the metrics and losses of `compile` that Keras has not matched with outputs of the model yet."""
    compiled = (model._compile_metrics, model._compile_loss)
    return [each for each in compiled if each is not None and not each.built]


def made_value(variable: keras.Variable) -> Any:
    """Returns the `tf.Variable` of a Keras variable; `None` before it is made, as while Keras computes shapes.

    Without it: Keras would make the whole initial value of a table to compute shapes.
    """
    return variable._value


def look_up_rows(variable: keras.Variable) -> None:
    """Makes lookups of rows of a Keras variable read these rows only.

    `tf.gather` calls `sparse_read` of what it is given, which TensorFlow's variables have, and Keras' do not. Without
    it: each lookup in an embedding copies the whole table, once a step has updated some of its rows.
    """
    variable.sparse_read = types.MethodType(_sparse_read, variable)


def _sparse_read(self: keras.Variable, indices: Any, name: str | None = None) -> Any:
    if in_stateless_scope():  # It may hold another value of the variable.
        raise AttributeError("sparse_read")  # Then `tf.gather` reads the whole.
    return self._maybe_autocast(self._value.sparse_read(indices, name=name))


def table_variable(layer: keras.layers.Embedding) -> keras.Variable:
    """Returns the variable of an embedding's table.

    Without it: the public property would compute the sum of the table and its LoRA update.
    """
    return layer._embeddings


def match_anew(compiled: list[Any]) -> None:
    """Makes Keras match metrics and losses with the outputs of the next call.

    Without it: metrics and losses that Keras has tried without targets are missing in the logs, or fail.
    """
    for each in compiled:
        each.built = False
        each.metrics.clear()  # A loss has its own list; unmatched metrics have an empty list.


class ReplacedLosses:
    """Replaces each loss `one` given to `compile` by `loss(one)`, until `put_back`.

    Each metric that logs the mean of a single loss gets `update(metric.update_state)` as its `update_state`. Without
    it: losses that are masked, summed, weighted or scalar differ from the losses on one device.
    """

    def __init__(self, model: keras.Model, loss: Any, update: Any):
        self._compiled, self._loss, self._update = model._compile_loss, loss, update
        self._before: list[Any] | None = None
        if self._compiled is None:
            return
        if self._compiled.built:
            self._replace()
        else:  # Keras matches losses with outputs at the first call.
            self._build, self._compiled.build = self._compiled.build, self._build_and_replace

    def put_back(self) -> None:
        """Puts the original losses of `compile` back."""
        if self._compiled is not None:
            vars(self._compiled).pop("build", None)
        if self._before is not None:
            self._compiled._flat_losses = self._before
            for metric in self._compiled.metrics:
                object.__delattr__(metric, "update_state")

    def _build_and_replace(self, *args: Any) -> None:
        self._build(*args)
        self._replace()

    def _replace(self) -> None:
        self._before = self._compiled._flat_losses
        self._compiled._flat_losses = [each._replace(loss=self._loss(each.loss)) for each in self._before]
        for metric in self._compiled.metrics:
            object.__setattr__(metric, "update_state", self._update(metric.update_state))


def layers_of(model: keras.Model) -> list[Any]:
    """Returns all layers, also nested layers. Without it: unequal layers are not named before the first step."""
    return list(model._flatten_layers(include_self=False))


@functools.cache
def sums_activity_over_rows() -> bool:
    """Whether an activity regularizer adds a sum over the rows of a batch, as in Keras 3.12 and 3.13, and not a mean.

    Without it: such a loss is divided by the number of replicas.
    """
    with tf.init_scope():
        layer = keras.layers.ActivityRegularization(l1=1.0, name="probe", dtype="float32")
        layer(tf.ones((2, 1)))
        return float(layer.losses[0]) > 1.5


def kept_losses(model: keras.Model) -> list[tuple[Any, list]]:
    """Returns each layer with its `add_loss` losses. Without it: a regularizer is lost, or counted twice."""
    return [(layer, layer._losses[:]) for layer in model._flatten_layers()]


def put_losses_back(kept: list[tuple[Any, list]]) -> None:
    """Restores the `add_loss` losses that `kept_losses` returned, without later additions and removals."""
    for layer, losses in kept:
        layer._losses[:] = losses


def open_scopes() -> list:
    """Returns the Keras objects, such as an optimizer, whose name scopes are open in this thread, innermost first."""
    stack = global_state.get_global_attribute("name_scope_stack") or []
    return [scope.caller for scope in reversed(stack) if scope.caller is not None]


def counter_of(optimizer: Any) -> Any:
    """Returns the variable in which an optimizer counts its calls. Wrappers share the inner optimizer's variable.

    Without it: `iterations` of an optimizer that accumulates gradients is a new tensor each time; residuals are lost.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    counter = optimizer.iterations
    return counter if isinstance(counter, keras.Variable | tf.Variable) else optimizer._iterations


def has_global_seed_generator() -> bool:
    """Returns whether Keras' global seed generator exists, since an unseeded random operation was called."""
    return global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR) is not None


def set_global_seed_generator(generator) -> None:
    """Sets the generator of unseeded random operations in this thread. Keras has one generator per thread."""
    global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, generator)


def count_steps_of(epochs: keras_epoch_iterator.EpochIterator, dataset: Any) -> None:
    """Makes a Keras `EpochIterator` take as many steps as a distributed dataset has batches.

    Keras counts the batches before the strategy distributes them. Without it: if each worker reads its own data, an
    epoch ends before the data ends.
    """
    epochs.data_adapter = TFDatasetAdapter(dataset)
    epochs._num_batches = epochs.data_adapter.num_batches


def is_made_in_scope(model: keras.Model) -> bool:
    """Returns whether a model was created in a strategy's scope. That strategy trains it, wherever it is compiled.

    Without it: a model created in a `OneDeviceStrategy` scope and compiled outside that scope is refused.
    """
    return model._distribute_strategy is not None


def call_in_step(callbacks) -> None:
    """Makes a Keras `CallbackList` call its callbacks within the step.

    If `fit` gets a single callback and no list, Keras does not see that the callback needs this, and calls the callback
    in another thread. Without it: such a BackupAndRestore saves variables of a later step, or of half a step.
    """
    callbacks._async_train = False


def goes_on_with(epochs, iterator) -> bool:
    """Returns whether the next epoch of a Keras `EpochIterator` continues `iterator`, not a new iterator.

    Without it: a backup made at the end of the input records that all input was read, and a new `fit` finds none left.
    """
    return epochs._current_iterator is iterator


def dataset_of(epochs: Any) -> Any:
    """Returns the distributed dataset of a Keras `EpochIterator`, or `None`.

    Without it: two shardings with equal global batches in one `fit` may receive each other's position.
    """
    return getattr(epochs, "_distributed_dataset", None)


def source_of(epochs: keras_epoch_iterator.EpochIterator) -> str:
    """Returns the source of a Keras `EpochIterator`: "arrays", a user's "dataset", or a user's "python" code.

    Without it: workers cannot tell whether rows differ by random operations or by other data.
    """
    if isinstance(epochs.data_adapter, TFDatasetAdapter):
        return "dataset"
    return "arrays" if isinstance(epochs.data_adapter, ArrayDataAdapter) else "python"


def end_with_input(epochs: Any) -> None:
    """Makes each epoch of a Keras `EpochIterator` without a known length end with its input, not only the first one.

    Keras counts the batches of the first epoch, and warns that its input has ended. Without it: later epochs with
    smaller batches end too early.
    """
    epochs._interrupted_warning = functools.partial(setattr, epochs, "_num_batches", None)


def count_as_seen(epochs, batches: int) -> None:
    """Adds batches that other code read from a Keras `EpochIterator`'s iterator to its count.

    Without it: a `fit` that resumes in the middle of its input does not start the input again at its end.
    """
    epochs._steps_seen += batches


def places_in_optimizer(optimizer: Any, variables: Any) -> list[int]:
    """Returns the indices of variables in an optimizer, or an empty list if it only wraps the optimizer that owns them.

    Without it: lists of variables with equal shapes would share residuals.
    """
    try:
        return [optimizer._get_variable_index(variable) for variable in variables]
    except KeyError:
        return []


def trained_variables(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer has been built for; an empty list before.

    Without it: weights cannot be divided among replicas before their optimizer state is made.
    """
    return optimizer._trainable_variables


def states_of_weight(optimizer: Any, variable: Any) -> list[keras.Variable]:
    """Returns an optimizer's variables for one weight.

    It keeps them in lists in the order of its weights; Muon of Keras 3.12 in dicts by the paths of weights.

    Without it: state of a weight that one replica updates would be correct on this replica only.
    """
    try:
        place = optimizer._get_variable_index(variable)
    except KeyError:
        return []
    known, trained = {id(each) for each in optimizer.variables}, optimizer._trainable_variables
    attributes, path = list(vars(optimizer).values()), getattr(trained[place], "path", None)
    found = [each[place] for each in attributes if isinstance(each, list) and len(each) == len(trained)]
    found += [each[path] for each in attributes if isinstance(each, dict) and path in each]
    return list({id(each): each for each in found if id(each) in known}.values())


def updates_as_muon(kind: type) -> bool:
    """Whether a class of optimizers updates weights as Keras' `Muon`, which older versions lack.

    Without it: the state of Muon is kept whole on one replica for each weight.
    """
    muon = getattr(keras.optimizers, "Muon", None)
    names = ("update_step", "_muon_update_step", "_adamw_update_step", "_should_use_adamw")
    return muon is not None and issubclass(kind, muon) and all(getattr(kind, n) is getattr(muon, n) for n in names)


def finds_state_by_path(optimizer: Any) -> bool:
    """Whether an optimizer is `Muon` of Keras 3.12, which finds the state of a weight by its path.

    Variables of TensorFlow, which a strategy passes to it, have no path. Without it: it fails with an `AttributeError`.
    """
    muon = getattr(keras.optimizers, "Muon", None)
    return muon is not None and isinstance(optimizer, muon) and "path" in muon._muon_update_step.__code__.co_names


def is_matrix_of_muon(optimizer: Any, variable: Any) -> bool:
    """Whether `Muon` orthogonalizes the momentum of a weight. It trains the others as Adam.

    Without it: as for `updates_as_muon`.
    """
    return not optimizer._should_use_adamw(variable)


def paths_in_optimizer(optimizer: Any, places: list[int]) -> list[str]:
    """Returns the paths of an optimizer's variables at `places`; of variables that are not Keras' own, the names.

    Without it: a compression policy does not know the variables, since Keras passes on the variables inside of its own.
    """
    variables = [optimizer._trainable_variables[place] for place in places]
    return [getattr(variable, "path", variable.name) for variable in variables]


def begin_with_epoch(model: keras.Model, epoch: int | None) -> None:
    """Makes the `fit` of a model that begins now begin with an epoch; `None`: with the argument `initial_epoch`.

    Keras' own `BackupAndRestore` sets the same attribute. Without it: a restored `fit` repeats epochs.
    """
    model._initial_epoch = None if epoch is None else _FirstEpoch(epoch)


class _FirstEpoch(int):
    """An epoch number that is true even if it is 0, because Keras evaluates `_initial_epoch or initial_epoch`."""

    def __bool__(self) -> bool:
        return True
