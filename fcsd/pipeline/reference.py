"""The original, against which the models of a recipe are measured on held-out text,
beside their scores.

Not covered: the divergence itself (`fcsd.training.losses.heldout_kl`).
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from fcsd.base.memory import free_memory
from fcsd.data.config import DataConfig
from fcsd.data.counts import tell_examples
from fcsd.data.dataset import heldout_fingerprint, heldout_rows
from fcsd.data.rows import PackedRows
from fcsd.evaluation.stage import Measure
from fcsd.model.load import ModelFolder
from fcsd.parallel.launch import Launch
from fcsd.parallel.place import load_for_evaluation
from fcsd.training.losses.heldout_kl import OriginalOutputs, mean_kl, read_original


@dataclass(frozen=True)
class Reference:
    """The original of a recipe and its held-out text.

    The original's outputs are computed once for all evaluations that share the
    reference, and stay in main memory between them, because every evaluation needs all
    of them.
    """

    original: ModelFolder
    data: DataConfig
    _known: list[tuple[Any, OriginalOutputs]] = field(
        default_factory=list, repr=False, compare=False
    )

    def settings(self) -> dict[str, Any]:
        """Return the settings of the held-out text, for the manifest."""
        text = {"heldout", "heldout_examples", "max_length", "packing", "loss_on"}
        return {"data": self.data.model_dump(mode="json", include=text)}

    def inputs(self) -> dict[str, Any]:
        """Return the fingerprints of the original and of the held-out text."""
        heldout = heldout_fingerprint(self.data.heldout)
        return self.original.fingerprints("original") | heldout

    def measure(self, tokenizer: Any, launch: Launch) -> Measure | None:
        """Return the function that measures a model; None without held-out text. All
        ranks call this, before the model is loaded.
        """
        rows = heldout_of(self.data, tokenizer, self.original)
        if rows is None:
            return None
        original_outputs = self.read(rows, launch)

        def kl(loaded: PreTrainedModel) -> dict[str, Any]:
            divergence = mean_kl(original_outputs, loaded, rows, ranks=launch.ranks)
            original_outputs.head.cpu()  # off the device, where the next model needs the space
            return {"kl_to_original": divergence}

        return kl

    def read(self, rows: Any, launch: Launch) -> OriginalOutputs:
        """Return the original's outputs on held-out text. All ranks call this."""
        if not any(_same_rows(rows, known_rows) for known_rows, _ in self._known):
            if launch.first:
                tell_examples(rows, "held-out text", always=False)
            # The original is freed before the next model is loaded: a device may not
            # hold both.
            original_outputs = read_original(
                load_for_evaluation(self.original, launch), rows, ranks=launch.ranks
            )
            free_memory()
            self._known[:] = [(rows, original_outputs)]
        return self._known[0][1]


def heldout_of(data: DataConfig, tokenizer: Any, original: ModelFolder) -> Any:
    """Return the rows (`PackedRows`) on which the KL to the original is measured; None
    if there are none.
    """
    if data.heldout is None:
        return None
    return heldout_rows(
        data.heldout,
        tokenizer,
        num_examples=data.heldout_examples,
        max_length=data.max_length,
        packing=data.packing,
        loss_on=data.loss_on,
        vocab_size=original.vocab_size,
    )


def _same_rows(rows: PackedRows, other_rows: PackedRows) -> bool:
    return len(rows) == len(other_rows) and all(
        np.array_equal(value, other_rows[number][name])
        for number in range(len(rows))
        for name, value in rows[number].items()
    )
