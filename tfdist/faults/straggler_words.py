"""Words for verdicts about slow workers and links. Does not load TensorFlow."""

from tfdist.events.straggler_file import CALLBACK, COMPUTATION, INPUT
from tfdist.faults.straggler_policy import Link, StragglerVerdict

_LOOK = (
    "Look for other jobs and a low clock rate on its machine. If other workers of the same host are fast, look for "
    "code of yours that differs by worker (`py_function`, branches on the worker's number)."
)
_BALANCE = "Otherwise, balance the rows by a BalancedSharding."
_PREPARE = "Prepare more batches in parallel there (num_parallel_calls, prefetch), or use a data service."
_SHORTEN = "Make its callbacks shorter, or run them less often."
_CHIEF_ONLY = "Let only the chief run the callback (`tfdist.callbacks.ChiefOnly`), or make it shorter."
_OF_LINKS = 'Measure the links by `tfdist doctor`, and look for other traffic; or send less by compression="int8".'
_BALANCED = "The others do not wait for it."


def text_of(verdict: StragglerVerdict, host: str) -> str:
    """Returns a verdict in words.

    Args:
      verdict: The verdict.
      host: Host of its worker.
    """
    straggler, amount = verdict.straggler, verdict.amount
    worker, since = f"worker {straggler.worker} on {host}", f"since step {verdict.since}"
    if verdict.link is not None:
        links, verb = _links_in_words(verdict.link, host)
        if verdict.is_over:
            return f"{links} no longer {verb} less than the others after step {verdict.step}"
        return f"{links} {verb} {amount:.0%} of the median of the other links {since}"
    if straggler.cause == INPUT:
        if verdict.is_over:
            return f"{worker} no longer waits for its input after step {verdict.step}"
        return f"{worker} waits for its input {amount:.0%} of the time {since}"
    if straggler.cause == CALLBACK:
        if verdict.is_over:
            return f"{worker} no longer spends more time than the others in callbacks after step {verdict.step}"
        return f"{worker} spends {amount:.0%} of the time in callbacks, and Python between steps, {since}"
    if verdict.has_changed and verdict.is_balanced:
        return f"{worker} gets too many rows again, and holds up the others, after step {verdict.step}"
    if verdict.has_changed:
        return f"{worker} gets fewer rows, and no longer holds up the others, after step {verdict.step}"
    if verdict.is_over:
        return f"{worker} no longer computes slower than the others after step {verdict.step}"
    times = f"{amount:.1f}" if amount < 10 else f"{amount:.0f}"
    slower = f"{times} times slower than the median of the others {since}"
    if verdict.is_balanced:
        return f"{worker} computes a row {slower}, and gets fewer rows"
    return f"{worker} computes {slower}"


def remedy_of(verdict: StragglerVerdict) -> str:
    """Returns what to do about a verdict; empty if it is over."""
    if verdict.is_over:
        return ""
    if verdict.is_balanced:
        return _BALANCED
    if verdict.straggler.cause == COMPUTATION:
        return f"{_LOOK} {_BALANCE}" if verdict.may_balance else _LOOK
    if verdict.straggler.cause == CALLBACK:
        return _CHIEF_ONLY if verdict.straggler.worker else _SHORTEN
    return _PREPARE if verdict.straggler.cause == INPUT else _OF_LINKS


def _links_in_words(link: Link, host: str) -> tuple[str, str]:
    """Returns the name of a link, or of several, and the verb of a sentence about it."""
    if link.sender is None:
        return f"the links from all peers to worker {link.receiver} on {host}", "carry"
    if link.receiver is None:
        return f"the links from worker {link.sender} on {host} to its peers", "carry"
    return f"the link from worker {link.sender} on {host} to worker {link.receiver}", "carries"
