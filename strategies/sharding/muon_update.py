"""Muon with sharded state: each replica computes its part of a matrix's momentum, and orthogonalizes the whole."""

from typing import Any

import keras

from tfdist._compat import keras_internals
from tfdist.strategies.step import current_step


def is_muon(optimizer: Any) -> bool:
    """Whether an optimizer updates weights as Keras' `Muon`, which orthogonalizes the momenta of matrices."""
    return isinstance(optimizer, MuonInParts) or keras_internals.updates_as_muon(type(optimizer))


def orthogonalizes(optimizer: Any, variable: Any) -> bool:
    """Whether an optimizer needs the whole momentum of a weight, but each element of it by itself before."""
    return is_muon(optimizer) and keras_internals.is_matrix_of_muon(optimizer, variable)


def refuse_without_paths(optimizer: Any) -> None:
    """Refuses an optimizer that is about to update whole weights and finds their state by paths.

    Raises:
      ValueError: If it is Muon of Keras 3.12.
    """
    if keras_internals.finds_state_by_path(optimizer):
        raise ValueError(
            "Muon of Keras 3.12 needs the paths of Keras' variables, but a strategy gives it TensorFlow's, which have "
            "none. Install Keras 3.13 or newer, or pass model_sharding='optimizer' to the strategy."
        )


class MuonInParts:
    """Mixin for views of `Muon`: gathers the momentum of a matrix, of which each replica has computed its part.

    The gathered momentum travels in place of the weight, which every replica then updates whole. So a step exchanges as
    many bytes as without sharding, and the update has the same bits. If the weight itself is divided, a replica assigns
    its part; see `MatrixPart`.
    """

    def update_step(self, gradient, variable, learning_rate):
        """Updates a weight, and notes which one."""
        update = _sharded_update()
        if update is not None:
            update.updated = variable
        super().update_step(gradient, variable, learning_rate)

    def zeropower_via_newtonschulz5(self, x, steps):
        """Orthogonalizes the whole matrix of which this replica has the part `x`."""
        update = _sharded_update()
        whole = x if update is None else update.gather(keras.ops.convert_to_tensor(x))
        return super().zeropower_via_newtonschulz5(whole, steps)


def _sharded_update():
    step = current_step()
    return None if step is None else step.sharded_update
