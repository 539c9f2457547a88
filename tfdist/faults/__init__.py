"""Fault handling: deadlines for workers that do not start, stall, are preempted or leave."""

from tfdist.faults.fault_tolerance import FaultTolerance

__all__ = ["FaultTolerance"]
