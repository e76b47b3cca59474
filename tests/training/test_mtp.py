"""MTP layers of a converted model: transformers runs them, fcsd trains them and writes
them back. References: float64 by hand, and transformers' own drafting.
"""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import modeling_layers

from fcsd.data.batches import NO_LOSS, in_batches
from fcsd.model.connectivity import Connectivity, convert_checkpoint, load_model
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training.mtp import MtpLayers
from tests.reference.tiny import tiny_model
from tests.support import run_command, skip_unavailable, user_error, write_rows

LIKE_DEEPSEEK = (
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v32",
    "glm_moe_dsa",
)
LIKE_QWEN = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe")
FAMILIES = [
    pytest.param(
        family,
        marks=[] if family in ("deepseek_v3", "qwen3_next") else pytest.mark.breadth,
    )
    for family in LIKE_DEEPSEEK + LIKE_QWEN
]
WEIGHTS = "model.safetensors"


def checkpoint_with_mtp(
    folder: Path, family: str, number: int = 1, **config: Any
) -> Path:
    """Write a tiny model with random MTP layers behind its decoder layers."""
    skip_unavailable(family)
    torch.manual_seed(1)
    model = tiny_model(family, **config)
    text: Any = model.config.get_text_config()
    if family in LIKE_QWEN:
        text.mtp_num_hidden_layers = number
    else:
        text.num_nextn_predict_layers = number
    model.save_pretrained(folder)
    tensors = load_file(folder / WEIGHTS) | random_mtp(model, number)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


def random_mtp(model: Any, number: int) -> dict[str, torch.Tensor]:
    """Return random values for MTP layers, each with a decoder layer like the model's
    last one, under the names of DeepSeek-V3's files, or Qwen3-Next's.
    """
    config = model.config.get_text_config()
    width, last = config.hidden_size, config.num_hidden_layers
    tensors = {}
    for k in range(number):
        block = model.get_decoder().layers[-1].state_dict()
        names = names_in_files(config.model_type, f"model.layers.{last + k}.")
        shapes = {
            names["enorm"]: (width,),
            names["hnorm"]: (width,),
            names["eh_proj"]: (width, 2 * width),
            **{names["block"] + name: value.shape for name, value in block.items()},
            names["norm"]: (width,),
        }
        for name, shape in shapes.items():
            value = torch.randn(shape) * 0.2 + (len(shape) == 1)
            # The files have the matrices of each expert.
            begin, _, part = name.rpartition(".experts.")
            if part == "gate_up_proj":
                for expert, (gate, up) in enumerate(each.chunk(2) for each in value):
                    tensors[f"{begin}.experts.{expert}.gate_proj.weight"] = gate.clone()
                    tensors[f"{begin}.experts.{expert}.up_proj.weight"] = up.clone()
            elif part == "down_proj":
                for expert, down in enumerate(value):
                    tensors[f"{begin}.experts.{expert}.down_proj.weight"] = down.clone()
            else:
                tensors[name] = value
    return tensors


def names_in_files(family: str, begin: str) -> dict[str, str]:
    """Return the names of an MTP layer's parts. begin: of a layer like DeepSeek-V3's."""
    if family in LIKE_QWEN:
        return {
            "enorm": "mtp.pre_fc_norm_embedding.weight",
            "hnorm": "mtp.pre_fc_norm_hidden.weight",
            "eh_proj": "mtp.fc.weight",
            "block": "mtp.layers.0.",
            "norm": "mtp.norm.weight",
        }
    return {
        "enorm": f"{begin}enorm.weight",
        "hnorm": f"{begin}hnorm.weight",
        "eh_proj": f"{begin}eh_proj.weight",
        "block": begin,
        "norm": f"{begin}shared_head.norm.weight",
    }


class ByHand:
    """An MTP layer from its tensors in the files: norms, projection, the decoder layer of
    the unpatched model, norm.
    """

    def __init__(self, model: Any, tensors: dict[str, torch.Tensor], k: int) -> None:
        config = model.config.get_text_config()
        family, last = config.model_type, config.num_hidden_layers
        self.model = model.get_decoder()
        names = names_in_files(family, f"model.layers.{last + k}.")
        self.block = copy.deepcopy(self.model.layers[-1])
        state = {}
        for name, value in self.block.state_dict().items():
            begin, _, part = (names["block"] + name).rpartition("experts.")
            matrices = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
            if part in matrices and begin:
                value = torch.stack([
                    torch.cat([
                        tensors[f"{begin}experts.{n}.{each}_proj.weight"] for each in matrices[part]
                    ])
                    for n in range(len(value))
                ])  # fmt: skip
            else:
                value = tensors[names["block"] + name]
            state[name] = value
        self.block.load_state_dict(state)
        self.norms = []
        for part in ("enorm", "hnorm", "norm"):
            norm = copy.deepcopy(self.model.norm)
            norm.weight.data = tensors[names[part]]
            self.norms.append(norm)
        self.project = tensors[names["eh_proj"]]

    def __call__(
        self, embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        of_token, of_state, last = self.norms
        both = torch.cat([of_token(embedded), of_state(states)], -1)
        x = both @ self.project.T
        length = x.shape[1]
        later = torch.ones(length, length).triu(1).bool()
        out = self.block(
            x,
            position_embeddings=self.model.rotary_emb(x, positions),
            position_ids=positions,
            attention_mask=torch.zeros(length, length).masked_fill(
                later, torch.finfo(torch.float32).min
            )[None, None],
        )
        return last(out[0] if isinstance(out, tuple) else out)  # type: ignore[no-any-return]


def mtp_layers(folder: Path) -> MtpLayers:
    model = load_model(folder, connectivity=Connectivity("all"))
    return MtpLayers(model.eval(), folder, [WEIGHTS])


def random_rows(vocab_size: int, number: int, length: int) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    rows = []
    for _ in range(number):
        ids = generator.integers(0, vocab_size, length)
        labels = np.where(np.arange(length) < 3, NO_LOSS, ids)
        rows.append(
            {"input_ids": ids, "position_ids": np.arange(length), "labels": labels}
        )
    return rows


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_acceptance_are_those_by_hand(
    family: str, number: int, tmp_path: Path
) -> None:
    if number > 1 and family in LIKE_QWEN:
        pytest.skip("has one MTP layer")
    # Of few tokens, drafts are right by chance.
    folder = checkpoint_with_mtp(tmp_path, family, number, vocab_size=8)
    layers = mtp_layers(folder)
    tensors = load_file(folder / WEIGHTS)
    regular = load_model(folder).eval()
    [batch] = in_batches(random_rows(8, 100, 12), 100)
    ids, positions = batch["input_ids"], batch["position_ids"]
    model = layers.model
    losses, equal, overlap = [], [], []
    with torch.no_grad():
        out = model(input_ids=ids, position_ids=positions, output_hidden_states=True)
        states = out.hidden_states[-1]
        for k in range(number):
            # Position t of layer k has the state of t and the token t+1+k.
            seen = slice(k + 1, None)
            embedded = model.get_input_embeddings()(ids[:, seen])
            states = ByHand(regular, tensors, k)(
                embedded, states[:, :-1], positions[:, seen]
            )
            q = model.lm_head(states).double().log_softmax(-1)[:, :-1]
            p = out.logits.double().log_softmax(-1)[:, k + 1 : -1]
            keep = batch["labels"][:, k + 2 :] != NO_LOSS
            losses.append((p.exp() * (p - q)).sum(-1)[keep].mean().item())
            equal.append((p.argmax(-1) == q.argmax(-1)) & keep)
            overlap.append(torch.minimum(p.exp(), q.exp()).sum(-1)[keep].mean().item())

    loss, count = layers.loss(batch)
    assert count == 100 * 9  # the first three of twelve tokens have no loss
    assert loss.item() == pytest.approx(sum(losses), rel=1e-4)
    found = layers.acceptance([batch])
    assert found.tokens == count
    assert found.sampled == pytest.approx(overlap, rel=1e-4)
    shares = [each.sum().item() / count for each in equal]
    assert found.greedy == pytest.approx(shares)
    # A second draft is accepted behind an accepted first one.
    accepted = equal[0].sum().item()
    if number == 2:
        second = (equal[0][:, :-1] & equal[1]).sum().item()
        assert 0 < second < min(accepted, equal[1].sum().item())
        accepted += second
    assert found.length == pytest.approx(1 + accepted / count)


def test_experts_may_be_one_tensor_in_the_files(tmp_path: Path) -> None:
    """As in Qwen3.5, whose decoder layers have them so."""
    folder = checkpoint_with_mtp(tmp_path, "qwen3_next")
    expected = mtp_layers(folder).mtp.layers.state_dict()
    tensors = load_file(folder / WEIGHTS)
    matrices: dict[str, list[torch.Tensor]] = {}
    for name in [name for name in tensors if "mtp.layers.0.mlp.experts." in name]:
        matrices[name.split(".")[-2]] = []
    begin = "mtp.layers.0.mlp.experts"
    for number in range(8):
        for part, found in matrices.items():
            if (name := f"{begin}.{number}.{part}.weight") in tensors:
                found.append(tensors.pop(name))
    gate, up, down = (
        torch.stack(matrices[f"{part}_proj"]) for part in ("gate", "up", "down")
    )
    tensors |= {
        f"{begin}.gate_up_proj": torch.cat([gate, up], 1),
        f"{begin}.down_proj": down,
    }
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    layers = mtp_layers(folder)
    state = layers.mtp.layers.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert not any("experts" in name for name in layers.stored)


def test_an_engine_accepts_as_many_drafts_as_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers drafts with the same layers: from the positions at which our greedy
    drafts agree follows how many passes it needs.
    """
    layers = mtp_layers(checkpoint_with_mtp(tmp_path, "deepseek_v3", vocab_size=16))
    model = layers.model
    prompt = torch.randint(
        0, model.config.vocab_size, (1, 5), generator=torch.Generator().manual_seed(3)
    )
    greedy = {"do_sample": False, "max_new_tokens": 40, "eos_token_id": None}
    plain = model.generate(prompt, **greedy)
    passes = []
    monkeypatch.setattr(
        modeling_layers.MtpModel, "from_pretrained", lambda *args, **options: layers.mtp
    )
    watch = model.get_decoder().register_forward_hook(lambda *_: passes.append(1))
    drafted = model.generate(prompt, use_mtp=True, **greedy)
    watch.remove()
    assert torch.equal(plain, drafted)

    [batch] = in_batches([
        {"input_ids": plain[0].numpy(), "position_ids": np.arange(plain.shape[1]), "labels": plain[0].numpy()}
    ], 1)  # fmt: skip
    [(states, targets, _)] = layers.states(batch, layers.hidden(batch))
    equal, _ = layers._agreement(states, targets)
    # The pass at position t chooses token t+1; an accepted draft is token t+2.
    position, needed = prompt.shape[1] - 1, 0
    while position + 1 < plain.shape[1]:
        needed += 1
        accepted = position + 2 < plain.shape[1] and bool(equal[position])
        position += 2 if accepted else 1
    assert 0 < equal.float().mean() < 1
    assert len(passes) == needed < 40


@pytest.mark.parametrize("family", FAMILIES)
def test_the_command_trains_them_and_changes_nothing_else(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_tokenizer(300)
    original = checkpoint_with_mtp(
        tmp_path / "original", family, vocab_size=len(tokenizer)
    )
    tokenizer.save_pretrained(original)
    convert_checkpoint(original, tmp_path / "converted", Connectivity("all"))
    text = tmp_path / "text.jsonl"
    write_rows(
        text, [{"text": f"{n} and {n + 1} make {2 * n + 1}. " * 3} for n in range(200)]
    )
    command = (
        "mtp", tmp_path / "converted", tmp_path / "out", "--text", text, "--tokens", 6000,
        "--max-length", 64, "--learning-rate", 3e-3, "--original", original,
    )  # fmt: skip
    assert run_command(*command) == 0
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == str(tmp_path / "out")
    assert all(f"{name}: " in told.err for name in ("original", "before", "after"))

    result = json.loads((tmp_path / "out" / "mtp.json").read_text())
    acceptance = result["acceptance"]
    assert acceptance["after"]["sampled"] > acceptance["before"]["sampled"]
    assert result["training"]["last_loss"] < result["training"]["first_loss"]
    before, after = (
        load_file(tmp_path / name / WEIGHTS) for name in ("converted", "out")
    )
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    names = names_in_files(family, "model.layers.4.")
    begins = tuple(names.values())
    assert all(name.startswith(begins) for name in changed)
    assert {names["eh_proj"], names["hnorm"], names["norm"]} <= changed
    assert not any(".experts." in name or ".gate." in name for name in changed)
    assert all(before[name].dtype == after[name].dtype for name in before)
    others = {file.name for file in (tmp_path / "converted").iterdir()}
    assert others | {"mtp.json"} == {file.name for file in (tmp_path / "out").iterdir()}
    # What was written is what was measured.
    run_command(
        "mtp",
        tmp_path / "out",
        tmp_path / "again",
        *command[3:],
        "--device-map",
        "auto",
    )
    before, after = (
        next(line for line in text.splitlines() if line.startswith(f"{name}: "))
        for name, text in (("before", capsys.readouterr().err), ("after", told.err))
    )
    assert before.partition(": ")[2] == after.partition(": ")[2]


def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "plain"
    tiny_model("qwen3_moe").save_pretrained(plain)
    with user_error("has no MTP layers; there is nothing to train"):
        MtpLayers(load_model(plain), plain, [WEIGHTS])
    promised = tmp_path / "promised"
    tiny_model("deepseek_v3", num_nextn_predict_layers=1).save_pretrained(promised)
    with user_error("promises 1 MTP layers, but no tensor"):
        MtpLayers(load_model(promised), promised, [WEIGHTS])

    other = tmp_path / "other"
    tiny_model("nemotron_h", num_nextn_predict_layers=1).save_pretrained(other)
    with user_error(
        "MTP layers of nemotron_h cannot be trained, only those of deepsee"
    ):
        MtpLayers(load_model(other), other, [WEIGHTS])
    named = tmp_path / "named"
    tiny_model("qwen3_next", mtp_num_hidden_layers=1).save_pretrained(named)
    with user_error(r"no tensor is named layers\.\d+\.… or mtp\.layers\.0"):
        MtpLayers(load_model(named), named, [WEIGHTS])
    several = checkpoint_with_mtp(tmp_path / "several", "qwen3_next")
    tensors = load_file(several / WEIGHTS)
    tensors |= {
        name.replace("mtp.layers.0", "mtp.layers.1"): value.clone()
        for name, value in tensors.items()
    }
    save_file(tensors, several / WEIGHTS, {"format": "pt"})
    with user_error("2 MTP layers share 'mtp.fc.weight'"):
        mtp_layers(several)

    # Half of a layer is missing.
    half = checkpoint_with_mtp(tmp_path / "half", "deepseek_v3")
    tensors = load_file(half / WEIGHTS)
    tensors.pop("model.layers.4.self_attn.o_proj.weight")
    save_file(tensors, half / WEIGHTS, {"format": "pt"})
    with user_error("its MTP layers lack .*o_proj"):
        mtp_layers(half)

    # It has a part that the layer would leave out.
    more = checkpoint_with_mtp(tmp_path / "more", "deepseek_v3")
    tensors = load_file(more / WEIGHTS)
    tensors["model.layers.4.embed_tokens.weight"] = torch.zeros(2, 2)  # the model's own
    save_file(tensors, more / WEIGHTS, {"format": "pt"})
    mtp_layers(more)
    tensors["model.layers.4.self_attn.g_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, more / WEIGHTS, {"format": "pt"})
    with user_error(
        "have 'model.layers.4.self_attn.g_proj.weight', which transformers'"
    ):
        mtp_layers(more)

    # Too little text; drafts that do not become better.
    tokenizer = tiny_tokenizer(300)
    model = checkpoint_with_mtp(
        tmp_path / "model", "deepseek_v3", vocab_size=len(tokenizer)
    )
    tokenizer.save_pretrained(model)
    text = tmp_path / "text.jsonl"
    write_rows(text, [{"text": "one two three four"}])
    assert run_command("mtp", model, tmp_path / "out", "--text", text) == 2
    assert "too little to leave an eighth out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_interrupted_training_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer(300)
    model = checkpoint_with_mtp(
        tmp_path / "model", "deepseek_v3", vocab_size=len(tokenizer)
    )
    tokenizer.save_pretrained(model)
    text = tmp_path / "text.jsonl"
    write_rows(text, [{"text": f"{n} and {n} and so on " * 4} for n in range(100)])

    def fail(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fcsd.pipeline.mtp.train_mtp", fail)
    words = ("--text", text, "--tokens", 2000, "--max-length", 64)
    run_command("mtp", model, tmp_path / "out", *words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.jsonl"]
