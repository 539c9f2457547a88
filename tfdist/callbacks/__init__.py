"""Keras callbacks for many workers: backups, files written by the chief only, logs of traffic and of balance."""

from tfdist.callbacks.backup_and_restore import BackupAndRestore
from tfdist.callbacks.balance import Balance
from tfdist.callbacks.chief_only import ChiefOnly, CSVLogger, ModelCheckpoint, TensorBoard
from tfdist.callbacks.traffic import Traffic

__all__ = ["BackupAndRestore", "Balance", "CSVLogger", "ChiefOnly", "ModelCheckpoint", "TensorBoard", "Traffic"]
