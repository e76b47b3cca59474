"""The fused losses against plain autograd in float64 on full logits."""

import copy
import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

from fcsd.training.losses import fused as losses
from fcsd.training.losses.fused import KERNELS, Kernels
from fcsd.training.losses.head import Target, attach_loss_head
from fcsd.training.losses.objectives import MEASURES
from tests.float64 import ROUNDINGS
from tests.losses import (
    DIVERGENCE_NAMES,
    DIVERGENCES,
    EXAMPLES,
    LABEL_NAMES,
    fused_cross_entropy,
    fused_divergence,
    fused_kl,
    fused_label_loss,
    objective_of,
    reference_loss,
)
from tests.reference.tiny import tiny_model
from tests.support import few, user_error

N, D, D_TEACHER, V = 37, 12, 20, 53


def reference_logits(
    hidden, weight, bias=None, scale=1.0, softcap=None, dtype=torch.float64
):
    z = hidden.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        z = z + bias.to(dtype)
    z = z * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def reference_kl(student, teacher):
    return F.kl_div(
        student.log_softmax(-1),
        teacher.log_softmax(-1),
        log_target=True,
        reduction="sum",
    )


def inputs(dtype=torch.float64, n=N, seed=0):
    """Return numbers that float32 can represent."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    return (
        rand(n, D), rand(V, D), rand(n, D_TEACHER), rand(V, D_TEACHER), rand(V), rand(V),
    )  # fmt: skip


def assert_equal_equations(actual, expected):
    """Compare in float64, where another order of summation changes results by 1e-14, on
    every CPU.
    """
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def assert_as_exact(actual, plain, exact):
    """Check that `actual` in float32 is not much further from `exact` in float64 than
    `plain`, which is float32 on full logits.
    """
    floor = torch.finfo(torch.float32).eps * exact.norm()
    assert (actual.double() - exact).norm() <= ROUNDINGS * max(
        (plain.double() - exact).norm(), floor
    )


def one_token_bytes(tiles=3, itemsize=8):
    return V * itemsize * tiles


OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.37, "teacher_scale": 1.7},
    "softcap": {"softcap": 2.0, "teacher_softcap": 3.0},
    "everything": {"bias": True, "scale": 0.7, "teacher_scale": 1.2, "softcap": 1.5},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", LABEL_NAMES)
def test_losses_on_labels_and_their_gradients_equal_float64_autograd(name, option):
    o, objective = OPTIONS[option], objective_of(name, **EXAMPLES.get(name, {}))
    h, w, _, _, b, _ = inputs()
    bias = b if o.get("bias") else None
    leaves = [x.requires_grad_() for x in (h, w, bias) if x is not None]
    labels = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(1))
    scale, softcap = o.get("scale", 1.0), o.get("softcap")

    logits = reference_logits(h, w, bias, scale, softcap)
    expected = reference_loss(logits, labels, objective).sum()
    expected_grads = torch.autograd.grad(expected, leaves)
    actual = fused_label_loss(
        h,
        w,
        labels,
        objective=objective,
        bias=bias,
        scaling=(scale, softcap),
        chunk_bytes=5 * one_token_bytes(2),
    )
    grads = torch.autograd.grad(actual, leaves)

    assert_equal_equations(actual, expected)
    for grad, reference in zip(grads, expected_grads, strict=True):
        assert_equal_equations(grad, reference)


def fused_measure(name, h, w, target, **options):
    """Return the loss of a measure; target: labels, or the teacher's hidden states, head
    and bias, of which a loss takes what it knows.
    """
    labels, th, tw, tb = target
    objective = objective_of(name)
    if not objective.has_teacher:
        return fused_label_loss(h, w, labels, objective=objective, **options)
    options |= {"divergence": objective, "teacher_bias": tb}
    return fused_divergence(h, w, th, tw, **options)[0]


@pytest.mark.parametrize("name", MEASURES)
def test_no_tokens_give_zero_and_stay_connected_with_zero_gradients(name):
    h, w, th, tw, b, _ = inputs(n=0)
    leaves = [x.requires_grad_() for x in (h, w, b)]
    target = torch.zeros(0, dtype=torch.long), th, tw, None
    loss = fused_measure(name, h, w, target, bias=b)
    assert loss.item() == 0.0
    grads = torch.autograd.grad(loss, leaves)
    assert [g.shape for g in grads] == [x.shape for x in leaves]
    assert all((g == 0).all() for g in grads)
    if (objective := objective_of(name)).has_teacher:
        options = {"divergence": objective, "statistics": True}
        _, statistics = fused_divergence(h, w, th, tw, **options)
        assert [rows.shape for rows in statistics] == [(0,)] * 3


@pytest.mark.parametrize("frozen", ["head", "hidden"])
def test_a_frozen_side_gets_no_gradient_and_leaves_the_other_sides_unchanged(frozen):
    h, w, th, tw, *_ = inputs()
    both = torch.autograd.grad(
        fused_kl(h.requires_grad_(), w.requires_grad_(), th, tw), (h, w)
    )
    h2, w2 = h.detach().clone(), w.detach().clone()
    trained = (h2 if frozen == "head" else w2).requires_grad_()
    fused_kl(h2, w2, th, tw).backward()
    torch.testing.assert_close(
        trained.grad, both[0] if frozen == "head" else both[1], rtol=0, atol=0
    )
    assert (w2 if frozen == "head" else h2).grad is None


def test_the_teacher_gets_no_gradient_even_when_it_would_take_one():
    h, w, th, tw, *_ = inputs()
    fused_kl(h.requires_grad_(), w, th.requires_grad_(), tw.requires_grad_()).backward()
    assert th.grad is None and tw.grad is None


def test_without_gradients_only_the_loss_is_computed():
    h, w, th, tw, *_ = inputs()
    with torch.no_grad():
        loss = fused_kl(h.requires_grad_(), w, th, tw)
    assert not loss.requires_grad
    assert_equal_equations(
        loss, reference_kl(reference_logits(h, w), reference_logits(th, tw))
    )


def close_student(kl_scale, dtype=torch.bfloat16):
    """Return a student near its teacher: one shared bfloat16 head, logits of standard
    deviation about 2.5.
    """
    g = torch.Generator().manual_seed(3)
    d, v, n = 64, 2000, 64
    w = (torch.randn(v, d, generator=g) / d**0.5).to(dtype)
    th = (2.5 * torch.randn(n, d, generator=g)).to(dtype)
    h = (th.float() + kl_scale * torch.randn(n, d, generator=g)).to(dtype)
    return h, w, th


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_gradients_are_exact_where_rounded_logits_lose_a_tenth(autocast):
    h, w, th = close_student(0.1)
    s, t = reference_logits(h, w), reference_logits(th, w)
    exact = (s.softmax(-1) - t.softmax(-1)) @ w.double()
    rounded = (
        s.bfloat16().double().softmax(-1) - t.bfloat16().double().softmax(-1)
    ) @ w.double()

    h.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = fused_kl(h, w, th, w)
    loss.backward()

    def error(gradient):
        return ((gradient.double() - exact).norm() / exact.norm()).item()

    assert h.grad.dtype == torch.bfloat16
    assert error(rounded) > 0.1
    assert error(h.grad) < 4e-3  # the rounding of the returned bfloat16 gradient itself
    torch.testing.assert_close(loss.double(), reference_kl(s, t), rtol=1e-4, atol=0)


def test_float32_inputs_inside_autocast_are_not_rounded():
    h, w, th, tw, *_ = inputs(torch.float32)
    alone = fused_kl(h, w, th, tw)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fused_kl(h, w, th, tw), alone)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_hidden_state_shows_in_gradient_and_loss(bad):
    for name in MEASURES:
        h, w, th, tw, *_ = inputs()
        h[3, 2] = bad
        target = torch.zeros(N, dtype=torch.long), th, tw, None
        loss = fused_measure(name, h.requires_grad_(), w, target)
        loss.backward()
        assert not torch.isfinite(h.grad).all(), name
        assert not torch.isfinite(loss), name
    h, w, th, tw, *_ = inputs()
    th[3, 2] = bad
    assert not torch.isfinite(fused_kl(h, w, th, tw))


def rounding_of(*logits):
    """Return the rounding error of float32 for the largest logit; a probability, and so
    a loss, has the same relative error.
    """
    return torch.finfo(torch.float32).eps * max(
        float(z.detach().abs().max()) for z in logits
    )


def test_shapes_that_do_not_fit_are_refused():
    h, w, th, tw, b, _ = inputs()
    with user_error("teacher: hidden states"):
        fused_kl(h, w, th[:, :-1], tw)
    with user_error("36 tokens of the teacher for 37 of the student"):
        fused_kl(h, w, th[:-1], tw)
    with user_error("head bias"):
        fused_kl(h, w, th, tw, bias=b[:-1])
    with user_error("labels of shape"):
        fused_cross_entropy(h, w, torch.zeros(N - 1, dtype=torch.long))
    with user_error(r"differ in vocabulary size \(52 and 53\)"):
        fused_kl(h, w, th, tw[:-1])
    with user_error(r"teacher: a vocabulary of 53 for a head of 50 rows"):
        fused_kl(h, w, th, tw[:50], vocab_size=V)


def test_a_retained_graph_cannot_be_scaled_twice():
    h, w, th, tw, *_ = inputs()
    loss = fused_kl(h.requires_grad_(), w, th, tw)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- the other divergences, temperature, padding, statistics


CASES = {name: {"name": name} for name in DIVERGENCE_NAMES} | {
    f"example of {by['name']}": by for by in DIVERGENCES if by["name"] in EXAMPLES
}
CASES |= {
    "kl at 2": {"name": "kl", "temperature": 2.0},
    "reverse_kl at 0.5": {"name": "reverse_kl", "temperature": 0.5},
    "jsd 0.1 at 3": {"name": "jsd", "jsd_beta": 0.1, "temperature": 3.0},
}


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 37, 1000])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("divergence", CASES)
def test_divergences_and_their_gradients_equal_float64_autograd(
    divergence, option, chunk_tokens, statistics
):
    by, o = objective_of(**CASES[divergence]), OPTIONS[option]
    h, w, th, tw, b, tb = inputs()
    bias, teacher_bias = (b, tb) if o.get("bias") else (None, None)
    leaves = [x.requires_grad_() for x in (h, w, bias) if x is not None]
    scaling = (o.get("scale", 1.0), o.get("softcap"))
    teacher_scaling = (o.get("teacher_scale", 1.0), o.get("teacher_softcap"))
    per_token = reference_loss(
        reference_logits(h, w, bias, *scaling),
        reference_logits(th, tw, teacher_bias, *teacher_scaling),
        by,
    )
    expected = per_token.sum()
    expected_grads = torch.autograd.grad(expected * 0.25, leaves)
    actual, _ = fused_divergence(
        h,
        w,
        th,
        tw,
        divergence=by,
        bias=bias,
        teacher_bias=teacher_bias,
        chunk_bytes=chunk_tokens * one_token_bytes(5),
        statistics=statistics,
        scaling=scaling,
        teacher_scaling=teacher_scaling,
    )
    grads = torch.autograd.grad(actual * 0.25, leaves)
    assert_equal_equations(actual, expected)
    for grad, reference in zip(grads, expected_grads, strict=True):
        assert_equal_equations(grad, reference)


@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None,
    reason="needs trl: pip install 'fcsd[bench]'",
)
@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(
    ("name", "beta"), [("kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.5), ("jsd", 0.2)]
)
def test_divergences_are_those_of_trl(name, beta, temperature):
    from trl.experimental.gkd import GKDTrainer

    h, w, th, tw, *_ = inputs()
    expected = GKDTrainer.generalized_jsd_loss(
        reference_logits(h, w)[None],
        reference_logits(th, tw)[None],
        beta=beta,
        temperature=temperature,
        reduction="sum",
    )
    by = objective_of(
        name, temperature=temperature, **({"jsd_beta": beta} if name == "jsd" else {})
    )
    actual, _ = fused_divergence(h, w, th, tw, divergence=by)
    assert_equal_equations(actual, expected)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
@pytest.mark.parametrize("divergence", CASES)
def test_statistics_of_the_tokens_are_those_of_full_logits(divergence, chunk_tokens):
    by = objective_of(**CASES[divergence])
    h, w, th, tw, b, tb = inputs()
    # near enough for the student to agree on some tokens
    th, tw, tb = th[:, :D], w.clone(), tb * 0.5
    student, teacher = reference_logits(h + th, w, b), reference_logits(th, tw, tb)
    _, statistics = fused_divergence(
        (h + th).requires_grad_(),
        w,
        th,
        tw,
        divergence=by,
        bias=b,
        teacher_bias=tb,
        statistics=True,
        chunk_bytes=chunk_tokens * one_token_bytes(4),
    )
    p = (teacher / by.temperature).softmax(-1)
    agreement = student.argmax(-1) == teacher.argmax(-1)
    assert 0 < agreement.sum() < N
    assert torch.equal(statistics.top1_agreement, agreement)
    assert_equal_equations(statistics.teacher_entropy, -(p * p.log()).sum(-1))
    expected = reference_loss(student, teacher, by)
    assert_equal_equations(statistics.divergence, expected)
    assert not any(rows.requires_grad for rows in statistics)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
@pytest.mark.parametrize(("rows", "teacher_rows"), [(V, V - 5), (V - 5, V), (V, V)])
def test_padded_rows_of_either_head_are_no_part_of_the_distributions(
    rows, teacher_rows, name, frozen
):
    h, w, th, tw, b, tb = inputs()
    size = V - 9
    w, b = (
        w[:rows].clone().requires_grad_(not frozen),
        b[:rows].clone().requires_grad_(not frozen),
    )
    tw, tb = tw[:teacher_rows] * 1.0, tb[:teacher_rows] * 1.0
    tw[size:] *= 100  # would show clearly if they were not left out
    leaves = [h.requires_grad_()] + ([] if frozen else [w, b])
    expected = reference_loss(
        reference_logits(h, w[:size], b[:size]),
        reference_logits(th, tw[:size], tb[:size]),
        objective_of(name),
    ).sum()
    expected_grads = torch.autograd.grad(expected, leaves)
    actual, statistics = fused_divergence(
        h,
        w,
        th,
        tw,
        divergence=objective_of(name),
        bias=b,
        teacher_bias=tb,
        vocab_size=size,
        statistics=True,
        chunk_bytes=7 * one_token_bytes(),
    )
    grads = torch.autograd.grad(actual, leaves)
    assert_equal_equations(actual, expected)
    for grad, reference in zip(grads, expected_grads, strict=True):
        assert_equal_equations(grad, reference)
    assert frozen or (not grads[1][size:].any() and not grads[2][size:].any())
    assert statistics.divergence.shape == (N,)


@pytest.mark.parametrize("name", LABEL_NAMES)
def test_padded_rows_have_no_part_in_a_loss_on_labels(name):
    h, w, *_ = inputs()
    labels, objective = torch.arange(N) % (V - 9), objective_of(name)
    logits = reference_logits(h, w[: V - 9])
    expected = reference_loss(logits, labels, objective).sum()
    actual = fused_label_loss(h, w, labels, objective=objective, vocab_size=V - 9)
    assert_equal_equations(actual, expected)


@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
def test_bfloat16_gradients_of_all_divergences_are_within_half_a_percent_near_the_teacher(
    name,
):
    h, w, th = close_student(0.02)
    s = reference_logits(h, w).requires_grad_()
    total = reference_loss(s, reference_logits(th, w), objective_of(name)).sum()
    assert 2e-5 < total / len(h) < 1e-2
    exact = torch.autograd.grad(total, s)[0] @ w.double()
    # the gradient itself is then not rounded to bfloat16
    h = h.float().requires_grad_()
    loss, statistics = fused_divergence(
        h, w, th, w, divergence=objective_of(name), statistics=True
    )
    loss.backward()
    assert (h.grad.double() - exact).norm() / exact.norm() < 5e-3
    torch.testing.assert_close(loss.double(), total.detach(), rtol=5e-3, atol=0)
    assert (statistics.divergence > 0).all()


class WideningKernels(Kernels):
    """The matmuls of a GPU, which take bfloat16 and return float32; the gradient of the
    logits is rounded.
    """

    def widens(self, device, dtype):
        return dtype == torch.bfloat16

    def mm(self, a, b, out):
        torch.mm(a.float(), b.float(), out=out)

    def addmm(self, accumulator, a, b):
        accumulator.addmm_(a.float(), b.float())


@pytest.mark.parametrize(
    "kernels", [KERNELS, WideningKernels()], ids=["as on this device", "as on a GPU"]
)
def test_bfloat16_gradients_of_a_whole_head_are_within_half_a_percent_of_float64_at_a_kl_of_4e_4(
    kernels,
):
    """Tested through the head module: bfloat16 hidden states, heads and returned
    gradients, a vocabulary of 32,000.
    """
    g = torch.Generator().manual_seed(0)
    n, d, v = 24, 512, 32000
    model = tiny_model("qwen3_moe")
    model.lm_head = torch.nn.Linear(d, v, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.randn(v, d, generator=g) / d**0.5)
    teacher_head = copy.deepcopy(model.lm_head)
    attach_loss_head(model)
    model.lm_head.kernels = kernels
    th = (2.5 * torch.randn(n, d, generator=g)).bfloat16()
    h = (
        (th.float() + 0.028 * torch.randn(n, d, generator=g))
        .bfloat16()
        .requires_grad_()
    )

    hidden, weight = (
        h.detach().double().requires_grad_(),
        model.lm_head.weight.detach().double().requires_grad_(),
    )
    expected = reference_kl(
        (hidden @ weight.T), reference_logits(th, teacher_head.weight.detach())
    )
    expected.backward()
    assert 3e-4 < expected / n < 5e-4

    by = objective_of("kl")
    loss, _ = model.lm_head(h, Target(by, teacher_hidden=th, teacher_head=teacher_head))
    loss.backward()
    for gradient, exact in (
        (h.grad, hidden.grad),
        (model.lm_head.weight.grad, weight.grad),
    ):
        assert gradient.dtype == torch.bfloat16
        assert (gradient.double() - exact).norm() / exact.norm() < 5e-3
    torch.testing.assert_close(
        loss.detach().double(), expected.detach(), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
@pytest.mark.parametrize("statistics", [False, True])
def test_a_rounded_log_sum_exp_does_not_show_in_the_divergence_of_a_nearly_converged_student(
    name, statistics, monkeypatch
):
    """In float64 with errors as large as those of float32: 1e-6 per row, where the
    divergence is below 5e-7.
    """
    exactly, g = losses._log_softmax_, torch.Generator().manual_seed(5)

    def rounded(x, work):
        exactly(x, work)
        x.add_(1e-6 * torch.randn(len(x), 1, generator=g, dtype=x.dtype))

    h, w, th = close_student(1e-3, torch.float64)
    expected = reference_loss(
        reference_logits(h, w), reference_logits(th, w), objective_of(name)
    ).sum()
    assert expected / len(h) < 5e-7
    monkeypatch.setattr(losses, "_log_softmax_", rounded)
    loss, _ = fused_divergence(
        h, w, th, w, divergence=objective_of(name), statistics=statistics
    )
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
@pytest.mark.parametrize("statistics", [False, True])
def test_no_divergence_of_a_nearly_converged_student_is_rounding_noise(
    name, statistics
):
    h, w, th = close_student(1e-2, torch.float32)
    expected = reference_loss(
        reference_logits(h, w), reference_logits(th, w), objective_of(name)
    ).sum()
    assert 1e-5 < expected / len(h) < 5e-5
    loss, _ = fused_divergence(
        h, w, th, w, divergence=objective_of(name), statistics=statistics
    )
    # The value of a token contains two sums of probabilities, each near 1 and rounded
    # once; the signs are random.
    unit = torch.finfo(torch.float32).eps * (2 * len(h)) ** 0.5
    assert abs(loss.double() - expected) < ROUNDINGS * unit < 0.05 * expected


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("divergence", CASES)
def test_float32_is_as_exact_as_it_is_on_full_logits(divergence, option):
    by, o = objective_of(**CASES[divergence]), OPTIONS[option]
    h, w, th, tw, b, tb = inputs(torch.float32)
    bias, teacher_bias = (b, tb) if o.get("bias") else (None, None)
    leaves = [x.requires_grad_() for x in (h, w, bias) if x is not None]
    student = {"bias": bias, "scale": o.get("scale", 1.0), "softcap": o.get("softcap")}
    teacher = {
        "bias": teacher_bias,
        "scale": o.get("teacher_scale", 1.0),
        "softcap": o.get("teacher_softcap"),
    }

    def on_full_logits(dtype):
        logits = (
            reference_logits(h, w, **student, dtype=dtype),
            reference_logits(th, tw, **teacher, dtype=dtype),
        )
        total = reference_loss(*logits, by).sum()
        return total.detach(), *torch.autograd.grad(total, leaves)

    actual, _ = fused_divergence(
        h, w, th, tw, divergence=by, bias=bias, teacher_bias=teacher_bias,
        scaling=(student["scale"], student["softcap"]), teacher_scaling=(teacher["scale"], teacher["softcap"]),
        chunk_bytes=5 * one_token_bytes(5, 4),
    )  # fmt: skip
    fused = actual.detach(), *torch.autograd.grad(actual, leaves)
    for one, plain, exact in zip(
        fused, on_full_logits(torch.float32), on_full_logits(torch.float64), strict=True
    ):
        assert_as_exact(one, plain, exact.double())


@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
def test_extreme_logits_give_the_finite_divergence_and_gradient_that_float64_gives(
    name,
):
    h, w, th, tw, *_ = inputs(torch.float32)
    h, th = (h * 200).requires_grad_(), th * 200
    logits = reference_logits(h, w), reference_logits(th, tw)
    expected = reference_loss(*logits, objective_of(name)).sum()
    expected_grad = torch.autograd.grad(expected, h)[0]
    loss, _ = fused_divergence(
        h, w, th, tw, divergence=objective_of(name), statistics=True
    )
    loss.backward()
    rounding = rounding_of(*logits)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=rounding, atol=0)
    assert (h.grad - expected_grad).norm() < ROUNDINGS * rounding * (
        1 + expected_grad.norm()
    )


@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
def test_equal_students_have_no_divergence_and_no_gradient(name):
    h, w, *_ = inputs()
    h = h.requires_grad_()
    loss, statistics = fused_divergence(
        h, w, h, w, divergence=objective_of(name), statistics=True
    )
    loss.backward()
    assert abs(loss.item()) < 1e-6 and h.grad.abs().max() < 1e-6
    assert statistics.top1_agreement.all()


@pytest.mark.parametrize("chunk_tokens", [1, 5, 1000])
@pytest.mark.parametrize("name", DIVERGENCE_NAMES)
def test_a_student_that_prefers_no_token_agrees_with_nobody(name, chunk_tokens):
    h, w, th, tw, *_ = inputs()
    dead = torch.zeros_like(w)
    dead[3:] -= 1  # the first three tokens tie in every row
    h = h.abs()
    chunk_bytes = chunk_tokens * one_token_bytes(4)
    for weight in (torch.zeros_like(w), dead):
        _, statistics = fused_divergence(
            h,
            weight,
            th,
            tw,
            divergence=objective_of(name),
            statistics=True,
            chunk_bytes=chunk_bytes,
        )
        best = reference_logits(th, tw).argmax(-1)
        assert (best > 0).sum() > 0 and not statistics.top1_agreement[best > 0].any()
        assert torch.equal(statistics.top1_agreement, best == 0)


def test_logits_that_rounding_makes_equally_probable_are_different():
    # A sum of exponentials far above the two largest, which differ in their last bits.
    w = torch.cat(
        [torch.tensor([[0.0], [1.0], [1.0 + 2**-20]]), torch.full((4096, 1), 0.5)]
    )
    h, th = torch.full((2, 1), 0.25), torch.full((2, 1), 8.0)
    _, statistics = fused_divergence(
        h, w, th, w, divergence=objective_of("kl"), statistics=True
    )
    rounded, teacher = ((states @ w.t()).log_softmax(-1) for states in (h, th))
    assert (rounded[:, 1] == rounded[:, 2]).all()
    assert (teacher[:, 1] < teacher[:, 2]).all()
    assert statistics.top1_agreement.all()


@pytest.mark.parametrize("name", few(DIVERGENCE_NAMES, 1))
def test_peak_memory_stays_far_below_tokens_times_vocabulary(name):
    """Measures the peak resident memory of a child: one (N, V) float32 matrix is 500
    MiB.
    """
    program = """
        import resource, sys, torch
        from tests.losses import fused_divergence, objective_of
        by = objective_of(sys.argv[1])
        torch.set_num_threads(1)
        n, d, v = 4096, 16, 32000
        h, th = torch.randn(n, d).requires_grad_(), torch.randn(n, d)
        w, tw = torch.randn(v, d).requires_grad_(), torch.randn(v, d)
        fused_divergence(h[:8], w, th[:8], tw, divergence=by)[0].backward()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        options = dict(divergence=by, statistics=True, chunk_bytes=48 << 20)
        fused_divergence(h, w, th, tw, **options)[0].backward()
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), name],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(output.stdout) < 120
