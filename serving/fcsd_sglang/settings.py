"""How all-reduces run, as the user chooses in `FCSD_SERVING`. Standard library only.

The default, `c10d`, runs on the stream of torch's process group on GPUs, and in its
thread with gloo.
"""

import json
import os
from dataclasses import replace

from fcsd_vllm.settings import Settings, SettingsError, read_settings

VARIABLE = "FCSD_SERVING"
BACK_ENDS = ("c10d", "blocking", "timed")


def settings() -> Settings:
    """Return the settings in `FCSD_SERVING`, JSON such as `{"comm": "blocking"}`.

    Raises:
        SettingsError: invalid JSON, an unknown key, or a backend that SGLang does not
        support.
    """
    text = os.environ.get(VARIABLE, "{}")
    try:
        chosen = read_settings({"fcsd": json.loads(text)})
    except json.JSONDecodeError as error:
        raise SettingsError(
            f'{VARIABLE}: must be JSON such as {{"comm": "blocking"}}, got {text!r}'
        ) from error
    except SettingsError as error:
        raise SettingsError(
            str(error).replace("additional_config: fcsd", VARIABLE)
        ) from error
    if chosen.comm and chosen.comm not in BACK_ENDS:
        raise SettingsError(
            f"{VARIABLE}.comm: must be one of {', '.join(BACK_ENDS)} with SGLang, got"
            f" {chosen.comm!r}"
        )
    if chosen.looked_at:
        raise SettingsError(
            f"{VARIABLE}.looked_at: applies to vLLM only; leave it out, because SGLang"
            " is supported in one version"
        )
    return chosen if chosen.comm else replace(chosen, comm=BACK_ENDS[0])
