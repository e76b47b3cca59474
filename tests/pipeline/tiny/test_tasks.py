"""The generated tasks: deterministic, executable, and split so that no test question
was trained on.
"""

import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fcsd.base.files import data_dir
from fcsd.evaluation.config import LMEvalTaskConfig
from fcsd.evaluation.suites import load_suite
from fcsd.pipeline.tiny.operations import OPERATIONS
from fcsd.pipeline.tiny.questions import LETTERS, WORDS, split_of
from fcsd.pipeline.tiny.tasks import write_tiny_data
from tests.support import few, user_error

SIZES = {
    "num_train": 3000, "num_distill": 1000, "num_heldout": 60, "num_validation": 40, "num_test": 120,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "data"
    write_tiny_data(path, **SIZES)
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def questions(path: Path) -> list[str]:
    examples = rows(path)
    if "messages" in examples[0]:
        return [row["messages"][0]["content"] for row in examples]
    return [row.get("prompt") or row["question"] for row in examples]


def without_names(question: str) -> str:
    """Return a question with its function name blanked: a new name alone is not a new question."""
    word = f"(?:{'|'.join(WORDS)})"
    return re.sub(rf"\b{word}(?:_{word})?(?=\()", "f", question)


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in files
    }


def test_same_seed_gives_the_same_bytes_and_another_seed_gives_others(
    folder: Path, tmp_path: Path
) -> None:
    write_tiny_data(tmp_path / "again", **SIZES)
    write_tiny_data(tmp_path / "other", seed=1, **SIZES)
    assert hashes(tmp_path / "again") == hashes(folder)
    same = [
        n for n, h in hashes(tmp_path / "other").items() if hashes(folder).get(n) == h
    ]
    assert not [name for name in same if name.endswith(".jsonl")]


@pytest.mark.parametrize("damage", few(["a digit", "a file less", "empty settings"], 1))
def test_tiny_data_that_were_changed_are_not_found_finished(
    tmp_path: Path, damage: str
) -> None:
    place, sizes = tmp_path / "tiny", SIZES
    write_tiny_data(place, **sizes)
    write_tiny_data(place, **sizes)
    rows = place / "train.jsonl"
    if damage == "a digit":
        rows.write_text(re.sub(r"\d", "x", rows.read_text(), count=1))
    elif damage == "a file less":
        rows.unlink()
    else:
        (place / "settings.json").write_text("")
    said = (
        r"settings\.json: not valid" if damage == "empty settings" else r"train\.jsonl"
    )
    with user_error(said):
        write_tiny_data(place, **sizes)


@pytest.mark.parametrize("seed", [0, 1])
def test_no_graded_question_occurs_in_training_under_any_function_name(
    tmp_path: Path, seed: int
) -> None:
    write_tiny_data(tmp_path / "d", seed=seed, **SIZES)
    data = tmp_path / "d" / "data" / "fcsd"
    by_split = {
        "train": questions(tmp_path / "d" / "train.jsonl")
        + questions(tmp_path / "d" / "distill.jsonl"),
        "heldout": questions(tmp_path / "d" / "heldout.jsonl"),
        "validation": questions(data / "tiny-code" / "validation.jsonl"),
        "test": [
            question
            for task in ("tiny-code", "tiny-choice", "tiny-answers")
            for question in questions(data / task / "test.jsonl")
        ],
    }
    bare = {
        split: {without_names(question) for question in by_split[split]}
        for split in by_split
    }
    assert len(by_split["test"]) == 3 * SIZES["num_test"]
    for one in bare:
        for other in bare:
            assert one == other or not bare[one] & bare[other], (
                f"{one} and {other} share a question"
            )


def test_blanking_names_makes_renamed_questions_equal() -> None:
    assert without_names("Define get_run(xs). It") == without_names(
        "Define make(xs). It"
    )


def test_every_wording_of_every_operation_occurs_in_training(tmp_path: Path) -> None:
    """Otherwise a test question would contain words that the model has never seen."""
    write_tiny_data(tmp_path / "d", **{**SIZES, "num_train": 20_000})
    text = "\n".join(questions(tmp_path / "d" / "train.jsonl"))
    for operation in OPERATIONS:
        for wording in operation.wordings:
            argument = {"int": "x", "list": "xs", "str": "s"}[operation.takes]
            pattern = re.escape(wording).replace(r"\{v\}", argument)
            pattern = pattern.replace(r"\{n\}", r"\d+").replace(r"\{c\}", "[A-Z]")
            assert re.search(pattern, text), wording


def test_splits_have_their_shares() -> None:
    counts = {"train": 0, "heldout": 0, "validation": 0, "test": 0}
    for number in range(24_000):
        counts[split_of(("f", number))] += 1
    assert counts["train"] == pytest.approx(20_000, rel=0.05)
    assert counts["test"] == pytest.approx(2_000, rel=0.1)


@pytest.mark.parametrize("split", ["validation", "test"])
def test_canonical_solutions_pass_their_tests_and_wrong_ones_fail(
    folder: Path, split: str
) -> None:
    for row in rows(folder / "data" / "fcsd" / "tiny-code" / f"{split}.jsonl"):
        namespace: dict[str, Any] = {}
        exec(row["code"], namespace)
        exec(row["test"], namespace)
        for line in row["test_list"]:
            exec(line, namespace)
        name = re.match(r"def (\w+)\(", row["code"]).group(1)  # type: ignore[union-attr]
        with pytest.raises(AssertionError):
            exec(row["test"], {name: lambda argument: None})


def test_code_rows_have_the_columns_of_mbpp_plus(folder: Path) -> None:
    from datasets import load_dataset

    loaded = load_dataset(
        str(folder / "data" / "fcsd" / "tiny-code"), cache_dir=str(folder / "cache")
    )
    assert set(loaded) == {"validation", "test"}
    assert len(loaded["test"]) == SIZES["num_test"]
    first = loaded["test"][0]
    assert set(first) == {
        "task_id", "prompt", "code", "test_imports", "test_list", "test",
    }  # fmt: skip
    assert isinstance(first["task_id"], int) and len(first["test_list"]) == 3


def test_a_value_question_is_answered_by_python_itself(folder: Path) -> None:
    checked = 0
    for row in rows(folder / "data" / "fcsd" / "tiny-answers" / "test.jsonl"):
        match = re.fullmatch(
            r"(?:What is |Evaluate |Give the value of )(.*?)\??", row["question"]
        )
        if match:
            assert repr(eval(match.group(1))) == row["answer"], row["question"]
            checked += 1
    assert checked > SIZES["num_test"] // 12


def test_careless_share_of_the_distillation_answers_is_wrong_and_no_training_answer_is(
    tmp_path: Path,
) -> None:
    write_tiny_data(tmp_path / "d", **{**SIZES, "num_distill": 4000}, careless=0.4)
    wrong = {}
    for name in ("train", "distill"):
        right = []
        for row in rows(tmp_path / "d" / f"{name}.jsonl"):
            question, answer = (message["content"] for message in row["messages"])
            match = re.fullmatch(
                r"(?:What is |Evaluate |Give the value of )(.*?)\??", question
            )
            if match:
                right.append(repr(eval(match.group(1))) == answer)
        assert len(right) > 100
        wrong[name] = 1 - sum(right) / len(right)
    assert wrong["train"] == 0
    # a mistaken expression may have the right value
    assert 0.25 < wrong["distill"] <= 0.45


def test_choices_differ_and_hold_the_answer_at_every_place(folder: Path) -> None:
    examples = rows(folder / "data" / "fcsd" / "tiny-choice" / "test.jsonl")
    for row in examples:
        assert len(set(row["choices"])) == len(row["choices"]) >= 2
    assert {row["answer"] for row in examples} == {0, 1, 2, 3}


def test_wrong_expressions_behave_differently_from_the_right_one(folder: Path) -> None:
    rng = random.Random(0)
    values: dict[str, list[Any]] = {
        "x": list(range(-100, 101)),
        "xs": [[rng.randrange(15) for _ in range(10)] for _ in range(300)],
        "s": ["".join(rng.choices(LETTERS, k=8)) for _ in range(2000)],
    }
    for row in rows(folder / "data" / "fcsd" / "tiny-choice" / "test.jsonl"):
        if not row["question"].startswith(
            ("Which expression", "What do you type", "Pick the code")
        ):
            continue
        right = row["choices"].pop(row["answer"])
        name = next(
            name for name in ("xs", "x", "s") if re.search(rf"\b{name}\b", right)
        )
        results = [
            [eval(code, {name: v}) for v in values[name]]
            for code in (right, *row["choices"])
        ]
        assert all(other != results[0] for other in results[1:]), row


def test_chat_template_masks_exactly_the_answer_with_its_end_token(
    folder: Path,
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == (
        "<|pad|>",
        "<|bos|>",
        "<|eos|>",
    )
    for row in rows(folder / "heldout.jsonl"):
        encoded = tokenizer.apply_chat_template(
            row["messages"],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        kept = [
            i
            for i, m in zip(
                encoded["input_ids"], encoded["assistant_masks"], strict=True
            )
            if m
        ]
        assert tokenizer.decode(kept) == row["messages"][1]["content"] + "<|eos|>"
        prompt = tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, tokenize=True
        )
        assert prompt["input_ids"] == encoded["input_ids"][: -len(kept)]
        assert len(encoded["input_ids"]) <= 256


def test_tokenizer_keeps_digits_and_capitals_apart_and_loses_no_text(
    folder: Path,
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    assert len(tokenizer) <= 512
    assert tokenizer.tokenize("1234") == list("1234")
    assert tokenizer.tokenize("'XYZ'")[1:4] == list("XYZ") or tokenizer.tokenize(
        "XYZ"
    ) == list("XYZ")
    for text in ("def f(x):\n    return x + 10", "naïve £ 漢字 🙂"):
        assert (
            tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
            == text
        )


def test_finished_folder_is_reused_and_other_settings_are_refused(folder: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*.jsonl")}
    write_tiny_data(folder, **SIZES)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    with user_error("name another folder, or remove this one"):
        write_tiny_data(folder, seed=5, **SIZES)


def test_a_failed_run_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("fcsd.pipeline.tiny.tasks._write_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        write_tiny_data(tmp_path / "d", **SIZES)
    assert list(tmp_path.iterdir()) == []


def test_suite_and_task_files_name_the_data_that_is_written(folder: Path) -> None:
    suite = load_suite("tiny")
    for row in suite.tasks:
        assert row.dataset is not None
        assert (folder / "data" / row.dataset / f"{row.split}.jsonl").is_file()
        if isinstance(row, LMEvalTaskConfig) and row.lm_eval_include is not None:
            path = data_dir("eval") / "tasks" / row.lm_eval_include / f"{row.task}.yaml"
            task = yaml.safe_load(path.read_text())
            assert (task["task"], task["dataset_path"], task["test_split"]) == (
                row.task,
                row.dataset,
                row.split,
            )
