"""The kinds of tasks, and the schemas of a suite (`eval/suites/*.yaml`;
docs/evaluate.md has the keys), of a recipe's `evaluation`, and of `fcsd evaluate
--samples`.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field, PositiveInt, field_validator, model_validator

from fcsd.base.errors import CREDENTIALS, UserError
from fcsd.base.strict import (
    FolderPath,
    Name,
    Rule,
    Strict,
    did_you_mean,
    like,
    one_of,
)
from fcsd.data.columns import Column as Meaning
from fcsd.data.columns import check_meanings
from fcsd.model.config import DROP_NEEDS_A_CAPACITY

if TYPE_CHECKING:
    from fcsd.parallel.launch import Ranks


Group = Literal["likelihood", "generation"]

GROUPS: dict[Group, str] = {
    "likelihood": "by likelihood of given answers",
    "generation": "by what it writes",
}
"""What scores have seen: a verdict has a line, and a comparison a mean, for each."""


@dataclass(frozen=True)
class Kind:
    """What holds of every task of a kind.

    scored_by: what its score has seen, in words. by_lm_eval: lm-eval loads and grades
    it, so that it may be a group with members. distance: its figure is a divergence
    from the original, in nats: less is better, it has no floor and no place in a mean
    of scores, and the original must be named.
    """

    group: Group
    scored_by: str
    by_lm_eval: bool = False
    distance: bool = False

    @cached_property
    def writes(self) -> bool:
        """Whether the model writes; otherwise it is asked for likelihoods alone."""
        return self.group == "generation"


KINDS = {
    "likelihood": Kind("likelihood", "likelihood of given answers", by_lm_eval=True),
    "generation": Kind("generation", "the answer that it writes", by_lm_eval=True),
    "code": Kind("generation", "the program that it writes"),
    "own_text": Kind("generation", "its own text", distance=True),
}

# Where a base model's program ends; the strings of EvalPlus 0.3.1
# (evalplus/provider/utility.py) without special tokens.
CODE_STOP = ["\nif __name__", "\ndef main(", "\nprint(", "\nassert ", '\n"""']


# An empty string would end every answer at once.
StopString = Annotated[str, Field(min_length=1)]


class TaskBase(Strict, strict=True):
    """The keys of tasks of every kind.

    A key that has no meaning for a task's kind is an error, not ignored; so is a value
    of another type (`num_fewshot: "5"`), which would not be converted back when a
    result is compared.
    """

    task: Name
    kind: str
    metric: str
    headline: bool = True  # counts in the suite's plain mean
    # the score of random answers; null: 1 / choices by likelihood, else 0
    floor: float | None = Field(None, ge=0, lt=1)
    limit: int | None = Field(None, gt=0)  # the first items only; null: all
    # hub id, or a path below the data root or (`fcsd.evaluation.datasets.local_place`) the current folder
    dataset: str
    dataset_name: str | None = None  # configuration; null: that of the lm-eval task
    # of the data set on the Hub; a folder below data_root has none
    revision: str | None = None
    chat_template: bool = False
    system_prompt: str | None = None  # with chat_template: the first turn
    # with chat_template: ask a hybrid's template for thoughts; null: no thoughts
    thinking: bool | None = None

    rules: ClassVar[tuple[Rule, ...]] = (
        (
            lambda task: task.system_prompt and not task.chat_template,
            "system_prompt needs chat_template: true",
        ),
        (
            lambda task: task.thinking and not task.chat_template,
            "thinking needs chat_template: true",
        ),
        (
            lambda task: task.thinking and not KINDS[task.kind].writes,
            "thinking has no meaning for kind 'likelihood', which generates no answers",
        ),
    )


class LMEvalTaskConfig(TaskBase):
    """A task of lm-eval, under its name there."""

    num_fewshot: int = Field(0, ge=0)
    split: str | None = None  # graded split; null: that of the lm-eval task
    # Folder with the lm-eval task's YAML; looked for beside the suite file, in
    # eval/tasks, and in lm-eval's own tasks folder (`arc`, `mmlu/default`). null:
    # lm-eval's folder named like the task.
    lm_eval_include: str | None = None

    rules: ClassVar[tuple[Rule, ...]] = (
        (
            lambda task: "," not in task.metric,
            "metric is lm-eval's key 'metric,filter' (for example 'acc,none'), got"
            " {0.metric!r}",
        ),
    )


class LikelihoodTaskConfig(LMEvalTaskConfig):
    """Choose among given answers by their likelihood."""

    kind: Literal["likelihood"]


class GenerationTaskConfig(LMEvalTaskConfig):
    """Write an answer, which lm-eval grades; null: as in the lm-eval task."""

    kind: Literal["generation"]
    max_new_tokens: int | None = Field(None, gt=0)
    stop: list[StopString] | None = None


class CodeTaskConfig(TaskBase):
    """Write programs in MBPP's or HumanEval's schema, which fcsd's own scorer runs in a
    sandbox.
    """

    kind: Literal["code"]
    metric: str = "pass@1"  # "pass@10", …
    split: str = "test"
    max_new_tokens: int = Field(768, gt=0)
    # Besides the end of the sequence. An answer through a template ends by itself, and
    # a base model's strings would end it before its program.
    stop: list[StopString] = Field(
        default_factory=lambda row: [] if row.get("chat_template") else list(CODE_STOP)
    )
    # processor time of a program; three times it on the clock
    timeout_s: float = Field(10.0, gt=0)
    # The prompt of the model: {prompt} is the data set's prompt, {test} its first
    # visible test, {tests} all of them.
    prompt_template: str = "{prompt}"
    # The deciding tests: the data set's `test`, or only the first three visible ones,
    # as in lm-eval's mbpp tasks.
    tests: Literal["all", "visible"] = "all"
    # completions of one problem; pass@k needs k of them or more
    num_samples: int = Field(1, gt=0)
    temperature: float = Field(0.0, ge=0)  # 0: greedy
    top_p: float = Field(1.0, gt=0, le=1)

    num_fewshot: int = 0

    @field_validator("num_fewshot")
    @classmethod
    def _shots_are_in_the_prompt(cls, value: int) -> int:
        if value:
            raise ValueError(
                "has no meaning for kind 'code', whose shots are part of"
                " prompt_template"
            )
        return value

    rules: ClassVar[tuple[Rule, ...]] = (
        (
            lambda task: not re.fullmatch(r"pass@[1-9][0-9]*", task.metric),
            "metric of a code task is 'pass@k', for example 'pass@1', got {0.metric!r}",
        ),
        (
            lambda task: pass_k(task) > task.num_samples,
            lambda task: f"{task.metric} needs num_samples of {pass_k(task)} or more",
        ),
        (
            lambda task: task.num_samples > 1 and not task.temperature,
            "several samples of greedy decoding are the same; set a temperature above"
            " 0",
        ),
        (
            lambda task: "{prompt}" not in task.prompt_template,
            "prompt_template must contain {{prompt}}",
        ),
    )


class OwnTextTaskConfig(TaskBase):
    """Continue prompts by the model's own samples, and compare the two next-token
    distributions of model and original at each token (`fcsd.evaluation.own_text`).

    The data set has conversations, which the model answers through its template, or
    documents, whose beginnings it continues.
    """

    kind: Literal["own_text"]
    metric: Literal["own_text_kl"] = "own_text_kl"
    # Nats, of which less is better, have no place in a mean of scores.
    headline: Literal[False] = False
    floor: None = None
    limit: None = None  # it has num_prompts
    split: str = "train"
    columns: dict[Meaning, str] | None = None  # null: inferred from their names
    num_prompts: int = Field(256, gt=0)  # the first of the data set
    prompt_tokens: int = Field(32, gt=0)  # of a document, its beginning
    max_new_tokens: int = Field(256, gt=0)
    temperature: float = Field(1.0, ge=0)  # 0: greedy
    seed: int = Field(0, ge=0, lt=2**32)  # of the samples

    num_fewshot: ClassVar[int] = 0

    @field_validator("limit", mode="before")
    @classmethod
    def _has_a_number_of_prompts(cls, value: Any) -> None:
        if value is not None:
            raise ValueError("a row of own_text has num_prompts; set that")

    @model_validator(mode="after")
    def _columns_make_a_prompt(self) -> "OwnTextTaskConfig":
        if self.columns is not None and not self.has_prompts_alone:
            check_meanings(self.columns)
        return self

    @property
    def has_prompts_alone(self) -> bool:
        """Whether the data set has prompts without answers, which need none here."""
        return self.columns is not None and self.columns.keys() == {"prompt"}


# One row of a suite.
TaskConfig = Annotated[
    LikelihoodTaskConfig | GenerationTaskConfig | CodeTaskConfig | OwnTextTaskConfig,
    one_of(
        "kind",
        LikelihoodTaskConfig,
        GenerationTaskConfig,
        CodeTaskConfig,
        OwnTextTaskConfig,
    ),
]


def items_limit(row: TaskBase, limit: int | None) -> int | None:
    """Return how many of a task's first items are evaluated: the smaller of its own
    limit and of the evaluation's; None: all.
    """
    return min(filter(None, [row.limit, limit]), default=None)


def pass_k(row: CodeTaskConfig) -> int:
    """Return the k of a code row's pass@k."""
    return int(row.metric.removeprefix("pass@"))


_Content = Literal["text", "text with _", "4 texts", "labelled"]

_CONTENTS = get_args(_Content)

Column = _Content | list[int | str]
"""The content of a column in a benchmark's rows: text, a list, {text: [texts], label:
[texts]}, or one of these values.
"""


class SuiteConfig(Strict, strict=True):
    """A named list of tasks with different names."""

    name: Name
    description: str = ""
    tasks: list[TaskConfig] = Field(min_length=1)
    # Shipped suites whose tasks come before these; `load_suite` adds them.
    suites: list[str] = Field([], exclude=True)
    # Task -> column -> its contents; a task that another suite of fcsd describes needs
    # no entry here.
    columns: dict[str, dict[str, Column]] = Field({}, exclude=True)
    # where the suite file lies; set by `load_suite`
    folder: str = Field("", exclude=True)

    @field_validator("columns", mode="before")
    @classmethod
    def _columns_have_contents(cls, value: Any) -> Any:
        tasks = value.items() if isinstance(value, dict) else [("", value)]
        for task, columns in tasks:
            items = columns.items() if isinstance(columns, dict) else [("", columns)]
            for column, content in items:
                if column and (
                    content in _CONTENTS
                    or (
                        isinstance(content, list)
                        and all(type(item) in (int, str) for item in content)
                    )
                ):
                    continue
                place = "".join(f"{key}: " for key in (task, column) if key)
                raise ValueError(
                    f"{place}each task's columns with their contents are needed, as in"
                    " `columns: {piqa: {goal: text, sol1: text, label: [0, 1]}}`; a"
                    f" content is {', '.join(_CONTENTS)} or a list of values; got"
                    f" {content!r}"
                )
        return value

    @property
    def has_own_text(self) -> bool:
        """Whether a task compares the model with its original."""
        return any(KINDS[row.kind].distance for row in self.tasks)

    @model_validator(mode="after")
    def _names_differ(self) -> "SuiteConfig":
        names = [row.task for row in self.tasks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"tasks: {', '.join(twice)} is listed twice")
        scored = not all(KINDS[row.kind].distance for row in self.tasks)
        if scored and not any(row.headline for row in self.tasks):
            raise ValueError("tasks: at least one must have headline: true")
        if unknown_tasks := sorted(self.columns.keys() - set(names)):
            raise ValueError(
                f"columns: {', '.join(unknown_tasks)} is not a task of this suite"
                f"{did_you_mean(unknown_tasks[0], names)}"
            )
        return self


BatchSize = int | Literal["auto"]


class ServerConfig(Strict):
    """A server that answers, by HTTP, for the evaluated model."""

    url: str  # as http://localhost:8000
    concurrency: PositiveInt = Field(
        64,
        description="with --server: number of concurrent requests",
        json_schema_extra={"metavar": "N"},
    )

    @field_validator("url")
    @classmethod
    def _address_alone(cls, value: str) -> str:
        # Not a ValueError: pydantic's message would print the password.
        if any(mark in value for mark in "@?#"):
            raise UserError(f"evaluation.server.url (--server): {CREDENTIALS}")
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("an address such as http://localhost:8000 is needed")
        return value.rstrip("/").removesuffix("/v1")


Side = Literal["first", "last", "single", "attention"]


class LayerStudyConfig(Strict):
    """The tasks and layers that a recipe's layer study measures beside the KL."""

    tasks: list[str] = Field(default_factory=list)  # of the suite
    sides: list[Side] | None = None  # null: all that differ
    every: int = Field(
        1,
        description="for first and last: measure every Nth number of layers, and all layers",
        gt=0,
    )


def check_batch_size(size: BatchSize, ranks: "Ranks") -> None:
    """Raise UserError for "auto" where the weights are sharded over the ranks."""
    if size == "auto" and ranks.lockstep:
        raise UserError(
            "batch_size: 'auto' needs a rank that can try again alone, and this launch"
            f" shards the weights over {ranks.size}; give a number"
        )


def check_server(server: ServerConfig | None, ranks: "Ranks") -> None:
    """Raise UserError when several processes would ask one server the same."""
    if server is not None and ranks.size > 1:
        raise UserError(
            "evaluation.server (--server): works with one process, but this launch has"
            f" {ranks.size}; evaluate without a launcher (`fcsd run` continues a"
            " run in one process)"
        )


class EvaluationConfig(Strict):
    """How every model of the run is evaluated."""

    suite: str = Field(
        "tiny",
        description="name of a shipped suite (eval/suites), or a path to a suite file",
    )
    data_root: FolderPath | None = Field(
        None, description="folder in hub layout (owner/name/…) (default: the Hub)"
    )
    batch_size: PositiveInt | Literal["auto"] = Field(
        16, description="sequences per forward pass; auto: as many as fit in memory"
    )
    limit: int | None = Field(
        None,
        description=(
            "evaluate only the first items of every task, for a quick look; every table"
            " marks it"
        ),
        gt=0,
    )
    # null: one in each evaluation
    cache: FolderPath | None = Field(
        None,
        description=(
            "folder of finished tasks that several evaluations share; tasks are found by"
            " hashes of weights, tokenizer, data and settings, not by paths"
        ),
    )
    server: ServerConfig | None = None  # null: the model is in memory
    # Untrained quality against the number of rewired layers (paper Fig. 3); true: its
    # KL alone.
    layer_study: LayerStudyConfig | None = None
    allow_weak_sandbox: bool = Field(
        False,
        description=(
            "run generated code even if this machine's sandbox cannot block network access"
            " and writing files"
        ),
    )
    # The experts' capacity in each forward pass, as train.capacity_factor; with
    # batch_size 1.
    capacity_factor: float | None = Field(
        None,
        description=(
            "drop (token, expert) pairs above this multiple of a sequence's mean load;"
            " needs --batch-size 1"
        ),
        gt=0,
        allow_inf_nan=False,
    )
    capacity_drop: Literal["order", "weight"] | None = Field(
        None,
        description=(
            "with --capacity-factor: drop the last pairs in order (default), or those with"
            " the smallest weights"
        ),
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        DROP_NEEDS_A_CAPACITY,
        (
            lambda config: config.capacity_factor is not None and config.server,
            "capacity_factor: a server's capacity cannot be set; evaluate in memory,"
            " without a server",
        ),
        (
            lambda config: (
                config.capacity_factor is not None and config.batch_size != 1
            ),
            "capacity_factor: needs batch_size 1, not {0.batch_size}: the dropped pairs"
            " would depend on the batch, and padding, which lm-eval does not report,"
            " would use capacity",
        ),
        (
            lambda config: (
                config.capacity_factor is not None
                and config.layer_study is not None
                and config.layer_study.tasks
            ),
            "capacity_factor: does not work with layer_study.tasks; leave one of them"
            " out",
        ),
    )

    @property
    def data_folder(self) -> Path | None:
        """The folder in hub layout that test sets are read from; None: the Hub."""
        return None if self.data_root is None else Path(self.data_root)

    @property
    def capacity(self) -> dict[str, Any]:
        """The settings of dropped pairs, on which scores depend; {} where none are."""
        if self.capacity_factor is None:
            return {}
        return {
            "capacity_factor": self.capacity_factor,
            "capacity_drop": self.capacity_drop or "order",
        }

    @field_validator("layer_study", mode="before")
    @classmethod
    def _yes_or_no(cls, value: Any) -> Any:
        # `true` is the section with all its defaults, `false` is none; YAML 1.1 has
        # other words for them.
        words = {"yes": True, "on": True, "no": False, "off": False}
        value = words.get(value.lower(), value) if isinstance(value, str) else value
        if isinstance(value, bool):
            return {} if value else None
        return value


class SampleFile(Strict):
    """A file of ready samples, and how it is graded."""

    samples: Path
    # A task of the suite or of lm-eval, or the path of a code data set (--tasks); null:
    # every line has its `task`.
    dataset: str | None = None
    suite: str = Field(
        "paper11", description="suite whose rows say how a task is graded"
    )
    include_path: Path | None = Field(
        None,
        description="your own task definitions (lm-eval YAML)",
        json_schema_extra={"metavar": "DIR"},
    )
    thinking: bool = Field(
        False,
        description="cut off the thoughts before an answer; thoughts that never end are no answer",
    )
    data_root: Path | None = like(EvaluationConfig, "data_root")
    output: Path | None = Field(
        None, description="folder for results.json and samples_*.jsonl"
    )
    partial: bool = Field(
        False, description="grade only the problems that have a sample"
    )
    timeout_s: float | None = Field(
        None, description="processor time of one program, in seconds (default: 10)"
    )
    allow_weak_sandbox: bool = like(EvaluationConfig, "allow_weak_sandbox")


def lm_eval_key(metric: str) -> tuple[str, str]:
    """Split metric and filter: ("acc", "none") of `acc,none`; code tasks have no
    filter.
    """
    name, _, rule = metric.partition(",")
    return name, rule or "none"
