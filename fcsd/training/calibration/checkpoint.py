"""Calibrate from folder to folder, one layer's weights in memory at a time; a killed
calibration continues.

    work/model/                 the converted checkpoint, whose changed tensors are written layer by layer
    work/state.json             the next layer, and what was solved so far
    work/streams-LAYER-RANK.safetensors    all streams before that layer, of a rank's share of the rows

The source's weights are never written, so that a layer that was cut off is solved again
from them. Nothing here is removed or renamed at the end: who calls this does so when it
is noted that the model is whole.
"""

import itertools
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fcsd.base.errors import UserError
from fcsd.base.files import file_fingerprint, write_json, writing
from fcsd.base.fingerprints import content_fingerprint, read_sealed, write_sealed
from fcsd.base.temporary import discard_folder
from fcsd.base.text import progress_bar
from fcsd.data.batches import Batch, real_tokens
from fcsd.model.connectivity import convert_checkpoint
from fcsd.model.connectivity.checkpoint import (
    CONFIG,
    Checkpoint,
    read_checkpoint,
    read_checkpoint_json,
)
from fcsd.model.connectivity.rewire import rewired_layers
from fcsd.model.connectivity.spec import CALIBRATED, Connectivity
from fcsd.model.load import ModelFolder
from fcsd.parallel.launch import Launch
from fcsd.parallel.ranks import Ranks
from fcsd.training.calibration.layer import walk
from fcsd.training.calibration.left_out import NAMES, LeftOut
from fcsd.training.calibration.model import complaint, own_text, shown
from fcsd.training.calibration.shards import (
    Layerwise,
    checksum,
    damage_of_copies,
    own_copies,
    write_changed,
)
from fcsd.training.calibration.state import State, batches_of, first_stream
from fcsd.training.calibration.steps import Stream
from fcsd.training.losses.kl import row_parts

_STATE = "state.json"
_AGAIN = "it is calibrated from the first layer again"
_LEFT_OUT = 8  # of so many tokens that are solved on, one more measures the result
_MOST_LEFT_OUT = 16_384


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

    work: one from a run that was killed has to be of the same settings, and is
    continued. left_out: rows that no map is solved on, to measure the KL to the
    original on.

    Returns: tokens, seconds, `layers`, what was solved in each
    (`fcsd.training.calibration.model.calibrate_model`), and `kl` (`LeftOut.kl`), None
    without rows for it.

    Raises UserError: a checkpoint that is converted, calibrated or quantised; too
    little text, or text that makes it worse; sums that cannot be solved.
    """
    started, ranks = time.perf_counter(), launch.ranks
    models = Layerwise(
        calibratable(original), connectivity, launch.device, **_options(original)
    )
    text = own_text(rows, models.model, ranks)
    layers = list(rewired_layers(models.student.layers))
    if not layers:
        raise UserError(
            f"{original.config.path}: no layer of it is rewired; there is nothing to"
            " calibrate"
        )
    model, measured = work / "model", LeftOut(left_out, ranks) if left_out else None
    with writing(work):
        changed = models.files_of(layers)
        state = None
        while state is None:  # a second time where what was left is damaged
            ranks.from_first(lambda: _prepare(original, connectivity, model, changed))
            state = _resume(
                work, models, original.folder, changed, text.batches, ranks, measured
            )
        end = max(layers) + 1 if measured is None else len(models.student.layers)
        with _layers_bar(state.next_layer, end, ranks) as bar:
            steps = walk(
                models,
                state,
                text,
                layers=layers,
                ridge=ridge,
                ranks=ranks,
                left_out=measured,
            )
            for result in steps:
                if result is not None:
                    _write_layer(models, state, model, original.folder, ranks)
                    bar.set_postfix_str(shown(result))
                _save(state, work, ranks, measured)
                bar.update()
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


def _layers_bar(begun: int, end: int, ranks: Ranks) -> Any:
    return progress_bar(
        total=end, initial=begun, desc="calibrate", unit="layer", shown=ranks.first
    )


def _write_layer(
    models: Layerwise, state: State, model: Path, source: Path, ranks: Ranks
) -> None:
    """Write what has changed of the layer that is loaded; the first rank does."""
    if ranks.first:
        tensors = models.layer_tensors(state.next_layer - 1)
        state.written |= write_changed(model, models.files, tensors, source)


def _options(original: ModelFolder) -> dict[str, Any]:
    options = original.config.model_dump(
        include={"attn_implementation", "experts_implementation"}, exclude_none=True
    )
    if "flash" in options.get("attn_implementation", ""):
        del options["attn_implementation"]  # its kernels know no float32
    return options


def _judge(state: State, ranks: Ranks) -> None:
    if (said := complaint(state.results)) is None:
        return
    is_ruled_out, line = said
    if is_ruled_out:
        raise UserError(line)
    if ranks.first:
        print(line, file=sys.stderr)


def calibratable(original: ModelFolder) -> Checkpoint:
    """Return the checkpoint, if it is an original whose weights can be folded into.

    Raises:
        UserError: it is converted, calibrated or quantised.
    """
    checkpoint, where = read_checkpoint(original.folder), original.config.path
    if CALIBRATED in checkpoint.config:
        raise UserError(f"{where}: is calibrated already; give the original")
    if checkpoint.connectivity is not None:
        raise UserError(
            f"{where}: is converted already; give the original, which is the teacher as"
            " well: calibration converts it"
        )
    if checkpoint.quantisation is not None:
        raise UserError(
            f"{where}: its weights are quantised, and a map folded into them would be"
            " rounded away; calibrate what `fcsd dequantize` makes of it, then"
            " quantise the result"
        )
    return checkpoint


def _prepare(
    original: ModelFolder,
    connectivity: Connectivity,
    model: Path,
    changed: Iterable[str],
) -> None:
    """Convert the original, with weight files of its own where they will change;
    nothing of it is kept that no state vouches for."""
    state = model.parent / _STATE
    if not state.is_file():
        discard_folder(model)
    if not model.is_dir():
        if state.is_file():
            print(
                f"calibrate: {model}: is not there any more, beginning with the first"
                " layer",
                file=sys.stderr,
            )
            state.unlink()  # it counts the layers of a model that is lost
        convert_checkpoint(original.folder, model, connectivity)
    own_copies(model, original.folder, changed)


def _resume(
    work: Path,
    models: Layerwise,
    source: Path,
    changed: set[str],
    batches: Sequence[Batch],
    ranks: Ranks,
    measured: LeftOut | None,
) -> State | None:
    """Read the state of a run that was cut off, or begin before the first layer.

    changed: the weight files that change. Returns None where what was left is damaged,
    with a line; it is removed.
    """
    state = ranks.from_first(lambda: _read_state(work, source, changed))
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
            f" and this launch has {ranks.size}; launch {state['ranks']}, or remove the"
            " folder to begin again"
        )
    file = _streams(work, state["next_layer"], ranks)
    tensors = _whole_streams(file)
    lost = next(
        filter(None, ranks.share(lambda: None if tensors is not None else str(file))),
        None,
    )
    if tensors is None or lost is not None:
        _remove_damaged(work, f"{lost}: is damaged or gone; {_AGAIN}", ranks)
        return None
    held: dict[str, list[Stream]] = {
        "teacher": [{} for _ in batches],
        "student": [{} for _ in batches],
    }
    if measured is not None:
        measured.streams = {name: [{} for _ in measured.batches] for name in NAMES}
        held |= measured.streams
    for key, value in tensors.items():
        who, number, name = key.split(".")
        held[who][int(number)][name] = value
    student = held["student"] if any(held["student"]) else None
    return State(
        state["next_layer"],
        held["teacher"],
        student,
        state["results"],
        state["written"],
    )


def _read_state(work: Path, source: Path, changed: set[str]) -> dict[str, Any] | None:
    """Return what `_save` noted, or what is damaged of it and of the model; None:
    nothing was noted.

    Streams of other layers, and half-written ones, are removed.
    """
    state: dict[str, Any] | None = None
    if (work / _STATE).is_file():
        try:
            state = read_sealed(work / _STATE, _AGAIN)
        except UserError as error:
            return {"damage": str(error)}
    kept = None if state is None else f"streams-{state['next_layer']}-"
    # of safetensors, which writes so
    for file in (*work.glob("streams-*"), *work.glob(".tmp*")):
        if kept is None or not file.name.startswith(kept):
            file.unlink()
    if state is None:
        return None
    damaged = damage_of_copies(work / "model", source, changed, state["written"])
    if damaged is None and _files_beside(work / "model") != state["files"]:
        damaged = "a file beside the weights"
    return (
        state
        if damaged is None
        else {"damage": f"{work / 'model'}: is damaged: {damaged}; {_AGAIN}"}
    )


def _whole_streams(file: Path) -> dict[str, Tensor] | None:
    """Read the streams that `_save` left; None where they are gone, or not what was written."""
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            known = (opened.metadata() or {}).get("sha256")
    except (OSError, ValueError, SafetensorError):
        return None
    return tensors if checksum(tensors) == known else None


def _files_beside(model: Path) -> dict[str, str]:
    """Return the hash of every file beside the weights; of the config, without what the
    end of a calibration adds.
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
    """Remove what a run left that was cut off, with a line that says why."""

    def begin() -> None:
        print(f"calibrate: {damage}", file=sys.stderr)
        (work / _STATE).unlink(missing_ok=True)  # first: nothing else counts without it
        for path in list(work.iterdir()):
            discard_folder(path) if path.is_dir() else path.unlink()

    ranks.from_first(begin)


def _streams(work: Path, layer: int, ranks: Ranks) -> Path:
    return work / f"streams-{layer}-{ranks.rank}.safetensors"


def _save(state: State, work: Path, ranks: Ranks, measured: LeftOut | None) -> None:
    """Leave all streams on disk, then note that they are what a run that is cut off now
    goes on with.
    """
    parts = {"teacher": state.teacher, "student": state.student or []}
    parts |= measured.streams if measured is not None else {}
    held = {
        f"{who}.{number}.{name}": value.clone(memory_format=torch.contiguous_format)
        for who, streams in parts.items()
        for number, stream in enumerate(streams)
        for name, value in stream.items()
    }
    target = _streams(work, state.next_layer, ranks)
    save_file(held, target.with_suffix(".tmp"), {"sha256": checksum(held)})
    os.replace(target.with_suffix(".tmp"), target)
    # all of them have left theirs, and the first has written the layer
    ranks.share(lambda: None)

    def note() -> None:
        record = {
            "next_layer": state.next_layer,
            "ranks": ranks.size,
            "results": state.results,
        }
        record |= {"written": state.written, "files": _files_beside(work / "model")}
        write_sealed(work / _STATE, record)

    ranks.from_first(note)
    _streams(work, state.next_layer - 1, ranks).unlink(missing_ok=True)


def take_rows(rows: Any, num_tokens: int) -> list[Any]:
    """Take rows, in order, until they hold `num_tokens` tokens of text, or there are no more."""
    sample: list[Any] = []
    count = 0
    for row in rows:
        sample.append(row)
        count += _num_tokens(row)
        if count >= num_tokens:
            break
    return sample


def split_rows(rows: Any, num_tokens: int, width: int) -> tuple[list[Any], list[Any]]:
    """Take rows with `num_tokens` tokens of text to calibrate on, and an eighth as many
    to measure the result on.

    The second ones are those that come next and share no example with the first. Where
    there are too few, they are the last of the first, as long as eight times as many
    distinct tokens as the model is wide may remain; else none.
    """
    solved = take_rows(rows, num_tokens)
    sizes = [_num_tokens(row) for row in solved]
    left_out, known, num_left = [], _examples(solved), 0
    for row in itertools.islice(rows, len(solved), None):
        if num_left >= _wanted(sum(sizes)):
            break
        if known.isdisjoint(_examples([row])):
            left_out.append(row)
            num_left += _num_tokens(row)
    while num_left < _wanted(sum(sizes)) and sum(sizes[:-1]) >= 8 * width:
        left_out.insert(0, solved.pop())
        num_left += sizes.pop()
    known = _examples(solved)
    return solved, [row for row in left_out if known.isdisjoint(_examples([row]))]


def _wanted(num_tokens: int) -> int:
    return min(num_tokens // _LEFT_OUT, _MOST_LEFT_OUT)


def _num_tokens(row: Any) -> int:
    return int(real_tokens(batches_of([row])[0]).sum())


def _examples(rows: Sequence[Any]) -> set[tuple[int, ...]]:
    """Return the examples of packed rows."""
    return {
        tuple(part["input_ids"].tolist()) for row in rows for part in row_parts(row, 1)
    }
