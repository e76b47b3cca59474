"""The training loop: `transformers.Trainer` with the objectives of the paper.

The loss of one optimiser step is the sum over all kept tokens, of all ranks and accumulation steps, divided by their
number, so it does not depend on how a batch is cut. Checkpoints are written beside and renamed, and hold all that an
exact continuation needs.
"""

import shutil
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    TrainerState,
    TrainingArguments,
)

from fcsd.config.training import ObjectiveConfig, TrainConfig
from fcsd.connectivity.spec import TRAINED
from fcsd.data.batches import next_token_targets, trim_padding
from fcsd.distill.averaging import WeightAverage
from fcsd.distill.callbacks import InStep
from fcsd.distill.checkpoints import GUARD_FILE, STOPPER_FILE, checkpoints, guard_state, note_files, remove
from fcsd.distill.early_stopping import EarlyStopper
from fcsd.distill.guarded import GuardedTrainer
from fcsd.distill.meters import Meters
from fcsd.distill.optimizer import MuonWithAdamW, parameter_groups
from fcsd.distill.schedule import learning_rate_schedule
from fcsd.distill.teachers.base import Teacher
from fcsd.distributed.failure import in_step
from fcsd.distributed.launch import Launch
from fcsd.distributed.state import (
    PART_OF,
    check_state,
    load_schedule,
    read_state,
    schedule_state,
    write_state,
)
from fcsd.files import read_json, write_json, writing
from fcsd.losses.head import refuse_packing
from fcsd.losses.hidden_terms import AuxiliaryLosses, Captured
from fcsd.models.autocast import autocast_experts
from fcsd.temporary import replace_folder

_PARTIAL = "checkpoint-being-written"
_SCHEDULE = "scheduler.pt"


class DistillTrainer(GuardedTrainer):
    """Minimises an `Objective` over packed rows.

    The model must carry a loss head (`fcsd.losses.head.attach_loss_head`). `teacher` is needed for the objectives
    that compare with one. `settings` say what moves the weights, beyond what `args` can say.

    Logged beside what `Trainer` logs, each the mean of the steps since the last log, over kept tokens of all ranks:
        ce                          cross-entropy, nats, of the objectives sft and ce
        kl | reverse_kl | jsd       the divergence, nats, before clipping
        kl_p50, kl_p90, kl_p99      its quantiles over all tokens of these steps, within 1 % (likewise for the others)
        top1_agreement              share of tokens whose most probable continuation is the teacher's
        teacher_entropy             nats
        clipped_share               of tokens, with objective.clip
        l2, router_kl               before their coefficients, see `fcsd.losses.hidden_terms`
        tokens_per_second           all tokens, of all ranks
    Divergence and entropy are taken at objective.temperature.
    """

    # `compute_loss` divides by the number of kept tokens of the whole step, see the module's docstring.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        objective: ObjectiveConfig,
        teacher: Teacher | None,
        launch: Launch,
        settings: TrainConfig,
        stopper: EarlyStopper | None = None,
        **kwargs: Any,
    ):
        self.engine = launch.engine
        self.is_writing_checkpoint = False  # beside its place
        if args.n_gpu > 1:  # a process has one device; transformers would copy the model to all that it sees
            print(
                f"this process trains on one of the {args.n_gpu} devices that it sees; `accelerate launch"
                f" --num_processes {args.n_gpu}` starts a process for each (docs/training.md)",
                file=sys.stderr,
            )
            args._n_gpu = 1
        if args.bf16:
            autocast_experts()
        # Else the Trainer refuses to write checkpoints; ours are not its.
        args.save_only_model = self.engine.spreads_experts
        kwargs["callbacks"] = [InStep(), *(kwargs.get("callbacks") or [])]
        super().__init__(model, args, launch=launch, **kwargs)
        args.save_only_model = False
        # The name is `Trainer`'s for a model that came sharded: accelerate wraps the optimiser only.
        self.is_distributed_loading_by_transformers = self.engine.has_dtensors
        if objective.has_teacher != (teacher is not None):
            raise ValueError(
                f"objective {objective.name!r} {'has no' if teacher is not None else 'needs a'} teacher"
            )
        self.objective: ObjectiveConfig = objective
        self.teacher = teacher
        self.terms = AuxiliaryLosses(objective, model, args.max_steps) if objective.has_hidden_terms else None
        self.stopper = stopper
        self.settings = settings
        self.average: WeightAverage | None = None
        if settings.ema_decay is not None:
            self.average = WeightAverage(model, settings.ema_decay, skipped=lambda: self._verdict != "go")
            self.add_callback(self.average)  # before the one that scores, which `train` adds
        self._prepared: list[dict[str, Tensor]] = []  # the micro-batches of the step that is under way
        self._known_checkpoints: set[str] = set()  # written by this trainer, or gone on from
        self.meters = Meters(self.accelerator, self._divergence, objective.clip)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self.engine.shards:  # whose parts are where they belong
            super()._move_model_to_device(model, device)

    # ---- loss

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """All micro-batches of a step, with the teacher's hidden states, and the step's number of kept tokens."""
        for batch in self._prepared:  # transformers' loop holds the last step until it has this one
            batch.pop("teacher_hidden", None)
        batches, num_kept = super().get_batch_samples(epoch_iterator, num_batches, device)
        model: Any = self.model
        for batch in batches:
            refuse_packing(model, batch["labels"], batch["position_ids"])
        if self.teacher is not None and not self._coefficients and batches:
            in_step()
            self.teacher.prepare(batches)
        self._prepared = batches
        return batches, num_kept

    @property
    def _coefficients(self) -> dict[str, float]:
        """Of the terms beside the divergence, in the step that is under way."""
        return self.terms.coefficients(self.state.global_step) if self.terms is not None else {}

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor | None:
        """Count the kept tokens of the optimiser step, over all ranks."""
        if not batch_samples:
            return None
        count = sum(
            next_token_targets(batch["labels"], batch["position_ids"])[0].sum() for batch in batch_samples
        )
        tokens = sum(batch["input_ids"].numel() for batch in batch_samples)
        counts = torch.tensor([int(count), tokens], device=device)
        if self.args.world_size > 1:
            counts = self.accelerator.reduce(counts, "sum")
        self.meters.num_tokens += int(counts[1])
        return counts[0]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute this micro-batch's share of the step's mean loss, in nats per kept token."""
        if num_items_in_batch is None:
            raise RuntimeError("the number of kept tokens of the step is unknown")
        inputs = trim_padding(inputs)
        ids, positions = inputs["input_ids"], inputs["position_ids"]
        keep, targets = next_token_targets(inputs["labels"], positions)
        extra: dict[str, Any] = {"labels": targets, "objective": "ce"}
        coefficients, teacher_captured = self._coefficients, Captured()
        terms = self.terms if coefficients else None
        if self.teacher is not None:
            if terms is not None:
                # One micro-batch at a time: the block outputs of a whole step would not fit.
                teacher_hidden, teacher_captured = self.teacher.hidden_and_captured(inputs, terms)
            else:
                teacher_hidden = inputs["teacher_hidden"]
            extra = {
                "teacher_hidden": teacher_hidden,
                "teacher_head": self.teacher.head,
                "objective": self._divergence,
                "temperature": self.objective.temperature,
                "clip": self.objective.clip,
            }
            if self.objective.jsd_beta is not None:
                extra["jsd_beta"] = self.objective.jsd_beta
        with terms.captured(model) if terms is not None else nullcontext(Captured()) as captured:
            outputs = model(input_ids=ids, position_ids=positions, keep=keep, **extra)
        # Gradients are averaged over ranks, the mean is over the tokens of all ranks.
        scale = self.accelerator.num_processes / torch.clamp(torch.as_tensor(num_items_in_batch), min=1)
        loss = outputs["loss"] * scale
        if self.teacher is None:
            self.meters.add("ce", loss)
        else:
            self.meters.add_statistics(outputs, scale)
        if terms is not None:
            for name, value in terms.values(captured, teacher_captured, keep, list(coefficients)).items():
                self.meters.add(name, value * scale)
                loss = loss + coefficients[name] * value * scale
        loss = self.watched(loss)
        return (loss, outputs) if return_outputs else loss

    @property
    def _divergence(self) -> str:
        """The name under which the divergence is logged: kl, reverse_kl or jsd."""
        return self.objective.name.removesuffix("+l2")

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_training_stop:
            self.control.should_log = True  # the last step is on record whatever logging_steps is
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the parts of the loss, the throughput and what was guarded against to what the Trainer logs."""
        if "loss" in logs:
            logs.update(self.meters.means(self.leave_out_skipped(logs)))
            self.meters.refuse_all_clipped(logs, self.state.global_step)
            logs["tokens_per_second"] = self.meters.tokens_per_second()
            logs.update(self.guard.report())
            self.reset_meters()
        super().log(logs, start_time)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if not self.control.should_training_stop:  # the score that began this run may have ended it
            super()._run_epoch(*args, **kwargs)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        self._note_training()
        # What `Trainer` would load, and when, depends on the engine; `restore` is the same for all.
        prepared: tuple[nn.Module, Any] = super()._prepare_for_training(max_steps, train_dataloader, None)
        if self.terms is not None:
            self.terms.steps = max_steps
        if resume_from_checkpoint is not None:
            self.restore(Path(resume_from_checkpoint))
            self._known_checkpoints.add(Path(resume_from_checkpoint).name)
        self.reset_meters()
        return prepared

    def _note_training(self) -> None:
        """Let the config say that these are no longer an original's weights; those of a regular model are one's."""
        config = self.plain_model.config
        if (getattr(config, "farskip", None) or {}).get("layers"):
            setattr(config, TRAINED, True)

    # ---- optimiser

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW as the Trainer makes it, or what `settings` ask for."""
        train = self.settings
        if self.optimizer is None and (train.optimizer != "adamw" or train.layer_lr_ratio != 1):
            trained: Any = self.model if model is None else model
            groups = parameter_groups(
                trained,
                learning_rate=train.learning_rate,
                weight_decay=train.weight_decay,
                decayed=self.get_decay_parameter_names(trained),
                layer_lr_ratio=train.layer_lr_ratio,
                with_muon=train.optimizer == "muon",
            )
            adamw, options = self.get_optimizer_cls_and_kwargs(self.args, trained)
            self.optimizer = (MuonWithAdamW if train.optimizer == "muon" else adamw)(groups, **options)
        optimizer = super().create_optimizer(model)
        # The Trainer has one group a mesh of those that decay, and of the others.
        if self.engine.spreads_experts:
            trained = self.model if model is None else model
            decayed = set(self.get_decay_parameter_names(trained))
            names = {id(parameter): name for name, parameter in trained.named_parameters()}
            for group in optimizer.param_groups:
                group[PART_OF] = int(names[id(group["params"][0])] not in decayed)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule that the arguments name."""
        if self.lr_scheduler is None:
            steered: Any = optimizer or self.optimizer
            self.lr_scheduler = learning_rate_schedule(self.args, steered, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_learning_rate(self) -> float:
        rate: float = super()._get_learning_rate()
        optimizer: Any = self.optimizer
        return rate / optimizer.param_groups[0].get("lr_scale", 1.0)

    # ---- checkpoints

    def scored_weights(self) -> AbstractContextManager[None]:
        """Within the block the model has the weights that are scored and kept: with ema_decay their average."""
        average = self.average
        return average.applied() if average is not None and average.average else nullcontext()

    @property
    def plain_model(self) -> Any:
        """The model without DDP's or DeepSpeed's wrapper."""
        return self.accelerator.unwrap_model(self.model)

    def restore(self, checkpoint: Path) -> None:
        """Weights, optimiser and schedule as they were, whatever engine and number of ranks wrote the checkpoint."""
        read_state(checkpoint, self.plain_model, self.optimizer, self.launch.ranks)
        schedule = torch.load(checkpoint / _SCHEDULE, map_location="cpu", weights_only=True)
        load_schedule(self.lr_scheduler, self.optimizer, schedule)
        if self.average is not None:
            self.average.load(checkpoint)

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / _PARTIAL) if self.is_writing_checkpoint else folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the checkpoint beside, then rename it, then drop the oldest: a checkpoint that can be seen is whole."""
        folder = Path(str(self.args.output_dir))
        name = f"checkpoint-{self.state.global_step}"
        beside = folder / _PARTIAL / name
        if name in self._known_checkpoints and (folder / name).is_dir():
            return
        self.is_writing_checkpoint = True
        try:
            with writing(folder / name):
                super()._save_checkpoint(model, trial)
                if self.args.should_save:
                    self._name_best_checkpoint(folder, beside)
                    write_json(beside / GUARD_FILE, self.guard.state())
                    if self.stopper is not None:
                        write_json(beside / STOPPER_FILE, self.stopper.state())
        finally:
            self.is_writing_checkpoint = False
            self.accelerator.wait_for_everyone()
            if self.args.should_save and not (beside / "trainer_state.json").is_file():
                shutil.rmtree(folder / _PARTIAL, ignore_errors=True)
        if self.args.should_save:
            check_state(beside)
        with writing(folder / name):
            note_files(beside, self.launch.ranks)
        if self.args.should_save:
            replace_folder(beside, folder / name)
            shutil.rmtree(folder / _PARTIAL, ignore_errors=True)
            self._remove_old_checkpoints(folder)
        self._known_checkpoints.add(name)
        self.accelerator.wait_for_everyone()

    def _name_best_checkpoint(self, folder: Path, beside: Path) -> None:
        """Let the state name the best checkpoint by the name that it gets when it is renamed."""
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder / beside.name)
            self.state.save_to_json(str(beside / "trainer_state.json"))

    def _remove_old_checkpoints(self, folder: Path) -> None:
        """Keep the newest `save_total_limit`, and the best one; None keeps all."""
        if self.args.save_total_limit is not None:
            for old in checkpoints(folder)[: -self.args.save_total_limit]:
                if str(old) != self.state.best_model_checkpoint:
                    remove(old)

    # The Trainer saves with `save_pretrained`, which writes per-expert tensor names, and loads a checkpoint with a
    # non-strict `load_state_dict`, which expects the fused names: the experts would silently stay as they are. Under
    # FSDP and DeepSpeed it writes formats that only the same engine reads.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Nothing: weights and optimiser are written together."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        write_state(Path(output_dir), self.plain_model, self.optimizer, self.launch.ranks)
        if self.args.should_save:
            torch.save(schedule_state(self.lr_scheduler, self.optimizer), Path(output_dir) / _SCHEDULE)
            if self.average is not None:
                self.average.save(Path(output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing: `restore` does it, once there is an optimiser."""

    def restore_progress(self, checkpoint: Path) -> None:
        """Load the stopper as it was; the time that was spent stays spent."""
        if self.stopper is not None:
            self.stopper.load(read_json(checkpoint / STOPPER_FILE))

    def restore_if_complete(self, checkpoint: Path) -> bool:
        """Load a checkpoint after which there is nothing left to train; of any other only stopper and guard, and false.

        A run that was killed between its last step and writing its model ends here: `train` would do one step more.
        """
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        self.restore_progress(checkpoint)
        self.guard.load(guard_state(checkpoint))
        done = state.global_step >= (self.args.max_steps if self.args.max_steps > 0 else state.max_steps)
        if self.stopper is not None:
            self.stopper.time.resume(read_json(checkpoint / STOPPER_FILE)["time"])
            is_due = self.stopper.is_due(state.global_step, self.args.max_steps)
            done = (done or self.stopper.should_stop) and not is_due
        if not done:
            return False
        self._note_training()
        read_state(checkpoint, self.plain_model, None, self.launch.ranks)
        if self.average is not None:
            self.average.load(checkpoint)
        self.state = state
        return True
