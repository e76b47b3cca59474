"""Schema of the recipe's section connectivity."""

from typing import Any, Literal

from pydantic import model_validator

from fcsd.base.errors import UserError
from fcsd.base.strict import Strict, option
from fcsd.model.connectivity.spec import Connectivity, parse_mlp, parse_selection


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
    def _check_selection(self) -> "ConnectivityConfig":
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
