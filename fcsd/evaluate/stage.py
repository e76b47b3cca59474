"""Evaluate one model on a suite, in a folder with a manifest.

Not covered: which models a recipe has; that is `fcsd.stages.run`.
"""

import contextlib
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcsd.artifact import Stage, versions
from fcsd.config.data import DataConfig, SourceConfig
from fcsd.config.model import ModelConfig
from fcsd.config.recipe import EvaluationConfig, ServerConfig
from fcsd.config.suite import SuiteConfig, TaskConfig, load_suite
from fcsd.connectivity.checkpoint import read_config
from fcsd.data.dataset import heldout_rows
from fcsd.data.local import data_fingerprint
from fcsd.distributed.launch import Launch
from fcsd.errors import UserError
from fcsd.evaluate.batch import BatchSize, check_batch_size
from fcsd.evaluate.endpoints import bias_facts, biased_routers, check_bias, check_bias_model
from fcsd.evaluate.lm_eval.write import write_lm_eval
from fcsd.evaluate.results import Samples, read_result, read_samples, write_result
from fcsd.evaluate.runner import PreparedEvaluation, prepare_evaluation
from fcsd.evaluate.served import ServedBackend
from fcsd.evaluate.server import Server
from fcsd.evaluate.store import TaskStore, configuration_fingerprint
from fcsd.evaluate.suites import dataset_location
from fcsd.files import new_folder, read_json
from fcsd.losses.kl import mean_kl, read_original
from fcsd.models.load import ModelFolder, find_model, free_memory, load_tokenizer
from fcsd.models.place import check_device_map, load_for_evaluation
from fcsd.overlap import refusal
from fcsd.routing.bias import BiasTables

FINISHED_TASKS = "finished-tasks"


@dataclass(frozen=True)
class Steered:
    """A model of a run whose routers are biased.

    ask: gives result and samples. inputs: name -> fingerprint of what they depend on beside tables and model.
    """

    tables: BiasTables
    inputs: Mapping[str, str]
    ask: Callable[[PreparedEvaluation], tuple[dict[str, Any], Samples]]


def evaluate_stage(
    name: str,
    model: ModelFolder,
    original: ModelFolder,
    *,
    folder: Path,
    evaluation: EvaluationConfig,
    data: DataConfig,
    launch: Launch,
    steered: Steered | None = None,
) -> Stage:
    """Evaluate one model of a run on its suite, and measure its KL to the original on held-out text.

    All ranks call this.
    """
    biased = {} if steered is None else bias_facts(steered.tables, evaluation.batch_size)
    check_server(evaluation.server, launch)
    launch = launch.for_evaluation()
    data_root = Path(evaluation.data_root) if evaluation.data_root is not None else None
    suite = load_suite(evaluation.suite)
    settings = {
        # No score depends on the batch size beyond float noise, so an evaluation may continue with another.
        "evaluation": evaluation.model_dump(
            mode="json", exclude={"layer_study", "cache", "batch_size", "server", "router_bias"}
        ),
        "suite": suite.model_dump(mode="json", exclude={"folder"}),
        "data": data.model_dump(
            mode="json", include={"heldout", "heldout_examples", "max_length", "packing", "loss_on"}
        ),
        "model": {"dtype": model.config.dtype},
        **_asked(evaluation.server),
        **biased,
    }
    inputs = launch.ranks.from_first(
        lambda: {
            **_identity(model),
            **(steered.inputs if steered is not None else {}),
            "original": original.weights,
            **test_set_fingerprints(suite.tasks, data_root, data.heldout),
        }
    )
    stage = Stage(folder, "evaluate", settings, inputs)
    loading = model.config.model_dump(include={"dtype", "attn_implementation", "experts_implementation"})
    cache = Path(evaluation.cache) if evaluation.cache is not None else None

    def store(answered_by: dict[str, Any]) -> TaskStore:
        return _store(stage, suite, cache, evaluation.limit, {"loading": loading, **answered_by, **biased})

    if _begin(stage, suite, store({}) if evaluation.server is None else None, launch) == "finished":
        return stage
    free_memory()  # of the trainings before
    tokenizer = load_tokenizer(model.folder, trust_remote_code=model.config.trust_remote_code)
    backend = _backend(evaluation.server, model, tokenizer)
    with prepare_evaluation(
        tokenizer,
        suite,
        data_root=data_root,
        batch_size=evaluation.batch_size,
        limit=evaluation.limit,
        allow_weak_sandbox=evaluation.allow_weak_sandbox,
        store=store(_answered_by(backend, check=True)),
        ranks=launch.ranks,
    ) as evaluate:
        if steered is not None:
            result, samples = steered.ask(evaluate)
        else:
            rows = heldout_of(data, tokenizer)
            result, samples = _ask(evaluate, backend, name, model, original, rows, launch)
    _leave(stage, result, samples, launch)
    return stage


def _ask(
    evaluate: PreparedEvaluation,
    backend: ServedBackend | None,
    name: str,
    model: ModelFolder,
    original: ModelFolder,
    rows: Any,
    launch: Launch,
) -> tuple[dict[str, Any], Samples]:
    """Return result, with the KL to the original, and samples of one model of a run."""
    if backend is not None:
        backend.check(evaluate)
        backend.identify(lambda: load_for_evaluation(model, launch))
    known, loaded = None, None
    if rows is not None:
        # First, and then it goes: a device may not hold two models.
        known = read_original(load_for_evaluation(original, launch), rows, ranks=launch.ranks)
        free_memory()
    if backend is None:
        loaded = load_for_evaluation(model, launch)
        result, samples = evaluate(loaded, name)
    else:
        result, samples = evaluate.ask(backend, name)
    if rows is not None and known is not None:
        loaded = load_for_evaluation(model, launch) if loaded is None else loaded
        result["kl_to_original"] = mean_kl(known, loaded, rows, ranks=launch.ranks)
    return result, samples


def evaluate_checkpoint(
    config: ModelConfig,
    launch: Launch,
    *,
    suite: str | SuiteConfig,
    data_root: Path | None,
    output: Path,
    batch_size: BatchSize,
    limit: int | None,
    allow_weak_sandbox: bool,
    cache: Path | None = None,
    device_map: str | None = None,
    server: ServerConfig | None = None,
    server_check: bool = True,
    bias: BiasTables | None = None,
) -> None:
    """Evaluate any checkpoint, without a recipe; the results are in `output`. All ranks call this.

    cache: a folder of finished tasks that several evaluations share; None: one in `output`, until all are finished.
    device_map: see `fcsd.models.place.load_for_evaluation`.
    server: what answers for the model, if it is not to be asked in memory; checked first whether it is this model.
    bias: tables that steer the model's routers; batch j of a task belongs to endpoint j mod N.
    """
    check_server(server, launch)
    check_bias(bias, batch_size, server)
    launch = launch.for_evaluation()
    ranks = launch.ranks
    check_device_map(device_map, launch)
    check_batch_size(batch_size, ranks)
    tasks = suite if isinstance(suite, SuiteConfig) else load_suite(suite)
    model = find_model(config)
    _check_overlap(model, launch)
    if bias is not None:
        check_bias_model(bias, read_json(model.folder / "config.json")["model_type"])
    biased = bias_facts(bias, batch_size)
    settings = {
        "suite": tasks.model_dump(mode="json", exclude={"folder"}),
        "limit": limit,
        **_asked(server),
        **biased,
    }
    inputs = ranks.from_first(lambda: {**_identity(model), **test_set_fingerprints(tasks.tasks, data_root)})
    stage = Stage(output, "evaluate", settings, inputs)

    def store(answered_by: dict[str, Any]) -> TaskStore:
        return _store(stage, tasks, cache, limit, {"loading": {}, **answered_by, **biased})

    if _begin(stage, tasks, store({}) if server is None else None, launch) != "finished":
        tokenizer = load_tokenizer(model.folder, trust_remote_code=config.trust_remote_code)
        backend = _backend(server, model, tokenizer)
        with prepare_evaluation(
            tokenizer,
            tasks,
            data_root=data_root,
            batch_size=batch_size,
            limit=limit,
            allow_weak_sandbox=allow_weak_sandbox,
            store=store(_answered_by(backend, check=server_check)),
            ranks=ranks,
        ) as evaluate:  # a mistake in tasks or data shows before the weights are read
            if backend is None:
                loaded = load_for_evaluation(model, launch, device_map=device_map)
                with biased_routers(loaded, bias, batch_size) as batches:
                    result, samples = evaluate(loaded, config.path, batches)
            else:
                backend.check(evaluate)
                if server_check:
                    backend.identify(lambda: load_for_evaluation(model, launch, device_map=device_map))
                result, samples = evaluate.ask(backend, config.path)
        _leave(stage, result, samples, launch)


def _check_overlap(model: ModelFolder, launch: Launch) -> None:
    asked = launch.engine.overlap
    if asked not in ("full", "forward"):
        return
    _, family, connectivity = read_config(model.folder, any_family=True)
    reason: str | None = "none of its layers is rewired"
    if family is not None and connectivity is not None:
        reason = refusal(family, model.load_config())
    if reason is not None:
        raise UserError(f"--overlap {asked}: {model.config.path} cannot: {reason}; leave --overlap out")


def heldout_of(data: DataConfig, tokenizer: Any) -> Any:
    """Return the rows that the KL to the original is measured on, if there are any."""
    if data.heldout is None:
        return None
    return heldout_rows(
        data.heldout,
        tokenizer,
        num_examples=data.heldout_examples,
        max_length=data.max_length,
        packing=data.packing,
        loss_on=data.loss_on,
    )


def check_server(server: ServerConfig | None, launch: Launch) -> None:
    """Raise UserError when several processes would ask one server the same."""
    if server is not None and launch.ranks.size > 1:
        raise UserError(
            f"evaluation.server (--server): is asked by one process, and this launch has {launch.ranks.size}; evaluate"
            " without a launcher (`fcsd run` continues a run in one process)"
        )


def _backend(server: ServerConfig | None, model: ModelFolder, tokenizer: Any) -> ServedBackend | None:
    """Return what asks the server, of which nothing but what it serves was asked yet; None: the model is in memory."""
    if server is None:
        return None
    found = Server(server.url, concurrency=server.concurrency)
    found.look(model.config.path)
    return ServedBackend(found, model, tokenizer)


def _asked(server: ServerConfig | None) -> dict[str, Any]:
    """Return what a stage's settings say of the server: that there is one, but not where."""
    return {} if server is None else {"server": True}


def _answered_by(backend: ServedBackend | None, *, check: bool) -> dict[str, Any]:
    """Return what finished tasks depend on where a server answered them."""
    return {} if backend is None else {"server": {**backend.server.facts, "checked": check}}


def _identity(model: ModelFolder) -> dict[str, str]:
    """Return what identifies the model that answers: never its path."""
    return {
        "model": model.weights,
        "connectivity": str(read_json(model.folder / "config.json").get("farskip", "regular")),
        "configuration": configuration_fingerprint(model.folder),
    }


def _store(
    stage: Stage, suite: SuiteConfig, cache: Path | None, limit: int | None, computed: dict[str, Any]
) -> TaskStore:
    """Return where finished tasks are kept: under the fingerprints of what was evaluated, never under its path.

    computed: how the model is loaded, or which server answers for it.
    """
    identity = {
        **{name: stage.inputs[name] for name in ("model", "connectivity", "configuration")},
        **computed,
        "limit": limit,
        "versions": {name: text for name, text in versions().items() if name not in ("python", "accelerate")},
    }
    data = {row.task: stage.inputs[f"task {row.task}"] for row in suite.tasks}
    return TaskStore(cache or stage.folder / FINISHED_TASKS, identity, data)


def _begin(stage: Stage, suite: SuiteConfig, store: TaskStore | None, launch: Launch) -> str:
    """Begin the stage; a finished one whose result is damaged is taken back, whole tasks are kept in `store`."""

    def take_back() -> None:
        if stage.state() != "finished":
            return
        try:
            read_result(stage.folder)
        except UserError as error:
            print(f"evaluate: {error}: this is done now", file=sys.stderr)
            if store is not None:
                _keep_whole_tasks(stage, suite, store)
            (stage.folder / "manifest.json").unlink()

    launch.ranks.from_first(take_back)
    return launch.begin(stage)


def _keep_whole_tasks(stage: Stage, suite: SuiteConfig, store: TaskStore) -> None:
    made = read_json(stage.folder / "manifest.json").get("versions", {})
    with contextlib.suppress(UserError, OSError, KeyError, AttributeError):  # results.json is the damaged one
        result = read_json(stage.folder / "results.json")
        for row in suite.tasks if made == versions() else ():
            found = result["tasks"][row.task]
            facts = {name: found[name] for name in ("num_items_total", "higher_is_better")}
            facts |= {"sandbox": result["sandbox"]} if row.kind == "code" else {}
            with contextlib.suppress(UserError):
                store.put(row, read_samples(stage.folder, row.task, found), facts)


def _leave(stage: Stage, result: dict[str, Any], samples: Samples, launch: Launch) -> None:
    """Write the results on the first rank; the others wait."""
    if launch.first:
        write_result(result, samples, stage.folder)
        with new_folder(stage.folder / "lm_eval") as new:
            write_lm_eval(result, samples, new)
    launch.finish(stage, {"mean": result["mean"]})
    if launch.first:
        # The samples are in their own files now.
        shutil.rmtree(stage.folder / FINISHED_TASKS, ignore_errors=True)


def test_set_fingerprints(
    tasks: Sequence[TaskConfig], data_root: Path | None, heldout: SourceConfig | None = None
) -> dict[str, str]:
    """Return what identifies the items of the test sets: a score is never read for other items."""
    found = {
        f"task {row.task}": data_fingerprint(dataset_location(row, data_root), row.revision) for row in tasks
    }
    if heldout is not None:
        found["data.heldout"] = data_fingerprint(heldout.path, heldout.revision)
    return found
