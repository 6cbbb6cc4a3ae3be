"""What is done with each ATen operator: which are views, which write, which are lowered and which fall to a decomposition.

``plan`` looks at an operator's schema once and returns the function that runs it from then on.
"""
from __future__ import annotations

from typing import Any

from bridge import lowering as _lowering  # noqa: F401  fills the registry
from bridge.fallback import fallback
from bridge.kernels import Plan, guarded
from bridge.lowering.registry import LOWERINGS, OVERRIDDEN
from bridge.opaque_operators import opaque_plan
from bridge.operands import pure
from bridge.own_rules import OWN_RULES
from bridge.viewing import view_plan
from bridge.writing import write_plan


def plan(func: Any) -> Plan:
    """The function (args, kwargs) -> result that runs an operator on traced tensors."""
    return _plan(func) if func in OVERRIDDEN else guarded(func, _plan(func))


def _plan(func: Any) -> Plan:
    special = OWN_RULES.get(func)
    if special is not None:
        return special
    opaque = opaque_plan(func)
    if opaque is not None:
        return opaque
    if func.namespace not in ("aten", "prims") and func not in LOWERINGS:
        return fallback(func)
    if func._schema.is_mutable:
        return write_plan(func)
    if func in LOWERINGS:
        return view_plan(func) if func.is_view else pure(func, LOWERINGS[func])
    return fallback(func)
