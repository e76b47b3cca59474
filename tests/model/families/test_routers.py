"""Routers and their choices in every family, original and converted, against the
arguments of the experts.
"""

import pytest
import torch

from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.model.families import FAMILIES, moe_mask
from fcsd.model.families.choices import recording
from fcsd.model.families.routers import find_routers
from tests.reference.tiny import tiny_model
from tests.support import few, user_error

SECOND_LOOK = {
    "dbrx": "its router gives logits only; the block chooses, and hands the choice to the experts",
    "jetmoe": "its router gives pairs sorted by expert, and its attention has experts, too",
    "llama4": "its router gives dense scores; the experts take no indices",
    "llama4_text": "its router gives dense scores; the experts take no indices",
    "deepseek_v4": "its first layers choose by token id; transformers records no router of them",
    "ernie4_5_vl_moe": "transformers records the block, in which text has a router of its own",
}
"""Families whose choice is not simply an output of the recorded module, and why."""


def tokens(rows: int = 2, length: int = 11, vocabulary: int = 99) -> torch.Tensor:
    return torch.randint(
        3, vocabulary, (rows, length), generator=torch.Generator().manual_seed(3)
    )


def used_experts(model, input_ids) -> dict[int, torch.Tensor]:
    """Return (tokens, E) pairs by layer as the experts see them: their indices, the
    rows that reach them, or the logits.
    """
    by_layer, handles = {}, []
    for router in find_routers(model):
        beside = model.get_submodule(router.name.rpartition(".")[0])
        kind = model.config.model_type.removeprefix("farskip_")

        def at_experts(
            module, args, layer=router.layer, width=router.num_experts, kind=kind
        ):
            if kind.startswith("llama4"):
                used = args[0].abs().sum(-1).view(width, -1).T > 0
            else:
                used = torch.zeros(len(args[1]), width).scatter_add_(
                    1, args[1], torch.ones(args[1].shape)
                )
            by_layer[layer] = used.long()

        def at_router(
            module,
            args,
            output,
            layer=router.layer,
            width=router.num_experts,
            top_k=router.top_k,
        ):
            chosen = output[4].topk(top_k).indices
            by_layer[layer] = (
                torch.zeros(len(chosen), width).scatter_(1, chosen, 1).long()
            )

        if kind == "jetmoe":
            handles.append(router.module.register_forward_hook(at_router))
        else:
            handles.append(beside.experts.register_forward_pre_hook(at_experts))
    with torch.no_grad():
        model(input_ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return by_layer


def gives_its_choice(model, router) -> bool:
    """Tell whether transformers records this very module, and its output has the
    experts of each token as a tensor.
    """
    recorded = [
        getattr(entry, "target_class", entry)
        for module in model.modules()
        for recorder in [
            (getattr(module, "_can_record_outputs", None) or {}).get(
                "router_logits", []
            )
        ]
        for entry in (recorder if isinstance(recorder, list) else [recorder])
    ]
    outputs = []
    handle = router.module.register_forward_hook(
        lambda module, args, output: outputs.append(output)
    )
    with torch.no_grad():
        model(tokens(), use_cache=False)
    handle.remove()
    shapes = [
        x.shape
        for x in outputs[0]
        if isinstance(x, torch.Tensor) and x.dtype == torch.int64
    ]
    return type(router.module) in recorded and shapes == [(22, router.top_k)]


@pytest.mark.contract
@pytest.mark.parametrize("family", few(sorted(FAMILIES)))
def test_each_moe_layer_has_one_router_and_its_choices_are_those_of_the_experts(
    family: str,
) -> None:
    model = tiny_model(family)
    layers = [
        k for k, is_moe in enumerate(moe_mask(model.config, FAMILIES[family])) if is_moe
    ]
    input_ids = tokens()
    for kind in ("original", "converted"):
        if kind == "converted":
            convert_model(model, Connectivity("all"))
        routers = find_routers(model)
        assert [router.layer for router in routers] == layers
        wanted = used_experts(model, input_ids)
        with recording(model) as recorded, torch.no_grad():
            model(input_ids, use_cache=False)
        for router, (experts, logits) in zip(routers, recorded.take(), strict=True):
            assert experts.shape == (22, router.top_k), router
            assert logits.shape == (22, router.num_experts), router
            pairs = torch.zeros_like(logits).scatter_(1, experts, 1).long()
            assert torch.equal(pairs, wanted[router.layer]), (kind, router.name)
            assert not router.module._forward_hooks
    assert gives_its_choice(model, routers[0]) == (family not in SECOND_LOOK)


def test_a_model_without_routers_is_refused_in_one_line() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 32,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
    with user_error(
        r"^LlamaForCausalLM \(model type 'llama'\): no router found; [^\n]*$"
    ):
        find_routers(model)


def test_a_router_that_was_not_called_is_named() -> None:
    model = tiny_model("mixtral", num_hidden_layers=2)
    with recording(model) as recorded:
        model.model.layers[0].mlp(torch.zeros(1, 3, 32))
        with user_error(r"router model\.layers\.1\.mlp\.gate chose nothing"):
            recorded.take()
