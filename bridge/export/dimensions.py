"""Which dimensions of the arguments are symbolic, and the sizes at which a function is traced for
that.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from jax import export

from bridge import private_jax
from bridge.convert import trees

Sizes = dict[str, int]
_NAME, _WORDS = re.compile(r"[A-Za-z]\w*"), frozenset({"floordiv", "mod", "max", "min"})
#: The sizes that are traced: from 9 on, because small ones may be special cases, or from 130 on, if
#: lowerings choose by size in between.
LEAST, _SPAN = (9, 130), 40


class Dimensions:
    """The shapes of the arguments' arrays, in which an entry is an int or a symbolic size.

    Attributes:
        names: the symbols.
        example: their values in the arguments; those that stand only in expressions like "2*b" are
            missing.
        shapes: for each array.
        constraints: as ``jax.export.symbolic_shape`` takes them.
    """

    def __init__(
        self,
        arrays: Sequence[torch.Tensor],
        specs: Sequence[Any],
        paths: Sequence[str],
        constraints: Sequence[str],
    ) -> None:
        texts = [_text(spec, x, path) for spec, x, path in zip(specs, arrays, paths, strict=True)]
        self.constraints = [
            *dict.fromkeys([*constraints, *[c for spec in specs for c in _limits(spec)]])
        ]
        self.names = sorted({name for text in texts for name in _NAME.findall(text)} - _WORDS)
        self._texts, self._arrays, self._paths = texts, arrays, paths
        self.example: Sizes = {}
        self._make()
        self._compare()

    def _make(self) -> None:
        scope = export.SymbolicScope(self.constraints)
        self.shapes = [
            self._shape(text, x, path, scope)
            for text, x, path in zip(self._texts, self._arrays, self._paths, strict=True)
        ]
        found = export.symbolic_shape(", ".join(self.names), scope=scope) if self.names else ()
        self.symbols = dict(zip(self.names, found, strict=True))
        self._sides = [
            [export.symbolic_shape(side)[0] for side in re.split(r"[<>=]=", c)]
            for c in self.constraints
        ]

    def _shape(self, text: str, x: torch.Tensor, path: str, scope: Any) -> tuple[Any, ...]:
        try:
            shape = tuple(export.symbolic_shape(text, scope=scope, like=tuple(x.shape)))
            if len(shape) != x.ndim:
                raise ValueError(f"it has {len(shape)} dimensions")
            return shape
        except ValueError as error:
            raise ValueError(
                f"batch: expected for {path}, which has shape {tuple(x.shape)}, a name for its "
                'dimension 0 ("b"), a shape as jax.export.symbolic_shape takes it ("b, _, n"), a '
                f"dict of names by dimension, or None; got {text!r}: {error}"
            ) from None

    def _compare(self) -> None:
        """Take the symbols' values from the arguments; raises if they contradict each other."""
        for shape, x, path in zip(self.shapes, self._arrays, self._paths, strict=True):
            for k, (dim, size) in enumerate(zip(shape, x.shape, strict=True)):
                name = str(dim)
                if name in self.symbols and self.example.setdefault(name, size) != size:
                    raise ValueError(
                        f"batch: {name!r} is {self.example[name]} in an argument before, and "
                        f"{size} in dimension {k} of {path}; give each "
                        "argument its own dimensions, None for an argument of fixed size: "
                        'batch=(None, "b")'
                    )
        if not self.allowed(self.example):
            raise ValueError(
                f"constraints: {', '.join(self.constraints)} do not hold for the arguments, whose "
                f"sizes are {self.example}"
            )

    def require(self, constraint: str) -> None:
        """Add a constraint, and make the shapes anew."""
        self.constraints.append(constraint)
        self._make()

    def allowed(self, sizes: Mapping[str, int]) -> bool:
        """Whether the constraints hold; those for symbols without a size do. No size is less
        than 1.
        """
        if min(sizes.values(), default=1) < 1:
            return False
        for text, sides in zip(self.constraints, self._sides, strict=True):
            if set(_NAME.findall(text)) - _WORDS <= set(sizes):
                left, right = (private_jax.size_at(side, sizes) for side in sides)
                if not (
                    left >= right
                    if ">=" in text
                    else left <= right
                    if "<=" in text
                    else left == right
                ):
                    return False
        return True

    def at(self, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """The shapes for these sizes."""
        return [tuple(private_jax.size_at(d, sizes) for d in shape) for shape in self.shapes]

    def sampled(self, count: int, least: int, avoid: Collection[int]) -> list[Sizes]:
        """That many different sizes of all symbols, from ``least`` on and none of them in ``avoid``
        if the constraints allow it.
        """
        draw = random.Random(0)
        low, small = (
            {name: max(n, self.example.get(name, 0)) for name in self.names} for n in (least, 2)
        )
        for unwanted, begin in ((avoid, low), (avoid, small), ((), small)):
            for _ in range(100):  # successive sizes show best what is divided and rounded
                starts = {
                    name: draw.randrange(begin[name], begin[name] + _SPAN) for name in self.names
                }
                runs = [draw.sample(range(n, n + count), count) for n in starts.values()]
                found = [
                    dict(zip(self.names, sizes, strict=True)) for sizes in zip(*runs, strict=True)
                ]
                used = {n for run in runs for n in run}
                if (
                    len(used) == count * len(runs)
                    and used.isdisjoint(unwanted)
                    and all(map(self.allowed, found))
                ):
                    return found
        every = ({name: draw.randrange(2, 1024) for name in self.names} for _ in range(4000))
        found = [*{tuple(s.values()): s for s in every if self.allowed(s)}.values()][:count]
        if len(found) == count:
            return found
        raise ValueError(
            f"constraints: {count} different values of each of {', '.join(self.names)} are needed "
            f"to see what depends on them, and {', '.join(self.constraints)} allow too few; export "
            "a program for each fixed size instead, batch=None"
        )


def spread(batch: Any, spec: Any) -> list[Any]:
    """The ``batch`` argument of export for each leaf of (args, kwargs), whose tree is ``spec``."""
    each = trees.broadcast(
        (tuple(batch), None) if isinstance(batch, tuple | list) else batch, spec, _is_dims
    )
    if each is None:
        raise ValueError(
            f"batch: expected one entry for all arguments or a tree like them, got {batch!r}"
        )
    return each


def _is_dims(x: Any) -> bool:
    return isinstance(x, dict) and all(isinstance(k, int) for k in x)


def _text(spec: Any, x: torch.Tensor, path: str) -> str:
    """The shape as JAX writes it: "b, ..."."""
    if spec is None:
        return "..."
    if isinstance(spec, dict):
        if not all(-x.ndim <= k < x.ndim for k in spec):
            raise ValueError(
                f"batch: {path} has {x.ndim} dimensions, got names for dimensions {sorted(spec)}"
            )
        names = {k % x.ndim: _name(v) for k, v in spec.items() if v is not None}
        return ", ".join(names.get(k, "_") for k in range(x.ndim)) or "..."
    text = _name(spec)
    if "," in text or text == "...":
        return text
    return f"{text}, ..." if x.ndim else "..."


def _name(spec: Any) -> str:
    name = spec if isinstance(spec, str) else getattr(spec, "__name__", None)
    if isinstance(spec, int) or not isinstance(name, str):
        raise ValueError(
            f"batch: expected names of dimensions, strings or torch.export.Dim, got {spec!r}"
        )
    return name


def _limits(spec: Any) -> list[str]:
    """The bounds that a torch.export.Dim has."""
    found = []
    for dim in spec.values() if isinstance(spec, dict) else [spec]:
        low, high = getattr(dim, "min", None), getattr(dim, "max", None)
        if isinstance(low, int) and low > 1:
            found.append(f"{dim.__name__} >= {low}")
        if isinstance(high, int) and high < 2**31:
            found.append(f"{dim.__name__} <= {high}")
    return found
