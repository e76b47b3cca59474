"""Training on the student's own text: what it writes, its gradients against full logits
in float64 and TRL's loss on the same samples, and a run on ranks or after a kill.
"""

import copy
import importlib.util
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from fcsd import FCSDConfig, FCSDTrainer
from fcsd.base.artifact import read_manifest
from fcsd.base.files import read_json
from fcsd.cli.main import main
from fcsd.data.batches import Collator, next_token_targets
from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.parallel.engine import Engine
from fcsd.parallel.launch import ALONE
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.report import report as report_module
from fcsd.training import checkpoint_writer as writer_module
from fcsd.training.arguments import refuse_what_cannot_be_sharded
from fcsd.training.card import card as card_module
from fcsd.training.card.facts import Facts
from fcsd.training.history import read_history
from fcsd.training.losses.head import attach_loss_head
from fcsd.training.meters import Meters
from fcsd.training.own_text import OwnText, StudentPrompt, cut, prompts_of, row_digest
from fcsd.training.run import train
from fcsd.training.teachers.cache import CachedTeacher
from fcsd.training.trainer import DistillTrainer
from tests.losses import DIVERGENCES, objective_of, reference_loss
from tests.parallel.test_engines import compare, launch
from tests.reference.tiny import TINY, tiny_model
from tests.support import (
    Bench,
    assert_killed,
    few,
    few_and_others,
    history,
    json_lines,
    skip_unavailable,
    trained_weights,
    user_error,
)
from tests.training.test_trainer import LENGTH, Rows, examples, make


@pytest.fixture(scope="module")
def teacher() -> Any:
    model = tiny_model(
        "qwen2_moe", num_hidden_layers=2, experts_implementation="eager"
    ).requires_grad_(False)
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.copy_(weight + 0.1 * torch.randn_like(weight))
    return model


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, np.ndarray]]:
    """The rows of all steps after the student has written."""
    rows: list[dict[str, np.ndarray]] = []
    write = OwnText.write

    def noted(self: Any, model: Any, batches: list[Any], step: int) -> None:
        write(self, model, batches, step)
        for batch in batches:
            rows.extend(
                {name: batch[name][index].numpy().copy() for name in batch}
                for index in range(len(batch["input_ids"]))
            )

    monkeypatch.setattr(OwnText, "write", noted)
    return rows


@pytest.mark.parametrize("objective", DIVERGENCES, ids=lambda by: by["name"])
@pytest.mark.parametrize("share", few([0.5, 1.0], 1))
def test_loss_and_gradients_are_those_of_full_logits_on_the_stored_samples(
    tmp_path: Path,
    teacher: Any,
    written: list[dict[str, np.ndarray]],
    monkeypatch: pytest.MonkeyPatch,
    objective: dict[str, Any],
    share: float,
) -> None:
    gradients: dict[str, torch.Tensor] = {}
    norm = DistillTrainer._get_grad_norm

    def noted(self: Any, model: Any, *args: Any, **kwargs: Any) -> float:
        for name, weight in model.named_parameters():
            if weight.grad is not None:
                gradients[name] = weight.grad.clone()
        return norm(self, model, *args, **kwargs)

    monkeypatch.setattr(DistillTrainer, "_get_grad_norm", noted)
    by = objective_of(**objective)
    rows = Rows(4)
    chosen = objective | {"own_text": share}
    # gradients as they are, not clipped
    run = make(tmp_path, teacher, chosen, rows=rows, max_steps=1, max_grad_norm=1e9)
    student, original = (
        copy.deepcopy(model).double() for model in (run.student, teacher)
    )
    train(*run)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, labels in examples(written):
        keep = labels[0, 1:] != -100
        own, theirs = (
            model(ids, use_cache=False).logits[0, :-1][keep]
            for model in (student, original)
        )
        total = total + reference_loss(own, theirs, by).sum()
        count += int(keep.sum())
    (total / count).backward()
    entry = read_history(tmp_path)[0]
    assert entry["own_rows"] == (4 if share == 1 else 1)
    assert entry["loss"] == pytest.approx(float(total.detach() / count), rel=1e-5)
    expected = {
        name: weight.grad
        for name, weight in student.named_parameters()
        if weight.grad is not None and bool(weight.grad.any())
    }
    assert expected.keys() <= gradients.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        difference = float((gradients[name].double() - gradient).abs().max())
        assert difference <= 2e-4 * scale, name


TRL_BETA = {"kl": 0.0, "reverse_kl": 1.0, "jsd": 0.3}


@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None,
    reason="needs trl: pip install 'fcsd[bench]'",
)
@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
@pytest.mark.parametrize(
    "objective",
    [by for by in DIVERGENCES if by["name"] in TRL_BETA],
    ids=lambda by: by["name"],
)
def test_the_loss_on_own_text_is_that_of_trl_on_the_same_samples(
    tmp_path: Path,
    teacher: Any,
    written: list[dict[str, np.ndarray]],
    objective: dict[str, Any],
) -> None:
    from trl.experimental.gkd import GKDTrainer

    run = make(tmp_path, teacher, objective | {"own_text": 1.0}, max_steps=1)
    student = copy.deepcopy(run.student)
    train(*run)
    total, count = 0.0, 0
    for ids, labels in examples(written):
        with torch.no_grad():
            own, theirs = (
                model(ids, use_cache=False).logits[:, :-1]
                for model in (student, teacher)
            )
        loss = GKDTrainer.generalized_jsd_loss(
            own,
            theirs,
            labels[:, 1:],
            beta=TRL_BETA[objective["name"]],
            temperature=objective.get("temperature", 1.0),
            reduction="sum",
        )
        total, count = total + float(loss), count + int((labels[:, 1:] != -100).sum())
    assert read_history(tmp_path)[0]["loss"] == pytest.approx(total / count, abs=1e-5)


def arrays(*columns: list[int]) -> dict[str, np.ndarray]:
    names = ("input_ids", "position_ids", "labels")
    return {
        name: np.array(column, np.int32)
        for name, column in zip(names, columns, strict=True)
    }


END, TURN = 2, 7  # the end of a sequence, and of a turn
CONVERSATION = [10, 11, 12, 13, TURN, 14, 15, 16, TURN, 17]  # two turns have loss
DOCUMENT = [20, 21, 22, 23]
ROW = arrays(
    [*CONVERSATION, *DOCUMENT, 0, 0],
    [*range(10), *range(4), 0, 1],
    [-100, -100, -100, 13, TURN, -100, -100, 16, TURN, -100, -100, 21, 22, 23, -100, -100],
)  # fmt: skip


def test_a_prompt_ends_before_a_drawn_turn_or_half_way_through_a_document() -> None:
    conversations, limits = set(), {}
    for step in range(40):
        prompts = prompts_of(
            ROW, row_digest(0, step, ROW), frozenset({END}), frozenset({TURN}), None
        )
        first, second = prompts
        assert second.tokens == [20, 21] and second.stops == {END}
        assert first.stops == {END, TURN} and first.seed != second.seed
        conversations.add(tuple(first.tokens))
        limits[len(first.tokens)] = (first.limit, second.limit)
    assert conversations == {tuple(CONVERSATION[:3]), tuple(CONVERSATION[:7])}
    # 16 tokens less both prompts, in equal parts
    assert limits == {3: (5, 5), 7: (3, 3)}
    short = prompts_of(ROW, bytes(32), frozenset({END}), frozenset(), 2)
    assert [prompt.limit for prompt in short] == [2, 2]


def test_own_text_ends_at_its_limit_or_behind_the_token_that_ends_it() -> None:
    prompt = StudentPrompt([1], frozenset({END, TURN}), 3, 0)
    assert cut([5, 6, 8, TURN, 9], prompt) == [5, 6, 8]
    assert cut([5, TURN, 8, END], prompt) == [5, TURN]
    assert cut([END], prompt) == [END]


def test_only_own_tokens_have_loss_and_prompts_are_those_of_the_data(
    tmp_path: Path, teacher: Any, written: list[dict[str, np.ndarray]]
) -> None:
    rows = Rows(8)
    train(*make(tmp_path, teacher, {"own_text": 1.0}, rows=rows, max_steps=2))
    given = {
        tuple(ids[0, :1].tolist()): (ids, labels) for ids, labels in examples(rows.rows)
    }
    own = 0
    for row in written:
        _, targets = next_token_targets(
            *(torch.tensor(row[name])[None] for name in ("labels", "position_ids"))
        )
        own += len(targets)
        for ids, labels in examples([row]):
            has_loss = (labels[0] != -100).numpy()
            assert np.array_equal(labels[0][has_loss], ids[0][has_loss])
            if not has_loss.any():  # padding
                continue
            first = int(has_loss.argmax())
            data, _ = given[tuple(ids[0, :1].tolist())]
            assert ids[0, :first].equal(data[0, :first])
    entries = read_history(tmp_path)
    assert sum(entry["own_rows"] for entry in entries) == 8
    texts = [entry["own_ended"] + entry["own_cut"] for entry in entries]
    lengths = [entry["own_mean_tokens"] for entry in entries]
    assert sum(a * b for a, b in zip(texts, lengths, strict=True)) == pytest.approx(own)
    assert all(0 < entry["own_time_share"] < 1 for entry in entries)


def test_the_share_of_written_rows_is_that_of_the_recipe(
    tmp_path: Path, teacher: Any
) -> None:
    run = make(
        tmp_path,
        teacher,
        {"own_text": 0.25, "own_text_tokens": 1},
        rows=Rows(40),
        max_steps=50,
        batch_size_tokens=8 * LENGTH,
        logging_steps=50,
        save_steps=100,
    )
    train(*run)
    # 400 rows, each with probability 1/4: a standard deviation of 8.7
    (entry,) = read_history(tmp_path)
    assert 100 - 4 * 8.7 < entry["own_rows"] < 100 + 4 * 8.7
    assert entry["own_mean_tokens"] == 1


def test_what_is_written_depends_on_the_step_and_not_on_the_cut_of_the_batch(
    tmp_path: Path, teacher: Any, written: list[dict[str, np.ndarray]]
) -> None:
    def texts(name: str, objective: dict[str, Any], **settings: Any) -> list[Any]:
        written.clear()
        # a rate of 0 would be refused; this one changes no token
        settings = {"learning_rate": 1e-12, "max_steps": 6, **settings}
        train(
            *make(tmp_path / name, teacher, {"own_text": 1.0} | objective, **settings)
        )
        return [row["input_ids"].tolist() for row in written]

    whole = texts("whole", {})
    assert len(whole) == 24
    parts = texts("parts", {"own_text_batch_size": 1}, per_device_train_batch_size=1)
    assert whole == parts
    # the second epoch has the rows of the first
    begins = [
        {tuple(row[:1]) for row in whole[:12]},
        {tuple(row[:1]) for row in whole[12:]},
    ]
    assert begins[0] == begins[1]
    assert sorted(whole[:12]) != sorted(whole[12:])


def test_rows_of_a_padded_head_that_are_no_tokens_are_never_drawn(
    tmp_path: Path, teacher: Any, written: list[dict[str, np.ndarray]]
) -> None:
    run = make(tmp_path, teacher, {"own_text": 1.0, "vocab_size": 98}, max_steps=3)
    run = run.changed(tokenizer=tiny_tokenizer(98))
    with torch.no_grad():
        run.student.lm_head.weight[98] = 50 * run.student.lm_head.weight.abs().max()
    train(*run)
    drawn = np.concatenate([row["labels"] for row in written])
    assert drawn.max() < 98


def test_a_sample_is_shown_in_the_history_every_so_many_steps(
    tmp_path: Path, teacher: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    objective = {"own_text": 1.0, "own_text_sample_steps": 2}
    train(*make(tmp_path, teacher, objective, max_steps=6))
    shown = [entry["step"] for entry in read_history(tmp_path) if "own_text" in entry]
    assert shown == [1, 2, 4, 6]
    assert capsys.readouterr().err.count("own text, step ") == 4


ON_POLICY: dict[str, Any] = {
    "objective": {"name": "kl", "own_text": 0.5, "own_text_tokens": 6}
}


@pytest.mark.breadth
@pytest.mark.parametrize("engine", few(["fsdp2", "ddp"], 1))
def test_two_ranks_write_and_train_what_one_process_does(
    bench: Bench, engine: str
) -> None:
    config = "cpu_2" if engine == "ddp" else "cpu_2_fsdp2"
    assert launch(config, ["distill", str(bench.recipe("two", **ON_POLICY))]) == [0]
    assert main(["distill", str(bench.recipe("one", **ON_POLICY))]) == 0
    compare(bench, "one", "two")
    figures = [
        [
            tuple(entry[key] for key in ("own_rows", "own_ended", "own_cut"))
            for entry in history(bench, name)
        ]
        for name in ("one", "two")
    ]
    assert figures[0] == figures[1] and sum(rows for rows, *_ in figures[0]) > 12


@pytest.mark.parametrize("lora", few([False, True], 1))
def test_a_killed_run_writes_on_and_ends_with_the_same_weights(
    bench: Bench, tmp_path: Path, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = dict(ON_POLICY)
    if lora:
        changes |= {
            "lora": {"r": 4, "lora_dropout": 0.1},
            "teacher": {"backend": "adapter_off"},
        }
    assert main(["distill", str(bench.recipe("whole", **changes))]) == 0
    path, rename = bench.recipe("killed", **changes), writer_module.replace_folder

    def killed() -> int:
        def die(*args: Any) -> None:
            rename(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(writer_module, "replace_folder", die)
        return main(["distill", str(path)])

    assert_killed(killed, tmp_path / "output")
    assert main(["distill", str(path)]) == 0
    assert trained_weights(bench, "whole") == trained_weights(bench, "killed")
    loss = [
        [entry["loss"] for entry in history(bench, name)]
        for name in ("whole", "killed")
    ]
    assert loss[0] == loss[1]


def test_what_a_text_does_not_depend_on_may_change(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(bench.recipe("r", **ON_POLICY))
    assert main(["distill", path]) == 0
    for key in ("batch_size=4", "sample_steps=2"):
        assert main(["distill", path, "--set", f"objective.own_text_{key}"]) == 0
    capsys.readouterr()
    assert main(["distill", path, "--set", "objective.own_text_tokens=4"]) == 2
    assert "objective.own_text_tokens: 6 -> 4" in capsys.readouterr().err


def test_a_script_continues_with_another_batch_of_texts(
    bench: Bench, tmp_path: Path
) -> None:
    def trainer(**changes: Any) -> FCSDTrainer:
        settings: dict[str, Any] = {
            "own_text": 0.5, "own_text_tokens": 6, "max_length": 32, "batch_size_tokens": 128, "max_steps": 4,
            "save_steps": 2, "warmup_steps": 0, "logging_steps": 1,
        }  # fmt: skip
        arguments = FCSDConfig(
            output_dir=str(tmp_path / "script"), layers="all", disable_tqdm=True, **settings | changes
        )  # fmt: skip
        rows = json_lines(bench.rows)
        return FCSDTrainer(model=str(bench.base), args=arguments, train_dataset=rows)

    trainer().train()
    # a run that was ended after its second step
    shutil.rmtree(tmp_path / "script" / "checkpoint-4")
    again = trainer(own_text_batch_size=1, own_text_sample_steps=1)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
    with user_error("own_text_tokens"):
        trainer(own_text_tokens=3).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (Engine("zero3"), "under ZeRO-3 cannot write; launch FSDP2"),
        (Engine("ep", expert_parallel=2), "under expert parallelism cannot write"),
    ],
)
def test_engines_under_which_a_student_cannot_write_are_refused(
    engine: Engine, words: str
) -> None:
    refuse_what_cannot_be_sharded(objective_of("kl"), engine)
    with user_error(words):
        refuse_what_cannot_be_sharded(objective_of("kl", own_text=0.5), engine)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teacher": {"backend": "cache", "cache": "hidden"}}, "teacher.backend cache holds hidden states of the data's"
         " text, but objective.own_text writes new text in every step; use sharded"),
        ({"objective": {"name": "sft", "own_text": 0.5}}, "objective.own_text"),
        ({"objective": {"name": "kl", "own_text": 1.5}}, "objective.own_text"),
        ({"objective": {"name": "kl", "own_text": 0}}, "own_text: a share above 0 is needed; leave it out to train on"),
        ({"objective": {"name": "kl", "own_text_tokens": 6}}, "own_text_tokens has no effect without own_text, the"),
    ],
)  # fmt: skip
def test_a_recipe_that_cannot_score_own_text_is_refused(
    bench: Bench,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    words: str,
) -> None:
    path = bench.recipe(**(ON_POLICY | changes))
    assert main(["distill", str(path)]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("families",), few_and_others([*TINY]))
def test_in_no_family_does_a_text_depend_on_the_others_of_its_batch(
    families: list[str],
) -> None:
    for family in families:
        skip_unavailable(family)
        model = tiny_model(family)
        convert_model(model, Connectivity("all"))
        attach_loss_head(model)
        model.train()
        tokenizer = tiny_tokenizer(min(99, model.config.get_text_config().vocab_size))
        batches = []
        for size in (8, 1):
            objective = objective_of("kl", own_text=1.0, own_text_batch_size=size)
            batch = Collator()([Rows(1, seed=seed).rows[0] for seed in range(4)])
            meters = Meters(Accelerator(cpu=True), "kl")
            OwnText(objective, tokenizer, ALONE, 0, meters).write(model, [batch], 3)
            batches.append(batch)
        assert batches[0]["input_ids"].equal(batches[1]["input_ids"]), family
        assert batches[0]["labels"].equal(batches[1]["labels"]), family
        assert model.training


@pytest.mark.filterwarnings("ignore")
def test_card_and_report_say_who_wrote_the_text(bench: Bench) -> None:
    written = {"max_new_tokens": 4}
    source = {"path": str(bench.rows), "max_examples": 30, "written": written}
    data = {"train": [source], "max_length": 32}
    path = bench.recipe("r", **ON_POLICY | {"data": data})
    assert main(["distill", str(path)]) == 0
    folder = bench.folder / "r" / "distill"
    assert report_module._training(folder).startswith("kl, 50% own text, 12 steps")
    config = read_json(folder / "model" / "config.json")
    text = card_module._training(Facts("m", config, training=read_manifest(folder)))
    assert "objective `kl`, 50% of the rows with text of its own, 12 steps" in text
    assert f"The original wrote the answers to `{bench.rows.name}`." in text


def test_a_teacher_that_knows_only_the_rows_of_the_data_is_refused(
    tmp_path: Path, teacher: Any
) -> None:
    cached: Any = CachedTeacher(None, copy.deepcopy(teacher.lm_head))  # type: ignore[arg-type]
    run = make(tmp_path, teacher, {"own_text": 0.5}).changed(teacher=cached)
    with user_error("CachedTeacher knows only the rows of the data"):
        train(*run)
