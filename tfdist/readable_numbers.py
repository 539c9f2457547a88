"""Formats numbers, times and sizes for people, in the terminal and in the page of `tfdist report`."""

import time

_UNKNOWN = "unknown"


def duration(seconds: float) -> str:
    """Formats a time span: "7.2 s", "72 s", "12 min 5 s", "3 h 12 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def short_duration(seconds: float) -> str:
    """Formats a time span in little room: "7 s", "12 min", "3 h"."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5970 else f"{seconds / 3600:.0f} h"


def step_time(seconds: float | None) -> str:
    """Formats the time of a step: "35.2 ms"."""
    if seconds is None:
        return _UNKNOWN
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def size(count: float | None) -> str:
    """Formats a number of bytes: "512 B", "1.2 MB"."""
    if count is None:
        return _UNKNOWN
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.5:
            return f"{count:.3g} {unit}"
    return f"{count / 1000:,.3g} TB"


def counted(count: int, noun: str) -> str:
    """Formats a number with its noun: "1 worker", "1,200 batches"."""
    return f"{count:,} {noun if count == 1 else plural(noun)}"


def counted_or_no(count: int, noun: str) -> str:
    """Formats a number with its noun, and zero as "no": "no GPUs", "1 GPU"."""
    return counted(count, noun) if count else f"no {plural(noun)}"


def plural(noun: str) -> str:
    """Returns the plural of a noun, which takes "s" or "es"."""
    return f"{noun}es" if noun.endswith(("ch", "s", "sh", "x")) else f"{noun}s"


def rounded(value: float | None) -> str:
    """Formats a number, rounded to three digits or to a whole number: "1,234", "0.123"."""
    if value is None:
        return _UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(share: float | None) -> str:
    """Formats a share: "12.3 %"."""
    return _UNKNOWN if share is None else f"{share:.1%}".replace("%", " %")


def clock(seconds: float) -> str:
    """Formats a moment, given in seconds since the epoch, as local time: "2026-11-26 19:20:03"."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OSError, OverflowError, ValueError):  # Damaged files may have any number.
        return "an unknown time"
