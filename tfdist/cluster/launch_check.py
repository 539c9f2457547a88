"""Detects a process that a scheduler started as one of many, but that has no TF_CONFIG."""

import os
from collections.abc import Mapping

from absl import logging

from tfdist.cluster.address import is_digits
from tfdist.cluster.schedulers import MPI_RANKS

# Variables with the number of processes, and with this process's rank. Not SLURM_NTASKS: Slurm also sets it in a batch
# script, which is a single process.
_SCHEDULERS = {**MPI_RANKS, "SLURM_STEP_NUM_TASKS": "SLURM_PROCID"}
_SCHEDULERS["PMI_SIZE"] = _SCHEDULERS.pop("PMI_SIZE")  # Last: Slurm with PMI sets this variable too.
_SLURM = "`srun tfdist run --slurm train.py`"
_MPI = "`mpirun -H node1,node2 tfdist run --mpi node1,node2 train.py`"


def warn_if_one_of_many(
    environ: Mapping[str, str] | None = None, *, starts_workers: bool = False, never_joins: bool = False
) -> None:
    """Warns once if a scheduler started this process as one of many without TF_CONFIG: each would train alone.

    Args:
      environ: The environment, `os.environ` if None.
      starts_workers: Whether this process starts workers. Its own TF_CONFIG is ignored then.
      never_joins: Whether this process uses `MirroredStrategy`, perhaps on purpose to train alone.
    """
    environ = os.environ if environ is None else environ
    if environ.get("TF_CONFIG", "").strip() and not starts_workers:
        return
    for count, rank in _SCHEDULERS.items():
        many = environ.get(count, "")
        if is_digits(many) and int(many) > 1:
            start = _SLURM if count.startswith("SLURM") else _MPI
            why = "--workers starts a whole job in each process: " if starts_workers else "TF_CONFIG is unset: "
            instead = (
                f"To train together, start {start}; or, before the strategy is made, give each process a TF_CONFIG "
                f"with all addresses and {rank} as the task's index; or give the strategy a cluster_resolver."
            )
            if never_joins:
                why, instead = "", f"To train together, use MultiWorkerMirroredStrategy under {start}."
            what = f"{why}each of the {many} {'jobs' if starts_workers else 'processes'} trains alone"
            logging.log_first_n(logging.WARNING, "%s is %s, but %s. %s", 1, count, many, what, instead)
            return
