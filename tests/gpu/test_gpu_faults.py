"""Failures on a GPU: BackupAndRestore, a killed worker, and the times that workers report while kernels run."""

import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys

import gpu_checks as checks
import numpy as np
import pytest
from gpu_devices import NEEDS_GPU

pytestmark = NEEDS_GPU

# Size of the matrices and number of products, which take a GPU or a core some tenths of a second.
BUSY = {"GPU": (4096, 24), "CPU": (512, 12)}[checks.KIND]
SCRIPT = pathlib.Path(__file__).parent / "killed_training.py"


def test_a_resumed_training_equals_the_uninterrupted_one(gpu_pools):
    ((whole, resumed),) = gpu_pools().run(checks.resumed)
    for own, expected in zip(resumed, whole, strict=True):
        np.testing.assert_allclose(own, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("workers", "devices", "kind"), [(1, 1, "mirrored"), (1, 2, "mirrored"), (2, 1, "workers")])
def test_reported_seconds_are_those_of_the_kernels_and_not_of_their_launch(gpu_pools, workers, devices, kind):
    reported, busy, moments = gpu_pools(workers, devices).run(checks.timed_steps, kind, *BUSY)[0]
    own = [statistics.median(of_replica) for of_replica in zip(*reported, strict=True)]
    print("seconds of the kernels:", busy, "reported by replica:", own)
    for noted in moments:
        print("BEGIN, LOSS, SHARE, GRADIENTS, END, ...:", [round(each - moments[0][0], 6) for each in noted])
    assert all(seconds > 0.7 * busy for seconds in own)


def test_a_job_continues_after_the_kill_of_a_worker_that_uses_the_gpu(tmp_path):
    command = [sys.executable, "-m", "tfdist", "run", "--workers", "2", "--max-restarts", "1", "--log-dir"]
    environment = {**os.environ, "TF_FORCE_GPU_ALLOW_GROWTH": "true", "TFDIST_GPU_TESTS_ON": checks.KIND}
    finished = subprocess.run(
        [*command, str(tmp_path / "run"), str(SCRIPT), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert (tmp_path / "killed").exists()
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert f"{signal.SIGKILL.name}" in finished.stdout + finished.stderr
