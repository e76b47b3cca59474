"""What the installed transformers has, so that a test notices families that are new or have changed.

    python -m tests.reference.upstream

in the repository writes the snapshot that `tests/model/families/test_upstream.py` compares with, the table and the
lists of docs/families.md, and the number of families in the README. Write it again only after the contract tests have
passed with that transformers.

Not covered: attention, norms and experts, which may change without changing the connectivity.
"""

import ast
import hashlib
import json
import re
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

from fcsd.model.families import FAMILIES, Family
from fcsd.model.families.refused import REFUSED
from fcsd.parallel.overlap.support import kept_inside, refusal

SNAPSHOT = Path("tests/files/upstream.json")
PAGE = Path("docs/families.md")
README = Path("README.md")
FAMILIES_BEGIN, FAMILIES_END = "<!-- families -->", "<!-- /families -->"

_MODELS = Path(transformers.__file__).parent / "models"
_EXPERTS = re.compile(
    r"^class \w*(?:(?:Experts|MoE|Moe|MOE)\b|SparseMoe|MoeBlock|MoEBlock)|\bself\.experts\b", re.MULTILINE
)
"""A class named like an MoE block, or a module with an attribute `experts`."""
_AUTO_MODELS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_BACKBONE_MAPPING_NAMES",
)


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def moe_model_types() -> list[str]:
    """Model types that an Auto class loads and whose modeling file has experts, sorted; also the supported
    ones, which are loaded by name."""
    folders = {
        path.parent.name
        for path in _MODELS.glob("*/modeling_*.py")
        if _EXPERTS.search(path.read_text(encoding="utf-8"))
    }
    loadable = {name for mapping in _AUTO_MODELS for name in getattr(modeling_auto, mapping)}
    found = {name for name in loadable if model_type_to_module_name(name) in folders}
    return sorted(found | FAMILIES.keys())


def _normalised(node: Any) -> Any:
    """A syntax tree as nested lists, without docstrings, annotations and what differs between Pythons."""
    if isinstance(node, list):
        return [_normalised(one) for one in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment", "type_params", "kind") or value in (None, []):
            continue
        if name == "body" and isinstance(value, list):
            value = [
                one
                for one in value
                if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
            ]
        fields.append([name, _normalised(value)])
    return [type(node).__name__, fields]


def _loops_over_layers(function: ast.AST) -> bool:
    return any(
        isinstance(node, ast.For) and re.search(r"self\.(layers|blocks)\b", ast.unparse(node.iter))
        for node in ast.walk(function)
    )


def fingerprint(family: Family) -> str:
    """A hash of the family's decoder layers, its MoE block and every method of its file that loops over
    layers, without docstrings, comments and annotations."""
    layers = family.decoder_layer if isinstance(family.decoder_layer, tuple) else (family.decoder_layer,)
    classes = [
        node for node in _tree(_MODELS.parent / family.upstream).body if isinstance(node, ast.ClassDef)
    ]
    parts: list[Any] = [node for node in classes if node.name in (*layers, family.moe_block)]
    for node in classes:
        parts += [one for one in node.body if isinstance(one, ast.FunctionDef) and _loops_over_layers(one)]
    text = json.dumps([_normalised(part) for part in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def snapshot() -> dict[str, Any]:
    """{"transformers": version, "model_types": those with experts, "families": model type -> hash}."""
    return {
        "transformers": transformers.__version__,
        "model_types": moe_model_types(),
        "families": {name: fingerprint(family) for name, family in sorted(FAMILIES.items())},
    }


def _listed(label: str, reason: str) -> str:
    """Format an item of a list, folded as pages are."""
    return textwrap.fill(f"- {label}: {reason}", 118, subsequent_indent="  ", break_on_hyphens=False)


def families_lists() -> str:
    """Format what docs/families.md lists: every family with its overlap, the reasons, and the refused families."""
    letters: dict[str, str] = {}

    def overlap(family: Family) -> str:
        reason, word = refusal(family), "refused"
        if reason is None:
            reason, word = kept_inside(family), "inside"
        if reason is None:
            return "yes"
        return f"{word} ({letters.setdefault(reason, chr(ord('a') + len(letters)))})"

    lines = ["| family | shared experts | reference | overlap |", "|---|---|---|---|"]
    for name, family in sorted(FAMILIES.items()):
        shared = family.block_shared or family.layer_shared
        cells = (
            name,
            ("yes" if family.additive else "in flight") if shared else "no",
            "hand" if family.reference == "written" else "generic",
            overlap(family),
        )
        lines.append(f"| {' | '.join(cells)} |")
    refused = defaultdict(list)
    for name, reason in sorted(REFUSED.items()):
        refused[reason].append(f"`{name}`")
    return "\n".join(
        [
            *lines,
            "",
            *(_listed(letter, reason) for reason, letter in letters.items()),
            "\nNot converted, because:\n",
            *(_listed(", ".join(names), reason) for reason, names in refused.items()),
        ]
    )


def with_families(page: str) -> str:
    """Put `families_lists` between the markers of docs/families.md."""
    before, rest = page.split(f"{FAMILIES_BEGIN}\n")
    _, after = rest.split(f"{FAMILIES_END}\n")
    return f"{before}{FAMILIES_BEGIN}\n{families_lists()}\n{FAMILIES_END}\n{after}"


def with_count(readme: str) -> str:
    """Put the number of supported families into the README's "N model families"."""
    return re.sub(r"\b\d+ model families", f"{len(FAMILIES)} model families", readme)


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(snapshot(), indent=1) + "\n", encoding="utf-8")
    for file, updated in ((PAGE, with_families), (README, with_count)):
        file.write_text(updated(file.read_text(encoding="utf-8")), encoding="utf-8")
