"""The held-out KL against the models' own logits in float64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fcsd.base.errors import UserError
from fcsd.cli.main import main
from fcsd.data.config import SourceConfig
from fcsd.data.dataset import heldout_rows
from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.planning.layers.study import read_study
from fcsd.training.losses.kl import mean_kl, read_original
from tests.reference.tiny import tiny_model

NUM_EXAMPLES = 6


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for n in range(NUM_EXAMPLES):
            roles = (("user", f"{n} + {n % 7}"), ("assistant", f"{n + n % 7} is it"))
            row = {"messages": [{"role": role, "content": content} for role, content in roles]}
            file.write(json.dumps(row) + "\n")
    return path


def rows_of(text: Path, packing: bool) -> Any:
    options: dict[str, Any] = {"num_examples": NUM_EXAMPLES, "max_length": 48, "loss_on": "response"}
    return heldout_rows(SourceConfig(path=str(text)), tiny_tokenizer(300), packing=packing, **options)


@torch.no_grad()
def by_hand(original: Any, model: Any, rows: Any, vocab_size: int) -> float:
    """Return the mean over response tokens of sum_v p log(p / q), one row of one example at a time."""
    values = []
    for row in rows:
        ids, labels = torch.as_tensor(row["input_ids"])[None], torch.as_tensor(row["labels"])
        p, q = (
            torch.log_softmax(m(ids, use_cache=False).logits[0, :, :vocab_size].double(), -1)
            for m in (original, model)
        )
        kl = (p.exp() * (p - q)).sum(-1)
        values.append(kl[:-1][labels[1:] != -100])
    return float(torch.cat(values).mean())


@pytest.mark.parametrize(
    ("family", "fields", "vocab_size"),
    [("qwen2_moe", {}, 300), ("inkling_text", {"unpadded_vocab_size": 270}, 270), ("jamba", {}, 300)],
)
def test_the_kl_is_that_of_the_models_own_logits(
    family: str, fields: dict[str, Any], vocab_size: int, text: Path
) -> None:
    original, model = (tiny_model(family, vocab_size=300, **fields) for _ in range(2))
    convert_model(model, Connectivity("all"))
    rows = rows_of(text, packing=False)
    result = mean_kl(read_original(original, rows), model, rows)
    assert result["kl"] == pytest.approx(by_hand(original, model, rows, vocab_size), rel=1e-4)
    assert result["kl"] > 0.01


def test_packed_rows_are_refused_where_examples_would_see_each_other(text: Path) -> None:
    rows = rows_of(text, packing=True)
    assert len(rows) < NUM_EXAMPLES
    model = tiny_model("jamba", vocab_size=300)
    with pytest.raises(
        UserError, match=r"'jamba' lets packed examples see each other; set data\.packing: false"
    ):
        mean_kl(read_original(model, rows), model, rows)


def test_the_layer_study_of_such_a_family_has_one_example_in_a_row(text: Path, tmp_path: Path) -> None:
    original, model = (tiny_model("jamba", vocab_size=300) for _ in range(2))
    original.save_pretrained(tmp_path / "model")
    tiny_tokenizer(300).save_pretrained(tmp_path / "model")
    options = f"--text {text} --max-length 48 --sides last --counts 4 --output {tmp_path / 'study'}".split()
    assert main(["layers", str(tmp_path / "model"), *options]) == 0
    convert_model(model, Connectivity("all"))
    rows = rows_of(text, packing=False)
    direct = mean_kl(read_original(original, rows), model, rows)
    [point] = read_study(tmp_path / "study")["points"]
    assert point["values"]["kl"]["value"] == pytest.approx(direct["kl"], rel=1e-4)
