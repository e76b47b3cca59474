"""A data root with a few invented rows for every benchmark of the shipped suites, in
the schema and the layout of its repository on the Hub (research: the columns that
lm-eval 0.4.13 reads)."""

import json
from pathlib import Path
from typing import Any

import yaml

Rows = list[dict[str, Any]]
TRAIN = 26  # 25 shots, and one more


def write_repository(folder: Path, configs: dict[str, dict[str, Rows]]) -> None:
    """configs: configuration -> split -> rows, as jsonl files that the README's front
    matter names.
    """
    entries = []
    for config, splits in configs.items():
        files = []
        for split, rows in splits.items():
            path = folder / config / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
            )
            files.append({"split": split, "path": f"{config}/{split}.jsonl"})
        entries.append({"config_name": config, "data_files": files})
    (folder / "README.md").write_text(
        f"---\n{yaml.safe_dump({'configs': entries})}---\n", encoding="utf-8"
    )


def mmlu_subjects() -> list[str]:
    """Return the 57 configurations that lm-eval's group reads."""
    import lm_eval

    folder = Path(str(lm_eval.__file__)).parent / "tasks" / "mmlu" / "default"
    files = folder.glob("mmlu_*.yaml")
    return [yaml.safe_load(path.read_text())["dataset_name"] for path in sorted(files)]


def _labelled(texts: list[str], labels: str) -> dict[str, list[str]]:
    return {"text": texts, "label": list(labels)}


def rows_of(dataset: str, count: int) -> Rows:
    """`count` invented rows of a data set; those of MMLU for the subject `s`."""
    made: dict[str, Any] = {
        "baber/piqa": lambda i: {
            "goal": f"dry cup {i}", "sol1": "wipe it", "sol2": "wet it again", "label": i % 2},
        "allenai/ai2_arc": lambda i: {
            "id": f"a{i}", "question": f"Which is an animal ({i})?", "answerKey": "2" if i % 2 else "B",
            "choices": _labelled(["stone", "horse", "chair", "cloud"], "1234" if i % 2 else "ABCD")},
        "Rowan/hellaswag": lambda i: {
            "ind": i, "activity_label": "Making tea", "ctx_a": "She fills a kettle.", "ctx_b": "she",
            "ctx": "She fills a kettle. she", "endings": ["waits.", "eats it.", "flies [step] off.", "sings."],
            "source_id": f"x~{i}", "split": "train", "split_type": "indomain", "label": str(i % 4)},
        "tau/commonsense_qa": lambda i: {
            "id": f"c{i}", "question": f"Where is milk cold ({i})?", "question_concept": "milk", "answerKey": "B",
            "choices": _labelled(["oven", "fridge", "roof", "shoe", "pond"], "ABCDE")},
        "allenai/winogrande": lambda i: {
            "sentence": f"The cup was not in the box as the _ was big ({i}).", "option1": "cup", "option2": "box",
            "answer": str(1 + i % 2)},
        "allenai/openbookqa": lambda i: {
            "id": f"o{i}", "question_stem": f"Ice melts when it ({i})", "answerKey": " A" if i % 2 else "A",
            "choices": _labelled(["is hot", "is red", "is sold", "is named"], "ABCD")},
        "openai/gsm8k": lambda i: {
            "question": f"Ann has {i} pens and buys 3. How many?", "answer": f"{i}+3=<<{i}+3={i + 3}>>\n#### {i + 3}"},
        "cais/mmlu": lambda i: {
            "question": f"what is {i}+{i}?", "subject": "s", "choices": [str(2 * i + k) for k in range(4)],
            "answer": i % 4},
        "boolq": lambda i: {
            "question": f"is water wet ({i})", "passage": "Water is a liquid.", "idx": i, "label": i % 2},
        "rte": lambda i: {
            "sentence1": "A cat sat.", "sentence2": f"An animal sat ({i}).", "label": i % 2, "idx": i},
        "allenai/sciq": lambda i: {
            "question": f"What do plants need ({i})?", "distractor1": "gold", "distractor2": "ink",
            "distractor3": "music", "correct_answer": "light", "support": "Plants grow with light."},
        "evalplus/humanevalplus": humaneval_row,
        "evalplus/mbppplus": mbpp_row,
    }  # fmt: skip
    return [made[dataset](index) for index in range(count)]


ASSERTION = """import numpy as np

def assertion(out, exp, atol):
    assert out == exp
"""


def humaneval_row(i: int) -> dict[str, Any]:
    """Return a row in EvalPlus's form; its number of base inputs is that of HumanEval's
    problem of the same number.
    """
    inputs = [[n, 1] for n in range(8)]
    return {
        "task_id": f"HumanEval/{i}",
        "prompt": f'def add{i}(a, b):\n    """ Return a plus b plus {i}. """\n',
        "canonical_solution": f"    return a + b + {i}\n",
        "entry_point": f"add{i}",
        "test": (
            f"{ASSERTION}\ndef check(candidate):\n    inputs = {inputs}\n    results ="
            f" {[n + 1 + i for n in range(8)]}\n    for i, (inp, exp) in"
            " enumerate(zip(inputs, results)):\n        assertion(candidate(*inp),"
            " exp, 0)\n"
        ),
    }


def mbpp_row(i: int) -> dict[str, Any]:
    """Return a row in EvalPlus's form with three base inputs and one more; visible
    tests see the base inputs only.
    """
    inputs = [[1, 2], [3, 3], [0, 3], [-1, 5]]
    right = [a * b + i for a, b in inputs]
    shown = [
        f"assert mul{i}({a}, {b}) == {r}"
        for (a, b), r in zip(inputs[:3], right, strict=False)
    ]
    return {
        "task_id": 1000 + i,
        "code": f"def mul{i}(a, b):\n    return a * b + {i}\n",
        "prompt": f"Write a function to multiply two numbers and add {i}.",
        "source_file": "none",
        "test_imports": [],
        "test_list": shown,
        "test": (
            f"{ASSERTION}\ninputs = {inputs}\nresults = {right}\nfor i, (inp, exp) in"
            f" enumerate(zip(inputs, results)):\n    assertion(mul{i}(*inp), exp, 0)\n"
        ),
    }


def write_root(root: Path, count: int = 3) -> Path:
    """Write all data sets of the shipped suites, with `count` graded rows each, and
    return their root.
    """

    def splits(name: str, *graded: str, train: str = "train") -> dict[str, Rows]:
        return {
            train: rows_of(name, TRAIN),
            **{split: rows_of(name, count) for split in graded},
        }

    for name, config, graded in (
        ("baber/piqa", "default", "validation"),
        ("Rowan/hellaswag", "default", "validation"),
        ("tau/commonsense_qa", "default", "validation"),
        ("allenai/winogrande", "winogrande_xl", "validation"),
        ("allenai/openbookqa", "main", "test"),
        ("openai/gsm8k", "main", "test"),
        ("allenai/sciq", "default", "test"),
    ):
        write_repository(
            root / name, {config: splits(name, graded, *({"validation"} - {graded}))}
        )
    arc = splits("allenai/ai2_arc", "test", "validation")
    write_repository(root / "allenai/ai2_arc", {"ARC-Easy": arc, "ARC-Challenge": arc})
    write_repository(root / "aps/super_glue", {"boolq": splits("boolq", "validation")})
    write_repository(root / "nyu-mll/glue", {"rte": splits("rte", "validation")})
    mmlu = {
        "test": rows_of("cais/mmlu", 2),
        "validation": rows_of("cais/mmlu", 1),
        "dev": rows_of("cais/mmlu", 5),
    }
    write_repository(root / "cais/mmlu", dict.fromkeys(mmlu_subjects(), mmlu))
    for name in ("evalplus/humanevalplus", "evalplus/mbppplus"):
        write_repository(root / name, {"default": {"test": rows_of(name, count)}})
    return root
