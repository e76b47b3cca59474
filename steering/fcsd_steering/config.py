"""Settings of the routing study, of bias tables, and of the study of steered models."""

from typing import Literal, NamedTuple

from pydantic import Field, PositiveInt, field_validator, model_validator

from fcsd.extension.base import ModelConfig, ModelStudy, Strict, like, option

Kind = Literal["camoe", "bottleneck", "windows"]
Swept = Literal["camoe", "bottleneck"]


PlacedBy = Literal["contiguous", "balanced", "topology_aware"]
CAMOE_STRENGTHS = [0.0, 0.05, 0.10, 0.15, 0.20, 0.25]  # of its tables
SIGMA_FLOOR = 0.05


class Steered(NamedTuple):
    """A model of the report: which model of the run, and how its routers are steered."""

    model: str
    kind: Swept
    strength: float


class SteeringStudy(Strict):
    """Evaluate models of a run with their routers steered, from their own traffic.

    Each kind and strength is a model of the report: KIND-STRENGTH of the original,
    MODEL-KIND-STRENGTH of another. A strength is CAMoE's lambda; for `bottleneck` the
    lambda of CAMoE whose time is the target. 0 is the model itself.
    """

    recipe: str  # whose run has evaluated the models
    output_dir: str | None = None  # null: `steering` in the folder of the run
    links: str  # file of `fcsd-steer profile-network`
    models: list[str] = Field(
        default_factory=lambda: ["original"], min_length=1
    )  # by their names in the report
    kind: Swept | list[Swept] = "camoe"
    strengths: list[float] = Field(
        default_factory=lambda: list(CAMOE_STRENGTHS), min_length=1
    )
    # that hold the experts; null: those of the links
    endpoints: PositiveInt | None = None
    placement: PlacedBy = option("contiguous", "which endpoint has which experts")
    selection: bool = option(False, "choose experts by the bias, weigh them without it")
    scale: Literal["logit_std"] | None = option(
        None, "count the strength in standard deviations of the layer's logits"
    )
    sigma_floor: float = option(
        SIGMA_FLOOR,
        "least standard deviation of a source's times, as a part of their mean, by"
        " which they are standardised; 0: as CAMoE prints it",
        ge=0,
    )
    tokens: PositiveInt = 65_536  # of data.train, that the traffic is counted on

    @field_validator("strengths")
    @classmethod
    def _not_negative_and_once(cls, value: list[float]) -> list[float]:
        if (low := min(value)) < 0:
            raise ValueError(f"a strength is 0 or more, got {low:g}")
        if len(set(value)) != len(value):
            raise ValueError("a strength is given twice")
        if not any(value):
            raise ValueError("needs a strength above 0; 0 is the model itself")
        return value

    @field_validator("models")
    @classmethod
    def _each_once(cls, value: list[str]) -> list[str]:
        if len(set(value)) != len(value):
            raise ValueError("a model is given twice")
        return value

    @property
    def kinds(self) -> list[Swept]:
        """The kinds as a list, even of a single one."""
        return (
            [self.kind]
            if isinstance(self.kind, str)
            else list(dict.fromkeys(self.kind))
        )

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
    batch_size: int = option(
        8, "rows of one batch; each batch is at one endpoint", gt=0
    )
    links: str | None = option(
        None, "links that `fcsd-steer profile-network` measured", metavar="FILE"
    )
    endpoints: int | None = option(
        None,
        "endpoints that experts and batches are shared out over (default: those of the"
        " links, or 8)",
        gt=0,
    )

    @model_validator(mode="after")
    def _has_text(self) -> "RoutingStudy":
        if self.text is None and not self.tasks:
            raise ValueError(
                "nothing to route: give a text (--text) or a task of the suite (--task)"
            )
        return self


class BiasSettings(RoutingStudy):
    """The kind of tables to make, and the text and links to make them from."""

    links: str = option(
        ..., "links that `fcsd-steer profile-network` measured", metavar="FILE"
    )
    kind: Kind = option(
        "camoe",
        "camoe: pushes from all slow paths; bottleneck: from the slowest only, as far"
        " as camoe's time; windows: each layer as far as its exchanges are hidden",
    )
    strength: float | None = option(
        None, "CAMoE's lambda; of bottleneck: the lambda whose time is the goal", ge=0
    )
    windows: str | None = option(
        None, "seconds beside each exchange, of `fcsd plan`", metavar="FILE"
    )
    placement: PlacedBy = like(SteeringStudy, "placement")
    selection: bool = like(SteeringStudy, "selection")
    scale: Literal["logit_std"] | None = like(SteeringStudy, "scale")
    sigma_floor: float = like(SteeringStudy, "sigma_floor")

    @model_validator(mode="after")
    def _fits_the_kind(self) -> "BiasSettings":
        # A file of windows replaces the strength: it says how far each layer has to be
        # pushed.
        if (self.kind == "windows") != (self.windows is not None):
            raise ValueError("--windows FILE and --kind windows go together")
        if (self.kind == "windows") == (self.strength is not None):
            raise ValueError(
                f"--strength: {self.kind} "
                + ("takes none" if self.strength is not None else "needs one")
            )
        if self.kind == "windows" and self.scale is not None:
            raise ValueError("--scale: windows have no strength to scale")
        if self.kind == "windows" and "sigma_floor" in self.model_fields_set:
            raise ValueError(
                "--sigma-floor: of CAMoE's standardised times, which windows do"
                " without; leave it out"
            )
        return self
