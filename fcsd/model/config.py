"""Schema of the recipe's sections model and connectivity, and the rule for an experts'
capacity.
"""

from typing import Any, Literal

from pydantic import model_validator

from fcsd.base.errors import Rule, UserError
from fcsd.base.strict import Strict, option
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


DROP_NEEDS_A_CAPACITY: Rule = (
    lambda record: record.capacity_drop is not None and record.capacity_factor is None,
    "capacity_drop: {0.capacity_drop!r} has no meaning without capacity_factor; set it,"
    " or leave both out",
)
"""Of a record with `capacity_factor` and `capacity_drop`."""
