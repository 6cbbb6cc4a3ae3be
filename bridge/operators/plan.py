"""The plan of each ATen operator: a view, a write, a lowering, or a decomposition.

``plan`` looks at an operator's schema once and returns the function that runs it from then on.
"""

from __future__ import annotations

import torch

from bridge import lowering as _lowering  # noqa: F401  fills the registry
from bridge.lowering.linalg.grouped_matmul import OF_TRANSFORMERS
from bridge.lowering.registry import LOWERINGS, OVERRIDDEN
from bridge.operators import special_cases as _own_rules  # noqa: F401  fills OWN_RULES
from bridge.operators.dtype_refusals import Plan, guarded
from bridge.operators.mutation import write_plan
from bridge.operators.operands import drawn, fallback, ordered, pure
from bridge.operators.views import view_plan
from bridge.trace import tracing
from bridge.trace.tracing import OWN_RULES


def plan(func: torch._ops.OpOverload) -> Plan:
    """The function (args, kwargs) -> result that runs an operator on traced tensors."""
    found = _plan(func)
    return found if func in OVERRIDDEN else guarded(func, found)


def _plan(func: torch._ops.OpOverload) -> Plan:
    if func in OWN_RULES:
        return OWN_RULES[func]
    row = LOWERINGS.get(func) or OF_TRANSFORMERS.get(str(func))
    if func._schema.is_mutable or (row is not None and row.writes):
        return write_plan(func)
    if row is not None:
        if func.is_view:
            return view_plan(func, row)
        inner = pure(func, row)
        return drawn(func, inner) if row.draws else ordered(inner) if row.ordered else inner
    return fallback(func)


tracing.HANDED_IN["plan"] = plan
