"""The report as one HTML page."""

from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from fcsd.base.text import fold
from fcsd.report.page import write_page
from tests.report.chromium import Chromium

ROW = "| " + " | ".join(f"a long cell {i}" for i in range(12)) + " |"
TEXT = f"""# Report of `x`

## Verdict

- **fcsd**: <script>document.title = "run"</script> within noise

{ROW}
|{"---|" * 12}
{ROW}

{fold("The recipe", "```yaml" + chr(10) + "a: " + "b" * 300 + chr(10) + "```")}

![A figure](loss.png)

[Every answer side by side](items.html)
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    figure, _ = plt.subplots(figsize=(12, 3))
    figure.savefig(tmp_path / "loss.png")
    plt.close(figure)
    write_page(TEXT, tmp_path / "report.html")
    # The page is one file, which includes its figures.
    (tmp_path / "loss.png").unlink()
    return tmp_path / "report.html"


def test_the_page_has_titles_tables_and_figures_in_one_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<title>Report of x</title>" in text and "default-src" in text
    assert text.count("<table>") == text.count('<div class="wide"><table>') == 1
    assert 'src="data:image/png;base64,' in text and ".png" not in text
    assert '<a href="items.html">' in text and "<details><summary>" in text


@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_fits_a_window_and_runs_nothing(
    page: Path, chromium: Chromium, width: int
) -> None:
    chromium.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=800,
        deviceScaleFactor=1,
        mobile=False,
    )
    chromium.requests.clear()
    chromium.open(page.as_uri())
    assert chromium.value("document.title") == "Report of x"
    assert chromium.value("document.documentElement.scrollWidth") <= width
    assert chromium.value("document.images[0].naturalWidth") == 1200
    table = "document.querySelector('.wide')"
    scrolls = f"{table}.scrollWidth > {table}.clientWidth"
    # The whole table fits a wide window; in a narrow one it scrolls by itself.
    assert chromium.value(scrolls) is (width < 1280)
    asked = [each for each in chromium.requests if not each.startswith("data:")]
    assert [each.rpartition("/")[2] for each in asked] == ["report.html"]
    # The policy refused the script of the text, and the browser says so.
    assert any("Content Security Policy" in str(error) for error in chromium.errors)
    chromium.errors.clear()
    chromium.call("Emulation.clearDeviceMetricsOverride")


def test_on_a_dark_page_figures_are_dark_too(page: Path, chromium: Chromium) -> None:
    lightness = """(async () => {
        const image = document.images[0], style = getComputedStyle(image);
        const canvas = document.createElement("canvas");
        [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
        const context = canvas.getContext("2d");
        context.filter = style.filter;
        context.drawImage(image, 0, 0);
        return context.getImageData(2, 2, 1, 1).data[0];
    })()"""
    try:
        for scheme, dark in (("light", False), ("dark", True)):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            chromium.call("Emulation.setEmulatedMedia", features=features)
            chromium.open(page.as_uri())
            corner = chromium.value(lightness)
            assert corner < 40 if dark else corner == 255
    finally:
        chromium.call("Emulation.setEmulatedMedia", features=[])
        chromium.errors.clear()
