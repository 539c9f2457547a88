"""The chief's part of `tfdist doctor`: waits for all tasks, asks for their facts, and has them measure in turn."""

import collections
import contextlib
import dataclasses
import pathlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tfdist.doctor.doctor_channel import COMMANDS
from tfdist.doctor.doctor_task import CALL_ERRORS, DoctorTask, participant_of
from tfdist.doctor.job_facts import JobFacts, Participant
from tfdist.doctor.machine_facts import existing
from tfdist.doctor.pairings import disjoint_rounds, rounds, turns
from tfdist.doctor.speed_checks import late_pairs, reference_rate, slow_links, slow_workers
from tfdist.errors import ClusterError
from tfdist.network.handshake import NotOursError

_HEAD_START_SECONDS = 1.0  # Workers usually connect to the chief by themselves.
_RETRY_SECONDS = 0.2
_ANSWER_SECONDS, _MOST_ANSWER_SECONDS = 5.0, 15.0
_END_SECONDS = 1.0
_COMPUTE_SECONDS, _MOST_TURNS = 0.3, 8
_COMPUTE_TRIES, _TRIP_TRIES, _MOST_TRIP_ROUNDS = 3, 3, 4
_LINK_SECONDS, _LEAST_LINK_SECONDS, _ALL_LINKS_SECONDS = 0.3, 0.08, 4.0
_AGAIN_SECONDS = 2.0
_MOST_LOCAL = 4  # Links within a single host are only shown.


class ChiefExamination:
    """Examines the job from the chief's task.

    Args:
      task: The chief's task.
    """

    def __init__(self, task: DoctorTask):
        self._task = task
        self._asked: dict[str, int] = {}
        self._pool = ThreadPoolExecutor(max(2, task.spec.num_workers), "tfdist-ask")

    def run(self) -> JobFacts:
        """Returns all facts, within the time limit of the task."""
        task = self._task
        self._wait_for_all()
        waited = time.monotonic() - task.start
        with self._marker() as marker:
            participants = self._facts(marker)
        job = JobFacts(0, task.spec.training_addresses, participants, waited)
        job = dataclasses.replace(job, round_trips=self._round_trips(job))
        job = dataclasses.replace(job, speeds=self._speeds(job))
        return dataclasses.replace(job, links=self._links(job))

    def tell_end(self, exit_code: int) -> None:
        """Tells all tasks that the check is over, with their exit code."""
        task, end = self._task, {"end": exit_code}
        answers = self._ask(dict.fromkeys(task.channels, end), _END_SECONDS)

        def tell_again(worker: int) -> None:
            with contextlib.suppress(*CALL_ERRORS), task.call(worker, COMMANDS, _END_SECONDS) as channel:
                channel.ask(end, _END_SECONDS)

        deaf = [worker for token, worker in self._asked.items() if token not in answers]
        list(self._pool.map(tell_again, deaf))
        self._pool.shutdown(wait=False)

    @property
    def _patience(self) -> float:
        """How long to wait for an answer: longer on a busy machine, if the time limit allows it."""
        left = self._task.deadline - time.monotonic()
        return max(_ANSWER_SECONDS, min(left, _MOST_ANSWER_SECONDS))

    def _wait_for_all(self) -> None:
        """Waits until there is a channel to each worker, or the time to wait is over."""
        task = self._task
        for peer in range(1, task.spec.num_workers):
            threading.Thread(target=self._call, args=(peer,), name="tfdist-call", daemon=True).start()
        while len(task.channels) < task.spec.num_workers - 1 and time.monotonic() < task.join_deadline:
            time.sleep(0.02)

    def _call(self, peer: int) -> None:
        """Connects to a worker that has not connected to the chief by itself."""
        task = self._task
        time.sleep(_HEAD_START_SECONDS)
        while time.monotonic() < task.join_deadline:
            if peer in [channel.peer.worker for channel in list(task.channels.values())]:
                return
            with contextlib.suppress(*CALL_ERRORS):
                channel = task.call(peer, COMMANDS, _ANSWER_SECONDS)
                if not task.keep(channel):
                    channel.close()
                return
            time.sleep(_RETRY_SECONDS)

    def _ask(self, requests: Mapping[str, dict[str, Any]], seconds: float) -> dict[str, dict[str, Any]]:
        """Sends requests to tasks at the same time, and returns the answers that come, by token of the task."""
        task = self._task

        def ask(token: str, request: dict[str, Any]) -> dict[str, Any] | None:
            try:
                if token == task.token:
                    return task.answer(request)
                return task.channels[token].ask(request, seconds)
            except (OSError, NotOursError, KeyError):
                task.drop(token)  # A late answer would be taken for that to the next request.
                return None

        asked = {token: self._pool.submit(ask, token, request) for token, request in requests.items()}
        answers = {token: future.result() for token, future in asked.items()}
        return {token: answer for token, answer in answers.items() if answer is not None}

    @contextlib.contextmanager
    def _marker(self) -> Iterator[str | None]:
        """Makes a file in the backup folder during the block, to find out whether all workers see the same folder.

        As the folder need not exist before training, the file may be in the one in which it would be made.
        """
        folder = self._task.options.request.backups
        path = existing(folder) / f".tfdist-doctor-{self._task.token}" if folder else pathlib.Path()
        made = None
        with contextlib.suppress(OSError):
            if folder:
                path.open("x").close()
                made = path.name
        try:
            yield made
        finally:
            if made:
                path.unlink(missing_ok=True)

    def _facts(self, marker: str | None) -> tuple[Participant, ...]:
        """Returns the facts of all tasks that answer, the chief's first, each with its place in TF_CONFIG."""
        task = self._task
        self._asked = {token: channel.peer.worker for token, channel in task.channels.items()}
        begin = {"begin": True, "marker": marker}
        answers = self._ask(dict.fromkeys([task.token, *task.channels], begin), _ANSWER_SECONDS + self._patience)
        read = {token: participant_of(answer) for token, answer in answers.items()}
        found = [each for each in read.values() if each is not None and each.facts.token in read]
        if read.get(task.token) is None:
            raise ClusterError(f"{task.spec.describe()} could not describe its machine in time: try again.")
        return seated(found, task.spec.training_addresses, task.token)

    def _round_trips(self, job: JobFacts) -> Mapping[tuple[int, int], float]:
        """Returns the shortest round trips of all contacts. Measures late ones again."""
        trips = {
            (worker, contact.peer): contact.round_trip
            for worker, present in job.seats.items()
            for contact in present.contacts
            if not contact.problem and contact.peer != worker and present.facts.worker == worker
        }
        for _ in range(_TRIP_TRIES):
            for pairs in disjoint_rounds(late_pairs(trips))[:_MOST_TRIP_ROUNDS]:
                callers = {job.seats[pair[0]].facts.token: pair for pair in pairs}
                requests = {token: {"trip": peer} for token, (_, peer) in callers.items()}
                for token, answer in self._ask(requests, self._patience).items():
                    if isinstance(trip := answer.get("round_trip"), float):
                        trips[callers[token]] = min(trip, trips.get(callers[token], trip))
        return trips

    def _speeds(self, job: JobFacts) -> Mapping[int, float]:
        """Has the workers compute, those of a machine in turn, and measures slow workers again."""
        machines = collections.defaultdict(list)
        for worker, present in sorted(job.seats.items()):
            machines[present.facts.machine].append(worker)
        share = {worker: len(group) for group in machines.values() for worker in group}
        best: dict[int, float] = {}
        for turn in turns(machines.values(), _MOST_TURNS):
            best |= self._compute(job, turn, share)
        for _ in range(_COMPUTE_TRIES):
            slow = slow_workers(best, 1.1)
            for turn in turns([[each for each in group if each in slow] for group in machines.values()], _MOST_TURNS):
                peers = {each: _fast_peer(machines[job.seats[each].facts.machine], slow, best) for each in turn}
                measured = self._compute(job, [*turn, *(peer for peer in peers.values() if peer is not None)], share)
                for worker, peer in peers.items():
                    best[worker] = max(best[worker], _comparable(measured, worker, peer, best))
        return best

    def _compute(self, job: JobFacts, workers: Sequence[int], share: Mapping[int, int]) -> Mapping[int, float]:
        requests = {
            job.seats[worker].facts.token: {
                "compute": _COMPUTE_SECONDS,
                "threads": max(1, job.seats[worker].facts.cores // share[worker]),
            }
            for worker in workers
        }
        answers = self._ask(requests, self._patience)
        rates = {worker: answers.get(job.seats[worker].facts.token, {}).get("rate") for worker in workers}
        return {worker: rate for worker, rate in rates.items() if isinstance(rate, float)}

    def _links(self, job: JobFacts) -> Mapping[tuple[int, int], float]:
        """Has pairs of hosts measure their link, each host one at a time. Measures slow links again."""
        by_network: dict[str, int] = {}
        for worker in sorted(job.seats):
            by_network.setdefault(job.seats[worker].facts.network, worker)
        are_several = len(by_network) > 1
        members = list(by_network.values()) if are_several else sorted(job.seats)[:_MOST_LOCAL]
        order = rounds(members)[: int(_ALL_LINKS_SECONDS / (2 * _LEAST_LINK_SECONDS))]
        seconds = min(_LINK_SECONDS, _ALL_LINKS_SECONDS / (2 * max(1, len(order))))
        links: dict[tuple[int, int], float] = {}
        for pairs in order:
            self._measure(job, pairs, seconds, links)
        end = time.monotonic() + _AGAIN_SECONDS
        while are_several and time.monotonic() < end:
            slow = slow_links(links, reference_rate(list(links.values())))
            again = disjoint_rounds(sorted({(min(link), max(link)) for link in slow}))
            if not again:
                break
            for pairs in again:
                self._measure(job, pairs, _LINK_SECONDS, links)
        return links

    def _measure(
        self, job: JobFacts, pairs: Sequence[tuple[int, int]], seconds: float, links: dict[tuple[int, int], float]
    ) -> None:
        """Measures disjoint pairs at the same time, and keeps the best rate of each direction."""
        callers: dict[str, tuple[int, int]] = {}
        for pair in pairs:
            for caller, peer in (pair, pair[::-1]):
                contact = job.seats[caller].contact(peer)
                if contact and not contact.problem and job.seats[caller].facts.worker == caller:
                    callers[job.seats[caller].facts.token] = caller, peer
                    break
        requests = {token: {"link": peer, "seconds": seconds} for token, (_, peer) in callers.items()}
        for token, answer in self._ask(requests, 2 * seconds + self._patience).items():
            caller, peer = callers[token]
            for link, name in (((caller, peer), "sent"), ((peer, caller), "received")):
                if isinstance(rate := answer.get(name), float):
                    links[link] = max(rate, links.get(link, 0.0))


def _fast_peer(group: Sequence[int], slow: Sequence[int], best: Mapping[int, float]) -> int | None:
    """Returns the fastest worker of a machine, if one is not slow."""
    return max((each for each in group if each in best and each not in slow), key=best.__getitem__, default=None)


def _comparable(measured: Mapping[int, float], worker: int, peer: int | None, best: Mapping[int, float]) -> float:
    """Returns the speed of a worker, without the influence of load on its machine if a peer there computed too."""
    speed = measured.get(worker, 0.0)
    if peer is None or not measured.get(peer):
        return speed
    return best[peer] * min(1.0, speed / measured[peer])


def seated(found: Sequence[Participant], addresses: Sequence[str], own_token: str) -> tuple[Participant, ...]:
    """Gives each participant its place in the chief's TF_CONFIG: by its address, or by the index that it claims."""
    chief = next((each for each in found if each.facts.token == own_token), None)
    contacts = sorted(chief.contacts if chief else (), key=lambda contact: not contact.problem)  # Sound ones win.
    at_address = {contact.token: contact.peer for contact in contacts if contact.token} | {own_token: 0}
    taken = set(at_address.values())
    placed = []
    for each in sorted(found, key=lambda one: (one is not chief, one.facts.worker)):
        seat = at_address.get(each.facts.token)
        if seat is None and each.facts.worker not in taken and 0 <= each.facts.worker < len(addresses):
            seat = each.facts.worker
            taken.add(seat)
        placed.append(dataclasses.replace(each, seat=seat))
    return tuple(placed)
