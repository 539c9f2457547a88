"""The file with verdicts about slow workers and links: a JSON object in each line, oldest first.

    {"time": 1764184083.1, "step": 1215, "since": 1200, "is_over": false, "cause": "computation", "worker": 3,
     "host": "b", "link": null, "amount": 1.9, "text": "worker 3 on host b computes 1.9 times ...", "remedy": "..."}

Does not load TensorFlow.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.symlink_safe_file import no_follow

COMPUTATION, INPUT, LINK, CALLBACK = "computation", "input", "link", "callback"
CAUSES = (COMPUTATION, INPUT, LINK, CALLBACK)
"""Why a worker is slow."""


@dataclasses.dataclass(frozen=True)
class StragglerRecord:
    """A verdict that a worker or a link is slow, or that it is no longer slow.

    Attributes:
      time: Time of the verdict, in seconds since the epoch.
      step: Number of the last training step before the verdict, counted as in the names of backups.
      since: The training step since which the worker is slow. With `is_over`, that of the verdict that ends.
      is_over: Whether the worker is no longer slow.
      cause: "computation", "input", "link" or "callback", which is all Python code between steps.
      worker: The slow worker. For a link, the sender; the receiver if its links from all peers are slow.
      host: Host of this worker.
      link: Two workers: the one that sends, and the one that receives. `null` in place of one of them means all peers.
        `null` for other causes.
      amount: A factor for "computation": the worker is that many times slower than the median of the others. For
        "input" and "callback", the part of the time that it spends there. For "link", the rate as a part of the
        median of the other links.
      text: The verdict in words.
      remedy: A remedy in a few words; empty if the worker is no longer slow.
      is_balanced: Whether a worker that computes slowly gets fewer rows, so that the others do not wait for it.
    """

    time: float
    step: int
    since: int
    is_over: bool
    cause: str
    worker: int
    host: str
    link: tuple[int | None, int | None] | None
    amount: float
    text: str
    remedy: str
    is_balanced: bool = False


def append_record(path: pathlib.Path, record: StragglerRecord) -> None:
    """Adds a line to the file `path`, which is made if it does not exist.

    Raises:
      OSError: If the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", opener=no_follow) as file:
        file.write(json.dumps(dataclasses.asdict(record)) + "\n")


def read_records(path: pathlib.Path) -> tuple[Sequence[StragglerRecord], int]:
    """Returns the records in a file, oldest first, and the number of lines that could not be read.

    Raises:
      OSError: If the file cannot be read.
    """
    records, damaged = [], 0
    for line in path.read_text(errors="replace").splitlines():
        try:
            records.append(_record(json.loads(line)))
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged += 1
    return records, damaged


def pairs_of(records: Sequence[StragglerRecord]) -> Sequence[tuple[StragglerRecord, StragglerRecord | None]]:
    """Returns each record of something slow with the one that ends it; `None` if it was slow until the end."""
    ends: dict[int, StragglerRecord] = {}
    begun: dict[tuple[object, ...], int] = {}  # Places of the records without an end so far.
    for place, record in enumerate(records):
        subject = record.cause, record.worker, record.link
        if not record.is_over:
            begun[subject] = place
        elif subject in begun:
            ends[begun.pop(subject)] = record
    return [(record, ends.get(place)) for place, record in enumerate(records) if not record.is_over]


def _record(content: Mapping[str, Any]) -> StragglerRecord:
    """Returns the record of a line.

    Raises:
      KeyError, TypeError, ValueError: If the line is no record.
    """
    content = {"is_balanced": False, **content}
    known: dict[str, Any] = {field.name: content[field.name] for field in dataclasses.fields(StragglerRecord)}
    record = StragglerRecord(**known)
    numbers = (record.time, record.step, record.since, record.worker, record.amount)
    if record.cause not in CAUSES or not all(isinstance(number, int | float) for number in numbers):
        raise ValueError("is no record of a slow worker")
    if not all(isinstance(text, str) for text in (record.host, record.text, record.remedy)):
        raise TypeError("has a text that is none")
    return dataclasses.replace(
        record, link=_link(record.link), is_over=bool(record.is_over), is_balanced=bool(record.is_balanced)
    )


def _link(ends: Any) -> tuple[int | None, int | None] | None:
    if ends is None:
        return None
    sender, receiver = ends
    if not all(end is None or isinstance(end, int) for end in (sender, receiver)):
        raise TypeError("has a link without numbers of workers")
    return sender, receiver
