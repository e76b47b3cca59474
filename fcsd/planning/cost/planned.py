"""Prepare a plan of a model on a cluster: check the settings, assign the ranks, trace
the layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.strict import Rule, refuse
from fcsd.base.text import size
from fcsd.model.connectivity import Connectivity
from fcsd.model.connectivity.selection import resolve_layers
from fcsd.model.families import moe_mask, text_config
from fcsd.model.families.overlap import kept_inside
from fcsd.model.inspect.checkpoint import find_source
from fcsd.model.inspect.memory import (
    layer_cache_bytes,
    layer_configs,
    selected_tokens,
)
from fcsd.model.quantised.methods import FIELD
from fcsd.parallel.overlap.schedule import LayerFacts, layer_facts
from fcsd.planning.cost.assumptions import ALL_REDUCES, WITHOUT_AITER
from fcsd.planning.cost.machine import Machine, make_machine
from fcsd.planning.cost.memory import Layout
from fcsd.planning.cost.operations import (
    ModelWork,
    as_run,
    index_key_bytes,
    seen_tokens,
    trace_layers,
)
from fcsd.planning.cost.roofline import Roofline, Rows
from fcsd.planning.cost.settings import PlanSettings
from fcsd.planning.cost.stored import BFLOAT16, FP8, Stored, stored_weights
from fcsd.planning.cost.training import Training, built
from fcsd.planning.network.links import LinkModel
from fcsd.training.config import TrainConfig
from fcsd.training.losses.objectives import CrossEntropyObjectiveConfig

ALL2ALL: dict[str, Rows] = {
    "allgather_reducescatter": "all",
    "deepep_high_throughput": "node",
    "deepep_low_latency": "expert",
}
"""The destinations of a server's token, by the name of vLLM's backend (0.32; its
default first); only the backends that FarSkip overlaps.
"""


@dataclass(frozen=True)
class Planned:
    """A planned model: its work, and the ranks that share it.

    inside: the layers keep their own combine (docs/scale.md). cached: bytes of keys and
    values on a rank, in serving. ranges: least, typical and most of the assumptions
    that depend on what is sent.
    """

    settings: PlanSettings
    training: Training
    connectivity: Connectivity
    machine: Machine
    work: ModelWork
    model_type: str
    inside: bool
    expert_parallel: int
    tensor_parallel: int
    micro_batches: int
    cached: float = 0.0
    ranges: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)

    def rewired(self) -> list[bool]:
        """Return True for each rewired layer."""
        chosen = resolve_layers(self.connectivity.layers, self.work.moe)
        return [k in chosen for k in range(len(self.work.layers))]

    def facts(self) -> list[LayerFacts | None]:
        """Return the facts on which the schedule of each layer depends."""
        work, rewired = self.work, self.rewired()
        splits: Any = ["core" if layer.core else "end" for layer in work.layers]
        return layer_facts(
            rewired,
            work.moe,
            self.connectivity.attention,
            self.mlp,
            splits,
            inside=self.inside,
        )

    @property
    def mlp(self) -> str | list[int]:
        """The MLP side's input, as in a checkpoint's `farskip` field."""
        return self.connectivity.field(self.work.moe)["mlp"]

    def assuming(self, **values: float) -> Planned:
        """Return this plan with other values of some assumptions."""
        return replace(self, machine=self.machine.assuming(values))

    @property
    def wide(self) -> bool:
        """Whether this is a server whose ranks have their own tokens and exchange
        them.
        """
        return self.settings.data_parallel is not None

    @property
    def num_gpus(self) -> int:
        """The number of GPUs in use: all of them in training, the ranks of one server
        in serving.
        """
        if self.settings.phase == "train":
            return self.machine.num_gpus
        return self.settings.data_parallel or self.tensor_parallel

    @property
    def megatron(self) -> bool:
        """Whether this is a training that Megatron runs and fcsd does not: with tensor
        or pipeline parallelism.
        """
        stages = self.settings.pipeline_parallel
        return self.settings.phase == "train" and self.tensor_parallel * stages > 1

    @property
    def layout(self) -> Layout:
        """The layout of a training: which ranks share the weights of a stage."""
        num_gpus = self.machine.num_gpus // self.settings.pipeline_parallel
        step_tokens = self.micro_batches * self.work.tokens * num_gpus
        return Layout(
            "optimizer" if self.megatron else self.settings.sharding,
            num_gpus,
            step_tokens=step_tokens,
            expert_parallel=self.expert_parallel,
        )

    @property
    def stored(self) -> Stored:
        """How the weights are stored in memory; a training stores them in bfloat16."""
        dtype = self.settings.dtype
        if self.settings.phase == "train" or dtype == "bfloat16":
            return FP8 if dtype == "fp8" else BFLOAT16
        has_fp8 = self.machine.gpu.fp8_tflops is not None
        stored = stored_weights(self.training.config, has_fp8=has_fp8)
        return FP8 if dtype == "fp8" and stored.precision != "fp8" else stored

    @property
    def aiter(self) -> bool | None:
        """Whether AMD's AITER kernels are planned; None where there is no choice: only
        for a prefill in FP8 on AMD GPUs did AMD publish the times of others.
        """
        amd = self.machine.gpu.amd and self.stored.precision == "fp8"
        if self.settings.phase != "prefill" or not amd:
            return None
        return not self.settings.without_aiter

    @property
    def roofline(self) -> Roofline:
        """The roofline that times its operations."""
        train = self.settings.phase == "train"
        fused = not self.settings.unfused_attention
        once = self.settings.rows_once and not self.megatron
        rows: Rows = "rank" if once else "expert"
        if self.wide:
            rows = ALL2ALL[self.settings.all2all]
        reduced = None if train or self.wide else self.work
        return Roofline(
            self.machine, self.stored, fused, self.tensor_parallel, rows, self.megatron, reduced, not train
        )  # fmt: skip


def prepare(settings: PlanSettings, links: LinkModel | None = None) -> Planned:
    """Check the settings and trace the model's layers."""
    machine = make_machine(
        settings.gpu,
        settings.nodes * settings.gpus_per_node,
        settings.gpus_per_node,
        settings.network_gb_s,
        settings.assumptions,
        links,
    )
    refuse(
        (
            settings.dtype == "fp8" and machine.gpu.fp8_tflops is None,
            f"--dtype fp8: the {machine.gpu.name} has no FP8 matmuls; leave it out",
        ),
        (
            settings.global_batch is not None and settings.phase != "train",
            f"--global-batch: --phase {settings.phase} has no optimiser step; leave it"
            " out",
        ),
    )
    source = find_source(settings.model, settings.revision)
    spec, config = settings.connectivity, source.own_config
    if spec is None:
        spec = Connectivity()
        if saved_connectivity := config.get("farskip"):
            spec = Connectivity.from_field(saved_connectivity, source.where)
    if (said := source.quantisation) is not None and FIELD not in config:
        # ModelOpt keeps it in a separate file.
        fields = {"quant_method": said.method, "quant_algo": said.algorithm}
        config = {**config, FIELD: fields}
    training = _training(settings, config, source.where, spec)
    family, model_config, build = built(training)
    # What cannot be converted to is no plan either.
    spec.new_field(moe_mask(model_config, family), family.layout)
    ep, tp = _ranks(settings, machine, links)
    # Decoding computes one new token per row; the text so far enters through its keys
    # and values.
    length = 1 if settings.phase == "decode" else settings.length
    # A batch far beyond the memory, before it is traced, where sizes would overflow.
    hidden_size = (config.get("text_config") or config).get("hidden_size") or 1
    stream = 2 * settings.batch * length * hidden_size
    memory = machine.gpu.memory_bytes
    if stream > memory:
        raise UserError(
            f"--batch {settings.batch} --length {settings.length}: the residual stream"
            f" of these tokens alone takes {size(stream)}, but the {machine.gpu.name}"
            f" has {size(memory)}; use a smaller batch or shorter rows"
        )
    # Requests of the whole server, divided among its data-parallel ranks.
    rows = settings.batch // (settings.data_parallel or 1)
    served = settings.phase != "train"
    work = trace_layers(build, family, source.where, rows, length, served=served)
    if not served and ep == 1:
        work = as_run(work)
    # Checked after the trace, which knows the number of experts for every family.
    refuse(
        (
            work.num_experts % ep,
            f"{_sharing_option(settings, ep)}: does not divide the"
            f" {work.num_experts} experts of {source.where}",
        ),
        (
            settings.pipeline_parallel > len(work.layers),
            f"--pp {settings.pipeline_parallel}: {source.where} has {len(work.layers)}"
            " layers, but every stage needs at least one",
        ),
    )
    text = text_config(model_config, family)
    cached = [0.0] if settings.phase == "train" else _cached(settings, text, tp)
    if settings.phase == "decode":
        work = _decoding(work, settings.length, rows, cached, text)
    inside = kept_inside(family) is not None
    planned = Planned(
        settings, training, spec, machine, work, family.model_type, inside, ep, tp,
        _micro_batches(settings, machine, tp), sum(cached),
    )  # fmt: skip
    planned = _with_all_reduces(planned)
    return _without_aiter(planned) if settings.without_aiter else planned


def _with_all_reduces(planned: Planned) -> Planned:
    """Return a plan of tensor-parallel ranks with the ranges of an all-reduce of its
    tokens: published, unless the cluster's file has its own time.
    """
    values, ranges = planned.machine.values, {}
    for way, name in ALL_REDUCES.items():
        if planned.settings.phase != "train" and planned.tensor_parallel > 1:
            low, typical, high = planned.roofline.published_us(planned.work, way)
            # Published times of other machines say nothing about a measured one.
            if name in values:
                low = typical = high = values[name]
            if name in values or low < high:
                ranges[name] = (low, typical, high)
        elif name in values:
            raise UserError(
                f"assumptions.{name}: only tensor-parallel ranks of a server (--tp 2 or"
                " more) all-reduce; leave it out"
            )
    return replace(planned, ranges=ranges)


def _without_aiter(planned: Planned) -> Planned:
    """Return a plan whose kernels take as many times as long as `WITHOUT_AITER` says;
    UserError where AMD published none.
    """
    settings, values = planned.settings, planned.machine.values
    if settings.phase != "prefill":
        wrong = f"--phase {settings.phase}"
    elif not planned.machine.gpu.amd:
        wrong = f"--gpu {settings.gpu}"
    elif planned.stored.precision != "fp8":
        wrong = f"--dtype {settings.dtype}"
    else:
        return planned.assuming(
            **{name: values[name] / times for name, times in WITHOUT_AITER.items()}
        )
    raise UserError(
        f"--without-aiter: {wrong}: AMD published its kernels' times for a prefill in FP8"
        " on MI300X only; leave it out"
    )


def _ranks(
    settings: PlanSettings, machine: Machine, links: LinkModel | None
) -> tuple[int, int]:
    """Return expert-parallel and tensor-parallel ranks."""
    world, train = machine.num_gpus, settings.phase == "train"
    dp, pp = settings.data_parallel, settings.pipeline_parallel
    # By default a training shares the experts over all GPUs; a server shares everything
    # by tensor parallelism. Wide expert parallelism: every rank has all of attention
    # and a part of the experts.
    tp = settings.tensor_parallel
    tp = (1 if train or dp else world) if tp is None else tp
    ep = settings.expert_parallel
    if dp is not None:
        refuse(
            (
                train,
                f"--dp {dp}: only for a server; in training every rank already has its"
                " own rows, leave it out",
            ),
            (
                tp != 1 or ep not in (None, dp),
                f"--dp {dp}: implies --tp 1 --ep {dp}, since every rank has the whole"
                " attention and a share of the experts; leave both out",
            ),
            (world % dp, f"--dp {dp}: does not divide the {_gpus(machine)}"),
            (
                settings.batch % dp,
                f"--batch {settings.batch}: the server's requests must be a multiple of"
                f" its {dp} ranks (--dp)",
            ),
        )
        ep = dp
    elif ep is None:
        ep = world // pp if train else tp
    refuse(*_rank_rules(settings, machine, tp, ep))
    if links is not None:
        refuse(*_link_rules(settings, links, ep))
        # The part of the code that expert parallelism calls.
        links.require(collective="all_to_all_single")
    return ep, tp


def _rank_rules(
    settings: PlanSettings, machine: Machine, tp: int, ep: int
) -> list[Rule]:
    """Return which ranks the machine or the phase does not have."""
    train, gpus = settings.phase == "train", _gpus(machine)
    dp, pp = settings.data_parallel, settings.pipeline_parallel
    tokens = settings.batch * settings.length
    given = {"tp": settings.tensor_parallel, "pp": pp if pp > 1 else None}
    megatron = " ".join(f"--{name} {n}" for name, n in given.items() if n is not None)
    stages = f" / {pp} stages" if pp > 1 else ""
    imbalance = machine.values["imbalance"]
    return [
        (
            dp is None
            and settings.all2all != PlanSettings.model_fields["all2all"].default,
            f"--all2all {settings.all2all}: works only with --dp; add --dp, or leave it"
            " out",
        ),
        (
            not train and pp > 1,
            f"--pp {pp}: --phase {settings.phase} has no pipeline stages; leave it out",
        ),
        (
            train and tp >= 1 and machine.num_gpus % (tp * pp),
            f"{megatron}: {tp * pp} ranks do not divide the {gpus}",
        ),
        (
            train and tp >= 1 and tokens % tp,
            f"--tp {tp}: does not divide the {tokens} tokens of a micro-batch (--batch"
            " times --length)",
        ),
        (not 1 <= tp <= machine.num_gpus, f"--tp {tp}: there are {gpus}"),
        (
            train and (ep < 1 or machine.num_gpus // pp % ep),
            f"--ep {ep}: does not divide the {gpus}{stages}",
        ),
        (
            not train and dp is None and ep not in (1, tp),
            f"--ep {ep}: a server's experts are distributed over all its {tp}"
            f" tensor-parallel ranks (--ep {tp}) or not at all (--ep 1)",
        ),
        (
            imbalance > ep,
            f"assumptions.imbalance: {imbalance:g}: must be at most {ep}, the number of"
            " ranks that share the experts (one rank then has all rows)",
        ),
    ]


def _gpus(machine: Machine) -> str:
    return f"{machine.num_gpus} GPUs ({machine.num_nodes} x {machine.gpus_per_node})"


def _link_rules(settings: PlanSettings, links: LinkModel, ep: int) -> list[Rule]:
    """Return which measured links are of other ranks or another collective. They describe
    all-to-all, and say nothing about the all-reduces of a tensor-parallel server.
    """
    dp, ranks = settings.data_parallel, links.world_size
    return [
        (
            settings.phase != "train" and not dp,
            f"--links: measured for all-to-all, but without --dp {settings.phase} uses"
            " all-reduces; leave it out",
        ),
        (
            dp and ALL2ALL[settings.all2all] == "all",
            f"--links: measured for all-to-all, but --all2all {settings.all2all}"
            " gathers; choose another",
        ),
        (
            ranks != ep,
            f"--links: measured between {ranks} ranks, but {ep} share the experts; give"
            f" --{'dp' if dp else 'ep'} {ranks}, or links of {ep} ranks",
        ),
    ]


def _sharing_option(settings: PlanSettings, ep: int) -> str:
    """Name the option that sets the number of ranks that share the experts."""
    train, dp = settings.phase == "train", settings.data_parallel
    if dp is not None or settings.expert_parallel is not None:
        return f"--dp {dp}" if dp is not None else f"--ep {ep}"
    if not train and settings.tensor_parallel is not None:
        return f"--tp {ep}"
    whose = " of a stage" if settings.pipeline_parallel > 1 else ""
    return f"--{'ep' if train else 'tp'} (by default all {ep} GPUs{whose})"


def _micro_batches(settings: PlanSettings, machine: Machine, tp: int) -> int:
    if settings.phase != "train":
        return 1
    copies = machine.num_gpus // (tp * settings.pipeline_parallel)
    rows_at_once = settings.batch * copies
    rows = rows_at_once if settings.global_batch is None else settings.global_batch
    if rows < 1 or rows % rows_at_once:
        on = "GPUs" if copies == machine.num_gpus else "copies (GPUs / --tp / --pp)"
        raise UserError(
            f"--global-batch {rows}: not a multiple of {rows_at_once} rows,"
            f" {settings.batch} on each of {copies} {on}"
        )
    return rows // rows_at_once


def _training(
    settings: PlanSettings, config: Mapping[str, Any], where: str, spec: Connectivity
) -> Training:
    train = TrainConfig(
        max_steps=1,
        warmup_steps=0,
        batch_size_tokens=settings.batch * settings.length,
        per_device_train_batch_size=settings.batch,
        learning_rate=1e-5,
        dtype="float32",
        bf16=True,
        gradient_checkpointing=not settings.keep_activations,
    )
    return Training(
        name="plan",
        config=config,
        where=where,
        connectivity=spec,
        objective=CrossEntropyObjectiveConfig(name="ce"),
        train=train,
        max_length=settings.length,
    )


def _cached(settings: PlanSettings, config: Any, tp: int) -> list[float]:
    """Return the bytes of keys and values on a rank by layer: heads are spread over the
    ranks, while each rank holds MLA's whole latent.
    """

    def ranks(layer: Any) -> int:
        heads = getattr(layer, "num_key_value_heads", None)
        if getattr(layer, "kv_lora_rank", None):
            heads = 1
        # With more ranks than heads, several ranks hold the same head.
        return settings.data_parallel or min(tp, heads or tp)

    by_layer = layer_cache_bytes(config, settings.length) or []
    return [
        num_bytes * settings.batch / ranks(layer)
        for num_bytes, layer in zip(by_layer, layer_configs(config), strict=False)
    ]


def _decoding(
    work: ModelWork,
    length: int,
    rows: int,
    cached: Sequence[float],
    config: Any,
) -> ModelWork:
    """Return the work of one token in each of a rank's `rows` that follows `length`
    others and reads their keys and values. cached: bytes of each layer, as far as the
    config states them.
    """
    layers = []
    num_layers = len(work.layers)
    windows, selected = seen_tokens(config), selected_tokens(config)
    facts = zip_longest(
        work.layers, cached[:num_layers], windows[:num_layers], selected[:num_layers]
    )
    for layer, layer_cached, window, chosen in facts:
        num_seen = min(length, window or length)
        # The cache of a window is short already; sparse attention keeps all tokens.
        share = min(1.0, chosen / length) if chosen else 1.0
        num_scored = length / (getattr(config, "index_kpool", None) or 1)
        layers.append(
            replace(
                layer,
                core=layer.core * num_seen,
                causal=False,
                scores=layer.scores * num_seen,
                cache_bytes=share * (layer_cached or 0.0),
                index=layer.index * num_scored,
                index_bytes=index_key_bytes(config) * rows * num_scored
                if layer.index
                else 0.0,
            )
        )
    return replace(work, layers=tuple(layers))
