"""Prompts that the model's positions cannot hold: cut as lm-eval cuts them, counted,
and reported.
"""

from pathlib import Path
from typing import Any

import pytest

from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.report.comparison import settings_line
from fcsd.report.table import score_table
from tests.evaluation.test_runner import (
    GENERATION,
    judge,
    likelihood,
    place,
    plain_lm_eval,
)
from tests.reference.tiny import tiny_model

__all__ = ["place"]  # a fixture
POSITIONS = 40


@pytest.fixture(scope="module")
def short() -> Any:
    return tiny_model(
        "qwen3_moe",
        vocab_size=512,
        max_position_embeddings=POSITIONS,
        num_hidden_layers=1,
    )


def test_prompts_that_were_cut_are_marked_and_give_the_numbers_of_plain_lm_eval(
    short: Any, place: Path
) -> None:
    made, samples = judge(short, place, likelihood(num_fewshot=1))
    plain = plain_lm_eval(short, place, "t_choice", 1, "o/choice")
    encode = tiny_tokenizer().encode
    too_long = 0
    for mine, other in zip(
        samples["t_choice"],
        sorted(plain["samples"]["t_choice"], key=lambda s: s["doc_id"]),
        strict=True,
    ):
        # The last token of an answer is predicted, not read.
        longest = max(
            len(encode(context + answer)) - 1 for context, answer in other["arguments"]
        )
        assert mine.get("cut", False) == (longest > POSITIONS)
        too_long += longest > POSITIONS
        assert mine["loglikelihoods"] == pytest.approx(
            [float(each[0][0]) for each in other["resps"]], abs=1e-4
        )
    assert 0 < too_long < 12, too_long
    assert made["tasks"]["t_choice"]["prompts_cut"] == too_long
    assert f"t_choice: {too_long} prompts exceed the model's positions" in score_table(
        made
    )
    assert (
        f"t_choice 1-shot, {too_long} of 12 prompts cut on the left"
        in settings_line(made)
    )


def test_prompts_are_cut_to_leave_room_for_the_answer(short: Any, place: Path) -> None:
    tight = GENERATION | {"max_new_tokens": POSITIONS - 4}
    made, samples = judge(short, place, tight)
    assert made["tasks"]["t_answers"]["prompts_cut"] == 6
    assert all(s["cut"] for s in samples["t_answers"])
    made, samples = judge(short, place, GENERATION)
    assert made["tasks"]["t_answers"]["prompts_cut"] == 0
    assert "cut" not in samples["t_answers"][0]
    assert "cut" not in score_table(made)
