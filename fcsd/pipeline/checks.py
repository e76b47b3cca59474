"""Refuse, before the first model is loaded, combinations of recipe, launch and machine
that would end a run hours later.

Not covered: faults that only a pass over all the data shows (templates, lengths), and
the columns of data on the Hub; a stage checks those when it starts.
"""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from fcsd.base.errors import UserError, errors_begin
from fcsd.base.strict import refuse
from fcsd.data.config import DataConfig, TrainingDataConfig
from fcsd.data.sources import check_source
from fcsd.evaluation.code.scorer import CodeScorer
from fcsd.evaluation.config import (
    LMEvalTaskConfig,
    SuiteConfig,
    check_batch_size,
    check_server,
)
from fcsd.evaluation.datasets import dataset_location
from fcsd.evaluation.lm_eval.packages import provide_packages, task_folder
from fcsd.model.connectivity.export import tell_first_layers
from fcsd.model.connectivity.modeling import classes_of, register
from fcsd.model.connectivity.selection import resolve_layers
from fcsd.model.connectivity.spec import ConnectivityConfig
from fcsd.model.dtypes import dtype_of
from fcsd.model.families import Family, expert_counts, family_of, moe_mask
from fcsd.model.families.family import text_config
from fcsd.model.families.overlap import refusal
from fcsd.model.load import ModelFolder, check_positions, load_checkpoint
from fcsd.model.quantised.methods import why_not_trained
from fcsd.parallel.engine import precision_rules
from fcsd.parallel.launch import Launch
from fcsd.pipeline.context import Run
from fcsd.recipe.layout import MAIN
from fcsd.recipe.recipe import PretrainConfig, Recipe, TaskStoppingConfig
from fcsd.training.arguments import (
    check_reporters,
    refuse_what_cannot_be_sharded,
)
from fcsd.training.config import TrainConfig, micro_batches
from fcsd.training.prepare import check_student
from fcsd.training.teachers.load import (
    check_is_original,
    check_teacher_folder,
    refuse_other_tokenizer,
)


def check_run(run: Run) -> None:
    """Check every stage that `fcsd run` has not finished yet. All ranks call this.

    Raises:
        UserError: a batch cannot be divided, a tracker is not installed, data are
            missing, the model lacks selected layers, the sandbox is too weak, or the
            launch does not support a setting, such as an automatic batch size where it
            shards the weights.
    """
    recipe, pretraining = run.recipe, run.recipe.pretrain
    if recipe.only_pretrains:
        _check_pretrainings(run)
        return
    exists = pretraining is None or not _unfinished(run.layout.pretrain)
    if pretraining is not None and not exists:
        # Its configuration comes from the recipe.
        config = _check_pretraining(run, pretraining)
        family = family_of(config)
        check_rows_fit(run, config, recipe.data.max_length)
    else:
        config, family = _config_and_family(run.original)
        _check_calibration(run)
    layout = run.layout
    if recipe.sweep is not None and _unfinished(layout.sweep):
        check_training(run, recipe.sweep.batch_size_tokens)
    for name in (None, *recipe.variants):
        if not _unfinished(layout.stage(name or MAIN)):
            continue
        variant_run = run.variant(name)
        # A variant without a batch size of its own may get any size of the sweep.
        changed = recipe.variants[name] if name is not None else {}
        sizes = None
        if recipe.sweep is not None and "train.batch_size_tokens" not in changed:
            sizes = recipe.sweep.batch_size_tokens
        with _errors_of(name):
            check_training(variant_run, sizes)
            if not exists:
                _check_layers(variant_run.recipe, config, family)
            elif name is not None and variant_run.recipe.starts_calibrated:
                _check_calibration(variant_run)
    if run.launch.first and _unfinished(layout.convert):
        mask = moe_mask(config, family)
        tell_first_layers(recipe.connectivity.spec, mask, family, recipe.model_path)
    if any(_unfinished(layout.evaluate / name) for name in recipe.model_names):
        _check_evaluation(run)


def _check_pretrainings(run: Run) -> None:
    """Check a recipe that only pre-trains, and its variants."""
    for name in (None, *run.recipe.variants):
        section = run.variant(name).recipe.pretrain
        assert section is not None
        if not _unfinished(run.layout.stage(name or "original")):
            continue
        with _errors_of(name):
            config = _check_pretraining(run, section)
            _rewired_layers(section.connectivity, config, family_of(config))
    if any(_unfinished(run.layout.evaluate / name) for name in run.recipe.model_names):
        _check_evaluation(run)


def _errors_of(variant: str | None) -> AbstractContextManager[None]:
    """Name a recipe's variant in the errors of a block; None: the recipe itself."""
    return nullcontext() if variant is None else errors_begin(f"variants.{variant}: ")


def _check_pretraining(run: Run, section: PretrainConfig) -> PreTrainedConfig:
    """Check a `pretrain` section; return the configuration of its model."""
    launch = run.launch.with_copies()
    check_settings(section.train, section.data, launch, "pretrain.")
    config = model_config(section.config)
    check_rows_fit(run, config, section.data.max_length, "pretrain.")
    return config


def check_training(run: Run, batches: Sequence[int] | None = None) -> None:
    """Check the distillation of a recipe, once per run, with each of the batch sizes of
    its sweep; None: with its own.
    """
    # Otherwise `check_run` has checked the configuration of the model to be
    # pre-trained.
    exists = run.recipe.pretrain is None or not _unfinished(run.layout.pretrain)
    facts = ("training", repr(run.recipe), tuple(batches or ()), exists)
    run.once(facts, lambda: _check_training(run, batches, exists))


def _check_training(run: Run, batches: Sequence[int] | None, exists: bool) -> None:
    recipe, launch = run.recipe, run.launch
    quantisation = None
    if recipe.pretrain is None:
        quantisation = run.original.checkpoint.quantisation
    refuse(
        (
            recipe.lora is not None and launch.engine.shards,
            "lora: adapters on weights that are sharded over ranks are not supported;"
            " launch data parallel copies",
        ),
        (
            reason := why_not_trained(quantisation),
            lambda: f"{run.original.config.path}: {reason}",
        ),
    )
    by_heldout_kl = (
        recipe.early_stopping is not None
        and recipe.early_stopping.metric == "heldout_kl"
    )
    refuse_what_cannot_be_sharded(
        recipe.objective, launch.engine, by_heldout_kl=by_heldout_kl
    )
    if exists:
        check_rows_fit(run, run.original, recipe.data.max_length)
    if recipe.teacher is not None and recipe.teacher.path is not None:
        check_rows_fit(
            run, run.teacher, recipe.data.max_length, model_key="teacher.path"
        )
    if recipe.teacher is not None and exists:
        check_teacher(run)
    if exists:
        _check_student(run)
    for tokens in batches or [recipe.train.batch_size_tokens]:
        train = recipe.train.model_copy(update={"batch_size_tokens": tokens})
        section = "train" if batches is None else "sweep"
        check_settings(
            train, recipe.data, launch, batch_key=f"{section}.batch_size_tokens"
        )
    if isinstance(recipe.early_stopping, TaskStoppingConfig):
        _check_suite(recipe.early_stopping.scored, run.data_root)


def _check_student(run: Run) -> None:
    """Try the settings of a training on the student without its weights."""
    recipe, train = run.recipe, run.recipe.train
    _check_layers(recipe, *_config_and_family(run.original))
    student = load_checkpoint(run.original, recipe.connectivity.spec, weights=False)
    check_student(
        student,
        run.tokenizer,
        recipe.sections,
        teacher_rows=run.teacher.vocab_size if recipe.teacher is not None else None,
        checkpointing=train.gradient_checkpointing,
    )
    if recipe.lora is not None:
        from fcsd.training.teachers.lora import add_adapters

        add_adapters(student, recipe.lora, recipe.seed, dtype_of(train.dtype))


def check_teacher(run: Run) -> None:
    """Check the teacher's checkpoint against the student's, once per run."""
    recipe, teacher = run.recipe, run.teacher
    assert recipe.teacher is not None

    def check() -> None:
        assert recipe.teacher is not None
        # A path that the user names is taken as meant; the default is the student's.
        if recipe.teacher.path is None:
            check_is_original(teacher.any_checkpoint)
            return
        name = f"teacher.path {recipe.teacher.path}"
        theirs = teacher.load_tokenizer()
        refuse_other_tokenizer(theirs, run.tokenizer, name)
        check_teacher_folder(
            teacher,
            run.original,
            recipe.connectivity.spec,
            name,
            same_weights=not recipe.starts_calibrated,
        )

    facts = (recipe.teacher.path, repr(recipe.connectivity), recipe.starts_calibrated)
    # On the first rank, because it may hash weights.
    run.once(("teacher", *facts), lambda: run.launch.ranks.from_first(check))


def check_rows_fit(
    run: Run,
    model: ModelFolder | PreTrainedConfig,
    max_length: int,
    where: str = "",
    model_key: str = "model",
) -> None:
    """Check the length of rows against the positions of a model, once per run; `where`
    is the beginning of the key.
    """
    key = f"{where}data.max_length"
    options: dict[str, Any] = {"key": key, "tell": run.launch.first}

    def check() -> None:
        if isinstance(model, ModelFolder):
            model.check_positions(max_length, **options)
        else:
            name = f"a {model.model_type}"
            check_positions(name, model, (), max_length, **options)

    run.once(("positions", key, model_key, max_length), check)


def settle_overlap(run: Run) -> None:
    """Settle how far the model overlaps in this launch; on the first rank, print a line
    if less communication will overlap than was asked for.

    Raises:
        UserError: --expert-parallel does not divide the experts; the model, the version
            of transformers or the environment does not support --overlap.
    """
    engine = run.launch.engine
    if not engine.spreads_experts:
        return
    from fcsd.parallel.overlap import check_connections, check_transformers

    config, family, name, connectivity = _overlapped_model(run)
    experts, _ = expert_counts(text_config(config, family))
    # Each rank holds equally many whole experts.
    if isinstance(experts, int) and experts % engine.expert_parallel:
        raise UserError(
            f"--expert-parallel {engine.expert_parallel}: does not divide the {experts}"
            f" experts of {name}; change it"
        )
    if engine.overlap != "off":
        check_transformers()
        check_connections(run.launch.device)
    reason = refusal(family, config)
    # Layers without experts have no exchanges.
    mask = moe_mask(config, family)
    layers = resolve_layers(connectivity.spec.layers, mask)
    if reason is None and not any(mask[k] for k in layers):
        reason = "connectivity.layers rewires no MoE layer"
    # A model that cannot overlap is an error only if overlap was requested.
    if reason is not None and engine.overlap in ("full", "forward"):
        raise UserError(
            f"--overlap {engine.overlap}: {name} does not support it:"
            f" {reason}; leave --overlap out"
        )
    if run.launch.first:
        _tell_of_overlap(run, reason)


def _overlapped_model(
    run: Run,
) -> tuple[PreTrainedConfig, Family, str, ConnectivityConfig]:
    """Return configuration, family, name and connectivity of the model of a launch."""
    recipe = run.recipe
    # A model that is only pre-trained may not exist yet.
    if recipe.only_pretrains:
        assert recipe.pretrain is not None
        config = model_config(recipe.pretrain.config)
        connectivity = recipe.pretrain.connectivity
        return config, family_of(config), "pretrain.config", connectivity
    config, family = _config_and_family(run.original)
    return config, family, str(run.original.folder), recipe.connectivity


def _tell_of_overlap(run: Run, reason: str | None) -> None:
    """Print a line if less communication will overlap; reason: why none does."""
    if reason is not None and run.launch.engine.overlap is None:
        print(f"overlap: off: {reason}", file=sys.stderr)
    if reason is None and run.recipe.objective.l2_coefficient is not None:
        print(
            "overlap: layers whose streams objective l2 compares wait for their own"
            " combine",
            file=sys.stderr,
        )


def check_settings(
    train: TrainConfig,
    data: TrainingDataConfig,
    launch: Launch,
    where: str = "",
    batch_key: str = "train.batch_size_tokens",
) -> None:
    """Check a `train` section and its `data` section; `where` is the beginning of their
    keys, and `batch_key` where the batch is given.
    """
    with errors_begin(where):
        refuse(*precision_rules(train, launch.engine))
        check_reporters(train.report_to)
        micro_batches(train, data.max_length, launch.ranks.size, batch_key)
        for source in data.train:
            check_source(source)
        if isinstance(data, DataConfig) and data.heldout is not None:
            check_source(data.heldout)


def model_config(config: dict[str, Any]) -> PreTrainedConfig:
    """Return transformers' configuration of the model to pre-train.

    Raises:
        UserError: transformers or fcsd does not support the model type, the model is
            dense, or a value is invalid.
    """
    from fcsd.model.inspect.checkpoint import config_object

    raw = {
        key: value for key, value in config.items() if key != "experts_implementation"
    }
    with errors_begin("pretrain.config: "):
        # transformers' own error would list hundreds of model types.
        family = family_of({"model_type": config["model_type"]})
        cls, name = classes_of(family).model.config_class, family.model_type
        if family.like:
            register(name)
        built: PreTrainedConfig = config_object(cls, raw, name, name)
        family_of(built)
    return built


def _config_and_family(model: ModelFolder) -> tuple[PreTrainedConfig, Family]:
    family = model.checkpoint.family
    assert family is not None
    return model.load_config(), family


def _check_calibration(run: Run) -> None:
    if run.recipe.calibration is not None:
        from fcsd.pipeline.calibrate import check_calibration

        check_calibration(run)


def _check_layers(recipe: Recipe, config: PreTrainedConfig, family: Family) -> None:
    layers = _rewired_layers(recipe.connectivity, config, family)
    if not layers and recipe.starts_calibrated:
        raise UserError(
            "connectivity.layers: none leaves nothing to calibrate; select layers, or"
            " set calibration.starts_training: false"
        )


def _rewired_layers(
    connectivity: ConnectivityConfig, config: PreTrainedConfig, family: Family
) -> list[int]:
    """Return the layers that a connectivity rewires in a model that it fits."""
    mask = moe_mask(config, family)
    try:
        layers: list[int] = connectivity.spec.new_field(mask, family.layout)["layers"]
    except UserError as error:
        # An error of one side or of the selection begins with its key.
        where = "" if str(error).startswith("connectivity") else "connectivity."
        raise UserError(f"{where}{error}") from None
    return layers


def _check_evaluation(run: Run) -> None:
    evaluation = run.recipe.evaluation
    suite = run.suite
    check_batch_size(evaluation.batch_size, run.launch.for_evaluation().ranks)
    check_server(evaluation.server, run.launch.ranks)
    if evaluation.layer_study is not None:
        from fcsd.planning.layers.settings import study_from_recipe, suite_of

        suite_of(study_from_recipe(run.recipe))
    _check_suite(suite, run.data_root)
    kinds = {row.kind for row in suite.tasks}
    # A recipe that pretrains has no tokenizer yet.
    if "own_text" in kinds and run.recipe.pretrain is None:
        run.launch.ranks.from_first(lambda: _check_prompts(suite, run))
    # Starting the sandbox once shows whether it is strong enough.
    if "code" in kinds:
        run.launch.ranks.from_first(
            lambda: _start_sandbox(evaluation.allow_weak_sandbox)
        )


def _check_suite(suite: SuiteConfig, data_root: Path | None) -> None:
    """Check that the data of each task, and the packages that grade it, are there."""
    for row in suite.tasks:
        dataset_location(row, data_root)
        if isinstance(row, LMEvalTaskConfig):
            provide_packages(row.task, task_folder(row, suite))


def _check_prompts(suite: SuiteConfig, run: Run) -> None:
    """Refuse prompts of own text that the tokenizer's template does not take."""
    for row in suite.tasks:
        if row.kind == "own_text":
            from fcsd.evaluation.own_text.prompts import load_prompts

            first = row.model_copy(update={"num_prompts": 1})
            load_prompts(first, run.data_root, run.tokenizer)


def _start_sandbox(allow_weak_sandbox: bool) -> None:
    with CodeScorer(num_workers=1, allow_weak_sandbox=allow_weak_sandbox):
        pass


def _unfinished(folder: Path) -> bool:
    return not (folder / "manifest.json").is_file()
