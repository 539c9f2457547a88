"""Lists the private names of TensorFlow and Keras that tfdist uses, and checks that the installed versions have them.

The check runs before any other module of tfdist uses such a name. So a version that lacks one is refused before it
trains, with an error that names it. The check cannot see that a name has another meaning. docs/architecture.md says
what happens then.
"""

import importlib
import inspect
import re
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from tfdist._compat import library_versions
from tfdist.errors import VersionError

__all__ = ["check_private_names"]

_DISTRIBUTE = "tensorflow.python.distribute."
_WORKERS = _DISTRIBUTE + "collective_all_reduce_strategy:CollectiveAllReduceExtended"
_MIRRORED = _DISTRIBUTE + "mirrored_strategy:MirroredExtended"
_REDUCE = _DISTRIBUTE + "cross_device_ops:CollectiveAllReduce"
_LAUNCH = _DISTRIBUTE + "cross_device_utils:CollectiveReplicaLauncher"
_VALUES = _DISTRIBUTE + "values:"
_INPUT = _DISTRIBUTE + "input_lib:"
_DATASET = "tensorflow.python.data.ops.dataset_ops:"
_DEVICES = "tensorflow.python.data.ops.multi_device_iterator_ops:OwnedMultiDeviceIterator"
_TRAINER = "keras.src.backend.tensorflow.trainer:"
_MODEL = _TRAINER + "TensorFlowTrainer|Trainer"
_EPOCHS = "keras.src.trainers.epoch_iterator:EpochIterator"
_LOSS = "keras.src.trainers.compile_utils:CompileLoss"
_OPTIMIZER = "keras.src.backend.tensorflow.optimizer:TFOptimizer"
_MUON = "?keras.src.optimizers.muon:Muon"
_ADAPTERS = "keras.src.trainers.data_adapters."

# By feature: where the names are. "|" separates names of which one suffices, since versions differ. In brackets is what
# the code of a function must name: a local variable, which tfdist reads from its frame, or a key; `inner.name` if the
# code of the function `inner` inside of it must name it. Some versions have no module after "?".
_NAMES_BY_FEATURE = {
    "tfdist.MultiWorkerMirroredStrategy": (
        *(f"{_WORKERS}.{name}" for name in ("_initialize_local", "_initialize_local_devices")),
        *(f"{_WORKERS}.{name}" for name in ("_initialize_multi_worker", "_update_config_proto", "_num_workers")),
        *(f"{_WORKERS}.{name}" for name in ("_cluster_spec", "_id_in_cluster", "_worker_device", "_devices")),
        *(f"{_WORKERS}.{name}" for name in ("_std_server_started", "_host_cross_device_ops", "_in_multi_worker_mode")),
        f"{_WORKERS}._get_variable_creator_initial_value",
        _DISTRIBUTE + "multi_worker_util:is_chief",
        "tensorflow.compiler.xla.tsl.protobuf:coordination_config_pb2",
        "tensorflow.python.eager:context",
        "tensorflow.python.eager.context:Context._context_handle",
        "tensorflow:__internal__.EagerTensor",
        "tensorflow:__internal__.FuncGraph",
    ),
    "both strategies": (
        *(f"{_WORKERS}.{name}" for name in ("_communication_options", "_collective_keys", "_cross_device_ops")),
        *(f"{_WORKERS}.{name}" for name in ("_create_variable", "_call_for_each_replica", "_use_merge_call")),
        *(f"{_WORKERS}.{name}" for name in ("_local_results", "_container_strategy", "_num_replicas_in_sync")),
        *(f"{_WORKERS}.{name}" for name in ("_replica_ctx_all_reduce", "_reduce_to")),
        f"{_WORKERS}._experimental_distribute_values_from_function",
        *(f"{_MIRRORED}.{name}" for name in ("_make_collective_ops_with_fallbacks", "_get_cross_device_ops")),
        *(f"{_MIRRORED}.{name}" for name in ("_communication_options", "_collective_keys", "_devices")),
        *(f"{_MIRRORED}.{name}" for name in ("_create_variable", "_call_for_each_replica", "_use_merge_call")),
        *(f"{_MIRRORED}.{name}" for name in ("_replica_ctx_all_reduce", "_reduce_to", "_cross_device_ops")),
        f"{_DISTRIBUTE}collective_all_reduce_strategy:CollectiveAllReduceStrategy._collective_key_base",
        f"{_WORKERS}._collective_key_base",
        f"{_MIRRORED}._collective_key_base",
        _DISTRIBUTE + "distribute_lib:ReplicaContextBase._merge_call",
        _DISTRIBUTE + "values_util:get_current_replica_id_as_int",
        _DISTRIBUTE + "distribute_utils:regroup",
        "tensorflow.python.framework.ops:Graph._variable_creator_stack",
        "tensorflow.python.framework.config:is_op_determinism_enabled",
        "tensorflow.python.eager:record",
        "tensorflow.python.eager.record:could_possibly_record",
    ),
    "the exchange of gradients": (
        *(f"{_REDUCE}.{name}" for name in ("_all_reduce", "_all_reduce_per_replica_values", "_batch_all_gather")),
        *(f"{_REDUCE}.{name}" for name in ("_devices", "_group_size", "_launchers", "_options", "_lock")),
        *(f"{_LAUNCH}.{name}" for name in ("_use_ordering_token", "_get_ordering_token", "_next_instance_key")),
        *(f"{_LAUNCH}.{name}" for name in ("_all_gather", "_group_key", "_group_size", "_device", "_options")),
        _DISTRIBUTE + "collective_util:Options.merge",
        "tensorflow.python.ops.control_flow_util:GraphOrParentsInXlaContext",
        "tensorflow.python.ops.control_flow_util_v2:maybe_set_lowering_attr",
        "tensorflow.python.ops.control_flow_v2_func_graphs:CondBranchFuncGraph",
        "tensorflow.python.ops.control_flow_v2_func_graphs:WhileBodyFuncGraph",
        "tensorflow.python.ops.control_flow_v2_func_graphs:WhileCondFuncGraph",
    ),
    "variables that replicas update": (
        *(f"{_VALUES}MirroredVariable.{name}" for name in ("_get_on_device_or_primary", "_update_replica")),
        *(f"{_VALUES}MirroredVariable.{name}" for name in ("_get_as_operand|_get", "_dense_var_to_tensor")),
        *(f"{_VALUES}MirroredVariable.{name}" for name in ("_get", "_update_cross_replica")),
        *(f"{_VALUES}MirroredVariable.{name}" for name in ("_serialize_to_tensors", "_restore_from_tensors")),
        f"{_VALUES}SyncOnReadVariable",
    ),
    "lookups in embeddings": (
        "keras.src.backend.common.stateless_scope:in_stateless_scope",
        "keras.src.backend.common.variables:Variable._value",
        "keras.src.backend.common.variables:Variable._maybe_autocast",
    ),
    "steps that are a `tf.function`": (
        "tensorflow.python.eager.def_function:Function",
        "tensorflow.python.eager.def_function:Function._clone",
        "tensorflow.python.autograph.core.ag_ctx:control_status_ctx",
        "tensorflow.python.autograph.impl:api",
        "tensorflow.python.autograph.impl.api:autograph_artifact",
        "tensorflow.python.autograph.impl.api:tf_convert",
        "tensorflow.python.autograph.impl.api:to_graph",
        "tensorflow.python.autograph.impl.api:ConversionError",
        "tensorflow.python.util:tf_decorator",
        "tensorflow.python.util.tf_decorator:unwrap",
        "tensorflow.python.framework.ops:Graph._get_function",
    ),
    "distributed datasets": (
        "tensorflow.python.distribute:input_lib",
        *(f"{_INPUT}DistributedDataset.{name}" for name in ("_cloned_datasets", "_cardinality", "_strategy")),
        *(f"{_INPUT}DistributedDatasetsFromFunction.{name}" for name in ("_datasets", "_cardinality", "_strategy")),
        f"{_INPUT}DistributedDataset._enable_get_next_as_optional",
        f"{_INPUT}DistributedDatasetsFromFunction._enable_get_next_as_optional",
        *(f"{_INPUT}DistributedIterator.{name}" for name in ("_iterators", "_input_workers", "_strategy", "_options")),
        *(f"{_INPUT}DistributedIterator.{name}" for name in ("_element_spec", "_cardinality", "_replica_order")),
        *(f"{_INPUT}DistributedIterator.{name}" for name in ("_enable_get_next_as_optional", "_type_spec")),
        f"{_INPUT}DistributedIteratorSpec._from_components",
        f"{_INPUT}_SingleWorkerOwnedDatasetIterator._iterator",
        *(f"{_VALUES}{name}" for name in ("PerReplica._type_spec", "PerReplicaSpec._component_specs")),
        *(f"{_DEVICES}.{name}" for name in ("_devices", "_device_iterators")),
        "tensorflow.python.data.ops.iterator_ops:OwnedIterator._dataset",
    ),
    "tfdist.data.BalancedSharding": (
        f"{_DATASET}UnaryUnchangedStructureDataset",
        f"{_DATASET}DatasetV2._variant_tensor",
    ),
    "the comparison of rows between workers": (
        "tensorflow.python.data.ops.map_op:_MapDataset",
        "tensorflow.python.data.ops.map_op:_ParallelMapDataset",
        f"{_DATASET}DatasetV2._inputs",
        f"{_DATASET}DatasetV2._functions",
        _ADAPTERS + "array_data_adapter:ArrayDataAdapter",
        _ADAPTERS + "tf_dataset_adapter:TFDatasetAdapter",
        f"{_MODEL}._flatten_layers",
    ),
    "`fit`, `evaluate` and `predict` on several replicas": (
        *(
            f"{_MODEL}.{name}"
            for name in ("fit(epoch_iterator)", "fit(callbacks)", "fit(self)", "fit(epoch)", "fit(begin_step)")
        ),
        *(f"{_MODEL}.fit({name})" for name in ("validation_data", "epochs", "initial_epoch")),
        *(f"{_MODEL}.{name}" for name in ("evaluate(epoch_iterator)", "evaluate(use_cached_eval_dataset)")),
        *(f"{_MODEL}.{name}" for name in ("predict(epoch_iterator)", "compile(self)")),
        *(f"{_MODEL}.{name}" for name in ("_maybe_symbolic_build(self)", "_maybe_symbolic_build(iterator)")),
        *(f"{_MODEL}.{name}" for name in ("_distribute_strategy", "_compile_metrics", "_compile_loss")),
        *(f"{_MODEL}._make_function({name})" for name in ("self", "one_step_on_data.self")),
        # The batch of a single step is read in a graph, or by Keras 3.16 in Python, where tfdist takes it over.
        f"{_MODEL}._make_function(multi_step_on_iterator.get_next|function.get_next_as_optional)",
        f"{_MODEL}._make_function(function.self)",
        *(f"{_MODEL}.{name}" for name in ("make_train_function", "make_test_function", "make_predict_function")),
        f"{_TRAINER}TFEpochIterator.__init__(self)",
        f"{_TRAINER}TFEpochIterator._distributed_dataset",
        *(
            f"{_EPOCHS}.{name}"
            for name in ("data_adapter", "_num_batches", "_current_iterator", "_steps_seen", "_interrupted_warning")
        ),
        "keras.src.callbacks:callback_list",
        "keras.src.callbacks.callback_list:CallbackList._async_train",
        "keras.src.backend.common.variables:Variable._deferred_initialize(self)",
        "keras.src.backend.common.variables:Variable._initialize(self)",
    ),
    "losses and metrics over the global batch": (
        f"{_LOSS}._flat_losses",
        *(f"{_LOSS}.{name}" for name in ("build", "metrics", "built")),
        "keras.src.trainers.compile_utils:CompileMetrics.built",
        "keras.src.layers.layer:Layer._losses",
        "keras.src.backend.common.masking:get_keras_mask",
    ),
    "optimizers that sum gradients over replicas": (
        *(f"{_OPTIMIZER}.{name}" for name in ("_all_reduce_sum_gradients(filtered_grads_and_vars)", "_clip_gradients")),
        *(f"{_OPTIMIZER}.{name}" for name in ("_backend_apply_gradients", "_trainable_variables", "_iterations")),
        f"{_OPTIMIZER}._get_variable_index",
        *(f"{_OPTIMIZER}.{name}" for name in ("_apply_weight_decay", "_backend_update_step")),
        f"{_OPTIMIZER}._update_model_variables_moving_average",
        f"{_OPTIMIZER}._overwrite_model_variables_with_average_value",
        f"{_OPTIMIZER}._model_variables_moving_average",
        *(f"{_MUON}.{name}" for name in ("_muon_update_step", "_adamw_update_step", "_should_use_adamw")),
        "?keras.src.optimizers.multi_optimizer:MultiOptimizer._inner_optimizers",
        "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer._stateful_handle_finite_grads(self)",
    ),
    "tfdist.layers.ShardedEmbedding": (
        "keras.src.backend.common.stateless_scope:in_stateless_scope",
        "keras.src.backend.common.variables:Variable._value",
        "keras.src.layers.core.embedding:Embedding._embeddings",
        "keras.src.backend.common.variables:Variable._initialize_with_initializer(initializer)",
        _VALUES + "DistributedVariable._distributed_container",
        f"{_OPTIMIZER}._backend_reset_gradient_accumulators",
        f"{_OPTIMIZER}._accumulated_gradients",
    ),
    "random layers": (
        "keras.src.backend.common:global_state",
        "keras.src.backend.common.global_state:get_global_attribute",
        "keras.src.backend.common.global_state:set_global_attribute",
        "keras.src.random:seed_generator",
        "keras.src.random.seed_generator:global_seed_generator(GLOBAL_SEED_GENERATOR|global_seed_generator)",
    ),
    "model_sharding='parameters'": (
        "tensorflow.python.eager.record:should_record_backprop",
        "tensorflow.python.eager.backprop:_gradient_function(gradient_tape/)",
        "tensorflow.python.framework.ops:Operation._update_input",
        "tensorflow.python.ops.custom_gradient:recompute_grad(inner.grad_wrapper)",
        _DISTRIBUTE + "values_util:is_saving_non_distributed",
        "keras.src.backend.common.symbolic_scope:in_symbolic_scope",
    ),
    "saving on the chief alone": ("keras.src.saving.saving_lib:get_attr_skipset",),
    "tfdist.callbacks.BackupAndRestore": (f"{_MODEL}._initial_epoch",),
}


class PrivateName(NamedTuple):
    """A private name of TensorFlow or Keras that tfdist uses.

    Attributes:
      module: Module that has the name.
      path: Alternative names after the module, such as `("fit",)` or `("TensorFlowTrainer", "Trainer")` with more.
      variables: Alternative names of a local variable of a function, which tfdist reads from the function's frame. Or
        those of a global variable or key that the function uses. "inner.name" is a name in the code of a function
        `inner` inside of it; the module must then contain this code, since tfdist asks which module calls. Empty for
        other names.
      is_optional: Whether some versions offer no such module, and need nothing of it.
      feature: The feature of tfdist that needs the name.
    """

    module: str
    path: tuple[tuple[str, ...], ...]
    variables: tuple[str, ...]
    is_optional: bool
    feature: str

    @property
    def library(self) -> str:
        """The library: "keras" or "tensorflow"."""
        return self.module.split(".")[0]

    def __str__(self) -> str:
        path, variables = ".".join("|".join(names) for names in self.path), "|".join(self.variables)
        return f"{self.module}:{path}" + (f"({variables})" if variables else "")

    def is_present(self) -> bool:
        """Returns whether the installed version of the library has the name."""
        owner: Any = _module(self.module)
        if owner is None:
            return self.is_optional
        for names in self.path[:-1]:
            owner = next((getattr(owner, name) for name in names if hasattr(owner, name)), None)
        names = self.path[-1]
        if self.variables:
            function = next((getattr(owner, name) for name in names if hasattr(owner, name)), None)
            return function is not None and self._is_used_in(inspect.unwrap(function))
        return any(_has(owner, name) for name in names)

    def _is_used_in(self, function: FunctionType) -> bool:
        known = _named_in(function.__code__)
        for code in filter(inspect.iscode, function.__code__.co_consts):
            if function.__globals__["__name__"] == self.module:
                known += [f"{code.co_name}.{name}" for name in _named_in(code)]
        return any(name in known for name in self.variables)


def _module(name: str) -> Any:
    """Returns a module, or `None` if this version has no such module. A module that fails to load raises its error."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def _has(owner: Any, name: str) -> bool:
    """Returns whether a module or class has an attribute. Methods of a class may also set it on objects."""
    if inspect.ismodule(owner):
        return hasattr(owner, name) or _module(f"{owner.__name__}.{name}") is not None
    return owner is not None and (hasattr(owner, name) or any(name in code.co_names for code in _codes_of(owner)))


def _codes_of(kind: type) -> Iterator[CodeType]:
    """Yields the code of each method of a class and of its parents."""
    for each in kind.__mro__:
        for member in vars(each).values():
            member = getattr(member, "fget", None) or getattr(member, "__func__", member)
            function = inspect.unwrap(member) if callable(member) else member
            if isinstance(function, FunctionType):
                yield function.__code__


def _named_in(code: CodeType) -> list[Any]:
    return [*code.co_varnames, *code.co_cellvars, *code.co_freevars, *code.co_names, *code.co_consts]


def _parsed(place: str, feature: str) -> PrivateName:
    found = re.fullmatch(r"(\??)([\w.]+):([\w.|]+)(?:\(([\w.|/]+)\))?", place)
    assert found is not None, place
    path = tuple(tuple(names.split("|")) for names in found[3].split("."))
    variables = tuple(found[4].split("|")) if found[4] else ()
    return PrivateName(found[2], path, variables, bool(found[1]), feature)


PRIVATE_NAMES = tuple(_parsed(place, feature) for feature, places in _NAMES_BY_FEATURE.items() for place in places)
"""All private names of TensorFlow and Keras that tfdist uses, including methods that it overrides."""


def check_private_names() -> None:
    """Checks that the installed TensorFlow and Keras have all private names that tfdist uses.

    Raises:
      VersionError: If a name is missing.
    """
    for name in PRIVATE_NAMES:
        if not name.is_present():
            raise VersionError(
                f"tfdist needs the private name `{name}` for {name.feature}, but {name.library} "
                f"{library_versions.installed_version(name.library)} does not have it. {library_versions.remedy()}; or "
                "install a newer tfdist, if there is one."
            )
