"""One program with symbolic sizes, from the programs of a function that was traced at several
sizes.

These are read together, equation by equation. What is the same in all of them stays; a size that
differs becomes an expression of the symbols that has these values, and so does a number that was
computed from sizes; whatever else differs cannot be exported.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from bridge import private_jax
from bridge.errors import is_users, shown_line
from bridge.export.dimensions import Sizes
from bridge.lowering.nn.convolution_primitive import of_any_size
from bridge.trace.value_checks import is_check

Eqns = Sequence[JaxprEqn]
Vector = tuple[int, ...]


class Differs(RuntimeError):
    """The programs of several sizes are not one program."""


class NoFormula(Differs):
    """A number depends on sizes in a way that was not recognized."""


class Replay:
    """The programs, to be run as one.

    Args:
        sizes: at which the programs were traced.
        symbols: the symbolic size of each name.
    """

    def __init__(self, sizes: Sequence[Sizes], symbols: dict[str, Any]) -> None:
        self.sizes, self.symbols = sizes, symbols
        self.known: dict[Vector, Any] = {
            tuple(s[name] for s in sizes): dim for name, dim in symbols.items()
        }

    def __call__(self, programs: Sequence[ClosedJaxpr], operands: Sequence[Any]) -> list[Any]:
        """The programs' outputs for these operands, which have symbolic shapes."""
        for value, *variables in zip(operands, *[p.jaxpr.invars for p in programs], strict=True):
            self._learn(variables, value)
        return self._closed(programs, operands)

    def _closed(self, programs: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """programs: closed jaxprs, or jaxprs without constants."""
        jaxprs = [getattr(p, "jaxpr", p) for p in programs]
        every = [getattr(p, "consts", ()) for p in programs]
        if len({len(consts) for consts in every}) > 1:
            raise Differs("the program has other tables of numbers at other sizes")
        uses = [
            [e for e in jaxprs[0].eqns if any(v is const for v in e.invars)]
            for const in jaxprs[0].constvars
        ]
        consts = [
            self._constant(values, eqns)
            for values, eqns in zip(zip(*every, strict=True), uses, strict=True)
        ]
        return self._run(jaxprs, consts, operands)

    def _run(
        self, jaxprs: Sequence[Jaxpr], consts: Sequence[Any], operands: Sequence[Any]
    ) -> list[Any]:
        first = jaxprs[0]
        values: dict[Any, Any] = dict(
            zip([*first.constvars, *first.invars], [*consts, *operands], strict=True)
        )
        numbers: list[dict[Any, int]] = [
            {v: k for k, v in enumerate([*j.constvars, *j.invars])} for j in jaxprs
        ]

        def read(atoms: Sequence[Any], eqns: Eqns) -> Any:
            if all(isinstance(v, Literal) for v in atoms):
                return self._constant([np.asarray(v.val, v.aval.dtype) for v in atoms], eqns)
            if (
                len(
                    {
                        -1 if isinstance(v, Literal) else n[v]
                        for v, n in zip(atoms, numbers, strict=True)
                    }
                )
                > 1
            ):
                raise Differs(f"what it computes{where(eqns)} has other operands at other sizes")
            return values[atoms[0]]

        for eqns in itertools.zip_longest(*[j.eqns for j in jaxprs]):
            if None in eqns or len({private_jax.named(e)[0] for e in eqns}) > 1:
                at = where([e for e in eqns if e is not None])
                raise Differs(
                    f"the program has other operations at other sizes, first{at}: either Python "
                    "asks for the size there, in an `if` or a loop, or the operator computes in "
                    "another way; use torch.where and operators on whole tensors"
                )
        for eqns in zip(*[j.eqns for j in jaxprs], strict=True):
            outs = self._equation(
                eqns, [read(atoms, eqns) for atoms in zip(*[e.invars for e in eqns], strict=True)]
            )
            for variables, value in zip(
                zip(*[e.outvars for e in eqns], strict=True), outs, strict=True
            ):
                self._learn(variables, value)
                values[variables[0]] = value
                for n, v in zip(numbers, variables, strict=True):
                    n[v] = len(n)
        return [read(atoms, ()) for atoms in zip(*[j.outvars for j in jaxprs], strict=True)]

    def _learn(self, variables: Sequence[Any], value: Any) -> None:
        """Remember the sizes of a value, which later parameters may name; raises if they are not
        those of the programs.
        """
        for k, dim in enumerate(getattr(value, "shape", ())):
            vector = tuple(v.aval.shape[k] for v in variables)
            if [private_jax.size_at(dim, s) for s in self.sizes] != [*vector]:
                raise Differs(
                    f"dimension {k} of a result is {dim}, and {vector} at the sizes {self.sizes}"
                )
            if not isinstance(dim, int):
                self.known.setdefault(vector, dim)

    # -- one equation ------------------------------------------------------------------------------
    def _equation(self, eqns: Eqns, operands: list[Any]) -> Sequence[Any]:
        eqn, (name, function) = eqns[0], private_jax.called(eqns[0])
        if is_check(eqn) or name == "stopped_by_torch":
            return operands
        if function is not None:  # whose rules for derivatives are no longer needed
            return self._closed([private_jax.called(e)[1] for e in eqns], operands)
        if name in _LOOPS:
            return _LOOPS[name](self, eqns, operands)
        params = {key: self._param([e.params[key] for e in eqns], key, eqns) for key in eqn.params}
        try:
            with private_jax.as_traced(eqn), eqn.ctx.manager:
                rule = _RULES.get(name)
                if rule is not None:
                    return [rule(*operands, **params)]
                out = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
        except Differs:
            raise
        except Exception as error:
            words = str(error).strip().splitlines() or [type(error).__name__]
            raise Differs(f"{name}{where(eqns)} needs a fixed size: {words[0]}") from error
        return out if eqn.primitive.multiple_results else [out]

    def _param(self, values: Sequence[Any], key: str, eqns: Eqns) -> Any:
        first = values[0]
        if type(first) is int or isinstance(first, np.integer):
            return self.size(tuple(map(int, values)), eqns)
        if isinstance(first, tuple | list) and all(len(v) == len(first) for v in values):
            parts = [self._param(part, key, eqns) for part in zip(*values, strict=True)]
            return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
        # of a reduction or a scatter: it computes with single numbers
        if isinstance(first, Jaxpr | ClosedJaxpr):
            same = len({str(v) for v in values}) == 1
        else:
            same = all(v is first or v == first for v in values) or (
                callable(first) and not isinstance(first, type) and key != "_prim"
            )
        if not same:
            raise Differs(
                f"{key}{where(eqns)} is {', '.join(map(str, values))} at the sizes {self.sizes}"
            )
        return first

    def _while(self, eqns: Eqns, operands: list[Any]) -> Sequence[Any]:
        n, m = eqns[0].params["cond_nconsts"], eqns[0].params["body_nconsts"]
        going, consts, carry = operands[:n], operands[n : n + m], operands[n + m :]
        cond, body = ([e.params[key] for e in eqns] for key in ("cond_jaxpr", "body_jaxpr"))
        return lax.while_loop(
            lambda c: self._closed(cond, [*going, *c])[0],
            lambda c: tuple(self._closed(body, [*consts, *c])),
            tuple(carry),
        )

    def _cond(self, eqns: Eqns, operands: list[Any]) -> Sequence[Any]:
        branches = zip(*[e.params["branches"] for e in eqns], strict=True)
        return lax.switch(
            operands[0],
            [lambda *xs, b=b: tuple(self._closed(b, xs)) for b in branches],
            *operands[1:],
        )

    def _scan(self, eqns: Eqns, operands: list[Any]) -> Sequence[Any]:
        each = [private_jax.named(e)[1] for e in eqns]
        _, n, m = private_jax.scanned(eqns[0])
        consts, carry, rows = operands[:n], operands[n : n + m], operands[n + m :]

        def step(carry: Any, row: Any) -> Any:
            out = self._closed(
                [params["jaxpr"] for params in each], [*consts, *carry, *row[: len(rows)]]
            )
            return tuple(out[:m]), tuple(out[m:])

        length = self.size(tuple(params["length"] for params in each), eqns)
        xs = (*rows, jnp.arange(length))  # the length itself may not be symbolic
        reverse, unroll = each[0]["reverse"], each[0]["unroll"]
        last, found = lax.scan(step, tuple(carry), xs, None, reverse, unroll)
        return [*last, *found]

    def _solve(self, eqns: Eqns, operands: list[Any]) -> Sequence[Any]:
        lengths = eqns[0].params["const_lengths"]
        before, n = lengths.matvec + lengths.vecmat, lengths.solve
        consts, right = operands[before : before + n], operands[sum(lengths) :]
        return self._closed([e.params["jaxprs"].solve for e in eqns], [*consts, *right])

    # -- sizes and numbers -------------------------------------------------------------------------
    def size(self, values: Vector, eqns: Eqns = ()) -> Any:
        """The size that has these values."""
        found = self._size(values)
        if found is None:
            raise Differs(
                f"a size{where(eqns)} is {_listed(values)} at the sizes {self.sizes}, in which no "
                "formula was found"
            )
        return found

    def _size(self, values: Vector, depth: int = 2) -> Any:
        if len(set(values)) == 1:
            return values[0]
        if values not in self.known:
            dims = [*self.symbols.values()]
            ways: tuple[Callable[[], Any], ...] = (
                lambda: self._combination(values, dims),
                lambda: self._product(values, depth) if depth else None,
                lambda: self._floor(values),
                lambda: self._combination(
                    values,
                    dims + [a * b for a, b in itertools.combinations_with_replacement(dims, 2)],
                ),
            )
            found = next((size for way in ways if (size := way()) is not None), None)
            if found is None:
                return None
            self.known[values] = found
        return self.known[values]

    def _combination(self, values: Vector, dims: Sequence[Any]) -> Any:
        """The sum of multiples of these sizes that has the values at all sizes; one more than
        needed must agree.
        """
        if len(values) < len(dims) + 2:
            return None
        table = np.array(
            [[1, *[private_jax.size_at(d, s) for d in dims]] for s in self.sizes], np.float64
        )
        solution = np.linalg.lstsq(table, np.array(values, np.float64), rcond=None)[0]
        for over in (1, 2):  # b * (b - 1) / 2
            factors = [round(c) for c in solution * over]
            if all(
                sum(f * int(t) for f, t in zip(factors, row, strict=True)) == over * v
                for row, v in zip(table, values, strict=True)
            ):
                total = sum(
                    (f * d for f, d in zip(factors[1:], dims, strict=True) if f), factors[0]
                )
                return total if over == 1 else total // over
        return None

    def _product(self, values: Vector, depth: int) -> Any:
        """A known size times another size, or plus a number; or a multiple of another size."""
        common = math.gcd(*values)
        if common > 1:
            rest = self._size(tuple(v // common for v in values), depth - 1)
            if rest is not None:
                return common * rest
        for vector, dim in [*self.known.items()]:
            if all(n and v % n == 0 for v, n in zip(values, vector, strict=True)):
                rest = self._size(
                    tuple(v // n for v, n in zip(values, vector, strict=True)), depth - 1
                )
                if rest is not None:
                    return dim * rest
            apart = {v - n for v, n in zip(values, vector, strict=True)}
            if len(apart) == 1:
                return dim + apart.pop()
        return None

    def _floor(self, values: Vector) -> Any:
        """A known size plus a number, divided and rounded down, if only one number is possible."""
        for vector, dim in [*self.known.items()]:
            for by in range(2, len(values) + 1):
                least = max(v * by - n for v, n in zip(values, vector, strict=True))
                if least == min(v * by + by - 1 - n for v, n in zip(values, vector, strict=True)):
                    # as JAX writes the sizes of windows and slices
                    return (dim + least - by) // by + 1
        return None

    def _constant(self, values: Sequence[Any], eqns: Eqns) -> Any:
        arrays = [
            np.asarray(v)
            if not jnp.issubdtype(getattr(v, "dtype", np.int32), jax.dtypes.extended)
            else v
            for v in values
        ]
        first = arrays[0]
        if all(a is first or (a.shape == first.shape and _equal(a, first)) for a in arrays):
            return first
        return (
            self._table(arrays, eqns)
            if first.ndim
            else self.number([a[()] for a in arrays], first.dtype, eqns)
        )

    def _table(self, arrays: Sequence[np.ndarray], eqns: Eqns) -> Any:
        """An array that counts, begin + sum of step * index over its dimensions, or one whose
        numbers change at a diagonal.
        """
        first = arrays[0]
        if len({a.ndim for a in arrays}) > 1:
            raise Differs(f"a table{where(eqns)} has other dimensions at other sizes")
        shape = [self.size(vector, eqns) for vector in zip(*[a.shape for a in arrays], strict=True)]
        counts = [_counts(a) for a in arrays]
        if all(c is not None for c in counts):
            begin, *steps = [self._constant(part, eqns) for part in zip(*counts, strict=True)]
            total: Any = jnp.full(shape, begin, first.dtype)
            for k, step in enumerate(steps):
                total += (lax.broadcasted_iota(np.int64, shape, k) * step).astype(first.dtype)
            return total
        for offset in (0, 1, -1, 2, -2) if first.ndim == 2 else ():
            parts = [_by_diagonal(a, offset) for a in arrays]
            if all(p is not None for p in parts):
                left, on, right = [self._constant(part, eqns) for part in zip(*parts, strict=True)]
                place = (
                    lax.broadcasted_iota(np.int64, shape, 1)
                    - lax.broadcasted_iota(np.int64, shape, 0)
                    - offset
                )
                return jnp.where(place < 0, left, jnp.where(place == 0, on, right)).astype(
                    first.dtype
                )
        raise Differs(
            f"a table{where(eqns)} has the shapes {', '.join(str(a.shape) for a in arrays)} at the "
            f"sizes {self.sizes}"
        )

    def number(self, values: Sequence[Any], dtype: Any, eqns: Eqns = ()) -> Any:
        """The number that has these values: a size, or one of ``_FORMS`` of a size."""
        given = np.array([float(v) for v in values])
        near = _near(dtype)
        with np.errstate(all="ignore"):
            for form, back in _FORMS:
                size = self._rounded(back(given), form, given, near)
                if size is not None:
                    return form(jnp.asarray(size).astype(np.float64)).astype(dtype)
            finite = np.isfinite(given).all()
            # a factor times a power of (a size + an integer)
            for vector, dim in [*self.known.items()] if finite else []:
                known = np.array(vector, np.float64)
                times, plus = np.polyfit(known, given, 1)
                for shift in {0, round(plus / times) if abs(plus) < 2**31 * abs(times) else 0}:
                    for power in (1, -1, 0.5, -0.5):
                        factor = given / (known + shift) ** power
                        if np.allclose(factor, factor[0], rtol=near, atol=0):
                            return (
                                factor.mean()
                                * (jnp.asarray(dim).astype(np.float64) + shift) ** power
                            ).astype(dtype)
        raise NoFormula(
            f"a number{where(eqns)} is {_listed(values)} at the sizes {self.sizes}, in which no "
            "formula was found"
        )

    def _rounded(
        self, found: np.ndarray, form: Callable[[Any], Any], given: np.ndarray, near: float
    ) -> Any:
        """A size near the numbers found, which have rounding errors; form of it gives the given
        ones.
        """

        def right(n: np.ndarray) -> bool:
            return np.allclose(form(n), given, rtol=near, atol=0)

        if not (np.isfinite(found).all() and (abs(found) < 2**53).all()):
            return None
        if right(np.round(found)):
            size = self._size(tuple(map(int, np.round(found))))
            if size is not None:
                return size
        known = [*self.known.items()]
        for (a, one), (b, other) in itertools.chain(
            zip(known, itertools.repeat(((1,) * len(found), 1))), itertools.combinations(known, 2)
        ):
            vector = np.array(a, np.float64) * np.array(b, np.float64)
            factor = round(float(np.median(found / vector)))
            if factor and right(factor * vector):
                return factor * one * other
        return None


#: Numbers that are computed from a size n, and n from the number.
_FORMS: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
    (lambda n: n, lambda v: v),
    (lambda n: 1 / n, lambda v: 1 / v),
    (lambda n: n / (n - 1), lambda v: v / (v - 1)),
    (lambda n: (n - 1) / n, lambda v: 1 / (1 - v)),
    (lambda n: n**0.5, lambda v: v * v),
    (lambda n: 1 / n**0.5, lambda v: 1 / (v * v)),
]
_LOOPS: dict[str, Callable[[Replay, Eqns, list[Any]], Sequence[Any]]] = {
    "while": Replay._while,
    "cond": Replay._cond,
    "scan": Replay._scan,
    "custom_linear_solve": Replay._solve,
}
#: Primitives of this project, which the exported program may not contain.
_RULES: dict[str, Callable[..., Any]] = {
    "with_cotangent": lambda x, *_, change: x,
    "conv": of_any_size,
    "at_lane": lambda numbers, lane: lax.dynamic_index_in_dim(numbers, lane, 0, keepdims=False),
}


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a, b, equal_nan=jnp.issubdtype(a.dtype, jnp.inexact))


def _counts(a: np.ndarray) -> list[Any] | None:
    """(its first element, its step in each dimension) of an array that counts."""
    begin = a[(0,) * a.ndim] if a.size else a.dtype.type(0)
    units = [tuple(int(k == at) for k in range(a.ndim)) for at in range(a.ndim)]
    if a.dtype == bool or _equal(a, np.full(a.shape, begin)):
        steps, made = [0] * a.ndim, np.full(a.shape, begin)
    else:
        wide = a.astype(np.float64 if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype)
        steps = [
            wide[unit] - wide[(0,) * a.ndim] if n > 1 else 0
            for unit, n in zip(units, a.shape, strict=True)
        ]
        made = begin + sum(s * i for s, i in zip(steps, np.indices(a.shape), strict=True))
        if jnp.issubdtype(a.dtype, jnp.floating):
            near = np.allclose(made, wide, rtol=0, atol=_near(a.dtype) * abs(wide).max())
            return [begin, *np.asarray(steps, a.dtype)] if near else None
    return [begin, *steps] if _equal(a, made.astype(a.dtype)) else None


def _near(dtype: Any) -> float:
    """By how much, relative to them, two numbers may differ that were computed
    in different ways.
    """
    return 4.0 * float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0


def _by_diagonal(a: np.ndarray, offset: int) -> list[Any] | None:
    """The numbers left of, on and right of a diagonal of a matrix, if there are no others."""
    place = np.arange(a.shape[1]) - np.arange(a.shape[0])[:, None] - offset
    parts = [a[np.sign(place) == k] for k in (-1, 0, 1)]
    if not all(p.size and _equal(p, np.full(p.shape, p[0])) for p in parts):
        return None
    return [p[0] for p in parts]


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(f"{v:.6g}" if isinstance(v, float | np.floating) else str(v) for v in values)


def where(eqns: Eqns) -> str:
    """`` in aten.conv2d (at model.py:12: ...)``: the operator and the line of the user's that an
    equation comes from.
    """
    for eqn in eqns[:1]:
        frames = private_jax.frames(eqn)
        operator = next(
            (
                name.replace("aten_", "aten.", 1)
                for _, name, _ in frames
                if name.startswith("aten_")
            ),
            eqn.primitive.name,
        )
        line = next(
            (f" (at {shown_line(file, number)})" for file, _, number in frames if is_users(file)),
            "",
        )
        return f" in {operator}{line}"
    return ""
