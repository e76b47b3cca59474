"""Write the checkpoints of a run: a large one while the training goes on.

What a step changes is copied into host memory, which is all that the training waits
for; a thread of each rank writes and hashes the copy. When all ranks are done, which
they tell each other with the figures of a step, the checkpoint gets its name. An error
ends the training in that step. `torch.distributed.checkpoint.async_save` has formats of
its own, which other engines and numbers of ranks do not read.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fcsd.base.files import read_json, write_json, writing
from fcsd.base.memory import available_memory
from fcsd.base.temporary import replace_folder
from fcsd.base.text import size
from fcsd.parallel.ranks import Ranks
from fcsd.parallel.state import (
    StateFile,
    check_state,
    schedule_state,
    state_files,
    write_settings,
)
from fcsd.training.checkpoints import (
    BALANCE_FILE,
    GUARD_FILE,
    PARTIAL,
    STOPPER_FILE,
    checkpoints,
    note_files,
    retire,
)
from fcsd.training.disk import trained_and_all

SCHEDULE = "scheduler.pt"
# trained parameters: what is smaller is written within a second
BACKGROUND_FROM = 20_000_000
_SHARE_OF_MEMORY = 0.8  # of what is free, for the copy


class CheckpointWriter:
    """Writes a trainer's checkpoints; large ones in a thread, from a copy in host
    memory, while the training goes on.

    A checkpoint gets its name when the parts of all ranks are on the disk. All ranks
    call the same methods but `leave`.

    is_saving: what the Trainer writes goes beside the checkpoint's place. known: names
    of the checkpoints that this training has written, or gone on from.
    """

    def __init__(self, trainer: Any):
        self.trainer, self.is_saving, self.known = trainer, False, set[str]()
        self._files: list[StateFile] = []  # of this rank's state, to be written
        self._name: str | None = None  # of what is being written
        self._thread: threading.Thread | None = None
        # kept: to map new memory takes longer than to copy
        self._copies: dict[str, Tensor] = {}
        self._has_room: bool | None = None  # for them
        self._noted: dict[str, dict[str, Any]] = {}
        self._error: Exception | None = None
        self._abandoned = False

    @property
    def _ranks(self) -> Ranks:
        # no rank is in a pass
        return replace(self.trainer.launch.ranks, lockstep=False)

    @property
    def _folder(self) -> Path:
        return Path(self.trainer.args.output_dir)

    @property
    def at_work(self) -> bool:
        return (
            self._name is not None
            and self._thread is not None
            and self._thread.is_alive()
        )

    def write(self, name: str, save: Callable[[], None]) -> None:
        """Take a checkpoint of the training as it is, once the one before is done;
        `save` leaves what is small.
        """
        self.close()
        if name in self.known and (self._folder / name).is_dir():
            return
        trainer, beside = self.trainer, self._folder / PARTIAL / name
        if trainer.args.should_save:
            # of a killed run
            for old in (
                self._folder / PARTIAL,
                *self._folder.glob(".checkpoint-*.old"),
            ):
                shutil.rmtree(old, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
        self.known.add(name)
        self._name, self._noted, self._error, self._abandoned = name, {}, None, False
        self.is_saving = True
        try:
            with writing(self._folder / name):
                save()
                if trainer.args.should_save:
                    _write_progress(trainer, beside)
        except Exception as error:  # all ranks learn of it in `finish`
            self._error = error
        finally:
            self.is_saving = False
        files, self._files = self._files, []
        if not self._in_background(files):
            self._write(beside, (file.copied({}) for file in files))
            self.finish()
            self.close()
            return
        copies = [file.copied(self._copies) for file in files]
        self._start(partial(self._write, beside, copies))

    def save_state(self, folder: Path) -> None:
        """Leave what is small of weights, optimiser and schedule in `folder`; the rest
        is written by `write`.
        """
        trainer = self.trainer
        trained = (trainer.plain_model, trainer.optimizer, trainer.launch.ranks)
        folder.mkdir(parents=True, exist_ok=True)
        average = trainer.average.average if trainer.average is not None else None
        self._files = state_files(*trained, average=average)
        write_settings(folder, *trained)
        if trainer.args.should_save:
            torch.save(
                schedule_state(trainer.lr_scheduler, trainer.optimizer),
                folder / SCHEDULE,
            )

    def _in_background(self, files: list[StateFile]) -> bool:
        """Tell whether the checkpoint is large, and a copy of it fits into the host's
        memory: the same on all ranks.
        """
        trainer = self.trainer
        if (
            trainer.args.push_to_hub
            or trained_and_all(trainer.plain_model)[0] < BACKGROUND_FROM
        ):
            return False
        if self._has_room is None:
            need = sum(run.nbytes for file in files for run in file.runs.values())
            need *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            room = available_memory()
            self._has_room = all(
                self._ranks.share(lambda: need <= _SHARE_OF_MEMORY * room)
            )
            if not self._has_room:
                trainer.guarded.say(
                    f"checkpoints: a copy takes {size(need)} of this machine's memory,"
                    f" of which {size(room)} are free; the training waits while they"
                    " are written"
                )
        return self._has_room

    def _start(self, work: Callable[[], None]) -> None:
        # A daemon: a process that is to end at once does not wait for it.
        self._thread = threading.Thread(
            target=work, name="fcsd-checkpoint", daemon=True
        )
        self._thread.start()

    def _write(self, beside: Path, files: Iterable[StateFile]) -> None:
        try:
            with writing(self._folder / beside.name):
                for file in files if self._error is None else ():
                    if self._abandoned:
                        return
                    self._noted[file.name] = file.write(beside)
        except Exception as error:
            self._error = error

    def finish(self) -> None:
        """Wait for what is being written, and give it its name; nothing where nothing
        is. UserError: a rank could not write.
        """
        if self._name is None:
            return
        name, self._name = self._name, None
        beside, first = self._folder / PARTIAL / name, self.trainer.args.should_save
        self._join()
        try:
            noted = {
                file: facts
                for own in self._ranks.share(self._outcome)
                for file, facts in own.items()
            }
            if first:
                check_state(beside)
            with writing(self._folder / name):
                note_files(beside, self.trainer.launch.ranks, noted)
        except Exception:
            if first:
                shutil.rmtree(self._folder / PARTIAL, ignore_errors=True)
            raise
        if first:
            replace_folder(beside, self._folder / name)
            shutil.rmtree(self._folder / PARTIAL, ignore_errors=True)
            self._start(
                partial(
                    _remove, [retire(path) for path in _old(self.trainer, self._folder)]
                )
            )
        self.trainer.accelerator.wait_for_everyone()

    def _outcome(self) -> dict[str, dict[str, Any]]:
        if self._error is not None:
            raise self._error
        return self._noted

    def close(self) -> None:
        """Finish, and wait until what has become old is removed."""
        self.finish()
        self._join()

    def leave(self, error: BaseException) -> None:
        """End with a training that has failed: ranks that cannot agree any more drop
        what they were writing.
        """
        if self.trainer.launch.ranks.size == 1 and isinstance(error, Exception):
            with contextlib.suppress(Exception):
                self.close()
        self._abandoned, self._name = True, None
        self._join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _write_progress(trainer: Any, beside: Path) -> None:
    """Write what guard, stopper and balance go on from, and with which settings; the
    best checkpoint gets the name that it is renamed to.
    """
    state = trainer.state
    if state.best_global_step == state.global_step:
        state.best_model_checkpoint = str(Path(trainer.args.output_dir) / beside.name)
        state.save_to_json(str(beside / "trainer_state.json"))
    trainer.record.write(beside)
    write_json(beside / GUARD_FILE, trainer.guard.state())
    if (balance := trainer.step_loss.balance) is not None:
        write_json(beside / BALANCE_FILE, balance.state())
    if trainer.stopper is not None:
        write_json(beside / STOPPER_FILE, trainer.stopper.state())


def restore_beside(trainer: Any, checkpoint: Path) -> None:
    """Go on with the average and the balance that a checkpoint holds beside the weights."""
    if trainer.average is not None:
        trainer.average.load(checkpoint)
    if (balance := trainer.step_loss.balance) is not None:
        balance.load(read_json(checkpoint / BALANCE_FILE))


def _old(trainer: Any, folder: Path) -> list[Path]:
    """List the checkpoints before the newest `save_total_limit`, without the best one;
    None keeps all.
    """
    if trainer.args.save_total_limit is None:
        return []
    before = checkpoints(folder)[: -trainer.args.save_total_limit]
    return [path for path in before if str(path) != trainer.state.best_model_checkpoint]


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
