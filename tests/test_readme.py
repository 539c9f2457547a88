"""What the README shows runs as it stands there."""

import pathlib
import re
import subprocess
import sys
import sysconfig

import pytest

from tfdist.cluster import ClusterSpec
from tfdist.errors import TFConfigError

TFDIST = str(pathlib.Path(sysconfig.get_path("scripts")) / "tfdist")
README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()


def block(name):
    return re.search(rf"<!-- test: {name} -->\n```python\n(.*?)```", README, re.DOTALL)[1]


def run(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.parametrize("launcher", [[sys.executable], [TFDIST, "run", "--workers", "2"]])
def test_the_script_runs_on_one_worker_and_on_two(launcher, tmp_path):
    (tmp_path / "train.py").write_text(block("main"))

    run([*launcher, "train.py"], tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.keras", "train.py"]


def test_the_compressed_script_runs_on_two_workers(tmp_path):
    (tmp_path / "train.py").write_text(block("compression"))

    assert "sent_bytes=" in run([TFDIST, "run", "--workers", "2", "train.py"], tmp_path)


def test_the_balanced_script_runs_on_two_workers(tmp_path):
    (tmp_path / "train.py").write_text(block("balanced"))

    assert "(2, 0) Statistics(rows=" in run([TFDIST, "run", "--workers", "2", "train.py"], tmp_path)


def test_the_killed_script_ends_by_itself(tmp_path):
    (tmp_path / "train.py").write_text(block("faults"))

    out = run([TFDIST, "run", "--workers", "2", "train.py"], tmp_path)

    assert "worker 1 was killed by SIGKILL" in out
    assert "attempt 1: 2 workers" in out


def test_the_test_helper_runs(tmp_path):
    (tmp_path / "check.py").write_text(block("testing"))

    run([sys.executable, "check.py"], tmp_path)


def test_the_error_is_as_shown():
    shown = " ".join(re.search(r"```\n(TFConfigError: .*?)```", README, re.DOTALL)[1].split())
    cluster = '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 3}}'

    with pytest.raises(TFConfigError) as raised:
        ClusterSpec.from_json(cluster)

    assert f"TFConfigError: {raised.value}" == shown


def test_no_placeholder_is_left():
    assert "@@" not in README
