"""The shipped suites against the papers: tasks, shots, metric keys, data sets and their
pinned revisions.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fcsd.cli.main import main
from fcsd.evaluation.config import GenerationTaskConfig
from fcsd.evaluation.suites import chosen_suite, load_suite, suite_names
from fcsd.recipe.load_recipe import load_recipe
from tests.support import ROOT, user_error

# Task -> (shots, lm-eval's metric key, data set on the Hub), from the papers: Table 1
# and Table 4 of FarSkip-Collective (which state no shots; MMLU at 5 and the rest at
# lm-eval's own are our choice), and section 4.2 of CAMoE (which does).
PAPER11 = {
    "piqa": (0, "acc_norm,none", "baber/piqa"),
    "arc_easy": (0, "acc_norm,none", "allenai/ai2_arc"),
    "arc_challenge": (0, "acc_norm,none", "allenai/ai2_arc"),
    "hellaswag": (0, "acc_norm,none", "Rowan/hellaswag"),
    "commonsense_qa": (0, "acc,none", "tau/commonsense_qa"),
    "winogrande": (0, "acc,none", "allenai/winogrande"),
    "humaneval_plus": (0, "pass@1", "evalplus/humanevalplus"),
    "mmlu": (5, "acc,none", "cais/mmlu"),
    "openbookqa": (0, "acc_norm,none", "allenai/openbookqa"),
    "gsm8k": (5, "exact_match,flexible-extract", "openai/gsm8k"),
    "mbpp_plus": (0, "pass@1", "evalplus/mbppplus"),
}
PRETRAIN9 = {
    "arc_challenge": (0, "acc_norm,none", "allenai/ai2_arc"),
    "arc_easy": (0, "acc_norm,none", "allenai/ai2_arc"),
    "boolq": (0, "acc,none", "aps/super_glue"),
    "hellaswag": (0, "acc_norm,none", "Rowan/hellaswag"),
    "mmlu": (0, "acc,none", "cais/mmlu"),
    "openbookqa": (0, "acc_norm,none", "allenai/openbookqa"),
    "piqa": (0, "acc_norm,none", "baber/piqa"),
    "sciq": (0, "acc,none", "allenai/sciq"),
    "winogrande": (0, "acc,none", "allenai/winogrande"),
}
CAMOE9 = {
    "boolq": (0, "acc,none", "aps/super_glue"),
    "rte": (0, "acc,none", "nyu-mll/glue"),
    "openbookqa": (0, "acc_norm,none", "allenai/openbookqa"),
    "piqa": (0, "acc_norm,none", "baber/piqa"),
    "mmlu": (5, "acc,none", "cais/mmlu"),
    "winogrande": (5, "acc,none", "allenai/winogrande"),
    "gsm8k": (5, "exact_match,strict-match", "openai/gsm8k"),
    "hellaswag": (10, "acc_norm,none", "Rowan/hellaswag"),
    "arc_challenge": (25, "acc_norm,none", "allenai/ai2_arc"),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("paper11", PAPER11), ("paper11_chat", PAPER11), ("pretrain9", PRETRAIN9), ("camoe9", CAMOE9),
    ],
)  # fmt: skip
def test_a_shipped_suite_has_the_papers_tasks_shots_metrics_and_data(
    name: str, expected: dict[str, tuple[int, str, str]]
) -> None:
    rows = [row for row in load_suite(name).tasks if row.headline]
    assert {
        row.task: (row.num_fewshot, row.metric, row.dataset) for row in rows
    } == expected
    assert [row.task for row in rows] == list(expected)
    assert {row.chat_template for row in rows} == {name == "paper11_chat"}


def test_the_chat_edition_differs_in_how_it_asks_and_in_nothing_else() -> None:
    plain, chat = (
        {row.task: row for row in load_suite(name).tasks}
        for name in ("paper11", "paper11_chat")
    )
    how = {"chat_template", "prompt_template", "stop", "max_new_tokens"}
    for task, row in chat.items():
        assert row.model_dump(exclude=how) == plain[task].model_dump(exclude=how)
    lengths, before = (
        {
            name: row.max_new_tokens
            for name, row in rows.items()
            if row.kind != "likelihood"
        }
        for rows in (chat, plain)
    )
    longer = {name for name, length in lengths.items() if length != before[name]}
    assert longer == {"gsm8k"} and lengths["gsm8k"] == 1024


def test_the_suite_for_chat_models_is_as_lm_eval_defines_it() -> None:
    """Shots, kind and data of lm-eval's own definitions, and a metric that they have."""
    suite = load_suite("instruct")
    plain = load_suite("tiny")
    for row in suite.tasks:
        (theirs,) = chosen_suite([row.task], plain).tasks
        assert isinstance(row, GenerationTaskConfig)
        assert isinstance(theirs, GenerationTaskConfig)
        assert (row.num_fewshot, row.dataset, row.chat_template) == (
            theirs.num_fewshot,
            theirs.dataset,
            True,
        )
        # The first of its metrics is lm-eval's headline, except for MATH, which has
        # two: a string comparison, and a proof of equality.
        assert row.metric == (
            "math_verify,none" if row.task == "minerva_math500" else theirs.metric
        )


def test_the_suite_of_what_a_model_writes_asks_ifeval_as_the_suite_for_chat_models():
    own, ifeval = load_suite("own_text").tasks
    (same,) = (row for row in load_suite("instruct").tasks if row.task == "ifeval")
    assert ifeval == same
    assert own.kind == "own_text" and own.dataset == ifeval.dataset
    assert (own.num_prompts, own.max_new_tokens, own.temperature) == (256, 256, 1)


def test_own_text_beside_the_papers_tasks_changes_none_of_them() -> None:
    suite, plain = load_suite("paper11_own_text"), load_suite("paper11")
    *rows, own = suite.tasks
    assert rows == plain.tasks and suite.columns == plain.columns
    assert own.kind == "own_text" and own.chat_template
    # Neither the text of the early stopping nor that of the training.
    recipes = [*(ROOT / "recipes").glob("*/economical.yaml")]
    assert len(recipes) == 3
    for path in recipes:
        recipe = load_recipe(path)
        assert recipe.evaluation.suite == suite.name
        assert recipe.data.heldout is not None
        held_out = recipe.data.heldout.path, recipe.data.heldout.split
        assert held_out == (own.dataset, "train[:256]")
        assert own.split == "train[-256:]"
        assert own.dataset not in {source.path for source in recipe.data.train}


def test_a_suite_names_the_suites_before_it(tmp_path: Path) -> None:
    def mine(**content: Any) -> Any:
        row = {"task": "own", "kind": "own_text", "dataset": "me/prompts"}
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({"name": "mine", "tasks": [row]} | content))
        return load_suite(path)

    names = [row.task for row in load_suite("tiny").tasks]
    suite = mine(suites=["tiny"])
    assert [row.task for row in suite.tasks] == [*names, "own"]
    assert suite.columns == load_suite("tiny").columns and suite.name == "mine"
    with user_error(
        r"mine.yaml: suites: 'tini': no shipped suite; did you mean 'tiny'"
    ):
        mine(suites=["tini"])
    twice = {"task": names[0], "kind": "own_text", "dataset": "me/prompts"}
    with user_error(f"{names[0]} is listed twice"):
        mine(suites=["tiny"], tasks=[twice])


def test_help_names_every_suite(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in suite_names())


@pytest.mark.parametrize("name", ["paper11", "paper11_chat", "pretrain9", "camoe9"])
def test_every_data_set_of_a_shipped_suite_is_pinned_to_one_commit(name: str) -> None:
    rows = load_suite(name).tasks
    assert all(re.fullmatch("[0-9a-f]{40}", row.revision or "") for row in rows)
    assert len({(row.dataset, row.revision) for row in rows}) == len(
        {row.dataset for row in rows}
    )
