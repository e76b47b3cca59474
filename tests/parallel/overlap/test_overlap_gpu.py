"""Overlap on real streams: one GPU with an emulated link whose rows are NaN until they
arrive, or two with NCCL.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.overlap.links import CudaLink
from benchmarks.overlap.models import spread_experts
from fcsd.model.connectivity import Connectivity, convert_model
from tests.parallel.overlap.ranks import attached, step, whole, worst
from tests.reference.tiny import tiny_model

DEVICES = torch.cuda.device_count()


def late_link(group: Any) -> Any:
    """Return the benchmark's link, slow enough that whoever does not wait reads NaN."""
    link = CudaLink(bytes_per_second=1e6, ranks=8)
    start = link.start

    def poisoned(received: Any, *rest: Any) -> Any:
        received.fill_(float("nan"))
        return start(received, *rest)

    link.start = poisoned
    return link


def errors(rank: int, world: int, store: str, transport: Any) -> list[float]:
    """Return the errors of blocking exchanges, overlapped ones, and those with
    checkpointing, against the first.
    """
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", store=dist.FileStore(store, world), rank=rank, world_size=world
    )
    try:
        model = tiny_model("qwen2_moe").cuda()
        convert_model(model, Connectivity("all"))
        spread_experts(model)
        x = torch.randint(
            3, 99, (2, 64), generator=torch.Generator().manual_seed(rank)
        ).cuda()
        attached(model, "blocking")
        expected = {name: whole(gradient) for name, gradient in step(model, x).items()}
        attached(model, "full", transport=transport)
        overlapped = [worst(step(model, x), expected)]
        model.activation_checkpointing_enable({"use_reentrant": False})
        return [*overlapped, worst(step(model, x), expected)]
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICES < 1, reason="needs a GPU")
def test_nothing_reads_rows_on_a_gpu_before_their_stream_has_brought_them(
    tmp_path: Path,
) -> None:
    assert max(errors(0, 1, str(tmp_path / "store"), late_link)) < 1e-4


def on_rank(rank: int, store: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    assert max(errors(rank, 2, store, None)) < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(
    DEVICES < 2, reason="needs two GPUs: NCCL does not let two ranks share one"
)
def test_two_gpus_have_the_gradients_of_blocking_exchanges(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(on_rank, (str(tmp_path / "store"),), nprocs=2)
