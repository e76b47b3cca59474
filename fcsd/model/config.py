"""The section `model` of a recipe, and a rule for records that give the experts of a
model a capacity.
"""

from typing import Literal

from pydantic import Field

from fcsd.base.strict import Rule, Strict

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class ModelConfig(Strict):
    """The original checkpoint: the teacher, and the weights the student starts from."""

    # hub id or local folder; may be left out when `pretrain` makes the model
    path: str = ""
    revision: str | None = Field(None, description="revision of a hub id")
    trust_remote_code: bool = Field(
        False, description="run code that comes with the checkpoint"
    )
    # Also the dtype of the teacher, and of every model during evaluation.
    dtype: Dtype = Field(
        "auto", description="dtype of the model; auto: the checkpoint's dtype"
    )
    attn_implementation: str | None = None
    experts_implementation: str | None = None


DROP_NEEDS_A_CAPACITY: Rule = (
    lambda record: record.capacity_drop is not None and record.capacity_factor is None,
    "capacity_drop: {0.capacity_drop!r} has no meaning without capacity_factor; set it,"
    " or leave both out",
)
"""Of a record with `capacity_factor` and `capacity_drop`."""
