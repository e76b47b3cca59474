"""What a routing study counts, and which bias tables are made: the records of `fcsd routing` and `fcsd bias`."""

from typing import Literal

from pydantic import model_validator

from fcsd.base.strict import like, option
from fcsd.data.config import ModelStudy
from fcsd.model.config import ModelConfig
from fcsd.steering.config import PlacedBy, RouterBiasConfig

Kind = Literal["camoe", "bottleneck", "windows"]


class RoutingStudy(ModelStudy):
    """Which models are run on which text, and where their experts are thought to be."""

    against: ModelConfig | None = None
    batch_size: int = option(8, "rows of one batch; each batch is at one endpoint", gt=0)
    links: str | None = option(None, "links that `fcsd profile-network` measured", metavar="FILE")
    endpoints: int | None = option(
        None,
        "endpoints that experts and batches are shared out over (default: those of the links, or 8)",
        gt=0,
    )

    @model_validator(mode="after")
    def _has_text(self) -> "RoutingStudy":
        if self.text is None and not self.tasks:
            raise ValueError("nothing to route: give a text (--text) or a task of the suite (--task)")
        return self


class BiasSettings(RoutingStudy):
    """Which tables to make, from which text and links."""

    links: str = option(..., "links that `fcsd profile-network` measured", metavar="FILE")
    kind: Kind = option(
        "camoe",
        "camoe: pushes from all slow paths; bottleneck: from the slowest only, as far as camoe's time; windows: each"
        " layer as far as its exchanges are hidden",
    )
    strength: float | None = option(
        None, "CAMoE's lambda; of bottleneck: the lambda whose time is the goal", ge=0
    )
    windows: str | None = option(None, "seconds beside each exchange, of `fcsd plan`", metavar="FILE")
    placement: PlacedBy = like(RouterBiasConfig, "placement")
    selection: bool = like(RouterBiasConfig, "selection")
    scale: Literal["logit_std"] | None = like(RouterBiasConfig, "scale")

    @model_validator(mode="after")
    def _fits_the_kind(self) -> "BiasSettings":
        if (self.kind == "windows") != (self.windows is not None):
            raise ValueError("--windows FILE and --kind windows go together")
        if (self.kind == "windows") == (self.strength is not None):
            raise ValueError(
                f"--strength: {self.kind} " + ("takes none" if self.strength is not None else "needs one")
            )
        if self.kind == "windows" and self.scale is not None:
            raise ValueError("--scale: windows have no strength to scale")
        return self
