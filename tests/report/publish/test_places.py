"""A publication names no path on the publisher's machine."""

import json

from fcsd.report.publish.public import public_text, without_places


def test_of_an_absolute_path_the_last_name_is_left_and_other_texts_stay() -> None:
    record = {
        "dataset": "/data/me/root/fcsd/tiny-code", "hub": "openai/gsm8k", "model": "runs/tiny/convert/model",
        "place": "~/models/Some Model", "line": "task x: cannot read /home/me/data/a.jsonl, nor /mnt/b/c",
        "address": "https://huggingface.co/me/x/blob/main/LICENSE", "rule": "and/or, 1/2, \\n/a",
        "numbers": [1, None, {"deep": "/var/lib/x"}],
    }  # fmt: skip
    public = json.loads(public_text("report.json", json.dumps(record)))
    assert public == record | {
        "dataset": "tiny-code",
        "place": "Some Model",
        "line": "task x: cannot read a.jsonl, nor c",
        "numbers": [1, None, {"deep": "x"}],
    }


def test_a_report_in_words_keeps_its_addresses_and_figures() -> None:
    text = (
        "| data | `/data/me/a.jsonl` |\n![loss](loss.png) see"
        " https://arxiv.org/abs/2511.1\n  path: /data/me/model\n"
    )
    assert (
        without_places(text)
        == "| data | `a.jsonl` |\n![loss](loss.png) see https://arxiv.org/abs/2511.1\n "
        " path: model\n"
    )
