"""Training text that the original writes once: its tokens against a loop by hand, and
what is made again, shared, continued and refused.
"""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fcsd.cli.main import main
from fcsd.data.chat import tokenize_examples
from fcsd.data.columns import column_meanings
from fcsd.data.examples import example_texts
from fcsd.evaluation import server as client
from fcsd.pipeline import written as module
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.evaluation.vllm_protocol import Engine, serving
from tests.parallel.test_engines import launch
from tests.support import Bench, assert_killed, few, write_rows

GREEDY = {"max_new_tokens": 6, "temperature": 0, "batch_size": 4}


def source(bench: Bench, **changes: Any) -> dict[str, Any]:
    return {"path": str(bench.rows), "max_examples": 10, "written": GREEDY} | changes


def recipe(bench: Bench, name: str, *sources: dict[str, Any], **changes: Any) -> Path:
    data = {"train": list(sources), "max_length": 32}
    return bench.recipe(name, data=data, **changes)


def texts(bench: Bench, name: str) -> list[dict[str, Any]]:
    (file,) = (bench.folder / name / "written").glob("*/text.jsonl")
    return [json.loads(line) for line in file.read_text().split("\n") if line]


def loaded(bench: Bench) -> tuple[Any, Any]:
    """Return the original as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(bench.base)
    return model.eval(), AutoTokenizer.from_pretrained(bench.base)


@torch.no_grad()
def continued(model: Any, prompt: list[int], ends: set[int], limit: int) -> list[int]:
    """Return the likeliest continuation, token by token, without a cache."""
    ids = list(prompt)
    while len(ids) - len(prompt) < limit:
        logits = model(torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] in ends:
            break
    return ids


def test_the_original_answers_the_prompts_of_a_data_set_through_its_template(
    bench: Bench,
) -> None:
    assert main(["run", str(recipe(bench, "r", source(bench))), "--only", "write"]) == 0
    model, tokenizer = loaded(bench)
    conversations = [json.loads(line) for line in bench.rows.read_text().splitlines()]
    rows = texts(bench, "r")
    assert len(rows) == 10
    for row, conversation in zip(rows, conversations[:10], strict=True):
        prompt = tokenizer.apply_chat_template(
            conversation["messages"][:-1], add_generation_prompt=True
        )["input_ids"]
        ends = {tokenizer.eos_token_id}
        assert row["input_ids"] == continued(model, prompt, ends, 6)
        own = len(row["input_ids"]) - len(prompt)
        assert row["loss_mask"] == [0] * len(prompt) + [1] * own
        assert row["ended"] == (row["input_ids"][-1] in ends)
        assert row["text"] == tokenizer.decode(row["input_ids"])


def test_documents_are_continued_behind_their_beginning(
    bench: Bench, tmp_path: Path
) -> None:
    documents = [
        {"text": f"{n}\u2028 and {n + 1} make {2 * n + 1}, one more"} for n in range(6)
    ]
    write_rows(tmp_path / "documents.jsonl", [{"text": "1"}, *documents])
    given = {"path": str(tmp_path / "documents.jsonl"), "columns": {"text": "text"}}
    written = GREEDY | {"prompt_tokens": 4}
    path = recipe(bench, "r", source(bench, **given, written=written))
    assert main(["run", str(path), "--only", "write"]) == 0
    model, tokenizer = loaded(bench)
    rows = texts(bench, "r")
    assert len(rows) == 6, "one document is too short"
    for row, document in zip(rows, documents, strict=True):
        prompt = tokenizer(document["text"])["input_ids"][:4]
        assert row["input_ids"] == continued(model, prompt, {tokenizer.eos_token_id}, 6)


def test_rows_that_make_no_prompt_are_left_out_where_the_recipe_says_so(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "hello"}]
    answer = [{"role": "assistant", "content": "yes"}]
    half = [{"role": "user", "content": "half an emoji \ud83d"}]
    rows = [{"prompt": turns, "completion": answer}, {"prompt": half, "completion": answer}]  # fmt: skip
    write_rows(tmp_path / "rows.jsonl", rows)
    given = source(bench, path=str(tmp_path / "rows.jsonl"), columns=None)
    path = recipe(bench, "r", given)
    words = ["run", str(path), "--only", "write"]
    assert main(words) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "rows.jsonl, row 2: a text holds half a character" in error
    assert "set data.on_bad_row: skip" in error
    assert main([*words, "--set", "data.on_bad_row=skip"]) == 0
    assert "1 of 2 examples left out" in capsys.readouterr().err
    (row,) = texts(bench, "r")
    assert row["text"].startswith("<bos><user> hello<assistant>")


def test_trainings_read_what_was_written_once(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"path": str(bench.rows), "weight": 0.5}
    path = recipe(
        bench,
        "r",
        source(bench, weight=0.5),
        given,
        variants={"sft": {"objective.name": "sft"}},
    )
    assert main(["distill", str(path)]) == 0
    assert main(["distill", str(path), "--variant", "sft"]) == 0
    output = capsys.readouterr().err
    assert output.count("texts by the original") == 1
    assert "write: finished before" in output
    # other settings are other text, beside the first
    other = ["--set", "data.train.0.written.max_new_tokens=3", "--only", "write"]
    assert main(["run", str(path), *other]) == 0
    same = ["--set", "data.train.0.written.batch_size=2", "--only", "write"]
    assert main(["run", str(path), *same]) == 0
    assert len([*(bench.folder / "r" / "written").iterdir()]) == 2


def test_the_text_of_a_variant_with_another_seed_is_written_with_the_others(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(bench, "seeds", source(bench), variants={"again": {"seed": 1}})
    assert main(["run", str(path), "--only", "write"]) == 0
    assert len([*(bench.folder / "seeds" / "written").iterdir()]) == 2
    capsys.readouterr()
    assert main(["distill", str(path), "--variant", "again"]) == 0
    assert "texts by the original" not in capsys.readouterr().err


def test_written_text_is_compared_with_test_items(bench: Bench, tmp_path: Path) -> None:
    """The prompt is a part of the text, so an item in it leaves the example out."""
    path = recipe(bench, "r", source(bench))
    assert main(["run", str(path), "--only", "write"]) == 0
    (file,) = (bench.folder / "r" / "written").glob("*/text.jsonl")
    example = json.loads(file.read_text().splitlines()[0])
    meanings = column_meanings(str(file), list(example), None)
    assert example_texts(example, meanings) == [example["text"]]
    (read,) = tokenize_examples([example], meanings, loaded(bench)[1])
    assert isinstance(read, dict) and list(read["input_ids"]) == example["input_ids"]
    assert [*map(int, read["loss_mask"])] == example["loss_mask"]


def sampled(bench: Bench) -> dict[str, Any]:
    return source(bench, written=GREEDY | {"temperature": 1.0})


def test_writing_that_was_killed_continues_with_the_same_text(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PART", 3)
    whole = recipe(bench, "whole", sampled(bench))
    assert main(["run", str(whole), "--only", "write"]) == 0
    path = recipe(bench, "killed", sampled(bench))

    def killed() -> int:
        lines = module._lines

        def die(tokenizer: Any, prompts: Any, texts: Any) -> str:
            if prompts[0].doc_id >= 6:
                os.kill(os.getpid(), signal.SIGKILL)
            return lines(tokenizer, prompts, texts)

        monkeypatch.setattr(module, "_lines", die)
        return main(["run", str(path), "--only", "write"])

    assert_killed(killed, tmp_path / "output")
    (parts,) = (bench.folder / "killed" / "written").glob("*/parts")
    first, second = sorted(parts.iterdir())
    # A crash of the machine may leave less than was written.
    first.write_text("".join(first.read_text().splitlines(keepends=True)[:2]))
    second.write_bytes(second.read_bytes()[:-9])
    assert main(["run", str(path), "--only", "write"]) == 0
    assert texts(bench, "killed") == texts(bench, "whole")
    assert not parts.exists()


@pytest.mark.parametrize("config", ["cpu_2", "cpu_2_fsdp2"])
def test_two_ranks_write_the_text_of_one_process(bench: Bench, config: str) -> None:
    two = recipe(bench, "two", sampled(bench))
    assert launch(config, ["run", str(two), "--only", "write"]) == [0]
    one = recipe(bench, "one", sampled(bench))
    assert main(["run", str(one), "--only", "write"]) == 0
    assert texts(bench, "one") == texts(bench, "two")


@pytest.mark.parametrize("gives_ids", few([True, False], 1))
def test_a_server_writes_what_the_model_in_memory_writes(
    bench: Bench, gives_ids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(client.API_KEY, raising=False)
    engine = Engine(*loaded(bench))
    engine.token_ids = gives_ids
    with serving(engine) as url:
        served = source(bench, written=GREEDY | {"server": url})
        path = recipe(bench, "served", served)
        assert main(["run", str(path), "--only", "write"]) == 0
    memory = recipe(bench, "memory", source(bench))
    assert main(["run", str(memory), "--only", "write"]) == 0
    keys = ("input_ids", "loss_mask", "ended") if gives_ids else ("text",)
    for one, other in zip(texts(bench, "served"), texts(bench, "memory"), strict=True):
        assert [one[key] for key in keys] == [other[key] for key in keys]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_examples": None}, "written: needs max_examples, the number of prompts"),
        ({"written": {"server": "http://name:secret@host:80"}}, "data.train.0.written.server"),
        ({"written": {"server": "localhost"}}, "http://localhost:8000 is needed"),
        ({"written": {"tokens": 3}}, "written.tokens: unknown key"),
        ({"written": GREEDY | {"max_new_tokens": 5000}}, "lower max_new_tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(
    bench: Bench,
    changes: dict[str, Any],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = recipe(bench, "r", source(bench, **changes))
    assert main(["run", str(path), "--only", "write"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert words in error and "secret" not in error


def test_conversations_need_a_chat_template(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(bench.base, tmp_path / "base")
    tiny_tokenizer(chat_template=False).save_pretrained(tmp_path / "base")
    (tmp_path / "base/chat_template.jinja").unlink(missing_ok=True)
    path = recipe(bench, "r", source(bench), model={"path": str(tmp_path / "base")})
    assert main(["run", str(path), "--only", "write"]) == 2
    assert "no chat template, needed for prompts" in capsys.readouterr().err


def test_a_recipe_without_written_text_has_no_such_stage(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(bench.recipe()), "--only", "write"]) == 2
    assert "no source of data.train has a `written` section" in capsys.readouterr().err
