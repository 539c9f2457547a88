"""Keras callbacks for many workers: backups, files written by the chief only, logs and checks of the training."""

from tfdist.callbacks.adaptive_batch import AdaptiveBatch
from tfdist.callbacks.audit import Audit
from tfdist.callbacks.backup_and_restore import BackupAndRestore
from tfdist.callbacks.balance import Balance
from tfdist.callbacks.chief_only import ChiefOnly, CSVLogger, ModelCheckpoint, TensorBoard
from tfdist.callbacks.telemetry_callback import Telemetry
from tfdist.callbacks.traffic import Traffic

__all__ = [
    "AdaptiveBatch",
    "Audit",
    "BackupAndRestore",
    "Balance",
    "CSVLogger",
    "ChiefOnly",
    "ModelCheckpoint",
    "Telemetry",
    "TensorBoard",
    "Traffic",
]
