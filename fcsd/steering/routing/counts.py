"""Run a model over batches and read what its routers did with every one.

Not covered: tokens of images in families that have experts of their own for them.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fcsd.base.text import progress_bar
from fcsd.model.families.choices import Routed, recording
from fcsd.parallel.ranks import Ranks, input_device

Read = TypeVar("Read")


def read_batches(
    model: nn.Module,
    batches: Sequence[Mapping[str, Tensor]],
    read: Callable[[list[Routed], Mapping[str, Tensor]], Read],
    *,
    ranks: Ranks,
    begin: Callable[[int], object] = lambda number: None,
    bar: str | None = None,
) -> list[Read]:
    """Run a model, in eval mode, on batches (input_ids, attention_mask), each on the
    rank that it is dealt to.

    read: is given what each router did with the tokens that are not padding, and the
    batch; what it gives of every batch is returned in order, on all ranks. begin: is
    told the number of the batch before it is run. bar: its name.
    """
    # The logits of all tokens over the vocabulary would be the largest tensor of the
    # run; nobody reads them.
    parameters: Any = inspect.signature(model.forward).parameters
    options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    device = input_device(model)
    own = len(ranks.deal(batches))
    with (
        recording(model) as recorded,
        progress_bar(
            total=own,
            desc=bar,
            unit="batch",
            shown=bar is not None and ranks.first,
            leave=False,
        ) as shown,
    ):

        def run(number: int, batch: Mapping[str, Tensor]) -> Read:
            begin(number)
            inputs = {name: value.to(device) for name, value in batch.items()}
            with torch.no_grad():
                model(**inputs, use_cache=False, **options)
            routed = recorded.take()
            if (mask := inputs.get("attention_mask")) is not None:
                kept = mask.reshape(-1).bool()
                routed = [
                    Routed(
                        experts[kept.to(experts.device)], logits[kept.to(logits.device)]
                    )
                    for experts, logits in routed
                ]
            shown.update()
            return read(routed, batch)

        return ranks.each(batches, run, lambda: run(0, batches[0]))
