"""The picture of a layer is what its script draws, and shows what the equations
allow.
"""

from itertools import pairwise
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"
ATTENTION = ("q, k, v", "core attention")
ROUTED = ("router", "dispatch", "routed experts", "combine")
ALL = (*ATTENTION, *ROUTED, "shared")


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    import layer

    return layer


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    import layer_schedule

    return layer_schedule


def test_the_committed_picture_is_what_the_script_draws(layer: ModuleType) -> None:
    committed = layer.OUTPUT.read_text(encoding="utf-8")
    assert committed == layer.picture(), "run `python docs/pictures/layer.py`"


def test_the_picture_has_its_own_background_and_its_text_is_text(
    layer: ModuleType,
) -> None:
    root = ElementTree.parse(layer.OUTPUT).getroot()
    background = root.find(f"{SVG}rect")
    assert background is not None and background.get("fill") == "#ffffff"
    assert float(background.get("width", 0)) >= layer.WIDTH - 1
    words = ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]
    assert {
        "Regular", "FarSkip", "attention", "routed experts", "dispatch", "combine", "waits",
    } <= set(words)  # fmt: skip
    assert root.findtext(f"{SVG}title") and root.findtext(f"{SVG}desc")
    assert not list(root.iter(f"{SVG}image"))


def reached(operations: list, name: str, k: int) -> set[tuple[str, int]]:
    """Return all operations whose results go into `name` of layer k."""
    reads = {(one.name, one.layer): one.reads for one in operations}
    names: set[tuple[str, int]] = set()
    waiting = [(name, k)]
    while waiting:
        for read in reads.get(waiting.pop(), ()):
            if read in reads and read not in names:
                names.add(read)
                waiting.append(read)
    return names


def of(names: tuple[str, ...], *layers: int) -> set[tuple[str, int]]:
    return {(name, k) for name in names for k in layers}


def test_the_blocks_of_a_regular_layer_read_what_the_equations_say(
    rules: ModuleType,
) -> None:
    operations = [one for k in range(4) for one in rules.regular_layer(k)]
    assert reached(operations, "q, k, v", 3) == of(ALL, 0, 1, 2)
    assert reached(operations, "router", 3) == of(ALL, 0, 1, 2) | of(ATTENTION, 3)
    assert reached(operations, "shared", 3) == of(ALL, 0, 1, 2) | of(ATTENTION, 3)


def test_the_blocks_of_a_farskip_layer_read_what_the_equations_say(
    rules: ModuleType,
) -> None:
    operations = [one for k in range(4) for one in rules.farskip_layer(k)]
    assert reached(operations, "q, k, v", 3) == of(ALL, 0, 1) | of(
        (*ATTENTION, "shared"), 2
    )
    assert reached(operations, "router", 3) == of(ALL, 0, 1, 2)
    assert reached(operations, "shared", 3) == of(ALL, 0, 1, 2)


@pytest.mark.parametrize(("kind", "idle"), [("regular", 5.0 + 5.5), ("farskip", 0.0)])
def test_only_the_regular_layer_waits_for_its_collectives(
    rules: ModuleType, kind: str, idle: float
) -> None:
    """A regular layer waits for the whole dispatch and the whole combine, a FarSkip
    layer for neither.
    """
    make = getattr(rules, f"{kind}_layer")
    placed = rules.schedule([one for k in range(5) for one in make(k)])
    starts = [placed["q, k, v", k][0] for k in range(5)]
    computing = sum(
        time
        for name, time in rules.DURATIONS.items()
        if name not in ("dispatch", "combine")
    )
    assert [later - earlier for earlier, later in pairwise(starts)] == [
        computing + idle
    ] * 4
