"""Compute the seconds of a layer's steps and exchanges from operations, published
figures and assumptions.

Not covered: contention on links, launches of kernels, the host's work; anything that
only a profiler shows.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fcsd.planning.cost.assumptions import ALL_REDUCES, ASSUMPTIONS
from fcsd.planning.cost.collectives import Way, fused_below, published
from fcsd.planning.cost.machine import Machine
from fcsd.planning.cost.operations import WHOLE, LayerWork, ModelWork, Work
from fcsd.planning.cost.stored import BFLOAT16, Precision, Stored
from fcsd.planning.network.simulate import Payload, rows_per_token, simulate

Rows = Literal["rank", "node", "expert", "all"]
"""Where a token sends rows: to each rank that has any of its experts (fcsd's training);
to each node of those ranks, and from there to each rank; to each expert (Megatron's
all-to-all, low-latency kernels); to all ranks, which gather every token.
"""

KERNELS = {
    "attention a": (1, 3),
    "attention b": (1, 0),
    "router": (1, 5),
    "experts": (2, 3),
    "shared expert": (2, 1),
    "mlp": (2, 2),
    "arrive": (0, 1),
}
"""Matmuls of a layer's steps in a server, as engines fuse them, and other kernels: norm,
rotary embedding and norms of heads, cache; norm, top k, sorting; activation, rows in
and out; and so on. With attention and two all-reduces 21 for a layer of Qwen3-30B-A3B,
of which 1,065 were captured for 48 layers (sgl-project/sglang-omni 760).
"""

LATENT = {"attention a": (2, 1), "attention b": (1, 0)}
"""Kernels that latent attention (MLA) has in addition: queries and keys into the latent
space and out of it, the norms of the latents.
"""

INDEXED = (2, 3)
"""Kernels of "attention a" that an indexer has in addition: its queries, and its keys
with the weights of its heads; the keys' norm and rotary embedding, the queries', cache
(vLLM 0.32, `Indexer` of models/deepseek_v2.py). Its scores are one more, and the choice
of the largest another.
"""

QUANTISED = ("attention a", "attention b", "experts", "shared expert", "mlp")
"""Steps with one more kernel that quantises activations for matmuls in FP8."""

PAIR_BYTES = 8
"""Bytes that travel with a row for each (token, expert) pair: the expert's index and
weight.
"""


@dataclass(frozen=True)
class Roofline:
    """A model of the time that work takes on a machine.

    stored: the weights in memory, and the dtype of the matmuls. fused: attention is one
    kernel that skips the pairs that a causal mask excludes; else batched matmuls with
    the scores in memory. tensor_parallel: ranks that share each layer. rows: where a
    token is sent. sequence_parallel: as Megatron trains: outside of attention, dense
    MLPs and shared experts, each tensor-parallel rank has its own part of the tokens,
    and its experts whole. reduced: work whose all-reduces have an assumed duration;
    None: there is none. served: a step runs as a captured graph, whose kernels take
    `matmul_us`, `core_us` and `kernel_us` at least.
    """

    machine: Machine
    stored: Stored = BFLOAT16
    fused: bool = True
    tensor_parallel: int = 1
    rows: Rows = "rank"
    sequence_parallel: bool = False
    reduced: ModelWork | None = None
    served: bool = False

    def assuming(self, values: Mapping[str, float]) -> "Roofline":
        """Return this roofline with other values of some assumptions."""
        return replace(self, machine=self.machine.assuming(values))

    @property
    def values(self) -> Mapping[str, float]:
        """Values of the assumptions."""
        return self.machine.values

    @property
    def token_ranks(self) -> int:
        """Number of tensor-parallel ranks that divide the tokens of the stream."""
        return self.tensor_parallel if self.sequence_parallel else 1

    @property
    def value_bytes(self) -> int:
        """Bytes of an activation."""
        return 4 if self.stored.precision == "float32" else 2

    def peak(self, precision: Precision) -> float:
        """Return the GPU's published FLOPs a second."""
        gpu = self.machine.gpu
        if precision == "float32":
            return gpu.float32_tflops * 1e12
        return (
            (gpu.fp8_tflops if precision == "fp8" else None) or gpu.bf16_tflops
        ) * 1e12

    @property
    def gap(self) -> float:
        """Seconds of a server's step outside of its kernels."""
        return self.values["gap_us"] / 1e6

    @property
    def bytes_per_s(self) -> float:
        """Bytes a second that a kernel reads or writes."""
        return self.machine.gpu.memory_gb_s * 1e9 * self.values["hbm"]

    def matmul(self, work: Work, share: str, ranks: int, read: float = 1.0) -> float:
        """Return the seconds of matmuls: the computation or the reading of the weights,
        whichever takes longer.

        share: name of the assumption for the share of the peak. ranks: number of ranks
        that split the work. read: fraction of the weights that is read.
        """
        is_experts, stored = share == "grouped", self.stored
        # Servers' FP8 kernels for the experts are much further from their peak; in a
        # training, DeepGEMM's reach 1,288 of 1,979 TFLOPS (its README, 8 groups).
        if is_experts and stored.precision == "fp8" and self.served:
            share = "fp8_grouped"
        width = stored.experts if is_experts else stored.others
        peak = self.peak(stored.precision_of(width))
        computing = work.flops / (peak * self.values[share])
        reading = work.weights * read * width / self.bytes_per_s
        return max(computing, reading) / ranks

    def passes(self, number: float, elements: float) -> float:
        """Return the seconds of reading or writing `elements` values `number` times."""
        return number * elements * self.value_bytes / self.bytes_per_s

    def core(self, layer: LayerWork) -> float:
        """Return the seconds of attention between its projections."""
        precision = self.stored.precision
        peak = self.peak("bfloat16" if precision == "fp8" else precision)
        ranks = self.tensor_parallel
        reading = layer.cache_bytes / self.bytes_per_s
        if self.fused:
            # A fused kernel skips the pairs that the mask excludes.
            pairs = layer.core_left
            return max(pairs / (peak * self.values["fused_core"]) / ranks, reading)
        # Without a fused kernel the scores go through memory, and all pairs are
        # computed.
        scores = self.passes(self.values["score_passes"], layer.scores) / ranks
        return max(layer.core / (peak * self.values["core"]) / ranks, reading) + scores

    def layers(self, model: ModelWork, expert_parallel: int) -> list[dict[str, float]]:
        """Return the seconds of the steps of every layer."""
        return [self.steps(model, layer, expert_parallel) for layer in model.layers]

    def steps(
        self, model: ModelWork, layer: LayerWork, expert_parallel: int
    ) -> dict[str, float]:
        """Return the seconds of a layer's steps in the forward pass, by the names of
        `fcsd.parallel.overlap.schedule`.

        expert_parallel: ranks that share the experts, each with its own tokens; 1 in
        serving, whose tensor-parallel ranks have the same tokens.

        Sorting rows before the dispatch counts as "router", sorting around the experts
        as "experts", and summing the returned rows as "arrive" of the next layer.
        """
        matmuls_and_others = self.parts(model, layer, expert_parallel)
        seconds = {name: sum(both) for name, both in matmuls_and_others.items()}
        seconds["attention a"] += indexer_s(self, layer)
        seconds["attention b"] += self.served_core(layer)
        return seconds

    def served_core(self, layer: LayerWork) -> float:
        """Return the seconds of attention between its projections; in a server, those
        of a kernel at least.
        """
        attends = any(name.startswith("attention") for name in layer.steps)
        least_s = self.values["core_us"] / 1e6 if self.served and attends else 0.0
        return max(self.core(layer), least_s)

    def parts(
        self, model: ModelWork, layer: LayerWork, expert_parallel: int
    ) -> dict[str, tuple[float, float]]:
        """Return the seconds of each step's matmuls, and of its passes over memory;
        without the core of attention.
        """
        ranks, stream = self.tensor_parallel, model.tokens * model.hidden_size
        # MLA's projections to the latents are not split: every tensor-parallel rank
        # computes them for its tokens.
        own = self.token_ranks
        norms = self.passes(self.values["norm_passes"], stream) / own
        norms *= layer.branches / 2

        def split(name: str) -> float:
            return self.matmul(layer.work(name), "gemm", ranks)

        queries = split("attention a") + self.matmul(
            layer.work("attention a" + WHOLE), "gemm", own
        )
        parts = {
            "attention a": (queries, 0.0),
            "attention b": (split("attention b"), 0.0),
        }
        if layer.moe:
            parts |= self._expert_parts(model, layer, expert_parallel, norms)
        elif layer.one_branch and not layer.work("mlp").weights:
            parts |= {"attention a": (queries, norms), "mlp": (0.0, 0.0)}
        else:
            parts["mlp"] = split("mlp"), norms
        for name, (matmuls, passes) in parts.items():
            if self.served and (matmuls or passes):
                least_matmuls, least_passes = _least_s(self, layer, name)
                parts[name] = max(matmuls, least_matmuls), max(passes, least_passes)
        return parts

    def _expert_parts(
        self, model: ModelWork, layer: LayerWork, expert_parallel: int, norms: float
    ) -> dict[str, tuple[float, float]]:
        """Return the seconds of matmuls and of passes over memory of an MoE block."""
        ranks, own = self.tensor_parallel, self.token_ranks
        # The busiest rank sets the pace of experts and exchanges.
        uneven = self.values["imbalance"]
        pairs = model.tokens * model.experts_per_token / ranks
        # A quarter of the row passes belongs to the router, half to the experts, a
        # quarter to the next layer's arrive.
        rows = (
            self.passes(self.values["row_passes"] / 4, pairs * model.row_width) * uneven
        )
        # `active` is the expected share of experts that at least one token chooses:
        # with few tokens not all weights are read.
        chosen = model.experts_per_token / model.num_experts
        active = 1 - (1 - chosen) ** (model.tokens / own * expert_parallel)
        read = active * self.values["distinct"] / expert_parallel * own
        experts = self.matmul(layer.work("experts"), "grouped", ranks, read)
        shared = self.matmul(layer.work("shared expert"), "gemm", ranks)
        return {
            "router": (self.matmul(layer.work("router"), "gemm", own), norms + rows),
            "experts": (experts * uneven, 2 * rows),
            "shared expert": (shared, 0.0),
            "arrive": (0.0, rows),
        }

    def head(self, model: ModelWork) -> float:
        """Return the seconds of the output head."""
        return self.matmul(model.head, "gemm", self.tensor_parallel)

    def optimizer(self, num_parameters: float, itemsize: int = 4) -> float:
        """Return the seconds of updating a rank's parameters. itemsize: bytes per
        element of an optimiser state.
        """
        return (
            num_parameters
            * self.values["optimizer_bytes"]
            * itemsize
            / 4
            / self.bytes_per_s
        )

    def sharding(
        self, model: ModelWork, ranks: int, expert_parallel: int, reduced: float = 4
    ) -> tuple[float, float, float]:
        """Return the seconds of gathering all weights for the forward and for the
        backward pass, and of reducing all gradients, each once.

        Weights are gathered in the dtype of the computation and gradients are reduced
        in the dtype of the update, layer by layer: those of experts among the ranks
        that have the same experts, everything else among all `ranks`; tensor-parallel
        ones have a part. The head stays gathered for the backward pass.
        reduced: bytes per element of a gradient.
        """
        same, split = ranks // expert_parallel, self.tensor_parallel
        moe, num_layers = sum(model.moe), len(model.layers)
        experts = model.num_expert_parameters / expert_parallel / max(moe, 1)
        other_parameters = (model.num_parameters - model.num_expert_parameters) / split
        head = model.head.weights / split

        # One ring for each layer, as FSDP2 gathers them: latency counts once per layer.
        def sent(width: float, still_gathered: float = 0.0) -> float:
            between = moe * self.ring(width * experts, same, apart=expert_parallel)
            return between + num_layers * self.ring(
                width * (other_parameters - still_gathered) / num_layers,
                ranks // split,
                apart=split,
            )

        return sent(self.value_bytes), sent(self.value_bytes, head), sent(reduced)

    def loss(self, model: ModelWork, num_matmuls: int = 3) -> float:
        """Return the seconds of head and loss, forward and backward: logits, and
        gradients of their two factors.
        """
        logits = model.tokens * model.head.weights / model.hidden_size
        logits /= self.tensor_parallel
        return num_matmuls * self.head(model) + self.passes(
            self.values["logit_passes"], logits * 4 / self.value_bytes
        )

    def exchange(self, model: ModelWork, ranks: int) -> tuple[float, float]:
        """Return the seconds of a dispatch and of a combine over `ranks`, with equal
        counts.

        Each rank sends an equal share of its rows to every rank; a dispatch to all
        ranks is an all-gather, and its combine a reduce-scatter. Measured links, if
        any, are simulated.
        """
        sent = self.stored.sent
        widths = (model.row_width * sent, model.row_width * self.value_bytes)
        tokens = model.tokens / self.token_ranks
        if self.rows == "all":
            ahead, back = (self.ring(ranks * tokens * width, ranks) for width in widths)
            return ahead, back
        uneven, experts = self.values["imbalance"], model.experts_per_token
        # The most loaded rank decides how long an exchange takes, so its excess is
        # charged to all.
        pairs = tokens * experts * uneven

        def rows_to(num_places: int) -> float:
            return tokens * rows_per_token(
                model.num_experts,
                experts,
                num_places,
                groups=model.expert_groups,
                imbalance=uneven,
            )

        rows = pairs if self.rows == "expert" else rows_to(ranks)
        if (links := self.machine.links) is not None:
            counts = np.full((ranks, ranks), rows / ranks)
            weights = PAIR_BYTES * pairs / rows
            payloads = (
                Payload(model.row_width, model.num_experts, value_bytes, weights)
                for value_bytes in (sent, self.value_bytes)
            )
            times = [simulate(links, counts, payload) for payload in payloads]
            return float(times[0].metadata + times[0].dispatch), float(times[1].combine)
        far_rows = None
        nodes, remainder = divmod(ranks, self.machine.gpus_per_node)
        if self.rows == "node" and nodes > 1 and not remainder:
            far_rows = rows_to(nodes) * (1 - 1 / nodes)
        ahead, back = (
            _all_to_all(
                self.machine,
                rows * width,
                ranks,
                None if far_rows is None else far_rows * width,
                latency_us,
            )
            for width, latency_us in zip(
                widths, _fixed_us(self.values, served=self.served), strict=True
            )
        )
        return ahead, back

    def ring(
        self,
        num_bytes: float,
        ranks: int,
        apart: int = 1,
        latency_us: float | None = None,
    ) -> float:
        """Return the seconds of an all-gather or a reduce-scatter of `num_bytes`: half
        an all-reduce.

        A ring over several nodes uses the network interface of each of its GPUs, and
        within a node the links between them. apart: distance from one rank of the ring
        to the next. latency_us: within a node; None: the assumed one.
        """
        if ranks == 1:
            return 0.0
        machine = self.machine
        # The node with the fewest members limits the ring: it has the fewest
        # interfaces.
        groups = machine.near(ranks, 1, apart)
        least, gpu = min(groups), machine.gpu
        links = (
            min(gpu.link_gb_s * gpu.payload, (least - 1) * machine.peer_gb_s)
            * self.values["link"]
        )
        interfaces = least * machine.nic_gb_s * self.values["nic"]
        # Within one node only its links count; with one rank per node only interfaces
        # count.
        if latency_us is None:
            latency_us = self.values["latency_us"]
        latency = latency_us / 1e6
        if len(groups) == 1:
            rate = links
        else:
            rate = min(links, interfaces) if least > 1 else interfaces
            latency *= 2
        return latency + (1 - 1 / ranks) * num_bytes / (rate * 1e9)

    def send(self, num_bytes: float, apart: int) -> float:
        """Return the seconds of sending to the rank that is `apart` ranks away."""
        machine, latency = self.machine, self.values["latency_us"] / 1e6
        if len(machine.near(2, 1, apart)) == 1:
            rate = machine.peer_gb_s * self.values["link"]
            return latency + num_bytes / (rate * 1e9)
        return 2 * latency + num_bytes / (machine.nic_gb_s * self.values["nic"] * 1e9)

    def all_reduce(self, model: ModelWork, way: Way = "engine") -> float:
        """Return the seconds of one all-reduce of the stream over the tensor-parallel
        ranks.

        Those of the plan's own tokens may be given or assumed (`all_reduce_us`,
        `side_us`); other numbers of tokens take longer or shorter as published.
        """
        if self.tensor_parallel == 1:
            return 0.0
        name = ALL_REDUCES[way]
        seconds = self.published_us(model, way)[1] / 1e6
        if self.reduced is None or name not in self.values:
            return seconds
        return self.values[name] * seconds / self.published_us(self.reduced, way)[1]

    def published_us(self, model: ModelWork, way: Way) -> tuple[float, float, float]:
        """Return the least, typical and most microseconds of an all-reduce: published
        ones; between nodes, and on GPUs without published times, three times those of
        latency and rates.
        """
        ranks, machine = self.tensor_parallel, self.machine
        num_bytes = model.tokens * model.hidden_size * self.value_bytes
        is_near = machine.near(ranks, 1) == [ranks]
        latency_us = self.values["latency_us"]

        def sent_us(num_bytes: float, latency_us: float) -> float:
            return 2e6 * self.ring(num_bytes, ranks, latency_us=latency_us)

        # A training's are NCCL's of large tensors, which take as long as their bytes.
        is_published = self.served and is_near
        table = published(way, machine.gpu, ranks) if is_published else None
        if table:
            return table.at(num_bytes, lambda size: sent_us(size, 0.0))
        fixed_us = latency_us if is_near else self.values["node_us"] / 4
        # An engine may have a kernel that is as fast as the published ones.
        known_us = ASSUMPTIONS["all_reduce_us"].low / 2 if is_published else fixed_us
        least_us = min(fixed_us, known_us) if way == "engine" else fixed_us
        both_us = sent_us(num_bytes, fixed_us)
        return sent_us(num_bytes, least_us), both_us, both_us


def indexer_s(roofline: Roofline, layer: LayerWork) -> float:
    """Return the seconds of an indexer's scores and its choice of tokens, which every
    tensor-parallel rank does for all heads; scores are in FP8 where the GPU has it.
    """
    if not layer.index:
        return 0.0
    values = roofline.values
    scores = max(
        layer.index_left / (roofline.peak("fp8") * values["fused_core"]),
        layer.index_bytes / roofline.bytes_per_s,
        values["matmul_us"] / 1e6,
    )
    return scores + values["kernel_us"] / 1e6


def fused_norm(roofline: Roofline, model: ModelWork) -> float:
    """Return the seconds that an engine saves where it fuses an all-reduce in line with
    the norm behind it; 0 where it does not, or is not faster so.
    """
    ranks, machine = roofline.tensor_parallel, roofline.machine
    if ranks == 1 or machine.near(ranks, 1) != [ranks]:
        return 0.0
    num_bytes = model.tokens * model.hidden_size * roofline.value_bytes
    is_fused = num_bytes < fused_below(machine.gpu, ranks)
    return roofline.values["fused_norm_us"] / 1e6 * is_fused


def _least_s(roofline: Roofline, layer: LayerWork, name: str) -> tuple[float, float]:
    """Return the least seconds of a step of a server: of its matmuls, and of its other
    kernels.
    """
    kernels = [KERNELS[name]]
    if layer.work("attention a" + WHOLE).weights and name in LATENT:
        kernels.append(LATENT[name])
    if layer.index and name == "attention a":
        kernels.append(INDEXED)
    stored = roofline.stored
    width = stored.experts if name == "experts" else stored.others
    if stored.precision_of(width) == "fp8" and name in QUANTISED:
        kernels.append((0, 1))
    matmuls, others = map(sum, zip(*kernels, strict=True))
    values = roofline.values
    return matmuls * values["matmul_us"] / 1e6, others * values["kernel_us"] / 1e6


def _fixed_us(
    values: Mapping[str, float], *, served: bool
) -> tuple[tuple[float, float], ...]:
    """Return the microseconds of a dispatch and of a combine beside their bytes: within
    a node, and between nodes.
    """
    if served:
        # A server's kernels send directly: published times between nodes are those of a
        # node and the bytes.
        return tuple((values[name],) * 2 for name in ("dispatch_us", "combine_us"))
    return ((values["latency_us"], 2 * values["latency_us"]),) * 2


def _all_to_all(
    machine: Machine,
    num_bytes: float,
    ranks: int,
    far_bytes: float | None,
    latency_us: tuple[float, float],
) -> float:
    """Return the seconds of an exchange. far_bytes: bytes that leave a node, and
    that the ranks of the receiving node forward; None: rows go straight to their
    ranks. latency_us: within a node, and between nodes.
    """
    near_us, far_us = latency_us
    if ranks == 1:
        return 0.0
    # a group may span nodes
    groups = machine.near(ranks, machine.num_gpus // ranks)
    least, most = min(groups), max(groups)
    rate = machine.values["link"] * 1e9
    out = machine.gpu.link_gb_s * machine.gpu.payload
    # Forwarded rows cross the links of the node, as rows that stay in it do.
    peer_bytes = num_bytes / (ranks if far_bytes is None else most)
    # Within a node: the slowest of one peer's link and the sum over all peers
    # through the GPU's own links.
    within = 0.0
    if most > 1:
        slowest = max(peer_bytes / machine.peer_gb_s, peer_bytes * (most - 1) / out)
        within = near_us / 1e6 + slowest / rate
    if least == ranks:
        return within
    if far_bytes is None:
        far_bytes = peer_bytes * (ranks - least)
    # Between nodes: everything for other nodes goes through the GPU's interface,
    # while the node's own links work.
    return max(
        within,
        far_us / 1e6 + far_bytes / (machine.nic_gb_s * 1e9 * machine.values["nic"]),
    )


def total(seconds: Mapping[str, float]) -> float:
    """Return the seconds of all steps."""
    return math.fsum(seconds.values())
