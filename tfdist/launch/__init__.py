"""Workers started on this machine: `tfdist run`, the supervisor behind it and its group of processes."""

from tfdist.launch.worker_group import WorkerExit, WorkerGroup

__all__ = ["WorkerExit", "WorkerGroup"]
