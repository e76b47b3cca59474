"""Cut a model into the stages of a pipeline, and compute the time of Megatron's other
communication: between tensor-parallel ranks, and from stage to stage.

A step of m micro-batches takes m + p - 1 times as long as one of them in the slowest of
p stages (1F1B, not interleaved). A layer has an all-reduce after attention and after a
dense MLP or shared expert, forward and backward; sequence parallelism sends the same
bytes in two halves. Routed experts are not split between tensor-parallel ranks.

Not covered: interleaved stages, DualPipe; context parallelism; communication of this
kind that engines overlap with matmuls.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from fcsd.parallel.overlap.schedule import LayerFacts
from fcsd.planning.cost.operations import ModelWork, Work
from fcsd.planning.cost.roofline import Roofline

Stage = tuple[int, int]
"""The first layer of a stage, and the first layer of the next stage."""


def stages_of(num_layers: int, number: int) -> list[Stage]:
    """Return the stages, as equal as possible; earlier ones have one layer more."""
    least, remainder = divmod(num_layers, number)
    sizes = [least + (k < remainder) for k in range(number)]
    return list(pairwise(accumulate(sizes, initial=0)))


def stage_work(work: ModelWork, stage: Stage) -> ModelWork:
    """Return the work of a stage: the first has the embeddings, the last the head."""
    first, end = stage
    layers, last = work.layers[first:end], end == len(work.layers)
    experts = sum(layer.work("experts").weights for layer in layers if layer.moe)
    of_layers = [
        sum(step.weights for step in layer.steps.values()) for layer in work.layers
    ]
    weights = sum(of_layers[first:end]) + work.head.weights * last
    if first == 0:  # embeddings, norms and biases
        weights += max(0, work.num_parameters - sum(of_layers) - work.head.weights)
    return replace(
        work,
        layers=layers,
        head=work.head if last else Work(),
        num_parameters=weights,
        num_expert_parameters=experts,
    )


def stage_facts(
    facts: Sequence[LayerFacts | None], stage: Stage
) -> list[LayerFacts | None]:
    """Return the facts of a stage's layers: no combine is in flight between stages."""
    chosen = list(facts[slice(*stage)])
    if chosen[0] is not None:
        chosen[0] = replace(chosen[0], incoming=False)
    if chosen[-1] is not None:
        chosen[-1] = replace(chosen[-1], outgoing=False)
    return chosen


def tensor_parallel_s(roofline: Roofline, work: ModelWork) -> float:
    """Return the seconds in which tensor-parallel ranks send to each other in one
    pass.
    """
    if roofline.tensor_parallel == 1:
        return 0.0
    number = sum(
        layer.branches - (layer.moe and not layer.work("shared expert").weights)
        for layer in work.layers
    )
    return number * roofline.all_reduce(work)


def sends_s(roofline: Roofline, work: ModelWork, num_stages: int) -> float:
    """Return the seconds in which a micro-batch goes to the next stage and its gradient
    comes back; each tensor-parallel rank sends its part.
    """
    if num_stages == 1:
        return 0.0
    stream = work.tokens * work.hidden_size * roofline.value_bytes
    apart = roofline.machine.num_gpus // num_stages
    return 2 * roofline.send(stream / roofline.tensor_parallel, apart)
