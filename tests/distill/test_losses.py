"""The fused losses against plain autograd in float64 on full logits."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F

from fcsd.distill.losses import fused_linear_cross_entropy, fused_linear_kl
from fcsd.errors import UserError

N, D, D_TEACHER, V = 37, 12, 20, 53


def reference_logits(hidden, weight, bias=None, scale=1.0, softcap=None):
    z = hidden.double() @ weight.double().T
    if bias is not None:
        z = z + bias.double()
    z = z * scale
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def reference_kl(student, teacher):
    return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="sum")


def inputs(dtype=torch.float32, n=N, seed=0):
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    return rand(n, D), rand(V, D), rand(n, D_TEACHER), rand(V, D_TEACHER), rand(V), rand(V)


def one_token_bytes(tiles=3, itemsize=4):
    return V * itemsize * tiles


OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.37, "teacher_scale": 1.7},
    "softcap": {"softcap": 2.0, "teacher_softcap": 3.0},
    "everything": {"bias": True, "scale": 0.7, "teacher_scale": 1.2, "softcap": 1.5},
}


@pytest.mark.parametrize("chunk_tokens", [1, 5, 37, 1000])
@pytest.mark.parametrize("option", OPTIONS)
def test_kl_and_its_gradients_equal_float64_autograd(option, chunk_tokens):
    o = OPTIONS[option]
    h, w, th, tw, b, tb = inputs()
    bias, teacher_bias = (b, tb) if o.get("bias") else (None, None)
    leaves = [x.requires_grad_() for x in (h, w, bias) if x is not None]
    scale, teacher_scale = o.get("scale", 1.0), o.get("teacher_scale", 1.0)
    softcap, teacher_softcap = o.get("softcap"), o.get("teacher_softcap")

    expected = reference_kl(
        reference_logits(h, w, bias, scale, softcap),
        reference_logits(th, tw, teacher_bias, teacher_scale, teacher_softcap),
    )
    expected_grads = torch.autograd.grad(expected * 0.25, leaves)
    actual = fused_linear_kl(
        h,
        w,
        th,
        tw,
        bias=bias,
        teacher_bias=teacher_bias,
        logit_scale=scale,
        teacher_logit_scale=teacher_scale,
        softcap=softcap,
        teacher_softcap=teacher_softcap,
        chunk_bytes=chunk_tokens * one_token_bytes(),
    )
    grads = torch.autograd.grad(actual * 0.25, leaves)

    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    for grad, reference in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, reference.to(grad.dtype), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("option", OPTIONS)
def test_cross_entropy_and_its_gradients_equal_float64_autograd(option):
    o = OPTIONS[option]
    h, w, _, _, b, _ = inputs()
    bias = b if o.get("bias") else None
    leaves = [x.requires_grad_() for x in (h, w, bias) if x is not None]
    labels = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(1))
    scale, softcap = o.get("scale", 1.0), o.get("softcap")

    expected = F.cross_entropy(reference_logits(h, w, bias, scale, softcap), labels, reduction="sum")
    expected_grads = torch.autograd.grad(expected, leaves)
    actual = fused_linear_cross_entropy(
        h, w, labels, bias=bias, logit_scale=scale, softcap=softcap, chunk_bytes=5 * one_token_bytes(2)
    )
    grads = torch.autograd.grad(actual, leaves)

    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    for grad, reference in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, reference.to(grad.dtype), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("objective", ["kl", "ce"])
def test_gradients_equal_central_differences_in_float64(objective):
    h, w, th, tw, b, tb = inputs(torch.float64, n=3)
    labels = torch.tensor([0, V - 1, 7])
    options = {"logit_scale": 0.5, "softcap": 2.0, "chunk_bytes": 2 * one_token_bytes(4, 8)}

    def loss(h, w, b):
        if objective == "kl":
            return fused_linear_kl(h, w, th, tw, bias=b, teacher_bias=tb, **options)
        return fused_linear_cross_entropy(h, w, labels, bias=b, **options)

    leaves = [x.requires_grad_() for x in (h, w, b)]
    grads = torch.autograd.grad(loss(*leaves), leaves)
    step = 1e-6
    for which, grad in enumerate(grads):
        for index in range(0, grad.numel(), 7):
            values = []
            for sign in (1, -1):
                moved = [x.detach().clone() for x in leaves]
                moved[which].view(-1)[index] += sign * step
                values.append(loss(*moved))
            difference = (values[0] - values[1]) / (2 * step)
            torch.testing.assert_close(grad.view(-1)[index], difference, rtol=1e-6, atol=1e-7)


def test_masked_rows_left_out_give_the_loss_of_the_mask_and_no_gradient_to_them():
    h, w, th, tw, *_ = inputs()
    keep = torch.arange(N) % 3 != 0
    h.requires_grad_(), w.requires_grad_()
    per_token = F.kl_div(
        reference_logits(h, w).log_softmax(-1),
        reference_logits(th, tw).log_softmax(-1),
        log_target=True,
        reduction="none",
    ).sum(-1)
    expected = (per_token * keep).sum()
    expected_grads = torch.autograd.grad(expected, (h, w))
    grads = torch.autograd.grad(fused_linear_kl(h[keep], w, th[keep], tw), (h, w))
    for grad, reference in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, reference.float(), rtol=1e-4, atol=1e-4)
    assert (grads[0][~keep] == 0).all()


@pytest.mark.parametrize("objective", ["kl", "ce"])
def test_no_tokens_give_zero_and_stay_connected_with_zero_gradients(objective):
    h, w, th, tw, b, _ = inputs(n=0)
    leaves = [x.requires_grad_() for x in (h, w, b)]
    if objective == "kl":
        loss = fused_linear_kl(h, w, th, tw, bias=b)
    else:
        loss = fused_linear_cross_entropy(h, w, torch.zeros(0, dtype=torch.long), bias=b)
    assert loss.item() == 0.0
    grads = torch.autograd.grad(loss, leaves)
    assert [g.shape for g in grads] == [x.shape for x in leaves]
    assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("frozen", ["head", "hidden"])
def test_a_frozen_side_gets_no_gradient_and_leaves_the_other_sides_unchanged(frozen):
    h, w, th, tw, *_ = inputs()
    both = torch.autograd.grad(fused_linear_kl(h.requires_grad_(), w.requires_grad_(), th, tw), (h, w))
    h2, w2 = h.detach().clone(), w.detach().clone()
    trained = (h2 if frozen == "head" else w2).requires_grad_()
    fused_linear_kl(h2, w2, th, tw).backward()
    torch.testing.assert_close(trained.grad, both[0] if frozen == "head" else both[1], rtol=0, atol=0)
    assert (w2 if frozen == "head" else h2).grad is None


def test_the_teacher_gets_no_gradient_even_when_it_would_take_one():
    h, w, th, tw, *_ = inputs()
    fused_linear_kl(h.requires_grad_(), w, th.requires_grad_(), tw.requires_grad_()).backward()
    assert th.grad is None and tw.grad is None


def test_a_head_tied_to_the_embedding_collects_both_gradients():
    _, w, th, tw, *_ = inputs()
    ids = torch.arange(N) % V
    w.requires_grad_()
    expected = torch.autograd.grad(
        reference_kl(reference_logits(torch.tanh(w[ids].double()), w), reference_logits(th, tw)), w
    )[0]
    actual = torch.autograd.grad(fused_linear_kl(torch.tanh(w[ids]), w, th, tw), w)[0]
    torch.testing.assert_close(actual, expected.float(), rtol=1e-4, atol=1e-4)


def test_without_gradients_only_the_loss_is_computed():
    h, w, th, tw, *_ = inputs()
    with torch.no_grad():
        loss = fused_linear_kl(h.requires_grad_(), w, th, tw)
    assert not loss.requires_grad
    torch.testing.assert_close(
        loss.double(), reference_kl(reference_logits(h, w), reference_logits(th, tw)), rtol=1e-5, atol=0
    )


def close_student(kl_scale, dtype=torch.bfloat16):
    """A student near its teacher: one shared bfloat16 head, logits of standard deviation about 2.5."""
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
    rounded = (s.bfloat16().double().softmax(-1) - t.bfloat16().double().softmax(-1)) @ w.double()

    h.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = fused_linear_kl(h, w, th, w)
    loss.backward()

    def error(gradient):
        return ((gradient.double() - exact).norm() / exact.norm()).item()

    assert h.grad.dtype == torch.bfloat16
    assert error(rounded) > 0.1
    assert error(h.grad) < 4e-3  # the rounding of the returned bfloat16 gradient itself
    torch.testing.assert_close(loss.double(), reference_kl(s, t), rtol=1e-4, atol=0)


def test_the_kl_of_a_nearly_converged_student_is_not_rounding_noise():
    h, w, th = close_student(1e-3, torch.float32)
    expected = reference_kl(reference_logits(h, w), reference_logits(th, w))
    assert expected / len(h) < 1e-5
    torch.testing.assert_close(fused_linear_kl(h, w, th, w).double(), expected, rtol=0.02, atol=0)


def test_float32_inputs_inside_autocast_are_not_rounded():
    h, w, th, tw, *_ = inputs()
    expected = reference_kl(reference_logits(h, w), reference_logits(th, tw))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = fused_linear_kl(h, w, th, tw)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_hidden_state_gives_a_non_finite_loss(bad):
    h, w, th, tw, *_ = inputs()
    h[3, 2] = bad
    assert not torch.isfinite(fused_linear_kl(h, w, th, tw))
    assert not torch.isfinite(fused_linear_cross_entropy(h, w, torch.zeros(N, dtype=torch.long)))
    h, w, th, tw, *_ = inputs()
    th[3, 2] = bad
    assert not torch.isfinite(fused_linear_kl(h, w, th, tw))


def test_extreme_logits_give_the_finite_loss_that_float64_gives():
    h, w, th, tw, *_ = inputs()
    h, th = h * 200, th * 200
    expected = reference_kl(reference_logits(h, w), reference_logits(th, tw))
    torch.testing.assert_close(fused_linear_kl(h, w, th, tw).double(), expected, rtol=1e-5, atol=0)


def test_different_vocabularies_are_refused_with_both_sizes():
    h, w, th, tw, *_ = inputs()
    with pytest.raises(UserError, match=r"differ in vocabulary size \(52 and 53\)"):
        fused_linear_kl(h, w, th, tw[:-1])


def test_shapes_that_do_not_fit_are_refused():
    h, w, th, tw, b, _ = inputs()
    with pytest.raises(UserError, match="teacher: hidden states"):
        fused_linear_kl(h, w, th[:, :-1], tw)
    with pytest.raises(UserError, match="36 tokens of the teacher for 37 of the student"):
        fused_linear_kl(h, w, th[:-1], tw)
    with pytest.raises(UserError, match="head bias"):
        fused_linear_kl(h, w, th, tw, bias=b[:-1])
    with pytest.raises(UserError, match="labels of shape"):
        fused_linear_cross_entropy(h, w, torch.zeros(N - 1, dtype=torch.long))


def test_a_retained_graph_cannot_be_scaled_twice():
    h, w, th, tw, *_ = inputs()
    loss = fused_linear_kl(h.requires_grad_(), w, th, tw)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_peak_memory_stays_far_below_tokens_times_vocabulary():
    """Peak resident memory of a child: one (N, V) float32 matrix is 1000 MiB."""
    program = """
        import resource, torch
        from fcsd.distill.losses import fused_linear_kl
        torch.set_num_threads(1)
        n, d, v = 8192, 16, 32000
        h, th = torch.randn(n, d).requires_grad_(), torch.randn(n, d)
        w, tw = torch.randn(v, d).requires_grad_(), torch.randn(v, d)
        fused_linear_kl(h[:8], w, th[:8], tw).backward()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        fused_linear_kl(h, w, th, tw, chunk_bytes=48 << 20).backward()
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(output.stdout) < 120
