"""What happens inside one training step: strategy → collective → codec."""

from tfdist.strategies.mirrored import MirroredStrategy
from tfdist.strategies.multi_worker import MultiWorkerMirroredStrategy

__all__ = ["MirroredStrategy", "MultiWorkerMirroredStrategy"]
