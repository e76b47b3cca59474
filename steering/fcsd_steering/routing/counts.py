"""Run a model over batches and read its routers' choices for each.

Not covered: image tokens in families with separate experts for them.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fcsd.base.text import progress_bar
from fcsd.model.families.choices import Routed, recording
from fcsd.parallel.launch import Ranks, input_device

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
    """Run a model in eval mode on batches (input_ids, attention_mask), each on the rank
    to which it is dealt.

    read: called with each router's choices for the tokens that are not padding, and
    with the batch; its results are returned in the order of the batches, on all ranks.
    begin: called with the number of a batch before it is run. bar: name of the progress
    bar.
    """
    # The logits over the vocabulary would be the largest tensor of the run, and are not
    # needed.
    parameters: Any = inspect.signature(model.forward).parameters
    options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    device = input_device(model)
    num_batches = len(ranks.deal(batches))
    with (
        recording(model) as recorded,
        progress_bar(
            total=num_batches,
            desc=bar,
            unit="batch",
            shown=bar is not None and ranks.first,
            leave=False,
        ) as progress,
    ):

        def run(batch: Mapping[str, Tensor]) -> Read:
            inputs = {name: value.to(device) for name, value in batch.items()}
            with torch.no_grad():
                model(**inputs, use_cache=False, **options)
            routed = recorded.take()
            if (mask := inputs.get("attention_mask")) is not None:
                is_token = mask.reshape(-1).bool()
                routed = [
                    Routed(
                        experts[is_token.to(experts.device)],
                        logits[is_token.to(logits.device)],
                    )
                    for experts, logits in routed
                ]
            progress.update()
            return read(routed, batch)

        # Ranks with fewer batches run the first one again: the layers of sharded models
        # need all ranks.
        def idle() -> None:
            begin(0)
            run(batches[0])

        with ranks.sharing(batches, idle) as share:
            for number, batch in share.items:
                begin(number)
                share.results.append(run(batch))
        return share.results
