"""Invented rows in the columns of real data sets: what a rehearsal reads where the recipe names the real ones.

Columns and types are those of the hub repositories, checked through lm-eval 0.4.13 for the benchmarks; the content
is made up here and holds nothing of theirs. A data set that is not in these tables has the columns that its recipe
names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

_ROLES = {"user": "human", "assistant": "gpt", "system": "system"}  # ShareGPT's words
_LETTERS = ["A", "B", "C", "D", "E"]


def conversation(index: int) -> list[dict[str, str]]:
    """Make one or two exchanges of a few words; every fourth begins with a system message."""
    system = [{"role": "system", "content": "be brief"}] if index % 4 == 3 else []
    first = [
        {"role": "user", "content": f"{index} + {index % 7}?"},
        {"role": "assistant", "content": f"it is {index + index % 7}"},
    ]
    second = [{"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}]
    return system + first + (second if index % 3 == 2 else [])


def _genqa(index: int) -> Row:
    return {
        "text": [message for message in conversation(index) if message["role"] != "system"],
        "prompt": "Write a question and its answer.",
        "template": "{question} {answer}",
        "idx": index,
        "category": "arithmetic",
    }


def _infinity_instruct(index: int) -> Row:
    turns = [{"from": _ROLES[turn["role"]], "value": turn["content"]} for turn in conversation(index)]
    return {"id": index, "conversations": turns, "label": "{}", "langdetect": "en", "source": "rehearsal"}


def _question(index: int) -> str:
    """Make a question long enough (more than 13 words) for the overlap of test items to be looked for."""
    return (
        f"A baker has {index + 3} trays with {index + 2} small loaves on each of them."
        f" How many loaves has the baker on all trays together?"
    )


def _choices(index: int, count: int) -> list[str]:
    right = (index + 3) * (index + 2)
    return [f"{right + offset} loaves of bread" for offset in range(count)]


def _arc(index: int) -> Row:
    choices = {"text": _choices(index, 4), "label": _LETTERS[:4]}
    return {"id": f"arc_{index}", "question": _question(index), "choices": choices, "answerKey": "A"}


def _commonsense_qa(index: int) -> Row:
    choices = {"label": _LETTERS, "text": _choices(index, 5)}
    return {
        "id": f"csqa_{index}", "question": _question(index), "question_concept": "bread", "choices": choices,
        "answerKey": "A",
    }  # fmt: skip


def _hellaswag(index: int) -> Row:
    first = _question(index)
    return {
        "ind": index, "activity_label": "Baking", "ctx_a": first, "ctx_b": "the baker", "ctx": f"{first} the baker",
        "endings": _choices(index, 4), "source_id": f"rehearsal~{index}", "split": "val",
        "split_type": "indomain", "label": "0",
    }  # fmt: skip


def _winogrande(index: int) -> Row:
    sentence = (
        f"The loaves did not fit on the {index + 2} trays of the small shop because the _ were too large."
    )
    return {"sentence": sentence, "option1": "loaves", "option2": "trays", "answer": "1"}


def _openbookqa(index: int) -> Row:
    choices = {"text": _choices(index, 4), "label": _LETTERS[:4]}
    return {"id": f"obqa_{index}", "question_stem": _question(index), "choices": choices, "answerKey": "A"}


def _mmlu(index: int) -> Row:
    return {"question": _question(index), "subject": "baking", "choices": _choices(index, 4), "answer": 0}


def _gsm8k(index: int) -> Row:
    answer = f"Each tray has {index + 2} loaves.\n#### {(index + 3) * (index + 2)}"
    return {"question": _question(index), "answer": answer}


def _boolq(index: int) -> Row:
    passage = f"A baker has {index + 3} trays. There is bread on each of them."
    return {
        "question": f"is there bread on tray {index}",
        "passage": passage,
        "idx": index,
        "label": index % 2,
    }


def _rte(index: int) -> Row:
    return {
        "sentence1": _question(index),
        "sentence2": "A baker has trays.",
        "label": index % 2,
        "idx": index,
    }


def _sciq(index: int) -> Row:
    wrong = {f"distractor{number}": text for number, text in enumerate(("music", "gold", "ink"), 1)}
    return {
        "question": _question(index),
        **wrong,
        "correct_answer": "light",
        "support": "Bread is made of flour.",
    }


def _humaneval_plus(index: int) -> Row:
    said = f"Return the sum of both numbers and {index}, also where one of them is below zero."
    return {
        "task_id": f"HumanEval/{index}",
        "prompt": f'def add_{index}(a, b):\n    """ {said} """\n',
        "canonical_solution": f"    return a + b + {index}\n",
        "entry_point": f"add_{index}",
        "test": f"def check(candidate):\n    assert candidate(1, 1) == {2 + index}\n",
    }


def _mbpp_plus(index: int) -> Row:
    name = f"times_{index}"
    return {
        "task_id": 1000 + index,
        "code": f"def {name}(a, b):\n    return a * b + {index}\n",
        "prompt": f"Write a function {name} that multiplies two numbers and adds {index} to what comes out of it.",
        "source_file": "rehearsal",
        "test_imports": [],
        "test_list": [f"assert {name}(1, 2) == {2 + index}", f"assert {name}(3, 3) == {9 + index}"],
        "test": f"assert {name}(-1, 5) == {index - 5}\n",
    }


@dataclass(frozen=True)
class Benchmark:
    """A test set: its row of a given index, its configurations and splits."""

    row: Callable[[int], Row]
    splits: tuple[str, ...]
    configs: tuple[str, ...] = ("default",)


_TRAIN_VALIDATION = ("train", "validation")
_ALL = ("train", "validation", "test")
_SUBJECTS = """
abstract_algebra anatomy astronomy business_ethics clinical_knowledge college_biology college_chemistry
college_computer_science college_mathematics college_medicine college_physics computer_security
conceptual_physics econometrics electrical_engineering elementary_mathematics formal_logic global_facts
high_school_biology high_school_chemistry high_school_computer_science high_school_european_history
high_school_geography high_school_government_and_politics high_school_macroeconomics high_school_mathematics
high_school_microeconomics high_school_physics high_school_psychology high_school_statistics
high_school_us_history high_school_world_history human_aging human_sexuality international_law jurisprudence
logical_fallacies machine_learning management marketing medical_genetics miscellaneous moral_disputes
moral_scenarios nutrition philosophy prehistory professional_accounting professional_law professional_medicine
professional_psychology public_relations security_studies sociology us_foreign_policy virology world_religions
"""

BENCHMARKS: dict[str, Benchmark] = {
    "baber/piqa": Benchmark(
        lambda i: {"goal": _question(i), "sol1": "multiply them", "sol2": "eat the bread", "label": i % 2},
        _TRAIN_VALIDATION,
    ),
    "allenai/ai2_arc": Benchmark(_arc, _ALL, ("ARC-Easy", "ARC-Challenge")),
    "Rowan/hellaswag": Benchmark(_hellaswag, _TRAIN_VALIDATION),
    "tau/commonsense_qa": Benchmark(_commonsense_qa, _TRAIN_VALIDATION),
    "allenai/winogrande": Benchmark(_winogrande, _TRAIN_VALIDATION, ("winogrande_xl",)),
    "allenai/openbookqa": Benchmark(_openbookqa, _ALL, ("main",)),
    "cais/mmlu": Benchmark(_mmlu, ("dev", "validation", "test"), ("all", *_SUBJECTS.split())),
    "openai/gsm8k": Benchmark(_gsm8k, ("train", "test"), ("main",)),
    "aps/super_glue": Benchmark(_boolq, _TRAIN_VALIDATION, ("boolq",)),
    "nyu-mll/glue": Benchmark(_rte, _TRAIN_VALIDATION, ("rte",)),
    "allenai/sciq": Benchmark(_sciq, _ALL),
    "evalplus/humanevalplus": Benchmark(_humaneval_plus, ("test",)),
    "evalplus/mbppplus": Benchmark(_mbpp_plus, ("test",)),
}
"""By hub id."""

_TRAINING: dict[str, Callable[[int], Row]] = {
    "tomg-group-umd/GenQA": _genqa,
    "BAAI/Infinity-Instruct": _infinity_instruct,
}


def training_row(path: str, columns: Mapping[Any, str], index: int) -> Row:
    """Make a row of the data set `path`; of one that is not known here, with the `columns` that the recipe names."""
    if path in _TRAINING:
        return _TRAINING[path](index)
    question, answer = f"{index} + {index % 7}?", f"it is {index + index % 7}"
    said = {
        "messages": conversation(index),
        "prompt": question,
        "input": "",
        "tools": [],
        "response": answer,
        "text": f"{question} {answer}, and so on to the end of the line.",
    }
    return {name: said[kind] for kind, name in columns.items()}
