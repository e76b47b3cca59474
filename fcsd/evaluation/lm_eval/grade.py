"""Grade ready answers by lm-eval's own filters and metrics: a stand-in for a model
answers from a file.

Importing this imports lm-eval.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.models.utils import postprocess_generated_text

from fcsd.base.errors import UserError
from fcsd.data.thoughts import answer_in
from fcsd.evaluation.config import LMEvalTaskConfig
from fcsd.evaluation.lm_eval.tasks import Tasks, run_task
from fcsd.evaluation.results import Line, Lines, texts_of, with_hashes_of_lines
from fcsd.evaluation.scores import Sample

_Item = tuple[str, int]  # task, and number of the document


class AnswersOfFile(LM):
    """Replaces a model; its answers end at the task's stop strings, as a model's do."""

    def __init__(
        self,
        answers: Mapping[_Item, Sequence[str]],
        documents: Mapping[str, Sequence[int]] | None = None,
        *,
        thinking: bool = False,
    ):
        super().__init__()
        self.answers, self.documents, self.thinking = answers, documents or {}, thinking
        self.cut = frozenset[str]()

    def think(self, row: LMEvalTaskConfig) -> None:
        """Do nothing: the answers are in the file."""

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Answer from the file; the n-th request about a document gets its n-th answer."""
        counts: Counter[_Item] = Counter()
        texts = []
        for request in requests:
            task, number = str(request.task_name), int(request.doc_id)
            if task in self.documents:  # among those with an answer
                number = self.documents[task][number]
            item = task, number
            text = self.answers[item][counts[item]] if item in self.answers else ""
            counts[item] += 1
            answer = answer_in(text) if self.thinking else text
            until = (request.args[1] or {}).get("until")
            texts.append(postprocess_generated_text(answer, until, None))
        return texts

    def loglikelihood(self, requests: Any) -> Any:
        """Refuse: a file of answers has no likelihoods."""
        raise UserError(
            "is scored by likelihood, which a file of answers does not hold"
        )

    loglikelihood_rolling = loglikelihood


def grade_answers(
    file: Path,
    row: LMEvalTaskConfig,
    tasks: Tasks,
    lines: Lines,
    *,
    partial: bool,
    thinking: bool,
) -> list[Sample]:
    """Grade the lines that are of this row's tasks: the samples, as of a model that is
    evaluated.

    A line names its document by `doc_id` (`member/number` in a group, or the member as
    `task`), or by lm-eval's `doc_hash` or `prompt_hash`. Several answers to a document,
    the same number for all, are graded one by one, and the mean counts; where the task
    itself asks several times (`repeats`), it gets them all at once.

    tasks: those of the row, loaded without a chat template. partial: documents without
    an answer are left out. thinking: answers begin with thoughts, which are cut off
    (`fcsd.data.thoughts`).
    """
    answers, lines_of = _by_document(row, tasks, lines)
    documents = {}
    for name, task in tasks.items():
        numbers = range(len(task.eval_docs))[: row.limit]
        documents[name] = [
            number for number in numbers if not partial or (name, number) in answers
        ]
    answers = {
        (name, number): texts
        for (name, number), texts in answers.items()
        if number in documents[name]
    }
    if not answers:
        raise UserError(f"task {row.task}: the file holds no answer to it")
    asked = [(name, n) for name, numbers in documents.items() for n in numbers]
    missing = [f"{name}/{n}" for name, n in asked if (name, n) not in answers]
    if missing:
        raise UserError(
            f"{file}: task {row.task}: {len(missing)} of {len(asked)} documents have no"
            f" answer (the first is {missing[0]}); add them, or grade only the others"
            " with --partial"
        )
    tasks = {name: task for name, task in tasks.items() if documents[name]}
    # Each pass below grades one answer to every document, so all documents need the
    # same number of answers.
    counts = {len(texts) for texts in answers.values()}
    repeats = {int(task.config.repeats or 1) for task in tasks.values()}
    if len(counts) > 1 or (repeats != {1} and counts != repeats):
        requirement = "the same number for every document"
        if repeats != {1}:
            requirement = f"{max(repeats)} for every document"
        raise UserError(
            f"task {row.task}: {min(counts)} to {max(counts)} answers per document; it"
            f" needs {requirement}"
        )
    # A task that asks several times by itself gets all answers in one pass.
    passes = [answers]
    if repeats == {1}:
        passes = [
            {item: texts[n : n + 1] for item, texts in answers.items()}
            for n in range(counts.pop())
        ]
    selected = documents if partial or row.limit else None
    graded = [
        run_task(
            AnswersOfFile(pass_answers, selected, thinking=thinking),
            row,
            tasks,
            None,
            selected,
        )
        for pass_answers in passes
    ]
    items = [_item(sample["doc_id"], row.task) for sample in graded[0]]
    return [
        _whole(row, samples, lines_of[item], answers[item])
        for item, *samples in zip(items, *graded, strict=True)
    ]


def _whole(
    row: LMEvalTaskConfig,
    samples: Sequence[Sample],
    lines: Lines,
    texts: Sequence[str],
) -> Sample:
    """Join the graded answers of the document to which the lines belong.

    The prompt is theirs, if they have one.
    """
    first = with_hashes_of_lines(samples[0], lines, row.task)
    if len(texts) == 1:
        return first
    scores = [sample["score"] for sample in samples]
    completions = list(texts)
    if len(scores) > 1:
        completions = [sample["completion"] for sample in samples]
    del first["completion"]
    first.pop("metrics", None)  # of the first answer alone
    return first | {
        "score": sum(scores) / len(scores),
        "completions": completions,
        "scores": scores,
    }


def _by_document(
    row: LMEvalTaskConfig, tasks: Tasks, lines: Lines
) -> tuple[dict[_Item, list[str]], dict[_Item, list[Line]]]:
    """Sort the lines by document: its answers, and its lines."""
    answers: dict[_Item, list[str]] = {}
    lines_of: dict[_Item, list[Line]] = {}
    hashes: dict[str, _Item] | None = None
    for where, line in lines:
        task = line.get("task", row.task)
        if not isinstance(task, str):
            raise UserError(f"{where}: task: text is needed, got {task!r}")
        if task != row.task and task not in tasks:
            continue
        name = line.get("doc_id", line.get("doc_hash", line.get("prompt_hash")))
        if "doc_id" in line:
            item = _item(line["doc_id"], task, where)
        else:
            # Hashing builds every prompt of the task, so it waits until a line needs
            # it.
            if hashes is None:
                hashes = _hashes(row, tasks)
            if name is None:
                raise UserError(
                    f"{where}: needs doc_id, doc_hash or prompt_hash to identify the"
                    " document"
                )
            item = hashes.get(str(name), ("", -1))
        if item[0] not in tasks or not 0 <= item[1] < len(tasks[item[0]].eval_docs):
            raise UserError(f"{where}: {name!r} is not a document of {row.task}")
        missing = "no 'completion' (an answer) and no 'completions' (several)"
        _, texts = texts_of(line, where, ("completions", "completion"), missing)
        answers.setdefault(item, []).extend(texts)
        lines_of.setdefault(item, []).append((where, line))
    return answers, lines_of


def _item(doc_id: Any, task: str, where: str = "") -> _Item:
    member, slash, number = str(doc_id).rpartition("/")
    digits = number.isascii() and number.isdigit() and len(number) < 20
    if isinstance(doc_id, bool) or not digits:
        raise UserError(
            f"{where}: doc_id: a number (or member/number in a group) is needed, got"
            f" {doc_id!r}"
        )
    return (member if slash else task, int(number))


def _hashes(row: LMEvalTaskConfig, tasks: Tasks) -> dict[str, _Item]:
    """Hash every document and its prompt as lm-eval does, by asking for answers that
    are not there.
    """
    return {
        sample[key]: _item(sample["doc_id"], row.task)
        for sample in run_task(AnswersOfFile({}), row, tasks, None)
        for key in ("doc_hash", "prompt_hash")
    }
