"""Runs the examples of the gallery on small data, each in one way by default: on two workers, or on two devices."""

import pytest

from example_runs import by_default, launcher, printed, runs


@pytest.fixture
def run(tmp_path):
    with runs(tmp_path) as run:
        yield run


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("way", by_default(launcher))
def test_image_files_learns_of_augmented_images(run, way, data_dir, tmp_path):
    text = run(way, "image_files.py", "--epochs", "5", "--data_dir", data_dir, "--folder", str(tmp_path / "files"))
    assert printed("test accuracy", text) > 0.8
    # Without augmentation it is 0.44 to 0.56.
    assert printed("accuracy on moved test images", text) > 0.7
