"""A recipe: one strict YAML file that names everything a run depends on, and is the
record of that run.

A recipe is complete: there are no flags beside it, what it extends is resolved when it
is loaded, and every default is in the schema below (`fcsd run RECIPE --show` prints all
values). Units are part of the
keys. Relative paths are relative to the folder in which the command runs. `--set
train.learning_rate=4e-5` replaces one value by its dotted key.
"""

import copy
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import (
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fcsd.base.errors import UserError
from fcsd.base.strict import (
    FolderPath,
    Name,
    OneOf,
    Rule,
    Strict,
    choice_of,
    did_you_mean,
    drop_foreign_keys,
    places_of,
    validate,
)
from fcsd.data.config import DataConfig, TrainingDataConfig
from fcsd.evaluation.config import (
    EvaluationConfig,
    ServerConfig,
    SuiteConfig,
    TaskConfig,
)
from fcsd.evaluation.suites import named_tasks
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity.spec import ConnectivityConfig
from fcsd.recipe.layout import MAIN, RESERVED
from fcsd.training.config import (
    CalibrationConfig,
    SafetyConfig,
    Sections,
    SweepConfig,
    TrainConfig,
)
from fcsd.training.losses.objectives import KLObjectiveConfig, ObjectiveConfig
from fcsd.training.teachers.config import (
    AdapterConfig,
    ShardedTeacherConfig,
    TeacherConfig,
)

_VARIANT_SECTIONS = (
    "connectivity", "calibration", "data", "objective", "teacher", "lora", "train", "early_stopping", "seed",
)  # fmt: skip

_PRETRAINING_SECTIONS = (
    "pretrain.config", "pretrain.connectivity", "pretrain.train", "seed",
)  # fmt: skip

# Transformers' spellings and those of published configurations: router_aux_loss_coef
# (most), aux_loss_coef (jetmoe), aux_loss_alpha and seq_aux (deepseek),
# moe_aux_loss_coeff, router_z_loss_coef (switch_transformers).
_ROUTER_LOSS = re.compile(
    r"aux_loss|aux_alpha|seq_aux|router_z_loss|moe_z_loss|load_balanc|output_router_logits"
)


def set_dotted(raw: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set `raw[a][b][c] = value` for key `a.b.c`, in place; a number selects an item of
    a list. `where` names the source of the change in errors.
    """
    parts = key.split(".")
    # A variant holds dotted keys: a section in their place would replace the main
    # recipe's whole section. Its name may also contain dots, but not that of a new one.
    variants = raw.get("variants")
    if parts[0] == "variants" and parts[2:]:
        parts = ["variants", parts[1], ".".join(parts[2:])]
    for name in variants if isinstance(variants, dict) else ():
        if key.startswith(f"variants.{name}."):
            parts = ["variants", name, key.removeprefix(f"variants.{name}.")]
    container: Any = raw
    for index, part in enumerate(parts[:-1]):
        if isinstance(container, list):
            container = _item(container, part, where)
        else:
            # A section that is null or absent is created, so that --set can switch it
            # on.
            if container.get(part) is None:
                container[part] = {}
            container = container[part]
        if not isinstance(container, dict | list):
            raise UserError(
                f"{where}: {'.'.join(parts[: index + 1])} is a single value and has no"
                f" key {parts[index + 1]!r}"
            )
    if isinstance(container, list):
        _item(container, parts[-1], where)
        container[int(parts[-1])] = copy.deepcopy(value)
    else:
        container[parts[-1]] = copy.deepcopy(value)


def _item(items: list[Any], part: str, where: str) -> Any:
    if not part.isdigit() or int(part) >= len(items):
        raise UserError(
            f"{where}: {part!r} is not an item of this list; allowed: 0 to"
            f" {len(items) - 1}"
        )
    return items[int(part)]


def to_yaml(value: Any) -> str:
    """Format YAML in the order of the schema, as `fcsd run --show` prints it."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=110)


class PretrainConfig(Strict):
    """A model from scratch (paper App. A): `config` is a transformers model
    configuration with its model_type.
    """

    config: dict[str, Any]
    tokenizer: str
    connectivity: ConnectivityConfig = ConnectivityConfig(layers="none")
    data: TrainingDataConfig
    train: TrainConfig

    @field_validator("train")
    @classmethod
    def _check_trained(cls, value: TrainConfig) -> TrainConfig:
        if not value.max_steps:
            raise ValueError(
                "max_steps must be at least 1: otherwise the model would be random"
            )
        return value

    @field_validator("config")
    @classmethod
    def _check_family_named(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "model_type" not in value:
            raise ValueError("model_type is required (for example 'qwen3_moe')")
        return value

    @field_validator("config")
    @classmethod
    def _check_router_loss(cls, value: dict[str, Any]) -> dict[str, Any]:
        if keys := router_loss_keys(value):
            raise ValueError(
                f"{', '.join(keys)}: pre-training does not use the model's own"
                " auxiliary router loss, so this key has no effect; leave it out and"
                " set pretrain.train.balance_loss_coefficient (0.01 in Switch, 0.001 in"
                " DeepSeek-V2), or balance_bias_rate"
            )
        return value


def router_loss_keys(config: dict[str, Any]) -> list[str]:
    """Return the dotted keys of a configuration that switch on an auxiliary loss of the
    routers; keys with a false or zero value do not count.
    """
    keys = []
    for key, value in config.items():
        if isinstance(value, dict):  # the text model of a multimodal one
            keys += [f"{key}.{inner}" for inner in router_loss_keys(value)]
        elif value and _ROUTER_LOSS.search(str(key)):
            keys.append(key)
    return keys


def _has_teacher(objective: Any) -> bool:
    choice = choice_of(ObjectiveConfig)
    kind: Any = choice.member(objective) if choice is not None else None
    # None: the objective is invalid, and its own error is the one to show.
    return kind is None or kind.has_teacher


def drop_inherited(raw: dict[str, Any], changes: Collection[str]) -> None:
    """Remove from a recipe's plain data, in place, what its changed choices do not have:
    keys of another objective, teacher and so on, and the teacher of an objective
    without one. changes: the dotted keys that were changed, which stay.
    """
    drop_foreign_keys(Recipe, raw, changes)
    if not _has_teacher(raw.get("objective") or {}) and not any(
        key.split(".")[0] == "teacher" for key in changes
    ):
        raw["teacher"] = None


class PublicationConfig(Strict):
    """Facts for the model card of the published folder that no stage can measure."""

    repo_id: str | None = None
    license: str | None = Field(
        None,
        description=(
            "for a checkpoint without README.md: licence, in place of the one on"
            " the original's card"
        ),
    )
    base_model: str | None = Field(
        None,
        description="for a checkpoint without README.md: hub id or folder of the original",
    )
    language: list[str] = Field(default_factory=list)

    @field_validator("repo_id", "base_model")
    @classmethod
    def _check_not_an_address(cls, name: str | None) -> str | None:
        # It is published as it is, and an address may hold a password.
        if name is not None and "://" in name:
            raise ValueError("owner/name on the Hub is needed, not an address")
        return name

    @field_validator("license", "base_model")
    @classmethod
    def _check_not_blank(cls, name: str | None) -> str | None:
        if name is not None and not name.strip():
            raise ValueError("must not be blank; leave it out")
        return name


class StoppingBase(Strict):
    """Scoring while training, and stopping when the score no longer improves (paper
    5.1: MBPP+, every 1000 steps, patience 20, delta 2 %).
    """

    every_steps: int = Field(1000, gt=0)
    patience: int = Field(20, gt=0)  # evaluations without an improvement
    # An improvement is more than this better than the best so far: a difference of
    # scores, a share of a KL (held-out text, own text).
    min_delta: float = Field(0.02, ge=0, lt=1)


class HeldoutKLStoppingConfig(StoppingBase):
    """Score by KL(original || student) on data.heldout, in nats per kept token."""

    metric: Literal["heldout_kl"]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a result depends on."""
        return self.model_dump(mode="json")


class TaskStoppingConfig(StoppingBase):
    """Score by a task, exactly as the evaluation scores that row of a suite."""

    task: str = Field(description="a task of `suite` (or set metric: heldout_kl)")
    suite: str = Field(description="a shipped suite, or the path of a suite file")
    limit: int | None = Field(None, gt=0)  # the first items only; null: all
    batch_size: int = Field(32, gt=0)  # sequences in one forward on a rank

    # the suite with this task alone; `settings` has its keys
    _scored: SuiteConfig = PrivateAttr()

    @field_validator("task", mode="before")
    @classmethod
    def _a_name(cls, value: Any) -> Any:
        # A recipe of an earlier fcsd has the keys of the row here.
        if isinstance(value, dict):
            raise ValueError(
                "the name of a task of `suite` is needed; put this row under `tasks:`"
                " of a suite file (docs/evaluate.md), and name that file as `suite`"
            )
        return value

    @model_validator(mode="after")
    def _check_task_in_suite(self) -> "TaskStoppingConfig":
        try:
            self._scored = named_tasks(self.suite, [self.task])
        except UserError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def scored(self) -> SuiteConfig:
        """The suite with only the scored task."""
        return self._scored

    @property
    def row(self) -> TaskConfig:
        """The row of the suite that says how the task is scored."""
        return self._scored.tasks[0]

    @property
    def metric(self) -> str:
        return self.row.metric

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a result depends on: those of the row instead of its name,
        and not the batch size, which changes a score only by floating-point noise.
        """
        settings = self.model_dump(mode="json", exclude={"suite", "batch_size"})
        return settings | {"task": self.row.model_dump(mode="json")}


EarlyStoppingConfig = Annotated[
    HeldoutKLStoppingConfig | TaskStoppingConfig,
    OneOf(
        "metric",
        {"heldout_kl": HeldoutKLStoppingConfig, "a task": TaskStoppingConfig},
        default="a task",
        else_default=True,
        name="",
        advice=(
            "; a task has the metric of its suite: leave `metric` out, and write, for"
            " example, {task: mbpp_plus, suite: paper11}"
        ),
    ),
]


def _has_backend(recipe: "Recipe", backend: str) -> bool:
    return recipe.teacher is not None and recipe.teacher.backend == backend


def _sweep_problem(recipe: "Recipe") -> str | None:
    """Return why a training of the sweep, or the one that it chooses, has fewer steps
    than its warm-up and its decay.
    """
    if (plan := recipe.sweep) is None:
        return None
    for batch in plan.batch_size_tokens:
        steps = plan.steps_of(batch, recipe.train)
        warmup = plan.steps_of(batch, recipe.train, plan.warmup_steps)
        if (decay := recipe.train.num_decay_steps(steps)) > steps - warmup:
            of = f" of {batch} tokens" if plan.equal == "tokens" else ""
            return (
                f"sweep.steps ({steps}{of}) are fewer than sweep.warmup_steps"
                f" ({warmup}) and train.lr_scheduler_kwargs.num_decay_steps"
                f" ({decay}), where a number below 1 is a fraction"
            )
        # Not only the sweep's own short trainings must hold warm-up and decay: the main
        # training, too, for whichever batch size is chosen.
        steps, warmup = recipe.steps_with(batch), recipe.train.warmup_steps
        if (decay := recipe.train.num_decay_steps(steps)) + warmup > steps:
            return (
                f"sweep.train_tokens ({plan.train_tokens}) in batches of {batch}"
                f" tokens is {steps} steps, fewer than train.warmup_steps"
                f" ({warmup}){f' and the {decay} of the decay' if decay else ''};"
                " change one of them"
            )
    return None


def _shards_instead(recipe: "Recipe") -> str:
    return f"use sharded{' or adapter_off' if recipe.lora is not None else ''}"


_RULES: tuple[Rule, ...] = (
    (
        lambda recipe: not recipe.model.path and recipe.pretrain is None,
        "model.path is required (or a `pretrain` section that makes the model)",
    ),
    (
        lambda recipe: recipe.model.path and recipe.pretrain is not None,
        "model.path and pretrain are both given; leave one out",
    ),
    (
        lambda recipe: recipe.teacher and not recipe.objective.has_teacher,
        "teacher: objective {0.objective.name!r} has no teacher; leave the section out",
    ),
    (
        lambda recipe: _has_backend(recipe, "adapter_off") and recipe.lora is None,
        "teacher.backend adapter_off needs a `lora` section: without adapters, training"
        " changes the teacher's weights; use sharded or cache",
    ),
    (
        lambda recipe: (
            _has_backend(recipe, "cache") and recipe.objective.name == "kl+l2"
        ),
        lambda recipe: (
            "teacher.backend cache holds final hidden states, but objective kl+l2"
            f" compares those of every layer; {_shards_instead(recipe)}"
        ),
    ),
    (
        lambda recipe: (
            _has_backend(recipe, "cache") and recipe.objective.own_text is not None
        ),
        lambda recipe: (
            "teacher.backend cache holds hidden states of the data's text, but"
            " objective.own_text writes new text in every step;"
            f" {_shards_instead(recipe)}"
        ),
    ),
    (
        lambda recipe: _has_backend(recipe, "adapter_off") and recipe.starts_calibrated,
        "teacher.backend adapter_off uses the student's weights as the original's, but"
        " calibration has changed them; use sharded or cache, or set"
        " calibration.starts_training: false",
    ),
    # Adapters already leave every original weight as it is.
    *(
        (
            lambda recipe, key=key: recipe.lora and getattr(recipe.objective, key),
            f"objective.{key} has no meaning with lora, which freezes all weights;"
            " leave it out",
        )
        for key in ("freeze_embeddings_and_head", "freeze_routers")
    ),
    (
        lambda recipe: (
            recipe.pretrain is not None
            and any(source.written for source in recipe.pretrain.data.train)
        ),
        "pretrain.data.train: written: the original would write its own training text"
        " before it exists; leave the key out",
    ),
    (
        lambda recipe: (
            recipe.early_stopping is not None
            and recipe.early_stopping.metric == "heldout_kl"
            and recipe.data.heldout is None
        ),
        "early_stopping.metric 'heldout_kl' needs data.heldout",
    ),
    (
        lambda recipe: (
            recipe.early_stopping is not None
            and recipe.train.balance_bias_rate is not None
        ),
        "train.balance_bias_rate does not work with early_stopping, because its best"
        " weights do not contain the routers' bias; use train.balance_loss_coefficient",
    ),
    (
        lambda recipe: (
            recipe.sweep is not None
            and recipe.sweep.choose_by is not None
            and recipe.early_stopping is None
        ),
        "sweep.choose_by: early_stopping is the score of the section early_stopping,"
        " which is null; add that section, or leave the key out to choose by the"
        " training loss",
    ),
    (
        lambda recipe: recipe.evaluation.layer_study and recipe.data.heldout is None,
        "evaluation.layer_study needs data.heldout, the text on which KL is measured",
    ),
    (_sweep_problem, _sweep_problem),
)


class Recipe(Strict):
    """Everything a run depends on; the run lacks the stages whose sections are null."""

    elsewhere: ClassVar[dict[str, str]] = {
        "extends": "only the file of a recipe can extend another one; load it first",
        "extend": "unknown key; did you mean 'extends'?",
    }
    rules: ClassVar[tuple[Rule, ...]] = _RULES

    name: Name
    output_dir: FolderPath
    seed: int = Field(0, ge=0)
    pretrain: PretrainConfig | None = None
    model: ModelConfig = Field(default_factory=ModelConfig)
    connectivity: ConnectivityConfig = Field(default_factory=ConnectivityConfig)
    calibration: CalibrationConfig | None = None
    data: DataConfig
    objective: ObjectiveConfig = Field(default_factory=KLObjectiveConfig)
    # null: backend sharded, where the objective has a teacher
    teacher: TeacherConfig | None = None
    lora: AdapterConfig | None = None  # null: all weights are trained
    train: TrainConfig = Field(default_factory=TrainConfig)
    safety: SafetyConfig = Field(default_factory=SafetyConfig)
    early_stopping: EarlyStoppingConfig | None = None
    sweep: SweepConfig | None = None
    # Further distillations of the same model; each is this recipe with some dotted keys
    # replaced: {sft: {objective.name: sft}, last-50: {connectivity.layers: {last:
    # 50%}}}. In a recipe that only pre-trains they are further pre-trainings.
    variants: dict[Name, dict[str, Any]] = Field(default_factory=dict)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    publication: PublicationConfig = Field(default_factory=PublicationConfig)

    @field_validator("variants")
    @classmethod
    def _check_variant_names(
        cls, value: dict[str, dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        if reserved := sorted(value.keys() & RESERVED):
            raise ValueError(
                f"{reserved[0]!r} is the name of a stage or its model; choose another"
                f" name than {', '.join(sorted(RESERVED))}"
            )
        return value

    @field_validator("teacher")
    @classmethod
    def _divergences_have_one(
        cls, value: TeacherConfig | None, info: ValidationInfo
    ) -> TeacherConfig | None:
        # Absent where the objective itself is invalid.
        objective = info.data.get("objective")
        if value is None and objective is not None and objective.has_teacher:
            return ShardedTeacherConfig()
        return value

    @model_validator(mode="after")
    def _servers_have_addresses(self) -> "Recipe":
        for source in self.data.train:
            if source.written is not None and source.written.server is not None:
                ServerConfig(url=source.written.server)
        return self

    def steps_with(self, batch_size_tokens: int) -> int:
        """Return the steps of the main distillation with this batch size: as many as
        `sweep.train_tokens` needs, if it is given.
        """
        if self.sweep is None or self.sweep.train_tokens is None:
            return self.train.max_steps
        return math.ceil(self.sweep.train_tokens / batch_size_tokens)

    @property
    def training_tokens(self) -> int:
        """The tokens that the longest training reads, among the sweep, the distillation
        that it chooses, and the variants.
        """
        tokens = [
            recipe.train.max_steps * recipe.train.batch_size_tokens
            for recipe in self.with_variants
        ]
        # A sweep leaves the batch size open: any of its choices may be the longest.
        if (sweep := self.sweep) is not None:
            for size in sweep.batch_size_tokens:
                tokens.append(
                    size * max(self.steps_with(size), sweep.steps_of(size, self.train))
                )
        return max(tokens)

    @property
    def model_names(self) -> list[str]:
        """The names of the run's models as in its report, the original first."""
        if self.only_pretrains:
            return ["original", *self.variants]
        calibrated = ["calibrated"] if self.calibration is not None else []
        return ["original", "converted", *calibrated, MAIN, *self.variants]

    @property
    def with_variants(self) -> list["Recipe"]:
        return [self, *map(self.variant, self.variants)]

    @property
    def data_sections(self) -> dict[str, TrainingDataConfig]:
        """The `data` sections of all trainings, by their keys as errors show them."""
        names = ["data", *(f"variants.{name}: data" for name in self.variants)]
        sections: dict[str, TrainingDataConfig] = dict(
            zip(names, (recipe.data for recipe in self.with_variants), strict=True)
        )
        return (
            sections
            if self.pretrain is None
            else sections | {"pretrain.data": self.pretrain.data}
        )

    @property
    def sections(self) -> Sections:
        """The sections that the trainer of the distillation reads."""
        # They are checked already.
        return Sections.model_construct(
            objective=self.objective,
            train=self.train,
            data=self.data,
            safety=self.safety,
        )

    @property
    def starts_calibrated(self) -> bool:
        return self.calibration is not None and self.calibration.starts_training

    @property
    def model_path(self) -> str:
        """The original checkpoint: `model.path`, or the output of the pre-training."""
        return self.model.path or str(Path(self.output_dir) / "pretrain" / "model")

    @property
    def teacher_model(self) -> tuple[str, ModelConfig]:
        """The teacher's checkpoint, and the settings to load it: those of the student's
        original except path and revision.
        """
        if self.teacher is None or self.teacher.path is None:
            return self.model_path, self.model
        changed = {"path": self.teacher.path, "revision": self.teacher.revision}
        return self.teacher.path, self.model.model_copy(update=changed)

    @property
    def only_pretrains(self) -> bool:
        """Whether nothing follows the pre-training: the recipe has no `train` section.
        Its variants are further pre-trainings.
        """
        return self.pretrain is not None and "train" not in self.model_fields_set

    def dump(self) -> dict[str, Any]:
        """Return the recipe as plain data, with all defaults."""
        return self.model_dump(
            mode="json", exclude={"train"} if self.only_pretrains else None
        )

    def chosen(self, name: str | None) -> "Recipe":
        """Return the variant that a user named; None: this recipe.

        Raises:
            UserError: the recipe has no such variant.
        """
        if name is None:
            return self
        if name not in self.variants:
            raise UserError(
                f"recipe {self.name}: has no variant '{name}'; allowed:"
                f" {', '.join(self.variants) or 'none'}"
            )
        return self.variant(name)

    def variant(self, name: str) -> "Recipe":
        """Return this recipe with the replacements of `variants[name]`, and without
        variants or a sweep.

        A variant with another `objective.name`, `teacher.backend` or
        `early_stopping.metric` does not inherit keys that
        its own choice does not have; one whose objective has no teacher inherits no
        `teacher` section.
        """
        raw = self.dump()
        raw["variants"], raw["sweep"] = {}, None
        where = f"recipe {self.name}: variants.{name}"
        changes = self.variants[name]
        for key, value in changes.items():
            self._check_change(key, where)
            set_dotted(raw, key, value, where)
        drop_inherited(raw, changes)
        return validate(Recipe, raw, where)

    def _check_change(self, key: str, where: str) -> None:
        """Refuse a key that a variant of this recipe cannot change."""
        sections: tuple[str, ...] = _VARIANT_SECTIONS
        training = "distillation of the same model"
        section = key.split(".")[0]
        if self.only_pretrains:
            sections, training = _PRETRAINING_SECTIONS, "pre-training on the same text"
            section = ".".join(key.split(".")[:2])
        if section not in sections:
            places = [
                place
                for place in places_of(Recipe, key)
                if place.startswith(tuple(f"{name}." for name in sections))
            ]
            advice = did_you_mean(
                places[0] if places else section, [*sections, *places]
            )
            raise UserError(
                f"{where}: {key}: a variant is another {training} and can change only"
                f" {', '.join(sections)}{advice}"
            )
