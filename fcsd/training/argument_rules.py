"""The arguments of transformers that fcsd's training honours, and those that it refuses
because they would have no effect, or another one than they promise.

`REFUSED` has those that are refused. `MAY_CHANGE_ARGUMENTS` are honoured, and free to
change when a training is continued. All others are honoured, and fixed for the whole
training, except that steps or epochs may become more, and that the batch counts by its
rows, not by the way in which a step is cut into micro-batches (`fcsd.training.record`).
The functions refuse combinations.

`per_device_eval_batch_size` holds for logits, that is for `compute_metrics` and
`predict`; a held-out loss is measured row by row.

Not covered: arguments that transformers itself ignores (`eval_steps` without
`eval_strategy`), and those that its own scripts read (`do_train`,
`resume_from_checkpoint`).
"""

from typing import Any

import torch
from transformers import TrainingArguments

from fcsd.base.errors import CREDENTIALS, UserError, holds_credentials
from fcsd.base.strict import Rule, broken
from fcsd.training.optimizer import learning_rate_schedule

REENTRANT = (
    "re-entrant checkpointing is not supported, because its first pass records no"
    " gradients for losses of what layers compute (balance_loss_coefficient) or for"
    " images"
)
_ENGINES = "launch with accelerate and configs/fsdp2_8.yaml"
_SKIPPED = "failing steps are skipped and do not enter any mean"
_ROWS = "rows have one length, and keep the order of the data"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "fp16": ((False,), "use bf16=True"),
    "label_smoothing_factor": ((0, 0.0), "use temperature, or the objective jsd, for a softer target"),
    "auto_find_batch_size": ((False,), "set per_device_train_batch_size; the batch of a step does not change"),
    "save_only_model": ((False,), "a checkpoint is for an exact continuation; save_model() saves only the model"),
    "use_liger_kernel": ((False,), "head and loss are fused already"),
    "liger_kernel_config": ((None,), "head and loss are fused already"),
    "bf16_full_eval": ((False,), "bf16=True also applies to the evaluation"),
    "fp16_full_eval": ((False,), "bf16=True also applies to the evaluation"),
    "fsdp": ((None, "", [], False), _ENGINES),
    "fsdp_config": ((None,), _ENGINES),
    "deepspeed": ((None,), _ENGINES),
    "parallelism_config": ((None,), _ENGINES),
    "average_tokens_across_devices": ((True,), "the loss is the mean over the tokens of all processes"),
    "logging_nan_inf_filter": ((False,), _SKIPPED),
    "remove_unused_columns": ((False,), "rows have no other columns"),
    "label_names": ((None,), "the labels of rows are called labels"),
    "length_column_name": (("length",), _ROWS),
    "save_on_each_node": ((False,), "output_dir must be on a file system that all machines share"),
    "use_cache": ((False,), "a training has no cache of keys and values"),
    "debug": (("", [], None), "failing steps are skipped, and events.jsonl lists them (`safety`)"),
}  # fmt: skip
"""Argument -> its neutral values, what to do instead."""

MAY_CHANGE_ARGUMENTS = {
    # where the run writes, and under which name
    "output_dir", "run_name", "project", "report_to", "trackio_space_id", "trackio_bucket_id",
    "trackio_static_space_id",
    # the log and the progress bar
    "disable_tqdm", "skip_memory_metrics", "log_level", "log_level_replica",
    "log_on_each_node", "logging_strategy", "logging_steps", "logging_first_step",
    "include_num_input_tokens_seen",
    # the evaluation, and the checkpoint that is kept by it
    "do_eval", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start",
    "per_device_eval_batch_size", "prediction_loss_only", "eval_do_concat_batches",
    "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics",
    "batch_eval_metrics", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
    # checkpoints, and how a run continues
    "save_strategy", "save_steps", "save_total_limit", "enable_jit_checkpoint", "ignore_data_skip",
    "restore_callback_states_from_checkpoint", "resume_from_checkpoint",
    # the Hub
    "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy",
    "hub_always_push", "hub_revision",
    # fields that transformers' scripts read
    "do_train", "do_predict",
    # memory, devices, workers and communication
    "torch_empty_cache_steps", "activation_checkpointing", "activation_checkpointing_kwargs",
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "use_cpu", "local_rank",
    "accelerator_config", "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory",
    "dataloader_persistent_workers", "dataloader_prefetch_factor",
    "dataloader_multiprocessing_context", "dataloader_in_order", "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "ddp_timeout",
}  # fmt: skip
"""Arguments that do not affect the weights, except by the order of floating-point
sums.
"""


def refuse_meaningless(args: TrainingArguments) -> None:
    """Raise UserError for an argument of `REFUSED` that is set, or that holds
    credentials; call it before transformers acts on the arguments.
    """
    for name, value in vars(args).items():
        if name != "hub_token" and isinstance(value, str) and holds_credentials(value):
            raise UserError(f"FCSDConfig: {name}: {CREDENTIALS}")
    for name, (neutral, instead) in REFUSED.items():
        if getattr(args, name, neutral[0]) not in neutral:
            raise UserError(f"FCSDConfig: {name}: has no meaning here; {instead}")


_NO_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
_NO_SETTINGS = ("constant", "constant_with_warmup")


def _schedule(args: Any) -> str:
    return str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))


CONFLICTS: tuple[Rule, ...] = (
    (
        lambda args: args.gradient_accumulation_steps < 1,
        "gradient_accumulation_steps: must be greater than 0, got"
        " {0.gradient_accumulation_steps}",
    ),
    (
        lambda args: (
            (args.activation_checkpointing_kwargs or {}).get("use_reentrant", False)
            is not False
        ),
        f"activation_checkpointing_kwargs: {REENTRANT}; set use_reentrant=False",
    ),
    (
        lambda args: args.max_steps <= 0 and args.num_train_epochs <= 0,
        "num_train_epochs: must be greater than 0, got {0.num_train_epochs:g}; or set"
        " max_steps",
    ),
    (
        lambda args: (
            args.save_strategy == "best"
            and (args.eval_strategy == "no" or args.metric_for_best_model is None)
        ),
        "save_strategy: 'best' needs an evaluation and its metric; set eval_strategy"
        " and metric_for_best_model, for example 'kl'",
    ),
    (
        lambda args: (
            args.max_steps > 0
            and args.num_train_epochs != TrainingArguments.num_train_epochs
        ),
        "num_train_epochs: {0.num_train_epochs:g} has no meaning with max_steps"
        " {0.max_steps}, which ends the training; leave one of them out",
    ),
    (
        lambda args: _schedule(args) in _NO_WARMUP and args.warmup_steps > 0,
        lambda args: (
            f"warmup_steps: the schedule '{_schedule(args)}' has no warm-up; use"
            " 'constant_with_warmup', or leave it out"
        ),
    ),
    (
        lambda args: _schedule(args) in _NO_SETTINGS and args.lr_scheduler_kwargs,
        lambda args: (
            f"lr_scheduler_kwargs: the schedule '{_schedule(args)}' has no settings;"
            " leave them out"
        ),
    ),
    (
        lambda args: args.train_sampling_strategy not in ("random", "sequential"),
        "train_sampling_strategy: {0.train_sampling_strategy!r} has no meaning here;"
        f" {_ROWS}",
    ),
    (
        lambda args: "loss" in args.include_for_metrics,
        "include_for_metrics: 'loss' has no meaning here; eval_loss is that of all"
        " tokens",
    ),
    (
        lambda args: (
            args.accelerator_config.split_batches
            or args.accelerator_config.dispatch_batches
        ),
        "accelerator_config: split_batches and dispatch_batches have no meaning here;"
        " set per_device_train_batch_size and batch_size_tokens instead",
    ),
)
"""Arguments of which one would silently overrule the other. A default cannot be told
from a value that was given, and conflicts with nothing.
"""


def refuse_conflicts(args: Any) -> None:
    """Raise UserError where an `FCSDConfig`, after transformers' own `__post_init__`,
    breaks a rule of `CONFLICTS`.
    """
    if problem := broken(CONFLICTS, args):
        raise UserError(f"FCSDConfig: {problem}")
    # The schedule's settings have no schema in transformers: building it once shows
    # whether they are accepted, before any data are read.
    try:
        learning_rate_schedule(
            args, torch.optim.SGD([torch.zeros(1)], lr=1.0), max(args.max_steps, 1)
        )
    except (TypeError, ValueError, ZeroDivisionError) as error:
        # Python's message begins with the name of a function of transformers.
        reason = str(error).partition("() ")[2] or error
        raise UserError(
            f"FCSDConfig: lr_scheduler_kwargs: the schedule '{_schedule(args)}' cannot"
            f" be made with {args.lr_scheduler_kwargs or {}} ({reason})"
        ) from None


def refuse_another_cut(
    args: Any, rows: int, num_micro_batches: int, num_processes: int
) -> None:
    """Raise UserError where `batch_size_tokens` contradicts
    `per_device_train_batch_size` or `gradient_accumulation_steps`.
    """
    configured_rows = args.per_device_train_batch_size
    accumulation_steps = args.gradient_accumulation_steps
    if rows != configured_rows:
        raise UserError(
            f"batch_size_tokens: {args.batch_size_tokens} are {rows} rows of max_length"
            f" {args.max_length} for each of {num_processes} processes, but"
            f" per_device_train_batch_size is {configured_rows}; leave it out, or make"
            " the batch larger"
        )
    # 1 is the default of transformers, which cannot be told from a 1 that was set.
    if accumulation_steps not in (1, num_micro_batches):
        raise UserError(
            f"batch_size_tokens: {args.batch_size_tokens} are {num_micro_batches}"
            f" micro-batches of {rows} x max_length {args.max_length} tokens on"
            f" {num_processes} processes, but gradient_accumulation_steps is"
            f" {accumulation_steps}; leave one of them out"
        )
