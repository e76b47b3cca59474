"""A local data set is read as it is now, not as a folder of the same name was when it
was last read.
"""

import json
from pathlib import Path

import pyarrow.parquet
import pytest

from fcsd.data.config import SourceConfig
from fcsd.data.local import data_fingerprint, fresh_cache
from fcsd.data.sources import load_source, open_source
from fcsd.data.write_rows import read_pieces
from fcsd.evaluation.code.problems import read_problems
from fcsd.evaluation.config import LikelihoodTaskConfig, SuiteConfig
from fcsd.evaluation.lm_eval.tasks import load_task
from tests.support import user_error

README = (
    "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: test\n    path:"
    " test.jsonl\n---\n"
)


def folder(root: Path, answer: int) -> Path:
    """Return one row in the MBPP schema, in a folder that has the same name under every root."""
    place = root / "someone" / "same-name"
    place.mkdir(parents=True, exist_ok=True)
    (place / "README.md").write_text(README)
    row = {
        "task_id": 1, "prompt": f"give {answer}", "code": f"def f():\n    return {answer}", "test_imports": [],
        "test_list": [f"assert f() == {answer}"], "test": f"assert f() == {answer}",
        "question": f"{answer}?", "choices": ["a", "b"], "answer": answer,
    }  # fmt: skip
    (place / "test.jsonl").write_text(json.dumps(row) + "\n")
    return place


def test_two_folders_of_one_name_and_a_changed_folder_give_their_own_rows(
    tmp_path: Path,
) -> None:
    for root, answer in (("one", 0), ("two", 1), ("one", 1)):
        place = folder(tmp_path / root, answer)
        assert read_problems(place)[0].prompt == f"give {answer}"
        (row,) = load_source(
            SourceConfig(
                path=str(place),
                split="test",
                columns={"prompt": "prompt", "response": "code"},
            )
        )
        assert row["prompt"] == f"give {answer}"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("utf16.jsonl", '{"text": "a"}\n'.encode("utf-16"), "line 1: not UTF-8"),
        ("bytes.jsonl", bytes(range(256)), "line 1: not valid JSON"),
        ("latin.jsonl", b'{"text": "a"}\n' * 3 + b'{"text": "\xe9"}', "line 4: not UTF-8"),
        ("blank.jsonl", b'{"text": "a", "n": [1]}\n\n{"text": "b"}\n', "line 2: is blank; remove it"),
        ("empty.parquet", None, "is empty; give a file or a split with rows"),
        ("cut.parquet", b"PAR1", "parquet.*; correct the file, or fetch it again"),
        ("lfs.parquet", b"version https://git-lfs.github.com/spec/v1\n", "lfs.parquet: is a pointer of Git LFS"),
        ("nowhere", b"", "no such file or folder, and the Hub did not give"),
        ("", b"", "data set '': is not a path; name a file"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_read_are_refused_with_place_and_advice(
    name: str,
    content: bytes | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is None:
        columns = {"text": pyarrow.array([], pyarrow.string())}
        pyarrow.parquet.write_table(pyarrow.table(columns), name)
    elif content:
        Path(name).write_bytes(content)
    source = SourceConfig(path=name, columns={"text": "text"})
    with user_error(message):
        # The fault may lie in the first row, or further back.
        list(read_pieces(open_source(source), []))


def test_a_broken_file_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b\n')
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n')
    source = SourceConfig(path=str(tmp_path), columns={"text": "text"})
    with user_error(r"data set .*/a\.jsonl, line 2: not valid JSON"):
        list(read_pieces(open_source(source), []))


def test_an_empty_name_is_not_the_current_folder() -> None:
    with user_error("data set ' ': is not a path; name a file"):
        data_fingerprint(" ")


def test_lm_eval_tasks_read_what_lies_there_too(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks" / "mine"
    tasks.mkdir(parents=True)
    (tasks / "mine.yaml").write_text(
        "task: mine\ndataset_path: someone/same-name\noutput_type:"
        " multiple_choice\ntest_split: test\ndoc_to_text: question\ndoc_to_choice:"
        " choices\ndoc_to_target: answer\nmetric_list: [{metric: acc}]\n"
    )
    row = LikelihoodTaskConfig(
        task="mine",
        kind="likelihood",
        metric="acc,none",
        dataset="someone/same-name",
        lm_eval_include="mine",
    )
    suite = SuiteConfig(name="s", tasks=[row], folder=str(tasks.parent))
    for root, answer in (("one", 0), ("two", 1)):
        folder(tmp_path / root, answer)
        (task,) = load_task(row, suite, tmp_path / root, None).values()
        assert [doc["question"] for doc in task.test_docs()] == [f"{answer}?"]


def test_a_hub_id_keeps_the_usual_cache() -> None:
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    with fresh_cache("owner/name"):
        assert before == datasets.config.HF_DATASETS_CACHE


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("train.txt", True), ("train.jsonl", True), ("data/x.xml", True), ("a.hdf5", True), ("b.tar", True),
        (".cache/x.json", False), (".fcsd-fetch", False), ("data/.DS_Store", False),
    ],
)  # fmt: skip
def test_every_file_that_may_be_read_identifies_a_folder_and_hidden_ones_do_not(
    file: str, counts: bool, tmp_path: Path
) -> None:
    (tmp_path / "rows.txt").write_text("one\n")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("a")
    before = data_fingerprint(str(tmp_path))
    (tmp_path / file).write_text("b")
    assert (data_fingerprint(str(tmp_path)) != before) == counts


def test_of_a_readme_the_settings_identify_a_folder_and_the_text_does_not(
    tmp_path: Path,
) -> None:
    place = folder(tmp_path, 1)
    before = data_fingerprint(str(place))
    (place / "README.md").write_text(README + "# Other words\n--- and a line\n")
    assert data_fingerprint(str(place)) == before
    (place / "README.md").write_text(README.replace("test.jsonl", "more.jsonl"))
    assert data_fingerprint(str(place)) != before
