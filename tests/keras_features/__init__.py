"""The table of Keras features: each row is one function that trains, under any strategy or none.

A row returns its results: weights, history, predictions. `test_keras_features.py` runs every row on one device and on
several replicas, and compares the results. Rows import nothing from the test and run in worker processes.
"""

from keras_features import callbacks, calls, inputs, loops, losses, metrics, models, optimizers  # noqa: F401
from keras_features.table import ROWS, Place, outcome, run_row, small_weights_too, start_anew, strategy_of

__all__ = ["ROWS", "Place", "outcome", "run_row", "small_weights_too", "start_anew", "strategy_of"]
