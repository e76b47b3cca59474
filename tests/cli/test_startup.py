"""The command line loads no heavy library before it has work to do."""

import pytest

from tests.support import start

MISTAKE = """
import sys
from fcsd.cli.main import main
status = main(sys.argv[1:])
print(status, 'torch' in sys.modules)
"""

HELP = """
import sys
from fcsd.cli.main import COMMANDS, main
for name in COMMANDS:
    try: main([name, '--help'])
    except SystemExit: pass
    heavy = {'torch', 'transformers', 'datasets', 'lm_eval'} & set(sys.modules)
    assert not heavy, (name, heavy)
"""

SCORER = """
import sys
import fcsd.evaluation.code.scorer
print({'torch', 'transformers', 'datasets', 'lm_eval'} & set(sys.modules))
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["distill", "nowhere.yaml"], "nowhere.yaml: no such file\n"),
        (["plan", "nowhere"], "nowhere: no such folder; a checkpoint is a folder with"),
        (["convert", "nowhere", "out"], "nowhere: no such folder; a checkpoint is a"),
        (
            ["compare", "nowhere", "elsewhere"],
            "nowhere: no results.json; this is not a",
        ),
        (
            ["plan-layers", "nowhere", "--budget", "3"],
            "nowhere: no layers.json; this is",
        ),
        (["plan", "a/b", "--gpu", "h1000"], "--gpu h1000: unknown GPU; allowed: a100"),
    ],
)
def test_a_mistaken_name_is_refused_before_torch_is_loaded(
    words: list[str], message: str
) -> None:
    with start("-c", MISTAKE, *words) as child:
        out, error = child.communicate()
    assert out == "2 False\n"
    assert error.startswith(f"fcsd {words[0]}: error: {message}")


def test_families_are_listed_without_torch() -> None:
    with start("-c", MISTAKE, "families") as child:
        out, error = child.communicate()
    assert error == "" and out.endswith(" |\n0 False\n")


def test_the_help_of_a_command_loads_no_heavy_library() -> None:
    with start("-c", HELP) as child:
        _, error = child.communicate()
    assert (child.returncode, error) == (0, "")


def test_the_sandbox_and_its_scorer_load_no_heavy_library() -> None:
    with start("-c", SCORER) as child:
        out, _ = child.communicate()
    assert out == "set()\n"
