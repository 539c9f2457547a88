"""A TFDS dataset of handwritten digits that needs no download."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds


class Digits(tfds.core.GeneratorBasedBuilder):
    """The 1797 handwritten digits that come with scikit-learn: a small MNIST without a download.

    Images are uint8 of shape [8, 8, 1], scaled from scikit-learn's 0..16 to 0..255; labels are 0..9. Every fifth image
    of each label, in scikit-learn's order, is in "test", and the others are in "train".

    Raises:
      ModuleNotFoundError: While preparing, if scikit-learn is missing.

    References:
      Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, 1998, https://doi.org/10.24432/C50P49
    """

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Handwritten digits, 8 by 8 pixels, from scikit-learn.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1)),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://doi.org/10.24432/C50P49",
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager
        images, labels = _read_digits()
        in_test = np.zeros(len(labels), bool)
        for label in range(10):
            in_test[np.flatnonzero(labels == label)[::5]] = True
        return {
            "train": self._generate_examples(images, labels, np.flatnonzero(~in_test)),
            "test": self._generate_examples(images, labels, np.flatnonzero(in_test)),
        }

    def _generate_examples(self, images: np.ndarray, labels: np.ndarray, rows: np.ndarray) -> Iterator[Any]:
        # The row number is the key that TFDS orders examples by, so every machine writes the same files.
        for row in rows.tolist():
            yield row, {"image": images[row], "label": int(labels[row])}


def _read_digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "The digits dataset needs scikit-learn, which is not installed. "
            "Install it with: pip install 'tfdist[examples]'",
            name=error.name,
        ) from error
    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8]
    return images[..., np.newaxis], digits.target
