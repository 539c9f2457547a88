"""Every error that tfdist raises by itself.

Each is also the built-in that a caller would expect, so `except ValueError` keeps working. A message gives the rule,
what came, and the way out.
"""

__all__ = [
    "AuditError",
    "BackupError",
    "ClusterError",
    "CompiledCollectivesError",
    "LossReductionError",
    "LossScaleError",
    "PositionError",
    "ScopeError",
    "SourceError",
    "TFConfigError",
    "TfdistError",
    "WorkerError",
    "WorkerLostError",
    "WorkerTimeoutError",
]


class TfdistError(Exception):
    """The base of all errors raised by tfdist."""

    # Autograph raises errors again from converted code, as their own type only if they are made like this.
    __init__ = Exception.__init__


class AuditError(TfdistError, RuntimeError):
    """Examples were missed or repeated in an epoch that should have each once."""


class BackupError(TfdistError, RuntimeError):
    """A backup cannot be made or restored: the place, another job, another model, another version."""


WAIT_FOR_CHIEF = "All workers wait for what the chief does alone"
"""How the error of a worker begins that waits for a chief which fails: that is to blame."""

CHIEF_SAYS = "The chief says"
"""How the error of a worker begins that repeats the chief's."""


class TFConfigError(TfdistError, ValueError):
    """TF_CONFIG is not a cluster spec that this process can join."""


class ClusterError(TfdistError, RuntimeError):
    """The workers of a cluster do not agree, or cannot be started; or one does alone what all have to do."""


class WorkerLostError(ClusterError):
    """A worker did not come in time, does not answer, or cannot be reached: another attempt may find it."""


class CompiledCollectivesError(TfdistError, ValueError):
    """`jit_compile=True` where the platform has no compiled collectives."""


class LossReductionError(TfdistError, ValueError):
    """The losses of a training step are reduced in a way that does not tell how much each replica counts."""


class LossScaleError(TfdistError, RuntimeError):
    """A loss scaler would let each replica decide by itself whether to take part in an exchange."""


class PositionError(TfdistError, ValueError):
    """A saved position in the data belongs to other data, or to other global batches of them."""


class ScopeError(TfdistError, ValueError):
    """A model or optimizer was made outside the scope of the strategy that trains it."""


class SourceError(TfdistError, ValueError):
    """An example cannot be read: its record is broken, its file has changed, or it is unlike the others."""


class WorkerError(TfdistError, RuntimeError):
    """A worker process started by tfdist failed; the message holds its traceback and output."""


class WorkerTimeoutError(TfdistError, TimeoutError):
    """A worker process started by tfdist did not finish before its deadline."""
