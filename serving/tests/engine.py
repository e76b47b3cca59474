"""Shared by the tests of the engine: its environment, prompts, the comparison with
fcsd's reference, the recorder.
"""

import functools
import gc
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import delta_rule
import numpy as np
import torch
import ungated_experts
from launch import ENVIRONMENT

os.environ.update(
    {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
)

NEW_TOKENS = 16
BOUND = 1e-5
"""Nats between two implementations in float32."""


def stand_in_for_torchvision() -> None:
    """Let the files of wrappers be imported, which name functions and classes for
    images of files that need torchvision.
    """
    for file, names in (
        (
            "llama4.image_processing_llama4",
            ("find_supported_resolutions", "get_best_fit"),
        ),
        (
            "qwen2_vl.image_processing_qwen2_vl",
            ("Qwen2VLImageProcessor", "smart_resize"),
        ),
        (
            "gemma4.image_processing_gemma4",
            ("Gemma4ImageProcessorKwargs", "get_aspect_ratio_preserving_size"),
        ),
    ):
        images = types.ModuleType(f"transformers.models.{file}")
        vars(images).update(dict.fromkeys(names))
        sys.modules[images.__name__] = images


def inspect_here(*families: str) -> None:
    """Give vLLM the classes of families themselves: it would inspect each by its name,
    in a process of 10 seconds.
    """
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins

    from fcsd_vllm import models
    from fcsd_vllm.families import FAMILIES

    load_general_plugins()
    for name in families:
        family = FAMILIES[name]
        for architecture in (
            family.architecture,
            *((family.causal_lm,) if family.like else ()),
        ):
            ModelRegistry.register_model(
                architecture, getattr(models, family.architecture)
            )


def start_engine(folder: Path, **options: Any) -> Any:
    """Return an `LLM` of a tiny checkpoint in float32; `options` are its arguments."""
    from vllm import LLM

    if folder.name.startswith(("deepseek", "instella")):
        # the default one has no float32
        options.setdefault("attention_backend", "CPU_MLA")
    if folder.name.startswith("lfm2"):
        # its operator for CPUs is wrong for queries of several heads
        options.setdefault(
            "compilation_config", {"custom_ops": ["all", "-rotary_embedding"]}
        )
    if folder.name.startswith("llama4-"):
        options.setdefault("limit_mm_per_prompt", {"image": 0})
    if folder.name.startswith("gemma4-"):
        options.setdefault("limit_mm_per_prompt", {"image": 0, "video": 0})
    if folder.name.startswith(
        ("granitemoehybrid", "nemotron_h", "qwen3_next", "qwen3_5")
    ):
        # the states of Mamba layers and linear attention make blocks too large
        options.setdefault("enable_prefix_caching", False)
    if folder.name.startswith("qwen3_5_moe-"):
        options.setdefault("limit_mm_per_prompt", {"image": 0, "video": 0})
    if folder.name.startswith(("qwen3_next", "qwen3_5")):
        delta_rule.stand_in()
    if folder.name.startswith("nemotron_h"):
        ungated_experts.stand_in()
    return LLM(
        str(folder),
        **{
            "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8,
            "kv_cache_memory_bytes": 2**24, "disable_log_stats": True, **options,
        },
    )  # fmt: skip


_KEPT: list[Any] = []


def stop_engine(llm: Any = None) -> None:
    """Free what an engine in this process holds, so that another can start.

    Under torchrun it is kept: with the engine its groups would end, and ranks cannot be
    joined a second time.
    """
    if "RANK" in os.environ:
        _KEPT.append(llm)
        return
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    if llm is not None:
        llm.llm_engine.engine_core.shutdown()
    del llm
    cleanup_dist_env_and_memory()
    gc.collect()


def model_of(llm: Any) -> Any:
    """Return the model of an engine in this process."""
    return llm.apply_model(lambda model: model)[0]


def generate(
    llm: Any,
    reference: Path,
    prompt_logprobs: int | None = 5,
    which: Sequence[int] = range(4),
    **options: Any,
) -> list[Any]:
    """Return what the engine makes of prompts of a reference, 16 greedy tokens each,
    with the top five log-probs.

    Those of prompts are not to be had of what is read from the prefix cache.
    """
    from vllm import SamplingParams

    arrays = np.load(_file(reference))
    prompts = [{"prompt_token_ids": arrays[f"prompt{k}"].tolist()} for k in which]
    sampling = SamplingParams(
        temperature=0,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        logprobs=5,
        prompt_logprobs=prompt_logprobs,
        detokenize=False,
    )
    return llm.generate(prompts, sampling, use_tqdm=False, **options)


def _file(reference: Path) -> Path:
    """Return the file itself, or the one in the folder of a checkpoint."""
    return reference if reference.suffix else reference / "reference.npz"


def compare(
    outputs: list[Any], reference: Path, which: Sequence[int] = range(4)
) -> tuple[int, float]:
    """Return how many prompts have all ids equal to the reference's, and the largest
    difference of a log-probability.

    Of a prompt whose ids differ only the prompt's own log-probabilities are compared.
    """
    arrays = np.load(_file(reference))
    equal, worst = 0, 0.0
    for k, output in zip(which, outputs, strict=True):
        logprobs, ids = arrays[f"logprobs{k}"], list(output.outputs[0].token_ids)
        same = ids == arrays[f"ids{k}"].tolist()
        equal += same
        prompt = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
        rows = [*prompt, *(output.outputs[0].logprobs if same else ())]
        for position, row in enumerate(rows):
            for token, entry in (row or {}).items():
                worst = max(
                    worst, abs(entry.logprob - float(logprobs[position - 1, token]))
                )
    return equal, worst


class Recorder:
    """A backend that writes down what happens around another one's collectives, in the
    order of execution.

    `all_reduce` stands for a collective of the engine's own; `attention`, `experts`,
    `shared`, `mlp` for modules.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.events: list[str] = []
        self.undo: list[Any] = []

    def start(self, x: Any, tag: str) -> Any:
        self.events.append(f"start {tag}")
        before = len(self.events)
        summed = self.inner.start(x, tag)
        del self.events[before:]  # the blocking backend's own all_reduce is this start
        return summed

    def wait(self, x: Any, tag: str) -> Any:
        self.events.append(f"wait {tag}")
        return self.inner.wait(x, tag)

    def watch(self, attention: Any, event: str) -> None:
        """Write an event down when a layer's attention runs; compiled models run no
        hooks, so its kernel is wrapped.
        """
        kernel = getattr(getattr(attention, "attn", None), "impl", None)
        if kernel is None:
            attention.register_forward_pre_hook(self.note(event))
            return
        run = kernel.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.events.append(event)
            return run(*args, **kwargs)

        kernel.forward = forward

    def note(self, event: str) -> Any:
        """A hook that writes an event down."""
        return lambda *_: self.events.append(event)

    def before(self, run: Any, event: str) -> Any:
        """Return a function that writes an event down before it runs."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.events.append(event)
            return run(*args, **kwargs)

        return noted

    def forget(self) -> None:
        """Take back what `record` changed outside the engine."""
        for undo in self.undo:
            undo()


def record(llm: Any) -> Recorder:
    """Put a recorder into an engine that runs eagerly; the events begin with its next step."""
    from vllm.distributed.parallel_state import get_tp_group

    schedules = schedules_of(llm)
    recorder = Recorder(model_of(llm).farskip_communication)
    for schedule in schedules:
        schedule.communication = recorder
    for k, layer in enumerate(layers_of(llm)):
        if (attention := attention_of(layer)) is not None:
            recorder.watch(attention, f"attention {k}")
    for schedule in schedules:
        k = schedule.index
        if schedule.block is not None:
            schedule.block.register_forward_pre_hook(
                recorder.note(f"{'mlp' if schedule.dense else 'experts'} {k}")
            )
        if schedule.shared is not None:
            schedule.shared.register_forward_pre_hook(recorder.note(f"shared {k}"))
    group = get_tp_group()
    stock = group.all_reduce

    def all_reduce(x: Any) -> Any:
        recorder.events.append("all_reduce")
        return stock(x)

    group.all_reduce = all_reduce
    recorder.undo.append(lambda: delattr(group, "all_reduce"))
    return recorder


def kernel_of(layer: Any) -> tuple[Any, str] | None:
    """Return what holds the kernel of a layer's attention, and under which name, as
    vLLM's operator finds it; None for linear attention.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    kernels = (
        part for part in layer.modules() if isinstance(part, Attention | MLAAttention)
    )
    if (kernel := next(kernels, None)) is None:
        return None
    return (
        (kernel, "forward_impl")
        if isinstance(kernel, MLAAttention)
        else (kernel.impl, "forward")
    )


def exchanging(llm: Any) -> list[Any]:
    """Return the schedules of rewired MoE layers whose experts are spread over
    data-parallel ranks.
    """
    return [
        each
        for each in schedules_of(llm)
        if getattr(each, "exchange", None) is not None
    ]


class Transport:
    """A backend that writes down where another one's exchanges begin and are waited for."""

    def __init__(self, inner: Any, events: list[str]) -> None:
        self.inner = inner
        self.events = events

    def gather(self, tensors: Any, sizes: Any, tag: str) -> Any:
        self.events.append(f"start {tag}")
        return self._watched(self.inner.gather(tensors, sizes, tag), tag)

    def scatter(self, x: Any, output: Any, sizes: Any, tag: str) -> Any:
        self.events.append(f"start {tag}")
        return self._watched(self.inner.scatter(x, output, sizes, tag), tag)

    def _watched(self, wait: Any, tag: str) -> Any:
        def watched() -> Any:
            self.events.append(f"wait {tag}")
            return wait()

        return watched


def record_exchange(llm: Any) -> Recorder:
    """Put a recorder into an engine whose experts are spread over data-parallel ranks;
    modules run hooks only eagerly.

    `attention` is where it begins, `kernel` where its kernel does; `gather` and
    `scatter` are exchanges of vLLM's own.
    """
    from vllm.distributed.parallel_state import get_dp_group

    recorder = Recorder(None)
    for k, layer in enumerate(layers_of(llm)):
        if (attention := attention_of(layer)) is None:
            continue
        attention.register_forward_pre_hook(recorder.note(f"attention {k}"))
        if (place := kernel_of(layer)) is None:
            continue
        owner, name = place
        outer = getattr(owner, name)
        watched = recorder.before(vars(outer).get("kernel", outer), f"kernel {k}")
        if "kernel" in vars(outer):
            vars(outer)["kernel"] = watched
        else:
            setattr(owner, name, watched)
    for schedule in schedules_of(llm):
        k = schedule.index
        if schedule.block is None:
            continue
        if schedule.dense:
            schedule.block.register_forward_pre_hook(recorder.note(f"mlp {k}"))
            continue
        experts = schedule.exchange.kernel.impl.fused_experts
        experts.apply = recorder.before(experts.apply, f"experts {k}")
        if isinstance(schedule.shared, torch.nn.Module):
            schedule.shared.register_forward_pre_hook(recorder.note(f"shared {k}"))
        if hasattr(schedule.exchange.halves, "transport"):
            halves = schedule.exchange.halves
            halves.transport = Transport(halves.transport, recorder.events)
    group = get_dp_group()
    for name, event in (("all_gatherv", "gather"), ("reduce_scatterv", "scatter")):
        setattr(group, name, recorder.before(getattr(group, name), event))
        recorder.undo.append(functools.partial(delattr, group, name))
    return recorder


def schedules_of(llm: Any) -> list[Any]:
    """Return the schedules of an engine's rewired layers, in order."""
    from fcsd_vllm.schedule import Schedule

    table = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return [each for each in table.values() if isinstance(each, Schedule)]


def layers_of(llm: Any) -> list[Any]:
    """Return the decoder layers of an engine's model."""
    model = model_of(llm)
    return list(getattr(model, "language_model", model).model.layers)


def attention_of(layer: Any) -> Any:
    """Return the attention module of a decoder layer, or another mixer; None for a layer
    of experts alone.
    """
    names = ("self_attn", "linear_attn", "attn", "short_conv", "mamba", "mixer")
    mixer = next(
        (
            getattr(layer, name)
            for name in names
            if getattr(layer, name, None) is not None
        ),
        None,
    )
    return None if hasattr(mixer, "experts") else mixer
