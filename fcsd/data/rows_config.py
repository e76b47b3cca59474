"""Schema of the rows of tokens that a text becomes."""

from typing import Literal

from fcsd.base.strict import Strict, option


class RowsConfig(Strict):
    """Keys of a recipe's `data` section; `fcsd.FCSDConfig` also has them."""

    max_length: int = option(4096, "tokens in one row of the text", gt=1)
    packing: bool = option(
        True, "several examples share a row; they do not attend to each other"
    )
    on_bad_row: Literal["error", "skip"] = option(
        "error",
        "for an example that cannot be tokenized: error ends the run, skip leaves it"
        " out, up to 1 %, and ten in any case",
    )
    loss_on: Literal["response", "all"] = option(
        "response", "tokens that the loss is computed on: response or all"
    )
