"""Policy: which GPUs each worker of this machine gets, by its slot. Starts no process, reads no files."""

from collections.abc import Mapping

from tfdist.errors import ClusterError
from tfdist.launch.gpu_discovery import HIDDEN, VISIBLE_DEVICES, FoundGpus
from tfdist.readable_numbers import counted


def assign_gpus(
    found: FoundGpus, *, workers: int, gpus_per_worker: int, is_by_scheduler: bool = False
) -> tuple[str, ...]:
    """Returns the value of CUDA_VISIBLE_DEVICES for each slot of this machine.

    A slot gets the same GPUs in each attempt, because they depend on nothing but its number.

    Args:
      found: GPUs to assign. Without `gpus_per_worker` they do not matter.
      workers: Number of workers on this machine, at most.
      gpus_per_worker: Number of GPUs of each worker; 0 hides all GPUs.
      is_by_scheduler: Whether each worker is started by itself, so that its GPUs may be its own already.

    Raises:
      ClusterError: If there are fewer GPUs than the workers need, or a worker would get several MIG devices.
    """
    if not gpus_per_worker:
        return (HIDDEN,) * workers
    needed = workers * gpus_per_worker
    if needed > len(found.devices):
        raise ClusterError(_too_few(found, workers, gpus_per_worker, is_by_scheduler))
    assigned = [found.devices[start : start + gpus_per_worker] for start in range(0, needed, gpus_per_worker)]
    if gpus_per_worker > 1 and any(device.startswith("MIG-") for devices in assigned for device in devices):
        raise ClusterError(
            f"A process of CUDA can use one MIG device, got {gpus_per_worker} for each worker: {found.source}. Give "
            f"--gpus-per-worker 1 and more workers, or name whole GPUs in {VISIBLE_DEVICES}."
        )
    return tuple(map(",".join, assigned))


def sharing_warning(environ: Mapping[str, str], *, workers: int, gpus: int) -> str | None:
    """Returns a warning if several workers of this machine would use all of its GPUs together, or None.

    Args:
      environ: Environment of the workers.
      workers: Number of workers on this machine.
      gpus: Number of GPUs on this machine.
    """
    if workers < 2 or not gpus or VISIBLE_DEVICES in environ:
        return None
    which, them = ("the GPU", "it") if gpus == 1 else (f"all {gpus} GPUs", "them")
    each = max(gpus // workers, 1)
    advice = f"Give --gpus-per-worker {each}" if workers <= gpus else f"Start at most {gpus} with --gpus-per-worker 1"
    return (
        f"{workers} workers of this machine share {which}, and the first one takes nearly all memory of {them}. "
        f"{advice} so that each has its own, or --gpus-per-worker 0 to train on CPUs."
    )


def _too_few(found: FoundGpus, workers: int, gpus_per_worker: int, is_by_scheduler: bool) -> str:
    most, each = len(found.devices) // gpus_per_worker, len(found.devices) // workers
    remedies = []
    if most:
        remedies.append(f"start at most {counted(most, 'worker')} here")
    if each:
        remedies.append(f"give --gpus-per-worker {each}")
    if found.is_by_user:
        remedies.append(f"name more GPUs in {VISIBLE_DEVICES}")
        if is_by_scheduler:
            remedies.append("leave the option out if the scheduler has given this worker GPUs of its own")
    *others, last = [*remedies, "give --gpus-per-worker 0 to train on CPUs"]
    advice = f"{', '.join(others)}, or {last}" if others else last
    return (
        f"This machine needs {counted(workers * gpus_per_worker, 'GPU')} for {counted(workers, 'worker')}, but "
        f"{found.source}. {advice[0].upper()}{advice[1:]}."
    )
