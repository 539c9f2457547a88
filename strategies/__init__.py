"""What happens inside one training step: strategy → collective → codec."""

from tfdist.strategies.loss_weight import step_losses_are
from tfdist.strategies.mirrored import MirroredStrategy
from tfdist.strategies.multi_worker import MultiWorkerMirroredStrategy

__all__ = ["MirroredStrategy", "MultiWorkerMirroredStrategy", "step_losses_are"]
