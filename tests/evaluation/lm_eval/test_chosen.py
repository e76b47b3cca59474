"""Tasks that are named on the command line: which rows they become, and that they run
without a suite file.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.base.strict import validate
from fcsd.cli.main import main
from fcsd.evaluation.answers import first_stop
from fcsd.evaluation.code.generate import prompts
from fcsd.evaluation.code.problems import Problem
from fcsd.evaluation.config import CodeTaskConfig, changed_suite, load_suite
from fcsd.evaluation.lm_eval import chosen
from fcsd.evaluation.lm_eval.chosen import chosen_suite
from fcsd.evaluation.lm_eval.tasks import load_task, tasks_folder
from tests.evaluation.test_bad_input import PIQA, error_of, model, root, words
from tests.support import few

__all__ = ["model", "root"]  # fixtures

MINE = {
    "task": "mine", "dataset_path": "baber/piqa", "output_type": "multiple_choice", "validation_split": "validation",
    "doc_to_text": "Q: {{goal}}\nA:", "doc_to_choice": "{{[sol1, sol2]}}", "doc_to_target": "label",
    "num_fewshot": 1, "fewshot_split": "train", "metric_list": [{"metric": "acc"}],
}  # fmt: skip
CODE = {"task": "x", "kind": "code", "dataset": "a/b"}


def test_a_named_task_is_the_suites_row_or_has_lm_evals_own_settings() -> None:
    suite = load_suite("paper11")
    made = chosen_suite(
        ["mmlu", "ifeval", "gpqa_diamond_cot_zeroshot", "mmlu_pro", "humaneval_plus"],
        suite,
    )
    (paper,) = [row for row in suite.tasks if row.task == "mmlu"]
    assert made.tasks[0] == paper and made.tasks[4].kind == "code"
    settings: list[Any] = [
        (row.kind, row.metric, row.dataset) for row in made.tasks[1:4]
    ]
    assert settings == [
        ("generation", "prompt_level_strict_acc,none", "google/IFEval"),
        ("generation", "exact_match,flexible-extract", "Idavidrein/gpqa"),
        ("generation", "exact_match,custom-extract", "TIGER-Lab/MMLU-Pro"),
    ]
    assert [row.num_fewshot for row in made.tasks[1:4]] == [0, 0, 5]  # type: ignore[union-attr]
    # which does not count in its suite
    alone = chosen_suite(["mbpp_plus_lmeval"], suite).tasks
    assert [(row.task, row.headline) for row in alone] == [("mbpp_plus_lmeval", True)]
    with pytest.raises(
        UserError, match=r"^task humaneval_64: runs generated code inside lm-eval"
    ):
        chosen_suite(["humaneval_64"], suite)


@pytest.mark.parametrize("tasks", few(["a hundred", "all"], 1))
def test_a_task_that_nobody_knows_is_answered_in_one_short_line(
    tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval has thousands of tasks, which take ten seconds to read: their names are
    not listed.
    """
    if tasks == "a hundred":
        for name in ("hellaswag", "mmlu"):
            shutil.copytree(tasks_folder() / name, tmp_path / name)
        monkeypatch.setattr(
            "lm_eval.tasks.manager.__file__", str(tmp_path / "manager.py")
        )
        # which is kept for the next test
        monkeypatch.setattr(chosen, "_every", chosen._every.__wrapped__)
    with pytest.raises(
        UserError,
        match=r"^task xyzzy!: lm-eval has no such task; `lm-eval ls tasks` lists them",
    ) as error:
        chosen_suite(["xyzzy!"], load_suite("paper11"))
    assert len(str(error.value)) < 200
    with pytest.raises(
        UserError,
        match=r"^task helaswag: lm-eval has no such task; did you mean 'hellaswag'",
    ):
        chosen_suite(["helaswag"], load_suite("pretrain9"))


def test_ones_own_task_runs_beside_one_of_lm_eval(
    model: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = root.parent / "definitions"
    folder.mkdir()
    (folder / "mine.yaml").write_text(yaml.safe_dump(MINE))
    given = words(model, root, PIQA)
    place = given.index("--suite")
    del given[place : place + 2]
    turns = ["--apply-chat-template", "--system-prompt", "Be brief."]
    assert (
        main([*given, "--tasks", "mine, piqa", "--include-path", str(folder), *turns])
        == 0
    )
    result = read_json(root.parent / "out" / "results.json")
    assert {task: (row["num_fewshot"], row["num_items"]) for task, row in result["tasks"].items()} == {
        "mine": (1, 1), "piqa": (0, 1),
    }  # fmt: skip
    assert "| mine " in capsys.readouterr().out
    samples = (root.parent / "out" / "samples_piqa.jsonl").read_text()
    assert "Be brief." in json.loads(samples.splitlines()[0])["prompt"]
    assert "has no meaning without --tasks" in error_of(
        [*given, "--include-path", str(folder)], capsys
    )


def test_a_task_that_shuffles_when_it_is_loaded_asks_every_model_the_same(
    root: Path,
) -> None:
    """As GPQA does with its choices, with Python's generator, whose state is unchanged
    afterwards.
    """
    folder = root.parent / "definitions"
    folder.mkdir()
    (folder / "utils.py").write_text(
        "import random\ndef drawn(rows):\n    return rows.map(lambda row: {**row,"
        " 'goal': str(random.random())})\n"
    )
    (folder / "mine.yaml").write_text(
        yaml.safe_dump(MINE) + "process_docs: !function utils.drawn\n"
    )
    suite = chosen_suite(["mine"], load_suite("tiny"), folder)
    asked = []
    for seed in (3, 4):
        random.seed(seed)
        before = random.getstate()
        (task,) = load_task(suite.tasks[0], suite, root, None).values()  # type: ignore[arg-type]
        asked.append([row["goal"] for row in task.eval_docs])
        assert random.getstate() == before
    assert asked[0] == asked[1] and len(set(asked[0])) == 3


def test_a_system_prompt_and_thinking_are_for_tasks_with_a_chat_template() -> None:
    suite = load_suite("paper11")
    with pytest.raises(UserError, match="system_prompt needs chat_template: true"):
        changed_suite(suite, system_prompt="Be brief.")
    made = changed_suite(
        suite, chat_template=True, system_prompt="Be brief.", thinking=True
    )
    assert all(
        row.system_prompt == "Be brief." and row.chat_template for row in made.tasks
    )
    assert {row.kind: row.thinking for row in made.tasks} == {
        "likelihood": None,
        "generation": True,
        "code": True,
    }
    assert changed_suite(suite, thinking=None) == suite


@pytest.mark.parametrize("name", ["humaneval_plus", "mbpp_plus"])
def test_strings_that_end_a_base_models_program_do_not_end_a_chat_models_answer(
    name: str,
) -> None:
    answer = 'Here it is:\n```python\n"""Adds."""\nimport math\n\ndef f(x):\n    return x\n```'
    suite = load_suite("paper11")
    (own,) = (row for row in suite.tasks if row.task == name)
    assert isinstance(own, CodeTaskConfig)
    assert first_stop(answer, own.stop) < len(answer)
    chat = changed_suite(suite, chat_template=True)
    for task in (
        next(row for row in chat.tasks if row.task == name),
        validate(CodeTaskConfig, {**CODE, "chat_template": True}, "row"),
    ):
        assert isinstance(task, CodeTaskConfig)
        assert first_stop(answer, task.stop) == len(answer)
    # graded as lm-eval grades, whose strings end a chat model's answer too
    assert next(r for r in chat.tasks if r.task == "mbpp_plus_lmeval").stop == [
        "[DONE]"
    ]  # type: ignore[union-attr]


@pytest.mark.parametrize("thinking", [None, True])
def test_a_program_is_asked_for_with_the_system_prompt_and_with_or_without_thoughts(
    thinking: bool | None,
) -> None:
    asked: list[Any] = []

    class Tokenizer:
        chat_template = "x"

        def apply_chat_template(self, turns: Any, **options: Any) -> str:
            asked.append((turns, options["enable_thinking"]))
            return "text"

    code = {**CODE, "chat_template": True, "thinking": thinking}
    row = validate(CodeTaskConfig, code | {"system_prompt": "Be brief."}, "row")
    assert prompts(Tokenizer(), [Problem("1", "Write f.", "", ())], row) == ["text"]  # type: ignore[arg-type]
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Write f."},
    ]
    assert asked == [(turns, bool(thinking))]
