"""Evaluate a model whose routers are steered.

Batch j of a task belongs to endpoint j mod N, as if N ranks dealt the batches, so one
process gives the same scores as N ranks. Scores therefore depend on the batch size.
"""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fcsd
from fcsd.base.artifact import Stage, versions
from fcsd.base.errors import UserError
from fcsd.evaluation.backend import Batches
from fcsd.evaluation.config import SuiteConfig
from fcsd.evaluation.datasets import test_set_fingerprints
from fcsd.evaluation.results import TaskStore, configuration_fingerprint
from fcsd.model.families import base_model_type
from fcsd.model.load import ModelFolder, load_tokenizer
from fcsd.parallel.launch import Launch, begin_stage, finish_stage
from fcsd_steering.routing.bias import BiasTables, router_bias

FINISHED_TASKS = "finished-tasks"


@contextlib.contextmanager
def biased_routers(model: Any, tables: BiasTables) -> Iterator[Batches]:
    """Bias the routers within the context; yield the hook that sets the endpoint of
    each batch.
    """
    with router_bias(model, tables) as steering:

        def begin(batch: int) -> None:
            steering.endpoint = batch % tables.num_endpoints

        begin(0)  # a rank without a batch still runs with the others
        yield Batches(begin, {"router_bias": bias_name(tables)})


def bias_name(tables: BiasTables) -> str:
    """Return the name of a bias in results: tables of the same name give the same
    scores.
    """
    # without the facts about their origin
    facts = [tables.selection, list(tables.layers), list(tables.tables.shape)]
    values = tables.tables.astype("<f4").tobytes()
    digest = hashlib.sha256(json.dumps(facts).encode() + b"\0" + values).hexdigest()
    return (
        f"{tables.kind} {tables.strength:g} over {tables.num_endpoints} endpoints,"
        f" tables {digest[:12]}"
    )


@dataclass(frozen=True)
class SteeredEvaluation:
    """One model on a suite under a bias, in a folder with a manifest.

    name: the model's name in the result. settings, inputs: the other things that its
    result depends on.
    """

    name: str
    model: ModelFolder
    tables: BiasTables
    suite: SuiteConfig
    batch_size: int
    data_root: str | None = None
    limit: int | None = None
    allow_weak_sandbox: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def run(
        self,
        folder: Path,
        launch: Launch,
        load: Callable[[], Any],
        measure: Callable[[BiasTables], dict[str, Any]] | None = None,
    ) -> None:
        """Evaluate the model, unless that is finished; an interrupted evaluation
        continues with the next task. All ranks call this.

        load: returns the model in memory. measure: returns more facts for the result.

        Raises:
            UserError: a folder with another evaluation; a missing task or data set.
        """
        settings = {
            "suite": self.suite.model_dump(mode="json"),
            "limit": self.limit,
            "batch_size": self.batch_size,
            "router_bias": bias_name(self.tables),
            **self.settings,
        }
        root = None if self.data_root is None else Path(self.data_root)
        inputs = launch.ranks.from_first(
            lambda: {
                **model_inputs(self.model),
                **test_set_fingerprints(self.suite, root),
                **self.inputs,
            }
        )
        stage = Stage(folder, "steer", settings, inputs)
        if begin_stage(stage, launch) != "finished":
            self._evaluate(stage, launch, load(), measure)
        # A kill may have left finished tasks after the stage had finished.
        if launch.first:
            shutil.rmtree(folder / FINISHED_TASKS, ignore_errors=True)

    def _evaluate(
        self,
        stage: Stage,
        launch: Launch,
        model: Any,
        measure: Callable[[BiasTables], dict[str, Any]] | None,
    ) -> None:
        tasks = {
            row.task: [
                value
                for name, value in sorted(stage.inputs.items())
                if name.partition(",")[0] == f"task {row.task}"
            ]
            for row in self.suite.tasks
        }
        settings = {
            key: value for key, value in stage.settings.items() if key != "suite"
        }
        models = {
            key: value
            for key, value in stage.inputs.items()
            if not key.startswith("task ")
        }
        identity = {**settings, **models, "versions": versions()}
        store = TaskStore(
            stage.folder / FINISHED_TASKS,
            identity,
            {task: json.dumps(fingerprints) for task, fingerprints in tasks.items()},
        )
        tokenizer = load_tokenizer(
            self.model.folder, trust_remote_code=self.model.config.trust_remote_code
        )
        with biased_routers(model, self.tables) as batches:
            result = fcsd.evaluate_model(
                model,
                self.suite,
                tokenizer=tokenizer,
                data_root=self.data_root,
                batch_size=self.batch_size,
                limit=self.limit,
                allow_weak_sandbox=self.allow_weak_sandbox,
                name=self.name,
                launch=launch,
                batches=batches,
                store=store,
            )
        if measure is not None:
            result |= measure(self.tables)
        if launch.first:
            result.save(stage.folder)
        finish_stage(stage, launch, {"mean": result["mean"]})


def model_inputs(model: ModelFolder, name: str = "model") -> dict[str, str]:
    """Return the fingerprints of a model: its weights, and the files beside them, which
    define its connectivity.
    """
    files = configuration_fingerprint(model.folder)
    return {**model.fingerprints(name), f"{name}, its configuration": files}


def check_model_type(tables: BiasTables, model_type: str) -> None:
    """Raise UserError if tables belong to another model type, before weights are read;
    `router_bias` checks more.
    """
    if tables.model_type != base_model_type(model_type):
        raise UserError(
            f"the tables belong to a {tables.model_type}, but the model is a"
            f" {base_model_type(model_type)}; write tables for this model with"
            " `fcsd-steer bias`"
        )
