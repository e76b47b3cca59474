"""Thoughts before answers, in memory and through a server: what ends them, what counts,
and what tables say.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fcsd.evaluation.config import EvaluationConfig, ServerConfig, SuiteConfig
from fcsd.evaluation.results import read_result
from fcsd.evaluation.scores import compare
from fcsd.evaluation.stage import PlannedEvaluation, run_evaluation
from fcsd.evaluation.suites import load_suite
from fcsd.model.config import ModelConfig
from fcsd.model.load import find_model
from fcsd.parallel.launch import join_launch
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.report.comparison import settings_line
from fcsd.report.table import models_table, narrow_table, paired_table, score_table
from tests.evaluation.test_runner import write_rows
from tests.evaluation.vllm_protocol import Engine, serving
from tests.reference.tiny import tiny_model
from tests.support import evaluate, few

LIMIT = 150
TASK = {
    "task": "sums",
    "dataset_path": "o/sums",
    "output_type": "generate_until",
    "test_split": "test",
    "doc_to_text": "question",
    "doc_to_target": "answer",
    "generation_kwargs": {"until": ["\n\n", "Question:"], "do_sample": False, "max_gen_toks": LIMIT},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
THINK = "<think> </think>"
# in the template, what opens the thoughts and ends them, and the special tokens
MARKERS = {
    "think": (THINK, "<think>", "</think>", ()),
    "opened by the prompt": (THINK + "{% if add_generation_prompt %}<think>\n{% endif %}", "", "</think>", ()),
    "seed": ("{# </seed:think> #}{% if thinking_budget == 0 %}{% endif %}", "<seed:think>", "</seed:think>", ()),
    "mistral": ("[/THINK]", "[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    "gptoss": (
        "<|channel|>", "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>",
        ("<|channel|>", "<|message|>", "<|start|>", "<|end|>"),
    ),
}  # fmt: skip
THOUGHT = "Hm.\n\nQuestion: two? def f(x):\n```python\nassert False\n```\nprint(9)\n\n"


def replies(begin: str, end: str) -> dict[str, str]:
    """Return the reply to a question: a right answer with stop strings in the thoughts,
    endless thoughts, or an endless answer.
    """
    return {
        "right": f"{begin}{THOUGHT}{end}\n\n7\n\nQuestion: more",
        "endless": f"{begin}7 " * 90,
        "long": f"{begin}{THOUGHT[:5]}{end}7" + " is it" * 90,
    }


def tokenizer_of(kind: str) -> Any:
    marks, _, _, special = MARKERS[kind]
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    # A comment in a template is not written.
    shown = marks if "{%" in marks else f"{{# {marks} #}}"
    tokenizer.chat_template = TEMPLATE + (shown.replace(THINK, f"{{# {THINK} #}}"))
    return tokenizer


def script(tokenizer: Any, kind: str, prompt: list[int], new: int) -> list[int]:
    """The tokens that the model would write, with the end of the sequence where there
    is room for it.
    """
    text = tokenizer.decode(prompt)
    said = replies(*MARKERS[kind][1:3])
    reply = next((reply for name, reply in said.items() if name in text), "a probe")
    ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id][:new]


def scripted(tokenizer: Any, kind: str) -> Any:
    """Make a model that writes what it is told, and obeys the stopping criteria."""
    model = tiny_model(
        "qwen3_moe",
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        num_hidden_layers=1,
    )

    def generate(input_ids: Any, stopping_criteria: Any = None, **options: Any) -> Any:
        width = input_ids.shape[1]
        new = (
            options["max_length"] - width
            if "max_length" in options
            else options["generation_config"].max_new_tokens
        )
        made = input_ids
        ends = getattr(options.get("generation_config"), "eos_token_id", None) or []
        for token in script(tokenizer, kind, input_ids[0].tolist(), new):
            made = torch.cat([made, torch.tensor([[token]])], dim=1)
            if token in ends:
                break
            if stopping_criteria and bool(
                torch.as_tensor(stopping_criteria(made, None)).all()
            ):
                break
        return made

    model.generate = generate
    return model


class Scripted(Engine):
    """The same behind a server."""

    kind = "think"

    def _generate(
        self, prompt: list[int], new: int, body: dict[str, Any]
    ) -> tuple[list[int], str, Any]:
        made: list[int] = []
        for token in script(self.tokenizer, self.kind, prompt, new):
            made.append(token)
            if token in set(body.get("stop_token_ids") or ()):
                return made, "stop", token
            if (stop := self._stop_in(made, body)) is not None:
                return made, "stop", stop
        return made, "length", None


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("thoughts")
    (root / "mine").mkdir()
    (root / "mine/sums.yaml").write_text(yaml.safe_dump(TASK))
    rows = [
        {"question": f"{name}: 3 + 4?", "answer": "7"}
        for name in ("right", "endless", "long")
    ]
    write_rows(root / "data/o/sums", rows, "test")
    return root


def sums(place: Path, **changes: Any) -> SuiteConfig:
    row = {
        "task": "sums", "kind": "generation", "metric": "exact_match,none", "dataset": "o/sums",
        "lm_eval_include": "mine", "chat_template": True, "thinking": True,
    }  # fmt: skip
    (place / "suite.yaml").write_text(
        yaml.safe_dump({"name": "mine", "tasks": [row | changes]})
    )
    return load_suite(place / "suite.yaml")


def in_memory(
    place: Path, kind: str, **changes: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    tokenizer = tokenizer_of(kind)
    plan: dict[str, Any] = {"data_root": str(place / "data"), "batch_size": 1}
    result, samples = evaluate(
        scripted(tokenizer, kind),
        tokenizer,
        sums(place, **changes),
        progress=False,
        **plan,
    )
    return result, samples["sums"]


@pytest.mark.parametrize("kind", MARKERS)
def test_stop_strings_end_the_answer_and_not_the_thoughts(
    place: Path, kind: str
) -> None:
    result, samples = in_memory(place, kind)
    right, endless, long = (sample["completion"] for sample in samples)
    assert right.strip() == "7" and samples[0]["score"] == 1
    assert endless == "" and samples[1]["score"] == 0
    assert long.startswith("7 is it")
    assert result["tasks"]["sums"]["answers_at_limit"] == 2


def by_server(
    place: Path, folder: Path, kind: str, ids: bool, **changes: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    tokenizer = tokenizer_of(kind)
    model = tiny_model(
        "qwen3_moe",
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        num_hidden_layers=1,
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    engine = Scripted(model, tokenizer)
    engine.kind, engine.token_ids = kind, ids
    with serving(engine) as url:
        config = EvaluationConfig(
            data_root=str(place / "data"), server=ServerConfig(url=url, concurrency=1)
        )
        asked = PlannedEvaluation(
            "model",
            find_model(ModelConfig(path=str(folder / "model"))),
            suite=sums(place, **changes),
            config=config,
            server_check=False,
        )
        run_evaluation(asked, folder / "out", join_launch())
    result, samples = read_result(folder / "out")
    return result, samples["sums"]


@pytest.mark.parametrize("ids", few([True, False], 1))
@pytest.mark.parametrize("kind", MARKERS)
def test_a_server_is_asked_for_thoughts_to_their_end_and_gives_the_same(
    place: Path, tmp_path: Path, kind: str, ids: bool
) -> None:
    result, samples = by_server(place, tmp_path, kind, ids)
    _, expected = in_memory(place, kind)
    assert [each["completion"] for each in samples] == [
        each["completion"] for each in expected
    ]
    assert result["tasks"]["sums"]["answers_at_limit"] == 2


@pytest.mark.parametrize("kind", few(["seed", "none"], 1))
def test_thoughts_that_nobody_asked_for_are_removed_and_counted(
    place: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose thinking is switched off, and one whose template has no word of
    thoughts; in memory and through a server with and without token ids.
    """
    monkeypatch.setitem(MARKERS, "none", ("", "<think>", "</think>", ()))
    results = [in_memory(place, kind, thinking=False)]
    for ids in (True, False):
        results.append(by_server(place, tmp_path / f"{ids}", kind, ids, thinking=False))
    for result, samples in results:
        right, endless, long = (sample["completion"] for sample in samples)
        assert right.strip() == "7" and samples[0]["score"] == 1
        assert endless == "" and long.startswith("7 is it")
        assert result["tasks"]["sums"]["answers_with_thoughts"] == 3
        assert result["tasks"]["sums"]["answers_at_limit"] == 2
        said = "3 of 3 answers have thoughts, though thinking is off"
        assert f"sums: {said}" in score_table(result)
        assert "3 of 3 answers with unasked thoughts" in settings_line(result)
    asked, _ = in_memory(place, kind, thinking=True)
    assert asked["tasks"]["sums"]["answers_with_thoughts"] == 0


@pytest.mark.parametrize("end", ["\n</think>\n\n", "</think>\n\n", "</think>"])
def test_thoughts_after_an_empty_thought_in_the_prompt_are_removed_and_counted(
    place: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    opening = "{% if add_generation_prompt %}<think>\n\n</think>\n\n{% endif %}"
    monkeypatch.setitem(MARKERS, "empty", (opening, "", end, ()))
    right = "" if end == "</think>" else "7"
    # The stop string in them may cut thoughts that nothing opens.
    said = {"right": f"So, 3 + 4.{end}{right}", "endless": "7", "long": "7"}
    monkeypatch.setattr(f"{__name__}.replies", lambda *_: said)
    result, samples = in_memory(place, "empty", thinking=False)
    assert [sample["completion"].strip() for sample in samples] == [right, "7", "7"]
    assert result["tasks"]["sums"]["answers_with_thoughts"] == 1


def test_an_answer_that_quotes_a_mark_of_thoughts_has_none(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quoted = "7, of which `</seed:think>` and <seed:think> are no part"
    listing = "as in\n```\n<seed:think>x</seed:think>\n```"
    said = {"right": f"{quoted}\n\nQuestion: more", "endless": listing, "long": "y"}
    monkeypatch.setattr(f"{__name__}.replies", lambda *_: said)
    result, samples = in_memory(place, "seed", thinking=False)
    assert [sample["completion"] for sample in samples] == [quoted, listing, "y"]
    assert result["tasks"]["sums"]["answers_with_thoughts"] == 0


CHOICE = {
    "task": "letters", "dataset_path": "o/letters", "output_type": "multiple_choice", "test_split": "test",
    "fewshot_split": "test", "doc_to_text": "question", "doc_to_choice": ["A", "B"], "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}  # fmt: skip
GENERATES = "{% if add_generation_prompt %}assistant:GENERATES{% endif %}"
TURNS = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
HARMONY = "<|channel|>final<|message|>"
CLOSED = {
    # what the template writes before an answer, and what is added to it
    "harmony": ("", "{# <|channel|>analysis<|message|> #}", HARMONY),
    "opened": ("<think>\n", "", "\n</think>\n\n"),
    "opened on the line": ("<think>", "", "\n\n</think>\n\n"),
    "no switch": ("", "{# <think> and </think> #}", "<think>\n\n</think>\n\n"),
    "as the template writes it": (
        "", "{% if never %}{{ '<think></think>\\n' }}{% endif %}", "<think></think>\n",
    ),
    "mistral": ("", "{# [THINK] [/THINK] #}", "[THINK][/THINK]"),
    "a wrapper": ("", "{# <think> <answer> #}", "<think>\n\n</think>\n\n<answer>\n"),
    "a switch": ("{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}", "", ""),
    "no thoughts": ("", "", ""),
    "an empty thought without a switch": ("<think>\n\n</think>\n\n", "", ""),
    "an empty thought and a wrapper": ("<think></think>\n<answer>\n", "", ""),
    "the head of a harmony answer": (HARMONY, "{# <|channel|>analysis<|message|> #}", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("shots", few([0, 1], 1))
def test_likelihoods_are_those_of_an_answer_after_closed_thoughts(
    tmp_path: Path, name: str, shots: int
) -> None:
    """The prompts are written by hand, and so is the likelihood."""
    opening, comment, added = CLOSED[name]
    rows = [{"question": f"{n}?", "answer": n % 2} for n in range(3)]
    write_rows(tmp_path / "data/o/letters", rows, "test")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letters.yaml").write_text(yaml.safe_dump(CHOICE))
    row = {
        "task": "letters", "kind": "likelihood", "metric": "acc,none", "dataset": "o/letters",
        "lm_eval_include": "mine", "chat_template": True, "num_fewshot": shots,
    }  # fmt: skip
    (tmp_path / "suite.yaml").write_text(
        yaml.safe_dump({"name": "mine", "tasks": [row]})
    )
    tokenizer = tiny_tokenizer()
    special = ["[THINK]", "[/THINK]"] if name == "mistral" else []
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = TURNS + comment + GENERATES.replace("GENERATES", opening)
    model = tiny_model(
        "qwen3_moe", vocab_size=len(tokenizer), max_position_embeddings=512
    )
    result, samples = evaluate(
        model, tokenizer, load_suite(tmp_path / "suite.yaml"), progress=False,
        data_root=str(tmp_path / "data"), batch_size=2,
    )  # fmt: skip
    shown = "<think></think>" if name == "a switch" else opening
    for sample in samples["letters"]:
        prompt = sample["prompt"]
        assert prompt.endswith(f"user:{sample['doc_id']}?\nassistant:{shown}{added}")
        # an example has no thoughts to close
        assert prompt.count("assistant:") == shots + 1
        assert not added or prompt.count(added) == 1
        for letter, found in zip("AB", sample["loglikelihoods"], strict=True):
            whole = tokenizer(prompt + letter)["input_ids"]
            begin = len(tokenizer(prompt.rstrip())["input_ids"])
            with torch.no_grad():
                logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            expected = sum(
                float(logprobs[place - 1, whole[place]])
                for place in range(begin, len(whole))
            )
            assert found == pytest.approx(expected, abs=1e-4)
    row = result["tasks"]["letters"]
    assert row.get("thoughts_closed_by", "") == added
    told = f"letters: the model thinks unasked; fcsd added {added!r} to its prompts"
    assert (told in score_table(result)) == bool(added)


def test_a_family_that_cannot_answer_without_thoughts_is_read_alike_when_none_are_asked_for(
    place: Path,
) -> None:
    # The last two may think unasked: their templates know thoughts and no switch.
    for kind in ("gptoss", "opened by the prompt", "think", "mistral"):
        _, samples = in_memory(place, kind, thinking=False)
        assert samples[0]["completion"].strip() == "7"
    _, samples = in_memory(place, "gptoss", thinking=None, chat_template=False)
    # a plain prompt has no turns
    assert samples[0]["completion"].startswith("analysis")


@pytest.mark.parametrize("kind", few(MARKERS, 2))
def test_code_tasks_cut_thoughts_by_the_same_markers_and_count_the_same(
    tmp_path: Path, kind: str
) -> None:
    code = [
        {"task_id": n, "prompt": f"{name}: add", "code": "f = 1", "test_imports": [], "test_list": [],
         "test": "assert True"}
        for n, name in enumerate(("right", "endless", "long"))
    ]  # fmt: skip
    write_rows(tmp_path / "data/o/code", code, "test")
    row = {
        "task": "code", "kind": "code", "dataset": "o/code", "max_new_tokens": LIMIT, "chat_template": True,
        "thinking": True, "stop": ["\n\nQuestion"],
    }  # fmt: skip
    tokenizer = tokenizer_of(kind)
    suite = SuiteConfig.model_validate({"name": "mine", "tasks": [row]})
    plan: dict[str, Any] = {
        "data_root": str(tmp_path / "data"),
        "batch_size": 1,
        "allow_weak_sandbox": True,
    }
    result, samples = evaluate(
        scripted(tokenizer, kind), tokenizer, suite, progress=False, **plan
    )
    right, endless, long = (sample["completion"] for sample in samples["code"])
    assert right == "7" and endless == "" and long.startswith("7 is it")
    assert result["tasks"]["code"]["answers_at_limit"] == 2


def test_a_special_token_among_the_stop_strings_ends_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory and through a server, of which one returns token ids and one does not."""
    monkeypatch.setitem(MARKERS, "plain", ("", "", "", ("<|eot|>",)))
    reply = "def f(): return 1<|eot|>\nf = 2\n" + "f = 3\n" * LIMIT
    monkeypatch.setattr(f"{__name__}.replies", lambda *_: {"right": reply})
    code = {"task_id": 1, "prompt": "right: add", "code": "def f(): return 1", "test_imports": [], "test_list": [],
            "test": "assert f() == 1"}  # fmt: skip
    write_rows(tmp_path / "data/o/code", [code], "test")
    row = {
        "task": "code", "kind": "code", "dataset": "o/code", "max_new_tokens": LIMIT, "chat_template": True,
        "stop": ["<|eot|>"],
    }  # fmt: skip
    suite = SuiteConfig.model_validate({"name": "mine", "tasks": [row]})
    tokenizer = tokenizer_of("plain")
    model = scripted(tokenizer, "plain")
    plan: dict[str, Any] = {
        "data_root": str(tmp_path / "data"),
        "allow_weak_sandbox": True,
    }
    results = [evaluate(model, tokenizer, suite, progress=False, batch_size=1, **plan)]
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for ids in (True, False):
        engine = Scripted(model, tokenizer)
        engine.kind, engine.token_ids = "plain", ids
        with serving(engine) as url:
            asked = PlannedEvaluation(
                "model",
                find_model(ModelConfig(path=str(tmp_path / "model"))),
                suite=suite,
                config=EvaluationConfig(server=ServerConfig(url=url), **plan),
                server_check=False,
            )
            run_evaluation(asked, tmp_path / f"ids {ids}", join_launch())
        results.append(read_result(tmp_path / f"ids {ids}"))
    for result, samples in results:
        (sample,) = samples["code"]
        assert (sample["completion"], sample["outcome"]) == (
            "def f(): return 1",
            "passed",
        )
        assert result["tasks"]["code"]["answers_at_limit"] == 0


def test_every_table_says_how_many_answers_hit_the_token_limit(place: Path) -> None:
    result, samples = in_memory(place, "think")
    other, more = in_memory(place, "think", max_new_tokens=LIMIT)
    assert other["tasks"]["sums"]["answers_at_limit"] == 2
    compared = compare(
        {"result": result, "samples": {"sums": samples}},
        {"result": other, "samples": {"sums": more}},
    )
    said = "2 of 3 answers hit the token limit"
    assert f"sums: {said}" in score_table(result)
    for table in (paired_table(compared), narrow_table(compared)):
        assert f"sums, original: {said}" in table and f"sums, model: {said}" in table
    models = {"original": {"layers": "0", "training": "", "result": result}}
    assert f"original, sums: {said}" in models_table(models)
    assert "2 of 3 answers at the token limit" in settings_line(result)
    none = json.loads(json.dumps(result))
    none["tasks"]["sums"]["answers_at_limit"] = 0
    assert "limit (" not in score_table(none)
