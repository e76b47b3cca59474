"""Report what a checkpoint is, which layers would be rewired, and how much memory that
needs, without loading its weights.

    from fcsd.model.inspect import inspect_model, report_table
    print(report_table(inspect_model("Qwen/Qwen3-30B-A3B")))

`checkpoint` finds the config (one file from the Hub, not the weights), `report` puts
the facts together, `parameters` counts on the meta device, `memory` turns counts into
bytes, `table` prints.

Not covered: the memory of a training (`fcsd.planning.cost`). Code that comes with a
checkpoint is never run.
"""

from fcsd.model.inspect.report import inspect_model
from fcsd.model.inspect.table import report_table

__all__ = ["inspect_model", "report_table"]
