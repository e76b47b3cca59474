"""Every task of the shipped suites runs on rows in its exact schema, and refuses rows
that are not.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fcsd.base.text import Work
from fcsd.cli.main import main
from fcsd.evaluation.config import SuiteConfig, TaskConfig
from fcsd.evaluation.lm_eval.columns import check_rows, columns_of
from fcsd.evaluation.lm_eval.tasks import load_task, work
from fcsd.evaluation.suites import load_suite
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.evaluation.rows import mmlu_subjects, rows_of, write_repository, write_root
from tests.evaluation.test_instruct import ONE_HEAD
from tests.reference.tiny import tiny_model
from tests.support import evaluate, few, run_command, start, user_error


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_root(tmp_path_factory.mktemp("root"))


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(
        "qwen3_moe", **ONE_HEAD, max_position_embeddings=8192, num_hidden_layers=2
    )


def short(row: TaskConfig) -> TaskConfig:
    """Return the row with answers of a few tokens: what the model says does not matter here."""
    return (
        row
        if row.kind == "likelihood"
        else row.model_copy(update={"max_new_tokens": 3})
    )


def task(suite: str, name: str) -> TaskConfig:
    return next(row for row in load_suite(suite).tasks if row.task == name)


@pytest.mark.breadth
def test_every_task_of_the_papers_suite_runs_from_local_data(
    root: Path, model: Any
) -> None:
    suite = load_suite("paper11")
    suite = suite.model_copy(update={"tasks": [short(row) for row in suite.tasks]})
    result, samples = evaluate(
        model,
        tiny_tokenizer(),
        suite,
        data_root=root,
        batch_size=32,
        limit=1,
        progress=False,
    )
    expected = {row.task: (1, 3) for row in suite.tasks} | {"mmlu": (57, 114)}
    assert {
        k: (v["num_items"], v["num_items_total"]) for k, v in result["tasks"].items()
    } == expected
    assert (
        len({sample["doc_id"].split("/")[0] for sample in samples["mmlu"]})
        == 57
        == len(mmlu_subjects())
    )
    assert {k: v["num_fewshot"] for k, v in result["tasks"].items()} == {
        row.task: row.num_fewshot for row in suite.tasks
    }
    assert result["complete"] is False
    assert result["tasks"]["mbpp_plus"]["base"]["value"] == 0
    headline = [v["value"] for v in result["tasks"].values() if v["headline"]]
    assert len(headline) == 11 and result["mean"] == pytest.approx(sum(headline) / 11)


def test_the_tasks_that_only_the_other_suites_have_run_from_local_data(
    root: Path, model: Any
) -> None:
    """Those with other shots, too; MMLU without shots is the same 57 tasks."""
    seen = {
        (row.task, row.num_fewshot, row.metric) for row in load_suite("paper11").tasks
    }
    tasks = []
    for name in ("pretrain9", "camoe9"):
        for row in load_suite(name).tasks:
            if (
                row.task,
                row.num_fewshot,
                row.metric,
            ) not in seen and row.task != "mmlu":
                tasks.append(short(row))
    assert {(row.task, row.num_fewshot) for row in tasks} == {
        ("boolq", 0), ("sciq", 0), ("rte", 0), ("winogrande", 5), ("gsm8k", 5), ("hellaswag", 10),
        ("arc_challenge", 25),
    }  # fmt: skip
    unique = {row.task: row for row in tasks}
    suite = SuiteConfig(name="rest", tasks=list(unique.values()))
    result, _ = evaluate(
        model,
        tiny_tokenizer(),
        suite,
        data_root=root,
        batch_size=32,
        limit=1,
        progress=False,
    )
    assert {k: v["num_fewshot"] for k, v in result["tasks"].items()} == {
        row.task: row.num_fewshot for row in suite.tasks
    }


def row_of(name: str, *, chat: bool) -> TaskConfig:
    """Return a row of paper11, or a group of its MMLU; three shots, answers of a few tokens."""
    row = task("paper11", "mmlu" if name.startswith("mmlu") else name)
    answers = {} if row.kind == "likelihood" else {"max_new_tokens": 8}
    return row.model_copy(
        update={"task": name, "num_fewshot": 3, "chat_template": chat} | answers
    )


@pytest.mark.parametrize(
    ("name", "chat", "batch_size"),
    few([
        ("piqa", False, 3), ("arc_challenge", True, 4), ("winogrande", False, 2), ("gsm8k", False, 2),
        ("gsm8k", True, 3), ("mmlu_stem", False, 5),
    ], 4),
)  # fmt: skip
def test_a_benchmark_gives_the_numbers_of_plain_lm_eval(
    name: str,
    chat: bool,
    batch_size: int,
    root: Path,
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Compared with lm-eval's own entry point, wrapper and task files: choices by
    length, choices by what follows, a group, and generated answers.
    """
    import datasets
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    row = row_of(name, chat=chat)
    folder = (
        Path(str(lm_eval.__file__)).parent / "tasks" / (row.lm_eval_include or name)
    )
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.chdir(root)  # where the names of the data sets on the Hub are folders
    plain = lm_eval.simple_evaluate(
        HFLM(
            pretrained=copy.deepcopy(model),
            tokenizer=tiny_tokenizer(),
            batch_size=1,
            enable_thinking=False,
        ),
        tasks=[name],
        num_fewshot=3,
        task_manager=TaskManager(include_path=[str(folder)], include_defaults=False),
        gen_kwargs={"max_gen_toks": 8} if row.kind == "generation" else None,
        apply_chat_template=chat,
        fewshot_as_multiturn=chat,
    )
    result, samples = evaluate(
        model,
        tiny_tokenizer(),
        SuiteConfig(name="s", tasks=[row]),
        data_root=root,
        batch_size=batch_size,
        progress=False,
    )
    theirs = plain["results"][name]
    assert result["tasks"][name]["value"] == pytest.approx(float(theirs[row.metric]))
    if name in plain["samples"]:  # lm-eval estimates the error of a group differently
        error = float(theirs[row.metric.replace(",", "_stderr,")])
        assert result["tasks"][name]["stderr"] == pytest.approx(error)
    expected = [
        (item if member == name else f"{member}/{item}", each)
        for member, items in plain["samples"].items()
        for item, each in sorted(
            (s["doc_id"], s) for s in items if s["filter"] == row.metric.split(",")[1]
        )
    ]
    assert sorted(str(each["doc_id"]) for each in samples[name]) == sorted(
        str(item) for item, _ in expected
    )
    mine = {each["doc_id"]: each for each in samples[name]}
    for item, other in expected:
        for key in ("doc_hash", "prompt_hash"):
            assert mine[item][key] == other[key]
        if row.kind == "generation":
            assert mine[item]["completion"] == other["resps"][0][0]
        else:
            scores = [float(choice[0][0]) for choice in other["resps"]]
            assert mine[item]["loglikelihoods"] == pytest.approx(scores, abs=1e-3)


@pytest.mark.breadth
def test_the_lm_eval_command_finds_the_same_item_by_item(
    root: Path, model: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both run from the command line on one FarSkip checkpoint (lm_eval with the code
    that is in it), and `fcsd compare` compares them.
    """
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    assert main(["convert", str(tmp_path / "base"), str(tmp_path / "model")]) == 0
    names = ("piqa", "winogrande", "gsm8k")  # groups: lm_eval/test_read.py
    rows = [row_of(name, chat=False).model_dump(exclude_none=True) for name in names]
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump({"name": "s", "tasks": rows}))
    words = (
        "-m lm_eval --model hf --model_args"
        f" pretrained={tmp_path / 'model'},trust_remote_code=True --tasks"
        f" {','.join(names)} --num_fewshot 3 --batch_size 2 --limit 2 --gen_kwargs"
        f" max_gen_toks=8 --log_samples --output_path {tmp_path / 'theirs'}"
    )
    with start(*words.split(), cwd=root, HF_HOME=str(tmp_path / "home")) as child:
        said = child.communicate(timeout=600)
    assert child.returncode == 0, said
    options = (
        f"--suite {tmp_path / 'suite.yaml'} --data-root {root} --limit 2 --output"
        f" {tmp_path / 'mine'}".split()
    )
    assert main(["evaluate", str(tmp_path / "model"), *options]) == 0
    capfd.readouterr()
    assert run_command("compare", tmp_path / "theirs", tmp_path / "mine", "--json") == 0
    (comparison,) = json.loads(capfd.readouterr().out).values()
    rows = comparison["tasks"]
    assert {
        name: [row[key] for key in ("num_items", "delta", "gained", "lost")]
        for name, row in rows.items()
    } == {name: [2, 0, 0, 0] for name in names}


def test_the_work_of_a_task_is_what_the_model_reads_or_may_write(root: Path) -> None:
    def of(name: str, limit: int | None = None) -> Work:
        row = task("paper11", name)
        return work(
            row,
            load_task(row, SuiteConfig(name="s", tasks=[row]), root, tiny_tokenizer()),
            limit,
        )

    rows = rows_of("baber/piqa", 3)
    read = sum(
        len(f"Question: {row['goal']}\nAnswer: {row[choice]}")
        for row in rows
        for choice in ("sol1", "sol2")
    )
    assert of("piqa") == Work(3, "characters", pytest.approx(read))
    assert of("piqa", 1) == Work(1, "characters", pytest.approx(read / 3))
    # Five letters for one prompt: lm-eval runs it once.
    first, *_ = rows_of("tau/commonsense_qa", 1)
    assert (
        len(first["question"]) < of("commonsense_qa").amount / 3 < 2 * len(str(first))
    )
    assert of("gsm8k") == Work(3, "tokens", 3 * 256)


def test_the_lm_eval_edition_of_mbpp_plus_has_lm_evals_prompt() -> None:
    """Compared with lm-eval's own shots and template, read as text: importing them
    would fetch a metric and run code.
    """
    import ast

    import lm_eval
    import yaml
    from jinja2 import Environment

    from fcsd.evaluation.code.problems import Problem

    folder = Path(str(lm_eval.__file__)).parent / "tasks" / "mbpp"
    function = next(
        node
        for node in ast.parse((folder / "utils.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "list_fewshot_samples"
    )
    shots = ast.literal_eval(function.body[0].value)  # type: ignore[attr-defined]
    lines = [
        line
        for line in (folder / "mbpp_plus.yaml").read_text().splitlines()
        if line.startswith("doc_to_text")
    ]
    template = Environment(keep_trailing_newline=True).from_string(
        yaml.safe_load(lines[0])["doc_to_text"]
    )
    document = {
        "prompt": "Do it.",
        "test_list": ["assert f(1)", "assert f(2)", "assert f(3)"],
    }
    expected = "".join(
        template.render(**shot) + shot["code"] + "\n[DONE]\n\n" for shot in shots
    )
    row = task("paper11", "mbpp_plus_lmeval")
    made = Problem("1", "Do it.", "", (), tuple(document["test_list"])).text(
        row.prompt_template or ""
    )
    assert made + "\n" == expected + template.render(**document)
    assert (row.stop, row.max_new_tokens, row.tests, row.headline) == (
        ["[DONE]"], 256, "visible", False,
    )  # fmt: skip


NAMES = {
    "arc_easy": "allenai/ai2_arc", "arc_challenge": "allenai/ai2_arc", "piqa": "baber/piqa",
    "hellaswag": "Rowan/hellaswag", "commonsense_qa": "tau/commonsense_qa", "winogrande": "allenai/winogrande",
    "openbookqa": "allenai/openbookqa", "gsm8k": "openai/gsm8k", "mmlu": "cais/mmlu", "boolq": "boolq", "rte": "rte",
    "sciq": "allenai/sciq",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_column_that_is_missing_or_of_the_wrong_type_is_named(name: str) -> None:
    rows, columns = rows_of(NAMES[name], 4), columns_of(name, load_suite("tiny"))
    assert columns
    check_rows(name, columns, rows, "x (test)")
    for column in columns:
        lacking, wrong = copy.deepcopy(rows), copy.deepcopy(rows)
        for row in lacking:
            del row[column]
        with user_error(
            f"task {name}: x .test.: no column '{column}'; it needs .*{column}"
        ):
            check_rows(name, columns, lacking, "x (test)")
        for value in (None, 7.5, True):
            wrong[2][column] = value
            with user_error(rf"x \(test\), row 2: {column} must be .*, got {value}"):
                check_rows(name, columns, wrong, "x (test)")


def test_an_answer_that_is_none_of_the_choices_is_named() -> None:
    rows = rows_of("allenai/ai2_arc", 2)
    rows[1]["answerKey"] = "E"
    with user_error("row 1: answerKey 'E' is none of the labels 1, 2, 3, 4"):
        check_rows("arc_easy", columns_of("arc_easy", load_suite("paper11")), rows, "x")


def test_more_shots_than_rows_are_refused(tmp_path: Path) -> None:
    row = task("camoe9", "arc_challenge")
    rows = rows_of("allenai/ai2_arc", 24)
    config = {"train": rows, "validation": rows[:1], "test": rows[:2]}
    write_repository(tmp_path / row.dataset, {"ARC-Challenge": config})
    with user_error(r"task arc_challenge: 25 shots, but .* \(train\) has 24 rows"):
        load_task(row, SuiteConfig(name="s", tasks=[row]), tmp_path, tiny_tokenizer())
