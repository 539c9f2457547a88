"""Workers started on this machine: `tfdist run`, the supervisor behind it and its group of processes."""

from tfdist.launch.group import WorkerExit, WorkerGroup

__all__ = ["WorkerExit", "WorkerGroup"]
