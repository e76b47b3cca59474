"""Write the families that each engine serves into docs/serve.md, from the plugins' rows.

python -m tests.reference.served
"""

from pathlib import Path

from tests.reference.upstream import by_reason, named
from tests.support import load_modules

PAGE = Path("docs/serve.md")
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
"""Package after `fcsd_`, also in the page's markers -> engine."""


def lists(engine: str) -> str:
    """Format the families that a plugin serves, and why it does not serve others."""
    families = load_modules("serving", f"fcsd_{engine}", ["families"]).families
    return "\n\n".join(
        [
            named(f"Served in {ENGINES[engine]}", sorted(families.FAMILIES)),
            "Not served with overlap, because",
            "\n".join(by_reason(families.REFUSED)),
        ]
    )


def with_lists(page: str) -> str:
    """Put the lists of both engines between their markers."""
    for engine in ENGINES:
        before, rest = page.split(f"<!-- {engine} -->\n")
        _, after = rest.split(f"<!-- /{engine} -->\n")
        page = f"{before}<!-- {engine} -->\n\n{lists(engine)}\n\n<!-- /{engine} -->\n{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_lists(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
