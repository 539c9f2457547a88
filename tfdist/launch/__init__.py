"""Starts and supervises workers on this machine: `tfdist run`, its supervisor and its worker processes."""

from tfdist.launch.worker_group import WorkerExit, WorkerGroup

__all__ = ["WorkerExit", "WorkerGroup"]
