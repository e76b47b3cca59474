import itertools
import json
import math
from collections import Counter, OrderedDict, deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest

from fcsd.evaluation.code.sandbox.codec import Codec, Handle

PLAIN: list[Any] = [
    None, True, 0, -1, 2**200, 1.5, -0.0, math.inf, "", "a\ud800\n", b"\x00\xff", 1 + 2j, range(1, 9, 2),
    [], (), {}, set(), frozenset({1}), [[1, (2, [3])], {"a": (1,)}], {(1, 2): {3}}, [(1, "a"), (2.0, None)],
    [(1,), (1, 2)], [()], deque([1, 2]), Counter("abba"), OrderedDict(b=1, a=2), Decimal("1.10"), Fraction(1, 3),
    Fraction(7**20000, 2), Decimal("-Infinity"),
    [True, 1, 1.0], {1: "a", "1": "b"}, bytearray(b"x"), -(7**20000), [7**20000, "a"], [(1, 7**20000)],
]  # fmt: skip


def through(value: Any) -> Any:
    return Codec().decode(json.loads(json.dumps(Codec().encode(value))))


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b) and (isinstance(a, int | Fraction) or repr(a) == repr(b))


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_arrive_with_their_types(value: Any) -> None:
    assert same(through(value), value)


def test_nan_arrives_as_nan() -> None:
    assert math.isnan(through(math.nan))


@pytest.mark.parametrize("dtype", ["int64", "float32", "bool", "complex128", "uint8"])
def test_arrays_and_numpy_scalars_arrive_with_shape_and_type(dtype: str) -> None:
    array = numpy.arange(6).reshape(2, 3).astype(dtype)
    made = through(array)
    assert made.dtype == array.dtype and made.shape == (2, 3) and (made == array).all()
    assert through(array[1, 1]) == array[1, 1]
    assert type(through(array[1, 1])) is type(array[1, 1])


def test_a_numpy_float64_stays_one_though_it_is_a_float() -> None:
    """EvalPlus requires the same type where an answer is close but not equal."""
    assert (
        type(through(numpy.float64(0.1)))
        is type(through([numpy.float64(0.1)])[0])
        is numpy.float64
    )
    assert type(through(numpy.str_("a"))) is str


def test_iterators_arrive_as_iterators() -> None:
    for value in (
        map(abs, [-1, 2]),
        (x for x in (1, 2)),
        iter([1, 2]),
        reversed([2, 1]),
        filter(None, [1, 0, 2]),
    ):
        made = through(value)
        assert made != [1, 2] and list(made) == [1, 2]


def test_millions_of_cells_of_few_objects_are_one_text_and_arrive_the_same() -> None:
    rows = list(itertools.combinations_with_replacement([2, True, 7.5, "x", None], 12))
    encoded = Codec().encode(rows)
    assert encoded["t"] == "table" and len(json.dumps(encoded)) < 1.2 * 12 * len(rows)
    assert same(through(rows), rows)


def test_an_unknown_object_equals_nothing_and_comes_back_as_itself() -> None:
    class Thing:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    near, far, thing = Codec(), Codec(), Thing()
    handle = far.decode(near.encode(thing))
    assert isinstance(handle, Handle) and handle != 42 and handle is not None
    assert near.decode(far.encode(handle)) is thing


@pytest.mark.parametrize(
    "data",
    [{}, {"t": "x", "v": 1}, {"t": "numpy", "v": ["O8", [1], [1]]}, {"v": 1}, {"t": ["tuple"], "v": []},
     {"t": "table", "v": {"leaves": [[]], "width": 1, "cells": "#"}}],
)  # fmt: skip
def test_what_encode_does_not_make_is_refused(data: Any) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        Codec().decode(data)
