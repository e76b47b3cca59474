"""Real text and code that every machine has: Python's reference, docstrings and
standard library; or files of yours.

    folder/tokenizer/       byte-level BPE, trained on `train.jsonl`
    folder/train.jsonl      for the teacher
    folder/distill.jsonl    for the student: other documents
    folder/heldout.jsonl    where KL to the teacher is measured: other documents again
    folder/corpus.json      what it was made from, sizes and a hash

A document (a module, a topic of the reference, a file given) is in one split only, and
so are its docstrings. Half of every split is text and half is code. Documents are cut
at line ends into pieces that fit into a row.
"""

import ast
import hashlib
import json
import platform
import random
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from fcsd.base.errors import UserError
from fcsd.base.files import new_folder

VOCABULARY = 1024
LENGTH = 128  # tokens in a row
SPLIT_BYTES = {"train": 4_000_000, "distill": 1_600_000, "heldout": 200_000}
_LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
    "lib2to3",
}
_CODE_SUFFIXES = {
    ".py",
    ".pyi",
    ".c",
    ".h",
    ".cpp",
    ".rs",
    ".go",
    ".js",
    ".ts",
    ".java",
}


def write_corpus(folder: Path, files: list[Path]) -> None:
    """Write the splits and the tokenizer; a folder made from the same documents is left
    as it is.

    files: text and code to use in place of Python's own; a suffix such as .py or .c
    says that it is code.

    Raises:
        UserError: a file that cannot be read, too little of text or of code, a folder
            with another corpus.
    """
    documents = list(_given(files)) if files else [*_reference(), *_standard_library()]
    digest = hashlib.sha256()
    for name, kind, text in documents:
        digest.update(f"{name}\0{kind}\0{text}\0".encode())
    source = "files" if files else f"Python {platform.python_version()}"
    settings = {
        "source": source,
        "sha256": digest.hexdigest(),
        "vocabulary": VOCABULARY,
        "length": LENGTH,
    }
    record = folder / "corpus.json"
    if record.is_file():
        existing = json.loads(record.read_text(encoding="utf-8"))
        if {key: existing[key] for key in settings} != settings:
            raise UserError(
                f"{folder}: holds the corpus of {existing['source']} (sha256"
                f" {existing['sha256'][:12]}), asked for is that of {source}"
                f" ({settings['sha256'][:12]}); name another folder, or remove this one"
            )
        return
    with new_folder(folder) as made:
        splits = {name: _balanced(documents, name) for name in SPLIT_BYTES}
        tokenizer = _train_tokenizer(splits["train"])
        tokenizer.save_pretrained(made / "tokenizer")
        counts = {}
        for name, texts in splits.items():
            pieces = [piece for text in texts for piece in _pieces(text, tokenizer)]
            random.Random(name).shuffle(pieces)
            counts[name] = {
                "pieces": len(pieces),
                "bytes": sum(len(piece.encode()) for piece in pieces),
            }
            lines = (json.dumps({"text": piece}) + "\n" for piece in pieces)
            (made / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        (made / "corpus.json").write_text(
            json.dumps(settings | {"splits": counts}, indent=1) + "\n"
        )


def _reference() -> Iterator[tuple[str, str, str]]:
    """The topics of Python's language reference that `help()` shows: English prose."""
    from pydoc_data import topics

    for name, text in sorted(topics.topics.items()):
        yield f"topic {name}", "text", text


def _standard_library() -> Iterator[tuple[str, str, str]]:
    """Every module as code, and its docstrings as text; both have the module's name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _LEFT_OUT & set(name.parts):
            continue
        try:
            code = path.read_text(encoding="utf-8")
            tree = ast.parse(code)
        except (UnicodeDecodeError, SyntaxError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = [
            ast.get_docstring(node)
            for node in ast.walk(tree)
            if isinstance(node, kinds)
        ]
        yield str(name), "code", code
        yield str(name), "text", "\n\n".join(text for text in docstrings if text)


def _given(files: list[Path]) -> Iterator[tuple[str, str, str]]:
    """The files as documents; cut into documents of 5,000 characters, so that every
    split gets some.
    """
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--text {path}: cannot be read as text: {error}") from None
        kind = "code" if path.suffix in _CODE_SUFFIXES else "text"
        for start in range(0, len(text), 5_000):
            yield f"{path.name} {start}", kind, text[start : start + 5_000]


def _split(name: str) -> str:
    """1/20 of the documents are held out, 5/20 are for the student, the rest is for the teacher."""
    place = zlib.crc32(name.encode()) % 20
    return "heldout" if place == 0 else "distill" if place <= 5 else "train"


def _balanced(documents: list[tuple[str, str, str]], split: str) -> list[str]:
    """The documents of one split, text and code in equal shares, up to its size."""
    wanted = SPLIT_BYTES[split] // 2
    kinds = {}
    for kind in ("text", "code"):
        mine = [
            text
            for name, own, text in documents
            if own == kind and _split(name) == split
        ]
        random.Random(split).shuffle(mine)
        kinds[kind] = _up_to(mine, wanted)
    size = (
        min(sum(map(len, texts)) for texts in kinds.values() if texts)
        if any(kinds.values())
        else 0
    )
    if size < 10_000:
        raise UserError(
            f"too little text for the split '{split}': {size} characters; give more"
            " files with --text"
        )
    return [text for texts in kinds.values() for text in _up_to(texts, size)]


def _up_to(texts: Iterable[str], size: int) -> list[str]:
    chosen: list[str] = []
    for text in texts:
        if size <= 0:
            break
        chosen.append(text[:size])
        size -= len(text)
    return chosen


def _train_tokenizer(texts: list[str]):  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


def _pieces(text: str, tokenizer) -> Iterator[str]:  # type: ignore[no-untyped-def]
    """Runs of whole lines that fit into a row with their end of sequence; a longer line
    is a piece of its own.
    """
    lines = [line for line in re.split(r"(?<=\n)", text) if line]
    if not lines:
        return
    piece, used = "", 0
    for line, ids in zip(lines, tokenizer(lines)["input_ids"], strict=True):
        if piece and used + len(ids) > LENGTH - 1:
            yield piece
            piece, used = "", 0
        piece, used = piece + line, used + len(ids)
    if piece.strip():
        yield piece
