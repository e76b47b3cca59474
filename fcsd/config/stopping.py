"""Schema of early stopping: which score, how often, with how much patience."""

from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from fcsd.config.strict import Strict
from fcsd.config.suite import TaskConfig

_ROW_KEYS = (  # of early_stopping, as in a suite
    "kind",
    "task",
    "dataset",
    "dataset_name",
    "split",
    "revision",
    "num_fewshot",
    "lm_eval_include",
    "chat_template",
    "max_new_tokens",
    "stop",
    "prompt_template",
    "tests",
    "timeout_s",
)


class EarlyStoppingConfig(Strict):
    """A score while training, and the end of it (paper 5.1: MBPP+, every 1000 steps, patience 20, delta 2 %).

    heldout_kl     KL(original || student) on data.heldout, in nats per kept token
    pass@1         greedy, on a code task
    metric,filter  lm-eval's key (`acc,none`), on any likelihood or generation task of lm-eval

    The keys from `kind` on are those of a row of a suite (`fcsd.config.suite.TaskConfig`), and the task is scored as
    the evaluation would score that row.
    """

    metric: str = "pass@1"
    every_steps: int = Field(1000, gt=0)
    patience: int = Field(20, gt=0)  # evaluations without an improvement
    # An improvement is more than this better than the best so far: a difference of scores, a share of the held-out KL.
    min_delta: float = Field(0.02, ge=0, lt=1)
    # Of a task, and not of heldout_kl:
    limit: int | None = Field(None, gt=0)  # the first items only; null: all
    batch_size: int | None = Field(None, gt=0)  # sequences in one forward on a rank; 32
    kind: Literal["likelihood", "generation", "code"] | None = None  # code where metric is pass@1
    task: str | None = None  # lm-eval's name of the task; for code any name
    # Required: hub id or folder below evaluation.data_root, or local folder; for code MBPP's or HumanEval's schema
    dataset: str | None = None
    dataset_name: str | None = None  # configuration
    split: str | None = None  # code: test; else what the lm-eval task names
    revision: str | None = None
    num_fewshot: int | None = Field(None, ge=0)  # 0
    lm_eval_include: str | None = None
    chat_template: bool | None = None  # code: true; else false
    max_new_tokens: int | None = Field(None, gt=0)  # code: 768; generation: what the lm-eval task says
    stop: list[str] | None = (
        None  # besides the end of the sequence; code: []; generation: what the lm-eval task says
    )
    # code: {prompt}, {test} the first visible test, {tests} all of them; "{prompt}"
    prompt_template: str | None = None
    tests: Literal["all", "visible"] | None = None  # code: all
    timeout_s: float | None = Field(None, gt=0)  # code: 10

    @model_validator(mode="before")
    @classmethod
    def _reads_its_former_key(cls, value: Any) -> Any:
        if isinstance(value, dict) and "max_problems" in value:
            value = dict(value)
            limit = value.pop("max_problems")
            if limit is not None and value.get("limit") is not None:
                raise ValueError("max_problems is the former name of limit; give limit alone")
            value["limit"] = value.get("limit") if limit is None else limit
        return value

    @model_validator(mode="after")
    def _keys_belong_to_the_metric(self) -> "EarlyStoppingConfig":
        if self.metric == "heldout_kl":
            for key in ("limit", "batch_size", *_ROW_KEYS):
                if getattr(self, key) is not None:
                    raise ValueError(
                        f"{key} has no meaning for metric 'heldout_kl', only for a task; the text is data.heldout"
                    )
            return self
        lm_evals = "," in self.metric
        if self.metric != "pass@1" and not lm_evals:
            raise ValueError(
                "metric is 'pass@1' of a code task, 'heldout_kl', or lm-eval's key 'metric,filter' (for example"
                f" 'acc,none'), got {self.metric!r}"
            )
        if self.kind is None and lm_evals:
            raise ValueError(f"kind is required for metric {self.metric!r}: likelihood or generation")
        if self.dataset is None:
            raise ValueError(f"dataset is required for metric {self.metric!r} (or set metric: heldout_kl)")
        if self.task is None and self.kind in ("likelihood", "generation"):
            raise ValueError(f"task is required for kind {self.kind!r}: lm-eval's name of the task")
        row = self.row
        # Assignment would validate again, and mark the key as given by the file.
        self.__dict__.update({key: getattr(row, key) for key in _ROW_KEYS})
        self.__dict__["batch_size"] = self.batch_size or 32
        return self

    @property
    def row(self) -> TaskConfig:
        """The scored task as a row of a suite.

        Raises:
            ValueError: keys that such a row may not have.
        """
        code = {"kind": "code", "task": "early_stopping", "chat_template": True, "stop": []}
        given = {key: getattr(self, key) for key in _ROW_KEYS if getattr(self, key) is not None}
        kind = given.get("kind", "code")
        try:
            return TaskConfig.model_validate(
                (code if kind == "code" else {}) | given | {"metric": self.metric}
            )
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in problem["loc"])
            raise ValueError(
                (f"{key}: " if key else "") + problem["msg"].removeprefix("Value error, ")
            ) from None
