"""What happens when workers do not come, get stuck, are asked to go, or leave: deadlines for all of it."""

from tfdist.faults.fault_tolerance import FaultTolerance

__all__ = ["FaultTolerance"]
