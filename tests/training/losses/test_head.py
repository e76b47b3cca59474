"""The loss head against the unpatched model: the same logits without an objective, the
textbook loss with one.
"""

import copy
import functools
import inspect

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from fcsd.data.batches import Collator, next_token_targets
from fcsd.model.families import FAMILIES
from fcsd.model.families.structure import LOGIT_SCALES, output_head
from fcsd.training.losses.head import (
    Target,
    attach_loss_head,
    detach_loss_head,
    final_hidden,
    refuse_packing,
)
from fcsd.training.losses.objectives import MEASURES, OBJECTIVES
from tests.examples import pack
from tests.losses import objective_of, reference_loss
from tests.reference.ranks import run_ranks
from tests.reference.tiny import TINY, gradients_of, tiny_model
from tests.support import few, user_error

KL, CE = objective_of("kl"), objective_of("ce")

B, T, V = 2, 10, 64
SHAPE = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
CONFIGS = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SHAPE,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "granitemoeshared": lambda: transformers.GraniteMoeSharedConfig(
        **SHAPE,
        shared_intermediate_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        logits_scaling=8.0,
        embedding_multiplier=2.0,
        tie_word_embeddings=True,
    ),
    "cohere2": lambda: transformers.Cohere2Config(**SHAPE, logit_scale=0.25),
    "gemma2": lambda: transformers.Gemma2Config(
        **SHAPE, head_dim=8, final_logit_softcapping=3.0
    ),
}


def make_model(family="qwen3_moe", seed=0):
    torch.manual_seed(seed)
    config = CONFIGS[family]()
    config._attn_implementation = "eager" if family == "gemma2" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model


def make_batch(seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (B, T), generator=g)
    positions = torch.arange(T).expand(B, T)
    keep = torch.rand(B, T, generator=g) > 0.4
    return ids, positions, keep, torch.randint(0, V, (int(keep.sum()),), generator=g)


def ce_of(model, batch):
    """Return the cross-entropy of the kept tokens of a batch of `make_batch`."""
    ids, positions, keep, labels = batch
    return model(
        input_ids=ids, position_ids=positions, keep=keep, labels=labels, objective=CE
    )["loss"]


def divergence_of(student, teacher, ids, positions, keep, objective=KL):
    """Return what the student's head gives for the teacher's last hidden states."""
    with torch.no_grad():
        hidden = final_hidden(teacher, ids, positions, keep)
    return student(
        input_ids=ids,
        position_ids=positions,
        keep=keep,
        objective=objective,
        teacher_hidden=hidden,
        teacher_head=teacher.lm_head,
    )


def reference_kl(student_logits, teacher_logits):
    s, t = (
        student_logits.double().log_softmax(-1),
        teacher_logits.double().log_softmax(-1),
    )
    return F.kl_div(s, t, log_target=True, reduction="sum")


@pytest.mark.parametrize("family", CONFIGS)
def test_the_kl_and_its_gradients_are_those_of_the_unpatched_models_logits(family):
    student, teacher = make_model(family, 0), make_model(family, 1)
    ids, positions, keep, _ = make_batch()
    with torch.no_grad():
        teacher_logits = teacher(ids, position_ids=positions).logits[keep]
    expected = reference_kl(
        student(ids, position_ids=positions).logits[keep], teacher_logits
    )
    expected.backward()
    expected_gradients = gradients_of(student)
    student.zero_grad()

    attach_loss_head(student)
    loss = divergence_of(student, teacher, ids, positions, keep)["loss"]
    loss.backward()

    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    actual = gradients_of(student)
    assert actual.keys() == expected_gradients.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=1e-3, atol=1e-4, msg=name
        )


def test_kept_positions_may_be_given_as_indices():
    model = make_model()
    ids, positions, keep, labels = make_batch()
    attach_loss_head(model)
    indices = keep.flatten().nonzero().squeeze(1)
    by_index = ce_of(model, (ids, positions, indices, labels))
    assert torch.equal(ce_of(model, (ids, positions, keep, labels)), by_index)


def test_a_batch_without_kept_positions_gives_zero_and_a_gradient_for_every_parameter():
    model = make_model()
    ids, positions, keep, _ = make_batch()
    attach_loss_head(model)
    no_labels = torch.zeros(0, dtype=torch.long)
    loss = ce_of(model, (ids, positions, torch.zeros_like(keep), no_labels))
    loss.backward()
    assert loss.item() == 0
    assert gradients_of(model).keys() == dict(model.named_parameters()).keys()
    assert all((gradient == 0).all() for gradient in gradients_of(model).values())


@pytest.mark.parametrize("family", ["qwen3_moe", "granitemoeshared"])
def test_without_an_objective_the_model_is_what_it_was(family, tmp_path):
    model, untouched = make_model(family), make_model(family)
    ids, *_ = make_batch()
    modules, signature = (
        [name for name, _ in model.named_modules()],
        inspect.signature(model.forward),
    )
    attach_loss_head(model)

    assert torch.equal(model(ids).logits, untouched(ids).logits)
    assert torch.equal(model(ids, labels=ids).loss, untouched(ids, labels=ids).loss)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(
        model.generate(ids, **options), untouched.generate(ids, **options)
    )
    assert inspect.signature(model.forward) == signature
    assert [name for name, _ in model.named_modules()] == modules
    assert type(model.lm_head).__name__ == "Linear"
    assert isinstance(model.lm_head, nn.Linear)
    assert model.state_dict().keys() == untouched.state_dict().keys()
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids).logits, untouched(ids).logits)


def test_detaching_leaves_no_trace():
    model = make_model()
    before = {**model.__dict__}, {**model.lm_head.__dict__}, type(model.lm_head)
    attach_loss_head(model)
    attach_loss_head(model)  # a second time changes nothing
    detach_loss_head(model)
    detach_loss_head(model)
    assert (model.__dict__, model.lm_head.__dict__, type(model.lm_head)) == before


def test_a_forward_that_was_already_replaced_comes_back():
    model = make_model()
    seen = []
    family_forward = model.forward
    model.forward = lambda *args, **kwargs: (
        seen.append(1) or family_forward(*args, **kwargs)
    )
    replaced = model.forward
    attach_loss_head(model)
    model(make_batch()[0])
    detach_loss_head(model)
    assert seen == [1] and model.forward is replaced


def test_a_copied_model_trains_its_own_parameters():
    model = make_model()
    attach_loss_head(model)
    twin = copy.deepcopy(model)
    ce_of(twin, make_batch()).backward()
    assert not gradients_of(model) and gradients_of(twin)


def test_another_model_of_the_same_class_keeps_its_own_forward():
    patched, other = make_model(), make_model()
    attach_loss_head(patched)
    assert type(other.lm_head) is nn.Linear and "forward" not in other.__dict__


def test_forward_hooks_of_the_head_fire_in_training():
    """FSDP2 and ZeRO-3 gather and reduce the head's weight in such hooks."""
    model = make_model()
    attach_loss_head(model)
    shapes = []
    model.lm_head.register_forward_pre_hook(
        lambda _module, inputs: shapes.append(tuple(inputs[0].shape))
    )
    batch = make_batch()
    ce_of(model, batch)
    assert shapes == [(int(batch[2].sum()), 32)]


def test_a_teacher_with_a_loss_head_gives_the_same_hidden_states_through_its_own_forward():
    teacher = make_model()
    ids, positions, keep, _ = make_batch()
    expected = final_hidden(teacher, ids, positions, keep)
    torch.testing.assert_close(teacher.lm_head(expected), teacher(ids).logits[keep])
    attach_loss_head(teacher)
    calls = []
    teacher.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(final_hidden(teacher, ids, positions, keep), expected)
    assert calls == [1]


def test_a_teacher_of_another_scale_keeps_its_own():
    student, teacher = (
        make_model("granitemoeshared", 0),
        make_model("granitemoeshared", 1),
    )
    teacher.config.logits_scaling = 2.0
    ids, positions, keep, _ = make_batch()
    expected = reference_kl(student(ids).logits[keep], teacher(ids).logits[keep])
    attach_loss_head(student)
    attach_loss_head(teacher)
    loss = divergence_of(student, teacher, ids, positions, keep)["loss"]
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)


def test_flash_attention_gets_one_long_row_because_it_would_mix_packed_rows_of_a_batch():
    model, batch = make_model(), make_batch()
    attach_loss_head(model)
    expected = ce_of(model, batch)
    shapes = []
    model.model.register_forward_pre_hook(
        lambda _m, _a, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    # sdpa computes; only the requested name is that of the flash kernels
    kernel, model.config._attn_implementation_internal = "sdpa", "flash_attention_2"
    model.model.register_forward_pre_hook(
        lambda *_: setattr(model.config, "_attn_implementation_internal", kernel)
    )
    actual = ce_of(model, batch)
    assert shapes == [(1, B * T)]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_model_without_a_linear_head_is_refused():
    with user_error("Linear: not a causal language model"):
        attach_loss_head(nn.Linear(2, 2))


def test_an_objective_without_its_arguments_is_an_error():
    model = make_model()
    attach_loss_head(model)
    ids, positions, keep, _ = make_batch()
    with pytest.raises(ValueError, match="objective 'kl' needs teacher_hidden"):
        model(input_ids=ids, position_ids=positions, keep=keep, objective=KL)


@pytest.mark.parametrize("objective", [KL, CE], ids=["kl", "ce"])
def test_labels_and_a_teacher_together_are_an_error(objective):
    with pytest.raises(ValueError, match="got labels and teacher_head and teacher_hid"):
        Target(objective, torch.zeros(1), torch.zeros(1, 4), nn.Linear(4, 8))


def text_ids(model, shape, seed):
    """Return token ids below those that stand for images."""
    size = min(model.config.get_text_config().vocab_size, 90)
    return torch.randint(10, size, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *few((family, name) for family in TINY for name in ("kl", "ce")),
        *(("qwen3_moe", name) for name in MEASURES if name not in ("kl", "ce")),
    ],
)
def test_the_loss_of_every_family_is_that_of_its_own_logits(family, name):
    """The teacher is the same model on other tokens. Where a family has soft caps or
    padding, the test makes them take effect.
    """
    model = own_logits_model(family)
    ids, others = text_ids(model, (B, T), 0), text_ids(model, (B, T), 1)
    positions, keep = torch.arange(T).expand(B, T), make_batch()[2]
    with torch.no_grad():
        has_teacher = OBJECTIVES[name].has_teacher
        objective = objective_of(name, **({"temperature": 2.0} if has_teacher else {}))
        logits, teacher_logits = (model(x).logits[keep].double() for x in (ids, others))
        labels = torch.arange(len(logits)) % logits.shape[-1]
        arguments = {
            "input_ids": ids, "position_ids": positions, "keep": keep, "objective": objective,
        }  # fmt: skip
        attach_loss_head(model)
        if not has_teacher:
            expected = reference_loss(logits, labels, objective).sum()
            output = model(**arguments, labels=labels)
        else:
            t = (teacher_logits / 2).log_softmax(-1)
            expected = reference_loss(logits, teacher_logits, objective).sum()
            hidden = final_hidden(model, others, positions, keep)
            arguments |= {"teacher_hidden": hidden, "teacher_head": output_head(model)}
            output = model(**arguments)
            agreement = logits.argmax(-1) == teacher_logits.argmax(-1)
            assert torch.equal(output["top1_agreement"], agreement)
            torch.testing.assert_close(
                output["teacher_entropy"].double(),
                -(t.exp() * t).sum(-1),
                rtol=1e-5,
                atol=0,
            )
        detach_loss_head(model)
    torch.testing.assert_close(output["loss"].double(), expected, rtol=1e-5, atol=0)


@functools.cache
def own_logits_model(family):
    model = tiny_model(family)
    config = model.config.get_text_config()
    if getattr(config, "final_logit_softcapping", None) is not None:
        config.final_logit_softcapping = 3.0
        if hasattr(model, "final_logit_softcapping"):  # mistral_large4 keeps a copy
            model.final_logit_softcapping = 3.0
        if hasattr(model, "logit_softcap"):  # inkling2, in a module
            model.logit_softcap.softcap = 3.0
    if hasattr(config, "unpadded_vocab_size"):
        config.unpadded_vocab_size = config.vocab_size - 5
    return model


def test_every_kind_of_logit_post_processing_is_among_the_families():
    scales = {*LOGIT_SCALES}
    kinds = set()
    for family in TINY:
        config = own_logits_model(family).config.get_text_config()
        kinds |= {
            name for name in scales if getattr(config, name, None) not in (None, 1.0)
        }
        kinds |= {
            name
            for name in ("final_logit_softcapping", "unpadded_vocab_size")
            if hasattr(config, name)
        }
    assert kinds == {*scales, "final_logit_softcapping", "unpadded_vocab_size"}


PACKING_LEAKS = {family for family, row in FAMILIES.items() if row.packing == "leaks"}
# Attention sinks, which sdpa does not have.
SINKS = ("flint", "gpt_oss", "granitemoe_swa", "hy_v4", "mimo_v2_flash")
ATTENTION = [
    (family, attention)
    for family in TINY
    for attention in ("sdpa", "eager")
    if family not in PACKING_LEAKS and not (family in SINKS and attention == "sdpa")
]


def packed_and_alone(model):
    """Return the losses of examples packed into rows of 24, and of each on its own; the
    packed batch.
    """
    ids = text_ids(model, (54,), 0).tolist()
    examples = [
        ids[sum(LENGTHS[:k]) : sum(LENGTHS[: k + 1])] for k in range(len(LENGTHS))
    ]
    rows = pack(
        [{"input_ids": e, "loss_mask": [True] * len(e)} for e in examples],
        24,
        pad_token_id=0,
    )
    batch = Collator()(list(rows))
    keep, targets = next_token_targets(batch["labels"], batch["position_ids"])
    with torch.no_grad():
        alone = sum(
            F.cross_entropy(
                model(torch.tensor([e])).logits[0, :-1].double(),
                torch.tensor(e[1:]),
                reduction="sum",
            )
            for e in examples
        )
        attach_loss_head(model)
        arguments = {
            "input_ids": batch["input_ids"],
            "position_ids": batch["position_ids"],
            "keep": keep,
        }
        packed = model(**arguments, labels=targets, objective=CE)["loss"]
    return packed.double(), alone, batch


LENGTHS = (5, 19, 2, 7, 12, 3, 6)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("family", "attention"), few(ATTENTION))
def test_packed_examples_of_a_family_have_the_loss_that_each_has_alone(
    family, attention
):
    """24 positions per row are more than the windows of the sliding and chunked
    families.
    """
    model = tiny_model(family, attn_implementation=attention)
    packed, alone, batch = packed_and_alone(model)
    torch.testing.assert_close(packed, alone, rtol=1e-10, atol=0)
    refuse_packing(model, batch["labels"], batch["position_ids"])


@pytest.mark.parametrize("family", sorted(PACKING_LEAKS))
def test_packed_rows_are_refused_for_the_families_in_which_examples_would_see_each_other(
    family,
):
    model = tiny_model(family)
    packed, alone, batch = packed_and_alone(model)
    assert abs(packed - alone) > 1e-4 * alone, "packs well now: take it off the list"
    with user_error(
        f"model type '{family}' lets packed examples .* data.packing: false"
    ):
        refuse_packing(model, batch["labels"], batch["position_ids"])
    rows = pack(
        [{"input_ids": [11, 12, 13], "loss_mask": [True] * 3}], 24, pad_token_id=0
    )
    single = Collator()(list(rows))
    refuse_packing(model, single["labels"], single["position_ids"])


@pytest.mark.usefixtures("float64")
def test_the_head_takes_the_divergences_settings_and_its_real_vocabulary():
    student, teacher = make_model(seed=0), make_model(seed=1)
    ids, positions, keep, _ = make_batch()
    logits = [
        model(ids).logits[keep][:, :50].double() / 1.5 for model in (student, teacher)
    ]
    p_s, p_t = (x.softmax(-1) for x in logits)
    m = 0.8 * p_s + 0.2 * p_t
    per_token = 0.2 * (p_t * (p_t / m).log()).sum(-1) + 0.8 * (
        p_s * (p_s / m).log()
    ).sum(-1)
    attach_loss_head(student, vocab_size=50)
    jsd = objective_of("jsd", temperature=1.5, jsd_beta=0.2)
    output = divergence_of(student, teacher, ids, positions, keep, jsd)
    torch.testing.assert_close(output["divergence"], per_token, rtol=1e-10, atol=0)
    torch.testing.assert_close(output["loss"], per_token.sum(), rtol=1e-10, atol=0)


# ---- several ranks


def kl_of_one_rank(rank, wrapper):
    """Return loss and gradients of two rows on one rank, then over two; the second row
    is fully masked.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    student, teacher = make_model(seed=0), make_model(seed=1).requires_grad_(False)
    attach_loss_head(student)
    attach_loss_head(teacher)
    ids, positions, keep, _ = make_batch()
    keep[1] = False

    def loss_of(model, rows):
        part = ids[rows], positions[rows], keep[rows]
        return divergence_of(model, teacher, *part)["loss"]

    expected = loss_of(student, slice(None))
    expected.backward()
    expected_gradients = gradients_of(student)
    student.zero_grad()
    wrapped = student
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(student)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for model in (student, teacher):
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
    loss = loss_of(wrapped, slice(rank, rank + 1))
    (loss * 2).backward()  # ranks are averaged
    total = loss.detach().clone()
    dist.all_reduce(total)
    worst = 0.0
    for name, parameter in student.named_parameters():
        gradient = (
            parameter.grad.full_tensor()
            if isinstance(parameter.grad, DTensor)
            else parameter.grad
        )
        reference = expected_gradients[name]
        worst = max(
            worst, ((gradient - reference).norm() / (reference.norm() + 1e-6)).item()
        )
    return (
        expected.item(),
        total.item(),
        worst,
        isinstance(student.lm_head.weight, DTensor),
    )


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_two_ranks_give_the_loss_and_gradients_of_one_even_when_one_of_them_keeps_no_token(
    wrapper,
):
    for expected, total, worst, sharded in run_ranks(kl_of_one_rank, 2, wrapper):
        assert total == pytest.approx(expected, rel=1e-5)
        assert worst < 1e-4
        assert sharded == (wrapper == "fsdp2")
