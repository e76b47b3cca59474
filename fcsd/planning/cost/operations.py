"""Count the operations of a model's layers by submodule, in one forward pass of each
kind of layer, without storage.

The model is built on the meta device and run on tensors without storage; of equal
layers only the first is run. The running module tells the step of
`fcsd.parallel.overlap.schedule`: attention before its core ("attention a"), the core,
the rest of attention ("attention b"), router, experts, shared expert, a dense layer's
MLP, the head.

An engine's sparse attention (DeepSeek-V3.2, GLM-5) counts the pairs that its indexer
selects, and the indexer's scores, which every tensor-parallel rank computes. In a
training transformers' code computes all pairs.

Not covered: operations other than matmuls (`fcsd.planning.cost.roofline` counts passes
over memory for them); attention in chunks, which counts as a window of their size;
sparse attention over blocks or compressed keys (MiniMax-M3, DeepSeek-V4, Qwen 4), and
that an engine's sparse attention computes in the latent space, with up to 3.4 times as
many operations for each pair.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.base.errors import UserError
from fcsd.model.connectivity.stack import decoder_layers, is_one_of
from fcsd.model.families import (
    Family,
    expert_counts,
    expert_groups,
    row_width,
    text_config,
)
from fcsd.model.families.structure import output_head
from fcsd.model.inspect.memory import attention_windows, selected_tokens
from fcsd.planning.cost.tracker import Interposed, Tracker, counting, give_fake_storage

WHOLE = ", whole"
"""Suffix for work that every tensor-parallel rank does in full: MLA's projections to
the latents.
"""
INDEXER = "indexer"
"""Module that selects the tokens of sparse attention, and the work of its scores."""
_LATENT = ("q_a_proj", "kv_a_proj", "kv_a_proj_with_mqa")


@dataclass(frozen=True)
class Work:
    """FLOPs of the matmuls in one step of a layer, and the number of weight elements it
    reads.
    """

    flops: float = 0.0
    weights: int = 0


@dataclass(frozen=True)
class LayerWork:
    """One layer's work by step.

    scores: elements of softmax(QKᵀ). core: FLOPs of the core's two matmuls, over all
    pairs; 0 where attention has no separate core before which an exchange could start.
    causal: a mask leaves out half of the pairs. in_window: share of the other half that
    a sliding window or sparse attention keeps. cache_bytes: keys and values of earlier
    tokens that a rank reads. index: FLOPs of the scores by which sparse attention
    selects, over all pairs; index_bytes: the keys that they read. experts_run: FLOPs of
    the experts as the family's own code runs them; the step "experts" counts only the
    chosen experts of each token. one_branch: the layer is attention, or another mixer,
    or an MLP.
    """

    moe: bool
    steps: dict[str, Work]
    core: float = 0.0
    scores: float = 0.0
    causal: bool = True
    in_window: float = 1.0
    cache_bytes: float = 0.0
    index: float = 0.0
    index_bytes: float = 0.0
    experts_run: float = 0.0
    one_branch: bool = False

    @property
    def branches(self) -> int:
        """The number of norms, and of sums over tensor-parallel ranks."""
        return 1 if self.one_branch else 2

    @property
    def core_left(self) -> float:
        """FLOPs of the core over the pairs that the mask keeps."""
        return self.core / 2 * self.in_window if self.causal else self.core

    @property
    def index_left(self) -> float:
        """FLOPs of an indexer's scores over the pairs that the mask keeps."""
        return self.index / 2 if self.causal else self.index

    def work(self, name: str) -> Work:
        """Return a step's work; empty where the layer has no such step."""
        return self.steps.get(name, Work())


@dataclass(frozen=True)
class ModelWork:
    """The work of a forward pass of (num_rows, num_tokens), layer by layer, and the
    sizes that exchanges depend on.

    row_width: elements of a row sent to an expert. expert_groups: see
    `fcsd.model.families.expert_groups`.
    """

    layers: tuple[LayerWork, ...]
    head: Work
    num_rows: int
    num_tokens: int
    hidden_size: int
    row_width: int
    num_experts: int
    experts_per_token: int
    num_parameters: int
    num_expert_parameters: int
    expert_groups: tuple[int, int] = (1, 1)

    @property
    def tokens(self) -> int:
        """Tokens of the pass."""
        return self.num_rows * self.num_tokens

    @property
    def flops(self) -> float:
        """FLOPs of the matmuls that the model needs: chosen experts, and attention on
        all pairs that the mask keeps.
        """
        layers = sum(
            sum(step.flops for step in layer.steps.values())
            + layer.core_left
            + layer.index_left
            for layer in self.layers
        )
        return layers + self.head.flops

    @property
    def runs_all(self) -> bool:
        """Whether the family's own code runs every expert on every token; ranks that
        share experts run only the chosen ones.
        """
        # With 1 % of tolerance: running all experts takes E / K times as many FLOPs.
        rows = self.experts_per_token * self.tokens / self.num_experts
        return any(
            layer.experts_run > 1.01 * 2 * rows * layer.work("experts").weights
            for layer in self.layers
        )

    @property
    def moe(self) -> list[bool]:
        """True for each MoE layer."""
        return [layer.moe for layer in self.layers]


@dataclass
class _Seen:
    """Values that the hooks of one layer recorded."""

    weights: Counter[str] = field(default_factory=Counter)
    core: float = 0.0
    scores: float = 0.0


def trace_layers(
    build: Callable[[], Any],
    family: Family,
    where: str,
    num_rows: int,
    num_tokens: int,
    *,
    served: bool = False,
) -> ModelWork:
    """Run one forward pass of a regular model and count the operations of each layer.

    build: makes the model; called on the meta device. served: an engine runs the model,
    whose attention is a fused kernel even where transformers' code of the family has
    only eager attention.

    Raises:
        UserError: no MoE layer; a family whose layers cannot be followed without data.
    """
    with torch.device("meta"):
        model: Any = build()
    nn.Module.to(model, torch.bfloat16).eval().requires_grad_(False)
    model.config.use_cache = False
    stack = decoder_layers(model, family)
    config = text_config(model.config, family)
    if served and config._attn_implementation == "eager":
        config._attn_implementation = "sdpa"
    num_experts, top_k = expert_counts(config)
    if (
        not any(_is_moe(layer, family) for layer in stack)
        or not num_experts
        or not top_k
    ):
        raise UserError(
            f"{where}: has no MoE layer, so there is no exchange to overlap"
        )
    # Only the first layer of each kind runs its own code; equal layers pass their input
    # on and share its counts.
    tracker, kinds = Tracker(), _kinds(stack, config)
    selected = selected_tokens(config)
    records = {first: _Seen() for first in kinds.values()}
    for k, layer in enumerate(stack):
        if kinds[k] == k:
            _name_steps(layer, family, tracker, f"{k} ", records[k])
            if served and k < len(selected) and selected[k]:
                _name_indexer(layer, tracker, f"{k} ")
        else:
            layer.forward = _as_if_run(stack[kinds[k]])
    head = output_head(model)
    tracker.counts_as(head, "head")
    subject = f"{where}: a layer of {family.model_type}"
    with torch.no_grad(), counting(tracker, _core(tracker, records), subject):
        give_fake_storage(model)
        ids = torch.zeros((num_rows, num_tokens), dtype=torch.long)
        model(input_ids=ids, use_cache=False)
    flops = {name: sum(by.values()) for name, by in tracker.flops.items()}
    tokens = num_rows * num_tokens
    # Even routing: imbalance is an assumption of the roofline, not of the work.
    rows = top_k * tokens / num_experts
    windows = seen_tokens(config) if served else attention_windows(config)
    layers = {
        k: replace(
            _layer_work(stack[k], family, k, flops, records[k], rows),
            in_window=_in_window(windows[k] if k < len(windows) else None, num_tokens),
        )
        for k in records
    }
    return ModelWork(
        layers=tuple(layers[kinds[k]] for k in range(len(stack))),
        head=Work(flops.get("head", 0.0), head.weight.numel()),
        num_rows=num_rows,
        num_tokens=num_tokens,
        hidden_size=head.in_features,
        row_width=row_width(config),
        num_experts=num_experts,
        experts_per_token=top_k,
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_expert_parameters=sum(_size(_experts(layer, family)) for layer in stack),
        expert_groups=expert_groups(config),
    )


def seen_tokens(config: Any) -> list[int | None]:
    """Return the tokens that an engine's attention reads at most for each query, layer
    by layer; None: all.
    """
    both = zip(attention_windows(config), selected_tokens(config), strict=True)
    return [window or selected for window, selected in both]


def index_key_bytes(config: Any) -> float:
    """Return the bytes of a token's key with which an indexer scores: in FP8 with a
    scale of four bytes for 128 numbers, as vLLM 0.32 and SGLang 0.5.23 cache it.
    """
    return float(getattr(config, "index_head_dim", 0)) * (1 + 4 / 128)


def _in_window(window: int | None, num_tokens: int) -> float:
    """Return the share of a row's causal pairs that a sliding window keeps."""
    seen = min(num_tokens, window or num_tokens)
    # The first `seen` tokens see all tokens before them, the others only that many.
    pairs = seen * (seen + 1) / 2 + (num_tokens - seen) * seen
    return pairs / (num_tokens * (num_tokens + 1) / 2)


def as_run(work: ModelWork) -> ModelWork:
    """Return the work of a rank that has all experts and runs them with the family's
    own code.
    """
    if not work.runs_all:
        return work

    def run(layer: LayerWork) -> LayerWork:
        if not layer.moe:
            return layer
        experts = replace(layer.work("experts"), flops=layer.experts_run)
        return replace(layer, steps=layer.steps | {"experts": experts})

    return replace(work, layers=tuple(map(run, work.layers)))


def part_of(work: ModelWork, tokens: int) -> ModelWork:
    """Return the work of a part of a pass's tokens, with the same share of the core of
    attention; it reads the same weights.
    """
    share = tokens / work.tokens

    def part(step: Work) -> Work:
        return replace(step, flops=step.flops * share)

    layers = (
        replace(
            layer,
            steps={name: part(step) for name, step in layer.steps.items()},
            core=layer.core * share,
            scores=layer.scores * share,
            cache_bytes=layer.cache_bytes * share,
            index=layer.index * share,
            index_bytes=layer.index_bytes * share,
            experts_run=layer.experts_run * share,
        )
        for layer in work.layers
    )
    return replace(
        work,
        layers=tuple(layers),
        head=part(work.head),
        num_rows=1,
        num_tokens=tokens,
    )


def _is_moe(layer: Any, family: Family) -> bool:
    return is_one_of(getattr(layer, family.moe), family.moe_block)


def _experts(layer: Any, family: Family) -> Any:
    """Return the module of a layer's routed experts: the first module named `experts`
    in its MoE block, or the whole block.
    """
    if not _is_moe(layer, family):
        return None
    block = getattr(layer, family.moe)
    named = (
        module
        for name, module in block.named_modules()
        if name.rpartition(".")[2] == "experts"
    )
    return next(named, block)


def _size(module: Any) -> int:
    return sum(p.numel() for p in module.parameters()) if module is not None else 0


def _kinds(stack: Any, config: Any) -> dict[int, int]:
    """Map each layer to the first equal layer: same class, same parameter shapes, same
    kind of attention.
    """
    types = getattr(config, "layer_types", None) or [None] * len(stack)
    first: dict[Any, int] = {}
    return {
        k: first.setdefault(
            (
                type(layer),
                types[k],
                tuple((name, p.shape) for name, p in layer.named_parameters()),
            ),
            k,
        )
        for k, layer in enumerate(stack)
    }


def _as_if_run(like: Any) -> Callable[..., Any]:
    """Return a forward pass that returns its input in the form of the executed layer's
    output.
    """

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = like.farskip_form
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

    return forward


def _name_steps(
    layer: Any, family: Family, tracker: Tracker, prefix: str, record: _Seen
) -> None:
    """Make the tracker count a layer's operations under the names of its steps."""
    tracker.counts_as(layer, prefix + "attention a")
    layer.register_forward_hook(
        lambda module, _, out: module.__dict__.update(farskip_form=out)
    )
    # A layer without experts computes a dense MLP, or, where each layer is one branch,
    # another mixer; in an MoE block everything outside routed and shared experts counts
    # as router.
    block, experts = getattr(layer, family.moe), _experts(layer, family)
    mixes = family.mlp_block is not None and not is_one_of(block, family.mlp_block)
    if experts is not block and not (experts is None and mixes):

        def enter(*_: Any) -> None:
            tracker.kind = prefix + ("mlp" if experts is None else "router")

        block.register_forward_pre_hook(enter)
    if experts is not None:
        tracker.counts_as(experts, prefix + "experts")
        for owner, name in ((block, family.block_shared), (layer, family.layer_shared)):
            if name and getattr(owner, name, None) is not None:
                tracker.counts_as(getattr(owner, name), prefix + "shared expert")
    # Matrices only: no matmul reads norms and biases.
    for name, module in layer.named_modules():
        if name.rpartition(".")[2] in _LATENT:
            tracker.counts_as(module, prefix + "attention a" + WHOLE)
        weight_elements = sum(
            p.numel() for p in module.parameters(recurse=False) if p.ndim > 1
        )
        if weight_elements:
            module.register_forward_pre_hook(
                lambda *_, weight_elements=weight_elements: record.weights.update(
                    {tracker.kind.removeprefix(prefix): weight_elements}
                )
            )


def _name_indexer(layer: Any, tracker: Tracker, prefix: str) -> None:
    """Count an indexer's projections as work that every tensor-parallel rank does in
    full (in vLLM and SGLang they are replicated), and its scores by themselves.
    """
    for name, module in layer.named_modules():
        if name.rpartition(".")[2] == INDEXER:
            tracker.counts_as(module, prefix + INDEXER)
        elif f".{INDEXER}." in name:
            tracker.counts_as(module, prefix + "attention a" + WHOLE)


def _core(tracker: Tracker, records: dict[int, _Seen]) -> Interposed:
    """Record the core of attention instead of running it; operations after it count as
    attention b.
    """

    def core(
        query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        k, _, step = tracker.kind.partition(" ")
        if step.startswith("attention"):
            record = records[int(k)]
            heads = query.shape[1]
            record.scores += query.shape[0] * heads * query.shape[2] * key.shape[2]
            # QKᵀ and the weighted sum of values, two operations for each element.
            record.core = 2.0 * record.scores * (query.shape[-1] + value.shape[-1])
            tracker.kind = f"{k} attention b"
        return query.new_empty((*query.shape[:-1], value.shape[-1]))

    return Interposed(core)


def _layer_work(
    layer: Any,
    family: Family,
    k: int,
    flops: dict[str, int],
    record: _Seen,
    rows_per_expert: float,
) -> LayerWork:
    names = {
        name.removeprefix(f"{k} ") for name in flops if name.startswith(f"{k} ")
    } | set(record.weights)
    steps = {
        name: Work(float(flops.get(f"{k} {name}", 0)), record.weights[name])
        for name in names
    }
    run = 0.0
    if (experts := _experts(layer, family)) is not None:
        # Some families run all experts on all tokens; tokens are dispatched only to the
        # experts they chose.
        chosen = 2.0 * rows_per_expert * _size(experts)
        run = steps["experts"].flops or chosen
        steps["experts"] = Work(min(run, chosen), _size(experts))
    index = steps.pop(INDEXER, Work())
    return LayerWork(
        _is_moe(layer, family),
        steps,
        record.core,
        record.scores,
        index=index.flops,
        experts_run=run,
        one_branch=family.layout == "blocks",
    )
