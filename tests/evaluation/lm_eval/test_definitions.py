"""Tasks that are named on the command line: which rows they become, and that they run
without a suite file.
"""

import json
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fcsd.base.files import read_json
from fcsd.base.strict import validate
from fcsd.cli.main import main
from fcsd.evaluation.code.problems import Problem
from fcsd.evaluation.code.steps import prompt_texts
from fcsd.evaluation.config import CodeTaskConfig
from fcsd.evaluation.lm_eval import definitions
from fcsd.evaluation.lm_eval.packages import tasks_folder
from fcsd.evaluation.lm_eval.tasks import _prediction, load_task
from fcsd.evaluation.suites import changed_suite, chosen_suite, load_suite
from fcsd.training.generation import first_stop
from tests.evaluation.test_bad_input import PIQA, error_of, model, root, words
from tests.support import few, user_error

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
    with user_error(r"^task humaneval_64: runs generated code inside lm-eval"):
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
        monkeypatch.setattr(definitions, "_every", definitions._every.__wrapped__)
    with user_error(
        r"^task xyzzy!: lm-eval has no such task; `lm-eval ls tasks` lists them"
    ) as error:
        chosen_suite(["xyzzy!"], load_suite("paper11"))
    assert len(str(error.value)) < 200
    for name in ("helaswag", "HELLASWAG"):
        with user_error(
            rf"^task {name}: lm-eval has no such task; did you mean 'hellaswag'"
        ):
            chosen_suite([name], load_suite("pretrain9"))


@pytest.fixture
def few_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of lm-eval's definitions are those of these folders."""
    names = ("arc", "hellaswag", "gsm8k", "winogrande", "wikitext", "glue", "mmlu/default", "benchmarks/openllm.yaml",
             "truthfulqa", "blimp_nl")  # fmt: skip
    folders = [tasks_folder() / name for name in names]
    index = definitions.read_definitions(folders[:7] + folders[8:], defaults=False)
    openllm = definitions.read_definitions(
        [tasks_folder() / "benchmarks"], defaults=False
    )["openllm"]
    monkeypatch.setattr(definitions, "_every", lambda: {**index, "openllm": openllm})


@pytest.mark.usefixtures("few_folders")
def test_any_name_of_lm_eval_is_a_suite_with_its_own_shots_and_metric() -> None:
    tiny = load_suite("tiny")

    def rows(*names: str) -> list[Any]:
        tasks: list[Any] = list(chosen_suite(names, tiny).tasks)
        return [(row.task, row.metric, row.num_fewshot, row.dataset) for row in tasks]

    arc = [
        ("arc_challenge", "acc_norm,none", 0, "allenai/ai2_arc"),
        ("arc_easy", "acc_norm,none", 0, "allenai/ai2_arc"),
    ]
    assert rows("arc_easy", "hellaswag") == [
        arc[1],
        ("hellaswag", "acc_norm,none", 0, "Rowan/hellaswag"),
    ]
    assert rows("ai2_arc") == arc, "a tag"
    assert rows("arc_challeng?", "arc_eas*", "arc_easy") == arc, "no task twice"
    assert rows("gsm8k") == [
        ("gsm8k", "exact_match,flexible-extract", 5, "openai/gsm8k")
    ]
    # a group whose tasks have one setting is one row
    assert rows("mmlu") == [("mmlu", "acc,none", 0, "cais/mmlu")]
    # of different data and shots: those of the group's file, benchmarks/openllm.yaml
    assert {task: shots for task, _, shots, _ in rows("openllm")} == {
        "arc_challenge": 25, "hellaswag": 10, "truthfulqa_gen": 0, "truthfulqa_mc1": 0, "truthfulqa_mc2": 0,
        "mmlu": 5, "winogrande": 5, "gsm8k": 5,
    }  # fmt: skip


@pytest.mark.usefixtures("few_folders")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wikitext", "is scored by the perplexity of whole texts"),
        ("cola", r"none of its metrics \(mcc\) is a mean over items"),
        ("arc_eazy", "lm-eval has no such task; did you mean 'arc_easy'"),
        ("arc_eazy_*", "no task of lm-eval has such a name"),
    ],
)
def test_a_task_that_cannot_be_compared_item_by_item_is_refused_before_it_runs(
    name: str, message: str
) -> None:
    with user_error(f"^task {re.escape(name)}: {message}"):
        chosen_suite([name], load_suite("tiny"))


def test_a_group_that_names_what_is_not_there_is_one_line(root: Path) -> None:
    folder = root.parent / "definitions"
    folder.mkdir()
    (folder / "mine.yaml").write_text(yaml.safe_dump(MINE))
    for number, member in enumerate(["gone", {"task": "gone", "num_fewshot": 2}]):
        group = {"group": f"g{number}", "task": ["mine", member]}
        (folder / f"g{number}.yaml").write_text(yaml.safe_dump(group))
        with user_error(f"^task g{number}: lm-eval does not define its member gone"):
            chosen_suite([f"g{number}"], load_suite("tiny"), folder)
    other = MINE | {
        "task": "other",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc_norm"}],
    }
    (folder / "other.yaml").write_text(yaml.safe_dump(other))
    changed = {"task": "other", "doc_to_text": "{{goal}}"}
    group = {"group": "g2", "task": ["mine", changed]}
    (folder / "g2.yaml").write_text(yaml.safe_dump(group))
    with user_error("is a group that defines or changes tasks"):
        chosen_suite(["g2"], load_suite("tiny"), folder)


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
    sample = json.loads(samples.splitlines()[0])
    assert "Be brief." in sample["prompt"]
    # acc_norm, by hand: log-likelihood by character; choices follow a space
    by_character = [
        value / len(choice.removeprefix(" "))
        for value, choice in zip(
            sample["loglikelihoods"], sample["choices"], strict=True
        )
    ]
    assert sample["prediction"] == by_character.index(max(by_character))
    assert (str(sample["prediction"]) == sample["target"]) == (sample["score"] == 1)
    assert "has no meaning without --tasks" in error_of(
        [*given, "--include-path", str(folder)], capsys
    )


def test_a_rule_of_the_task_chooses_no_answer_and_an_empty_choice_is_none() -> None:
    item = {"doc": {}, "resps": [[(-9.0, False)], [(-8.0, False)]]}
    task = SimpleNamespace(
        OUTPUT_TYPE="multiple_choice",
        config=SimpleNamespace(process_results=None),
        doc_to_choice=lambda doc: ["yes", ""],
    )
    assert [_prediction(task, item, metric) for metric in ("acc", "acc_norm")] == [1, 0]
    task.config.process_results = lambda doc, results: {"acc": 0.5}
    assert _prediction(task, item, "acc") is None


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
    with user_error("system_prompt needs chat_template: true"):
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
    choices = chosen_suite(["piqa"], suite)
    with user_error(r"--thinking: no task of suite paper11-tasks writes its answer"):
        changed_suite(choices, chat_template=True, thinking=True)


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
    assert prompt_texts(Tokenizer(), [Problem("1", "Write f.", "", ())], row) == [
        "text"
    ]  # type: ignore[arg-type]
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Write f."},
    ]
    assert asked == [(turns, bool(thinking))]
