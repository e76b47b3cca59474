"""Real benchmarks from a local folder in hub layout, through the same code as the tiny ones."""

import re
from pathlib import Path

import pytest

from fcsd.evaluation.code.problems import Tests, read_problems
from fcsd.evaluation.code.scorer import CodeScorer
from fcsd.evaluation.suites import load_suite
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.reference.tiny import tiny_model
from tests.support import evaluate

pytestmark = pytest.mark.real_data


def test_benchmarks_run_from_local_data_and_have_their_official_numbers_of_items(
    shared_hub: Path,
) -> None:
    official = {
        "hellaswag": 10042, "winogrande": 1267, "humaneval_plus": 164, "gsm8k": 1319, "mbpp_plus": 378,
        "mbpp_plus_lmeval": 378,
    }  # fmt: skip
    suite = load_suite("paper11")
    tasks = [
        (
            row
            if row.kind == "likelihood"
            else row.model_copy(update={"max_new_tokens": 4})
        )
        for row in suite.tasks
        if row.task in official
    ]
    model = tiny_model(
        "qwen3_moe", vocab_size=512, max_position_embeddings=8192, num_hidden_layers=2
    )
    result, samples = evaluate(
        model,
        tiny_tokenizer(),
        suite.model_copy(update={"tasks": tasks}),
        data_root=shared_hub,
        batch_size=4,
        limit=2,
        progress=False,
    )
    assert {
        task: row["num_items_total"] for task, row in result["tasks"].items()
    } == official
    assert {
        task: row["num_items"] for task, row in result["tasks"].items()
    } == dict.fromkeys(samples, 2)
    assert result["tasks"]["gsm8k"]["num_fewshot"] == 5
    assert [len(sample["loglikelihoods"]) for sample in samples["hellaswag"]] == [4] * 2


def returns_none(program: str) -> str:
    names = re.findall(r"^def (\w+)", program, re.MULTILINE)
    return "".join(f"def {name}(*args, **named):\n    return None\n" for name in names)


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("name", "tests", "count"),
    [
        ("mbppplus", "visible", 378),
        ("mbppplus", "all", 378),
        ("humanevalplus", "all", 164),
    ],
)
def test_all_canonical_programs_pass_and_programs_that_return_none_do_not(
    shared_hub: Path, name: str, tests: Tests, count: int
) -> None:
    problems = read_problems(shared_hub / "evalplus" / name, tests=tests)
    assert len(problems) == count
    assert all(bool(problem.base_tests) == (tests == "all") for problem in problems)
    with CodeScorer(timeout_s=10.0) as scorer:
        scorer.self_check(problems)
        nothing = {
            problem.task_id: [returns_none(problem.canonical)] for problem in problems
        }
        outcomes = [each for (each,) in scorer.score_samples(problems, nothing)]
    assert not [
        outcome.task_id
        for outcome in outcomes
        if "passed" in (outcome.outcome, outcome.base)
    ]
    assert {outcome.outcome for outcome in outcomes} <= {"wrong", "error"}
