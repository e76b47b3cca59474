"""Examples are counted by what happens to them, and an error names those that have no
answer.
"""

from pathlib import Path
from typing import Any

import datasets
import pytest

from fcsd.data.config import SourceConfig
from fcsd.data.counts import ExampleCounts, tell_examples
from fcsd.data.dataset import build_dataset, given_rows
from fcsd.data.decontaminate import Decontaminator, Item, ItemIndex
from fcsd.data.write_rows import BadRows
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.support import user_error, write_rows

TOKENIZER = tiny_tokenizer(300)


def given(examples: list[dict[str, Any]], **options: Any) -> Any:
    settings = {"name": "train_dataset", "max_length": 8, "num_proc": 1, **options}
    return given_rows(datasets.Dataset.from_list(examples), TOKENIZER, **settings)


def tokens(*labels: bool) -> dict[str, list[int]]:
    """Return an example with a token for each label; tokens whose label is True carry
    loss.
    """
    ids = list(range(5, 5 + len(labels)))
    return {
        "input_ids": ids,
        "labels": [i if has else -100 for i, has in zip(ids, labels, strict=True)],
    }


NO, YES = [False], [True]


@pytest.mark.parametrize("packing", [True, False])
def test_every_example_is_whole_cut_or_without_loss(packing: bool) -> None:
    examples = [
        tokens(*NO, *YES),  # whole
        tokens(*NO * 4, *YES * 4),  # just fits
        tokens(*NO * 4, *YES * 2, *NO * 6),  # what is cut off has no loss
        tokens(*NO * 4, *YES * 5),  # cut
        tokens(*YES * 20),  # cut
        tokens(*NO * 8, *YES * 3),  # its answer is cut away
        tokens(*NO * 12),
        tokens(*YES, *NO * 3),  # nothing predicts the first token
    ]
    rows = given(examples, packing=packing)
    assert rows.counts == ExampleCounts(read=8, cut=2, without_loss=2, cut_away=1)
    assert rows.counts.usable == rows.num_examples() == 5
    assert (
        rows.counts.sentence(3)
        == "8 examples read: 2 cut, 3 without loss, 0 left out, 3 never used"
    )


def test_what_is_left_out_is_counted_and_a_second_call_finds_it_in_the_file(
    tmp_path: Path,
) -> None:
    overlap = "one two three four five six seven eight"
    write_rows(
        tmp_path / "data" / "a.jsonl",
        [{"text": "a b c"}, {"text": None}, {"text": overlap}] * 2,
    )
    source = SourceConfig(
        path=str(tmp_path / "data" / "a.jsonl"), columns={"text": "text"}
    )
    place = (tmp_path / "tokens", ["a"])
    expected = ExampleCounts(read=6, bad=2, overlapping=2)
    for index in (ItemIndex([Item("task", "1", (overlap,))]), None):
        rows = build_dataset(
            [source], TOKENIZER, max_length=16, num_proc=1, bad_rows=BadRows("skip"), place=place,
            decontaminator=Decontaminator(index) if index is not None else lambda: pytest.fail("read again"),
        )  # fmt: skip
        assert rows.counts == expected and expected.left_out == 4 and len(rows) == 1


def test_an_example_that_a_mixture_repeats_is_counted_once(tmp_path: Path) -> None:
    sources = []
    for name, count in (("long", 40), ("short", 3)):
        write_rows(
            tmp_path / f"{name}.jsonl", [{"text": f"{name} {n}"} for n in range(count)]
        )
        sources.append(
            SourceConfig(path=str(tmp_path / f"{name}.jsonl"), columns={"text": "text"})
        )
    rows = build_dataset(sources, TOKENIZER, max_length=16, num_proc=1)
    assert rows.num_examples() == rows.counts.read == 43


def test_what_more_than_a_twentieth_of_the_examples_lose_is_a_warning() -> None:
    assert not list(
        ExampleCounts(read=100, cut=5, without_loss=5, cut_away=5, bad=5).warnings(64)
    )
    counts = ExampleCounts(
        read=100, cut=6, without_loss=7, cut_away=8, bad=9, overlapping=10
    )
    assert [text.partition(":")[0] for text in counts.warnings(64)] == ["warning"] * 5
    texts = "\n".join(counts.warnings(64))
    for text in (
        (
            "6 of 100 examples (6 %) are truncated: some of their tokens with loss are"
            " beyond max_length 64; raise it"
        ),
        (
            "8 of 100 examples (8 %) are without loss: all of their tokens with loss"
            " are beyond max_length 64; raise it"
        ),
        (
            "7 of 100 examples (7 %) are without loss: they have no answer; check the"
            " data, or `columns`"
        ),
        "9 of 100 examples (9 %) are left out: they cannot be tokenized",
        "10 of 100 examples (10 %) are left out: they overlap with test items",
    ):
        assert text in texts


def test_held_out_text_has_a_line_where_it_loses_something(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = given([tokens(*NO, *YES)])
    cut = given([tokens(*NO, *YES)] * 30 + [tokens(*NO, *YES * 20)])
    capsys.readouterr()
    tell_examples(whole, "held-out text", always=False)
    assert capsys.readouterr().err == ""
    tell_examples(cut, "held-out text", always=False)
    line = "held-out text: 31 examples read: 1 cut, 0 without loss, 0 left out\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("example", "missing"),
    [
        ({"messages": [{"role": "user", "content": "hi"}]}, "column 'messages' has no message of an assistant"),
        ({"conversations": [{"from": "human", "value": "hi"}]},
         "column 'conversations' has no message of an assistant"),
        ({"text": ""}, "column 'text' has no text of two tokens"),
        (tokens(*NO * 3), "column 'labels' has only the label -100"),
        ({"input_ids": [3]}, "column 'input_ids' has no example of two tokens"),
        (
            {"messages": [{"role": "assistant", "content": "hi", "weight": 0}]},
            "column 'messages' has no message of an assistant that has text and loss"
            " (one with `weight: 0`, `train: false` or the like has none)",
        ),
        ({"input_ids": [3, 4, 5], "completion_mask": [1, 0, 0]},
         "'completion_mask' mark no token after an example's first"),
    ],
)  # fmt: skip
def test_data_without_an_answer_do_not_get_the_advice_of_longer_rows(
    example: dict[str, Any], missing: str
) -> None:
    with user_error("not one of 4 examples has a token with loss") as caught:
        given([example] * 4)
    assert missing in str(caught.value) and "max_length" not in str(caught.value)
    assert "name other columns under `columns`" in str(caught.value)


def test_data_whose_answers_are_all_cut_away_get_the_advice_of_longer_rows() -> None:
    with user_error(
        "not one of 2 examples has a response token within max_length: 8; raise"
    ):
        given([tokens(*NO * 3), tokens(*NO * 9, *YES)])


def test_data_of_which_nothing_is_left_say_what_became_of_them() -> None:
    text = "one two three four five six seven eight"
    with user_error(
        "none of 3 examples is left: 1 cannot be tokenized, 2 overlap with test"
    ):
        given(
            [{"text": text}, {"text": None}, {"text": text}], bad_rows=BadRows("skip"),
            decontaminator=Decontaminator(ItemIndex([Item("task", "1", (text,))])),
        )  # fmt: skip
