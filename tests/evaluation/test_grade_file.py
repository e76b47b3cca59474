"""`fcsd evaluate --samples`: samples from a file, graded by our scorer, by lm-eval, and
by a stand-in for EvalPlus.
"""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fcsd.cli.main import main
from fcsd.evaluation.code.problems import read_problems
from fcsd.evaluation.code.programs import programs_of
from fcsd.evaluation.config import SampleFile, SuiteConfig
from fcsd.evaluation.grade_file import score_file
from fcsd.evaluation.results import read_result
from fcsd.evaluation.scores import compare
from fcsd.evaluation.suites import chosen_suite, load_suite
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.evaluation.rows import write_root
from tests.reference.tiny import tiny_model
from tests.support import command_words, evaluate, run_command, user_error

RIGHT = [f"def mul{i}(a, b):\n    return a * b + {i}\n" for i in range(3)]
BASE_ONLY = [
    f"def mul{i}(a, b):\n    return a * b + {i} if a >= 0 else 0\n" for i in range(3)
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_root(tmp_path_factory.mktemp("ready"))


def lines(path: Path, *samples: Any) -> Path:
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


def graded(
    samples: Path, dataset: str | None, data_root: Path, **options: Any
) -> dict[str, Any]:
    return score_file(
        SampleFile(samples=samples, dataset=dataset, data_root=data_root, **options)
    )


def test_solutions_are_graded_and_the_result_can_be_compared(
    root: Path, tmp_path: Path
) -> None:
    ids = ("Mbpp/1000", "1001", 1002)  # EvalPlus's form of the id, and the Hub's
    both = []
    for name, programs in (
        ("a", RIGHT),
        ("b", [RIGHT[0], BASE_ONLY[1], "def mul2(a, b): return None\n"]),
    ):
        file = lines(
            tmp_path / f"{name}.jsonl",
            *(
                {"task_id": i, "solution": p}
                for i, p in zip(ids, programs, strict=True)
            ),
        )
        graded(file, "mbpp_plus", root, output=tmp_path / name)
        result, samples = read_result(tmp_path / name)
        both.append({"result": result, "samples": samples})
    task = both[1]["result"]["tasks"]["mbpp_plus"]
    assert (task["value"], task["base"]["value"]) == (
        pytest.approx(1 / 3),
        pytest.approx(2 / 3),
    )
    assert task["outcomes"] == {"passed": 1, "wrong": 2}
    assert both[1]["result"]["sandbox"]["network_off"]
    row = compare(*both)["tasks"]["mbpp_plus"]
    assert (row["gained"], row["lost"]) == (0, 2)
    result = tmp_path / "b" / "results.json"
    result.write_text(result.read_text().replace('"wrong": 2', '"wrong": 1'))
    with user_error(r"differs from .* \(results\.json: "):
        read_result(tmp_path / "b")
    # graded again, it is whole
    graded(file, "mbpp_plus", root, output=tmp_path / "b")
    assert (
        read_result(tmp_path / "b")[0]["tasks"]["mbpp_plus"]["outcomes"]
        == (task["outcomes"])
    )


def test_several_samples_of_a_problem_give_pass_at_k(
    root: Path, tmp_path: Path
) -> None:
    samples = [
        {
            "task_id": f"HumanEval/{i}",
            "completion": f"    return a + b + {i if good else 99}\n",
        }
        for i, goods in enumerate([(1, 0, 0, 0, 0), (0, 0, 0, 0, 0), (1, 1, 1, 1, 1)])
        for good in goods
    ]
    result = graded(lines(tmp_path / "s.jsonl", *samples), "humaneval_plus", root)
    task = result["tasks"]["humaneval_plus"]
    assert task["pass_at_k"] == {"1": pytest.approx(0.4), "5": pytest.approx(2 / 3)}
    assert task["value"] == pytest.approx(0.4)
    assert task["outcomes"] == {"passed": 6, "wrong": 9}


def test_fewer_samples_than_pass_at_k_needs_are_refused_before_any_program_runs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {
        "task": "humaneval_plus", "kind": "code", "metric": "pass@2", "num_samples": 2, "temperature": 1.0,
        "dataset": "fcsd/humaneval_plus",
    }  # fmt: skip
    suite = tmp_path / "suite.yaml"
    shipped = load_suite("paper11").tasks
    row["dataset"] = next(r.dataset for r in shipped if r.task == "humaneval_plus")
    suite.write_text(yaml.safe_dump({"name": "s", "tasks": [row]}))
    samples = [
        {"task_id": f"HumanEval/{i}", "completion": f"    return a + b + {i}\n"}
        for i in (0, 0, 1, 2, 2)
    ]
    monkeypatch.setattr("fcsd.evaluation.grade_file.CodeScorer", None)
    with user_error(
        r"HumanEval/1 has 1 samples, but pass@2 of task humaneval_plus needs 2 of"
    ):
        graded(
            lines(tmp_path / "s.jsonl", *samples),
            "humaneval_plus",
            root,
            suite=str(suite),
        )


def test_what_evaluate_wrote_is_read_with_the_program_taken_from_the_completion(
    root: Path,
) -> None:
    problem, *_ = read_problems(root / "evalplus/humanevalplus")
    text = "```python\ndef add0(a, b):\n    return a + b\n```"
    sample = {"doc_id": "HumanEval/0", "completion": text}
    program = problem.prefix + text.split("\n", 1)[1][:-3]
    assert programs_of([("line 1", sample)], [problem])[0] == {"HumanEval/0": [program]}
    # as EvalPlus reads an answer to a question
    alone = program.removeprefix(problem.prefix).strip()
    assert programs_of([("line 1", sample)], [problem], chat=True)[0] == {
        "HumanEval/0": [alone]
    }
    thought = sample | {"completion": f"<think>```python\nno\n```</think>\n{text}"}
    assert programs_of([("line 1", thought)], [problem], thinking=True)[0] == {
        "HumanEval/0": [program]
    }


@pytest.mark.parametrize("chat_template", [False, True])
def test_programs_that_evaluate_wrote_are_compared_with_what_it_measured(
    chat_template: bool, root: Path, tmp_path: Path
) -> None:
    model = tiny_model(
        "qwen3_moe", vocab_size=512, max_position_embeddings=8192, num_hidden_layers=1
    )
    suite = chosen_suite(["mbpp_plus"], load_suite("paper11"))
    changes = {"max_new_tokens": 4, "chat_template": chat_template}
    suite.tasks[0] = suite.tasks[0].model_copy(update=changes)
    row = suite.tasks[0].model_dump(mode="json", exclude_unset=True)
    suite_file = tmp_path / "suite.yaml"
    suite_file.write_text(yaml.safe_dump({"name": "s", "tasks": [row]}))
    tokenizer = tiny_tokenizer()
    result, samples = evaluate(
        model, tokenizer, suite, data_root=root, batch_size=4, progress=False
    )
    file = lines(tmp_path / "s.jsonl", *samples["mbpp_plus"])
    graded(file, "mbpp_plus", root, output=tmp_path / "out", suite=str(suite_file))
    again, kept = read_result(tmp_path / "out")
    comparison = compare(
        {"result": result, "samples": samples}, {"result": again, "samples": kept}
    )
    assert comparison["tasks"]["mbpp_plus"]["delta"] == 0
    # Lines of another program are taken to have been asked without a template.
    others = [
        {"task_id": sample["doc_id"], "solution": ""} for sample in samples["mbpp_plus"]
    ]
    graded(
        lines(file, *others),
        "mbpp_plus",
        root,
        output=tmp_path / "out",
        suite=str(suite_file),
    )
    same = [
        sample["prompt_hash"] == other["prompt_hash"]
        for sample, other in zip(
            samples["mbpp_plus"],
            read_result(tmp_path / "out")[1]["mbpp_plus"],
            strict=True,
        )
    ]
    assert all(same) if not chat_template else not any(same)
    changed = [samples["mbpp_plus"][0] | {"doc_hash": "0"}, *samples["mbpp_plus"][1:]]
    with user_error(r"line 1: doc_hash belongs to another document than mbpp_plus's"):
        graded(lines(file, *changed), "mbpp_plus", root, suite=str(suite_file))


SAMPLE = '{"task_id": 1000, "solution": "x"}'
PACKED = gzip.compress(SAMPLE.encode(), mtime=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"s\.jsonl: holds no samples; a line is"),
        ("\n \n", r"holds no samples; a line is"),
        (SAMPLE.replace("1000", "7"), r"line 1: 7 is not a problem of this data set \(it has 1000, 1001, 1002\)"),
        (SAMPLE.replace("1000", '"Mbpp/7"'), r"line 1: 'Mbpp/7' is not a problem"),
        ('{"solution": "x"}', r"line 1: task_id: text or a number is needed, got None"),
        ('{"task_id": 1000}', r"line 1: no 'solution' \(a whole program\) and no 'completion'"),
        (SAMPLE.replace('"x"', "5"), r"line 1: solution: text is needed, got int"),
        (f"{SAMPLE}\n[]", r"line 2: a JSON object is needed, got list"),
        (SAMPLE[:-1], r"line 1: not valid JSON"),
        (SAMPLE, r"2 of 3 problems have no sample \(the first is 1001\);.*--partial"),
        (b"\xff\xfe", r"s\.jsonl: is not a \.jsonl or \.jsonl\.gz file of UTF-8 text"),
        (PACKED[:-9], r"s\.jsonl\.gz: is not a \.jsonl or \.jsonl\.gz file of UTF-8"),
    ],
)  # fmt: skip
def test_a_bad_file_of_samples_is_one_line(
    root: Path, tmp_path: Path, text: str | bytes, message: str
) -> None:
    path = tmp_path / ("s.jsonl.gz" if text == PACKED[:-9] else "s.jsonl")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with user_error(message):
        graded(path, "mbpp_plus", root)


def test_a_wrong_data_set_or_file_is_one_line(root: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "s.jsonl", {"task_id": 1000, "solution": "x"})
    with user_error(r"nothing\.jsonl: no such file"):
        graded(tmp_path / "nothing.jsonl", "mbpp_plus", root)
    for place, problem in (("folder", "is a folder"), ("pipe", "is a named pipe")):
        if place == "pipe":
            os.mkfifo(tmp_path / place)
        else:
            (tmp_path / place).mkdir()
        with user_error(f"{place}: {problem}, a"):
            graded(tmp_path / place, "mbpp_plus", root)
    with user_error(r"task mbpp_plus: .*no such folder; the data root must hold"):
        graded(path, "mbpp_plus", tmp_path)


def test_the_command_prints_base_and_plus_and_marks_a_partial_file(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "s.jsonl", {"task_id": 1000, "solution": BASE_ONLY[0]})
    words = command_words(
        "evaluate --samples", path, "--tasks mbpp_plus --data-root", root
    )
    assert main(words) == 2
    assert "2 of 3 problems have no sample" in capsys.readouterr().err
    assert main([*words, "--partial"]) == 0
    out = capsys.readouterr().out
    assert (
        "| mbpp_plus " in out and "| mbpp_plus (base tests) " in out and "1 of 3" in out
    )
    assert "a quick look, not a result" in out


# ----------------------------------------------------------------------------------
# answers that lm-eval grades

# The invented rows of GSM8K: Ann has i pens and buys 3. The score of each answer by
# GSM8K's rules, flexible-extract (the last number, up to "Question:") and strict-match
# (the number behind ####):
ANSWERS = [
    ("She has 3.", 1, 0),
    ("1 + 3\n#### 4\n\nQuestion: Bob has 70 pens", 1, 1),
    ("#### 7 or 5?", 1, 0),
]


def limited(folder: Path, **limits: int) -> str:
    """Write a suite of rows of paper11 with limits of their own."""
    rows = [
        row.model_dump(mode="json", exclude_unset=True) | {"limit": limits[row.task]}
        for row in load_suite("paper11").tasks
        if row.task in limits
    ]
    path = folder / "limited.yaml"
    path.write_text(yaml.safe_dump({"name": "limited", "tasks": rows}))
    return str(path)


def test_a_row_with_a_limit_asks_for_its_first_items_alone(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the second of three items no sample is needed; a sample of the third is not
    graded; fewer than the limit are refused as ever.
    """
    suite = limited(tmp_path, gsm8k=1, mbpp_plus=1)
    words = ["evaluate", "--suite", suite, "--data-root", str(root), "--samples"]
    programs = [
        {"task": "mbpp_plus", "task_id": number, "solution": RIGHT[number - 1000]}
        for number in (1000, 1002)
    ]
    said = [
        {"task": "gsm8k", "doc_id": number, "completion": text}
        for number, text in ((0, "#### 3"), (2, "#### 0"))
    ]
    path = lines(tmp_path / "s.jsonl", *programs, *said)
    assert main([*words, str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    for row in result["tasks"].values():
        assert (row["num_items"], row["num_items_total"], row["value"]) == (1, 3, 1)
    assert main([*words, str(path)]) == 0
    out = capsys.readouterr().out
    assert out.count("1 of 3") >= 2 and "quick look" not in out
    for name, kept, message in (
        ("a", [programs[1]], "holds no sample of task mbpp_plus"),
        ("b", [said[1]], "task gsm8k: the file holds no answer to it"),
    ):
        path = lines(tmp_path / f"{name}.jsonl", *kept)
        assert main([*words, str(path)]) == 2
        assert message in capsys.readouterr().err
    suite = limited(tmp_path, gsm8k=2, mbpp_plus=2)
    for name, kept, message in (
        ("c", programs, "1 of 2 problems have no sample (the first is 1001)"),
        ("d", said, "1 of 2 documents have no answer (the first is gsm8k/1)"),
    ):
        path = lines(tmp_path / f"{name}.jsonl", *kept)
        assert main([*words, str(path)]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def answers(path: Path, texts: Any = None, **more: Any) -> Path:
    texts = [text for text, *_ in ANSWERS] if texts is None else texts
    return lines(
        path,
        *({"doc_id": i, "completion": text} | more for i, text in enumerate(texts)),
    )


def test_answers_are_graded_by_lm_evals_filters_and_metric(
    root: Path, tmp_path: Path
) -> None:
    for suite, column in (("paper11", 1), ("camoe9", 2)):
        graded(
            answers(tmp_path / "a.jsonl"),
            "gsm8k",
            root,
            output=tmp_path / suite,
            suite=suite,
        )
        result, kept = read_result(tmp_path / suite)
        assert [sample["score"] for sample in kept["gsm8k"]] == [
            answer[column] for answer in ANSWERS
        ]
        assert result["tasks"]["gsm8k"]["num_fewshot"] == 5 and result["complete"]
    same = graded(
        answers(tmp_path / "a.jsonl", task="gsm8k"), None, root
    )  # the lines say it
    assert same["tasks"]["gsm8k"]["value"] == 1


def test_what_a_model_said_is_graded_as_when_it_was_evaluated_and_compared_with_it(
    root: Path, tmp_path: Path
) -> None:
    model = tiny_model(
        "qwen3_moe", vocab_size=512, max_position_embeddings=8192, num_hidden_layers=1
    )
    suite = load_suite("paper11")
    suite = chosen_suite(["gsm8k"], suite)
    suite.tasks[0] = suite.tasks[0].model_copy(update={"max_new_tokens": 6})
    result, samples = evaluate(
        model, tiny_tokenizer(), suite, data_root=root, batch_size=4, progress=False
    )
    file = lines(tmp_path / "s.jsonl", *samples["gsm8k"])
    graded(file, "gsm8k", root, output=tmp_path / "out")
    again, kept = read_result(tmp_path / "out")
    assert kept["gsm8k"] == samples["gsm8k"]
    comparison = compare(
        {"result": result, "samples": samples}, {"result": again, "samples": kept}
    )
    assert comparison["tasks"]["gsm8k"]["delta"] == 0
    # Without numbers, by the hashes that lm-eval writes, in any order.
    named = [
        {key: s[key] for key in ("prompt_hash", "completion")}
        for s in reversed(samples["gsm8k"])
    ]
    graded(lines(file, *named), "gsm8k", root, output=tmp_path / "out")
    assert read_result(tmp_path / "out")[1] == kept


def test_several_answers_count_by_their_mean_and_thoughts_are_cut_off(
    root: Path, tmp_path: Path
) -> None:
    texts = [f"<think>#### {i}, no, 99</think>\n#### {i + 3}" for i in range(3)]
    rows = [
        {
            "doc_id": i,
            "completions": [text, f"<think>It is {i + 3}.</think>I cannot say."],
        }
        for i, text in enumerate(texts)
    ]
    options: dict[str, Any] = {"data_root": root, "suite": "camoe9"}
    graded(
        lines(tmp_path / "s.jsonl", *rows),
        "gsm8k",
        output=tmp_path / "out",
        thinking=True,
        **options,
    )
    result, kept = read_result(tmp_path / "out")
    assert result["tasks"]["gsm8k"]["value"] == 0.5
    assert kept["gsm8k"][1]["scores"] == [1, 0]
    assert kept["gsm8k"][1]["completions"][0] == "#### 4"
    assert (
        graded(answers(tmp_path / "u.jsonl", texts), "gsm8k", **options)["tasks"][
            "gsm8k"
        ]["value"]
        == 0
    )


def test_members_of_a_group_are_named_in_the_line_or_its_number(
    root: Path, tmp_path: Path
) -> None:
    """Two tasks of our own, whose answer is right if it is the question's number."""
    own = tmp_path / "own"
    own.mkdir()
    leaf = {
        "dataset_path": "openai/gsm8k", "dataset_name": "main", "output_type": "generate_until", "test_split": "test",
        "doc_to_text": "{{question}}", "metric_list": [{"metric": "exact_match"}], "generation_kwargs": {"until": []},
    }  # fmt: skip
    for name, target in (("low", "0"), ("high", "{{answer.split('#### ')[1]}}")):
        (own / f"{name}.yaml").write_text(
            yaml.safe_dump(leaf | {"task": name, "doc_to_target": target})
        )
    (own / "both.yaml").write_text(
        yaml.safe_dump({"group": "both", "task": ["high", "low"]})
    )
    rows = [{"doc_id": f"low/{i}", "completion": "0"} for i in range(3)]
    rows += [{"task": "high", "doc_id": i, "completion": str(i + 3)} for i in (2, 0)]
    file = lines(tmp_path / "s.jsonl", *rows)
    options: dict[str, Any] = {"data_root": root, "include_path": own}
    with user_error(
        r"1 of 6 documents have no answer \(the first is high/1\); .*--partial"
    ):
        graded(file, "both", **options)
    task = graded(file, "both", partial=True, **options)["tasks"]["both"]
    assert (task["value"], task["num_items"], task["num_items_total"]) == (1, 5, 6)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"doc_id": 3, "completion": "x"}, "line 1: 3 is not a document of gsm8k"),
        ({"doc_id": "x", "completion": "x"}, r"line 1: doc_id: a number \(or member/number in a group\) is needed"),
        ({"doc_hash": "0" * 64, "completion": "x"}, "line 1: '0000.* is not a document of gsm8k"),
        ({"completion": "x"}, "line 1: needs doc_id, doc_hash or prompt_hash to identify the document"),
        ({"doc_id": 0}, r"line 1: no 'completion' \(an answer\) and no 'completions' \(several\)"),
        ({"doc_id": 0, "completion": 5}, "line 1: completion: text is needed, got int"),
        ({"doc_id": 0, "completion": "x"}, r"task gsm8k: 2 of 3 documents have no answer \(the first is gsm8k/1\)"),
        ({"doc_id": 0, "completion": "x", "task": "other"}, "task gsm8k: the file holds no answer to it"),
        ({"doc_id": 0, "completion": "x", "task": ["x"]}, r"line 1: task: text is needed, got \['x'\]"),
        ({"doc_id": "9" * 5000, "completion": "x"}, "line 1: doc_id: a number .* is needed"),
    ],
)  # fmt: skip
def test_a_bad_file_of_answers_is_one_line(
    root: Path, tmp_path: Path, row: Any, message: str
) -> None:
    with user_error(message):
        graded(lines(tmp_path / "s.jsonl", row), "gsm8k", root)


def test_every_line_of_an_item_must_belong_to_it_and_to_one_prompt(
    root: Path, tmp_path: Path
) -> None:
    file = tmp_path / "s.jsonl"
    first = {"doc_id": 0, "completion": "x", "prompt_hash": "a"}
    for key, value, message in (
        (
            "doc_hash",
            "0",
            "line 2: doc_hash belongs to another document than gsm8k's 0",
        ),
        ("prompt_hash", "b", "line 2: prompt_hash is not that of the lines before"),
        ("prompt_hash", 5, "line 2: prompt_hash: text is needed, got 5"),
    ):
        lines(file, first, first | {key: value})
        with user_error(message):
            graded(file, "gsm8k", root, partial=True)
    program = {"task_id": 1000, "solution": RIGHT[0], "prompt_hash": "a"}
    lines(file, program, program | {"prompt_hash": "b"})
    with user_error(
        "line 2: prompt_hash is not that of the lines before for mbpp_plus"
    ):
        graded(file, "mbpp_plus", root, partial=True)


def test_answers_to_other_data_or_to_tasks_without_text_are_refused(
    root: Path, tmp_path: Path
) -> None:
    other = answers(tmp_path / "a.jsonl", doc_hash="0" * 64)
    with user_error(
        r"a\.jsonl, line 1: doc_hash belongs to another document than gsm8k's 0: the"
        r" data set"
    ):
        graded(other, "gsm8k", root)
    uneven = lines(
        other, *({"doc_id": i, "completions": ["1"] * (1 + i % 2)} for i in range(3))
    )
    with user_error(r"1 to 2 answers per document; it needs the same number for every"):
        graded(uneven, "gsm8k", root)
    with user_error("task piqa: is scored by likelihood, which a file of answers does"):
        graded(answers(tmp_path / "p.jsonl"), "piqa", root)
    with user_error(r"line 1: names no task; add a key 'task', or give --tasks"):
        graded(answers(tmp_path / "n.jsonl"), None, root)


def test_one_file_may_hold_programs_and_answers(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"task": "gsm8k", "doc_id": i, "completion": text}
        for i, (text, *_) in enumerate(ANSWERS)
    ]
    rows += [
        {"task": "mbpp_plus", "task_id": 1000 + i, "solution": text}
        for i, text in enumerate(RIGHT)
    ]
    file = lines(tmp_path / "s.jsonl", *rows)
    assert (
        run_command(
            "evaluate --samples", file, "--data-root", root, "--output", tmp_path / "o"
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "| gsm8k " in out and "| mbpp_plus (base tests) " in out
    result, _ = read_result(tmp_path / "o")
    assert result["mean"] == 1 and [row["task"] for row in result["settings"]["rows"]] == [
        "gsm8k", "mbpp_plus",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a/model"], "MODEL has no meaning with --samples, which runs no model"),
        (["--batch-size", "4"], "--batch-size has no meaning with --samples"),
        (["--server", "http://x"], "--server has no meaning with --samples"),
    ],
)
def test_what_a_model_needs_is_refused_beside_a_file_of_samples(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = lines(tmp_path / "s.jsonl", {"task_id": 1000, "solution": ""})
    assert main(["evaluate", *words, "--samples", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_what_a_file_of_samples_needs_is_refused_without_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["evaluate", "a/model", "--output", "o", "--partial"]) == 2
    assert "--partial has no meaning without --samples" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------
# thoughts


@pytest.mark.parametrize("thinking", [True, None])
def test_a_models_thoughts_are_cut_off_before_an_answer_is_graded(
    root: Path, thinking: bool | None
) -> None:
    """The thoughts contain a wrong number and a wrong program; of two programs, the
    first in the text would count.
    """
    model, tokenizer = (
        tiny_model("qwen3_moe", vocab_size=512, max_position_embeddings=8192),
        tiny_tokenizer(),
    )
    wrong, right = "def mul0(a, b): return 99", "def mul0(a, b): return a * b"
    said = (
        f"<think>#### 99\n```python\n{wrong}\n```\n</think>\n####"
        f" 3\n```python\n{right}\n```\n"
    )
    ids = torch.tensor(tokenizer(said, add_special_tokens=False)["input_ids"])
    assert "</think>" in tokenizer.decode(ids)
    model.generate = lambda input_ids, **_: torch.cat(  # type: ignore[method-assign,assignment]
        [input_ids, ids.expand(len(input_ids), -1)], dim=1
    )
    how = {"chat_template": True, "thinking": thinking}
    chosen = (
        chosen_suite(["gsm8k"], load_suite("camoe9")).tasks
        + chosen_suite(["mbpp_plus"], load_suite("paper11")).tasks
    )
    rows = [row.model_dump(mode="json", exclude_unset=True) | how for row in chosen]
    suite = SuiteConfig.model_validate({"name": "own", "tasks": rows})
    result, samples = evaluate(
        model, tokenizer, suite, data_root=root, batch_size=2, limit=1, progress=False
    )
    for task in ("gsm8k", "mbpp_plus"):
        (sample,) = samples[task]
        assert sample["score"] == 1 and "99" not in sample["completion"]
        assert sample["completion"].startswith("#### 3")
        # Those that nobody asked for are counted.
        unasked = result["tasks"][task].get("answers_with_thoughts", 0)
        assert unasked == (0 if thinking else 1)
