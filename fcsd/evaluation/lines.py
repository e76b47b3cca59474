"""Read files of one JSON value a line (samples, and data sets that `datasets` cannot
read), and the texts of a line.
"""

import gzip
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError, one_line
from fcsd.base.files import check_regular, parse_json


def json_lines(
    path: Path, description: str = "valid JSON", advice: str = ""
) -> list[tuple[str, Any]]:
    """Read the values of a .jsonl or .jsonl.gz file, each with where it is; blank lines
    are skipped.

    description: what each line should be, for the message. advice: ends the message.
    """
    check_regular(path)
    try:
        data = path.read_bytes()
        # Not `splitlines`: a text in a line of JSON may hold line separators of
        # Unicode.
        texts = (
            (gzip.decompress(data) if path.suffix == ".gz" else data)
            .decode("utf-8")
            .split("\n")
        )
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: is not a .jsonl or .jsonl.gz file of UTF-8 text ({error}){advice}"
        ) from None
    values = []
    for number, text in enumerate(texts, start=1):
        where = f"{path}, line {number}"
        try:
            values += [(where, parse_json(text))] if text.strip() else []
        except ValueError as error:
            raise UserError(
                f"{where}: not {description} ({one_line(error)}){advice}"
            ) from None
    return values


def texts_of(
    line: Mapping[str, Any], where: str, keys: Mapping[str, bool], missing: str
) -> tuple[str, list[str]]:
    """Return the first of these keys that a line has, and its texts, at least one.

    keys: key -> whether it holds a list of texts, or one text. missing: the error for a
    line without any of them.
    """
    key = next((key for key in keys if key in line), None)
    if key is None:
        raise UserError(f"{where}: {missing}")
    texts = line[key] if keys[key] else [line[key]]
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(text, str) for text in texts)
    ):
        raise UserError(
            f"{where}: {key}: text is needed, got {type(line[key]).__name__}"
        )
    return key, texts
