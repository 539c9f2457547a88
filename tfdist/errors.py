"""Error classes of tfdist.

Each class also extends the built-in error that a caller would expect, so `except ValueError` keeps working. Each
message states the rule, the value received and the remedy.
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
    "VersionError",
    "WorkerError",
    "WorkerLostError",
    "WorkerTimeoutError",
]


class TfdistError(Exception):
    """Base class of all errors of tfdist."""


# Autograph raises errors of converted code again. It keeps the type of an error only with this `__init__`.
TfdistError.__init__ = Exception.__init__  # type: ignore[method-assign]  # in the class it would have no type


class AuditError(TfdistError, RuntimeError):
    """An epoch missed or repeated examples, but should contain each example once."""


class BackupError(TfdistError, RuntimeError):
    """A backup cannot be saved or restored because of its path, another job, another model or another version."""


WAIT_FOR_CHIEF = "All workers wait while the chief works alone"
"""First words of the error of a worker that waited for a failing chief. The chief's failure is the cause."""

CHIEF_SAYS = "The chief reports"
"""First words of the error of a worker that repeats the chief's error."""


CHIEF_IS_GONE = "Worker 0, which averages the weights, is gone"
"""First words of the error of a worker that goes on without lost workers, but has lost worker 0."""


class TFConfigError(TfdistError, ValueError):
    """TF_CONFIG is not a cluster spec that this process can join."""


class ClusterError(TfdistError, RuntimeError):
    """Workers disagree or cannot be started, or one worker alone does what all workers must do together."""


class WorkerLostError(ClusterError):
    """A worker is late, unresponsive or unreachable. Another attempt may succeed."""


class CompiledCollectivesError(TfdistError, ValueError):
    """`jit_compile=True` is set, but XLA cannot compile the step of several replicas."""


class LossReductionError(TfdistError, ValueError):
    """The reduction of the losses in a training step does not show how much weight each replica has."""


class LossScaleError(TfdistError, RuntimeError):
    """With a loss scaler, each replica would decide by itself whether to exchange its gradients."""


class PositionError(TfdistError, ValueError):
    """A saved position in a dataset belongs to other data, or to the same data in other global batches."""


class ScopeError(TfdistError, ValueError):
    """A model or optimizer was made outside the scope of the strategy that trains it."""


class SourceError(TfdistError, ValueError):
    """An example cannot be read: its record is broken, its file has changed, or it differs from other examples."""


class VersionError(TfdistError, ImportError):
    """The installed TensorFlow or Keras is known to fail, or lacks a private name that tfdist uses."""


class WorkerError(TfdistError, RuntimeError):
    """A worker process started by tfdist failed; the message holds its traceback and output."""


class WorkerTimeoutError(TfdistError, TimeoutError):
    """A worker process started by tfdist did not finish before its deadline."""
