"""Two ranks that share the experts drop what one process drops from the same
micro-batches.
"""

from pathlib import Path
from typing import Any

import pytest

from fcsd.model.connectivity import Connectivity, load_model
from fcsd.model.families.capacity import dropping
from tests.parallel.overlap.ranks import CHECKPOINTING, X, attached, spread, step, worst
from tests.reference.ranks import run_ranks
from tests.reference.tiny import tiny_model
from tests.support import few

WAYS = ("plain", "blocking", "full", "full, checkpointing")


def dropped(rank: int, folder: Path, drop: Any) -> dict[str, Any]:
    """Return way -> (worst error of a gradient, pairs dropped here)."""
    everything, parts, by_way = Connectivity("all"), X.chunk(2), {}
    expected, own = None, []
    if rank == 0:
        one = load_model(folder, connectivity=everything)
        with dropping(one, 1.0, drop) as counts:
            expected = {
                name: gradient / 2 for name, gradient in step(one, *parts).items()
            }
            by_way["one process"] = int(counts.take()[0])  # type: ignore[index]
        without = step(one, *parts)
        by_way["changes"] = max(
            float((without[n] / 2 - g).abs().max()) for n, g in expected.items()
        )
    for way in WAYS:
        model = spread(
            folder,
            everything,
            2,
            **({"ep_implementation": "all_to_all"} if way == "plain" else {}),
        )
        if way != "plain":
            attached(model, way.split(",")[0])
        if "checkpointing" in way:
            model.activation_checkpointing_enable(CHECKPOINTING)
        with dropping(model, 1.0, drop) as counts:
            own.append(worst(step(model, parts[rank]), expected))
            by_way[way] = (own[-1], int(counts.take()[0]))  # type: ignore[index]
    return by_way


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("family", "drop"), few([("deepseek_v3", "weight"), ("qwen2_moe", "order")], 1)
)
def test_two_ranks_drop_and_learn_what_one_process_does(
    tmp_path: Path, family: str, drop: str
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    first, second = run_ranks(dropped, 2, tmp_path, drop)
    assert first["changes"] > 1e-3 and first["one process"] > 0
    for way in WAYS:
        assert first[way][0] < 1e-4, way
        assert first[way][1] + second[way][1] == first["one process"], way
