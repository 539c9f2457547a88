"""Names of what a worker can be doing, for events, times, messages about stalls, and telemetry.

Does not load TensorFlow.
"""

START = "start-up"
"""From the start of the process to its first call of Keras."""

BUILDING = "building"
"""Python builds a model, and workers compare it."""

TRACING = "tracing"
"""Python traces a function, or TensorFlow optimizes its graph."""

INPUT = "input"
"""The worker waits for a batch."""

COMPUTE = "compute"
"""The worker computes, and waits for no other replica."""

EXCHANGE = "exchange"
"""Exchanges that computation does not hide, waits for other replicas, and the update of the variables."""

CALLBACK = "callback"
"""Python code between two steps of a call: callbacks, and anything else that the program or Keras does there."""

VALIDATION = "validation"
"""Validation, evaluation or prediction."""

SAVE = "save"
"""The worker waits for a backup."""

RESTORE = "restore"
"""The worker restores a backup."""

OUTSIDE = "outside"
"""The script runs outside of Keras' calls."""

OWN_LOOP = "a training loop of your own"
"""The script runs a training loop without `fit`. Its steps, and the code between them, are not known one by one."""

MEETING = "the beginning of a call"
"""The exchange of all workers before the first step of a call, where early workers wait."""

AGREEING = "agreement on a backup"
"""The worker asks its peers whether to save."""

WAITING = "waiting for the chief"
"""The worker waits for a decision of the chief."""

ITS_END = "its program has ended"
"""The worker waits until its peers end, too."""
