"""The guard of a benchmark's programs ends with them, however soon they end."""

import subprocess
import sys

ENDS_AT_ONCE = """
import os, subprocess, sys
from fcsd_bench import guard

class Ended(subprocess.Popen):
    def __init__(self, *words, **options):
        super().__init__(*words, **options)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

subprocess.Popen = Ended
sys.exit(guard.main([sys.executable, "-S", "-c", "raise SystemExit(7)"]))
"""


def test_the_status_of_a_command_that_ends_before_it_is_waited_for_is_not_lost() -> (
    None
):
    with subprocess.Popen(
        [sys.executable, "-c", ENDS_AT_ONCE], stdin=subprocess.PIPE
    ) as guard:
        try:
            assert guard.wait(timeout=300) == 7
        finally:
            guard.kill()
