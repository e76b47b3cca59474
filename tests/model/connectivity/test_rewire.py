"""The contract of every family: a rewired model against forward passes written from the
equations.
"""

import itertools
import re

import pytest
import torch

from fcsd.model.connectivity import (
    Connectivity,
    convert_model,
    resolve_layers,
    rewire,
    unconvert_model,
)
from fcsd.model.connectivity.stack import decoder_layers
from fcsd.model.families import FAMILIES, UNAVAILABLE, moe_mask
from tests.float64 import BOUND, error
from tests.reference.adapted import LAYERS
from tests.reference.images import IMAGES, inputs_of
from tests.reference.multimodal import multimodal_reference_forward
from tests.reference.mutants import mutated
from tests.reference.parts import arguments_computed_once
from tests.reference.reference import MOE, reference_forward
from tests.reference.surgery import surgery_forward
from tests.reference.tiny import TINY, gradients_of, logits, tiny_model
from tests.reference.tiny.multimodal import IMAGE
from tests.support import (
    KINDS,
    TEXT_FAMILIES,
    WRAPPERS,
    cache_of,
    few,
    skip_unavailable,
)

SELECTIONS = ("all", "moe", {"first": 2}, {"last": "75%"}, [0, 2])
SIDES = (("partial", "outdated"), ("partial", "full"), ("full", "outdated"))
MIXED = ("partial", [1, 3])
"""The MLP side is outdated in some of the rewired layers, and regular in the others."""

SINKS = (
    *("deepseek_v4", "flint", "gpt_oss", "granitemoe_swa", "hy_v4"),
    *("inkling2_text", "mimo_v2_flash"),
)
RECURRENT = (
    *("bailing_hybrid", "granitemoehybrid", "inkling_text", "jamba", "kimi_linear", "lara_mini"),
    *("lfm2_moe", "minimax", "qwen3_5_moe_text", "qwen3_next"), *("nemotron_h", "qwen4_exp_text", "zaya"),
    "inkling2_text",
)  # fmt: skip

pytestmark = [pytest.mark.contract, pytest.mark.usefixtures("float64")]

EXCEPTIONS: dict[tuple[str, str], str] = {
    **{("sdpa", name): "attention sinks have no sdpa path" for name in SINKS},
    ("packed", "gpt_oss"): "masks are built without position ids",
    ("packed", "afmoe"): "masks are built without position ids",
    ("checkpointing", "jetmoe"): "it does not support activation checkpointing",
    ("packed", "minimax_m3_vl_text"): "blocks of keys are chosen over the whole row",
    ("packed", "deepseek_v4"): "keys are compressed over the whole row",
    ("padded cache", "deepseek_v4"): "padding counts as text only without a cache",
    **{
        ("packed", name): "the recurrent state runs on from one sequence into the next"
        for name in RECURRENT
    },
    (
        "cache of several tokens",
        "jamba",
    ): "Mamba's state is read only when a single token is added",
}
"""(contract, family) -> what the original of transformers 5.23 does not do either. The
tests show it on the original, so that an exception that is no longer needed fails."""


def tokens(rows: int = 2, length: int = 11, seed: int = 3) -> torch.Tensor:
    return torch.randint(
        3, 99, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def left_padding(rows: int, length: int, padding: int = 4) -> torch.Tensor:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, :padding] = 0
    return mask


@torch.no_grad()
def reference(model, *args, **inputs):
    return reference_forward(model, *args, **inputs)


def resolved(model, selection):
    return resolve_layers(
        selection, moe_mask(model.config, FAMILIES[model.config.model_type])
    )


def stack_of(model):
    return decoder_layers(
        model, FAMILIES[model.config.model_type.removeprefix("farskip_")]
    )


def excepted(contract, family, original_fails):
    """Tell whether the family is an exception, after showing that the original fails,
    too.
    """
    if (contract, family) not in EXCEPTIONS:
        return False
    assert original_fails(), (
        f"{family}, {contract}: the original can do it now; delete the exception"
    )
    return True


def test_every_supported_family_has_a_tiny_model_and_a_reference():
    assert FAMILIES.keys() == TINY.keys()
    written = {
        name for name, family in FAMILIES.items() if family.reference == "written"
    }
    assert written == (MOE.keys() | IMAGES.keys() | LAYERS.keys()) - UNAVAILABLE.keys()
    assert len(written) >= 14


@pytest.mark.parametrize(
    ("padded", "implementation", "family"),
    [
        pytest.param(
            *(padded, implementation, family),
            # Every family once; each kind of attention padded and in each implementation.
            marks=[]
            if (padded, implementation) == (True, "sdpa")
            or (family in KINDS and (padded, implementation) == (False, "eager"))
            else pytest.mark.breadth,
        )
        for padded in (False, True)
        for implementation in ("sdpa", "eager")
        for family in TEXT_FAMILIES
    ],
)
def test_a_converted_model_computes_the_equations(family, implementation, padded):
    def original_refuses():
        with pytest.raises(ValueError, match="scaled_dot_product_attention"):
            tiny_model(family, attn_implementation=implementation)
        return True

    if excepted(implementation, family, original_refuses):
        return
    x = tokens()
    mask = left_padding(*x.shape) if padded else None
    kept = slice(None) if mask is None else mask.bool()
    model = tiny_model(family, attn_implementation=implementation)
    # Where attention and MLP read the same stream, an outdated MLP alone changes
    # nothing and is refused.
    sides = SIDES[:2] if FAMILIES[family].layout == "parallel" else SIDES
    # Padding and the implementation of attention do not depend on the selection: test
    # every pair of selection and sides once.
    every_pair = not padded and implementation == (
        "eager" if family in SINKS else "sdpa"
    )
    if FAMILIES[family].reference == "written" and every_pair:
        cases = [*itertools.product(SELECTIONS, sides), ("all", MIXED)]
    else:
        selections = SELECTIONS[1:] if every_pair else SELECTIONS[-1:]
        cases = [
            *itertools.product(["all"], (*sides, MIXED)),
            *itertools.product(selections, sides[:1]),
        ]
    selected = {str(selection): resolved(model, selection) for selection, _ in cases}
    with arguments_computed_once():
        references = [
            reference(model, x, selected[str(selection)], *sides, attention_mask=mask)[
                0
            ]
            for selection, sides in cases
        ]
    for (selection, (attention, mlp)), expected in zip(cases, references, strict=True):
        unconvert_model(model)
        layers = selected[str(selection)]
        assert (
            convert_model(
                model, Connectivity(selection, attention, mlp), regular_ok=True
            )
            == layers
        )
        actual = logits(model, x, attention_mask=mask)
        worst = error(actual[kept], expected[kept])
        assert worst < BOUND, f"{selection} {attention} {mlp}: {worst:.1e}"


@pytest.mark.parametrize("family", few(TEXT_FAMILIES))
def test_the_regular_model_computes_the_reference_without_farskip_layers(family):
    model, x = tiny_model(family), tokens()
    assert error(logits(model, x), reference(model, x, [])[0]) < BOUND


@pytest.mark.parametrize(
    ("family", "overrides"),
    few([
        ("llama4_text", {"interleave_moe_layer_step": 2}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
        ("qwen2_moe", {"mlp_only_layers": [1, 3]}),
        ("deepseek_v2", {"first_k_dense_replace": 2}),
        ("ernie4_5_moe", {"moe_layer_interval": 2}),
        ("jamba", {"expert_layer_period": 2}),
        ("lfm2_moe", {"num_dense_layers": 2}),
        ("qwen3_next", {"mlp_only_layers": [1, 3]}),
        ("kimi_linear", {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}),
        ("laguna", {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}),
    ], 5),
)  # fmt: skip
@pytest.mark.parametrize("sides", SIDES)
def test_dense_layers_read_what_is_in_flight_and_leave_nothing_in_flight(
    family, overrides, sides
):
    model, x = tiny_model(family, **overrides), tokens()
    for selection in ("all", "moe", {"first": 3}, [1, 2]):
        unconvert_model(model)
        layers = resolved(model, selection)
        expected, _ = reference(model, x, layers, *sides)
        convert_model(model, Connectivity(selection, *sides), regular_ok=True)
        assert error(logits(model, x), expected) < BOUND, selection


@pytest.mark.parametrize("family", few(sorted(FAMILIES)))
def test_no_layers_and_unconverting_are_bit_identical_to_the_original(family):
    model, inputs = tiny_model(family), inputs_of(family)
    original = logits(model, **inputs)
    assert convert_model(model, Connectivity("none")) == []
    assert torch.equal(logits(model, **inputs), original)
    convert_model(model, Connectivity("all"))
    assert (logits(model, **inputs) - original).abs().max() > 1
    unconvert_model(model)
    assert torch.equal(logits(model, **inputs), original)


@pytest.mark.parametrize("family", [*few(TEXT_FAMILIES), *WRAPPERS])
def test_recorded_hidden_states_are_the_full_streams(family):
    model, inputs = tiny_model(family), inputs_of(family)
    is_wrapper = FAMILIES[family].multimodal
    forward = multimodal_reference_forward if is_wrapper else reference_forward
    with torch.no_grad():
        _, streams = forward(model, layers=range(4), **inputs)
        convert_model(model, Connectivity("all"))
        recorded = model(
            **inputs, output_hidden_states=True, use_cache=False
        ).hidden_states
    assert len(recorded) == len(streams) == 5
    # The last recorded state is after the final norm, in the regular model too.
    for k, (actual, expected) in enumerate(
        zip(recorded[:-1], streams[:-1], strict=True)
    ):
        assert error(actual, expected) < BOUND, k


def test_router_logits_that_a_block_returns_stay_where_they_are_recorded():
    """Of this family's block transformers records the second output."""
    family = "ernie4_5_vl_moe"
    skip_unavailable(family)
    model, inputs = tiny_model(family), inputs_of(family)
    options = {"output_router_logits": True, "use_cache": False}
    with torch.no_grad():
        before = model(**inputs, **options)
        convert_model(model, Connectivity("all"))
        after = model(**inputs, **options)
    assert after.aux_loss.isfinite() and before.aux_loss.isfinite()
    shapes = [
        [logits.shape for logits in each.router_logits] for each in (before, after)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("family", few(TEXT_FAMILIES))
def test_generating_with_the_cache_gives_what_full_passes_give(family):
    model, x = tiny_model(family), tokens(length=9)
    mask = left_padding(*x.shape)
    settings = {
        "max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip

    @torch.no_grad()
    def difference(*cuts):
        """Return the largest difference from the logits of one pass when the tokens
        come in parts.
        """
        parts, cache = [], {}
        for start, end in itertools.pairwise((0, *cuts, x.shape[1])):
            out = model(x[:, start:end], use_cache=True, **cache)
            parts.append(out.logits)
            cache = cache_of(out)
        return error(torch.cat(parts, dim=1), logits(model, x))

    def made(cache, **options):
        return model.generate(
            x, attention_mask=mask, use_cache=cache, **settings, **options
        )

    def padding_fails():
        options = {"output_logits": True, "return_dict_in_generate": True}
        cached, full = (
            torch.stack(made(cache, **options).logits) for cache in (True, False)
        )
        return error(cached, full) > 0.01

    if excepted("padded cache", family, padding_fails):
        mask = torch.ones_like(mask)
    if not excepted("cache", family, lambda: difference(6, 7, 8) > 0.01):
        convert_model(model, Connectivity("all"))
        assert torch.equal(made(True), made(False))
        assert difference(6, 7, 8) < BOUND
        unconvert_model(model)
    if not excepted("cache of several tokens", family, lambda: difference(6) > 0.01):
        convert_model(model, Connectivity("all"))
        assert difference(6) < BOUND


# the images of a wrapper have no gradient
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("family", few(sorted(FAMILIES)))
def test_gradient_checkpointing_does_not_change_gradients(family):
    model, inputs = tiny_model(family).train(), inputs_of(family)
    labels = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, -100)

    def original_refuses():
        with pytest.raises(
            ValueError, match="does not support activation checkpointing"
        ):
            model.activation_checkpointing_enable()
        return True

    if excepted("checkpointing", family, original_refuses):
        return

    def gradients():
        model.zero_grad()
        torch.manual_seed(0)  # routers that sample in training
        model(**inputs, labels=labels, use_cache=False).loss.backward()
        return gradients_of(model)

    original = gradients()
    convert_model(model, Connectivity("all"))
    plain = gradients()
    assert plain.keys() == original.keys()
    layers = {id(p) for layer in stack_of(model) for p in layer.parameters()}
    # Re-entrant checkpointing also changes the gradients of Mistral Large 4's original.
    for reentrant in (False,) if family == "mistral_large4" else (False, True):
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        runs = []
        # Before the block: recomputation may end within it.
        moe = getattr(stack_of(model)[1], FAMILIES[family].moe)
        hook = moe.register_forward_pre_hook(lambda *_: runs.append(1))  # noqa: B023
        checkpointed = gradients()
        hook.remove()
        model.activation_checkpointing_disable()
        assert len(runs) == 2, "the layer was not recomputed: checkpointing was off"
        # In a regular Llama 4, too, it cuts the vision tower off.
        partly = reentrant and FAMILIES[family].multimodal
        assert partly or checkpointed.keys() == plain.keys()
        for name, gradient in plain.items():
            if partly and id(model.get_parameter(name)) not in layers:
                continue
            # Re-entrant checkpoints may sum gradients in another order.
            scale = max(1, gradient.abs().max()) if FAMILIES[family].multimodal else 1
            tolerance = BOUND * scale if reentrant else 0
            assert (checkpointed[name] - gradient).abs().max() <= tolerance, name


@pytest.mark.parametrize("family", few(TEXT_FAMILIES))
def test_packed_sequences_with_position_ids_give_what_they_give_alone(family):
    model = tiny_model(family)
    parts = [tokens(1, 5, seed=1), tokens(1, 7, seed=2)]
    positions = torch.cat([torch.arange(part.shape[1])[None] for part in parts], dim=1)

    def difference():
        packed = logits(model, torch.cat(parts, dim=1), position_ids=positions)
        return error(packed, torch.cat([logits(model, part) for part in parts], dim=1))

    if excepted("packed", family, lambda: difference() > 0.01):
        return
    assert difference() < BOUND
    convert_model(model, Connectivity("all"))
    assert difference() < BOUND


@pytest.mark.parametrize("family", few(sorted(FAMILIES)))
def test_gradients_are_those_of_the_equations(family):
    """In a wrapper, also those of the vision tower."""
    model, inputs = tiny_model(family), inputs_of(family)
    is_wrapper = FAMILIES[family].multimodal
    forward = multimodal_reference_forward if is_wrapper else reference_forward
    # The reference of a text family begins behind the embeddings.
    trained = model if is_wrapper else stack_of(model)
    weights = {name: p for name, p in trained.named_parameters() if p.requires_grad}

    def gradients(output):
        following = inputs["input_ids"][:, 1:]
        text = following != IMAGE
        loss = torch.nn.functional.cross_entropy(output[:, :-1][text], following[text])
        return torch.autograd.grad(loss, list(weights.values()), allow_unused=True)

    expected = gradients(forward(model, layers=range(4), **inputs)[0])
    convert_model(model, Connectivity("all"))
    actual = gradients(model(**inputs, use_cache=False).logits)
    reached = set()
    for name, a, e in zip(weights, actual, expected, strict=True):
        if (
            e is None
        ):  # the choice of experts, or of the tokens to attend to, has no gradient
            assert a is None or not a.any(), name
            continue
        assert (a - e).abs().max() < BOUND * max(1.0, float(e.abs().max())), name
        reached.add(name)
    if is_wrapper:
        assert any(re.search(r"(vision|visual|sam)", name) for name in reached)


@pytest.mark.parametrize(
    ("family", "jitter"),
    [
        ("mixtral", {"router_jitter_noise": 0.2}),
        ("minimax_m2", {"router_jitter_noise": 0.2}),
        ("phimoe", {"input_jitter_noise": 0.2}),
    ],
)
def test_noise_that_a_block_puts_into_its_input_in_training_stays_in_the_block(
    family, jitter
):
    model, x = tiny_model(family, **jitter).train(), tokens()
    torch.manual_seed(1)
    with torch.no_grad():
        expected, _ = surgery_forward(model, x, range(4))
    torch.manual_seed(1)
    # the reference starts with a pass of the model, which draws as many random numbers
    logits(model, x)
    convert_model(model, Connectivity("all"))
    assert error(logits(model, x), expected) < BOUND


HYBRIDS = ("jamba", "granitemoehybrid", "lfm2_moe", "qwen3_next")
MUTANTS = {
    "the MLP side uses the norm of attention": (
        "norm = getattr(self.norms, name)",
        "norm = getattr(self.norms, self.family.in_norm)",
        ("qwen3_moe", "deepseek_v2", *HYBRIDS),
    ),
    "attention gets the full stream": (
        "self.a = o if attention_input is None else attention_input",
        "self.a = o",
        ("qwen3_moe", "deepseek_v2", "nemotron_h", *HYBRIDS),
    ),
    "the MLP side sees attention": (
        "if not self.plan.outdated:\n            return norm(h)",
        "return norm(h)",
        ("qwen3_moe", "deepseek_v2", *HYBRIDS),
    ),
    "the shared experts stay in flight": (
        "return rest + shared_output",
        "return rest",
        (
            "qwen2_moe", "deepseek_v2", "granitemoeshared", "granitemoehybrid", "qwen3_next", "hunyuan_v1_moe",
            "nemotron_h",
        ),
    ),
    "the residual multiplier is forgotten": (
        "shared_output * multiplier",
        "shared_output",
        ("granitemoeshared", "granitemoe_swa", "granitemoehybrid"),
    ),
    "the sigmoid gate is forgotten": (
        "shared.output = multiply(gate, shared.output)\n        return shared.output",
        "return multiply(gate, shared.output)", ("qwen2_moe", "qwen3_next"),
    ),
    "Llama 4's routed output is added into what was caught": (
        "(self.output + routed).to", "self.output.add_(routed).to", ("llama4_text",),
    ),
    "a dense layer leaves its output in flight": (
        "return is_moe and farskip['attention'] == 'partial'",
        "return farskip['attention'] == 'partial'",
        ("deepseek_v2", "ernie4_5_moe", "lfm2_moe", "qwen3_next"),
    ),
    "a regular layer gets the partial stream": (
        "carry = k + 1 in selected and",
        "carry = k + 1 < len(stack) and",
        ("qwen3_moe", "deepseek_v2", *HYBRIDS),
    ),
}  # fmt: skip
"""What is wrong -> (text of the rewiring, what a mutant has in its place, families in
which it must show).
"""


def largest_error(module, family):
    """Return the largest error of the logits, over two selections; infinite where the
    mutant does not run.
    """
    x, worst = tokens(), 0.0
    for layers in ([0, 1, 2, 3], [0, 1, 2]):
        model = tiny_model(family)
        expected, _ = reference(model, x, layers)
        field = {
            "version": 1, "layers": layers, "attention": "partial", "mlp": "outdated",
        }  # fmt: skip
        module.rewire(model, FAMILIES[family], field)
        try:
            worst = max(worst, error(logits(model, x), expected))
        except (TypeError, ValueError, AttributeError):
            worst = float("inf")
    return worst


@pytest.mark.parametrize("mutant", few(MUTANTS, 4))
def test_mutants_of_the_rewiring_differ_from_the_reference(mutant, monkeypatch):
    """Tests that the comparisons above miss nothing: each mutation must show in each
    family that it concerns.
    """
    old, new, families = MUTANTS[mutant]
    module, same = mutated(old, new, monkeypatch), mutated(old, old, monkeypatch)
    for family in families:
        assert largest_error(module, family) > 0.05, family
        assert largest_error(same, family) < BOUND, family


def test_rewiring_is_refused_for_an_unknown_version_or_side_and_indices_out_of_range():
    model, family = tiny_model("qwen3_moe"), FAMILIES["qwen3_moe"]
    good = {"version": 1, "layers": [0], "attention": "partial", "mlp": "outdated"}
    for change in (
        {"version": 2},
        {"attention": "half"},
        {"mlp": "late"},
        {"layers": [4]},
        {"layers": [-1]},
    ):
        with pytest.raises(ValueError, match=r"config\.farskip"):
            rewire.rewire(model, family, good | change)
    with pytest.raises(ValueError, match=r"config\.farskip"):
        rewire.rewire(model, family, None)
