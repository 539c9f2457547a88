"""Policy of `tfdist doctor`: whether workers have equal versions, scripts, settings, devices and clocks."""

import collections
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.doctor.check import FAILURE, OK, WARNING, Check
from tfdist.doctor.job_facts import JobFacts, verb
from tfdist.network.connection_acceptor import printable
from tfdist.readable_numbers import counted, counted_or_no

_MUST_BE_EQUAL = ("tfdist", "tensorflow", "keras")
_CLOCK_SECONDS = 1.0


def check_equality(job: JobFacts) -> Iterator[Check]:
    """Checks what must or should be equal on all workers."""
    for check in (_versions, _scripts, _settings, _security, _devices, _clocks):
        yield from check(job)


def _groups(values: Mapping[int, Any]) -> list[tuple[Any, list[int]]]:
    """Returns the different values with their workers, the most frequent first, then that of the lowest worker."""
    workers: dict[Any, list[int]] = collections.defaultdict(list)
    for worker, value in sorted(values.items()):
        workers[value].append(worker)
    return sorted(workers.items(), key=lambda item: (-len(item[1]), item[1][0]))


def _have(job: JobFacts, workers: list[int]) -> str:
    return f"{job.names(workers)} {verb(workers, 'has', 'have')}"


def _rest(job: JobFacts, usual: list[int]) -> str:
    return f"the {len(usual)} others have" if len(usual) > 1 else f"{job.name(usual[0])} has"


def _versions(job: JobFacts) -> Iterator[Check]:
    by_worker = {worker: present.facts.versions for worker, present in job.seats.items()}
    packages = list(dict.fromkeys(name for each in by_worker.values() for name in each))
    are_equal = True
    for package in packages:
        (usual, usual_workers), *others = _groups({worker: each.get(package, "") for worker, each in by_worker.items()})
        for version, workers in others:
            are_equal = False
            text = f"{_have(job, workers)} {_version(package, version)}, {_rest(job, usual_workers)} {_text(usual)}"
            verdict = FAILURE if package in _MUST_BE_EQUAL else WARNING
            yield Check("versions", verdict, text, "Install the same versions on all workers", tuple(workers))
        if not usual and not others:
            are_equal = False
            yield Check("versions", FAILURE, f"{package} is not installed", f"Install {package}", tuple(usual_workers))
    if are_equal and by_worker:
        first = next(iter(by_worker.values()))
        yield Check("versions", OK, ", ".join(f"{name} {printable(first[name])}" for name in packages))


def _version(package: str, version: str) -> str:
    return f"{package} {printable(version)}" if version else f"no {package}"


def _text(version: str) -> str:
    return printable(version) or "none"


def _scripts(job: JobFacts) -> Iterator[Check]:
    scripts = {worker: present.facts.script for worker, present in job.seats.items() if present.facts.script}
    for worker, script in scripts.items():
        if not script.startswith("sha256:"):
            text = f"{job.name(worker)}: {printable(script)}"
            yield Check("script", FAILURE, text, "Copy the script to this host, at the same path", (worker,))
    hashes = {worker: script for worker, script in scripts.items() if script.startswith("sha256:")}
    if not hashes:
        return
    (usual, usual_workers), *others = _groups(hashes)
    for script, workers in others:
        text = f"{_have(job, workers)} another script ({script[:15]}…) than {job.names(usual_workers)}"
        text += f" ({usual[:15]}…)"
        yield Check("script", FAILURE, text, "Copy the same script to all hosts", tuple(workers))
    if not others and len(hashes) == len(scripts):
        yield Check("script", OK, f"equal on all workers ({usual[:15]}…)")


def _settings(job: JobFacts) -> Iterator[Check]:
    by_worker = {worker: present.facts.settings for worker, present in job.seats.items()}
    names = sorted({name for each in by_worker.values() for name in each})
    different = False
    for name in names:
        (_, usual_workers), *others = _groups({worker: each.get(name) for worker, each in by_worker.items()})
        for value, workers in others:
            different = True
            what = "another value" if value else "no value"
            text = f"{_have(job, workers)} {what} of the environment variable {printable(name)} than the others"
            if len(usual_workers) == 1:
                text = text.replace("the others", job.name(usual_workers[0]))
            remedy = f"Set {printable(name)} alike on all workers, or nowhere"
            yield Check("settings", WARNING, text, remedy, tuple(workers))
    if not different:
        yield Check("settings", OK, "TF_*, TFDIST_*, XLA_* and KERAS_* variables are equal on all workers")


def _security(job: JobFacts) -> Iterator[Check]:
    (usual, usual_workers), *others = _groups({worker: each.facts.security for worker, each in job.seats.items()})
    for security, workers in others:
        text = f"{_have(job, workers)} {_protection(security)}, {_rest(job, usual_workers)} {_protection(usual)}"
        remedy = "Give all workers the same TFDIST_SECRET and TFDIST_TLS_* files, or none"
        yield Check("secret and TLS", FAILURE, text, remedy, tuple(workers))
    if not others:
        yield Check("secret and TLS", OK, f"all workers have {_protection(usual)}")


def _protection(security: str) -> str:
    if security == "none":
        return "no secret and no TLS"
    return printable(security).replace("secret", "a secret")


def _devices(job: JobFacts) -> Iterator[Check]:
    problem = False
    for worker, present in job.seats.items():
        if present.facts.gpu_problem:
            problem = True
            text = f"{job.name(worker)}: {printable(present.facts.gpu_problem)}"
            yield Check(
                "devices", FAILURE, text, "Repair the driver, or hide the GPUs by CUDA_VISIBLE_DEVICES=-1", (worker,)
            )
    (usual, usual_workers), *others = _groups({worker: each.facts.gpus for worker, each in job.seats.items()})
    for gpus, workers in others:
        problem = True
        theirs, rest = counted_or_no(gpus, "GPU"), counted_or_no(usual, "GPU")
        text = f"{_have(job, workers)} {theirs}, {_rest(job, usual_workers)} {rest}"
        remedy = "Hide GPUs by CUDA_VISIBLE_DEVICES, or use `tfdist run --gpus-per-worker`, for equally many on each"
        yield Check("devices", WARNING, text, remedy, tuple(workers))
    if not problem:
        cores = sorted({present.facts.cores for present in job.seats.values()})
        most = counted(cores[-1], "logical processor")
        each = most if len(cores) == 1 else f"{cores[0]} to {most}"
        yield Check("devices", OK, f"each worker sees {counted_or_no(usual, 'GPU')} and {each}")


def _clocks(job: JobFacts) -> Iterator[Check]:
    ahead = {0: 0.0} if job.is_joint else {job.worker: 0.0}
    reporting = job.seats.get(job.worker)
    for worker in range(len(job.addresses)):
        contact = reporting.contact(worker) if reporting else None
        present = job.seats.get(worker)
        back = present.contact(job.worker) if present else None
        if contact and not contact.problem:
            ahead[worker] = contact.clock_ahead
        elif back and not back.problem:
            ahead[worker] = -back.clock_ahead
    if len(ahead) < 2:
        return
    usual = statistics.median_low(ahead.values())
    wrong = {worker: value - usual for worker, value in ahead.items() if abs(value - usual) > _CLOCK_SECONDS}
    for worker, value in wrong.items():
        reference = job.name(next(other for other in ahead if other != worker)) if len(ahead) == 2 else "the others"
        text = (
            f"the clock of {job.name(worker)} is {abs(value):.0f} s {'ahead of' if value > 0 else 'behind'} {reference}"
        )
        remedy = "Let a time service set the clocks of all hosts (chrony, systemd-timesyncd)"
        yield Check("clocks", WARNING, text, remedy, (worker,))
    if not wrong:
        most = max(ahead.values()) - min(ahead.values())
        yield Check("clocks", OK, f"they differ by at most {1e3 * most:.1f} ms")
