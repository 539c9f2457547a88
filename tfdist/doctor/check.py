"""One result of `tfdist doctor`, and the count of all."""

import dataclasses
from collections.abc import Iterable
from typing import Any

OK, WARNING, FAILURE = "ok", "warning", "failure"


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
      name: Name of the check, such as "own port".
      verdict: `OK`, `WARNING` if the job starts but may be slow or wrong, or `FAILURE` if it cannot run like this.
      text: The finding, with the workers and hosts.
      remedy: The remedy; empty if all is well.
      workers: The workers that the finding names.
    """

    name: str
    verdict: str
    text: str
    remedy: str = ""
    workers: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the check as a JSON object."""
        return dataclasses.asdict(self)


def count(checks: Iterable[Check], verdict: str) -> int:
    """Returns how many checks have this verdict."""
    return sum(each.verdict == verdict for each in checks)
