"""Policy of `tfdist doctor`: whether processors, memory and disks suffice. No disk access here."""

import collections
import errno
import os
from collections.abc import Iterator

from tfdist.doctor.check import FAILURE, OK, WARNING, Check
from tfdist.doctor.job_facts import JobFacts, Participant, verb
from tfdist.doctor.worker_facts import FolderFacts
from tfdist.network.connection_acceptor import printable
from tfdist.readable_numbers import counted

MIB = 1 << 20
LEAST_MEMORY, _ENOUGH_MEMORY = 256 * MIB, 640 * MIB  # TensorFlow alone needs some 400 MB.
LEAST_DISK, _ENOUGH_DISK = 32 * MIB, 512 * MIB
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


def check_resources(job: JobFacts) -> Iterator[Check]:
    """Checks processors, memory, disks and the folders that workers write to."""
    for check in (_processors, _memory, _folders, _remote_backups, _shared_backups):
        yield from check(job)


def memory_verdict(free: int, workers: int) -> str:
    """Returns the verdict on the free memory of a machine that a number of workers share."""
    each = free // max(1, workers)
    return FAILURE if each < LEAST_MEMORY else WARNING if each < _ENOUGH_MEMORY else OK


def disk_verdict(folder: FolderFacts) -> str:
    """Returns the verdict on a folder that a worker writes to."""
    if folder.problem or folder.free_bytes < LEAST_DISK:
        return FAILURE
    return WARNING if folder.free_bytes < _ENOUGH_DISK else OK


def _processors(job: JobFacts) -> Iterator[Check]:
    """A note only, since tests and demonstrations run so, and train correctly."""
    by_machine = collections.defaultdict(list)
    for worker, present in job.seats.items():
        by_machine[present.facts.machine].append(worker)
    for workers in by_machine.values():
        facts = [job.seats[worker].facts for worker in workers]
        processors = {number for each in facts for number in each.processors}
        if all(each.processors for each in facts) and len(workers) > len(processors):
            have = counted(len(processors), "logical processor")
            text = f"{len(workers)} workers on {printable(facts[0].host)} share {have}, so each waits for the others"
            yield Check("processors", OK, text, workers=tuple(workers))


def _memory(job: JobFacts) -> Iterator[Check]:
    share = collections.Counter(present.facts.network for present in job.seats.values())
    short, frees = False, []
    for worker, present in job.seats.items():
        free, here = present.facts.free_memory, share[present.facts.network]
        if free < 0:
            continue
        frees.append(free // here)
        verdict = memory_verdict(free, here)
        if verdict != OK:
            short = True
            among = f" for {here} workers" if here > 1 else ""
            text = f"{job.name(worker)} has {_size(free)} of free memory{among}"
            remedy = f"Use fewer workers there, end other programs, or raise the limit to {_size(_ENOUGH_MEMORY)} each"
            yield Check("memory", verdict, text, remedy, (worker,))
    if frees and not short:
        yield Check("memory", OK, f"at least {_size(min(frees))} are free for each worker")


def _folders(job: JobFacts) -> Iterator[Check]:
    least: dict[str, int] = {}
    bad: set[str] = set()
    for worker, present in job.seats.items():
        for folder in present.facts.folders:
            name, verdict = _check_name(folder), disk_verdict(folder)
            least[name] = min(folder.free_bytes, least.get(name, folder.free_bytes))
            if verdict != OK:
                bad.add(name)
                yield Check(name, verdict, f"{job.name(worker)}: {_text(folder)}", _remedy(folder), (worker,))
    for name in least:
        if name not in bad:
            yield Check(name, OK, f"writable, at least {_size(least[name])} are free")


def _check_name(folder: FolderFacts) -> str:
    return {"backups": "backup folder", "logs": "log folder"}.get(folder.purpose, "disk")


def _text(folder: FolderFacts) -> str:
    where = f"{printable(folder.path)} for {printable(folder.purpose)}"
    if folder.problem:
        return f"{where} cannot be written: {printable(folder.problem)} ({_size(folder.free_bytes)} free)"
    return f"{where} is almost full, {_size(folder.free_bytes)} are free"


def _remedy(folder: FolderFacts) -> str:
    if folder.problem and folder.problem not in _FULL:
        return "Let this user write there (owner, mode, mount options), or give another folder"
    another = "set TMPDIR to another folder" if folder.purpose == "temporary files" else "give another folder"
    return f"Make room on this disk, or {another}"


def _remote_backups(job: JobFacts) -> Iterator[Check]:
    urls = {present.facts.remote_backups for present in job.seats.values() if present.facts.remote_backups}
    for url in sorted(urls):
        remedy = "See that all workers have the right to write there: a short training with this folder tells"
        yield Check("backup folder", WARNING, f"{printable(url)} is on remote storage, which is not checked", remedy)


def _shared_backups(job: JobFacts) -> Iterator[Check]:
    """Workers of several hosts need a backup folder that all see."""
    asked = {worker: present.sees_marker for worker, present in job.seats.items() if present.sees_marker is not None}
    blind = [worker for worker, sees in asked.items() if not sees]
    if blind:
        text = f"{job.names(blind)} {verb(blind, 'does', 'do')} not see the chief's file in the backup folder"
        remedy = "Give a backup folder on storage that all workers share, mounted at this path on all hosts"
        yield Check("shared backups", FAILURE, text, remedy, tuple(blind))
    elif asked and len(job.addresses) > 1:
        yield Check("shared backups", OK, "all workers see the same backup folder")
    elif job.is_joint and len(job.addresses) > 1 and any(_has_backups(present) for present in job.seats.values()):
        text = "whether all workers share the backup folder is not known, since the chief could not make a file there"
        yield Check("shared backups", WARNING, text, "Let the chief write to the folder, and check again")


def _has_backups(present: Participant) -> bool:
    return any(folder.purpose == "backups" for folder in present.facts.folders)


def _size(number: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", 1 << 10)):
        if number >= factor:
            return f"{number / factor:.4g} {unit}"
    return f"{number} bytes"
