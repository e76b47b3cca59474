"""The suite for chat models, through the chat template, on a few invented rows in the
schema of each data set.

IFEval and MATH need packages of `fcsd[instruct]`; `make test-extras` runs those two.
"""

import random
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import pytest

from fcsd.evaluation.config import SampleFile, SuiteConfig
from fcsd.evaluation.grade_file import score_file
from fcsd.evaluation.lm_eval.packages import provide_packages
from fcsd.evaluation.results import read_result
from fcsd.evaluation.scores import at_floor
from fcsd.evaluation.suites import load_suite
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.report.table import score_table
from tests.evaluation.rows import write_repository
from tests.evaluation.test_grade_file import lines
from tests.reference.tiny import tiny_model
from tests.support import evaluate, user_error

# Shots are thousands of byte tokens, and attention takes most of the time.
ONE_HEAD = {"vocab_size": 512, "num_attention_heads": 1, "num_key_value_heads": 1}
SUBJECTS = (
    "biology", "business", "chemistry", "computer science", "economics", "engineering", "health", "history", "law",
    "math", "other", "philosophy", "physics", "psychology",
)  # fmt: skip


def bbh_parts() -> list[str]:
    import lm_eval

    folder = Path(str(lm_eval.__file__)).parent / "tasks" / "bbh" / "cot_fewshot"
    names = [
        re.search(r'dataset_name"?: "?(\w+)', path.read_text())
        for path in sorted(folder.glob("*.yaml"))
    ]
    return [match[1] for match in names if match is not None]


def mmlu_pro(subject: str, number: int) -> dict[str, Any]:
    return {
        "question_id": number, "question": f"What is {number} plus 1 in {subject}?", "category": subject, "src": "own",
        "options": [str(number + k) for k in range(10)], "answer": "B", "answer_index": 1,
        "cot_content": f"A: Let's think step by step. It is {number + 1}. The answer is (B).",
    }  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("instruct")
    pro = {
        "test": [mmlu_pro(subject, 1) for subject in SUBJECTS],
        "validation": [
            mmlu_pro(subject, number) for subject in SUBJECTS for number in range(5)
        ],
    }
    write_repository(root / "TIGER-Lab/MMLU-Pro", {"default": pro})
    question = {"Question": "Which is a metal?", "Correct Answer": "iron"}
    wrong = {
        f"Incorrect Answer {n}": text
        for n, text in enumerate(("wood", "air", "milk"), start=1)
    }
    write_repository(
        root / "Idavidrein/gpqa", {"gpqa_diamond": {"train": [question | wrong]}}
    )
    row = {"input": "not True is", "target": "False"}
    write_repository(
        root / "SaylorTwift/bbh", {name: {"test": [row]} for name in bbh_parts()}
    )
    sums = {
        "problem": "What is $1/4 + 1/4$?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "answer": r"\frac{1}{2}",
        "subject": "Algebra", "level": 1, "unique_id": "a",
    }  # fmt: skip
    write_repository(root / "HuggingFaceH4/MATH-500", {"default": {"test": [sums]}})
    instruction = {
        "key": 1, "prompt": "Name two metals in two bullet points, without a comma.",
        "instruction_id_list": ["punctuation:no_comma", "detectable_format:number_bullet_lists"],
        "kwargs": [{"num_bullets": None}, {"num_bullets": 2}],
    }  # fmt: skip
    write_repository(root / "google/IFEval", {"default": {"train": [instruction]}})
    return root


def asked(root: Path, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a task of the suite with a model that answers in a few tokens; return the
    task's result and its samples.
    """
    (row,) = [row for row in load_suite("instruct").tasks if row.task == name]
    own = row.model_dump(mode="json", exclude_unset=True) | {"max_new_tokens": 3}
    result, samples = evaluate(
        tiny_model("qwen3_moe", **ONE_HEAD, max_position_embeddings=8192, num_hidden_layers=1),
        tiny_tokenizer(), SuiteConfig.model_validate({"name": "own", "tasks": [own]}),
        data_root=root, batch_size=16, progress=False,
    )  # fmt: skip
    return result["tasks"][name], samples[name]


def graded(
    root: Path, folder: Path, name: str, samples: list[dict[str, Any]], *answers: str
) -> float:
    """Return the score of these answers, given to the items in turn."""
    rows = [
        {"doc_id": sample["doc_id"], "completion": answers[index % len(answers)]}
        for index, sample in enumerate(samples)
    ]
    file = lines(folder / "s.jsonl", *rows)
    result = score_file(
        SampleFile(samples=file, dataset=name, data_root=root, suite="instruct")
    )
    return float(result["tasks"][name]["value"])


def test_mmlu_pro_asks_fourteen_subjects_with_five_shots_as_turns(
    root: Path, tmp_path: Path
) -> None:
    row, samples = asked(root, "mmlu_pro")
    assert (row["num_items"], row["num_fewshot"], row["value"]) == (14, 5, 0)
    assert samples[0]["prompt"].count("<assistant>") == 6
    assert "J. 10" in samples[0]["prompt"]
    right, wrong = (
        "Two. The answer is (B). Question: The answer is (C)",
        "The answer is (C). The answer is (B).",
    )
    assert graded(root, tmp_path, "mmlu_pro", samples, right, wrong) == 7 / 14


def test_gpqa_shuffles_its_choices_and_takes_the_last_letter(
    root: Path, tmp_path: Path
) -> None:
    row, samples = asked(root, "gpqa_diamond_cot_zeroshot")
    (right,) = re.findall(r"(\([A-D]\)) iron", samples[0]["prompt"])
    assert row["num_items"] == 1 and samples[0]["target"] == right
    other = "(A)" if right != "(A)" else "(B)"
    for answer, value in (
        (f"Not {other} but {right}", 1),
        (f"Not {right} but {other}", 0),
    ):
        assert (
            graded(root, tmp_path, "gpqa_diamond_cot_zeroshot", samples, answer)
            == value
        )


@pytest.mark.breadth
def test_bbh_has_its_twenty_seven_parts_with_three_shots(
    root: Path, tmp_path: Path
) -> None:
    row, samples = asked(root, "bbh_cot_fewshot")
    assert (row["num_items"], row["num_fewshot"]) == (27, 3)
    assert len(set(bbh_parts())) == 27
    assert samples[0]["prompt"].count("<assistant>") == 4
    right, wrong = "So the answer is False.", "So the answer is True."
    assert graded(
        root, tmp_path, "bbh_cot_fewshot", samples, right, wrong
    ) == pytest.approx(14 / 27)


@pytest.mark.extras
def test_math_is_graded_by_proof_of_equality(root: Path, tmp_path: Path) -> None:
    pytest.importorskip(
        "math_verify", reason="`make test-extras` installs fcsd[instruct]"
    )
    row, samples = asked(root, "minerva_math500")
    assert (row["num_items"], row["num_fewshot"]) == (1, 4)
    for answer, value in (
        (r"so $\boxed{0.5}$.", 1),
        (r"$\boxed{\frac{2}{4}}$", 1),
        (r"$\boxed{0.4}$", 0),
    ):
        assert graded(root, tmp_path, "minerva_math500", samples, answer) == value


def ifeval_packages() -> None:
    for name in ("langdetect", "punkt"):
        pytest.importorskip(name, reason="`make test-extras` installs fcsd[instruct]")


@pytest.mark.extras
def test_ifeval_checks_every_instruction(root: Path, tmp_path: Path) -> None:
    ifeval_packages()
    row, samples = asked(root, "ifeval")
    assert (row["metric"], row["num_items"]) == ("prompt_level_strict_acc,none", 1)
    for answer, value in (
        ("* iron\n* zinc", 1),
        ("* iron, zinc\n* tin", 0),
        ("* iron", 0),
    ):
        assert graded(root, tmp_path, "ifeval", samples, answer) == value


@pytest.mark.extras
def test_ifeval_has_its_four_metrics(root: Path, tmp_path: Path) -> None:
    ifeval_packages()
    # The comma is in the first line, which the loose metrics leave out, as they do the
    # last; three bullet points are still more than two.
    answer = {
        "doc_id": 0,
        "completion": "Well, here they are:\n* iron\n* zinc\n* tin\n* gold",
    }
    result = score_file(
        SampleFile(
            samples=lines(tmp_path / "s.jsonl", answer),
            dataset="ifeval",
            data_root=root,
            suite="instruct",
        )
    )
    task = result["tasks"]["ifeval"]
    assert task["value"] == 0
    assert task["metrics"] == {
        "inst_level_strict_acc": {"value": 0, "stderr": None},
        "prompt_level_loose_acc": {"value": 0, "stderr": None},
        "inst_level_loose_acc": {"value": 0.5, "stderr": None},
    }
    table = score_table(result)
    assert re.search(r"inst_level_loose_acc +\| +0 \| +1 \| +50.0 ± –", table), table


@pytest.mark.extras
def test_ifevals_541_prompts_are_graded_without_the_network(
    tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures that are compared are counted here from the answers, which follow
    every instruction of one kind and none of another.
    """
    ifeval_packages()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = shared_data / "hub/google/IFEval"
    documents = datasets.load_dataset(str(folder), split="train")
    assert len(documents) == 541
    answers = [
        {"doc_id": number, "completion": "no comma and a small text"}
        for number in range(541)
    ]
    result = score_file(
        SampleFile(
            samples=lines(tmp_path / "s.jsonl", *answers),
            dataset="ifeval",
            data_root=shared_data / "hub",
            suite="instruct",
            output=tmp_path / "out",
        )
    )
    task = result["tasks"]["ifeval"]
    samples = read_result(tmp_path / "out")[1]["ifeval"]
    kinds = {"punctuation:no_comma": True, "language:response_language": False}
    seen = 0
    for document, sample in zip(documents, samples, strict=True):
        followed = sample["metrics"]["inst_level_strict_acc"]
        assert sample["score"] == all(followed)
        for name, value in zip(document["instruction_id_list"], followed, strict=True):
            seen += name in kinds
            assert kinds.get(name, value) == value, (document["prompt"], name)
    assert seen > 90
    total = sum(len(document["instruction_id_list"]) for document in documents)
    followed = sum(sum(s["metrics"]["inst_level_strict_acc"]) for s in samples)
    assert task["metrics"]["inst_level_strict_acc"]["value"] == followed / total


@pytest.mark.extras
def test_random_words_are_at_the_floor_of_ifeval(
    tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some instructions are followed by any text: no comma, few words, lower case."""
    ifeval_packages()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rng = random.Random(1)
    words = [f"{a}{b}n" for a in "bdfklmt" for b in "aeiou"]
    answers = [
        {"doc_id": number, "completion": " ".join(rng.choices(words, k=100))}
        for number in range(541)
    ]
    result = score_file(
        SampleFile(
            samples=lines(tmp_path / "s.jsonl", *answers),
            dataset="ifeval",
            data_root=shared_data / "hub",
            suite="instruct",
        )
    )
    row = result["tasks"]["ifeval"]
    assert row["value"] > 0.08 and at_floor(row["value"], row["stderr"], row["floor"])
    assert "(floor)" in score_table(result)


@pytest.mark.extras
def test_the_sentence_splitter_of_the_package_is_nltks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ifeval_packages()
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    folder = Path(str(lm_eval.__file__)).parent / "tasks" / "ifeval"
    provide_packages("ifeval", folder)
    text = "Dr. Smith went home at 5 p.m. on Monday. He was tired. Was he? Yes!"
    tokenizer = nltk.data.load("nltk:tokenizers/punkt/english.pickle")
    assert len(tokenizer.tokenize(text)) == 4
    assert nltk.word_tokenize("It works, really.") == [
        "It", "works", ",", "really", "."
    ]  # fmt: skip


SPLITTING = {
    "utils.py": "import re\n\nfrom . import split\n",
    "split.py": 'import nltk\n\nnltk.download("punkt_tab")\n',
}
IMPORTING = {
    "utils.py": "import re\nimport no_such_package\nfrom helper import x\n"
    "try:\n    import optional_one\nexcept ImportError:\n    pass\n",
    "helper.py": "from no_such_either.part import y\n",
    "prepare.py": "import unused_one\n",  # not called by the definition
}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (SPLITTING, "task own: needs nltk's sentence splitter (punkt_tab), which is not"
                    " installed; pip install 'fcsd[instruct]' brings it"),
        (IMPORTING, "task own: needs packages that are not installed (no_such_package, no_such_either);"
                    " pip install 'fcsd[instruct]'"),
    ],
    ids=["a sentence splitter", "packages"],
)  # fmt: skip
def test_what_a_definition_needs_and_is_not_installed_is_one_line_before_a_model_runs(
    files: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setitem(sys.modules, "punkt", None)
    (tmp_path / "own.yaml").write_text("process_results: !function utils.grade\n")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with user_error(re.escape(message)):
        provide_packages("own", tmp_path)
