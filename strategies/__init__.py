"""The strategies, and all that happens inside one step of Keras: weighting, exchange and compression of gradients."""

from tfdist.strategies.loss_weight import step_losses_are
from tfdist.strategies.mirrored import MirroredStrategy
from tfdist.strategies.multi_worker import MultiWorkerMirroredStrategy

__all__ = ["MirroredStrategy", "MultiWorkerMirroredStrategy", "step_losses_are"]
