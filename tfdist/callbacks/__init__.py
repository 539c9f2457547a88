"""Keras callbacks for many workers: those that write files do so once, on the chief."""

from tfdist.callbacks.chief_only import ChiefOnly, CSVLogger, ModelCheckpoint, TensorBoard

__all__ = ["CSVLogger", "ChiefOnly", "ModelCheckpoint", "TensorBoard"]
