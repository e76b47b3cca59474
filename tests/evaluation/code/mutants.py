"""Programs that are nearly right: a correct program's answers changed after the fact,
or its text changed.
"""

import ast
from collections.abc import Iterator

# Each is the body of `change(answer, number of this call, arguments)`; `deep(f,
# answer)` applies f to the leaves.
CHANGES: dict[str, str] = {
    "right": "return answer",
    "none": "return None",
    "one more": "return deep(lambda x: x + 1 if type(x) in (int, float) else x, answer)",
    "not, or longer": "return not answer if type(answer) is bool else answer + answer[:1]",
    "last is missing": "return answer[:-1]",
    "other order": "return answer[::-1]",
    "noise of 1e-7": "return deep(lambda x: x + 1e-7 if type(x) is float else x, answer)",
    "noise of 1e-5": "return deep(lambda x: x + 1e-5 if type(x) is float else x, answer)",
    "integers as floats": "return deep(lambda x: float(x) if type(x) is int else x, answer)",
    "floats as integers": "return deep(lambda x: int(x) if type(x) is float else x, answer)",
    "list for tuple": "return list(answer) if type(answer) is tuple else tuple(answer)",
    "inner list for tuple": "return type(answer)(list(x) if type(x) is tuple else x for x in answer)",
    "a set": "return set(answer)",
    "an iterator": "return iter(answer)",
    "a generator": "return (x for x in answer)",
    "text": "return str(answer)",
    "number for bool": "return int(answer) if type(answer) is bool else bool(answer)",
    "nan": "return deep(lambda x: float('nan') if type(x) in (int, float) else x, answer)",
    "array": "import numpy\nreturn numpy.array(answer)",
    "empty array": "import numpy\nreturn numpy.empty(0)",
    "array without width": "import numpy\nreturn numpy.empty((0, 1))",
    "float32": "import numpy\nreturn numpy.float32(answer)",
    "complex": "return complex(answer)",
    "fraction": "from fractions import Fraction\nreturn Fraction(answer)",
    "decimal": "from decimal import Decimal\nreturn Decimal(answer)",
    "a class of int or text": "return type('Own', (type(answer),), {})(answer)",
    "a dictionary in another order": "return dict(reversed(answer.items()))",
    "an exception": "raise ValueError('no')",
    "an exit": "import sys\nsys.exit(0)",
    "right for two calls": "return answer if number < 2 else None",
    "repeated in a list": "return [answer, answer]",
    "every element twice": "return [x for x in answer for _ in range(2)]",
    "arguments emptied": "for x in arguments:\n    if type(x) in (list, dict, set):\n        x.clear()\nreturn answer",
}  # fmt: skip
_WRAPPER = """
{code}

def deep(f, x):
    if type(x) in (list, tuple):
        return type(x)(deep(f, y) for y in x)
    return {{k: deep(f, v) for k, v in x.items()}} if type(x) is dict else f(x)

def change(answer, number, arguments):
{body}

correct, calls = {name}, [0]
def {name}(*arguments):
    answer = correct(*arguments)
    calls[0] += 1
    return change(answer, calls[0] - 1, arguments)
"""


def changed(code: str, name: str, change: str) -> str:
    """Return a program whose function `name` gives the answers of `code`, changed."""
    body = "\n".join("    " + line for line in CHANGES[change].splitlines())
    return _WRAPPER.format(code=code, name=name, body=body)


_OTHER: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class _Edit(ast.NodeTransformer):
    """Change only the node with number `target`."""

    def __init__(self, target: int):
        self.target, self.seen = target, 0

    def _here(self) -> bool:
        self.seen += 1
        return self.seen - 1 == self.target

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if type(node.value) is int and self._here():
            return ast.copy_location(ast.Constant(node.value + 1), node)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if type(node.ops[0]) in _OTHER and self._here():
            node.ops[0] = _OTHER[type(node.ops[0])]()
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if type(node.op) in _OTHER and self._here():
            node.op = _OTHER[type(node.op)]()
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._here():
            node.op = _OTHER[type(node.op)]()
        return node


def edited(code: str) -> Iterator[str]:
    """Yield `code` with one number, comparison or operator changed, once in every
    way.
    """
    tree = ast.parse(code)
    count = _Edit(-1)
    count.visit(tree)
    for target in range(count.seen):
        yield (
            ast.unparse(ast.fix_missing_locations(_Edit(target).visit(ast.parse(code))))
            + "\n"
        )
