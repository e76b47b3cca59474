"""A capacity in a recipe: pairs are dropped and counted in training, but in no score,
and in the same way after a resume.
"""

from typing import Any

import pytest

from fcsd.base.strict import validate
from fcsd.cli.main import main
from fcsd.model.families.capacity import Dropping
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training.config import TrainConfig, may_change
from fcsd.training.fcsd_config import FCSDConfig
from tests.reference.tiny import tiny_model
from tests.support import history, make_bench, user_error


def test_a_training_drops_counts_and_continues_with_the_same_capacity(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    tiny_model("qwen3_moe", vocab_size=300).save_pretrained(tmp_path / "base")
    tiny_tokenizer(300).save_pretrained(tmp_path / "base")
    bench = make_bench(tmp_path / "base", tmp_path)
    train = {
        "max_steps": 2, "batch_size_tokens": 128, "learning_rate": 1e-3, "warmup_steps": 1, "logging_steps": 1,
        "per_device_train_batch_size": 2,
    }  # fmt: skip
    taken: list[tuple[int, int]] = []
    take = Dropping.take

    def noted(self: Any) -> Any:
        pairs = take(self)
        assert pairs is not None
        taken.append((int(pairs[0]), int(pairs[1])))
        return pairs

    monkeypatch.setattr(Dropping, "take", noted)
    losses = {}
    for name, more in (
        ("none", {}),
        ("tight", {"capacity_factor": 0.75, "capacity_drop": "weight", "gradient_checkpointing": True}),
        ("wide", {"capacity_factor": 100.0}),
    ):  # fmt: skip
        taken.clear()
        assert main(["distill", str(bench.recipe(name, train=train | more))]) == 0
        entries = history(bench, name)
        losses[name] = [entry["loss"] for entry in entries]
        shares = [entry.get("dropped_share") for entry in entries]
        if name == "none":
            assert shares == [None, None] and not taken
        else:
            # two micro-batches per step; recomputed layers are not counted again
            expected = [
                sum(dropped for dropped, _ in taken[k : k + 2])
                / sum(pairs for _, pairs in taken[k : k + 2])
                for k in (0, 2)
            ]
            assert len(taken) == 4 and shares == pytest.approx(expected)
            assert (
                all(0.1 < share < 0.9 for share in shares)
                if name == "tight"
                else shares == [0, 0]
            )
    assert losses["wide"] == losses["none"] and losses["tight"][0] != losses["none"][0]
    capsys.readouterr()
    changed = bench.recipe(
        "tight", train=train | {"capacity_factor": 0.75, "capacity_drop": "weight", "per_device_train_batch_size": 1}
    )  # fmt: skip
    assert main(["distill", str(changed)]) == 2
    assert "train.per_device_train_batch_size: 2 -> 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"capacity_factor": 0}, r"train: capacity_factor: .*greater than 0"),
        ({"capacity_factor": float("inf")}, r"train: capacity_factor: .*finite"),
        ({"capacity_factor": 1.0, "capacity_drop": "probs"}, r"train: capacity_drop: .*'order' or 'weight'"),
        ({"capacity_drop": "order"}, r"capacity_drop: 'order' has no meaning without capacity_factor"),
    ],
)  # fmt: skip
def test_bad_values_are_one_line(values: dict[str, Any], message: str) -> None:
    with user_error(message) as error:
        validate(TrainConfig, values, "train")
    assert "\n" not in str(error.value)


def test_the_trainers_arguments_have_the_keys_and_rows_of_a_pass_are_fixed_by_a_capacity(
    tmp_path: Any,
) -> None:
    config = FCSDConfig(
        output_dir=str(tmp_path),
        capacity_factor=1.25,
        capacity_drop="weight",
        max_steps=1,
    )
    train = config.sections().train
    assert (train.capacity_factor, train.capacity_drop) == (1.25, "weight")
    assert "train.per_device_train_batch_size" not in may_change(train)
    assert "train.per_device_train_batch_size" in may_change(TrainConfig())
