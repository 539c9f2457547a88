"""Policy: compares codecs for a job, recommends one, and follows it to more replicas. No TensorFlow and no files."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from tfdist.plan.exchange_costs import NONE, ExchangeCosts
from tfdist.plan.planned_buckets import Gradient
from tfdist.plan.step_prediction import PlannedStep, Prediction, predict_step
from tfdist.readable_numbers import percent, step_time

LARGEST_CURVE = 4096
# From the exact exchange to codecs that defer most to later steps. The first of about equally fast ones is recommended.
_BY_LOSS = (NONE, "float16", "bfloat16", "int8", "int4", "powersgd", "topk", "sign")
_ABOUT = 1.02

GroupSize = Callable[[int], int | None]  # From the number of replicas; `None` for an exchange in one level.


@dataclasses.dataclass(frozen=True)
class Job:
    """A job to plan.

    Attributes:
      replicas: Number of replicas.
      link_bits: Bits per second that a replica can send.
      compute_seconds: Forward and backward pass and update of a replica alone.
      forward_share: Part of this time before the first gradient.
      gradients: The gradients of the model by name of the codec that encodes them, `"none"` among the names.
      group_size: Returns the size of groups for a number of replicas.
    """

    replicas: int
    link_bits: float
    compute_seconds: float
    forward_share: float
    gradients: Mapping[str, Sequence[Gradient]]
    group_size: GroupSize = lambda replicas: None

    def step(self, codec: str, replicas: int, costs: ExchangeCosts) -> Prediction:
        """Predicts the step with a codec."""
        groups = self.group_size(replicas)
        step = PlannedStep(self.compute_seconds, self.gradients[codec], codec, self.forward_share, group_size=groups)
        return predict_step(step, replicas, self.link_bits, costs)


@dataclasses.dataclass(frozen=True)
class JobPlan:
    """The predictions that `tfdist plan` prints.

    Attributes:
      predictions: The step with each codec.
      recommended: The prediction of the recommended codec.
      curve: Pairs of predictions, without a codec and with the recommended one, for 1, 2, 4, ... replicas.
      in_groups: The best prediction with exchanges in two levels, if its step is shorter by more than 2 %.
    """

    predictions: Sequence[Prediction]
    recommended: Prediction
    curve: Sequence[tuple[Prediction, Prediction]]
    in_groups: Prediction | None = None


def plan_job(job: Job, costs: ExchangeCosts, other_groups: GroupSize | None = None) -> JobPlan:
    """Plans a job: predicts the step with each codec, and recommends the most exact one of the fastest.

    Args:
      job: The job.
      costs: Costs of the exchange beside the link.
      other_groups: Sizes of groups to compare the job with. By default it is not compared.
    """
    predictions = _predictions(job, costs)
    recommended = _recommended(predictions)
    counts = [1 << power for power in range(LARGEST_CURVE.bit_length())]
    curve = [(job.step(NONE, each, costs), job.step(recommended.codec, each, costs)) for each in counts]
    in_groups = None
    if other_groups is not None:
        in_groups = _recommended(_predictions(dataclasses.replace(job, group_size=other_groups), costs))
        if recommended.seconds <= _ABOUT * in_groups.seconds:
            in_groups = None
    return JobPlan(predictions, recommended, curve, in_groups)


def assumptions(job: Job, costs: ExchangeCosts) -> list[str]:
    """Returns the assumptions of the predictions."""
    groups = job.group_size(job.replicas)
    levels = (
        [] if groups is None else [f"Replicas exchange in two levels, {job.replicas} of them in groups of {groups}."]
    )
    return [
        f"Costs: {costs.source}.",
        *levels,
        f"A replica alone needs {step_time(job.compute_seconds)} for a step. Gradients appear after "
        f"{percent(job.forward_share)} of it, from the last layer on, in proportion to their bytes.",
        "All replicas are equally fast, and each has its own link. The network behind the links carries all of it at "
        "once. Gradients of embeddings travel whole.",
        "Workers have one device each, and exchange over their own connections. GPUs exchange over TensorFlow's "
        "collectives, which may need other times.",
    ]


def _predictions(job: Job, costs: ExchangeCosts) -> list[Prediction]:
    return [job.step(codec, job.replicas, costs) for codec in job.gradients]


def _recommended(predictions: Sequence[Prediction]) -> Prediction:
    limit = _ABOUT * min(each.seconds for each in predictions)
    return min((each for each in predictions if each.seconds <= limit), key=_loss)


def _loss(prediction: Prediction) -> int:
    name = prediction.codec.partition("(")[0]
    return _BY_LOSS.index(name) if name in _BY_LOSS else len(_BY_LOSS)
