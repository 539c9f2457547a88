"""Words for verdicts about slow workers and links. Does not load TensorFlow."""

from tfdist.events.straggler_file import COMPUTATION, INPUT
from tfdist.faults.straggler_policy import Link, StragglerVerdict

_REMEDIES = {
    COMPUTATION: "Look for other jobs and a low clock rate on its machine, or balance the rows by a BalancedSharding.",
    INPUT: "Prepare more batches in parallel there (num_parallel_calls, prefetch), or use a data service.",
}
_OF_LINKS = 'Measure the links by `tfdist doctor`, and look for other traffic; or send less by compression="int8".'
_BALANCED = "The others do not wait for it."


def text_of(verdict: StragglerVerdict, host: str) -> str:
    """Returns a verdict in words.

    Args:
      verdict: The verdict.
      host: Host of its worker.
    """
    subject, amount = verdict.subject, verdict.amount
    worker, since = f"worker {subject.worker} on {host}", f"since step {verdict.since}"
    if subject.link is not None:
        links, verb = _links_in_words(subject.link, host)
        if verdict.is_over:
            return f"{links} no longer {verb} less than the others after step {verdict.step}"
        return f"{links} {verb} {amount:.0%} of the median of the other links {since}"
    if subject.cause == INPUT:
        if verdict.is_over:
            return f"{worker} no longer waits for its input after step {verdict.step}"
        return f"{worker} waits for its input {amount:.0%} of the time {since}"
    if verdict.is_over:
        what = "computes a row slower" if subject.is_balanced else "computes longer"
        return f"{worker} no longer {what} than the others after step {verdict.step}"
    slower = f"{amount:.1f} times slower than the median of the others {since}"
    if subject.is_balanced:
        return f"{worker} computes a row {slower}, and gets fewer rows"
    return f"{worker} computes {slower}"


def remedy_of(verdict: StragglerVerdict) -> str:
    """Returns what to do about a verdict; empty if it is over."""
    if verdict.is_over:
        return ""
    return _BALANCED if verdict.subject.is_balanced else _REMEDIES.get(verdict.subject.cause, _OF_LINKS)


def _links_in_words(link: Link, host: str) -> tuple[str, str]:
    """Returns the name of a link, or of several, and the verb of a sentence about it."""
    if link.sender is None:
        return f"the links from all peers to worker {link.receiver} on {host}", "carry"
    if link.receiver is None:
        return f"the links from worker {link.sender} on {host} to its peers", "carry"
    return f"the link from worker {link.sender} on {host} to worker {link.receiver}", "carries"
