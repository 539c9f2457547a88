"""One process of many that a scheduler has started, without a word of the others."""

import os
from collections.abc import Mapping

from absl import logging

from tfdist.cluster.address import is_digits

# How many processes were started together, and which of them this one is. Slurm sets SLURM_NTASKS and SLURM_PROCID in a
# batch script too, which is one process.
_SCHEDULERS = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}


def warn_if_one_of_many(environ: Mapping[str, str] | None = None) -> None:
    """Warns, once, if this process has no TF_CONFIG and was started together with others: each would train alone."""
    environ = os.environ if environ is None else environ
    if environ.get("TF_CONFIG", "").strip():
        return
    for count, rank in _SCHEDULERS.items():
        many = environ.get(count, "")
        if is_digits(many) and int(many) > 1:
            logging.log_first_n(
                logging.WARNING,
                "%s is %s, but TF_CONFIG is unset: each of the %s processes trains alone. To train together, give each "
                "a TF_CONFIG with the addresses of all, and %s as its task's index, before the strategy is made; or "
                "give the strategy a cluster_resolver.",
                1,
                *(count, many, many, rank),
            )
            return
