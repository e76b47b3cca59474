"""What only a GPU can show: kernels of the loss, every family, a run, its resume,
engines on one NCCL rank, memory.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fcsd.model.autocast import autocast_experts
from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.training.calibration.model import calibrate_model
from tests.float64 import in_float64
from tests.losses import fused_cross_entropy, fused_kl
from tests.model.test_autocast import gradients
from tests.reference.tiny import tiny_model
from tests.support import ROOT, TEXT_FAMILIES, Bench, free_port, start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU of CUDA or ROCm"
    ),
]


# ---- the loss


def exact_kl(h, w, th, tw):
    student, teacher = (h @ w.T).log_softmax(-1), (th @ tw.T).log_softmax(-1)
    return F.kl_div(student, teacher, log_target=True, reduction="sum")


def exact_cross_entropy(h, w, labels):
    return F.cross_entropy(h @ w.T, labels, reduction="sum")


def loss_inputs(dtype, n=700, dim=256, vocab=5003):
    """Return student and teacher close to each other, as at the end of a distillation:
    0.01 nats per token.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    tw, th = normal(vocab, dim) * 3 / dim**0.5, normal(n, dim)
    w, h = tw + 0.02 * normal(vocab, dim) * 3 / dim**0.5, th + 0.05 * normal(n, dim)
    return [x.to("cuda", dtype) for x in (h, w, th, tw)]


def relative(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("chunk_tokens", [64, 700])
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.bfloat16, 5e-3), (torch.float16, 5e-3), (torch.float32, 1e-4)],
)
@pytest.mark.parametrize("loss", ["kl", "cross_entropy"])
def test_the_loss_and_its_gradients_are_those_of_float64(
    loss, dtype, bound, chunk_tokens
):
    """Half precision goes through `mm(out_dtype=float32)`; the head's gradient
    accumulates chunk by chunk.
    """
    h, w, th, tw = loss_inputs(dtype)
    labels = torch.randint(
        0,
        len(w),
        (len(h),),
        device="cuda",
        generator=torch.Generator("cuda").manual_seed(1),
    )
    leaves = [x.requires_grad_() for x in (h, w)]
    wide = [x.detach().double().requires_grad_() for x in (h, w)]
    options = {"chunk_bytes": chunk_tokens * len(w) * 3 * 4}
    if loss == "kl":
        actual = fused_kl(h, w, th, tw, **options)
        expected = exact_kl(*wide, th.double(), tw.double())
    else:
        actual = fused_cross_entropy(
            h, w, labels, chunk_bytes=chunk_tokens * len(w) * 2 * 4
        )
        expected = exact_cross_entropy(*wide, labels)
    assert actual.dtype == torch.float32
    assert relative(actual.detach(), expected.detach()) < 1e-4
    for mine, exact in zip(
        torch.autograd.grad(actual, leaves),
        torch.autograd.grad(expected, wide),
        strict=True,
    ):
        assert mine.dtype == dtype
        assert relative(mine, exact) < bound


def test_the_loss_keeps_one_chunk_of_logits_and_never_all():
    n, dim, vocab = 8192, 512, 100_000
    h, th = (
        torch.randn(n, dim, device="cuda", dtype=torch.bfloat16, requires_grad=k == 0)
        for k in range(2)
    )
    w, tw = (
        torch.randn(
            vocab, dim, device="cuda", dtype=torch.bfloat16, requires_grad=k == 0
        )
        for k in range(2)
    )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fused_kl(h, w, th, tw).backward()
    peak = torch.cuda.max_memory_allocated() - before
    head, logits = vocab * dim * 4, n * vocab * 4
    # the chunk's GiB and its copy in half precision; the gradient, twice at the end
    assert peak < 1.5 * 2**30 + 2 * head
    assert peak < logits  # of one model in float32


# ---- families


@pytest.mark.parametrize("model_type", TEXT_FAMILIES)
def test_a_rewired_model_computes_on_the_gpu_what_it_computes_on_a_cpu(model_type):
    """In float64, forward and backward."""
    ids = torch.randint(3, 99, (2, 11), generator=torch.Generator().manual_seed(3))
    with in_float64():
        on_cpu = tiny_model(model_type).double()
        convert_model(on_cpu, Connectivity("all"))
        on_gpu = copy.deepcopy(on_cpu).cuda()
        results = []
        for model in (on_cpu, on_gpu):
            output = model(ids.to(model.device), use_cache=False).logits
            (
                output
                * torch.sin(
                    torch.arange(output.numel(), device=model.device).view_as(output)
                )
            ).sum().backward()
            gradients = {
                n: p.grad.cpu()
                for n, p in model.named_parameters()
                if p.grad is not None
            }
            results.append((output.detach().cpu(), gradients))
    (logits, gradients), (gpu_logits, gpu_gradients) = results
    torch.testing.assert_close(gpu_logits, logits, rtol=1e-8, atol=1e-8)
    assert gradients.keys() == gpu_gradients.keys()
    for name, gradient in gradients.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(
            gpu_gradients[name] / scale,
            gradient / scale,
            rtol=1e-7,
            atol=1e-7,
            msg=name,
        )


@pytest.mark.parametrize("model_type", TEXT_FAMILIES)
def test_bfloat16_with_the_default_kernels_stays_as_close_as_the_original_does(
    model_type,
):
    """Uses kernels of experts and attention that a CPU does not have; the rewired model
    loses no more precision than the original.
    """
    ids = torch.randint(3, 99, (2, 32), generator=torch.Generator().manual_seed(3))
    drift = {}
    for name in ("original", "farskip"):
        model = tiny_model(model_type)
        if name == "farskip":
            convert_model(model, Connectivity("all"))
        with torch.no_grad():
            exact = model(ids, use_cache=False).logits.log_softmax(-1)
            rounded = (
                model.to("cuda", torch.bfloat16)(ids.cuda(), use_cache=False)
                .logits.float()
                .log_softmax(-1)
            )
        drift[name] = float((rounded.cpu() - exact).abs().median())
    assert drift["farskip"] < 3 * drift["original"] + 0.02, drift


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_experts_under_autocast_are_computed_in_bfloat16_as_their_loop_is(model_type):
    autocast_experts()
    models = {
        name: tiny_model(model_type, experts_implementation=name).cuda()
        for name in ("grouped_mm", "eager")
    }
    loss, actual, kernels = gradients(models["grouped_mm"], True)
    looped, loop, _ = gradients(models["eager"], True)
    _, exact, _ = gradients(
        tiny_model(model_type, experts_implementation="eager").cuda(), False
    )
    assert kernels.dtypes == {torch.bfloat16}
    assert loss == pytest.approx(looped, rel=0.02)
    for name, gradient in actual.items():
        error, same = ((each[name] - exact[name]).norm() for each in (actual, loop))
        assert gradient.dtype == torch.float32
        assert error <= 3 * same + 0.01 * exact[name].norm(), name


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_a_calibration_on_the_gpu_folds_what_one_on_a_cpu_folds(model_type):
    """In float64, where no token goes to another expert because of the order of a sum."""
    rows = torch.randint(3, 90, (160, 32), generator=torch.Generator().manual_seed(0))
    with in_float64():
        teacher = tiny_model(model_type, seed=1).double()
        converted = copy.deepcopy(teacher)
        convert_model(converted, Connectivity("all"))
        folded = []
        for device in ("cpu", "cuda"):
            student = copy.deepcopy(converted).to(device)
            calibrate_model(
                student, copy.deepcopy(teacher).to(device), rows, progress=False
            )
            folded.append(
                {name: p.detach().cpu() for name, p in student.named_parameters()}
            )
    before = {name: p.detach() for name, p in converted.named_parameters()}
    changed = [
        name
        for name, weight in folded[0].items()
        if not torch.equal(weight, before[name])
    ]
    assert len(changed) > 8
    for name in changed:
        weight, scale = (
            folded[0][name],
            float((folded[0][name] - before[name]).abs().max()),
        )
        torch.testing.assert_close(
            folded[1][name], weight, rtol=0, atol=1e-6 * scale, msg=name
        )


# ---- a run


def history(folder: Path) -> list[dict[str, float]]:
    return [
        json.loads(line)
        for line in (folder / "distill" / "history.jsonl").read_text().splitlines()
    ]


def run(*command: str, **environment: str) -> str:
    process = start(*command, **environment)
    output, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    return output + errors


def test_a_run_on_the_gpu_has_the_loss_curve_of_a_cpu(bench: Bench):
    run("-m", "fcsd", "distill", str(bench.recipe("gpu")))
    run("-m", "fcsd", "distill", str(bench.recipe("cpu")), CUDA_VISIBLE_DEVICES="")
    one, other = (history(bench.folder / name) for name in ("gpu", "cpu"))
    assert len(one) == len(other) == 12
    for a, b in zip(one, other, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-2)


def test_a_bfloat16_run_on_the_gpu_follows_the_float32_one_and_stops_early_by_code(
    bench: Bench,
):
    train = {
        "max_steps": 12, "batch_size_tokens": 128, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
        "warmup_steps": 2, "logging_steps": 1, "save_steps": 4,
    }  # fmt: skip
    run(
        "-m",
        "fcsd",
        "distill",
        str(bench.recipe("wide", train={**train, "bf16": False})),
    )
    scored = bench.recipe(
        "narrow", train={**train, "bf16": True}, early_stopping=bench.early_stopping
    )
    run("-m", "fcsd", "distill", str(scored))
    for a, b in zip(
        history(bench.folder / "narrow"), history(bench.folder / "wide"), strict=True
    ):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.1)
    assert (bench.folder / "narrow" / "distill" / "scores.json").is_file()


ENGINES = {
    "copies": {"distributed_type": "MULTI_GPU"},
    "fsdp2": {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_reshard_after_forward": True,
        },
    },
    "zero3": {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 3, "zero3_init_flag": False, "gradient_accumulation_steps": "auto"},
    },
}  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_on_one_nccl_rank_trains_what_a_plain_process_does(
    engine, bench: Bench
):
    import yaml

    if engine == "zero3":
        pytest.importorskip("deepspeed", reason="needs DeepSpeed")
    config = bench.folder / "config.yaml"
    common = {
        "compute_environment": "LOCAL_MACHINE", "num_machines": 1, "num_processes": 1, "mixed_precision": "no",
    }  # fmt: skip
    config.write_text(yaml.safe_dump(common | ENGINES[engine]))
    launch = (
        "-m", "accelerate.commands.launch", "--config_file", str(config), "--main_process_port", str(free_port()),
    )  # fmt: skip
    run("-m", "fcsd", "distill", str(bench.recipe("alone")))
    run(
        *launch, "-m", "fcsd", "distill", str(bench.recipe(engine)), OMP_NUM_THREADS="1"
    )
    for a, b in zip(
        history(bench.folder / engine), history(bench.folder / "alone"), strict=True
    ):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-2)


def test_an_interrupted_run_on_the_gpu_is_continued_to_the_same_end(bench: Bench):
    from safetensors.torch import load_file

    interrupt = ROOT / "tests" / "gpu" / "interrupted.py"
    deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    run(str(interrupt), "0", "distill", str(bench.recipe("whole")), **deterministic)
    run(str(interrupt), "6", "distill", str(bench.recipe("broken")), **deterministic)
    assert not (bench.folder / "broken" / "distill" / "model").exists()
    run(str(interrupt), "0", "distill", str(bench.recipe("broken")), **deterministic)
    one, other = (
        load_file(bench.folder / name / "distill" / "model" / "model.safetensors")
        for name in ("whole", "broken")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
