"""What the command line takes as numbers, sizes and names: told what is wrong with them, by argparse."""

import argparse
import re
from collections.abc import Mapping

BINARY = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_COUNTS = {"k": 10**3, "M": 10**6, "B": 10**9}


def positive_int(text: str) -> int:
    """A whole number from 1 up."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"needs a whole number from 1 up, got {text}")
    return value


def count(text: str) -> int:
    """A whole number from 0 up."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"needs a whole number from 0 up, got {text}")
    return value


def seconds(text: str) -> float:
    """Seconds from 0 up."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"needs seconds from 0 up, got {text}")
    return value


def _quantity(text: str, units: Mapping[str, int]) -> int:
    """Reads a whole number of things: "64KiB", "2.5M", "1000"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text.strip())
    if match and match[2] in ("", *units):
        value = float(match[1]) * units.get(match[2], 1)
        if value >= 1 and value.is_integer():
            return int(value)
    raise argparse.ArgumentTypeError(f"needs a whole number, alone or with {', '.join(units)} after it, got {text!r}")


def sizes(text: str) -> tuple[int, ...]:
    """Sizes of float32 tensors, in bytes: "1KiB,4MB"."""
    found = sorted({_quantity(part, BINARY | DECIMAL) for part in text.split(",")})
    odd = [size for size in found if size % 4]
    if odd:
        raise argparse.ArgumentTypeError(f"needs multiples of 4 bytes, the size of a float32, got {odd[0]} B")
    return tuple(found)


def names(text: str) -> tuple[str, ...]:
    """Names, each once: "none,int8"."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def parameters(text: str) -> int:
    """A number of parameters: "25M"."""
    return _quantity(text, _COUNTS)
