"""Steer the original's routers away from slow links: tables from its traffic, then an evaluation under each.

Not covered: tables for other models of the run; `fcsd bias` writes those.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fcsd.artifact import Stage
from fcsd.calibration.checkpoint import take_rows
from fcsd.config.router_bias import RouterBiasConfig
from fcsd.data.batches import Collator, real_tokens
from fcsd.errors import UserError
from fcsd.evaluate.backend import Batches
from fcsd.evaluate.endpoints import biased_routers
from fcsd.evaluate.stage import Steered, evaluate_stage, heldout_of, test_set_fingerprints
from fcsd.evaluate.steered import Sweep
from fcsd.families.structure import packing_of
from fcsd.files import file_sha256
from fcsd.models.place import load_for_evaluation
from fcsd.network.links import Array, LinkModel, read_links
from fcsd.network.simulate import Payload, edge_times, endpoint_counts
from fcsd.routing.bias import BiasTables, read_tables, write_tables
from fcsd.routing.counts import routed_batches
from fcsd.routing.exchanges import exchange_counts, exchange_times
from fcsd.routing.placement import balanced, contiguous, topology_aware
from fcsd.routing.routers import find_routers
from fcsd.stages.context import Run
from fcsd.stages.progress import STEERING, evaluation
from fcsd.stages.rows import data_inputs, training_rows


def steer(run: Run) -> None:
    """Evaluate the original under every bias of the recipe's `evaluation.router_bias`; what is finished is not done
    again. All ranks call this.

    Raises:
        UserError: links of another number of endpoints than the recipe's; endpoints that do not divide the experts.
    """
    steering = _Steering(run)
    run.begin(STEERING)
    steering.make_tables()
    for name in steering.bias.names:
        run.begin(evaluation(name))
        steering.evaluate(name)


class _Steering:
    """A recipe's `evaluation.router_bias` on its original, which is loaded once for all that is not finished."""

    def __init__(self, run: Run):
        bias, batch_size = run.recipe.evaluation.router_bias, run.recipe.evaluation.batch_size
        assert bias is not None and batch_size != "auto"  # the recipe has checked it
        self.run, self.bias, self.batch_size = run, bias, batch_size
        self.links, self.launch = links_of(bias), run.launch.for_evaluation()
        self.links_sha256 = file_sha256(Path(bias.links))

    @functools.cached_property
    def loaded(self) -> Any:
        return load_for_evaluation(self.run.original, self.launch)

    @functools.cached_property
    def payload(self) -> Payload:
        hidden_size = self.loaded.config.get_text_config().hidden_size
        return Payload(hidden_size, find_routers(self.loaded)[0].num_experts)

    @functools.cached_property
    def sweep(self) -> Sweep:
        """What asks the original; its tables are there."""
        rows = heldout_of(self.run.recipe.data, self.run.tokenizer)
        placement = read_tables(self.run.layout.bias_tables(next(iter(self.bias.names)))).placement
        top_k = find_routers(self.loaded)[0].top_k
        return Sweep(
            self.loaded, rows, self.links, placement, self.payload, top_k, self.batch_size, self.launch
        )

    def make_tables(self) -> None:
        recipe = self.run.recipe
        settings = {
            "router_bias": self.bias.model_dump(mode="json", exclude={"links", "endpoints"}),
            "batch_size": self.batch_size,
            "data": recipe.data.model_dump(mode="json"),
            "seed": recipe.seed,
            "model": {"dtype": recipe.model.dtype},
        }
        inputs = self.launch.ranks.from_first(
            lambda: {
                "original": self.run.original.weights,
                "links": self.links_sha256,
                **data_inputs(recipe.data, self.run),
                **test_set_fingerprints([], None, recipe.data.heldout),
            }
        )
        stage = Stage(self.run.layout.router_bias, "router-bias", settings, inputs)
        if self.launch.begin(stage) == "finished":
            return
        made = self._tables()
        for name, tables in made.items() if self.launch.first else ():
            write_tables(self.run.layout.bias_tables(name), tables)
        self.launch.wait()
        self.launch.finish(stage, {"original": self.sweep.unbiased()})

    def evaluate(self, name: str) -> None:
        run, tables = self.run, read_tables(self.run.layout.bias_tables(name))
        evaluate_stage(
            name,
            run.original,
            run.original,
            folder=run.layout.evaluation(name),
            evaluation=run.recipe.evaluation,
            data=run.recipe.data,
            launch=run.launch,
            steered=Steered(
                tables, {"links": self.links_sha256}, lambda evaluate: self.sweep.ask(tables, evaluate, name)
            ),
        )

    # ---- tables

    def _tables(self) -> dict[str, BiasTables]:
        """Count the original's traffic on training text, place the experts, and make the tables of every model."""
        counts = self._counts(None)
        placement = self._placement(counts.mean(0))
        found = {}
        for name, (kind, strength) in self.bias.names.items():
            found[name] = self._camoe(counts, placement, strength)
            if kind == "bottleneck":
                goal = self._time(self._counts(found[name]), placement)
                found[name] = self._bottleneck(counts, placement, goal)
        return found

    def _counts(self, tables: BiasTables | None) -> NDArray[np.int64]:
        """Return the pairs [X, L, N, E] of exchanges on training text under a bias; the same on all ranks."""
        with biased_routers(self.loaded, tables, self.batch_size) as steered:
            found = []
            for routed in routed_batches(self.loaded, self._batches(steered)):
                layers = [
                    torch.bincount(each.experts.flatten().cpu(), minlength=self.payload.num_experts)
                    for each in routed
                ]
                found.append(torch.stack(layers).numpy())
        counts = exchange_counts(np.stack(found), len(self.links.endpoints), 1)
        return self.launch.ranks.from_first(lambda: counts)

    def _placement(self, counts: Array) -> NDArray[np.int64]:
        """Return the endpoint of every expert, [L, E], for mean pairs [L, N, E]."""
        num_endpoints, num_experts = counts.shape[1:]
        start = np.tile(contiguous(num_experts, num_endpoints), (len(counts), 1))
        if self.bias.placement == "balanced":
            return balanced(counts.sum(1), num_endpoints)
        if self.bias.placement == "topology_aware":
            return topology_aware(counts, self.links, self.payload)
        return start

    def _camoe(self, counts: NDArray[np.int64], placement: NDArray[np.int64], strength: float) -> BiasTables:
        links, payload, rows = self.links, self.payload, []
        for pairs, of in zip(endpoint_counts(counts.mean(0), placement), placement, strict=True):
            cost = links.alpha("dispatch") + links.beta("dispatch") * pairs * payload.dispatch_bytes
            cost = cost + links.alpha("combine").T + links.beta("combine").T * pairs * payload.combine_bytes
            mean = cost.mean(1, keepdims=True)
            scores = (cost - mean) / np.maximum(cost.std(1, keepdims=True), 0.05 * mean)
            rows.append((-strength * scores)[:, of])
        return self._wrap("camoe", strength, np.stack(rows), placement)

    def _wrap(self, kind: Any, strength: float, tables: Array, placement: NDArray[np.int64]) -> BiasTables:
        config = self.loaded.config
        return BiasTables(
            kind,
            strength,
            self.bias.selection,
            tuple(router.layer for router in find_routers(self.loaded)),
            tables.astype(np.float32),
            placement,
            config.model_type,
            config.num_hidden_layers,
        )

    def _bottleneck(self, counts: NDArray[np.int64], placement: NDArray[np.int64], goal: float) -> BiasTables:
        links, payload, num_endpoints = self.links, self.payload, len(self.links.endpoints)
        base, off = self._time(counts, placement), ~np.eye(num_endpoints, dtype=bool)
        push = np.zeros((len(placement), num_endpoints, num_endpoints))
        for _ in range(100):
            rows = np.stack([each[:, of] for each, of in zip(push, placement, strict=True)])
            tables = self._wrap("bottleneck", 1 - goal / base, rows, placement)
            now = self._counts(tables)
            if self._time(now, placement) <= goal:
                break
            for layer, pairs in enumerate(endpoint_counts(now.mean(0), placement)):
                out = edge_times(links, "dispatch", pairs * payload.dispatch_bytes)
                back = edge_times(links, "combine", pairs.T * payload.combine_bytes).T
                weights = sum(np.exp((each / each.max() - 1) / 0.03) * off for each in (out, back))
                push[layer] -= 0.03 * weights / np.max(weights)
        return tables

    def _time(self, counts: NDArray[np.int64], placement: NDArray[np.int64]) -> float:
        """Return the mean time of exchanges."""
        return float(exchange_times(self.links, counts, placement, self.payload).mean())

    @functools.cached_property
    def _packed(self) -> bool:
        packs = packing_of(self.run.original.load_config()) != "leaks"
        return self.run.recipe.data.packing and packs

    @functools.cached_property
    def _rows(self) -> list[Any]:
        """The training text that traffic is counted on."""
        data = self.run.recipe.data.model_copy(update={"packing": self._packed})
        rows = take_rows(training_rows(data, self.run.tokenizer, self.run)[0], self.bias.tokens)
        needed = self.batch_size * len(self.links.endpoints)
        if len(rows) < needed:
            raise UserError(
                f"evaluation.router_bias.tokens: {self.bias.tokens} tokens of data.train are {len(rows)} rows, and"
                f" {len(self.links.endpoints)} endpoints need {self.batch_size} each (evaluation.batch_size); raise"
                " it, or lower the batch size"
            )
        return rows

    def _batches(self, steered: Batches | None) -> Iterator[dict[str, Tensor]]:
        """Yield the text in batches; before one is run, the bias is that of its endpoint."""
        size = self.batch_size
        for number, start in enumerate(range(0, len(self._rows), size)):
            batch = Collator()([self._rows[k] for k in range(start, min(start + size, len(self._rows)))])
            if steered is not None and steered.begin is not None:
                steered.begin(number)
            inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
            # A mask would let the examples of a row see each other; those of rows of one example are mostly padding.
            yield inputs if self._packed else inputs | {"attention_mask": real_tokens(batch).long()}


def links_of(bias: RouterBiasConfig) -> LinkModel:
    """Read the links of a recipe.

    Raises:
        UserError: no such file; not as many endpoints as the recipe has.
    """
    links = read_links(bias.links)
    if bias.endpoints not in (None, len(links.endpoints)):
        raise UserError(
            f"evaluation.router_bias.endpoints: {bias.endpoints}, but {bias.links} has {len(links.endpoints)}"
        )
    return links
