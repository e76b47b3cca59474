"""Settings of the routing study, of bias tables, and of the study of steered models."""

from typing import Literal, NamedTuple

from pydantic import Field, PositiveInt, field_validator, model_validator

from fcsd.base.strict import Strict, like
from fcsd.evaluation.study import ModelStudy
from fcsd.model.config import ModelConfig

Kind = Literal["camoe", "bottleneck", "windows"]
Swept = Literal["camoe", "bottleneck"]


PlacedBy = Literal["contiguous", "balanced", "topology_aware"]
CAMOE_STRENGTHS = [0.0, 0.05, 0.10, 0.15, 0.20, 0.25]  # of its tables
SIGMA_FLOOR = 0.05


class Steered(NamedTuple):
    """A model of the report: a model of the run, and how its routers are steered."""

    model: str
    kind: Swept
    strength: float


class SteeringStudy(Strict):
    """Evaluate models of a run with their routers steered, from their own traffic.

    Each kind and strength is a model of the report: KIND-STRENGTH for the original,
    MODEL-KIND-STRENGTH for other models. A strength is CAMoE's lambda; for
    `bottleneck`, the lambda of CAMoE whose time is the target. 0 is the unsteered
    model.
    """

    recipe: str  # the recipe whose run has evaluated the models
    output_dir: str | None = None  # null: `steering` in the folder of the run
    links: str  # file of `fcsd-steer profile-network`
    models: list[str] = Field(
        default_factory=lambda: ["original"], min_length=1
    )  # names as in the report
    kind: Swept | list[Swept] = "camoe"
    strengths: list[float] = Field(
        default_factory=lambda: list(CAMOE_STRENGTHS), min_length=1
    )
    # endpoints that hold the experts; null: those of the links
    endpoints: PositiveInt | None = None
    placement: PlacedBy = Field(
        "contiguous", description="how experts are distributed over endpoints"
    )
    selection: bool = Field(
        False, description="choose experts with the bias, but weigh them without it"
    )
    scale: Literal["logit_std"] | None = Field(
        None,
        description="measure the strength in standard deviations of the layer's logits",
    )
    sigma_floor: float = Field(
        SIGMA_FLOOR,
        description=(
            "lower bound of the standard deviation by which a source's times are divided,"
            " as a fraction of their mean; 0: as in CAMoE's paper"
        ),
        ge=0,
    )
    tokens: PositiveInt = 65_536  # tokens of data.train on which the traffic is counted

    @field_validator("strengths")
    @classmethod
    def _check_strengths(cls, value: list[float]) -> list[float]:
        if (low := min(value)) < 0:
            raise ValueError(f"a strength is 0 or more, got {low:g}")
        if len(set(value)) != len(value):
            raise ValueError("a strength is given twice")
        if not any(value):
            raise ValueError("needs a strength above 0; 0 is the unsteered model")
        return value

    @field_validator("models")
    @classmethod
    def _check_models(cls, value: list[str]) -> list[str]:
        if len(set(value)) != len(value):
            raise ValueError("a model is given twice")
        return value

    @property
    def kinds(self) -> list[Swept]:
        """The kinds as a list, even of a single one."""
        kinds = [self.kind] if isinstance(self.kind, str) else self.kind
        return list(dict.fromkeys(kinds))

    @property
    def names(self) -> dict[str, Steered]:
        """The steered models by their names in the report."""
        return {
            # Strength 0 is the model itself.
            f"{'' if model == 'original' else f'{model}-'}{kind}-{strength:g}": Steered(
                model, kind, strength
            )
            for model in self.models
            for kind in self.kinds
            for strength in self.strengths
            if strength
        }

    def names_of(self, model: str) -> dict[str, Steered]:
        """Return the steered models made from one model of the run."""
        return {
            name: steered
            for name, steered in self.names.items()
            if steered.model == model
        }


class RoutingStudy(ModelStudy):
    """The models, the text and the endpoints of a routing study."""

    against: ModelConfig | None = None
    batch_size: int = Field(
        8, description="rows of one batch; each batch is at one endpoint", gt=0
    )
    links: str | None = Field(
        None,
        description="links that `fcsd-steer profile-network` measured",
        json_schema_extra={"metavar": "FILE"},
    )
    endpoints: int | None = Field(
        None,
        description=(
            "endpoints over which experts and batches are distributed (default: those of"
            " the links, or 8)"
        ),
        gt=0,
    )

    @model_validator(mode="after")
    def _check_text(self) -> "RoutingStudy":
        if self.text is None and not self.tasks:
            raise ValueError(
                "nothing to route: give a text (--text) or a task of the suite (--task)"
            )
        return self


class BiasSettings(RoutingStudy):
    """The kind of tables to make, and the text and links to make them from."""

    links: str = Field(
        ...,
        description="links that `fcsd-steer profile-network` measured",
        json_schema_extra={"metavar": "FILE"},
    )
    kind: Kind = Field(
        "camoe",
        description=(
            "camoe: move tokens off all slow paths; bottleneck: only off the slowest,"
            " until camoe's time is reached; windows: in each layer, until its exchanges"
            " are hidden"
        ),
    )
    strength: float | None = Field(
        None,
        description="CAMoE's lambda; for bottleneck, the lambda whose time is the goal",
        ge=0,
    )
    windows: str | None = Field(
        None,
        description="seconds in which each exchange is hidden, from `fcsd plan --windows`",
        json_schema_extra={"metavar": "FILE"},
    )
    placement: PlacedBy = like(SteeringStudy, "placement")
    selection: bool = like(SteeringStudy, "selection")
    scale: Literal["logit_std"] | None = like(SteeringStudy, "scale")
    sigma_floor: float = like(SteeringStudy, "sigma_floor")

    @model_validator(mode="after")
    def _check_kind(self) -> "BiasSettings":
        # A file of windows replaces the strength: it tells how far each layer must be
        # pushed.
        if (self.kind == "windows") != (self.windows is not None):
            raise ValueError(
                "--windows FILE and --kind windows need each other; give both"
            )
        if (self.kind == "windows") == (self.strength is not None):
            raise ValueError(
                f"--strength: {self.kind} "
                + ("takes none" if self.strength is not None else "needs one")
            )
        if self.kind == "windows" and self.scale is not None:
            raise ValueError(
                "--scale: has no effect with --kind windows, which has no strength; leave it out"
            )
        if self.kind == "windows" and "sigma_floor" in self.model_fields_set:
            raise ValueError(
                "--sigma-floor: has no effect with --kind windows; leave it out"
            )
        return self
