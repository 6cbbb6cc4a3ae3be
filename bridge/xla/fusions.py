"""Ends the fusions of XLA for CPUs that would compute the same numbers over and over.

XLA fuses an operation with what it is computed from, and computes that anew for each operation that
needs it, also if these need it at other places (slices, concatenations, pads). In a long chain,
such as the steps of a simulation and their derivatives, the work doubles from step to step: a
hundred steps take minutes to compile, and run up to fifty times as long as if nothing were fused.
So we count what an operation would compute if all before it were fused into it, and where that is
too much, the value is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.mlir import ir

from bridge.lowering.common.in_place import ELEMENTWISE, once, size

# so many operations in one fusion are too many; one operation counts as often as it would be
# computed
_WORST = 1 << 14
_MOST = 64  # in a program that has such a fusion, each is ended that is larger than this
#: What is fused with what it is computed from, beside operations element by element.
_FUSED = (
    ELEMENTWISE
    | frozenset(
        f"stablehlo.{name}"
        for name in (
            "broadcast_in_dim",
            "concatenate",
            "dynamic_slice",
            "pad",
            "reverse",
            "slice",
            "transpose",
        )
    )
    | {"func.call"}
)


def limited(lowered: jax.stages.Lowered) -> None:
    """End the fusions that are too large, in a program that is lowered and not compiled yet."""
    module: ir.Module = lowered.compiler_ir("stablehlo")
    every: list[Any] = []

    def note(op: ir.Operation) -> ir.WalkResult:
        every.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(note, ir.WalkOrder.PRE_ORDER)
    if max(_fused(every, None).values(), default=0) > _WORST:
        _fused(every, module)


def _fused(every: Sequence[Any], module: ir.Module | None) -> dict[ir.Value, int]:
    """By value, how many operations XLA may fuse for it; module: where to end those that are larger
    than ``_MOST``.
    """
    work: dict[ir.Value, int] = {}
    for op in every:
        if op.name not in _FUSED and not (
            op.name == "stablehlo.reduce" and size(op.operands[0]) == size(op.results[0])
        ):
            continue
        count = 1 + sum([work.get(v, 0) for v in op.operands])
        if module is not None and count > _MOST and len(op.results) == 1:
            with op.context, op.location, ir.InsertionPoint(op):
                work[once(module, op.results[0])] = 0
        else:
            work.update(dict.fromkeys(op.results, count))
    return work
