"""Calibrate from folder to folder, one layer's weights in memory at a time; a killed
calibration continues.

    work/model/                 the converted checkpoint, whose changed tensors are written layer by layer
    work/state.json             the next layer, and the results so far
    work/streams-LAYER-RANK.safetensors    all streams before that layer, on a rank's share of the rows

The source's weights are never written, so that an interrupted layer can be solved again
from them. Nothing is removed or renamed at the end: the caller does so once it has
recorded that the model is complete.
"""

import itertools
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fcsd.base.errors import UserError
from fcsd.base.files import (
    arrays_fingerprint,
    check_regular,
    content_fingerprint,
    file_fingerprint,
    read_checkpoint_json,
    read_sealed,
    write_sealed,
)
from fcsd.base.strict import refuse
from fcsd.base.text import STEPS_BAR, progress_bar
from fcsd.base.writing import discard_folder, write_json, writing
from fcsd.data.batches import Batch, real_tokens
from fcsd.model.connectivity import convert_checkpoint
from fcsd.model.connectivity.checkpoint import (
    CONFIG,
    Checkpoint,
    read_checkpoint,
)
from fcsd.model.connectivity.rewire import rewired_layers
from fcsd.model.connectivity.spec import CALIBRATED, Connectivity
from fcsd.model.families import moe_mask
from fcsd.model.load import ModelFolder
from fcsd.parallel.launch import Launch, Ranks
from fcsd.training.calibration.layer import walk
from fcsd.training.calibration.left_out import NAMES, LeftOut
from fcsd.training.calibration.model import complaint, shown, text_of_rank
from fcsd.training.calibration.shards import (
    Layerwise,
    damage_of_copies,
    own_copies,
    write_changed,
)
from fcsd.training.calibration.state import State, batches_of, first_stream
from fcsd.training.calibration.steps import Stream
from fcsd.training.losses.heldout_kl import row_parts

_STATE = "state.json"
_AGAIN = "fcsd calibrates it again from the first layer"
_LEFT_OUT = 8  # one further token measures the result for each 8 that are solved on
_MOST_LEFT_OUT = 16_384
# The streams grow with text and width, up to many gigabytes, and are hashed: a save that
# takes longer than this is followed by nine times as long without one.
_SHORT_SAVE_S = 1.0


def calibrate_checkpoint(
    original: ModelFolder,
    work: Path,
    connectivity: Connectivity,
    rows: Sequence[Any],
    *,
    ridge: float,
    launch: Launch,
    left_out: Sequence[Any] = (),
) -> dict[str, Any]:
    """Write the original, converted and calibrated, to `work/model`. All ranks call
    this, and each works on its share of the rows.

    work: a killed run's folder is continued; its settings must be the same.
    left_out: rows that no map is solved on, to measure the KL to the original.

    Returns: tokens, seconds, `layers`, the residuals of each layer
    (`fcsd.training.calibration.model.calibrate_model`), and `kl` (`LeftOut.kl`; None
    without `left_out`).

    Raises UserError: as `calibratable`; there is too little text, or it makes the model
    worse; the sums cannot be solved.
    """
    started, ranks = time.perf_counter(), launch.ranks
    checkpoint = calibratable(original, connectivity)
    models = Layerwise(checkpoint, connectivity, launch.device, **_options(original))
    text = text_of_rank(rows, models.model, ranks)
    layers = list(rewired_layers(models.student.layers))
    model, measured = work / "model", LeftOut(left_out, ranks) if left_out else None
    with writing(work):
        changed = models.files_of(layers)
        state = None
        while state is None:  # again if the leftovers of a killed run are damaged
            ranks.from_first(lambda: _prepare(original, connectivity, model, changed))
            state = _resume(
                work, models, original.folder, text.batches, ranks, measured
            )
        end = max(layers) + 1 if measured is None else len(models.student.layers)
        with progress_bar(
            total=end,
            initial=state.next_layer,
            desc="calibrate",
            bar_format=STEPS_BAR,
            shown=ranks.first,
        ) as bar:
            steps = walk(
                models,
                state,
                text,
                layers=layers,
                ridge=ridge,
                ranks=ranks,
                left_out=measured,
            )
            next_save = 0.0
            # A layer's weights are written before `_save` counts it: killed between the
            # two, it is solved again.
            for result in steps:
                if result is not None:
                    _write_layer(models, state, model, original.folder, ranks)
                    bar.set_postfix_str(shown(result))
                due = state.next_layer == end or time.monotonic() >= next_save
                if ranks.from_first(partial(bool, due)):
                    next_save = _timed_save(state, work, ranks, measured)
                bar.update()
        # A result that is ruled out never becomes a calibrated model: the mark in the
        # config comes last.
        _judge(state, ranks)
        kl = measured.kl(models, models.head()) if measured is not None else None
        facts = {"tokens": text.num_tokens, "ridge": ridge, "layers": layers}
        ranks.share(lambda: None)  # no rank is still at work in the folder
        ranks.from_first(
            lambda: write_json(
                model / CONFIG,
                read_checkpoint_json(model / CONFIG) | {CALIBRATED: facts},
            )
        )
    return {
        **facts,
        "distinct_tokens": text.num_distinct,
        "layers": state.results,
        "kl": kl,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _timed_save(
    state: State, work: Path, ranks: Ranks, measured: LeftOut | None
) -> float:
    """Save; return the time from which the next save is due."""
    begin = time.monotonic()
    _save(state, work, ranks, measured)
    took = time.monotonic() - begin
    return time.monotonic() + (9 * took if took > _SHORT_SAVE_S else 0.0)


def _write_layer(
    models: Layerwise, state: State, model: Path, source: Path, ranks: Ranks
) -> None:
    """Write the changed tensors of the loaded layer, on the first rank."""
    if ranks.first:
        tensors = models.layer_tensors(state.next_layer - 1)
        state.written |= write_changed(model, models.files, tensors, source)


def _options(original: ModelFolder) -> dict[str, Any]:
    options = original.config.model_dump(
        include={"attn_implementation", "experts_implementation"}, exclude_none=True
    )
    if "flash" in options.get("attn_implementation", ""):
        del options["attn_implementation"]  # its kernels do not support float32
    return options


def _judge(state: State, ranks: Ranks) -> None:
    if (verdict := complaint(state.results)) is None:
        return
    is_ruled_out, message = verdict
    if is_ruled_out:
        raise UserError(message)
    if ranks.first:
        print(message, file=sys.stderr)


def calibratable(original: ModelFolder, connectivity: Connectivity) -> Checkpoint:
    """Return the checkpoint if it is an original with weights that maps can be folded
    into, and the connectivity rewires it.

    Raises:
        UserError: it is converted, calibrated or quantised; the connectivity does not
            fit it, changes nothing or rewires no layer.
    """
    checkpoint, where = read_checkpoint(original.folder), original.config.path
    refuse(
        (
            CALIBRATED in checkpoint.config,
            f"{where}: is calibrated already; give the original",
        ),
        (
            checkpoint.connectivity is not None,
            f"{where}: is converted already; give the original: calibration converts"
            " it, and it is the teacher as well",
        ),
        (
            checkpoint.quantisation is not None,
            f"{where}: its weights are quantised, so folded maps would be rounded away;"
            " run `fcsd dequantize`, calibrate its output, then quantise the result",
        ),
    )
    assert checkpoint.family is not None
    mask = moe_mask(original.load_config(), checkpoint.family)
    if not connectivity.new_field(mask, checkpoint.family.layout)["layers"]:
        raise UserError(
            f"{where}: layers: none rewires no layer, so there is nothing to calibrate"
        )
    return checkpoint


def _prepare(
    original: ModelFolder,
    connectivity: Connectivity,
    model: Path,
    changed: Iterable[str],
) -> None:
    """Convert the original, with copies instead of links of the weight files that will
    change. A model without a state file beside it is discarded first.
    """
    state = model.parent / _STATE
    # Without a state, a killed run may have left the model half-written.
    if not state.is_file():
        discard_folder(model)
    if not model.is_dir():
        if state.is_file():
            print(
                f"calibrate: {model}: is missing; starting again with the first layer",
                file=sys.stderr,
            )
            state.unlink()  # it counts layers of the lost model
        convert_checkpoint(original.folder, model, connectivity)
    own_copies(model, original.folder, changed)


def _resume(
    work: Path,
    models: Layerwise,
    source: Path,
    batches: Sequence[Batch],
    ranks: Ranks,
    measured: LeftOut | None,
) -> State | None:
    """Return the state of an interrupted run, or that before the first layer.

    If the interrupted run left damaged files, they are removed with a message, and None
    is returned.
    """
    files = models.checkpoint.weight_files
    state = ranks.from_first(lambda: _read_state(work, source, files))
    if state is None:
        if measured is not None:
            measured.begin(models)
        return State(
            0, [first_stream(models.student, batch, models.device) for batch in batches]
        )
    if "damage" in state:
        _remove_damaged(work, state["damage"], ranks)
        return None
    if state["ranks"] != ranks.size:
        raise UserError(
            f"{work}: was begun with {state['ranks']} processes, which share the rows,"
            f" but this launch has {ranks.size}; launch {state['ranks']} processes, or"
            " remove the folder to begin again"
        )
    # Each rank has a file of streams; all begin again if one rank's is unusable.
    file = _streams(work, state["next_layer"], ranks)
    tensors = _whole_streams(file, state["streams"][ranks.rank])
    lost = next(
        filter(None, ranks.share(lambda: None if tensors is not None else str(file))),
        None,
    )
    if tensors is None or lost is not None:
        _remove_damaged(work, f"{lost}: is damaged or gone; {_AGAIN}", ranks)
        return None
    streams: dict[str, list[Stream]] = {
        "teacher": [{} for _ in batches],
        "student": [{} for _ in batches],
    }
    if measured is not None:
        measured.streams = {name: [{} for _ in measured.batches] for name in NAMES}
        streams |= measured.streams
    # The names of the tensors are those that `_save` gives them.
    for key, value in tensors.items():
        model, number, name = key.split(".")
        streams[model][int(number)][name] = value
    student = streams["student"] if any(streams["student"]) else None
    return State(
        state["next_layer"],
        streams["teacher"],
        student,
        state["results"],
        state["written"],
    )


def _read_state(
    work: Path, source: Path, files: Iterable[str]
) -> dict[str, Any] | None:
    """Return the record that `_save` wrote, or {"damage": message} if it or the model,
    whose weights are in `files`, is damaged; None without a record.

    Streams of other layers and half-written ones are removed.
    """
    state: dict[str, Any] | None = None
    if (work / _STATE).is_file():
        try:
            state = read_sealed(work / _STATE, _AGAIN)
        except UserError as error:
            return {"damage": str(error)}
    current = None if state is None else f"streams-{state['next_layer']}-"
    # safetensors writes to a file whose name begins with .tmp first.
    for file in (*work.glob("streams-*"), *work.glob(".tmp*")):
        if current is None or not file.name.startswith(current):
            file.unlink()
    if state is None:
        return None
    damaged = damage_of_copies(work / "model", source, files, state["written"])
    if damaged is None and _files_beside(work / "model") != state["files"]:
        damaged = "a file next to the weights"
    if damaged is None:
        return state
    return {"damage": f"{work / 'model'}: is damaged: {damaged}; {_AGAIN}"}


def _whole_streams(file: Path, written: str) -> dict[str, Tensor] | None:
    """Read the streams that `_save` wrote with this hash; None if they are gone,
    damaged, or those of another run.
    """
    check_regular(file, "remove it")
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError):
        return None
    return tensors if _hash_of(tensors) == written else None


def _hash_of(streams: dict[str, Tensor]) -> str:
    arrays = {name: value.numpy() for name, value in streams.items()}
    return arrays_fingerprint(arrays, {})


def _files_beside(model: Path) -> dict[str, str]:
    """Hash every file beside the weights; the config without the field that the end of
    a calibration adds.
    """
    files = [
        file
        for file in model.rglob("*")
        if file.is_file() and file.suffix != ".safetensors"
    ]
    hashes = {
        str(file.relative_to(model)): file_fingerprint(file) for file in sorted(files)
    }
    with suppress(UserError):
        config = read_checkpoint_json(model / CONFIG)
        config.pop(CALIBRATED, None)
        hashes[CONFIG] = content_fingerprint(config)
    return hashes


def _remove_damaged(work: Path, damage: str, ranks: Ranks) -> None:
    """Remove the files of an interrupted run, and print why."""

    def begin() -> None:
        print(f"calibrate: {damage}", file=sys.stderr)
        # The state first: without it, the other files are not continued from.
        (work / _STATE).unlink(missing_ok=True)
        for path in list(work.iterdir()):
            discard_folder(path) if path.is_dir() else path.unlink()

    ranks.from_first(begin)


def _streams(work: Path, layer: int, ranks: Ranks) -> Path:
    return work / f"streams-{layer}-{ranks.rank}.safetensors"


def _save(state: State, work: Path, ranks: Ranks, measured: LeftOut | None) -> None:
    """Write all streams to disk, then record that an interrupted run continues with
    them.
    """
    parts = {"teacher": state.teacher, "student": state.student or []}
    parts |= measured.streams if measured is not None else {}
    # Cloned, because safetensors refuses tensors that share memory, as streams of
    # several models may.
    tensors = {
        f"{model}.{number}.{name}": value.clone(memory_format=torch.contiguous_format)
        for model, streams in parts.items()
        for number, stream in enumerate(streams)
        for name, value in stream.items()
    }
    target = _streams(work, state.next_layer, ranks)
    save_file(tensors, target.with_suffix(".tmp"))
    os.replace(target.with_suffix(".tmp"), target)
    # From here on all ranks have saved theirs, and the first has written the layer.
    hashes = ranks.share(lambda: _hash_of(tensors))

    def note() -> None:
        record = {
            "next_layer": state.next_layer,
            "ranks": ranks.size,
            "results": state.results,
            "streams": hashes,
        }
        record |= {"written": state.written, "files": _files_beside(work / "model")}
        write_sealed(work / _STATE, record)

    ranks.from_first(note)
    _streams(work, state.next_layer - 1, ranks).unlink(missing_ok=True)


def take_rows(rows: Any, num_tokens: int) -> list[Any]:
    """Return the first rows that hold `num_tokens` tokens of text, or all rows if they
    hold fewer.
    """
    sample: list[Any] = []
    count = 0
    for row in rows:
        sample.append(row)
        count += _num_tokens(row)
        if count >= num_tokens:
            break
    return sample


def holds_tokens(rows: Any, num_tokens: int) -> bool:
    """Tell whether rows hold so many tokens of text."""
    return sum(map(_num_tokens, take_rows(rows, num_tokens))) >= num_tokens


def wanted_tokens(num_tokens: int) -> int:
    """Return the tokens of text that a calibration on `num_tokens` reads, with those
    that measure its result.
    """
    return num_tokens + _wanted(num_tokens)


def split_rows(rows: Any, num_tokens: int, width: int) -> tuple[list[Any], list[Any]]:
    """Return rows with `num_tokens` tokens of text to calibrate on, and rows with an
    eighth as many to measure the result on.

    The latter are the next rows that share no example with the former. If there are too
    few of them, the last rows of the former are used, as long as eight times the
    model's width in tokens remains; otherwise none.
    """
    solved = take_rows(rows, num_tokens)
    sizes = [_num_tokens(row) for row in solved]
    left_out, solved_examples, num_left = [], _examples(solved), 0
    for row in itertools.islice(rows, len(solved), None):
        if num_left >= _wanted(sum(sizes)):
            break
        if solved_examples.isdisjoint(_examples([row])):
            left_out.append(row)
            num_left += _num_tokens(row)
    # Too few rows came next: move rows from the end of `solved`.
    while num_left < _wanted(sum(sizes)) and sum(sizes[:-1]) >= 8 * width:
        left_out.insert(0, solved.pop())
        num_left += sizes.pop()
    # A row that was moved may share an example with those that remain.
    solved_examples = _examples(solved)
    return solved, [
        row for row in left_out if solved_examples.isdisjoint(_examples([row]))
    ]


def _wanted(num_tokens: int) -> int:
    return min(num_tokens // _LEFT_OUT, _MOST_LEFT_OUT)


def _num_tokens(row: Any) -> int:
    return int(real_tokens(batches_of([row])[0]).sum())


def _examples(rows: Sequence[Any]) -> set[tuple[int, ...]]:
    """Return the examples of packed rows."""
    return {
        tuple(part["input_ids"].tolist()) for row in rows for part in row_parts(row, 1)
    }
