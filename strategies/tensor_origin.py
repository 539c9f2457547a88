"""Finds in a dataset's graph the origins of its tensors, which decide whether they must be alike on all workers."""

import enum
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdist._compat import dataset_internals

_DRAWS = re.compile(
    "Random|Rng|Multinomial|TruncatedNormal|SampleDistorted|StatelessGamma|NonDeterministic|Stateful[A-Z]"
)
# Readers that TensorFlow shards by files: kReaderDatasetOps in auto_shard.cc.
_READERS = re.compile("^(ArrayRecord|FixedLengthRecord|RecordIO|SSTable|TextLine|TFRecord)Dataset")
_PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


class Origin(enum.IntEnum):
    """The origin of a tensor of a batch, that is, what makes it. A larger value means a less predictable tensor.

    Attributes:
      GRAPH: Stored, or computed by operations that give the same value each time.
      PYTHON: Made by Python code, which may draw random numbers.
      RANDOM: Depends on a random operation of TensorFlow.
    """

    GRAPH = 0
    PYTHON = 1
    RANDOM = 2


def origins_of(dataset: tf.data.Dataset) -> list[Origin]:
    """Returns the origin of each tensor in the batches of a dataset, in the order of `tf.nest.flatten`.

    Shuffles count as GRAPH: workers share a seed, so their shuffles must give the same order. Costs a walk over the
    operations of all functions of the pipeline.
    """
    return _origins(dataset, {})


def sizes_of(dataset: tf.data.Dataset) -> list[int]:
    """Returns the known numbers of elements along a dataset's pipeline, last stage first, where they change."""
    sizes: list[int] = []
    for stage in dataset_internals.datasets_read_by(dataset):
        size = int(stage.cardinality())
        if size >= 0 and sizes[-1:] != [size]:
            sizes.append(size)
    return sizes


def reads_files(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset reads files, of which AutoShardPolicy.AUTO gives each worker its own."""
    readers = (tf.data.TFRecordDataset, tf.data.TextLineDataset, tf.data.FixedLengthRecordDataset)
    stages = dataset_internals.datasets_read_by(dataset)
    return any(isinstance(stage, readers) for stage in stages) or any(map(_READERS.match, _kinds_of(dataset)))


def calls_python(dataset: tf.data.Dataset) -> bool:
    """Returns whether Python code makes any part of a dataset's batches."""
    return any(kind in _PYTHON for kind in _kinds_of(dataset))


def _kinds_of(dataset: tf.data.Dataset) -> Iterator[str]:
    """Yields the type of each operation in the functions of a dataset's pipeline."""
    for stage in dataset_internals.datasets_read_by(dataset):
        for graph in dataset_internals.graphs_of_dataset_functions(stage):
            yield from _kinds_in(graph)


def _kinds_in(graph: Any) -> list[str]:
    """Returns the types of the operations of a pipeline's function, and of the functions that it may call."""
    definition = graph.as_graph_def()
    bodies = [definition.node, *(each.node_def for each in definition.library.function)]
    return [node.op for body in bodies for node in body]


def _origins(dataset: Any, known: dict[int, list[Origin]]) -> list[Origin]:
    if id(dataset) not in known:
        incoming = [_origins(each, known) for each in dataset_internals.inputs_of(dataset)]
        graphs = dataset_internals.graphs_of_dataset_functions(dataset)
        count = len(tf.nest.flatten(dataset.element_spec))
        known[id(dataset)] = _of_stage(dataset, count, incoming, graphs)
    return known[id(dataset)]


def _of_stage(dataset: Any, count: int, incoming: list[list[Origin]], graphs: list[Any]) -> list[Origin]:
    flat = [origin for each in incoming for origin in each]
    if dataset_internals.maps_elements(dataset) and len(incoming) == 1 and len(graphs) == 1:
        outputs = _through(graphs[0], incoming[0])
        if len(outputs) == count:
            return outputs
    if graphs:  # A filter, or datasets made of each element.
        return [max([*flat, *map(_worst, graphs)], default=Origin.GRAPH)] * count
    if incoming and all(len(each) == count for each in incoming):
        return [max(each) for each in zip(*incoming, strict=True)]
    return flat if len(flat) == count else [max(flat, default=Origin.GRAPH)] * count


def _through(graph: Any, incoming: list[Origin]) -> list[Origin]:
    """Returns the origins of the outputs of a pipeline's function, by the origins of its inputs."""
    inputs = graph.inputs[: len(graph.inputs) - len(graph.captures)]
    if len(inputs) != len(incoming):
        return [max([*incoming, _worst(graph)])] * len(graph.outputs)
    origins: dict[str, Origin] = {tensor.op.name: origin for tensor, origin in zip(inputs, incoming, strict=True)}
    for operation in graph.get_operations():  # Inputs come before their consumers.
        if operation.name not in origins:
            before = [origins.get(tensor.op.name, Origin.GRAPH) for tensor in operation.inputs]
            origins[operation.name] = max([_of_operation(operation, graph), *before])
    return [origins.get(tensor.op.name, Origin.GRAPH) for tensor in graph.outputs]


def _worst(graph: Any) -> Origin:
    return max((_of_operation(operation, graph) for operation in graph.get_operations()), default=Origin.GRAPH)


def _of_operation(operation: tf.Operation, graph: Any) -> Origin:
    own = _of_kinds([operation.type])
    called = _called_by(operation.node_def.attr.values())
    return max(own, _of_functions(called, graph)) if called else own


def _of_functions(names: list[str], graph: Any) -> Origin:
    """Returns the largest origin in the functions that an operation calls, directly or indirectly."""
    bodies = {each.signature.name: each.node_def for each in graph.as_graph_def().library.function}
    worst, seen = Origin.GRAPH, set()
    while names:
        name = names.pop()
        if name not in seen and name in bodies:
            seen.add(name)
            worst = max(worst, _of_kinds(node.op for node in bodies[name]))
            names += [called for node in bodies[name] for called in _called_by(node.attr.values())]
    return worst


def _called_by(attributes: Iterable[Any]) -> list[str]:
    return [
        function.name
        for attribute in attributes
        for function in (attribute.func, *attribute.list.func)
        if function.name
    ]


def _of_kinds(kinds: Iterable[str]) -> Origin:
    return max((_of_kind(kind) for kind in kinds), default=Origin.GRAPH)


def _of_kind(kind: str) -> Origin:
    if kind in _PYTHON:
        return Origin.PYTHON
    draws = _DRAWS.search(kind) and "Dataset" not in kind and kind != "StatefulPartitionedCall"
    return Origin.RANDOM if draws else Origin.GRAPH
