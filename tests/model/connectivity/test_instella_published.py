"""Checkpoints as AMD publishes Instella-MoE: their keys, their 5,344 names, invented
weights of toy sizes.
"""

import io
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fcsd.base.errors import UserError
from fcsd.cli.main import main
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity import (
    Connectivity,
    convert_checkpoint,
    farskip_layers,
    load_model,
    unconvert_checkpoint,
)
from fcsd.model.connectivity.export import export_checkpoint
from fcsd.pipeline.pretrain import new_model
from fcsd.pipeline.tiny import rehearse
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.pipeline.tiny.tasks import write_tiny_data
from tests.float64 import BOUND, error
from tests.model.connectivity.test_export import run_without_fcsd
from tests.reference.instella import (
    CONFIGS,
    WRONG,
    logits_of,
    published_config,
    published_shapes,
    published_tensors,
    write_published,
)
from tests.reference.tiny import tiny_config
from tests.support import command_words, make_bench, user_error

X = torch.randint(3, 99, (2, 11), generator=torch.Generator().manual_seed(5))
LAYERS = 5

float64 = pytest.mark.usefixtures("float64")


@torch.no_grad()
def logits(folder, **options):
    return load_model(folder, dtype="float64", **options)(X, use_cache=False).logits


def test_the_names_and_sizes_are_those_of_the_published_index():
    shapes = published_shapes(
        json.loads((CONFIGS / "Instella-MoE-16B-A3B-Think.json").read_text())
    )
    numbers = [torch.Size(shape).numel() for shape in shapes.values()]
    biases = sum(
        count
        for name, count in zip(shapes, numbers, strict=True)
        if name.endswith("bias")
    )
    assert len(shapes) == 5344
    # bfloat16, biases float32: total_size of the index
    assert sum(numbers) * 2 + biases * 2 == 31_725_581_824


KEYS = {  # keys -> layers that are FarSkip
    "as published": ({}, range(LAYERS)),
    "an MTP layer that the files do not hold": ({"num_nextn_predict_layers": 1}, range(LAYERS)),
    "the range written out": ({"farskip_start_idx": 0, "farskip_end_idx": 1e4}, range(LAYERS)),
    "an end": ({"farskip_end_idx": 2}, range(3)),
    "a regular model": ({"farskip": False}, range(0)),
    "none of the keys": ({"farskip": None, "auto_map": None}, range(0)),
}  # fmt: skip


@float64
@pytest.mark.parametrize("case", KEYS)
def test_a_published_checkpoint_computes_amds_equations_and_uses_every_tensor(
    case, tmp_path
):
    keys, layers = KEYS[case]
    folder = write_published(tmp_path, **keys)
    expected = logits_of(folder, X, layers)
    model = load_model(folder, dtype="float64")
    assert farskip_layers(model) == list(layers)
    assert (
        type(model).__name__ == ("FarSkip" if layers else "") + "InstellaMoEForCausalLM"
    )
    with torch.no_grad():
        computed = model(X, use_cache=False).logits
    assert error(computed, expected) < BOUND
    if layers:
        assert error(logits(folder, original=True), logits_of(folder, X, False)) < BOUND
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(
        torch.equal(again[name].double(), tensors[name].double()) for name in tensors
    )
    assert error(logits(tmp_path / "again"), expected) < BOUND


@float64
@pytest.mark.parametrize("wrong", WRONG)
def test_a_misreading_of_a_published_checkpoint_differs(wrong, tmp_path):
    folder = write_published(tmp_path)
    assert error(logits_of(folder, X, wrong=wrong), logits_of(folder, X)) > 0.02


GATE = "model.layers.3.self_attn.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(GATE), f"1 tensors are missing, the first is '{GATE}'"),
        (lambda tensors: tensors.update({GATE: tensors[GATE][:4].clone()}), f"tensor '{GATE}' has shape [4, 32], but"),
        (
            lambda tensors: tensors.update({GATE.replace("3", "5"): tensors[GATE].clone()}),
            "1 tensors belong to no parameter, the first is 'model.layers.5.self_attn.gate_proj.weight'",
        ),
    ],
)  # fmt: skip
def test_a_missing_a_misshapen_and_an_extra_gate_are_refused_before_weights_are_read(
    change, message, tmp_path
):
    tensors = published_tensors(published_config())
    change(tensors)
    with pytest.raises(UserError) as caught:
        load_model(write_published(tmp_path, tensors))
    assert message in str(caught.value)


def test_gates_in_the_files_of_a_config_without_the_key_are_refused(tmp_path):
    tensors = published_tensors(published_config())
    for keys in (
        {"gated_attention": False},
        {"gated_attention": None},
        {"gated_attention": None, "farskip": None},
    ):
        with user_error(
            r"5 tensors belong to no parameter, the first is"
            r" 'model\.layers\.0\.self_attn"
        ):
            load_model(write_published(tmp_path, tensors, **keys))


@float64
def test_a_conversion_writes_our_format_which_can_be_undone_without_losing_the_gate(
    tmp_path,
):
    folder = write_published(tmp_path / "amd", num_nextn_predict_layers=1)
    regular = logits_of(folder, X, False)
    assert convert_checkpoint(folder, tmp_path / "ours") == list(range(LAYERS))
    ours = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (ours["model_type"], ours["num_nextn_predict_layers"]) == (
        "farskip_instella_moe",
        0,
    )
    assert error(logits(tmp_path / "ours"), logits_of(folder, X)) < BOUND
    convert_checkpoint(folder, tmp_path / "two", Connectivity([1, 2]))
    assert farskip_layers(load_model(tmp_path / "two")) == [1, 2]

    for source in ("amd", "ours"):
        unconvert_checkpoint(tmp_path / source, tmp_path / f"{source}-regular")
        config = json.loads(
            (tmp_path / f"{source}-regular" / "config.json").read_text()
        )
        assert (config["model_type"], config["gated_attention"]) == (
            "instella_moe",
            True,
        )
        assert (
            config["auto_map"]["AutoModelForCausalLM"]
            == "modeling_farskip.InstellaMoEForCausalLM"
        )
        assert error(logits(tmp_path / f"{source}-regular"), regular) < BOUND
        with safe_open(
            tmp_path / f"{source}-regular" / "model.safetensors", "pt"
        ) as tensors:
            assert (
                sum("self_attn.gate_proj" in name for name in tensors.keys()) == LAYERS  # noqa: SIM118
            )
    assert convert_checkpoint(tmp_path / "ours-regular", tmp_path / "back") == list(
        range(LAYERS)
    )
    assert error(logits(tmp_path / "back"), logits_of(folder, X)) < BOUND


@float64
def test_an_export_is_what_amd_publishes(tmp_path):
    """An export from fcsd's format has the values, names and bytes of the checkpoint
    that it came from.
    """
    folder = write_published(tmp_path / "amd", farskip_end_idx=2)
    convert_checkpoint(folder, tmp_path / "ours")
    model = load_model(tmp_path / "ours")
    # its config in the fields of transformers 5
    model.save_pretrained(tmp_path / "saved")
    before = json.loads((folder / "config.json").read_text())
    for source in ("amd", "ours", "saved"):
        export_checkpoint(tmp_path / source, tmp_path / f"{source}-amd")
        after = json.loads((tmp_path / f"{source}-amd" / "config.json").read_text())
        assert after["auto_map"]["AutoConfig"].endswith(
            "--configuration_instella_moe.InstellaMoEConfig"
        )
        for key in before.keys() - {"auto_map"}:
            assert after[key] == before[key], (source, key)
        assert (
            error(logits(tmp_path / f"{source}-amd"), logits_of(folder, X, range(3)))
            < BOUND
        )
        with safe_open(
            tmp_path / f"{source}-amd" / "model.safetensors", "pt"
        ) as tensors:
            assert published_shapes(after).keys() == set(tensors.keys())


WITHOUT = """
x, expected = torch.load(sys.argv[2])
for name, logits in expected.items():
    folder = sys.argv[3] + "/" + name
    try:
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    except ValueError as refusal:
        assert "trust_remote_code" in str(refusal), refusal
    else:
        raise SystemExit(f"{name}: loaded as another model")
    with in_float64(), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float64)
        found = error(model.eval()(x, use_cache=False).logits, logits)
    assert found < BOUND, (name, found)
assert "fcsd" not in sys.modules
print("DONE")
"""


@pytest.mark.breadth
def test_both_wirings_load_without_fcsd_and_stock_transformers_refuses_both(tmp_path):
    folder = write_published(tmp_path / "amd")
    convert_checkpoint(folder, tmp_path / "ours")
    unconvert_checkpoint(folder, tmp_path / "regular")
    expected = {"ours": logits_of(folder, X), "regular": logits_of(folder, X, False)}
    torch.save((X, expected), tmp_path / "expected.pt")
    done = run_without_fcsd(WITHOUT, tmp_path, tmp_path / "expected.pt", tmp_path)
    assert done.returncode == 0 and "DONE" in done.stdout, done.stderr[-3000:]


def test_a_recipe_can_train_the_family_from_scratch_and_rehearses_it_for_a_published_model(
    tmp_path,
):
    fields = tiny_config("instella_moe").to_diff_dict()
    model = new_model(
        {name: value for name, value in fields.items() if name != "dtype"},
        Connectivity("all"),
    )
    assert type(model).__name__ == "FarSkipInstellaMoEForCausalLM"
    assert model.config.gated_attention
    for keys in ({}, {"farskip": None}):
        folder = write_published(tmp_path / "amd", **keys)
        assert (
            type(rehearse._config(ModelConfig(path=str(folder)))).__name__
            == "InstellaMoEConfig"
        )


@pytest.fixture
def published_bench(tmp_path):
    """Return a bench whose base is a checkpoint as AMD publishes it, beside another one
    with other weights.
    """
    ids = {
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": 300, "moe_intermediate_size": 16,
    }  # fmt: skip
    for name, seed in (("amd", 7), ("teacher", 8)):
        config = published_config(**ids)
        write_published(tmp_path / name, published_tensors(config, seed), **ids)
        tiny_tokenizer(300).save_pretrained(tmp_path / name)
    return make_bench(tmp_path / "amd", tmp_path)


@pytest.mark.breadth
def test_a_published_checkpoint_is_tuned_and_talked_to(
    published_bench, tmp_path, capsys, monkeypatch
):
    bench = published_bench
    sft = bench.recipe("sft", objective={"name": "sft"})
    kl = bench.recipe("kl", teacher={"path": str(tmp_path / "teacher")})
    alone = bench.recipe("alone")
    for recipe in (sft, kl):
        assert main(["estimate", str(recipe)]) == 0
        assert main(["distill", str(recipe)]) == 0
        model = bench.folder / recipe.stem / "distill" / "model"
        config = json.loads((model / "config.json").read_text())
        assert (config["model_type"], config["farskip"]["layers"]) == (
            "farskip_instella_moe",
            list(range(LAYERS)),
        )
        before, after = (
            load_model(bench.base, dtype="float32"),
            load_model(model, dtype="float32"),
        )
        for one, other in zip(before.model.layers, after.model.layers, strict=True):
            assert not torch.equal(
                one.self_attn.gate_proj.weight, other.self_attn.gate_proj.weight
            )
    assert main(["distill", str(alone)]) == 2
    assert (
        "as its own teacher it would teach nothing; set teacher.path"
        in capsys.readouterr().err
    )
    words = ["--text", str(bench.rows), "--max-length", "64"]
    monkeypatch.setattr("sys.stdin", io.StringIO("1 + 1\n"))
    assert main(["chat", str(bench.base), "--max-new-tokens", "2", "--greedy"]) == 0
    # Whatever needs an original with regular connectivity uses the regular model with
    # the same weights.
    for command in (
        ["layers", str(bench.base), "--output", str(tmp_path / "layers")],
        ["calibrate", str(bench.base), "x"],
    ):
        assert main([*command, *words]) == 2
    assert capsys.readouterr().err.count("is already converted; the study needs") == 1
    assert main(["unconvert", str(bench.base), str(tmp_path / "regular")]) == 0
    command = command_words(
        "calibrate", tmp_path / "regular", tmp_path / "calibrated", "--tokens 2000"
    )
    assert main([*command, *words]) == 0
    assert (
        type(load_model(tmp_path / "calibrated")).__name__
        == "FarSkipInstellaMoEForCausalLM"
    )


@pytest.mark.breadth
def test_a_published_checkpoint_is_evaluated_as_what_it_is_converted_to(
    published_bench, tmp_path
):
    write_tiny_data(
        tmp_path / "tiny", num_train=8, num_distill=8, num_heldout=2, num_test=3
    )
    options = command_words(
        "--suite tiny --data-root", tmp_path / "tiny" / "data", "--batch-size 3"
    )
    assert (
        main(["convert", str(published_bench.base), str(tmp_path / "converted")]) == 0
    )
    samples = []
    for model in (published_bench.base, tmp_path / "converted"):
        output = tmp_path / f"scores-{model.name}"
        assert main(["evaluate", str(model), *options, "--output", str(output)]) == 0
        samples.append(
            {path.name: path.read_text() for path in output.glob("samples_*.jsonl")}
        )
    assert len(samples[0]) == 3 and samples[0] == samples[1]
