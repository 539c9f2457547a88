"""Keras callbacks for many workers: those that write files do so once, on the chief; and logs of the traffic."""

from tfdist.callbacks.chief_only import ChiefOnly, CSVLogger, ModelCheckpoint, TensorBoard
from tfdist.callbacks.traffic import Traffic

__all__ = ["CSVLogger", "ChiefOnly", "ModelCheckpoint", "TensorBoard", "Traffic"]
