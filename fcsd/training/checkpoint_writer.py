"""Write the checkpoints of a run; large ones are written while the training continues.

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
# Trained parameters from which a thread writes; smaller models take less than a second.
BACKGROUND_FROM = 20_000_000
_SHARE_OF_MEMORY = 0.8  # of the free memory, for the copy


class CheckpointWriter:
    """Write a trainer's checkpoints; large ones in a thread, from a copy in host
    memory, while the training continues.

    A checkpoint gets its name when the parts of all ranks are on the disk. All ranks
    call the same methods, except for `leave`.

    is_saving: the Trainer's files go to the temporary folder. known: names of the
    checkpoints that this training has written, or continued from.
    """

    def __init__(self, trainer: Any):
        self.trainer, self.is_saving, self.known = trainer, False, set[str]()
        self._files: list[StateFile] = []  # of this rank's state, to be written
        self._name: str | None = None  # of the checkpoint that is being written
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
        """Write a checkpoint of the present state, once the previous one is done;
        `save` writes the small files.
        """
        self.close()
        # The Trainer may ask twice for the checkpoint of one step.
        if name in self.known and (self._folder / name).is_dir():
            return
        trainer, partial_folder = self.trainer, self._folder / PARTIAL / name
        if trainer.args.should_save:
            # Remove what a killed run has left half-written or half-removed.
            for leftover in (
                self._folder / PARTIAL,
                *self._folder.glob(".checkpoint-*.old"),
            ):
                shutil.rmtree(leftover, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
        self.known.add(name)
        self._name, self._noted, self._error, self._abandoned = name, {}, None, False
        self.is_saving = True
        try:
            with writing(self._folder / name):
                save()
                if trainer.args.should_save:
                    _write_progress(trainer, partial_folder)
        # A rank must not leave while others wait for it: `finish` raises the
        # error on all.
        except Exception as error:
            self._error = error
        finally:
            self.is_saving = False
        files, self._files = self._files, []
        if not self._in_background(files):
            self._write(partial_folder, (file.copied({}) for file in files))
            self.finish()
            self.close()
            return
        copies = [file.copied(self._copies) for file in files]
        self._start(partial(self._write, partial_folder, copies))

    def save_state(self, folder: Path) -> None:
        """Write the small parts of optimiser and schedule to `folder`; `write` writes
        the tensors.
        """
        trainer = self.trainer
        training_state = (trainer.plain_model, trainer.optimizer, trainer.launch.ranks)
        folder.mkdir(parents=True, exist_ok=True)
        average = trainer.average.average if trainer.average is not None else None
        self._files = state_files(*training_state, average=average)
        write_settings(folder, *training_state)
        if trainer.args.should_save:
            torch.save(
                schedule_state(trainer.lr_scheduler, trainer.optimizer),
                folder / SCHEDULE,
            )

    def _in_background(self, files: list[StateFile]) -> bool:
        """Tell whether the checkpoint is large and its copy fits into host memory; the
        answer is the same on all ranks.
        """
        trainer = self.trainer
        if (
            trainer.args.push_to_hub
            or trained_and_all(trainer.plain_model)[0] < BACKGROUND_FROM
        ):
            return False
        # Checked once, for the first checkpoint: later copies reuse its memory.
        if self._has_room is None:
            need = sum(run.nbytes for file in files for run in file.runs.values())
            need *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            room = available_memory()
            self._has_room = all(
                self._ranks.share(lambda: need <= _SHARE_OF_MEMORY * room)
            )
            if not self._has_room:
                trainer.guarded.say(
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
        if self._name is None:
            return
        name, self._name = self._name, None
        partial_folder, first = (
            self._folder / PARTIAL / name,
            self.trainer.args.should_save,
        )
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
                    self.trainer.launch.ranks,
                    file_facts,
                    self.trainer.record.owner,
                )
        except Exception:
            if first:
                shutil.rmtree(self._folder / PARTIAL, ignore_errors=True)
            raise
        if first:
            replace_folder(partial_folder, self._folder / name)
            shutil.rmtree(self._folder / PARTIAL, ignore_errors=True)
            # Renaming is quick, deleting large files is not: a thread does it.
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
        """Finish, and wait until the checkpoints that became too old are removed."""
        self.finish()
        self._join()

    def leave(self, error: BaseException) -> None:
        """Stop after the training has failed.

        Ranks that cannot agree any more drop the checkpoint that they were writing; a
        single process can still finish it.
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


def _write_progress(trainer: Any, partial_folder: Path) -> None:
    """Write the states of guard, stopper and balance, and the settings of the training.

    The Trainer has noted the temporary folder as the best checkpoint's; it is replaced
    by the final name.
    """
    state = trainer.state
    if state.best_global_step == state.global_step:
        state.best_model_checkpoint = str(
            Path(trainer.args.output_dir) / partial_folder.name
        )
        state.save_to_json(str(partial_folder / "trainer_state.json"))
    trainer.record.write(partial_folder)
    write_json(partial_folder / GUARD_FILE, trainer.guard.state())
    if (balance := trainer.step_loss.balance) is not None:
        write_json(partial_folder / BALANCE_FILE, balance.state())
    if trainer.stopper is not None:
        write_json(partial_folder / STOPPER_FILE, trainer.stopper.state())


def restore_beside(trainer: Any, checkpoint: Path) -> None:
    """Load the weights' average and the routers' balance from a checkpoint."""
    if trainer.average is not None:
        trainer.average.load(checkpoint)
    if (balance := trainer.step_loss.balance) is not None:
        balance.load(read_json(checkpoint / BALANCE_FILE))


def _old(trainer: Any, folder: Path) -> list[Path]:
    """List the checkpoints that are older than the newest `save_total_limit`, except
    for the best one; a limit of None keeps all.
    """
    if trainer.args.save_total_limit is None:
        return []
    older_checkpoints = checkpoints(folder)[: -trainer.args.save_total_limit]
    return [
        path
        for path in older_checkpoints
        if str(path) != trainer.state.best_model_checkpoint
    ]


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
