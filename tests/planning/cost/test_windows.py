"""Windows of exchanges, by hand from the schedule of docs/scale.md; and of a server's
all-reduces.
"""

from typing import Any

import pytest

from fcsd.parallel.overlap.schedule import (
    beside,
    layer_facts,
    served_beside,
    served_branches,
)
from fcsd.planning.cost.times import equation_9, exposed, gain, window

STEPS = {
    "attention a": 1.0, "attention b": 10.0, "router": 100.0, "experts": 1e3, "shared expert": 1e4, "arrive": 0.1,
    "mlp": 1e5,
}  # fmt: skip


def windows(facts: Any, seconds: Any) -> list[tuple[float, float]]:
    return [
        (window(each["dispatch"], seconds), window(each["combine"], seconds))
        for each in beside(facts)
    ]


def serving_windows(
    rewired: Any, moe: Any, attention: str, mlp: Any, seconds: Any
) -> list[tuple[float, ...]]:
    shared = ["shared expert" in each for each in seconds]
    computed = served_beside(rewired, moe, attention, mlp, shared)
    return [tuple(window(each, seconds) for each in layer) for layer in computed]


def windows_of(
    rewired: list[bool],
    moe: list[bool],
    attention: str = "partial",
    mlp: Any = "outdated",
    **changes: Any,
) -> list[tuple[float, float]]:
    splits = changes.pop("splits", ["core"] * len(moe))
    facts = layer_facts(rewired, moe, attention, mlp, splits, **changes)
    return windows(facts, [STEPS] * len(moe))


def test_dispatch_has_the_core_and_combine_the_shared_expert_and_the_next_queries():
    # The first layer starts its dispatch before all of attention; after the last there
    # is only the shared expert.
    assert windows_of([True] * 3, [True] * 3) == [(11, 10001), (10, 10001), (10, 10000)]


def test_a_window_has_the_seconds_of_the_layer_that_computes_in_it() -> None:
    twice = [
        {name: scale * value for name, value in STEPS.items()} for scale in (1, 2, 4)
    ]
    facts = layer_facts([True] * 3, [True] * 3, "partial", "outdated", ["core"] * 3)
    assert windows(facts, twice) == [
        (11, 10000 + 2),
        (2 * 10, 2 * 10000 + 4),
        (4 * 10, 4 * 10000),
    ]
    assert serving_windows([True] * 3, [True] * 3, "partial", "outdated", twice) == [
        (1000, 2 * 11),
        (2 * 1000, 4 * 11),
        (4 * 1000, 0),
    ]


def test_a_layer_that_is_not_rewired_blocks_and_ends_a_run() -> None:
    assert windows_of([True, True, False, True], [True] * 4) == [
        (11, 10001),
        (10, 10000),
        (0, 0),
        (1, 10010),
    ]


def test_behind_a_dense_layer_nothing_is_in_flight() -> None:
    # Its attention reads the stream without the routed output, its MLP reads the full
    # stream.
    assert windows_of([True] * 3, [True, False, True]) == [
        (11, 10011),
        (0, 0),
        (1, 10010),
    ]


def test_each_side_alone_has_the_windows_that_its_schedule_leaves() -> None:
    assert windows_of([True] * 2, [True] * 2, attention="full") == [(1, 10010)] * 2
    assert windows_of([True] * 2, [True] * 2, mlp="full") == [(10000, 11), (10000, 0)]


def test_sides_that_differ_by_layer_have_the_windows_of_each() -> None:
    # A layer with a regular MLP side computes its shared expert beside its dispatch, and
    # all of its attention beside the combine before it.
    assert windows_of([True] * 2, [True] * 2, mlp=[1]) == [(10000, 1), (10, 10000)]
    assert windows_of([True] * 2, [True] * 2, mlp=[0]) == [(11, 10011), (10000, 0)]


def test_attention_that_cannot_be_cut_leaves_the_dispatch_the_shared_expert() -> None:
    assert windows_of([True] * 3, [True] * 3, splits=["end"] * 3)[1] == (10000, 11)


def test_layers_that_keep_their_combine_hide_both_exchanges_beside_themselves() -> None:
    assert windows_of([True] * 2, [True] * 2, inside=True) == [(1, 10010)] * 2


def test_equation_9_is_necessary_and_not_sufficient() -> None:
    # A single sum would allow 10 of 10011 seconds, but the windows are separate, and
    # that of the dispatch holds 10.
    dispatch, combine = 25.0, 5.0
    assert equation_9(dispatch + combine, STEPS | {"mlp": 0.0}) == pytest.approx(
        30 / 10011
    )
    assert exposed(dispatch, windows_of([True] * 3, [True] * 3)[1][0]) == 15
    assert exposed(combine, 10001) == 0


def test_all_reduces_of_a_server_hide_under_the_routed_experts_and_the_next_attention():
    def served(
        moe: list[bool], attention: str = "partial", mlp: str = "outdated"
    ) -> Any:
        return serving_windows(
            [True] * len(moe), moe, attention, mlp, [STEPS] * len(moe)
        )

    assert served([True, True]) == [(1000, 11), (1000, 0)]
    # a dense layer needs one, with nothing beside it
    assert served([False, True]) == [(0,), (1000, 0)]
    # A third one, for the shared experts, if the next attention does not wait for what
    # they are summed with.
    assert served([True, True], mlp="full") == [(0, 11, 1000), (0, 0)]
    assert served([True, True], mlp=[1]) == [(0, 11, 1000), (1000, 0)]
    without = [
        {name: value for name, value in STEPS.items() if name != "shared expert"}
    ] * 2
    assert serving_windows([True] * 2, [True] * 2, "partial", "full", without) == [
        (0, 11),
        (0, 0),
    ]
    assert served([True, True], attention="full") == [(1000, 0)] * 2
    assert serving_windows(
        [True, False], [True, True], "partial", "outdated", [STEPS] * 2
    ) == [
        (1000, 0),
        (0, 0),
    ]


def test_the_gain_is_that_of_the_exposed_share_that_gets_hidden() -> None:
    assert gain(0.156, 1.0) == pytest.approx(0.185, abs=0.0005)
    assert gain(0.2, 0.5) == pytest.approx(100 / 90 - 1)
    assert gain(0.5, 0.0) == 0


@pytest.mark.parametrize(
    ("attention", "mlp", "expected"),
    [
        # mixers 0, 2 and 6 with the experts behind them, experts 4 and mixer 5 alone
        ("partial", "outdated", [(), (1, 20), (), (3, 4.4), (4, 50), (0,), (), (7, 0)]),
        ("full", "outdated", [(), (1, 0), (), (3, 4.4), (0,), (0,), (), (7, 0)]),
        # only R_1 and R_4 are in flight, then shared experts are summed alone
        ("partial", "full", [(), (0, 1, 20), (), (0, 0), (4, 50), (0,), (), (0, 0)]),
    ],
)
def test_a_mixer_is_summed_with_the_experts_behind_it(
    attention: str, mlp: str, expected: list[tuple[float, ...]]
) -> None:
    moe = [False, True, False, True, True, False, False, True]
    seconds = [
        {"experts": k, "shared expert": k / 10} if is_moe else {"attention a": 10 * k}
        for k, is_moe in enumerate(moe)
    ]
    computed = served_branches([True] * 8, moe, attention, mlp, moe)
    windows = [tuple(window(each, seconds) for each in layer) for layer in computed]
    assert windows == [pytest.approx(layer) for layer in expected]


def test_a_regular_layer_of_one_branch_has_one_sum_and_ends_a_run() -> None:
    computed = served_branches(
        [True, True, False, True], [False, True, False, True], "partial", "outdated", [True] * 4
    )  # fmt: skip
    assert computed == [(), ([(1, "experts")], []), ([],), ([],)]
