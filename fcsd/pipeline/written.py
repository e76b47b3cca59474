"""Let the original write training text, once: it continues the prompts of a source
that has a `written` section.

    written/KEY/text.jsonl    text, ended, input_ids, loss_mask (own tokens); KEY is a hash of all that they depend on
    written/KEY/parts/        while it is written; a run that was cut off continues with the next part

The trainings of a run, its variants and its calibration share it, as they share tokens.

Not covered: text that the student writes (`fcsd.training.own_text`).
"""

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fcsd.base.artifact import Stage
from fcsd.base.errors import UserError
from fcsd.base.files import content_fingerprint, read_text
from fcsd.base.memory import free_memory
from fcsd.base.writing import make_folder, write_text
from fcsd.data.chat import check_has_template
from fcsd.data.config import TrainingDataConfig, TrainingSourceConfig
from fcsd.data.local import data_fingerprint
from fcsd.data.sources import columns_of, open_source
from fcsd.data.write_rows import BadRows
from fcsd.evaluation.backend import InMemoryBackend
from fcsd.evaluation.config import OwnTextTaskConfig, ServerConfig, check_server
from fcsd.evaluation.own_text.measure import Written, write
from fcsd.evaluation.own_text.prompts import Prompt, prompts_in
from fcsd.parallel.launch import Launch, begin_stage, finish_stage
from fcsd.parallel.place import load_for_evaluation
from fcsd.pipeline.context import Run

FILE = "text.jsonl"
MAY_CHANGE = ("written.batch_size", "written.server")
_PART = 512  # prompts
Continue = Callable[[Sequence[Prompt], int], list[Written]]
"""Continues prompts, of which the first has this number."""


def with_written(data: TrainingDataConfig, run: Run) -> TrainingDataConfig:
    """Return a `data` section in which written text takes the place of the sources that
    it continues; what is missing is written first. All ranks call this.
    """
    if all(source.written is None for source in data.train):
        return data
    sources = [
        source
        if source.written is None
        else _written(source, f"data.train.{index}", run, BadRows(data.on_bad_row))
        for index, source in enumerate(data.train)
    ]
    return data.model_copy(update={"train": sources})


def write_all(run: Run) -> Path:
    """Write the text of all trainings of a recipe; return the folder."""
    runs = [run.variant(name) for name in (None, *run.recipe.variants)]
    if not any(source.written for each in runs for source in each.recipe.data.train):
        raise UserError(
            f"recipe {run.recipe.name}: no source of data.train has a `written`"
            " section; add one"
        )
    for each in runs:
        for source in with_written(each.recipe.data, each).train:
            if run.launch.first and Path(source.path).name == FILE:
                print(source.path)
    return run.layout.written


def _written(
    source: TrainingSourceConfig, key: str, run: Run, bad_rows: BadRows
) -> TrainingSourceConfig:
    original = run.original

    def inputs() -> dict[str, Any]:
        return original.fingerprints("original") | {
            "prompts": data_fingerprint(source.path, source.revision)
        }

    settings = source.model_dump(
        mode="json", exclude={"path", "revision", "weight"}
    ) | {"seed": run.recipe.seed, "dtype": original.config.dtype}
    found = run.launch.ranks.from_first(inputs)
    fixed = settings | {"written": dict(settings["written"])}
    for name in MAY_CHANGE:
        del fixed["written"][name.partition(".")[2]]
    folder = run.layout.written / content_fingerprint([fixed, found])[:16]

    def make() -> Path:
        stage = Stage(folder, "write", settings, found, MAY_CHANGE)
        if begin_stage(stage, run.launch) != "finished":
            prompts = _prompts(source, key, run, bad_rows)
            finish_stage(stage, run.launch, _write(source, prompts, folder, run))
        return folder / FILE

    path = run.once(("written", folder), make)
    return TrainingSourceConfig(path=str(path), columns=None, weight=source.weight)


def _write(
    source: TrainingSourceConfig,
    asked: tuple[OwnTextTaskConfig, list[Prompt]],
    folder: Path,
    run: Run,
) -> dict[str, Any]:
    """Write the text of a source part by part; return its figures."""
    launch, parts = run.launch.for_evaluation(), folder / "parts"
    row, prompts = asked
    places = {
        first: parts / f"{first:08}.jsonl" for first in range(0, len(prompts), _PART)
    }
    missing = launch.ranks.from_first(
        lambda: [
            first
            for first, place in places.items()
            if not _is_whole(place, len(prompts[first : first + _PART]))
        ]
    )
    if missing:
        continue_ = _writer(source, row, run, launch)
        for first in missing:
            chosen = prompts[first : first + _PART]
            texts = continue_(chosen, first)
            if launch.first:
                make_folder(parts)
                write_text(places[first], _lines(run.tokenizer, chosen, texts))
        del continue_
        free_memory()  # of the model

    def join() -> dict[str, Any]:
        text = "".join(read_text(place) for place in places.values())
        write_text(folder / FILE, text)
        shutil.rmtree(parts)
        examples = _examples(text)
        tokens = sum(sum(example["loss_mask"]) for example in examples)
        ended = sum(example["ended"] for example in examples)
        print(
            f"write: {len(examples):,} texts by the original, {ended:,} ended by"
            f" themselves, {tokens / len(examples):.1f} tokens each: {folder / FILE}",
            file=sys.stderr,
        )
        return {"texts": len(examples), "ended": ended, "tokens": tokens}

    return launch.ranks.from_first(join)


def _examples(text: str) -> list[dict[str, Any]]:
    # Not `splitlines`: a text may hold other separators of lines, such as U+2028.
    return [json.loads(line) for line in text.split("\n") if line]


def _is_whole(part: Path, number: int) -> bool:
    """Return whether a part has all of its texts; a damaged one is written again."""
    try:
        return part.is_file() and len(_examples(read_text(part))) == number
    except ValueError:
        return False


def _prompts(
    source: TrainingSourceConfig, key: str, run: Run, bad_rows: BadRows
) -> tuple[OwnTextTaskConfig, list[Prompt]]:
    """Return the prompts of a source, and how they are continued."""
    assert source.written is not None and source.max_examples is not None
    opened = open_source(source)
    meanings = columns_of(opened.settings)
    examples = opened.examples.take(source.max_examples)
    chat = "messages" in meanings or "response" in meanings
    if "completion" in meanings:  # a text, or a list of messages
        chat = not isinstance(next(iter(examples))[meanings["prompt"]], str)
    if chat:
        check_has_template(run.tokenizer)
    row = OwnTextTaskConfig(
        kind="own_text",
        task=key,
        dataset=source.path,
        chat_template=chat,
        seed=run.recipe.seed,
        num_prompts=source.max_examples,
        **source.written.model_dump(
            include={"prompt_tokens", "max_new_tokens", "temperature"}
        ),
    )
    prompts = list(prompts_in(row, examples, meanings, run.tokenizer, bad_rows))
    if bad_rows.num_bad and run.launch.first:
        print(f"write: {key}: {bad_rows!r}", file=sys.stderr)
    if not prompts:
        raise UserError(
            f"{key}: {source.path} has no document of more than {row.prompt_tokens}"
            " tokens; give longer ones, or lower written.prompt_tokens"
        )
    return row, prompts


def _writer(
    source: TrainingSourceConfig, row: OwnTextTaskConfig, run: Run, launch: Launch
) -> Continue:
    """Return the original in memory, or behind its server."""
    assert source.written is not None
    if source.written.server is not None:
        server = ServerConfig(url=source.written.server)
        check_server(server, launch.ranks)
        from fcsd.evaluation.served import ServedBackend

        served = ServedBackend(server, run.original, run.tokenizer)
        served.identify(lambda: load_for_evaluation(run.original, launch))

        def behind_server(prompts: Sequence[Prompt], first: int) -> list[Written]:
            return write(served, row, prompts, row.temperature, first=first)

        return behind_server
    backend = InMemoryBackend(
        load_for_evaluation(run.original, launch),
        run.tokenizer,
        source.written.batch_size,
        launch.ranks,
    )

    def in_memory(prompts: Sequence[Prompt], first: int) -> list[Written]:
        with backend.asking():
            return write(backend, row, prompts, row.temperature, first=first)

    return in_memory


def _lines(tokenizer: Any, prompts: Sequence[Prompt], texts: Sequence[Written]) -> str:
    lines = []
    for prompt, text in zip(prompts, texts, strict=True):
        ids = [*prompt.tokens, *text.tokens]
        example = {
            "text": tokenizer.decode(ids),
            "ended": text.ended,
            "input_ids": ids,
            "loss_mask": [0] * len(prompt.tokens) + [1] * len(text.tokens),
        }
        lines.append(json.dumps(example, ensure_ascii=False) + "\n")
    return "".join(lines)
