"""Grade what a contest's program printed or returned, as LiveCodeBench does.

`fcsd.evaluation.code.contest` sends this file's text into the sandbox, where the
examiner runs it; it is imported only by tests. Standard library only, and no name that
a program could have defined is looked up.

Not covered: problems with several right outputs, which LiveCodeBench left out.
"""

import json
from decimal import Decimal


def fcsd_printed(out, right):  # type: ignore[no-untyped-def]
    """Compare line by line, without the space around each; AssertionError at the first
    that differs.

    Lines that are not equal may still be the same numbers, one by one as exact
    decimals: "1.50 2" for "1.5 2.0".
    """
    assert isinstance(out, str), "no text"
    mine, wanted = _lines(out), _lines(right)
    assert len(mine) == len(wanted), f"{len(mine)} lines for {len(wanted)}"
    for number, (line, other) in enumerate(zip(mine, wanted, strict=True), start=1):
        assert line == other or _same_numbers(line, other), (
            f"line {number}: {line[:80]!r} for {other[:80]!r}"
        )


def fcsd_returned(out, right):  # type: ignore[no-untyped-def]
    """Compare a returned value with what `right` has as JSON; a tuple counts as a list."""
    out, wanted = list(out) if isinstance(out, tuple) else out, json.loads(right)
    same = out == wanted
    assert isinstance(same, bool) and same, f"{out!r:.80} for {wanted!r:.80}"


def _lines(text):  # type: ignore[no-untyped-def]
    return [line.strip() for line in text.strip().split("\n")]


def _same_numbers(line, other):  # type: ignore[no-untyped-def]
    try:
        return list(map(Decimal, line.split())) == list(map(Decimal, other.split()))
    except ArithmeticError:  # a word, or a signalling NaN
        return False
