"""Schema of a sweep of biases that steer a model's routers away from slow links."""

from typing import Literal

from pydantic import Field, PositiveInt, field_validator

from fcsd.base.strict import Strict, option

Kind = Literal["camoe", "bottleneck"]
PlacedBy = Literal["contiguous", "balanced", "topology_aware"]
CAMOE_STRENGTHS = [0.0, 0.05, 0.10, 0.15, 0.20, 0.25]  # of its tables


class RouterBiasConfig(Strict):
    """Evaluate the original with its routers steered; each kind and strength is a model of the report, KIND-STRENGTH.

    A strength is CAMoE's lambda; for `bottleneck` the lambda of CAMoE whose time is the target. 0 is the original.
    """

    links: str  # file of `fcsd profile-network`
    kind: Kind | list[Kind] = "camoe"
    strengths: list[float] = Field(default_factory=lambda: list(CAMOE_STRENGTHS), min_length=1)
    endpoints: PositiveInt | None = None  # that hold the experts; null: those of the links
    placement: PlacedBy = option("contiguous", "which endpoint has which experts")
    selection: bool = option(False, "choose experts by the bias, weigh them without it")
    scale: Literal["logit_std"] | None = option(
        None, "count the strength in standard deviations of the layer's logits"
    )
    tokens: PositiveInt = 65_536  # of data.train, that the traffic is counted on

    @field_validator("strengths")
    @classmethod
    def _not_negative_and_once(cls, value: list[float]) -> list[float]:
        if (low := min(value)) < 0:
            raise ValueError(f"a strength is 0 or more, got {low:g}")
        if len(set(value)) != len(value):
            raise ValueError("a strength stands twice")
        if not any(value):
            raise ValueError("needs a strength above 0; 0 is the original itself")
        return value

    @property
    def kinds(self) -> list[Kind]:
        """The kinds, also where there is one."""
        return [self.kind] if isinstance(self.kind, str) else list(dict.fromkeys(self.kind))

    @property
    def names(self) -> dict[str, tuple[Kind, float]]:
        """The steered models by their names in the report, with kind and strength."""
        return {f"{kind}-{one:g}": (kind, one) for kind in self.kinds for one in self.strengths if one}
