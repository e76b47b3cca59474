"""FarSkip checkpoints: folder to folder, saved by a trainer, and loaded where fcsd does
not exist.
"""

import errno
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fcsd.base.artifact import command_record, model_outputs
from fcsd.base.files import write_sealed
from fcsd.model.connectivity import (
    Connectivity,
    convert_checkpoint,
    convert_model,
    export,
    farskip_layers,
    load_model,
    unconvert_checkpoint,
)
from fcsd.model.connectivity.checkpoint import read_checkpoint
from fcsd.model.connectivity.modeling import modeling_source
from fcsd.model.families import FAMILIES
from fcsd.model.load import load_tokenizer
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training.calibration.shards import Layerwise
from tests.float64 import logits_in_float64
from tests.reference.images import inputs_of
from tests.reference.tiny import X, logits, tiny_model
from tests.support import (
    ROOT,
    TEXT_FAMILIES,
    WRAPPERS,
    assert_same_model,
    change_json,
    edited_json,
    few,
    few_and_others,
    user_error,
)

# A process with transformers but without fcsd: its import fails, whatever is on the
# path.
WITHOUT_FCSD = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "fcsd":
            raise ImportError("fcsd is blocked")

sys.meta_path.insert(0, Block())
sys.path[:] = [p for p in sys.path if p not in ("", sys.argv[1])]
try:
    import fcsd
except ImportError:
    pass
else:
    raise SystemExit("fcsd could be imported")
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
""" + (ROOT / "tests" / "float64.py").read_text(encoding="utf-8")


def tensor_shapes(folder):
    shapes = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                shapes[name] = tensors.get_slice(name).get_shape()
    return shapes


def auto_classes(family):
    """Return the names of the auto classes that load a family with its head."""
    if FAMILIES[family].multimodal:
        return ["AutoModelForImageTextToText", "AutoModelForMultimodalLM"]
    return ["AutoModelForCausalLM", FAMILIES[family].auto_model]


def run_without_fcsd(code, tmp_path, *arguments, path=""):
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(path),
    }
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_FCSD + code, os.getcwd(), *map(str, arguments)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def assert_same_export(folder, other):
    """Compare the class, the connectivity and the code of two checkpoints, which needs
    no fcsd; return the config.
    """
    configs = [json.loads((f / "config.json").read_text()) for f in (folder, other)]
    for key in ("model_type", "architectures", "farskip", "auto_map"):
        assert configs[0][key] == configs[1][key], (folder, key)
    sources = [(f / "modeling_farskip.py").read_text() for f in (folder, other)]
    assert sources[0] == sources[1]
    assert not re.search(r"^\s*(from|import) fcsd", sources[0], re.MULTILINE)
    return configs[0]


@pytest.mark.parametrize(
    "families",
    [
        *few_and_others(
            TEXT_FAMILIES, kinds={"deepseek_v3", "gpt_oss", "llama4_text", "qwen3_moe"}
        ),
        *few_and_others(WRAPPERS),
    ],
)
def test_an_export_loads_without_fcsd_for_every_family_and_never_silently(
    families, tmp_path
):
    base, far = tmp_path / "base", tmp_path / "far"
    expected = {}
    for family in families:
        model, inputs = tiny_model(family), inputs_of(family)
        model.save_pretrained(base / family)
        convert_checkpoint(base / family, far / family, Connectivity("last:75%"))
        convert_model(model, Connectivity("last:75%"))
        whole = logits_in_float64(model, inputs)
        expected[family] = auto_classes(family), inputs, whole
    torch.save(expected, tmp_path / "expected.pt")
    code = """
import transformers
expected = torch.load(sys.argv[2])
for family, (names, inputs, logits) in expected.items():
    folder = sys.argv[3] + "/" + family
    autos = [getattr(transformers, name) for name in names]
    for auto in (AutoConfig, AutoModel, *autos):
        try:
            auto.from_pretrained(folder, trust_remote_code=False)
        except ValueError as refusal:
            assert "trust_remote_code" in str(refusal), refusal
        else:
            raise SystemExit(f"{family}: {auto.__name__} loaded without trust_remote_code")
    model = autos[0].from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__name__.startswith("FarSkip"), type(model)
    model.save_pretrained(folder + "_again")
    again = autos[-1].from_pretrained(folder + "_again", trust_remote_code=True).eval()
    for one in (model, again):
        found = error(logits_in_float64(one, inputs), logits)
        assert found < BOUND, (family, found)
    headless = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(headless).__name__.startswith("FarSkip"), type(headless)
    if AutoModelForCausalLM in autos:
        inner = getattr(model, "model", None) or model.transformer
        whole = call_in_float64(inner, inputs).last_hidden_state
    else:
        out = call_in_float64(model, inputs | {"output_hidden_states": True})
        whole = out.hidden_states[-1]
    # transformers 5.23 renames the final norm of a headless DeepSeek-V4, and so loses it.
    if type(headless) is not type(model) and family != "deepseek_v4":
        last = call_in_float64(headless, inputs).last_hidden_state
        assert error(last, whole) < BOUND, family
assert "fcsd" not in sys.modules
print("DONE", len(expected))
"""
    done = run_without_fcsd(code, tmp_path, tmp_path / "expected.pt", far)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"DONE {len(families)}" in done.stdout
    for family in families:
        again = far / f"{family}_again"
        assert_same_export(far / family, again)
        assert tensor_shapes(base / family) == tensor_shapes(again)


@pytest.mark.parametrize("family", few(sorted(FAMILIES)))
def test_saving_a_converted_model_writes_a_complete_farskip_checkpoint(
    family, tmp_path
):
    model, inputs = tiny_model(family), inputs_of(family)
    model.save_pretrained(tmp_path / "base")
    # Where a layer is one branch, experts alone would change nothing.
    blocks = FAMILIES[family].layout == "blocks"
    connectivity = Connectivity([1, 2] if blocks else "moe")
    convert_model(model, connectivity)
    model.save_pretrained(tmp_path / "far")
    convert_checkpoint(tmp_path / "base", tmp_path / "converted", connectivity)
    saved = assert_same_export(tmp_path / "far", tmp_path / "converted")
    assert saved["model_type"] == f"farskip_{family}"
    assert saved["architectures"] == [f"FarSkip{FAMILIES[family].causal_lm}"]
    assert saved["farskip"]["layers"] == farskip_layers(model)
    autos = {"AutoConfig", "AutoModel", *auto_classes(family)}
    assert set(saved["auto_map"]) == autos
    if FAMILIES[family].multimodal:
        text = saved["text_config"]
        assert "farskip" not in text
        assert text["model_type"] == model.config.text_config.model_type
    assert tensor_shapes(tmp_path / "far") == tensor_shapes(tmp_path / "base")
    for name in ("far", "converted"):
        assert_same_model(load_model(tmp_path / name), model, inputs)


def test_a_trained_conversion_saved_by_the_trainer_loads_and_leaves_the_source_intact(
    tmp_path,
):
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainingArguments

    class Rows(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"input_ids": X[index % 2], "labels": X[index % 2]}

    tiny_model("qwen3_moe").save_pretrained(tmp_path / "base")
    before = (tmp_path / "base" / "model.safetensors").read_bytes()
    convert_checkpoint(tmp_path / "base", tmp_path / "far", Connectivity("all"))
    model = load_model(tmp_path / "far")
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=2,
        per_device_train_batch_size=2,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    trainer.save_model(str(tmp_path / "far"))  # over the linked weights
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == before
    trained = logits(model.eval())
    for folder in (tmp_path / "far", tmp_path / "run" / "checkpoint-2"):
        stored = load_model(folder)
        assert farskip_layers(stored) == [0, 1, 2, 3]
        assert torch.equal(logits(stored), trained)
    assert (
        trained
        - logits(load_model(tmp_path / "base", connectivity=Connectivity("all")))
    ).abs().max() > 0


def test_a_conversion_carries_tokenizer_and_generation_config_but_no_code_or_pickles(
    tmp_path,
):
    base = tmp_path / "base"
    tiny_model("deepseek_v2").save_pretrained(base, max_shard_size="30KB")
    tiny_tokenizer(99).save_pretrained(base)
    change_json(base / "config.json", {"auto_map": {"AutoConfig": "old.Old"}})
    with edited_json(base / "tokenizer_config.json") as tokenizer_config:
        tokenizer_config.pop("tokenizer_class")
    for name in ("old.py", "pytorch_model.bin", "optimizer.pt", "README.md"):
        (base / name).write_text("x")
    (base / "LICENSE").write_text("Apache-2.0")
    assert convert_checkpoint(base, tmp_path / "deep" / "far", Connectivity("moe")) == [
        1,
        2,
        3,
    ]
    far = tmp_path / "deep" / "far"
    names = {file.name for file in far.iterdir()}
    assert not names & {"old.py", "pytorch_model.bin", "optimizer.pt", "README.md"}
    carried = {
        "tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE",
    }  # fmt: skip
    assert carried | {"modeling_farskip.py", "model.safetensors.index.json"} <= names
    assert json.loads((far / "config.json").read_text())["auto_map"][
        "AutoConfig"
    ].startswith("modeling_farskip.")
    from transformers import AutoTokenizer

    from fcsd.model.connectivity import register

    register("deepseek_v2")
    tokenizer = AutoTokenizer.from_pretrained(far)
    messages = [{"role": "user", "content": "add 1"}]
    same = tiny_tokenizer(99)
    assert tokenizer.apply_chat_template(
        messages, tokenize=False
    ) == same.apply_chat_template(messages, tokenize=False)
    assert tokenizer("add 1")["input_ids"] == same("add 1")["input_ids"]


DECLARED = (
    "LlamaTokenizerFast", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "GPT2TokenizerFast", None,
)  # fmt: skip


@pytest.mark.parametrize(
    "family", ["mixtral", "qwen3_moe", "deepseek_v3", "phimoe", "dbrx"]
)
def test_the_tokenizers_files_stay_and_it_is_the_one_that_transformers_makes_of_the_base(
    family, tmp_path
):
    base = tmp_path / "base"
    tiny_model(family).save_pretrained(base)
    tiny_tokenizer(99).save_pretrained(base)
    values = json.loads((base / "tokenizer_config.json").read_text())
    for number, declared in enumerate(DECLARED):
        named = {"tokenizer_class": declared} if declared else {}
        values = {
            key: value for key, value in values.items() if key != "tokenizer_class"
        } | named
        (base / "tokenizer_config.json").write_text(json.dumps(values))
        far, back = tmp_path / f"far{number}", tmp_path / f"back{number}"
        convert_checkpoint(base, far, Connectivity("all"))
        unconvert_checkpoint(far, back)
        for folder in (far, back):
            for name in ("tokenizer.json", "tokenizer_config.json"):
                assert (folder / name).read_bytes() == (base / name).read_bytes()
        first, second = load_tokenizer(base), load_tokenizer(far)
        assert type(second) is type(first), declared
        assert second("add 1 <s>x")["input_ids"] == first("add 1 <s>x")["input_ids"]


def test_a_transformers_that_is_too_old_is_named_with_what_is_needed(monkeypatch):
    source = modeling_source(FAMILIES["qwen3_moe"])
    monkeypatch.setattr("transformers.__version__", "4.57.6")
    needed = (
        r"this checkpoint \(qwen3_moe\) needs transformers >=5\.5,<6;"
        r" 4\.57\.6 is installed: pip install -U 'transformers>=5\.5,<6'"
    )
    with pytest.raises(ImportError, match=needed):
        exec(
            compile(source, "modeling_farskip.py", "exec"),
            {"__name__": "modeling_farskip"},
        )


def test_unconverting_a_checkpoint_gives_the_base_checkpoint_back(tmp_path):
    model = tiny_model("mixtral")
    model.save_pretrained(tmp_path / "base")
    convert_checkpoint(tmp_path / "base", tmp_path / "far", Connectivity("all"))
    unconvert_checkpoint(tmp_path / "far", tmp_path / "back")
    base, back = (
        json.loads((tmp_path / name / "config.json").read_text())
        for name in ("base", "back")
    )
    assert base == back
    assert {file.name for file in (tmp_path / "base").iterdir()} == {
        file.name for file in (tmp_path / "back").iterdir()
    }
    assert torch.equal(logits(load_model(tmp_path / "back")), logits(model))
    with user_error("is not a FarSkip checkpoint"):
        unconvert_checkpoint(tmp_path / "back", tmp_path / "more")


def test_a_checkpoint_that_differs_from_its_record_is_not_undone(tmp_path):
    tiny_model("mixtral").save_pretrained(tmp_path / "base")
    far = tmp_path / "far"
    convert_checkpoint(tmp_path / "base", far, Connectivity("all"))
    record = command_record("calibrate", outputs=model_outputs(far))
    write_sealed(far / "manifest.json", record)
    change_json(far / "config.json", {"rms_norm_eps": 0.5})
    with user_error(r"is not what `fcsd calibrate` wrote .*0\.5"):
        unconvert_checkpoint(far, tmp_path / "back")


def test_a_converted_checkpoint_can_be_converted_otherwise_but_not_the_same_way_twice(
    tmp_path,
):
    model = tiny_model("olmoe")
    model.save_pretrained(tmp_path / "base")
    convert_checkpoint(tmp_path / "base", tmp_path / "all", Connectivity("all"))
    assert convert_checkpoint(
        tmp_path / "all", tmp_path / "last", Connectivity("last:1")
    ) == [3]
    convert_model(model, Connectivity("last:1"))
    assert torch.equal(logits(load_model(tmp_path / "last")), logits(model))
    with user_error("is already converted with this connectivity"):
        convert_checkpoint(tmp_path / "all", tmp_path / "again", Connectivity("moe"))
    assert not (tmp_path / "again").exists()


def test_a_destination_that_is_in_use_is_refused_and_an_empty_folder_is_not(tmp_path):
    tiny_model("mixtral").save_pretrained(tmp_path / "base")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    with user_error("used: exists and is not empty; choose another destination"):
        convert_checkpoint(tmp_path / "base", tmp_path / "used", Connectivity("all"))
    with user_error("is not empty"):
        convert_checkpoint(tmp_path / "base", tmp_path / "base", Connectivity("all"))
    with user_error("exists and is not a folder"):
        convert_checkpoint(
            tmp_path / "base", tmp_path / "used" / "notes.txt", Connectivity("all")
        )
    assert (tmp_path / "used" / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    convert_checkpoint(tmp_path / "base", tmp_path / "empty", Connectivity("all"))
    assert farskip_layers(load_model(tmp_path / "empty")) == [0, 1, 2, 3]


def test_the_same_conversion_again_was_finished_before_and_another_is_refused(
    tmp_path, capsys
):
    base, far = tmp_path / "base", tmp_path / "far"
    tiny_model("mixtral").save_pretrained(base)

    def convert(layers="all", **options):
        return convert_checkpoint(
            base, far, Connectivity(layers), alone=True, **options
        )

    layers = convert()
    config, times = (far / "config.json").read_bytes(), (far / "config.json").stat()
    capsys.readouterr()
    assert convert() == layers
    assert capsys.readouterr().err == f"convert: finished before, in {far}\n"
    assert (far / "config.json").stat() == times
    weights = far / "model.safetensors"
    copied = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(copied)  # as where the file system cannot link
    assert convert() == layers
    for change in (
        lambda: convert("last:1"),
        lambda: convert(config_only=True),
        lambda: ((far / "config.json").write_bytes(config[:-1] + b" \n"), convert()),
        lambda: (
            (far / "config.json").write_bytes(config),
            weights.write_bytes(copied[:-1] + bytes([copied[-1] ^ 1])),
            convert(),
        ),
        lambda: (weights.unlink(), convert()),
    ):
        with user_error("far: exists and is not empty"):
            change()
    assert {path.name for path in tmp_path.iterdir()} == {"base", "far"}


def test_of_two_conversions_into_one_new_folder_one_loses_with_a_message(
    tmp_path, monkeypatch
):
    tiny_model("mixtral").save_pretrained(tmp_path / "base")
    write, inner = export._write, []

    def second_meanwhile(*arguments):
        write(*arguments)
        if not inner:  # all is written and not renamed yet
            inner.append([])
            inner[0] = convert_checkpoint(
                tmp_path / "base", tmp_path / "far", Connectivity([3])
            )

    monkeypatch.setattr(export, "_write", second_meanwhile)
    with user_error("far: another process has created it in the meantime"):
        convert_checkpoint(tmp_path / "base", tmp_path / "far", Connectivity("all"))
    assert inner == [[3]] and farskip_layers(load_model(tmp_path / "far")) == [3]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["base", "far"]


def test_a_path_that_is_not_utf8_is_not_called_a_damaged_file(tmp_path):
    tiny_model("mixtral").save_pretrained(tmp_path / "base")
    latin = tmp_path / os.fsdecode(b"caf\xe9")
    (tmp_path / "base").rename(latin)
    with user_error(r"safetensors requires UTF-8 paths; rename"):
        convert_checkpoint(latin, tmp_path / "far", Connectivity("all"))
    latin.rename(tmp_path / "base")
    with user_error(r"safetensors requires UTF-8 paths"):
        convert_checkpoint(tmp_path / "base", latin, Connectivity("all"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["base"]


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    tiny_model("mixtral").save_pretrained(tmp_path / "base")

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.link", full)
    monkeypatch.setattr("shutil.copyfile", full)
    with user_error(r"far: could not be written \(No space left on device\)"):
        convert_checkpoint(tmp_path / "base", tmp_path / "far", Connectivity("all"))
    assert [file.name for file in tmp_path.iterdir()] == ["base"]


def test_a_quantised_checkpoint_is_converted_without_knowing_its_tensors(tmp_path):
    """In the form in which gpt-oss is published: MXFP4 blocks and scales under names
    that the unquantised model does not have.
    """
    base = tmp_path / "base"
    tiny_model("gpt_oss").save_pretrained(base)
    tensors = load_file(base / "model.safetensors")
    packed = {
        name: tensors.pop(name)
        for name in list(tensors)
        if name.endswith("experts.down_proj")
    }
    tensors |= {f"{name}_blocks": torch.zeros(4, dtype=torch.uint8) for name in packed}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    quantisation = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    change_json(base / "config.json", {"quantization_config": quantisation})
    assert convert_checkpoint(base, tmp_path / "far", Connectivity("all")) == [
        0, 1, 2, 3,
    ]  # fmt: skip
    assert (
        json.loads((tmp_path / "far" / "config.json").read_text())[
            "quantization_config"
        ]
        == quantisation
    )
    assert tensor_shapes(tmp_path / "far").keys() == tensor_shapes(base).keys()


@pytest.mark.skipif(
    "lara_mini" not in FAMILIES, reason="this transformers is older than the family"
)
def test_a_projection_that_is_published_fused_stays_so_there_and_back(tmp_path):
    """Lara Mini's in_proj, with rows of query, key, value, z, b and a, and its out_norm
    have other names in memory.
    """
    base, far, trained, back = (
        tmp_path / name for name in ("base", "far", "trained", "back")
    )
    model = tiny_model("lara_mini")
    model.save_pretrained(base)
    tensors = load_file(base / "model.safetensors")
    for k in (0, 2):
        own, published = (
            model.model.layers[k].linear_attn,
            f"model.layers.{k}.linear_attn",
        )
        parts = (own.in_proj_qkv, own.in_proj_z, own.in_proj_b, own.in_proj_a)
        rows = [row for part in parts for row in part.weight.tolist()]
        assert tensors[f"{published}.in_proj.weight"].tolist() == rows
        assert (
            tensors[f"{published}.out_norm.weight"].tolist() == own.norm.weight.tolist()
        )
    assert not any("in_proj_" in name or "linear_attn.norm" in name for name in tensors)
    convert_checkpoint(base, far, Connectivity("all"))
    loaded = load_model(far)
    assert all(
        torch.equal(value, model.state_dict()[name])
        for name, value in loaded.state_dict().items()
    )
    loaded.save_pretrained(trained)
    unconvert_checkpoint(trained, back)
    # of a calibration
    models = Layerwise(read_checkpoint(far), Connectivity("all"), torch.device("cpu"))
    with models.layer(2):
        layer = models.layer_tensors(2)
    assert layer.keys() == {
        name for name in tensors if name.startswith("model.layers.2.")
    }
    for copy in (
        load_file(far / "model.safetensors"),
        load_file(back / "model.safetensors"),
    ):
        assert copy.keys() == tensors.keys()
        assert all(torch.equal(copy[name], tensors[name]) for name in tensors)
    assert all(torch.equal(value, tensors[name]) for name, value in layer.items())


def test_weights_are_copied_where_they_cannot_be_linked(tmp_path, monkeypatch):
    def other_device(*args, **kwargs):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    tiny_model("mixtral").save_pretrained(tmp_path / "base")
    monkeypatch.setattr("os.link", other_device)
    convert_checkpoint(tmp_path / "base", tmp_path / "far", Connectivity("all"))
    files = [tmp_path / name / "model.safetensors" for name in ("base", "far")]
    assert files[0].stat().st_ino != files[1].stat().st_ino
    assert files[0].read_bytes() == files[1].read_bytes()


def truncate_a_shard(base):
    file = sorted(base.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-7])


def remove_a_shard(base):
    sorted(base.glob("*.safetensors"))[1].unlink()


def reshape_a_tensor(base):
    file = sorted(base.glob("*.safetensors"))[1]
    tensors = load_file(file)
    name = min(tensors)
    save_file(
        tensors | {name: tensors[name].flatten()[:-1].clone()},
        file,
        metadata={"format": "pt"},
    )


def empty_a_shard(base):
    save_file({}, sorted(base.glob("*.safetensors"))[1], metadata={"format": "pt"})


def config(**changes):
    def change(base):
        change_json(base / "config.json", changes)

    return change


def name_a_shard(name):
    """Give the first shard another name in the index, and return it."""

    def change(base):
        index = json.loads((base / "model.safetensors.index.json").read_text())
        first = min(index["weight_map"].values())
        renamed = {
            key: name if file == first else file
            for key, file in index["weight_map"].items()
        }
        (base / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": renamed})
        )

    return change


def tokenizer_config(text):
    return lambda base: (base / "tokenizer_config.json").write_text(text)


NAMES = "weight_map names .*; the name of a .safetensors file in this folder is needed"
OWN = {"AutoModelForCausalLM": "modeling_own.Own"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate_a_shard, r"-00002-of-\d+.safetensors: damaged or incomplete"),
        (remove_a_shard, r"-00002-of-\d+.safetensors: no such file, but model.safetensors.index.json names it"),
        (reshape_a_tensor, r"tensor '.*' has shape \[\d+\], but config.json says \[.*\]; weights and config"),
        (empty_a_shard, r"tensor '.*' is not in this file, but model.safetensors.index.json says so"),
        (config(architectures=["OlmoeForCausalLM"]), "architectures names OlmoeForCausalLM, but model_type is"),
        (config(model_type="olmoe"), "architectures names MixtralForCausalLM, but model_type is 'olmoe'"),
        (config(model_type="doge"), "'doge' cannot be converted: its experts are rows of an embedding"),
        (config(model_type="own", auto_map=OWN), "trust_remote_code=True .* loads it, but fcsd cannot"),
        (config(hidden_size=48), "but config.json says"),
        (config(farskip={"version": 1}), "contradicts the field farskip"),
        (config(num_hidden_layers=3), r"19 tensors belong to no parameter, the first is 'model\.layers\.3\."),
        (config(architectures=3), "architectures must be a list of class names, got 3"),
        (config(num_attention_heads=0), "num_attention_heads must be at least 1, got 0"),
        (name_a_shard("../outside.safetensors"), NAMES),
        (name_a_shard("/etc/passwd"), NAMES),
        (name_a_shard("x" * 300 + ".safetensors"), NAMES),
        (name_a_shard(3), NAMES),
        (name_a_shard(None), NAMES),
        (tokenizer_config('{"auto_map": "x.Y"}'), "base/tokenizer_config.json: auto_map: Auto class to module.Class"),
        (tokenizer_config('{"auto_map": {"AutoTokenizer": ["/etc/x.Y", 3]}}'), "auto_map: Auto class to module"),
        (tokenizer_config('{"a": '), "base/tokenizer_config.json: not valid JSON"),
    ],
)  # fmt: skip
def test_a_bad_source_is_refused_and_leaves_nothing_behind(damage, message, tmp_path):
    tiny_model("mixtral").save_pretrained(tmp_path / "base", max_shard_size="30KB")
    damage(tmp_path / "base")
    with user_error(message) as caught:
        convert_checkpoint(tmp_path / "base", tmp_path / "far", Connectivity([3]))
    assert str(tmp_path / "base") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["base"]


def test_names_that_are_too_long_for_a_folder_are_one_line(tmp_path):
    tiny_model("mixtral").save_pretrained(tmp_path / "base")
    long = tmp_path / ("x" * 300)
    # of which the temporary name beside it is too long
    for name in ("x" * 300, "é" * 120):
        with user_error(
            r"^the name .*… has (300|240) bytes, but at most 200 are possible"
        ):
            convert_checkpoint(tmp_path / "base", tmp_path / name, Connectivity("all"))
    for source in (long, str(long)):
        with user_error("xxx: cannot be a folder: File name too long"):
            convert_checkpoint(source, tmp_path / "far", Connectivity("all"))
