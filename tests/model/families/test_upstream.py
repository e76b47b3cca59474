"""A transformers release that adds or changes a family is noticed here."""

import json
import re
from pathlib import Path

import pytest
import transformers

from fcsd.model.families import ALL_FAMILIES, FAMILIES, UNAVAILABLE
from fcsd.model.families.refused import BROKEN, REFUSED
from tests.reference.upstream import (
    PAGE,
    README,
    SNAPSHOTS,
    fingerprint,
    moe_model_types,
    num_families,
    saved_snapshot,
    with_count,
    with_families,
)
from tests.support import ROOT

WRITE = "`python -m tests.reference.upstream`"
AS_NEW = pytest.mark.skipif(
    saved_snapshot() is None, reason="this transformers is older than all snapshots"
)


def saved():
    return saved_snapshot()


def test_the_page_of_families_has_the_lists_of_the_registry():
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert text == with_families(text), (
        f"{PAGE}: its lists are not those of the registry; {WRITE}"
    )
    assert all(f"`{name}`" in text for name in (*ALL_FAMILIES, *REFUSED))


def test_the_readme_says_how_many_families_there_are_and_links_to_their_page():
    text = (ROOT / README).read_text(encoding="utf-8")
    assert text == with_count(text), (
        f"{README}: its number of families is not that of the registry; {WRITE}"
    )
    counts = re.search(r"\b(\d+) \(transformers 5\.23\), (\d+) \(5\.24\.0\)", text)
    # The snapshots list the families that were there when each release was tested.
    tested = [
        len(json.loads((ROOT / SNAPSHOTS / f"{release}.json").read_text())["families"])
        for release in ("5.23.0", "5.24.0")
    ]
    assert counts is not None and [int(count) for count in counts.groups()] == tested
    assert num_families(transformers.__version__) == len(FAMILIES)
    assert f"]({PAGE})" in text


def test_no_other_page_has_a_number_of_families_that_would_go_stale():
    """Decisions and changes are dated, so their numbers stay."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / README, ROOT / "pyproject.toml"]
    numbers = {
        page.name: found
        for page in pages
        if page.name != "decisions.md"
        and (found := re.findall(r"\b(\d+) (?:\w+ )?families\b", page.read_text()))
    }
    leaking = sum(row.packing == "leaks" for row in ALL_FAMILIES.values())
    assert numbers == {Path(PAGE).name: [str(leaking)]}


def test_the_page_says_which_release_breaks_a_family_and_why():
    text = " ".join((ROOT / PAGE).read_text(encoding="utf-8").split())
    for name, releases in BROKEN.items():
        for release, fault in releases.items():
            assert f"!={release}" in text and f"; in {release}, {fault}" in text, name


def test_every_moe_model_type_of_transformers_is_supported_or_refused_with_a_reason():
    undecided = [
        name
        for name in moe_model_types()
        if not {name} & (FAMILIES.keys() | UNAVAILABLE.keys() | REFUSED.keys())
    ]
    assert not undecided, (
        f"transformers {transformers.__version__} has MoE model types that fcsd neither"
        f" supports nor refuses: {', '.join(undecided)}. See docs/families.md, or give"
        " the reason in fcsd/model/families/refused.py"
    )
    assert not FAMILIES.keys() & REFUSED.keys()
    assert all(len(reason) > 20 for reason in REFUSED.values())


@AS_NEW
def test_the_moe_model_types_of_transformers_are_those_of_the_snapshot():
    now, then = set(moe_model_types()), set(saved()["model_types"])
    assert now == then, (
        f"transformers {transformers.__version__} has {sorted(now - then)} that"
        f" {saved()['transformers']} had not, and no longer {sorted(then - now)}."
        f" Decide on each, run tests/model/connectivity, then {WRITE}"
    )


@AS_NEW
def test_no_supported_family_has_changed_upstream():
    now, then = (
        {name: fingerprint(family) for name, family in FAMILIES.items()},
        saved()["families"],
    )
    changed = sorted(
        name for name in now.keys() & then.keys() if now[name] != then[name]
    )
    assert not changed, (
        f"transformers {transformers.__version__}: the decoder layer, the MoE block or"
        f" the loop over layers is not that of {saved()['transformers']} in"
        f" {', '.join(changed)}. Read what changed, run the contract tests (pytest"
        f" tests/model/connectivity tests/model/families), then {WRITE}"
    )
    assert now.keys() == then.keys(), (
        f"{sorted(now.keys() ^ then.keys())}: added or removed here; {WRITE}"
    )


@AS_NEW
def test_a_changed_layer_or_loop_and_nothing_else_changes_the_fingerprint(
    tmp_path, monkeypatch
):
    """The same text with other comments, docstrings and annotations is the same; other
    code is not.
    """
    family, source = (
        FAMILIES["qwen3_moe"],
        Path(transformers.__file__).parent / "models/qwen3_moe",
    )
    folder = tmp_path / "models" / "qwen3_moe"
    folder.mkdir(parents=True)
    text = (source / "modeling_qwen3_moe.py").read_text(encoding="utf-8")
    monkeypatch.setattr("tests.reference.upstream._MODELS", tmp_path / "models")

    def hashed(changed):
        (folder / "modeling_qwen3_moe.py").write_text(changed, encoding="utf-8")
        return fingerprint(family)

    def replaced(old, new):
        assert old in text
        return text.replace(old, new)

    same = saved()["families"]["qwen3_moe"]
    layer = "class Qwen3MoeDecoderLayer(GradientCheckpointingLayer):\n"
    assert hashed(text) == same
    assert (
        hashed(replaced(layer, f'{layer}    """A layer."""\n    # with a comment\n'))
        == same
    )
    assert (
        hashed(
            replaced(
                "hidden_states: torch.Tensor,", "hidden_states: 'torch.Tensor | None',"
            )
        )
        == same
    )
    assert (
        hashed(replaced("residual + hidden_states", "residual - hidden_states")) != same
    )
    assert hashed(replaced("self.layers[", "self.layers[1:][")) != same


@pytest.mark.parametrize(
    "text",
    [
        "class LlamaSparseMoeBlock(nn.Module): ...",
        "class LlamaMLP:\n    def f(self): self.experts(x)",
    ],
)
def test_a_model_type_that_gets_experts_is_listed(tmp_path, monkeypatch, text):
    monkeypatch.setattr("tests.reference.upstream._MODELS", tmp_path)
    (tmp_path / "llama").mkdir()
    for content, listed in (("class LlamaMLP:\n    pass", False), (text, True)):
        (tmp_path / "llama" / "modeling_llama.py").write_text(content, encoding="utf-8")
        assert ("llama" in moe_model_types()) == listed


def test_a_configuration_that_has_the_models_of_an_moe_family_is_listed(monkeypatch):
    mapping = "tests.reference.upstream.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
    for model, listed in (("LlamaForCausalLM", False), ("Glm4MoeForCausalLM", True)):
        monkeypatch.setattr(mapping, {"newcomer": model})
        assert ("newcomer" in moe_model_types()) == listed
