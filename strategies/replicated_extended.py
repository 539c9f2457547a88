"""The internal methods that tfdist changes in TensorFlow's synchronous strategies: how replicas run and exchange."""

import contextlib
import functools
import weakref
from concurrent.futures import ThreadPoolExecutor

import keras
import tensorflow as tf

from tfdist._compat import keras_internals, keras_stack, tf_internals
from tfdist.errors import LossScaleError, ScopeError
from tfdist.kept_random_state import kept_random_state
from tfdist.strategies import distributed_optimizer as optimizers
from tfdist.strategies import distributed_variables as variables
from tfdist.strategies import keras_steps
from tfdist.strategies import step as steps
from tfdist.strategies.chief_only_guard import check_in_company, check_is_read_in_company
from tfdist.strategies.collectives import Collectives
from tfdist.strategies.collectives.all_reduce import symbolic_tensors
from tfdist.strategies.collectives.shard_groups import ShardGroups
from tfdist.strategies.collectives.sparse import sum_duplicates
from tfdist.strategies.compression_policy import is_uncompressed, policy_of
from tfdist.strategies.compression_state import CompressionState
from tfdist.strategies.gradient_reducer import GradientReducer
from tfdist.strategies.gradient_structure import check_of_one_kind
from tfdist.strategies.local_steps.local_training import LocalTraining, is_outer_update
from tfdist.strategies.loss_weight import weighted
from tfdist.strategies.memory_report import MadeVariables
from tfdist.strategies.reduction_request import ReductionRequest
from tfdist.strategies.sharding.part_reducer import PartReducer
from tfdist.strategies.sharding.sharded_state import ShardedState
from tfdist.strategies.sharding.sharded_table import ShardedTable
from tfdist.strategies.sharding.sharded_weight import ShardedWeight
from tfdist.strategies.sharding.state_creation import check_is_updated_in_parts, make_in_parts
from tfdist.strategies.sharding.table_update import table_of, update_parts
from tfdist.strategies.table_reducer import TableReducer


class ReplicatedExtended:
    """The `extended` half of both strategies (their internal methods), as a mixin for TensorFlow's classes.

    Sums gradients with or without compression, makes a class of variables for each kind (such as weights and metrics),
    and refuses exchanges between replicas that cannot work.
    """

    communication: CompressionState | None = None
    reducer: GradientReducer
    reducer_beside: GradientReducer  # Sums in exchanges that run beside steps; `reducer` if none do.
    _collectives_beside: Collectives | None = None
    parts: PartReducer | None = None  # Parts of what `model_sharding` divides.
    parts_of_all: PartReducer | None = None  # Parts of tables, which are divided among all replicas.
    tables: TableReducer | None = None
    model_sharding: str | None = None
    local_training: LocalTraining | None = None  # The local steps of a strategy with `synchronization`.
    divides_weights = False  # Whether the strategy has made a weight or a table that is divided among replicas.
    _num_workers = 1
    _crosses_border: bool
    _own_seed_generator: keras.random.SeedGenerator | None = None

    def shard(self, model_sharding, group_size=None):
        """Sets what of a model is sharded among whom, by arguments of the strategy; called once, before `compress`."""
        self.model_sharding = model_sharding
        if self._num_replicas_in_sync == 1:
            return
        collectives = self._cross_device_ops
        if isinstance(collectives, Collectives):
            groups = ShardGroups.of(group_size, self._num_workers, len(self.worker_devices))
            self.parts_of_all, self.tables = PartReducer(collectives), TableReducer(collectives)
            self.parts = self.parts_of_all if groups is None else PartReducer(collectives, groups)
        elif model_sharding is not None:
            raise ValueError(
                f"model_sharding={model_sharding!r} exchanges parts of weights by collectives, but cross_device_ops is "
                f"{self.cross_device_ops_name}. Leave cross_device_ops out."
            )

    def train_locally(self, synchronization):
        """Sets how often replicas synchronize, by an argument of the strategy; called once, after `compress`."""
        if synchronization is None or self._num_replicas_in_sync == 1:
            return
        if not isinstance(self._cross_device_ops, Collectives):
            raise ValueError(
                f"synchronization={synchronization!r} exchanges weights by collectives, but cross_device_ops is "
                f"{self.cross_device_ops_name}. Leave cross_device_ops out."
            )
        self.local_training = LocalTraining(synchronization, self._container_strategy())

    def waiting_for_synchronization(self):
        """The context of a synchronization outside of steps."""
        return contextlib.nullcontext()

    def parts_of(self, division):
        """Returns what exchanges the parts of a tensor that is divided in this way."""
        return self.parts if division.shards == self.parts.shards else self.parts_of_all

    def gathered(self, state):
        """Returns the whole value of a `ShardedState`, outside of a step. All workers must call this method.

        Raises:
          ClusterError: If the chief alone reads it, in a `ChiefOnly` callback, and the cluster has other workers.
        """
        if self._num_workers > 1:
            check_is_read_in_company()
        parts = self.parts_of(state.partition)
        return parts.gather_eagerly([[own.read_value()] for own in state.values], [state.partition])[0][0]

    def looked_up(self, table, ids, dtype):
        """Returns rows of a `ShardedTable`, outside of a step. All workers must call this method.

        Raises:
          ClusterError: If the chief alone calls it, in a `ChiefOnly` callback, and the cluster has other workers.
        """
        if self._num_workers > 1:
            check_is_read_in_company()
        return self.tables.look_up_outside(table, ids, dtype)

    def compress(self, compression, time_exchanges):
        """Sets how gradients are compressed, by arguments of the strategy; called once, when the strategy is made."""
        policy, collectives = policy_of(compression), self._cross_device_ops
        if policy is not None and self._num_replicas_in_sync > 1 and not isinstance(collectives, Collectives):
            raise ValueError(
                f"compression={compression!r} exchanges gradients by collectives, but cross_device_ops is "
                f"{self.cross_device_ops_name}. Leave cross_device_ops out."
            )
        if policy is not None and self.model_sharding == "parameters":
            raise ValueError(
                f"model_sharding='parameters' sums gradients uncompressed, in the backward pass, but got compression="
                f"{compression!r}. Leave compression out, or use model_sharding='optimizer'."
            )
        if policy is not None:
            # By local steps, only what travels beside steps is encoded.
            self.communication = CompressionState(policy, self._collectives_beside or collectives, time_exchanges)
        # Gradients are encoded only if they leave a worker or device.
        encoding = self.communication if self._crosses_border else None

        def reducer(collectives):
            return GradientReducer(collectives, encoding, self.worker_devices, self._num_replicas_in_sync, self.parts)

        self.reducer = reducer(collectives)
        self.reducer_beside = self.reducer if self._collectives_beside is None else reducer(self._collectives_beside)

    @property
    def cross_device_ops_name(self):
        """The name of the class that reduces values over the replicas, for errors."""
        return type(self._cross_device_ops).__name__

    @property
    def replicas(self):
        """The number of replicas, also inside a step for which `num_replicas_in_sync` is 1."""
        return self._num_replicas_in_sync

    def of_all_workers(self, numbers):
        """Returns the integers of all workers, in the order of workers: one each, or lists of equal length."""
        return [numbers]

    def check_in_company(self):
        """Refuses an operation of all workers if the chief alone has begun it and the cluster has other workers."""
        if self._num_workers > 1:
            check_in_company()

    @functools.cached_property
    def made_variables(self):
        """The variables that the strategy has made, for `memory_report`."""
        return MadeVariables()

    def _use_merge_call(self):
        # Replicas exchange by collectives and never leave the step for that, so an optimizer can exchange gradients
        # inside a branch (gradient accumulation, loss scaling).
        return False

    def _create_variable(self, next_creator, **kwargs):
        if self.parts is not None:
            divided = make_in_parts(next_creator, kwargs, self)
            if divided is not None:
                self.made_variables.add(divided)
                self.divides_weights |= isinstance(divided, ShardedWeight | ShardedTable)
                return divided
        trainable = kwargs.get("trainable") is not False
        colocated = kwargs.get("colocate_with") is not None
        variable = super()._create_variable(next_creator, **kwargs)
        if isinstance(variable, tf.distribute.DistributedValues):
            variable = variables.refine(variable, trainable=trainable, colocated=colocated)
            self.made_variables.add(variable)
        return variable

    def initial_value_of(self, kwargs):
        """Returns the value of a variable to be made with these arguments, which is equal on all workers."""
        arguments = {**kwargs, "replica_id": 0, "device": self.worker_devices[0], "primary_var": None}
        value = self._get_variable_creator_initial_value(**arguments)
        return value() if callable(value) else value

    def update(self, var, fn, args=(), kwargs=None, group=True):
        """Calls `fn` on each replica to update `var`; see `tf.distribute.StrategyExtended.update`.

        Raises:
          ScopeError: If an optimizer of this strategy updates a variable that was made outside of its scope.
        """
        strategy = self._container_strategy()
        made_by = getattr(tf_internals.container_of(var), "distribute_strategy", None)
        if self._num_replicas_in_sync > 1 and made_by is not strategy:
            raise ScopeError(
                f"An optimizer that was made in the scope of a strategy updates the variable {var.name!r}, which was "
                "made outside of it, so that each replica would train by itself. Make the model inside `with "
                "strategy.scope():` as well, and compile it there."
            )
        if self.model_sharding is not None and args:
            check_is_updated_in_parts(var)
        if isinstance(var, ShardedWeight) and steps.current_step() is None:
            args = tuple(map(_in_parts, args))  # Keras passes averages, which are in parts too.
        if table_of(var) is not None and steps.current_step() is None:
            return update_parts(var, fn, args)
        return super().update(var, fn, args, kwargs, group)

    def _call_for_each_replica(self, fn, args, kwargs):
        if isinstance(fn, tf_internals.Function):
            return self._traced(fn)(*args, **kwargs)
        if not tf.executing_eagerly():
            fn = tf_internals.tf_convert(fn, tf_internals.control_status_ctx())
            if isinstance(self._cross_device_ops, Collectives):
                local = [self._local_results(leaf) for leaf in tf.nest.flatten((args, kwargs))]
                self._cross_device_ops.count_alike(symbolic_tensors(local))
        noted = contextlib.nullcontext() if tf.executing_eagerly() else self._activity.tracing()
        with noted, _seeded_apart(getattr(self, "_id_in_cluster", 0)):
            fn = keras_steps.in_step(fn, args, kwargs, self.seed_generator())
            return super()._call_for_each_replica(fn, args, kwargs)

    @property
    def _activity(self):
        return self._container_strategy().reports.activity

    def seed_generator(self):
        """Returns Keras' generator of unseeded random operations, made before a step, which cannot make variables.

        Another thread makes it: TensorFlow traces a function twice that makes a variable while it is traced.
        """
        strategy = self._container_strategy()

        def make():
            with strategy.scope():
                return keras.random.SeedGenerator()

        known = keras_internals.global_seed_generator() if keras_internals.has_global_seed_generator() else None
        if known is None or getattr(known.state.value, "distribute_strategy", None) is not strategy:
            if known is None or self._own_seed_generator is None:
                with kept_random_state(), ThreadPoolExecutor(1) as pool:  # Keras draws a seed.
                    self._own_seed_generator = pool.submit(make).result()
            keras_internals.set_global_seed_generator(self._own_seed_generator)
        return keras_internals.global_seed_generator()

    def _traced(self, fn):
        """Returns `fn`, a `tf.function`, with the same arguments and options, but traced once for all replicas."""
        if fn not in self._traced_functions:
            replicate = tf.autograph.experimental.do_not_convert(self._call_for_each_replica)
            python_function = fn.python_function  # A reference to `fn` would keep it alive for ever.

            def on_all_replicas(*args, **kwargs):
                return replicate(
                    tf_internals.tf_convert(python_function, tf_internals.control_status_ctx()), args, kwargs
                )

            self._traced_functions[fn] = tf_internals.clone_function(fn, on_all_replicas)
        return self._traced_functions[fn]

    @functools.cached_property
    def _traced_functions(self):
        return weakref.WeakKeyDictionary()

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        """Reduces values of the user's code, or gradients of an optimizer of Keras without a view of tfdist."""
        self.reducer.check_compiled()  # A replica may have XLA compile a part of its step.
        if is_outer_update():
            return value
        step, optimizer = steps.current_step(), next(iter(keras_internals.open_scopes()), None)
        if self._num_replicas_in_sync > 1:
            _check_loss_scaling()
        if step is not None:
            step.exchanges.count += 1
        variables = keras_stack.variables_of_summed_gradients()
        _check_has_no_tables(optimizer, variables)
        if variables and step is not None and self.local_training is not None:
            own = self.local_training.gradients(step, optimizer, tf.nest.flatten(value), variables)
            if optimizers.sums_rows_in_place(optimizer):
                own = [sum_duplicates(gradient) for gradient in own]
            return tf.nest.pack_sequence_as(value, own)
        # The model does not hold this optimizer, so its gradients are not weighted by rows yet.
        if variables and step is not None and step.share is not None and not step.weighs and not step.weights_loss:
            value = weighted(step, value, optimizer)
        values = tf.nest.flatten(value)
        if step is not None and reduce_op == tf.distribute.ReduceOp.SUM:
            values = step.or_zeros(values)
        if variables and step is not None and isinstance(optimizer, keras.optimizers.Optimizer):
            check_of_one_kind(step, optimizer, values, variables)
        applies = optimizer if isinstance(optimizer, keras.optimizers.Optimizer) else None
        request = ReductionRequest(reduce_op, values, applies, variables, options)
        encodes = self.reducer.communication is not None
        if applies is None and encodes and keras_stack.tf_keras_exchanges_gradients() and not is_uncompressed():
            raise ValueError(
                "`compression` is for optimizers of `keras`, but gradients of an optimizer of tf_keras are exchanged. "
                "Build the model with `import keras`, and unset TF_USE_LEGACY_KERAS, which makes `tf.keras` tf_keras; "
                "or leave `compression` out."
            )
        totals = self.reducer.reduce(request, steps.Step(None) if step is None else step)
        if optimizers.sums_rows_in_place(optimizer):
            totals = [sum_duplicates(total) for total in totals]
        return tf.nest.pack_sequence_as(value, totals)

    def _reduce_to(self, reduce_op, value, destinations, options):
        reduce_one = super()._reduce_to
        return tf.nest.map_structure(
            lambda leaf: reduce_one(reduce_op, self._with_tensors(leaf), destinations, options), value
        )

    def of_each_replica(self, value):
        """Returns `value` as one value per replica. TensorFlow passes a single one if replicas gave the same object."""
        if isinstance(value, tf.distribute.DistributedValues) or len(self.worker_devices) == 1:
            return value
        devices = iter(self.worker_devices)

        def copy(context):
            del context
            with tf.device(next(devices)):
                return tf.identity(value)

        return self._experimental_distribute_values_from_function(copy)

    def _with_tensors(self, leaf):
        """Converts Python numbers on the replicas of `leaf` to tensors, which collectives need."""
        local = self._local_results(leaf)
        if not isinstance(leaf, tf.distribute.DistributedValues) or not isinstance(local[0], int | float):
            return leaf
        numbers = iter(local)
        return self._experimental_distribute_values_from_function(lambda context: tf.convert_to_tensor(next(numbers)))


def _in_parts(value):
    """Returns the parts of sharded state, as one tensor for each replica; other values unchanged."""
    state = value.value if isinstance(value, keras.Variable) else value
    return (
        tf_internals.regroup([own.read_value() for own in state.values]) if isinstance(state, ShardedState) else value
    )


@contextlib.contextmanager
def _seeded_apart(worker):
    """Changes the graph's `tf.random` seed by worker, since all workers have the same seed and trace alike.

    Replicas in one graph have different seeds already. A seed would only restart the one sequence of eager operations.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if graph is None or graph.seed is None:
        yield
        return
    before, graph.seed = graph.seed, (graph.seed + worker * variables.SEED_SHIFT) % (1 << 31)
    try:
        yield
    finally:
        graph.seed = before


def _check_has_no_tables(optimizer, variables):
    """Refuses that an optimizer without a view exchanges the gradient of a sharded table as that of a whole weight."""
    for table in filter(None, map(table_of, variables)):
        raise ValueError(
            f"The rows of the ShardedEmbedding {table.name!r} are divided among the replicas, but `apply` of "
            f"{getattr(optimizer, 'name', optimizer)!r} updates whole weights. Call `apply` on "
            "`strategy.distributed_optimizer(optimizer)` instead."
        )


def _check_loss_scaling():
    """Refuses an exchange that each replica enters or skips by its own gradients: replicas would wait for ever."""
    scaler = keras_stack.deciding_loss_scaler()
    if scaler is not None and not optimizers.decides_for_all(scaler):
        raise LossScaleError(
            f"LossScaleOptimizer {scaler.name!r} must decide from the gradients of all replicas whether to exchange "
            "them, but sees only those of one replica. In a custom loop, call `apply` on "
            "`strategy.distributed_optimizer(optimizer)` instead, inside strategy.run."
        )
