"""Evaluate one model on a suite, in a folder with a manifest: in memory or behind a
server, with or without a recipe.

    evaluation = PlannedEvaluation("MODEL", model, suite, config)
    result = run_evaluation(evaluation, folder, launch)

Not covered: a model's measurements other than scores (`fcsd.pipeline.reference`).
"""

import contextlib
import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from transformers import PreTrainedModel

from fcsd.base.artifact import Stage, check_outputs, read_manifest, versions
from fcsd.base.errors import UserError
from fcsd.base.files import content_fingerprint, read_json, tokenizer_files
from fcsd.base.memory import free_memory
from fcsd.base.writing import new_folder
from fcsd.evaluation.config import (
    KINDS,
    EvaluationConfig,
    SuiteConfig,
    check_batch_size,
    check_server,
)
from fcsd.evaluation.datasets import DEFINITION, test_set_fingerprints
from fcsd.evaluation.lm_eval.write import write_lm_eval
from fcsd.evaluation.results import (
    Samples,
    TaskStore,
    configuration_fingerprint,
    read_result,
    read_samples,
    write_result,
)
from fcsd.evaluation.runner import (
    TASK_FACTS,
    check_original,
    prepare_evaluation,
)
from fcsd.model.load import ModelFolder
from fcsd.parallel.launch import Launch, begin_stage, finish_stage
from fcsd.parallel.place import load_for_evaluation

if TYPE_CHECKING:
    from fcsd.evaluation.own_text.measure import Original
    from fcsd.evaluation.served import ServedBackend

FINISHED_TASKS = "finished-tasks"
Measure = Callable[[PreTrainedModel], dict[str, Any]]
"""Measures a model beside its scores, for its result."""


class ReferenceLike(Protocol):
    """The reference against which a recipe's models are measured, in addition to their
    scores.
    """

    def settings(self) -> dict[str, Any]:
        """Return the settings on which the measure depends, for the manifest."""

    def inputs(self) -> dict[str, Any]:
        """Return the fingerprints of the measurement's inputs."""

    def measure(self, tokenizer: Any, launch: Launch) -> Measure | None:
        """Return the function that measures a model; None where there is nothing to
        measure. All ranks call this, before the model is loaded.
        """


@dataclass(frozen=True)
class PlannedEvaluation:
    """One model on one suite.

    name: the model's name in the result. config: batch size, limit, data root, cache,
    server and sandbox. reference: of a model of a recipe. server_check: first check
    which model is served. original: what tasks of kind own_text compare with.
    texts_of_original: what it has written, for evaluations that share it. device_map:
    of both models, for one process, as in transformers.
    """

    name: str
    model: ModelFolder
    suite: SuiteConfig
    config: EvaluationConfig
    reference: ReferenceLike | None = None
    server_check: bool = True
    original: ModelFolder | None = None
    texts_of_original: dict[str, Any] = dataclasses.field(default_factory=dict)
    device_map: Any = None

    def load(self, model: ModelFolder, launch: Launch) -> PreTrainedModel:
        """Load a model in eval mode, as a rank of the launch holds it."""
        return load_for_evaluation(model, launch, device_map=self.device_map)

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
        return {
            "evaluation": self.config.model_dump(mode="json", exclude=left_out),
            **suite,
            **self.reference.settings(),
            "model": {"dtype": self.model.config.dtype},
            **self.answered_by,
        }

    @property
    def loading(self) -> dict[str, Any]:
        """How the model is loaded: in another precision, or with other kernels."""
        keys = {"dtype", "attn_implementation", "experts_implementation"}
        return self.model.config.model_dump(include=keys)

    def model_inputs(self) -> dict[str, Any]:
        """Return the fingerprints of the model, without paths."""
        # Weights do not show it: a converted checkpoint has the same as its original.
        return {
            **self.model.fingerprints("model"),
            "connectivity": str(
                read_json(self.model.folder / "config.json").get("farskip", "regular")
            ),
        }

    def inputs(self) -> dict[str, Any]:
        """Return the fingerprints of all inputs, without paths."""
        fingerprints = self.model_inputs()
        if self.reference is not None:
            fingerprints |= self.reference.inputs()
        if self.suite.has_own_text and self.original is not None:
            fingerprints |= self.original.fingerprints("original")
        return fingerprints | test_set_fingerprints(self.suite, self.config.data_folder)


def run_evaluation(
    evaluation: PlannedEvaluation, folder: Path, launch: Launch
) -> dict[str, Any] | None:
    """Evaluate a model on its suite, and what its reference measures beside; the result
    is written into `folder` and returned, None where it was finished before.

    A finished evaluation is not run again, one that was cut off continues with the next
    task. All ranks call this.

    Raises:
        UserError: contradictory settings (a server and several ranks); a missing model,
            task or data set; a folder with another evaluation.
    """
    config = evaluation.config
    check_server(config.server, launch.ranks)
    launch = launch.for_evaluation()
    check_batch_size(config.batch_size, launch.ranks)
    model = evaluation.model
    if evaluation.suite.has_own_text:
        check_original(evaluation.suite.tasks, evaluation.original)
    # The folder belongs to these settings and inputs; with others it is refused.
    stage = Stage(
        folder,
        "evaluate",
        evaluation.settings(),
        launch.ranks.from_first(evaluation.inputs),
        # Words, which change no score.
        may_change=("suite.description",),
    )
    if _begin(evaluation, stage, launch) == "finished":
        _drop_finished_tasks(stage, launch)
        return None
    free_memory()  # of the trainings before
    tokenizer = model.load_tokenizer()
    backend = None  # the model is in memory
    if config.server is not None:
        from fcsd.evaluation.served import ServedBackend

        backend = ServedBackend(config.server, model, tokenizer)
    store = _store(evaluation, stage, stage.inputs, backend)
    # A mistake in tasks or data shows before the weights are read.
    with prepare_evaluation(
        tokenizer,
        evaluation.suite,
        config,
        store=store,
        ranks=launch.ranks,
        original=_original(evaluation, stage, launch),
    ) as prepared:
        measure = None
        prepared.check_positions(model.load_config(any_family=True))
        if backend is not None:
            prepared.check_server(backend)
            if evaluation.server_check:
                backend.identify(lambda: evaluation.load(model, launch))
        # The original is read before the model is loaded: a device may not hold both.
        if evaluation.reference is not None:
            measure = evaluation.reference.measure(tokenizer, launch)
        if backend is not None:
            result, samples = prepared.evaluate(backend, evaluation.name)
            if measure is not None:
                result |= measure(evaluation.load(model, launch))
        else:
            loaded = evaluation.load(model, launch)
            result, samples = prepared(loaded, evaluation.name)
            if measure is not None:
                result |= measure(loaded)
    _write_and_finish(stage, result, samples, launch)
    return result


def _original(
    evaluation: PlannedEvaluation, stage: Stage, launch: Launch
) -> "Original | None":
    """Return the original of an evaluation whose tasks need one; its own samples are
    kept beside the finished tasks, as those of its own evaluation.
    """
    original = evaluation.original
    if original is None or not evaluation.suite.has_own_text:
        return None
    from fcsd.evaluation.own_text.measure import OF_ORIGINAL, Original
    from fcsd.training.teachers.load import refuse_other_tokenizer

    @contextlib.contextmanager
    def loaded() -> Iterator[PreTrainedModel]:
        yield evaluation.load(original, launch)
        free_memory()

    # Experts of the original have no capacity, whatever those of the model have.
    config = evaluation.config
    unlimited = config.model_copy(
        update={"capacity_factor": None, "capacity_drop": None}
    )
    of_original = dataclasses.replace(evaluation, model=original, config=unlimited)
    model, inputs = launch.ranks.from_first(
        lambda: (evaluation.model_inputs(), of_original.model_inputs())
    )
    same = (
        model == inputs
        and evaluation.loading == of_original.loading
        and not config.capacity
    )
    store = _store(of_original, stage, stage.inputs | inputs)
    # Through another template or tokenizer its prompts are not those of its own
    # evaluation.
    asked = tokenizer_files(evaluation.model.folder)
    if asked != tokenizer_files(original.folder):
        refuse_other_tokenizer(
            original.load_tokenizer(),
            evaluation.model.load_tokenizer(),
            "the original",
            may_lack=True,
            advice=OF_ORIGINAL,
            whose="the model's",
        )
        store.identity["asked"] = asked
    return Original(
        loaded,
        itself=same,
        name=content_fingerprint(inputs),
        store=store,
        known=evaluation.texts_of_original,
    )


def _store(
    evaluation: PlannedEvaluation,
    stage: Stage,
    inputs: Mapping[str, Any],
    backend: "ServedBackend | None" = None,
) -> TaskStore:
    """Return the store of finished tasks, keyed by the fingerprints of the model and
    its settings, never by a path.

    inputs: fingerprints of the stage's inputs. backend: the server that answers for the
    model, if any.
    """
    config, served = evaluation.config, {}
    if backend:
        # Another engine, or another configuration of it, rounds differently.
        served = {"server": {**backend.facts, "checked": evaluation.server_check}}
    identity = {
        **{name: inputs[name] for name in ("model", "connectivity")},
        "configuration": configuration_fingerprint(evaluation.model.folder),
        "loading": evaluation.loading if evaluation.reference is not None else {},
        **served,
        **config.capacity,
        "limit": config.limit,
        "versions": {
            name: text
            for name, text in versions().items()
            if name not in ("python", "accelerate")
        },
    }
    # A kept answer counts as long as the items and their prompts are the same.
    data = {}
    original = [inputs[name] for name in sorted(inputs) if name.startswith("original")]
    for row in evaluation.suite.tasks:
        items = inputs.get(f"task {row.task}", "")
        data[row.task] = items + inputs.get(f"task {row.task}{DEFINITION}", "")
        if KINDS[row.kind].distance:
            data[row.task] += content_fingerprint(original)
    return TaskStore(
        Path(config.cache) if config.cache else stage.folder / FINISHED_TASKS,
        identity,
        data,
    )


def _begin(evaluation: PlannedEvaluation, stage: Stage, launch: Launch) -> str:
    """Begin the stage; a finished one whose result is damaged is taken back, and its
    whole tasks are kept.
    """

    def remove_damaged() -> None:
        finished = (stage.folder / "manifest.json").is_file()
        if not finished or stage.state() != "finished":
            return
        try:
            read_result(stage.folder)
        except UserError as error:
            print(f"evaluate: {error}; fcsd does this now", file=sys.stderr)
            # A server's facts belong to the key, and are not known yet.
            if evaluation.config.server is None:
                _keep_whole_tasks(evaluation, stage)
            (stage.folder / "manifest.json").unlink()

    launch.ranks.from_first(remove_damaged)
    return begin_stage(stage, launch)


def _keep_whole_tasks(evaluation: PlannedEvaluation, stage: Stage) -> None:
    store = _store(evaluation, stage, stage.inputs)
    # Other versions of the packages might give other scores.
    own_versions = read_manifest(stage.folder).get("versions")
    # results.json is the damaged one
    with contextlib.suppress(UserError, OSError, KeyError, AttributeError):
        check_outputs(stage.folder, "results.json")
        result = read_json(stage.folder / "results.json")
        recorded = {row["task"]: row for row in result["settings"]["suite"]["tasks"]}
        for row in evaluation.suite.tasks if own_versions == versions() else ():
            score = result["tasks"][row.task]
            names = ("num_items_total", *TASK_FACTS)
            facts = {name: score[name] for name in names if name in score}
            if row.kind == "code":
                facts["sandbox"] = result["sandbox"]
            elif KINDS[row.kind].by_lm_eval:
                facts["generation"] = recorded[row.task]
            with contextlib.suppress(UserError):
                store.put(row, read_samples(stage.folder, row.task, score), facts)


def _write_and_finish(
    stage: Stage, result: dict[str, Any], samples: Samples, launch: Launch
) -> None:
    """Write the results on the first rank; the others wait."""
    if launch.first:
        write_result(result, samples, stage.folder)
        with new_folder(stage.folder / "lm_eval") as new:
            write_lm_eval(result, samples, new)
    finish_stage(stage, launch, {"mean": result["mean"]})
    _drop_finished_tasks(stage, launch)


def _drop_finished_tasks(stage: Stage, launch: Launch) -> None:
    if launch.first:
        # The samples are in separate files; a kill may have left some after the stage
        # had finished.
        shutil.rmtree(stage.folder / FINISHED_TASKS, ignore_errors=True)
