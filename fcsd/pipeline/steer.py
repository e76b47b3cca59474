"""Steer the original's routers away from slow links: tables from its traffic, then an evaluation under each."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fcsd.base.artifact import Stage
from fcsd.base.errors import UserError
from fcsd.base.files import file_sha256
from fcsd.data.batches import in_batches, real_tokens
from fcsd.evaluation.config import load_suite
from fcsd.evaluation.stage import Evaluation, Reference, heldout_of, run_evaluation, test_set_fingerprints
from fcsd.evaluation.steered import Sweep
from fcsd.model.families import row_width
from fcsd.model.families.routers import find_routers
from fcsd.parallel.place import load_for_evaluation
from fcsd.pipeline.context import Run
from fcsd.pipeline.progress import STEERING, evaluation
from fcsd.pipeline.rows import data_inputs, training_rows
from fcsd.steering.config import RouterBiasConfig
from fcsd.steering.network.links import LinkModel, read_links
from fcsd.steering.network.simulate import Payload
from fcsd.steering.routing.bias import BiasTables, read_tables, write_tables
from fcsd.steering.routing.bottleneck import Deployment
from fcsd.steering.routing.placement import placed
from fcsd.steering.routing.tables import Calibration, make_tables
from fcsd.training.calibration.checkpoint import take_rows


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
        width = row_width(self.loaded.config.get_text_config())
        return Payload(width, find_routers(self.loaded)[0].num_experts)

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
        places = {name: self.run.layout.bias_tables(name) for name in self.bias.names}
        missing = self.launch.ranks.from_first(
            lambda: [name for name in places if not places[name].is_file()]
        )
        for name, tables in self._tables(missing):
            if self.launch.first:
                write_tables(places[name], tables)
        self.launch.wait()
        self.launch.finish(stage, {"original": self.sweep.unbiased()})

    def evaluate(self, name: str) -> None:
        run, config = self.run, self.run.recipe.evaluation
        links = {"links": self.links_sha256}
        reference = Reference(run.original, run.recipe.data, links, lambda: self.sweep)
        tables = read_tables(run.layout.bias_tables(name))
        evaluation = Evaluation(name, run.original, load_suite(config.suite), config, reference, tables)
        run_evaluation(evaluation, run.layout.evaluation(name), run.launch)

    # ---- tables

    def _tables(self, names: Sequence[str]) -> Iterator[tuple[str, BiasTables]]:
        """Count the original's traffic on training text, place the experts, and make the tables of models."""
        if not names:
            return
        calibration = Calibration(
            self.loaded,
            self._batches(),
            len(self.links.endpoints),
            selection=self.bias.selection,
            ranks=self.launch.ranks,
        )
        exchange = self.links, self.payload
        placement = placed(self.bias.placement, calibration.counts.mean(0), *exchange)
        deployment = Deployment(*exchange, placement)
        for name in names:
            kind, strength = self.bias.names[name]
            scaled = self.bias.scale is not None
            yield name, make_tables(calibration, deployment, kind, strength, scaled=scaled)[0]

    def _batches(self) -> list[dict[str, Tensor]]:
        """Return the training text that traffic is counted on, in batches."""
        data, size = self.run.recipe.data, self.batch_size
        packed = training_rows(data, self.run.tokenizer, self.run, apart_in=self.run.original)
        rows = take_rows(packed, self.bias.tokens)
        if len(rows) < size * len(self.links.endpoints):
            raise UserError(
                f"evaluation.router_bias.tokens: {self.bias.tokens} tokens of data.train are {len(rows)} rows, and"
                f" {len(self.links.endpoints)} endpoints need {size} each (evaluation.batch_size); raise it, or lower"
                " the batch size"
            )
        batches = []
        for batch in in_batches(rows, size):
            text = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
            # A mask would let the examples of a row see each other; rows of one example are mostly padding.
            batches.append(
                text if packed.layout.packing else text | {"attention_mask": real_tokens(batch).long()}
            )
        return batches


def links_of(bias: RouterBiasConfig) -> LinkModel:
    """Read the links of a recipe; UserError where there is no such file, or not as many endpoints as the recipe has."""
    links = read_links(bias.links)
    if bias.endpoints not in (None, len(links.endpoints)):
        raise UserError(
            f"evaluation.router_bias.endpoints: {bias.endpoints}, but {bias.links} has {len(links.endpoints)}"
        )
    return links
