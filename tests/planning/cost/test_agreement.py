"""`fcsd plan` and `fcsd estimate` give the same figures for the same training, to the
digit.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fcsd.model.connectivity import Connectivity
from fcsd.pipeline.plan import plan_from_files
from fcsd.planning.cost.estimate import estimate
from fcsd.planning.cost.settings import Hardware, PlanSettings
from fcsd.recipe.load_recipe import load_recipe
from tests.real_configs import CONFIGS
from tests.support import few, skip_unavailable

MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {}, "DeepSeek-V2-Lite": {}, "DeepSeek-V3": {"first_k_dense_replace": 1}, "OLMoE-1B-7B-0924": {},
    "gpt-oss-20b": {"layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip
LAYOUTS = {
    "one GPU": (1, 1, 1),
    "eight, FSDP2": (1, 8, 1),
    "eight, experts over eight": (1, 8, 8),
    "two nodes, experts over eight": (2, 8, 8),
}
"""Nodes, GPUs of a node, ranks that share the experts."""

SETTINGS = [
    (model, gpu, layout, checkpointing, rows, dtype)
    for number, (model, layout) in enumerate(itertools.product(MODELS, LAYOUTS))
    for gpu, checkpointing, rows, dtype in (
        ("h100", number % 2 == 0, 1, "auto"),
        ("mi300x", number % 2 == 1, 2, "bfloat16"),
    )
]


def test_there_are_forty_settings() -> None:
    assert len(SETTINGS) == len(set(SETTINGS)) == 40


def estimated(folder: Path, train: dict[str, Any], hardware: Hardware) -> Any:
    """Estimate a pre-training, which has no teacher, as a plan has none."""
    config = json.loads((folder / "config.json").read_text())
    data = {"train": [{"path": "nowhere.jsonl"}], "max_length": 256}
    section = {"config": config, "tokenizer": "none", "train": train, "data": data}
    path = folder / "recipe.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "r", "output_dir": str(folder / "run"), "data": data, "pretrain": section,
            }
        )
    )  # fmt: skip
    return estimate(load_recipe(path), hardware, pretrain=True)


@pytest.mark.parametrize(
    ("model", "gpu", "layout", "checkpointing", "rows", "dtype"),
    few(SETTINGS[::3] + SETTINGS[1::3] + SETTINGS[2::3], 6),
)
def test_plan_and_estimate_agree(
    model: str,
    gpu: str,
    layout: str,
    checkpointing: bool,
    rows: int,
    dtype: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # For the estimate's table of activations, which a plan does not have.
    monkeypatch.setattr("fcsd.planning.cost.estimate.activation_bytes", lambda *_: None)
    config = json.loads((CONFIGS / f"{model}.json").read_text())
    skip_unavailable(config["model_type"])
    config |= {"num_hidden_layers": 2} | MODELS[model]
    # Terms of the loss and weights that a training cannot have.
    losses = ("router_aux_loss_coef", "aux_loss_alpha", "seq_aux")
    for key in (*losses, "quantization_config"):
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    nodes, gpus_per_node, ranks = LAYOUTS[layout]
    gpus, micro_batches = nodes * gpus_per_node, 2
    train = {
        "bf16": True, "gradient_checkpointing": checkpointing, "per_device_train_batch_size": rows,
        "batch_size_tokens": micro_batches * rows * gpus * 256, "max_steps": 10, "warmup_steps": 1,
        "learning_rate": 1e-4,
    }  # fmt: skip
    hardware = Hardware(gpu=gpu, num_gpus=gpus, sharding="fsdp2", expert_parallel=ranks)
    said = estimated(tmp_path, train, hardware)
    settings = PlanSettings(
        model=str(tmp_path),
        gpu=gpu,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        expert_parallel=ranks,
        batch=rows,
        global_batch=micro_batches * rows * gpus,
        length=256,
        dtype=dtype,
        keep_activations=not checkpointing,
        connectivity=Connectivity("none"),
    )
    planned = plan_from_files(settings, advise=False)
    times, time = planned["times"], said["time"]
    assert time["expected_s"] == times["regular_s"]
    assert time["compute_s"] == times["compute_s"]
    assert time["exchanges_s"] == times["communication_s"]
    assert time["sharding_s"] == times["sharding_s"][0]
    assert (times["communication_s"] > 0) == (ranks > 1)
    for part in ("parts", "total_bytes", "gpu_bytes", "fits"):
        assert said["memory"][part] == planned["memory"][part], part
    rate = planned["tokens_per_second_per_gpu"]["regular"]
    assert time["expected_tokens_per_second"] == pytest.approx(gpus * rate, rel=1e-12)
