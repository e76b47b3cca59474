"""Write the data of the demo: a tokenizer, chat rows to train on, and three tasks
(`fcsd.pipeline.tiny.questions`).
"""

import itertools
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fcsd.base.artifact import differences
from fcsd.base.errors import UserError
from fcsd.base.files import file_sha256, read_sealed, write_sealed
from fcsd.base.writing import files_below, is_empty, new_folder
from fcsd.pipeline.tiny.questions import (
    answer_tasks,
    chat_rows,
    choice_tasks,
    code_tasks,
)
from fcsd.pipeline.tiny.rows import write_data_set, write_rows

FORMAT_VERSION = 3
_SETTINGS = "settings.json"

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
USER, ASSISTANT = "<|user|>", "<|assistant|>"

# `{% generation %}` marks the tokens that the model itself writes; they end with the
# end-of-turn token.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '"
    + USER
    + "' + message['content'] }}{% else %}{{ '"
    + ASSISTANT
    + "' }}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '"
    + ASSISTANT
    + "' }}{% endif %}"
)


def _write_tokenizer(folder: Path, texts: list[str], vocab_size: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    # Digits and capital letters stay single tokens, so that strings of them can be
    # counted, cut and reversed.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[0-9A-Z]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS, USER, ASSISTANT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS,
        additional_special_tokens=[USER, ASSISTANT], model_max_length=256, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


@dataclass(frozen=True)
class Sizes:
    """Rows of each file, tokens of the vocabulary; careless: share of the answers in
    `distill.jsonl` with a mistake.
    """

    seed: int = 0
    num_train: int = 40_000
    num_distill: int = 12_000
    careless: float = 0.4
    num_heldout: int = 400
    num_validation: int = 64
    num_test: int = 200
    vocab_size: int = 512


def write_tiny_data(folder: Path, **sizes: Any) -> None:
    """Write the tokenizer, the training rows and the three tasks; the same settings
    (`Sizes`) give the same bytes.

    Layout: `tokenizer/`, `settings.json`, chat rows `train.jsonl` (for pre-training),
    `distill.jsonl` and `heldout.jsonl`, and in `data/fcsd/` the tasks
    `tiny-code/{validation,test}.jsonl` (MBPP+ schema), `tiny-choice/test.jsonl` and
    `tiny-answers/test.jsonl`. In `distill.jsonl` the share `careless` of the answers
    has a mistake, like instruction data by other authors: fine-tuning learns the
    mistakes, distillation from the original does not. A finished folder with the same
    settings is left unchanged; one with other content is a UserError.
    """
    folder, requested = Path(folder), Sizes(**sizes)
    settings = {"format_version": FORMAT_VERSION, **asdict(requested)}
    # The settings identify the data, since the same settings give the same bytes.
    if folder.exists() and (not folder.is_dir() or not is_empty(folder)):
        hint = "name another folder, or remove this one"
        written: dict[str, Any] = {}
        if (folder / _SETTINGS).is_file():
            written = read_sealed(folder / _SETTINGS, hint)
        files = written.pop("files", {})
        if written != settings:
            raise UserError(
                f"{folder}: holds something other than the tiny data with these"
                f" settings ({settings}); {hint}"
            )
        found = _hashes(folder)
        if changes := differences(files, {name: found.get(name) for name in files}):
            raise UserError(
                f"{folder}: is damaged, or was changed ({'; '.join(changes[:3])});"
                f" {hint}"
            )
        return
    with new_folder(folder) as new:
        _write_all(new, requested)
        write_sealed(new / _SETTINGS, {**settings, "files": _hashes(new)})


def _hashes(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): file_sha256(file)
        for file in sorted(files_below(folder))
        if file.name != _SETTINGS
    }


def _write_all(folder: Path, sizes: Sizes) -> None:
    # Each file has its own stream of random numbers, so one more row in a file changes
    # no other file.
    def rng(stream: str) -> random.Random:
        return random.Random(f"{sizes.seed}/{stream}")

    def take(
        stream: str, split: str, count: int, careless: float = 0.0
    ) -> list[dict[str, Any]]:
        return list(itertools.islice(chat_rows(rng(stream), split, careless), count))

    train = take("train", "train", sizes.num_train)
    write_rows(folder / "train.jsonl", train)
    write_rows(
        folder / "distill.jsonl",
        take("distill", "train", sizes.num_distill, sizes.careless),
    )
    write_rows(folder / "heldout.jsonl", take("heldout", "heldout", sizes.num_heldout))
    test = {"test": sizes.num_test}
    tasks = {
        "code": (code_tasks, {"validation": sizes.num_validation, **test}),
        "choice": (choice_tasks, test),
        "answers": (answer_tasks, test),
    }
    for name, (make, counts) in tasks.items():
        files = {
            ("default", split): make(rng(f"{name}/{split}"), split, count)
            for split, count in counts.items()
        }
        write_data_set(
            folder / "data" / "fcsd" / f"tiny-{name}",
            files,
            "Generated by `fcsd tiny-data`.\n",
        )
    # The tokenizer is trained on a part of the rows, which have few different words.
    texts = [
        message["content"] for row in train[:20_000] for message in row["messages"]
    ]
    _write_tokenizer(folder / "tokenizer", texts, sizes.vocab_size)
