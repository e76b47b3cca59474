"""Evaluate a model whose routers are steered.

Batch j of a task belongs to endpoint j mod N, as N ranks deal them, so that one process
gives the scores of N ranks, and so do N ranks. Scores therefore depend on the batch
size.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import fcsd
from fcsd.extension.base import UserError
from fcsd.extension.checkpoints import base_model_type
from fcsd.extension.evaluation import Batches
from fcsd_steering.routing.bias import BiasTables, router_bias


@contextlib.contextmanager
def biased_routers(model: Any, tables: BiasTables) -> Iterator[Batches]:
    """Bias the routers within the context; yield the hook that sets the endpoint of
    each batch.
    """
    with router_bias(model, tables) as steering:

        def begin(batch: int) -> None:
            steering.endpoint = batch % tables.num_endpoints

        begin(0)  # a rank without a batch still runs along with the others
        yield Batches(begin, {"router_bias": bias_name(tables)})


def bias_name(tables: BiasTables) -> str:
    """Return the name of a bias in results: tables of the same name give the same
    scores.
    """
    # Not what they were made from.
    facts = [tables.selection, list(tables.layers), list(tables.tables.shape)]
    values = tables.tables.astype("<f4").tobytes()
    digest = hashlib.sha256(json.dumps(facts).encode() + b"\0" + values).hexdigest()
    return (
        f"{tables.kind} {tables.strength:g} over {tables.num_endpoints} endpoints,"
        f" tables {digest[:12]}"
    )


def evaluate_steered(
    model: Any, tables: BiasTables, suite: Any, *, batch_size: int, **options: Any
) -> fcsd.Evaluation:
    """Evaluate a model in memory under a bias; options: of `fcsd.evaluate_model`. All
    ranks of a launch call this.
    """
    with biased_routers(model, tables) as batches:
        return fcsd.evaluate_model(
            model, suite, batch_size=batch_size, batches=batches, **options
        )


def check_model_type(tables: BiasTables, model_type: str) -> None:
    """Raise UserError where tables are of another model type, before weights are read;
    `router_bias` looks closer.
    """
    if tables.model_type != base_model_type(model_type):
        raise UserError(
            f"the tables are of a {tables.model_type}, and the model is a"
            f" {base_model_type(model_type)}; `fcsd-steer bias` writes tables for a"
            " model"
        )
