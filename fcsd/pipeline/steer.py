"""Steer the routers of a run's models away from slow links: make tables from a model's
traffic, and evaluate the model under each.
"""

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
from fcsd.evaluation.stage import (
    Evaluation,
    Reference,
    heldout_of,
    run_evaluation,
    test_set_fingerprints,
)
from fcsd.evaluation.steered import Sweep
from fcsd.model.families import row_width
from fcsd.model.families.routers import find_routers
from fcsd.model.load import free_memory
from fcsd.parallel.place import load_for_evaluation
from fcsd.pipeline.context import Run
from fcsd.pipeline.progress import evaluation, steering
from fcsd.pipeline.rows import data_inputs, training_rows
from fcsd.steering.config import RouterBiasConfig
from fcsd.steering.network.links import LinkModel, read_links
from fcsd.steering.network.simulate import Payload
from fcsd.steering.routing.bias import BiasTables, read_tables, write_tables
from fcsd.steering.routing.bottleneck import Deployment
from fcsd.steering.routing.placement import placed
from fcsd.steering.routing.tables import Calibration, make_tables
from fcsd.training.calibration.checkpoint import take_rows
from fcsd.training.losses.kl import Original


def steer(run: Run) -> None:
    """Evaluate the models of the recipe's `evaluation.router_bias` under every bias;
    finished evaluations are not repeated. All ranks call this.

    Raises:
        UserError: the links have another number of endpoints than the recipe, or the
            endpoints do not divide the experts.
    """
    assert run.recipe.evaluation.router_bias is not None
    reference = Reference(run.original, run.recipe.data)
    for model in run.recipe.evaluation.router_bias.models:
        _steer_model(run, model, reference)


def _steer_model(run: Run, model: str, reference: Reference) -> None:
    steering_run = _Steering(run, model, reference)
    run.begin(steering(model))
    steering_run.make_tables()
    for name in steering_run.names:
        run.begin(evaluation(name))
        steering_run.evaluate(name)


class _Steering:
    """A recipe's `evaluation.router_bias` for one of its models, which is loaded only
    once, and only if something is not finished.

    reference: the original's distributions on the held-out text, read once for all
    models.
    """

    def __init__(self, run: Run, model: str, reference: Reference):
        bias, batch_size = (
            run.recipe.evaluation.router_bias,
            run.recipe.evaluation.batch_size,
        )
        assert bias is not None and batch_size != "auto"  # the recipe has checked it
        self.run, self.bias, self.batch_size = run, bias, batch_size
        self.name, self.model, self.reference = model, run.model(model), reference
        self.names = bias.names_of(model)
        self.links, self.launch = links_of(bias), run.launch.for_evaluation()
        self.links_sha256 = file_sha256(Path(bias.links))

    @functools.cached_property
    def rows(self) -> Any:
        return heldout_of(self.run.recipe.data, self.run.tokenizer, self.run.original)

    @functools.cached_property
    def original(self) -> Original | None:
        return (
            None
            if self.name == "original"
            else self.reference.read(self.rows, self.launch)
        )

    @functools.cached_property
    def loaded(self) -> Any:
        # The original's distributions come first: a device may not hold two models.
        _ = self.original
        free_memory()
        return load_for_evaluation(self.model, self.launch)

    @functools.cached_property
    def payload(self) -> Payload:
        width = row_width(self.loaded.config.get_text_config())
        return Payload(width, find_routers(self.loaded)[0].num_experts)

    @functools.cached_property
    def sweep(self) -> Sweep:
        """The evaluation of the model under its tables, which must exist."""
        return Sweep(
            self.loaded,
            self.original,
            self.rows,
            links=self.links,
            placement=read_tables(self._place(next(iter(self.names)))).placement,
            payload=self.payload,
            top_k=find_routers(self.loaded)[0].top_k,
            batch_size=self.batch_size,
            launch=self.launch,
        )

    def make_tables(self) -> None:
        recipe = self.run.recipe
        settings = {
            "router_bias": self.bias.model_dump(
                mode="json", exclude={"links", "endpoints", "models"}
            ),
            "batch_size": self.batch_size,
            "data": recipe.data.model_dump(mode="json"),
            "seed": recipe.seed,
            "model": {"dtype": recipe.model.dtype},
        }
        inputs = self.launch.ranks.from_first(
            lambda: {
                **self.run.original.fingerprints("original"),
                **self.model.fingerprints("model"),
                "links": self.links_sha256,
                **data_inputs(recipe.data, self.run),
                **test_set_fingerprints(None, None, recipe.data.heldout),
            }
        )
        stage = Stage(
            self.run.layout.router_bias(self.name), "router-bias", settings, inputs
        )
        if self.launch.begin(stage) == "finished":
            return
        table_files = {name: self._place(name) for name in self.names}
        # A stage that was interrupted makes only the tables that it has not written.
        missing = self.launch.ranks.from_first(
            lambda: [name for name in table_files if not table_files[name].is_file()]
        )
        for name, tables in self._tables(missing):
            # The first rank writes each table as soon as it is made.
            if self.launch.first:
                write_tables(table_files[name], tables)
        self.launch.wait()
        self.launch.finish(stage, {"unbiased": self.sweep.unbiased()})

    def evaluate(self, name: str) -> None:
        run, config = self.run, self.run.recipe.evaluation
        links = {"links": self.links_sha256}
        reference = Reference(run.original, run.recipe.data, links, lambda: self.sweep)
        tables = read_tables(self._place(name))
        evaluation = Evaluation(
            name, self.model, load_suite(config.suite), config, reference, tables
        )
        run_evaluation(evaluation, run.layout.evaluation(name), run.launch)

    # ---- tables

    def _place(self, name: str) -> Path:
        return self.run.layout.bias_tables(name, self.name)

    def _tables(self, names: Sequence[str]) -> Iterator[tuple[str, BiasTables]]:
        """Measure the model's traffic on training text, place the experts, make tables."""
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
            _, kind, strength = self.names[name]
            tables, _ = make_tables(
                calibration,
                deployment,
                kind,
                strength,
                scaled=self.bias.scale is not None,
                sigma_floor=self.bias.sigma_floor,
            )
            yield name, tables

    def _batches(self) -> list[dict[str, Tensor]]:
        """Return the training text on which traffic is counted, in batches."""
        data, size = self.run.recipe.data, self.batch_size
        training = training_rows(
            data, self.run.tokenizer, self.run, apart_in=self.run.original
        )
        rows = take_rows(training, self.bias.tokens)
        # Traffic is counted per endpoint, each of which needs at least one batch.
        if len(rows) < size * len(self.links.endpoints):
            raise UserError(
                f"evaluation.router_bias.tokens: {self.bias.tokens} tokens of"
                f" data.train are {len(rows)} rows, and {len(self.links.endpoints)}"
                f" endpoints need {size} each (evaluation.batch_size); raise it, or"
                " lower the batch size"
            )
        batches = []
        for batch in in_batches(rows, size):
            text = {
                "input_ids": batch["input_ids"],
                "position_ids": batch["position_ids"],
            }
            # With a mask, the examples of a packed row would attend to each other;
            # without one, the padding of other rows, which is most of them, would be
            # counted.
            batches.append(
                text
                if training.layout.packing
                else text | {"attention_mask": real_tokens(batch).long()}
            )
        return batches


def links_of(bias: RouterBiasConfig) -> LinkModel:
    """Read the links of a recipe; UserError if there is no such file, or it has another
    number of endpoints than the recipe.
    """
    links = read_links(bias.links)
    if bias.endpoints not in (None, len(links.endpoints)):
        raise UserError(
            f"evaluation.router_bias.endpoints: {bias.endpoints}, but {bias.links} has"
            f" {len(links.endpoints)}"
        )
    return links
