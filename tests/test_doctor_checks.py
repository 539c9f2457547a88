"""The checks of `tfdist doctor` follow from the collected facts: a sound job has no warning, each fault has its own."""

import dataclasses
import hashlib
import json
import os
import pathlib
import socket
import threading
import types

import pytest

from tfdist.cluster import ClusterSpec, ports
from tfdist.cluster.port_holder import holder_of
from tfdist.doctor import check_table, doctor_command, machine_facts, start_checks
from tfdist.doctor.check import FAILURE, OK, WARNING, Check
from tfdist.doctor.chief_examination import seated
from tfdist.doctor.findings import findings
from tfdist.doctor.job_facts import JobFacts, Participant
from tfdist.doctor.link_rate import rate_of, receive_blocks, send_blocks
from tfdist.doctor.pairings import disjoint_rounds, rounds, turns
from tfdist.doctor.worker_facts import (
    MISMATCH,
    NO_SUCH_NAME,
    OTHER_TASK,
    REFUSED,
    SILENT,
    STRANGER,
    UNREACHABLE,
    FolderFacts,
    PeerContact,
    WorkerFacts,
    from_message,
)
from tfdist.launch.arguments import CommandParser

MIB = 1 << 20
VERSIONS = {"python": "3.12.1", "tfdist": "0.1.0", "tensorflow": "2.20.0", "keras": "3.13.0", "numpy": "2.3.0"}
SCRIPT = "sha256:" + hashlib.sha256(b"script").hexdigest()


def addresses(workers):
    return tuple(f"10.0.0.{worker + 1}:2222" for worker in range(workers))


def facts(worker, workers=4, **changed):
    own = WorkerFacts(
        worker=worker,
        addresses=addresses(workers),
        token=f"token-{worker}",
        host=f"host-{worker}",
        machine=f"machine-{worker}",
        network=f"network-{worker}",
        local_addresses=(f"10.0.0.{worker + 1}",),
        names={f"10.0.0.{each + 1}": (f"10.0.0.{each + 1}",) for each in range(workers)},
        name_problems={},
        port_problem="",
        security="secret",
        versions=VERSIONS,
        script=SCRIPT,
        settings={"TF_XLA_FLAGS": "abcd"},
        remote_backups="",
        folders=(FolderFacts("temporary files", "/tmp", 9000 * MIB, ""), FolderFacts("backups", "/b", 9000 * MIB, "")),
        free_memory=4000 * MIB,
        gpus=0,
        gpu_problem="",
        cores=8,
        processors=tuple(range(8)),
    )
    return dataclasses.replace(own, **changed)


def contact(peer, **changed):
    sound = PeerContact(peer, "", "", f"token-{peer}", 2e-4, 1e-4, True)
    return dataclasses.replace(sound, **changed)


def closed(peer, kind, detail="no answer"):
    return PeerContact(peer, kind, detail)


class Job:
    """The facts of a sound job, for tests to change."""

    def __init__(self, workers=4):
        self.facts = {worker: facts(worker, workers) for worker in range(workers)}
        self.contacts = {(a, b): contact(b) for a in range(workers) for b in range(workers)}
        self.sees = dict.fromkeys(range(workers), True)
        self.links = {(a, b): 9.4e8 for a in range(workers) for b in range(workers) if a != b}
        self.trips = {link: 2e-4 for link in self.links}
        self.speeds = dict.fromkeys(range(workers), 5e10)
        self.addresses = addresses(workers)
        self.more = []

    def change(self, place, **changed):
        self.facts[place] = dataclasses.replace(self.facts[place], **changed)

    def change_all(self, **changed):
        for worker in self.facts:
            self.change(worker, **changed)

    def close(self, source, target, kind=SILENT, detail="no answer"):
        self.contacts[source, target] = closed(target, kind, detail)

    def remove(self, worker, kind=SILENT, detail="no answer"):
        del self.facts[worker]
        for other in self.facts:
            self.close(other, worker, kind, detail)

    def participant(self, worker):
        own = tuple(found for (source, _), found in self.contacts.items() if source == worker)
        return Participant(worker, self.facts[worker], own, self.sees[worker])

    def findings(self):
        present = [self.participant(worker) for worker in self.facts]
        links = {pair: rate for pair, rate in self.links.items() if set(pair) <= set(self.facts)}
        trips = {pair: trip for pair, trip in self.trips.items() if set(pair) <= set(self.facts)}
        speeds = {worker: speed for worker, speed in self.speeds.items() if worker in self.facts}
        return findings(JobFacts(0, self.addresses, (*present, *self.more), 6.0, speeds, links, trips))

    def problems(self):
        return [check for check in self.findings() if check.verdict != OK]

    def problem(self):
        (check,) = self.problems()
        return check


def check_names(check, verdict, name, *words, workers=None):
    assert (check.verdict, check.name) == (verdict, name), check
    shown = f"{check.text}. {check.remedy}"
    assert [word for word in words if word not in shown] == [], shown
    assert check.remedy or name == "own port", check
    assert workers is None or check.workers == workers, check


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 9])
def test_a_sound_job_has_no_warning(workers):
    checks = Job(workers).findings()
    assert {check.verdict for check in checks} == {OK}
    names = [check.name for check in checks]
    assert len(names) == len(set(names)) and {"specification", "tasks", "own port", "versions", "memory"} <= set(names)


def test_workers_of_one_machine_have_no_warning_about_their_links():
    job = Job()
    job.change_all(machine="machine", network="network")
    job.links[0, 1] = 1e6
    assert job.problems() == []


def test_a_port_closed_one_way_is_named_with_both_ends():
    job = Job()
    job.close(0, 2)
    words = ("worker 0 at 10.0.0.1:2222", "cannot connect to worker 2 at 10.0.0.3:2222 on host-2", "can connect to it")
    check_names(job.problem(), FAILURE, "connections", *words, "TCP port 2222", workers=(2, 0))


def test_a_port_closed_for_all_is_named_once():
    job = Job()
    for source in (0, 1, 3):
        job.close(source, 2)
    check_names(job.problem(), FAILURE, "connections", "no worker can connect to worker 2", "although", "TCP port 2222")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (SILENT, ["firewall", "2222"]),
        (REFUSED, ["Start `tfdist doctor` there"]),
        (UNREACHABLE, ["Start that host", "routes"]),
        (STRANGER, ["End the program that holds port 2222"]),
        (NO_SUCH_NAME, ["Correct the name"]),
        (MISMATCH, ["same secret"]),
    ],
)
def test_a_missing_worker_is_named_once_with_a_remedy_for_the_reason(kind, words):
    job = Job()
    job.remove(3, kind, "why it fails")
    check_names(job.problem(), FAILURE, "tasks", "worker 3 at 10.0.0.4:2222", "why it fails", *words, workers=(3,))


def test_a_worker_that_only_a_peer_reaches_is_named():
    job = Job()
    job.remove(3)
    job.contacts[1, 3] = contact(3)
    check = next(check for check in job.problems() if check.name == "tasks")
    check_names(check, FAILURE, "tasks", "worker 3", "answers a peer", "chief")


def test_another_cluster_spec_is_named_with_the_difference():
    job = Job()
    job.change(2, addresses=(*addresses(4)[:3], "10.0.0.9:2222"))
    words = ("worker 2", "another cluster", "worker 3 at 10.0.0.9:2222 instead of 10.0.0.4:2222")
    check_names(job.problem(), FAILURE, "specification", *words)
    job.change(2, addresses=addresses(3))
    check_names(job.problem(), FAILURE, "specification", "worker 2", "3 workers instead of 4")


def test_two_tasks_with_one_index_are_named_with_the_missing_index():
    job = Job()
    job.change(2, worker=1, token="token-2")
    for source in (0, 1, 3):
        job.contacts[source, 2] = contact(2, problem=OTHER_TASK, detail="a task that is worker 1 answers")
    found = {check.name: check for check in job.problems()}
    check_names(found["tasks"], FAILURE, "tasks", "2 tasks have index 1", "host-1", "host-2", "index 2")
    check_names(found["own address"], FAILURE, "own address", "10.0.0.2 is no address", "10.0.0.3", "as worker 2")


def test_loopback_addresses_of_several_hosts_are_refused():
    job = Job()
    job.addresses = tuple(f"127.0.0.1:{2222 + worker}" for worker in range(4))
    names = {"127.0.0.1": ("127.0.0.1",)}
    job.change_all(addresses=job.addresses, names=names)
    check_names(job.problem(), FAILURE, "specification", "loopback", "address of its host")
    for worker in (1, 2, 3):
        job.remove(worker, REFUSED)
    found = job.problems()
    check_names(found[0], FAILURE, "specification", "loopback", "worker 3 at 127.0.0.1:2225")


def test_a_name_that_does_not_resolve_is_named_with_its_worker_and_hosts():
    job = Job()
    job.addresses = ("node1:2222", "node2:2222", *addresses(4)[2:])
    names = {"node1": ("10.0.0.1",), "node2": ("10.0.0.2",), "10.0.0.3": ("10.0.0.3",), "10.0.0.4": ("10.0.0.4",)}
    job.change_all(addresses=job.addresses, names=names)
    assert job.problems() == []
    job.change(3, name_problems={"node2": "Name or service not known"})
    words = ("the host name node2 of worker 1 at node2:2222", "on worker 3", "Name or service not known", "/etc/hosts")
    check_names(job.problem(), FAILURE, "names", *words)


def test_a_peer_name_that_means_loopback_is_named():
    job = Job()
    job.addresses = ("node1:2222", "node2:2222", *addresses(4)[2:])
    names = {"node1": ("10.0.0.1",), "node2": ("10.0.0.2",), "10.0.0.3": ("10.0.0.3",), "10.0.0.4": ("10.0.0.4",)}
    job.change_all(addresses=job.addresses, names=names)
    job.change(1, names={**names, "node2": ("127.0.1.1",)})  # Debian does so with a machine's own name.
    assert job.problems() == []
    job.change(3, names={**names, "node2": ("127.0.1.1",)})
    check_names(job.problem(), FAILURE, "names", "node2", "wrong host", "127.0.1.1", "on worker 3")


def test_two_names_of_one_address_are_refused():
    job = Job(2)
    job.addresses = ("node1:2222", "node2:2222")
    job.change_all(addresses=job.addresses, names={"node1": ("10.0.0.1",), "node2": ("10.0.0.1", "10.0.0.2")})
    check_names(job.problems()[0], FAILURE, "names", "worker 0", "worker 1", "same address 10.0.0.1:2222")


def test_an_address_behind_nat_is_accepted_if_peers_reach_the_task():
    job = Job()
    job.change(1, local_addresses=("192.168.0.7",))
    assert job.problems() == []
    for source in range(4):
        job.close(source, 1)
    assert {check.name for check in job.problems()} == {"own address", "connections"}


def test_one_ip_address_on_two_machines_is_found():
    job = Job()
    job.change(3, local_addresses=("10.0.0.4", "10.0.0.2"))
    check_names(job.problem(), FAILURE, "own address", "worker 1", "worker 3", "10.0.0.2", "`ip address del`")
    job.change(3, local_addresses=("10.0.0.4", "172.17.0.1"))
    job.change(1, local_addresses=("10.0.0.2", "172.17.0.1"))  # Docker's bridge
    assert job.problems() == []


def test_a_taken_port_is_reported_in_the_words_of_training():
    job = Job()
    job.change(1, port_problem="TF_CONFIG gives port 2222, but it is held by process 7 (python): end it")
    check_names(job.problem(), FAILURE, "own port", "worker 1", "process 7 (python)", workers=(1,))


def test_closed_free_ports_are_a_warning():
    job = Job()
    job.contacts[0, 1] = contact(1, other_port=False)
    check_names(job.problem(), WARNING, "free ports", "worker 0", "worker 1", "Open all TCP ports")


@pytest.mark.parametrize(
    ("package", "verdict"),
    [("tfdist", FAILURE), ("tensorflow", FAILURE), ("keras", FAILURE), ("python", WARNING), ("numpy", WARNING)],
)
def test_an_unequal_version_is_named_with_the_minority(package, verdict):
    job = Job()
    job.change(0, versions={**VERSIONS, package: "9.9"})
    words = ("worker 0", f"{package} 9.9", f"the 3 others have {VERSIONS[package]}")
    check_names(job.problem(), verdict, "versions", *words, workers=(0,))
    job.change(0, versions={**VERSIONS, package: ""})
    check_names(job.problem(), verdict, "versions", f"no {package}")


def test_a_package_that_is_missing_everywhere_is_a_failure():
    job = Job(1)
    job.change(0, versions={**VERSIONS, "tensorflow": ""})
    check_names(job.problem(), FAILURE, "versions", "tensorflow is not installed")


def test_unequal_and_missing_scripts_are_named():
    job = Job()
    job.change(2, script="sha256:" + hashlib.sha256(b"other").hexdigest())
    check_names(job.problem(), FAILURE, "script", "worker 2", "another script", "Copy the same script", workers=(2,))
    job.change(2, script="train.py cannot be read: No such file or directory")
    check_names(job.problem(), FAILURE, "script", "worker 2", "No such file", workers=(2,))


def test_unequal_settings_are_named_without_values():
    job = Job()
    job.change(1, settings={})
    check_names(job.problem(), WARNING, "settings", "worker 1", "no value", "TF_XLA_FLAGS", workers=(1,))
    job.change(1, settings={"TF_XLA_FLAGS": "beef"})
    check_names(job.problem(), WARNING, "settings", "worker 1", "another value", "TF_XLA_FLAGS")
    assert "beef" not in str(job.findings()) and "abcd" not in str(job.findings())


def test_unequal_devices_and_drivers_that_hang_are_named():
    job = Job()
    job.change_all(gpus=2)
    job.change(1, gpus=1)
    check_names(job.problem(), WARNING, "devices", "worker 1", "1 GPU", "2 GPUs", workers=(1,))
    job.change(1, gpus=2, gpu_problem="the driver did not answer")
    check_names(job.problem(), FAILURE, "devices", "worker 1", "did not answer")


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_wrong_clock_is_named_also_that_of_the_chief(wrong):
    job = Job()
    for (source, target), found in job.contacts.items():
        ahead = 300.0 * ((target == wrong) - (source == wrong))
        job.contacts[source, target] = dataclasses.replace(found, clock_ahead=ahead)
    check_names(job.problem(), WARNING, "clocks", f"worker {wrong}", "300 s ahead", "chrony", workers=(wrong,))


def test_the_clock_of_a_worker_that_the_chief_cannot_reach_is_known_from_the_worker():
    job = Job()
    job.close(0, 2)
    job.contacts[2, 0] = contact(0, clock_ahead=300.0)
    assert sorted(check.name for check in job.problems()) == ["clocks", "connections"]


@pytest.mark.parametrize(("free", "verdict"), [(100 * MIB, FAILURE), (500 * MIB, WARNING), (700 * MIB, OK), (-1, OK)])
def test_little_memory_is_named(free, verdict):
    job = Job()
    job.change(1, free_memory=free)
    assert [check.verdict for check in job.problems()] == [verdict] * (verdict != OK)


@pytest.mark.parametrize(("processors", "is_noted"), [((0,), True), ((0, 1, 2, 3), False), (None, False)])
def test_more_workers_than_processors_on_a_machine_are_a_note_and_no_warning(processors, is_noted):
    job = Job()
    job.change_all(machine="machine", host="a")
    for worker in range(4):  # None: as Slurm does, each worker has one processor of its own.
        job.change(worker, processors=(worker,) if processors is None else processors)
    assert job.problems() == []
    texts = [check.text for check in job.findings() if check.name == "processors"]
    assert texts == (["4 workers on a share 1 logical processor, so each waits for the others"] if is_noted else [])


def test_workers_of_one_machine_share_its_memory():
    job = Job()
    job.change_all(free_memory=2000 * MIB, network="network")
    checks = job.problems()
    assert len(checks) == 4 and all(check.name == "memory" and "for 4 workers" in check.text for check in checks)


def test_full_disks_and_folders_that_cannot_be_written_are_named():
    job = Job()
    job.change(1, folders=(FolderFacts("temporary files", "/tmp", 0, "No space left on device"),))
    check_names(job.problem(), FAILURE, "disk", "worker 1", "/tmp", "No space left", "TMPDIR")
    job.change(1, folders=(FolderFacts("temporary files", "/tmp", 100 * MIB, ""),))
    check_names(job.problem(), WARNING, "disk", "worker 1", "/tmp", "100 MiB")
    job.change(1, folders=(FolderFacts("backups", "/b", 9000 * MIB, "Read-only file system"),))
    check_names(job.problem(), FAILURE, "backup folder", "worker 1", "/b", "Read-only", "mount options")


def test_a_backup_folder_that_is_not_shared_is_named():
    job = Job()
    job.sees[2] = False
    check_names(job.problem(), FAILURE, "shared backups", "worker 2", "storage that all workers share", workers=(2,))


def test_a_check_of_the_backup_folder_that_is_not_possible_is_a_warning():
    job = Job()
    job.sees = dict.fromkeys(range(4))
    check_names(job.problem(), WARNING, "shared backups", "could not make a file")
    job.change_all(folders=job.facts[0].folders[:1])
    assert job.problems() == []
    job.change_all(remote_backups="gs://bucket/b")
    check_names(job.problem(), WARNING, "backup folder", "gs://bucket/b", "not checked")


def test_the_backup_folder_of_a_url_is_on_no_disk(tmp_path):
    remote = machine_facts.FactRequest(backup_dir="gs://bucket/b")
    assert remote.backups is None and list(remote.folders) == ["temporary files"]
    own = machine_facts.FactRequest(backup_dir=str(tmp_path / "new"))
    assert own.folders["backups"] == tmp_path / "new" and machine_facts.existing(own.backups) == tmp_path


def test_a_slow_worker_is_named():
    job = Job()
    job.speeds[3] = 1.2e10
    check_names(job.problem(), WARNING, "processor speed", "worker 3", "4.2 times slower", "cpu.max", workers=(3,))
    job.speeds[3] = 3e10
    assert job.problems() == []
    pair = Job(2)
    pair.speeds[0] = 2e10
    check_names(pair.problem(), WARNING, "processor speed", "worker 0")


@pytest.mark.parametrize("workers", [3, 4, 8])
def test_a_host_with_a_slow_link_is_named_once(workers):
    job = Job(workers)
    for pair in job.links:
        job.links[pair] *= 0.1 if 2 in pair else 0.97 + 0.01 * pair[0]
    check_names(job.problem(), WARNING, "link rate", "links of worker 2", "times less than", "ethtool", workers=(2,))


def test_a_slow_link_of_two_workers_is_named_with_both_ends():
    job = Job()
    job.links[3, 1] = 8e7
    words = ("from worker 3 at 10.0.0.4:2222", "to worker 1 at 10.0.0.2:2222", "80 Mbit/s", "940 Mbit/s")
    check_names(job.problem(), WARNING, "link rate", *words, workers=(3, 1))


def test_a_late_link_is_named():
    job = Job()
    job.trips[1, 2] = job.trips[2, 1] = 0.2
    check_names(job.problem(), WARNING, "latency", "worker 1", "worker 2", "200 ms")
    job.trips[1, 2] = 0.01  # only one of both measurements was disturbed
    assert job.problems() == []


def test_a_worker_without_the_chief_reports_its_own_findings():
    job = Job()
    job.close(2, 0, REFUSED, "nothing listens at this port")
    job.change(2, port_problem="it is taken")
    alone = JobFacts(2, job.addresses, (job.participant(2),), 7.5)
    found = {check.name: check for check in findings(alone) if check.verdict != OK}
    check_names(found["chief"], FAILURE, "chief", "worker 0 at 10.0.0.1:2222", "worker 2", "one task alone")
    check_names(found["connections"], FAILURE, "connections", "worker 2", "cannot connect to worker 0")
    assert found.keys() == {"chief", "connections", "own port"}


def test_tasks_get_the_place_of_their_address_before_the_one_they_claim():
    chief = dataclasses.replace(Job().participant(0), seat=None)
    others = [Participant(None, facts(worker), ()) for worker in (1, 2, 3)]
    swapped = [others[0], Participant(None, facts(1, token="token-2"), ()), others[2]]
    assert [each.seat for each in seated([chief, *others], addresses(4), "token-0")] == [0, 1, 2, 3]
    placed = seated([*swapped, chief], addresses(4), "token-0")
    assert {each.facts.token: each.seat for each in placed} == {f"token-{worker}": worker for worker in range(4)}
    stranger = Participant(None, facts(1, token="unknown"), ())
    assert seated([chief, others[0], stranger], addresses(4), "token-0")[-1].seat is None


@pytest.mark.parametrize("members", range(1, 12))
def test_each_pair_meets_once_and_nobody_is_in_two_pairs_of_a_round(members):
    order = rounds(list(range(members)))
    pairs = [tuple(sorted(pair)) for each in order for pair in each]
    assert sorted(pairs) == [(a, b) for a in range(members) for b in range(a + 1, members)]
    assert all(len({end for pair in each for end in pair}) == 2 * len(each) for each in order)
    again = disjoint_rounds(pairs)
    assert sorted(pair for each in again for pair in each) == sorted(pairs)
    assert all(len({end for pair in each for end in pair}) == 2 * len(each) for each in again)


def test_members_of_a_group_take_turns():
    assert turns([[0, 1, 2], [3], [4, 5]], 8) == [[0, 3, 4], [1, 5], [2]]
    assert turns([[0, 1, 2]], 2) == [[0, 2], [1]]


def test_the_rate_of_a_link_leaves_the_first_burst_out():
    burst, steady = [(0.0, 1_000_000)], [(0.01 * tick, 1_000_000 + 125_000 * tick) for tick in range(1, 31)]
    assert rate_of(burst + steady, 0.3) == pytest.approx(1e8)


def test_a_transfer_ends_with_the_last_block():
    left, right = socket.socketpair()
    with left, right:
        sender = threading.Thread(target=lambda: send_all(left))
        sender.start()
        right.settimeout(60)  # The connection stays open.
        assert receive_blocks(right, 0.1) > 0
        sender.join()


def send_all(connection):
    class Plain:
        setsockopt = staticmethod(lambda *_: None)  # not TCP
        sendall = connection.sendall

    send_blocks(Plain, 0.1)


def test_facts_survive_the_way_to_the_chief_and_wrong_ones_are_refused():
    own = facts(1)
    sent = json.loads(json.dumps(dataclasses.asdict(own)))
    assert from_message(WorkerFacts, sent) == own
    assert from_message(PeerContact, json.loads(json.dumps(dataclasses.asdict(contact(2))))) == contact(2)
    for field, value in (
        ("worker", "1"),
        ("addresses", "a"),
        ("names", {"a": [1]}),
        ("folders", [{}]),
        ("cores", True),
    ):
        assert from_message(WorkerFacts, {**sent, field: value}) is None
    assert from_message(WorkerFacts, {}) is None and from_message(WorkerFacts, [1]) is None


def test_settings_are_hashed_and_secrets_are_left_out():
    environ = {
        "TF_XLA_FLAGS": "--x",
        "TFDIST_SECRET": "s" * 32,
        "TF_API_TOKEN": "t",
        "HOME": "/root",
        "TF_CONFIG": "{}",
    }
    found = machine_facts.settings({**environ, "TFDIST_SLOT": "1", "TF_EMPTY": ""})
    assert list(found) == ["TF_XLA_FLAGS"] and found["TF_XLA_FLAGS"] != "--x"
    assert found != machine_facts.settings({"TF_XLA_FLAGS": "--y"})


def test_a_folder_is_probed_without_being_made(tmp_path):
    absent = tmp_path / "a/b"
    assert machine_facts.folder_facts("backups", absent).problem == ""
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    assert machine_facts.folder_facts("backups", tmp_path / "file").problem == "Not a directory"
    assert machine_facts.folder_facts("backups", tmp_path / "file/b").problem == "Not a directory"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_fact_that_takes_too_long_is_given_up(monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(machine_facts, "_FACT_SECONDS", 60)
    assert machine_facts.in_time(lambda: 5)() == 5
    monkeypatch.setattr(machine_facts, "_FACT_SECONDS", 0.1)
    assert machine_facts.in_time(never.wait)() is None
    never.set()


def test_the_holder_of_a_port_is_found_by_its_number():
    (port,) = ports.free_ports(1)
    assert holder_of(port) is None
    with socket.create_server(("127.0.0.1", port)):
        name = pathlib.Path("/proc/self/comm").read_text().strip()
        assert holder_of(port) == f"process {os.getpid()} ({name})"


def test_the_table_has_one_line_for_each_check(capsys):
    checks = [Check("names", OK, "fine"), Check("own port", FAILURE, "taken", "End it"), Check("disk", WARNING, "full")]
    check_table.print_table(checks, check_table.summary_of(checks, 4, 7.4))
    assert capsys.readouterr().out.splitlines() == [
        "ok       names     fine",
        "failure  own port  taken. End it.",
        "warning  disk      full",
        "tfdist doctor: not ready; 1 failure, 1 warning; 3 checks of 4 workers in 7.4 s",
    ]


def test_the_table_of_a_terminal_has_a_row_for_each_check(capsys):
    check_table._print_on_terminal([Check("names", OK, "fine"), Check("own port", FAILURE, "taken [x]", "End it")])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert rows[-2:] == [["names", "ok", "fine"], ["own", "port", "failure", "taken", "[x].", "End", "it."]]


def test_the_cluster_of_a_task_comes_from_its_options_or_its_scheduler(monkeypatch):
    parser = CommandParser()
    doctor_command.add_arguments(parser)
    for name in ("TF_CONFIG", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert doctor_command._spec_of(parser.parse_args([])).num_workers == 1
    slurm = {
        "STEP_NODELIST": "n[1-2]",
        "STEP_TASKS_PER_NODE": "1(x2)",
        "PROCID": "1",
        "STEP_NUM_TASKS": "2",
        "JOB_ID": "7",
    }
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    found = doctor_command._spec_of(parser.parse_args([]))
    assert found.num_workers == 2 and found.worker_id == 1 and found.address.startswith("n2:")
    assert doctor_command._spec_of(parser.parse_args(["--slurm", "--base-port", "999"])).address == "n2:999"
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert doctor_command._spec_of(parser.parse_args(["--mpi", "a,b"])).training_addresses == ("a:12345", "b:12345")
    monkeypatch.setenv("TF_CONFIG", ClusterSpec.local(3, 2, [1, 2, 3]).to_json())
    assert doctor_command._spec_of(parser.parse_args([])).address == "127.0.0.1:3"


def warnings_at_start(caplog, spec=None, workers=1):
    caplog.clear()
    start_checks.warn_at_start(spec, None, workers)
    for thread in threading.enumerate():
        if thread.name == "tfdist-address":
            thread.join()
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_job_warns_at_its_start_of_little_memory_and_a_full_disk(monkeypatch, caplog):
    monkeypatch.setattr(start_checks, "free_memory", lambda: 8 << 30)
    monkeypatch.setattr(start_checks.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=8 << 30))
    assert warnings_at_start(caplog, workers=16) == []
    (memory,) = warnings_at_start(caplog, workers=40)
    assert "Only 8192 MiB of memory are free on this machine for 40 worker(s)" in memory
    monkeypatch.setattr(start_checks, "free_memory", lambda: 90 * MIB)
    monkeypatch.setattr(start_checks.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=3 * MIB))
    memory, disk = warnings_at_start(caplog)
    assert "Only 90 MiB of memory" in memory and "Only 3 MiB are free in" in disk


def test_a_job_warns_at_its_start_of_the_address_of_another_machine(monkeypatch, caplog):
    monkeypatch.setattr(start_checks, "free_memory", lambda: 8 << 30)
    monkeypatch.setattr(start_checks, "local_addresses", lambda: ("10.0.0.3", "10.9.9.9"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)

    def spec(index):
        return ClusterSpec({"worker": addresses(4)}, "worker", index)

    assert warnings_at_start(caplog, spec(2)) == []
    assert warnings_at_start(caplog, ClusterSpec.local(2, 0, [1, 2])) == []
    (warning,) = warnings_at_start(caplog, spec(1))
    assert "10.0.0.2 is no address of this machine, which has 10.0.0.3, 10.9.9.9" in warning
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert warnings_at_start(caplog, spec(1)) == []


def test_the_json_result_has_checks_and_measurements_but_no_settings():
    job = Job(2)
    whole = JobFacts(0, job.addresses, (job.participant(0), job.participant(1)), 1.0, job.speeds, job.links)
    result = check_table.to_json(findings(whole), whole, 2.0)
    assert (result["failures"], result["warnings"]) == (0, 0)
    assert [worker["address"] for worker in result["workers"]] == list(job.addresses)
    assert [(each["from"], each["to"], each["bits_per_second"]) for each in result["connections"]] == [
        (0, 1, 9.4e8),
        (1, 0, 9.4e8),
    ]
    assert "abcd" not in str(result)
