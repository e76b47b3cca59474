"""Let a language model write the text on which it is distilled: conversations, and
documents from an empty beginning.

    python examples/real/own_text.py runs/real/dense runs/real/own.jsonl --rows 512

A conversation is what the model puts into the user's turn of its own chat template, and
its answer to that. Each line of the output is {"text": …} with at most `--tokens`
tokens, sampled at temperature 1 from the likeliest tokens that hold 95 % of the
probability. Every second row is a conversation.
"""

import argparse
import json
import random
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from fcsd.base.files import write_text
from fcsd.base.text import progress_bar

TOP_P = 0.95
QUESTION_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of the model that writes")
    parser.add_argument("output", type=Path, help="file of JSON lines")
    parser.add_argument("--rows", type=int, default=512, help="number of texts")
    parser.add_argument("--tokens", type=int, default=256, help="longest text")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not options.model.is_dir():
        parser.error(
            f"{options.model}: no such folder; prepare.py makes runs/real/dense"
        )
    if min(options.rows, options.batch_size) < 1 or options.tokens < 64:
        parser.error("--rows and --batch-size: at least 1; --tokens: at least 64")
    torch.manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = (
        AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.bfloat16 if device == "cuda" else torch.float32
        )
        .eval()
        .to(device)
    )
    writer = Writer(model, tokenizer, options.tokens)
    texts: list[str] = []
    for first in progress_bar(
        range(0, options.rows, options.batch_size), desc="writing", unit="batch"
    ):
        count = min(options.batch_size, options.rows - first)
        texts += writer.conversations(count // 2)
        texts += writer.documents(count - count // 2)
    random.Random(options.seed).shuffle(texts)
    write_text(
        options.output,
        "".join(
            json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts
        ),
    )


class Writer:
    """Samples texts of at most `tokens` tokens."""

    def __init__(self, model: Any, tokenizer: Any, tokens: int) -> None:
        self.model, self.tokenizer, self.tokens = model, tokenizer, tokens

    def documents(self, count: int) -> list[str]:
        start = self.tokenizer.encode("<|endoftext|>", add_special_tokens=False)
        written = self.continued([start] * count, self.tokens)
        return self.tokenizer.batch_decode(written, skip_special_tokens=True)

    def conversations(self, count: int) -> list[str]:
        template = self.tokenizer.apply_chat_template
        # The template's own system prompt, up to where the user begins.
        begin = template([{"role": "user", "content": "?"}], tokenize=False).split("?")
        start = self.tokenizer.encode("?".join(begin[:-1]), add_special_tokens=False)
        questions = [
            text.strip()
            for text in self.tokenizer.batch_decode(
                self.continued([start] * count, min(QUESTION_TOKENS, self.tokens // 4)),
                skip_special_tokens=True,
            )
        ]
        prompts = [
            template(
                [{"role": "user", "content": question}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for question in questions
        ]
        ids = [
            self.tokenizer.encode(text, add_special_tokens=False) for text in prompts
        ]
        answers = self.tokenizer.batch_decode(
            self.continued(ids, max(1, self.tokens - max(map(len, ids), default=0))),
            skip_special_tokens=True,
        )
        return [
            template(
                [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer.strip()},
                ],
                tokenize=False,
            )
            for question, answer in zip(questions, answers, strict=True)
        ]

    @torch.no_grad()
    def continued(self, prompts: list[list[int]], new_tokens: int) -> list[Tensor]:
        """Return what the model adds to prompts, up to its end of turn."""
        if not prompts:
            return []
        length = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (length - len(row)) + row for row in prompts])
        mask = torch.tensor(
            [[0] * (length - len(row)) + [1] * len(row) for row in prompts]
        )
        output = self.model.generate(
            input_ids=ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=TOP_P,
            max_new_tokens=new_tokens,
            pad_token_id=pad,
        )
        return list(output[:, length:].cpu())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
