"""Write a report's Markdown as one self-contained HTML page, which a browser shows as
it is and an email can carry.

Figures are embedded; wide tables scroll by themselves, so that the page fits a narrow
window. The page runs no script. The link to `items.html` works beside that file.
"""

import base64
import html
import re
from importlib.resources import files
from pathlib import Path

from fcsd.base.writing import write_text

# Markdown may hold HTML (`fold` writes some), so the page itself forbids everything that
# a model's or a data set's name could smuggle in.
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none';"
    " form-action 'none'"
)
_IMAGE = re.compile(r'<img src="([^":/]+\.png)"')


def write_page(markdown: str, path: Path) -> None:
    """Write `path`, an HTML page of the text; figures are read from its folder.

    markdown: with a first line `# TITLE`.
    """
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)
    body = body.replace("<table>", '<div class="wide"><table>')
    body = body.replace("</table>", "</table></div>")
    body = _IMAGE.sub(lambda match: _embedded(path.parent / match[1]), body)
    title = markdown.partition("\n")[0].lstrip("# ").replace("`", "")
    style = files("fcsd.report").joinpath("page.css").read_text(encoding="utf-8")
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{html.escape(_POLICY)}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{style}</style>
</head>
<body>
{body}</body>
</html>
"""
    write_text(path, page)


def _embedded(figure: Path) -> str:
    """Return the beginning of an image element that holds the figure itself."""
    data = base64.b64encode(figure.read_bytes()).decode("ascii")
    return f'<img src="data:image/png;base64,{data}"'
