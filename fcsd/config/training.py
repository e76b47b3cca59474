"""Schema of the objective, the optimiser, the safety net and the sweep."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fcsd.config.strict import Strict

DIVERGENCES = ("kl", "reverse_kl", "jsd", "kl+l2")


OBJECTIVES_WITH = {
    "temperature": DIVERGENCES,
    "jsd_beta": ("jsd",),
    "clip": DIVERGENCES,
    "l2_coefficient": ("kl+l2",),
    "l2_relative": ("kl+l2",),
    "l2_points": ("kl+l2",),
    "l2_until": ("kl+l2",),
    "router_kl_coefficient": DIVERGENCES,
}


class ObjectiveConfig(Strict):
    """What is minimised, in nats per kept token.

    kl          forward KL(teacher || student), paper Eq. 4
    reverse_kl  KL(student || teacher)
    jsd         jsd_beta KL(teacher || m) + (1 - jsd_beta) KL(student || m), where the mixture m has jsd_beta
                of the teacher
    kl+l2       kl plus l2_coefficient times a distance inside the model; as it stands Eq. 5, on the outputs of all
                decoder layers (`fcsd.losses.hidden_terms`)
    sft         cross-entropy on the data, paper Eq. 3: the baseline
    ce          the same loss under its pre-training name

    A key that an objective has no use for is null (`fcsd.losses.fused` has the exact definitions).
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
    def _keys_belong_to_the_name(self) -> "ObjectiveConfig":
        if self.name == "kl+l2" and self.l2_coefficient is None:
            raise ValueError("l2_coefficient is needed for objective 'kl+l2' and for no other")
        for key, names in OBJECTIVES_WITH.items():
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
        return self.name in OBJECTIVES_WITH["temperature"]


class TrainConfig(Strict):
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
    def _minimum_rate_belongs_to_its_schedule(self) -> "TrainConfig":
        if (self.lr_scheduler_type == "cosine_with_min_lr") != (self.min_lr_rate is not None):
            raise ValueError(
                "min_lr_rate is needed for lr_scheduler_type 'cosine_with_min_lr' and for no other"
            )
        if self.warmup_steps > self.max_steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) is more than max_steps ({self.max_steps})")
        return self


class SafetyConfig(Strict):
    """What a long run does when a step goes wrong (`fcsd.distill.safety`); of every training of the recipe."""

    max_skipped_steps: int = Field(10, ge=0)  # in a row, for a loss or gradient that is not finite
    spike_window: int = Field(128, gt=1)  # steps whose median is the usual loss
    spike_threshold: float | None = Field(6.0, gt=0)  # robust standard deviations above it; null: not watched
    spike_steps: int = Field(5, gt=0)  # a spike that lasts this many steps is rewound
    max_rewinds: int = Field(0, ge=0)  # to a checkpoint from before the trouble; 0: none


class SweepConfig(Strict):
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
