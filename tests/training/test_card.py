"""The card that a trainer writes is fcsd's: what the model is, what it was made from
and how to load it.
"""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import DatasetInfo
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

import fcsd
from fcsd.api.trainer import FCSDTrainer
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training.card.trainer import dataset_names
from fcsd.training.fcsd_config import FCSDConfig
from tests.reference.tiny import tiny_model
from tests.support import user_error

ROWS = [{"prompt": f"{n} + 1?", "response": f"{n + 1} it is"} for n in range(40)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3_moe", num_hidden_layers=2, vocab_size=300, num_experts=4)


@pytest.fixture
def make(model: Any, tmp_path: Path) -> Callable[..., FCSDTrainer]:
    def trainer(
        name_or_path: str = "owner/base", data: Any = None, **changes: Any
    ) -> FCSDTrainer:
        given = {
            name: changes.pop(name)
            for name in ("model", "teacher", "eval_dataset")
            if name in changes
        }
        student = copy.deepcopy(model)
        student.config._name_or_path = name_or_path
        settings: dict[str, Any] = {
            "layers": "last:1", "max_length": 32, "max_steps": 2, "batch_size_tokens": 64, "learning_rate": 1e-3,
            "save_strategy": "no", "disable_tqdm": True,
        }  # fmt: skip
        return FCSDTrainer(
            given.pop("model", student),
            FCSDConfig(str(tmp_path / "out"), **settings | changes),
            train_dataset=ROWS if data is None else data,
            processing_class=tiny_tokenizer(300),
            **given,
        )

    return trainer


def card_of(trainer: FCSDTrainer, **said: Any) -> ModelCard:
    trainer.create_model_card(**said)
    return ModelCard.load(Path(str(trainer.args.output_dir)) / "README.md")


# the Hub cannot be reached for the original's licence
@pytest.mark.filterwarnings("ignore")
def test_the_card_names_original_connectivity_objective_data_and_how_it_is_loaded(
    make: Callable[..., FCSDTrainer], tmp_path: Path
) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    rows.info.download_checksums = {
        "hf://datasets/owner/sums@0a1b/train.jsonl": {"num_bytes": 1}
    }
    trainer = make(
        data=rows, eval_dataset=ROWS[:4], eval_strategy="steps", eval_steps=2
    )
    trainer.train()
    trainer.save_model()
    card = card_of(trainer)
    assert card.data.base_model == "owner/base" and card.data.datasets == ["owner/sums"]
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.tags == ["farskip", "moe", "self-distillation", "fcsd"]
    text = " ".join(card.text.split())
    assert (
        "`owner/base` with **FarSkip connectivity**: 1 of 2 decoder layers are rewired"
        in text
    )
    assert "Rewired layers: 1." in text
    assert "trained from scratch" not in text
    assert "unknown" not in text
    expected = (
        "Self-distillation (FCSD): teacher is the original checkpoint, objective `kl`,"
        " 2 steps of 64 tokens, learning rate 0.001."
    )
    assert expected in text
    assert "Data: `owner/sums`." in text
    assert "KL(teacher || this model) on held-out" in text
    # it was not evaluated
    assert "Nothing is known about what it kept of the original." in text
    assert "not trained" not in text and str(tmp_path) not in card.content
    # Runs the code on the card: without a repository it names the folder that it
    # describes.
    (code,) = re.findall(r"```python\n(.*?)```", card.text, flags=re.S)
    assert "path/to/this/folder" in code and "trust_remote_code=True" in code
    assert AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", trust_remote_code=True
    )


@pytest.mark.filterwarnings("ignore")
def test_what_is_said_comes_before_what_is_known(
    make: Callable[..., FCSDTrainer],
) -> None:
    trainer = make(objective="ce", hub_model_id="me/mine")
    trainer.train()
    card = card_of(
        trainer, language="de", license="mit", tags="sums", model_name="Mine", finetuned_from="other/base",
        dataset=["owner/rows", "notes"], dataset_tags="owner/tagged",
    )  # fmt: skip
    data = card.data
    assert (data.language, data.license, data.base_model) == (
        ["de"],
        "mit",
        "other/base",
    )
    assert data.datasets == ["owner/rows", "owner/tagged"]
    assert data.tags == ["farskip", "moe", "fcsd", "sums"]
    assert "# Mine\n" in card.text
    assert 'from_pretrained("me/mine", trust_remote_code=True)' in card.text
    text = " ".join(card.text.split())
    assert "Trained with cross-entropy, 2 steps" in text
    assert "Data: `owner/rows`, `notes`, `owner/tagged`." in text
    for name in ("tasks", "dataset_args"):
        with user_error(rf"^create_model_card: {name}: does not appear on the card"):
            trainer.create_model_card(**{name: "x"})


def test_the_original_of_a_folder_is_what_its_conversion_or_its_card_says(
    make: Callable[..., FCSDTrainer], model: Any, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path / "base-model")
    tiny_tokenizer(300).save_pretrained(tmp_path / "base-model")
    (tmp_path / "base-model" / "README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage: fr\n---\n"
    )
    fcsd.convert_checkpoint(
        tmp_path / "base-model", tmp_path / "converted", layers="all"
    )
    # Only the card of a downloaded folder says what it was made from.
    (tmp_path / "converted" / "manifest.json").unlink()
    (tmp_path / "converted" / "README.md").write_text(
        "---\nbase_model: owner/base\nlicense: mit\n---\n"
    )
    trainer = make(
        model=str(tmp_path / "converted"),
        teacher=str(tmp_path / "base-model"),
        layers=None,
        max_steps=1,
    )
    trainer.train()
    text = " ".join(card_of(trainer).text.split())
    assert "`owner/base` with **FarSkip" in text
    assert "teacher is `base-model`, objective" in text
    trainer = make(model=str(tmp_path / "base-model"), max_steps=1)
    trainer.train()
    card = card_of(trainer)
    assert card.data.license == "apache-2.0"
    assert card.data.language == ["fr"]
    assert card.data.base_model is None
    assert "It was made from `base-model`." in " ".join(card.text.split())
    assert str(tmp_path) not in card.content


def test_a_model_that_was_not_trained_is_called_that_and_an_sft_is_no_distillation(
    make: Callable[..., FCSDTrainer],
) -> None:
    assert "> **Rewired, but not trained.**" in card_of(make("")).text
    trainer = make("", layers="none", objective="sft")
    trainer.train()
    card = card_of(trainer)
    text = " ".join(card.text.split())
    assert "0 of 2 decoder layers are rewired" in text and "not trained" not in text
    assert "Fine-tuned on the answers of the data (SFT), 2 steps" in text
    assert "self-distillation" not in card.data.tags


@pytest.mark.parametrize(
    ("info", "names"),
    [
        ({"download_checksums": {"hf://datasets/a/b@1/x": {}, "hf://datasets/a/b@1/y": {},}}, ("a/b",),),
        ({"download_checksums": {"hf://datasets/squad@1/x": {}}, "dataset_name": "other",}, ("squad",),),
        ({"dataset_name": "gsm8k"}, ("gsm8k",)),
        ({"builder_name": "json", "dataset_name": "json"}, ()),
        ({}, ()),
    ],
)  # fmt: skip
def test_data_sets_are_known_by_what_they_were_loaded_from(
    info: dict[str, Any], names: tuple[str, ...]
) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    rows.info.update(DatasetInfo(**info))
    assert dataset_names(rows) == dataset_names(rows.map(dict)) == names
    assert dataset_names(ROWS) == dataset_names(None) == ()
