"""`tfdist bench` measures exchanges of real workers, and refuses impossible measurements at once."""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from tfdist.cluster import ClusterSpec, free_ports
from tfdist.errors import ClusterError
from tfdist.launch.arguments import bit_rate
from tfdist.launch.memory_limit import free_memory

DEADLINE_SECONDS = 240
KIB = 1 << 10


def start(directory, *arguments, tf_config=None):
    """Starts the command in a process."""
    (directory / "tmp").mkdir(exist_ok=True)
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    environ |= {"CUDA_VISIBLE_DEVICES": "-1", "TMPDIR": str(directory / "tmp"), "COLUMNS": "100"}
    if tf_config:
        environ["TF_CONFIG"] = tf_config.to_json()
    command = [sys.executable, "-m", "tfdist.launch.cli", "bench", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environ, cwd=directory, **pipes)


def finish(*processes):
    """Returns the exit code, output and errors of each process."""
    try:
        ended = [process.communicate(timeout=DEADLINE_SECONDS) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
    return [(process.returncode, *streams) for process, streams in zip(processes, ended, strict=True)]


def on_two_hosts(directory, *arguments):
    """Returns the processes of the chief and worker 1, with the TF_CONFIG and `arguments` of each."""
    ports = free_ports(2)
    specs = [ClusterSpec.local(2, index, ports) for index in range(2)]
    return [start(directory, *own, tf_config=spec) for own, spec in zip(arguments, specs, strict=True)]


def files(directory):
    """Returns the names of the written files, without temporary files."""
    return [path.name for path in directory.iterdir() if path.name != "tmp"]


def check_row(row, size):
    """Checks that the numbers of a row are consistent."""
    seconds = row["seconds"]
    assert row["bytes"] == size and row["skipped"] is None
    assert 3 <= row["repetitions"] <= 50
    assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"] < DEADLINE_SECONDS
    assert row["algorithm_bytes_per_second"] == pytest.approx(size / seconds["median"])
    assert row["bus_bytes_per_second"] == pytest.approx(size / seconds["median"])  # 2 (N - 1) / N is 1 for 2 workers


def test_two_workers_on_this_machine_are_measured(tmp_path):
    (tmp_path / "new.json").write_text("an earlier result")
    sizes = ("--sizes", "64KiB,1KiB", "--compression", "none", "--seconds", 0.1)
    model = ("--parameters", "12k", "--compute-ms", 50, "--link", "10mbit")
    ((code, out, err),) = finish(start(tmp_path, "--workers", 2, *sizes, *model, "--json", "new.json"))
    assert code == 0, err
    assert files(tmp_path) == ["new.json"]
    result = json.loads((tmp_path / "new.json").read_text())
    assert {"machine", "versions", "command", "cluster", "rows", "expectations"} <= result.keys()
    assert result["command"].startswith("tfdist bench --workers 2") and result["workers"] == result["replicas"] == 2
    for row, size in zip(result["rows"], (1 * KIB, 64 * KIB), strict=True):
        check_row(row, size)
        shown = f"{size // KIB} KiB"
        assert shown in out and f"none, {shown}:" in err  # in the table, and in the log at the time of measurement

    (expected,) = result["expectations"]
    medians = [row["seconds"]["median"] for row in result["rows"]]
    exchange = np.interp(4 * 12_000, [1 * KIB, 64 * KIB], medians)
    assert expected["latency_seconds"] == medians[0] and expected["beyond_largest_size"] is False
    assert expected["exchange_seconds"] == pytest.approx(exchange)
    assert expected["sent_bytes"] == 4 * 12_000  # 2 (N - 1) / N of the gradients
    on_link = exchange + 8 * 4 * 12_000 / 10e6
    assert expected["link_exchange_seconds"] == pytest.approx(on_link)
    assert expected["step_seconds"] == pytest.approx({"low": max(0.05, on_link), "high": 0.05 + on_link})
    assert result["recommended"] == "none" and "on links of 10 Mbit/s: no compression" in " ".join(out.split())
    for word in ("algorithm:", "bus:", "times:", "latency:", "step:"):  # the meaning of the columns
        assert word in out


@pytest.mark.exhaustive
def test_hosts_with_their_own_tf_config_are_measured_and_the_chief_reports(tmp_path):
    arguments = ("--sizes", "1KiB,1MiB,1000000GiB", "--compression", "none,int8", "--seconds", 0.1, "--json")
    chief, other = finish(*on_two_hosts(tmp_path, (*arguments, "chief.json"), (*arguments, "other.json")))
    assert (chief[0], other[0]) == (0, 0), chief[2] + other[2]
    assert "1 MiB" in chief[1] and other[1] == ""
    assert "worker 1 of 2" in other[2] and "takes part" in other[2] and "takes part" not in chief[2]
    assert files(tmp_path) == ["chief.json"]
    rows = json.loads((tmp_path / "chief.json").read_text())["rows"]
    assert [row["compression"] for row in rows] == ["none"] * 3 + ["int8"] * 3
    for measured, skipped in (rows[1:3], rows[4:]):
        check_row(measured, KIB**2)
        assert "free memory" in skipped["skipped"] and "seconds" not in skipped
    assert "free memory" in chief[1]
    assert rows[1]["sent_bytes"] == KIB**2 and 3.5 < rows[1]["sent_bytes"] / rows[4]["sent_bytes"] < 4.1
    check_row(rows[0], KIB)
    assert rows[3]["skipped"] == "int8 does not compress a tensor of 16 x 16" and "seconds" not in rows[3]


@pytest.mark.exhaustive
def test_workers_with_different_commands_raise_instead_of_waiting(tmp_path):
    ended = finish(*on_two_hosts(tmp_path, ("--sizes", "1KiB,4KiB"), ("--sizes", "1KiB")))
    assert [code for code, _, _ in ended] == [1, 1]
    assert all("worker 1 differ" in err and "same command" in err for _, _, err in ended), ended


def test_an_unknown_codec_raises_before_workers_wait(tmp_path):
    lonely = start(tmp_path, "--compression", "none,int9", tf_config=ClusterSpec.local(2, 0, free_ports(2)))
    ((code, out, err),) = finish(lonely)
    assert (code, out) == (2, "") and "'int9'" in err and "int8" in err


def test_the_bench_waits_for_a_missing_worker_until_the_timeout(tmp_path):
    lonely = start(tmp_path, "--timeout", 3, "--json", "new.json", tf_config=ClusterSpec.local(2, 0, free_ports(2)))
    ((code, out, err),) = finish(lonely)
    assert (code, out) == (1, "") and "--timeout 3 s" in err
    assert files(tmp_path) == []


def check_part_is_told(chief, expected):
    """Checks that a job that ends after its first row shows this row, and those that it has measured since."""
    ((code, out, err),) = finish(chief)
    assert code == expected and "1 KB" in out and "Traceback" not in err, err
    result = json.loads((pathlib.Path(chief.args[-1])).read_text())
    told = [row["bytes"] for row in result["rows"]]
    assert 1 <= len(told) < len(SIZES) and told == SIZES[: len(told)] and result["error"]


@contextlib.contextmanager
def after_its_first_row(chief, *others):
    """Waits for the first row of a job. Kills all processes at the end, or at the deadline."""
    with contextlib.ExitStack() as stack:
        for process in (chief, *others):
            stack.enter_context(process)  # Exits after `kill`, since it waits for the process.
            stack.callback(process.kill)
        late = threading.Timer(DEADLINE_SECONDS, chief.kill)
        stack.callback(late.cancel)
        late.start()
        told = iter(chief.stderr.readline, "")
        assert any("1 KB: " in line for line in told), chief.poll()
        late.cancel()
        yield


# After the first row, further ones take minutes, in which a late test still ends the job.
SIZES = [1000, *((64 + number) * KIB**2 for number in range(30))]
LONG = ("--compression", "none", "--sizes", ",".join(f"{size}B" for size in SIZES), "--seconds", 30, "--json")


def test_measured_rows_are_reported_if_a_worker_dies(tmp_path):
    launcher = start(tmp_path, "--workers", 2, *LONG, tmp_path / "new.json")
    with after_its_first_row(launcher):
        pids = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        (worker,) = [pid for pid in pids if b'"index": 1}' in pathlib.Path(f"/proc/{pid}/environ").read_bytes()]
        os.kill(int(worker), signal.SIGKILL)
        check_part_is_told(launcher, 137)


@pytest.mark.exhaustive
def test_measured_rows_are_reported_if_the_chief_is_ended(tmp_path):
    chief, other = on_two_hosts(tmp_path, *[(*LONG, tmp_path / "new.json")] * 2)
    with after_its_first_row(chief, other):
        chief.terminate()
        check_part_is_told(chief, 143)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100mbit", 1e8),
        ("100 Mbit/s", 1e8),
        ("2.5Gbit", 2.5e9),
        ("10gbit/s", 1e10),
        ("56kbps", None),
        ("64kbitps", 64e3),
    ],
)
def test_the_rate_of_a_link_is_parsed(text, rate):
    if rate is None:
        with pytest.raises(argparse.ArgumentTypeError, match="such as 100mbit"):
            bit_rate(text)
    else:
        assert bit_rate(text) == rate


@pytest.mark.parametrize(
    ("costs", "name"),
    [
        ({"none": 1.0, "int8": 0.5, "topk": 0.4}, "topk"),
        ({"none": 1.0, "topk": 0.48, "int4": 0.5, "int8": 0.51}, "int8"),  # about as fast, and more exact
        ({"none": 0.105, "int8": 0.1}, "none"),
        ({"float16": 0.2, "of one's own": 0.1}, "of one's own"),
    ],
)
def test_the_recommended_codec_is_the_most_exact_of_the_fastest(costs, name):
    from tfdist.launch import bench

    expectations = [{"compression": codec, "link_exchange_seconds": cost} for codec, cost in costs.items()]
    assert bench.recommendation(expectations) == name
    assert bench.recommendation([{"compression": "none", "exchange_seconds": 1.0}]) is None
    slow = [each | {"step_seconds": {"high": 100 + each["link_exchange_seconds"]}} for each in expectations]
    assert bench.recommendation(slow) == min(
        costs, key=lambda codec: (codec != "none", codec != "float16", codec != "int8")
    )


def measure_with_a_deadline():
    import time

    from tfdist.launch import bench

    spec, left = ClusterSpec.from_env(), []
    plan = bench.BenchPlan((KIB,), ("none",), 0.01, time.monotonic() + (1000 if spec.is_chief else 10))
    rows = list(bench.measure(plan, spec, left.append))
    return len(rows), left


@pytest.mark.exhaustive
def test_after_the_rendezvous_the_deadline_of_the_chief_counts(pools):
    (of_chief, nothing), (of_other, (left,)) = pools("2x1").run(measure_with_a_deadline)
    assert of_chief == of_other == 1 and nothing == [] and 900 < left < 1010


TWO = ("--workers", "2")
REFUSALS = {
    "no cluster": ((), ("TF_CONFIG", "--workers 2")),
    "one worker": (("--workers", "1"), ("at least two workers", "--workers 2")),
    "no number": ((*TWO, "--sizes", "1KiB,big"), ("--sizes", "'big'", "KiB, MiB, GiB")),
    "unknown unit": ((*TWO, "--sizes", "1Kb"), ("--sizes", "'1Kb'", "KiB, MiB, GiB")),
    "nothing": ((*TWO, "--sizes", "0"), ("--sizes", "'0'")),
    "not whole": ((*TWO, "--sizes", "0.3B"), ("--sizes", "'0.3B'")),
    "part of a float32": ((*TWO, "--sizes", "1KiB,6B"), ("--sizes", "multiples of 4", "6 B")),
    "negative parameters": ((*TWO, "--parameters=-5M"), ("--parameters", "'-5M'")),
    "no directory": ((*TWO, "--json", "none/new.json"), ("--json", "none/new.json")),
    "no file": ((*TWO, "--json", "."), ("--json", "directory")),
    "no rate": ((*TWO, "--link", "fast"), ("--link", "such as 100mbit", "got fast")),
    "no rate at all": ((*TWO, "--link", "0mbit"), ("--link", "got 0mbit")),
    "too few GPUs": ((*TWO, "--gpus-per-worker", "1"), ("--gpus-per-worker", "2 workers", "CUDA_VISIBLE_DEVICES=3 ")),
    "unknown option": ((*TWO, "--sises", "1KiB"), ("--sises 1KiB", "did you mean --sizes")),
}


def called(arguments, directory, tf_config=""):
    """Returns exit code, output and errors of the command; the code is 100 if the command has loaded TensorFlow."""
    code = f"""
import sys
from tfdist.launch import cli
try:
    exit_code = cli.main({["bench", *arguments]})
except SystemExit as ended:
    exit_code = ended.code
sys.exit(100 if "tensorflow" in sys.modules else exit_code)
"""
    environ = {**os.environ, "TF_CONFIG": tf_config}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environ, cwd=directory, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """Returns exit code, output and errors of the command for each of `REFUSALS`, all called by one process."""
    code = f"""
import contextlib, io, json, sys
from tfdist.launch import cli
told = {{}}
for name, (arguments, _) in {REFUSALS}.items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exit_code = cli.main(["bench", *arguments])
        except SystemExit as ended:
            exit_code = ended.code
    told[name] = 100 if "tensorflow" in sys.modules else exit_code, out.getvalue(), err.getvalue()
print(json.dumps(told))
"""
    environ = {**os.environ, "TF_CONFIG": "", "CUDA_VISIBLE_DEVICES": "3"}
    options = {"capture_output": True, "text": True, "timeout": DEADLINE_SECONDS}
    directory = tmp_path_factory.mktemp("refused")
    done = subprocess.run([sys.executable, "-c", code], env=environ, cwd=directory, **options)
    assert done.returncode == 0, done.stderr
    assert files(directory) == []
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_arguments_raise_without_tensorflow(name, refused):
    _, words = REFUSALS[name]
    code, out, err = refused[name]
    assert (code, out) == (2, ""), err
    assert [word for word in words if word not in err] == []


@pytest.mark.parametrize(
    ("workers", "arguments", "words"),
    [
        (1, (), ("TF_CONFIG names 1", "--workers 2")),
        (3, TWO, ("TF_CONFIG names 3", "--workers is 2")),
        (2, ("--gpus-per-worker", "1"), ("--gpus-per-worker", "set its CUDA_VISIBLE_DEVICES")),
    ],
)
def test_a_tf_config_that_does_not_fit_raises_without_tensorflow(workers, arguments, words, tmp_path):
    spec = ClusterSpec.local(workers, 0, free_ports(workers))
    code, out, err = called(arguments, tmp_path, spec.to_json())
    assert (code, out) == (2, ""), err
    assert [word for word in words if word not in err] == []


def test_a_faulty_tf_config_is_named_without_tensorflow(tmp_path):
    code, _, err = called((), tmp_path, '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}}')
    assert code == 1 and "TF_CONFIG needs a `task`" in err


def test_help_names_all_options_without_tensorflow(tmp_path):
    code, out, err = called(["--help"], tmp_path)
    assert code == 0, err
    options = ("workers", "sizes", "compression", "parameters", "compute-ms", "seconds", "json", "timeout")
    assert [option for option in options if f"--{option}" not in out] == []


@pytest.mark.parametrize(
    ("elements", "exact", "right"),
    [
        ([3.0, 3.0], True, True),
        ([3.0, 2.0], True, False),  # one worker's part is missing
        ([3.0, 2.0], False, True),  # a codec may send the rest later
        ([3.0, float("nan")], True, False),
        ([float("nan"), 3.0], False, False),
        ([float("inf"), 3.0], False, False),
    ],
)
def test_a_wrong_sum_is_reported(elements, exact, right):
    import tensorflow as tf

    from tfdist.launch import bench

    with contextlib.nullcontext() if right else pytest.raises(ClusterError, match="must be 3"):
        bench.check_sum(tf.constant(elements), 2, exact=exact)


def test_tensors_are_nearly_square():
    from tfdist.launch import bench

    shapes = {4: [1, 1], 4 * 12: [3, 4], 4 * 7: [1, 7], KIB: [16, 16], 10**6: [500, 500], 1 << 20: [512, 512]}
    assert {size: bench._shape(size) for size in shapes} == shapes


def test_bytes_are_shown_in_round_units():
    from tfdist.launch.bench import _show_bytes

    shown = {12: "12 B", 1000: "1 KB", 1 << 10: "1 KiB", 10**6: "1 MB", 3 << 19: "1.5 MiB", 12345678: "11.77 MiB"}
    assert {size: _show_bytes(size) for size in shown} == shown


def rows(*points):
    from tfdist.launch import bench

    return [bench.Row("none", size, 2, (seconds,) * 3) for size, seconds in points]


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used", "cached"),
    [
        ("0::/", "", "memory.max", "memory.current", "inactive_file"),
        ("0::/job/step", "job", "memory.max", "memory.current", "inactive_file"),
        ("0::/job/step", "job/step", "memory.max", "memory.current", "inactive_file"),
        ("4:memory:/", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ("4:memory:/job", "memory/job", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_the_page_cache_of_a_group_counts_as_free_memory(line, folder, limit, used, cached, tmp_path):
    (tmp_path / "own").write_text(f"{line}\n3:cpu,cpuacct:/other\n")
    unlimited = free_memory(tmp_path, tmp_path / "own")
    group = tmp_path / folder
    group.mkdir(parents=True, exist_ok=True)
    for name, text in {limit: "1000", used: "900", "memory.stat": f"anon 500\n{cached} 300"}.items():
        (group / name).write_text(text + "\n")
    assert free_memory(tmp_path, tmp_path / "own") == 400 < unlimited
    if "memory" not in folder:
        (group / limit).write_text("max\n")
        assert free_memory(tmp_path, tmp_path / "own") > 400


def test_a_prediction_follows_the_measured_points():
    from tfdist.launch.bench import predict

    measured = rows((1000, 0.001), (2000, 0.002), (10_000, 0.004))
    expected = {10: 0.001, 1000: 0.001, 1500: 0.0015, 6000: 0.003, 10_000: 0.004, 18_000: 0.006}
    assert {size: predict(measured, size) for size in expected} == pytest.approx(expected)
    # If the larger size was not slower, there is no slope to extrapolate, and its rate is used.
    assert predict(rows((1000, 0.002), (2000, 0.001)), 4000) == pytest.approx(0.002)
    assert predict(rows((1000, 0.002)), 4000) == pytest.approx(0.008)
