"""Runs the examples of the gallery on small data, each in one way by default: on two workers, or on two devices."""

import pytest

from example_runs import by_default, launcher, printed, runs, two_devices


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
    # After 20 epochs without augmentation it is 0.56.
    assert printed("accuracy on moved test images", text) > 0.7


@pytest.mark.parametrize("way", by_default(two_devices))
def test_the_recommender_beats_popularity_with_a_codec_for_its_rows(run, way):
    flags = ("--users", "2000", "--items", "1000", "--batch_size", "512", "--epochs", "2", "--compression", "int8")
    text = run(way, "recommender.py", *flags)
    assert printed("hit rate", text) > printed("hit rate of popularity", text) + 0.05


@pytest.mark.parametrize("way", by_default(launcher))
def test_text_classification_learns_and_saves_a_model_of_strings(run, way, tmp_path):
    flags = ("--epochs", "1", "--batch_size", "128", "--save", str(tmp_path / "model.keras"))
    text = run(way, "text_classification.py", *flags)
    assert printed("test accuracy", text) > printed("share of the largest class", text) + 0.3
    assert (tmp_path / "model.keras").exists()


@pytest.mark.parametrize("way", by_default(two_devices))
def test_the_forecast_beats_repeating_the_series(run, way):
    text = run(way, "time_series.py", "--days", "140", "--epochs", "6", "--width", "16")
    naive = min(printed("error of repeating yesterday", text), printed("error of repeating last week", text))
    assert printed("error of the forecast", text) < 0.9 * naive
