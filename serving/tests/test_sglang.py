"""FarSkip models in SGLang on a CPU: `make test-sglang` makes the environment and the checkpoints."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orders
import pytest

from fcsd_sglang.families import FAMILIES
from fcsd_sglang.versions import VERSION, EngineError, check_version

pytest.importorskip(
    "sglang", reason="sglang is not installed; `make test-sglang` installs it beside the checkout"
)

BOUND = 1e-5
"""Nats between two implementations in float32."""
CONNECTIVITIES = ("all", "half", "gap", "attention_full", "mlp_full")
STUBS = Path(__file__).with_name("sglang_stubs")
ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(STUBS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "SGLANG_CPU_OMP_THREADS_BIND": "0|0",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "fcsd_sglang",
    "SGLANG_USE_CPU_ENGINE": "1",
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Any]:
    """SGLang's layers in this process."""
    sys.path.insert(0, str(STUBS))
    import sglang_stack

    sglang_stack.start()
    yield sglang_stack
    sys.path.remove(str(STUBS))


@pytest.mark.parametrize("connectivity", CONNECTIVITIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_compute_what_fcsd_computes_in_the_order_that_hides_sums(
    family: str, connectivity: str, models: Path, stack: Any
) -> None:
    found = stack.compare(models, f"{family}-{connectivity}")
    print(found["case"], found["worst"])
    assert found["worst"] < BOUND
    assert found["original"] > 0.1
    if found["case"] in orders.OF_CASE:
        assert found["events"] == orders.events(orders.OF_CASE[found["case"]], ranks=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_regular_checkpoint_stays_regular(family: str, models: Path, stack: Any) -> None:
    assert stack.compare(models, f"{family}-original")["worst"] < BOUND


@pytest.mark.parametrize("experts, port", [(1, 29541), (2, 29542)])
def test_two_ranks_compute_the_same_and_sum_in_the_same_order(experts: int, port: int, models: Path) -> None:
    cases = ["qwen3_moe-all", "qwen3_moe-gap", "deepseek_v2-all", "deepseek_v3-gap", "glm4_moe-mlp_full"]
    script = str(Path(__file__).with_name("sglang_stack.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(experts), str(port), str(models), *cases],
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    first, second = (
        [json.loads(line.partition(" ")[2]) for line in output.splitlines() if line.startswith("RESULT")]
        for output in outputs
    )
    assert [found["case"] for found in first] == cases
    for ours, theirs in zip(first, second, strict=True):
        assert max(ours["worst"], theirs["worst"]) < BOUND
        assert ours["original"] > 0.1
        assert ours["events"] == theirs["events"]
        if ours["case"] in orders.OF_CASE:
            assert ours["events"] == orders.events(orders.OF_CASE[ours["case"]], ranks=2)


ENGINE = """
import json, os, sys
import numpy as np

if __name__ == "__main__":
    import sglang

    folder, options = sys.argv[1], json.loads(sys.argv[2])
    engine = sglang.Engine(
        model_path=folder, device="cpu", dtype="float32", attention_backend="torch_native",
        sampling_backend="pytorch", grammar_backend="none", disable_radix_cache=True,
        disable_overlap_schedule=True, mem_fraction_static=0.1, max_total_tokens=4096, context_length=512,
        skip_server_warmup=True, **options,
    )
    reference = np.load(folder + "/reference.npz")
    outputs = engine.generate(
        input_ids=[reference[f"prompt{k}"].tolist() for k in range(4)],
        sampling_params={"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
        return_logprob=True, logprob_start_len=0, top_logprobs_num=5,
    )
    found = []
    for output in outputs:
        rows = output["meta_info"]["input_top_logprobs"] + output["meta_info"]["output_top_logprobs"]
        found.append({"ids": output["output_ids"], "rows": [[entry[:2] for entry in row or []] for row in rows]})
    print("RESULT", json.dumps(found), flush=True)
    engine.shutdown()
"""


def run_engine(folder: Path, tmp_path: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Return what a server's engine said of a checkpoint, in processes of its own."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    changed = options.pop("environment", {})
    return subprocess.run(
        [sys.executable, str(script), str(folder), json.dumps(options)],
        env={**ENVIRONMENT, **changed},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    "case, options",
    [
        ("qwen3_moe-all", {}),
        ("qwen3_moe-gap", {"tp_size": 2, "ep_size": 2}),
        ("glm4_moe-all", {"tp_size": 2}),
    ],
)
def test_the_engine_generates_what_load_model_generates(
    case: str, options: dict[str, Any], models: Path, tmp_path: Path
) -> None:
    import numpy as np

    run = run_engine(models / case, tmp_path, **options)
    line = next((line for line in run.stdout.splitlines() if line.startswith("RESULT")), None)
    assert line is not None, run.stderr[-2000:]
    reference = np.load(models / case / "reference.npz")
    worst = 0.0
    for k, found in enumerate(json.loads(line.partition(" ")[2])):
        assert found["ids"] == reference[f"ids{k}"].tolist()
        for position, row in enumerate(found["rows"]):
            for logprob, token in row:
                worst = max(worst, abs(logprob - float(reference[f"logprobs{k}"][position - 1, token])))
    assert worst < BOUND
    assert "FarSkip: rewired" in run.stderr + run.stdout


def test_another_version_is_refused_by_its_name() -> None:
    check_version(VERSION)
    check_version(f"{VERSION}+cpu")
    with pytest.raises(
        EngineError, match=r"SGLang 0\.5\.24 is refused: .* install sglang==0\.5\.23"
    ) as refused:
        check_version("0.5.24")
    assert "\n" not in str(refused.value)
