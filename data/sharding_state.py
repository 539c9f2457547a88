"""The state of a `BalancedSharding` as text: saved in checkpoints, and compared between workers."""

import json
from typing import Any

from tfdist.data.iterator_assignments import IteratorAssignments
from tfdist.data.sources import Source
from tfdist.errors import PositionError

_FORMAT = 1
_CHARACTERS = 1000  # Largest size of a saved state, except for the shares of very many replicas.


class ShardingState:
    """Saves, restores and describes the position, shares and speeds of a `BalancedSharding`.

    `settings` are further settings that must be equal on all workers, by name.
    """

    def __init__(self, source: Source, seed: int, assignments: IteratorAssignments, settings: dict[str, Any]):
        self._source, self._assignments, self._settings = source, assignments, settings
        plan, self._fingerprint = assignments.plan, source.fingerprint()
        self._identity = {
            "examples": plan.num_examples,
            "global_batch_size": plan.global_batch_size,
            "seed": seed,
            "order": repr(plan.order),
            "source": self._fingerprint,
        }

    def save(self) -> str:
        """Returns the position in training and the replicas' shares and speeds as JSON, for a checkpoint."""
        with self._assignments.lock:
            epoch, step, first = self._assignments.position.place
            state = {"format": _FORMAT, "epoch": epoch, "step": step, "of": self._identity}
            if self._assignments.resizes:
                state |= {"first": first, **self._assignments.sizes.state()}
            state |= self._assignments.shares.state()
        for learnt in ("speed", "shares", None):
            text = json.dumps(state, separators=(",", ":"))
            if len(text) <= _CHARACTERS or learnt is None:
                break
            state[learnt] = None  # The state of so many replicas is too long, so they measure again.
        return text

    def read(self, text: str) -> tuple[int, int, dict[str, Any]]:
        """Returns the epoch, the step and the whole state that are in a text of `save`.

        Raises:
          PositionError: If the state belongs to another source, seed, order or batch size.
        """
        try:
            state = json.loads(text)
            epoch, step, identity = int(state["epoch"]), int(state["step"]), dict(state["of"])
        except (ValueError, KeyError, TypeError) as error:
            raise PositionError(f"A position must be a result of `serialize`, got {text!r:.200}.") from error
        if (own := self._identity) != identity:
            different = ", ".join(
                f"{key} was {identity.get(key)}, is {own[key]}" for key in own if identity.get(key) != own[key]
            )
            if identity.get("source") != own["source"]:
                different += f" (checksums of the examples; it now reads {self._source.origin()})"
            raise PositionError(
                f"The saved position belongs to other global batches: {different}. Restore it with the source and "
                "arguments that it was saved with, or start a new run."
            )
        return epoch, step, state

    def restore(self, text: str) -> None:
        """Continues training at the position that `save` has saved, on any number of replicas; raises as `read`."""
        epoch, step, state = self.read(text)
        here = self._assignments
        first = int(state.get("first", step * here.plan.global_batch_size))
        if first >= here.plan.examples_per_epoch:  # The next batch was a short last one, now left out.
            epoch, step, first = epoch + 1, 0, 0
        with here.lock:
            here.position.restore((epoch, step, first))
            if here.resizes:
                here.sizes.restore(state)
            here.shares.restore(state)
            if here.place is not None:
                here.shares.settle(here.place, here.sizes.present)

    def add_setting(self, name: str, value: Any) -> None:
        """Adds a setting that must be equal on all workers."""
        self._settings[name] = value

    def settings(self) -> list[str]:
        """Returns the settings that must be equal on all workers, so that they agree on the examples of each step."""
        return [f"{name} {value}" for name, value in {**self._identity, **self._settings}.items()]

    def settings_for_errors(self) -> list[str]:
        """Returns the same settings as `settings`, but names where the examples are from, for errors."""
        of_source = f"source {self._fingerprint}"
        named = f"examples with the checksum {self._fingerprint} from {self._source.origin()}"
        return [named if each == of_source else each for each in self.settings()]

    def of_training(self) -> list[str]:
        """Returns the position and shares, which must be equal on all workers when training begins."""
        with self._assignments.lock:
            state = {"position": self._assignments.position.next, **self._assignments.shares.state()}
            if self._assignments.resizes:
                state |= self._assignments.sizes.state()
        return [f"{name} {value}" for name, value in state.items()]
