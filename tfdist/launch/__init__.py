"""Workers started on this machine: `tfdist run` and the group of processes behind it."""

from tfdist.launch.group import WorkerExit, WorkerGroup

__all__ = ["WorkerExit", "WorkerGroup"]
