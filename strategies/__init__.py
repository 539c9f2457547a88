"""The strategies, and all that happens inside one step of Keras: weighting, exchange and compression of gradients."""

from tfdist.strategies.local_steps.synchronization import DiLoCo, LocalSGD
from tfdist.strategies.loss_weight import step_losses_are
from tfdist.strategies.memory_estimate import estimate_memory
from tfdist.strategies.mirrored import MirroredStrategy
from tfdist.strategies.multi_worker import MultiWorkerMirroredStrategy

__all__ = [
    "DiLoCo",
    "LocalSGD",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "estimate_memory",
    "step_losses_are",
]
