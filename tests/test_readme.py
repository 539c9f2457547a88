"""The examples of the README and of the pages in `docs/` run as they are, most of them on workers that live on."""

import contextlib
import os
import pathlib
import subprocess
import sys
import sysconfig

import pytest

from code_blocks import BLOCKS, code
from launched import beside_progress, first_of_free_ports
from test_documentation_code import HOW_TO, SECTIONS, run_script
from tfdist.cluster import ClusterSpec
from tfdist.errors import TFConfigError

TFDIST = str(pathlib.Path(sysconfig.get_path("scripts")) / "tfdist")
OTHERS = [
    block
    for block in BLOCKS
    if (block.kind, block.language) == ("run", "python")
    and block.name not in ("main", "compression", "balanced", "faults", "testing", *HOW_TO)
    and not block.place.startswith(SECTIONS)
]


def run(command, folder):
    env = {**os.environ, "TMPDIR": str(folder.parent)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("launcher", [[sys.executable], [TFDIST, "run", "--workers", "2"]])
def test_the_script_runs_on_one_worker_and_on_two(launcher, tmp_path):
    (tmp_path / "train.py").write_text(code("main"))

    run([*launcher, "train.py"], tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.keras", "train.py"]


@pytest.mark.parametrize("placement", ["single", "2x1"])
def test_the_script_runs_on_workers_that_live_on(placement, pools, tmp_path):
    pools(placement).run(run_script, code("main"), str(tmp_path), alone=placement == "single")

    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".py"] == ["best.keras"]


@pytest.mark.parametrize("block", OTHERS, ids=[block.name for block in OTHERS])
def test_a_script_without_a_test_of_its_own_runs(block, pools, tmp_path):
    pool = pools("1x2" if block.workers == 1 else "2x1")
    pool.run(run_script, block.code, str(tmp_path), alone=block.workers == 1)


def test_the_changed_lines_are_those_of_the_script():
    changed = [line[1:] for line in code("diff").splitlines() if line.startswith("+")]
    assert len(changed) == 3
    assert [line for line in changed if line not in code("main").splitlines()] == []


@pytest.mark.parametrize(
    ("name", "environ", "rank"),
    [
        ("slurm", {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}, "SLURM_PROCID"),
        ("mpi", {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK"),
    ],
)
def test_under_a_scheduler_each_process_is_a_worker(name, environ, rank, tmp_path):
    """Starts the processes as a scheduler would, all on this machine."""
    (tmp_path / "train.py").write_text("import os; print(os.environ['TF_CONFIG'])")
    (line,) = [line for line in code(name).splitlines() if "tfdist run" in line]
    command = line[line.index("tfdist run") :].replace("node1:4,node2:4", "localhost:2").split()
    command = [TFDIST, *command[1:2], "--base-port", str(first_of_free_ports(2)), *command[2:]]
    with contextlib.ExitStack() as stack:
        jobs = []
        for index in range(2):
            env = {**os.environ, **environ, rank: str(index)}
            jobs.append(subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True))
            stack.callback(jobs[-1].kill)
        errors = [job.communicate(timeout=400)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], errors
    assert all(f"worker {index} of 2 at localhost" in error for index, error in enumerate(errors)), errors


def test_the_compressed_script_runs_on_two_workers(pools, tmp_path):
    printed = pools("2x1").run(run_script, code("compression"), str(tmp_path))

    assert all("sent_bytes=" in text for text in printed), printed


def test_the_balanced_script_runs_on_two_workers(pools, tmp_path):
    printed = pools("2x1").run(run_script, code("balanced"), str(tmp_path))

    assert all("(2, 0) Statistics(rows=" in text for text in printed), printed


def test_the_killed_script_kills_no_worker_in_a_later_attempt(pools, tmp_path):
    pools("2x1").run(run_script, code("faults"), str(tmp_path), {"TFDIST_ATTEMPT": "1"})

    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".py"] == []


@pytest.mark.exhaustive
def test_the_killed_script_ends_by_itself(tmp_path):
    (tmp_path / "train.py").write_text(code("faults"))

    out = run([TFDIST, "run", "--workers", "2", "train.py"], tmp_path)

    assert "worker 1 was killed by SIGKILL" in out
    assert "attempt 1: 2 workers" in out
    assert len(beside_progress(out)) <= 3 + 8, out


def test_the_test_helper_runs(tmp_path):
    (tmp_path / "check.py").write_text(code("testing"))

    run([sys.executable, "check.py"], tmp_path)


def test_the_error_is_as_shown():
    (shown,) = [" ".join(block.code.split()) for block in BLOCKS if block.code.startswith("tfdist: TF_CONFIG")]
    cluster = '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 3}}'

    with pytest.raises(TFConfigError) as raised:
        ClusterSpec.from_json(cluster)

    assert f"tfdist: {raised.value}" == shown
