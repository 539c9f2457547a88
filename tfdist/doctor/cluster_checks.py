"""Policy of `tfdist doctor`: whether all workers are there, at addresses that all others reach. No network."""

import collections
import itertools
from collections.abc import Iterator

from tfdist.cluster.address import is_loopback, split_address
from tfdist.doctor.check import FAILURE, OK, WARNING, Check
from tfdist.doctor.job_facts import JobFacts, Participant, joined
from tfdist.doctor.worker_facts import MISMATCH, NO_SUCH_NAME, OTHER_TASK, REFUSED, SILENT, STRANGER, UNREACHABLE
from tfdist.network.connection_acceptor import printable
from tfdist.readable_numbers import counted

_MOST_SHOWN = 8

_REMEDIES = {
    NO_SUCH_NAME: "Correct the name in every TF_CONFIG, make it resolve there, or give an IP address",
    REFUSED: "Start `tfdist doctor` there at the same time, or give all tasks a longer --timeout",
    SILENT: "Start that host, or let its firewall and those between admit TCP port {port} from all workers",
    UNREACHABLE: "Start that host, and correct its address, its network interface or the routes",
    STRANGER: "End the program that holds port {port} there, or give this worker another port in every TF_CONFIG",
    MISMATCH: "Give all workers the same secret, and certificates of the same authority or none",
    OTHER_TASK: "Give all tasks the same addresses, and each its own index",
}


def check_cluster(job: JobFacts) -> Iterator[Check]:
    """Checks the cluster specs, tasks, addresses, ports and connections."""
    for check in (_specs, _tasks, _names, _own_addresses, _machine_addresses, _own_ports, _connections, _other_ports):
        yield from check(job)


def _specs(job: JobFacts) -> Iterator[Check]:
    """All tasks need the same addresses, and several hosts need addresses other than loopback."""
    unlike = [each for each in job.participants if each.facts.addresses != job.addresses]
    for each in unlike:
        theirs = tuple(map(printable, each.facts.addresses))
        text = f"{_task(job, each)} has another cluster than {job.name(job.worker)}: {_differences(job, theirs)}"
        remedy = "Give all tasks the same addresses in the same order"
        yield Check("specification", FAILURE, text, remedy, _seat(each))
    loopback = all(is_loopback(split_address(address)[0]) for address in job.addresses)
    networks = {each.facts.network for each in job.participants}
    missing = [worker for worker in range(len(job.addresses)) if worker not in job.seats]
    if loopback and (len(networks) > 1 or (missing and not _reached(job, missing))):
        text = (
            "all addresses of TF_CONFIG are loopback, such as localhost, where each host reaches only itself, and "
            f"{job.names(missing) if missing else 'the tasks'} cannot be reached"
        )
        remedy = "Give each worker an address of its host that all others can reach"
        yield Check("specification", FAILURE, text, remedy, tuple(missing))
    elif not unlike:
        counted = f"{len(job.addresses)} worker{'s' if len(job.addresses) > 1 else ''}"
        yield Check("specification", OK, f"{counted}, {job.name(0)} is the chief")


def _tasks(job: JobFacts) -> Iterator[Check]:
    """All tasks must take part, each with its own index."""
    claims = collections.defaultdict(list)
    for each in job.participants:
        if each.facts.addresses == job.addresses:
            claims[each.facts.worker].append(each)
    doubled = {worker: tasks for worker, tasks in claims.items() if len(tasks) > 1}
    for worker, tasks in doubled.items():
        places = joined([_place(each) for each in tasks])
        free = [other for other in range(len(job.addresses)) if other not in claims]
        remedy = f"Give one of them index {free[0]}" if free else "End one of them"
        yield Check("tasks", FAILURE, f"{len(tasks)} tasks have index {worker}: {places}", remedy, (worker,))
    missing = [worker for worker in range(len(job.addresses)) if worker not in job.seats] if job.is_joint else []
    for worker in missing:
        yield _missing_task(job, worker)
    if not doubled and not missing and job.is_joint:
        waited = f"all have come after {job.waited_seconds:.1f} s" if len(job.addresses) > 1 else "this one has come"
        yield Check("tasks", OK, waited)


def _missing_task(job: JobFacts, worker: int) -> Check:
    contacts = [contact for each in job.participants if (contact := each.contact(worker))]
    kinds = collections.Counter(contact.problem for contact in contacts)
    port = split_address(job.addresses[worker])[1]
    if "" in kinds:
        text = f"{job.name(worker)} answers a peer, but it has no connection with the chief in either direction"
        return Check("tasks", FAILURE, text, _REMEDIES[SILENT].format(port=port), (worker,))
    kind = kinds.most_common(1)[0][0]
    detail = next(contact.detail for contact in contacts if contact.problem == kind)
    text = f"{job.name(worker)} did not take part within {job.waited_seconds:.0f} s: {printable(detail)}"
    return Check("tasks", FAILURE, text, _REMEDIES[kind].format(port=port), (worker,))


def _names(job: JobFacts) -> Iterator[Check]:
    """Each host name must resolve on each host, to different addresses for different workers."""
    problems: dict[tuple[str, str], list[Participant]] = collections.defaultdict(list)
    is_local = all(is_loopback(split_address(address)[0]) for address in job.addresses)
    for each in job.participants:
        for host, problem in each.facts.name_problems.items():
            problems[host, problem].append(each)
        own = split_address(each.facts.addresses[each.facts.worker])[0] if _is_sound(each) else ""
        for host, addresses in each.facts.names.items():
            if not is_local and host != own and not is_loopback(host) and all(map(is_loopback, addresses)):
                problems[host, f"it means loopback there ({', '.join(addresses)})"].append(each)
    for (host, problem), tasks in problems.items():
        owners = [worker for worker, address in enumerate(job.addresses) if split_address(address)[0] == host]
        where = "on all hosts" if len(tasks) == len(job.participants) else f"on {_tasks_named(job, tasks)}"
        name = f"the host name {printable(host)} of {job.names(owners)}" if owners else f"the name {printable(host)}"
        text = f"{name} does not resolve {where}: {printable(problem)}"
        if problem.startswith("it means"):
            text = f"{name} leads to the wrong host {where}: {printable(problem)}"
        remedy = "Correct the name in every TF_CONFIG, add it to the name service or /etc/hosts, or give an IP address"
        yield Check("names", FAILURE, text, remedy, tuple(owners))
    same = list(_same_endpoints(job))
    for first, second, address in same:
        text = f"{job.name(first)} and {job.name(second)} are the same address {address}"
        yield Check("names", FAILURE, text, "Give each worker its own host or port", (first, second))
    if not problems and not same:
        yield Check("names", OK, "all host names resolve on all hosts")


def _same_endpoints(job: JobFacts) -> Iterator[tuple[int, int, str]]:
    """Finds workers with different addresses that mean the same IP address and port."""
    names = job.participants[0].facts.names
    for first, second in itertools.combinations(range(len(job.addresses)), 2):
        (host, port), (other_host, other_port) = (split_address(job.addresses[each]) for each in (first, second))
        both = [address for address in names.get(host, ()) if address in names.get(other_host, ())]
        if both and port == other_port and host != other_host:
            yield first, second, f"{both[0]}:{port}"


def _own_addresses(job: JobFacts) -> Iterator[Check]:
    """The address of a task must be one of its machine, unless peers reach the task there, as behind NAT."""
    bad = False
    for each in filter(_is_sound, job.participants):
        facts = each.facts
        host = split_address(facts.addresses[facts.worker])[0]
        resolved = facts.names.get(host, ())
        if not resolved or any(address in facts.local_addresses or is_loopback(address) for address in resolved):
            continue
        if any(
            contact.token == facts.token and not contact.problem and contact.peer == facts.worker
            for other in job.participants
            for contact in other.contacts
        ):
            continue
        bad = True
        shown = ", ".join(facts.local_addresses[:_MOST_SHOWN]) or "none"
        text = f"{host} is no address of the machine of {_task(job, each)}, which has {shown}"
        yield Check("own address", FAILURE, text, _right_place(job, each), _seat(each))
    if not bad:
        yield Check("own address", OK, "the address of each task leads to its machine")


def _right_place(job: JobFacts, task: Participant) -> str:
    for worker, address in enumerate(job.addresses):
        resolved = task.facts.names.get(split_address(address)[0], ())
        if worker != task.facts.worker and set(resolved) & set(task.facts.local_addresses):
            return f"Start this task as worker {worker}, which has its address in TF_CONFIG"
    return "Start the task on the host that TF_CONFIG names, or put an address of this machine into every TF_CONFIG"


def _machine_addresses(job: JobFacts) -> Iterator[Check]:
    """No two machines of the job may have the same IP address."""
    meant = {address for each in job.participants for found in each.facts.names.values() for address in found}
    owners: dict[str, dict[str, Participant]] = collections.defaultdict(dict)
    for each in job.participants:
        for address in meant & set(each.facts.local_addresses):
            owners[address].setdefault(each.facts.network, each)
    for address, tasks in sorted(owners.items()):
        if len(tasks) > 1:
            named = _tasks_named(job, list(tasks.values()))
            text = f"the machines of {named} both have the IP address {address}, so connections reach either of them"
            remedy = f"Remove {address} from the machine that should not have it (`ip address del`)"
            seats = tuple(seat for each in tasks.values() for seat in _seat(each))
            yield Check("own address", FAILURE, text, remedy, seats)


def _own_ports(job: JobFacts) -> Iterator[Check]:
    bad = [each for each in job.participants if each.facts.port_problem]
    for each in bad:
        text = f"{_task(job, each)}: {_shown(each.facts.port_problem)}"
        yield Check("own port", FAILURE, text, "", _seat(each))
    if not bad:
        yield Check("own port", OK, "each task can listen at its port")


def _connections(job: JobFacts) -> Iterator[Check]:
    """Each worker must reach each peer; workers that nobody reaches are missing tasks."""
    total, failing = 0, 0
    for worker in range(len(job.addresses)):
        tried = {
            seat: contact
            for seat, each in job.seats.items()
            if seat != worker and each.facts.addresses == job.addresses and (contact := each.contact(worker))
        }
        total += len(tried)
        if not any(not contact.problem for contact in tried.values()) and worker not in job.seats and job.is_joint:
            failing += len(tried)  # `_tasks` names the worker.
            continue
        by_kind = collections.defaultdict(list)
        for seat, contact in tried.items():
            if contact.problem:
                by_kind[contact.problem].append((seat, contact.detail))
        for kind, found in by_kind.items():
            failing += len(found)
            yield _closed(job, worker, kind, found, len(found) == len(tried))
    if not failing and total:
        yield Check("connections", OK, f"all {total} connections between workers can be opened")


def _closed(job: JobFacts, worker: int, kind: str, found: list[tuple[int, str]], is_all: bool) -> Check:
    seats = [seat for seat, _ in found]
    port = split_address(job.addresses[worker])[1]
    sources = "no worker" if is_all and len(seats) > 1 else job.names(seats)
    verb = "can connect" if is_all and len(seats) > 1 else "cannot connect"
    back = [seat for seat in seats if (there := job.seats.get(worker)) and _is_sound_contact(there, seat)]
    also = f", although {job.name(worker)} can connect to {'them' if len(back) > 1 else 'it'}" if back else ""
    text = f"{sources} {verb} to {job.name(worker)}: {printable(found[0][1])}{also}"
    remedy = _REMEDIES[kind].format(port=port)
    if kind == SILENT and back:
        remedy = f"Let the firewalls of {job.name(worker)} and on the way admit TCP port {port} from {job.names(seats)}"
    return Check("connections", FAILURE, text, remedy, (worker, *seats))


def _other_ports(job: JobFacts) -> Iterator[Check]:
    """Exchanges use free ports of the hosts. If those are closed, TensorFlow's slower exchange takes over."""
    closed = collections.defaultdict(list)
    opened = 0
    for seat, each in job.seats.items():
        for contact in each.contacts:
            if contact.other_port is False and not contact.problem and contact.peer != seat:
                closed[contact.peer].append(seat)
            opened += contact.other_port is True and contact.peer != seat
    for worker, seats in closed.items():
        text = f"{job.names(seats)} can reach only the port of {job.name(worker)} in TF_CONFIG, not its free ports"
        remedy = "Open all TCP ports between the workers; otherwise TensorFlow carries the gradients, which is slower"
        yield Check("free ports", WARNING, text, remedy, (worker, *seats))
    if not closed and opened:
        yield Check("free ports", OK, "workers also reach each other at free ports, for the exchange of gradients")


def _reached(job: JobFacts, workers: list[int]) -> bool:
    return any(not contact.problem for each in job.participants for contact in each.contacts if contact.peer in workers)


def _is_sound(task: Participant) -> bool:
    return 0 <= task.facts.worker < len(task.facts.addresses)


def _is_sound_contact(task: Participant, peer: int) -> bool:
    contact = task.contact(peer)
    return contact is not None and not contact.problem


def _seat(task: Participant) -> tuple[int, ...]:
    return () if task.seat is None else (task.seat,)


def _task(job: JobFacts, task: Participant) -> str:
    return _place(task) if task.seat is None else job.name(task.seat)


def _tasks_named(job: JobFacts, tasks: list[Participant]) -> str:
    return joined([_task(job, each) for each in tasks[:_MOST_SHOWN]])


def _place(task: Participant) -> str:
    """Names a task by its machine, where its place in TF_CONFIG is in doubt."""
    return f"one on {printable(task.facts.host)} ({', '.join(map(printable, task.facts.local_addresses[:2]))})"


def _differences(job: JobFacts, theirs: tuple[str, ...]) -> str:
    if len(theirs) != len(job.addresses):
        return f"{counted(len(theirs), 'worker')} instead of {len(job.addresses)}"
    pairs = list(zip(itertools.count(), theirs, job.addresses, strict=False))
    found = [f"worker {worker} at {other} instead of {own}" for worker, other, own in pairs if other != own]
    return ", ".join(found[:_MOST_SHOWN])


def _shown(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text[:1000])
