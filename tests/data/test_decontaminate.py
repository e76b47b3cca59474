"""Test items in training data: planted items are found, similar text is not, and real
data is told apart.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml

from fcsd.base.files import read_json
from fcsd.cli.main import main
from fcsd.data.config import SourceConfig
from fcsd.data.dataset import build_dataset
from fcsd.data.decontaminate import Decontaminator, Item, ItemIndex, words
from fcsd.data.messages import all_texts
from fcsd.evaluation.items import suite_items
from fcsd.evaluation.suites import load_suite, named_tasks
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.data.test_data import write_jsonl
from tests.support import Bench

QUESTION = (
    "A farmer's well is 12 metres deep, and every day the water in it rises by three"
    " more; how deep is it then?"
)


def index(*texts: str, ngram: int = 13) -> ItemIndex:
    return ItemIndex(
        (Item("task", str(n), (text,)) for n, text in enumerate(texts)), ngram
    )


def test_thirteen_words_in_a_row_are_an_overlap_and_twelve_are_not() -> None:
    question = words(QUESTION)
    searched = index(QUESTION)
    for begin in range(len(question) - 12):
        part = " ".join(question[begin : begin + 13])
        assert searched.find(f"so {part} yes") == ("task", "0", part)
        assert searched.find(f"so {' '.join(question[begin : begin + 12])} yes") is None


def test_case_punctuation_and_line_breaks_make_no_difference() -> None:
    searched = index(QUESTION)
    assert (
        searched.find(QUESTION.upper().replace(" ", "\n  ").replace(",", " --"))
        is not None
    )
    assert (
        searched.find(QUESTION.replace("three", "four").replace("deep", "wide")) is None
    )


def test_a_shorter_item_counts_as_a_whole_and_a_very_short_one_is_counted_as_unchecked():
    short = "Write a function that finds the shared elements of lists."  # 10 words
    searched = index(short, "What is it called?", QUESTION)
    assert searched.find(f"Please: {short} Thanks.") == (
        "task",
        "0",
        " ".join(words(short)),
    )
    assert searched.find(short.removesuffix("lists.")) is None
    assert searched.find("What is it called? " * 20) is None
    assert searched.unchecked == {"task": 1}


def test_wording_that_many_items_share_and_rows_of_numbers_say_nothing() -> None:
    frame = (
        "Read the following passage with care and answer the question at its very end:"
    )
    searched = index(
        *(
            f"{frame} number {n} is about the town called {'abcdefghijklmnop'[n] * 3}"
            for n in range(16)
        )
    )
    assert searched.find(frame) is None
    assert searched.find(f"{frame} number 3 is about the town called ddd") is not None
    assert (
        index("assert add(" + ", ".join(map(str, range(40))) + ")").find(
            " ".join(map(str, range(40)))
        )
        is None
    )


def reference(items: list[Item], text: str, ngram: int) -> bool:
    """Apply the rule with sets of tuples."""

    def rows(text: list[str], length: int) -> set[tuple[str, ...]]:
        return {tuple(text[n : n + length]) for n in range(len(text) - length + 1)}

    owners: dict[tuple[str, ...], set[str]] = {}
    for item in items:
        for said in item.texts:
            if len(words(said)) >= 8:
                for row in rows(words(said), min(ngram, len(words(said)))):
                    owners.setdefault(row, set()).add(item.id)
    mine = words(text)
    return any(
        len(who) <= 10 and 2 * sum(word.isdigit() for word in row) <= len(row) and row in rows(mine, len(row))
        for row, who in owners.items()
    )  # fmt: skip


@pytest.mark.parametrize("ngram", [9, 13])
def test_the_index_finds_what_sets_of_words_find(ngram: int) -> None:
    """A vocabulary of three words and two numbers: near misses everywhere."""
    chance = random.Random(0)

    def text(length: int) -> str:
        return " ".join(
            chance.choice(["a", "b", "the", "1", "2"]) for _ in range(length)
        )

    items = [
        Item("t", str(n), (text(chance.randint(4, 30)), text(9))) for n in range(40)
    ]
    searched = ItemIndex(items, ngram)
    outcomes = set()
    for _ in range(150):
        begin = chance.randint(0, 20)
        part = words(chance.choice(items).texts[0])[
            begin : begin + chance.randint(6, 15)
        ]
        candidate = (
            f"{text(chance.randint(0, 20))} {' '.join(part)}"
            f" {text(chance.randint(0, 20))}"
        )
        outcomes.add(expected := reference(items, candidate, ngram))
        assert (searched.find(candidate) is not None) == expected
    planted = [
        f"{text(5)} {' '.join(words(item.texts[0]))} {text(4)}" for item in items
    ]
    assert [searched.find(each) is not None for each in planted] == [
        reference(items, each, ngram) for each in planted
    ]
    assert outcomes == {True, False}


def test_all_texts_of_a_row_are_read_also_inside_lists_and_mappings() -> None:
    row = {
        "q": "one",
        "choices": {"label": ["A"], "text": ["two", "three"]},
        "answer": 3,
        "none": None,
    }
    assert list(all_texts(row)) == ["one", "A", "two", "three"]


@pytest.fixture
def places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[SourceConfig], Path]:
    """Two sources of 50 examples with one planted item each, and a data root with the items."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    plain = [{"p": f"what is {n} and {n}", "r": f"it is {2 * n}"} for n in range(50)]
    plain[30]["p"] = f"Tell me: {QUESTION}"
    talk = [
        {"m": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": "yes"}]}
        for n in range(50)
    ]
    talk[7]["m"][1]["value"] = QUESTION.upper()
    sources = [
        SourceConfig(path=write_jsonl(tmp_path / "a.jsonl", plain), columns={"prompt": "p", "response": "r"}),
        SourceConfig(path=write_jsonl(tmp_path / "b.jsonl", talk), columns={"messages": "m"}),
    ]  # fmt: skip
    root = tmp_path / "root" / "owner" / "bench"
    root.mkdir(parents=True)
    write_jsonl(
        root / "test.jsonl",
        [{"id": 1, "question": "Too short?"}, {"id": 2, "question": QUESTION}],
    )
    return sources, tmp_path / "root"


def suite_file(folder: Path) -> Path:
    """Write a suite with the data set of `places`."""
    file = folder / "suite.yaml"
    task = {"kind": "code", "task": "bench", "dataset": "owner/bench"}
    file.write_text(yaml.safe_dump({"name": "s", "tasks": [task]}))
    return file


def test_planted_items_are_left_out_and_on_the_record(places: Any) -> None:
    sources = places[0]
    suite = load_suite(suite_file(places[1]))
    items = list(suite_items(suite, places[1], tiny_tokenizer()))
    decontaminator = Decontaminator(ItemIndex(items))
    rows = build_dataset(
        sources,
        tiny_tokenizer(),
        max_length=256,
        packing=False,
        decontaminator=decontaminator,
    )
    said = [tiny_tokenizer().decode(row["input_ids"]).lower() for row in rows]
    assert len(said) >= 98 and not any("farmer" in text for text in said)
    names = [f"{source.path}:train" for source in sources]
    overlaps = {overlap["source"]: overlap for overlap in decontaminator.overlaps()}
    assert len(decontaminator.overlaps()) == 2 and set(overlaps) == set(names)
    assert overlaps[names[0]]["item"] == "1" and overlaps[names[0]]["task"] == "bench"
    assert overlaps[names[0]]["begins"].startswith("Tell me: A farmer's well")
    assert overlaps[names[1]]["ngram"] == " ".join(words(QUESTION)[:13])
    summary = decontaminator.summary()
    assert summary["by_task"] == {"bench": 2}
    assert summary["num_items_too_short"] == {"bench": 1}
    assert summary["by_source"][names[0]] == {"num_examples": 50, "num_left_out": 1}


def test_a_stage_leaves_the_list_and_its_manifest_the_numbers(
    bench: Bench, places: Any
) -> None:
    sources, root = places
    train = [source.model_dump(mode="json") for source in sources]
    plan = {"suite": str(suite_file(root))}
    path = bench.recipe(
        "r",
        data={"train": train, "max_length": 32, "decontaminate": plan},
        evaluation={"data_root": str(root)},
    )
    assert main(["distill", str(path)]) == 0
    folder = bench.folder / "r" / "distill"
    results = read_json(folder / "manifest.json")["results"]["decontamination"]
    assert results["num_left_out"] == 2
    assert results["num_items"] == 2
    assert results["ngram"] == 13
    listed = read_json(folder / "decontamination.json")
    assert len(listed["left_out"]) == 2 and listed["by_source"] == results["by_source"]
    inputs = read_json(folder / "manifest.json")["inputs"]
    assert [key for key in inputs if key.startswith("data.decontaminate ")]


def test_what_the_items_are_is_checked(
    places: Any, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    root = places[1]
    for change, message in {
        "{against: []}": "against: unknown key",
        "{ngram: 13}": "data.decontaminate.suite: is required",
        "{suite: tinny}": "suite 'tinny': no such suite; did you mean 'tiny'?",
    }.items():
        command = [
            "--set", f"data.decontaminate={change}", "--set", f"evaluation.data_root={root}",
        ]  # fmt: skip
        assert main(["distill", str(bench.recipe("r")), *command]) == 2
        assert message in capsys.readouterr().err


def items_of(shared_data: Path, task: str) -> Iterator[Item]:
    suite = named_tasks("paper11", [task])
    return suite_items(suite, shared_data / "hub", tiny_tokenizer())


def test_the_suites_loaders_give_the_items_of_likelihood_generation_and_code_tasks(
    tmp_path: Path,
) -> None:
    from fcsd.pipeline.tiny.tasks import write_tiny_data

    write_tiny_data(
        tmp_path / "d",
        num_train=10,
        num_distill=5,
        num_heldout=5,
        num_validation=5,
        num_test=6,
        vocab_size=400,
    )
    items = list(
        suite_items(load_suite("tiny"), tmp_path / "d" / "data", tiny_tokenizer())
    )
    assert {item.task for item in items} == {"tiny_code", "tiny_choice", "tiny_answers"}
    code = [item for item in items if item.task == "tiny_code"]
    assert len(code) == 6 and any("def " in text for text in code[0].texts)
    questions = datasets.load_dataset(
        "json",
        data_files=str(next((tmp_path / "d/data/fcsd/tiny-choice").rglob("test*"))),
        split="train",
    )
    assert (
        questions[0]["question"]
        in next(item for item in items if item.task == "tiny_choice").texts
    )


@pytest.mark.real_data
def test_every_test_problem_of_gsm8k_overlaps_with_itself_and_few_with_the_training_problems(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    searched = ItemIndex(items_of(shared_data, "gsm8k"))
    assert len(searched.items) == 1319 and searched.unchecked.total() == 0

    def left_out(split: str) -> tuple[int, int]:
        rows = datasets.load_dataset(
            str(shared_data / "hub/openai/gsm8k"), "main", split=split
        )
        overlaps = [
            searched.find(row["question"]) or searched.find(row["answer"])
            for row in rows
        ]
        return sum(overlap is not None for overlap in overlaps), len(rows)

    assert left_out("test") == (1319, 1319)
    count, rows = left_out("train")
    # figures of speech: "find the total number of students"
    assert rows == 7473 and count < 0.005 * rows


@pytest.mark.real_data
def test_mbpp_items_overlap_by_their_short_questions(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    items = list(items_of(shared_data, "mbpp_plus"))
    # code and question
    searched = ItemIndex(Item(item.task, item.id, item.texts[:2]) for item in items)
    overlaps = [
        searched.find(f"Here is a task. {item.texts[1]} Use Python.") for item in items
    ]
    assert sum(overlap is not None for overlap in overlaps) >= 370 and len(items) == 378


CALL = {"type": "function", "function": {"name": "f", "arguments": {"q": QUESTION}}}


@pytest.mark.parametrize(
    "message",
    [
        {"content": QUESTION},
        {"content": QUESTION + " \ud83d"},
        {"content": "", "reasoning_content": QUESTION},
        {"content": "", "tool_calls": [CALL]},
    ],
)
def test_all_that_a_template_may_write_of_a_message_is_compared(
    message: dict[str, Any],
) -> None:
    source = SourceConfig(path="x.jsonl", columns={"messages": "m"})
    turns = [{"role": "user", "content": "go"}, {"role": "assistant", **message}]
    found = Decontaminator(index(QUESTION)).find(source, {"m": turns})
    assert found is not None and found.item == "0"
