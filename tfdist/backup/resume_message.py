"""The log message that tells at a restart how a `fit` continues from a commit."""

import math

from tfdist.backup.snapshot import Checkpoint
from tfdist.readable_numbers import counted


def resume_message(checkpoint: Checkpoint, finished: int, last: float, first: int, *, is_done_before: bool) -> str:
    """Returns the log message about how a `fit` continues from a commit.

    Args:
      checkpoint: The commit.
      finished: Number of `fit`s that this process has finished.
      last: Number of epochs of this `fit`.
      first: The argument `initial_epoch` of `fit`.
      is_done_before: Whether the `fit` was finished before and is skipped.
    """
    then, path = checkpoint.progress, checkpoint.commit.path
    if is_done_before and then.fit > finished:
        return (
            f"Restored {path}, of fit {then.fit + 1} of this program, and skipped fit {finished + 1}: no backup of its "
            f"end was kept, so code before fit {then.fit + 1} sees later weights. delete_checkpoint=False keeps such "
            "backups."
        )
    if is_done_before:
        return f"Restored {path}, the end of fit {finished + 1} of this program, which was finished before."
    if then.is_beyond(last):
        return (
            f"Restored {path}, which was made after {counted(then.batch, 'batch')} of epoch {then.epoch + 1}, but "
            f"this fit ends with epoch {last}: it trains nothing, and the backups stay."
        )
    if then.stops and not then.batch:
        return (
            f"Restored {path}: a callback stopped this fit at the end of epoch {then.epoch}, so it is done. Without "
            "that folder it trains further, from an earlier backup or from the start."
        )
    if not then.batch and then.epoch >= last:
        return f"Restored {path}, the end of this fit, so it trains nothing. Without that folder it starts over."
    instead = f", although initial_epoch is {first}" if first > then.epoch else ""
    if not then.batch:
        return f"Restored {path}: continues with epoch {then.epoch + 1}{instead}."
    if then.batch >= (then.steps_per_epoch or math.inf):
        following = "which is the last" if then.epoch + 1 >= last else f"with epoch {then.epoch + 2}"
        return f"Restored {path}: continues after the last batch of epoch {then.epoch + 1}, {following}{instead}."
    return f"Restored {path}: continues after {counted(then.batch, 'batch')} of epoch {then.epoch + 1}{instead}."
