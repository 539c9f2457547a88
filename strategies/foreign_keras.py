"""Models and callbacks of another Keras, such as tf_keras, which are refused by name."""

from typing import Any

import keras


class ForKerasModels:
    """Mixed into a Keras callback, before it in the bases: it refuses a model of tf_keras."""

    def set_model(self, model: keras.Model) -> None:
        """Takes the model.

        Raises:
          TypeError: If it is a model of tf_keras.
        """
        check_is_keras_model(self, model)
        super().set_model(model)  # type: ignore[misc]


def check_is_keras_model(callback: Any, model: Any) -> None:
    """Refuses a callback that was given to the `fit` of a model of tf_keras.

    Raises:
      TypeError: With the remedy.
    """
    packages = {each.__module__.split(".")[0] for each in type(model).__mro__}
    if "tf_keras" in packages:
        raise TypeError(
            f"The callbacks of tfdist are for models of `keras` {keras.__version__}, but {type(callback).__name__} was "
            f"given to a model of tf_keras. Build the model with `import keras`, and unset "
            "TF_USE_LEGACY_KERAS, by which `tf.keras` is tf_keras; or leave the callback out."
        )
