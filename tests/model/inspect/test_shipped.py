"""The configs that ship with fcsd: where they are taken, and that they are those of the
models that they name.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from fcsd.cli.main import main
from fcsd.model.inspect import inspect_model, report_table
from fcsd.model.inspect.checkpoint import find_source
from fcsd.model.inspect.shipped import CONFIGS, shipped_ids, shipped_models
from tests.real_configs import real_folder
from tests.support import few, user_error

MODELS = shipped_models()
QWEN = "Qwen/Qwen3-30B-A3B"
ASKED_FOR = {
    "deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3.2",
    "deepseek-ai/DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Pro", "openai/gpt-oss-20b", "openai/gpt-oss-120b",
    "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3.5-397B-A17B",
    "Qwen/Qwen3.6-35B-A3B", "zai-org/GLM-4.5", "zai-org/GLM-4.5-Air", "zai-org/GLM-4.6", "zai-org/GLM-5",
    "moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2-Thinking", "deepseek-ai/DeepSeek-V3.1", "MiniMaxAI/MiniMax-M2",
    "MiniMaxAI/MiniMax-M2.1", "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "mistralai/Mixtral-8x7B-v0.1", "allenai/OLMoE-1B-7B-0924",
}  # fmt: skip


def test_every_config_has_its_sources_and_every_repository_one_config():
    assert {path.stem for path in CONFIGS.glob("*.json")} == set(MODELS)
    ids = [name for model in MODELS.values() for name in model["ids"]]
    assert len(ids) == len(set(ids)) and set(ids) >= ASKED_FOR
    for model in MODELS.values():
        assert model["source"] and model["published"]["source"]
        assert set(model) <= {"ids", "source", "unconfirmed", "published"}


@pytest.mark.parametrize("name", few(MODELS, 14))
def test_a_model_has_its_published_total_and_active_parameters(
    name: str, tmp_path: Path
) -> None:
    parameters = inspect_model(real_folder(name, tmp_path))["parameters"]
    published = MODELS[name]["published"]
    for key in ("total", "active"):
        without = published.get(f"{key}_without", [])
        number = parameters[key] - sum(
            parameters["parts"][part][key] for part in without
        )
        text = str(published[key])
        digits = 10 ** len(text.partition(".")[2])
        # Most publishers round; Qwen and DeepSeek-V2 cut off (3.353 is 3.3).
        as_written = (
            round(number * digits / 1e9) / digits,
            number * digits // 10**9 / digits,
        )
        if "about" in published and key == "total":
            assert number / 1e9 == pytest.approx(float(text), rel=0.03), key
            assert float(text) not in as_written, "needs no explanation"
        else:
            assert float(text) in as_written, key
    for key in ("total", "active"):
        assert parameters[key] == sum(row[key] for row in parameters["parts"].values())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Return a Hub, and its cache, that has what `files` names, or does not answer."""
    state = SimpleNamespace(files={}, cache={}, answers=True, asked=[])

    def metadata(url: str) -> None:
        if not state.answers:
            raise OSError("no network")

    def download(
        name: str,
        file: str,
        revision: str | None = None,
        local_files_only: bool = False,
    ) -> str:
        state.asked.append((name, local_files_only))
        found = state.cache if local_files_only or not state.answers else state.files
        if name not in found:
            raise OSError("no network")
        path = tmp_path / "config.json"
        path.write_text(json.dumps(found[name]))
        return str(path)

    def model_info(*args: object, **options: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    return state


def test_hub_and_cache_win_over_the_shipped_config(hub: SimpleNamespace) -> None:
    config = json.loads((CONFIGS / "Qwen3-30B-A3B.json").read_text())
    hub.files = {QWEN: config | {"num_hidden_layers": 7}}
    hub.cache = {QWEN: config | {"num_hidden_layers": 5}}
    source = find_source(QWEN)
    assert (source.config["num_hidden_layers"], source.shipped) == (7, False)
    hub.answers = False
    source = find_source(QWEN)
    assert (source.config["num_hidden_layers"], source.shipped) == (5, False)
    hub.cache = {}
    source = find_source(QWEN)
    assert (source.config, source.shipped) == (config, True)
    # The long wait of the Hub's own retries is for others.
    assert hub.asked == [(QWEN, False), (QWEN, True), (QWEN, True)]


def test_a_revision_is_the_hubs(hub: SimpleNamespace) -> None:
    hub.answers = False
    with user_error("the Hub did not give config.json of a repository of this name"):
        find_source(QWEN, "main")


def test_a_folder_wins_over_the_shipped_config(
    hub: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    folder = real_folder("OLMoE-1B-7B-0924", tmp_path / QWEN)
    assert find_source(QWEN).config["model_type"] == "olmoe"
    shutil.rmtree(folder)
    hub.answers = False
    assert find_source(QWEN).config["model_type"] == "qwen3_moe"


def test_inspect_and_plan_say_that_the_config_is_the_shipped_one(
    hub: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.answers = False
    facts = inspect_model(QWEN)
    assert facts["shipped_config"]
    assert "config        config.json as shipped with fcsd; the Hub" in report_table(
        facts
    )
    assert main(["plan", QWEN, "--nodes", "2"]) == 0
    printed = capsys.readouterr().out
    assert f"model      {QWEN}: config.json as shipped with fcsd, qwen3_moe" in printed


def test_the_error_for_another_model_lists_those_that_are_shipped(
    hub: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.answers = False
    assert main(["plan", "Qwen/Qwen3-31B-A3B"]) == 2
    error = capsys.readouterr().err
    guess = "did you mean 'Qwen/Qwen3-30B-A3B'?"
    assert f"error: Qwen/Qwen3-31B-A3B: {guess} There is no such folder, and" in error
    assert (
        f"without the Hub, fcsd knows the configs of {', '.join(shipped_ids())}\n"
        in error
    )
    assert len(shipped_ids()) == len(MODELS)
    assert main(["plan", "Qwen/Qwen3-30B-a3b"]) == 2
    assert f"error: Qwen/Qwen3-30B-a3b: {guess} There is" in capsys.readouterr().err
    assert main(["plan", "nobody/x"]) == 2
    assert "error: nobody/x: no such folder" in capsys.readouterr().err
