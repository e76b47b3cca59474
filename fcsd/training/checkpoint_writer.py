"""Write the checkpoints of a run; large ones are written while the training continues.
The disk space that they need is compared with the free space before the first step.

The state that a step changes is copied into host memory, and the training waits for
this copy alone; a thread of each rank writes and hashes it. The ranks tell each other
with the figures of a step when they are done, and then the checkpoint gets its name. An
error ends the training in that step.

`torch.distributed.checkpoint.async_save` would do the same for FSDP2, and any number of
ranks can read what it writes. It is not used because its metadata is a pickle, and
because DeepSpeed's states, which are written here too, are not DTensors.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from fcsd.base.errors import UserError
from fcsd.base.memory import available_memory
from fcsd.base.text import size
from fcsd.base.writing import replace_folder, writing
from fcsd.model.dtypes import dtype_of
from fcsd.parallel.launch import Launch, Ranks
from fcsd.parallel.state import (
    StateFile,
    check_state,
    schedule_state,
    state_files,
    write_optimizer_settings,
)
from fcsd.training.checkpoints import PARTIAL, checkpoints, note_files, retire
from fcsd.training.config import TrainConfig

SCHEDULE = "scheduler.pt"
# Trained parameters from which a thread writes; smaller models take less than a second.
BACKGROUND_FROM = 20_000_000
_SHARE_OF_MEMORY = 0.8  # of the free memory, for the copy


@dataclass(frozen=True)
class TrainingState:
    """What a step changes: the weights, with ema_decay their average, and the states of
    optimiser and schedule.
    """

    model: Any
    optimizer: Any
    scheduler: Any
    average: dict[str, Tensor] | None


class CheckpointWriter:
    """Write the checkpoints of a training; large ones in a thread, from a copy in host
    memory, while the training continues.

    A checkpoint gets its name when the parts of all ranks are on the disk. All ranks
    call the same methods, except for `leave`.

    owner: of the checkpoints, as in `TrainingRecord`. say: prints a line. known: names
    of the checkpoints that this training has written, or continued from. name: of the
    one that is being written.
    """

    def __init__(
        self,
        args: TrainingArguments,
        launch: Launch,
        owner: Any,
        say: Callable[[str], None],
    ):
        self.args, self.launch, self.owner, self.say = args, launch, owner, say
        self.known = set[str]()
        self.name: str | None = None
        self._best: str | None = None  # the checkpoint that is kept, however old
        self._thread: threading.Thread | None = None
        # reused by every checkpoint: mapping new memory takes longer than copying
        self._copies: dict[str, Tensor] = {}
        self._has_room: bool | None = None  # for them
        self._noted: dict[str, dict[str, Any]] = {}
        self._error: Exception | None = None
        self._abandoned = False

    @property
    def _ranks(self) -> Ranks:
        # No rank is in a forward pass here.
        return replace(self.launch.ranks, lockstep=False)

    @property
    def _folder(self) -> Path:
        return Path(str(self.args.output_dir))

    @property
    def is_writing(self) -> bool:
        return (
            self.name is not None
            and self._thread is not None
            and self._thread.is_alive()
        )

    def write(
        self,
        name: str,
        state: TrainingState,
        write_small_files: Callable[[Path], None],
        best: str | None,
    ) -> None:
        """Write a checkpoint, once the previous one is done; of a large one, begin to
        write it, and `finish` names it in a later step. best: the checkpoint that is
        kept, however old.
        """
        self.close()
        # The Trainer may ask twice for the checkpoint of one step.
        if name in self.known and (self._folder / name).is_dir():
            return
        partial_folder = self._folder / PARTIAL / name
        if self.args.should_save:
            # Remove what a killed run has left half-written or half-removed.
            for leftover in (
                self._folder / PARTIAL,
                *self._folder.glob(".checkpoint-*.old"),
            ):
                shutil.rmtree(leftover, ignore_errors=True)
        self.launch.wait()
        self.known.add(name)
        self.name, self._best = name, best
        self._noted, self._error, self._abandoned = {}, None, False
        files: list[StateFile] = []
        try:
            with writing(self._folder / name):
                files = self._write_settings(partial_folder, state)
                write_small_files(partial_folder)
        # A rank must not leave while others wait for it: `finish` raises the
        # error on all.
        except Exception as error:
            self._error = error
        if not self._in_background(state.model, files):
            self._write(partial_folder, (file.copied({}) for file in files))
            self.close()
            return
        copies = [file.copied(self._copies) for file in files]
        self._start(partial(self._write, partial_folder, copies))

    def _write_settings(self, folder: Path, state: TrainingState) -> list[StateFile]:
        """Write the settings of optimiser and schedule; return the files of the tensors,
        which are not written yet.
        """
        folder.mkdir(parents=True, exist_ok=True)
        sharded = (state.model, state.optimizer, self.launch.ranks)
        files = state_files(*sharded, average=state.average)
        write_optimizer_settings(folder, *sharded)
        if self.args.should_save:
            schedule = schedule_state(state.scheduler, state.optimizer)
            torch.save(schedule, folder / SCHEDULE)
        return files

    def _in_background(self, model: Any, files: list[StateFile]) -> bool:
        """Tell whether the checkpoint is large and its copy fits into host memory; the
        answer is the same on all ranks.
        """
        if self.args.push_to_hub or trained_and_all(model)[0] < BACKGROUND_FROM:
            return False
        # Checked once, for the first checkpoint: later copies reuse its memory.
        if self._has_room is None:
            need = sum(
                tensor.nbytes for file in files for tensor in file.tensors.values()
            )
            need *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            room = available_memory()
            self._has_room = all(
                self._ranks.share(lambda: need <= _SHARE_OF_MEMORY * room)
            )
            if not self._has_room:
                self.say(
                    f"checkpoints: a copy needs {size(need)} of this machine's memory,"
                    f" but only {size(room)} are free; the training waits while a"
                    " checkpoint is written"
                )
        return self._has_room

    def _start(self, work: Callable[[], None]) -> None:
        # A daemon, so that a process that must end immediately does not wait for it.
        self._thread = threading.Thread(
            target=work, name="fcsd-checkpoint", daemon=True
        )
        self._thread.start()

    def _write(self, partial_folder: Path, files: Iterable[StateFile]) -> None:
        try:
            with writing(self._folder / partial_folder.name):
                for file in files if self._error is None else ():
                    if self._abandoned:
                        return
                    self._noted[file.name] = file.write(partial_folder)
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and give it
        its name. UserError: a rank could not write.
        """
        if self.name is None:
            return
        name, self.name = self.name, None
        partial_folder, first = self._folder / PARTIAL / name, self.args.should_save
        self._join()
        try:
            file_facts = {
                file: facts
                for facts_of_rank in self._ranks.share(self._outcome)
                for file, facts in facts_of_rank.items()
            }
            if first:
                check_state(partial_folder)
            with writing(self._folder / name):
                note_files(
                    partial_folder,
                    self.launch.ranks,
                    file_facts,
                    self.owner,
                )
        except Exception:
            if first:
                shutil.rmtree(self._folder / PARTIAL, ignore_errors=True)
            raise
        if first:
            replace_folder(partial_folder, self._folder / name)
            shutil.rmtree(self._folder / PARTIAL, ignore_errors=True)
            # Renaming is quick, deleting large files is not: a thread does it.
            retired = [retire(path) for path in self._old_checkpoints()]
            self._start(partial(_remove, retired))
        self.launch.wait()

    def _old_checkpoints(self) -> list[Path]:
        """List the checkpoints that are older than the newest `save_total_limit`,
        except for the best one; a limit of None keeps all.
        """
        if self.args.save_total_limit is None:
            return []
        older_checkpoints = checkpoints(self._folder)[: -self.args.save_total_limit]
        return [path for path in older_checkpoints if str(path) != self._best]

    def _outcome(self) -> dict[str, dict[str, Any]]:
        if self._error is not None:
            raise self._error
        return self._noted

    def close(self) -> None:
        """Finish, and wait until the checkpoints that became too old are removed."""
        self.finish()
        self._join()

    def leave(self, error: BaseException) -> None:
        """Stop after the training has failed.

        Ranks that cannot agree any more drop the checkpoint that they were writing; a
        single process can still finish it.
        """
        if self.launch.ranks.size == 1 and isinstance(error, Exception):
            with contextlib.suppress(Exception):
                self.close()
        self._abandoned, self.name = True, None
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class DiskNeed:
    """The most bytes that a training keeps at the same time.

    checkpoint: a single one. num_checkpoints: `save_total_limit`, and the one that is
    being written. best: for early stopping, the best weights, those that are being
    written, and those named by the checkpoint that goes when the next one is complete.
    model: the model that is saved at the end.
    """

    checkpoint: int
    num_checkpoints: int
    best: int
    model: int

    @property
    def total(self) -> int:
        return self.num_checkpoints * self.checkpoint + self.best + self.model


def disk_need(
    train: TrainConfig,
    *,
    num_trained: int,
    num_parameters: int,
    model_itemsize: int,
    keeps_best: bool,
) -> DiskNeed:
    """Compute the space that a training needs: a checkpoint has the trained weights and
    the two moments of AdamW in the training dtype, and with ema_decay the averaged
    weights.

    num_trained, num_parameters: of the student, over all ranks. model_itemsize: bytes
    of a saved weight; 0 where no model is saved. keeps_best: whether early stopping
    keeps weights.
    """
    weights = num_trained * dtype_of(train.dtype).itemsize
    # One every `save_steps`; the last step has one where a model is saved. No steps,
    # none.
    num_saved = max(0, (train.max_steps - 1) // train.save_steps + bool(model_itemsize))
    return DiskNeed(
        checkpoint=weights * (4 if train.ema_decay is not None else 3),
        num_checkpoints=min(train.save_total_limit + 1, num_saved),
        best=3 * weights if keeps_best else 0,
        model=num_parameters * model_itemsize,
    )


def check_disk(folder: Path, need: DiskNeed, train: TrainConfig) -> None:
    """Raise UserError where the disk of a folder has less space than a training needs;
    files that it wrote before a restart count as free.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A continued run replaces its own files.
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    room = shutil.disk_usage(folder).free + written
    if need.total <= room:
        return
    parts = [f"{need.num_checkpoints} checkpoints of {size(need.checkpoint)}"]
    if need.best:
        parts.append(f"{size(need.best)} for the best weights")
    if need.model:
        parts.append(f"{size(need.model)} for the model")
    advice = "free some space, or choose an output_dir on another disk"
    if train.save_total_limit > 1:
        advice += (
            "; train.save_total_limit: 1 needs"
            f" {size((train.save_total_limit - 1) * need.checkpoint)} less"
        )
    raise UserError(
        f"{folder}: the training needs {size(need.total)} on the disk"
        f" ({', '.join(parts)}), but {size(room)} are free; {advice}"
    )


def trained_and_all(model: nn.Module) -> tuple[int, int]:
    """Count the trained and all parameters of a model, over all ranks that share it."""
    # ZeRO-3's parameters are empty outside a pass; `ds_numel` is their number.
    counts = [
        (getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()
    ]
    return sum(number for number, trained in counts if trained), sum(
        number for number, _ in counts
    )
