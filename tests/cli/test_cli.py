"""The command line: every command explains itself; a mistake is one line, exit status
2, and nothing half-written.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fcsd.base.errors import one_line
from fcsd.cli import main as cli
from fcsd.cli.main import main
from fcsd.cli.options import Command
from fcsd.cli.program import Program
from tests.reference.tiny import tiny_model
from tests.support import ROOT, Bench, start


def commands() -> dict[str, argparse.ArgumentParser]:
    (choices,) = (
        a.choices
        for a in cli.build_parser()._actions
        if isinstance(a, argparse._SubParsersAction)
    )
    return dict(choices)


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_explains_itself_and_its_arguments(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    parser = commands()[name]
    assert parser.description and parser.description in " ".join(text.split())
    for action in parser._actions:
        assert action.help, f"{name}: {action.dest} has no help"
        assert (action.option_strings or [action.metavar])[-1] in text


def test_the_commands_are_these() -> None:
    assert set(commands()) == {
        "convert", "unconvert", "calibrate", "families",
        "pretrain", "sweep", "distill", "run",
        "evaluate", "compare", "tiny-data", "configs", "layers", "plan-layers", "inspect", "estimate",
        "push", "chat", "trace", "plan",
        "dequantize", "quantize", "mtp",
    }  # fmt: skip


def test_help_and_version_load_no_heavy_library() -> None:
    code = (
        "import sys, resource\nimport fcsd, fcsd.cli.main\nfor words in (['--version'],"
        " ['--help'], ['distill', '--help']):\n    try: fcsd.cli.main.main(words)\n   "
        " except SystemExit as end: assert not end.code\nheavy = {'torch',"
        " 'transformers', 'datasets', 'lm_eval', 'pydantic', 'numpy'} &"
        " set(sys.modules)\nused ="
        " resource.getrusage(resource.RUSAGE_SELF)\nprint('LOADED', sorted(heavy),"
        " used.ru_utime + used.ru_stime < 1.0)\n"
    )
    with start("-c", code) as child:
        out, error = child.communicate()
    assert (child.returncode, error) == (0, "")
    assert "LOADED [] True" in out and "fcsd 0.1.0" in out


def test_a_file_that_may_not_be_used_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(_: argparse.Namespace) -> None:
        raise PermissionError(13, "Permission denied", "m/config.json")

    program = Program("fcsd", "", "", {"try": Command("", lambda parser: None, run)})
    assert program.run(["try"]) == 2
    assert capsys.readouterr().err == (
        "fcsd try: error: m/config.json: Permission denied; check its permissions and"
        " links, or give another path\n"
    )


@pytest.mark.parametrize("words", [["families"], ["run", "tiny/demo", "--show"]])
def test_a_full_disk_under_the_output_is_one_line(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        child = subprocess.run(
            [sys.executable, "-m", "fcsd", *words],
            stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
    assert child.returncode == 2
    assert re.fullmatch(
        rf"fcsd {words[0]}: error: the output could not be written \(No space left on"
        r" device\); free some space and run the command again\n",
        child.stderr,
    )


def test_a_full_disk_elsewhere_does_not_lose_what_was_printed() -> None:
    code = (
        "from fcsd.cli.options import Command; from fcsd.cli.program import Program\n"
        "def run(_): print('told'); raise OSError(28, 'No space left', 'm/weights')\n"
        "command = Command('', lambda parser: None, run)\n"
        "raise SystemExit(Program('fcsd', '', '', {'try': command}).run(['try']))"
    )
    with start("-c", code) as child:
        out, err = child.communicate()
    assert (child.returncode, out) == (2, "told\n")
    assert "m/weights could not be written (No space left)" in err


@pytest.mark.parametrize("closed", ["2>&- <&-", ">&- 2>&- <&-"])
def test_a_command_runs_where_a_stream_is_closed(closed: str) -> None:
    child = subprocess.run(
        ["sh", "-c", f'"$0" -m fcsd families {closed}', sys.executable],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert (child.returncode, child.stderr) == (0, "")
    assert ("afmoe" in child.stdout) == (">&-" not in closed.split())


def test_the_module_is_the_command() -> None:
    with start("-m", "fcsd", "--version") as child:
        assert child.communicate() == ("fcsd 0.1.0\n", "") and child.returncode == 0
    with start("-m", "fcsd", "run", "nowhere.yaml") as child:
        out, error = child.communicate()
    assert child.returncode == 2 and out == ""
    assert re.fullmatch(r"fcsd run: error: nowhere\.yaml: no such file.*\n", error)


def test_without_a_command_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert 'fcsd = "fcsd.cli.main:main"' in (ROOT / "pyproject.toml").read_text()
    assert main([]) == 2
    printed = capsys.readouterr().out
    assert "usage: fcsd" in printed and "First steps:" in printed


class Refused:
    """Run a command that must be refused, and check what it printed and left."""

    def __init__(self, capfd: pytest.CaptureFixture[str], watched: Path):
        self.capfd, self.watched = capfd, watched

    def __call__(self, *command: object, message: str) -> None:
        before = self._final_names()
        self.capfd.readouterr()
        status = main([str(word) for word in command])
        out, error = self.capfd.readouterr()
        lines = [
            line for line in re.split(r"[\n\r]", error) if line.startswith("fcsd ")
        ]
        assert (status, len(lines)) == (2, 1), error
        assert "Traceback" not in error and error.rstrip().endswith(lines[0])
        assert re.search(message, lines[0]), lines[0]
        assert out == ""
        assert self._final_names() == before

    def _final_names(self) -> list[str]:
        """Finished results: whatever is neither a stage's note, nor tokens for the next
        try, nor an empty folder.
        """
        return sorted(
            str(path)
            for path in self.watched.rglob("*")
            if (path.is_file() and path.name != "stage.json")
            or path.name in ("model", "publish")
            if "tokens" not in path.parts
        )


@pytest.fixture
def refused(bench: Bench, capfd: pytest.CaptureFixture[str]) -> Refused:
    return Refused(capfd, bench.folder)


def test_a_missing_folder_is_refused(bench: Bench, refused: Refused) -> None:
    missing = str(bench.folder / "missing")
    for command in (
        ["convert", missing, str(bench.folder / "out")],
        ["evaluate", missing, "--output", str(bench.folder / "e")],
    ):
        refused(*command, message=r"missing: no such folder")
    refused(
        "distill",
        bench.recipe("r", model={"path": missing}),
        message=r"missing: no such folder",
    )
    refused("distill", bench.folder / "no.yaml", message=r"no\.yaml: no such file")
    refused("compare", missing, missing, message=r"missing")


def source(bench: Bench, text: str, **keys: Any) -> dict[str, Any]:
    path = bench.rows.parent / "other.jsonl"
    path.write_text(text)
    return {"train": [{"path": str(path)} | keys], "max_length": 32}


ROW = (
    json.dumps(
        {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        }
    )
    + "\n"
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "keys", "message"),
    [
        ('{"prompt": "a"}\n', {}, (r"no column 'messages'; it has 'prompt'; name the right ones under `columns`")),
        ("", {}, r"other\.jsonl.*empty"),
        ('{"messages": [\n', {}, r"other\.jsonl"),
        ('{"messages": "hello"}\n', {}, r"column 'messages': needs a list of messages with 'role' and 'content', or"),
        (ROW, {}, (r"has 1 rows of 32 tokens, but one batch of 128 tokens needs 4; use more data")),
        (ROW, {"streaming": True}, r"data.train.0.streaming: fcsd tokenizes every source once"),
        (ROW, {"split": "test"}, r"other\.jsonl"),
        (ROW, {"path": "none.jsonl"}, r"none\.jsonl.*no such file"),
    ],
    ids=[
        "missing column", "empty", "invalid", "wrong type", "too little", "a key of former times", "unknown split",
        "missing file",
    ],
)  # fmt: skip
def test_data_that_cannot_be_used_is_refused(
    bench: Bench, refused: Refused, text: str, keys: dict[str, Any], message: str
) -> None:
    refused(
        "distill", bench.recipe("r", data=source(bench, text, **keys)), message=message
    )


def test_a_text_that_cannot_be_read_is_refused_with_what_its_option_takes(
    bench: Bench, refused: Refused
) -> None:
    file, out = bench.rows.parent / "texts.jsonl", str(bench.folder / "out")
    for row, message in (
        (
            {"text": 5},
            r"texts\.jsonl, row 1: column 'text': text is needed, got 5; correct it$",
        ),
        (
            {"story": "a"},
            r"no column 'messages', .*; it has 'story'; name the right ones under"
            r" `columns`, for example"
            r" \{path: \S*texts\.jsonl, columns: \{'text': 'content'\}\}$",
        ),
    ):
        file.write_text(json.dumps(row) + "\n")
        for command in (
            ["calibrate", str(bench.base), f"{out}-c-{next(iter(row))}"],
            ["layers", str(bench.base), "--output", f"{out}-l-{next(iter(row))}"],
        ):
            refused(*command, "--text", file, message=message)


def test_mistakes_in_a_recipe_are_refused(bench: Bench, refused: Refused) -> None:
    recipe = str(bench.recipe("r", variants={"sft": {"objective.name": "sft"}}))

    def wrong(override: str, message: str, command: str = "distill") -> None:
        refused(command, recipe, "--set", override, message=message)

    wrong(
        "train.learning_rat=1",
        r"train\.learning_rat: unknown key; did you mean 'learning_rate'\?",
        "run",
    )
    wrong(
        "train.batch_size_tokens=96",
        r"96 is not a multiple of 64 \(per_device_train_batch_size 2 x"
        r" data\.max_length 32",
    )
    wrong("connectivity.layers=[7]", r"7")
    absent = "{suite: tiny, task: absent}"
    wrong(f"early_stopping={absent}", r"task 'absent': not in suite tiny")
    wrong("pretrain=1", r"pretrain")
    wrong("variants.x={connectivty.layers: all}", r"did you mean 'connectivity'\?")
    refused(
        "distill",
        recipe,
        "--variant",
        "sfd",
        message=r"has no variant 'sfd'; allowed: sft",
    )
    refused("sweep", recipe, message=r"has no `sweep` section")
    refused("pretrain", recipe, message=r"has no `pretrain` section")
    refused(
        "distill",
        recipe,
        "--set",
        "sweep={steps: 2, last_steps: 2}",
        message=r"sweep: the sweep is not finished; run `fcsd sweep`",
    )
    refused(
        "sweep",
        recipe,
        "--set",
        "sweep={steps: 2, last_steps: 3, warmup_steps: 0}",
        message=r"sweep: last_steps \(3\) is more than steps \(2\)",
    )


def test_a_folder_of_someone_else_is_not_written_into(
    bench: Bench, refused: Refused
) -> None:
    own = bench.folder / "r" / "distill"
    own.mkdir(parents=True)
    (own / "thesis.txt").write_text("mine")
    refused(
        "distill",
        bench.recipe("r"),
        message=r"is not empty and was not made by stage 'distill'; choose another",
    )
    refused("convert", bench.base, own, message=r"exists|not empty")
    refused(
        "trace",
        bench.recipe(),
        "--output",
        own,
        message=r"distill: exists and holds no trace",
    )
    text = ("--text", str(bench.rows))
    for command in (["convert"], ["calibrate", *text], ["quantize"]):
        refused(
            *command, bench.base, own / "thesis.txt",
            message=r"thesis\.txt: exists and is not a folder; choose another",
        )  # fmt: skip
    unfinished = own.rename(bench.folder / "out.partial")
    refused(
        "calibrate", bench.base, bench.folder / "out", *text,
        message=r"out\.partial: exists and holds no unfinished calibration; choose another",
    )  # fmt: skip
    own = unfinished
    assert [path.name for path in own.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x" * 300, r"xxx…?:? .*(bytes, but at most|too long)"),
        ("a\ud800", "an incomplete character"),
    ],
)
def test_a_path_that_no_file_can_have_is_refused_wherever_it_stands(
    bench: Bench, refused: Refused, name: str, message: str
) -> None:
    model, recipe, text = str(bench.base), str(bench.recipe("r")), str(bench.rows)
    path = str(bench.folder / name)
    for command in (
        ["run", path, "--show"],
        ["evaluate", model, "--suite", "tiny", "--output", path],
        ["layers", model, "--text", text, "--output", path],
        ["calibrate", model, path, "--text", text],
        ["convert", model, path],
        ["push", path, "me/x"],
        ["tiny-data", path],
    ):
        refused(
            *command,
            message=(
                f"{message}|: no such f(ile|older)|no file can have this name|safetensors requires UTF-8 paths"
            ),
        )
    if "\ud800" not in name:
        refused("distill", recipe, "--set", f"output_dir={path}", message=message)


def test_an_output_folder_that_cannot_be_made_is_refused_with_what_is_in_its_way(
    bench: Bench, refused: Refused
) -> None:
    model, recipe, text = str(bench.base), str(bench.recipe("r")), str(bench.rows)
    (bench.folder / "afile").write_text("x")
    out = str(bench.folder / "afile" / "x")
    for command in (
        ["distill", recipe, "--set", f"output_dir={out}"],
        ["run", recipe, "--set", f"output_dir={out}"],
        ["run", recipe, "--rehearse", out],
        ["evaluate", model, "--suite", "tiny", "--output", out],
        ["layers", model, "--text", text, "--output", out],
        ["calibrate", model, out, "--text", text],
        ["convert", model, out],
        ["tiny-data", out],
    ):
        refused(
            *command,
            message=(
                r"afile/x\S*: cannot be created, because \S*/afile is not a folder;"
                r" choose another output"
            ),
        )
        # A place where nobody may write, which root learns only by trying.
        command = [word.replace(out, "/proc/x") for word in command]
        refused(
            *command,
            message=(
                r"/proc/x\S*: cannot be created, because /proc is not writable \(.+\); choose"
                r" another"
            ),
        )


def test_the_working_folder_is_not_replaced(
    bench: Bench, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bench.folder / "here").mkdir()
    monkeypatch.chdir(bench.folder / "here")
    refused("convert", bench.base, ".", message="not the name of a new folder")


def test_an_address_in_a_mistaken_command_line_is_shown_without_its_secrets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (
        ["evaluate", "model", "https://me:SECRET@host/v1?key=SECRET"],
        ["evaluate", "model", "--concurrency", "https://host/v1?key=SECRET"],
        ["evaluate", "model", "--concurrency", "https://host/v1?SECRET"],
        ["https://me:SECRET@host"],
    ):
        try:
            assert main(words) == 2
        except SystemExit as end:
            assert end.code == 2
        error = capsys.readouterr().err
        assert "host" in error and "SECRET" not in error


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--data-root", "nowhere", "--data-root has no meaning without --decontaminate"),
        *((option, "-1", f"error: {option}: Input should be greater than")
          for option in ("--tokens", "--ridge", "--max-length")),
    ],
)  # fmt: skip
def test_an_option_without_meaning_or_out_of_range_is_refused_by_its_name(
    bench: Bench, refused: Refused, option: str, value: str, message: str
) -> None:
    command = ("calibrate", bench.base, bench.folder / "out", "--text", bench.rows)
    refused(*command, option, value, message=message)


def test_an_interruption_says_how_to_continue(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fcsd.pipeline.distill.distill", interrupted)
    assert main(["distill", str(bench.recipe("r"))]) == 130
    assert (
        capsys.readouterr().err
        == "\nfcsd distill: interrupted; run the same command again to continue\n"
    )


@pytest.mark.parametrize(
    ("family", "options", "warned"),
    [
        ("qwen3_moe", ["--mlp", "full"], True),
        ("mixtral", [], True),
        ("qwen3_moe", ["--attention", "full"], False),
        ("qwen3_moe", ["--layers", "0,2"], False),  # no attention is ahead
        ("qwen3_moe", ["--config-only"], False),
        ("qwen2_moe", ["--mlp", "full"], False),
    ],
)
def test_convert_says_that_weights_without_a_shared_expert_need_calibration(
    family: str,
    options: list[str],
    warned: bool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    tiny_model(family).save_pretrained(tmp_path / "model")
    capfd.readouterr()
    out = str(tmp_path / "out")
    assert main(["convert", str(tmp_path / "model"), out, *options]) == 0
    printed = capfd.readouterr()
    assert printed.out == f"{out}\n"
    lines = [line for line in printed.err.splitlines() if "calibrate" in line]
    assert len(lines) == warned
    if warned:
        assert f"fcsd convert: {family} has no shared expert" in lines[0]


def test_convert_and_unconvert_give_the_weights_back(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    there, back = bench.folder / "there", bench.folder / "back"
    assert main(["convert", str(bench.base), str(there), "--layers", "last:1"]) == 0
    assert (
        json.loads((there / "config.json").read_text())["model_type"]
        == "farskip_qwen2_moe"
    )
    assert main(["unconvert", str(there), str(back)]) == 0
    assert json.loads((back / "config.json").read_text())["model_type"] == "qwen2_moe"
    one, other = (
        load_file(bench.base / "model.safetensors"),
        load_file(back / "model.safetensors"),
    )
    assert one.keys() == other.keys()
    assert all((value == other[name]).all() for name, value in one.items())
    assert capsys.readouterr().out.split() == [str(there), str(back)]


def test_families_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    from fcsd.model.families import FAMILIES

    assert main(["families"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in FAMILIES)
    assert main(["families", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--variant sft", "--variant needs --only pretrain or"),
        ("--only convert --verify", "--verify needs --only cache-teacher; add it"),
        ("--show-rows 3", "--show-rows needs --only tokenize; add it"),
        ("--show --only convert", "--show and --only are both given; leave one out"),
        ("--only convert --json", "--json prints the report, but this command does not write one"),
        ("--show --json", "--json prints the report, but this command does not write one"),
    ],
)  # fmt: skip
def test_an_option_that_the_stage_does_not_have_is_refused(
    bench: Bench, refused: Refused, options: str, message: str
) -> None:
    refused("run", bench.recipe("r"), *options.split(), message=message)


def test_the_resolved_recipe_loads_again(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(bench.recipe("r")), "--show", "--set", "seed=5"]) == 0
    first = capsys.readouterr().out
    again = bench.folder / "again.yaml"
    again.write_text(first)
    assert main(["run", str(again), "--show"]) == 0
    assert capsys.readouterr().out == first and "\nseed: 5\n" in first


def test_the_accelerate_configuration_is_what_accelerate_reads() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(ROOT / "configs" / "cpu_2.yaml"))
    assert (config.num_processes, config.use_cpu) == (2, True)


EMPTY = "a path is needed, got ''"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["convert"], "the following arguments are required: MODEL, OUT"),
        (["convert", "a", "b", "--attention", "half"], "argument --attention: invalid choice: 'half'"),
        (["nonsense"], "no command 'nonsense'"),
        (["convert", "m", "out", "--laers=1"], "fcsd convert: error: no option '--laers'; did you mean '--layers'?"),
        (["convert", "model", "out", "more"], "fcsd convert: error: unexpected argument 'more'; put a name with"),
        *(([word, "recipe.yaml"], f"no command '{word}'; did you mean '{said}'?")
          for word, said in (("trian", "pretrain"), ("distil", "distill"), ("evalute", "evaluate"))),
        # which would be the working folder
        (["convert", "model", ""], f"argument OUT: {EMPTY}"),
        (["evaluate", "model", "--output", ""], f"argument --output: {EMPTY}"),
        (["evaluate", "model", "--cache="], f"argument --cache: {EMPTY}"),
        (["run", "", "--show"], f"argument RECIPE: {EMPTY}"),
        (["tiny-data", ""], f"argument OUT: {EMPTY}"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_mistake_in_a_command_line_is_argparse_usage(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("word", sorted(cli.MOVED_COMMANDS))
def test_a_command_that_has_moved_says_what_to_type_instead(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert word not in commands()
    with pytest.raises(SystemExit) as ended:
        main([word, "anything", "--option"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(
        f"fcsd: error: '{word}' is now `{cli.MOVED_COMMANDS[word]}`\n"
    )
    program, command, *options = cli.MOVED_COMMANDS[word].split()
    if program == "fcsd":  # other programs are distributions of their own
        flags = {
            flag
            for action in commands()[command]._actions
            for flag in action.option_strings
        }
        assert {option for option in options if option.startswith("--")} <= flags


def test_a_librarys_long_error_is_cut() -> None:
    assert one_line(ValueError("one\ntwo")) == "one two"
    long = one_line(ValueError("column\n" * 1000))
    assert len(long) == 500 and long.startswith("column column") and long.endswith("…")
