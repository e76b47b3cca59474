import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fcsd.base.errors import ScorerError, UserError
from fcsd.evaluation.backend import InMemoryBackend
from fcsd.evaluation.code import scorer as scorer_module
from fcsd.evaluation.code.problems import Problem, load_problems, read_problems
from fcsd.evaluation.code.sanitise import program_in
from fcsd.evaluation.code.scorer import CodeScorer
from fcsd.evaluation.code.steps import prompt_texts, questions_of
from fcsd.evaluation.config import CodeTaskConfig
from fcsd.parallel.launch import ALONE
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.reference.tiny import tiny_model
from tests.support import user_error

ROW: dict[str, Any] = {
    "task_id": 1,
    "prompt": "Add one.",
    "code": "def f(x):\n    return math.floor(x) + 1\n",
    "test_imports": ["import math"],
    "test_list": ["assert f(1) == 2", "assert f(2) == 3"],
    "test": "assert f(math.floor(1)) == 2",
}
ROW["code"] = "import math\n" + ROW["code"]


def row(**changes: Any) -> CodeTaskConfig:
    base = {
        "task": "t", "kind": "code", "metric": "pass@1", "dataset": "o/d", "max_new_tokens": 8, "stop": [],
    }  # fmt: skip
    return CodeTaskConfig.model_validate(base | changes)


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in rows))
    return path


def test_problems_are_read_from_a_folder_in_hub_layout(tmp_path: Path) -> None:
    jsonl(tmp_path / "o" / "d" / "test.jsonl", [ROW])
    (tmp_path / "o" / "d" / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: test\n   "
        " path: test.jsonl\n---\n"
    )
    (problem,) = load_problems(row(), tmp_path)
    assert problem.task_id == "1" and problem.visible_tests == tuple(ROW["test_list"])
    with user_error("cannot read split 'train' of this data set"):
        load_problems(row(split="train"), tmp_path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{k: v for k, v in ROW.items() if k != "test"}],
            r"no column test; code tasks need the MBPP\+ schema",
        ),
        ([ROW | {"code": 3}], "row 0: code must be text, got int"),
        ([ROW | {"test_list": "x"}], "row 0: test_list must be a list of texts"),
        ([ROW | {"test": " "}], "test is empty, so every program would pass"),
        ([ROW, ROW], "task_id 1 is given twice"),
        ([], "the file is empty"),
    ],
)
def test_bad_data_is_refused_with_its_place(
    tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    path = jsonl(tmp_path / "x.jsonl", rows)
    with user_error(message):
        read_problems(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with user_error(r"no\.jsonl: no such file"):
        read_problems(tmp_path / "no.jsonl")
    with user_error("nowhere: no such folder"):
        read_problems(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("def f(): pass\n", "def f(): pass\n"),
        ("Sure:\n```python\ndef f(): pass\n```\nand\n```\nx\n```", "def f(): pass\n"),
        ("```\na = 1\n", "a = 1\n"),  # never closed
        ("    ```py\n    a\n    ```", "    a\n"),
        ("It is ```python\na = 1\n``` there.", "It is ```python\na = 1\n``` there."),
        ("````py\na = 1\n````\nor\n```py\nb = 2\n", "b = 2\n"),
        ("a = '```'\n", "a = '```'\n"),
    ],
)  # fmt: skip
def test_lm_eval_takes_the_first_fenced_block_or_all_of_the_text(
    text: str, first: str
) -> None:
    assert program_in(Problem("1", "", "", (), block="first"), text) == first


def test_the_prompt_template_shows_visible_tests_and_leaves_braces_alone() -> None:
    problem = Problem(
        "1", "Make {test}.", "", ("x",), ("assert f({}) == 1", "assert g()")
    )
    assert (
        problem.text("{prompt} {test}|{tests}")
        == "Make {test}. assert f({}) == 1|assert f({}) == 1\nassert g()"
    )


PROBLEMS = [Problem(str(n), "a " * n + "b", "", ("x",)) for n in (1, 7, 3, 5, 2)]


def complete(
    model: Any, tokenizer: Any, problems: list[Problem], task: Any, *, batch_size: int
) -> Any:
    backend = InMemoryBackend(model, tokenizer, batch_size, ALONE, progress=False)
    texts = prompt_texts(tokenizer, problems, task)
    answers = iter(backend.answers(questions_of(backend, texts, task)))
    return {
        problem.task_id: [next(answers).text for _ in range(task.num_samples)]
        for problem in problems
    }


def test_batched_completions_equal_greedy_decoding_one_by_one() -> None:
    """Compared with a loop over the full forward pass, without cache, padding or
    `generate`.
    """
    tokenizer, model = (
        tiny_tokenizer(),
        tiny_model("qwen3_moe", vocab_size=len(tiny_tokenizer())),
    )
    made = complete(model, tokenizer, PROBLEMS, row(), batch_size=3)
    assert list(made) == [problem.task_id for problem in PROBLEMS]
    ends = {tokenizer.eos_token_id, model.generation_config.eos_token_id}
    for problem, text in zip(
        PROBLEMS, prompt_texts(tokenizer, PROBLEMS, row()), strict=True
    ):
        ids, new = tokenizer(text)["input_ids"], []
        with torch.no_grad():
            while len(new) < 8 and not (new and new[-1] in ends):
                new.append(int(model(torch.tensor([ids + new])).logits[0, -1].argmax()))
        assert made[problem.task_id] == [
            tokenizer.decode(new, skip_special_tokens=True)
        ]


def test_samples_are_drawn_at_the_temperature_and_are_the_same_again() -> None:
    tokenizer, model = (
        tiny_tokenizer(),
        tiny_model("qwen3_moe", vocab_size=len(tiny_tokenizer())),
    )
    model.generation_config.top_k = 1  # the model's own settings must not take effect

    def draw(**changes: Any) -> dict[str, list[str]]:
        task = row(num_samples=4, temperature=1.0, **changes)
        return complete(model, tokenizer, PROBLEMS, task, batch_size=3)

    made = draw()
    assert [len(texts) for texts in made.values()] == [4] * 5
    assert list(made) == [p.task_id for p in PROBLEMS]
    assert all(len(set(texts)) > 1 for texts in made.values()) and draw() == made
    greedy = complete(model, tokenizer, PROBLEMS, row(), batch_size=3)
    narrow = draw(top_p=1e-9)
    assert {name: set(texts) for name, texts in narrow.items()} == {
        k: set(v) for k, v in greedy.items()
    }


def test_generation_ends_at_the_stop_string_and_does_not_look_at_the_prompt() -> None:
    tokenizer, model = (
        tiny_tokenizer(),
        tiny_model("qwen3_moe", vocab_size=len(tiny_tokenizer())),
    )
    whole = complete(model, tokenizer, PROBLEMS, row(), batch_size=5)
    (text,) = whole["7"]
    assert len(text) > 3
    stop = text[2:4]
    lengths = []
    model.register_forward_hook(lambda *a: lengths.append(1))
    cut = complete(
        model, tokenizer, PROBLEMS[1:2], row(stop=[stop, "a a"]), batch_size=1
    )
    assert (
        cut["7"][0]
        == text[: min(i for i in (text.find(stop), text.find("a a")) if i >= 0)]
    )
    assert len(lengths) < 8


def test_generating_leaves_the_model_and_the_random_state_as_they_were() -> None:
    tokenizer, model = (
        tiny_tokenizer(),
        tiny_model("qwen3_moe", vocab_size=len(tiny_tokenizer())),
    )
    model.train()
    model.model.layers[0].eval()
    model.config.use_cache = False
    modes = [module.training for module in model.modules()]
    torch.manual_seed(1), numpy.random.seed(1), random.seed(1)
    expected = torch.rand(1), numpy.random.rand(), random.random()
    torch.manual_seed(1), numpy.random.seed(1), random.seed(1)
    side, pad = tokenizer.padding_side, tokenizer.pad_token
    complete(model, tokenizer, PROBLEMS, row(), batch_size=2)
    assert (torch.rand(1), numpy.random.rand(), random.random()) == expected
    assert [module.training for module in model.modules()] == modes
    assert model.config.use_cache is False
    assert (tokenizer.padding_side, tokenizer.pad_token) == (side, pad)


def good(code: str = "def f(x):\n    return x + 1\n", *tests: str) -> Problem:
    return Problem("1", "p", code, tests or ("assert f(1) == 2",))


def test_outcomes_tell_wrong_from_error_and_keep_the_order() -> None:
    programs = {
        "passed": "def f(x): return x + 1", "wrong": "def f(x): return x", "error": "def f(x): return x + undefined",
        "timeout": "def f(x):\n    while True: pass", "memory": "def f(x): return bytearray(1 << 40)",
    }  # fmt: skip
    problems = [Problem(name, "", good().canonical, good().tests) for name in programs]
    with CodeScorer(num_workers=2, timeout_s=1.0) as scorer:
        scorer.self_check(problems)
        outcomes = scorer.score(problems, programs)
        with user_error(r"no completion for problem error \(1 missing, 0 unknown\)"):
            scorer.score(problems, {k: v for k, v in programs.items() if k != "error"})
        with user_error("zzz is not a problem"):
            scorer.score(problems, programs | {"zzz": ""})
    assert [outcome.outcome for outcome in outcomes] == list(programs)


def test_an_assertion_of_the_program_itself_is_an_error_not_a_wrong_answer() -> None:
    with CodeScorer(num_workers=1) as scorer:
        (outcome,) = scorer.score(
            [good()], {"1": "def f(x):\n    assert False, 'no'\n"}
        )
        assert (outcome.outcome, outcome.message) == ("error", "AssertionError: no")
        expects = good(
            "def f(x): raise ValueError('x')",
            "try:\n    f(1)\nexcept ValueError: pass\nelse: assert False",
        )
        scorer.self_check([expects])


def test_a_data_set_without_canonical_solutions_is_checked_by_a_program_of_ours():
    with CodeScorer(num_workers=1) as scorer:
        (outcome,) = scorer.self_check([Problem("1", "p", "", ("assert False",))])
    assert outcome.passed and outcome.task_id == "probe"


def test_a_canonical_solution_is_run_once_in_a_process_until_it_or_the_sandbox_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one is run each time: it tells whether the sandbox still works."""
    ran: list[str] = []
    grade = scorer_module._grade

    def noted(server: Any, problem: Problem, *rest: Any) -> Any:
        ran.append(problem.task_id)
        return grade(server, problem, *rest)

    monkeypatch.setattr(scorer_module, "_grade", noted)
    monkeypatch.setattr(scorer_module, "_CANONICAL_PASSED", {})
    problems = [replace(good(), task_id=name) for name in "abc"]

    def checked(problems: list[Problem], **options: Any) -> list[str]:
        ran.clear()
        with CodeScorer(num_workers=1, **options) as scorer:
            assert all(outcome.passed for outcome in scorer.self_check(problems))
            assert len(scorer._canonical_s) == len(problems), (
                "limits follow from what they took"
            )
        return sorted(ran)

    assert checked(problems) == ["a", "b", "c"]
    assert checked(problems) == ["a"]
    assert checked(
        [*problems[:2], replace(problems[2], tests=("assert f(2) == 3",))]
    ) == ["a", "c"]
    assert checked(problems, memory_bytes=1 << 30) == ["a", "b", "c"]
    assert checked(problems, disable=["landlock"], allow_weak_sandbox=True) == [
        "a",
        "b",
        "c",
    ]
    wrong = [problems[0], replace(problems[1], canonical="def f(x): return x")]
    for _ in range(2):
        said = (
            "1 of 2 canonical solutions do not pass their own tests .*no score is given"
        )
        with pytest.raises(ScorerError, match=said):
            checked(wrong)
        assert sorted(ran) == ["a", "b"]


def test_a_scorer_error_is_no_user_error_and_no_score() -> None:
    assert issubclass(ScorerError, RuntimeError)
    assert not issubclass(ScorerError, UserError)
