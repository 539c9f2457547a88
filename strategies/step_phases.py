"""Divides the time from the end of a training step to the end of the next one into phases, by the clocks in the graph.

    END ── callbacks ── ASKED ── AGREES ── BEGIN ─ forward ─ LOSS ── SHARE ─ backward ─ GRADIENTS ── END
             outside      input   exchange      compute      exchange      compute        exchange

Exchanges include the wait for other replicas; the last one also the update of the variables and the logs. Does not load
TensorFlow.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class StepMoments:
    """Moments of one training step of a replica, in seconds since the epoch; 0 if the moment has never come.

    Attributes:
      ended_before: End of the step before.
      asked: The graph asks for input.
      agrees: The worker has its input, and asks the others whether any worker has data left.
      begin: The batch has arrived.
      loss: The loss is known, and the rows of all replicas are asked for.
      share: These rows have arrived.
      gradients: All gradients are computed.
      end: The report of the step has arrived.
    """

    ended_before: float
    asked: float
    agrees: float
    begin: float
    loss: float
    share: float
    gradients: float
    end: float


@dataclasses.dataclass(frozen=True)
class StepPhases:
    """Seconds that a worker spent between the ends of two training steps, by phase. Their sum is the whole time.

    Attributes:
      outside: Outside of the step: callbacks, validation, saves, and other Python code. Without an earlier step, 0.
      input: Waiting for the input.
      compute: Computing, without waits for replicas.
      exchange: Exchanges that computation does not hide, the wait for other replicas, and the update of the variables.
    """

    outside: float
    input: float
    compute: float
    exchange: float

    @property
    def seconds(self) -> float:
        """The whole time."""
        return self.outside + self.input + self.compute + self.exchange


def divide_on_gpu(computed_before: float, asked: float, begin: float, computed: float) -> StepPhases:
    """Returns the phases between the moments at which a GPU has computed a step and the next one.

    TensorFlow asks for the input of a step, and launches its kernels, while the GPU computes the step before. So only
    the time in which the GPU has no kernels counts as outside of the step or as input.

    Args:
      computed_before: When the GPU has computed the step before, in seconds since the epoch; 0 without such a step.
      asked: When the graph asks for input.
      begin: When the batch has arrived.
      computed: When the GPU has computed the step.
    """
    since = computed_before or min(asked or begin, begin)
    begin = min(max(begin, since), computed)
    asked = min(max(asked, since), begin) if asked else begin
    return StepPhases(asked - since, begin - asked, computed - begin, 0.0)


def divide(step: StepMoments) -> StepPhases:
    """Returns the phases of a step. A moment that did not come in this step takes no time.

    If the graph did not say when it asked for input, that time counts as outside of the step.
    """
    begin = step.begin
    since = step.ended_before or min(step.asked or begin, begin)
    asked = step.asked if since <= step.asked <= begin else begin
    agrees = step.agrees if asked <= step.agrees <= begin else begin
    waited = step.share - step.loss if begin <= step.loss <= step.share <= step.end else 0.0
    computed = step.gradients if begin <= step.gradients <= step.end else step.end
    compute = max(computed - begin - waited, 0.0)
    outside = max(asked - since, 0.0)
    return StepPhases(outside, agrees - asked, compute, max(step.end - begin - compute, 0.0) + begin - agrees)
