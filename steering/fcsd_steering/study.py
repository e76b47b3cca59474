"""Steer the routers of a run's models away from slow links: make tables from a model's
traffic, evaluate the model under each, and report.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fcsd.base.artifact import Stage
from fcsd.base.errors import UserError
from fcsd.base.files import file_sha256, read_sealed, read_yaml, write_sealed
from fcsd.base.memory import free_memory
from fcsd.base.strict import did_you_mean, validate
from fcsd.data.batches import in_batches, real_tokens
from fcsd.data.dataset import heldout_fingerprint
from fcsd.model.families import expert_counts, row_width
from fcsd.model.families.routers import find_routers
from fcsd.parallel.launch import Launch, begin_stage, finish_stage
from fcsd.parallel.place import load_for_evaluation
from fcsd.pipeline.context import Run
from fcsd.pipeline.reference import Reference, heldout_of
from fcsd.pipeline.rows import data_inputs, training_rows
from fcsd.planning.network.links import LinkModel, read_links
from fcsd.planning.network.simulate import Payload
from fcsd.recipe.load_recipe import load_recipe
from fcsd.training.calibration.checkpoint import take_rows
from fcsd.training.losses.heldout_kl import OriginalOutputs
from fcsd_steering.config import SteeringStudy
from fcsd_steering.evaluate import SteeredEvaluation, model_inputs
from fcsd_steering.report import evaluation_folder, tables_folder, write_report
from fcsd_steering.routing.bias import BiasTables, read_tables, write_tables
from fcsd_steering.routing.bottleneck import Deployment
from fcsd_steering.routing.placement import contiguous, placed
from fcsd_steering.routing.tables import Calibration, make_tables
from fcsd_steering.sweep import Sweep

_TABLES = "tables.json"  # the hash of each table, by its name


def load_study(path: str | Path) -> SteeringStudy:
    """Read the file of a study; paths of its recipe and links may be relative to it.

    Raises:
        UserError: no such file, an unknown key, a value out of range.
    """
    path = Path(path)
    raw = read_yaml(path)
    if isinstance(raw, dict):
        for key in ("recipe", "links"):
            name = raw.get(key)
            if isinstance(name, str) and not Path(name).exists():
                beside = path.parent / name
                raw[key] = str(beside) if beside.is_file() else name
    return validate(SteeringStudy, raw, str(path))


def run_study(study: SteeringStudy, launch: Launch) -> str:
    """Evaluate the study's models under every bias, and write the report; return its
    tables. All ranks call this; finished evaluations are not repeated.

    Raises:
        UserError: the run has not evaluated a model, or has no held-out text; the links
            have another number of endpoints than the study, or the endpoints do not
            divide the experts.
    """
    run = Run(load_recipe(study.recipe), launch)
    folder = Path(study.output_dir or run.layout.root / "steering")
    links = links_of(study)
    _check(study, links, run)
    reference = Reference(run.original, run.recipe.data)
    for model in study.models:
        steered = _SteeredModel(study, links, run, model, reference, folder)
        steered.make_tables()
        for name in steered.names:
            steered.evaluate(name)
    return launch.ranks.from_first(lambda: write_report(study, run.layout, folder))


def _check(study: SteeringStudy, links: LinkModel, run: Run) -> None:
    """Raise UserError for what would fail later."""
    recipe = run.recipe
    if recipe.data.heldout is None:
        raise UserError(
            f"{study.recipe}: has no data.heldout, the text on which time and KL are"
            " measured; add it"
        )
    if not isinstance(recipe.evaluation.batch_size, int):
        raise UserError(
            f"{study.recipe}: evaluation.batch_size: with 'auto', an item's endpoint"
            " would depend on the memory; give a number"
        )
    if recipe.evaluation.capacity_factor is not None:
        raise UserError(
            f"{study.recipe}: evaluation.capacity_factor: not supported for steered"
            " models; leave it out"
        )
    for name in study.models:
        if name not in recipe.model_names:
            suggestion = did_you_mean(name, recipe.model_names)
            raise UserError(f"models: no model {name!r} in {study.recipe}{suggestion}")
        if not (run.layout.evaluate / name / "manifest.json").is_file():
            raise UserError(
                f"{run.layout.evaluate / name}: {name} has not been evaluated; run"
                f" `fcsd run {study.recipe}` first"
            )
    config = run.original.load_config(any_family=True).get_text_config()
    num_experts, *_ = expert_counts(config)
    contiguous(num_experts or 0, len(links.endpoints))


class _SteeredModel:
    """One model of a study, loaded only once, and only if something is unfinished.

    reference: the original's distributions on the held-out text, read once for all
    models.
    """

    def __init__(
        self,
        study: SteeringStudy,
        links: LinkModel,
        run: Run,
        model: str,
        reference: Reference,
        folder: Path,
    ):
        self.study, self.run, self.folder = study, run, folder
        self.batch_size: Any = (
            run.recipe.evaluation.batch_size
        )  # `_check` has checked it
        self.name, self.model, self.reference = model, run.model(model), reference
        self.names = study.names_of(model)
        self.links, self.launch = links, run.launch.for_evaluation()
        self.links_sha256 = file_sha256(Path(study.links))

    @functools.cached_property
    def rows(self) -> Any:
        return heldout_of(self.run.recipe.data, self.run.tokenizer, self.run.original)

    @functools.cached_property
    def original(self) -> OriginalOutputs | None:
        if self.name == "original":
            return None
        return self.reference.read(self.rows, self.launch)

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
        """The measurements under the model's tables, which must exist."""
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
            "study": self.study.model_dump(
                mode="json",
                exclude={"recipe", "output_dir", "links", "endpoints", "models"},
            ),
            "batch_size": self.batch_size,
            "data": recipe.data.model_dump(mode="json"),
            "seed": recipe.seed,
            "model": {"dtype": recipe.model.dtype},
        }
        inputs = self.launch.ranks.from_first(
            lambda: {
                **self._fingerprints(),
                **data_inputs(recipe.data, self.run),
                **heldout_fingerprint(recipe.data.heldout),
            }
        )
        stage = Stage(tables_folder(self.folder, self.name), "steer", settings, inputs)
        if begin_stage(stage, self.launch) == "finished":
            return
        table_files = {name: self._place(name) for name in self.names}
        # A stage that was interrupted makes only the tables that it has not written.
        written = self.launch.ranks.from_first(lambda: _whole_tables(stage))
        missing = [name for name in table_files if name not in written]
        for name, tables in self._tables(missing):
            # The first rank writes each table as soon as it is made.
            if self.launch.first:
                write_tables(table_files[name], tables)
                written[name] = file_sha256(table_files[name])
                write_sealed(stage.folder / _TABLES, written, stage.identity)
        self.launch.wait()
        finish_stage(stage, self.launch, {"unbiased": self.sweep.unbiased()})

    def evaluate(self, name: str) -> None:
        """Evaluate the model under the bias `name`, unless that is finished."""
        recipe = self.run.recipe
        config, heldout = recipe.evaluation, recipe.data.heldout
        text = {"heldout", "heldout_examples", "max_length", "packing", "loss_on"}
        evaluation = SteeredEvaluation(
            name,
            self.model,
            read_tables(self._place(name)),
            self.run.suite,
            self.batch_size,
            data_root=config.data_root,
            limit=config.limit,
            allow_weak_sandbox=config.allow_weak_sandbox,
            settings={
                "data": recipe.data.model_dump(mode="json", include=text),
                "model": {"dtype": recipe.model.dtype},
            },
            inputs=self.launch.ranks.from_first(
                lambda: {
                    **self._fingerprints(),
                    **heldout_fingerprint(heldout),
                }
            ),
        )
        folder = evaluation_folder(self.folder, name)
        evaluation.run(
            folder,
            self.launch,
            lambda: self.loaded,
            lambda tables: self.sweep.measure(tables),
        )

    def _fingerprints(self) -> dict[str, str]:
        return {
            **model_inputs(self.run.original, "original"),
            **model_inputs(self.model),
            "links": self.links_sha256,
        }

    def _place(self, name: str) -> Path:
        return tables_folder(self.folder, self.name) / f"{name}.safetensors"

    def _tables(self, names: Sequence[str]) -> Iterator[tuple[str, BiasTables]]:
        """Measure the model's traffic on training text, place the experts, make tables."""
        if not names:
            return
        calibration = Calibration(
            self.loaded,
            self._batches(),
            len(self.links.endpoints),
            selection=self.study.selection,
            ranks=self.launch.ranks,
        )
        exchange = self.links, self.payload
        placement = placed(self.study.placement, calibration.counts.mean(0), *exchange)
        deployment = Deployment(*exchange, placement)
        for name in names:
            _, kind, strength = self.names[name]
            tables, _ = make_tables(
                calibration,
                deployment,
                kind,
                strength,
                scaled=self.study.scale is not None,
                sigma_floor=self.study.sigma_floor,
            )
            yield name, tables

    def _batches(self) -> list[dict[str, Tensor]]:
        """Return the training text on which traffic is counted, in batches."""
        data, size = self.run.recipe.data, self.batch_size
        training = training_rows(
            data, self.run.tokenizer, self.run, apart_in=self.run.original
        )
        rows = take_rows(training, self.study.tokens)
        # Traffic is counted per endpoint, each of which needs at least one batch.
        if len(rows) < size * len(self.links.endpoints):
            raise UserError(
                f"tokens: {self.study.tokens} tokens of data.train make {len(rows)}"
                f" rows, but {len(self.links.endpoints)} endpoints need {size} each"
                " (evaluation.batch_size); raise it, or lower the batch size"
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
            if not training.layout.packing:
                text["attention_mask"] = real_tokens(batch).long()
            batches.append(text)
        return batches


def _whole_tables(stage: Stage) -> dict[str, str]:
    """Return the names and hashes of the tables that an interrupted stage has written;
    a line tells of those that have changed since, and are made again.
    """
    file, written = stage.folder / _TABLES, dict[str, str]()
    if file.is_file():
        try:
            written = read_sealed(
                file, "fcsd-steer makes its tables again", stage.identity
            )
        except UserError as error:
            print(f"steer: {error}", file=sys.stderr)
    whole = {}
    for name, sha256 in written.items():
        path = stage.folder / f"{name}.safetensors"
        if path.is_file() and file_sha256(path) == sha256:
            whole[name] = sha256
        else:
            print(
                f"steer: {path}: is damaged or gone; fcsd-steer makes it again",
                file=sys.stderr,
            )
    return whole


def links_of(study: SteeringStudy) -> LinkModel:
    """Read the links of a study; raise UserError if the file is missing or has another
    number of endpoints than the study.
    """
    links = read_links(study.links)
    if study.endpoints not in (None, len(links.endpoints)):
        raise UserError(
            f"endpoints: {study.endpoints}, but {study.links} has"
            f" {len(links.endpoints)}"
        )
    return links
