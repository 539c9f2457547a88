"""Handles faults of workers during training: workers that do not start, stall, die, are preempted or leave."""

from tfdist.faults.fault_deadlines import FaultTolerance

__all__ = ["FaultTolerance"]
