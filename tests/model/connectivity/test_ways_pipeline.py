"""Pipelines of two ranks: that of transformers, which passes one tensor on, and that of
torch, with stages cut by hand.
"""

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import nn

from fcsd.model.connectivity import (
    Connectivity,
    convert_checkpoint,
    convert_model,
    load_model,
    pipeline_cuts,
    rewire,
)
from tests.float64 import BOUND
from tests.model.connectivity.test_ways_parallel import PARTS
from tests.reference.ranks import run_ranks
from tests.reference.tiny import tiny_model
from tests.support import few, user_error

X = torch.randint(3, 99, (4, 12), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("family", "connectivity", "cuts"),
    [
        ("qwen3_moe", Connectivity("none"), [1, 2, 3]),
        ("qwen3_moe", Connectivity("all"), []),
        ("qwen3_moe", Connectivity([0, 1, 3]), [2, 3]),
        ("qwen3_moe", Connectivity({"last": 2}), [1, 2]),
        ("qwen3_moe", Connectivity("all", attention="full"), [1, 2, 3]),
        # a dense layer leaves nothing in flight
        ("deepseek_v2", Connectivity("all"), [1]),
        ("llama4_text", Connectivity([1, 2]), [1, 3]),
    ],
)
def test_a_pipeline_may_be_cut_where_a_layer_hands_on_one_tensor(
    family, connectivity, cuts
):
    model = tiny_model(family)
    convert_model(model, connectivity)
    assert pipeline_cuts(model) == cuts
    single = []
    for k, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda _, __, out, k=k: (
                single.append(k + 1) if torch.is_tensor(out) else None
            )
        )
    model(X, use_cache=False)
    assert single == [*cuts, 4]


@pytest.mark.parametrize("num_layers", [4, 7])
@pytest.mark.parametrize("num_stages", [2, 3, 4, 5])
def test_the_cuts_that_are_checked_are_those_of_transformers(num_layers, num_stages):
    from transformers.distributed.pipeline_parallel import PipelineStage

    stage = object.__new__(PipelineStage)
    # 5.24 gives the remaining layers to the first stages, 5.23 to the last one
    stage.pp_size = num_stages
    starts = {
        stage.layer_range_for_rank(rank, num_layers)[0] for rank in range(1, num_stages)
    } - {0}
    model = tiny_model("qwen3_moe", num_hidden_layers=num_layers)
    for k in range(1, num_layers):
        # something is in flight before layer k only
        convert_model(model, Connectivity([k - 1, k]))
        if k in starts:
            with pytest.raises(rewire.StageError, match=f"one begins at layer {k},"):
                rewire.check_stages(model.model.layers, num_stages)
        else:
            rewire.check_stages(model.model.layers, num_stages)


def transformers_pipeline(rank, folder, families):
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(pp_size=2)
    settings = {
        "max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    results = {}
    for family in families:
        for name, connectivity in (
            ("original", None),
            ("rewired", Connectivity([0, 1, 3])),
        ):
            try:
                model = load_model(
                    folder / family,
                    connectivity=connectivity,
                    distributed_config=config,
                )
            except AttributeError as error:
                results[family, name] = str(error)
                continue
            one = load_model(folder / family, connectivity=connectivity)
            with torch.no_grad():
                error = (
                    (model(X, use_cache=False).logits - one(X, use_cache=False).logits)
                    .abs()
                    .max()
                )
            mask = torch.ones_like(X)
            made = [
                m.generate(X, attention_mask=mask, **settings) for m in (model, one)
            ]
            results[family, name] = (float(error), torch.equal(*made))
        with user_error(
            r"one begins at layer 2, where .* of layer 1 is in flight"
        ) as caught:
            load_model(
                folder / family,
                connectivity=Connectivity("all"),
                distributed_config=config,
            )
        assert "leave layer 2 regular" in str(caught.value)
        convert_checkpoint(folder / family, folder / f"{family}-{rank}")
        with user_error("one begins at layer 2"):
            load_model(folder / f"{family}-{rank}", distributed_config=config)
    return results


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("families", PARTS, ids=["few", "others"])
def test_transformers_pipelines_are_cut_before_a_regular_layer_and_refused_elsewhere(
    families, tmp_path
):
    for family in families:
        tiny_model(family).save_pretrained(tmp_path / family)
    for results in run_ranks(transformers_pipeline, 2, tmp_path, families):
        for family in families:
            original, rewired = results[family, "original"], results[family, "rewired"]
            if family == "llama4_text":
                assert "has no attribute 'language_model'" in original, (
                    "the original can do it now"
                )
                assert "has no attribute 'language_model'" in rewired
                continue
            assert original[0] < BOUND and original[1], (family, original)
            assert rewired[0] < BOUND and rewired[1], (family, rewired)


class Stage(nn.Module):
    """A stage of decoder layers `layers`, with the embedding before the first and the
    head after the last.
    """

    def __init__(self, model, layers):
        super().__init__()
        self.model, self.indices = model, layers

    def forward(self, *streams):
        decoder = self.model.model
        h = decoder.embed_tokens(streams[0]) if 0 in self.indices else streams
        if len(h) == 1:
            h = h[0]
        size, length, _ = (h[0] if isinstance(h, tuple) else h).shape
        positions = torch.arange(length).expand(size, length)
        mask = torch.full((size, 1, length, length), -torch.inf).triu(1)
        rotary = decoder.rotary_emb(torch.zeros(size, length, 1), positions)
        for k in self.indices:
            h = decoder.layers[k](
                h,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=rotary,
            )
        return self.model.lm_head(decoder.norm(h)) if 3 in self.indices else h


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def torch_pipeline(rank, families):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    results = {}
    for family in families:
        model = tiny_model(
            family, **({"sliding_window": 64} if family == "gpt_oss" else {})
        )
        convert_model(model, Connectivity("all"))
        assert 2 not in pipeline_cuts(model)
        expected = model(X, use_cache=False).logits
        loss_of(expected, X).backward()
        gradients = {
            name: p.grad for name, p in model.named_parameters() if p.grad is not None
        }
        model.zero_grad()

        layers = range(2) if rank == 0 else range(2, 4)
        stage = PipelineStage(Stage(model, layers), rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss_of)
        logits = schedule.step(X) if rank == 0 else schedule.step(target=X)
        error = 0.0 if rank == 0 else float((logits - expected).detach().abs().max())
        own = {
            name: p.grad for name, p in model.named_parameters() if p.grad is not None
        }
        worst = max(
            float((gradient - gradients[name]).abs().max())
            for name, gradient in own.items()
        )
        results[family] = (error, worst, set(own), set(gradients))
        dist.barrier()
    return results


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("families", PARTS, ids=["few", "others"])
def test_a_stage_cut_by_hand_hands_on_the_pair(families):
    first, second = run_ranks(torch_pipeline, 2, families)
    for family in families:
        for error, worst, _, _ in (first[family], second[family]):
            assert error < BOUND and worst < BOUND, (family, error, worst)
        assert first[family][2] | second[family][2] == first[family][3], family


@pytest.mark.breadth
@pytest.mark.parametrize("rewired", few([True, False], 1))
def test_the_tracing_front_end_of_torch_hands_on_the_pair_since_transformers_5_24(
    rewired,
):
    from torch.distributed.pipelining import SplitPoint, pipeline

    model = tiny_model("qwen3_moe")
    if rewired:
        convert_model(model, Connectivity("all"))
    inputs = {"input_ids": X, "use_cache": False}
    pipe = pipeline(
        model, (), inputs, split_spec={"model.layers.2": SplitPoint.BEGINNING}
    )
    assert pipe.num_stages == 2
    if Version(transformers.__version__) < Version("5.24"):
        with pytest.raises(
            RuntimeError, match="Expected positional argument for parameter unsqueeze"
        ):
            pipe(**inputs)
        return
    others = {"input_ids": X.flip(1), "use_cache": False}
    (logits,) = pipe(**others)
    assert (logits - model(**others).logits).abs().max() < BOUND
