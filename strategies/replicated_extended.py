"""The internal methods that tfdist changes in TensorFlow's synchronous strategies: how replicas run and exchange."""

import contextlib
import functools
import random
import weakref

import keras
import tensorflow as tf

from tfdist._compat import keras_internals, keras_stack, tf_internals
from tfdist.errors import CompiledCollectivesError, LossScaleError, ScopeError
from tfdist.strategies import batch_independent_rows, keras_steps
from tfdist.strategies import distributed_optimizer as optimizers
from tfdist.strategies import distributed_variables as variables
from tfdist.strategies import step as steps
from tfdist.strategies.chief_only_guard import check_in_company
from tfdist.strategies.collectives import Collectives
from tfdist.strategies.collectives.all_reduce import symbolic_tensors
from tfdist.strategies.collectives.sparse import sum_duplicates
from tfdist.strategies.compression_policy import is_uncompressed, policy_of
from tfdist.strategies.compression_state import CompressionState
from tfdist.strategies.gradient_structure import check_of_one_kind
from tfdist.strategies.loss_weight import weighted


class ReplicatedExtended:
    """The `extended` half of both strategies, as a mixin for TensorFlow's classes.

    Exchanges gradients with or without compression, makes variables by kind, and refuses exchanges that cannot work.
    """

    communication: CompressionState | None = None
    _num_workers = 1
    _own_seed_generator: keras.random.SeedGenerator | None = None

    def compress(self, compression, time_exchanges):
        """Sets the compression of gradients; see `MultiWorkerMirroredStrategy`."""
        policy = policy_of(compression)
        if policy is None:
            return
        if self._num_replicas_in_sync > 1 and not isinstance(self._cross_device_ops, Collectives):
            raise ValueError(
                f"compression={compression!r} exchanges gradients by collectives, but cross_device_ops is "
                f"{type(self._cross_device_ops).__name__}. Leave cross_device_ops out."
            )
        self.communication = CompressionState(policy, lambda: self._cross_device_ops, time_exchanges)

    @property
    def replicas(self):
        """The number of replicas, also inside a step for which `num_replicas_in_sync` is 1."""
        return self._num_replicas_in_sync

    def check_in_company(self):
        """Refuses an operation of all workers if the chief alone has begun it and the cluster has other workers."""
        if self._num_workers > 1:
            check_in_company()

    def check_compiled(self):
        """Refuses exchanges in code that XLA compiles for devices without compiled collectives."""
        devices = self.worker_devices
        if is_compiled() and self._num_replicas_in_sync > 1 and not all("GPU" in device for device in devices):
            raise CompiledCollectivesError(
                "jit_compile=True compiles the whole step, and XLA has no collectives for CPU devices. Got "
                f"{self._num_replicas_in_sync} replicas, here on {', '.join(devices)}. "
                "Pass jit_compile=False to `compile` (or `tf.function`); `predict` and single layers may stay compiled."
            )

    def exchange_gradients(self, optimizer, gradients, of=None):
        """Sums an optimizer's gradients over all replicas, compressed if the strategy has codecs.

        Args:
          optimizer: Optimizer that applies the gradients.
          gradients: Tensors and `IndexedSlices`.
          of: Variables of the gradients, if known.
        """
        gradients = _shaped(gradients, of)
        if not self._compresses or is_uncompressed():
            return steps.current_step().all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        self.check_compiled()
        exchange = self.communication.exchange_of(optimizer, gradients, of or ())
        done, step = tf.convert_to_tensor(optimizer.iterations), steps.current_step()
        gradients, without_heads = batch_independent_rows.with_heads(gradients, step)
        if tf.executing_eagerly():
            with _losses_kept(step):
                return tf.distribute.get_replica_context().merge_call(_exchange_eagerly, (exchange, gradients, done))
        exchange = functools.partial(exchange, tf_internals.get_current_replica_id_as_int())
        return without_heads(_in_one_frame(step, exchange, gradients, done))

    @property
    def _compresses(self):
        """Whether the strategy has codecs, and its gradients leave a worker or device."""
        return self.communication is not None and self._crosses_border

    def _use_merge_call(self):
        # Replicas exchange by collectives and never leave the step for that, so an optimizer can exchange gradients
        # inside a branch (gradient accumulation, loss scaling).
        return False

    def _create_variable(self, next_creator, **kwargs):
        trainable = kwargs.get("trainable") is not False
        colocated = kwargs.get("colocate_with") is not None
        variable = super()._create_variable(next_creator, **kwargs)
        if isinstance(variable, tf.distribute.DistributedValues):
            variable = variables.refine(variable, trainable=trainable, colocated=colocated)
        return variable

    def update(self, var, fn, args=(), kwargs=None, group=True):
        """See `tf.distribute.StrategyExtended.update`.

        Raises:
          ScopeError: If an optimizer of this strategy updates a variable that was made outside of its scope.
        """
        strategy = self._container_strategy()
        if self._num_replicas_in_sync > 1 and getattr(var, "distribute_strategy", None) is not strategy:
            raise ScopeError(
                f"An optimizer that was made in the scope of a strategy updates the variable {var.name!r}, which was "
                "made outside of it, so that each replica would train by itself. Make the model inside `with "
                "strategy.scope():` as well, and compile it there."
            )
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
        """Returns the generator of Keras' unseeded random operations, made outside of steps, where variables fail."""
        strategy = self._container_strategy()
        known = keras_internals.global_seed_generator() if keras_internals.has_global_seed_generator() else None
        if known is None or getattr(known.state.value, "distribute_strategy", None) is not strategy:
            if known is None or self._own_seed_generator is None:
                before = random.getstate()
                with tf.init_scope(), strategy.scope():
                    self._own_seed_generator = keras.random.SeedGenerator()
                random.setstate(before)  # Undoes the draw of Keras' seed.
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
        step = steps.current_step()
        self.check_compiled()  # A replica may have XLA compile a part of its step.
        if self._num_replicas_in_sync > 1:
            _check_loss_scaling()
        if step is not None and not step.in_own_exchange:
            step.exchanges += 1
        of = [] if step is not None and step.in_own_exchange else keras_stack.variables_of_summed_gradients()
        # The model does not hold this optimizer, so its gradients are not weighted by rows yet.
        if of and step is not None and step.share is not None and not step.weighs and not step.weights_loss:
            value = weighted(step, value, next(iter(keras_internals.open_scopes()), None))
        if step is not None and reduce_op == tf.distribute.ReduceOp.SUM:
            value = tf.nest.pack_sequence_as(value, step.or_zeros(tf.nest.flatten(value)))
        optimizer = next(iter(keras_internals.open_scopes()), None)
        if of and step is not None and isinstance(optimizer, keras.optimizers.Optimizer):
            check_of_one_kind(step, optimizer, value, of)
        if self._is_compressed(optimizer, reduce_op, step):
            totals = self.exchange_gradients(optimizer, tf.nest.flatten(value), of)
            return tf.nest.pack_sequence_as(value, self._scattered(optimizer, totals))
        if self._compresses and keras_stack.tf_keras_exchanges_gradients() and not is_uncompressed():
            raise ValueError(
                "`compression` is for optimizers of `keras`, but gradients of an optimizer of tf_keras are exchanged. "
                "Build the model with `import keras`, and unset TF_USE_LEGACY_KERAS, which makes `tf.keras` tf_keras; "
                "or leave `compression` out."
            )
        if of:
            value = _shaped(value, of)
        value, without_heads = batch_independent_rows.with_heads(value, step)
        if tf.executing_eagerly() or not isinstance(self._cross_device_ops, Collectives):
            # Replicas run one after another, or other `cross_device_ops` need the values of all: leave the step.
            with _losses_kept(step):
                merge = functools.partial(_all_reduce_merged, reduce_op, options)
                totals = tf.distribute.get_replica_context().merge_call(merge, (tf.nest.flatten(value),))
            return without_heads(tf.nest.pack_sequence_as(value, totals))
        replica = tf_internals.get_current_replica_id_as_int()
        options = options or tf_internals.CommunicationOptions()
        total = _in_one_frame(
            step, lambda value: self._cross_device_ops._all_reduce(reduce_op, value, replica, options), value
        )
        return self._scattered(optimizer, without_heads(total))

    def _is_compressed(self, optimizer, reduce_op, step):
        """Whether codecs apply to an all-reduce: an optimizer sums gradients in it, and it is not the step's own."""
        of_gradients = isinstance(optimizer, keras.optimizers.Optimizer) and reduce_op == tf.distribute.ReduceOp.SUM
        own = step is not None and step.in_own_exchange
        return self._compresses and of_gradients and not own and not is_uncompressed()

    def _scattered(self, optimizer, totals):
        """Sums duplicate rows in `totals` for optimizers that scatter rows into the weights, in any order."""
        return tf.nest.map_structure(sum_duplicates, totals) if optimizers.sums_rows_in_place(optimizer) else totals

    def _reduce_to(self, reduce_op, value, destinations, options):
        reduce_one = super()._reduce_to
        return tf.nest.map_structure(
            lambda leaf: reduce_one(reduce_op, self._with_tensors(leaf), destinations, options), value
        )

    def of_each_replica(self, value):
        """Returns one value per replica. TensorFlow passes a single value if all replicas gave the same object."""
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


def is_compiled() -> bool:
    """Whether XLA compiles the operations traced now."""
    return not tf.executing_eagerly() and tf_internals.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


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


def _shaped(gradients, variables):
    """Gives `gradients` the static shapes of their variables, if these are known.

    The static shapes of gradients may differ between replicas: Keras may trace one replica for a known number of rows
    and another replica for any number. Buckets and codecs must be the same on all replicas.
    """
    if not variables:
        return gradients
    return [_of_shape(grad, variable.shape) for grad, variable in zip(gradients, variables, strict=True)]


def _of_shape(gradient, shape):
    if not isinstance(gradient, tf.IndexedSlices):
        gradient = tf.convert_to_tensor(gradient)
        return gradient if gradient.shape.is_fully_defined() else tf.ensure_shape(gradient, shape)
    values = tf.ensure_shape(gradient.values, [None, *shape[1:]])
    return tf.IndexedSlices(values, gradient.indices, tf.constant(list(shape), gradient.indices.dtype))


def _losses_kept(step):
    return contextlib.nullcontext() if step is None else step.losses_kept()


def _in_one_frame(step, exchange, *values):
    """Calls `exchange` so that TensorFlow matches its collectives with the collectives of other replicas.

    TensorFlow identifies a collective of a process also by the loop that it runs in, and each replica has its own
    loop. Inside a function that is not inlined, a collective belongs to no loop.
    """
    if step is None or not step.in_loop:
        return exchange(*values)
    return tf.function(exchange, autograph=False, experimental_attributes={"_noinline": True})(*values)


def _all_reduce_merged(reduce_op, options, strategy, values):
    """All-reduces the `values` of all replicas in the cross-replica context of `merge_call`."""
    of_each = [strategy.extended.of_each_replica(value) for value in values]
    return strategy.extended.batch_reduce_to(reduce_op, [(value, value) for value in of_each], options)


def _exchange_eagerly(strategy, exchange, gradients, done):
    """Exchanges gradients in the cross-replica context of `merge_call`, for replicas that run one after another."""
    of_each = strategy.extended.of_each_replica
    local = [strategy.experimental_local_results(of_each(gradient)) for gradient in gradients]
    done = strategy.experimental_local_results(done)[0]
    return tf_internals.regroup(exchange.eagerly([list(own) for own in zip(*local, strict=True)], done))


def _check_loss_scaling():
    """Refuses an exchange that each replica enters or skips by its own gradients: replicas would wait for ever."""
    scaler = keras_stack.deciding_loss_scaler()
    if scaler is not None and not optimizers.decides_for_all(scaler):
        raise LossScaleError(
            f"LossScaleOptimizer {scaler.name!r} must decide from the gradients of all replicas whether to exchange "
            "them, but sees only those of one replica. In a custom loop, call `apply` on "
            "`strategy.distributed_optimizer(optimizer)` instead, inside strategy.run."
        )
