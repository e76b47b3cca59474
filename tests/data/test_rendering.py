"""A chat template that writes today's date: a run sees one date, and so do two runs
that are compared.
"""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import transformers.utils.chat_template_utils as clock

from fcsd.data.chat import tokenize_examples
from fcsd.data.rendering import BEGAN, dated
from fcsd.evaluation.chat.chat import Speaker
from fcsd.evaluation.code.problems import Problem
from fcsd.evaluation.code.steps import prompt_texts
from fcsd.evaluation.config import CodeTaskConfig, SuiteConfig
from fcsd.evaluation.items import suite_prompts
from fcsd.evaluation.scores import compare
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.data.test_examples import stock
from tests.evaluation.test_runner import ANSWERS, place, suite  # noqa: F401  a fixture
from tests.reference.tiny import tiny_model
from tests.support import evaluate

DATED = (
    "{{ '<|im_start|>system\nToday is ' + strftime_now('%Y-%m-%d') + '<|im_end|>\n'"
    " }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content +"
    " '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt"
    " %}<|im_start|>assistant\n{% endif %}"
)
ASKED = [{"role": "user", "content": "hi"}]


def set_day(day: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the day that transformers sees."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2026, 11, day)

    monkeypatch.setattr(clock, "datetime", Clock)


def tokenizer_with(template: str = DATED) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def answers(place: Path, monkeypatch: pytest.MonkeyPatch, day: int) -> dict[str, Any]:  # noqa: F811
    set_day(day, monkeypatch)
    model = tiny_model(
        "qwen3_moe", vocab_size=512, max_position_embeddings=512, num_hidden_layers=1
    )
    rows = [
        {"task": "t_answers", "kind": "generation", "metric": "exact_match,none", "dataset": "o/answers"},
        {"task": "t_choice", "kind": "likelihood", "metric": "acc,none", "dataset": "o/choice"},
    ]  # fmt: skip
    asked = suite(place, *({**row, "chat_template": True} for row in rows))
    plan: dict[str, Any] = {
        "data_root": str(place / "data"),
        "batch_size": 2,
        "limit": 2,
    }
    tokenizer = tokenizer_with()
    said = suite_prompts(asked, place / "data", tokenizer, 1)
    assert all("Today is 2025-01-01" in tokenizer.decode(prompt) for prompt in said)
    result, samples = evaluate(model, tokenizer, asked, progress=False, **plan)
    return {"result": result, "samples": samples}


def test_the_same_model_on_two_days_is_asked_the_same(
    place: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, after = answers(place, monkeypatch, 24), answers(place, monkeypatch, 25)
    assert compare(before, after)["mean"]["delta"] == 0
    assert before["samples"] == after["samples"]
    assert "Today is 2025-01-01" in before["samples"]["t_answers"][0]["prompt"]
    assert before["result"]["settings"]["template_date"] == "2025-01-01"


def test_code_prompts_have_the_date_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_day(24, monkeypatch)
    row = {"task": "x", "kind": "code", "dataset": "a/b", "chat_template": True}
    problem = Problem("0", "add", "def f(): pass", ())
    task = CodeTaskConfig.model_validate(row)
    assert "Today is 2025-01-01" in prompt_texts(tokenizer_with(), [problem], task)[0]


def test_no_date_is_recorded_where_the_template_writes_none(
    place: Path,  # noqa: F811
) -> None:
    model = tiny_model(
        "qwen3_moe", vocab_size=512, max_position_embeddings=512, num_hidden_layers=1
    )
    row = {
        "task": "t_answers", "kind": "generation", "metric": "exact_match,none", "dataset": "o/answers",
    }  # fmt: skip
    made = SuiteConfig.model_validate(
        suite(place, {**row, "chat_template": True}).model_dump()
    )
    made = made.model_copy(update={"folder": str(place)})
    plan: dict[str, Any] = {
        "data_root": str(place / "data"),
        "batch_size": 2,
        "limit": 1,
    }
    result, _ = evaluate(model, tiny_tokenizer(), made, progress=False, **plan)
    assert result["settings"]["template_date"] is None


@pytest.mark.parametrize("template", [DATED, "gptoss", "llama3_2", "muse_glimmer"])
def test_rows_of_training_that_are_made_over_midnight_have_one_date(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_with(template if "{" in template else stock(template))
    example = {"messages": [*ASKED, {"role": "assistant", "content": "hello"}]}
    rows = []
    for day in (24, 25):
        set_day(day, monkeypatch)
        rows += tokenize_examples([example], {"messages": "messages"}, tokenizer)
    assert rows[0] == rows[1] and isinstance(rows[0], dict)
    text = tokenizer.decode(rows[0]["input_ids"])
    assert f"{BEGAN:%Y-%m-%d}" in text or f"{BEGAN:%d %b %Y}" in text


@pytest.mark.parametrize(
    "template",
    [
        DATED, "\n" + DATED, "  {% if true %}\n" + DATED + "{% endif %}",
        "{{ strftime_now('%d/%-m/%y %%d %B %b %A %a %H:%M:%S %I %p %j') }}",
        "{% macro day(f) %}{{ strftime_now(f) }}{% endmacro %}{{ day('%Y') }}{{ strftime_now is defined }}",
        "{% for m in messages %}{% set year = strftime_now('%Y')|int %}{{ year - 1 }}{% endfor %}",
        "gptoss", "llama3_2", "muse_glimmer", "qwen3",
    ],
)  # fmt: skip
def test_a_dated_template_writes_what_transformers_writes_on_that_day(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_day(24, monkeypatch)
    tokenizer = tokenizer_with(template if "{" in template else stock(template))
    options = {"tokenize": False, "add_generation_prompt": True}
    expected = tokenizer.apply_chat_template(ASKED, **options)
    set_day(25, monkeypatch)
    changed = dated(tokenizer.chat_template, datetime(2026, 11, 24))
    assert (
        tokenizer.apply_chat_template(ASKED, chat_template=changed, **options)
        == expected
    )


def test_a_chat_over_midnight_keeps_the_day_on_which_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(
        "qwen3_moe", vocab_size=512, max_position_embeddings=512, num_hidden_layers=1
    )
    tokenizer = tokenizer_with()
    speaker = Speaker(
        "model", model, tokenizer, [*ASKED], today=datetime(2026, 11, 23, 23, 59)
    )
    for day in (23, 24):
        set_day(day, monkeypatch)
        assert "Today is 2026-11-23" in tokenizer.decode(
            speaker.prompt()["input_ids"][0]
        )
