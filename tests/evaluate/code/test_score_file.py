"""`fcsd score`: samples from a file, by our scorer and by a stand-in for EvalPlus."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fcsd.cli.main import main
from fcsd.errors import UserError
from fcsd.evaluate.code.problems import read_problems
from fcsd.evaluate.code.score_file import read_samples, score_file
from fcsd.evaluate.results import read_result
from fcsd.evaluate.scores import compare
from tests.evaluate.rows import write_root

RIGHT = [f"def mul{i}(a, b):\n    return a * b + {i}\n" for i in range(3)]
BASE_ONLY = [f"def mul{i}(a, b):\n    return a * b + {i} if a >= 0 else 0\n" for i in range(3)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_root(tmp_path_factory.mktemp("ready"))


def lines(path: Path, *samples: Any) -> Path:
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


def test_solutions_are_graded_and_the_result_can_be_compared(root: Path, tmp_path: Path) -> None:
    ids = ("Mbpp/1000", "1001", 1002)  # EvalPlus's form of the id, and the Hub's
    both = []
    for name, programs in (("a", RIGHT), ("b", [RIGHT[0], BASE_ONLY[1], "def mul2(a, b): return None\n"])):
        file = lines(
            tmp_path / f"{name}.jsonl",
            *({"task_id": i, "solution": p} for i, p in zip(ids, programs, strict=True)),
        )
        score_file(file, "mbpp_plus", data_root=root, output=tmp_path / name, progress=False)
        result, samples = read_result(tmp_path / name)
        both.append({"result": result, "samples": samples})
    task = both[1]["result"]["tasks"]["mbpp_plus"]
    assert (task["value"], task["base"]["value"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert task["outcomes"] == {"passed": 1, "wrong": 2} and both[1]["result"]["sandbox"]["network_off"]
    row = compare(*both)["tasks"]["mbpp_plus"]
    assert (row["gained"], row["lost"]) == (0, 2)


def test_several_samples_of_a_problem_give_pass_at_k(root: Path, tmp_path: Path) -> None:
    samples = [
        {"task_id": f"HumanEval/{i}", "completion": f"    return a + b + {i if good else 99}\n"}
        for i, goods in enumerate([(1, 0, 0, 0, 0), (0, 0, 0, 0, 0), (1, 1, 1, 1, 1)])
        for good in goods
    ]
    result = score_file(
        lines(tmp_path / "s.jsonl", *samples), "humaneval_plus", data_root=root, progress=False
    )
    task = result["tasks"]["humaneval_plus"]
    assert task["pass_at_k"] == {"1": pytest.approx(0.4), "5": pytest.approx(2 / 3)}
    assert task["value"] == pytest.approx(0.4) and task["outcomes"] == {"passed": 6, "wrong": 9}


def test_what_evaluate_wrote_is_read_with_the_program_taken_from_the_completion(root: Path) -> None:
    (problem, *_) = read_problems(root / "evalplus/humanevalplus")
    text = "```python\ndef add0(a, b):\n    return a + b\n```"
    path = lines(root / "own.jsonl", {"doc_id": "HumanEval/0", "completion": text})
    assert read_samples(path, [problem]) == {"HumanEval/0": [problem.prefix + text.split("\n", 1)[1][:-3]]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"s\.jsonl: holds no samples"),
        ("\n \n", r"holds no samples"),
        (
            '{"task_id": 7, "solution": "x"}',
            r"line 1: 7 is not a problem of this data set \(it has 1000, 1001, 1002\)",
        ),
        ('{"task_id": "Mbpp/7", "solution": "x"}', r"line 1: 'Mbpp/7' is not a problem"),
        ('{"solution": "x"}', r"line 1: task_id: text or a number is needed, got None"),
        ('{"task_id": 1000}', r"line 1: no 'solution' \(a whole program\) and no 'completion'"),
        ('{"task_id": 1000, "solution": 5}', r"line 1: solution: text is needed, got int"),
        ('{"task_id": 1000, "solution": "x"}\n[]', r"line 2: a JSON object is needed, got list"),
        ('{"task_id": 1000, "solution": "x"', r"line 1: not valid JSON"),
        (
            '{"task_id": 1000, "solution": "x"}',
            r"2 of 3 problems have no sample \(the first is 1001\);.*--partial",
        ),
    ],
)
def test_a_bad_file_of_samples_is_one_line(root: Path, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        score_file(path, "mbpp_plus", data_root=root, progress=False)


def test_a_wrong_data_set_or_file_is_one_line(root: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "s.jsonl", {"task_id": 1000, "solution": "x"})
    with pytest.raises(
        UserError, match=r"no such code task; did you mean 'mbpp_plus'\? \(or give the path of a data set"
    ):
        score_file(path, "mbpp_pls", data_root=root)
    with pytest.raises(UserError, match=r"nothing\.jsonl: no such file"):
        score_file(tmp_path / "nothing.jsonl", "mbpp_plus", data_root=root)
    with pytest.raises(UserError, match=r"task mbpp_plus: .*no such folder; the data root must hold"):
        score_file(path, "mbpp_plus", data_root=tmp_path)


def test_the_command_prints_base_and_plus_and_marks_a_partial_file(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lines(tmp_path / "s.jsonl", {"task_id": 1000, "solution": BASE_ONLY[0]})
    words = ["score", str(path), "--dataset", "mbpp_plus", "--data-root", str(root)]
    assert main(words) == 2
    assert "2 of 3 problems have no sample" in capsys.readouterr().err
    assert main([*words, "--partial"]) == 0
    out = capsys.readouterr().out
    assert "| mbpp_plus " in out and "| mbpp_plus (base tests) " in out and "1 of 3" in out
    assert "a quick look, not a result" in out


# What evalplus 0.3.1 leaves beside the samples, by a module of its name: passes what says "right".
STAND_IN = """
import json, os, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
samples = [json.loads(line) for line in open(words["--samples"])]
assert words["--dataset"] == "mbpp" and os.environ["MBPP_OVERRIDE_PATH"].endswith("data.jsonl.gz")
assert "EVALPLUS_TIMEOUT_PER_TASK" not in os.environ
if any("crash" in s["solution"] for s in samples): sys.exit("no such problem")
found = {}
for s in samples:
    plus = "pass" if "right" in s["solution"] else "timeout"
    found.setdefault(s["task_id"], []).append({"task_id": s["task_id"], "solution": s["solution"],
        "base_status": "fail" if "bad" in s["solution"] else "pass", "plus_status": plus})
json.dump({"eval": found}, open(words["--samples"].replace(".jsonl", "_eval_results.json"), "w"))
"""


@pytest.fixture
def evalplus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib/evalplus").mkdir(parents=True)
    (tmp_path / "lib/evalplus/__init__.py").write_text("")
    (tmp_path / "lib/evalplus/evaluate.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    monkeypatch.setenv("EVALPLUS_TIMEOUT_PER_TASK", "5")
    yield
    sys.modules.pop("evalplus", None)


def test_evalplus_grades_in_a_process_of_its_own(root: Path, tmp_path: Path, evalplus: None) -> None:
    texts = ["right", "slow", "right but bad"]
    path = lines(tmp_path / "s.jsonl", *({"task_id": 1000 + i, "solution": t} for i, t in enumerate(texts)))
    options: dict[str, Any] = {
        "data_root": root, "scorer": "evalplus", "evalplus_data": tmp_path / "data.jsonl.gz", "progress": False,
    }  # fmt: skip
    with pytest.raises(UserError, match=r"EvalPlus runs programs without our sandbox.*--allow-weak-sandbox"):
        score_file(path, "mbpp_plus", **options)
    options["allow_weak_sandbox"] = True
    task = score_file(path, "mbpp_plus", **options)["tasks"]["mbpp_plus"]
    assert task["outcomes"] == {"passed": 1, "timeout": 1, "wrong": 1}
    assert (task["value"], task["base"]["value"]) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    with pytest.raises(UserError, match="grades mbpp_plus and humaneval_plus, not mbpp_plus_lmeval"):
        score_file(path, "mbpp_plus_lmeval", **options)
    lines(path, *({"task_id": 1000 + i, "solution": "crash"} for i in range(3)))
    with pytest.raises(RuntimeError, match="EvalPlus failed with status 1: no such problem"):
        score_file(path, "mbpp_plus", **options)


def test_without_the_package_the_error_says_what_to_install(root: Path, tmp_path: Path) -> None:
    import importlib.util

    if importlib.util.find_spec("evalplus") is not None:
        pytest.skip("evalplus is installed")
    path = lines(tmp_path / "s.jsonl", *({"task_id": 1000 + i, "solution": "x"} for i in range(3)))
    with pytest.raises(UserError, match=r"not installed; pip install 'fcsd\[evalplus\]'"):
        score_file(path, "mbpp_plus", data_root=root, scorer="evalplus")
