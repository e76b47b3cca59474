"""Generated instruct-to-Python tasks, small enough for a model of a few million
parameters and a CPU.

There are three skills, all answered in the chat form of the tokenizer that is written
with them:

- code: a described function, in one or two steps, is written in Python;
- choice: the expression for a task, or the meaning or value of an expression;
- answers: the same without choices.

Each question asks for a combination of operations (`OPERATIONS`), of the wording of
each, and of numbers. The combination is hashed into one of four splits (train, held
out, validation, test), so it never occurs in two splits, in any frame of words or under
any function name. Without numbers, the frame belongs to the combination, too; otherwise
whole wordings would be missing from training. Questions for the value of an expression
are in one split only.

Not covered: programs with loops or branches, more than two steps, natural text.
"""

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fcsd.pipeline.tiny.operations import OPERATIONS, Operation

ARGUMENTS = {"int": "x", "list": "xs", "str": "s"}
LETTERS = "ABCDEFGH"
_TYPES = ("int", "list", "list", "str")  # lists have most operations

_WORDS = """
adapt alter apply build change check compute convert derive do edit find form get handle inspect look make
match measure move obtain pick prepare process query read run scan select show solve step test use work
"""
WORDS = tuple(_WORDS.split())

CODE_FRAMES = (
    "Write {call} to {task}.",
    "Define {call}: {task}.",
    "I need {call} to {task}.",
    "{call} should {task}.",
    "Let {call} {task}.",
)

DOCSTRING_REQUEST = " Add a docstring."
STEP_FRAMES = ("{first}, then {second}", "first {first}, next {second}")
CHOOSE_FRAMES = (
    "Which expression will {task}?",
    "What do you type to {task}?",
    "Pick the code to {task}.",
)
VALUE_FRAMES = ("What is {code}?", "Evaluate {code}", "Give the value of {code}")
CALL_FRAMES = (
    "What does {call} return?\n{code}",
    "{code}\nWhat is the result of {call}?",
)
MEANING_FRAMES = ("What does {code} do?", "Say in words: {code}", "Explain {code}")

_BUILTINS = {f.__name__: f for f in (abs, all, len, list, max, min, sorted, sum)}

_SPLITS = {0: "test", 1: "test", 2: "validation", 3: "heldout"}


def split_of(combination: tuple[Any, ...]) -> str:
    """Choose the one split of a combination: 2/24 test, 1/24 validation, 1/24 heldout,
    the rest train.
    """
    return _SPLITS.get(zlib.crc32(repr(combination).encode()) % 24, "train")


@dataclass(frozen=True)
class Step:
    """An operation with a choice of its wording and of its number or letter."""

    operation: Operation
    wording: int
    filling: int | str | None

    @property
    def combination(self) -> tuple[Any, ...]:
        return (self.operation.takes, self.operation.code, self.wording, self.filling)

    @property
    def near(self) -> list[int | str]:
        return [] if self.filling is None else [self.filling]

    def text(self, argument: str) -> str:
        return self._fill(self.operation.wordings[self.wording], argument)

    def code(self, argument: str) -> str:
        return self._fill(self.operation.code, argument)

    def _fill(self, template: str, argument: str) -> str:
        return template.format(v=argument, n=self.filling, c=self.filling)


def _by_type(computed: bool) -> dict[str, tuple[Operation, ...]]:
    return {
        kind: tuple(
            o for o in OPERATIONS if o.takes == kind and (o.computed or not computed)
        )
        for kind in ARGUMENTS
    }


_OPERATIONS, _COMPUTED = _by_type(False), _by_type(True)


def _step(rng: random.Random, takes: str | None = None, computed: bool = False) -> Step:
    table = _COMPUTED if computed else _OPERATIONS
    operation = rng.choice(table[takes or rng.choice(_TYPES)])
    filling: int | str | None = None
    if "{n}" in operation.code:
        first, last = operation.numbers
        filling = rng.randint(first, last)
    elif "{c}" in operation.code:
        filling = rng.choice(LETTERS)
    return Step(operation, rng.randrange(len(operation.wordings)), filling)


def _value(
    rng: random.Random, kind: str, near: list[int | str], small: bool
) -> int | list[int] | str:
    """Draw a random argument; `near` has the numbers and letters of the task, whose
    neighbours show edge cases.
    """
    numbers = [n for n in near if isinstance(n, int)]
    letters = [c for c in near if isinstance(c, str)]
    if kind == "int":
        if small:
            return rng.randrange(10)
        return rng.choice(
            [rng.randrange(-20, 100), *(n + rng.randrange(-1, 2) for n in numbers)]
        )
    if kind == "list":
        if small:
            return [rng.randrange(10) for _ in range(3)]
        items = [rng.randrange(15) for _ in range(rng.randrange(6, 12))]
        # Items around the numbers of the task, so that comparisons go either way.
        items += [n + rng.randrange(-1, 2) for n in numbers]
        rng.shuffle(items)
        return items
    size = 3 if small else rng.randrange(6, 12)
    pool = LETTERS + "".join(letters) * 3
    return "".join(rng.choice(pool) for _ in range(size))


def _result(code: str, argument: str, value: Any) -> Any:
    """Compute the value of an expression that this module generated."""
    return eval(code, {"__builtins__": _BUILTINS}, {argument: value})


def _function(name: str, steps: list[Step], docstring: str | None = None) -> str:
    argument = ARGUMENTS[steps[0].operation.takes]
    lines = [f"def {name}({argument}):"]
    if docstring is not None:
        lines.append(f'    """{docstring}"""')
    lines += [f"    {argument} = {step.code(argument)}" for step in steps[:-1]]
    return "\n".join([*lines, f"    return {steps[-1].code(argument)}"])


def _combination(steps: list[Step], frame: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the combination that must not occur in two splits; without a number or
    letter the frame of words is part of it.
    """
    fillings = [step.filling for step in steps if step.filling is not None]
    return (*(step.combination for step in steps), None if fillings else frame)


def _steps(rng: random.Random) -> list[Step]:
    """Draw one or two steps; the second takes the result of the first."""
    first = _step(rng)
    if rng.random() < 0.1 and first.operation.gives in ARGUMENTS:
        return [first, _step(rng, first.operation.gives)]
    return [first]


def _code_row(
    rng: random.Random, split: str, careless: float = 0.0
) -> dict[str, Any] | None:
    steps = _steps(rng)
    argument = ARGUMENTS[steps[0].operation.takes]
    frame = rng.randrange(len(CODE_FRAMES))
    join = rng.randrange(len(STEP_FRAMES)) if len(steps) == 2 else 0
    # The combination decides its split, so other splits can never contain it.
    if split_of(_combination(steps, (frame, join))) != split:
        return None
    texts = [step.text(argument) for step in steps]
    task = texts[0]
    if len(texts) > 1:
        task = STEP_FRAMES[join].format(first=texts[0], second=texts[1])
    name = rng.choice(WORDS)
    prompt = CODE_FRAMES[frame].format(call=f"{name}({argument})", task=task)
    docstring = None
    if len(steps) == 1 and rng.random() < 0.1:
        prompt, docstring = prompt + DOCSTRING_REQUEST, f"{task[0].upper()}{task[1:]}."
    # The mistake is in one step, and only the code shows it.
    if rng.random() < careless:
        mistaken = rng.randrange(len(steps))
        steps = [
            _mistakes(rng, s)[0] if i == mistaken else s for i, s in enumerate(steps)
        ]
    return {
        "prompt": prompt,
        "code": _function(name, steps, docstring),
        "name": name,
        "steps": steps,
    }


@dataclass(frozen=True)
class Question:
    """A question with its answer; `wrong()` returns candidates for wrong choices, the
    most similar first.
    """

    text: str
    answer: str
    wrong: Callable[[], list[str]]


def _other(rng: random.Random, filling: int | str) -> int | str:
    if isinstance(filling, str):
        return rng.choice([c for c in LETTERS if c != filling])
    return rng.choice(
        [n for n in (filling - 1, filling + 1, filling + 2, 2 * filling) if n > 0]
    )


def _mistakes(rng: random.Random, step: Step, computed: bool = False) -> list[Step]:
    """List the same operation with another number, then other operations on the same type."""
    mistakes = [_step(rng, step.operation.takes, computed) for _ in range(20)]
    if step.filling is not None:
        mistakes.insert(
            0, Step(step.operation, step.wording, _other(rng, step.filling))
        )
    return mistakes


def _choose(rng: random.Random, split: str) -> Question | None:
    """Ask for an expression by its words; the wrong expressions take the same type and
    behave differently.
    """
    step, frame = _step(rng), rng.randrange(len(CHOOSE_FRAMES))
    if split_of(_combination([step], (frame,))) != split:
        return None
    argument = ARGUMENTS[step.operation.takes]
    right = step.code(argument)

    def wrong() -> list[str]:
        # An expression counts as wrong only if some value shows a difference.
        values = [_value(rng, step.operation.takes, step.near, False) for _ in range(8)]
        expected = [_result(right, argument, value) for value in values]
        codes = [mistake.code(argument) for mistake in _mistakes(rng, step)]
        return [
            code
            for code in codes
            if [_result(code, argument, value) for value in values] != expected
        ]

    return Question(CHOOSE_FRAMES[frame].format(task=step.text(argument)), right, wrong)


def _meaning(rng: random.Random, split: str) -> Question | None:
    """Ask for the words of an expression; the first wording of an operation is the answer."""
    step, frame = _step(rng), rng.randrange(len(MEANING_FRAMES))
    # Each operation has a single correct description: its first wording.
    step = Step(step.operation, 0, step.filling)
    if split_of(("meaning", *_combination([step], (frame,)))) != split:
        return None
    argument = ARGUMENTS[step.operation.takes]

    def wrong() -> list[str]:
        return [
            Step(m.operation, 0, m.filling).text(argument) for m in _mistakes(rng, step)
        ]

    return Question(
        MEANING_FRAMES[frame].format(code=step.code(argument)),
        step.text(argument),
        wrong,
    )


def _evaluation(rng: random.Random, split: str) -> Question | None:
    """Ask for the value of an expression, or of a function for an argument."""
    step = _step(rng, computed=True)
    kind, gives = step.operation.takes, step.operation.gives
    if gives == "bool":  # guessing gets half of them right, and they must be computed
        return None
    # Small values, whose results can be read off.
    value = _value(rng, kind, step.near, True)
    if split_of(("value", step.code(repr(value)))) != split:
        return None
    argument = ARGUMENTS[kind]
    result = _result(step.code(argument), argument, value)
    if rng.random() < 0.5:
        text = rng.choice(VALUE_FRAMES).format(code=step.code(repr(value)))
    else:
        name = rng.choice(WORDS)
        text = rng.choice(CALL_FRAMES).format(
            call=f"{name}({value!r})", code=_function(name, [step])
        )

    def wrong() -> list[str]:
        # Numbers near the result, and the results of similar operations.
        near = (
            [result + d for d in rng.sample((-10, -2, -1, 1, 2, 10), 3)]
            if gives == "int"
            else []
        )
        same = [
            m for m in _mistakes(rng, step, computed=True) if m.operation.gives == gives
        ]
        return [
            repr(v)
            for v in (
                *near,
                *(_result(m.code(argument), argument, value) for m in same),
            )
        ]

    return Question(text, repr(result), wrong)


CHOICE_KINDS = (_choose, _meaning, _evaluation)
ANSWER_KINDS = (_meaning, _evaluation)


def _choice(rng: random.Random, split: str) -> dict[str, Any] | None:
    """Make a question with up to four different choices; None if fewer than two remain."""
    question = rng.choice(CHOICE_KINDS)(rng, split)
    if question is None:
        return None
    choices = [question.answer]
    for text in question.wrong():
        if text not in choices and len(choices) < 4:
            choices.append(text)
    if len(choices) < 2:
        return None
    # The position of the answer must not give it away.
    rng.shuffle(choices)
    return {
        "question": question.text,
        "choices": choices,
        "answer": choices.index(question.answer),
    }


def _tests(rng: random.Random, row: dict[str, Any]) -> dict[str, Any] | None:
    """Write an MBPP+ row: `test_list` (3 asserts), `test` (a script for all inputs);
    None: too few inputs are valid.
    """
    name: str = row["name"]
    steps: list[Step] = row["steps"]
    near = [number for step in steps for number in step.near]
    namespace: dict[str, Any] = {}
    # This module generated the code, which runs with few builtins.
    exec(row["code"], {"__builtins__": _BUILTINS}, namespace)
    function: Callable[[Any], Any] = namespace[name]
    # Inputs near the numbers of the task tell almost correct programs apart.
    pairs = []
    for _ in range(40):
        value = _value(rng, steps[0].operation.takes, near, False)
        try:
            pairs.append((value, function(value)))
        except (ValueError, IndexError):  # e.g. the largest item of an empty list
            continue
        if len(pairs) == 12:
            break
    # A function with a single result would pass with a constant.
    if len(pairs) < 12 or len({repr(result) for _, result in pairs}) < 2:
        return None
    script = (
        f"inputs = {[[value] for value, _ in pairs]!r}\nresults ="
        f" {[result for _, result in pairs]!r}\nfor arguments, expected in zip(inputs,"
        f" results):\n    assert {name}(*arguments) == expected\n"
    )
    asserts = [f"assert {name}({value!r}) == {result!r}" for value, result in pairs[:3]]
    return {
        "prompt": row["prompt"],
        "code": row["code"],
        "test_imports": [],
        "test_list": asserts,
        "test": script,
    }


def _chat(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def chat_rows(
    rng: random.Random, split: str, careless: float = 0.0
) -> Iterator[dict[str, Any]]:
    """Yield endless rows `{"messages": [user, assistant]}`: two in five code, half of
    the rest choice, half answers.

    Questions for values are twice as frequent as the others: they are learnt slowest.
    `careless` is the share of answers with one mistake in them: another number or
    another operation.
    """
    while True:
        skill = rng.random()
        if skill < 0.4:
            if code := _code_row(rng, split, careless):
                yield _chat(code["prompt"], code["code"])
        else:
            # The value kind is added once more, which doubles its share.
            kinds = CHOICE_KINDS if skill < 0.7 else ANSWER_KINDS
            kind = rng.choice((*kinds, _evaluation))
            if question := kind(rng, split):
                wrong = question.wrong() if rng.random() < careless else []
                yield _chat(question.text, wrong[0] if wrong else question.answer)


def _distinct(
    make: Callable[[], dict[str, Any] | None], key: str, count: int
) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < count:
        row = make()
        if row is not None:
            rows.setdefault(row[key], row)
    return list(rows.values())


def code_tasks(rng: random.Random, split: str, count: int) -> list[dict[str, Any]]:
    """Make `count` rows in the MBPP+ schema, no prompt twice; each canonical solution
    passes its own tests.
    """

    def make() -> dict[str, Any] | None:
        row = _code_row(rng, split)
        return _tests(rng, row) if row else None

    return [
        {"task_id": i, **row}
        for i, row in enumerate(_distinct(make, "prompt", count), start=1)
    ]


def choice_tasks(rng: random.Random, split: str, count: int) -> list[dict[str, Any]]:
    """Make `count` rows (question, choices, answer: the index of the right choice)."""
    return _distinct(lambda: _choice(rng, split), "question", count)


def answer_tasks(rng: random.Random, split: str, count: int) -> list[dict[str, Any]]:
    """Make `count` rows (question, answer)."""

    def make() -> dict[str, Any] | None:
        question = rng.choice(ANSWER_KINDS)(rng, split)
        return (
            {"question": question.text, "answer": question.answer} if question else None
        )

    return _distinct(make, "question", count)
