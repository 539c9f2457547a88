"""One process of many that a scheduler has started, without a word of the others."""

import os
from collections.abc import Mapping

from absl import logging

from tfdist.cluster.address import is_digits
from tfdist.cluster.schedulers import MPI_RANKS

# How many processes were started together, and which of them this one is. Slurm sets SLURM_NTASKS and SLURM_PROCID in a
# batch script too, which is one process.
_SCHEDULERS = {**MPI_RANKS, "SLURM_STEP_NUM_TASKS": "SLURM_PROCID"}
_SCHEDULERS["PMI_SIZE"] = _SCHEDULERS.pop("PMI_SIZE")  # Last: Slurm sets it, too, where it speaks PMI.
_SLURM = "`srun tfdist run --slurm train.py`"
_MPI = "`mpirun -H node1,node2 tfdist run --mpi node1,node2 train.py`"


def warn_if_one_of_many(
    environ: Mapping[str, str] | None = None, *, starts_workers: bool = False, never_joins: bool = False
) -> None:
    """Warns, once, if this process has no TF_CONFIG and was started together with others: each would train alone.

    Args:
      environ: The environment, `os.environ` if None.
      starts_workers: Whether this process starts workers, whatever its own TF_CONFIG is.
      never_joins: Whether its strategy is `MirroredStrategy`, which may be meant to train alone.
    """
    environ = os.environ if environ is None else environ
    if environ.get("TF_CONFIG", "").strip() and not starts_workers:
        return
    for count, rank in _SCHEDULERS.items():
        many = environ.get(count, "")
        if is_digits(many) and int(many) > 1:
            start = _SLURM if count.startswith("SLURM") else _MPI
            why = "--workers starts a whole job in each: " if starts_workers else "TF_CONFIG is unset: "
            instead = (
                f"To train together, start {start}; or give each a TF_CONFIG with the addresses of all, and {rank} as "
                f"its task's index, before the strategy is made, or the strategy a cluster_resolver."
            )
            if never_joins:
                why, instead = "", f"For one training take MultiWorkerMirroredStrategy, under {start}."
            what = f"{why}each of the {many} {'jobs' if starts_workers else 'processes'} trains alone"
            logging.log_first_n(logging.WARNING, "%s is %s, but %s. %s", 1, count, many, what, instead)
            return
