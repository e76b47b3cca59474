"""An answer is a function of its prompt alone: not of the batch size, the order, the
ranks, the model's own generation settings, or whether a server gives it.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import GenerationConfig

from fcsd.evaluation.config import EvaluationConfig, ServerConfig, SuiteConfig
from fcsd.evaluation.results import read_result
from fcsd.evaluation.stage import PlannedEvaluation, run_evaluation
from fcsd.evaluation.suites import load_suite
from fcsd.model.config import ModelConfig
from fcsd.model.families import FAMILIES
from fcsd.model.load import find_model
from fcsd.parallel.launch import Ranks, join_launch
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training.generation import _KEPT, _UNTOLD, set_aside
from tests.evaluation.test_runner import CHOICE, write_rows
from tests.evaluation.vllm_protocol import Engine, serving
from tests.float64 import BOUND, in_float64
from tests.reference.ranks import run_ranks
from tests.reference.tiny import tiny_model
from tests.support import evaluate, few, user_error

LIMIT = 12
SPECIAL = "<unused7>"
QUESTIONS = [f"{'and ' * (number * 5 % 7)}{number} plus" for number in range(6)]
TASK = {
    "task": "t_until", "dataset_path": "o/questions", "output_type": "generate_until", "test_split": "test",
    "doc_to_text": "question", "doc_to_target": "answer",
    "generation_kwargs": {"do_sample": False, "max_gen_toks": LIMIT},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
GENERATION = {
    "task": "t_until", "kind": "generation", "metric": "exact_match,none", "dataset": "o/questions",
    "lm_eval_include": "mine",
}  # fmt: skip
CODE = {
    "task": "t_code", "kind": "code", "dataset": "o/code", "max_new_tokens": LIMIT, "timeout_s": 4.0,
}  # fmt: skip


@dataclasses.dataclass
class Case:
    """A model, a tokenizer of whose special tokens some stop an answer, and what the
    model answers to each prompt alone.
    """

    model: Any
    tokenizer: Any
    stop: list[str]
    place: Path

    def suite(self, *rows: dict[str, Any]) -> SuiteConfig:
        made = [{"stop": self.stop, **row} for row in rows]
        path = self.place / "suite.yaml"
        path.write_text(yaml.safe_dump({"name": "mine", "tasks": made}))
        return load_suite(path)

    def answers(self, *rows: dict[str, Any], **plan: Any) -> dict[str, dict[str, Any]]:
        """Return the completions of each task by their prompt."""
        return self.answers_of(self.suite(*rows), **plan)

    def answers_of(self, suite: SuiteConfig, **plan: Any) -> dict[str, dict[str, Any]]:
        """Return the same of a suite, of which nothing is written."""
        options = {"data_root": str(self.place / "data"), "allow_weak_sandbox": True}
        _, samples = evaluate(
            self.model, self.tokenizer, suite, progress=False,
            **{**options, "batch_size": 1, **plan},
        )  # fmt: skip
        return by_prompt(samples)


@contextlib.contextmanager
def generating(case: Case, **settings: Any) -> Iterator[None]:
    """Give the task of lm-eval these settings of generation for the duration of a
    block.
    """
    file = case.place / "mine/t_until.yaml"
    kwargs = {**TASK["generation_kwargs"], **settings}  # type: ignore[dict-item]
    file.write_text(yaml.safe_dump({**TASK, "generation_kwargs": kwargs}))
    try:
        yield
    finally:
        file.write_text(yaml.safe_dump(TASK))


def by_prompt(samples: Any) -> dict[str, dict[str, Any]]:
    return {
        task: {
            each["prompt"]: each.get("completion", each.get("completions"))
            for each in items
        }
        for task, items in samples.items()
    }


def greedy(case: Any, text: str, stop: list[str]) -> str:
    """Decode by hand, without cache, padding or `generate`: each token is the likeliest,
    until the text with its special tokens has a stop string.
    """
    ids, new = case.tokenizer(text)["input_ids"], []
    raw = ""
    while len(new) < LIMIT and (not new or new[-1] != case.tokenizer.eos_token_id):
        with torch.no_grad():
            logits = case.model(torch.tensor([ids + new])).logits[0, -1]
        new.append(int(logits.argmax()))
        raw = case.tokenizer.decode(new, skip_special_tokens=False)
        if found := [raw.index(word) for word in stop if word in raw]:
            raw = raw[: min(found)]
            break
    for special in case.tokenizer.all_special_tokens:
        raw = raw.replace(special, "")
    return raw


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Answers end at different lengths: at a special token, at a string over two
    tokens, or at the limit.
    """
    place = tmp_path_factory.mktemp("answers")
    (place / "mine").mkdir()
    (place / "mine/t_until.yaml").write_text(yaml.safe_dump(TASK))
    code = [
        {"task_id": n, "prompt": text, "code": "f = 1", "test_imports": [], "test_list": [], "test": "assert True"}
        for n, text in enumerate(QUESTIONS)
    ]  # fmt: skip
    write_rows(place / "data/o/code", code, "test")
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [SPECIAL]})
    made = Case(readable(), tokenizer, [SPECIAL, "\n", "ab"], place)
    rows = [
        {"question": text, "answer": greedy(made, text, made.stop)}
        for text in QUESTIONS
    ]
    write_rows(place / "data/o/questions", rows, "test")
    return made


def readable(**settings: Any) -> Any:
    """Make a model that writes few different characters, and the end of an answer."""
    model = tiny_model(
        "qwen3_moe", vocab_size=512, max_position_embeddings=256, seed=15
    )
    tokenizer = tiny_tokenizer()
    words = tokenizer.convert_tokens_to_ids(["a", "b", "c", SPECIAL])
    words += tokenizer("\n", add_special_tokens=False)["input_ids"]
    weight = model.get_output_embeddings().weight.data
    weight[[n for n in range(len(weight)) if n not in words]] = 0
    model.generation_config = GenerationConfig()
    for key, value in settings.items():
        setattr(model.generation_config, key, value)
    return model


@pytest.fixture(scope="module")
def alone(case: Case) -> dict[str, dict[str, str]]:
    """Decoded by hand."""
    prompts = {"t_until": QUESTIONS, "t_code": [text + "\n" for text in QUESTIONS]}
    return {
        task: {text: greedy(case, text, case.stop) for text in texts}
        for task, texts in prompts.items()
    }


def test_the_answers_of_this_module_end_in_different_ways(
    case: Case, alone: dict[str, dict[str, str]]
) -> None:
    lengths = {len(text) for answers in alone.values() for text in answers.values()}
    assert len(lengths) > 3
    raw = {greedy(case, text, []) for text in QUESTIONS}
    assert raw != set(alone["t_until"].values())


@pytest.mark.parametrize("batch_size", few([3, "auto", 1, 6], 2))
def test_no_batch_size_changes_an_answer(
    case: Case, alone: dict[str, dict[str, str]], batch_size: Any
) -> None:
    assert case.answers(GENERATION, CODE, batch_size=batch_size) == alone


def test_no_order_of_the_items_changes_an_answer(
    case: Case, alone: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    rows = [{"question": text, "answer": "x"} for text in QUESTIONS[::-1]]
    write_rows(tmp_path / "o/questions", rows, "test")
    found = case.answers(GENERATION, data_root=str(tmp_path), batch_size=4)
    assert found["t_until"] == alone["t_until"]
    few_items = case.answers(GENERATION, data_root=str(tmp_path), batch_size=4, limit=3)
    assert few_items["t_until"].items() < alone["t_until"].items()


def _of_rank(rank: int, case: Case, suite: SuiteConfig) -> Any:
    return case.answers_of(suite, batch_size=2, ranks=Ranks(rank, 2))


@pytest.mark.breadth
def test_no_number_of_ranks_changes_an_answer(
    case: Case, alone: dict[str, dict[str, str]]
) -> None:
    # Written before the ranks begin: one could read what another has only opened.
    suite = case.suite(GENERATION, CODE)
    assert run_ranks(_of_rank, 2, case, suite) == [alone, alone]


SAMPLED = CODE | {"task": "t_code", "num_samples": 2, "temperature": 1.0, "top_p": 0.9}


@pytest.mark.parametrize("batch_size", few([5, 12], 1))
def test_a_sample_does_not_depend_on_its_neighbours(
    case: Case, batch_size: int
) -> None:
    made = case.answers(SAMPLED, batch_size=1)
    assert all(len(set(texts)) == 2 for texts in made["t_code"].values())
    assert case.answers(SAMPLED, batch_size=batch_size) == made


@pytest.mark.breadth
def test_a_task_of_lm_eval_that_samples_gives_the_same_samples_in_any_batch(
    case: Case,
) -> None:
    with generating(case, do_sample=True, temperature=0.9):
        made = case.answers(GENERATION, batch_size=1)
        assert case.answers(GENERATION, batch_size=3) == made
    assert made["t_until"].keys() == set(QUESTIONS)


def test_draws_follow_the_distribution() -> None:
    """Compared with the probabilities, computed by hand."""
    from fcsd.training.generation import Sampling, _Draw

    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -torch.inf]])
    seeds = list(range(4000))
    draw = _Draw(Sampling(temperature=0.7), seeds)
    tokens = draw(torch.zeros(1, 1), logits.repeat(len(seeds), 1)).argmax(-1)
    shares = torch.bincount(tokens, minlength=5) / len(seeds)
    weights = [2.718281828 ** (value / 0.7) for value in (2, 1, 0, -1)]
    expected = torch.tensor([weight / sum(weights) for weight in weights] + [0.0])
    assert (shares - expected).abs().max() < 5 * (0.25 / len(seeds)) ** 0.5
    assert shares[4] == 0
    nucleus = _Draw(Sampling(temperature=0.7, top_p=0.5), seeds)
    assert set(
        nucleus(torch.zeros(1, 1), logits.repeat(len(seeds), 1)).argmax(-1).tolist()
    ) == {0}


@pytest.mark.parametrize("size", [5, 511, 512, 513, 1024, 5000])
@pytest.mark.parametrize("padding", [0, 7])
def test_a_draw_is_the_first_token_whose_cumulative_probability_exceeds_its_number(
    size: int, padding: int
) -> None:
    """Compared with numpy in float64; half of the tokens are ruled out, and a head's
    padding rows, whose logits are the largest, are no tokens.
    """
    from fcsd.training.generation import Sampling, _Draw

    seeds = list(range(200))
    values = np.random.default_rng(size).normal(0, 3, (len(seeds), size))
    values[:, np.random.default_rng(1).permutation(size)[: size // 2]] = -np.inf
    logits = torch.full((len(seeds), size + padding), 50.0)
    logits[:, :size] = torch.tensor(values)
    weights = np.exp(logits[:, :size].double().numpy())
    shares = weights.cumsum(-1) / weights.sum(-1, keepdims=True)
    numbers = [
        float(
            torch.rand(
                (), generator=torch.Generator().manual_seed(seed), dtype=torch.double
            )
        )
        for seed in seeds
    ]
    expected = [
        int(np.flatnonzero(row > number)[0])
        for row, number in zip(shares, numbers, strict=True)
    ]
    # Sums in float32 decide otherwise only where a number is within their rounding.
    near = [
        np.abs(row - number).min() < 1e-6
        for row, number in zip(shares, numbers, strict=True)
    ]
    assert sum(near) < 5
    draw = _Draw(Sampling(temperature=1.0, vocab_size=size), seeds)
    drawn = draw(torch.zeros(1, 1), logits.clone())
    assert (drawn > -torch.inf).sum(-1).tolist() == [1] * len(seeds)
    tokens = drawn.argmax(-1).tolist()
    assert all(
        token == of_row or is_near
        for token, of_row, is_near in zip(tokens, expected, near, strict=True)
    )
    assert all(weights[row, token] > 0 for row, token in enumerate(tokens))


def test_a_number_at_either_end_draws_a_token_that_is_allowed() -> None:
    from fcsd.training.generation import _token_at

    weights = torch.zeros(2, 1300)
    weights[:, [3, 700, 900]] = torch.tensor([1.0, 1e-20, 3.0])
    ends = torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.double)
    assert _token_at(weights, ends).tolist() == [[3], [900]]


def test_sequences_that_have_ended_may_have_no_number() -> None:
    from fcsd.training.generation import _token_at

    weights = torch.full((1, 1300), torch.nan)
    token = _token_at(weights, torch.tensor([[0.5]], dtype=torch.double))
    assert 0 <= int(token) < 1300


PENALISED = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "num_beams": {"num_beams": 3, "length_penalty": -2.0},
    "min_new_tokens": {"min_new_tokens": 9},
}


@pytest.mark.parametrize("name", few(PENALISED, 1))
def test_a_setting_of_the_task_that_reads_the_prompt_does_not_read_its_padding(
    case: Case, name: str
) -> None:
    with generating(case, **PENALISED[name]):
        made = case.answers(GENERATION, batch_size=1)
        assert case.answers(GENERATION, batch_size=6) == made


@pytest.mark.parametrize("setting", ["max_length", "penalti", "num_return_sequences"])
def test_a_setting_of_a_task_that_is_not_known_is_one_line(
    case: Case, setting: str
) -> None:
    refused = user_error(f"task t_until: the task sets {setting} for generation; ")
    with generating(case, **{setting: 2}), refused:
        case.answers(GENERATION)


@pytest.mark.parametrize(
    ("settings", "message"),
    few(
        [
            ({"until": [3]}, r"until \[3\] and 12 new tokens; until must"),
            ({"max_gen_toks": 0}, ".* and 0 new tokens; .* one token or more"),
            ({"until": None}, None),
            ({"do_sample": True, "temperature": 1.0, "top_k": -1}, None),
        ],
        3,
    ),
)
def test_values_of_a_task_that_are_none_are_refused_and_empty_ones_are_not(
    case: Case, settings: dict[str, Any], message: str | None
) -> None:
    row = {**GENERATION, "stop": None}
    with generating(case, **settings):
        if message is None:
            assert len(case.answers(row)["t_until"]) == len(QUESTIONS)
            return
        with user_error(f"task t_until: the task sets {message}"):
            case.answers(row)


def served(
    case: Case, folder: Path, suite: SuiteConfig, ids: bool, model: Path
) -> tuple[dict[str, Any], Any]:
    engine = Engine(case.model, case.tokenizer)
    engine.token_ids = ids
    with serving(engine) as url:
        config = EvaluationConfig(
            data_root=str(case.place / "data"),
            server=ServerConfig(url=url, concurrency=4),
            allow_weak_sandbox=True,
        )
        evaluated = find_model(ModelConfig(path=str(model)))
        run_evaluation(
            PlannedEvaluation("model", evaluated, suite, config, server_check=False),
            folder,
            join_launch(),
        )
    return read_result(folder)


def saved(case: Case, folder: Path, **settings: Any) -> Path:
    case.model.save_pretrained(folder)
    case.tokenizer.save_pretrained(folder)
    file = folder / "generation_config.json"
    file.unlink(missing_ok=True)
    if settings:
        file.write_text(json.dumps(settings))
    return folder


@pytest.mark.breadth
def test_a_server_that_returns_only_texts_gives_the_same_answers(
    case: Case, alone: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """One that also returns token ids is asked below."""
    model = saved(case, tmp_path / "model")
    suite = case.suite(GENERATION, CODE)
    _, samples = served(case, tmp_path / "out", suite, False, model)
    assert by_prompt(samples) == alone


# --- the model's own generation settings ---------------------------------------------

VALUES: dict[str, Any] = {
    "max_length": 5, "max_new_tokens": 2, "min_length": 100, "min_new_tokens": 11, "early_stopping": True,
    "max_time": 1e-9, "stop_strings": ["a", "e", " "], "do_sample": True, "num_beams": 3, "use_mtp": True,
    "use_cache": False, "cache_implementation": "static", "cache_config": {"max_batch_size": 1}, "max_cache_len": 3,
    "temperature": 9.0, "top_k": 3, "top_p": 0.1, "min_p": 0.5, "top_h": 0.5, "typical_p": 0.1,
    "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "repetition_penalty": 1.9, "encoder_repetition_penalty": 1.9,
    "length_penalty": 3.0, "no_repeat_ngram_size": 1, "bad_words_ids": [[7], [8, 9]], "renormalize_logits": True,
    "forced_bos_token_id": 7, "forced_eos_token_id": 7, "remove_invalid_values": True,
    "exponential_decay_length_penalty": [1, 9.0], "suppress_tokens": list(range(5, 200)),
    "begin_suppress_tokens": list(range(5, 200)), "sequence_bias": [[[9], 100.0]], "token_healing": True,
    "guidance_scale": 3.0, "watermarking_config": {"greenlist_ratio": 0.25, "bias": 9.0}, "num_return_sequences": 2,
    "output_attentions": True, "output_hidden_states": True, "output_scores": True, "output_logits": True,
    "return_dict_in_generate": True, "encoder_no_repeat_ngram_size": 1, "decoder_start_token_id": 7,
    "is_assistant": True, "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.1, "prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 1,
    "assistant_early_exit": 1, "assistant_lookbehind": 3, "target_lookbehind": 3, "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash", "compile_config": {"mode": "default"}, "disable_compile": True,
    "continuous_batching_config": {}, "low_memory": True, "penalty_alpha": 0.9, "dola_layers": "high",
    "diversity_penalty": 0.5, "num_beam_groups": 2, "constraints": ["x"], "force_words_ids": [[9]],
    "prefill_chunk_size": 2, "forced_decoder_ids": [[1, 9]], "a_field_of_tomorrow": 3,
}  # fmt: skip
"""A value of each setting that would change the answers, or fail."""
TOKENS = {"pad_token_id", "bos_token_id", "eos_token_id"}
NO_SETTINGS = {"transformers_version"}


def test_every_setting_of_transformers_has_its_place_here() -> None:
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields - VALUES.keys() - TOKENS - NO_SETTINGS == set()
    assert TOKENS == _KEPT and set(_UNTOLD) <= fields


@pytest.mark.parametrize(
    "names",
    [["repetition_penalty"], ["stop_strings"], ["return_dict_in_generate"], VALUES],
    ids=["penalty", "stop", "output", "all"],
)
def test_a_setting_of_the_models_file_changes_no_answer(
    case: Case, alone: dict[str, dict[str, str]], names: Iterable[str]
) -> None:
    """In memory; `max_new_tokens` and penalties reach a server, too (below). Of all
    settings at once, a single one that is heeded shows.
    """
    settings = {name: VALUES[name] for name in names}
    model = readable(**settings)
    other = dataclasses.replace(case, model=model)
    assert other.answers(GENERATION, CODE, batch_size=4) == alone
    for name in settings:
        kept = getattr(model.generation_config, name)
        assert kept is not None, "the model is left as it was"


MANY = {
    "repetition_penalty": 1.9, "max_new_tokens": 2, "do_sample": True, "temperature": 0.3, "top_k": 3,
    "stop_strings": ["a"], "no_repeat_ngram_size": 1,
}  # fmt: skip


def test_settings_of_a_file_are_told_once_and_reach_neither_memory_nor_server(
    case: Case,
    alone: dict[str, dict[str, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = saved(case, tmp_path / "model", **MANY)
    suite = case.suite(GENERATION, CODE)
    config = EvaluationConfig(
        data_root=str(case.place / "data"), batch_size=4, allow_weak_sandbox=True
    )
    model = find_model(ModelConfig(path=str(folder)))
    run_evaluation(
        PlannedEvaluation("mine", model, suite, config), tmp_path / "out", join_launch()
    )
    said = capsys.readouterr().err
    assert said.count("scores do not depend on them") == 1
    assert "mine: its generation settings have" in said
    assert "repetition_penalty 1.9" in said and "max_new_tokens 2" in said
    result, samples = read_result(tmp_path / "out")
    assert by_prompt(samples) == alone
    assert result["settings"]["generation_config_unused"] == MANY
    by_server, from_server = served(case, tmp_path / "served", suite, True, folder)
    assert by_prompt(from_server) == alone
    assert by_server["settings"]["generation_config_unused"] == MANY
    for task, row in result["tasks"].items():
        assert row["answers_at_limit"] == by_server["tasks"][task]["answers_at_limit"]
        endless = [text for text in alone[task].values() if len(text) == LIMIT]
        assert row["answers_at_limit"] == len(endless) > 0


def test_the_end_tokens_of_the_models_file_are_kept(
    case: Case, alone: dict[str, dict[str, str]]
) -> None:
    answers = [greedy(case, text, []) for text in QUESTIONS]
    token = case.tokenizer(answers[2], add_special_tokens=False)["input_ids"][2]
    model = readable(eos_token_id=[token])
    found = dataclasses.replace(case, model=model).answers(GENERATION, batch_size=4)
    assert found != {"t_until": alone["t_until"]}
    assert found == dataclasses.replace(case, model=model).answers(GENERATION)
    assert set_aside(model.generation_config) == {}


# --- families ------------------------------------------------------------------------


@pytest.mark.parametrize("family", few(FAMILIES))
def test_padding_changes_an_answer_only_where_the_family_says_so(family: str) -> None:
    """Logits in float32, which padding may round but not change."""
    model = tiny_model(family, vocab_size=256, max_position_embeddings=256)
    model.generation_config = GenerationConfig(pad_token_id=0)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 256, (n,), generator=generator) for n in (3, 29, 8)]
    width = max(map(len, prompts))
    ids = torch.stack([torch.cat([p.new_zeros(width - len(p)), p]) for p in prompts])
    options: Any = {
        "max_new_tokens": 2, "do_sample": False, "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    together = model.generate(
        input_ids=ids, attention_mask=(ids > 0).long(), **options
    ).logits[0]
    differences = [
        model.generate(
            input_ids=prompt[None],
            attention_mask=torch.ones_like(prompt)[None],
            **options,
        ).logits[0][0]
        - together[number]
        for number, prompt in enumerate(prompts)
    ]
    largest = max(float(each.abs().max()) for each in differences)
    spread = float(together.std())
    if FAMILIES[family].padding == "counts":
        assert largest > 1e-2 * spread
    else:
        assert largest < 1e-3 * spread


def test_a_family_that_counts_padding_gives_the_same_answers_in_any_batch(
    case: Case,
) -> None:
    model = tiny_model(
        "minimax_m3_vl_text", vocab_size=512, max_position_embeddings=256
    )
    model.generation_config = GenerationConfig()
    other = dataclasses.replace(case, model=model)
    made = other.answers(GENERATION, batch_size=1)
    assert other.answers(GENERATION, batch_size=6) == made


@pytest.mark.parametrize("family", few(["qwen3_moe", "qwen3_next", "minimax_m3_vl_text", "gpt_oss"], 2))  # fmt: skip
def test_a_likelihood_does_not_depend_on_its_neighbours(
    family: str, tmp_path: Path
) -> None:
    """In float64; in a lower precision, padding rounds otherwise."""
    rows = [
        {"question": "and " * (5 * n % 7) + "so", "choices": ["x", "yyy", "zz " * n], "answer": 0}
        for n in range(1, 7)
    ]  # fmt: skip
    write_rows(tmp_path / "data/o/choice", rows, "test", "train")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/t_choice.yaml").write_text(
        yaml.safe_dump({"task": "t_choice", **CHOICE})
    )
    row = {
        "task": "t_choice", "kind": "likelihood", "metric": "acc,none", "dataset": "o/choice",
        "lm_eval_include": "mine",
    }  # fmt: skip
    with in_float64():
        model = tiny_model(family, vocab_size=512, max_position_embeddings=256)
        case = Case(model, tiny_tokenizer(), [], tmp_path)
        found = [
            [
                value
                for sample in samples["t_choice"]
                for value in sample["loglikelihoods"]
            ]
            for size in (1, 4, 18)
            for _, samples in [
                evaluate(
                    model, case.tokenizer, likelihoods(tmp_path, row), progress=False,
                    data_root=str(tmp_path / "data"), batch_size=size,
                )
            ]
        ]  # fmt: skip
    assert found[1] == pytest.approx(found[0], abs=BOUND)
    assert found[2] == pytest.approx(found[0], abs=BOUND)


def likelihoods(place: Path, row: dict[str, Any]) -> SuiteConfig:
    (place / "suite.yaml").write_text(yaml.safe_dump({"name": "mine", "tasks": [row]}))
    return load_suite(place / "suite.yaml")
