"""Own text from the command line: compared with its original and with another model,
shown side by side, continued after a kill, and refused where something is missing.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import processors

from fcsd.cli.main import main
from fcsd.evaluation.config import OwnTextTaskConfig
from fcsd.evaluation.own_text import measure
from fcsd.evaluation.own_text.prompts import load_prompts
from fcsd.evaluation.own_text.text import equal_beginning, repeated_4grams
from fcsd.evaluation.results import read_result, write_result
from fcsd.evaluation.suites import load_suite, named_tasks
from fcsd.model.connectivity.load import load_model
from fcsd.model.connectivity.spec import TRAINED
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.reference.tiny import tiny_model
from tests.support import (
    command_words,
    edited_json,
    few,
    json_lines,
    user_error,
    write_rows,
)

ROWS = [
    {"task": "own_texts", "kind": "own_text", "dataset": "o/texts", "prompt_tokens": 6, "max_new_tokens": 18},
    {"task": "own_chats", "kind": "own_text", "dataset": "o/chats", "chat_template": True, "max_new_tokens": 10,
     "seed": 1},
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An original, two conversions of it, their suite, and all results."""
    root = tmp_path_factory.mktemp("own")
    model = tiny_model("qwen3_moe", vocab_size=512, num_hidden_layers=3)
    model.save_pretrained(root / "original")
    tiny_tokenizer().save_pretrained(root / "original")
    texts = [{"text": f"{n} and {n * n} is the number of them"} for n in range(5)]
    chats = [
        {"messages": [{"role": "user", "content": f"what is {n}?"}, {"role": "assistant", "content": f"it is {n}"}]}
        for n in range(5)
    ]  # fmt: skip
    for name, rows in (("texts", texts), ("chats", chats)):
        (root / "data/o" / name).mkdir(parents=True)
        (root / "data/o" / name / "train.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    (root / "suite.yaml").write_text(yaml.safe_dump({"name": "own", "tasks": ROWS}))
    for name, layers in (("all", "all"), ("last", "last:1")):
        words = ["convert", root / "original", root / name, "--layers", layers]
        assert main([str(word) for word in words]) == 0
    for name in ("original", "all", "last"):
        assert evaluate(root, name, root / "results" / name) == 0
    return root


def evaluate(place: Path, name: str, output: Path, *options: str | Path) -> int:
    words = [
        "evaluate", place / name, "--suite", place / "suite.yaml", "--output", output, "--data-root", place / "data",
        "--cache", place / "cache", *(options or ("--original", place / "original")),
    ]  # fmt: skip
    return main([str(word) for word in words])


def test_the_prompts_are_beginnings_of_documents_and_questions_through_the_template(
    place: Path,
) -> None:
    _, samples = read_result(place / "results/last")
    tokenizer = tiny_tokenizer()
    for number, sample in enumerate(samples["own_texts"]):
        text = f"{number} and {number * number} is the number of them"
        assert sample["prompt"] == tokenizer.decode(tokenizer(text)["input_ids"][:6])
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "what is 3?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert samples["own_chats"][3]["prompt"] == asked


def test_the_converted_models_diverge_by_as_much_as_is_rewired(place: Path) -> None:
    results = {
        name: read_result(place / "results" / name)[0]
        for name in ("original", "all", "last")
    }
    for task in ("own_texts", "own_chats"):
        rows = {name: result["tasks"][task] for name, result in results.items()}
        assert rows["original"]["value"] == 0 < rows["last"]["value"]
        assert rows["last"]["value"] < rows["all"]["value"]
        assert all(row["higher_is_better"] is False for row in rows.values())
    own = results["last"]["tasks"]["own_texts"]["metrics"]
    assert {"own_text_kl_16", "forward_kl_16"} <= own.keys()
    assert "own_text_kl_64" not in own  # longer than its texts
    # The original's own nats are those that its own evaluation found.
    of_original = results["original"]["tasks"]["own_texts"]["metrics"]["nats"]
    assert own["original_nats"] == of_original


def test_a_distance_from_the_original_is_told_and_not_tested(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(place / "results" / name) for name in ("original", "last")]
    assert main(["compare", *folders, "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "distance from the original" in printed
    assert "Lost beyond noise" not in printed
    page = json.loads((tmp_path / "out/comparison.json").read_text())
    row = page["comparisons"]["last"]["tasks"]["own_texts"]
    assert (row["verdict"], row["p_value"], row["original"]) == ("distance", None, 0)
    # A line begins with its sentence.
    assert "last, by what it writes: along its own samples it diverges" in printed
    assert re.search(
        rf"diverges from the original by {row['converted']:.3f} ± .* nats a token",
        printed,
    )
    figures = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert figures == {"own_texts.png", "own_chats.png"}
    # Unit, direction and decoding are told; rules for scores in per cent are not.
    assert "own_text_kl (nats, less is better)" in printed
    page_text = (tmp_path / "out/comparison.md").read_text()
    assert "Per cent" not in page_text and "McNemar" not in page_text
    assert "greedy, except own_texts at temperature 1, own_chats at" in page_text


def test_of_two_conversions_the_one_with_the_smaller_divergence_gains(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(place / "results" / name) for name in ("all", "last")]
    assert main(["compare", *folders, "--json"]) == 0
    (comparison,) = json.loads(capsys.readouterr().out).values()
    row = comparison["tasks"]["own_texts"]
    assert row["delta"] < 0 and (row["gained"], row["lost"]) == (5, 0)
    _, before = read_result(place / "results/all")
    _, after = read_result(place / "results/last")
    differences = [
        b["forward_kl"] - a["forward_kl"]
        for a, b in zip(before["own_texts"], after["own_texts"], strict=True)
    ]
    paired = row["metrics"]["forward_kl"]
    assert paired["delta"] == pytest.approx(sum(differences) / 5)
    assert comparison["mean"] is None
    assert main(["compare", *reversed(folders), "--json"]) == 0
    (comparison,) = json.loads(capsys.readouterr().out).values()
    row = comparison["tasks"]["own_texts"]
    assert row["delta"] > 0 and (row["gained"], row["lost"]) == (0, 5)


def test_under_a_capacity_the_original_is_another_model_without_one(
    place: Path, tmp_path: Path
) -> None:
    """The original's own texts, which the first evaluation keeps, are none of the
    second's.
    """
    capacity = ("--capacity-factor", "0.5", "--batch-size", "1")
    shared = ("--original", place / "original", "--cache", tmp_path / "cache")
    for name in ("last", "original"):
        assert evaluate(place, name, tmp_path / name, *shared, *capacity) == 0
    result, samples = read_result(tmp_path / "original")
    assert 0.2 < result["settings"]["dropped_share"] < 0.8
    assert result["tasks"]["own_texts"]["value"] > 0.01
    _, of_last = read_result(tmp_path / "last")
    _, whole = read_result(place / "results/original")
    assert samples["own_texts"] != whole["own_texts"]
    for sample, own in zip(of_last["own_texts"], whole["own_texts"], strict=True):
        # Of the same text, but for the rounding of other batch sizes.
        assert sample["original_nats"] == pytest.approx(own["nats"], rel=1e-5)


def test_of_chosen_tasks_no_other_is_shown(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, samples = read_result(place / "results/last")
    del result["tasks"]["own_chats"], samples["own_chats"]
    write_result(result, samples, tmp_path / "less")
    both = place / "results/original", tmp_path / "less"
    command = command_words("compare", *both, "--output", tmp_path / "out")
    assert main(command) == 2
    assert "with `fcsd compare --tasks own_texts`" in capsys.readouterr().err
    assert main([*command, "--tasks", "own_texts"]) == 0
    assert "own_chats" not in capsys.readouterr().out
    shown = (tmp_path / "out/comparison.md").read_text()
    assert "own_texts, first prompt" in shown and "| own_chats" not in shown
    assert [*(tmp_path / "out").glob("*.png")] == [tmp_path / "out/own_texts.png"]


def test_another_original_seed_or_length_is_not_compared(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "other"
    shutil.copytree(place / "results/last", folder)
    (folder / "manifest.json").unlink()
    result = json.loads((folder / "results.json").read_text())
    for change, words in (
        ({"original": "x"}, "were compared with different originals"),
        ({"seed": 3}, "seed is 0 against 3"),
        ({"max_new_tokens": 9}, "max_new_tokens is 18 against 9"),
    ):
        changed = json.loads(json.dumps(result))
        if "original" in change:
            changed["tasks"]["own_texts"] |= change
        else:
            changed["settings"]["suite"]["tasks"][0] |= change
        (folder / "results.json").write_text(json.dumps(changed))
        assert main(["compare", str(place / "results/all"), str(folder)]) == 2
        assert f"own_texts: {words}" in " ".join(
            capsys.readouterr().err.replace("the two ", "").split()
        )


def test_an_evaluation_that_was_killed_continues_to_the_same_samples(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends in the second task, and in the middle of the first one."""
    whole = {
        task: (place / "results/last" / f"samples_{task}.jsonl").read_bytes()
        for task in ("own_texts", "own_chats")
    }
    options = ("--original", place / "original")
    calls = 0

    class Killed(BaseException):
        pass

    written = measure.write

    def dies(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (2, 9):
            raise Killed
        return written(*arguments)

    monkeypatch.setattr(measure, "write", dies)
    words = [
        "evaluate", place / "last", "--suite", place / "suite.yaml", "--output", tmp_path / "out",
        "--data-root", place / "data", *options,
    ]  # fmt: skip
    for _ in range(2):
        with pytest.raises(Killed):
            main([str(word) for word in words])
    assert main([str(word) for word in words]) == 0
    for task, content in whole.items():
        assert (tmp_path / "out" / f"samples_{task}.jsonl").read_bytes() == content


def test_an_original_that_is_asked_through_another_template_is_asked_again(
    place: Path, tmp_path: Path
) -> None:
    """Its kept samples, and those that it makes, are not those of its own template."""
    shutil.copytree(place / "last", place / "other")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}?{% endfor %}"
    tokenizer.save_pretrained(place / "other")
    first = ("--original", place / "original", "--cache", tmp_path / "cache")
    for name, options in (("other", first), ("original", first), ("other", ())):
        output = tmp_path / f"{name}{len(options)}"
        assert evaluate(place, name, output, *options) == 0
    alone, after = (read_result(tmp_path / name)[1] for name in ("other4", "other0"))
    assert alone == after
    assert alone["own_chats"][1]["prompt"] == "what is 1??"
    own, expected = (
        read_result(folder)[1]
        for folder in (tmp_path / "original4", place / "results/original")
    )
    assert own == expected


def test_what_is_missing_is_one_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*rows: dict[str, Any], options: Any = ()) -> str:
        (tmp_path / "s.yaml").write_text(yaml.safe_dump({"name": "s", "tasks": rows}))
        words = [
            "evaluate", place / "last", "--suite", tmp_path / "s.yaml", "--output", tmp_path / "never",
            "--data-root", place / "data", *options,
        ]  # fmt: skip
        assert main([str(word) for word in words]) == 2
        return " ".join(capsys.readouterr().err.split())

    named = ("--original", place / "original")
    texts, chats = ROWS
    assert "own_texts: compares what the model writes with its original" in error(texts)
    assert "name that with --original MODEL" in error(texts)
    plain = {key: value for key, value in chats.items() if key != "chat_template"}
    assert "row 1: is a conversation, which needs chat_template: true" in error(
        plain, options=named
    )
    templated = texts | {"chat_template": True}
    assert "has documents, which a chat template does not take" in error(
        templated, options=named
    )
    assert "no document of more than 500 tokens" in error(
        texts | {"prompt_tokens": 500}, options=named
    )
    long = error(texts | {"max_new_tokens": 100_000}, options=named)
    assert "do not fit the model's" in long and "lower max_new_tokens" in long
    rows = [{"text": "short, but long enough"}, {"text": "x" * 1000}]
    write_rows(tmp_path / "long.jsonl", rows)
    alone = {"dataset": str(tmp_path / "long.jsonl"), "prompt_tokens": 900}
    longer = error(texts | alone, options=named)
    assert "long.jsonl, row 2: a prompt of 900 tokens" in longer
    assert "take that row out" in longer and "lower max_new" not in longer
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": "hello"}])
    alone = {"dataset": str(tmp_path / "prompts.jsonl")}
    nameless = error(texts | alone, options=named)
    assert "or of prompts without answers {prompt: NAME}" in nameless
    assert "{path:" not in nameless
    assert "no such folder" in error(texts, options=("--original", tmp_path / "none"))
    converted = error(texts, options=("--original", place / "all"))
    assert "all: is named as the original, but is converted itself" in converted
    shutil.copytree(place / "original", tmp_path / "foreign")
    tiny_tokenizer(300).save_pretrained(tmp_path / "foreign")
    with edited_json(tmp_path / "foreign/tokenizer.json") as tokenizer:
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    said = error(texts, options=("--original", tmp_path / "foreign"))
    assert "the original: its tokenizer is not the model's: 2 tokens" in said
    assert "name the model that this one was converted from" in said


def test_an_original_that_no_task_needs_is_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a user who forgot the suite with own text would find out hours later."""
    command = command_words(
        "evaluate", place / "last", "--suite paper11 --original", place / "original"
    )
    assert main([*command, "--output", str(tmp_path / "out")]) == 2
    assert "--original: no task of suite paper11 is own text" in capsys.readouterr().err


def test_a_model_that_is_not_converted_is_its_own_original(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert evaluate(place, "original", out, "--limit", "2") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "original: is not converted, and no original is named" in said
    rows = read_result(out)[0]["tasks"]
    assert {row["value"] for row in rows.values()} == {0.0}
    # Weights that fcsd has trained are no original.
    shutil.copytree(place / "original", place / "trained")
    with edited_json(place / "trained/config.json") as config:
        config[TRAINED] = {}
    assert evaluate(place, "trained", tmp_path / "never", "--limit", "2") == 2
    assert "name that with --original MODEL" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_base_model_is_told_what_to_give_in_place_of_a_chat_suite(
    place: Path, shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The suite of a base model continues real contexts of HellaSwag."""
    base = tmp_path / "base"
    shutil.copytree(place / "original", base)
    for file in base.glob("*token*"):
        file.unlink()
    (base / "chat_template.jinja").unlink(missing_ok=True)
    tiny_tokenizer(chat_template=False).save_pretrained(base)
    with edited_json(base / "config.json") as config:
        config["max_position_embeddings"] = 512

    def run(suite: str, *options: str) -> int:
        words = [
            "evaluate", base, "--suite", suite, "--data-root", shared_data / "hub", "--output", tmp_path / suite,
            *options,
        ]  # fmt: skip
        return main([str(word) for word in words])

    assert run("own_text", "--tasks", "own_text") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "for a base model give --suite own_text_base in place of own_text" in said
    assert run("own_text_base", "--limit", "2") == 0
    samples = read_result(tmp_path / "own_text_base")[1]["own_text"]
    assert samples[0]["prompt"] == "A man is sitting on a roof. he"


def own_prompts(folder: Path, example: dict[str, Any], **keys: Any) -> Any:
    """Return the prompts of a data set with this example and one more."""
    other = {"input_ids": list(b"abcdefgh")}
    if "input_ids" not in example:
        other = dict.fromkeys(example, "a text that is long enough")
    if "messages" in example:
        other = {"messages": [{"role": "user", "content": "hello"}]}
    write_rows(folder / "rows.jsonl", [other, example])
    row = OwnTextTaskConfig(
        task="own", kind="own_text", dataset=str(folder / "rows.jsonl"), prompt_tokens=4,
        chat_template="messages" in example, **keys,
    )  # fmt: skip
    return load_prompts(row, None, ending_tokenizer())


def test_prompts_without_answers_are_questions_or_beginnings(tmp_path: Path) -> None:
    question = "Why is the sky blue?"
    write_rows(tmp_path / "rows.jsonl", [{"key": 3, "question": question}])
    turns = [{"role": "user", "content": question}]
    through = tiny_tokenizer().apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    for chat_template, expected in ((True, through), (False, question)):
        row = OwnTextTaskConfig(
            task="own", kind="own_text", dataset=str(tmp_path / "rows.jsonl"),
            columns={"prompt": "question"}, chat_template=chat_template,
        )  # fmt: skip
        (prompt,) = load_prompts(row, None, tiny_tokenizer())
        assert prompt.text == expected


def ending_tokenizer() -> Any:
    """Return a tokenizer that puts a token before and one behind each text."""
    tokenizer = tiny_tokenizer()
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ({"input_ids": [9, -4, 9, 9, 9]}, "token id -4 at position 1"),
        ({"input_ids": [9, 4.5, 9, 9, 9]}, "a list of whole numbers is needed"),
        ({"input_ids": ["a"] * 9}, "a list of whole numbers is needed"),
        ({"text": "ab\ud83d cdefgh"}, "a text holds half a character"),
        ({"messages": [{"role": "user", "content": "ab\ud83d"}]}, "a text holds half a character"),
        ({"prompt": "ab\ud83d", "completion": "c"}, "a text holds half a character"),
        ({"messages": [{"role": "assistant", "content": "hello"}]}, "no message before the answer"),
    ],
)  # fmt: skip
def test_a_row_that_makes_no_prompt_is_named(
    example: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with user_error(rf"task own: .*rows.jsonl, row 2: .*{words}"):
        own_prompts(tmp_path, example)


@pytest.mark.parametrize(
    ("example", "tokens"),
    [
        ({"input_ids": []}, None),
        ({"text": ""}, None),
        ({"text": "abcd"}, [1, *"abc"]),
        # the prompt of a completion is not ended, and never empty
        ({"prompt": "ab", "completion": "c"}, [1, *"ab"]),
        ({"prompt": "", "completion": "c"}, [1]),
        ({"prompt": "ab<eos>", "completion": "c"}, [1, *"ab", 2, 2]),
    ],
)
def test_a_prompt_is_the_beginning_of_its_document_or_the_whole_of_what_is_given(
    example: dict[str, Any], tokens: list[Any] | None, tmp_path: Path
) -> None:
    found = own_prompts(tmp_path, example)[1:]
    alphabet = tiny_tokenizer()
    ids = [
        token if isinstance(token, int) else alphabet.convert_tokens_to_ids(token)
        for token in tokens or []
    ]
    assert [list(prompt.tokens) for prompt in found] == ([ids] if tokens else [])


TURNS = [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]


@pytest.mark.parametrize(("given", "asked"), [(4, 3), (3, 3), (2, 1), (1, 1)])
def test_a_conversation_is_asked_up_to_its_last_answer_or_with_its_last_question(
    given: int, asked: int, tmp_path: Path
) -> None:
    turns = [{"role": role, "content": text} for role, text in TURNS]
    prompt = own_prompts(tmp_path, {"messages": turns[:given]})[1]
    assert prompt.text == tiny_tokenizer().apply_chat_template(
        turns[:asked], tokenize=False, add_generation_prompt=True
    )


def test_the_suite_decides_what_own_text_can_be(tmp_path: Path) -> None:
    def load(**keys: Any) -> Any:
        row = {"task": "own", "kind": "own_text", "dataset": "x/y", **keys}
        path = tmp_path / "s.yaml"
        path.write_text(yaml.safe_dump({"name": "s", "tasks": [row]}))
        return load_suite(path).tasks[0]

    assert load().headline is False
    for key, value in (
        ("headline", True), ("metric", "acc,none"), ("num_fewshot", 2), ("stop", ["x"]), ("num_prompts", 0),
        ("columns", {"response": "q"}),
    ):  # fmt: skip
        with user_error(key):
            load(**{key: value})
    with user_error("limit: a row of own_text has num_prompts"):
        load(limit=2)
    with user_error("seed: .*less than"):
        load(seed=20261201123456)
    with user_error("floors: unknown key; allowed: chat_template"):  # no floor here
        load(floors=1)
    path = str(tmp_path / "s.yaml")
    load()
    assert named_tasks(path, ["own"]).tasks[0].headline is False


def test_figures_of_a_text_are_those_of_its_tokens() -> None:
    assert repeated_4grams([1, 2, 3]) == 0
    assert repeated_4grams([1, 2, 3, 4, 5]) == 0
    # 1234, 2341, 3412, 4123, 1234: one of five has occurred before
    assert repeated_4grams([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repeated_4grams([7] * 10) == pytest.approx(6 / 7)
    assert equal_beginning([1, 2, 3], [1, 2, 4]) == 2
    assert equal_beginning([1, 2], [1, 2, 4]) == 2
    assert equal_beginning([5], [1, 2, 4]) == 0


def test_a_result_of_own_text_whose_samples_lack_a_figure_is_damaged(
    place: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(place / "results/last", folder)
    (folder / "manifest.json").unlink()
    file = folder / "samples_own_texts.jsonl"
    lines = json_lines(file)
    for key in ("forward_kl", "by_length", "tokens", "greedy_longest"):
        damaged = [{k: v for k, v in line.items() if k != key} for line in lines]
        write_rows(file, damaged)
        with user_error("not a sample"):
            read_result(folder)


def test_a_loaded_conversion_writes_what_the_command_wrote(place: Path) -> None:
    """The greedy text, decoded by hand."""
    import torch

    model = load_model(place / "last")
    _, samples = read_result(place / "results/last")
    sample = samples["own_texts"][2]
    ids = tiny_tokenizer()("2 and 4 is the number of them")["input_ids"][:6]
    new: list[int] = []
    for _ in range(18):
        with torch.no_grad():
            logits = model(torch.tensor([ids + new])).logits[0, -1]
        new.append(int(logits.argmax()))
    assert new == sample["greedy_tokens"]


@pytest.mark.parametrize("thinking", few([True, False], 1))
def test_thoughts_that_the_template_opens_are_text_like_any_other(
    place: Path, tmp_path: Path, thinking: bool
) -> None:
    """They are sampled, shown and measured from their first token on: the divergence is
    that of all tokens behind the opening, by hand.
    """
    import torch

    opening = "{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}"
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}"
        "</think>{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + opening
        + "{% endif %}"
    )
    for name in ("original", "last"):
        shutil.copytree(place / name, tmp_path / name)
        (tmp_path / name / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained(tmp_path / name)
    row = ROWS[1] | {"thinking": thinking, "num_prompts": 2}
    suite = tmp_path / "suite.yaml"
    suite.write_text(yaml.safe_dump({"name": "thoughts", "tasks": [row]}))
    words = [
        "evaluate", tmp_path / "last", "--original", tmp_path / "original", "--suite", suite, "--data-root",
        place / "data", "--output", tmp_path / "out",
    ]  # fmt: skip
    assert main([str(word) for word in words]) == 0
    models = [load_model(tmp_path / name) for name in ("last", "original")]
    expected = "<think>\n" if thinking else "<think>\n\n</think>\n\n"
    for number, sample in enumerate(read_result(tmp_path / "out")[1]["own_chats"]):
        prompt = f"what is {number}?{expected}"
        assert sample["prompt"] == prompt
        tokens = sample["tokens"]
        assert len(tokens) == 10 or sample["ended"]
        assert sample["completion"] == tokenizer.decode(
            tokens, skip_special_tokens=True
        )
        asked = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            own, other = (
                model(torch.tensor([asked + tokens]))
                .logits[0, len(asked) - 1 : -1]
                .double()
                .log_softmax(-1)
                for model in models
            )
        divergence = (own.exp() * (own - other)).sum(-1).mean()
        assert sample["score"] == pytest.approx(float(divergence), rel=1e-3)
