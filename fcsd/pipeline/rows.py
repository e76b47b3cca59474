"""Make the rows that a recipe trains on: the folders of their tokens, the identity of
their sources, and the record of examples that were left out.
"""

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from fcsd.base.writing import hold_folder, make_folder, release_folder, write_json
from fcsd.data.config import DecontaminateConfig, TrainingDataConfig
from fcsd.data.dataset import build_dataset
from fcsd.data.local import data_fingerprint
from fcsd.data.rendering import BEGAN, note_date, writes_date
from fcsd.data.rows import MEANING, PackedRows
from fcsd.data.write_rows import BadRows
from fcsd.evaluation.datasets import test_set_fingerprints
from fcsd.evaluation.suites import load_suite
from fcsd.model.load import ModelFolder, load_tokenizer
from fcsd.parallel.launch import Launch
from fcsd.pipeline.context import Run
from fcsd.training.losses.head import packing_of

if TYPE_CHECKING:
    from fcsd.data.decontaminate import Decontaminator

_DATE = "date.json"  # beside a run's tokens: the date that its chat templates write


def training_rows(
    data: TrainingDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    run: Run,
    *,
    num_tokens: int | None = None,
    on_bad_row: str | None = "data.on_bad_row",
    apart_in: ModelFolder | None = None,
) -> PackedRows:
    """Return packed rows of a `data` section of the recipe; missing tokens are written
    first.

    All ranks call this; the first one writes below `tokens/` of the run, and all map
    the same files. All trainings of the run, its calibration and its teacher's cache
    share the tokens of a source.

    num_tokens: how many tokens are read; None: as many as the longest training of the
    recipe reads.
    on_bad_row: see `BadRows`. apart_in: a model in which the examples of a row must not
    attend to each other; if they would, they are not packed. Raises the errors of
    `build_dataset`, and UserError if another process is writing tokens of this run.
    """
    tokens = run.whole.training_tokens if num_tokens is None else num_tokens
    if any(source.written is not None for source in data.train):
        from fcsd.pipeline.written import with_written

        data = with_written(data, run)
    # In some models, packed examples attend to each other despite their position ids.
    if (
        apart_in is not None
        and data.packing
        and packing_of(apart_in.load_config()) == "leaks"
    ):
        data = data.model_copy(update={"packing": False})
    folder, vocab_size = run.layout.tokens, _vocab_size(run, tokenizer)

    def write() -> str:
        make_folder(folder)
        # Two processes must not write the same shards.
        hold_folder(folder)
        try:
            writes = writes_date(tokenizer.chat_template)
            date = note_date(folder / _DATE) if writes else BEGAN
            rows = build_dataset(
                data.train,
                tokenizer,
                max_length=data.max_length,
                packing=data.packing,
                loss_on=data.loss_on,
                seed=run.recipe.seed,
                num_rows=math.ceil(tokens / data.max_length),
                decontaminator=lambda: _decontaminator(
                    data.decontaminate, tokenizer, run.data_root
                ),
                bad_rows=BadRows(data.on_bad_row, on_bad_row),
                place=(
                    folder,
                    _folder_names(data, tokenizer, vocab_size, data_inputs(data, run)),
                ),
                vocab_size=vocab_size,
                date=date,
            )
        finally:
            release_folder(folder)
        return str(rows.path)

    return PackedRows(Path(run.launch.ranks.from_first(write)))


def _vocab_size(run: Run, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the vocabulary size of the run's models, which may not be trained yet;
    None: unknown.
    """
    # A model that is still to be pre-trained has no checkpoint that would tell.
    if (pretraining := run.recipe.pretrain) is not None:
        return int(pretraining.config.get("vocab_size", len(tokenizer)))
    return run.original.vocab_size


def _folder_names(
    data: TrainingDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int | None,
    inputs: dict[str, str],
) -> list[str]:
    """Name the folder of each source's tokens by a hash of everything that they depend
    on.
    """
    test_items = {
        name: value
        for name, value in inputs.items()
        if not name.startswith("data.train.")
    }
    decontaminate = (
        data.decontaminate.model_dump() if data.decontaminate is not None else None
    )
    # Two stages of one run may find the same tokenizer in different folders.
    shared = [
        MEANING,
        data.loss_on,
        decontaminate,
        test_items,
        tokenizer.chat_template,
        _encoding(tokenizer),
        vocab_size,
    ]
    digest = hashlib.sha256(json.dumps(shared, sort_keys=True, default=str).encode())
    names = []
    for index, source in enumerate(data.train):
        # The weight decides only the mixture, so it is not part of the name.
        source_facts = [
            source.model_dump(exclude={"weight"}),
            inputs[f"data.train.{index}"],
        ]
        source_digest = digest.copy()
        source_digest.update(json.dumps(source_facts, sort_keys=True).encode())
        names.append(source_digest.hexdigest()[:16])
    return names


def _encoding(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Return the parts of a tokenizer that the tokens of a text depend on."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = json.loads(backend.to_str()) if backend is not None else {}
    # These are settings of the last call, not of the tokenizer.
    for call in ("padding", "truncation"):
        steps.pop(call, None)
    return [steps, tokenizer.get_vocab(), tokenizer.special_tokens_map]


def tokenize(run: Run) -> dict[str, tuple[PackedRows, PreTrainedTokenizerBase]]:
    """Write the tokens of all trainings of a recipe; return the rows of its
    pre-training, its data and its variants, each with its tokenizer.
    """
    recipe, rows = run.recipe, {}
    if recipe.only_pretrains:
        assert recipe.pretrain is not None
        tokenizer = load_tokenizer(recipe.pretrain.tokenizer)
        return {"pretrain.data": (pretraining_rows(run), tokenizer)}
    has_original = recipe.pretrain is None or Path(recipe.model_path).is_dir()
    if (pretraining := recipe.pretrain) is not None:
        rows["pretrain.data"] = (
            pretraining_rows(run),
            load_tokenizer(pretraining.tokenizer),
        )
    # Before the pre-training, only its tokenizer exists.
    tokenizer = (
        run.tokenizer
        if has_original or pretraining is None
        else load_tokenizer(pretraining.tokenizer)
    )
    rows["data"] = training_rows(recipe.data, tokenizer, run), tokenizer
    for name in recipe.variants:
        variant_run = run.variant(name)
        # A variant with the same data shares the main model's rows.
        if (variant_run.recipe.data, variant_run.recipe.seed) != (
            recipe.data,
            recipe.seed,
        ):
            rows[f"variants.{name}: data"] = (
                training_rows(variant_run.recipe.data, tokenizer, variant_run),
                tokenizer,
            )
    return rows


def pretraining_rows(run: Run) -> PackedRows:
    """Return the rows of the recipe's pre-training, enough for its variants, too."""
    whole = run.whole
    recipes = whole.with_variants if whole.only_pretrains else [whole]
    pretrainings = [recipe.pretrain for recipe in recipes if recipe.pretrain]
    tokens = max(
        pretraining.train.max_steps * pretraining.train.batch_size_tokens
        for pretraining in pretrainings
    )
    first = pretrainings[0]
    return training_rows(
        first.data, load_tokenizer(first.tokenizer), run, num_tokens=tokens
    )


def _decontaminator(
    config: DecontaminateConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    data_root: Path | None,
) -> "Decontaminator | None":
    if config is None:
        return None
    from fcsd.data.decontaminate import Decontaminator, ItemIndex
    from fcsd.evaluation.items import suite_items

    items = suite_items(load_suite(config.suite), data_root, tokenizer)
    return Decontaminator(ItemIndex(items, config.ngram))


def exclusions(rows: PackedRows, folder: Path, launch: Launch) -> dict[str, Any]:
    """Return, for a manifest, the counts of examples that were left out, by reason;
    list the examples in files in `folder`.
    """
    counts: dict[str, Any] = {}
    if (record := rows.record["decontamination"]) is not None:
        description = f"{record['num_left_out']} examples that overlap with test items"
        counts["decontamination"] = _write(
            folder / "decontamination.json", record, description, launch
        )
    if (record := rows.record["bad_rows"])["num_left_out"]:
        description = (
            f"{record['num_left_out']} of {record['num_examples']} examples that cannot"
            " be tokenized"
        )
        counts["bad_rows"] = _write(
            folder / "bad_rows.json", record, description, launch
        )
    return counts


def _write(
    file: Path, record: dict[str, Any], description: str, launch: Launch
) -> dict[str, Any]:
    if launch.first:
        write_json(file, record)
        print(f"data: {description} were left out, see {file}", file=sys.stderr)
    return {name: value for name, value in record.items() if name != "left_out"}


def data_inputs(data: TrainingDataConfig, run: Run) -> dict[str, str]:
    """Return fingerprints of the training sources, and of the test items that are
    excluded from them.
    """
    inputs = {
        f"data.train.{index}": data_fingerprint(source.path, source.revision)
        for index, source in enumerate(data.train)
    }
    config, data_root = data.decontaminate, run.data_root
    # Test items decide which examples are left out, so they are also inputs.
    if config is not None:
        fingerprints = test_set_fingerprints(load_suite(config.suite), data_root)
        inputs |= {
            f"data.decontaminate {name}": value for name, value in fingerprints.items()
        }
    return inputs
