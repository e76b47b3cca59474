"""Schema of the recipe's sections teacher and lora."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fcsd.base.strict import FolderPath, Rule, Strict, one_of


class _OfACheckpoint(Strict):
    """A teacher that is a separate checkpoint instead of the student's weights."""

    backend: str
    # another checkpoint, with the student's vocabulary; null: model.path
    path: str | None = None
    revision: str | None = None  # of a hub id in `path`

    rules: ClassVar[tuple[Rule, ...]] = (
        (
            lambda teacher: teacher.revision is not None and teacher.path is None,
            "revision applies to `path`; for the student's model, set model.revision",
        ),
    )


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
    cache: FolderPath = Field(description="the folder of the stage cache-teacher")
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

    rules: ClassVar[tuple[Rule, ...]] = (
        (
            lambda lora: not lora.target_modules and not lora.target_parameters,
            "target_modules or target_parameters must name the weights to adapt",
        ),
        (
            lambda lora: lora.lora_dropout and lora.target_parameters,
            "lora_dropout must be 0 with target_parameters: the adapters of a parameter"
            " have no input to drop",
        ),
    )
