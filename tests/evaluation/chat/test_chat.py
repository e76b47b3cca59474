"""`fcsd chat`: replies are those of `generate`, conversations are remembered, a single
reply can be interrupted.
"""

import contextlib
import io
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fcsd.cli.main import main
from fcsd.evaluation.chat.chat import Reply, Speaker, chat, load_speaker
from fcsd.evaluation.chat.terminal import (
    cells,
    ending,
    first_row,
    printable,
    side_by_side,
)
from fcsd.model.connectivity import Connectivity, convert_checkpoint
from tests.support import ROOT, change_json


@pytest.fixture(scope="module")
def converted(base_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "model"
    convert_checkpoint(base_checkpoint, folder, Connectivity("all"))
    return folder


def said(speakers: list[Speaker], *lines: str, **options: object) -> list[str]:
    """Return the answers of a chat without a terminal, without the turns that it
    repeats and its notes about the limit.
    """
    text = "\n" + transcript(speakers, *lines, **options)
    for line in lines[: lines.index("/exit") + 1 if "/exit" in lines else None]:
        assert not line or f"\n> {line}\n" in text
        text = text.replace(f"\n> {line}\n", "", 1)
    return re.sub(
        r"\((\S+: )?cut after \d+ tokens; --max-new-tokens allows more\)\n", "", text
    ).splitlines()


def transcript(speakers: list[Speaker], *lines: str, **options: object) -> str:
    """Return what a chat without a terminal prints."""
    sink = io.StringIO()
    source = io.StringIO("\n".join(lines) + "\n")
    with mock.patch("sys.stdin", source), contextlib.redirect_stdout(sink):
        chat(speakers, **options)  # type: ignore[arg-type]
    return sink.getvalue()


def by_hand(folder: Path, messages: list[dict[str, str]], new_tokens: int) -> str:
    """Return the reply of transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt"
    )
    ids = prompt["input_ids"] if not isinstance(prompt, torch.Tensor) else prompt
    with torch.no_grad():
        reply = model.generate(ids, max_new_tokens=new_tokens, do_sample=False)
    return tokenizer.decode(reply[0, ids.shape[1] :], skip_special_tokens=True)


def plain(text: str) -> str:
    return printable(text).rstrip("\n")


def test_a_second_turn_knows_the_first_and_reset_forgets_it(
    base_checkpoint: Path,
) -> None:
    speaker = load_speaker(str(base_checkpoint))
    text = "\n".join(
        said(
            [speaker],
            "hello",
            "and now",
            "/reset",
            "hello",
            system="be brief",
            max_new_tokens=6,
        )
    )
    system = {"role": "system", "content": "be brief"}
    hello, more = ({"role": "user", "content": words} for words in ("hello", "and now"))
    first = by_hand(base_checkpoint, [system, hello], 6)
    second = by_hand(
        base_checkpoint,
        [system, hello, {"role": "assistant", "content": first}, more],
        6,
    )
    assert first != second
    begins = "The conversation starts again."
    assert text == "\n".join([plain(first), plain(second), begins, plain(first)])
    assert speaker.messages == [system, hello, {"role": "assistant", "content": first}]


def test_the_models_own_generation_settings_hold(
    base_checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(base_checkpoint, tmp_path / "model"))
    (folder / "generation_config.json").write_text(
        '{"max_new_tokens": 3, "eos_token_id": 2, "pad_token_id": 0}'
    )
    speaker = load_speaker(str(folder))
    said([speaker], "hello")
    assert speaker.messages[-1]["content"] == by_hand(
        base_checkpoint, [{"role": "user", "content": "hello"}], 3
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"return_dict_in_generate": True, "output_scores": True},
        {"constraints": ["x"]},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "high"},
        {"num_beam_groups": 2, "diversity_penalty": 0.5},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_cannot_stream_are_switched_off(
    base_checkpoint: Path, settings: dict[str, object]
) -> None:
    speaker = load_speaker(str(base_checkpoint))
    for name, value in settings.items():
        setattr(speaker.model.generation_config, name, value)
    said([speaker], "hello", max_new_tokens=6)
    assert speaker.messages[-1]["content"] == by_hand(
        base_checkpoint, [{"role": "user", "content": "hello"}], 6
    )


def test_the_models_own_stop_strings_end_a_reply(base_checkpoint: Path) -> None:
    whole = by_hand(base_checkpoint, [{"role": "user", "content": "hello"}], 12)
    stop = whole[3:5]
    speaker = load_speaker(str(base_checkpoint))
    speaker.model.generation_config.stop_strings = [stop]
    said([speaker], "hello", max_new_tokens=12)
    reply = speaker.messages[-1]["content"]
    assert stop in reply and whole.startswith(reply) and len(reply) < len(whole)


def test_greedy_overrules_settings_that_sample(
    base_checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(base_checkpoint, tmp_path / "model"))
    (folder / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 5.0, "top_p": 0.9, "eos_token_id": 2,'
        ' "pad_token_id": 0}'
    )
    speaker = load_speaker(str(folder))
    assert speaker.settings(False) == "temperature 5, top_p 0.9; float32 on cpu"
    assert speaker.settings(True) == "greedy; float32 on cpu"
    said([speaker], "hello", max_new_tokens=12, greedy=True)
    greedy = by_hand(base_checkpoint, [{"role": "user", "content": "hello"}], 12)
    assert speaker.messages[-1]["content"] == greedy
    torch.manual_seed(0)
    said([speaker], "hello", max_new_tokens=12)
    assert speaker.messages[-1]["content"] != greedy
    # transformers refuses to sample at temperature 0.
    cold = load_speaker(str(folder))
    cold.model.generation_config.temperature = 0.0
    assert cold.settings(False) == "greedy; float32 on cpu"
    said([cold], "hello", max_new_tokens=12)
    assert cold.messages[-1]["content"] == greedy


def test_a_reply_that_the_limit_ended_says_so_and_one_that_the_model_ended_does_not(
    base_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speaker = load_speaker(str(base_checkpoint))
    text = transcript([speaker], "hello", "x" * 60, max_new_tokens=20)
    assert text.splitlines()[0] == "> hello" and "\n\n> xxx" in text
    assert text.count("(cut after 20 tokens; --max-new-tokens allows more)\n") == 1
    assert text.endswith(
        "(cut: the model's 128 positions are full; /reset starts a new conversation)\n"
    )
    first = by_hand(base_checkpoint, [{"role": "user", "content": "hello"}], 1)
    (token,) = speaker.tokenizer.encode(first, add_special_tokens=False)
    monkeypatch.setattr(speaker.model.generation_config, "eos_token_id", token)
    assert "cut" not in transcript([speaker], "hello", max_new_tokens=1)


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_a_message_can_be_answered_again_and_a_hybrid_asked_not_to_think(
    switch: str, base_checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(base_checkpoint, tmp_path / "model"))
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(
        template + f"{{% if {switch} is false %}}quick{{% endif %}}"
    )
    speaker, quick = (
        load_speaker(str(folder)),
        load_speaker(str(folder), thinking=False),
    )
    once = said([quick], "hello", max_new_tokens=6)
    assert said([quick], "hello", "/again", max_new_tokens=6) == [*once, *once]
    assert len(quick.messages) == 2
    assert said([quick], "/again") == ["There is no message yet."]
    quick.messages = speaker.messages = [{"role": "user", "content": "hello"}]
    prompt = quick.tokenizer.decode(quick.prompt()["input_ids"][0])
    assert (
        prompt == speaker.tokenizer.decode(speaker.prompt()["input_ids"][0]) + "quick"
    )


def test_side_by_side_each_model_answers_its_own_conversation(
    base_checkpoint: Path, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    speakers = [load_speaker(str(converted)), load_speaker(str(base_checkpoint))]
    rows = said(speakers, "hello", "again", max_new_tokens=8)
    hello = {"role": "user", "content": "hello"}
    for speaker, folder in zip(speakers, (converted, base_checkpoint), strict=True):
        first = by_hand(folder, [hello], 8)
        assert speaker.messages[1] == {"role": "assistant", "content": first}
    assert speakers[0].messages[1] != speakers[1].messages[1], (
        "or this test shows nothing"
    )
    name = rows[0].split(" │ ")[0].strip()
    # cut to the column's width
    assert name and str(converted).endswith(name.removeprefix("…"))
    assert all(" │" in row for row in rows)


def test_without_room_for_columns_the_replies_stand_one_below_the_other(
    base_checkpoint: Path, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    speakers = [load_speaker(str(converted)), load_speaker(str(base_checkpoint))]
    rows = said(speakers, "hello", max_new_tokens=4)
    replies = [plain(speaker.messages[-1]["content"]) for speaker in speakers]
    heads = [f"── {speaker.name}" for speaker in speakers]
    assert rows == "\n".join(
        f"{head}\n{reply}" for head, reply in zip(heads, replies, strict=True)
    ).split("\n")


def test_commands_that_do_not_exist_and_empty_lines_are_no_turns(
    base_checkpoint: Path,
) -> None:
    speaker = load_speaker(str(base_checkpoint))
    rows = said([speaker], "", "/sing loudly", "/help", "/exit", "never read")
    assert rows[0].startswith("/sing: no such command") and "/reset" in "\n".join(rows)
    assert speaker.messages == []


def test_a_conversation_that_is_too_long_is_refused_and_continues_after_reset(
    base_checkpoint: Path,
) -> None:
    speaker = load_speaker(str(base_checkpoint))
    rows = said([speaker], "x" * 200, "/reset", "hi", max_new_tokens=2)
    assert "the model 128 positions; /reset starts a new conversation" in rows[0]
    assert speaker.messages[0]["content"] == "hi" and len(speaker.messages) == 2


def test_a_reply_ends_where_the_positions_end(base_checkpoint: Path) -> None:
    speaker = load_speaker(str(base_checkpoint))
    speaker.messages = [{"role": "user", "content": "x" * 110}]
    length = len(speaker.prompt()["input_ids"][0])
    assert length > 110
    assert Reply(speaker, None)._options["max_new_tokens"] == 128 - length


def test_a_model_that_fails_ends_its_reply_and_not_the_chat(
    base_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speaker = load_speaker(str(base_checkpoint))

    def fail(**options: object) -> None:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(speaker.model, "generate", fail)
    rows = said([speaker], "hello", "/help")
    assert rows[1] == "error: RuntimeError: out of memory"
    assert "/reset" in "\n".join(rows[2:])
    assert speaker.messages == [], (
        "what was not answered is not part of the conversation"
    )


def test_ctrl_c_while_the_last_step_ends_is_waited_out(
    base_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speaker = load_speaker(str(base_checkpoint))
    speaker.messages = [{"role": "user", "content": "x"}]
    reply = Reply(speaker, 2)
    join, pressed = reply._thread.join, []

    def press(*timeout: float) -> None:
        pressed.append(1)
        if len(pressed) == 1:
            raise KeyboardInterrupt
        join()

    monkeypatch.setattr(reply._thread, "is_alive", lambda: len(pressed) < 2)
    monkeypatch.setattr(reply._thread, "join", press)
    reply.start()
    reply.stop()
    assert len(pressed) == 2


def test_what_cannot_be_talked_to_is_one_line(
    base_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(shutil.copytree(base_checkpoint, tmp_path / "base"))
    (folder / "chat_template.jinja").unlink()
    assert main(["chat", str(folder)]) == 2
    assert "its tokenizer has no chat template" in capsys.readouterr().err
    (folder / "chat_template.jinja").write_text(
        "{{ raise_exception('no system role') }}"
    )
    speaker = load_speaker(str(folder))
    assert "refuses the conversation: no system role" in said([speaker], "hello")[0]
    # A script on the other end of a pipe sees the status.
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    assert main(["chat", str(folder)]) == 2
    shown = capsys.readouterr()
    assert shown.out.count("error: ") == 2
    assert "error: 2 replies are missing: " in shown.err
    assert "refuses the conversation: no system role" in shown.err
    assert main(["chat", str(base_checkpoint), "--device-map", "nowhere"]) == 2
    assert (
        "--device-map nowhere: When passing device_map as a string"
        in capsys.readouterr().err
    )
    assert main(["chat", str(base_checkpoint), "--device-map", "cuda:99"]) == 2
    assert re.search(r"error: --device-map cuda:99: \w.*\n$", capsys.readouterr().err)
    assert main(["chat", str(base_checkpoint), "--max-new-tokens", "0"]) == 2
    assert "must be at least 1" in capsys.readouterr().err


def test_a_reply_that_is_stopped_ends_long_before_its_limit(
    base_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    criterion = Reply._criterion

    # A step that sleeps lets this thread stop the other, however busy the machine is.
    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.02)
        return criterion(*args, **options)

    monkeypatch.setattr(Reply, "_criterion", slow)
    speaker = load_speaker(str(base_checkpoint))
    speaker.messages = [{"role": "user", "content": "x"}]
    speaker.model.generation_config.eos_token_id = None
    whole, reply = Reply(speaker, 100), Reply(speaker, 100)
    whole.start()
    reply.start()
    reply.stop()
    assert len("".join(reply)) < len("".join(whole)) / 2
    whole.stop()


def test_ctrl_c_while_a_reply_begins_ends_it_and_the_chat_continues(
    base_checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    start, begun = Reply.start, []

    def interrupted(reply: Reply) -> None:
        start(reply)
        begun.append(reply)
        if len(begun) == 1:
            raise KeyboardInterrupt

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    lines = iter(["hello", "again"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, "/exit"))
    monkeypatch.setattr(Reply, "start", interrupted)
    monkeypatch.setattr("sys.stdin", Terminal())
    speaker = load_speaker(str(base_checkpoint))
    assert chat([speaker], max_new_tokens=4) == []
    assert capsys.readouterr().out.count("(interrupted)") == 1
    assert len(begun) == 2


def test_ctrl_c_ends_the_reply_and_the_chat_continues(
    base_checkpoint: Path, tmp_path: Path
) -> None:
    """The command on a terminal of its own."""
    folder = Path(shutil.copytree(base_checkpoint, tmp_path / "model"))
    # Replies do not end before all positions are used, and steps are slow enough to be
    # interrupted.
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": null, "pad_token_id": 0}'
    )
    code = (
        "import signal, time, fcsd.evaluation.chat.chat, fcsd.cli.main\n"
        # a job in the background ignores it
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "once = fcsd.evaluation.chat.chat.Reply._criterion\n"
        "def slow(*a, **k):\n"
        f"    open({str(tmp_path / 'a step')!r}, 'w').close()\n"
        "    time.sleep(0.2)\n"
        "    return once(*a, **k)\n"
        "fcsd.evaluation.chat.chat.Reply._criterion = slow\n"
        f"raise SystemExit(fcsd.cli.main.main(['chat', {str(folder)!r}]))\n"
    )
    terminal, other = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=other, stdout=other, stderr=other, cwd=ROOT, close_fds=True,
        env={**os.environ, "TERM": "dumb"}, start_new_session=True,
    )  # fmt: skip
    os.close(other)
    seen = ""

    def until(pattern: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        nonlocal seen
        end = time.monotonic() + 120
        while not re.search(pattern, seen):
            assert time.monotonic() < end, seen
            if select.select([terminal], [], [], 0.5)[0]:
                seen += os.read(terminal, 4096).decode("utf-8", "replace")
            else:
                meanwhile()

    def press_ctrl_c() -> None:
        child.send_signal(signal.SIGINT)

    try:
        until(r"/exit leaves\.\s+> ")
        os.write(terminal, b"hello\n")
        until(r"hello\r\n")
        # the reply continues for 100 steps of 0.2 s; its letters wait for a space
        end = time.monotonic() + 120
        while not (tmp_path / "a step").exists():
            assert child.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        press_ctrl_c()
        until(r"\(interrupted\)\s+> ")
        # between the prompt and the read, a signal waits for the next one
        until(r"\(/exit leaves\)\s+> ", meanwhile=press_ctrl_c)
        os.write(terminal, b"/exit\n")
        assert child.wait(120) == 0
        assert "Traceback" not in seen
    finally:
        child.kill()
        child.wait()
        os.close(terminal)


def test_ctrl_c_without_a_terminal_ends_the_command(
    base_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(reply: Reply) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Reply, "__iter__", press)
    with pytest.raises(KeyboardInterrupt):
        transcript(
            [load_speaker(str(base_checkpoint))],
            "hello",
            "never asked",
            max_new_tokens=2,
        )


def test_cells_are_those_of_a_terminal() -> None:
    # wide; a letter with a combining accent; woman + joiner + rocket, whose parts
    # terminals show
    texts = ("日本", "e\u0301", "\U0001f469\u200d\U0001f680", "a\ufe0f")
    assert list(map(cells, texts)) == [4, 1, 4, 1]
    assert ending("/a/long/path", 8) == "…ng/path" and ending("short", 8) == "short"


def test_a_model_cannot_move_the_cursor() -> None:
    assert printable("a\x1b[2Jb\x07\r\n\tc\u202ed") == "a[2Jb\n\tcd"


@pytest.mark.parametrize(
    ("text", "width", "rows"),
    [
        ("one two three", 8, ["one two", "three"]),
        ("one two", 3, ["one", "two"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("a\n\nb", 4, ["a", "", "b"]),
        ("日本語", 4, ["日本", "語"]),
        (" x", 1, [" ", "x"]),
    ],
)
def test_rows_break_at_spaces_and_count_wide_characters_twice(
    text: str, width: int, rows: list[str]
) -> None:
    wrapped = []
    while text:
        row, text = first_row(text, width)
        wrapped.append(row)
    assert wrapped == rows


def test_a_row_is_shown_as_soon_as_both_columns_have_it() -> None:
    asked = []

    def column(name: str, *pieces: str):  # type: ignore[no-untyped-def]
        for piece in pieces:
            asked.append(name)
            yield piece

    rows = side_by_side(
        [column("a", "one two three ", "four five"), column("b", "x\n", "y\n", "z")], 10
    )
    assert next(rows) == "one two    │ x" and asked == ["a", "b"]
    assert list(rows) == ["three four │ y", "five       │ z"]


HARMONY = (
    "<|channel|>analysis<|message|>User"
    " greets.<|end|><|start|>assistant<|channel|>final<|message|>Hello!"
)
FAMILIES = {  # the marker in the template, special tokens, what the model writes
    "gptoss": ("<|channel|>", ("<|channel|>", "<|message|>", "<|start|>", "<|end|>"), HARMONY),
    "mistral": ("[THINK]", ("[THINK]", "[/THINK]"), "[THINK]User greets.[/THINK]Hello!"),
    "seed": ("</seed:think>", (), "<seed:think>User greets.</seed:think>Hello!"),
    "qwen3": ("</think>", (), "<think>\nUser greets.\n</think>\n\nHello!"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_thoughts_are_neither_shown_nor_kept(
    base_checkpoint: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, special, text = FAMILIES[kind]
    speaker = load_speaker(str(base_checkpoint))
    speaker.tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    speaker.tokenizer.chat_template += f"{{# {marker} #}}"
    ids = speaker.tokenizer(text, add_special_tokens=False)["input_ids"]

    def generate(
        input_ids: torch.Tensor, streamer: object, max_new_tokens: int, **_: object
    ) -> torch.Tensor:
        streamer.put(input_ids)  # type: ignore[attr-defined]
        for token in ids[:max_new_tokens]:
            streamer.put(torch.tensor([token]))  # type: ignore[attr-defined]
        streamer.end()  # type: ignore[attr-defined]
        return torch.cat([input_ids, torch.tensor([ids[:max_new_tokens]])], dim=1)

    monkeypatch.setattr(speaker.model, "generate", generate)
    assert (
        transcript([speaker], "hello", max_new_tokens=len(ids) + 1)
        == "> hello\nHello!\n"
    )
    assert speaker.messages[-1] == {"role": "assistant", "content": "Hello!"}
    begun = len(
        speaker.tokenizer(text[: text.index("greets")], add_special_tokens=False)[
            "input_ids"
        ]
    )
    note = (
        f"no answer, because the thoughts did not end: cut after {begun} tokens;"
        " --max-new-tokens allows more"
    )
    assert (
        transcript([speaker], "hello", max_new_tokens=begun) == f"> hello\n\n({note})\n"
    )


def test_a_model_whose_config_asks_for_mtp_replies_token_by_token(
    base_checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(base_checkpoint, tmp_path / "model"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    change_json(folder / "config.json", {"use_mtp": True})
    speaker = load_speaker(str(folder))
    said([speaker], "hello", max_new_tokens=6)
    expected = by_hand(base_checkpoint, [{"role": "user", "content": "hello"}], 6)
    assert speaker.messages[-1]["content"] == expected
