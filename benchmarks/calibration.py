"""The cost of a calibration on the shapes of a large model with few layers, and its
effect on every family.

    python -m benchmarks.calibration layers [--num-layers 2] [--shrink 1]
                                            [--tokens 8192] [--device cuda]
    python -m benchmarks.calibration families

`layers`: a random checkpoint of Qwen3-30B-A3B's shapes (widths divided by --shrink, a
small vocabulary) is calibrated from folder to folder. Printed are seconds per layer,
operations per second (`fcsd.planning.cost.estimate`), and the growth of the process.
`families`: KL(original || converted) of each family's tiny random model on random
tokens, before and after.
"""

import argparse
import copy
import json
import resource
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fcsd.model.config import ModelConfig
from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.model.connectivity.checkpoint import read_checkpoint
from fcsd.model.families import FAMILIES
from fcsd.model.load import find_model
from fcsd.parallel.engine import Engine
from fcsd.parallel.launch import Launch
from fcsd.planning.cost.estimate import calibration_flops
from fcsd.training.calibration.checkpoint import calibrate_checkpoint
from fcsd.training.calibration.model import calibrate_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LENGTH = 512


def write_checkpoint(folder: Path, num_layers: int, shrink: int) -> None:
    """Write random weights in bfloat16, experts one by one, in shards of the size of a
    layer.
    """
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=2048 // shrink, intermediate_size=6144 // shrink, moe_intermediate_size=768 // shrink,
        num_experts=128 // shrink, num_experts_per_tok=8, num_attention_heads=32 // shrink, num_key_value_heads=4,
        head_dim=128, num_hidden_layers=num_layers, vocab_size=8192, norm_topk_prob=True, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        folder, max_shard_size="1GB"
    )


def layers(num_layers: int, shrink: int, tokens: int, device: str) -> dict[str, float]:
    """Measure one calibration; each process measures only one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(folder / "base", num_layers, shrink)
        (folder / "work").mkdir()
        ids = torch.randint(0, 8192, (-(-tokens // LENGTH), LENGTH))
        rows = [
            {"input_ids": row, "position_ids": torch.arange(LENGTH), "labels": row}
            for row in ids
        ]
        before = Path("/proc/self/clear_refs")
        # Reset the peak: the whole checkpoint was in memory while it was written.
        before.write_text("5")
        start = _peak_mib()
        calibration = calibrate_checkpoint(
            find_model(ModelConfig(path=str(folder / "base"))),
            folder / "work",
            Connectivity("all"),
            rows,
            ridge=1e-3,
            launch=Launch(torch.device(device), Engine("one")),
        )
        checkpoint = read_checkpoint(folder / "base")
        size = (
            sum(file.stat().st_size for file in (folder / "base").glob("*.safetensors"))
            / 2**20
        )
    width, experts = 2048 // shrink, 128 // shrink
    matrices = {
        name: shape
        for name, shape in checkpoint.shapes.items()
        if ".layers." in name and len(shape) == 2
    }
    size_of = {name: shape[0] * shape[1] for name, shape in matrices.items()}
    active = sum(
        number * (8 / experts if ".experts." in name else 1)
        for name, number in size_of.items()
    )
    flops = calibration_flops(
        forward=2 * active,
        tokens=calibration["tokens"],
        num_layers=num_layers,
        hidden_size=width,
        num_parameters=sum(size_of.values()),
        num_experts=experts,
        experts_per_token=8,
    )
    return {
        "tokens": calibration["tokens"],
        "operations_a_second": round(flops / calibration["seconds"] / 1e9) * 1e9,
        "seconds_a_layer": round(calibration["seconds"] / num_layers, 2),
        "checkpoint_mib": round(size),
        "grew_mib": round(_peak_mib() - start),
    }


def _peak_mib() -> float:
    """Return the peak of resident memory since the reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@torch.no_grad()
def kl(teacher: torch.nn.Module, student: torch.nn.Module, ids: torch.Tensor) -> float:
    """Return KL(teacher || student) in nats per token."""
    p, q = (
        m(input_ids=ids, use_cache=False).logits.double().log_softmax(-1)
        for m in (teacher, student)
    )
    return float((p.exp() * (p - q)).sum(-1).mean())


def families() -> None:
    """Print a line per family, and at the end those that got worse."""
    from tests.reference.tiny import tiny_model

    ids = torch.randint(3, 90, (160, 32), generator=torch.Generator().manual_seed(0))
    worse = []
    for model_type in FAMILIES:
        teacher = tiny_model(model_type, seed=1)
        student = copy.deepcopy(teacher)
        convert_model(student, Connectivity("all"))
        before = kl(teacher, student, ids[:32])
        results = calibrate_model(student, teacher, ids[32:], progress=False)
        after = kl(teacher, student, ids[:32])
        left = {text for result in results for text in result["left"]}
        print(
            f"{model_type:24} {before:.3f} -> {after:.3f}  {'; '.join(sorted(left))}",
            flush=True,
        )
        worse += [model_type] if after >= before else []
    print(f"worse than untrained: {', '.join(worse) or 'none'}")


def main(arguments: list[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibration", description=__doc__
    )
    parser.add_argument("what", choices=["layers", "families"])
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    if options.what == "families":
        families()
    else:
        print(
            json.dumps(
                layers(
                    options.num_layers, options.shrink, options.tokens, options.device
                )
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
