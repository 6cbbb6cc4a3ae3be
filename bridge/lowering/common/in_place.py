"""Writes to a part of an array, which XLA does in place, and what keeps XLA for CPUs from reading
what it has just written.

XLA fuses a write with the computation of its values. It should not if they are read elsewhere in
the same memory, but it does not notice if there is a reshape between the two
(https://github.com/openxla/xla/issues/49176, every jaxlib so far): y[1:] = y[:-1] then copies the
first row into all others. Such a read has to be over before the write begins.
``lax.optimization_barrier`` does not ensure that, because XLA removes it before it fuses. A call
that is not inlined stays. It returns a copy: if it returned its operand, a later fusion might read
the one value by both names and write its result into their memory, and XLA looks at one name only.

The call stands behind the read (a slice, a sum, ...), where XLA itself ends a fusion if it does
notice, so that it makes no program slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func, stablehlo
from jax.interpreters import ad, batching, mlir


def overwrite(x: Array, values: Array, start: Sequence[int | Array]) -> Array:
    """x with values at the place that begins at start; as in ``lax.dynamic_update_slice``, they
    have x's rank and dtype.
    """
    # exported for any size: XLA inlines all calls when the sizes are known
    if not all(isinstance(n, int) for n in x.shape):
        hit = lax.dynamic_update_slice(
            lax.full_like(x, False, bool), lax.full_like(values, True, bool), start
        )
        return lax.select(hit, lax.dynamic_update_slice(lax.full_like(x, 0), values, start), x)
    known = [i for i in start if isinstance(i, int)]
    values = read_first(values, x, tuple(known) if len(known) == len(start) else None)
    return lax.dynamic_update_slice(x, values, starts(start, x.shape))


def starts(at: Sequence[int | Array], shape: Sequence[int]) -> list[Any]:
    """Where a part of an array of this shape begins, as int32 where that can say it.

    JAX maps and differentiates a loop after our trace of it, and in the user's own program 64-bit
    types may then be off. Its rules for a slice compute with int32 beside the place, and refuse one
    that is int64.
    """
    if not all(isinstance(n, int) and n <= np.iinfo(np.int32).max for n in shape):
        return list(at)
    return [
        np.int32(i) if isinstance(i, int) else _as_int32(i, n)
        for i, n in zip(at, shape, strict=True)
    ]


def _as_int32(i: Array, size: int) -> Array:
    """An index of any integer type; what lies outside of the dimension still does."""
    if i.dtype.itemsize >= 4:
        i = lax.clamp(
            i.dtype.type(0 if np.issubdtype(i.dtype, np.unsignedinteger) else -size),
            i,
            i.dtype.type(size),
        )
    return lax.convert_element_type(i, np.int32)


def read_first(values: Array, x: Array, at: tuple[int, ...] | None = None) -> Array:
    """The values, which are to be written into x: what they read from x's memory is read before it
    is written.

    at: the place in x if it is known. What is read just there, element by element, may be read
    while it is written.
    """
    return _read_first_p.bind(values, x, at=at)


_read_first_p = Primitive("read_first")
_read_first_p.def_impl(lambda values, x, at: values)
_read_first_p.def_abstract_eval(lambda values, x, at: values)


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Any], *, at: tuple[int, ...] | None
) -> tuple[Array, Any]:
    same = any(isinstance(t, ad.Zero) for t in tangents)
    return _read_first_p.bind(*primals, at=at), tangents[0] if same else _read_first_p.bind(
        *tangents, at=at
    )


def _transpose(ct: Any, values: Any, x: Any, *, at: tuple[int, ...] | None) -> list[Any]:
    return [ct, ad.Zero(x.aval) if ad.is_undefined_primal(x) else None]


def _batch(
    operands: Sequence[Array], dims: Sequence[Any], *, at: tuple[int, ...] | None
) -> tuple[Array, Any]:
    dim = dims[0]
    at = (
        (*at[:dim], 0, *at[dim:]) if at is not None and dim is not None and dim == dims[1] else None
    )
    return _read_first_p.bind(*operands, at=at), dim


ad.primitive_jvps[_read_first_p] = _jvp
ad.primitive_transposes[_read_first_p] = _transpose
batching.primitive_batchers[_read_first_p] = _batch


def _lowered(
    context: mlir.LoweringRuleContext, values: ir.Value, x: ir.Value, *, at: tuple[int, ...] | None
) -> list[ir.Value]:
    return [
        _Reads(context, x, at).before(values)
        if "cpu" in context.module_context.platforms
        else values
    ]


# JAX lowers what can be cached by itself; the rule sees what is around
mlir.register_lowering(_read_first_p, _lowered, cacheable=False)

_function: Any = func.FuncOp
#: Each element of the result depends on the elements at the same place of the operands.
ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in (
        "abs",
        "add",
        "and",
        "ceil",
        "clamp",
        "compare",
        "convert",
        "cosine",
        "divide",
        "exponential",
        "exponential_minus_one",
        "floor",
        "log",
        "log_plus_one",
        "logistic",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "not",
        "or",
        "power",
        "remainder",
        "reshape",
        "rsqrt",
        "select",
        "sign",
        "sine",
        "sqrt",
        "subtract",
        "tanh",
        "xor",
    )
)
_WRITES = frozenset({"stablehlo.dynamic_update_slice", "stablehlo.scatter"})


class _Reads:
    """The reads of an array's memory in the part of a program that has been lowered, up to a write
    into it.
    """

    def __init__(
        self, context: mlir.LoweringRuleContext, x: ir.Value, at: tuple[int, ...] | None
    ) -> None:
        self.module, self.x, self.at = context.module_context.module, x, at
        # the values that may lie in the same memory, reshaped or not
        self.memory = _closure([x], self._may_be)
        self.readers = _closure(self.memory, _results)

    def _may_be(self, v: ir.Value) -> list[ir.Value]:
        """The values of which v may be another form: XLA moves reshapes, and removes operations
        that change nothing (x * 1).
        """
        owner: Any = v.owner
        if not isinstance(owner, ir.Block):
            return (
                [] if owner.name in _WRITES else [o for o in owner.operands if size(o) == size(v)]
            )
        # two arguments of a function may be one value where it is called, but not two of what a
        # loop carries
        of = owner.owner.operation
        # of a loop's body: none
        name = str(of.attributes["sym_name"]).strip('"') if "sym_name" in of.attributes else ""
        return (
            []
            if not name or name == "main" or name.startswith("closed_call")
            else [a for a in owner.arguments if size(a) > 1]
        )

    def before(self, values: ir.Value) -> ir.Value:
        """The values, behind calls that are not inlined where they, or what they are computed of,
        read the memory.
        """
        return (
            once(self.module, values, True)
            if values in self.memory
            else self._cut(values, True) or values
        )

    def _cut(self, v: ir.Value, in_place: bool) -> ir.Value | None:
        """in_place: all between v and the write is element by element. Returns what takes v's
        place, if anything does.
        """
        if v not in self.readers:
            return None
        op: Any = v.owner
        while op.name == "stablehlo.reshape" and op.operands[0] not in self.memory:
            op = op.operands[0].owner  # XLA computes less twice if the call is behind the reshape
        sources = [o for o in op.operands if o in self.readers]
        if op.regions or any(o in self.memory or size(o) > size(v) for o in sources):
            return None if in_place and self._reads_there(op) else once(self.module, v, True)
        for o in sources:
            self._cut(o, in_place and op.name in ELEMENTWISE)
        return None

    def _reads_there(self, op: Any) -> bool:
        if op.name != "stablehlo.slice":
            return op.name in ELEMENTWISE
        starts, strides = (tuple(op.attributes[key]) for key in ("start_indices", "strides"))
        return op.operands[0] == self.x and starts == self.at and set(strides) <= {1}


def once(module: ir.Module, v: ir.Value, copied: bool = False) -> ir.Value:
    """The value behind a call that is not inlined, with which all that XLA fuses for it ends; it
    takes the value's place.

    copied: the call returns a copy, because later operations may still name the value itself.
    """
    copied = copied and size(v) > 0
    name, owner = f"{'read_first' if copied else 'computed_once'}_{v.type}", v.owner
    if name not in ir.SymbolTable(module.operation):
        with ir.InsertionPoint(module.body):
            same = _function(name, ([v.type], [v.type]), visibility="private")
        with ir.InsertionPoint(same.add_entry_block()) as body:
            (given,) = body.block.arguments
            func.ReturnOp([_copy(given) if copied else given])
    call: Any = func.CallOp([v.type], ir.FlatSymbolRefAttr.get(name), [v])
    call.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
        {"inlineable": ir.StringAttr.get("false")}
    )
    v.replace_all_uses_except(call.result, call.operation)
    if isinstance(owner, ir.Block):
        call.operation.move_before(owner.operations[0])
    else:
        call.operation.move_after(owner)
    return call.result


def _copy(v: ir.Value) -> ir.Value:
    """A copy that XLA does not take for the value itself: it does not know that a number is zero or
    another one.
    """
    scalar, start = ir.RankedTensorType.get([], v.type.element_type), [0] * v.type.rank
    first = stablehlo.reshape(
        scalar, stablehlo.slice(v, start, [1] * v.type.rank, [1] * v.type.rank)
    )
    zero = stablehlo.convert(scalar, mlir.ir_constant(np.bool_(False)))
    is_zero, is_other = [
        stablehlo.compare(first, zero, stablehlo.ComparisonDirectionAttr.get(how))
        for how in ("EQ", "NE")
    ]
    return stablehlo.select(
        stablehlo.or_(is_zero, is_other), v, stablehlo.broadcast_in_dim(v.type, zero, [])
    )


def _closure(values: Any, then: Any) -> set[ir.Value]:
    found, left = set(values), list(values)
    while left:
        for v in then(left.pop()):
            if v not in found:
                found.add(v)
                left.append(v)
    return found


def _results(v: ir.Value) -> list[ir.Value]:
    return [r for use in v.uses for r in use.owner.results]


def size(v: ir.Value) -> int:
    return math.prod(v.type.shape) if isinstance(v.type, ir.RankedTensorType) else 0
