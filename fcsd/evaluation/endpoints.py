"""A router bias in an evaluation: each batch belongs to the endpoint that would hold it.

Batch j of a task belongs to endpoint j mod N, as N ranks deal them, so that one process gives the scores of N ranks,
and so do N ranks. The batch size therefore enters the key of a finished task.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from fcsd.base.errors import UserError
from fcsd.evaluation.backend import Batches
from fcsd.evaluation.batch import BatchSize
from fcsd.evaluation.config import ServerConfig
from fcsd.model.families import base_model_type
from fcsd.steering.routing.bias import BiasTables, router_bias


def check_bias(tables: BiasTables | None, batch_size: BatchSize, server: ServerConfig | None) -> None:
    """Raise UserError where batches would have no endpoint that stays the same."""
    if tables is None:
        return
    if server is not None:
        raise UserError(
            "--router-bias: a table has a row for each endpoint that tokens come from, and the ranks of a server that"
            " ends a layer in an all-reduce all hold the same tokens; evaluate in memory, without --server"
        )
    if batch_size == "auto":
        raise UserError(
            "--batch-size auto: has no meaning with --router-bias, where the batch size decides which endpoint an item"
            " belongs to; give a number"
        )


def check_bias_model(tables: BiasTables, model_type: str) -> None:
    """Raise UserError where tables are of another model type, before weights are read; `router_bias` looks closer."""
    if tables.model_type != base_model_type(model_type):
        raise UserError(
            f"--router-bias: the tables are of a {tables.model_type}, and the model is a {base_model_type(model_type)};"
            " `fcsd bias` writes tables for a model"
        )


def bias_facts(tables: BiasTables | None, batch_size: BatchSize) -> dict[str, Any]:
    """Return what scores depend on where routers are biased; {} where they are not."""
    if tables is None:
        return {}
    bias = {
        "kind": tables.kind,
        "strength": tables.strength,
        "endpoints": tables.num_endpoints,
        "selection": tables.selection,
        "sha256": tables_fingerprint(tables),
    }
    return {"router_bias": bias, "batch_size": batch_size}


def tables_fingerprint(tables: BiasTables) -> str:
    """Hash the tables, the layers that they are for, and how they are applied; not what they were made from."""
    facts = [tables.selection, list(tables.layers), list(tables.tables.shape)]
    values = tables.tables.astype("<f4").tobytes()
    return hashlib.sha256(json.dumps(facts).encode() + b"\0" + values).hexdigest()


@contextlib.contextmanager
def biased_routers(
    model: PreTrainedModel, tables: BiasTables | None, batch_size: BatchSize
) -> Iterator[Batches | None]:
    """Bias the routers inside, if there are tables; give what says to which endpoint a batch belongs.

    Raises:
        UserError: tables of another model.
    """
    if tables is None:
        yield None
        return
    with router_bias(model, tables) as steering:

        def begin(batch: int) -> None:
            steering.endpoint = batch % tables.num_endpoints

        begin(0)  # of a rank that has no batch, and runs with the others
        yield Batches(begin, {"router_bias": bias_facts(tables, batch_size)["router_bias"]})
