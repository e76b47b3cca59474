"""Rows are shown as text, and the marked parts are those that carry loss."""

import re
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fcsd.cli.main import main
from fcsd.data.dataset import given_rows
from fcsd.data.show import check_number, print_rows, row_lines
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.support import Bench, user_error

TOKENIZER = tiny_tokenizer(300)


def chat(question: str, *answers: str) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}]
    for answer in answers:
        turns += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "go on"},
        ]
    return {"messages": turns[:-1]}


def rows_of(
    examples: list[dict[str, Any]], tokenizer: Any = TOKENIZER, **options: Any
) -> Any:
    settings = {
        "name": "x", "max_length": 64, "shuffle": False, "num_proc": 1, **options,
    }  # fmt: skip
    return given_rows(datasets.Dataset.from_list(examples), tokenizer, **settings)


def test_examples_are_apart_special_tokens_are_there_padding_is_not_and_what_has_loss_is_in_brackets():
    rows = rows_of([chat("1 + 1", "2 it is"), chat("a", "b", "c")])
    head, first, one, second, two = row_lines(rows, 0, TOKENIZER)
    assert re.fullmatch(
        r"row 1 of 1: 2 examples, (\d+) of 64 tokens, (\d+) with loss", head
    )
    ids, labels = rows[0]["input_ids"], rows[0]["labels"]
    length = [*rows[0]["position_ids"]].index(0, 1)
    assert (
        first
        == f"-- example 1 of 2: {length} tokens, {(labels[:length] != -100).sum()} with"
        " loss"
    )
    assert second.startswith("-- example 2 of 2: ")
    assert f" {(labels != -100).sum()} with loss" in head
    for text, begin, end in (
        (one, 0, length),
        (two, length, int(head.split(", ")[1].split()[0])),
    ):
        assert text.replace("[[", "").replace("]]", "") == TOKENIZER.decode(
            ids[begin:end]
        )
    assert TOKENIZER.bos_token in one and TOKENIZER.pad_token not in one + two
    assert re.findall(r"\[\[(.*?)\]\]", one) == ["2 it is" + TOKENIZER.eos_token]
    assert re.findall(r"\[\[(.*?)\]\]", two) == [
        f"{answer}{TOKENIZER.eos_token}" for answer in "bc"
    ]


def test_an_example_that_is_cut_says_how_long_it_was() -> None:
    _, head, text = row_lines(rows_of([chat("q", "long " * 40)]), 0, TOKENIZER)
    assert re.search(r"example 1 of 1: 64 tokens, cut from \d{3}, \d+ with loss", head)
    assert text.endswith("]]")


def test_the_first_token_of_an_example_is_not_marked_as_nothing_predicts_it() -> None:
    _, head, text = row_lines(rows_of([{"text": "a b"}]), 0, TOKENIZER)
    first, *others = TOKENIZER.convert_ids_to_tokens(TOKENIZER("a b")["input_ids"])
    assert text.startswith(f"{first}[[") and f"{len(others) + 1} with loss" in head


def spaced_tokenizer() -> Any:
    """Return a tokenizer of words whose decoder leaves out the space at the beginning,
    as Llama 2's does.
    """
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"▁{word}" for word in ("one", "two", "three", "four")),
    ]
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: index for index, word in enumerate(words)}, unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def test_spaces_between_tokens_with_and_without_loss_stay() -> None:
    tokenizer = spaced_tokenizer()
    ids = [1, 3, 4, 5, 6, 2]
    rows = rows_of(
        [{"input_ids": ids, "labels": [-100, -100, 4, 5, -100, 2]}], tokenizer
    )
    *_, text = row_lines(rows, 0, tokenizer)
    assert text.replace("[[", "").replace("]]", "") == tokenizer.decode(ids)
    assert re.sub(r"\s", "", text) == "<s>one[[twothree]]four[[</s>]]"
    assert re.search(r"one ?\[\[ ?two three\]\] ?four", text)


def test_rows_that_came_packed_and_unpacked_rows_are_shown_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = rows_of([chat("1 + 1", "2 it is"), chat("a", "b")], packing=False)
    packed = datasets.Dataset.from_list([dict(row) for row in rows])
    capsys.readouterr()
    print_rows(packed, TOKENIZER, 5)
    out = capsys.readouterr().out
    assert out.count("row ") == 2
    assert "[[b<eos>]]" in out.replace(TOKENIZER.eos_token, "<eos>")
    print_rows(rows, TOKENIZER, 5)
    assert capsys.readouterr().out == out


def test_a_terminal_gets_reverse_video_and_no_control_characters_of_the_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of([chat("q\x1b[2J", "two\nlines")])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_rows(rows, TOKENIZER, 1)
    out = capsys.readouterr().out
    assert f"\x1b[7mtwo\nlines{TOKENIZER.eos_token}\x1b[0m" in out and "[[" not in out
    assert "q\\x1b[2J" in out and out.count("\x1b") == 2
    monkeypatch.setenv("NO_COLOR", "1")
    print_rows(rows, TOKENIZER, 1)
    assert "[[two\nlines" in capsys.readouterr().out


def test_a_number_below_one_is_refused() -> None:
    with user_error("--show: 0: a number of rows from 1 is needed"):
        check_number(0, "--show")


def test_tokenize_shows_rows_after_its_own_lines_also_when_the_tokens_are_there(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(bench.recipe("r"))
    assert main(["run", recipe, "--only", "tokenize"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    for _ in range(2):
        assert main(["run", recipe, "--only", "tokenize", "--show-rows", "2"]) == 0
        first, *shown = capsys.readouterr().out.splitlines()
        assert first == line and [
            text[:6] for text in shown if text.startswith("row ")
        ] == [
            "row 1 ",
            "row 2 ",
        ]
        assert len(re.findall(r"\[\[\d+ is it", "\n".join(shown))) >= 2
    assert main(["run", recipe, "--only", "tokenize", "--show-rows", "0"]) == 2
    assert (
        "--show-rows: 0: a number of rows from 1 is needed" in capsys.readouterr().err
    )
