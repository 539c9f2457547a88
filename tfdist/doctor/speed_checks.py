"""Policy of `tfdist doctor`: whether a link or a worker is much slower than the others. No measurement here."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from tfdist.doctor.check import OK, WARNING, Check
from tfdist.doctor.job_facts import JobFacts

_SLOW_COMPUTE = 0.5
_SLOW_LINK = 5.0  # A measurement of a link that is ten times slower varies, but not by so much.
_LATE_LINK, _LATE_SECONDS = 10.0, 0.05


def check_speed(job: JobFacts) -> Iterator[Check]:
    """Checks the round trips and rates of links, and the speed of processors."""
    for check in (_round_trips, _links, _compute):
        yield from check(job)


def reference_rate(rates: Sequence[float]) -> float:
    """Returns the usual rate of the links: the upper quartile, so that one slow host of three counts as slow."""
    if len(rates) < 2:
        return max(rates, default=0.0)
    return statistics.quantiles(rates, n=4, method="inclusive")[2]


def slow_links(links: Mapping[tuple[int, int], float], reference: float) -> list[tuple[int, int]]:
    """Returns the links that carry less than a fifth of the usual rate."""
    return [link for link, rate in links.items() if _SLOW_LINK * rate < reference]


def slow_workers(speeds: Mapping[int, float], margin: float = 1.0) -> list[int]:
    """Returns the workers with less than half of the median speed, or with less than `margin` times that."""
    limit = margin * _SLOW_COMPUTE * statistics.median_high(speeds.values()) if speeds else 0.0
    return [worker for worker, speed in speeds.items() if speed < limit]


def late_pairs(trips: Mapping[tuple[int, int], float]) -> list[tuple[int, int]]:
    """Returns the pairs of workers with a round trip that is much longer than usual, in both directions."""
    usual = statistics.median_low(trips.values()) if trips else 0.0
    pairs = {(min(link), max(link)): min(seconds, trips.get(link[::-1], seconds)) for link, seconds in trips.items()}
    return [pair for pair, seconds in pairs.items() if seconds > max(_LATE_SECONDS, _LATE_LINK * usual)]


def _round_trips(job: JobFacts) -> Iterator[Check]:
    trips = job.round_trips
    if not trips:
        return
    usual = statistics.median_low(trips.values())
    late = {pair: min(trips[link] for link in (pair, pair[::-1]) if link in trips) for pair in late_pairs(trips)}
    for (first, second), seconds in late.items():
        pair = f"{job.name(first)} and {job.name(second)}"
        text = f"a round trip between {pair} takes {_ms(seconds)}, others take {_ms(usual)}"
        remedy = "Look at the route between them (`mtr`), and at the load of both hosts"
        yield Check("latency", WARNING, text, remedy, (first, second))
    if not late:
        span = f"{_ms(min(trips.values()))} to {_ms(max(trips.values()))}"
        yield Check("latency", OK, f"round trips between workers take {span}")


def _links(job: JobFacts) -> Iterator[Check]:
    if not job.links:
        return
    between_hosts = {
        link: rate
        for link, rate in job.links.items()
        if job.seats[link[0]].facts.network != job.seats[link[1]].facts.network
    }
    usual = reference_rate(list(between_hosts.values()))
    slow = slow_links(between_hosts, usual)
    named = set()
    for worker in sorted({end for link in slow for end in link}):
        own = {link: rate for link, rate in between_hosts.items() if worker in link}
        bad = [link for link in own if link in slow]
        rest = [link for link in between_hosts if worker not in link]
        if len(bad) > 2 and 2 * len(bad) >= len(own) and rest and not set(rest) <= set(slow):
            named |= set(bad)
            yield _slow(job, f"links of {job.name(worker)} carry", [own[link] for link in bad], usual, (worker,))
    for link in slow:
        if link not in named:
            text = f"the link from {job.name(link[0])} to {job.name(link[1])} carries"
            yield _slow(job, text, [between_hosts[link]], usual, link)
    if not slow:
        rates = list((between_hosts or job.links).values())
        where = f"{len(rates)} links between hosts" if between_hosts else "workers of this host"
        yield Check("link rate", OK, f"{_rate(min(rates))} to {_rate(max(rates))} over {where}")


def _slow(job: JobFacts, subject: str, rates: list[float], usual: float, workers: tuple[int, ...]) -> Check:
    rate = statistics.median(rates)
    text = f"{subject} {_rate(rate)}, {usual / max(rate, 1.0):.0f} times less than usual here ({_rate(usual)})"
    remedy = (
        "Look at the speed of its network interface (`ethtool`), cable, switch port, limits and other traffic; "
        "compression= sends fewer bytes"
    )
    return Check("link rate", WARNING, text, remedy, workers)


def _compute(job: JobFacts) -> Iterator[Check]:
    if not job.speeds:
        return
    usual = statistics.median_high(job.speeds.values())
    slow = slow_workers(job.speeds)
    for worker in slow:
        speed = job.speeds[worker]
        text = f"{job.name(worker)} computes {usual / max(speed, 1.0):.1f} times slower than the median ("
        text += f"{speed / 1e9:.3g} instead of {usual / 1e9:.3g} Gflop/s)"
        remedy = (
            "Look for other programs and for a limit of processor time on its host (`top`, `cpu.max` of its control "
            "group); or share rows by speed with tfdist.data.BalancedSharding"
        )
        yield Check("processor speed", WARNING, text, remedy, (worker,))
    if not slow:
        lowest, highest = min(job.speeds.values()), max(job.speeds.values())
        yield Check("processor speed", OK, f"{lowest / 1e9:.3g} to {highest / 1e9:.3g} Gflop/s for each worker")


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _rate(bits: float) -> str:
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= factor:
            return f"{bits / factor:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"
