"""The evaluation of a checkpoint: where the model computes, and what makes it a
different evaluation.
"""

import contextlib
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from transformers import LlamaConfig, LlamaForCausalLM

from fcsd.base.artifact import model_outputs
from fcsd.base.files import write_sealed
from fcsd.evaluation import stage
from fcsd.evaluation.results import configuration_fingerprint
from fcsd.evaluation.suites import load_suite
from fcsd.model.config import ModelConfig
from fcsd.model.load import ModelFolder, to_device
from fcsd.parallel import place as placed
from fcsd.parallel.engine import Engine
from fcsd.parallel.launch import Launch, Ranks, join_launch
from fcsd.pipeline import reference
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.recipe.load_recipe import load_recipe
from tests.evaluation.test_kept_tasks import judge, place
from tests.reference.tiny import tiny_model
from tests.support import Bench, user_error

__all__ = ["place"]  # a fixture


def evaluated(recipe: Path, name: str, folder: Path) -> None:
    """Evaluate a model of a run; the original of the recipe is the same folder."""
    plan = load_recipe(recipe)
    model = ModelFolder(plan.model, folder)
    suite, original = (
        load_suite(plan.evaluation.suite),
        reference.Reference(model, plan.data),
    )
    evaluation = stage.PlannedEvaluation(name, model, suite, plan.evaluation, original)
    output = Path(plan.output_dir) / "evaluate" / name
    stage.run_evaluation(evaluation, output, join_launch())


class Prepared:
    """An evaluation whose prompts fit, and which is run by a function."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def check_positions(self, config: Any) -> None:
        pass

    def __call__(self, model: Any, name: str, **options: Any) -> Any:
        return self.run(model, name)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Collect the results of evaluations that run no model, in order; none of them is
    written.
    """
    results: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def prepare_evaluation(tokenizer: Any, *args: Any, **options: Any) -> Iterator[Any]:
        yield Prepared(
            lambda model, name: ({"name": name, "vocabulary": len(tokenizer)}, {})
        )

    monkeypatch.setattr(
        stage,
        "_write_and_finish",
        lambda _, result, samples, launch: results.append(result),
    )
    monkeypatch.setattr(stage, "prepare_evaluation", prepare_evaluation)
    return results


def on(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(PartialState(), "device", torch.device(device))


def test_a_model_is_evaluated_on_the_accelerator_of_the_process(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    @contextlib.contextmanager
    def prepare_evaluation(*args: Any, **options: Any) -> Iterator[Any]:
        def stop(model: Any, name: str) -> None:
            seen.append({parameter.device.type for parameter in model.parameters()})
            raise KeyboardInterrupt

        yield Prepared(stop)

    monkeypatch.setattr(stage, "prepare_evaluation", prepare_evaluation)
    on(monkeypatch, "meta")
    with pytest.raises(KeyboardInterrupt):
        judge(place, tmp_path / "out")
    assert seen == [{"meta"}]


def test_a_model_that_the_accelerator_cannot_hold_is_refused_with_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Big(torch.nn.Linear):
        def _apply(self, *args: Any, **options: Any) -> Any:
            raise torch.OutOfMemoryError

    with user_error(
        r"some/model: its weights \(4 GB\) do not fit into the free memory of meta"
    ):
        to_device(
            Big(31250, 32000, bias=False, device="meta"),
            "some/model",
            torch.device("meta"),
        )  # type: ignore[arg-type]


def test_a_copy_is_read_straight_to_the_device_and_one_that_is_too_large_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise eight ranks of a machine would have eight copies in main memory."""
    device = torch.device("cuda", 1)
    maps = []

    def load(*args: Any, **options: Any) -> Any:
        maps.append(options["device_map"])
        raise torch.OutOfMemoryError

    monkeypatch.setattr(placed, "load_checkpoint", load)
    with user_error(
        r"model: its weights \(0 GB\) do not fit into the free memory of cuda:1"
    ):
        placed.load_for_evaluation(
            ModelFolder(ModelConfig(), place / "model"),
            Launch(device, Engine("ddp"), Ranks(1, 2)),
        )
    assert maps == [{"": device}]


def test_a_checkpoint_is_loaded_only_as_its_command_left_it(
    place: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(place / "model", tmp_path / "calibrated")
    record = {"stage": "calibrate", "outputs": model_outputs(folder)}
    write_sealed(folder / "manifest.json", record)
    model, launch = ModelFolder(ModelConfig(), folder), join_launch()
    placed.load_for_evaluation(model, launch)
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink()
    file.write_bytes(data)
    for load in (placed.load_for_evaluation, placed.load_for_launch):
        with user_error("is not what `fcsd calibrate` wrote"):
            load(model, launch)


def test_a_dense_model_is_evaluated_as_what_others_are_compared_with(
    place: Path, tmp_path: Path
) -> None:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    own = shutil.copytree(place, tmp_path / "place")
    LlamaForCausalLM(config).save_pretrained(own / "model")
    assert judge(own, tmp_path / "out").keys() == {"piqa", "sciq", "gsm8k"}


def test_the_original_is_gone_when_the_evaluated_model_is_loaded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, left: list[dict[str, Any]]
) -> None:
    """One accelerator may not hold both: the KL needs the original's hidden states and
    head only.
    """
    loaded: list[weakref.ref[Any]] = []
    load = placed.load_for_evaluation

    def seen(*args: Any, **options: Any) -> Any:
        assert all(weak() is None for weak in loaded)
        model = load(*args, **options)
        loaded.append(weakref.ref(model))
        return model

    for module in (reference, stage):
        monkeypatch.setattr(module, "load_for_evaluation", seen)
    data = {
        "train": [{"path": str(bench.rows)}],
        "heldout": {"path": str(bench.rows)},
        "heldout_examples": 4,
    }
    evaluated(bench.recipe(data=data | {"max_length": 32}), "original", bench.base)
    assert len(loaded) == 2
    kl = left[0]["kl_to_original"]
    assert kl["kl"] == pytest.approx(0, abs=1e-6) and kl["num_tokens"] > 0


def test_the_original_is_read_once_for_all_models_that_are_measured_against_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, left: list[dict[str, Any]]
) -> None:
    reads: list[int] = []
    read = reference.read_original

    def counted(model: Any, rows: Any, **options: Any) -> Any:
        reads.append(len(rows))
        return read(model, rows, **options)

    monkeypatch.setattr(reference, "read_original", counted)
    data = {
        "train": [{"path": str(bench.rows)}],
        "heldout": {"path": str(bench.rows)},
        "heldout_examples": 4,
    }
    plan = load_recipe(bench.recipe(data=data | {"max_length": 32}))
    original = ModelFolder(plan.model, bench.base)
    other = bench.folder / "models" / "other"
    tiny_model(
        "qwen3_moe",
        vocab_size=original.load_config().vocab_size,
        num_hidden_layers=1,
        seed=9,
    ).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    shared = reference.Reference(original, plan.data)

    def evaluate(name: str, model: ModelFolder, against: stage.ReferenceLike) -> None:
        one = stage.PlannedEvaluation(
            name, model, load_suite("tiny"), plan.evaluation, against
        )
        stage.run_evaluation(one, bench.folder / name, join_launch())

    for name, model in (
        ("one", original),
        ("other", ModelFolder(plan.model, other)),
        ("again", original),
    ):
        evaluate(name, model, shared)
    assert reads == [4]
    original_kl, other_kl, again = (result["kl_to_original"]["kl"] for result in left)
    assert original_kl == again == pytest.approx(0, abs=1e-6) and other_kl > 0.01
    longer = plan.data.model_copy(update={"heldout_examples": 5})
    evaluate(
        "longer", original, reference.Reference(original, longer, _known=shared._known)
    )
    assert reads == [4, 5], "other rows are read"


def test_a_finished_evaluation_is_not_that_of_another_tokenizer_or_configuration(
    place: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(place / "model", model)
    judge(place, tmp_path / "out", model=model, limit=1)
    judge(place, tmp_path / "out", model=model, limit=1)  # finished before
    (model / "README.md").write_text("# A card")
    judge(place, tmp_path / "out", model=model, limit=1)
    (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    with user_error(r"was made with other settings \(model/chat_template.jinja: "):
        judge(place, tmp_path / "out", model=model, limit=1)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("config.json", True), ("generation_config.json", True), ("tokenizer_config.json", True),
        ("merges.txt", True), ("vocab.json", True), ("qwen.tiktoken", True), ("tokenizer.model", True),
        ("tokenization_x.py", True), ("additional_chat_templates/tool_use.jinja", True),
        ("README.md", False), ("manifest.json", False), ("model.safetensors.index.json", False),
    ],
)  # fmt: skip
def test_files_that_change_an_answer_identify_a_configuration_and_no_others(
    name: str, counts: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = configuration_fingerprint(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")
    assert (configuration_fingerprint(tmp_path) != before) == counts


def test_a_revision_belongs_to_the_original_on_the_hub_and_not_to_the_models_of_the_run(
    bench: Bench, left: list[dict[str, Any]]
) -> None:
    evaluated(
        bench.recipe(model={"path": "owner/name", "revision": "a" * 40}),
        "converted",
        bench.base,
    )
    assert left[0]["name"] == "converted" and left[0]["vocabulary"] > 0
