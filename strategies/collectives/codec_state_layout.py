"""The layout of codec states in checkpoints: replicas, worker, shapes."""

import json
from typing import Any

import tensorflow as tf


class CodecStateLayout(tf.train.experimental.PythonState):
    """Saves in checkpoints which codec states an `EncodedReducer` has, and refuses checkpoints of other states.

    TensorFlow would restore the variables that fit and ignore the rest, without a message.
    """

    refusal: str | None = None  # The error message for the last restored checkpoint, unless it was accepted.

    def __init__(self, replicas: int, worker: int, shapes: Any):
        self._own = {"replicas": replicas, "worker": worker, "shapes": shapes}

    def serialize(self) -> str:
        """Returns the layout of the codec states (replicas, worker, shapes) as JSON, for the checkpoint."""
        return json.dumps(self._own)

    def deserialize(self, saved: Any) -> None:
        """Raises a ValueError if the layout of codec states in a checkpoint differs from that in this process."""
        there, here = json.loads(saved), json.loads(self.serialize())
        self.refusal = None if there == here else self._refusal_of(there, here)
        self.check()

    def check(self) -> None:
        """Raises a ValueError if the last restored checkpoint was refused, for callers that caught the first error."""
        if self.refusal is not None:
            raise ValueError(self.refusal)

    def _refusal_of(self, there: dict[str, Any], here: dict[str, Any]) -> str:
        unlike = [
            f"{there[key]} {name}" if key != "worker" else f"worker {there[key]}"
            for key, name in (("replicas", "replicas"), ("worker", ""))
            if there[key] != here[key]
        ]
        return (
            "A checkpoint of `strategy.communication` holds the residuals of each replica, so only the same worker can "
            "restore it, with as many replicas and the same compression. This checkpoint is of "
            f"{' and '.join(unlike) or 'other gradients or codecs'}; this process is worker {here['worker']} of a job "
            f"with {here['replicas']} replicas. Save `communication.state()` of every worker and pass all of them to "
            "`communication.redistribute(states)`, which takes any number of replicas; or leave `communication` out of "
            "the checkpoint, and lose the residuals."
        )
