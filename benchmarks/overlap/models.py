"""The benchmark's models, with a few layers, experts spread over all ranks, and sleeps
in them.
"""

import argparse
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from fcsd.model.families import family_of
from fcsd.parallel.overlap import schedule
from fcsd.parallel.overlap.block import BlockRun, Call
from fcsd.parallel.overlap.experts import OverlappedEP

SLEEPS_MS = {
    "a": 30.0,
    "b": 50.0,
    "shared": 25.0,
    "experts": 40.0,
    "router": 5.0,
    "share": 1.0,
}


def config_of(options: argparse.Namespace) -> Any:
    from transformers import AutoConfig

    common = {
        "vocab_size": 1000,
        "hidden_size": options.dim,
        "intermediate_size": options.dim * 2,
        "moe_intermediate_size": options.expert_dim,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.heads,
        "num_experts_per_tok": options.top_k,
        "max_position_embeddings": 65536,
    }
    if options.model == "none":
        own = {
            "num_experts": options.experts,
            "head_dim": options.dim // options.heads,
            "norm_topk_prob": True,
        }
        return AutoConfig.for_model("qwen3_moe", **common, **own)
    rope = max(8, options.dim // options.heads // 4)
    return AutoConfig.for_model(
        "deepseek_v3",
        **common,
        n_routed_experts=options.experts,
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        q_lora_rank=options.dim // 2,
        kv_lora_rank=options.dim // 4,
        qk_rope_head_dim=rope,
        qk_nope_head_dim=options.dim // options.heads,
        v_head_dim=options.dim // options.heads,
    )


def spread_experts(model: Any) -> None:
    """Spread only the experts of a model's MoE blocks (`mlp.experts`) over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    import fcsd.parallel.overlap  # noqa: F401  # registers the implementation

    device = next(model.parameters()).device.type
    mesh = init_device_mesh(
        device, (torch.distributed.get_world_size(), 1), mesh_dim_names=("ep", "tp")
    )
    plan = {}
    for name, _ in model.named_modules():
        if name.endswith("mlp.experts"):
            plan |= {
                f"{name}.gate_up_proj": "grouped_gemm",
                f"{name}.down_proj": "grouped_gemm",
            }
            plan[name] = "ep_dispatch_experts"
    apply_expert_parallelism(
        model, mesh["ep"], mesh["tp"], plan, ep_implementation="farskip"
    )


def spread_model(options: argparse.Namespace, rewired: bool) -> Any:
    """Return the model with its experts spread over all ranks, and everything else
    whole.
    """
    from transformers import AutoModelForCausalLM

    from fcsd.model.connectivity import Connectivity, convert_model

    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config_of(options), dtype=dtype)
    for name, parameter in model.named_parameters():
        if "gate.weight" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    if rewired:
        convert_model(model, Connectivity("all"))
    spread_experts(model)
    model.config.use_cache = False
    return model.train()


class InHalves(BlockRun):
    """A block whose shared expert is computed in two steps, each of half of the tokens."""

    def shared_expert(self) -> None:
        expert, tokens = (
            getattr(self.block, self.family.block_shared),
            self.m.flatten(0, 1),
        )
        half = len(tokens) // 2
        if self.shared is None:
            self.shared = expert(tokens[:half])
        else:
            self.shared = torch.cat([self.shared, expert(tokens[half:])]).view_as(
                self.m
            )


def in_steps(model: Any, transport: Any, mode: str) -> None:
    """Make a regular model's blocks run in the runtime's steps, so that they use the
    same link.
    """
    router, start, shared_expert, *experts, finish = schedule.BLOCK
    steps = {
        "beside": schedule.BLOCK,
        "both": (router, start, shared_expert, *experts, shared_expert, finish),
    }.get(mode, (router, start, *experts, shared_expert, finish))
    made, family = InHalves if mode == "both" else BlockRun, family_of(model.config)
    for k, layer in enumerate(model.model.layers):
        block = layer.mlp
        block.experts.farskip_ep.open(k, (mode != "regular",) * 2, transport)

        def forward(x: Any, block: Any = block) -> Any:
            run = made(
                block.experts.farskip_ep,
                family,
                block,
                Call(None, False, False, 1),
                steps,
                lambda _: None,
            )
            run.m = x
            run.until(None)
            return run.output

        block.forward = forward


@contextlib.contextmanager
def a_row_for_each_expert(top_k: int) -> Iterator[None]:
    """Inside the context, make a token send a separate row to each of its experts, as
    if it were that many tokens.
    """
    start, finish = OverlappedEP.start_dispatch, OverlappedEP.finish_combine

    def start_dispatch(
        self: Any, rows: Any, experts: Any, weights: Any, sizes: Any
    ) -> Any:
        rows = rows.repeat_interleave(top_k, 0)
        return start(self, rows, experts.reshape(-1, 1), weights.reshape(-1, 1), sizes)

    def finish_combine(ticket: Any, exchange: Any, dispatch: Any) -> Any:
        return finish(ticket, exchange, dispatch).unflatten(0, (-1, top_k)).sum(1)

    names = {
        "start_dispatch": start_dispatch,
        "finish_combine": staticmethod(finish_combine),
    }
    own = {name: vars(OverlappedEP)[name] for name in names}
    for name, function in names.items():
        setattr(OverlappedEP, name, function)
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(OverlappedEP, name, function)


def add_sleeps(model: Any, num_tokens: int, clock: Any = time) -> None:
    """Make parts of a layer sleep. num_tokens: tokens of a batch; the shared expert
    sleeps in proportion to the part of them that it gets. clock: the object whose
    `sleep` is called.
    """

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, milliseconds: float) -> Any:
            ctx.milliseconds = milliseconds
            clock.sleep(SLEEPS_MS["share"] * milliseconds / 1e3)
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            clock.sleep(SLEEPS_MS["share"] * 2 * ctx.milliseconds / 1e3)
            return gradient, None

    def sleeps(module: Any, milliseconds: float) -> None:
        module.register_forward_pre_hook(
            lambda _, args: (Sleep.apply(args[0], milliseconds), *args[1:])
        )

    def partly(_: Any, args: Any) -> Any:
        share = args[0].shape[:-1].numel() / num_tokens / SLEEPS_MS["share"]
        return Sleep.apply(args[0], SLEEPS_MS["shared"] * share)

    for layer in model.model.layers:
        attention, block = layer.self_attn, layer.mlp
        sleeps(
            getattr(attention, "kv_a_proj_with_mqa", None) or attention.v_proj,
            SLEEPS_MS["a"],
        )
        sleeps(attention.o_proj, SLEEPS_MS["b"])
        sleeps(block.gate, SLEEPS_MS["router"])
        if hasattr(block, "shared_experts"):
            block.shared_experts.register_forward_pre_hook(partly)
        ep = block.experts.farskip_ep
        own = ep.experts_forward
        ep.experts_forward = lambda x, *rest, own=own: own(
            Sleep.apply(x, SLEEPS_MS["experts"]), *rest
        )
