"""All-reduces as published: between two sizes, beyond the largest, by ranks and GPU; and
those that a cluster file gives.
"""

import math
from typing import Any

import pytest

from benchmarks.plan import planned
from fcsd.base.errors import UserError
from fcsd.planning.cost.collectives import TABLES, published
from fcsd.planning.cost.hardware import GPUS
from fcsd.planning.cost.plan import plan
from fcsd.planning.cost.planned import Planned
from fcsd.planning.cost.times import plan_times

QWEN: dict[str, Any] = {"gpu": "h200", "phase": "decode", "batch": 64, "length": 4096}


def of(planned: Planned) -> dict[str, float]:
    return {
        name: 1e6 * value for name, value in plan_times(planned)["exchange_s"].items()
    }


def test_every_row_is_in_order_and_every_table_has_a_source() -> None:
    for by_gpu in TABLES.values():
        for by_ranks in by_gpu.values():
            for table in by_ranks.values():
                assert table.source
                sizes = [row[0] for row in table.rows]
                assert sizes == sorted(set(sizes))
                for _, low, typical, high in table.rows:
                    assert 0 < low <= typical <= high


def test_a_size_between_two_rows_is_on_a_line_over_its_logarithm() -> None:
    table = published("engine", GPUS["h200"], 8)
    assert table is not None
    # 256 KiB 12.5 us, 512 KiB 11 us
    share = math.log(300 / 256) / math.log(2)
    assert table.at(300 * 1024, lambda _: 0.0)[1] == pytest.approx(12.5 - 1.5 * share)
    assert table.at(1024, lambda _: 0.0) == table.rows[0][1:]
    # 64 MiB takes 320 us; the bytes beyond it, as long as their rate says
    more = table.at(2 * 65536 * 1024, lambda num_bytes: num_bytes / 65536)
    assert more[1] == 320 + 1024


def test_64_requests_of_qwen_are_256_kib_and_a_prefill_is_as_fast_as_its_links() -> (
    None
):
    assert of(planned("Qwen3-30B-A3B", {}, QWEN)) == pytest.approx(
        {"all_reduce": 12.5, "side": 24.6}
    )
    prefill = {"gpu": "h200", "phase": "prefill", "batch": 16, "length": 2048}
    # 128 MiB: 320 us for 64, and the rest over seven eighths of the links, there and
    # back
    rest = 2 * 7 / 8 * 64 * 2**20 / (450e9 * 0.85) * 1e6
    assert of(planned("Qwen3-30B-A3B", {}, prefill))["all_reduce"] == pytest.approx(
        320 + rest
    )


def test_smaller_groups_have_their_own_times_and_other_gpus_latency_and_rates() -> None:
    four = planned("Qwen3-30B-A3B", {}, QWEN | {"gpus_per_node": 4})
    assert of(four) == pytest.approx({"all_reduce": 10, "side": 15.8})
    # nobody published 3 ranks: those of 4
    assert published("engine", GPUS["h100"], 3) is published("engine", GPUS["h100"], 4)
    num_bytes = 64 * 2048 * 2
    a100 = 2 * (20 + 1e6 * 7 / 8 * num_bytes / (300e9 * 0.85))
    assert of(planned("Qwen3-30B-A3B", {}, QWEN | {"gpu": "a100"})) == pytest.approx(
        {"all_reduce": a100, "side": a100}
    )
    # over two nodes, 50 us and the bytes
    two = planned("Qwen3-30B-A3B", {}, QWEN | {"nodes": 2})
    sent = 2e6 * 15 / 16 * num_bytes / min(450e9 * 0.85, 8 * 50e9 * 0.8)
    assert of(two)["all_reduce"] == pytest.approx(50 + sent)


def test_own_times_replace_the_published_and_set_the_range() -> None:
    own = planned(
        "Qwen3-30B-A3B", {}, QWEN | {"assumptions": {"all_reduce_us": 30, "side_us": 9}}
    )
    assert of(own) == pytest.approx({"all_reduce": 30, "side": 9})
    rows = {row["name"]: row for row in plan(own, advise=False)["sensitivity"]}
    assert rows["all_reduce_us"]["range"] == [10, 30]
    assert rows["side_us"]["range"] == [9, 34]
    with pytest.raises(UserError, match=r"all_reduce_us: only tensor-parallel ranks"):
        planned("Qwen3-30B-A3B", {}, {"assumptions": {"all_reduce_us": 30}})


def test_the_expected_gain_covers_every_assumption_and_names_the_first() -> None:
    for phase in ("decode", "prefill"):
        length = 512 if phase == "prefill" else 4096
        facts = plan(
            planned("Qwen3-30B-A3B", {}, QWEN | {"phase": phase, "length": length}),
            advise=False,
        )
        least, most = facts["expected_gain"]
        for row in facts["sensitivity"]:
            assert least - 1e-12 <= row["speed_up"][0] - 1, row["name"]
            assert row["speed_up"][1] - 1 <= most + 1e-12, row["name"]
        spans = {
            row["name"]: row["speed_up"][1] - row["speed_up"][0]
            for row in facts["sensitivity"]
        }
        assert spans[facts["hangs_on"]] == max(spans.values())


def test_a_captured_step_takes_its_kernels_and_its_gap() -> None:
    """One request on eight GPUs: nothing is as long as the kernels of its steps."""
    one = planned("Qwen3-30B-A3B", {}, QWEN | {"batch": 1, "length": 64})
    times, layer = plan_times(one), plan_times(one)["layer_s"]
    assert {name: round(1e6 * value) for name, value in layer.items() if value > 1e-7} == {
        "attention a": 10, "attention b": 6, "router": 12, "experts": 10,
    }  # fmt: skip
    head = one.roofline.head(one.work)
    assert times["compute_s"] == pytest.approx(48 * 38e-6 + head + 600e-6, rel=1e-3)
