"""Compare `fcsd estimate` with real steps of a real run on this GPU.

    python benchmarks/estimate.py --gpu h100 [--cases qwen3 deepseek …] [--steps 8]
    [--json OUT]

The benchmark runs `fcsd distill` of a published configuration at its real widths, with
few layers and random weights so that a whole training state fits on one device. It
measures the peaks of allocated and of reserved memory, and the tokens per second that
the run reports (the median of the steps after the third). Before that, `fcsd estimate`
predicts them from the same recipe. Each run is a separate process. Speed depends on the
share of the published peak that is reached, for which `fcsd estimate` assumes a range;
the share that gives the measured speed is printed.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

QWEN, DEEPSEEK = "Qwen--Qwen3-30B-A3B", "deepseek-ai--DeepSeek-V2-Lite-Chat"
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": (QWEN, {"num_hidden_layers": 3}, {}),
    "qwen3, all activations": (
        QWEN,
        {"num_hidden_layers": 3},
        {"gradient_checkpointing": False},
    ),
    "deepseek": (DEEPSEEK, {"num_hidden_layers": 4}, {}),
    "qwen3 fsdp2": (QWEN, {"num_hidden_layers": 3}, {}),
    "qwen3 float32": (QWEN, {"num_hidden_layers": 2}, {"bf16": False}),
}
"""name -> published configuration, its changes, the changes of the recipe's section `train`."""

FSDP2 = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "num_machines": 1,
    "num_processes": 1,
    "mixed_precision": "no",
    "main_process_port": 0,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
    },
}
"""One rank, for the cases whose name ends in fsdp2: weights, including those of
experts, are cast where they are gathered.
"""


def write_checkpoint(folder: Path, config: str, changes: dict[str, Any]) -> None:
    """Write random weights in bfloat16 at the configuration's widths, and a small
    tokenizer.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from fcsd.pipeline.tiny.models import tiny_tokenizer

    fields = json.loads(
        (ROOT / "fcsd" / "inspect" / "configs" / f"{config}.json").read_text()
    )
    fields |= changes
    for name in ("auto_map", "architectures", "quantization_config"):
        fields.pop(name, None)
    model_type = fields.pop("model_type")
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(model_type, **fields), dtype=torch.bfloat16
        )
    model.save_pretrained(folder)
    tiny_tokenizer(512).save_pretrained(folder)


def write_recipe(
    folder: Path, options: argparse.Namespace, train: dict[str, Any]
) -> Path:
    rows = options.rows * options.steps * 4
    text = "the rain in spain stays mainly in the plain, and " * (
        options.length // 49 + 1
    )
    (folder / "rows.jsonl").write_text(
        "".join(
            json.dumps({"text": f"{k} {text}"[: options.length]}) + "\n"
            for k in range(rows)
        )
    )
    recipe = {
        "name": "estimate",
        "output_dir": str(folder / "run"),
        "model": {"path": str(folder / "model")},
        "data": {
            "train": [
                {"path": str(folder / "rows.jsonl"), "columns": {"text": "text"}}
            ],
            "max_length": options.length,
            "loss_on": "all",
        },
        "train": {
            "max_steps": options.steps,
            "batch_size_tokens": options.rows * options.length * 2,  # two micro-batches
            "per_device_train_batch_size": options.rows,
            "learning_rate": 1e-5,
            "warmup_steps": 1,
            "logging_steps": 1,
            "save_steps": options.steps,
            "save_total_limit": 1,
            "bf16": True,
            **train,
        },
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return folder / "recipe.yaml"


def worker(case: str, folder: Path, options: argparse.Namespace) -> None:
    """Run once, and write the measurements to FOLDER/measured.json."""
    import torch

    from fcsd.cli.main import main as fcsd
    from fcsd.training import run as training
    from fcsd.training.trainer import DistillTrainer

    config, changes, train = CASES[case]
    write_checkpoint(folder / "model", config, changes)
    torch.cuda.empty_cache()
    recipe = write_recipe(folder, options, train)

    def end(*_: Any) -> None:
        # the memory kept after the last step does not count; if sharded, it would have
        # to be gathered
        raise SystemExit

    DistillTrainer._save_checkpoint = lambda *_, **__: None  # type: ignore[method-assign]
    training._leave_model = end
    torch.cuda.reset_peak_memory_stats()
    peaks: dict[str, int] = {}
    step = DistillTrainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = step(self, *args, **kwargs)
        peaks["allocated"] = torch.cuda.max_memory_allocated()
        peaks["reserved"] = torch.cuda.max_memory_reserved()
        return loss

    DistillTrainer.training_step = training_step  # type: ignore[method-assign]
    with contextlib.suppress(SystemExit):
        if status := fcsd(["distill", str(recipe)]):
            raise RuntimeError(f"fcsd distill: exit status {status}")
    peaks["allocated"] = max(peaks["allocated"], torch.cuda.max_memory_allocated())
    lines = (folder / "run" / "distill" / "history.jsonl").read_text().splitlines()
    speeds = [
        row["tokens_per_second"]
        for row in map(json.loads, lines)
        if "tokens_per_second" in row
    ]
    (folder / "measured.json").write_text(
        json.dumps(peaks | {"tokens_per_second": statistics.median(speeds[3:])})
    )


def measure(case: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = [
            "--worker",
            case,
            "--folder",
            name,
            "--gpu",
            options.gpu,
            "--steps",
            str(options.steps),
        ]
        arguments += ["--rows", str(options.rows), "--length", str(options.length)]
        begin, sharding = [sys.executable], "none"
        if case.endswith("fsdp2"):
            (folder / "fsdp2.yaml").write_text(json.dumps(FSDP2))
            begin += [
                "-m",
                "accelerate.commands.launch",
                "--config_file",
                str(folder / "fsdp2.yaml"),
            ]
            sharding = "fsdp2"
        run = subprocess.run(
            [*begin, __file__, *arguments], capture_output=True, text=True
        )
        if not (folder / "measured.json").is_file():
            return {"case": case, "error": (run.stderr or run.stdout)[-1500:]}
        measured = json.loads((folder / "measured.json").read_text())
        command = [
            sys.executable,
            "-m",
            "fcsd",
            "estimate",
            str(folder / "recipe.yaml"),
            "--gpu",
            options.gpu,
        ]
        process = subprocess.run(
            [*command, "--sharding", sharding, "--json"],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        if process.returncode:
            return {"case": case, "error": process.stderr[-1500:], "measured": measured}
    estimate = json.loads(process.stdout)
    return {"case": case, "measured": measured, "estimate": estimate}


def row(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"{result['case']:24} {result['error']}"
    measured, estimate = result["measured"], result["estimate"]
    parts = estimate["memory"]["parts"]
    expected = estimate["memory"]["total_bytes"] - parts["GPU context"]
    without_slack = expected - parts["fragmentation"]
    slow, fast = estimate["time"]["tokens_per_second"]
    settings = estimate["settings"]
    per_token = estimate["flops"]["per_step"] / (
        settings["rows"] * settings["max_length"] * settings["micro_batches"]
    )
    share = (
        measured["tokens_per_second"]
        * per_token
        / (estimate["hardware"]["bf16_tflops"] * 1e12)
    )
    return (
        f"{result['case']:24} {without_slack / 2**30:9.1f}"
        f" {measured['allocated'] / 2**30:9.1f}"
        f" {without_slack / measured['allocated']:6.2f} {expected / 2**30:9.1f}"
        f" {measured['reserved'] / 2**30:9.1f} {slow:8.0f} to {fast:6.0f}"
        f" {measured['tokens_per_second']:8.0f} {share:6.1%}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", default="h100", help="as `fcsd estimate` names it")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=2, help="rows in a forward pass")
    parser.add_argument("--length", type=int, default=4096, help="tokens per row")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.folder, options)
        return 0
    print(
        f"{'case':24} {'GiB told':>9} {'allocated':>9} {'ratio':>6} {'with slack':>9}"
        f" {'reserved':>9} {'tokens/s told':>18} {'measured':>8} {'share':>6}"
    )
    results = []
    for case in options.cases:
        results.append(measure(case, options))
        print(row(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
