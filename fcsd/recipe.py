"""A recipe: one strict YAML file that names everything a run depends on, and is the record of that run.

A recipe is complete: no flag beside it, no inheritance, every default in the schema below
(`fcsd recipe RECIPE` prints the whole of it). Units are part of the keys. Relative paths are relative to the
folder in which the command runs. `--set train.learning_rate=4e-5` replaces one value by its dotted key.

Not covered: where a run happens (processes, FSDP, DeepSpeed) is accelerate's configuration, see `configs/`.
"""

import copy
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, PositiveInt, ValidationError, field_validator, model_validator

from fcsd.errors import UserError
from fcsd.evaluate.suites import SuiteTask
from fcsd.strict import Strict, did_you_mean, parse_yaml, read_yaml, validate

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_VARIANT_SECTIONS = (
    "connectivity",
    "data",
    "objective",
    "teacher",
    "lora",
    "train",
    "early_stopping",
    "seed",
)
_DIVERGENCES = ("kl", "reverse_kl", "jsd", "kl+l2")
_OBJECTIVES_WITH = {
    "temperature": _DIVERGENCES,
    "jsd_beta": ("jsd",),
    "clip": _DIVERGENCES,
    "l2_coefficient": ("kl+l2",),
    "l2_relative": ("kl+l2",),
    "l2_points": ("kl+l2",),
    "l2_until": ("kl+l2",),
    "router_kl_coefficient": _DIVERGENCES,
}
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
Column = Literal["messages", "prompt", "input", "response", "text"]


class Model(Strict):
    """The original checkpoint: the teacher, and the weights the student starts from."""

    path: str = ""  # hub id or local folder; may be left out when `pretrain` makes the model
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: Dtype = (
        "auto"  # of the teacher, and of every model while it is evaluated; auto: the checkpoint's own
    )
    attn_implementation: str | None = None
    experts_implementation: str | None = None


class Connectivity(Strict):
    """Which layers are rewired, and which of their two inputs (see `fcsd.connectivity.Connectivity`)."""

    layers: str | list[int] | dict[Literal["first", "last"], int | str] = "all"
    attention: Literal["partial", "full"] = "partial"
    mlp: Literal["outdated", "full"] = "outdated"

    @model_validator(mode="after")
    def _selection_can_be_read(self) -> "Connectivity":
        from fcsd.connectivity.spec import parse_selection

        try:
            parse_selection(self.layers)
        except UserError as error:
            raise ValueError(str(error)) from None
        return self


class Source(Strict):
    """One data set: a hub id, a local folder in hub layout, or a .jsonl, .json or .parquet file."""

    path: str
    name: str | None = None  # configuration of the data set
    split: str = "train"
    revision: str | None = None
    streaming: bool = False
    columns: dict[Column, str] = Field({"messages": "messages"})
    weight: float = Field(1.0, gt=0)  # share in a mixture of several sources
    max_examples: int | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _columns_make_an_example(self) -> "Source":
        kinds = set(self.columns)
        if kinds not in ({"messages"}, {"text"}, {"prompt", "response"}, {"prompt", "input", "response"}):
            raise ValueError(
                "columns must name 'messages', or 'text', or 'prompt' and 'response' (and optionally 'input'),"
                f" got {', '.join(sorted(kinds)) or 'nothing'}"
            )
        return self


class Judged(Strict):
    """Rows of a data set that models are judged on."""

    path: str  # hub id or folder below evaluation.data_root, or a local folder or file
    name: str | None = None  # configuration of the data set
    split: str = "test"
    revision: str | None = None
    columns: list[str] = Field(default_factory=list)  # whose text counts; none: all of them


class Decontaminate(Strict):
    """Training examples that share `ngram` words in a row with a test item are left out and listed."""

    suite: str | None = None  # name in eval/suites, or a path: the items of its tasks
    against: list[Judged] = Field(default_factory=list)  # and of these data sets
    ngram: int = Field(13, ge=5)

    @model_validator(mode="after")
    def _has_test_items(self) -> "Decontaminate":
        if self.suite is None and not self.against:
            raise ValueError("needs test items: name a suite, or data sets under `against`")
        return self


class Data(Strict):
    """Training text, and held-out text on which KL to the original is reported."""

    train: list[Source] = Field(min_length=1)
    decontaminate: Decontaminate | None = None
    heldout: Source | None = None
    heldout_examples: int = Field(256, gt=0)
    max_length: int = Field(4096, gt=1)  # tokens in one row
    packing: bool = True
    loss_on: Literal["response", "all"] = "response"


class Objective(Strict):
    """What is minimised, in nats per kept token.

    kl          forward KL(teacher || student), paper Eq. 4
    reverse_kl  KL(student || teacher)
    jsd         jsd_beta KL(teacher || m) + (1 - jsd_beta) KL(student || m), where the mixture m has jsd_beta
                of the teacher
    kl+l2       kl plus l2_coefficient times a distance inside the model; as it stands Eq. 5, on the outputs of all
                decoder layers (`fcsd.distill.extra_terms`)
    sft         cross-entropy on the data, paper Eq. 3: the baseline
    ce          the same loss under its pre-training name

    A key that an objective has no use for is null (`fcsd.distill.losses` has the exact definitions).
    """

    name: Literal["kl", "reverse_kl", "jsd", "kl+l2", "sft", "ce"] = "kl"
    temperature: float | None = Field(None, gt=0, allow_inf_nan=False)  # of both softmaxes; 1.0
    jsd_beta: float | None = Field(None, gt=0, lt=1)  # 0.5; its limits are called kl (0) and reverse_kl (1)
    clip: float | None = Field(None, gt=0)  # nats; a token above it counts as this much, without gradient
    l2_coefficient: float | None = Field(None, gt=0)
    l2_relative: bool | None = (
        None  # false; each token's squared distance over the teacher's square, mean of points
    )
    l2_points: Literal["blocks", "merges", "sublayers"] | None = None  # blocks
    l2_until: float | None = Field(
        None, gt=0, le=1
    )  # the coefficient falls to 0 over this share of max_steps
    router_kl_coefficient: float | None = Field(
        None, gt=0
    )  # of the routers' KL to the teacher's, mean of MoE layers
    vocab_size: int | None = Field(None, gt=0)  # of heads with padding: rows from here on are no tokens
    freeze_embeddings_and_head: bool = False
    freeze_routers: bool = False

    @model_validator(mode="after")
    def _keys_belong_to_the_name(self) -> "Objective":
        if self.name == "kl+l2" and self.l2_coefficient is None:
            raise ValueError("l2_coefficient is needed for objective 'kl+l2' and for no other")
        for key, names in _OBJECTIVES_WITH.items():
            if getattr(self, key) is not None and self.name not in names:
                raise ValueError(
                    f"{key} is needed for objective 'kl+l2' and for no other"
                    if key == "l2_coefficient"
                    else f"{key} has no meaning for objective {self.name!r}, only for {', '.join(names)}"
                )
        # Assignment would validate again, and mark the key as given by the file.
        if self.temperature is None and self.has_teacher:
            self.__dict__["temperature"] = 1.0
        if self.jsd_beta is None and self.name == "jsd":
            self.__dict__["jsd_beta"] = 0.5
        if self.name == "kl+l2":
            self.__dict__["l2_relative"] = bool(self.l2_relative)
            self.__dict__["l2_points"] = self.l2_points or "blocks"
        return self

    @property
    def has_extra_terms(self) -> bool:
        """Whether something inside the models is compared, and not only what they give."""
        return self.l2_coefficient is not None or self.router_kl_coefficient is not None

    @property
    def has_teacher(self) -> bool:
        """Whether the student is compared with a teacher, and not with the data alone."""
        return self.name in _OBJECTIVES_WITH["temperature"]


class Teacher(Strict):
    """Where the teacher's final hidden states come from; the numbers are the same, memory and time are not.

    sharded      a second, frozen model: whole on one process, in shards over several where the engine shards
    adapter_off  the student's own weights, with adapters and connectivity off; needs `lora`
    cache        read from the folder that `fcsd cache-teacher` wrote; the teacher is not run
    """

    backend: Literal["sharded", "adapter_off", "cache"] = "sharded"
    path: str | None = (
        None  # another checkpoint as the teacher, with the student's vocabulary; null: model.path
    )
    revision: str | None = None  # of a hub id in `path`
    cache: str | None = None  # folder of `fcsd cache-teacher`; read by backend cache only
    # Of a cache: rows that are compared with the loaded teacher before training starts; 0: it is never loaded.
    spot_check_rows: int = Field(4, ge=0)

    @model_validator(mode="after")
    def _keys_belong_to_the_backend(self) -> "Teacher":
        if self.backend == "cache" and not self.cache:
            raise ValueError("backend 'cache' needs `cache`, the folder that `fcsd cache-teacher` wrote")
        if self.backend == "adapter_off" and self.path is not None:
            raise ValueError(
                "backend 'adapter_off' runs the student's own weights and takes no path; use sharded or cache"
            )
        if self.revision is not None and self.path is None:
            raise ValueError("revision belongs to `path`; that of the student's model is model.revision")
        return self


class Lora(Strict):
    """Low-rank adapters are trained, the weights of the model are not; names are those of `peft.LoraConfig`."""

    r: int = Field(16, gt=0)
    lora_alpha: float = Field(32, gt=0)
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: str | list[str] | None = (
        "all-linear"  # names of Linear modules; all-linear: all but the head
    )
    # Experts are one parameter of three dimensions: mlp.experts.gate_up_proj, mlp.experts.down_proj
    target_parameters: list[str] | None = None

    @model_validator(mode="after")
    def _something_is_adapted(self) -> "Lora":
        if not self.target_modules and not self.target_parameters:
            raise ValueError("target_modules or target_parameters must name what is adapted")
        if self.lora_dropout and self.target_parameters:
            raise ValueError(
                "lora_dropout must be 0 with target_parameters: the adapters of a parameter have no input to drop"
            )
        return self


class Train(Strict):
    """The optimiser's side of a run; names are those of `transformers.TrainingArguments` where it has them."""

    max_steps: int = Field(2000, gt=0)
    batch_size_tokens: int = Field(131072, gt=0)  # over all ranks and accumulation steps
    per_device_train_batch_size: int = Field(1, gt=0)  # rows of max_length tokens in one forward
    learning_rate: float = Field(2e-5, gt=0)
    lr_scheduler_type: Literal["cosine", "cosine_with_min_lr", "linear", "constant_with_warmup"] = "cosine"
    min_lr_rate: float | None = Field(None, ge=0, le=1)  # for cosine_with_min_lr: last rate over first
    warmup_steps: int = Field(1000, ge=0)
    layer_lr_ratio: float = Field(
        1.0, gt=0
    )  # last layer's rate over the first one's; learning_rate is the middle's
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the layers' matrices, AdamW for all else
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    ema_decay: float | None = Field(
        None, gt=0, lt=1
    )  # the weights' moving average is what is scored and left
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the trained weights
    bf16: bool = False  # autocast to bfloat16
    gradient_checkpointing: bool | None = None  # null: from 1e9 parameters on
    logging_steps: int = Field(10, gt=0)
    save_steps: int = Field(500, gt=0)
    save_total_limit: int = Field(2, gt=0)
    report_to: list[Literal["wandb", "trackio", "tensorboard"]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _minimum_rate_belongs_to_its_schedule(self) -> "Train":
        if (self.lr_scheduler_type == "cosine_with_min_lr") != (self.min_lr_rate is not None):
            raise ValueError(
                "min_lr_rate is needed for lr_scheduler_type 'cosine_with_min_lr' and for no other"
            )
        if self.warmup_steps > self.max_steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) is more than max_steps ({self.max_steps})")
        return self


class Safety(Strict):
    """What a long run does when a step goes wrong (`fcsd.distill.safety`); of every training of the recipe."""

    max_skipped_steps: int = Field(10, ge=0)  # in a row, for a loss or gradient that is not finite
    spike_window: int = Field(128, gt=1)  # steps whose median is the usual loss
    spike_threshold: float | None = Field(6.0, gt=0)  # robust standard deviations above it; null: not watched
    spike_steps: int = Field(5, gt=0)  # a spike that lasts this many steps is rewound
    max_rewinds: int = Field(0, ge=0)  # to a checkpoint from before the trouble; 0: none


class EarlyStopping(Strict):
    """A score while training, and the end of it (paper 5.1: MBPP+, every 1000 steps, patience 20, delta 2 %).

    heldout_kl     KL(original || student) on data.heldout, in nats per kept token
    pass@1         greedy, on a code task
    metric,filter  lm-eval's key (`acc,none`), on any likelihood or generation task of lm-eval

    The keys from `kind` on are those of a row of a suite (`fcsd.evaluate.suites.SuiteTask`), and the task is scored as
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
    def _keys_belong_to_the_metric(self) -> "EarlyStopping":
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
    def row(self) -> SuiteTask:
        """The scored task as a row of a suite.

        Raises:
            ValueError: keys that such a row may not have.
        """
        code = {"kind": "code", "task": "early_stopping", "chat_template": True, "stop": []}
        given = {key: getattr(self, key) for key in _ROW_KEYS if getattr(self, key) is not None}
        kind = given.get("kind", "code")
        try:
            return SuiteTask.model_validate(
                (code if kind == "code" else {}) | given | {"metric": self.metric}
            )
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in problem["loc"])
            raise ValueError(
                (f"{key}: " if key else "") + problem["msg"].removeprefix("Value error, ")
            ) from None


class Sweep(Strict):
    """Batch size first, at train.learning_rate; then learning rate, at the best batch size (paper 5.1)."""

    batch_size_tokens: list[Annotated[int, Field(gt=0)]] = Field(
        default_factory=lambda: [2**16, 2**17, 2**18], min_length=1
    )
    learning_rate: list[Annotated[float, Field(gt=0)]] = Field(
        default_factory=lambda: [2e-5, 4e-5, 8e-5], min_length=1
    )
    steps: int = Field(2000, gt=0)  # of every run
    warmup_steps: int = Field(1000, ge=0)
    last_steps: int = Field(100, gt=0)  # the choice is by the mean training loss over this many last steps
    # Of the distillation that follows: its train.max_steps becomes this over the chosen batch size. null: as it is
    train_tokens: int | None = Field(None, gt=0)


class Evaluation(Strict):
    """How every model of the run is judged."""

    suite: str = "tiny"  # name in eval/suites, or a path
    data_root: str | None = None  # folder in hub layout; null: the Hub
    batch_size: PositiveInt | Literal["auto"] = 16
    limit: int | None = Field(None, gt=0)  # items per task, for a quick look
    cache: str | None = None  # folder of finished tasks that several runs share; null: one in each evaluation
    layer_study: bool = False  # untrained quality against the number of rewired layers (paper Fig. 3)
    allow_weak_sandbox: bool = False


class Pretrain(Strict):
    """A model from scratch (paper App. A): `config` is a transformers model configuration with its model_type."""

    config: dict[str, Any]
    tokenizer: str
    connectivity: Connectivity = Connectivity(layers="none")
    data: Data
    train: Train

    @field_validator("config")
    @classmethod
    def _config_names_its_family(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "model_type" not in value:
            raise ValueError("model_type is required (for example 'qwen3_moe')")
        return value


class Publication(Strict):
    """What the model card of the published folder says beyond what was measured."""

    repo_id: str | None = None
    license: str | None = None
    base_model: str | None = None
    language: list[str] = Field(default_factory=list)


class Recipe(Strict):
    """Everything a run depends on; sections that are null are stages that the run does not have."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    output_dir: str
    seed: int = Field(0, ge=0)
    pretrain: Pretrain | None = None
    model: Model = Model()
    connectivity: Connectivity = Connectivity()
    data: Data
    objective: Objective = Objective()
    teacher: Teacher | None = None  # null: backend sharded, where the objective has a teacher
    lora: Lora | None = None  # null: all weights are trained
    train: Train = Train()
    safety: Safety = Safety()
    early_stopping: EarlyStopping | None = None
    sweep: Sweep | None = None
    # Further distillations of the same model, each this recipe with some dotted keys replaced:
    # {sft: {objective.name: sft}, last-50: {connectivity.layers: {last: 50%}}}
    variants: dict[str, dict[str, Any]] = Field(default_factory=dict)
    evaluation: Evaluation = Evaluation()
    publication: Publication = Publication()

    @model_validator(mode="after")
    def _has_a_model(self) -> "Recipe":
        if not self.model.path and self.pretrain is None:
            raise ValueError("model.path is required (or a `pretrain` section that makes the model)")
        if self.model.path and self.pretrain is not None:
            raise ValueError("model.path and pretrain are both given; leave one out")
        return self

    @model_validator(mode="after")
    def _teacher_fits(self) -> "Recipe":
        teacher = self.teacher
        if teacher is None:
            if self.objective.has_teacher:
                self.__dict__["teacher"] = Teacher()
        elif not self.objective.has_teacher:
            raise ValueError(
                f"teacher: objective {self.objective.name!r} compares with no teacher; leave the section out"
            )
        elif teacher.backend == "adapter_off" and self.lora is None:
            raise ValueError(
                "teacher.backend adapter_off needs a `lora` section: without adapters the trained weights are no"
                " longer the teacher's; use sharded or cache"
            )
        elif teacher.backend == "cache" and self.objective.has_extra_terms:
            what = "objective kl+l2" if self.objective.name == "kl+l2" else "objective.router_kl_coefficient"
            raise ValueError(
                f"teacher.backend cache holds final hidden states, {what} compares those of every layer;"
                " use sharded" + (" or adapter_off" if self.lora is not None else "")
            )
        for key in ("freeze_embeddings_and_head", "freeze_routers"):
            if self.lora is not None and getattr(self.objective, key):
                raise ValueError(
                    f"objective.{key} has no meaning with lora, which freezes all weights; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _stopping_has_its_text(self) -> "Recipe":
        stopping = self.early_stopping
        if stopping is not None and stopping.metric == "heldout_kl" and self.data.heldout is None:
            raise ValueError("early_stopping.metric 'heldout_kl' needs data.heldout")
        return self

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output_dir)

    @property
    def model_path(self) -> str:
        """The original checkpoint: `model.path`, or what the pre-training stage leaves."""
        return self.model.path or str(self.folder / "pretrain" / "model")

    @property
    def teacher_model(self) -> tuple[str, Model]:
        """The teacher's checkpoint, and how it is loaded: as the student's original but for path and revision."""
        if self.teacher is None or self.teacher.path is None:
            return self.model_path, self.model
        changed = {"path": self.teacher.path, "revision": self.teacher.revision}
        return self.teacher.path, self.model.model_copy(update=changed)

    def dump(self) -> dict[str, Any]:
        """The whole recipe as plain data, defaults included."""
        return self.model_dump(mode="json")

    def variant(self, name: str) -> "Recipe":
        """This recipe with the replacements of `variants[name]`, and without variants or sweep of its own.

        A variant with another `objective.name` does not inherit the keys that belong to other objectives.
        """
        raw = self.dump()
        raw["variants"], raw["sweep"] = {}, None
        where = f"recipe {self.name}: variants.{name}"
        for key, value in self.variants[name].items():
            section = key.split(".")[0]
            if section not in _VARIANT_SECTIONS:
                raise UserError(
                    f"{where}: {key}: a variant is another distillation of the same model and can change only"
                    f" {', '.join(_VARIANT_SECTIONS)}{did_you_mean(section, list(_VARIANT_SECTIONS))}"
                )
            if key == "objective.name":
                for other, names in _OBJECTIVES_WITH.items():
                    if value not in names and f"objective.{other}" not in self.variants[name]:
                        raw["objective"][other] = None
                if value not in _DIVERGENCES and not any(
                    other.split(".")[0] == "teacher" for other in self.variants[name]
                ):
                    raw["teacher"] = None
            set_dotted(raw, key, value, where)
        return validate(Recipe, raw, where)


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read and check a recipe file; `overrides` are `dotted.key=value` texts, the value in YAML.

    Raises:
        UserError: unreadable file, invalid YAML, unknown key (with a suggestion), a value out of range, no such suite,
            training data that is a graded split.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder, a recipe file is needed (for example {path}/recipe.yaml)")
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise UserError(
            f"{path}: a recipe is a mapping of keys to values, this file holds {type(raw).__name__}"
        )
    for override in overrides or []:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise UserError(f"--set {override}: must look like train.learning_rate=4e-5")
        set_dotted(raw, key, parse_yaml(text, f"--set {override}"), f"--set {override}")
    recipe = validate(Recipe, raw, str(path))
    for name in recipe.variants:
        recipe.variant(name)  # a mistake inside a variant is found now, not hours later
    from fcsd.graded import refuse_graded

    refuse_graded(recipe, str(path))
    return recipe


def set_dotted(raw: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set `raw[a][b][c] = value` for key `a.b.c`, in place; a number selects an item of a list."""
    parts = key.split(".")
    place: Any = raw
    for index, part in enumerate(parts[:-1]):
        if isinstance(place, list):
            place = _item(place, part, where)
        else:
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
        if not isinstance(place, dict | list):
            raise UserError(
                f"{where}: {'.'.join(parts[: index + 1])} is a single value and has no key {parts[index + 1]!r}"
            )
    if isinstance(place, list):
        _item(place, parts[-1], where)
        place[int(parts[-1])] = copy.deepcopy(value)
    else:
        place[parts[-1]] = copy.deepcopy(value)


def _item(place: list[Any], part: str, where: str) -> Any:
    if not part.isdigit() or int(part) >= len(place):
        raise UserError(f"{where}: {part!r} is not an item of this list; allowed: 0 to {len(place) - 1}")
    return place[int(part)]


def to_yaml(value: Any) -> str:
    """YAML text in the order of the schema, as `fcsd recipe` prints it."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=110)
