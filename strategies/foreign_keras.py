"""Checks by which tfdist's callbacks refuse models of tf_keras."""

from typing import Any

import keras


class ForKerasModels:
    """Mixin that makes a Keras callback refuse models of tf_keras. List it first among the bases."""

    def set_model(self, model: keras.Model) -> None:
        """Sets the model of the callback; see `check_is_keras_model`."""
        check_is_keras_model(self, model)
        super().set_model(model)  # type: ignore[misc]


def check_is_keras_model(callback: Any, model: Any) -> None:
    """Refuses a callback that was passed to the `fit` of a model of tf_keras.

    Raises:
      TypeError: If `model` is a model of tf_keras.
    """
    packages = {each.__module__.split(".")[0] for each in type(model).__mro__}
    if "tf_keras" in packages:
        raise TypeError(
            f"The callbacks of tfdist are for models of `keras` {keras.__version__}, but {type(callback).__name__} was "
            f"given to a model of tf_keras. Build the model with `import keras`, and unset "
            "TF_USE_LEGACY_KERAS, which makes `tf.keras` tf_keras; or leave the callback out."
        )
