"""Families whose layer is not the plain one: what `test_rewire` does not test.

`test_rewire`, `test_load` and `test_export` cover these families like all others.
"""

import pytest
import torch

from fcsd.base.errors import UserError
from fcsd.model.connectivity import (
    Connectivity,
    convert_checkpoint,
    convert_model,
    load_model,
    rewire,
    unconvert_model,
)
from fcsd.model.families import FAMILIES
from tests.float64 import BOUND, error
from tests.reference.adapted import LAYERS, adapted_forward, adapted_streams
from tests.reference.images import image_inputs
from tests.reference.multimodal import multimodal_reference_forward
from tests.reference.mutants import mutated
from tests.reference.tiny import X, logits, tiny_model
from tests.support import few, user_error

SIDES = (("partial", "outdated"), ("partial", "full"), ("full", "outdated"))

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("float64")]


def field(layers, attention="partial", mlp="outdated"):
    return {"version": 1, "layers": list(layers), "attention": attention, "mlp": mlp}


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("cohere2_moe", {"shared_expert_combination_strategy": "sum", "expert_selection_fn": "sigmoid"}),
        ("cohere2_moe", {"num_shared_experts": 0, "rms_norm_eps": 1e-5}),
        ("cohere2_moe", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared", "shared", "shared"]}),
        ("glm_moe_dsa", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}),
        ("beam", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}),
        ("inkling_text", {"mlp_layer_types": ["sparse", "sparse", "dense", "sparse"], "n_shared_experts": 1}),
        ("axk1", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}),
        ("afmoe", {"num_dense_layers": 2, "mup_enabled": False}),
        ("kolibri1", {"norm_topk_prob": False}),
        ("flex_olmo", {"norm_topk_prob": True}),
        ("minimax", {"layer_types": ["linear_attention"] * 4}),
        ("inkling2_text", {"n_layers_per_attn_res_block": 1}),
        ("inkling2_text", {"n_layers_per_attn_res_block": 6, "layer_types": ["hybrid"] * 4}),
        (
            "nemotron_h",
            {
                "layers_block_type": ["moe", "mlp", "moe", "moe"],
                "moe_latent_size": None,
            },
        ),
    ],
)  # fmt: skip
def test_members_of_a_family_with_other_settings_compute_the_equations(name, overrides):
    model = tiny_model(name, **overrides)
    for layers in (range(4), [1, 2]):
        for sides in SIDES[:2] if FAMILIES[name].layout == "parallel" else SIDES:
            with torch.no_grad():
                expected, _ = adapted_forward(model, X, layers, *sides)
            convert_model(model, Connectivity(list(layers), *sides), regular_ok=True)
            assert error(logits(model), expected) < BOUND, (layers, sides)
            unconvert_model(model)


def in_flight(model, name, module=rewire):
    """Return (o_k, o_k without what is in flight) by index, for every layer that has
    something in flight.
    """
    pairs = {}

    def keep(index):
        def hook(_, args, out):
            if isinstance(out, tuple) and (
                FAMILIES[name].side_output is None or len(out) == 3
            ):
                pairs[index] = out[:2]

        return hook

    stack = module.decoder_layers(model, FAMILIES[name])
    hooks = [
        layer.register_forward_hook(keep(index)) for index, layer in enumerate(stack)
    ]
    try:
        logits(model)
    finally:
        for hook in hooks:
            hook.remove()
    return pairs


def largest_error(module, name, layers=(0, 1, 2, 3)):
    """Return the error of the logits and of the layers' outputs; infinite where the
    rewired model does not run.

    The outputs of layers are compared themselves, because a norm that reads them hides
    a factor.
    """
    model = tiny_model(name)
    with torch.no_grad():
        expected, _ = adapted_forward(model, X, layers)
        streams, rests = adapted_streams(model, X, layers)
    module.rewire(model, FAMILIES[name], field(layers))
    try:
        worst = error(logits(model), expected)
        pairs = in_flight(model, name, module)
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return float("inf")
    followed = {k for k in layers if k + 1 in layers and rests[k] is not None}
    assert pairs.keys() == followed
    for k, (o, partial) in pairs.items():
        if partial is None:
            return float("inf")
        worst = max(worst, error(o, streams[k + 1]), error(partial, rests[k]))
    return worst


@pytest.mark.parametrize("name", few(sorted(LAYERS), 8))
def test_what_is_handed_on_is_the_stream_without_what_is_in_flight(name):
    assert largest_error(rewire, name) < BOUND
    assert largest_error(rewire, name, (1, 2)) < BOUND


MIXED = ("deepseek_v4",)
STREAMS = (*MIXED, "hy_v4", "qwen4_exp_text")
MUTANTS = {
    "what a norm follows is taken apart": (
        "carry and family.additive and has_shared",
        "carry and has_shared",
        ("afmoe", "kolibri1", "axk1", "inkling_text"),
    ),
    "the average of shared and routed is forgotten": (" * self.plan.shared_scale", "", ("cohere2_moe",)),
    "what the residual connection keeps is forgotten": (
        "rest = self.kept(1, rest)",
        "rest = self.after_attention",
        ("beam", "minimax", "gemma4_text"),
    ),
    "a depth is taken for a factor": ('if rule == "depth" else value', "if False else value", ("beam",)),
    "a factor is taken for a depth": ('if rule == "depth" else value', "if True else value", ("minimax",)),
    "parallel: the MLP reads what attention reads": (
        "x = self.normed_stream(self.o)", "x = self.norm(family.in_norm, self.a)", ("cohere2_moe",),
    ),
    "parallel: attention's output is in flight, too": (
        "self.after_attention = self.o + out[0]", "self.after_attention = self.o", ("cohere2_moe",),
    ),
    "post-norm: attention reads the full stream": (
        "hidden_states = self.normed_stream(self.a)", "hidden_states = self.normed_stream(self.o)",
        ("flex_olmo", "minimax"),
    ),
    "post-norm: the MLP sees attention": (
        "            if self.plan.outdated:\n                x = ",
        "            if self.plan.outdated:\n                _ = ", ("flex_olmo", "minimax"),
    ),
    "post-norm: the norm before the MLP is left out": (
        "x = self.norm(family.mlp_norm, self.kept(0, self.normed_stream(self.o)))",
        "x = self.kept(0, self.normed_stream(self.o))", ("minimax",),
    ),
    "post-norm: the norm of the stream is left out": (
        "x = self.norm(family.mlp_norm, self.kept(0, self.normed_stream(self.o)))",
        "x = self.norm(family.mlp_norm, self.kept(0, self.o))", ("minimax",),
    ),
    "several readers: the last one is taken for the stream": (
        "if self.after_attention is None:\n            self.after_attention = h", "self.after_attention = h",
        ("gemma4_text",),
    ),
    "several readers: only the first reads the outdated stream": (
        "for name in family.mlp_norm if several else", "for name in family.mlp_norm[:1] if several else",
        ("gemma4_text",),
    ),
    "norms inside a module: the module is called as it is": (
        "norms = {family.norms: forward}", "norms = {family.norms: self.norms}", ("dbrx",),
    ),
    "a second output: what is in flight is lost": (
        "attention_input, value = value", "_, value = value", ("glm_moe_dsa", "zaya"),
    ),
    "blocks: a branch leaves the stream before the one before it": (
        "rest = self.o if self.family.layout == 'blocks' else",
        "rest = self.a if self.family.layout == 'blocks' else", ("nemotron_h",),
    ),
    "streams: attention reads all of them": (
        "return self.connect(0, self.a, self.o)", "return self.connect(0, self.o, self.o)", STREAMS,
    ),
    "streams: the MLP reads them unmixed": (
        "return self.connect(1, self.kept(0, self.o), h)", "return self.connect(1, self.o, h)", MIXED,
    ),
    "streams: the MLP sees attention": (
        "return self.connect(1, self.kept(0, self.o), h)", "return self.connect(1, h, h)", STREAMS,
    ),
    "streams: the mix is computed from what the branch reads": (
        'values["mix"] = self.connection(side, whole)["mix"]', "pass", MIXED,
    ),
    "streams: the mix is not transposed": ("mix.to(stream.dtype).transpose(-1, -2)", "mix.to(stream.dtype)", MIXED),
    "streams: those that attention reads are kept": ('values["streams"] = whole', "pass", ("qwen4_exp_text",)),
    "streams: a branch before attention reads all of them": (
        "getattr(self.layer, self.family.stream_branch)(self.a,",
        "getattr(self.layer, self.family.stream_branch)(self.o,", ("qwen4_exp_text",),
    ),
    "streams: a branch before attention is hidden from it": (
        "self.a = self.o if whole else self.a + out", "pass", ("qwen4_exp_text",),
    ),
    "streams: the shared output is spread like that of attention": (
        "self.spread(1, shared_output)", "self.spread(0, shared_output)", STREAMS,
    ),
    "sources: attention reads what is in flight": (
        "return self.mixed(0, self.a)", "return self.mixed(0, self.o)", ("inkling2_text",),
    ),
    "sources: the MLP sees attention": (
        "            return self.mixed(1, self.o)", "            pass", ("inkling2_text",),
    ),
    "sources: a stream with which a block begins is read twice": (
        "return self.mixed(1, self.o)",
        "return getattr(self.layer, self.family.connections[1])(sources, self.o)", ("inkling2_text",),
    ),
    "a second output: it is not handed on": (
        "return (o, (partial, side_output))", "return (o, (partial, side_value(side, args, kwargs)))",
        ("glm_moe_dsa", "zaya"),
    ),
    "a second output: what a layer is given by position stays as it was": (
        "return ((value, *args[1:]), kwargs)", "return (args, kwargs)", ("zaya",),
    ),
    "the scale's share of the stream is forgotten": (
        "return value(torch.zeros_like(stream), stream)", "return stream", ("zaya",),
    ),
    "the scale of the other sum is taken": (
        "self.family.residual_names[side]", "self.family.residual_names[1 - side]", ("zaya",),
    ),
}  # fmt: skip
"""What is wrong -> (text of the rewiring, what a mutant has in its place, families in
which it must show).
"""


@pytest.mark.parametrize("mutant", few(MUTANTS, 8))
def test_mutants_of_the_rewiring_differ_from_the_reference(mutant, monkeypatch):
    old, new, names = MUTANTS[mutant]
    module = mutated(old, new, monkeypatch)
    for name in names:
        assert largest_error(module, name) > 0.05, name


WRAPPER_MUTANTS = {
    "only the full stream is edited between layers": (
        "tuple((edit(model, stream, *args) for stream in hidden_states))",
        "(edit(model, hidden_states[0], *args), hidden_states[1])", "qwen3_vl_moe",
    ),
    "the gate's share of the stream is forgotten": (
        "return value(stream, torch.zeros_like(stream))", "return stream", "muse_spark",
    ),
    "the gate of the other sum is taken": (
        "self.family.residual_names[side]", "self.family.residual_names[1 - side]", "muse_spark",
    ),
    "a second output: what is in flight is lost": (
        "attention_input, value = value", "_, value = value", "mistral_large4",
    ),
    "which tokens are pieces of images is forgotten": (
        "args = (self.arguments.get(family.moe_argument),)", "args = ()", "ernie4_5_vl_moe",
    ),
}  # fmt: skip
"""As `MUTANTS`, with a multimodal wrapper each."""


@pytest.mark.parametrize("mutant", WRAPPER_MUTANTS)
def test_mutants_of_the_rewiring_of_wrappers_differ_from_the_reference(
    mutant, monkeypatch
):
    old, new, name = WRAPPER_MUTANTS[mutant]
    inputs = image_inputs(name)
    for module, wrong in ((rewire, False), (mutated(old, new, monkeypatch), True)):
        model = tiny_model(name)
        with torch.no_grad():
            expected, _ = multimodal_reference_forward(model, range(4), **inputs)
            module.rewire(model, FAMILIES[name], field(range(4)))
            try:
                distance = error(model(**inputs, use_cache=False).logits, expected)
            except (TypeError, AttributeError):
                distance = float("inf")
        assert distance > 0.05 if wrong else distance < BOUND


def test_layers_that_share_keys_and_values_compute_the_equations():
    """Mistral Large 4: layer 1 reads the keys and values that layer 0 computed from
    what it read itself.
    """
    model = tiny_model("mistral_large4", kv_source_layers=[0, 0, 2, 3])
    assert model.model.language_model.layers[1].self_attn.is_kv_shared_layer
    for layers in (range(4), [0, 1], [1, 2]):
        with torch.no_grad():
            expected, _ = multimodal_reference_forward(model, layers, input_ids=X)
        convert_model(model, Connectivity(list(layers)))
        assert error(logits(model), expected) < BOUND, layers
        unconvert_model(model)


def test_undoing_takes_the_edit_between_layers_back():
    model = tiny_model("qwen3_vl_moe")
    stack = model.model.language_model
    before = set(vars(stack))
    convert_model(model, Connectivity("all"))
    assert set(vars(stack)) - before == {"_deepstack_process"}
    unconvert_model(model)
    assert set(vars(stack)) == before


def test_a_side_that_changes_nothing_is_refused(tmp_path):
    model = tiny_model("cohere2_moe")
    model.save_pretrained(tmp_path / "base")
    nothing = Connectivity("all", attention="full")
    before = logits(model)
    message = (
        "attention: full changes nothing here, because attention and MLP of a layer"
        " read the same stream"
    )
    with user_error(message):
        convert_model(model, nothing)
    assert torch.equal(logits(model), before)
    with user_error(f"{tmp_path / 'base'}: {message}"):
        convert_checkpoint(tmp_path / "base", tmp_path / "far", nothing)
    assert not (tmp_path / "far").exists()
    with pytest.raises((UserError, ValueError), match=message):
        load_model(tmp_path / "base", connectivity=nothing)
