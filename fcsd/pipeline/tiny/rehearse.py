"""Make a rehearsal of a recipe: replace its model, data and sizes, and write the
folder.

    FOLDER/recipe.yaml        the rehearsal, a complete recipe of its own
    FOLDER/model/             the model with its sizes cut, to 4 layers of width 64, random weights; and its tokenizer
    FOLDER/hub/OWNER/NAME/    rows in the columns of each data set that the recipe names by its hub id
    FOLDER/files/             the same for data that the recipe names by a path
    FOLDER/run/               output_dir

The model, the data and the numbers of steps, tokens and items are replaced. A batch
keeps its number of rows, so that it divides over ranks and micro-batches exactly as the
real one (a batch of more than 64 rows is halved until it has no more). Test sets whose
columns are in no suite are linked from the recipe's own data root.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from fcsd.base.errors import UserError
from fcsd.base.files import inside, is_empty, new_folder
from fcsd.base.strict import validate
from fcsd.data.config import (
    DataConfig,
    DecontaminateConfig,
    SourceConfig,
    TrainingDataConfig,
    making_of,
)
from fcsd.evaluation.config import SuiteConfig, TaskConfig, load_suite, suite_names
from fcsd.evaluation.lm_eval.columns import columns_of
from fcsd.evaluation.lm_eval.tasks import named_splits
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity.modeling import base_config_class
from fcsd.model.connectivity.spec import parse_selection
from fcsd.model.families import family_of
from fcsd.model.inspect.checkpoint import config_object, find_source
from fcsd.model.quantised.methods import without_quantisation
from fcsd.parallel.launch import Launch
from fcsd.pipeline.checks import model_config
from fcsd.pipeline.tiny.cut import cut_sizes
from fcsd.pipeline.tiny.models import small_model, tiny_tokenizer
from fcsd.pipeline.tiny.rows import (
    CODE,
    benchmark_row,
    training_row,
    write_data_set,
    write_rows,
)
from fcsd.recipe.load_recipe import graded_splits, split_names
from fcsd.recipe.recipe import (
    Recipe,
    TaskStoppingConfig,
    router_loss_keys,
    set_dotted,
    to_yaml,
)
from fcsd.training.card.facts import hub_id
from fcsd.training.config import TrainConfig

_MAX_LENGTH = 64
_VOCABULARY = 512
_SIZES: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    # Each token is a byte, so prompts with shots are long.
    "max_position_embeddings": 4096,
}
_NUM_STEPS = 2
_MOST_ROWS = 64  # of a batch
_NUM_ITEMS = 8  # of every test set, or as many as its shots need
_LAYERS = 4

Benchmark = tuple[TaskConfig, SuiteConfig]
"""A row of a suite, and the suite."""


def rehearse(recipe: Recipe, folder: Path, launch: Launch) -> Recipe:
    """Write the rehearsal of `recipe` into `folder`, unless it is there, and return it.

    Raises:
        UserError: the folder holds something else, or the rehearsal of other settings;
            the model belongs to no known family.
    """
    # The rehearsal depends only on recipe and folder, so its text identifies it.
    small = _small(recipe, folder)
    text = (
        f"# The rehearsal of recipe {recipe.name}, made by fcsd: no result means"
        f" anything.\n{to_yaml(small.dump())}"
    )
    ready = folder / "recipe.yaml"
    # Never overwrite anything that is not this rehearsal.
    if folder.is_file() or (
        folder.is_dir() and not is_empty(folder) and not ready.is_file()
    ):
        raise UserError(
            f"--rehearse {folder}: is something else than a rehearsal; choose a new"
            " folder"
        )
    if ready.is_file() and ready.read_text(encoding="utf-8") != text:
        raise UserError(
            f"--rehearse {folder}: holds the rehearsal of other settings; choose"
            " another folder or remove it"
        )
    if launch.first:
        inventable, user_test_sets = _test_sets(recipe)
        if not ready.is_file():
            with new_folder(folder) as new:
                _write_models(recipe, new)
                _write_data(recipe, new, inventable)
                (new / "recipe.yaml").write_text(text, encoding="utf-8")
        # Also in a rehearsal that exists: the user may have fetched test sets since.
        for path, source in user_test_sets.items():
            link = folder / "hub" / path  # `_test_sets` has checked the path
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(source)
    launch.wait()
    return small


def _small(recipe: Recipe, folder: Path) -> Recipe:
    """Replace model, data and steps of a recipe and its variants; nothing is read or written."""
    raw = _replaced(recipe, folder)
    for name, changes in recipe.variants.items():
        # The values that a variant changes are taken from the rehearsal of that
        # variant, so that they are replaced in the same way.
        variant = _replaced(recipe.variant(name), folder)
        raw["variants"][name] = {key: _dotted(variant, key) for key in changes}
    return validate(Recipe, raw, f"rehearsal of recipe {recipe.name}")


def _replaced(recipe: Recipe, folder: Path) -> dict[str, Any]:
    raw = recipe.dump()

    def put(key: str, value: Any) -> None:
        set_dotted(raw, key, value, f"rehearsal of recipe {recipe.name}")

    # The name is in the titles of report and model card.
    put("name", f"{recipe.name}-rehearsal")
    put("output_dir", str(folder / "run"))
    if recipe.pretrain is not None:
        put("pretrain.config", _pretrain_config(recipe))
        put("pretrain.tokenizer", str(folder / "model"))
        raw["pretrain"]["data"] |= _small_data(recipe.pretrain.data, folder, "pretrain")
        raw["pretrain"]["train"] |= _small_train(
            recipe.pretrain.train, recipe.pretrain.data.max_length
        )
    else:
        put("model.path", str(folder / "model"))
        put("model.revision", None)
    if recipe.teacher is not None and recipe.teacher.path is not None:
        raw["teacher"] |= {"path": str(folder / "teacher"), "revision": None}
    if recipe.teacher is not None and recipe.teacher.cache is not None:
        put("teacher.cache", str(folder / "teacher-cache"))
    if recipe.objective.vocab_size is not None:
        put("objective.vocab_size", _VOCABULARY)
    length = recipe.data.max_length
    raw["data"] |= _small_data(recipe.data, folder, "data")
    if not recipe.only_pretrains:
        raw["train"] |= _small_train(recipe.train, length)
    if recipe.early_stopping is not None:
        put("early_stopping.every_steps", _NUM_STEPS // 2)
        if isinstance(recipe.early_stopping, TaskStoppingConfig):
            put("early_stopping.limit", 2)
    if recipe.sweep is not None:
        batches = [
            _small_batch(tokens, length) for tokens in recipe.sweep.batch_size_tokens
        ]
        raw["sweep"] |= {"batch_size_tokens": batches, "steps": 2, "last_steps": 1}
        put("sweep.warmup_steps", min(recipe.sweep.warmup_steps, 1))
        if recipe.sweep.train_tokens is not None:
            # At least `_NUM_STEPS` steps with the largest batch: the first step of a
            # warm-up changes no weights.
            put("sweep.train_tokens", _NUM_STEPS * max(batches))
    put("evaluation.data_root", str(folder / "hub"))
    put("evaluation.server", None)  # serves another model
    put("evaluation.limit", min(recipe.evaluation.limit or _NUM_ITEMS, 2))
    return raw


def _small_data(data: TrainingDataConfig, folder: Path, section: str) -> dict[str, Any]:
    def small(source: SourceConfig, name: str) -> dict[str, Any]:
        path = str(_place(source.path, folder, f"{section}-{name}"))
        return source.model_dump(mode="json") | {"path": path, "revision": None}

    sources = [small(source, str(index)) for index, source in enumerate(data.train)]
    changes = {"train": sources, "max_length": min(data.max_length, _MAX_LENGTH)}
    if not isinstance(data, DataConfig):
        return changes
    heldout = None if data.heldout is None else small(data.heldout, "heldout")
    num_examples = min(data.heldout_examples, _NUM_ITEMS)
    return changes | {"heldout": heldout, "heldout_examples": num_examples}


def _small_train(train: TrainConfig, max_length: int) -> dict[str, Any]:
    schedule = train.lr_scheduler_kwargs
    # The decay must fit into the few steps.
    if schedule is not None and "num_decay_steps" in schedule:
        schedule = schedule | {"num_decay_steps": 1}
    return {
        "lr_scheduler_kwargs": schedule,
        "max_steps": min(train.max_steps, _NUM_STEPS),
        "warmup_steps": min(train.warmup_steps, 1),
        "batch_size_tokens": _small_batch(train.batch_size_tokens, max_length),
        "logging_steps": 1,
        "save_steps": _NUM_STEPS // 2,
    }


def _small_batch(tokens: int, max_length: int) -> int:
    """Return the tokens of a batch with as many, shorter rows; their number is halved
    while it exceeds `_MOST_ROWS`. A batch that is not a whole number of rows, which
    training refuses, remains one.
    """
    rows, remainder = divmod(tokens, max_length)
    while rows > _MOST_ROWS and rows % 2 == 0:
        rows //= 2
    return rows * min(max_length, _MAX_LENGTH) + (1 if remainder else 0)


def _dotted(raw: Any, key: str) -> Any:
    for part in key.split("."):
        raw = raw[int(part)] if isinstance(raw, list) else raw[part]
    return raw


def _pretrain_config(recipe: Recipe) -> dict[str, Any]:
    assert recipe.pretrain is not None
    original = recipe.pretrain.config
    cut = cut_sizes(
        model_config(original), num_hidden_layers=_num_layers(recipe), **_SIZES
    )
    config = cut.to_diff_dict()
    for key in router_loss_keys(config):  # defaults of transformers
        section, _, name = key.rpartition(".")
        del (_dotted(config, section) if section else config)[name]
    implementation = {
        name: original[name] for name in ("experts_implementation",) if name in original
    }
    dropped = (
        "transformers_version", "_name_or_path", "dtype", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    return {
        name: value for name, value in config.items() if name not in dropped
    } | implementation


def _write_models(recipe: Recipe, folder: Path) -> None:
    """Write the small model and its tokenizer, or only the tokenizer for a recipe that
    pre-trains; also teachers with other checkpoints. Weights are bfloat16, as in real
    checkpoints.
    """
    sizes = _SIZES | {"num_hidden_layers": _num_layers(recipe), "dtype": torch.bfloat16}
    if recipe.pretrain is None:
        small_model(_config(recipe.model), **sizes).save_pretrained(folder / "model")
    tiny_tokenizer(_VOCABULARY).save_pretrained(folder / "model")
    for variant_recipe in recipe.with_variants:
        if (
            variant_recipe.teacher is not None
            and variant_recipe.teacher.path is not None
        ):
            small_model(
                _config(variant_recipe.teacher_model[1]), seed=1, **sizes
            ).save_pretrained(folder / "teacher")


def _config(model: ModelConfig) -> PreTrainedConfig:
    """Read the configuration of a checkpoint, without weights, as a regular model's."""
    assert model.path is not None
    try:
        source = find_source(model.path, model.revision)
    except UserError as error:
        raise UserError(
            f"--rehearse: {error}; it is read to find the model's family"
        ) from None
    config = source.own_config
    family = family_of(config)
    raw = without_quantisation(config)  # of its weights
    return config_object(
        base_config_class(family), raw, family.model_type, source.where
    )


def _num_layers(recipe: Recipe) -> int:
    """Return enough layers for all that are selected by number; shares of the layers
    need no more than `_LAYERS`.
    """
    sections = [variant_recipe.connectivity for variant_recipe in recipe.with_variants]
    if recipe.pretrain is not None:
        sections.append(recipe.pretrain.connectivity)
    layer_counts = [_LAYERS]
    for section in sections:
        selection = parse_selection(section.layers)
        # Selected layers must exist in the cut model, too.
        if isinstance(selection, list):
            layer_counts.append(selection[-1] + 1)
        elif isinstance(selection, dict):
            layer_counts += [
                count for count in selection.values() if isinstance(count, int)
            ]
    return max(layer_counts)


def _place(path: str, folder: Path, name: str) -> Path:
    """Return the location of the rows that replace the data at `path`."""
    if hub_id(path) is not None:
        return folder / "hub" / path
    return folder / "files" / (name + (Path(path).suffix if _is_file(path) else ""))


def _is_file(path: str) -> bool:
    return Path(path).suffix in (".jsonl", ".json", ".parquet")


def _write_data(
    recipe: Recipe, rehearsal: Path, inventable: Mapping[str, Sequence[Benchmark]]
) -> None:
    """Write rows for all data that the recipe reads; inventable: the test sets whose
    rows can be invented.
    """
    # Splits are collected per data set, which is written at once with its README.
    repositories: dict[Path, dict[tuple[str, str], list[dict[str, Any]]]] = {}
    for name, source, number in _sources(recipe):
        columns = source.columns or {"messages": "messages"}
        rows = [training_row(source.path, columns, index) for index in range(number)]
        target = _place(source.path, rehearsal, name)
        if _is_file(source.path):
            write_rows(target, rows)
        else:
            for split in split_names(source.split):
                repositories.setdefault(target, {})[source.name or "default", split] = (
                    rows
                )
    (rehearsal / "hub").mkdir(exist_ok=True)
    for path, benchmarks in sorted(inventable.items()):
        files = repositories.setdefault(inside(rehearsal / "hub", path), {})
        for row, suite in benchmarks:
            make = (
                CODE[path]
                if row.kind == "code"
                else partial(benchmark_row, columns_of(row.task, suite))
            )
            rows = [
                make(index) for index in range(max(_NUM_ITEMS, row.num_fewshot + 1))
            ]
            declared: set[tuple[str, Any]] = {
                (row.dataset_name or "default", row.split)
            }
            splits = declared if row.kind == "code" else named_splits(row, suite)
            files |= {
                config_and_split: rows
                for config_and_split in sorted(splits)
                if config_and_split not in files
            }
    for folder, files in repositories.items():
        write_data_set(folder, files)


def _sources(recipe: Recipe) -> Iterator[tuple[str, SourceConfig, int]]:
    """Yield name, source and number of examples of all training sources and held-out
    texts.
    """
    tokens = max(
        variant_recipe.train.batch_size_tokens
        for variant_recipe in recipe.with_variants
    )
    if recipe.sweep is not None:
        tokens = max(tokens, *recipe.sweep.batch_size_tokens)
    sections: list[tuple[str, TrainingDataConfig, int]]
    sections = [("data", recipe.data, tokens)]
    if recipe.pretrain is not None:
        sections.append(
            ("pretrain", recipe.pretrain.data, recipe.pretrain.train.batch_size_tokens)
        )
    for section, data, batch in sections:
        # An example fills at least half a row of `_MAX_LENGTH` tokens, so these are
        # enough for a batch and some more.
        num_examples = 2 * (batch // data.max_length) // len(data.train) + _NUM_ITEMS
        for index, source in enumerate(data.train):
            yield f"{section}-{index}", source, num_examples
    if recipe.data.heldout is not None:
        yield "data-heldout", recipe.data.heldout, _NUM_ITEMS


def _decontaminations(recipe: Recipe) -> list[DecontaminateConfig]:
    sections = recipe.data_sections.values()
    return [data.decontaminate for data in sections if data.decontaminate is not None]


def _benchmarks(names: Iterable[str]) -> dict[str, list[Benchmark]]:
    """Return the rows of these suites and of fcsd's, by data set, if their data can be
    invented.
    """
    by_dataset: dict[str, dict[str, Benchmark]] = {}
    for suite in map(load_suite, dict.fromkeys([*names, *suite_names()])):
        for row in suite.tasks:
            if (
                row.dataset in CODE
                if row.kind == "code"
                else columns_of(row.task, suite)
            ):
                by_dataset.setdefault(row.dataset, {}).setdefault(
                    row.task, (row, suite)
                )
    return {path: list(rows.values()) for path, rows in by_dataset.items()}


def _test_sets(recipe: Recipe) -> tuple[dict[str, list[Benchmark]], dict[str, Path]]:
    """Return the test sets whose rows can be invented, and the locations of those that
    only the user has; print those that are neither, which a run refuses when it begins.
    """
    sections, where = recipe.data_sections.values(), f"recipe {recipe.name}"
    graded = {
        split.path: split.by
        for data in sections
        for split in graded_splits(recipe, data, where)
    }
    suite = recipe.evaluation.suite
    stopping = recipe.early_stopping
    scored = {stopping.suite} if isinstance(stopping, TaskStoppingConfig) else set()
    suites = {
        suite,
        *scored,
        *(section.suite for section in _decontaminations(recipe)),
    }
    root, inventable, user_test_sets = (
        recipe.evaluation.data_root,
        _benchmarks(sorted(suites)),
        {},
    )
    for path, by in graded.items():
        # Absolute paths and paths upwards cannot be linked below the folder.
        if path in inventable or Path(path).is_absolute() or ".." in Path(path).parts:
            continue
        locations = [*([Path(root) / path] if root is not None else []), Path(path)]
        if existing := [location for location in locations if location.exists()]:
            user_test_sets[path] = existing[0].resolve()
        else:
            filling = "; `fcsd evaluate --fetch ROOT --suite SUITE` fills one"
            print(
                f"--rehearse: {by}: no rows of the data set {path} are known to fcsd,"
                f" and evaluation.data_root ({root or 'not set'}) does not have it;"
                " nothing can be evaluated on it before that names a folder that"
                f" does{making_of(path, root) or filling}",
                file=sys.stderr,
            )
    return {
        path: rows for path, rows in inventable.items() if path in graded
    }, user_test_sets
