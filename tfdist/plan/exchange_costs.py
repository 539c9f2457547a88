"""Policy: the costs of an exchange of gradients, by default or by the results of `tfdist bench`. No TensorFlow."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

NONE = "none"  # The name of an exchange without a codec.
# Seconds to encode and decode a byte of float32 on an NVIDIA H100, with XLA: docs/how_to/gpus.md.
_H100_CODING = {
    "float16": 4.5e-3 / 400e6,
    "bfloat16": 4.6e-3 / 400e6,
    "int8": 1.6e-3 / 400e6,
    "int4": 1.5e-3 / 400e6,
    "sign": 1.6e-3 / 400e6,
    "topk": 2.8e-3 / 400e6,
    "powersgd": 1.9e-3 / 400e6,
}


@dataclasses.dataclass(frozen=True)
class ExchangeCosts:
    """The costs of an exchange of gradients for a replica, beside the time on the link.

    Attributes:
      latency_seconds: Time of an exchange of almost no bytes, from the first replica to the last.
      message_seconds: Processor time to send a message and to receive one. Messages of a step go to all other
        replicas.
      coding: Seconds to encode and decode a byte of float32, by name of the codec. For `"none"`, to add up a byte.
      source: Origin of these numbers, for a person.
    """

    latency_seconds: float
    message_seconds: float
    coding: Mapping[str, float]
    source: str

    def seconds_per_byte(self, codec: str) -> float | None:
        """Returns the seconds to code a byte of float32, or `None` if unknown.

        If "powersgd(4)" is unknown, it counts as "powersgd".
        """
        return self.coding.get(codec, self.coding.get(codec.partition("(")[0]))

    def on_processors(self, speed: float) -> "ExchangeCosts":
        """Returns the costs on processors that are `speed` times as fast."""
        coding = {name: seconds / speed for name, seconds in self.coding.items()}
        return ExchangeCosts(self.latency_seconds / speed, self.message_seconds / speed, coding, self.source)


DEFAULT_COSTS = ExchangeCosts(
    latency_seconds=200e-6,
    message_seconds=200e-6,  # By the processor times of 4 and 16 workers in docs/benchmarks.md.
    coding={NONE: 0.0, **_H100_CODING},
    source="codecs as fast as on an NVIDIA H100, 0.2 ms for an exchange and for a message",
)


def costs_of_bench(path: pathlib.Path) -> ExchangeCosts:
    """Returns the costs that `tfdist bench --json` has measured.

    Time is taken as a line in the bytes of the tensor, by least squares. The network of the measurement is part of it,
    so it should be faster than the planned link: several workers on one machine, or a fast network.

    Raises:
      ValueError: If the file is not a result of `tfdist bench`, or has fewer than two sizes of a codec.
      OSError: If it cannot be read.
    """
    try:
        result = json.loads(path.read_text())
        rows = [row for row in result["rows"] if not row["skipped"]]
        measured: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            measured.setdefault(row["compression"], []).append((row["bytes"], row["seconds"]["median"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result of `tfdist bench --json`: {error!r}. Measure again.") from None
    few = [name for name, points in measured.items() if len(points) < 2]
    if few or not measured:
        raise ValueError(
            f"A calibration needs at least two sizes of each codec, but {path} has fewer for "
            f"{', '.join(few) or 'all'}. Measure with `tfdist bench --workers 2 --sizes 1KiB,1MiB,64MiB "
            "--json FILE`."
        )
    lines = {name: _line(points) for name, points in measured.items()}
    latency, _ = lines.get(NONE, min(lines.values()))
    coding = {name: per_byte for name, (_, per_byte) in lines.items()}
    message = DEFAULT_COSTS.message_seconds
    source = f"`tfdist bench` of {result_place(result)}, {1e3 * message:.1f} ms for a message"
    return ExchangeCosts(latency, message, coding, source)


def result_place(result: Mapping[str, Any]) -> str:
    """Describes where `tfdist bench` has measured: "2 workers on Intel ..."."""
    return f"{result.get('workers', '?')} workers on {result.get('machine', {}).get('cpu', 'an unknown machine')}"


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the time at 0 and the rise of the line through points, neither below 0.

    The smallest point gives the time at 0, which least squares would take from the noise of the largest.
    """
    points = sorted(points)
    start, first = points[0]
    beyond = [(each - start, seconds - first) for each, seconds in points[1:]]
    rise = sum(each * seconds for each, seconds in beyond) / sum(each * each for each, _ in beyond)
    rise = max(rise, 0.0)
    return max(first - rise * start, 0.0), rise
