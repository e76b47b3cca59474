"""`fcsd push` with the real client to a Hub on this machine: what arrives, what is
refused, what is sent again.
"""

import json
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants, parse_eval_result_entries
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fcsd.base.artifact import Stage, check_checkpoint, model_outputs
from fcsd.base.files import file_sha256, read_json, write_sealed
from fcsd.base.weights import weights_fingerprint
from fcsd.base.writing import write_json, write_text
from fcsd.cli.main import main
from fcsd.evaluation.chat.chat import load_speaker
from fcsd.evaluation.results import write_result
from fcsd.model.connectivity import Connectivity, convert_checkpoint
from tests.reference.tiny import tiny_model
from tests.report.publish.hub_server import COMMIT, TOKEN, Hub, hub
from tests.report.test_report import result
from tests.support import assert_same_model, start, user_error

__all__ = ["hub"]  # the fixture

# huggingface_hub 2.4 sends files in a way that its own HTTP library calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def converted(base_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the base checkpoint, rewired, in two shards."""
    folder = tmp_path_factory.mktemp("converted")
    convert_checkpoint(base_checkpoint, folder / "one", Connectivity("all"))
    model = AutoModelForCausalLM.from_pretrained(folder / "one", trust_remote_code=True)
    shutil.copytree(
        folder / "one",
        folder / "model",
        ignore=shutil.ignore_patterns("*.safetensors*"),
    )
    model.save_pretrained(folder / "model", max_shard_size="100KB")
    assert len(list((folder / "model").glob("*.safetensors"))) > 1
    return folder / "model"


@pytest.fixture
def checkpoint(converted: Path, tmp_path: Path) -> Path:
    """Return a copy of its own."""
    return Path(shutil.copytree(converted, tmp_path / "checkpoint"))


def push(*words: str | Path) -> int:
    return main(["push", *map(str, words)])


def error_of(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """Return the one line that a failing push prints last."""
    assert push(*words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert "Traceback" not in "\n".join(lines)
    return lines[-1]


def test_a_pushed_checkpoint_loads_from_what_arrived(
    hub: Hub, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / "optimizer.pt").write_bytes(b"secret state")
    for place in (".git", "checkpoint-500"):
        (checkpoint / place).mkdir()
        (checkpoint / place / "model.safetensors").write_bytes(b"not this")
    assert push(checkpoint, "me/x", "--private", "--license", "apache-2.0") == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == f"{hub.url}/me/x"
    repo = hub.repos["me/x"]
    assert repo.private
    assert not [name for name in repo.files if "/" in name or name == "optimizer.pt"]
    assert (
        "left out, because it does not belong to a published checkpoint: .git/,"
        " checkpoint-500/,"
        " optimizer.pt" in printed.err
    )
    assert "no results on the card" in printed.err
    there = repo.write(tmp_path / "there")
    loaded, local = (
        AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
        for place in (there, checkpoint)
    )
    assert_same_model(loaded, local, {"input_ids": torch.arange(3, 12)[None]})
    assert AutoTokenizer.from_pretrained(there, trust_remote_code=True).chat_template
    card = ModelCard.load(there / "README.md")
    assert card.data.license == "apache-2.0"
    assert 'from_pretrained("me/x", trust_remote_code=True)' in card.text
    assert "2 of 2 decoder layers are rewired" in card.text
    assert "Rewired layers: 0, 1." in card.text


def test_the_token_is_written_nowhere(
    hub: Hub, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(checkpoint, "me/x") == 0
    assert push(checkpoint, "me/x", "--dry-run", tmp_path / "dry") == 0
    hub.may_write = False
    assert push(checkpoint, "me/other") == 2
    printed = capsys.readouterr()
    assert TOKEN not in printed.out + printed.err
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files and not [file for file in files if TOKEN.encode() in file.read_bytes()]
    assert not [
        name
        for name, content in hub.repos["me/x"].files.items()
        if TOKEN.encode() in content
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("README.md", f"token: {TOKEN}"),
        ("README.md", "export X=hf_" + "aB3" * 12),
        ("chat_template.jinja", "{# ghp_" + "aB3" * 12 + " #}"),
        ("LICENSE", "AKIA" + "IOSFODNN7EXAMPLE"),
        ("README.md", "-----BEGIN RSA " + "PRIVATE KEY-----"),
        ("chat_template.jinja", "{# xoxb-" + "12345-67890-abcdefgh #}"),
        ("NOTICE", "git clone https://me:" + "pass-word@example.org/x"),
    ],
)
def test_a_file_with_a_token_in_it_is_refused(
    hub: Hub, checkpoint: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint / name).write_text(f"first\n{text}\n")
    line = error_of(capsys, checkpoint, "me/x")
    assert f"{checkpoint / name}, line 2: contains what looks like a secret (" in line
    assert text.split()[-1] not in line and text not in line
    assert not hub.requests


@pytest.mark.parametrize(
    "encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be", "utf-8-sig"]
)
@pytest.mark.parametrize("name", ["LICENSE", "tokenizer_config.json", "NOTICE.txt"])
def test_a_token_is_found_in_every_encoding_of_a_text(
    hub: Hub, checkpoint: Path, name: str, encoding: str, capsys: Any
) -> None:
    token = "hf_" + "aB3" * 12
    if name.endswith(".json"):
        text = (checkpoint / name).read_text().replace("{", f'{{"x": "{token}",', 1)
        encoding = "utf-8"
    else:
        text = f"first\n{token}\n"
    (checkpoint / name).write_bytes(text.encode(encoding))
    line = error_of(capsys, checkpoint, "me/x")
    assert "contains what looks like a secret" in line and token not in line
    assert f"{checkpoint / name}, line " in line and not hub.requests


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("LICENSE", r"key: \u0068f_{}"),
        ("LICENSE", r'key: "\x68\x66\u005F{}"'),
        ("LICENSE", r'key: "\U00000068f_{}"'),
        ("deltas.png", "PNG tEXt\0hf_{}"),
    ],
)
def test_a_token_is_found_behind_escapes_and_in_a_picture(
    hub: Hub, checkpoint: Path, name: str, written: str, capsys: Any
) -> None:
    (checkpoint / name).write_text(written.format("aB3" * 12))
    line = error_of(capsys, checkpoint, "me/x")
    assert "contains what looks like a secret" in line and "aB3aB3" not in line
    assert not hub.requests


@pytest.mark.parametrize("token", ["hf_" + "aB3" * 12, TOKEN])
def test_a_token_is_found_in_the_metadata_of_weights(
    hub: Hub, checkpoint: Path, token: str, capsys: Any
) -> None:
    file = sorted(checkpoint.glob("*.safetensors"))[0]
    save_file(load_file(file), file, {"format": "pt", "made by": f"a {token} b"})
    line = error_of(capsys, checkpoint, "me/x")
    assert f"{file}, metadata: contains what looks like a secret" in line
    assert token not in line and not hub.requests


def test_a_dry_run_writes_exactly_what_a_push_sends(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    (checkpoint / ".eval_results").mkdir()
    for name in (
        ".eval_results/gsm8k.yaml",
        "deltas.png",
        "report.md",
        "LICENSE",
        ".env",
        "items.html",
    ):
        (checkpoint / name).write_text(f"{name}: 1\n")
    assert push(checkpoint, "me/x", "--dry-run", tmp_path / "dry") == 0
    assert not hub.requests
    assert push(checkpoint, "me/x") == 0
    dry = tmp_path / "dry"
    there = {
        str(file.relative_to(dry)): file.read_bytes()
        for file in dry.rglob("*")
        if file.is_file()
    }
    assert there == hub.repos["me/x"].files
    assert {
        ".eval_results/gsm8k.yaml", "deltas.png", "report.md", "LICENSE",
    } < there.keys()  # fmt: skip
    assert not {".env", "items.html"} & there.keys()


def test_a_dry_run_within_the_checkpoint_does_not_name_its_own_folder(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(checkpoint)
    (checkpoint / "notes").touch()
    assert push(checkpoint, "me/x", "--dry-run", "dry") == 0
    said = capsys.readouterr().err
    assert re.search(r"does not belong to a published checkpoint: notes$", said, re.M)


def test_a_blank_licence_is_refused(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = error_of(capsys, checkpoint, "me/x", "--license", "")
    assert "--license: must not be blank" in error


def test_a_dry_run_without_a_name_is_written_beside_the_folder(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(checkpoint, "me/x", "--dry-run") == 0
    assert (checkpoint.parent / "checkpoint-hub" / "config.json").is_file()
    assert "exists already; choose a new folder" in error_of(
        capsys, checkpoint, "me/x", "--dry-run"
    )


@pytest.mark.breadth
def test_with_hf_xet_a_push_that_is_killed_in_the_middle_continues_from_there(
    hub: Hub, tmp_path: Path
) -> None:
    """With the users' settings, hf_xet sends blocks of 64 MB, and records now and then
    which have arrived.
    """
    source, checkpoint, hub.xet = (
        tmp_path / "base",
        tmp_path / "checkpoint",
        tmp_path / "xet",
    )
    model = tiny_model(
        "qwen2_moe",
        num_hidden_layers=2,
        vocab_size=70_000,
        hidden_size=512,
        num_experts=2,
    )
    model.save_pretrained(source, max_shard_size="150MB")
    convert_checkpoint(source, checkpoint, Connectivity("all"))
    weights = {file.name: file for file in checkpoint.glob("*.safetensors")}
    size = sum(file.stat().st_size for file in weights.values())
    assert len(weights) > 1 and size > 4 * 64_000_000

    def blocks() -> dict[str, tuple[int, int]]:
        """Return the size and inode of finished blocks; a block that was sent again has
        another inode.
        """
        files = [
            file
            for file in (tmp_path / "xet").rglob("default.*")
            if file.suffix != ".tagset"
        ]
        return {file.name: (file.stat().st_size, file.stat().st_ino) for file in files}

    environment = {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
        # 20 s, in which everything here would be sent
        "HF_XET_DATA_SESSION_XORB_METADATA_FLUSH_INTERVAL": "100ms",
    }
    command = ("-m", "fcsd", "push", str(checkpoint), "me/x")
    # In a process of its own: hf_xet starts threads, and other tests fork.
    with start(*command, **environment) as child:
        while (
            not (noted := list(hub.xet.rglob("xorb_metadata/*.mdb")))
            and child.poll() is None
        ):
            time.sleep(0.01)
        child.kill()
    arrived = blocks()
    assert child.returncode == -signal.SIGKILL and noted and arrived
    assert hub.repos["me/x"].files == {}, "nobody sees half a checkpoint"
    with start(*command, **environment) as child:
        out, error = child.communicate()
    assert child.returncode == 0, error
    assert out.splitlines()[-1] == f"{hub.url}/me/x" and TOKEN not in out + error
    again = [name for name, block in arrived.items() if blocks()[name] != block]
    assert len(again) <= len(arrived) - len(noted) < len(blocks()) - 1
    repo = hub.repos["me/x"]
    assert len(repo.commits) == 1 and not hub.received
    for name, file in weights.items():
        assert repo.files[name] == b"xet:" + file_sha256(file).encode()
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size < 10**7
                and TOKEN.encode() in file.read_bytes()]  # fmt: skip


def test_a_broken_upload_continues_where_it_stopped(
    hub: Hub,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last = (sorted(checkpoint.glob("*.safetensors"))[-1]).read_bytes()
    hub.breaks = lambda content: content == last
    line = error_of(capsys, checkpoint, "me/x")
    assert "the upload broke off" in line and "run the same command again" in line
    assert hub.repos["me/x"].files == {}, "nobody sees half a checkpoint"
    hub.breaks = lambda content: False
    assert push(checkpoint, "me/x") == 0
    assert (
        len(hub.received)
        == len(set(hub.received))
        == len(list(checkpoint.glob("*.safetensors")))
    )
    assert push(checkpoint, "me/x") == 0
    assert len(hub.received) == len(set(hub.received))
    assert len(hub.repos["me/x"].commits) == 1


def test_a_second_push_removes_the_shards_that_are_gone(
    hub: Hub, checkpoint: Path, converted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(checkpoint, "me/x") == push(checkpoint, "me/x") == 0
    assert "replaces the README.md" not in capsys.readouterr().err
    hub.repos["me/x"].files |= {
        "notes.txt": b"the owner's own",
        "README.md": b"edited on the page",
    }
    for name in ("report.md", "files.json"):
        hub.repos["me/x"].files[name] = b"of an earlier upload"
    for file in checkpoint.glob("*.safetensors*"):
        file.unlink()
    shutil.copyfile(
        converted.parent / "one" / "model.safetensors", checkpoint / "model.safetensors"
    )
    assert push(checkpoint, "me/x") == 0
    names = hub.repos["me/x"].files
    assert [name for name in names if "safetensors" in name] == ["model.safetensors"]
    assert "notes.txt" in names
    assert not {"report.md", "files.json"} & set(names)
    assert "replaces the README.md of me/x" in capsys.readouterr().err


def test_what_the_hub_refuses_is_said_in_one_line(
    hub: Hub,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.may_write = False
    assert "may not write there" in error_of(capsys, checkpoint, "me/x")
    hub.may_write = True
    assert push(checkpoint, "me/x") == 0
    assert "exists and is public" in error_of(capsys, checkpoint, "me/x", "--private")
    hub.repos["me/x"].files["config.json"] = b'{"model_type": "llama"}'
    assert "exists and holds a model of type 'llama'" in error_of(
        capsys, checkpoint, "me/x"
    )
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "does not accept the access token" in error_of(capsys, checkpoint, "me/x")
    monkeypatch.delenv("HF_TOKEN")
    assert "no access token for the Hub" in error_of(capsys, checkpoint, "me/x")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in error_of(capsys, checkpoint, "me/x")


def test_what_the_hub_says_against_a_card_or_a_commit_is_passed_on_without_the_token(
    hub: Hub,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.metadata_errors = [
        '"license" must be one of [apache-2.0, mit]',
        '"language[0]" must be a code',
    ]
    line = error_of(capsys, checkpoint, "me/x", "--license", "mine")
    assert 'refuses the metadata of README.md: - "license" must be one of' in line
    assert '"language[0]"' in line
    assert "the same command again" not in line and not hub.received
    hub.metadata_errors = []
    for status, text, words in (
        (403, "Private repository storage limit reached", "(403: Private repository storage limit reached"),
        (400, f"no such file, {TOKEN}", "the Hub refuses this (400: "),
        (429, "slow down", "run the same command again later (429: slow down"),
        (412, "A commit has happened since", "run the same command again"),
    ):  # fmt: skip
        hub.commit_answer = (status, text)
        line = error_of(capsys, checkpoint, "me/x")
        assert words in line and TOKEN not in line
    hub.commit_answer = None
    assert push(checkpoint, "me/x") == 0 and len(hub.repos["me/x"].commits) == 1
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    capsys.readouterr()
    assert "the Hub at http://127.0.0.1:1 cannot be reached" in error_of(
        capsys, checkpoint, "me/x"
    )


def test_what_was_pushed_loads_by_its_name_with_the_code_of_its_card(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    assert push(checkpoint, "me/x") == 0
    card = ModelCard(hub.repos["me/x"].files["README.md"].decode())
    (code,) = re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL)
    assert 'AutoModelForCausalLM.from_pretrained("me/x"' in code
    assert "max_new_tokens=512" in code
    code = (
        "import sys; sys.modules['fcsd'] = None\n"
        + code.replace("max_new_tokens=512", "max_new_tokens=4, do_sample=False")
        + "pin = AutoModelForCausalLM.from_pretrained('me/x', trust_remote_code=True,"
        " revision='"
        + COMMIT
        + "')\nassert type(pin).__name__ == type(model).__name__ =="
        " 'FarSkipQwen2MoeForCausalLM'\nprint('reply', reply[0,"
        " inputs['input_ids'].shape[1]:].tolist())\n"
    )
    environment = {
        "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home"),
    }  # fmt: skip
    with start("-W", "ignore", "-c", code, **environment) as child:
        out, error = child.communicate()
    assert child.returncode == 0, error
    assert load_speaker("me/x").tokenizer.chat_template, "as the card says"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=True)
    turn = [{"role": "user", "content": "What are the main topics of linear algebra?"}]
    prompt = tokenizer.apply_chat_template(
        turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    mine = model.generate(**prompt, max_new_tokens=4, do_sample=False)[
        0, prompt["input_ids"].shape[1] :
    ]
    assert out.splitlines()[-1] == f"reply {mine.tolist()}"


def test_a_dry_run_shares_the_weights_and_nothing_that_one_may_edit(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry = tmp_path / "dry"
    write_json(
        checkpoint / "report.json",
        {"output_dir": str(tmp_path), "link": "https://a.b/usr/bin"},
    )
    (checkpoint / "USE_POLICY.md").write_text(f"See {tmp_path} for it.\n")
    assert push(checkpoint, "me/x", "--dry-run", dry) == 0
    said = capsys.readouterr().err
    assert f"USE_POLICY.md: contains paths of this machine: {tmp_path}\n" in said
    assert "report.json: names" not in said
    assert read_json(dry / "report.json") == {
        "output_dir": tmp_path.name,
        "link": "https://a.b/usr/bin",
    }
    for file in dry.iterdir():
        if (checkpoint / file.name).exists():
            assert file.samefile(checkpoint / file.name) == (
                file.suffix == ".safetensors"
            ), file.name


def test_a_converted_model_knows_its_original_and_its_card_says_that_it_was_not_trained(
    base_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = (
        Path(shutil.copytree(base_checkpoint, tmp_path / "base")),
        tmp_path / "out",
    )
    write_text(
        base / "README.md",
        "---\nlicense: other\nlicense_name: qwen\nlicense_link: TERMS.md\nlanguage:"
        " en\n---\n",
    )
    assert main(["convert", str(base), str(out), "--layers", "all"]) == 0
    assert push(out, "me/x", "--dry-run", tmp_path / "dry") == 0
    card = ModelCard.load(tmp_path / "dry" / "README.md")
    assert "> **Rewired, but not trained.**" in card.text
    assert "Not evaluated." in card.text
    assert (card.data.license_name, card.data.language) == ("qwen", ["en"])
    assert card.data.license_link is None, "nothing of this name is in the folder"
    assert "manifest.json" not in {file.name for file in (tmp_path / "dry").iterdir()}
    assert (
        push(out, "me/x", "--base-model", "some/base", "--dry-run", tmp_path / "dry3")
        == 0
    )
    card = ModelCard.load(tmp_path / "dry3" / "README.md")
    assert card.data.base_model == "some/base" and card.data.license_name == "qwen"
    assert (
        card.data.license_link == "https://huggingface.co/some/base/blob/main/TERMS.md"
    )
    assert "> **Rewired, but not trained.**" in card.text, (
        "the original on this machine has the same weights"
    )
    # Overwritten by a training, so that the record no longer applies.
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(out)
    assert push(out, "me/x", "--dry-run", tmp_path / "dry2") == 0
    text = (tmp_path / "dry2" / "README.md").read_text()
    assert "Rewired, but" not in text
    assert "It is not recorded whether and how the weights were trained" in text


def test_a_card_keeps_the_languages_and_names_of_the_originals_as_they_are_written(
    base_checkpoint: Path, tmp_path: Path
) -> None:
    base, out = (
        Path(shutil.copytree(base_checkpoint, tmp_path / "base")),
        tmp_path / "out",
    )
    assert main(["convert", str(base), str(out), "--layers", "all"]) == 0
    for number, (written, languages, licence_name) in enumerate(
        [
            ("language: no\nlicense_name: 1.10", ["no"], "1.10"),
            ("language: [en, no, on]\nlicense_name: 2026-05-01",
             ["en", "no", "on"], "2026-05-01"),
            ("language:\n- NO\n- yes\nlicense_name: off", ["NO", "yes"], "off"),
            ("language: null\nlicense_name: true", None, "true"),
            ("language: ~\nlicense_name: 0x10", None, "0x10"),
        ]
    ):  # fmt: skip
        write_text(base / "README.md", f"---\nlicense: other\n{written}\n---\n")
        dry = tmp_path / f"dry{number}"
        assert push(out, "me/x", "--dry-run", dry) == 0
        card = ModelCard.load(dry / "README.md")
        assert (card.data.language, card.data.license_name) == (languages, licence_name)
    write_text(base / "README.md", "---\nlicense: [mit, apache-2.0]\n---\n")
    assert push(out, "me/x", "--dry-run", tmp_path / "two") == 0
    card = ModelCard.load(tmp_path / "two" / "README.md")
    assert card.data.license == ["mit", "apache-2.0"]
    assert "\nmit, apache-2.0. The weights derive from" in card.text


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("# Mine\n\n## Results\n\n| task | score |\n|---|---|\n| a | 41.5 |\n", True),
        ("# Mine\n\n## Evaluation results\n\n### MMLU\n\n5 shots: 71.2 %\n", True),
        ("# Mine\n\n## Results\n\nNot evaluated.\n\n## Licence\n\nMIT 2.0\n", False),
        ("# Mine\n\n```\n# Results\n1\n```\n\n## Loading\n\ntransformers 5\n", False),
        ("# Mine\n", False),
        ("---\nbase_model:\n- me/base\n- me/other\n---\n# Mine\n", False),
    ],
)  # fmt: skip
def test_results_in_the_text_of_a_card_are_seen(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    reported: bool,
) -> None:
    write_text(checkpoint / "README.md", text)
    assert push(checkpoint, "me/x", "--dry-run", tmp_path / "dry") == 0
    noted = capsys.readouterr().err
    assert ("no results on the card" in noted) != reported
    assert ("the results on the card are in its text only" in noted) == reported


@pytest.mark.parametrize("reason", ["local data", "quick look"])
def test_measured_results_that_enter_no_index_are_not_said_to_be_missing(
    checkpoint: Path,
    base_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if reason == "local data":  # a folder of this name is no data set of the Hub
        for name in ("code", "choice"):
            (tmp_path / "a" / name).mkdir(parents=True)
    limit = 4 if reason == "quick look" else None
    original = evaluated(tmp_path / "original", "original", base_checkpoint, limit)
    mine = evaluated(tmp_path / "mine", "fcsd", checkpoint, limit)
    dry = tmp_path / "dry"
    words = ("--results", original, mine, "--dry-run", dry)
    assert push(checkpoint, "me/x", *words) == 0
    card = ModelCard.load(dry / "README.md")
    assert card.data.eval_results is None and not (dry / ".eval_results").exists()
    assert ("Only the first 4 items" in card.text) == (reason == "quick look")
    noted = capsys.readouterr().err
    assert "no results on the card" not in noted
    assert "the results on the card are in its text only" in noted


def drop_shard(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def swap_shards(folder: Path) -> None:
    one, two, *_ = sorted(folder.glob("*.safetensors"))
    shutil.copyfile(two, one)


def cut_shard(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])


def other_width(folder: Path) -> None:
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"hidden_size": 64})


def not_farskip(folder: Path) -> None:
    config = read_json(folder / "config.json")
    del config["farskip"]
    write_json(
        folder / "config.json",
        config | {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]},
    )


def only_adapters(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: [file.unlink() for file in folder.glob("*.safetensors*")], "no weights"),
        (drop_shard, "shards are missing"),
        (swap_shards, "is not in this file"),
        (cut_shard, "damaged or incomplete"),
        (other_width, "weights and config belong to different models"),
        (not_farskip, "is not a FarSkip checkpoint"),
        (lambda folder: (folder / "modeling_farskip.py").unlink(), "auto_map in config.json names it"),
        (lambda folder: (folder / "config.json").unlink(), "holds neither a checkpoint"),
        (only_adapters, "holds adapters, not a model; give the folder of the stage"),
        (lambda folder: (folder / "README.md").write_text("---\na: [\n---\n"), "is not YAML"),
    ],
    ids=["no weights", "a shard gone", "wrong shard", "cut shard", "width", "regular", "code", "config", "adapters",
         "card"],
)  # fmt: skip
def test_a_folder_that_is_not_whole_is_refused_before_anything_is_sent(
    hub: Hub,
    checkpoint: Path,
    damage: Any,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(checkpoint)
    assert message in error_of(capsys, checkpoint, "me/x")
    assert not hub.requests


@pytest.mark.parametrize(
    "name",
    [
        "x", "me/x/y", "me/", "me/a b", "-me/x", "me/x.git", "https://huggingface.co/me/x",
    ],
)  # fmt: skip
def test_a_name_that_is_no_repository_is_refused(
    hub: Hub, checkpoint: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) if name.startswith("-") else _nothing():
        assert "is not a repository id" in error_of(capsys, checkpoint, name)
    assert not hub.requests


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        ("https://me:SECRET@h/x", "holds a name or password"),
        ("https://h/x", "owner/name on the Hub is needed, not an address"),
        (" ", "--base-model: must not be blank"),
        ("nowhere", "is neither a folder nor owner/name on the Hub"),
    ],
)
def test_a_base_model_that_the_card_cannot_name_is_refused(
    hub: Hub, checkpoint: Path, base: str, problem: str, capsys: Any
) -> None:
    error = error_of(capsys, checkpoint, "me/x", "--base-model", base)
    assert problem in error
    assert "SECRET" not in error and not hub.requests


class _nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


def evaluated(
    folder: Path,
    name: str,
    weights: Path,
    limit: int | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    inputs: dict[str, Any] = {"model": weights_fingerprint(weights)}
    if config is not None:
        inputs["model/config.json"] = config
    stage = Stage(folder, "evaluate", {}, inputs)
    stage.start()
    write_result(*result(name, limit), folder)
    stage.finish({})
    return folder


def test_a_card_made_from_results_has_the_table_the_index_and_a_file_a_task(
    checkpoint: Path,
    base_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    write_text(
        base / "README.md",
        "---\nlicense: other\nlicense_name: qwen\nlicense_link: LICENSE\n---\n# Base\n",
    )
    original = evaluated(tmp_path / "original", "original", base_checkpoint)
    mine = evaluated(tmp_path / "mine", "fcsd", checkpoint)
    words = (
        "--results", original, mine, "--base-model", base, "--dry-run", tmp_path / "dry",
    )  # fmt: skip
    assert push(checkpoint, "me/x", *words) == 0
    card = ModelCard.load(tmp_path / "dry" / "README.md")
    assert (card.data.license, card.data.license_name) == ("other", "qwen")
    assert {r.dataset_type: r.metric_value for r in card.data.eval_results} == {
        "a/code": 75.0,
        "a/choice": 50.0,
    }
    # 3 of 4 both: one gained, one lost; delta 0; the interval 2.4469 * sqrt(2 + 2) / 6,
    # with Student's t of 6
    (line,) = [line for line in card.text.splitlines() if line.startswith("| code")]
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    assert cells == [
        "pass@1, 0-shot", "75.0", "75.0", "0.0 (-81.6 to +81.6)", "within noise",
    ]  # fmt: skip
    assert "code 0-shot; choice 0-shot; float32, decoding greedy" in card.text
    (entry,) = parse_eval_result_entries(
        yaml.safe_load((tmp_path / "dry/.eval_results/code.yaml").read_text())
    )
    assert (entry.dataset_id, entry.value) == ("a/code", 75.0)
    assert "0-shot" in entry.notes
    assert str(tmp_path) not in card.content
    line = error_of(
        capsys, checkpoint, "me/x", "--results", original, tmp_path, "--dry-run", tmp_path / "no",
    )  # fmt: skip
    assert "holds no result of `fcsd evaluate`" in line
    of_fewer_tasks = tmp_path / "fewer"
    shutil.copytree(original, of_fewer_tasks)
    (of_fewer_tasks / "manifest.json").unlink()
    written = json.loads((of_fewer_tasks / "results.json").read_text())
    del written["tasks"]["choice"]
    (of_fewer_tasks / "results.json").write_text(json.dumps(written))
    line = error_of(
        capsys, checkpoint, "me/x", "--results", of_fewer_tasks, mine, "--dry-run", tmp_path / "no",
    )  # fmt: skip
    assert f"{of_fewer_tasks} and {mine} have different tasks (choice in one" in line
    assert "evaluate both models on the same suite" in line
    elsewhere = evaluated(
        tmp_path / "elsewhere", "fcsd", checkpoint, config={"farskip": {"layers": [0]}}
    )
    for pair, said in (
        ((original, elsewhere), "was measured with another connectivity than that of"),
        ((elsewhere, mine), "was measured on a converted model"),
    ):
        line = error_of(
            capsys, checkpoint, "me/x", "--results", *pair, "--dry-run", tmp_path / "no",
        )  # fmt: skip
        assert f"{elsewhere}: {said}" in line
    other = evaluated(tmp_path / "other", "fcsd", base_checkpoint)
    line = error_of(
        capsys,
        checkpoint,
        "me/x",
        "--results",
        original,
        other,
        "--dry-run",
        tmp_path / "dry2",
    )
    assert "was measured on other weights" in line and not (tmp_path / "dry2").exists()


def test_a_card_that_is_there_is_kept_and_gets_the_repository_id(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        '# My own words\n\n`from_pretrained("path/to/this/folder")`,'
        ' `from_pretrained("old/name")`\n'
    )
    (checkpoint / "README.md").write_text(text)
    write_json(
        checkpoint / "report.json", {"recipe": {"publication": {"repo_id": "old/name"}}}
    )
    assert push(checkpoint, "me/x", "--dry-run", tmp_path / "dry") == 0
    card = (tmp_path / "dry" / "README.md").read_text()
    assert (
        card
        == '# My own words\n\n`from_pretrained("me/x")`, `from_pretrained("me/x")`\n'
    )
    noted = capsys.readouterr().err
    assert (
        f"no licence on the card: edit {checkpoint / 'README.md'}, or publication in"
        " the recipe" in noted
    )
    assert "README.md loads" not in noted and "--base-model" not in noted
    assert push(tmp_path / "dry", "me/y", "--dry-run", tmp_path / "dry3") == 0
    assert "README.md loads me/x, not me/y" in capsys.readouterr().err
    line = error_of(
        capsys, checkpoint, "me/x", "--license", "mit", "--dry-run", tmp_path / "dry2"
    )
    assert "apply to a new card" in line


@pytest.mark.parametrize("card", [True, False])
@pytest.mark.parametrize(
    "what", ["weights", "config", "tokenizer", "tokenizer is gone", "report", "nothing"]
)
def test_a_publication_whose_weights_or_files_are_not_those_of_its_stage_is_not_pushed(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    card: bool,
    what: str,
) -> None:
    """A README.md beside the weights does not keep them from being compared."""
    publish = tmp_path / "publish"
    shutil.copytree(checkpoint, publish)
    write_json(publish / "report.json", {"seconds": 1})
    outputs = model_outputs(publish)
    outputs["report.json"] = file_sha256(publish / "report.json")
    write_sealed(publish / "files.json", outputs)
    if card:
        (publish / "README.md").write_text("# My own words\n")
    if what == "weights":
        file = min(publish.glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    elif what == "config":
        config = json.loads((publish / "config.json").read_text())
        write_json(publish / "config.json", config | {"rms_norm_eps": 0.5})
    elif what == "tokenizer":
        text = (publish / "tokenizer.json").read_text()
        (publish / "tokenizer.json").write_text(text.replace("1", "2", 1))
    elif what == "tokenizer is gone":
        (publish / "tokenizer.json").unlink()
    elif what == "report":
        write_json(publish / "report.json", {"seconds": 2})
    if what == "nothing":
        assert push(publish, "me/x", "--dry-run", tmp_path / "dry") == 0
        assert not (tmp_path / "dry" / "files.json").exists()
        assert "files.json" not in capsys.readouterr().err
        return
    line = error_of(capsys, publish, "me/x", "--dry-run", tmp_path / "dry")
    said = {
        "weights": "describes other weights",
        "config": "rms_norm_eps: 1e-06 -> 0.5",
        "report": "report.json: ",
    }.get(what, "model/tokenizer.json: ")
    assert said in line and not (tmp_path / "dry").exists()
    with user_error(r"is not what .*files\.json describes"):
        check_checkpoint(publish)


def test_a_publication_without_its_report_can_be_read_but_not_pushed(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of the Hub is fetched without its report and figures."""
    publish = tmp_path / "publish"
    shutil.copytree(checkpoint, publish)
    outputs = model_outputs(publish) | {"report.md": "a" * 64}
    write_sealed(publish / "files.json", outputs)
    check_checkpoint(publish)
    assert "report.md: " in error_of(
        capsys, publish, "me/x", "--dry-run", tmp_path / "dry"
    )


def test_a_run_is_pushed_from_its_publish_folder_and_an_unfinished_one_says_what_is_there(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(checkpoint, run / "distill" / "model")
    manifest = {
        "stage": "distill", "results": {"steps": 7},
        "settings": {
            "model": {"path": "some/base"}, "objective": {"name": "kl"},
            "train": {"batch_size_tokens": 128, "learning_rate": 1e-3},
            "data": {
                "train": [{"path": "/home/somebody/rows.jsonl"}, *({"path": "owner/rows", "split": s} for s in "ab")]
            },
        },
    }  # fmt: skip
    write_json(run / "distill" / "manifest.json", manifest)
    write_json(run / "distill" / "stage.json", {})
    write_json(
        run / "distill" / "manifest.json", manifest | {"outputs": {"model": "0" * 64}}
    )
    line = error_of(capsys, run / "distill", "me/x", "--dry-run", tmp_path / "dry")
    assert "describes other weights (000000000000…) than those in" in line
    fingerprint = weights_fingerprint(run / "distill" / "model")
    write_json(
        run / "distill" / "manifest.json",
        manifest | {"outputs": {"model": fingerprint}},
    )
    line = error_of(capsys, run, "me/x", "--dry-run", tmp_path / "dry")
    assert "has no publish folder yet" in line
    assert f"you can also push {run}/distill" in line
    assert (
        push(run / "distill", "me/x", "--license", "mit", "--dry-run", tmp_path / "dry")
        == 0
    )
    card = ModelCard.load(tmp_path / "dry" / "README.md")
    assert card.data.base_model == "some/base" and card.data.datasets == ["owner/rows"]
    assert "objective `kl`, 7 steps of 128 tokens, learning rate 0.001" in card.text
    assert "`rows.jsonl`, `owner/rows`" in card.text and "somebody" not in card.content
    shutil.copytree(tmp_path / "dry", run / "publish")
    assert push(run, "me/x", "--dry-run", tmp_path / "dry2") == 0
    assert json.loads((tmp_path / "dry2" / "config.json").read_text())["farskip"][
        "layers"
    ] == [0, 1]
