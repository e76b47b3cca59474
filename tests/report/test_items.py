"""The page of single answers: its content, that no answer becomes markup or script, and
that its filters work.
"""

import base64
import gzip
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fcsd.evaluation.scores import compare
from fcsd.report.items import write_items
from tests.report.chromium import Chromium
from tests.report.test_report import result

HOSTILE = (
    "</script><script>document.title='owned'</script>"
    "<img src=x onerror=\"document.title='owned'\"> & @DATA@ \ud800"
)
SCORES = {"original": [1, 1, 0, 0], "fcsd": [1, 0, 1, 0]}  # kept, lost, gained, never


def evaluated(name: str) -> dict[str, Any]:
    whole, _ = result(name)
    row = whole["tasks"]["code"] | {"num_items": 4, "value": 0.5}
    samples = [
        {"doc_id": f"Mbpp/{i}", "doc_hash": f"d{i}", "prompt_hash": f"p{i}", "score": float(score), "target": "t",
         "prompt": f"question {i} {HOSTILE}", "completion": f"{name} says {i} {HOSTILE}", "outcome": "wrong",
         "message": HOSTILE}
        for i, score in enumerate(SCORES[name])
    ]  # fmt: skip
    choice = [
        sample
        | {
            "loglikelihoods": [-1.25, float("-inf")],
            "choices": ["yes", HOSTILE],
            "doc_id": i,
        }
        for i, sample in enumerate(samples)
    ]
    for sample in choice:
        del sample["completion"]
    choice_row = whole["tasks"]["choice"] | {"num_items": 4}
    tasks = {"code": row, "choice": choice_row}
    return {
        "result": whole | {"tasks": tasks},
        "samples": {"code": samples, "choice": choice},
    }


@pytest.fixture
def page(tmp_path: Path) -> Path:
    both = {f"{name} {HOSTILE}": evaluated(name) for name in SCORES}
    first, second = both.values()
    write_items(both, {list(both)[1]: compare(first, second)}, tmp_path / "items.html")
    return tmp_path / "items.html"


def page_of(
    folder: Path, samples_of: Callable[[str], list[dict[str, Any]]], **options: Any
) -> str:
    """Write the page of the samples of two models in a code task; return its address."""
    both = {}
    for name in ("original", "fcsd"):
        (whole, _), samples = result(name, **options), samples_of(name)
        row = whole["tasks"]["code"] | {"num_items": len(samples)}
        tasks = {"code": row}
        both[name] = {"result": whole | {"tasks": tasks}, "samples": {"code": samples}}
    compared = {"fcsd": compare(both["original"], both["fcsd"])}
    write_items(both, compared, folder / "items.html")
    return (folder / "items.html").as_uri()


class Reader(HTMLParser):
    """Elements with their attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if (
            self.elements
            and self.elements[-1][0] == "script"
            and self.cdata_elem == "script"
        ):
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)


def test_no_answer_is_markup_and_only_the_pages_own_script_may_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    reader = Reader(text)
    assert "owned" not in re.sub(
        r'(?s)<script type="application/json".*?</script>', "", text
    )
    assert "img" not in [tag for tag, _ in reader.elements]
    assert not [
        name
        for _, attributes in reader.elements
        for name in attributes
        if name.startswith("on")
    ]
    assert not [a for _, a in reader.elements if a.get("src") or a.get("href")], (
        "needs nothing from elsewhere"
    )
    programs = [
        program for attributes, program in reader.scripts if "type" not in attributes
    ]
    assert len(programs) == 1
    assert "innerHTML" not in programs[0]
    assert "eval" not in programs[0]
    (policy,) = [
        a["content"]
        for tag, a in reader.elements
        if a.get("http-equiv") == "Content-Security-Policy"
    ]
    digest = base64.b64encode(hashlib.sha256(programs[0].encode()).digest()).decode()
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy


def test_the_page_holds_every_item_of_every_task_with_both_answers(page: Path) -> None:
    data = {
        a["id"]: text
        for a, text in Reader(page.read_text(encoding="utf-8")).scripts
        if "id" in a
    }
    index = json.loads(data["index"])
    assert [task["name"] for task in index["tasks"]] == ["code", "choice"]
    assert index["models"][1] == f"fcsd {HOSTILE}".replace("\ud800", "?")
    code, choice = (
        json.loads(gzip.decompress(base64.b64decode(data[f"task-{i}"])))
        for i in range(2)
    )
    assert [[answer["score"] for answer in item["answers"]] for item in code] == [
        [1, 1],
        [1, 0],
        [0, 1],
        [0, 0],
    ]
    assert code[1]["answers"][1]["texts"][0].startswith("fcsd says 1 </script>")
    assert choice[0]["answers"][0]["loglikelihoods"] == [-1.25, None]
    assert choice[0]["choices"][0] == "yes"


# Our own minimal document for the page's script: what it would show, as plain objects.
HARNESS = r"""
const fs = require("fs"), vm = require("vm");
const html = fs.readFileSync(process.argv[1], "utf-8");
const text = (id) => html.split(`id="${id}">`)[1].split("</script>")[0];
class Element {
  constructor(name) { this.name = name; this.children = []; this.listeners = {}; this.own = ""; this.className = ""; }
  append(...more) { this.children.push(...more); }
  replaceChildren(...more) { this.children = more; }
  addEventListener(kind, call) { this.listeners[kind] = call; }
  get textContent() { return this.own + this.children.map((c) => c.textContent).join(this.name === "pre" ? "" : "\n"); }
  set textContent(value) { this.own = String(value); this.children = []; }
  set innerHTML(value) { throw new Error("markup"); }
}
const places = {};
for (const id of [
  "note", "facts", "filter", "task", "model", "kind", "text", "count", "back", "next", "items", "overview",
]) {
  places[id] = new Element(id);
  places[id].value = "";
}
const document = {
  getElementById: (id) => places[id] || Object.assign(new Element(id), { own: text(id) }),
  createElement: (name) => new Element(name),
  createTextNode: (text) => Object.assign(new Element("#text"), { own: text }),
};
const pause = () => new Promise((done) => setTimeout(done, 5));
const wait = async () => { while (!places.count.own.includes("items")) await pause(); };
const seen = () => ({
  kinds: places.items.children.map((item) => item.className), count: places.count.textContent,
  text: places.items.textContent, facts: places.facts.textContent,
});
(async () => {
  const script = html.split("<script>")[1].split("</script>")[0];
  const location = { hash: "" }, history = { replaceState: (state, title, to) => { location.hash = to; } };
  vm.runInNewContext(script, {
    addEventListener: () => {}, document, atob, Blob, Response, DecompressionStream, Uint8Array, console,
    location, history, URLSearchParams,
  });
  await wait();
  const states = { start: seen() };
  for (const [name, id, value] of JSON.parse(process.argv[2])) {
    places[id].value = value;
    places.count.own = "";
    places[id].listeners.input();
    await wait();
    states[name] = seen();
  }
  states.address = location.hash;
  console.log(JSON.stringify(states));
})();
"""


def states_of(page: Path, *choices: tuple[str, str, str]) -> dict[str, Any]:
    """Return what the page's script shows at the start, and after each choice (its name
    here, the element's id, the value).
    """
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node to run the page's script")
    ran = subprocess.run(
        [node, "-e", HARNESS, str(page), json.dumps(choices)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    states: dict[str, Any] = json.loads(ran.stdout)
    return states


def test_the_pages_filters_show_what_they_say(page: Path) -> None:
    states = states_of(
        page,
        ("gained", "kind", "gained"),
        ("all", "kind", "all"),
        ("search", "text", "SAYS 3"),
        ("none", "text", "nowhere"),
        ("cleared", "text", ""),
        ("choice", "task", "choice"),
    )
    assert states["start"]["kinds"] == ["lost", "gained"]
    assert "original says 1 </script>" in states["start"]["text"], "text stays text"
    assert "pass@1, 0-shot, 4 items" in states["start"]["facts"]
    assert states["gained"]["kinds"] == ["gained"]
    assert "1 of 4 items" in states["gained"]["count"]
    assert states["all"]["kinds"] == ["kept", "lost", "gained", "never"]
    assert states["search"]["kinds"] == ["never"]
    assert states["address"].startswith("#task=choice&model=fcsd+")
    assert states["address"].endswith("&kind=all")
    assert states["none"]["kinds"] == []
    assert "0 of 4 items, page 1 of 1" in states["none"]["count"]
    assert "-1.25" in states["choice"]["text"]
    assert "not finite" in states["choice"]["text"]


def test_equal_divergences_are_neither_right_nor_wrong(tmp_path: Path) -> None:
    divergences = {"original": [0.5, 0.5, 0.0], "fcsd": [0.5, 0.75, 0.0]}

    def samples(name: str) -> list[dict[str, Any]]:
        return [
            {"doc_id": str(i), "doc_hash": f"d{i}", "prompt_hash": f"p{i}", "score": nats,
             "prompt": "p", "completion": "one", "greedy": "two"}
            for i, nats in enumerate(divergences[name])
        ]  # fmt: skip

    page_of(tmp_path, samples)
    states = states_of(tmp_path / "items.html", ("all", "kind", "all"))
    assert states["all"]["kinds"] == ["kept", "lost", "kept"]
    assert "0.750 nats a token" in states["all"]["text"]


SHOWN = "[...document.querySelectorAll('article')].map((each) => each.className)"
TEXT = "document.querySelector('main').innerText"


def choose(browser: Chromium, place: str, value: str) -> None:
    """Return the page after a choice from a list, or after typing."""
    browser.value(
        f"(() => {{ const e = document.getElementById({place!r}); e.value ="
        f" {json.dumps(value)}; e.dispatchEvent(new Event('input', {{bubbles: true}}));"
        " })()"
    )


def test_in_a_browser_the_filters_show_what_they_say_and_the_address_keeps_it(
    browser: Chromium, page: Path
) -> None:
    browser.open(page.as_uri())
    assert browser.wait(f"{SHOWN}.length && {SHOWN}") == ["lost", "gained"]
    facts = browser.value("document.getElementById('facts').textContent")
    assert "pass@1, 0-shot, 4 items" in facts
    boxes = browser.value(
        "[...document.querySelectorAll('article.lost .answer')].map((e) =>"
        " [e.className, e.getBoundingClientRect().x])"
    )
    assert [name for name, _ in boxes] == ["answer right", "answer wrong"]
    assert boxes[0][1] + 400 < boxes[1][1]
    for kind, kinds in (
        ("gained", ["gained"]), ("lost", ["lost"]), ("kept", ["kept"]), ("never", ["never"]),
        ("all", ["kept", "lost", "gained", "never"]),
    ):  # fmt: skip
        choose(browser, "kind", kind)
        browser.wait(f"{SHOWN}.join() === {','.join(kinds)!r}")
        assert (
            browser.value("new URLSearchParams(location.hash.slice(1)).get('kind')")
            == kind
        )
    count = "document.getElementById('count').textContent"
    choose(browser, "text", "nowhere")
    browser.wait(f"{count} === '0 of 4 items, page 1 of 1'")
    choose(browser, "text", "")
    browser.value("document.getElementById('text').focus()")
    browser.type("SAYS 3")
    browser.wait(f"{SHOWN}.join() === 'never'")
    assert "1 of 4 items" in browser.value(count)
    address = browser.value("location.href")
    browser.open("about:blank")
    browser.open(address)  # as another person to whom it was sent
    browser.wait(f"{SHOWN}.join() === 'never'")
    assert browser.value("document.getElementById('text').value") == "SAYS 3"
    browser.value("location.hash = 'task=choice&kind=all'")
    browser.wait(f"{SHOWN}.length === 4")
    assert browser.value("document.querySelectorAll('main table tr').length") == 16, (
        "4 items, 2 models, 2 choices"
    )
    shown = browser.value(TEXT)
    assert "not finite" in shown and "-1.25" in shown
    browser.value("location.hash = 'task=nonsense&kind=any&page=99'")
    browser.wait(f"{SHOWN}.join() === 'lost,gained'")
    browser.requests[:] = [
        request for request in browser.requests if request != "about:blank"
    ]


def test_in_a_browser_the_choice_and_the_expected_one_are_marked(
    browser: Chromium, tmp_path: Path
) -> None:
    """By the rule of the metric; a target that may name two choices marks none."""
    # choices, target, log-likelihoods; then the one that acc_norm chooses, and the
    # expected one
    rows = [
        ([" aa", " bbbbbbbb"], "1", [-2.0, -4.0], 1, 1),
        ([" yes", " no"], "no", [-1.0, -9.0], 0, 1),
        ([" 1", " 0"], "1", [-1.0, None], 0, -1),
        ([" a", " b"], "a sentence", [-3.0, -1.0], 1, -1),
    ]
    samples = [
        {"doc_id": i, "doc_hash": str(i), "prompt_hash": "p", "score": 1.0, "target": target, "choices": choices,
         "loglikelihoods": [float("-inf") if value is None else value for value in values]}
        for i, (choices, target, values, _, _) in enumerate(rows)
    ]  # fmt: skip
    whole, _ = result("fcsd")
    task = whole["tasks"]["choice"] | {"metric": "acc_norm,none", "num_items": 4}
    each = {
        "result": whole | {"tasks": {"choice": task}},
        "samples": {"choice": samples},
    }
    write_items(
        {"a": each, "b": each}, {"b": compare(each, each)}, tmp_path / "items.html"
    )
    browser.open((tmp_path / "items.html").as_uri() + "#kind=all")
    browser.wait(f"{SHOWN}.length === 4")
    marks = browser.value(
        "[...document.querySelectorAll('article')].map((e) =>"
        " [...e.querySelectorAll('table:first-of-type')].map((t) =>"
        " [[...t.rows].findIndex((r) => r.className === 'chosen'),"
        " [...t.rows].findIndex((r) => r.cells[2].textContent === '✓')])[0])"
    )
    assert marks == [[chosen, expected] for *_, chosen, expected in rows]


def test_in_a_browser_no_answer_runs_and_none_is_lost(
    browser: Chromium, tmp_path: Path
) -> None:
    """Tests text that models and data sets may contain, which is shown to the last
    character.
    """
    texts = {
        "markup": HOSTILE.replace("\ud800", ""), "end": "]]> --> </pre></article></script>", "nul": "a\0b",
        "scripts": "\u202e\u2028\u2029\x85 \U0001f600 e\u0301 \u0e01\u0e33", "template": "${alert(1)} {{7*7}} `x`",
        "address": "javascript:alert(1) http://example.org/x.png", "long": "x" * 100_000, "lines": "\n" * 2000 + "end",
        "empty": "",
    }  # fmt: skip

    def samples(name: str) -> list[dict[str, Any]]:
        return [
            {"doc_id": key, "doc_hash": key, "prompt_hash": key, "score": float(name == "fcsd"), "prompt": text,
             "target": text, "completion": text, "outcome": "wrong", "message": text}
            for key, text in texts.items()
        ]  # fmt: skip

    browser.open(page_of(tmp_path, samples))
    browser.wait(f"{SHOWN}.length === {len(texts)}")
    shown = browser.value(
        "Object.fromEntries([...document.querySelectorAll('article')].map((e) =>"
        " [e.querySelector('h2').textContent, [...e.querySelectorAll('pre')].map((p) =>"
        " p.textContent)]))"
    )
    for key, text in texts.items():
        expected = [text] * (4 if text else 2)  # prompt, expected, and two answers
        assert shown[key] == expected, key
    assert browser.value("document.title") == "Answers side by side"
    assert (
        browser.value(
            "document.querySelectorAll('main img, main script, main a').length"
        )
        == 0
    )
    assert browser.value("document.documentElement.scrollWidth <= innerWidth"), (
        "nothing makes the page wider"
    )


def test_in_a_browser_a_whole_benchmark_is_turned_over_by_keyboard(
    browser: Chromium, tmp_path: Path
) -> None:
    def samples(name: str) -> list[dict[str, Any]]:
        right = {"original": 3, "fcsd": 4}[name]
        return [
            {"doc_id": i, "doc_hash": f"d{i}", "prompt_hash": f"p{i}", "score": float(i % right == 0),
             "prompt": f"question {i}", "completion": f"{name} {i}"}
            for i in range(120)
        ]  # fmt: skip

    browser.open(page_of(tmp_path, samples, limit=120) + "#kind=all")
    count = "document.getElementById('count').textContent"
    browser.wait(f"{count} === '120 of 120 items, page 1 of 3'")
    assert "Only the first 120 items" in browser.value(
        "document.getElementById('note').innerText"
    )
    browser.press("ArrowRight")
    browser.wait(f"{count}.endsWith('page 2 of 3')")
    assert "question 50" in browser.value(TEXT)
    assert "question 49" not in browser.value(TEXT)
    browser.wait("location.hash.endsWith('page=2')")
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")  # there is nothing before the first
    browser.wait(f"{count}.endsWith('page 1 of 3')")
    assert browser.value("document.getElementById('back').disabled")
    names = []
    for _ in range(5):
        browser.press("Tab")
        names.append(browser.value("document.activeElement.id"))
    assert names == [
        "task", "model", "kind", "text", "next",
    ], "every control is reached, in order"  # fmt: skip
    browser.value("document.getElementById('next').click()")
    browser.wait(f"{count}.endsWith('page 2 of 3')")
    browser.value("document.getElementById('text').focus()")
    browser.press("ArrowRight")
    browser.type("question 11")
    browser.wait(f"{count} === '11 of 120 items, page 1 of 1'")
    for scheme in ("light", "dark"):
        browser.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        back, front = browser.value(
            "[getComputedStyle(document.querySelector('header')).backgroundColor,"
            " getComputedStyle(document.body).color]"
        )
        assert (back == "rgb(255, 255, 255)") == (scheme == "light") and back != front
    browser.call("Emulation.setEmulatedMedia", media="print", features=[])
    assert (
        browser.value("getComputedStyle(document.getElementById('filter')).display")
        == "none"
    )
    browser.call("Emulation.setEmulatedMedia", media="", features=[])


def test_in_a_browser_the_page_opens_on_the_distilled_model_with_a_line_a_task(
    browser: Chromium, tmp_path: Path
) -> None:
    three = {
        name: evaluated("fcsd" if name == "fcsd" else "original")
        for name in ("original", "converted", "fcsd")
    }
    write_items(three, {name: compare(three["original"], three[name]) for name in ("converted", "fcsd")},
                tmp_path / "items.html")  # fmt: skip
    browser.open((tmp_path / "items.html").as_uri())
    browser.wait(f"{SHOWN}.length === 2")
    assert browser.value("document.getElementById('model').value") == "fcsd"
    lines = browser.value(
        "[...document.querySelectorAll('#overview tr')].map((e) => [...e.cells].map((c)"
        " => c.innerText))"
    )
    assert lines[0][0] == "task"
    assert [line[0] for line in lines[1:]] == ["code", "choice"]
    assert lines[1][4:6] == ["1", "1"], "gained and lost"
    browser.value("document.querySelectorAll('#overview button')[1].click()")
    browser.wait(
        "document.getElementById('task').value === 'choice' &&"
        " location.hash.includes('task=choice')"
    )


def test_in_a_browser_the_words_in_which_two_answers_differ_are_marked(
    browser: Chromium, tmp_path: Path
) -> None:
    answers = {
        "swap": ("return x % 2 == 0", "return x % 8 == 0", ["2"], ["8"]),
        "more": ("sort it", "sort it, then   turn it", [], [", then   turn it"]),
        "same": ("a b", "a b", [], []),
        "all": ("one", "two", [], []),  # nothing in common: nothing to mark
        "twice": ("a b a", "b a b", ["a "], [" b"]),
        "long": ("x " * 3000, "y " * 3000, [], []),  # too long to compare
    }

    def samples(name: str) -> list[dict[str, Any]]:
        place = int(name == "fcsd")
        return [
            {"doc_id": key, "doc_hash": key, "prompt_hash": key, "score": float(place), "completion": texts[place]}
            for key, texts in answers.items()
        ]  # fmt: skip

    browser.open(page_of(tmp_path, samples))
    browser.wait(f"{SHOWN}.length === {len(answers)}")
    marks = browser.value(
        "Object.fromEntries([...document.querySelectorAll('article')].map((e) =>"
        " [e.querySelector('h2').textContent, [...e.querySelectorAll('pre')].map((p) =>"
        " [p.textContent, [...p.querySelectorAll('mark')].map((m) =>"
        " m.textContent)])]))"
    )
    for key, (one, other, only_one, only_other) in answers.items():
        assert marks[key] == [[one, only_one], [other, only_other]], key
