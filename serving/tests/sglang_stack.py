"""The layers of SGLang's models in one process, without its engine, and with the
attention of transformers.

SGLang's MLA runs on compiled kernels only. With attention taken from transformers, all
else of a layer is SGLang's: norms, experts, shared experts, boundaries, and what
fcsd_sglang makes of them; and prompts need no cache.
"""

import inspect
import json
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
    import cpu_kernels  # noqa: F401

    PLACE.update(rank=rank, ranks=ranks, experts=experts, port=port)


_BACKENDS = {"GptOssForCausalLM": "triton"}
"""Attention of a family that SGLang would not start with torch's; neither is called."""


def _publish(folder: Path) -> Any:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    config = json.loads((folder / "config.json").read_text())
    architecture = config["architectures"][0].removeprefix("FarSkip")
    arguments = ServerArgs(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        attention_backend=_BACKENDS.get(architecture, "torch_native"),
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
    text = model_config.hf_text_config
    # what the engine adds on a CPU
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if hasattr(text, name):
            setattr(text, f"{name}_cpu", getattr(text, name))
    bootstrap.init_layer_runtime(model_config=model_config)
    return model_config


def load(folder: Path, original: Path) -> Any:
    """Return SGLang's model of a checkpoint, whose attention is transformers' of the original."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import get_parallel
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    model = get_model(
        model_config=_publish(folder),
        load_config=LoadConfig(),
        device_config=DeviceConfig("cpu", gpu_id=0),
    )
    wrapped = "text_config" in json.loads((original / "config.json").read_text())
    auto: Any = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    base = auto.from_pretrained(original, dtype=torch.float32).model
    base = base.language_model if wrapped else base
    ranks = get_parallel().tp_size
    for k, layer in enumerate(model.model.layers):
        owner, name = mixer(layer)
        names = list(inspect.signature(getattr(owner, name)).parameters)

        def attention(
            *given: Any, k: int = k, names: list[str] = names, **named: Any
        ) -> Any:
            arguments = {**dict(zip(names, given, strict=False)), **named}
            read, positions = arguments["hidden_states"], arguments.get("positions")
            # this rank's part of the sum
            out = _attend(base, k, read[None], positions)[0] / ranks
            return (out, None) if "kv_states" in names else out

        setattr(owner, name, attention)
    return model


def mixer(layer: Any) -> tuple[Any, str]:
    """Return what has a layer's attention as a function, and under which name."""
    from fcsd_sglang.families import ROWS

    names = {name for row in ROWS.values() for name in row.attention}
    (name,) = (name for name in sorted(names) if hasattr(layer, name))
    attention = getattr(layer, name)
    return (
        (attention, "forward")
        if isinstance(attention, torch.nn.Module)
        else (layer, name)
    )


def _attend(base: Any, k: int, hidden_states: Any, positions: Any) -> Any:
    """Return the output of attention in layer k of transformers, for one whole prompt."""
    from transformers import masking_utils

    attention = next(
        module
        for name in ("self_attn", "linear_attn", "conv")
        if (module := getattr(base.layers[k], name, None)) is not None
    )
    if positions is None:
        return attention(hidden_states)
    kinds = getattr(base.config, "layer_types", None)
    mask: Any = masking_utils.create_causal_mask
    if kinds and kinds[k] == "sliding_attention":
        mask = masking_utils.create_sliding_window_causal_mask
    rotary = getattr(base, "rotary_emb", None) or base.pos_emb
    by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
    return attention(
        hidden_states=hidden_states,
        position_embeddings=rotary(
            hidden_states, positions[None], *([kinds[k]] if by_kind else [])
        ),
        attention_mask=mask(
            base.config, hidden_states, None, None, position_ids=positions[None]
        ),
    )[0]


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
        return_hidden_states_before_norm=False,
    )
    hidden = model.model(tokens, torch.arange(len(tokens)), batch)
    if isinstance(hidden, tuple):  # also what the last norm reads
        hidden = hidden[0]
    logits = hidden @ model.lm_head.weight.T
    logits = logits / getattr(model.config, "logits_scaling", 1)
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
        owner, name = mixer(layer)
        setattr(owner, name, said(f"attention {k}", getattr(owner, name)))
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
    import sys

    start(int(sys.argv[1]), 2, int(sys.argv[2]), int(sys.argv[3]))
    for name in sys.argv[5:]:
        print("RESULT", json.dumps(compare(Path(sys.argv[4]), name)), flush=True)
