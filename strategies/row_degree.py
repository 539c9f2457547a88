"""Finds in the graph of a step how each tensor grows with the rows of its replica.

Assume that a replica gets k times as many rows of the same kind, while the rows of other replicas stay the same. If
that multiplies a tensor by k^d, its degree is d: 0 for a mean over rows; 1 for a sum over rows, the number of rows, and
a sum divided by a fixed batch size. Gradients have the degree of their loss. So the graph of the gradients tells means
from sums. A replica must weight a mean by its part of the rows, while sums are added as they are.

The batch axis is the first axis of unknown static length. All backward operations are linear in their incoming gradient
and keep its degree. An operation with rows in its inputs and none in its output has added them up. Only operations that
divide, multiply, add or take means need rules.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.strategies.graph_analysis import captured

Degree = float | None
"""A degree; NaN if terms of different degrees were added; `None` if the graph does not tell the degree."""

# Only the first input counts: the remaining inputs are shapes, axes and indices.
_OF_FIRST = {
    *("Identity", "Snapshot", "StopGradient", "PreventGradient", "CheckNumerics", "EnsureShape", "Cast", "Neg", "Abs"),
    *("Reshape", "ExpandDims", "Squeeze", "Transpose", "Tile", "BroadcastTo", "Pad", "PadV2", "MirrorPad"),
    *("StridedSlice", "Slice", "GatherV2", "GatherNd", "Split", "SplitV", "Unpack", "ReverseV2", "Roll"),
    *("Max", "Min", "Mean", "TopKV2", "Cumsum", "MatrixDiagV3", "MatrixDiagPartV3", "PlaceholderWithDefault"),
}
# Only the input with this number counts.
_OF_ONE = {"StridedSliceGrad": 4, "Fill": 1, "ScatterNd": 1}
_ALIKE = {"Add", "AddV2", "AddN", "Sub", "ConcatV2", "Pack", "Maximum", "Minimum", "Select", "SelectV2"}
_QUOTIENTS = {"RealDiv", "Div", "DivNoNan", "FloorDiv", "Xdivy"}
# The factors of the degrees of the inputs.
_POWERS = {
    **{"Square": (2,), "Sqrt": (0.5,), "Rsqrt": (-0.5,), "Reciprocal": (-1,), "Inv": (-1,)},
    **{"SqrtGrad": (-1, 1), "RsqrtGrad": (3, 1), "ReciprocalGrad": (2, 1), "InvGrad": (2, 1), "L2Loss": (2,)},
    **{"SquaredDifference": (1, 1), "Prod": (1, 0), "Sum": (1, 0)},
}
# Functions without a degree if their input has one.
_OF_CONSTANTS = {"Exp", "Expm1", "Log", "Log1p", "Tanh", "Sigmoid", "Softplus", "Softmax", "LogSoftmax", "Pow", "Erf"}
_WITHOUT = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "Range", "OneHot", "ArgMax", "ArgMin"}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_BRANCHES = {"If", "StatelessIf"}
_LOOPS = {"While", "StatelessWhile"}


class RowDegrees:
    """Finds the degrees of the tensors of one replica's step: the powers of its number of rows by which they grow.

    Visits each operation once, while the step is traced. The rows of one replica do not change the tensors that
    replicas have `exchanged`. The tensors in `grown` have degree 1 regardless of the graph.
    """

    def __init__(self, exchanged: Collection[Any], grown: Collection[Any]):
        self._exchanged, self._grown = exchanged, grown
        self._known: dict[tf.Operation, list[Degree]] = {}

    def of_gradients(self, gradients: Sequence[Any]) -> list[Degree]:
        """Returns the degrees (powers of the rows) of the dense gradients; of the sparse ones if none is dense."""
        dense = [gradient for gradient in gradients if isinstance(gradient, tf.Tensor)]
        if dense:
            return [self.of(gradient) for gradient in dense]
        sparse = [gradient.values for gradient in gradients if isinstance(gradient, tf.IndexedSlices)]
        return [_sum([self.of(values), float(_has_rows(values))]) for values in sparse]

    def of(self, tensor: tf.Tensor) -> Degree:
        """Returns a tensor's degree: 0 for a mean over rows, 1 for a sum; NaN if mixed, `None` if unknown."""
        waiting = [tensor.op]
        while waiting:
            operation = waiting[-1]
            ahead = [] if operation in self._known else self._unknown_inputs(operation)
            if ahead:
                waiting += ahead
                continue
            waiting.pop()
            if operation not in self._known:
                self._known[operation] = self._degrees(operation)
        return self._known[tensor.op][tensor.value_index]

    def _unknown_inputs(self, operation: tf.Operation) -> list[tf.Operation]:
        if operation.type in _WITHOUT or all(self._is_exchanged(output) for output in operation.outputs):
            return []
        return [each.op for each in self._inputs(operation) if each.op not in self._known]

    def _inputs(self, operation: tf.Operation) -> list[tf.Tensor]:
        if operation.type == "Placeholder":
            outside = captured(operation)
            return [outside] if tf.is_symbolic_tensor(outside) else []
        return [each for each in operation.inputs if each.dtype != tf.resource]

    def _degrees(self, operation: tf.Operation) -> list[Degree]:
        outputs = operation.outputs
        if operation.type in _CALLS | _BRANCHES:
            return self._of_bodies(operation)
        return [0.0 if self._is_exchanged(output) else self._degree(operation, output) for output in outputs]

    def _is_exchanged(self, tensor: tf.Tensor) -> bool:
        """Whether replicas have exchanged a tensor, which later operations may have passed on unchanged."""
        while tensor.ref() not in self._exchanged:
            if tensor.op.type not in ("Identity", "Cast", "EnsureShape", "IdentityN"):
                return False
            tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
        return True

    def _degree(self, operation: tf.Operation, output: tf.Tensor) -> Degree:
        kind = operation.type
        if output.ref() in self._grown:
            return 1.0
        if kind in ("Shape", "Size"):
            (given,) = operation.inputs
            return float(_has_rows(given) and not self._is_exchanged(given))
        if kind in _WITHOUT or output.dtype in (tf.bool, tf.string, tf.resource):
            return 0.0
        if output.dtype.is_integer and kind in ("StridedSlice", "GatherV2") and not _takes_length(operation):
            return 0.0
        if kind in _OF_FIRST:
            return _sum([self._degree_of_input(operation, 0), float(_adds_up_where_reshaped(operation))])
        if kind in _OF_ONE or kind == "IdentityN":
            return self._degree_of_input(operation, _OF_ONE.get(kind, output.value_index))
        # If the output is float, integer inputs are shapes, axes and indices. Bool inputs are conditions.
        numbers = [each for each in self._inputs(operation) if each.dtype != tf.bool]
        inputs = [each for each in numbers if each.dtype.is_integer == output.dtype.is_integer]
        degrees = [self._known[each.op][each.value_index] for each in inputs]
        if not degrees:
            return 0.0
        if kind in _ALIKE and not (kind == "Pack" and output.dtype.is_integer):
            return _alike(inputs, degrees)
        if kind in _QUOTIENTS:
            return _sum([degrees[0], _times(-1, degrees[1])])
        if kind in _OF_CONSTANTS:
            return 0.0 if not any(degrees) and None not in degrees else None
        if kind in _POWERS:
            degrees = [_times(power, degree) for power, degree in zip(_POWERS[kind], degrees, strict=False)]
        degree = _of_one_gradient(degrees) if kind in _LOOPS else _sum(degrees)
        return _sum([degree, float(_adds_up_rows(operation, inputs, output))])

    def _degree_of_input(self, operation: tf.Operation, place: int) -> Degree:
        given = operation.inputs[place]
        return 0.0 if given.dtype == tf.resource else self._known[given.op][given.value_index]

    def _of_bodies(self, operation: tf.Operation) -> list[Degree]:
        """Returns the degrees of the outputs of a called function, or of a branch, by the degrees of the inputs."""
        given = list(operation.inputs)[1 if operation.type in _BRANCHES else 0 :]
        found = []
        for body in tf_internals.bodies_of_call(operation):
            within = RowDegrees(
                self._exchanged, self._grown
            )  # Only for this call: another call may pass other degrees.
            for inside, outside in zip(body.inputs, given, strict=False):
                known = self._known.get(outside.op)
                within._known[inside.op] = [0.0 if known is None else known[outside.value_index]]
            found.append([within.of(output) for output in body.outputs])
        if not found:
            return [None] * len(operation.outputs)
        return [_only(each) for each in zip(*found, strict=True)] or [None] * len(operation.outputs)


def _has_rows(tensor: tf.Tensor) -> bool:
    return tensor.shape.rank is None or None in tensor.shape.as_list()


def _batch_axis(shape: tf.TensorShape) -> int | None:
    return None if shape.rank is None else next((i for i, size in enumerate(shape) if size is None), None)


def _sum(degrees: Collection[Degree]) -> Degree:
    return None if None in degrees else sum(degree for degree in degrees if degree is not None)


def _times(power: float, degree: Degree) -> Degree:
    return 0.0 if power == 0 else None if degree is None else power * degree


def _only(degrees: Collection[Degree]) -> Degree:
    """Returns the degree that all `degrees` have in common; NaN if they differ, `None` if one is unknown."""
    if None in degrees:
        return None
    return next(iter(degrees)) if len(set(degrees)) == 1 else math.nan


def _of_one_gradient(degrees: Collection[Degree]) -> Degree:
    """Returns the degree of a loop's outputs, if its inputs have degree 0 or one other degree, that of gradients."""
    grown = {degree for degree in degrees if degree != 0}
    return _only(grown) if grown else 0.0


def _alike(inputs: Sequence[tf.Tensor], degrees: Sequence[Degree]) -> Degree:
    """Returns the degree that all terms of a sum have. Constants do not count: they guard divisions, or are zeros."""
    pairs = zip(inputs, degrees, strict=True)
    counted = [degree for each, degree in pairs if each.op.type not in ("Const", "ZerosLike", "Fill")]
    return _only(counted) if counted else 0.0


def _takes_length(operation: tf.Operation) -> bool:
    """Whether a slice of a shape may contain the number of rows. True if the input is no shape."""
    shape = operation.inputs[0].op
    if shape.type != "Shape":
        return True
    axis, begin = _batch_axis(shape.inputs[0].shape) or 0, _static(operation.inputs[1])
    if begin is None:
        return True
    places = np.ravel(begin)
    if operation.type == "StridedSlice" and not operation.get_attr("shrink_axis_mask"):
        end = _static(operation.inputs[2])
        rank = shape.inputs[0].shape.rank
        if end is None or rank is None:
            return True
        first = 0 if operation.get_attr("begin_mask") else int(places[0])
        last = rank if operation.get_attr("end_mask") else int(np.ravel(end)[0])
        places = np.arange(rank)[first:last]
    return bool(np.any(places == axis))


_FOLDED: dict[str, Callable[..., Any]] = {"AddV2": np.add, "Sub": np.subtract, "FloorMod": np.mod}


def _static(tensor: tf.Tensor) -> Any:
    """Returns the value of a constant, or of arithmetic on axes, as in the gradient of a mean; `None` if unknown."""
    value = tf.get_static_value(tensor)
    if value is None and tensor.op.type in ("Cast", "Identity"):
        return _static(tensor.op.inputs[0])
    if value is None and tensor.op.type in _FOLDED:
        terms = [_static(each) for each in tensor.op.inputs]
        return None if any(term is None for term in terms) else _FOLDED[tensor.op.type](*terms)
    return value


def _adds_up_rows(operation: tf.Operation, inputs: Sequence[tf.Tensor], output: tf.Tensor) -> bool:
    """Whether an operation sums over rows of the batch: it has an input with rows and an output without."""
    kind = operation.type
    rows = any(each.dtype == tf.variant or (_has_rows(each) and each.dtype.is_floating) for each in inputs)
    if kind == "Sum":
        axes, axis = _static(operation.inputs[1]), _batch_axis(inputs[0].shape)
        if axes is not None and inputs[0].shape.rank is not None:
            return axis is not None and axis in np.ravel(axes) % max(inputs[0].shape.rank, 1)
        return inputs[0].shape.rank is None and output.shape.rank is not None and not _has_rows(output)
    gives = output.dtype == tf.variant or _has_rows(output)  # A list of tensors has no shape.
    return rows and not gives and not (kind.startswith("FusedBatchNorm") and "Grad" not in kind)


def _adds_up_where_reshaped(operation: tf.Operation) -> bool:
    """Whether a reshape follows a sum over the rows of the batch.

    The axes of the sum may be unknown. If rows go into the sum and the reshape has none, the sum was over the rows.
    """
    if operation.type != "Reshape" or _has_rows(operation.outputs[0]):
        return False
    before = operation.inputs[0].op
    return before.type == "Sum" and _static(before.inputs[1]) is None and _has_rows(before.inputs[0])
