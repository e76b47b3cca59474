"""Take the program out of an answer by the rules of EvalPlus 0.3.1's sanitiser
(evalplus/sanitize.py).

    block     the consecutive lines, two or more, that Python can parse and of which most are not blank; the first
              such; where no lines can be parsed, the first line
    program   the block's imports, and the first definition of each name that the function asked for needs

A definition is an undecorated class, an undecorated function with a `return`, or an
assignment, each at the top level. Everything else at the top level goes, such as calls,
tests, `if` and `from __future__`. Where nothing remains, the block is the program.

EvalPlus tries all pairs of lines and reads the block with tree-sitter. Here the
position of a syntax error tells which longer ranges also fail, and `ast` reads the
block, which Python can parse. One thing differs: a requested function on a single line
between fences is found, although no block of two or more lines contains it.

Not covered: a block of one line that Python cannot parse, from which tree-sitter may
take a function; texts whose search would take many seconds (thousands of lines that
never end a statement), where the best block so far counts.
"""

import ast
import codeop
import re
import warnings
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fcsd.evaluation.code.problems import Problem

Definition = (
    ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign
)
_UNFINISHED = ast.PyCF_ONLY_AST | codeop.PyCF_ALLOW_INCOMPLETE_INPUT  # type: ignore[attr-defined]
_MOST_LINES = 100_000  # parsed for one text, which takes some seconds
_FENCE = re.compile(
    r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)


def program_in(problem: "Problem", text: str, *, chat: bool = False) -> str:
    """Take the program out of a completion, by the rules of the benchmark's grader
    (`Problem.block`).

    chat: the completion is an answer to a question. Otherwise it continues the head of
    the function, as base models do; if that gives no complete function, it is read as
    an answer, whose program follows the head.
    """
    if problem.block == "first":
        return problem.prefix + str((_FENCE.findall(text) or [text])[0])
    # As EvalPlus does (evalplus/provider/hf.py): the heads of functions are indented
    # with spaces, which Python does not let tabs continue.
    text = text.replace("\t", "    ")
    if problem.entry_point is None:
        return problem.prefix + longest_block(text, least=1)
    # EvalPlus's sanitiser, which also drops calls and tests that follow the function.
    answer = sanitised(text, problem.entry_point)
    if chat or not problem.prefix:
        return answer
    program = sanitised(problem.prefix + text, problem.entry_point)
    # A base model continues the head of the function. Where that gives no complete
    # function but the text alone does, the model has written the whole program.
    if defines(program, problem.entry_point) or not defines(
        answer, problem.entry_point
    ):
        return program
    return f"{problem.prefix}{answer}\n"


def sanitised(text: str, entry_point: str) -> str:
    """Return the program in `text` that the function `entry_point` needs."""
    block = longest_block(text)
    tree = _parse(block)
    if line := _lone_definition(text, block, entry_point):
        return line
    if not isinstance(tree, ast.Module):
        return block
    imports = [node for node in tree.body if _is_import(node)]
    definitions = list(_definitions(tree))
    needed_names = _reachable(
        entry_point, {name: set(_words(node)) for name, node in definitions}
    )
    statements = imports + [node for name, node in definitions if name in needed_names]
    lines = block.encode().split(b"\n")  # the offsets of a tree are bytes
    program = "\n".join(_source(node, lines) for node in statements).strip()
    return program or block


def defines(program: str, entry_point: str) -> bool:
    """Tell whether a program has a definition of `entry_point` that the sanitiser
    keeps.
    """
    tree = _parse(program)
    return isinstance(tree, ast.Module) and any(
        name == entry_point for name, _ in _definitions(tree)
    )


def longest_block(text: str, least: int = 2) -> str:
    """Return the most lines of `text` that Python can parse: the range with the most
    lines that are not blank.

    Of equal ones it is the first. A range has `least` lines or more; without one, the
    first line is returned.
    """
    lines = _lines(text)
    filled = [0, *accumulate(bool(line.strip()) for line in lines)]
    best, most, left = (0, 1), 0, _MOST_LINES
    covered_starts: set[int] = (
        set()
    )  # starts from which no longer range than the best can come
    # From each start try the longest range first, and stop where no range can win.
    for first, line in enumerate(lines):
        if filled[-1] - filled[first] <= most or left <= 0:
            break
        if first in covered_starts or not _begins(line):
            continue
        last = len(lines)
        while (
            last - first >= least and filled[last] - filled[first] > most and left > 0
        ):
            result = _parse("\n".join(lines[first:last]))
            # The budget counts lines that were parsed: up to the error, or all.
            left -= result if isinstance(result, int) else last - first
            if isinstance(result, ast.Module):
                best, most = (first, last), filled[last] - filled[first]
                covered_starts |= _boundaries(result, first, last)
            elif result is None:
                last = _before_failure(lines, first, last)
            else:  # every longer range also has this error
                last = min(last - 1, first + result - 1)
    first, last = best
    # Blank lines at the end count for nothing above, so a range may have any number of
    # them.
    while last - first > least and not lines[last - 1].strip():
        last -= 1
    return "\n".join(lines[first:last])


def _lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").rstrip("\r").replace("\r", "\n").split("\n")


def _lone_definition(text: str, block: str, entry_point: str) -> str | None:
    """Return the line that defines the requested function if the block does not define
    it.
    """
    if defines(block, entry_point):
        return None
    # Lines outside the block, because its own have been read already.
    block_lines = set(_lines(block))
    lines = (
        line for line in _lines(text) if entry_point in line and line not in block_lines
    )
    return next(
        (
            line
            for line in lines
            if not line[:1].isspace() and defines(line, entry_point)
        ),
        None,
    )


def _before_failure(lines: list[str], first: int, last: int) -> int:
    """Find the most lines that the parser can read at all: too deep a nesting, or a
    NUL, fails without a place.
    """
    good = first
    while last - good > 1:
        middle = (good + last) // 2
        if _parse("\n".join(lines[first:middle])) is None:
            last = middle
        else:
            good = middle
    return good


def _parse(text: str) -> ast.Module | int | None:
    """Parse `text`; the line of its error, counted from 1, or None where Python does
    not say a line.
    """
    with warnings.catch_warnings():
        # of escapes such as "\d", which a filter could make an error
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except SyntaxError as error:
            return error.lineno or None
        except (ValueError, MemoryError, RecursionError):
            return None


def _begins(line: str) -> bool:
    """Tell whether a program may begin with this line: not one that is indented or can
    never be parsed.
    """
    if line[:1] in (" ", "\t") and line.strip():
        return line.strip().startswith("#")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(line, "<answer>", "exec", _UNFINISHED)
        except SyntaxError as error:
            return error.msg == "incomplete input"
        except (ValueError, MemoryError, RecursionError):
            return False
    return True


def _boundaries(tree: ast.Module, first: int, last: int) -> set[int]:
    """Return the lines of lines[first:last] at which no statement of its tree
    continues.

    What can be parsed from such a line on can be parsed from `first` on, too, and is
    longer there.
    """
    inside = {
        first + line - 1
        for node in tree.body
        for line in range(_first_line(node) + 1, (node.end_lineno or node.lineno) + 1)
    }
    return set(range(first, last)) - inside


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *[decorator.lineno for decorator in decorators]])


def _is_import(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.level > 0 or node.module != "__future__"
    return isinstance(node, ast.Import)


def _definitions(tree: ast.Module) -> Iterator[tuple[str | None, Definition]]:
    """Yield the first definition of each name at the top level, with its name."""
    names = set()
    for node in tree.body:
        if not isinstance(node, Definition) or getattr(node, "decorator_list", []):
            continue
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if function and not any(
            isinstance(part, ast.Return) for part in ast.walk(node)
        ):
            continue
        name = _name(node)
        # Later definitions of a name are dropped, as EvalPlus does.
        if name not in names:
            names.add(name)
            yield name, node


def _name(node: Definition) -> str | None:
    """Return the name under which EvalPlus knows a definition.

    For an assignment, it is the first plain name next to the sign, so `a[0] = b`
    defines b; None without one.
    """
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    operands: list[ast.expr | None]
    if isinstance(node, ast.AnnAssign):
        operands = [node.target, node.value]
    else:  # in `a = b = c` the second side is an assignment
        if len(node.targets) == 1:
            operands = [node.targets[0], node.value]
        else:
            operands = [node.targets[0]]
    return next(
        (operand.id for operand in operands if isinstance(operand, ast.Name)), None
    )


def _words(node: ast.AST) -> Iterator[str]:
    """Yield every identifier in a definition: names, attributes, parameters and
    keywords alike.
    """
    for part in ast.walk(node):
        if isinstance(part, ast.Constant):
            continue
        for value in vars(part).values():
            for word in value if isinstance(value, list) else [value]:
                if isinstance(word, str):
                    yield from word.split(".")


def _reachable(entry_point: str, words: dict[str | None, set[str]]) -> set[str | None]:
    """Return the names that the definition of `entry_point` needs, and those that they
    need.
    """
    # All words of a definition count as its dependencies: too many rather than too few.
    reached: set[str | None] = {entry_point}
    waiting: list[str | None] = [entry_point]
    while waiting:
        new = words.get(waiting.pop(), set()) - reached
        reached |= new
        waiting += new
    return reached


def _source(node: ast.stmt, lines: list[bytes]) -> str:
    """Cut a statement out of the block."""
    first, last = node.lineno - 1, node.end_lineno or node.lineno
    cut = lines[first:last]
    cut[-1] = cut[-1][: node.end_col_offset]
    cut[0] = cut[0][node.col_offset :]
    return b"\n".join(cut).decode()
