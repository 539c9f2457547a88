"""Models and callbacks of another Keras, such as tf_keras, which are refused by name."""

from typing import Any

import keras


class ForKerasModels:
    """Mixed into a Keras callback, before it in the bases: it is refused by a model that is none of `keras`."""

    def set_model(self, model: keras.Model) -> None:
        """Takes the model.

        Raises:
          TypeError: If it is a model of another Keras.
        """
        check_is_keras_model(self, model)
        super().set_model(model)  # type: ignore[misc]


def check_is_keras_model(callback: Any, model: Any) -> None:
    """Refuses a callback that was given to the `fit` of a model of another Keras.

    Raises:
      TypeError: With the remedy.
    """
    if not isinstance(model, keras.Model):
        other = next((each.__module__.split(".")[0] for each in type(model).__mro__ if "keras" in each.__module__), "")
        raise TypeError(
            f"The callbacks of tfdist are for models of `keras` {keras.__version__}, but {type(callback).__name__} was "
            f"given to a model of {other or type(model).__module__!r}. Build the model with `import keras`, and unset "
            "TF_USE_LEGACY_KERAS, by which `tf.keras` is tf_keras; or leave the callback out."
        )
