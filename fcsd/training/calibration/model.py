"""Calibrate a converted model in memory against its original, on the same rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.base.strict import Rule, refuse, wrong_kind
from fcsd.base.text import STEPS_BAR, progress_bar
from fcsd.model.connectivity.convert import farskip_layers
from fcsd.model.connectivity.spec import CALIBRATED
from fcsd.model.families import base_model_type, family_of
from fcsd.model.families.structure import refuse_adapters, refuse_offloaded
from fcsd.model.load import refuse_not_finite
from fcsd.model.quantised.methods import model_quantisation
from fcsd.parallel.launch import ALONE, Ranks, input_device, is_sharded
from fcsd.training.calibration.layer import walk
from fcsd.training.calibration.solve import FITS_THE_SAMPLE
from fcsd.training.calibration.state import (
    Models,
    State,
    Text,
    batches_of,
    first_stream,
)
from fcsd.training.calibration.steps import Steps
from fcsd.training.config import CalibrationConfig
from fcsd.training.losses.head import refuse_packing

# The residual of held-out outputs may at most double. In small models it reaches 1.5
# times its value with 16 distinct tokens per unit of width.
_RULED_OUT = 2.0


def calibrate_model(
    student: Any,
    teacher: Any,
    rows: Sequence[Any] | Tensor,
    *,
    ridge: float = CalibrationConfig().ridge,
    ranks: Ranks = ALONE,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Fold maps into the weights of `student`, in place, that bring the inputs and
    outputs of its branches nearer to the teacher's.

    Args:
        student: a converted model.
        teacher: the original, of the same family and width.
        rows: those of `fcsd.data.dataset.build_dataset`, or token ids (N, T); each rank
            works on its share.
        ridge: λ relative to the mean diagonal.

    Returns:
        For each rewired layer, squared residuals relative to the target: `reads`
        (branch -> [before, after]), `adds` and `experts` ([before, after]); and `left`,
        the inputs and outputs that no map can be folded into.

    Raises:
        UserError: the student is not converted, the models do not belong together or
            are sharded, or there is too little text.
    """
    memory = "a model in memory (the first value that fcsd.load returns)"
    refuse(
        wrong_kind("student", student, nn.Module, memory),
        wrong_kind("teacher", teacher, nn.Module, memory),
        *_STUDENT,
        of=(student,),
    )
    # Maps are folded into the weights that a layer computes with, as whole matrices.
    refuse_adapters(student, "student")
    refuse_offloaded(student, "student")
    refuse(*_PAIR, of=(student, teacher))
    for model in (student, teacher):
        refuse_not_finite(model, type(model).__name__)
    layers = farskip_layers(student)
    text = text_of_rank(_as_rows(rows), teacher, ranks)
    modes = student.training, teacher.training
    student.eval(), teacher.eval()
    family = family_of(student.config)
    models = Models(
        Steps(student, family), Steps(teacher, family), input_device(student)
    )
    # Dropout must be off while residuals are computed; each model returns to its mode
    # at the end.
    try:
        teacher_streams, student_streams = (
            [first_stream(steps, batch, models.device) for batch in text.batches]
            for steps in (models.teacher, models.student)
        )
        state = State(0, teacher_streams, student_streams)
        with progress_bar(
            total=max(layers) + 1,
            desc="calibrate",
            bar_format=STEPS_BAR,
            shown=progress and ranks.first,
        ) as bar:
            results = walk(models, state, text, layers=layers, ridge=ridge, ranks=ranks)
            for result in results:
                bar.update()
                if result is not None:
                    bar.set_postfix_str(shown(result))
    finally:
        student.train(modes[0]), teacher.train(modes[1])
    # The config is saved with the model and tells that its weights are no longer the
    # original's.
    setattr(
        student.config,
        CALIBRATED,
        {"tokens": text.num_tokens, "ridge": ridge, "layers": layers},
    )
    return state.results


def _as_rows(rows: Any) -> Sequence[Any]:
    if not isinstance(rows, Tensor):
        return rows  # type: ignore[no-any-return]
    positions = torch.arange(rows.shape[1])
    return [
        {"input_ids": row, "position_ids": positions, "labels": row}
        for row in rows.cpu()
    ]


def _name(model: Any) -> str:
    return type(model).__name__


_STUDENT: tuple[Rule, ...] = (
    (
        lambda student: (
            getattr(getattr(student, "config", None), "farskip", None) is None
        ),
        lambda student: (
            f"{_name(student)}: is not converted; convert the student first"
            " (fcsd.convert)"
        ),
    ),
    (
        lambda student: hasattr(student.config, CALIBRATED),
        lambda student: f"{_name(student)}: is calibrated already; give the original",
    ),
)
"""Of a student."""


def _kind(model: Any) -> tuple[str, int]:
    """Return type and width, in which student and teacher are the same."""
    width: int = model.config.get_text_config().hidden_size
    return base_model_type(model.config.model_type), width


_PAIR: tuple[Rule, ...] = (
    (
        lambda student, teacher: model_quantisation(student) is not None,
        lambda student, teacher: (
            f"{_name(student)}: its weights are quantised, so folded maps would be"
            " rounded away; calibrate the unquantised model (`fcsd dequantize` writes"
            " one)"
        ),
    ),
    # A family has several sizes; the maps take the teacher's streams to the student's.
    (
        lambda student, teacher: (
            _kind(student) != _kind(teacher)
            or getattr(teacher.config, "farskip", None) is not None
        ),
        lambda student, teacher: (
            f"{_name(teacher)}: the teacher has to be the student's original, a regular"
            " {} of width {}".format(*_kind(student))
        ),
    ),
    (
        lambda *models: any(map(is_sharded, models)),
        lambda *models: (
            f"{_name(next(filter(is_sharded, models)))}: its weights are sharded over"
            " ranks; calibrate the checkpoint first (fcsd calibrate), which holds one"
            " layer at a time"
        ),
    ),
    (
        lambda student, teacher: not farskip_layers(student),
        lambda student, teacher: (
            f"{_name(student)}: has no rewired layer; there is nothing to calibrate"
        ),
    ),
)
"""Of a student and its teacher."""


def text_of_rank(rows: Sequence[Any], model: Any, ranks: Ranks) -> Text:
    """Return this rank's share of the rows, which is empty where there are fewer batches
    than ranks.

    Raises:
        UserError: ids outside the model's vocabulary; fewer distinct tokens than four
            times its width; packed examples that the model cannot keep apart.
    """
    text = Text.of(batches_of(rows), ranks)

    def accept() -> None:
        refuse(*_text_rules(text, model.config.get_text_config()))
        for batch in text.batches:
            refuse_packing(model, batch["labels"], batch["position_ids"])

    # Each rank looks at its own share; `share` raises on all ranks if one of them does.
    ranks.share(accept)
    return text


def _text_rules(text: Text, config: Any) -> list[Rule]:
    """Return what a rank's share of the rows may not be."""
    ids = torch.cat(
        [batch["input_ids"].flatten() for batch in text.batches] or [torch.zeros(1)]
    )
    outside = ids[(ids < 0) | (ids >= config.vocab_size)]
    least = 4 * config.hidden_size
    return [
        (
            len(outside),
            lambda: (
                "calibration text: has the token id"
                f" {int(outside[outside.abs().argmax()])}, but the model has"
                f" {config.vocab_size} tokens; make the rows with the model's own"
                " tokenizer"
            ),
        ),
        # Residuals do not show this: on few different tokens they are small, and the KL
        # is not (docs/decisions.md).
        (
            text.num_distinct < least,
            f"calibration text: {text.num_distinct} distinct tokens of"
            f" {text.num_tokens} in all (a repeated example adds none); calibration"
            f" needs at least {least} distinct tokens (4 x hidden size): give more text,"
            " or use more of it (--tokens; in a recipe calibration.tokens)",
        ),
    ]


def complaint(results: Sequence[dict[str, Any]]) -> tuple[bool, str] | None:
    """Return whether the text is too little or too uniform to use the result, and a
    message about it; None if the text is good enough.

    The sum over all layers of residuals on held-out text decides (docs/decisions.md):
    if the inputs' residuals grow, or the outputs' double, the model is hardly better,
    or no better, than with copied weights. In small models the residual of the outputs
    grows a little with any text.
    """

    def total(column: int, *, adds: bool) -> float:
        pairs = (
            pair
            for result in results
            for name, pair in result["held_out"].items()
            if (name == "adds") is adds
        )
        return sum(pair[column] for pair in pairs)

    # A residual above `usual` times the residual without maps is reported; above
    # `limit` times it, the result is refused.
    for adds, usual, limit in ((False, 1.0, 1.0), (True, FITS_THE_SAMPLE, _RULED_OUT)):
        copied, mapped = total(0, adds=adds), total(1, adds=adds)
        if mapped > usual * copied:
            return (
                mapped > limit * copied,
                (
                    "calibration text: is too short or too uniform: on held-out text,"
                    f" the {'outputs' if adds else 'inputs'} of rewired layers differ from"
                    f" the original's by {mapped:.3g} with the maps and by"
                    f" {copied:.3g} without (relative squared error, all layers), so"
                    " the model may become worse; give more text, or more varied text"
                ),
            )
    return None


def shown(result: dict[str, Any]) -> str:
    """Format the residuals of one layer's inputs, before and after its maps, in a few
    words for the bar; the manifest has all.
    """
    parts = [
        f"{name} {copied:.2f}>{mapped:.2f}"
        for name, (copied, mapped) in result["reads"].items()
        if "." not in name  # the parts of a block would leave no room for a bar
    ]
    return f"layer {result['layer']}: " + ", ".join(parts)
