"""Numbers in sentences: counts with their nouns, sizes."""

from __future__ import annotations


def count(number: int, noun: str) -> str:
    """``1 row``, ``2,000 rows``. For nouns whose plural adds an s, the last word of ``noun``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def verb(number: int, one: str, many: str) -> str:
    """``is`` or ``are``, as the number asks."""
    return one if number == 1 else many


def size(num_bytes: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return count(round(num_bytes), "byte") if unit == "bytes" else f"{num_bytes:,.1f} {unit}"
