"""The held-out KL against the models' own logits in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fcsd.cli.main import main
from fcsd.data.config import SourceConfig
from fcsd.data.dataset import heldout_rows
from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.planning.layers.settings import read_study
from fcsd.training.losses.heldout_kl import (
    PART_TOKENS,
    mean_kl,
    read_original,
    row_parts,
)
from tests.reference.tiny import tiny_model
from tests.support import arithmetic, user_error, write_rows

NUM_EXAMPLES = 6


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    write_rows(path, arithmetic(NUM_EXAMPLES))
    return path


def rows_of(text: Path, packing: bool) -> Any:
    options: dict[str, Any] = {
        "num_examples": NUM_EXAMPLES,
        "max_length": 48,
        "loss_on": "response",
    }
    return heldout_rows(
        SourceConfig(path=str(text)), tiny_tokenizer(300), packing=packing, **options
    )


@torch.no_grad()
def by_hand(original: Any, model: Any, rows: Any, vocab_size: int) -> float:
    """Return the mean over response tokens of sum_v p log(p / q), one row of one
    example at a time.
    """
    values = []
    for row in rows:
        ids, labels = (
            torch.as_tensor(row["input_ids"])[None],
            torch.as_tensor(row["labels"]),
        )
        p, q = (
            torch.log_softmax(
                m(ids, use_cache=False).logits[0, :, :vocab_size].double(), -1
            )
            for m in (original, model)
        )
        kl = (p.exp() * (p - q)).sum(-1)
        values.append(kl[:-1][labels[1:] != -100])
    return float(torch.cat(values).mean())


@pytest.mark.parametrize(
    ("family", "fields", "vocab_size"),
    [
        ("qwen2_moe", {}, 300),
        ("inkling_text", {"unpadded_vocab_size": 270}, 270),
        ("jamba", {}, 300),
    ],
)
def test_the_kl_is_that_of_the_models_own_logits(
    family: str, fields: dict[str, Any], vocab_size: int, text: Path
) -> None:
    original, model = (tiny_model(family, vocab_size=300, **fields) for _ in range(2))
    convert_model(model, Connectivity("all"))
    rows = rows_of(text, packing=False)
    result = mean_kl(read_original(original, rows), model, rows)
    assert result["kl"] == pytest.approx(
        by_hand(original, model, rows, vocab_size), rel=1e-4
    )
    assert result["kl"] > 0.01


def test_a_row_is_cut_between_examples_and_behind_its_last_token_with_loss() -> None:
    lengths = [3, 4, 2, 9, 1]  # the longest stays whole, the last is padding
    positions = [k for length in lengths for k in range(length)]
    labels = [*range(18), -100]
    row = {"input_ids": list(range(19)), "position_ids": positions, "labels": labels}
    parts = row_parts(row, 7)
    assert [part["input_ids"].tolist() for part in parts] == [
        [0, 1, 2, 3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13, 14, 15, 16, 17],
    ]  # fmt: skip
    assert all(
        part["position_ids"][0] == 0 and len(part["labels"]) == len(part["input_ids"])
        for part in parts
    )
    (whole,) = row_parts(row, 64)
    assert whole["input_ids"].tolist() == list(range(18))
    # no token counts, but there is a row
    (nothing,) = row_parts(row | {"labels": [-100] * 19}, 7)
    assert len(nothing["input_ids"]) == 1


@pytest.mark.parametrize("part_tokens", [1, 30, 100])
def test_rows_in_parts_have_the_kl_of_each_example_alone(
    part_tokens: int, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither how a row is cut nor its padding changes its sum, its tokens or the
    standard error.
    """
    monkeypatch.setitem(PART_TOKENS, "cpu", part_tokens)
    original, model = (
        tiny_model("qwen2_moe", vocab_size=300, experts_implementation="eager").double()
        for _ in range(2)
    )
    convert_model(model, Connectivity("all"))
    examples = rows_of(text, packing=False)
    source = SourceConfig(path=str(text))
    options: dict[str, Any] = {
        "num_examples": NUM_EXAMPLES,
        "max_length": 100,
        "loss_on": "response",
    }
    rows = heldout_rows(source, tiny_tokenizer(300), packing=True, **options)
    assert 1 < len(rows) < NUM_EXAMPLES
    longest: list[int] = []
    model.model.register_forward_pre_hook(
        lambda _, __, kwargs: longest.append(kwargs["input_ids"].numel()),
        with_kwargs=True,
    )
    result = mean_kl(read_original(original, rows, in_parts=True), model, rows)
    assert max(longest) <= max(
        part_tokens,
        max(len(ids) for k in range(len(rows)) for ids, _ in rows.examples_of(k)),
    )
    assert result["kl"] == pytest.approx(
        by_hand(original, model, examples, 300), rel=1e-6
    )
    whole = mean_kl(read_original(original, rows), model, rows)
    assert result["stderr"] == pytest.approx(whole["stderr"], rel=1e-6)
    assert result["num_tokens"] == whole["num_tokens"]


def test_packed_rows_are_refused_where_examples_would_see_each_other(
    text: Path,
) -> None:
    rows = rows_of(text, packing=True)
    assert len(rows) < NUM_EXAMPLES
    model = tiny_model("jamba", vocab_size=300)
    with user_error(
        r"'jamba' lets packed examples attend to each other; set data\.packing: false"
    ):
        mean_kl(read_original(model, rows), model, rows)


def test_the_layer_study_of_such_a_family_has_one_example_in_a_row(
    text: Path, tmp_path: Path
) -> None:
    original, model = (tiny_model("jamba", vocab_size=300) for _ in range(2))
    original.save_pretrained(tmp_path / "model")
    tiny_tokenizer(300).save_pretrained(tmp_path / "model")
    options = (
        f"--text {text} --max-length 48 --sides last --every 4 --output"
        f" {tmp_path / 'study'}".split()
    )
    assert main(["layers", str(tmp_path / "model"), *options]) == 0
    convert_model(model, Connectivity("all"))
    rows = rows_of(text, packing=False)
    direct = mean_kl(read_original(original, rows), model, rows)
    *_, point = read_study(tmp_path / "study")["points"]
    assert point["num_layers"] == 4
    assert point["values"]["kl"]["value"] == pytest.approx(direct["kl"], rel=1e-4)
