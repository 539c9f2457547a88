"""Every error that tfdist raises by itself.

Each is also the built-in that a caller would expect, so `except ValueError` keeps working. A message gives the rule,
what came, and the way out.
"""

__all__ = [
    "ClusterError",
    "CompiledCollectivesError",
    "LossScaleError",
    "ScopeError",
    "TFConfigError",
    "TfdistError",
    "WorkerError",
    "WorkerTimeoutError",
]


class TfdistError(Exception):
    """The base of all errors raised by tfdist."""

    # Autograph raises errors again from converted code, as their own type only if they are made like this.
    __init__ = Exception.__init__


class TFConfigError(TfdistError, ValueError):
    """TF_CONFIG is not a cluster spec that this process can join."""


class ClusterError(TfdistError, RuntimeError):
    """The workers of a cluster do not agree, or cannot be started."""


class CompiledCollectivesError(TfdistError, ValueError):
    """`jit_compile=True` where the platform has no compiled collectives."""


class LossScaleError(TfdistError, RuntimeError):
    """A loss scaler would let each replica decide by itself whether to take part in an exchange."""


class ScopeError(TfdistError, ValueError):
    """A model or optimizer was made outside the scope of the strategy that trains it."""


class WorkerError(TfdistError, RuntimeError):
    """A worker process started by tfdist failed; the message holds its traceback and output."""


class WorkerTimeoutError(TfdistError, TimeoutError):
    """A worker process started by tfdist did not finish before its deadline."""
