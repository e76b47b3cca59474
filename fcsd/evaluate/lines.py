"""Read files of one JSON value a line: samples, and data sets that `datasets` cannot read.

Not covered: what a line must hold.
"""

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from fcsd.errors import UserError


def json_lines(path: Path, what: str = "valid JSON", advice: str = "") -> list[tuple[str, Any]]:
    """Read the values of a .jsonl or .jsonl.gz file, each with where it is; lines without text are passed over.

    what: what each line should be, for the message. advice: ends the message.

    Raises:
        UserError: a file that cannot be decoded, or a line that is no JSON.
    """
    try:
        data = path.read_bytes()
        # Not `splitlines`: a text in a line of JSON may hold line separators of Unicode.
        texts = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").split("\n")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is no .jsonl or .jsonl.gz file of UTF-8 text ({error}){advice}") from None
    values = []
    for number, text in enumerate(texts, start=1):
        where = f"{path}, line {number}"
        try:
            values += [(where, json.loads(text))] if text.strip() else []
        except ValueError as error:
            raise UserError(f"{where}: not {what} ({error}){advice}") from None
    return values
