"""The files in `deploy/` agree with each other and with tfdist. The tests need no scheduler and no container image."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest

from launched import eventually
from test_documentation_code import run_script
from tfdist.cluster import ClusterSpec
from tfdist.faults import FaultTolerance
from tfdist.network import secret
from tfdist.telemetry.worker_metrics import METRICS, PHASES

ROOT = pathlib.Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SCRIPTS = sorted([*DEPLOY.rglob("*.sh"), *DEPLOY.rglob("*.sbatch")])
# What the files set: variables of the script in them, and those that tfdist reads.
OF_TFDIST = {"TF_CONFIG", secret.SECRET, secret.SECRET_FILE, "TFDIST_START_TIMEOUT_SECONDS"}
OF_SCRIPT = {"OUTPUT_DIR", "EPOCHS", "METRICS_PORT"}


def documents(name):
    """Returns the documents of a YAML file. PyYAML is a package of the tests' own, since tfdist needs none."""
    return list(pytest.importorskip("yaml").safe_load_all((DEPLOY / name).read_text()))


def of_kind(name, kind):
    (found,) = [each for each in documents(name) if each["kind"] == kind]
    return found


def values(env, **given):
    """Returns the variables of a container whose values are in the manifest, with references replaced."""
    values = dict(given)
    for each in env:
        if "value" in each:  # The others come from the pod or a secret.
            values[each["name"]] = re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], each["value"])
    return values


def steps(kind):
    """Returns the arguments of the Dockerfile's instructions of a kind."""
    lines = re.sub(r"\\\n", " ", (DEPLOY / "docker/Dockerfile").read_text()).splitlines()
    return [line.partition(" ")[2] for line in lines if line.startswith(f"{kind} ")]


def pods_of_the_job():
    return of_kind("kubernetes/job.yaml", "Job")["spec"]["template"]["spec"]


def pods_of_the_runtime():
    (jobs,) = of_kind("kubernetes/kubeflow_runtime.yaml", "TrainingRuntime")["spec"]["template"]["spec"][
        "replicatedJobs"
    ]
    return jobs["template"]["spec"]["template"]["spec"]


def test_the_image_gets_files_that_exist_and_a_command_that_tfdist_has():
    assert [file for copy in steps("COPY") for file in copy.split()[:-1] if not (ROOT / file).exists()] == []
    (command,) = map(json.loads, steps("CMD"))
    assert command[:2] == ["tfdist", "run"]
    assert command[-1] in [copy.split()[-1] for copy in steps("COPY")]
    assert set(re.findall(r"(\w+)=", *steps("ENV"))) - {"PYTHONUNBUFFERED"} <= OF_SCRIPT | OF_TFDIST
    assert steps("FROM")[0].startswith("python:3.11")


@pytest.mark.slow
def test_the_files_that_the_image_gets_are_enough_to_install_tfdist(tmp_path):
    """Replays the steps COPY and RUN up to the package in a folder, without its dependencies and without a network."""
    for copy in steps("COPY"):
        *files, target = copy.split()
        if target.startswith("/opt/tfdist"):
            for file in files:
                place = tmp_path / target.strip("/") / (pathlib.Path(file).name if target.endswith("/") else "")
                place.parent.mkdir(parents=True, exist_ok=True)
                (shutil.copytree if (ROOT / file).is_dir() else shutil.copy)(ROOT / file, place)
    (install,) = [run for run in steps("RUN") if run.startswith("pip install")]
    assert install.split()[-1] == "/opt/tfdist[prometheus]"

    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(tmp_path / "site")]
    command = [sys.executable, "-m", "pip", "install", *options, str(tmp_path / "opt/tfdist")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/tfdist/strategies/mirrored.py").exists()


def test_the_services_of_compose_are_workers_of_one_cluster():
    (compose,) = documents("docker/compose.yaml")
    services = compose["services"]
    specs = {name: ClusterSpec.from_json(each["environment"]["TF_CONFIG"]) for name, each in services.items()}
    assert [spec.address for spec in specs.values()] == [f"{name}:2222" for name in services]
    assert len({spec.jobs["worker"] for spec in specs.values()}) == 1 and len(specs) == 2
    for service in services.values():
        assert set(service["environment"]) <= OF_TFDIST | OF_SCRIPT
        (name,) = service["secrets"]
        assert service["environment"][secret.SECRET_FILE] == f"/run/secrets/{name}" and name in compose["secrets"]
        assert (DEPLOY / "docker" / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).is_file()
        assert set(service["networks"]) <= set(compose["networks"])
        assert {volume.partition(":")[0] for volume in service["volumes"]} == set(compose["volumes"])


def test_the_pods_of_the_job_are_workers_of_one_cluster():
    job = of_kind("kubernetes/job.yaml", "Job")
    service, policy = (of_kind("kubernetes/job.yaml", kind) for kind in ("Service", "NetworkPolicy"))
    pods, name, size = pods_of_the_job(), job["metadata"]["name"], job["spec"]["completions"]
    specs = [
        ClusterSpec.from_json(values(pods["containers"][0]["env"], INDEX=str(index))["TF_CONFIG"])
        for index in range(size)
    ]
    assert [spec.address for spec in specs] == [f"{name}-{index}.{pods['subdomain']}:2222" for index in range(size)]
    assert specs[0].num_workers == size == job["spec"]["parallelism"]
    assert pods["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert pods["restartPolicy"] == "Never"  # podFailurePolicy needs it.
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        assert rule.get("onExitCodes", {}).get("containerName", "train") == pods["containers"][0]["name"]


def test_the_nodes_of_the_runtime_are_workers_of_one_cluster():
    runtime, job = (of_kind("kubernetes/kubeflow_runtime.yaml", kind) for kind in ("TrainingRuntime", "TrainJob"))
    size, name = runtime["spec"]["mlPolicy"]["numNodes"], job["metadata"]["name"]
    env = pods_of_the_runtime()["containers"][0]["env"]
    specs = [ClusterSpec.from_json(values(env, INDEX=str(index), JOB=name)["TF_CONFIG"]) for index in range(size)]
    # A JobSet names its pods <JobSet>-<replicated job>-<number of the job>-<index>.<JobSet>.
    assert [spec.address for spec in specs] == [f"{name}-node-0-{index}.{name}:2222" for index in range(size)]
    assert specs[0].num_workers == size == job["spec"]["trainer"]["numNodes"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["trainer"]["command"] == pods_of_the_runtime()["containers"][0]["command"]


def test_kubernetes_accepts_the_manifests():
    """Of the runtime, whose kind is Kubeflow's, the schemas of Kubernetes know the pods."""
    schemas = pytest.importorskip("kubernetes_validate")
    named = {"metadata": {"name": "node"}, "spec": pods_of_the_runtime()}
    for document in [*documents("kubernetes/job.yaml"), {"apiVersion": "v1", "kind": "Pod"} | named]:
        schemas.validate(document, schemas.latest_version(), strict=True)


@pytest.mark.parametrize("pods", [pods_of_the_job, pods_of_the_runtime])
def test_pods_set_variables_that_are_read_and_have_time_to_save(pods):
    pods = pods()
    (container,) = pods["containers"]
    names = [each["name"] for each in container["env"]]
    assert set(names) <= OF_TFDIST | OF_SCRIPT | {"INDEX", "JOB"}
    assert names.index("INDEX") < names.index("TF_CONFIG"), "a reference needs a variable before it"
    assert FaultTolerance().with_environment(values(container["env"], INDEX="0", JOB="train"))
    assert pods["terminationGracePeriodSeconds"] > FaultTolerance().preemption_timeout_seconds
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pods["volumes"]}
    assert container["command"][:2] == ["tfdist", "run"] and container["command"][-1] == "train.py"


def test_prometheus_finds_the_port_of_the_metrics_and_may_read_it():
    (pod,) = [each["spec"]["template"] for each in documents("kubernetes/job.yaml") if each["kind"] == "Job"]
    runtime = of_kind("kubernetes/kubeflow_runtime.yaml", "TrainingRuntime")["spec"]["template"]["spec"]
    for template in (pod, runtime["replicatedJobs"][0]["template"]["spec"]["template"]):
        annotations = template["metadata"]["annotations"]
        port = values(template["spec"]["containers"][0]["env"], INDEX="0", JOB="train")["METRICS_PORT"]
        assert annotations["prometheus.io/scrape"] == "true" and annotations["prometheus.io/port"] == port
    rules = of_kind("kubernetes/job.yaml", "NetworkPolicy")["spec"]["ingress"]
    assert [each["port"] for rule in rules for each in rule.get("ports", [])] == [int(port)]


def test_alerts_and_dashboard_use_metrics_that_exist():
    (rules,) = documents("prometheus-rules.yaml")
    found = [rule for group in rules["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in found if "record" in rule}
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]

    names = {name for text in [*(rule["expr"] for rule in found), *shown] for name in re.findall(r"tfdist[\w:]+", text)}
    assert names - recorded <= {metric.name for metric in METRICS}
    assert {metric.name for metric in METRICS} <= set(re.findall(r"tfdist_\w+", " ".join(shown))) | {
        "tfdist_steps_total"
    }
    for text in re.findall(r'phase=~?"([\w|]+)"', " ".join([*(rule["expr"] for rule in found), *shown])):
        assert set(text.split("|")) <= PHASES.keys()
    for rule in found:
        assert "record" in rule or {"summary", "description"} <= rule["annotations"].keys()
    (config,) = documents("prometheus.yaml")
    assert [(DEPLOY / name).is_file() for name in config["rule_files"]] == [True]


def test_the_pages_make_the_secret_that_the_pods_read():
    commands = (ROOT / "docs/how_to/kubernetes.md").read_text()
    for pods in (pods_of_the_job(), pods_of_the_runtime()):
        (key,) = [each["valueFrom"] for each in pods["containers"][0]["env"] if each["name"] == secret.SECRET]
        made = (
            f"kubectl create secret generic {key['secretKeyRef']['name']} --from-literal={key['secretKeyRef']['key']}="
        )
        assert made in commands


@pytest.mark.parametrize("script", SCRIPTS, ids=[path.name for path in SCRIPTS])
def test_scripts_have_no_syntax_error_and_set_variables_that_are_read(script):
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).stderr == b""
    assert os.access(script, os.X_OK)
    assert set(re.findall(r"^export (\w+)", script.read_text(), re.MULTILINE)) <= OF_TFDIST | OF_SCRIPT


@pytest.mark.slow
def test_the_script_runs_on_two_workers(pools, tmp_path):
    pools("2x1").run(run_script, (DEPLOY / "train.py").read_text(), str(tmp_path), {"EPOCHS": "2"})

    assert {"log.csv", "model.keras"} <= {path.name for path in (tmp_path / "output").iterdir()}


@pytest.fixture
def machine(tmp_path):
    """Returns the environment of a machine whose programs write their arguments to a file."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("srun", "mpirun", "scontrol", "tfdist"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> "$CALLS"\nexit ${{{name}_code:-0}}\n')
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "CALLS": str(tmp_path / "calls"), "SLURM_JOB_ID": "7"}


def calls(machine):
    return pathlib.Path(machine["CALLS"]).read_text().splitlines()


@pytest.mark.parametrize(("script", "program"), [("many_nodes", "srun"), ("one_node", "tfdist")])
@pytest.mark.parametrize(("code", "again"), [(0, False), (1, False), (75, True)])
def test_a_batch_script_goes_back_into_the_queue_if_its_workers_were_asked_to_leave(
    script, program, code, again, machine, tmp_path
):
    environ = machine | {f"{program}_code": str(code)}
    done = subprocess.run([DEPLOY / f"slurm/{script}.sbatch"], cwd=tmp_path, env=environ, timeout=60)

    assert done.returncode == code
    assert calls(machine)[0].startswith("srun --kill-on-bad-exit=0 tfdist run" if program == "srun" else "tfdist run")
    assert calls(machine)[1:] == ["scontrol requeue 7"] * again


def test_a_batch_script_passes_the_signal_of_slurm_to_tfdist_once(machine, tmp_path):
    program = pathlib.Path(machine["PATH"].partition(os.pathsep)[0]) / "tfdist"
    program.write_text(
        '#!/bin/bash\ntrap "echo USR1 >> $CALLS; sleep 0.3; exit 75" USR1\n'
        "echo up >> $CALLS\nwhile :; do sleep 0.05; done\n"
    )
    job = subprocess.Popen([DEPLOY / "slurm/one_node.sbatch"], cwd=tmp_path, env=machine)
    try:
        assert eventually(lambda: pathlib.Path(machine["CALLS"]).exists())
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=60) == 75
    finally:
        job.kill()
    assert calls(machine) == ["up", "USR1", "scontrol requeue 7"]


def test_mpirun_and_tfdist_get_the_same_hosts(machine, tmp_path):
    subprocess.run([DEPLOY / "mpi/train.sh", "a:2,b:2"], cwd=tmp_path, env=machine, check=True, timeout=60)

    (call,) = calls(machine)
    assert re.search(r"^mpirun -H (\S+) .*tfdist run --mpi (\S+) ", call).groups() == ("a:2,b:2", "a:2,b:2")
