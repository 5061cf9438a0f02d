"""Units: SI inside the code, and formatting for people."""

from __future__ import annotations

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
TERA = 1e12
NANOSECOND, MICROSECOND, MILLISECOND = 1e-9, 1e-6, 1e-3
BITS_PER_BYTE = 8


def _scaled(value: float, step: float, units: tuple[str, ...]) -> str:
    """Three significant digits, whole numbers as they are, with the largest unit that keeps the number at least 1."""
    sign = "-" if value < 0 else ""
    size, index = abs(value), 0
    # As it is printed: 999.5 of a unit is 1.00 of the next.
    while index + 1 < len(units) and float(_three_digits(size)) >= step:
        size, index = size / step, index + 1
    return f"{sign}{_three_digits(size)} {units[index]}"


def _three_digits(size: float) -> str:
    digits = 0 if size >= 99.95 or size == int(size) else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f}"


def format_bytes(num_bytes: float) -> str:
    """ "79.6 GiB"."""
    return _scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_bytes_per_second(rate: float) -> str:
    """ "450 GB/s" (decimal, as vendors count)."""
    return _scaled(rate, 1000, ("B/s", "KB/s", "MB/s", "GB/s", "TB/s"))


def format_flops(flops: float) -> str:
    """ "1.23 TFLOP"."""
    return _scaled(flops, 1000, ("FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def format_flops_per_second(rate: float) -> str:
    """ "989 TFLOP/s"."""
    return _scaled(rate, 1000, ("FLOP/s", "KFLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"))


def format_count(count: float) -> str:
    """ "124M" parameters."""
    return _scaled(count, 1000, ("", "K", "M", "B", "T")).replace(" ", "")


def format_seconds(seconds: float) -> str:
    """ "12.3 ms"; from a minute on "3 min 20 s"."""
    size = abs(seconds)
    sign = "-" if seconds < 0 else ""
    if size >= 59.5:
        if size >= 3599.5:
            hours, minutes = divmod(round(size / 60), 60)
            return f"{sign}{hours} h {minutes} min"
        minutes, rest = divmod(round(size), 60)
        return f"{sign}{minutes} min {rest} s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if size >= 0.9995 * factor:
            return sign + _scaled(size / factor, 1000, (unit,))
    return sign + _scaled(size / 1e-9, 1000, ("ns",)) if size else "0 s"
