"""The layers of SGLang's models in one process, without its engine, and with the
attention of transformers.

SGLang's MLA runs on compiled kernels only. With attention taken from transformers, all
else of a layer is SGLang's: norms, experts, shared experts, boundaries, and what
fcsd_sglang makes of them; and prompts need no cache.
"""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "fcsd_sglang",
}
os.environ.update(ENVIRONMENT)


PLACE: dict[str, int] = {}
"""Those of this process; see `start`."""


def start(rank: int = 0, ranks: int = 1, experts: int = 1, port: int = 29531) -> None:
    """Make this process one of `ranks` of SGLang; experts are spread over them in
    `experts` parts.
    """
    import fcsd_sglang

    fcsd_sglang.register()
    PLACE.update(rank=rank, ranks=ranks, experts=experts, port=port)


def _publish(folder: Path) -> Any:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_radix_cache=True,
        tp_size=PLACE["ranks"],
        ep_size=PLACE["experts"],
    )
    arguments.resolve_once()
    publish(
        arguments,
        role="scheduler",
        ranks=SpawnRanks(world_rank=PLACE["rank"], gpu_id=0),
    )
    if not torch.distributed.is_initialized():
        bootstrap._init_parallel_groups(
            backend="gloo",
            dist_init_method=f"tcp://127.0.0.1:{PLACE['port']}",
            server_args=arguments,
            gpu_id=0,
        )
    model_config = ModelConfig.from_server_args(arguments)
    bootstrap.init_layer_runtime(model_config=model_config)
    return model_config


def load(folder: Path, original: Path) -> Any:
    """Return SGLang's model of a checkpoint, whose attention is transformers' of the original."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import get_parallel
    from transformers import AutoModelForCausalLM

    model = get_model(
        model_config=_publish(folder),
        load_config=LoadConfig(),
        device_config=DeviceConfig("cpu", gpu_id=0),
    )
    base = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).model
    ranks = get_parallel().tp_size
    for layer, other in zip(model.model.layers, base.layers, strict=True):

        def attention(
            hidden_states: Any,
            positions: Any,
            *,
            of: Any = other.self_attn,
            **rest: Any,
        ) -> Any:
            angles = base.rotary_emb(hidden_states[None], positions[None])
            out = of(
                hidden_states=hidden_states[None],
                position_embeddings=angles,
                attention_mask=None,
            )
            return out[0][0] / ranks  # this rank's part of the sum

        layer.self_attn.forward = attention
    return model


@torch.no_grad()
def logprobs(model: Any, tokens: Any) -> torch.Tensor:
    """Return the log-probabilities after each token of one prompt, as one prefill computes them."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    tokens = torch.as_tensor(tokens)
    batch = SimpleNamespace(
        can_run_tbo=False,
        residual_stream=None,
        forward_mode=ForwardMode.EXTEND,
        input_ids=tokens,
        attn_cp_metadata=None,
    )
    hidden = model.model(tokens, torch.arange(len(tokens)), batch)
    logits = hidden @ model.lm_head.weight.T
    if torch.distributed.get_world_size() > 1:
        parts = [
            torch.empty_like(logits) for _ in range(torch.distributed.get_world_size())
        ]
        torch.distributed.all_gather(parts, logits)
        logits = torch.cat(parts, -1)
    return logits.log_softmax(-1)


def worst(model: Any, folder: Path) -> float:
    """Return the largest difference of a log-probability from fcsd's, over prompts and
    what fcsd generated.
    """
    reference = np.load(folder / "reference.npz")
    differences = []
    for k in range(4):
        tokens = np.concatenate([reference[f"prompt{k}"], reference[f"ids{k}"]])
        expected = torch.from_numpy(reference[f"logprobs{k}"])
        differences.append((logprobs(model, tokens) - expected).abs().max())
    return torch.stack(differences).max().item()  # NaN where one is


def record(model: Any) -> list[str]:
    """Give the list that a forward fills: attention, shared experts, experts, starts
    and waits; see `orders`.
    """
    from sglang.srt.runtime_context import get_parallel

    events: list[str] = []

    def said(event: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            events.append(event)
            return function(*args, **kwargs)

        return run

    for k, layer in enumerate(model.model.layers):
        layer.self_attn.forward = said(f"attention {k}", layer.self_attn.forward)
        schedule = getattr(layer, "farskip_schedule", None)
        if schedule is None:
            continue
        schedule.block = said(
            f"{'mlp' if schedule.dense else 'experts'} {k}", schedule.block
        )
        schedule.shared = schedule.shared and said(f"shared {k}", schedule.shared)
        schedule.communication = _Recording(schedule.communication, events)
    group = get_parallel().tp_group
    group.all_reduce = said("all_reduce", type(group).all_reduce.__get__(group))
    return events


class _Recording:
    def __init__(self, inner: Any, events: list[str]) -> None:
        self.inner, self.events = inner, events

    def start(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        self.events.append(f"start {tag}")
        return self.inner.start(x, tag)

    def wait(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        self.events.append(f"wait {tag}")
        return self.inner.wait(x, tag)


def compare(models: Path, case: str) -> dict[str, Any]:
    """Return how far a checkpoint is from fcsd's reference and from the original's, and
    the order of a step.
    """
    folder, original = models / case, models / f"{case.partition('-')[0]}-original"
    model = load(folder, original)
    comparison = {
        "case": case,
        "worst": worst(model, folder),
        "original": worst(model, original),
    }
    events = record(model)
    logprobs(model, range(8))
    return {**comparison, "events": list(events)}


if __name__ == "__main__":  # one of two ranks: RANK EXPERTS PORT MODELS CASE …
    import json
    import sys

    start(int(sys.argv[1]), 2, int(sys.argv[2]), int(sys.argv[3]))
    for name in sys.argv[5:]:
        print("RESULT", json.dumps(compare(Path(sys.argv[4]), name)), flush=True)
