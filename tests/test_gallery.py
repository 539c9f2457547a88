"""Runs the examples of the gallery on small data, each in one way by default."""

import json
import os
import subprocess
import sys

import pytest

from example_runs import DEADLINE_SECONDS, EXAMPLES, by_default, one_process, printed, runs, two_devices


@pytest.fixture
def run(tmp_path):
    with runs(tmp_path) as run:
        yield run


@pytest.mark.parametrize("way", by_default(one_process))
def test_image_files_learns_of_augmented_images(run, way, data_dir, tmp_path):
    text = run(way, "image_files.py", "--epochs", "5", "--data_dir", data_dir, "--folder", str(tmp_path / "files"))
    assert printed("test accuracy", text) > 0.8
    # After 20 epochs without augmentation it is 0.56.
    assert printed("accuracy on moved test images", text) > 0.7


@pytest.mark.parametrize("way", by_default(two_devices))
def test_the_recommender_beats_popularity_with_a_codec_for_its_rows(run, way):
    flags = ("--users", "2000", "--items", "1000", "--batch_size", "512", "--epochs", "2", "--compression", "int8")
    text = run(way, "recommender.py", *flags)
    assert printed("hit rate", text) > printed("hit rate of popularity", text) + 0.05


@pytest.mark.parametrize("way", by_default(two_devices))
def test_text_classification_learns_and_saves_a_model_of_strings(run, way, tmp_path):
    flags = ("--epochs", "1", "--batch_size", "128", "--save", str(tmp_path / "model.keras"))
    text = run(way, "text_classification.py", *flags)
    assert printed("test accuracy", text) > printed("share of the largest class", text) + 0.3
    assert (tmp_path / "model.keras").exists()


@pytest.mark.parametrize("way", by_default(one_process))
def test_the_forecast_beats_repeating_the_series(run, way):
    text = run(way, "time_series.py", "--days", "140", "--epochs", "3", "--batch_size", "32", "--width", "16")
    naive = min(printed("error of repeating yesterday", text), printed("error of repeating last week", text))
    assert printed("error of the forecast", text) < 0.9 * naive


@pytest.mark.parametrize("way", by_default(two_devices))
def test_gan_draws_digits_that_are_recognized(run, way, data_dir):
    text = run(way, "gan.py", "--steps", "200", "--data_dir", data_dir)
    assert printed("recognized digits", text) > 0.5  # by chance 0.1


@pytest.mark.parametrize("way", by_default(one_process))
def test_transfer_learning_reuses_what_other_digits_taught(run, way, data_dir):
    flags = ("--pretrain_epochs", "5", "--epochs", "10", "--nofrom_scratch", "--data_dir", data_dir)
    text = run(way, "transfer_learning.py", *flags)
    assert printed("test accuracy with a frozen base", text) > 0.3  # by chance 0.2
    assert printed("test accuracy after fine-tuning", text) > 0.4


RUN_CELLS = """
import json, pathlib, sys
for cell in json.loads(pathlib.Path(sys.argv[1]).read_text())["cells"]:
    code = "".join(cell["source"])
    if cell["cell_type"] != "code":
        continue
    if code.startswith("%%writefile "):
        first, _, code = code.partition("\\n")
        pathlib.Path(first.split()[1]).write_text(code)
    else:
        exec(code.replace("EPOCHS = 10", "EPOCHS = 2"), globals())
figure.savefig("run.png")
"""


def test_the_cells_of_the_notebook_run_in_order(tmp_path):
    notebook = EXAMPLES / "two_workers.ipynb"
    cells = json.loads(notebook.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []

    env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    env |= {"MPLBACKEND": "Agg", "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-c", RUN_CELLS, str(notebook)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE_SECONDS)

    assert done.returncode == 0, done.stderr
    assert printed("test accuracy", done.stdout) > 0.5
    assert "worker 1 equals worker 0: True" in done.stdout
    assert (tmp_path / "run.png").stat().st_size > 0
