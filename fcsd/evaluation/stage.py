"""Evaluate one model on a suite, in a folder with a manifest: in memory or behind a
server, with or without a recipe.

    stage = run_evaluation(Evaluation("path/of/MODEL", model, load_suite("tiny"),
    config), folder, launch)
"""

import contextlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from fcsd.base.artifact import Stage, check_outputs, read_manifest, versions
from fcsd.base.errors import UserError
from fcsd.base.files import new_folder, read_json
from fcsd.base.memory import free_memory
from fcsd.data.config import DataConfig, SourceConfig
from fcsd.data.counts import tell_examples
from fcsd.data.dataset import heldout_rows
from fcsd.data.local import data_fingerprint
from fcsd.data.rows import PackedRows
from fcsd.evaluation.backend import check_batch_size
from fcsd.evaluation.config import EvaluationConfig, ServerConfig, SuiteConfig
from fcsd.evaluation.lm_eval.write import write_lm_eval
from fcsd.evaluation.results import Samples, read_result, read_samples, write_result
from fcsd.evaluation.runner import PreparedEvaluation, prepare_evaluation
from fcsd.evaluation.served import ServedBackend
from fcsd.evaluation.server import Server
from fcsd.evaluation.store import TaskStore, configuration_fingerprint
from fcsd.evaluation.suites import dataset_location, definition_folder
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity.checkpoint import read_config
from fcsd.model.load import ModelFolder, find_model, load_tokenizer
from fcsd.parallel.launch import Launch
from fcsd.parallel.overlap import refusal
from fcsd.parallel.place import check_device_map, load_for_evaluation
from fcsd.training.losses.kl import Original, mean_kl, read_original

FINISHED_TASKS = "finished-tasks"
_DEFINITION = ", its definition"
Measure = Callable[[PreTrainedModel], dict[str, Any]]
"""Measures a model beside its scores, for its result."""


@dataclass(frozen=True)
class Reference:
    """The original, against which a recipe's models are measured on held-out text,
    beside their scores.

    The original's outputs are computed once for all evaluations that share the
    reference, and stay in main memory between them: each needs all of them to its end.
    """

    original: ModelFolder
    data: DataConfig
    _known: list[tuple[Any, Original]] = field(
        default_factory=list, repr=False, compare=False
    )

    def measure(self, tokenizer: Any, launch: Launch) -> Measure | None:
        """Return the function that measures a model; None without held-out text. All
        ranks call this, before the model is loaded.
        """
        rows = heldout_of(self.data, tokenizer, self.original)
        if rows is None:
            return None
        original_outputs = self.read(rows, launch)

        def kl(loaded: PreTrainedModel) -> dict[str, Any]:
            divergence = mean_kl(original_outputs, loaded, rows, ranks=launch.ranks)
            original_outputs.head.cpu()  # off the device, where the next model needs the room
            return {"kl_to_original": divergence}

        return kl

    def read(self, rows: Any, launch: Launch) -> Original:
        """Return the original's outputs on held-out text. All ranks call this."""
        if not any(_same_rows(rows, known_rows) for known_rows, _ in self._known):
            if launch.first:
                tell_examples(rows, "held-out text", always=False)
            # The original is freed before the next model comes: a device may not hold
            # both.
            original_outputs = read_original(
                load_for_evaluation(self.original, launch), rows, ranks=launch.ranks
            )
            free_memory()
            self._known[:] = [(rows, original_outputs)]
        return self._known[0][1]


@dataclass(frozen=True)
class Evaluation:
    """One model on one suite.

    name: the model's name in the result. model: its folder, or a `model` section.
    config: batch size, limit, data root, cache, server and sandbox. reference: of a
    model of a recipe. device_map: see `fcsd.parallel.place.load_for_evaluation`.
    server_check: first check which model is served.
    """

    name: str
    model: ModelFolder | ModelConfig
    suite: SuiteConfig
    config: EvaluationConfig
    reference: Reference | None = None
    device_map: str | None = None
    server_check: bool = True

    @cached_property
    def checkpoint(self) -> ModelFolder:
        """The model's folder; missing files of a hub id are fetched."""
        if isinstance(self.model, ModelFolder):
            return self.model
        return find_model(self.model)

    @property
    def data_root(self) -> Path | None:
        """The folder in hub layout that test sets are read from; None: the Hub."""
        if self.config.data_root is None:
            return None
        return Path(self.config.data_root)

    @property
    def answered_by(self) -> dict[str, Any]:
        """The facts on which scores depend where a server answers (that there is one,
        not where), or pairs are dropped.
        """
        served = {} if self.config.server is None else {"server": True}
        return served | self.config.capacity

    def settings(self) -> dict[str, Any]:
        """Return the settings on which a result depends, for the manifest."""
        suite = {"suite": self.suite.model_dump(mode="json")}
        if self.reference is None:
            return {**suite, "limit": self.config.limit, **self.answered_by}
        # No score depends on the batch size beyond float noise, so an evaluation may
        # continue with another.
        left_out = {"layer_study", "cache", "batch_size", "server"}
        text = {"heldout", "heldout_examples", "max_length", "packing", "loss_on"}
        return {
            "evaluation": self.config.model_dump(mode="json", exclude=left_out),
            **suite,
            "data": self.reference.data.model_dump(mode="json", include=text),
            "model": {"dtype": self.checkpoint.config.dtype},
            **self.answered_by,
        }

    def inputs(self) -> dict[str, Any]:
        """Return the fingerprints of all inputs; no path is part of them."""
        model, reference, heldout = self.checkpoint, self.reference, None
        # Weights do not tell it: a converted checkpoint has those of its original.
        fingerprints = {
            **model.fingerprints("model"),
            "connectivity": str(
                read_json(model.folder / "config.json").get("farskip", "regular")
            ),
        }
        if reference is not None:
            fingerprints |= reference.original.fingerprints("original")
            heldout = reference.data.heldout
        return fingerprints | test_set_fingerprints(self.suite, self.data_root, heldout)


def run_evaluation(evaluation: Evaluation, folder: Path, launch: Launch) -> Stage:
    """Evaluate a model on its suite, and what its reference measures beside; the result
    is in `folder`.

    A finished evaluation is not run again, one that was cut off continues with the next
    task. All ranks call this.

    Raises:
        UserError: what rules itself out (a server and several ranks); a model, task or
            data set that is not there; a folder with another evaluation.
    """
    config = evaluation.config
    check_server(config.server, launch)
    launch = launch.for_evaluation()
    check_device_map(evaluation.device_map, launch)
    check_batch_size(config.batch_size, launch.ranks)
    model = evaluation.checkpoint
    if evaluation.reference is None:
        _check_overlap(model, launch)
    # The folder belongs to these settings and inputs; with others it is refused.
    stage = Stage(
        folder,
        "evaluate",
        evaluation.settings(),
        launch.ranks.from_first(evaluation.inputs),
    )
    if _begin(evaluation, stage, launch) == "finished":
        _drop_finished_tasks(stage, launch)
        return stage
    free_memory()  # of the trainings before
    tokenizer = load_tokenizer(
        model.folder, trust_remote_code=model.config.trust_remote_code
    )
    backend = None  # the model is in memory
    if config.server is not None:
        server = Server(config.server.url, concurrency=config.server.concurrency)
        server.look(model.config.path)
        backend = ServedBackend(server, model, tokenizer)
    store = _store(evaluation, stage, backend)
    # A mistake in tasks or data shows before the weights are read.
    with prepare_evaluation(
        tokenizer, evaluation.suite, config, store=store, ranks=launch.ranks
    ) as prepared:
        result, samples = _ask(evaluation, prepared, backend, tokenizer, launch)
    _leave(stage, result, samples, launch)
    return stage


def _ask(
    evaluation: Evaluation,
    prepared: PreparedEvaluation,
    backend: ServedBackend | None,
    tokenizer: Any,
    launch: Launch,
) -> tuple[dict[str, Any], Samples]:
    """Return result and samples of a model; the result includes what its reference
    measures.
    """
    reference = evaluation.reference

    def load() -> PreTrainedModel:
        return load_for_evaluation(
            evaluation.checkpoint, launch, device_map=evaluation.device_map
        )

    if backend is not None:
        backend.check(prepared)
        if evaluation.server_check:
            backend.identify(load)
    # The original is read before the model is loaded: a device may not hold both.
    measure = reference.measure(tokenizer, launch) if reference is not None else None
    if backend is not None:
        result, samples = prepared.ask(backend, evaluation.name)
        return result | (measure(load()) if measure is not None else {}), samples
    loaded = load()
    result, samples = prepared(loaded, evaluation.name)
    return result | (measure(loaded) if measure is not None else {}), samples


def _check_overlap(model: ModelFolder, launch: Launch) -> None:
    overlap = launch.engine.overlap
    if overlap not in ("full", "forward"):
        return
    _, family, connectivity = read_config(model.folder, any_family=True)
    reason: str | None = "none of its layers is rewired"
    if family is not None and connectivity is not None:
        reason = refusal(family, model.load_config())
    if reason is not None:
        raise UserError(
            f"--overlap {overlap}: {model.config.path} cannot: {reason}; leave"
            " --overlap out"
        )


def heldout_of(data: DataConfig, tokenizer: Any, original: ModelFolder) -> Any:
    """Return the rows (`PackedRows`) that the KL to the original is measured on; None
    where there are none.
    """
    if data.heldout is None:
        return None
    return heldout_rows(
        data.heldout,
        tokenizer,
        num_examples=data.heldout_examples,
        max_length=data.max_length,
        packing=data.packing,
        loss_on=data.loss_on,
        vocab_size=original.vocab_size,
    )


def check_server(server: ServerConfig | None, launch: Launch) -> None:
    """Raise UserError when several processes would ask one server the same."""
    if server is not None and launch.ranks.size > 1:
        raise UserError(
            "evaluation.server (--server): works with one process, but this launch has"
            f" {launch.ranks.size}; evaluate without a launcher (`fcsd run` continues a"
            " run in one process)"
        )


def _same_rows(rows: PackedRows, other_rows: PackedRows) -> bool:
    return len(rows) == len(other_rows) and all(
        np.array_equal(value, other_rows[number][name])
        for number in range(len(rows))
        for name, value in rows[number].items()
    )


def _store(
    evaluation: Evaluation, stage: Stage, backend: ServedBackend | None = None
) -> TaskStore:
    """Return the store of finished tasks, keyed by the fingerprints of the model and
    its settings, never by a path.

    backend: which server answers for the model, if one does.
    """
    config, loading = evaluation.config, dict[str, Any]()
    if evaluation.reference is not None:
        # A recipe may load its models in another precision or with other kernels.
        loading_keys = {"dtype", "attn_implementation", "experts_implementation"}
        loading = evaluation.checkpoint.config.model_dump(include=loading_keys)
    if backend:
        # Another engine, or another form of it, answers with other rounding.
        served = {
            "server": {**backend.server.facts, "checked": evaluation.server_check}
        }
    else:
        served = {}
    identity = {
        **{name: stage.inputs[name] for name in ("model", "connectivity")},
        "configuration": configuration_fingerprint(evaluation.checkpoint.folder),
        "loading": loading,
        **served,
        **config.capacity,
        "limit": config.limit,
        "versions": {
            name: text
            for name, text in versions().items()
            if name not in ("python", "accelerate")
        },
    }
    # A kept answer counts as long as the items and how they are asked are the same.
    data = {}
    for row in evaluation.suite.tasks:
        items = stage.inputs.get(f"task {row.task}", "")
        data[row.task] = items + stage.inputs.get(f"task {row.task}{_DEFINITION}", "")
    return TaskStore(
        Path(config.cache) if config.cache else stage.folder / FINISHED_TASKS,
        identity,
        data,
    )


def _begin(evaluation: Evaluation, stage: Stage, launch: Launch) -> str:
    """Begin the stage; a finished one whose result is damaged is taken back, and its
    whole tasks are kept.
    """

    def take_back() -> None:
        if stage.state() != "finished":
            return
        try:
            read_result(stage.folder)
        except UserError as error:
            print(f"evaluate: {error}: this is done now", file=sys.stderr)
            # A server's facts belong to the key, and are not known yet.
            if evaluation.config.server is None:
                _keep_whole_tasks(evaluation, stage)
            (stage.folder / "manifest.json").unlink()

    launch.ranks.from_first(take_back)
    return launch.begin(stage)


def _keep_whole_tasks(evaluation: Evaluation, stage: Stage) -> None:
    store = _store(evaluation, stage)
    # Other versions of the packages might give other scores.
    own_versions = read_manifest(stage.folder).get("versions")
    # results.json is the damaged one
    with contextlib.suppress(UserError, OSError, KeyError, AttributeError):
        check_outputs(stage.folder, "results.json")
        result = read_json(stage.folder / "results.json")
        for row in evaluation.suite.tasks if own_versions == versions() else ():
            score = result["tasks"][row.task]
            facts = {
                name: score[name] for name in ("num_items_total", "higher_is_better")
            }
            facts |= {"sandbox": result["sandbox"]} if row.kind == "code" else {}
            with contextlib.suppress(UserError):
                store.put(row, read_samples(stage.folder, row.task, score), facts)


def _leave(
    stage: Stage, result: dict[str, Any], samples: Samples, launch: Launch
) -> None:
    """Write the results on the first rank; the others wait."""
    if launch.first:
        write_result(result, samples, stage.folder)
        with new_folder(stage.folder / "lm_eval") as new:
            write_lm_eval(result, samples, new)
    launch.finish(stage, {"mean": result["mean"]})
    _drop_finished_tasks(stage, launch)


def _drop_finished_tasks(stage: Stage, launch: Launch) -> None:
    if launch.first:
        # The samples are in files of their own; a kill may have left some after the
        # stage had finished.
        shutil.rmtree(stage.folder / FINISHED_TASKS, ignore_errors=True)


def test_set_fingerprints(
    suite: SuiteConfig | None,
    data_root: Path | None,
    heldout: SourceConfig | None = None,
) -> dict[str, str]:
    """Return fingerprints of the test sets' items and of the lm-eval files that say how
    they are asked: a score is never reused for others."""
    fingerprints: dict[str, str] = {}
    for row in suite.tasks if suite is not None else ():
        location = dataset_location(row, data_root)
        fingerprints[f"task {row.task}"] = data_fingerprint(location, row.revision)
        folder = None
        if suite is not None and row.kind != "code":
            folder = definition_folder(row, suite)
        if folder is not None:
            fingerprints[f"task {row.task}{_DEFINITION}"] = data_fingerprint(
                str(folder)
            )
    if heldout is not None:
        fingerprints["data.heldout"] = data_fingerprint(heldout.path, heldout.revision)
    return fingerprints
