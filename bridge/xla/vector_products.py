"""Writes small products of a matrix and a vector as sums, in a program that XLA is to compile fast.

XLA for CPUs makes a long kernel of each such product, unrolled over tiles. LLVM takes 3 ms for it,
and 0.8 ms for a product and a sum.
"""

from __future__ import annotations

import math

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

_LARGEST = 1 << 14  # multiplications in one product: beyond that, the time of a run counts for more


def as_sums(lowered: jax.stages.Lowered, longest: int) -> None:
    """Replace the small products of a matrix and a vector in a program that is lowered and not
    compiled yet.

    longest: how many numbers may be added up one after the other.
    """
    products: list[ir.Operation] = []

    def note(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.dot_general":
            products.append(op)
        return ir.WalkResult.ADVANCE

    module: ir.Module = lowered.compiler_ir("stablehlo")
    module.operation.walk(note)
    for op in products:
        _replace(op, longest)


def _replace(op: ir.Operation, longest: int) -> None:
    dims = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    batched = [*dims.lhs_batching_dimensions], [*dims.rhs_batching_dimensions]
    summed = [*dims.lhs_contracting_dimensions], [*dims.rhs_contracting_dimensions]
    result, *types = [ir.RankedTensorType(v.type) for v in (op.results[0], *op.operands)]
    free = [
        [d for d in range(t.rank) if d not in (*b, *s)]
        for t, b, s in zip(types, batched, summed, strict=True)
    ]
    sizes = [types[0].shape[d] for d in summed[0]]
    kind = result.element_type
    if str(kind) not in ("f32", "f64") or any(t.element_type != kind for t in types):
        return
    if not any(math.prod([t.shape[d] for d in ds]) == 1 for t, ds in zip(types, free, strict=True)):
        return
    if not 1 < math.prod(sizes) <= longest or math.prod([*result.shape, *sizes]) > _LARGEST:
        return
    # where the result has the free dimensions of each operand
    firsts = len(batched[0]), len(batched[0]) + len(free[0])
    with op.context, op.location, ir.InsertionPoint(op):
        every = ir.RankedTensorType.get([*result.shape, *sizes], kind)
        factors = []
        for v, t, b, f, s, first in zip(
            op.operands, types, batched, free, summed, firsts, strict=True
        ):
            place = {
                d: k
                for ds, start in ((b, 0), (f, first), (s, result.rank))
                for k, d in enumerate(ds, start)
            }
            factors.append(
                stablehlo.broadcast_in_dim(
                    every, v, ir.DenseI64ArrayAttr.get([place[d] for d in range(t.rank)])
                )
            )
        scalar = ir.RankedTensorType.get([], kind)
        zero = stablehlo.constant(
            ir.DenseElementsAttr.get_splat(scalar, ir.FloatAttr.get(kind, 0.0))
        )
        last = ir.DenseI64ArrayAttr.get(range(result.rank, every.rank))
        total = stablehlo.ReduceOp([result], [stablehlo.multiply(*factors)], [zero], last)
        with ir.InsertionPoint(total.regions[0].blocks.append(scalar, scalar)) as body:
            stablehlo.return_([stablehlo.add(*body.block.arguments)])
    op.results[0].replace_all_uses_with(total.results[0])
    op.erase()
