"""Describe the installed transformers, so that a test notices new and changed families.

    python -m tests.reference.upstream

in the repository writes the snapshot of this release that
`tests/model/families/test_upstream.py` compares with, the lists of docs/families.md and
the number of families in the README. Write it only after the contract tests have passed
with that transformers.

Not covered: attention, norms and experts, which may change without changing the
connectivity.
"""

import ast
import hashlib
import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import transformers
from packaging.version import Version
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

from fcsd.model.connectivity.modeling import supported_transformers
from fcsd.model.families import ALL_FAMILIES, FAMILIES, SERVED, SERVED_BY_SGLANG, Family
from fcsd.model.families.overlap import overlap_of
from fcsd.model.families.refused import BROKEN, REFUSED

SNAPSHOTS = Path("tests/files/upstream")  # one for each release
PAGE = Path("docs/families.md")
README = Path("README.md")
FAMILIES_BEGIN, FAMILIES_END = "<!-- families -->", "<!-- /families -->"

_MODELS = Path(transformers.__file__).parent / "models"
_EXPERTS = re.compile(
    r"^class \w*(?:(?:Experts|MoE|Moe|MOE)\b|SparseMoe|MoeBlock|MoEBlock)|\bself\.experts\b",
    re.MULTILINE,
)
"""A class named like an MoE block, or a module with an attribute `experts`."""
_AUTO_MODELS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_BACKBONE_MAPPING_NAMES",
)  # fmt: skip


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def moe_model_types() -> list[str]:
    """Return model types that an Auto class loads and whose modeling file has experts,
    sorted; also the supported ones, which are loaded by name."""
    sources = {
        path.parent.name: path.read_text(encoding="utf-8")
        for path in _MODELS.glob("*/modeling_*.py")
    }
    folders = {name for name, text in sources.items() if _EXPERTS.search(text)}
    # A separate configuration may have the models of another family.
    classes = {
        name
        for folder in folders
        for name in re.findall(r"^class (\w+)", sources[folder], re.MULTILINE)
    }
    with_experts = {
        name
        for mapping in _AUTO_MODELS
        for name, model in getattr(modeling_auto, mapping).items()
        if model_type_to_module_name(name) in folders
        or classes.intersection([model] if isinstance(model, str) else model)
    }
    return sorted(with_experts | FAMILIES.keys())


def _normalised(node: Any) -> Any:
    """Return a syntax tree as nested lists, without docstrings, annotations and
    differences between versions of Python.
    """
    if isinstance(node, list):
        return [_normalised(one) for one in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name in (
            "annotation",
            "returns",
            "type_comment",
            "type_params",
            "kind",
        ) or value in (None, []):
            continue
        if name == "body" and isinstance(value, list):
            value = [
                one
                for one in value
                if not (
                    isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
                )
            ]
        fields.append([name, _normalised(value)])
    return [type(node).__name__, fields]


def _loops_over_layers(function: ast.AST) -> bool:
    return any(
        isinstance(node, ast.For)
        and re.search(r"self\.(layers|blocks)\b", ast.unparse(node.iter))
        for node in ast.walk(function)
    )


def fingerprint(family: Family) -> str:
    """Return a hash of the family's decoder layers, its MoE block and every method of
    its file that loops over layers, without docstrings, comments and annotations."""
    layers = (
        family.decoder_layer
        if isinstance(family.decoder_layer, tuple)
        else (family.decoder_layer,)
    )
    classes = [
        node
        for node in _tree(_MODELS.parent / family.upstream).body
        if isinstance(node, ast.ClassDef)
    ]
    parts: list[Any] = [
        node for node in classes if node.name in (*layers, family.moe_block)
    ]
    for node in classes:
        parts += [
            one
            for one in node.body
            if isinstance(one, ast.FunctionDef) and _loops_over_layers(one)
        ]
    text = json.dumps([_normalised(part) for part in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def snapshot() -> dict[str, Any]:
    """Return {"transformers": version, "model_types": those with experts, "families":
    model type -> hash}.
    """
    return {
        "transformers": transformers.__version__,
        "model_types": moe_model_types(),
        "families": {
            name: fingerprint(family) for name, family in sorted(FAMILIES.items())
        },
    }


def saved_snapshot() -> dict[str, Any] | None:
    """Return the newest snapshot of a release that is not newer than the installed one;
    None where all are newer.
    """
    snapshots = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in (Path(__file__).parents[2] / SNAPSHOTS).glob("*.json")
    ]
    installed = Version(transformers.__version__)
    older = [
        saved for saved in snapshots if Version(saved["transformers"]) <= installed
    ]
    return max(older, key=lambda saved: Version(saved["transformers"]), default=None)


def _folded(text: str) -> str:
    return textwrap.fill(
        text,
        118,
        subsequent_indent="  " if text.startswith("- ") else "",
        break_on_hyphens=False,
    )


def by_reason(reasons: Mapping[str, str]) -> list[str]:
    """Format {family: reason} as a list with an item for each reason."""
    names = defaultdict(list)
    for name, reason in reasons.items():
        names[reason].append(f"`{name}`")
    return [_folded(f"- {reason}: {', '.join(each)}") for reason, each in names.items()]


def named(words: str, families: Iterable[str]) -> str:
    return _folded(f"{words}: {', '.join(f'`{name}`' for name in families)}.")


def families_lists() -> str:
    """Format what docs/families.md lists: every family by its overlap, what differs,
    and the refused families.
    """
    families = dict(sorted(ALL_FAMILIES.items()))
    # A checkpoint of most families loads with older releases than fcsd supports.
    usual = f">={Family.since},<6"
    others = {
        name: f"needs transformers {versions}"
        + "".join(f"; in {each}, {why}" for each, why in BROKEN.get(name, {}).items())
        for name, row in families.items()
        if (versions := supported_transformers(row)) != usual
        and Version(row.since) >= Version(Family.since)
    }
    overlap = {name: overlap_of(row) for name, row in families.items()}
    inside, refused = (
        {
            name: fact["because"]
            for name, fact in overlap.items()
            if fact["overlap"] == how
        }
        for how in ("inside the layer", "none")
    )
    shared = {
        name: row.block_shared or row.layer_shared for name, row in families.items()
    }
    lists = [
        named(
            "Overlap between layers",
            [name for name, fact in overlap.items() if fact["because"] is None],
        ),
        "Overlap inside the layer, because",
        "\n".join(by_reason(inside)),
        "No overlap, because",
        "\n".join(by_reason(refused)),
        named("No shared experts", [name for name in families if not shared[name]]),
        named(
            "Shared experts in flight, too",
            [name for name in families if shared[name] and not families[name].additive],
        ),
        named(
            "Generic reference",
            [name for name, row in families.items() if row.reference != "written"],
        ),
        named("Served in vLLM with overlap ([serve](serve.md))", SERVED),
        named("Served in SGLang with overlap", SERVED_BY_SGLANG),
        "Not with every supported transformers:",
        "\n".join(by_reason(others)),
        "Not converted, because",
        "\n".join(by_reason(dict(sorted(REFUSED.items())))),
    ]
    return "\n\n".join(lists)


def with_families(page: str) -> str:
    """Put `families_lists` between the markers of docs/families.md."""
    before, rest = page.split(f"{FAMILIES_BEGIN}\n")
    _, after = rest.split(f"{FAMILIES_END}\n")
    return f"{before}{FAMILIES_BEGIN}\n\n{families_lists()}\n\n{FAMILIES_END}\n{after}"


def num_families(release: str) -> int:
    """Count the families that can be converted with a release of transformers."""
    return sum(
        Version(row.since) <= Version(release)
        and release not in BROKEN.get(row.model_type, {})
        for row in ALL_FAMILIES.values()
    )


def with_count(readme: str) -> str:
    """Put the number of families into the README: with the oldest release that has a
    snapshot, and with the newest.
    """
    releases = sorted(Version(path.stem) for path in SNAPSHOTS.glob("*.json"))
    oldest, newest = str(releases[0]), str(releases[-1])
    count = (
        f"{num_families(oldest)} (transformers {oldest.removesuffix('.0')}),"
        f" {num_families(newest)} ({newest})"
    )
    return re.sub(r"\b\d+ \(transformers [\d.]+\), \d+ \([\d.]+\)", count, readme)


if __name__ == "__main__":
    written = SNAPSHOTS / f"{transformers.__version__}.json"
    written.write_text(json.dumps(snapshot(), indent=1) + "\n", encoding="utf-8")
    for file, updated in ((PAGE, with_families), (README, with_count)):
        file.write_text(updated(file.read_text(encoding="utf-8")), encoding="utf-8")
