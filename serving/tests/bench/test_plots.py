"""The figure's ticks name what varies between the measurements."""

import pytest

from fcsd_bench.plots import _ticks


@pytest.mark.parametrize(
    ("shapes", "label", "ticks"),
    [
        ([(512, 16)], "prompt tokens", ["512"]),
        ([(512, 16), (1024, 16)], "prompt tokens", ["512", "1024"]),
        ([(512, 1), (512, 8)], "concurrent requests", ["1", "8"]),
        (
            [(512, 1), (512, 8), (1024, 1), (1024, 8)],
            "prompt tokens, concurrent requests",
            ["512\n1", "512\n8", "1024\n1", "1024\n8"],
        ),
        ([], "prompt tokens", []),
    ],
)
def test_ticks_name_what_varies(
    shapes: list[tuple[int, int]], label: str, ticks: list[str]
) -> None:
    points = [
        dict(zip(("prompt_tokens", "requests"), each, strict=True)) for each in shapes
    ]
    assert _ticks(points) == (label, ticks)
