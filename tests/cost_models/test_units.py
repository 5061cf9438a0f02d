import pytest
from autopar.cost_models import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_bytes(0), "0 B"),
        (units.format_bytes(1023), "1023 B"),
        (units.format_bytes(1536), "1.50 KiB"),
        (units.format_bytes(79.6 * units.GIB), "79.6 GiB"),
        (units.format_bytes(-3 * units.MIB), "-3 MiB"),
        (units.format_bytes(units.MIB), "1 MiB"),
        (units.format_bytes(1023.6 * units.KIB), "1.00 MiB"),
        (units.format_bytes(1023.4 * units.KIB), "1023 KiB"),
        (units.format_bytes(2000 * 2**50), "2000 PiB"),
        (units.format_bytes_per_second(450e9), "450 GB/s"),
        (units.format_flops_per_second(989e12), "989 TFLOP/s"),
        (units.format_flops(999.9e9), "1.00 TFLOP"),
        (units.format_count(124_439_808), "124M"),
        (units.format_count(12), "12"),
        (units.format_seconds(0), "0 s"),
        (units.format_seconds(0.0123), "12.3 ms"),
        (units.format_seconds(2.5e-6), "2.50 us"),
        (units.format_seconds(3e-10), "0.30 ns"),
        (units.format_seconds(0.9999), "1.00 s"),
        (units.format_seconds(999.4e-6), "999 us"),
        (units.format_seconds(999.6e-6), "1.00 ms"),
        (units.format_seconds(59.4), "59.4 s"),
        (units.format_seconds(59.6), "1 min 0 s"),
        (units.format_seconds(200), "3 min 20 s"),
        (units.format_seconds(3599.7), "1 h 0 min"),
        (units.format_seconds(7199), "2 h 0 min"),
        (units.format_seconds(7260), "2 h 1 min"),
    ],
)
def test_numbers_for_people(text: str, expected: str) -> None:
    assert text == expected
