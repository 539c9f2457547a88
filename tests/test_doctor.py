"""`tfdist doctor` finds each fault of a job on several hosts in time, names it, and has no warning on sound hosts.

The hosts are network namespaces of this machine. `test_doctor_checks.py` tests what follows from the facts.
"""

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

from benchmarks.netlab import Netlab, why_not
from launched import eventually
from tfdist.cluster import ClusterSpec, free_ports
from tfdist.launch import cli
from tfdist.testing.faults import Slowdown

DEADLINE_SECONDS = 240
IN_TIME_SECONDS = 60  # Less than the timeout in the next line, so that a task that waits for it is noticed.
PATIENT = ("--timeout", "120")  # for tasks that all come, also late on a busy machine; then no task waits
PORT = 2222
COMMAND = [sys.executable, "-m", "tfdist.launch.cli", "doctor"]
# Warnings about this machine itself, which may be short of each. Other programs slow down one worker more than another.
OF_THIS_MACHINE = {"memory", "disk", "processor speed"}

LATE_CLOCK = """
import sys, time
from tfdist.cluster import ClusterSpec
from tfdist.doctor import doctor_command
from tfdist.launch.arguments import CommandParser
parser = CommandParser()
doctor_command.add_arguments(parser)
arguments = parser.parse_args(sys.argv[1:])
sys.exit(doctor_command.run_task(ClusterSpec.from_env(), arguments, clock=lambda: time.time() + 300))
"""


class Task:
    """A task of `tfdist doctor` in a process of its own, and its outcome."""

    def __init__(self, command, **environ):
        environ = {name: str(value) for name, value in environ.items()}
        inherited = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.start = time.monotonic()
        self.process = subprocess.Popen(command, env={**inherited, "CUDA_VISIBLE_DEVICES": "-1", **environ}, **pipes)

    def end(self):
        """Waits for the end; afterwards the task has `code`, `out`, `err` and `seconds`."""
        try:
            self.out, self.err = self.process.communicate(timeout=DEADLINE_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
        self.code, self.seconds = self.process.returncode, time.monotonic() - self.start
        return self

    def checked_seconds(self):
        """Returns how long the check took, without the time until all tasks had started."""
        whole = re.search(r"^tfdist doctor: .* in ([0-9.]+) s$", self.out, re.MULTILINE)
        waited = re.search(r"all have come after ([0-9.]+) s", self.out)
        return float(whole[1]) - (float(waited[1]) if waited else 0.0) if whole else 0.0

    def rows(self):
        """Returns the verdict, the name and the text of each check."""
        found = [re.fullmatch(r"(ok|warning|failure) +(.+?)  +(.*)", line) for line in self.out.splitlines()]
        return [match.groups() for match in found if match]

    def problems(self):
        """Returns the checks that found something, without those about this machine."""
        return [row for row in self.rows() if row[0] != "ok" and row[1] not in OF_THIS_MACHINE]


def ended(tasks):
    return [task.end() for task in tasks]


def local_task(spec, *arguments, **environ):
    return Task([*COMMAND, *map(str, arguments)], TF_CONFIG=spec.to_json(), **environ)


def is_busy():
    """Returns whether other programs use the processors, so that slow workers cannot be told from others."""
    first, start = idle_ticks(), time.monotonic()
    time.sleep(0.5)
    return (idle_ticks() - first) / os.sysconf("SC_CLK_TCK") < 0.5 * os.cpu_count() * (time.monotonic() - start)


def idle_ticks():
    return int(pathlib.Path("/proc/stat").read_text().split()[4])


def shows(row, verdict, name, *words):
    assert row[:2] == (verdict, name), row
    assert [word for word in words if word not in row[2]] == [], row


def test_workers_on_this_machine_are_ready(tmp_path):
    files = ("--json", tmp_path / "result.json", "--script", __file__, "--backup-dir", tmp_path / "new")
    options = ("--workers", 2, *files)
    task = Task([*COMMAND, *map(str, options)], TF_XLA_FLAGS="--tf_xla_a_value=7", TFDIST_SECRET="s3cret" * 9).end()
    assert (task.code, task.problems()) == (0, []), task.out + task.err
    assert task.out.splitlines()[-1].startswith("tfdist doctor: ready"), task.out
    assert ("ok", "shared backups") in [row[:2] for row in task.rows()], task.out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["failures"] == 0 and len(result["workers"]) == 2
    assert all(each["bits_per_second"] > 1e6 for each in result["connections"])
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
    shown = task.out + task.err + json.dumps(result)
    assert "a_value=7" not in shown and "s3cret" not in shown and "connections" in shown


def test_one_worker_without_a_cluster_is_checked_alone():
    task = Task([*COMMAND]).end()
    assert (task.code, task.problems()) == (0, []), task.out + task.err
    assert "TF_CONFIG is not set" in task.err


def test_json_without_a_file_is_all_of_standard_output():
    task = Task([*COMMAND, "--workers", "2", "--json"]).end()
    assert task.code == 0, task.out + task.err
    assert json.loads(task.out)["failures"] == 0


@pytest.fixture
def stand_in(tmp_path, monkeypatch, caplog, capfd):
    """Returns a function that runs `tfdist doctor --workers 2` with shell commands as the tasks.

    It returns the exit code, the output and the log.
    """

    def run(chief, other, timeout=1):
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\ncase $TF_CONFIG in\n*'\"index\": 0'*) {chief};;\n*) {other};;\nesac\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        code = cli.main(["doctor", "--workers", "2", "--timeout", str(timeout)])
        return code, capfd.readouterr().out, caplog.text

    return run


def test_the_table_is_printed_and_the_task_is_named_if_another_task_is_killed(stand_in):
    code, out, log = stand_in("sleep 1; echo table; exit 1", "echo no memory; kill -9 $$")
    assert code == 1 and out == "table\n", log
    assert "worker 1 was killed by SIGKILL; its log ends with:\nno memory" in log and "worker 0" not in log


def test_exit_codes_that_the_chief_has_told_need_no_line(stand_in):
    code, out, log = stand_in("sleep 0.5; echo table; exit 1", "exit 1")
    assert code == 1 and out == "table\n" and "log ends with" not in log


@pytest.mark.parametrize(
    ("chief", "line"),
    [
        ("echo hangs; sleep 100", "worker 0 did not end the check within 2.3 s; its log ends with:\nhangs"),
        ("kill -9 $$", "worker 0 was killed by SIGKILL; its log ends with:\n(no lines)"),
    ],
)
def test_a_chief_without_a_table_is_named(stand_in, chief, line):
    code, _, log = stand_in(chief, "sleep 100", timeout=0.1)
    assert code == 1 and line in log and "worker 1" not in log, log


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"cluster": {"worker": ["10.0.0.1:1", "localhost:1"]}, "task": {"type": "worker", "index": 0}}', "loopback"),
        (
            '{"cluster": {"worker": ["10.0.0.1:1", "10.0.0.1:1"]}, "task": {"type": "worker", "index": 0}}',
            "are the same",
        ),
    ],
)
def test_a_cluster_spec_that_training_refuses_is_a_failure(text, words, tmp_path):
    task = Task([*COMMAND, "--json", str(tmp_path / "result.json")], TF_CONFIG=text).end()
    assert task.code == 1
    (row,) = task.problems()
    shows(row, "failure", "specification", words, "Give ")
    assert json.loads((tmp_path / "result.json").read_text())["failures"] == 1


@pytest.mark.exhaustive
def test_another_program_at_the_port_and_another_secret_are_named():
    ports = free_ports(3)
    specs = [ClusterSpec.local(3, index, ports) for index in range(3)]
    code = (
        f"import socket, time; s = socket.create_server(('127.0.0.1', {ports[1]})); print(flush=True); time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as holder:
        try:
            holder.stdout.readline()
            tasks = [local_task(spec, TFDIST_SECRET="abcdefgh" * (4 + (spec.worker_id == 2))) for spec in specs]
            chief, taken, other = ended(tasks)
        finally:
            holder.kill()
    assert (chief.code, taken.code, other.code) == (1, 1, 1)
    assert max(task.checked_seconds() for task in (chief, taken, other)) < IN_TIME_SECONDS
    failures = chief.problems()
    port = next(row for row in failures if row[1] == "own port")
    shows(port, "failure", "own port", "worker 1", f"process {holder.pid} (python", "another port")
    missing = next(row for row in failures if row[1] == "tasks")
    shows(missing, "failure", "tasks", "worker 2", "TFDIST_SECRET differs", "same secret")
    shows(other.problems()[0], "failure", "chief", "worker 0", "worker 2", "one task alone")


@pytest.fixture(scope="module")
def lab():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Netlab(hosts=4, rate=None) as lab:
        yield lab


@pytest.fixture
def hosts(lab, tmp_path):
    return Hosts(lab, tmp_path)


class Hosts:
    """Four hosts, on each of which a task of `tfdist doctor` is started."""

    def __init__(self, lab, folder):
        self.lab, self.folder = lab, folder
        self.addresses = [f"{host.address}:{PORT}" for host in lab.hosts]
        self.indices = [0, 1, 2, 3]
        self.specs = dict.fromkeys(range(4), None)  # other addresses for the task of a host
        self.environ = {host: {} for host in range(4)}
        self.before = {}  # shell commands before the task of a host
        self.code = {}  # other programs than the command
        self.options = []
        self.absent = set()
        self.timeout = PATIENT

    def sh(self, host, command):
        done = subprocess.run(self.lab.hosts[host].command(["sh", "-ec", command]), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def task(self, host):
        addresses = self.specs[host] or self.addresses
        task = {"type": "worker", "index": self.indices[host]}
        config = json.dumps({"cluster": {"worker": addresses}, "task": task})
        program = [sys.executable, "-c", self.code[host]] if host in self.code else COMMAND
        script = f'{self.before.get(host, ":")}; exec "$@"'
        command = ["sh", "-ec", script, "sh", *program, *self.timeout, *map(str, self.options)]
        return Task(self.lab.hosts[host].command(command), TF_CONFIG=config, **self.environ[host])

    def start(self):
        return {host: self.task(host) for host in range(4) if host not in self.absent}

    def run(self):
        """Runs all tasks, and returns them by host."""
        tasks = self.start()
        ended(tasks.values())
        late = {host: task.out for host, task in tasks.items() if task.checked_seconds() > IN_TIME_SECONDS}
        assert late == {}
        return tasks

    def problem(self):
        """Runs all tasks, and returns the only problem that the chief reports."""
        tasks = self.run()
        problems = tasks[0].problems()
        assert len(problems) == 1, tasks[0].out + tasks[0].err
        code = int(problems[0][0] == "failure")
        assert {task.code for task in tasks.values()} == {code}, [task.err for task in tasks.values()]
        return problems[0]

    def name(self, worker):
        return f"worker {worker} at {self.addresses[worker]}"


@contextlib.contextmanager
def dropped(hosts, host, source):
    """Drops what another host sends to the port of a host in TF_CONFIG: a firewall that is closed one way."""
    rule = f"from {hosts.lab.hosts[source].address} iif eth0 ipproto tcp dport {PORT} blackhole pref 50"
    hosts.sh(host, f"ip rule add pref 100 lookup local; ip rule del pref 0; ip rule add {rule}")
    try:
        yield
    finally:
        hosts.sh(host, "ip rule add pref 0 lookup local; ip rule del pref 100; ip rule del pref 50")


def listening(host):
    """Returns the addresses at which processes on a host listen."""
    done = subprocess.run(host.command(["ss", "-Hltn"]), capture_output=True, text=True, check=True)
    return {line.split()[3].rpartition(":")[0] for line in done.stdout.splitlines()}


@pytest.mark.privileged
def test_sound_hosts_have_no_warning_and_listen_only_at_their_address(hosts):
    hosts.absent.add(3)  # The tasks of the other hosts wait for this one, so that all can be seen.
    tasks = hosts.start()
    seen = {host: set() for host in range(4)}

    def look():
        for host in seen:
            seen[host] |= listening(hosts.lab.hosts[host])
        return seen

    assert eventually(lambda: all(look()[host] for host in tasks)), seen
    tasks[3] = hosts.task(3)
    assert eventually(lambda: look() and tasks[0].process.poll() is not None, DEADLINE_SECONDS)
    ended(tasks.values())
    assert [row for row in tasks[0].rows() if row[0] != "ok" and row[1] not in OF_THIS_MACHINE] == []
    assert {task.code for task in tasks.values()} == {0}, tasks[0].out + tasks[0].err
    assert [seen[host] - {hosts.lab.hosts[host].address} for host in seen] == [set()] * 4
    names = [name for _, name, _ in tasks[0].rows()]
    expected = ("specification", "tasks", "names", "own address", "own port", "connections", "clocks", "versions")
    assert [name for name in (*expected, "memory", "disk", "link rate", "processor speed") if name not in names] == []


@pytest.mark.privileged
@pytest.mark.exhaustive
def test_workers_of_one_machine_listen_only_at_loopback(lab):
    task, seen = Task(lab.hosts[0].command([*COMMAND, "--workers", "2"])), set()

    def is_over():
        seen.update(listening(lab.hosts[0]))
        return task.process.poll() is not None

    assert eventually(is_over, DEADLINE_SECONDS)
    assert (task.end().code, seen) == (0, {"127.0.0.1"}), task.out + task.err


@pytest.mark.privileged
def test_a_port_that_is_closed_one_way_is_named_with_both_ends(hosts):
    with dropped(hosts, 2, source=0):
        row = hosts.problem()
    shows(row, "failure", "connections", f"{hosts.name(0)} cannot connect to {hosts.name(2)}", "can connect to it")
    assert f"TCP port {PORT} from {hosts.name(0)}" in row[2]


@pytest.mark.privileged
@pytest.mark.exhaustive
def test_a_port_of_the_chief_that_is_closed_is_named(hosts):
    with dropped(hosts, 0, source=3):
        shows(hosts.problem(), "failure", "connections", f"{hosts.name(3)} cannot connect to {hosts.name(0)}")


@pytest.mark.privileged
def test_several_faults_of_several_hosts_are_all_named(hosts):
    """Faults that do not disturb each other, in one run; exhaustive tests have each alone."""
    make_unequal_version(hosts, 1)
    make_unequal_script(hosts, 2)
    make_folder_read_only(hosts, 3)
    hosts.code[1] = LATE_CLOCK
    tasks = hosts.run()
    found = {row[1]: row for row in tasks[0].problems()}
    assert found.keys() == {"versions", "script", "clocks", "backup folder", "shared backups"}, tasks[0].out
    shows(found["versions"], "failure", "versions", hosts.name(1), "keras 9.9.9")
    shows(found["script"], "failure", "script", hosts.name(2))
    shows(found["clocks"], "warning", "clocks", hosts.name(1), "300 s ahead")
    shows(found["backup folder"], "failure", "backup folder", hosts.name(3), "Read-only")


@pytest.mark.privileged
@pytest.mark.exhaustive
def test_an_unreachable_host_is_named(hosts):
    hosts.timeout = ()
    hosts.sh(3, "ip link set eth0 down")
    try:
        tasks = hosts.run()
    finally:
        hosts.sh(3, "ip link set eth0 up")
    (row,) = tasks[0].problems()
    shows(row, "failure", "tasks", hosts.name(3), "Start that host")
    assert {task.code for task in tasks.values()} == {1}
    shows(tasks[3].problems()[0], "failure", "chief", hosts.name(0), "one task alone")


@pytest.mark.privileged
@pytest.mark.exhaustive
def test_a_host_without_a_task_is_named(hosts):
    hosts.timeout = ()
    hosts.absent.add(1)
    shows(hosts.problem(), "failure", "tasks", hosts.name(1), "nothing listens", "Start `tfdist doctor` there")


@pytest.mark.privileged
@pytest.mark.exhaustive
def test_a_wrong_name_is_named(hosts):
    hosts.addresses[2] = f"no-such-host.invalid:{PORT}"
    tasks = hosts.run()
    found = {row[1]: row for row in tasks[0].problems()}
    shows(found["names"], "failure", "names", "no-such-host.invalid", "worker 2", "Correct the name")
    assert {task.code for task in tasks.values()} == {1}


@pytest.mark.privileged
@pytest.mark.exhaustive
def test_two_tasks_of_one_index_are_named(hosts):
    hosts.indices[2] = 1
    tasks = hosts.run()
    found = {row[1]: row for row in tasks[0].problems()}
    shows(found["tasks"], "failure", "tasks", "2 tasks have index 1", hosts.lab.hosts[2].address, "index 2")
    shows(found["own address"], "failure", "own address", "as worker 2")


@pytest.mark.privileged
@pytest.mark.exhaustive
def test_an_ip_address_of_two_hosts_is_named(hosts):
    address = hosts.lab.hosts[1].address
    hosts.sh(3, f"ip address add {address}/24 dev eth0")
    try:
        tasks = hosts.run()
    finally:
        hosts.sh(3, f"ip address del {address}/24 dev eth0; ip neigh flush all")
        for host in (0, 1, 2):
            hosts.sh(host, "ip neigh flush all")
    rows = [row for row in tasks[0].problems() if row[1] == "own address"]
    assert rows, tasks[0].out
    shows(rows[0], "failure", "own address", address, hosts.name(1), hosts.name(3), "ip address del")


@pytest.mark.privileged
@pytest.mark.exhaustive
@pytest.mark.parametrize("addresses", [[f"127.0.0.1:{PORT + index}" for index in range(4)], None], ids=["all", "one"])
def test_localhost_among_several_hosts_is_named_on_each(hosts, addresses):
    hosts.timeout = ()
    hosts.addresses = addresses or [*hosts.addresses[:2], f"localhost:{PORT}", *hosts.addresses[3:]]
    for task in hosts.run().values():
        row = next(row for row in task.problems() if row[1] == "specification")
        shows(row, "failure", "specification", "loopback", "Give ")
        assert task.code == 1
        assert addresses or "localhost:2222" in row[2]


def make_unequal_version(hosts, host):
    metadata = hosts.folder / "keras-9.9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: keras\nVersion: 9.9.9\n")
    hosts.environ[host]["PYTHONPATH"] = hosts.folder


def make_unequal_script(hosts, host):
    mounted = hosts.folder / "job"
    mounted.mkdir()
    (mounted / "train.py").write_text("print(1)\n")
    hosts.before[host] = f"mount -t tmpfs job {mounted}; echo 'print(2)' > {mounted}/train.py"
    hosts.options += ["--script", mounted / "train.py"]


def make_folder_read_only(hosts, host):
    folder = hosts.folder / "backup"
    folder.mkdir()
    hosts.before[host] = f"mount -t tmpfs -o ro backup {folder}"
    hosts.options += ["--backup-dir", folder]


@pytest.mark.privileged
@pytest.mark.exhaustive
def test_an_unequal_version_is_named(hosts):
    make_unequal_version(hosts, 1)
    shows(hosts.problem(), "failure", "versions", f"{hosts.name(1)} has keras 9.9.9", "the 3 others have", "Install")


@pytest.mark.privileged
@pytest.mark.exhaustive
def test_an_unequal_spec_is_named(hosts):
    hosts.specs[2] = [*hosts.addresses[:3], f"10.77.0.99:{PORT}"]
    tasks = hosts.run()
    rows = [row for row in tasks[0].problems() if row[1] == "specification"]
    shows(rows[0], "failure", "specification", hosts.name(2), f"worker 3 at 10.77.0.99:{PORT} instead of", "Give all")
    assert {task.code for task in tasks.values()} == {1}


@pytest.mark.privileged
@pytest.mark.exhaustive
def test_a_spec_with_another_chief_is_named(hosts):
    hosts.specs[3] = [hosts.addresses[1], hosts.addresses[0], *hosts.addresses[2:]]
    tasks = hosts.run()
    rows = [row for row in tasks[0].problems() if row[1] == "specification"]
    shows(rows[0], "failure", "specification", hosts.name(3), f"worker 0 at {hosts.addresses[1]} instead of")


@pytest.mark.privileged
@pytest.mark.exhaustive
def test_an_unequal_script_is_named(hosts):
    make_unequal_script(hosts, 2)
    shows(hosts.problem(), "failure", "script", f"{hosts.name(2)} has another script", "Copy the same script")


@pytest.mark.privileged
@pytest.mark.exhaustive
def test_a_port_in_use_is_named_with_its_process(hosts):
    code = f"import socket, time; s = socket.create_server(('', {PORT})); print(flush=True); time.sleep(99)"
    command = hosts.lab.hosts[1].command([sys.executable, "-c", code])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            holder.stdout.readline()
            tasks = hosts.run()
        finally:
            holder.kill()
    row = next(row for row in tasks[0].problems() if row[1] == "own port")
    shows(row, "failure", "own port", hosts.name(1), f"process {holder.pid} (python", "end it")


@pytest.mark.privileged
@pytest.mark.exhaustive
def test_a_link_that_is_ten_times_slower_is_named(hosts):
    hosts.lab.shape("200mbit")
    try:
        host = hosts.lab.hosts[2]
        slower = f"tc qdisc replace dev {host.interface} root tbf rate 20mbit burst 70000 latency 100ms"
        hosts.sh(2, slower)
        shows(hosts.problem(), "warning", "link rate", f"links of {hosts.name(2)}", "Mbit/s", "ethtool")
        hosts.lab.shape("200mbit")
        assert hosts.run()[0].problems() == []
    finally:
        hosts.lab.shape(None)


@pytest.mark.privileged
@pytest.mark.exhaustive
def test_a_worker_with_a_quarter_of_a_core_is_named(hosts):
    if is_busy():
        pytest.skip("other programs use the processors, so no worker has more than a quarter of a core")
    tasks = hosts.start()
    with Slowdown(tasks[3].process.pid, 4):
        ended(tasks.values())
    rows = {row[1]: row for row in tasks[0].rows()}
    shows(rows["processor speed"], "warning", "processor speed", hosts.name(3), "times slower", "cpu.max")
    assert tasks[0].code == 0 and tasks[0].checked_seconds() < IN_TIME_SECONDS


@pytest.mark.privileged
@pytest.mark.exhaustive
def test_a_full_disk_is_named(hosts):
    disk = hosts.folder / "disk"
    disk.mkdir()
    hosts.environ[1]["TMPDIR"] = disk
    hosts.before[1] = f"mount -t tmpfs -o size=64k disk {disk}; ! head -c 1M /dev/zero > {disk}/file 2> /dev/null"
    task = hosts.run()[0]
    (row,) = [row for row in task.rows() if row[1] == "disk" and row[0] == "failure"]
    shows(row, "failure", "disk", hosts.name(1), str(disk), "No space left", "Make room")
    assert task.code == 1


@pytest.mark.privileged
@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["read-only", "a file"])
def test_a_backup_folder_that_cannot_be_written_is_named(hosts, how):
    make_folder_read_only(hosts, 3)
    if how == "a file":
        hosts.before[3] = f"mount -t tmpfs backup {hosts.folder}; touch {hosts.folder}/backup"
    tasks = hosts.run()
    found = {row[1]: row for row in tasks[0].problems()}
    words = ("Read-only",) if how == "read-only" else ("Not a directory",)
    shows(found["backup folder"], "failure", "backup folder", hosts.name(3), *words)
    shows(found["shared backups"], "failure", "shared backups", hosts.name(3), "storage that all workers share")


@pytest.mark.privileged
@pytest.mark.exhaustive
def test_a_clock_that_is_five_minutes_off_is_named(hosts):
    hosts.code[2] = LATE_CLOCK
    shows(hosts.problem(), "warning", "clocks", hosts.name(2), "300 s ahead of the others", "chrony")


@pytest.mark.privileged
@pytest.mark.exhaustive
def test_sound_hosts_of_a_loaded_machine_have_no_warning(hosts):
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for _ in range(3):
            task = hosts.run()[0]
            assert (task.code, task.problems()) == (0, []), task.out
            assert [row for row in task.rows() if row[:2] == ("warning", "processor speed")] == [], task.out
    finally:
        for each in load:
            each.kill()
            each.wait()
