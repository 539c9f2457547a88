"""A TF_CONFIG is understood, or refused with the rule, the received value and the remedy."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from tfdist.cluster import ClusterSpec, check_bindable, free_ports, is_chief, ports
from tfdist.cluster.schedulers import expand_counts, expand_hosts
from tfdist.errors import TFConfigError


def config(cluster, task_type="worker", index=0, **more):
    return json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}, **more})


TWO = {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}

# Contents of TF_CONFIG, and words that the error must contain.
WRONG = {
    "not JSON": ('{"cluster": ', ["JSON", "line 1, column 13"]),
    "single quotes": ("{'cluster': {}}", ["JSON", "column 2", "double quotes"]),
    "a list": ("[1, 2]", ["JSON object", "[1, 2]"]),
    "null": ("null", ["JSON object", "null"]),
    "cluster is a list": ('{"cluster": ["a:1"]}', ["`cluster`", "roles", '["a:1"]']),
    "cluster is null": ('{"cluster": null}', ["`cluster`", "null"]),
    "cluster is an empty list": ('{"cluster": []}', ["`cluster`", "[]"]),
    "index without cluster": ('{"task": {"type": "worker", "index": 1}}', ["`cluster`", '"index": 1', "unset"]),
    "index in quotes, no cluster": (config({}, index="2"), ["`cluster`", '"index": "2"']),
    "type without cluster": ('{"task": {"type": "ps", "index": 0}}', ["`cluster`", '"type": "ps"']),
    "cluster in capitals": ('{"CLUSTER": {}, "task": {"type": "worker", "index": 0}}', ["`cluster`", '"CLUSTER"']),
    "clusters": ('{"clusters": {}}', ["`cluster`", '"clusters"']),
    "addresses under another key": ('{"sparseCluster": {"worker": {"0": "h:1"}}}', ["`cluster`", '"sparseCluster"']),
    "sparse cluster without addresses": ('{"sparseCluster": {"worker": {}}}', ["`cluster`", '"sparseCluster"']),
    "no role has a task": (config({"worker": [], "ps": []}), ["`cluster.worker`", "[]"]),
    "brackets within brackets": ("[" * 100_000, ["JSON", "100000 characters"]),
    "lists within a cluster": ('{"cluster": ' + "[" * 900 + "]" * 900 + "}", ["`cluster`"]),
    "lists within another key": (
        '{"other": ' + "[" * 900 + '"h:1"' + "]" * 900 + ', "task": {"index": 1}}',
        ["`cluster`"],
    ),
    "a number of 9,000 digits": ('{"cluster": {}, "task": {"index": ' + "9" * 9000 + "}}", ["JSON", "(4300"]),
    "an index of 4,000 digits": (config(TWO, index=10**4000), ["2 addresses", "…"]),
    "no task": (json.dumps({"cluster": TWO}), ["`task`", "null"]),
    "task is a list": (json.dumps({"cluster": TWO, "task": ["worker", 0]}), ["`task`", '["worker", 0]']),
    "task without index": (json.dumps({"cluster": TWO, "task": {"type": "worker"}}), ["index", '{"type": "worker"}']),
    "task without type": (json.dumps({"cluster": TWO, "task": {"index": 1}}), ["type", '{"index": 1}']),
    "parameter servers": (config({**TWO, "ps": ["h:1"]}), ["synchronous", "cluster.ps", "Leave `ps` out"]),
    "unknown role": (config({**TWO, "master": ["h:1"]}), ["master", "chief, worker, evaluator"]),
    "empty role": (config({"worker": []}), ["`cluster.worker`", "[]"]),
    "addresses in one string": (config({"worker": "h:1,i:1"}), ["list", '"h:1,i:1"']),
    "addresses by index": (config({"worker": {"0": "h:1"}}), ["list", "cluster.worker"]),
    "only an evaluator": (config({"evaluator": ["h:1"]}), ["worker that trains", "evaluator"]),
    "two chiefs": (config({"chief": ["a:1", "b:1"]}, "chief"), ["one chief", "a:1, b:1"]),
    "address no string": (config({"worker": ["h:1", 2222]}), ["strings", "`cluster.worker[1]`", "2222"]),
    "no port": (config({"worker": ["hostname"]}), ["host:port", '"hostname"']),
    "empty host": (config({"worker": [":2222"]}), ["host:port", '":2222"']),
    "empty label": (config({"worker": ["a..b:2222"]}), ["host name", '"a..b:2222"', "Correct"]),
    "long label": (config({"worker": [f"{'a' * 64}.b:2222"]}), ["1 to 63", "aaaa"]),
    "empty address": (config({"worker": [""]}), ["host:port", '""']),
    "port no number": (config({"worker": ["h:http"]}), ["host:port", '"h:http"']),
    "negative port": (config({"worker": ["h:-1"]}), ["host:port", '"h:-1"']),
    "superscript port": (config({"worker": ["h:²"]}), ["host:port"]),
    "port 0": (config({"worker": ["h:0"]}), ["1 to 65535", "got 0"]),
    "port too large": (config({"worker": ["h:65536"]}), ["1 to 65535", "got 65536"]),
    "scheme": (config({"worker": ["grpc://h:2222"]}), ["without a scheme", "grpc://h:2222"]),
    "space": (config({"worker": ["h :2222"]}), ["host:port", '"h :2222"']),
    "bare IPv6": (config({"worker": ["fe80::1:2222"]}), ["brackets", "[fe80::1]:2222"]),
    "name in brackets": (config({"worker": ["[host]:2222"]}), ["brackets", "[host]:2222"]),
    "any interface": (config({"worker": ["0.0.0.0:2222"]}), ["reach", "0.0.0.0:2222"]),
    "same address twice": (
        config({"worker": ["h:1", "h:1"]}),
        ["different address", "`cluster.worker[0]`", "`cluster.worker[1]`", "h:1"],
    ),
    "same address in two roles": (config({"chief": ["h:1"], "worker": ["H:1"]}), ["`cluster.chief[0]`"]),
    "same address, two spellings": (config({"worker": ["localhost:1", "127.0.0.1:1"]}), ["different address"]),
    "same IPv6 address, two spellings": (config({"worker": ["[2001:db8::1]:1", "[2001:DB8:0::1]:1"]}), ["different"]),
    "same IPv4 address as IPv6": (config({"worker": ["10.0.0.1:1", "[::ffff:10.0.0.1]:1"]}), ["different address"]),
    "same port on loopback": (config({"worker": ["127.0.0.1:1", "[::1]:1"]}), ["127.0.0.1:1", "[::1]:1", "own port"]),
    "any interface, spelled out": (config({"worker": ["[0:0::0]:2222"]}), ["reach", "[0:0::0]:2222"]),
    "loopback beside hosts": (
        config({"worker": ["localhost:1", "10.0.0.2:1"]}),
        ["loopback", "localhost:1", "10.0.0.2:1", "reach"],
    ),
    "127.x beside hosts": (config({"worker": ["10.0.0.1:1", "127.0.1.1:1"]}), ["loopback", "127.0.1.1:1"]),
    "type not in cluster": (config(TWO, "chief"), ['"chief"', "only the roles worker"]),
    "type no string": (config(TWO, ["worker"]), ["only the roles worker"]),
    "evaluator": (config({**TWO, "evaluator": ["h:1"]}, "evaluator"), ["does not train", "without TF_CONFIG"]),
    "index out of range": (
        config(TWO, index=3),
        ['{"type": "worker", "index": 3}', "2 addresses", "10.0.0.1:2222, 10.0.0.2:2222", "from 0 to 1"],
    ),
    "index negative": (config(TWO, index=-1), ["-1", "2 addresses"]),
    "index true": (config(TWO, index=True), ["whole number", "true"]),
    "index fraction": (config(TWO, index=1.0), ["whole number", "1.0"]),
    "index words": (config(TWO, index="one"), ["whole number", '"one"']),
    "index null": (config(TWO, index=None), ["whole number", "null"]),
    "rpc layer": (config(TWO, rpc_layer="grpc+mpi"), ["rpc_layer", "grpc+mpi"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tf_config_is_refused_with_rule_and_remedy(name):
    text, words = WRONG[name]
    with pytest.raises(TFConfigError) as caught:
        ClusterSpec.from_env({"TF_CONFIG": text})
    message = str(caught.value)
    assert message.startswith("TF_CONFIG") and message.endswith("."), message
    assert [word for word in words if word not in message] == [], message


# Arguments of `ClusterSpec`, and the expected worker_id, num_workers, is_chief and address.
RIGHT = {
    "two workers": ((TWO, "worker", 1), (1, 2, False, "10.0.0.2:2222")),
    "worker 0 without a chief": ((TWO, "worker", 0), (0, 2, True, "10.0.0.1:2222")),
    "chief": (({"worker": ["b:1", "c:1"], "chief": ["a:1"]}, "chief", 0), (0, 3, True, "a:1")),
    "worker 0 beside a chief": (({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "worker", 0), (1, 3, False, "b:1")),
    "chief alone": (({"chief": ["a:1"]}, "chief", 0), (0, 1, True, "a:1")),
    "beside an evaluator": (({"worker": ["a:1"], "evaluator": ["b:1"]}, "worker", 0), (0, 1, True, "a:1")),
    "roles without tasks": (
        ({"ps": [], "chief": [], **TWO, "evaluator": []}, "worker", 1),
        (1, 2, False, "10.0.0.2:2222"),
    ),
    "no worker beside the chief": (({"chief": ["a:1"], "worker": []}, "chief", 0), (0, 1, True, "a:1")),
    "index in quotes": ((TWO, "worker", "1"), (1, 2, False, "10.0.0.2:2222")),
    "IPv6": (({"worker": ["[2001:db8::1]:2222"]}, "worker", 0), (0, 1, True, "[2001:db8::1]:2222")),
    "all loopback": (({"worker": ["localhost:1", "[::1]:2"]}, "worker", 1), (1, 2, False, "[::1]:2")),
    "service names": (({"worker": ["w-0.svc_a:80", "w-1.svc_a:80"]}, "worker", 0), (0, 2, True, "w-0.svc_a:80")),
}


@pytest.mark.parametrize("name", RIGHT)
def test_valid_tf_config_is_parsed_and_survives_a_round_trip(name):
    task, expected = RIGHT[name]
    spec = ClusterSpec.from_json(config(*task, environment="cloud", rpc_layer="grpc"))
    assert (spec.worker_id, spec.num_workers, spec.is_chief, spec.address) == expected
    assert ClusterSpec.from_json(spec.to_json()) == spec
    assert hash(ClusterSpec.from_json(spec.to_json())) == hash(spec)


@pytest.mark.parametrize(
    "text",
    ["", "  ", "{}", '{"cluster": {}}', '{"task": {"type": "worker", "index": 0}}', '{"environment": "cloud"}'],
)
def test_a_process_without_a_cluster_trains_alone(text, monkeypatch):
    assert ClusterSpec.from_env({"TF_CONFIG": text}) is None
    monkeypatch.setenv("TF_CONFIG", text)
    assert is_chief()
    with pytest.raises(TFConfigError):
        ClusterSpec.from_json(text)


def test_is_chief_follows_the_environment(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert ClusterSpec.from_env() is None and is_chief()
    monkeypatch.setenv("TF_CONFIG", config(TWO, index=1))
    assert not is_chief()
    monkeypatch.setenv("TF_CONFIG", config({**TWO, "evaluator": ["h:1"]}, "evaluator"))
    assert not is_chief()


def test_describe_names_the_worker():
    assert ClusterSpec.from_json(config(TWO, index=1)).describe() == "worker 1 of 2 at 10.0.0.2:2222"
    with_chief = ClusterSpec.from_json(config({"chief": ["a:1"], "worker": ["b:1"]}))
    assert with_chief.describe() == "worker 1 of 2 (task worker 0) at b:1"


def test_slots_differ_between_workers_of_a_host():
    jobs = {"chief": ["a:1"], "worker": ["b:1", "A:2", "b:2", "a:3"]}
    specs = [ClusterSpec(jobs, "chief", 0), *(ClusterSpec(jobs, "worker", index) for index in range(4))]
    assert [spec.slot for spec in specs] == [0, 0, 1, 1, 2]
    assert [len(spec.workers_on_host) for spec in specs] == [3, 2, 3, 2, 3]


# A list of hosts in Slurm's notation, and the hosts.
HOSTLISTS = {
    "gpu1": ["gpu1"],
    "a,b-2": ["a", "b-2"],
    "node[01-03,07],gpu1": ["node01", "node02", "node03", "node07", "gpu1"],
    "n[9-11]": ["n9", "n10", "n11"],
    "rack[1-2]n[01-02]x": ["rack1n01x", "rack1n02x", "rack2n01x", "rack2n02x"],
}


@pytest.mark.parametrize("text", HOSTLISTS)
def test_hosts_of_slurm_are_expanded(text):
    assert expand_hosts(text) == HOSTLISTS[text]


def test_counts_of_slurm_are_expanded():
    assert [expand_counts(text) for text in ("3", "2(x3),1", "1,2(x2)")] == [[3], [2, 2, 2, 1], [1, 2, 2]]


def slurm(rank, nodes="node[1-2],gpu", tasks="2(x2),1", **more):
    step = {"SLURM_STEP_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_PROCID": str(rank)}
    return {name: value for name, value in {**step, **more}.items() if value is not None}


def test_tasks_of_slurm_are_workers_of_one_cluster():
    specs = [ClusterSpec.from_slurm(slurm(rank, SLURM_JOB_ID="7003")) for rank in range(5)]
    hosts, ports = zip(*(spec.address.split(":") for spec in specs), strict=True)
    assert hosts == ("node1", "node1", "node2", "node2", "gpu")
    assert [spec.worker_id for spec in specs] == list(range(5)) and all(spec.jobs == specs[0].jobs for spec in specs)
    assert ports[0] == ports[2] == ports[4] and int(ports[1]) == int(ports[0]) + 1
    assert ClusterSpec.from_slurm(slurm(3), base_port=5000).address == "node2:5001"


def test_slurm_jobs_and_steps_that_run_at_once_have_different_ports():
    steps = [{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(7003, 7013) for step in range(10)]
    specs = [ClusterSpec.from_slurm(slurm(0, "node", "64", **own)) for own in steps]
    addresses = [address for spec in specs for address in spec.jobs["worker"]]
    assert len(set(addresses)) == 64 * len(steps)
    assert max(int(address.split(":")[1]) for address in addresses) < 32768  # connections use the ports above
    assert ClusterSpec.from_slurm(slurm(64, "node", "65"), base_port=5000).address == "node:5064"


def mpi(rank, size, hosts=("a:2", "b"), names=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
    return ClusterSpec.from_mpi(hosts, dict(zip(names, (str(rank), str(size)), strict=True)))


def test_processes_of_mpi_are_workers_on_the_given_hosts():
    assert [mpi(rank, 3).address for rank in range(3)] == ["a:12345", "a:12346", "b:12345"]
    assert mpi(2, 3, "a:2,b").address == "b:12345"
    assert mpi(1, 2, ("a", "b"), ("PMI_RANK", "PMI_SIZE")).describe() == "worker 1 of 2 at b:12345"


# A scheduler's environment, and words that the error must contain.
NO_STEP = {
    "no srun": (lambda: ClusterSpec.from_slurm({"SLURM_PROCID": "0"}), ["SLURM_STEP_NODELIST", "is not set", "`srun`"]),
    "brackets": (lambda: ClusterSpec.from_slurm(slurm(0, "n[1-2")), ["SLURM_STEP_NODELIST", "brackets", "'n[1-2'"]),
    "no range": (lambda: ClusterSpec.from_slurm(slurm(0, "n[1-x]")), ["SLURM_STEP_NODELIST", "'1-x'"]),
    "no range that rises": (lambda: ClusterSpec.from_slurm(slurm(0, "n[3-1],gpu")), ["SLURM_STEP_NODELIST", "'3-1'"]),
    "no count": (lambda: ClusterSpec.from_slurm(slurm(0, tasks="2(y3)")), ["SLURM_STEP_TASKS_PER_NODE", "'2(y3)'"]),
    "fewer counts": (lambda: ClusterSpec.from_slurm(slurm(0, tasks="2")), ["has 3", "has 1"]),
    "rank": (lambda: ClusterSpec.from_slurm(slurm(5)), ["SLURM_PROCID", "from 0 to 4", "'5'"]),
    "other number": (lambda: ClusterSpec.from_slurm(slurm(0, SLURM_STEP_NUM_TASKS="8")), ["is 8", "has 5", "`srun`"]),
    "components": (
        lambda: ClusterSpec.from_slurm(slurm(0, SLURM_HET_SIZE="2")),
        ["one component", "SLURM_HET_SIZE", "TF_CONFIG", "--het-group"],
    ),
    "in turn": (
        lambda: ClusterSpec.from_slurm(slurm(1, SLURM_NODEID="1")),
        ["host by host", "task 1", "host number 1", "--distribution=block"],
    ),
    "in turn, seen by the first": (
        lambda: ClusterSpec.from_slurm(slurm(0, SLURM_NODEID="0", SLURM_GTIDS="0,3")),
        ["host by host", "tasks 0,3", "--distribution=block"],
    ),
    "ports": (lambda: ClusterSpec.from_slurm(slurm(0, "node", "65")), ["64 ports", "node has 65", "--base-port"]),
    "port": (lambda: ClusterSpec.from_slurm(slurm(0), base_port=65535), ["65535", "got 65536"]),
    "no mpirun": (lambda: ClusterSpec.from_mpi(["a"], {}), ["OMPI_COMM_WORLD_SIZE", "`mpirun`"]),
    "too few hosts": (lambda: mpi(0, 4), ["OMPI_COMM_WORLD_SIZE=4", "room for 3 processes on a:2,b."]),
    "no hosts": (lambda: mpi(0, 2, ["a:x"]), ["'a:x'", "node1:4"]),
    "no rank": (lambda: mpi("x", 3), ["OMPI_COMM_WORLD_RANK", "from 0 to 2", "'x'"]),
}


@pytest.mark.parametrize("name", NO_STEP)
def test_missing_scheduler_variables_are_named(name):
    make, words = NO_STEP[name]
    with pytest.raises(TFConfigError) as caught:
        make()
    message = str(caught.value)
    assert message.endswith(".") and [word for word in words if word not in message] == [], message


def test_a_large_cluster_gives_a_readable_error():
    many = {"worker": [f"10.0.{i // 250}.{i % 250 + 1}:2222" for i in range(1000)]}
    with pytest.raises(TFConfigError) as caught:
        ClusterSpec.from_json(config(many, index=1000))
    assert "992 more" in str(caught.value) and len(str(caught.value)) < 600


def test_local_cluster_has_one_port_a_worker():
    assert ClusterSpec.local(2, 1, [5001, 5002]).address == "127.0.0.1:5002"
    with pytest.raises(TFConfigError, match="one port per worker"):
        ClusterSpec.local(3, 0, [5001, 5002])


def test_free_ports_are_distinct_and_free():
    ports = free_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass
    assert free_ports(0) == []
    with pytest.raises(ValueError):
        free_ports(-1)


def test_held_ports_are_open_only_to_the_workers(monkeypatch):
    held = ports.hold_ports(2)
    first, second = held.numbers
    for name, value in held.env.items():
        monkeypatch.setenv(name, value)
    for host in ("127.0.0.1", ""):
        with pytest.raises(OSError, match="in use"):
            socket.create_server((host, first)).close()
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", first)):
        pass
    for host, port in (("127.0.0.1", first), ("", second)):  # as the rendezvous and gRPC do
        assert ports.is_held(port)
        check_bindable(ClusterSpec.local(1, 0, [port]))
        with (
            socket.create_server((host, port), reuse_port=True) as listener,
            socket.create_connection(("127.0.0.1", port)),
        ):
            listener.settimeout(5)
            listener.accept()[0].close()
    held.close()
    with socket.create_server(("", second)):
        assert not ports.is_held(free_ports(1)[0])


def test_own_port_is_bindable_until_another_process_takes_it():
    (port,) = free_ports(1)
    spec = ClusterSpec.local(1, 0, [port])
    check_bindable(spec)
    for host in ("127.0.0.1", ""):  # a socket on one interface blocks a socket on all interfaces
        with socket.socket() as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as gRPC does
            holder.bind((host, port))
            holder.listen()
            with pytest.raises(TFConfigError, match=rf"already taken(.|\n)*held by process {os.getpid()} \("):
                check_bindable(spec)
    check_bindable(spec)


def test_an_unknown_host_is_named():
    spec = ClusterSpec.from_json(config({"worker": ["no-such-host.invalid:2222"]}))
    with pytest.raises(TFConfigError, match=r"no-such-host\.invalid' does not resolve"):
        check_bindable(spec)


def test_a_pod_waits_until_its_name_resolves(monkeypatch):
    (port,) = free_ports(1)
    spec = ClusterSpec.from_json(config({"worker": [f"train-0.train:{port}"]}))
    asked = []

    def getaddrinfo(*_, **__):
        asked.append(None)
        if len(asked) < 3:
            raise socket.gaierror("not yet known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(ports, "_RETRY_SECONDS", 0.01)
    with pytest.raises(TFConfigError, match="does not resolve"):
        check_bindable(spec, pod_seconds=60)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    asked.clear()
    check_bindable(spec)
    assert len(asked) == 0
    with pytest.raises(TFConfigError, match="does not resolve"):
        check_bindable(spec, pod_seconds=0.005)
    check_bindable(spec, pod_seconds=60)
    assert len(asked) == 3


@pytest.mark.slow
def test_a_name_server_that_answers_after_seconds_is_waited_for(monkeypatch):
    """The system's resolver waits 5 s if the first of two name servers is dead."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(3))
    (port,) = free_ports(1)
    check_bindable(ClusterSpec.from_json(config({"worker": [f"late.example:{port}"]})))


# The environment of a scheduler's process, and words that the warning must contain, or None without a warning.
STARTED = {
    "mpirun": ({"OMPI_COMM_WORLD_SIZE": "4"}, ["OMPI_COMM_WORLD_SIZE is 4", "TF_CONFIG", "OMPI_COMM_WORLD_RANK"]),
    "MPICH": ({"PMI_SIZE": "2", "TF_CONFIG": " "}, ["PMI_SIZE is 2", "PMI_RANK", "--mpi"]),
    "MVAPICH": ({"MV2_COMM_WORLD_SIZE": "2"}, ["MV2_COMM_WORLD_SIZE is 2", "MV2_COMM_WORLD_RANK"]),
    "srun": ({"SLURM_STEP_NUM_TASKS": "3"}, ["SLURM_STEP_NUM_TASKS is 3", "SLURM_PROCID", "--slurm"]),
    "srun with PMI": ({"PMI_SIZE": "3", "SLURM_STEP_NUM_TASKS": "3"}, ["SLURM_STEP_NUM_TASKS is 3", "--slurm"]),
    "mpirun in a batch script": ({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}, ["--mpi"]),
    "a batch script": ({"SLURM_NTASKS": "3", "SLURM_PROCID": "0"}, None),
    "mpirun of one": ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
    "with TF_CONFIG": ({"OMPI_COMM_WORLD_SIZE": "4", "TF_CONFIG": "{}"}, None),
    "by hand": ({}, None),
}


def warned(environ, **more):
    """Returns the warnings of two calls in one process."""
    call = f"[warn({environ}, **{more}) for _ in range(2)]"
    code = f"from tfdist.cluster.launch_check import warn_if_one_of_many as warn; {call}"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=180, check=True).stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTED)
def test_one_process_of_many_that_would_train_alone_is_warned_once(name):
    environ, words = STARTED[name]
    err = warned(environ)
    assert err.count("trains alone") == (words is not None)
    assert [word for word in words or () if word not in err] == [], err


def test_many_mirrored_strategies_get_a_hint_to_the_multi_worker_strategy():
    err = warned({"SLURM_STEP_NUM_TASKS": "8"}, never_joins=True)
    assert err.count("each of the 8 processes trains alone") == 1, err
    assert "MultiWorkerMirroredStrategy" in err and "--slurm" in err and "cluster_resolver" not in err, err


def test_importing_does_not_load_tensorflow():
    code = "import sys, tfdist.cluster; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=180).returncode == 0
