"""Schema of the recipe sections model, connectivity, teacher and lora."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fcsd.base.errors import UserError
from fcsd.base.strict import Strict, option
from fcsd.base.unions import one_of
from fcsd.model.connectivity.spec import Connectivity, parse_mlp, parse_selection

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class ModelConfig(Strict):
    """The original checkpoint: the teacher, and the weights the student starts from."""

    # hub id or local folder; may be left out when `pretrain` makes the model
    path: str = ""
    revision: str | None = option(None, "revision of a hub id")
    trust_remote_code: bool = option(False, "run code that comes with the checkpoint")
    # Also the dtype of the teacher, and of every model during evaluation.
    dtype: Dtype = option("auto", "dtype of the model; auto: the checkpoint's dtype")
    attn_implementation: str | None = None
    experts_implementation: str | None = None


def check_capacity(factor: float | None, drop: str | None) -> None:
    """Raise ValueError for `capacity_drop` without a factor that drops anything."""
    if drop is not None and factor is None:
        raise ValueError(
            f"capacity_drop: {drop!r} has no meaning without capacity_factor; set it,"
            " or leave both out"
        )


class ConnectivityConfig(Strict):
    """The layers to rewire, and the inputs of their two branches (see
    `fcsd.model.connectivity.Connectivity`).
    """

    layers: str | list[int] | dict[Literal["first", "last"], int | str] = "all"
    attention: Literal["partial", "full"] = option(
        "partial",
        "input of attention; partial: the stream without the routed output in flight",
    )
    mlp: str | list[int] | dict[Literal["first", "last"], int | str] = option(
        "outdated",
        "input of MoE and MLP blocks; outdated: the stream before this layer's"
        " attention; full: the regular input; a selection of layers, such as last:50%:"
        " outdated only in these layers",
    )

    @model_validator(mode="after")
    def _selection_can_be_read(self) -> "ConnectivityConfig":
        try:
            parse_selection(self.layers)
            parse_mlp(self.mlp)
        except UserError as error:
            raise ValueError(str(error)) from None
        return self

    def spec(self) -> Connectivity:
        """Return the connectivity that this section describes."""
        layers: Any = self.layers
        mlp: Any = self.mlp
        return Connectivity(layers, self.attention, mlp)


class _OfACheckpoint(Strict):
    """A teacher that is a separate checkpoint instead of the student's weights."""

    backend: str
    # another checkpoint, with the student's vocabulary; null: model.path
    path: str | None = None
    revision: str | None = None  # of a hub id in `path`

    @model_validator(mode="after")
    def _revision_has_its_path(self) -> Self:
        if self.revision is not None and self.path is None:
            raise ValueError(
                "revision applies to `path`; for the student's model, set"
                " model.revision"
            )
        return self


class ShardedTeacherConfig(_OfACheckpoint):
    """Run a second, frozen model: a whole one on one process, shards on several if the
    engine shards.
    """

    backend: Literal["sharded"] = "sharded"

    cache: ClassVar[None] = None


class AdapterOffTeacherConfig(Strict):
    """Run the student's own weights, with adapters and connectivity off; needs `lora`."""

    backend: Literal["adapter_off"]

    path: ClassVar[None] = None
    revision: ClassVar[None] = None
    cache: ClassVar[None] = None


class CachedTeacherConfig(_OfACheckpoint):
    """Read the hidden states that the stage cache-teacher wrote; no teacher is run."""

    backend: Literal["cache"]
    cache: str = Field(description="the folder of the stage cache-teacher")
    # Rows that are compared with the loaded teacher before training starts; 0: it is
    # never loaded.
    spot_check_rows: int = Field(4, ge=0)


# The source of the teacher's final hidden states. All give the same numbers; memory and
# time differ.
TeacherConfig = Annotated[
    ShardedTeacherConfig | AdapterOffTeacherConfig | CachedTeacherConfig,
    one_of(
        "backend",
        ShardedTeacherConfig,
        AdapterOffTeacherConfig,
        CachedTeacherConfig,
        default="sharded",
    ),
]


class AdapterConfig(Strict):
    """Train low-rank adapters and freeze the weights of the model. The names are those
    of `peft.LoraConfig`.
    """

    r: int = Field(16, gt=0)
    lora_alpha: float = Field(32, gt=0)
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    # Names of Linear modules, or all-linear for all but the head.
    target_modules: str | list[str] | None = "all-linear"
    # Experts are parameters of three dimensions, not Linear modules:
    # mlp.experts.gate_up_proj, mlp.experts.down_proj
    target_parameters: list[str] | None = None

    @model_validator(mode="after")
    def _something_is_adapted(self) -> "AdapterConfig":
        if not self.target_modules and not self.target_parameters:
            raise ValueError(
                "target_modules or target_parameters must name the weights to adapt"
            )
        if self.lora_dropout and self.target_parameters:
            raise ValueError(
                "lora_dropout must be 0 with target_parameters: the adapters of a"
                " parameter have no input to drop"
            )
        return self
