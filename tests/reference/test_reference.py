"""The helpers on which other tests rely."""

import multiprocessing
import os
import time

import pytest
import torch

from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.reference.ranks import run_ranks
from tests.reference.tiny import TINY, tiny_config, tiny_model
from tests.support import few, user_error


@pytest.mark.parametrize("family", few(sorted(TINY)))
def test_every_parameter_and_router_bias_is_random_and_the_seed_decides(family):
    one, same, other = (
        tiny_model(family),
        tiny_model(family),
        tiny_model(family, seed=1),
    )
    for (name, a), b, c in zip(
        one.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name
        assert a.numel() == 1 or a.std() > 0.01, name
    biases = [
        buffer
        for name, buffer in one.named_buffers()
        if name.endswith(("correction_bias", "expert_bias"))
    ]
    assert all(buffer.std() > 0.05 for buffer in biases)
    assert biases or family not in ("deepseek_v3", "glm4_moe", "lfm2_moe")


def test_overrides_reach_the_config():
    assert tiny_config("mixtral", num_hidden_layers=2).num_hidden_layers == 2
    assert len(tiny_model("mixtral", num_hidden_layers=2).model.layers) == 2


def test_the_tokenizer_is_exact_on_any_text_and_has_a_chat_template():
    tokenizer = tiny_tokenizer(300)
    assert len(tokenizer) == tokenizer.vocab_size == 300
    text = "def add(x):\n    return x + 1  # ≈ 日本 🙂"
    ids = tokenizer(text)["input_ids"]
    assert max(ids) < 262
    assert tokenizer.decode(ids) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        0,
        1,
        2,
    )
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    made = tokenizer.apply_chat_template(
        chat,
        return_dict=True,
        return_assistant_tokens_mask=True,
        add_generation_prompt=False,
    )
    assert tokenizer.decode(made["input_ids"]) == "<bos><user> hi<assistant> yo<eos>"
    kept = [
        i
        for i, keep in zip(made["input_ids"], made["assistant_masks"], strict=True)
        if keep
    ]
    assert tokenizer.decode(kept) == "yo<eos>"
    prompt = tokenizer.apply_chat_template(
        chat[:1], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<bos><user> hi<assistant> "
    assert tiny_tokenizer(300, chat_template=False).chat_template is None


def test_a_small_vocabulary_keeps_lower_case_code():
    tokenizer = tiny_tokenizer(99)
    assert len(tokenizer) == 99
    text = "def f(a, b):\n    return a + b * 10"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    with user_error("vocab_size must be at least 70, got 50"):
        tiny_tokenizer(50)


def test_a_tokenizer_survives_saving(tmp_path):
    from transformers import AutoTokenizer

    tiny_tokenizer(300).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("x = 1\n")["input_ids"] == tiny_tokenizer(300)("x = 1\n")["input_ids"]
    assert loaded.chat_template == tiny_tokenizer(300).chat_template


def _sum_of_ranks(rank, start):
    value = torch.full((2,), float(start + rank))
    torch.distributed.all_reduce(value)
    return rank, value, os.environ["RANK"], os.environ["WORLD_SIZE"], os.getpid()


def test_ranks_communicate_and_return_their_results_in_order():
    results = run_ranks(_sum_of_ranks, 3, 10)
    assert [result[0] for result in results] == [0, 1, 2]
    assert all(torch.equal(result[1], torch.full((2,), 33.0)) for result in results)
    assert [result[2:4] for result in results] == [("0", "3"), ("1", "3"), ("2", "3")]
    assert len({result[4] for result in results} | {os.getpid()}) == 4
    assert "RANK" not in os.environ


def _one_fails(rank):
    if rank == 1:
        raise ValueError("rank one is out")
    torch.distributed.barrier()


def test_a_failing_rank_raises_its_traceback_and_the_others_are_stopped():
    with pytest.raises(
        RuntimeError,
        match=r"(?s)rank 1 failed:.*_one_fails.*ValueError: rank one is out",
    ):
        run_ranks(_one_fails, 2)
    assert multiprocessing.active_children() == []


def _one_dies(rank):
    if rank == 0:
        os._exit(7)
    torch.distributed.barrier()


def test_a_rank_that_dies_is_named_with_its_exit_code():
    with pytest.raises(
        RuntimeError, match=r"rank 0 died with exit code 7|rank 1 failed"
    ):
        run_ranks(_one_dies, 2)


def _sleeps(rank):
    time.sleep(60)


def test_ranks_that_hang_are_stopped_after_the_time_limit():
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] were not done after 2 s"):
        run_ranks(_sleeps, 2, timeout_s=2)
