"""Grade one program's outputs as EvalPlus does (the rules of evalplus 0.3.1 and its
later fix for HumanEval/32).

`fcsd.evaluation.code.problems` sends this file's text into the sandbox, where the
examiner runs it; it is imported only by tests. Standard library and numpy only, and no
name that a program could have defined is looked up.

Not covered: time limits, which hold for the whole program.
"""

import math

import numpy


def fcsd_grade(function, inputs, expected, first, last, tolerance, rule):  # type: ignore[no-untyped-def]
    """Call `function` on inputs[first:last]; AssertionError at the first wrong output.

    expected: the list of right outputs, or the reference function.
    tolerance: absolute; 0 is exact, except that floats are compared to 1e-6.
    rule: "equal", or one of EvalPlus's special oracles:
        "set"             the same elements, order and repetition aside
        "not_none"        whether there is an output, as the expected one says (a match object cannot be sent)
        "root"            HumanEval/32: the output is a zero of the polynomial that is the input
        "pyramid"         Mbpp/581: the height may be the perpendicular one, too
        "digit_distance"  Mbpp/558: the shorter number may be filled with zeros, too
    """
    for index in range(len(inputs))[first:last]:
        arguments = inputs[index]
        out = function(*arguments)
        if rule == "root":
            assert abs(_polynomial(*arguments, out)) <= tolerance, (
                f"input {index}: not a zero"
            )
            continue
        right = expected(*arguments) if callable(expected) else expected[index]
        same = out == right
        if rule == "set":
            exact = set(out) == set(right)
        elif rule == "not_none":
            exact = (
                out == right if isinstance(out, bool) else right == (out is not None)
            )
        else:
            exact = _truth(same, index)
        if rule == "pyramid":
            exact = exact or _truth(abs(out - _surface(*arguments)) <= tolerance, index)
        elif rule == "digit_distance":
            exact = exact or _truth(out == _digit_distance(*arguments), index)
        if tolerance == 0 and _floats(right):
            tolerance = 1e-6  # and for the inputs that follow, as there
        if not exact and tolerance != 0:
            assert type(out) is type(right), (
                f"input {index}: {type(out).__name__} for {type(right).__name__}"
            )
            # EvalPlus compares the lengths only, so that [[]] is close to any [x]:
            # numpy stretches both to nothing.
            assert numpy.shape(out) == numpy.shape(right), f"input {index}: shape"
            assert numpy.allclose(out, right, rtol=1e-7, atol=tolerance), (
                f"input {index}: not close"
            )
        else:
            assert exact, f"input {index}: not equal"


def _truth(same, index):  # type: ignore[no-untyped-def]
    """Return the truth of a comparison; of arrays only one element has one: in numpy an
    empty one equals anything.
    """
    assert not isinstance(same, numpy.ndarray) or same.size == 1, (
        f"input {index}: an array of shape {same.shape}"
    )
    return bool(same)


def _floats(value):  # type: ignore[no-untyped-def]
    if isinstance(value, list | tuple) and value:
        return all(isinstance(item, float) for item in value)
    if isinstance(value, numpy.ndarray):
        return value.dtype in (numpy.float64, numpy.float32)
    return isinstance(value, float)


def _polynomial(coefficients, x):  # type: ignore[no-untyped-def]
    return sum(factor * math.pow(x, power) for power, factor in enumerate(coefficients))


def _surface(base, height):  # type: ignore[no-untyped-def]
    return round(base**2 + 4 * (base * math.sqrt((base / 2) ** 2 + height**2)) / 2)


def _digit_distance(one, two):  # type: ignore[no-untyped-def]
    width = max(len(str(one)), len(str(two)))
    pairs = zip(str(one).zfill(width), str(two).zfill(width), strict=True)
    return sum(abs(int(a) - int(b)) for a, b in pairs)
