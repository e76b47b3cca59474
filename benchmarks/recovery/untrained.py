"""A model before any distillation: its teacher's loss, and the KL of rewired
selections, copied and calibrated.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fcsd.base.files import write_json
from fcsd.data.batches import in_batches, next_token_targets
from fcsd.data.dataset import heldout_rows
from fcsd.model.load import find_model, load_checkpoint, load_tokenizer
from fcsd.parallel.launch import join_launch
from fcsd.planning.layers.settings import KL, Study
from fcsd.planning.layers.study import measuring
from fcsd.recipe.recipe import Recipe

TOKENS = 8_192  # of the text to calibrate on


def measure_untrained(recipe: Recipe, path: Path) -> None:
    """Leave in `path` what the pre-trained model of `recipe` is worth and what rewiring
    costs it, unless it is there.

    `teacher_ce` is its cross-entropy on the held-out text, `kl` has for each selection
    the KL to it with copied and with calibrated weights, nats a token; `first` is the
    first layer alone, `but-N` all but the first N.
    """
    if path.is_file():
        return
    teacher = find_model(
        recipe.model.model_copy(
            update={"path": str(recipe.folder / "pretrain" / "model")}
        )
    )
    plan = Study(
        model=teacher.config,
        text=recipe.data.heldout,
        text_examples=recipe.data.heldout_examples,
        max_length=recipe.data.max_length,
        calibrated=recipe.data.train[0],
        calibration_tokens=TOKENS,
    )
    num_layers = teacher.load_config().num_hidden_layers
    kl: dict[str, dict[str, float]] = {}
    with measuring(plan, teacher, join_launch()) as measure:
        for name, layers in selections(num_layers):
            kl[name] = {
                which: measure(layers, which == "calibrated").values[KL]["value"]
                for which in ("copied", "calibrated")
            }
            print(f"untrained {path.parent.name}: {name} {kl[name]}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        path,
        {
            "num_layers": num_layers,
            "teacher_ce": _cross_entropy(recipe, teacher),
            "kl": kl,
        },
    )


def selections(num_layers: int) -> Iterator[tuple[str, list[int]]]:
    """All layers, the first alone, and all but the first one, two and three."""
    yield "all", list(range(num_layers))
    yield "first", [0]
    for left_out in range(1, min(4, num_layers)):
        yield f"but-{left_out}", list(range(left_out, num_layers))


@torch.no_grad()
def _cross_entropy(recipe: Recipe, teacher: Any) -> float:
    model = load_checkpoint(teacher).eval()
    rows = heldout_rows(
        recipe.data.heldout,
        load_tokenizer(teacher.folder),
        num_examples=recipe.data.heldout_examples,
        max_length=recipe.data.max_length,
        packing=recipe.data.packing,
        loss_on=recipe.data.loss_on,
    )
    total, count = 0.0, 0
    for batch in in_batches(rows, 8):
        keep, targets = next_token_targets(batch["labels"], batch["position_ids"])
        logits = model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"]
        ).logits
        total += float(
            nn.functional.cross_entropy(logits[keep].float(), targets, reduction="sum")
        )
        count += len(targets)
    return total / count
