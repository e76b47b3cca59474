"""From a recipe to its rehearsal: what is replaced, and the folder that holds it.

    FOLDER/recipe.yaml        the rehearsal, a complete recipe of its own
    FOLDER/model/             the model with its sizes cut, to 4 layers of width 64, random weights; and its tokenizer
    FOLDER/hub/OWNER/NAME/    rows in the columns of each data set that the recipe names by its hub id
    FOLDER/files/             the same for data that the recipe names by a path
    FOLDER/run/               output_dir

Replaced are the model, the data and the numbers of steps, tokens and items. A batch
keeps its number of rows, so that it divides over ranks and micro-batches exactly as the
real one (one of more than 64 rows is halved until it has no more). Test sets whose
columns no suite describes are linked from the recipe's own data root.
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
from fcsd.data.config import DataConfig, DecontaminateConfig, SourceConfig, making_of
from fcsd.evaluation.config import SuiteConfig, TaskConfig, load_suite, suite_names
from fcsd.evaluation.lm_eval.columns import columns_of
from fcsd.evaluation.lm_eval.tasks import named_splits
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity.modeling import base_model_class
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
    # prompts with shots are long where a token is a byte
    "max_position_embeddings": 4096,
}
_NUM_STEPS = 2
_MOST_ROWS = 64  # of a batch
_NUM_ITEMS = 8  # of every test set, or as many as its shots need
_LAYERS = 4

Benchmark = tuple[TaskConfig, SuiteConfig]
"""A row of a suite, and the suite."""


def rehearse(recipe: Recipe, folder: Path, launch: Launch) -> Recipe:
    """Write the rehearsal of `recipe` into `folder`, or find it there, and return it.

    Raises:
        UserError: the folder holds something else, or the rehearsal of other settings;
        no family is known for the model.
    """
    small = _small(recipe, folder)
    text = (
        f"# The rehearsal of recipe {recipe.name}, made by fcsd: no result means"
        f" anything.\n{to_yaml(small.dump())}"
    )
    ready = folder / "recipe.yaml"
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
        known, own = _test_sets(recipe)
        if not ready.is_file():
            with new_folder(folder) as place:
                _write_models(recipe, place)
                _write_data(recipe, place, known)
                (place / "recipe.yaml").write_text(text, encoding="utf-8")
        for path, source in own.items():  # those that were made since, too
            link = folder / "hub" / path  # which `_test_sets` has looked at
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(source)
    launch.wait()
    return small


def _small(recipe: Recipe, folder: Path) -> Recipe:
    """Replace model, data and steps of a recipe and its variants; nothing is read or written."""
    raw = _replaced(recipe, folder)
    for name, changes in recipe.variants.items():
        # What a variant changes is looked up in the rehearsal of that variant, so that
        # it is replaced alike.
        variant = _replaced(recipe.variant(name), folder)
        raw["variants"][name] = {key: _dotted(variant, key) for key in changes}
    return validate(Recipe, raw, f"rehearsal of recipe {recipe.name}")


def _replaced(recipe: Recipe, folder: Path) -> dict[str, Any]:
    raw = recipe.dump()

    def put(key: str, value: Any) -> None:
        set_dotted(raw, key, value, f"rehearsal of recipe {recipe.name}")

    # in the title of its report and of its model card
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
    raw["train"] |= _small_train(recipe.train, length)
    if recipe.early_stopping is not None:
        put("early_stopping.every_steps", _NUM_STEPS // 2)
        if isinstance(recipe.early_stopping, TaskStoppingConfig):
            put("early_stopping.limit", 2)
            if recipe.early_stopping.task.kind != "likelihood":
                put("early_stopping.task.max_new_tokens", 8)
    if recipe.sweep is not None:
        batches = [
            _small_batch(tokens, length) for tokens in recipe.sweep.batch_size_tokens
        ]
        raw["sweep"] |= {"batch_size_tokens": batches, "steps": 2, "last_steps": 1}
        put("sweep.warmup_steps", min(recipe.sweep.warmup_steps, 1))
        if recipe.sweep.train_tokens is not None:
            # At least `_NUM_STEPS` steps with the largest batch: the first step of a
            # warm-up moves nothing.
            put("sweep.train_tokens", _NUM_STEPS * max(batches))
    put("evaluation.data_root", str(folder / "hub"))
    put("evaluation.server", None)  # serves another model
    put("evaluation.limit", min(recipe.evaluation.limit or _NUM_ITEMS, 2))
    return raw


def _small_data(data: DataConfig, folder: Path, section: str) -> dict[str, Any]:
    def small(source: SourceConfig, name: str) -> dict[str, Any]:
        path = str(_place(source.path, folder, f"{section}-{name}"))
        return source.model_dump(mode="json") | {"path": path, "revision": None}

    return {
        "train": [small(source, str(index)) for index, source in enumerate(data.train)],
        "heldout": small(data.heldout, "heldout") if data.heldout is not None else None,
        "heldout_examples": min(data.heldout_examples, _NUM_ITEMS),
        "max_length": min(data.max_length, _MAX_LENGTH),
    }


def _small_train(train: TrainConfig, max_length: int) -> dict[str, Any]:
    schedule = train.lr_scheduler_kwargs
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
    """Keep as many rows, of fewer tokens; above `_MOST_ROWS` halved. A batch that is no
    whole number of rows, which training refuses, stays one."""
    rows, rest = divmod(tokens, max_length)
    while rows > _MOST_ROWS and rows % 2 == 0:
        rows //= 2
    return rows * min(max_length, _MAX_LENGTH) + (1 if rest else 0)


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
    kept = {
        name: original[name] for name in ("experts_implementation",) if name in original
    }
    dropped = (
        "transformers_version", "_name_or_path", "dtype", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    return {name: value for name, value in config.items() if name not in dropped} | kept


def _write_models(recipe: Recipe, place: Path) -> None:
    """Write the small model in bfloat16, as checkpoints of this size are, and its
    tokenizer, of a recipe that pre- trains only the tokenizer; teachers of other
    checkpoints.
    """
    sizes = _SIZES | {"num_hidden_layers": _num_layers(recipe), "dtype": torch.bfloat16}
    if recipe.pretrain is None:
        small_model(_config(recipe.model), **sizes).save_pretrained(place / "model")
    tiny_tokenizer(_VOCABULARY).save_pretrained(place / "model")
    for one in recipe.with_variants:
        if one.teacher is not None and one.teacher.path is not None:
            small_model(_config(one.teacher_model[1]), seed=1, **sizes).save_pretrained(
                place / "teacher"
            )


def _config(model: ModelConfig) -> PreTrainedConfig:
    """Read the configuration of a checkpoint without its weights, as that of the regular model."""
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
        base_model_class(family).config_class, raw, family.model_type, source.where
    )


def _num_layers(recipe: Recipe) -> int:
    """Choose enough layers for each one selected by its number; shares of the layers
    need no more than `_LAYERS`.
    """
    sections = [one.connectivity for one in recipe.with_variants]
    if recipe.pretrain is not None:
        sections.append(recipe.pretrain.connectivity)
    needed = [_LAYERS]
    for section in sections:
        selection = parse_selection(section.layers)
        if isinstance(selection, list):
            needed.append(selection[-1] + 1)
        elif isinstance(selection, dict):
            needed += [count for count in selection.values() if isinstance(count, int)]
    return max(needed)


def _place(path: str, folder: Path, name: str) -> Path:
    """Choose where the rows lie that stand for the data at `path`."""
    if hub_id(path) is not None:
        return folder / "hub" / path
    return folder / "files" / (name + (Path(path).suffix if _is_file(path) else ""))


def _is_file(path: str) -> bool:
    return Path(path).suffix in (".jsonl", ".json", ".parquet")


def _write_data(
    recipe: Recipe, place: Path, known: Mapping[str, Sequence[Benchmark]]
) -> None:
    """Write rows for everything that the recipe reads; known: the test sets whose rows
    can be invented.
    """
    repositories: dict[Path, dict[tuple[str, str], list[dict[str, Any]]]] = {}
    for name, source, number in _sources(recipe):
        columns = source.columns or {"messages": "messages"}
        rows = [training_row(source.path, columns, index) for index in range(number)]
        target = _place(source.path, place, name)
        if _is_file(source.path):
            write_rows(target, rows)
        else:
            for split in split_names(source.split):
                repositories.setdefault(target, {})[source.name or "default", split] = (
                    rows
                )
    (place / "hub").mkdir(exist_ok=True)
    for path, benchmarks in sorted(known.items()):
        files = repositories.setdefault(inside(place / "hub", path), {})
        for row, suite in benchmarks:
            make = (
                CODE[path]
                if row.kind == "code"
                else partial(benchmark_row, columns_of(row.task, suite))
            )
            rows = [
                make(index) for index in range(max(_NUM_ITEMS, row.num_fewshot + 1))
            ]
            own: set[tuple[str, Any]] = {(row.dataset_name or "default", row.split)}
            splits = own if row.kind == "code" else named_splits(row, suite)
            files |= {each: rows for each in sorted(splits) if each not in files}
        compared = {
            (each.name or "default", each.split)
            for section in _decontaminations(recipe)
            for each in section.against
            if each.path == path
        }
        files |= {each: rows for each in sorted(compared) if each not in files}
    for folder, files in repositories.items():
        write_data_set(folder, files)


def _sources(recipe: Recipe) -> Iterator[tuple[str, SourceConfig, int]]:
    """Name, source and number of examples, of all training sources and held-out texts."""
    tokens = max(one.train.batch_size_tokens for one in recipe.with_variants)
    if recipe.sweep is not None:
        tokens = max(tokens, *recipe.sweep.batch_size_tokens)
    sections = [("data", recipe.data, tokens)]
    if recipe.pretrain is not None:
        sections.append(
            ("pretrain", recipe.pretrain.data, recipe.pretrain.train.batch_size_tokens)
        )
    for section, data, batch in sections:
        # An example fills half a row of `_MAX_LENGTH` tokens or more: a batch, and a
        # bit.
        number = 2 * (batch // data.max_length) // len(data.train) + _NUM_ITEMS
        for index, source in enumerate(data.train):
            yield f"{section}-{index}", source, number
        if data.heldout is not None:
            yield f"{section}-heldout", data.heldout, _NUM_ITEMS


def _decontaminations(recipe: Recipe) -> list[DecontaminateConfig]:
    sections = recipe.data_sections.values()
    return [data.decontaminate for data in sections if data.decontaminate is not None]


def _benchmarks(names: Iterable[str]) -> dict[str, list[Benchmark]]:
    """Return the rows of these suites, and of those of fcsd, whose data can be
    invented, by their data set.
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
    """Collect the test sets whose rows can be invented, and where those lie that only
    the user has; tell of those that are in neither place, which a run refuses when it
    begins."""
    sections, where = recipe.data_sections.values(), f"recipe {recipe.name}"
    graded = {
        each.path: each.by
        for data in sections
        for each in graded_splits(recipe, data, where)
    }
    suite = recipe.evaluation.suite
    suites = {suite, *(section.suite or suite for section in _decontaminations(recipe))}
    root, known, own = recipe.evaluation.data_root, _benchmarks(sorted(suites)), {}
    for path, by in graded.items():
        if path in known or Path(path).is_absolute() or ".." in Path(path).parts:
            continue
        places = [*([Path(root) / path] if root is not None else []), Path(path)]
        if there := [place for place in places if place.exists()]:
            own[path] = there[0].resolve()
        else:
            filling = "; `fcsd evaluate --fetch ROOT --suite SUITE` fills one"
            print(
                f"--rehearse: {by}: no rows of the data set {path} are known to fcsd,"
                f" and evaluation.data_root ({root or 'not set'}) does not have it;"
                " nothing can be evaluated on it before that names a folder that"
                f" does{making_of(path, root) or filling}",
                file=sys.stderr,
            )
    return {path: rows for path, rows in known.items() if path in graded}, own
