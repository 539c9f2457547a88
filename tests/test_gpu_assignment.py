"""`--gpus-per-worker` gives each worker of a machine its own GPUs. Made-up lists of GPUs stand for real ones."""

import os
import stat
import subprocess
import sys

import pytest

from launched import nothing_left
from tfdist.cluster import ClusterSpec, free_ports
from tfdist.errors import ClusterError
from tfdist.launch import gpu_discovery
from tfdist.launch.gpu_assignment import assign_gpus, sharing_warning
from tfdist.launch.gpu_discovery import FoundGpus, count_device_files, find_gpus, parse_list

TWO = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-11)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-22)\n"
SPLIT = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-11)
  MIG 3g.20gb     Device  0: (UUID: MIG-aa)
  MIG 3g.20gb     Device  1: (UUID: MIG-bb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-22)
"""
PRINT = 'print(os.environ["TFDIST_SLOT"], os.environ.get("CUDA_VISIBLE_DEVICES"), "tensorflow" in sys.modules)'


def found(*devices, **options):
    return FoundGpus(devices, "the list has them", **options)


@pytest.fixture
def run(tmp_path):
    with nothing_left(tmp_path) as run:
        yield run


def fake_nvidia_smi(directory, printed="", code=0, then=""):
    """Writes an `nvidia-smi`, and returns an environment with it and the usual programs in PATH."""
    directory.mkdir(exist_ok=True)
    program = directory / "nvidia-smi"
    program.write_text(f'#!/bin/sh\n[ "$1" = --list-gpus ] || exit 99\nprintf %s "{printed}"\n{then}\nexit {code}\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{directory}:/usr/bin:/bin"}


# Finding GPUs.


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("0", ["0"]),
        ("3,1", ["3", "1"]),
        (" 2 , 3,", ["2", "3"]),
        ("GPU-22,GPU-11", ["GPU-22", "GPU-11"]),
        ("MIG-aa,MIG-GPU-11/1/0", ["MIG-aa", "MIG-GPU-11/1/0"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2,-1,3", ["2"]),
    ],
)
def test_cuda_visible_devices_names_the_gpus_in_its_order(value, devices, tmp_path):
    environ = {**fake_nvidia_smi(tmp_path, TWO), "CUDA_VISIBLE_DEVICES": value}
    gpus = find_gpus(environ)
    assert list(gpus.devices) == devices and gpus.is_by_user and f"CUDA_VISIBLE_DEVICES={value} names" in gpus.source


@pytest.mark.parametrize(("value", "words"), [("0,gpu1", "got 'gpu1'"), ("0,1,0", "got 0 twice"), ("-2", "got '-2'")])
def test_entries_that_cuda_does_not_take_are_refused(value, words):
    with pytest.raises(ClusterError, match=words):
        find_gpus({"CUDA_VISIBLE_DEVICES": value})


@pytest.mark.parametrize(
    ("printed", "devices"),
    [
        (TWO, ["0", "1"]),
        (SPLIT, ["MIG-aa", "MIG-bb", "GPU-22"]),
        ("No devices found.\n", []),
        ("Unable to determine the device handle for GPU0: Unknown Error\n" + TWO, ["0", "1"]),
        ("", []),
    ],
)
def test_the_list_of_nvidia_smi_is_read(printed, devices, tmp_path):
    assert list(parse_list(printed)) == devices
    gpus = find_gpus(fake_nvidia_smi(tmp_path, printed))
    assert list(gpus.devices) == devices and not gpus.is_by_user and "nvidia-smi --list-gpus" in gpus.source


def test_a_driver_that_does_not_work_is_no_gpu_and_named(tmp_path):
    gpus = find_gpus(fake_nvidia_smi(tmp_path, "couldn't communicate with the driver", code=9))
    assert gpus.devices == () and "exit code 9: couldn't communicate with the driver" in gpus.source


def test_nvidia_smi_has_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_discovery, "_DEADLINE_SECONDS", 0.2)
    with pytest.raises(ClusterError, match=r"must answer within 0.2 s.*dmesg.*CUDA_VISIBLE_DEVICES"):
        find_gpus(fake_nvidia_smi(tmp_path, then="exec sleep 20"))


def test_without_nvidia_smi_the_device_files_count(tmp_path):
    for name in ("nvidia0", "nvidia3", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    gpus = find_gpus({"PATH": str(tmp_path)}, device_folder=tmp_path)
    assert gpus.devices == ("0", "1", "2") and "no nvidia-smi, and /dev has 3 GPUs" in gpus.source
    assert count_device_files(tmp_path / "nowhere") == 0


# Sharing them out.


def test_each_slot_gets_its_own_gpus_in_order():
    four = found("3", "2", "GPU-11", "0")
    assert assign_gpus(four, workers=4, gpus_per_worker=1) == ("3", "2", "GPU-11", "0")
    assert assign_gpus(four, workers=2, gpus_per_worker=2) == ("3,2", "GPU-11,0")
    assert assign_gpus(four, workers=3, gpus_per_worker=1) == ("3", "2", "GPU-11")
    assert assign_gpus(found(), workers=2, gpus_per_worker=0) == ("-1", "-1")


@pytest.mark.parametrize(
    ("gpus", "workers", "each", "words"),
    [
        (found("0", "1"), 3, 1, ["This machine needs 3 GPUs for 3 workers, but", "Start at most 2 workers"]),
        (
            found("0", "1", "2"),
            2,
            2,
            ["needs 4 GPUs for 2 workers, but the list has them", "most 1 worker here, give --gpus-per-worker 1, or"],
        ),
        (
            found(),
            1,
            1,
            ["needs 1 GPU for 1 worker,", "them. Give --gpus-per-worker 0 to train"],
        ),
        (found("0", is_by_user=True), 2, 1, ["name more GPUs in CUDA_VISIBLE_DEVICES", "here"]),
    ],
)
def test_too_many_workers_are_refused_with_the_remedy(gpus, workers, each, words):
    with pytest.raises(ClusterError) as raised:
        assign_gpus(gpus, workers=workers, gpus_per_worker=each)
    assert all(word in str(raised.value) for word in words) and "scheduler" not in str(raised.value)


def test_gpus_that_a_scheduler_may_have_shared_out_are_named():
    with pytest.raises(ClusterError, match="leave the option out if the scheduler"):
        assign_gpus(found("0", is_by_user=True), workers=2, gpus_per_worker=1, is_by_scheduler=True)


def test_a_worker_gets_one_mig_device():
    split = found("MIG-aa", "MIG-bb", "MIG-cc", "MIG-dd")
    assert assign_gpus(split, workers=2, gpus_per_worker=1) == ("MIG-aa", "MIG-bb")
    with pytest.raises(ClusterError, match="can use one MIG device, got 2 for each worker"):
        assign_gpus(split, workers=2, gpus_per_worker=2)


@pytest.mark.parametrize(
    ("workers", "gpus", "environ", "words"),
    [
        (2, 4, {}, "share all 4 GPUs, and the first one takes nearly all memory of them. Give --gpus-per-worker 2 so"),
        (2, 1, {}, "share the GPU, and the first one takes nearly all memory of it. Start at most 1 with"),
        (1, 4, {}, None),
        (2, 0, {}, None),
        (2, 4, {"CUDA_VISIBLE_DEVICES": "0,1"}, None),
        (2, 4, {"CUDA_VISIBLE_DEVICES": ""}, None),
    ],
)
def test_workers_that_would_share_all_gpus_are_warned(workers, gpus, environ, words):
    warning = sharing_warning(environ, workers=workers, gpus=gpus)
    assert words in warning and "--gpus-per-worker 0" in warning if words else warning is None


# In real processes.


def outputs(run):
    (logs,) = run.log_dirs()
    return {path.relative_to(logs).as_posix(): path.read_text().strip() for path in sorted(logs.rglob("worker-*.log"))}


def without_visible_devices(run, monkeypatch, printed=TWO):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake_nvidia_smi(run.directory / "bin", printed)


def test_each_worker_sees_its_own_gpu(run, monkeypatch):
    env = without_visible_devices(run, monkeypatch)
    code, _, err = run.finish("--workers", 2, "--gpus-per-worker", 1, run.script(PRINT), env=env)
    assert code == 0 and "2 workers on this machine, CUDA_VISIBLE_DEVICES 0 | 1; logs in" in err, err
    assert list(outputs(run).values()) == ["0 0 False", "1 1 False"]


def test_a_worker_keeps_its_gpu_over_a_restart_with_fewer_workers(run):
    body = """
        attempt = int(os.environ["TFDIST_ATTEMPT"])
        print(os.environ["TFDIST_SLOT"], os.environ["CUDA_VISIBLE_DEVICES"])
        leave(f"met-{attempt}-{worker}", 0)
        while attempt < 2 and len(list(here.glob(f"met-{attempt}-*"))) < 3: time.sleep(0.01)
        if attempt < 2 and worker == 1: os._exit(5)
        if attempt < 2: time.sleep(60)
    """
    env = {"CUDA_VISIBLE_DEVICES": "7,GPU-22,1,0,4,2"}
    options = ["--workers", 3, "--min-workers", 2, "--gpus-per-worker", 2]
    code, _, err = run.finish(*options, run.script(body), env=env, restarts=2)
    assert code == 0, err
    seen = outputs(run)
    first = ["0 7,GPU-22", "1 1,0", "2 4,2"]
    assert [seen[f"attempt-0/worker-{index}.log"] for index in range(3)] == first
    assert [seen[f"attempt-2/worker-{index}.log"] for index in range(2)] == [first[0], first[2]]


def test_zero_hides_all_gpus(run):
    env = {"CUDA_VISIBLE_DEVICES": "0,1"}
    code, _, err = run.finish("--workers", 2, "--gpus-per-worker", 0, run.script(PRINT), env=env)
    assert code == 0 and list(outputs(run).values()) == ["0 -1 False", "1 -1 False"], err


def test_more_workers_than_gpus_are_refused_before_any_starts(run, monkeypatch):
    env = without_visible_devices(run, monkeypatch)
    code, out, err = run.finish("--workers", 3, "--gpus-per-worker", 1, run.script(PRINT), env=env)
    assert code == 2 and out == "" and run.log_dirs() == []
    assert "--gpus-per-worker: This machine needs 3 GPUs for 3 workers, but `nvidia-smi" in err
    assert "lists 2 GPUs. Start at most 2 workers here, or give --gpus-per-worker 0" in err and "Traceback" not in err


def test_a_worker_of_a_cluster_gets_the_gpus_of_its_place_on_its_host(run):
    spec = ClusterSpec.local(2, 1, free_ports(2))
    env = {"TF_CONFIG": spec.to_json(), "CUDA_VISIBLE_DEVICES": "4,5"}
    code, out, err = run.finish("--gpus-per-worker", 1, run.script(PRINT), env=env)
    assert code == 0 and out.split() == ["1", "5", "False"] and "CUDA_VISIBLE_DEVICES 5; logs in" in err, err
    code, out, err = run.finish("--gpus-per-worker", 1, run.script(PRINT), env={**env, "CUDA_VISIBLE_DEVICES": "0"})
    assert code == 2 and out == "" and "leave the option out if the scheduler" in err


WITH_GPUS = """
import pathlib, sys
from tfdist.launch import cli, gpu_discovery
gpu_discovery._DEVICE_FOLDER = pathlib.Path(sys.argv[1])
sys.exit(cli.main(["run", "--max-restarts=0", *sys.argv[2:]]))
"""


@pytest.mark.parametrize("number", ["2", "1"])
def test_without_the_option_workers_see_all_gpus_and_a_warning_names_it(run, monkeypatch, number):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices = run.directory / "devices"
    devices.mkdir()
    (devices / "nvidia0").touch()
    (devices / "nvidia1").touch()
    done = subprocess.run(
        [sys.executable, "-c", WITH_GPUS, devices, "--workers", number, run.script(PRINT)],
        env={**os.environ, "TMPDIR": str(run.directory / "tmp")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout.startswith("0 None"), done.stderr
    assert done.stderr.count("share all 2 GPUs") == (number == "2")
