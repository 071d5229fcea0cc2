"""Making states while torch.compile traces.

A tensor that is made inside the traced graph cannot be written to in the backward graph. So states
are made beside the trace, on the real module, and the graph meets them as inputs.
"""

from __future__ import annotations

from typing import Any

import torch

from quaver.errors import QuaverError


def refresh_states(context: Any) -> None:
    """For `comptime(refresh_states)` in a method with the locals `self`, `recipe` and `device`.

    torch.compile runs it when it traces that line; it leaves nothing in the graph.
    """

    def local(name: str) -> Any:
        variable = context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
        variable = variable.realize() if hasattr(variable, "realize") else variable
        return variable.value if hasattr(variable, "value") else variable.as_python_constant()

    local("self")._refresh_states(local("recipe"), local("device"))


def refuse_recomputation(context: Any) -> None:
    """For `comptime(refuse_recomputation)`: nothing that is compiled can repeat a first run.

    Raises:
        QuaverError: this is traced inside a backward pass, as a checkpoint around it has it.
    """
    if torch._C._current_graph_task_id() != -1:
        raise QuaverError(
            "a compiled module inside a checkpoint cannot repeat its scales; compile around "
            "torch.utils.checkpoint (without fullgraph=True), or do not compile"
        )
