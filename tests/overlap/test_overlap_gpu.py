"""Overlap on real streams: one GPU with an emulated link whose rows are NaN until they arrive, or two with NCCL."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fcsd.connectivity import Connectivity, convert_model
from fcsd.tiny.models import tiny_model
from tests.overlap.ranks import attached, step, worst

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "overlap.py"
DEVICES = torch.cuda.device_count()


def late_link(group: Any) -> Any:
    """The benchmark's link, slow enough that whoever does not wait reads NaN."""
    spec = importlib.util.spec_from_file_location("overlap_benchmark", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    link = module.CudaLink(bytes_per_second=1e6, ranks=8)
    start = link.start

    def poisoned(received: Any, *rest: Any) -> Any:
        received.fill_(float("nan"))
        return start(received, *rest)

    link.start = poisoned
    return link


def spread_here(world: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    import fcsd.overlap  # noqa: F401  # registers the implementation

    model = tiny_model("qwen2_moe").cuda()
    convert_model(model, Connectivity("all"))
    mesh = init_device_mesh("cuda", (world, 1), mesh_dim_names=("ep", "tp"))
    plan = {}
    for name, _ in model.named_modules():
        if name.endswith("mlp.experts"):
            plan |= {f"{name}.gate_up_proj": "grouped_gemm", f"{name}.down_proj": "grouped_gemm"}
            plan[name] = "ep_dispatch_experts"
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, ep_implementation="farskip")
    return model


def errors(rank: int, world: int, store: str, transport: Any) -> list[float]:
    """Of blocking exchanges, overlapped ones, and those with checkpointing, against the first."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(store, world), rank=rank, world_size=world)
    try:
        model = spread_here(world)
        x = torch.randint(3, 99, (2, 64), generator=torch.Generator().manual_seed(rank)).cuda()
        attached(model, "blocking")
        expected = step(model, x)
        attached(model, "full", transport=transport)
        found = [worst(step(model, x), expected)]
        model.activation_checkpointing_enable({"use_reentrant": False})
        return [*found, worst(step(model, x), expected)]
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICES < 1, reason="needs a GPU")
def test_nothing_reads_rows_on_a_gpu_before_their_stream_has_brought_them(tmp_path: Path) -> None:
    assert max(errors(0, 1, str(tmp_path / "store"), late_link)) < 1e-4


def on_rank(rank: int, store: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    assert max(errors(rank, 2, store, None)) < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(DEVICES < 2, reason="needs two GPUs: NCCL does not let two ranks share one")
def test_two_gpus_have_the_gradients_of_blocking_exchanges(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(on_rank, (str(tmp_path / "store"),), nprocs=2)
