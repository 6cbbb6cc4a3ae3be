"""Random programs that write to parts of what they read: lines of Python drawn from a seed, the
same for PyTorch and for torchfunc_jax.

A program is a function of a vector ``x`` and a 0-dim index ``i``. Each line is tried on real
tensors as it is drawn, and left out if PyTorch refuses it. A program that fails is reduced by
leaving out lines.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

INDEX = 1  # the value of i
SIZES = (8, 12, 24, 24, 36, 60, 96, 256, 960, 4096)


class Program:
    """Lines of Python, and what they return."""

    def __init__(
        self, lines: Sequence[str], returned: Sequence[str], size: int, dtype: torch.dtype
    ) -> None:
        self.lines, self.returned, self.size, self.dtype = (
            tuple(lines),
            tuple(returned),
            size,
            dtype,
        )
        body = "".join(
            f"    {line}\n" for line in (*self.lines, f"return [{', '.join(self.returned)}]")
        )
        self.text = f"def program(x, i):  # x: {size} elements, {dtype}; i: {INDEX}\n{body}"
        scope = {"torch": torch}
        exec(self.text, scope)
        self.run: Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]] = scope["program"]

    def argument(self, seed: int = 0) -> torch.Tensor:
        """Distinct values: what comes from a wrong place shows."""
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(seed))
        return (
            order.to(self.dtype)
            if not self.dtype.is_floating_point
            else order.to(self.dtype) / self.size + 0.5
        )

    def reduced(self, fails: Callable[[Program], bool]) -> Program:
        """The program with as few lines and results as possible for which ``fails`` still holds."""
        found, smaller = self, True
        while smaller:
            smaller = False
            lines = [
                (found.lines[:k] + found.lines[k + 1 :], found.returned)
                for k in reversed(range(len(found.lines)))
            ]
            results = [(found.lines, (one,)) for one in found.returned if len(found.returned) > 1]
            for some in (*lines, *results):
                other = Program(*some, self.size, self.dtype)
                if possible(other) and fails(other):
                    found, smaller = other, True
                    break
        return found


def possible(program: Program) -> bool:
    """Whether PyTorch runs a program."""
    try:
        program.run(program.argument(), torch.tensor(INDEX))
    except (RuntimeError, IndexError, NameError, TypeError, ValueError):
        return False
    return True


def drawn(seed: int) -> Program:
    """The program of a seed."""
    return _Draw(seed).program()


class _Draw:
    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.size = self.r.choice(SIZES)
        self.dtype = self.r.choice(
            [torch.float32, torch.float64, torch.float64, torch.float64, torch.int64, torch.int32]
        )
        self.lines: list[str] = []
        x = Program((), (), self.size, self.dtype).argument()
        self.scope: dict[str, Any] = {"torch": torch, "x": x, "i": torch.tensor(INDEX)}
        self.names: list[str] = []

    def program(self) -> Program:
        self.new(
            self.r.choice(
                [
                    "x.reshape{0}",
                    "x.view{0}.clone()",
                    "x.reshape{0} * 2",
                    "(x + 1).view{0}",
                    "x.clone().view{0}",
                ]
            ).format(tuple(self.factors(self.size, self.r.randint(1, 4))))
        )
        for _ in range(self.r.randint(2, 7)):
            self.r.choice(
                [
                    self.view,
                    self.compute,
                    self.write,
                    self.write,
                    self.write,
                    self.shift,
                    self.shift,
                    self.shift,
                    self.indexed,
                ]
            )()
        kept = [name for name in self.names if self.scope[name].numel() <= 4 * self.size]
        returned = [
            self.r.choice(
                ["{}", "{}.reshape(-1)", "{} * 2", "{}.unsqueeze(0)", "{}.clone()"]
            ).format(name)
            for name in kept[-3:]
        ]
        return Program(
            self.lines,
            self.r.sample(returned, self.r.randint(1, len(returned))),
            self.size,
            self.dtype,
        )

    # -- lines -------------------------------------------------------------------------------------
    def line(self, text: str) -> bool:
        try:
            exec(text, self.scope)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return False
        self.lines.append(text)
        return True

    def new(self, expression: str) -> None:
        name = f"y{len(self.names)}"
        if self.line(f"{name} = {expression}"):
            self.names.append(name)

    def view(self) -> None:
        self.new(self.part(self.pick(), self.r.randint(1, 2)))

    def compute(self) -> None:
        self.new(self.changed(self.part(self.pick(), self.r.randint(0, 1))))

    def write(self) -> None:
        """Any value into any part."""
        target = self.part(self.pick(), self.r.randint(0, 2))
        value = self.fitted(
            self.changed(self.part(self.pick(), self.r.randint(0, 2))), self.shape(target)
        )
        self.store(target, value)

    def shift(self) -> None:
        """A part into another of the same shape, some elements further."""
        name = self.pick()
        shape = self.shape(name)
        dim = self.r.randrange(len(shape)) if shape else 0
        if not shape or shape[dim] < 2:
            return
        k, step = self.r.randint(1, min(3, shape[dim] - 1)), self.r.choice([1, 1, 1, 2])
        before = ":, " * dim
        places = [
            f"[{before}{k}:{step if step > 1 else ''}]".replace(":2]", "::2]"),
            f"[{before}:-{k}:{step}]".replace(":1]", "]"),
        ]
        if self.r.random() < 0.3:
            places.reverse()
        source = name if self.r.random() < 0.7 else self.alike(shape)
        self.store(name + places[0], self.changed(f"{source}{places[1]}.clone()", 0.5))

    def indexed(self) -> None:
        """Writes at places that are tensors, constants or known only to the program."""
        name = self.pick()
        shape = self.shape(name)
        if not shape or not 2 <= shape[0] <= 64:
            return
        n = self.r.randint(1, min(3, shape[0] - 1))
        places = f"torch.tensor({self.r.sample(range(shape[0]), n)})"
        rows = self.r.choice(
            [
                f"{name}[:{n}].clone()",
                f"{name}[{places}]",
                f"{name}[-{n}:].flip(0)",
                f"({name}[:{n}] * 2)",
            ]
        )
        row = self.r.choice([f"{name}[i]", f"{name}[0]", f"{name}[i - 1]", f"{name}[-1]"])
        row = self.changed(row + ".clone()", 0.3)
        wide = (
            f"{places}.reshape({', '.join(['-1', *['1'] * (len(shape) - 1)])}"
            f").expand_as({name}[:{n}])"
        )
        at = self.r.choice(["i", "i - 1", "i[None]", "0"])
        self.line(
            self.r.choice(
                [
                    f"{name}.index_copy_(0, {places}, {rows})",
                    f"{name}.index_add_(0, {places}, {rows})",
                    f"{name}.index_put_(({places},), {rows})",
                    f"{name}.index_put_(({places},), {rows}, accumulate=True)",
                    f"{name}.scatter_(0, {wide}, {rows})",
                    f"{name}.scatter_add_(0, {wide}, {rows})",
                    f"{name}[{places}] = {rows}",
                    f"{name}[{at}] = {row}",
                    f"{name}[{at}] += {row}",
                    f"{name}.index_copy_(0, i[None], {row}[None])",
                    f"{name}.index_add_(0, i[None], {row}[None])",
                    f"{name}.index_fill_(0, {places}, 2)",
                    f"{name}.narrow(0, i, {n}).copy_({rows})",
                    f"{name}.masked_scatter_({name} > {name}.reshape(-1)[0], {name}.flip(0))",
                    f"{name}.masked_fill_({name} > {row}, 1)",
                    # PyTorch's own gradient of these is wrong if they are views of one tensor
                    *(
                        []
                        if self.dtype.is_floating_point
                        else [
                            f"torch._foreach_{op}_([{name}[0], {name}[{k}]], [{row}, {row}])"
                            for op, k in (("add", -1), ("mul", 1))
                        ]
                    ),
                ]
            )
        )

    def store(self, target: str, value: str) -> None:
        forms = [
            "{0}.copy_({1})",
            "{0}.copy_({1})",
            "{0}.add_({1})",
            "{0}.mul_({1})",
            "{0}.sub_({1})",
            "{0}[...] = {1}",
        ]
        self.line(self.r.choice(forms).format(target, value))
        if self.r.random() < 0.15:
            self.scattered()

    def scattered(self) -> None:
        name = self.pick()
        shape = self.shape(name)
        if len(shape) < 2 or shape[0] < 2:
            return
        k = self.r.randint(1, shape[0] - 1)
        self.new(
            self.r.choice(
                [
                    f"{name}.slice_scatter({name}[:-{k}], 0, {k})",
                    f"{name}.select_scatter({name}[0], 0, {k})",
                    f"{name}.diagonal_scatter({name}.diagonal().flip(-1) * 2)",
                    f"{name}.roll({k}, 0)",
                    f"torch.cat([{name}[:{k}], {name}[:-{k}]])",
                    (
                        f"{name}.clone(memory_format=torch.contiguous_format).as_strided_scatter("
                        f"{name}.reshape(-1)[:{k}].clone(), ({k},), (1,), 1)"
                    ),
                ]
            )
        )

    # -- expressions -------------------------------------------------------------------------------
    def pick(self) -> str:
        return self.r.choice(self.names[-3:])

    def alike(self, shape: Sequence[int]) -> str:
        return self.r.choice(
            [name for name in self.names if tuple(self.shape(name)) == tuple(shape)]
        )

    def shape(self, expression: str) -> tuple[int, ...]:
        return tuple(eval(expression, self.scope).shape)

    def factors(self, n: int, dims: int) -> list[int]:
        found = []
        for _ in range(dims - 1):
            found.append(self.r.choice([d for d in range(1, n + 1) if n % d == 0 and d <= 64]))
            n //= found[-1]
        found.append(n)
        self.r.shuffle(found)
        return found

    def part(self, expression: str, depth: int) -> str:
        for _ in range(depth):
            expression = self.one_view(expression)
        return expression

    def one_view(self, expression: str) -> str:
        shape = self.shape(expression)
        if not shape:
            return f"{expression}.reshape(1)"
        d = self.r.randrange(len(shape))
        n, before = shape[d], ":, " * d
        k = self.r.randrange(max(n, 1))
        other = self.r.randrange(len(shape))
        choices = [
            f"{expression}[{before}{k}:]",
            f"{expression}[{before}:{max(k, 1)}]",
            f"{expression}[{before}::2]",
            f"{expression}[{before}{k}]",
            (
                f"{expression}.reshape("
                f"{', '.join(map(str, self.factors(math.prod(shape), self.r.randint(1, 4))))})"
            ),
            f"{expression}.flatten()",
            f"{expression}.transpose({d}, {other})",
            f"{expression}.unsqueeze({d})",
            f"{expression}.squeeze()",
            f"{expression}.movedim(0, -1)",
        ]
        if n > 1:
            choices += [f"{expression}.unfold({d}, 2, 2)", f"{expression}.narrow({d}, 1, {n - 1})"]
        if len(shape) > 1:
            choices += [
                f"{expression}.diagonal()",
                f"{expression}.mT",
                f"{expression}[{k if d == 0 else 0}]",
            ]
        return self.r.choice(choices)

    def changed(self, expression: str, chance: float = 0.8) -> str:
        if self.r.random() > chance:
            return expression
        shape = self.shape(expression)
        d = self.r.randrange(len(shape)) if shape else 0
        choices = [
            f"({expression} * 2)",
            f"({expression} + 1)",
            f"{expression}.abs()",
            f"(-{expression})",
            f"{expression}.clone()",
        ]
        if shape:
            choices += [
                f"{expression}.flip({d})",
                f"{expression}.roll(1, {d})",
                f"{expression}.cumsum({d}).to({expression}.dtype)",
            ]
            choices += [f"{expression}.sum({d}, keepdim=True).to({expression}.dtype)"]
            choices += [
                f"({expression} + {expression}.flip({d}))",
                f"torch.where({expression} > 1, {expression}, {expression}.flip({d}))",
            ]
        if self.dtype.is_floating_point:
            choices += [f"{expression}.sin()", f"({expression} * 0.5)", f"{expression}.tanh()"]
        return self.r.choice(choices)

    def fitted(self, expression: str, shape: Sequence[int]) -> str:
        """The expression as a value of this shape, in memory of its own: PyTorch refuses some
        writes that overlap what they read.
        """
        mine, n = self.shape(expression), math.prod(shape)
        if mine == tuple(shape):
            return f"{expression}.clone()"
        if math.prod(mine) >= n:
            part = self.r.choice([f"[:{n}]", f"[{math.prod(mine) - n}:]"])
            return f"{expression}.reshape(-1){part}.reshape({tuple(shape)}).clone()"
        return f"{expression}.sum().to({expression}.dtype)"
