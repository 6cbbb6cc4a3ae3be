"""Random small programs of what PyTorch's autograd knows and JAX does not, as Python source, with
their truth in plain PyTorch.

A program has autograd.Functions of every style, hooks, detach and no_grad, checkpoints, in-place
operators, modules with hooks, nested transforms and torch.autograd.grad, over variables of shape
[3]. It is a list of units, of which some can be left out to make a failing program smaller.
"""

from __future__ import annotations

import dataclasses
import linecache
import random
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

HEADER = """\
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

def values(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)

def linear():
    made = nn.Linear(3, 3, dtype=torch.float64)
    with torch.no_grad():
        for p in made.parameters():
            numbers = torch.linspace(-0.7, 0.8, p.numel(), dtype=torch.float64)
            p.copy_(numbers.reshape(p.shape).cos())
    return made

w, u, c = values(0.7, -0.4, 1.2), values(-0.3, 0.9, 0.5), values(1.1, 0.6, -0.8)
count = torch.zeros(())
layer, hooked = linear(), linear()
hooked.register_full_backward_hook(
    lambda m, inputs, outputs: None if inputs[0] is None else (inputs[0] * 1.3,)
)
hooked.register_full_backward_pre_hook(lambda m, outputs: (outputs[0] * 0.8,))
"""


# -- what a transform gives, by plain PyTorch alone ------------------------------------------------
def _leaf(a: torch.Tensor) -> torch.Tensor:
    return a.view_as(a) if a.requires_grad else a.detach().requires_grad_()


def _as_outside(t: torch.Tensor) -> torch.Tensor:
    return t if torch.is_grad_enabled() else t.detach()


def _pulled(
    out: torch.Tensor, inputs: Sequence[torch.Tensor], cotangent: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    if not out.requires_grad:
        return tuple(torch.zeros_like(a) for a in inputs)
    found = torch.autograd.grad(out, inputs, cotangent, create_graph=True, allow_unused=True)
    return tuple(
        torch.zeros_like(a) if g is None else g for g, a in zip(found, inputs, strict=True)
    )


def _grad(f: Callable[..., Any], argnums: Any = 0) -> Callable[..., Any]:
    def run(*args: torch.Tensor) -> Any:
        with torch.enable_grad():
            leaves = [_leaf(a) for a in args]
            out = f(*leaves)
            found = _pulled(out, leaves, torch.ones_like(out))
        found = tuple(map(_as_outside, found))
        return found[argnums] if isinstance(argnums, int) else tuple(found[i] for i in argnums)

    return run


def _vjp(f: Callable[..., Any], *args: torch.Tensor) -> Any:
    with torch.enable_grad():
        leaves = [_leaf(a) for a in args]
        out = f(*leaves)

    def pull(cotangent: torch.Tensor) -> Any:
        with torch.enable_grad():
            found = _pulled(out, leaves, cotangent)
        return tuple(map(_as_outside, found))

    return _as_outside(out), pull


def _jacrev(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: torch.Tensor) -> torch.Tensor:
        out, pull = _vjp(f, *args)
        return torch.stack([pull(row)[0] for row in torch.eye(out.numel(), dtype=out.dtype)])

    return run


def _jvp(f: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    out, pull = _vjp(f, *primals)
    rows = (
        [pull(row) for row in torch.eye(out.numel(), dtype=out.dtype)]
        if out.dim()
        else [pull(torch.ones_like(out))]
    )
    pushed = torch.stack(
        [sum((g * t).sum() for g, t in zip(row, tangents, strict=True)) for row in rows]
    )
    return out, pushed.reshape(out.shape)


def _vmap(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: torch.Tensor) -> Any:
        outs = [f(*rows) for rows in zip(*args, strict=True)]
        return (
            tuple(map(torch.stack, zip(*outs, strict=True)))
            if isinstance(outs[0], tuple)
            else torch.stack(outs)
        )

    return run


def _itself(f: Callable[..., Any]) -> Callable[..., Any]:
    return f


PLAIN = types.SimpleNamespace(
    grad=_grad, vjp=_vjp, jacrev=_jacrev, jvp=_jvp, vmap=_vmap, jit=_itself, functionalize=_itself
)


# -- autograd.Functions ----------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a Function computes.

    Attributes:
        inputs: names of its tensor arguments; a float s may come with them.
        before: what forward computes first.
        outs: the outputs.
        slopes: for each output, by input, its derivative in terms of what is saved.
        saved: names that slopes uses: inputs, outputs o0 and o1, others that forward has made.
        constant: which output is marked as not differentiable.
        dirty: whether the first input is changed in place.
    """

    inputs: tuple[str, ...]
    outs: tuple[str, ...]
    slopes: tuple[dict[str, str], ...]
    saved: tuple[str, ...]
    before: str = ""
    constant: int | None = None
    dirty: bool = False


SIMPLE = [
    Kernel(("a",), ("a.sin() * s",), ({"a": "a.cos() * s"},), ("a",)),
    Kernel(("a",), ("(a * s).tanh()",), ({"a": "(1 - o0 ** 2) * s"},), ("o0",)),
    Kernel(("a",), ("a.view_as(a)",), ({"a": "-s"},), ()),
    Kernel(("a",), ("(a * 4).round() / 4",), ({"a": "(a > -2) * s"},), ("a",)),
]
KERNELS = [
    *SIMPLE,
    Kernel(
        ("a", "b"),
        ("a * b.tanh() * s",),
        ({"a": "b.tanh() * s", "b": "a * (1 - b.tanh() ** 2) * s"},),
        ("a", "b"),
    ),
    Kernel(
        ("a", "b"),
        ("t * b * s",),
        ({"a": "(1 - t ** 2) * b * s", "b": "t * s"},),
        ("t", "b"),
        "t = a.tanh()",
    ),
    Kernel(
        ("a", "b"),
        ("a * b", "a.cos() + b * s"),
        ({"a": "b", "b": "a"}, {"a": "-a.sin()", "b": "s"}),
        ("a", "b"),
    ),
    Kernel(
        ("a", "b"), ("a.exp() * 0.2", "o0 * b"), ({"a": "o0"}, {"a": "o1", "b": "o0"}), ("o0", "o1")
    ),
    Kernel(
        ("a",), ("a * a * s", "(a > 0).to(a.dtype)"), ({"a": "2 * a * s"}, {}), ("a",), constant=1
    ),
    Kernel(("a",), ("a.sort()[0] * s", "a.argsort()"), ({"a": "s"}, {}), (), constant=1),
    Kernel(("a",), ("a.mul_(s)",), ({"a": "s"},), (), dirty=True),
    Kernel(("a",), ("a.sin_()",), ({"a": "t * s"},), ("t",), "t = a.cos()", dirty=True),
    Kernel(("a",), ("a.exp_()",), ({"a": "o0 * s"},), ("o0",), dirty=True),
]


@dataclasses.dataclass
class Made:
    """A Function's source, and what a call of it needs to know."""

    name: str
    kernel: Kernel
    source: str
    new: bool
    forward_mode: bool
    order: list[str]
    once: bool

    def call(self, tensors: Sequence[str], number: float) -> str:
        given = dict(zip(self.kernel.inputs, tensors, strict=True)) | {
            "s": repr(number),
            "extra": "['x', None]",
        }
        return f"{self.name}.apply({', '.join(given[a] for a in self.order)})"


def _function(name: str, r: random.Random, earlier: Made | None) -> Made:
    kernel = r.choice(SIMPLE if earlier is None else KERNELS)
    # forward alone can save what it makes on the way
    hidden = any(k not in (*kernel.inputs, "o0", "o1") for k in kernel.saved)
    # PyTorch's vmap needs a rule of a Function with setup_context; not every kernel has one
    new = not hidden and r.random() < 0.55 and not kernel.dirty and "argsort" not in kernel.outs[-1]
    order = [*kernel.inputs, "s"]
    if r.random() < 0.2:
        order.append("extra")
    if r.random() < 0.3:
        order.insert(0, order.pop(order.index("s")))
    pushes = r.random() < 0.6
    once = r.random() < 0.12
    materialized = r.random() < 0.75
    asks = r.random() < 0.3
    by_attribute = r.random() < 0.15 and set(kernel.saved) <= set(kernel.inputs) and not pushes
    factor = r.choice(["1.5", "1.5", "c", "w", "1.5 * u"])
    inner = earlier if earlier is not None and r.random() < 0.35 else None
    times = (
        r.choice(["", "", "", " * c", " * w"])
        if not kernel.dirty and not kernel.constant and "o0" not in kernel.saved
        else ""
    )
    if inner is not None and kernel.saved and "a" in kernel.saved:
        factor = inner.call(["a"], 0.6)
    if (
        inner is not None
        and times == ""
        and not kernel.dirty
        and "o0" not in kernel.saved
        and kernel.constant is None
    ):
        times = f" * {inner.call(['a'], 0.8)}"
    n = len(kernel.outs)
    outs = [f"o{i}" for i in range(n)]
    body = [kernel.before] if kernel.before else []
    body += [f"o{i} = {e}{times if i == 0 else ''}" for i, e in enumerate(kernel.outs)]
    returned = outs[0] if n == 1 else f"({', '.join(outs)})"
    keep: list[str] = []
    if by_attribute:
        keep += [f"ctx.{k} = {k}" for k in kernel.saved]
    elif kernel.saved:
        keep += [f"ctx.save_for_backward({', '.join(kernel.saved)})"]
        keep += [f"ctx.save_for_forward({', '.join(kernel.saved)})"] if pushes else []
    keep += ["ctx.s = s"]
    if kernel.constant is not None:
        keep += [f"ctx.mark_non_differentiable(o{kernel.constant})"]
    if kernel.dirty:
        keep += ["ctx.mark_dirty(a)"]
    if not materialized:
        keep += ["ctx.set_materialize_grads(False)"]
    lines = [f"class {name}(torch.autograd.Function):"]
    vmap = r.choice(["generated", "generated", "own"]) if new else "none"
    if vmap == "generated":
        lines += ["    generate_vmap_rule = True", ""]

    def method(head: str, content: list[str], decorate: str = "") -> None:
        decorators = ["    @staticmethod", *([f"    {decorate}"] if decorate else [])]
        lines.extend([*decorators, f"    def {head}:", *[f"        {x}" for x in content], ""])

    names = ", ".join(order)
    if new:
        method(f"forward({names})", [*body, f"return {returned}"])
        method(
            "setup_context(ctx, inputs, output)",
            [f"{names}, = inputs", f"{returned} = output", *keep],
        )
    else:
        method(f"forward(ctx, {names})", [*body, *keep, f"return {returned}"])
    loaded = ["s = ctx.s"]
    if by_attribute:
        loaded += [f"{k} = ctx.{k}" for k in kernel.saved]
    elif kernel.saved:
        loaded += [f"{', '.join(kernel.saved)}, = ctx.saved_tensors"]
    gradients = []
    content = list(loaded)
    for position, a in enumerate(order):
        terms = [(i, slopes[a]) for i, slopes in enumerate(kernel.slopes) if a in slopes]
        if not terms:
            gradients.append("None")
            continue
        if materialized:
            text = " + ".join(f"g{i} * ({e})" for i, e in terms)
        else:
            content += [f"terms = [{', '.join(f'(g{i}, lambda g: g * ({e}))' for i, e in terms)}]"]
            content += [
                "terms = [rule(g) for g, rule in terms if g is not None]",
                f"d{a} = sum(terms) if terms else None",
            ]
            text = f"d{a}"
        text = (
            f"({text}) * {factor}"
            if materialized
            else f"{text} if {text} is None else {text} * {factor}"
        )
        gradients.append(
            f"({text}) if ctx.needs_input_grad[{position}] else None" if asks else text
        )
    content += [
        f"return {gradients[0] if len(gradients) == 1 else ', '.join(f'({g})' for g in gradients)}"
    ]
    method(
        f"backward(ctx, {', '.join(f'g{i}' for i in range(n))})",
        content,
        "@once_differentiable" if once else "",
    )
    if pushes:
        content = list(loaded)
        pushed = []
        for i, slopes in enumerate(kernel.slopes):
            if i == kernel.constant or not slopes:
                pushed.append("None")
                continue
            content += [
                f"terms = [{', '.join(f'(t{a}, lambda d: d * ({e}))' for a, e in slopes.items())}]"
            ]
            content += [
                "terms = [rule(t) for t, rule in terms if t is not None]",
                f"p{i} = sum(terms) * {factor} if terms else None",
            ]
            if kernel.dirty:
                content += [f"p{i} = ta.copy_(p{i})"]
            pushed.append(f"p{i}")
        content += [f"return {pushed[0] if n == 1 else ', '.join(pushed)}"]
        method(f"jvp(ctx, {', '.join(f't{a}' for a in order)})", content)
    if vmap == "own":
        content = [
            f"{a} = {a} if in_dims[{k}] is None else {a}.movedim(in_dims[{k}], 0)"
            for k, a in enumerate(order)
            if a in kernel.inputs
        ]
        if len(kernel.inputs) == 2:
            content += ["a, b = torch.broadcast_tensors(a, b)"]
        content += [f"return {name}.apply({names}), {'0' if n == 1 else (0,) * n}"]
        method(f"vmap(info, in_dims, {names})", content)
    return Made(name, kernel, "\n".join(lines), new, pushes, order, once)


# -- units of a program ----------------------------------------------------------------------------
@dataclasses.dataclass
class Unit:
    """Some lines that define variables of shape [3] from others."""

    lines: list[str]
    defines: list[str]
    uses: list[str]


@dataclasses.dataclass
class Program:
    """A program and what is known about it.

    Attributes:
        needs: the names among x, y and the captured tensors that require grad; "layers": the
            parameters of both layers.
    """

    seed: int
    functions: list[Made]
    units: list[Unit]
    result: str
    needs: frozenset[str]

    @property
    def body(self) -> str:
        return "\n".join(line for unit in self.units for line in unit.lines)

    @property
    def hooks(self) -> bool:
        return "register_hook" in self.body or "hooked(" in self.body

    @property
    def reentrant(self) -> bool:
        return (
            "use_reentrant=v" in self.body
            or "use_reentrant=x" in self.body
            or "use_reentrant=y" in self.body
        )

    @property
    def writes(self) -> bool:
        return "count." in self.body

    @property
    def used(self) -> list[Made]:
        """The Functions that the program needs."""
        found: list[Made] = []
        text = self.body
        for made in reversed(self.functions):
            if f"{made.name}.apply" in text:
                found.insert(0, made)
                text += made.source
        return found

    @property
    def forward_mode(self) -> bool:
        """Whether forward mode can go through, and gives what reverse mode does: it obeys no hook
        and no no_grad.
        """
        reverse = ("register_hook", "hooked(", "no_grad", "set_grad", "T.", "autograd.grad")
        return all(m.forward_mode for m in self.used) and not any(
            word in self.body for word in reverse
        )

    @property
    def source(self) -> str:
        body = [f"    {line}" for line in self.body.splitlines()]
        return "\n".join(
            [
                HEADER,
                *[m.source for m in self.used],
                "",
                "def f(x, y):",
                *body,
                f"    return {self.result}",
                "",
            ]
        )

    def without(self, k: int) -> Program:
        """The program with unit k left out: what it defines is what it was made of."""
        unit = self.units[k]
        stand_in = (
            [Unit([f"{name} = {unit.uses[0]} * 1"], [name], unit.uses[:1]) for name in unit.defines]
            if unit.uses
            else []
        )
        rest = "\n".join(line for u in self.units[k + 1 :] for line in u.lines) + self.result
        stand_in = [u for u in stand_in if u.defines[0] in rest]
        return dataclasses.replace(self, units=[*self.units[:k], *stand_in, *self.units[k + 1 :]])


class _Writer:
    """Draws units, and the names they give to what they make."""

    def __init__(self, r: random.Random, functions: list[Made]) -> None:
        self.r, self.functions, self.names, self.units, self.next = r, functions, ["x", "y"], [], 0

    def pick(self) -> str:
        """Often what was made last, so that the program is deep."""
        return self.names[-1] if self.r.random() < 0.4 else self.r.choice(self.names)

    def captured(self) -> str:
        return self.r.choice(
            ["w", "u", "c", "w[[2, 0, 1]]", "u.flip(0)", "layer.bias", "w.detach()"]
        )

    def new(self) -> str:
        self.next += 1
        return f"v{self.next - 1}"

    def expression(self, a: str, b: str, inside: bool = False) -> str:
        """An expression of two variables; inside: in a nested function."""
        kinds = [
            f"torch.sin({a}) * {b}",
            f"{a} * {self.captured()} + {b}",
            f"torch.tanh({a} - {b})",
            f"({a} * {b}).cumsum(0)",
            f"{a} * 0.5 + {self.captured()}",
            f"torch.where({a} > {b}, {a}, {b} * 0.5)",
            f"{a}.flip(0) * {b}.cos()",
            f"{a}.softmax(0) * {self.captured()}",
            f"layer({a}) * {b}",
            f"{a} * {b}.detach()",
        ]
        if self.functions and self.r.random() < 0.6:
            usable = [m for m in self.functions if len(m.kernel.outs) == 1 and not m.kernel.dirty]
            made = self.r.choice(usable)
            return (
                f"{made.call([a, b][: len(made.kernel.inputs)], self.number())} * "
                f"{self.r.choice([b, '1', self.captured()])}"
            )
        return self.r.choice(kinds)

    def number(self) -> float:
        return self.r.choice([0.7, -1.2, 1.0, 0.4])

    def unit(self) -> None:
        r, a, b = self.r, self.pick(), self.r.choice(self.names)
        out = self.new()
        more: list[str] = []
        kind = r.choice(KINDS)
        if kind == "plain":
            lines = [f"{out} = {self.expression(a, b)}"]
        elif kind == "function":
            made = r.choice(self.functions)
            tensors = [a, r.choice([b, self.captured()])][: len(made.kernel.inputs)]
            if made.kernel.dirty:
                before = self.new()
                lines = [f"{before} = {a} * 1", f"{out} = {made.call([before], self.number())}"]
                more = [before]
            elif len(made.kernel.outs) == 2:
                second = self.new()
                lines = [f"{out}, {second} = {made.call(tensors, self.number())}"]
                if "argsort" in made.kernel.outs[1]:
                    lines += [f"{second} = {second} * 0.1"]
                more = [second]
            else:
                lines = [f"{out} = {made.call(tensors, self.number())}"]
        elif kind == "hook":
            hook = r.choice(
                [
                    "g * 1.7",
                    "g.clamp(-0.5, 0.5)",
                    "g * c",
                    "g * w",
                    "None",
                    "g + 0.1",
                    "g * g.detach().cos()",
                    "-g",
                ]
            )
            # times 1: PyTorch keeps the result of tanh for a second derivative as it is before the
            # hook's tensor, here it is after
            lines = [
                f"{out} = ({self.expression(a, b)}) * 1",
                f"if {out}.requires_grad:",
                f"    {out}.register_hook(lambda g: {hook})",
            ]
        elif kind == "no_grad":
            what = self.expression(a, b)
            lines = r.choice(
                [
                    [f"{out} = ({what}).detach() + {b}"],
                    ["with torch.no_grad():", f"    {out} = {what}"],
                    ["with torch.no_grad(), torch.enable_grad():", f"    {out} = {what}"],
                    ["with torch.no_grad():", f"    {out} = {what}", f"{out} = {out} * {a}"],
                    [
                        "with torch.set_grad_enabled(False):",
                        f"    {out} = {what}",
                        f"{out} = {out} + {b}",
                    ],
                ]
            )
        elif kind == "checkpoint":
            reentrant = r.choice(["False", "False", f"{a}.requires_grad"])
            inner = self.expression("a", "b", True)
            lines = [
                f"{out} = checkpoint(lambda a, b: {inner}, {a}, {b}, use_reentrant={reentrant})"
            ]
        elif kind == "in place":
            change = r.choice(
                [
                    f"{out}.mul_({b})",
                    f"{out}[0] = {b}[1]",
                    f"{out}[1:].sin_()",
                    f"{out}.view(3, 1)[:2].mul_(0.5)",
                    f"{out}.add_({self.captured()})",
                    f"{out}.copy_({b})",
                    f"{out}[:2] += {self.captured()}[1:]",
                    f"{out}.masked_fill_({b} > 0, 0.3)",
                    f"{out}.detach().zero_()",
                ]
            )
            lines = [f"{out} = {a} * {self.number()}", change]
            if r.random() < 0.25:
                lines = [lines[0], "with torch.no_grad():", f"    {change}"]
        elif kind == "module":
            lines = [f"{out} = {r.choice(['layer', 'hooked'])}({a}).tanh()"]
        elif kind == "transform":
            inner = self.expression("a", b, True)
            lines = [
                f"{out} = "
                + r.choice(
                    [
                        f"T.grad(lambda a: ({inner}).sum())({a})",
                        f"T.vjp(lambda a: {inner}, {a})[1]({b})[0]",
                        f"T.jacrev(lambda a: {inner})({a}).sum(0)",
                        f"T.vmap(lambda a, b: a.sin() * b * w.sum())({a}, {b})",
                        (
                            "T.vmap(lambda a: "
                            f"{self.expression('a', 'a.cos()', True)})(torch.stack([{a}, "
                            f"{b}])).sum(0)"
                        ),
                        (
                            "T.vmap(T.grad(lambda a: "
                            f"({self.expression('a', 'a', True)}).sum()))(torch.stack([{a}, "
                            f"{b}])).sum(0)"
                        ),
                    ]
                )
            ]
        elif kind == "autograd":
            inner = self.expression("leaf", b, True)
            lines = [
                "with torch.enable_grad():",
                f"    leaf = {a}.detach().requires_grad_()",
                (
                    f"    {out} = torch.autograd.grad(({inner} + leaf).sum(), leaf, "
                    f"create_graph=True)[0] * {a}"
                ),
            ]
        else:
            lines = [f"count.add_({a}.detach().sum().float().abs())", f"{out} = {a} + 1"]
        self.units.append(Unit(lines, [out, *more], [a, b]))
        self.names += [out, *more]


KINDS = [
    *["plain"] * 3,
    *["function"] * 6,
    *["hook"] * 2,
    *["no_grad"] * 2,
    *["checkpoint"] * 2,
    *["in place"] * 2,
    "module",
    *["transform"] * 2,
    "autograd",
]
NEEDS = [
    {"x", "y", "w", "u", "layers"},
    {"x", "y", "w", "u", "layers"},
    {"x"},
    {"x", "y"},
    {"w", "u", "layers"},
    {"w"},
    {"y", "layers"},
    {"x", "w"},
    set(),
]


def program(seed: int) -> Program:
    """The program of a seed."""
    r = random.Random(seed)
    functions: list[Made] = []
    for k in range(r.randint(1, 3)):
        functions.append(_function(f"F{k}", r, functions[0] if functions else None))
    writer = _Writer(r, functions)
    if r.random() < 0.15:
        hook = r.choice(["g * 2", "g * w", "g.sin()"])
        writer.units.append(
            Unit(["if x.requires_grad:", f"    x.register_hook(lambda g: {hook})"], [], [])
        )
    for _ in range(r.randint(2, 6)):
        writer.unit()
    if r.random() < 0.1:
        writer.units.append(
            Unit([f"count.add_({writer.names[-1]}.detach().sum().float().abs())"], [], [])
        )
    result = " + ".join(dict.fromkeys([writer.names[-1], r.choice(writer.names), "x * 0.1"]))
    return Program(seed, functions, writer.units, result, frozenset(r.choice(NEEDS)))


# -- ways to call one ------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Way:
    """A way to call a program.

    Attributes:
        build: from a namespace of transforms and f to a function of x and y.
        batch: x and y have a first dimension of two lanes.
        order: how many times torch's autograd goes back from outside.
        inner: whether a transform in build differentiates; "forward": by forward mode.
    """

    build: Callable[[Any, Callable[..., Any]], Callable[..., Any]]
    batch: bool = False
    order: int = 1
    inner: str = ""

    def takes(self, p: Program) -> bool:
        """Whether the truth of a program can be had in this way."""
        if p.writes and (self.batch or self.inner):
            return False  # torch.func refuses to write to a captured tensor there
        if p.reentrant and (
            self.inner or self.order > 1 or "T." in p.body or "autograd.grad" in p.body
        ):
            return False  # PyTorch refuses torch.autograd.grad with a reentrant checkpoint
        if p.hooks and self.inner and p.needs:
            # plain PyTorch calls a hook in each backward pass, torch.func in that of the transform
            # alone
            return False
        return self.inner != "forward" or p.forward_mode


COEFFICIENTS = torch.tensor([1.0, -0.6, 0.8], dtype=torch.float64)


def _loss(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y: (f(x, y) * COEFFICIENTS).sum()


def _both(T: Any, f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y: sum(T.grad(_loss(f), (0, 1))(x, y))


WAYS: dict[str, Way] = {
    "functionalize": Way(lambda T, f: T.functionalize(f)),
    "jit": Way(lambda T, f: T.jit(f)),
    "functionalize, twice": Way(lambda T, f: T.functionalize(f), order=2),
    "jit, twice": Way(lambda T, f: T.jit(f), order=2),
    "vmap": Way(lambda T, f: T.vmap(f), batch=True),
    "jit(vmap)": Way(lambda T, f: T.jit(T.vmap(f)), batch=True),
    "grad": Way(_both, inner="reverse"),
    "jit(grad)": Way(lambda T, f: T.jit(_both(T, f)), inner="reverse"),
    "vmap(grad)": Way(lambda T, f: T.vmap(_both(T, f)), batch=True, inner="reverse"),
    "jit(vmap(grad))": Way(lambda T, f: T.jit(T.vmap(_both(T, f))), batch=True, inner="reverse"),
    "vjp": Way(lambda T, f: lambda x, y: sum(T.vjp(f, x, y)[1](COEFFICIENTS)), inner="reverse"),
    "jacrev": Way(lambda T, f: lambda x, y: T.jacrev(f)(x, y).sum(0), inner="reverse"),
    "jvp": Way(lambda T, f: lambda x, y: T.jvp(f, (x, y), (y, x))[1], inner="forward"),
    "jit(jvp)": Way(lambda T, f: T.jit(lambda x, y: T.jvp(f, (x, y), (y, x))[1]), inner="forward"),
}


def has_leaves(p: Program, way: Way) -> bool:
    """Whether the truth has leaves of its own: then its results may require grad, and be refused a
    derivative, where ours do not.
    """
    return bool(way.inner) or "T." in p.body or "requires_grad_" in p.body


class Run:
    """A program in one namespace of transforms, to be called several times."""

    def __init__(self, p: Program, way: Way, T: Any) -> None:
        self.p, self.way = p, way
        self.space: dict[str, Any] = {"T": T, "__name__": "program"}
        name = f"<program {p.seed}>"
        linecache.cache[name] = (len(p.source), None, p.source.splitlines(True), name)
        exec(compile(p.source, name, "exec"), self.space)
        layers = [*self.space["layer"].parameters(), *self.space["hooked"].parameters()]
        self.captured = [self.space["w"], self.space["u"], *layers]
        for t in layers:
            t.requires_grad_("layers" in p.needs)
        for key in ("w", "u"):
            self.space[key].requires_grad_(key in p.needs)
        self.call = way.build(T, self.space["f"])
        self.leaves = has_leaves(p, way)

    def result(self, number: int) -> list[torch.Tensor | None]:
        """What call number ``number`` gives: output, gradients, what was written; its numbers
        differ from those of other calls.
        """
        with torch.no_grad():
            for k, t in enumerate([*self.captured, self.space["c"]]):
                t.add_(0.07 * number * (1 + k % 3))
        leaves = self.arguments(number)
        out = self.call(*leaves)
        every = [t for t in (*leaves, *self.captured) if t.requires_grad]
        found: list[torch.Tensor | None] = [
            out.detach().clone(),
            torch.tensor(out.requires_grad and not self.leaves),
        ]
        first: list[torch.Tensor | None] = [None] * len(every)
        if out.requires_grad and every:
            cotangent = COEFFICIENTS.expand_as(out)
            if self.way.order == 1:
                out.backward(cotangent)
            else:
                first = list(
                    torch.autograd.grad(out, every, cotangent, create_graph=True, allow_unused=True)
                )
                total = sum((g.sin() * 1.3).sum() for g in first if g is not None)
                if total.requires_grad:
                    total.backward()
        found += [None if g is None else g.detach().clone() for g in first]
        for t in (*leaves, *self.captured):
            found.append(t.grad)
            t.grad = None
        return [*found, self.space["count"].clone()]

    def arguments(self, number: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.p.seed * 10 + number)
        shape = (2, 3) if self.way.batch else (3,)
        return [
            torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(
                key in self.p.needs
            )
            for key in ("x", "y")
        ]


CALLS = 2


def truth(p: Program, way: Way, T: Any = PLAIN) -> list[Any] | Exception:
    """What plain PyTorch, or torch.func, gives, or the error it raises."""
    try:
        run = Run(p, way, T)
        return [run.result(k) for k in range(CALLS)]
    except Exception as error:
        return error


def refused_by_torch_func(p: Program, way: Way, error: Exception) -> bool:
    """Whether it is the error that torch.func raises too, for a program that PyTorch runs because
    it cannot be recorded.
    """
    if not any("PyTorch runs this call" in note for note in getattr(error, "__notes__", ())):
        return False
    return one_refusal(error, truth(p, way, torch.func))


def one_refusal(mine: Any, theirs: Any) -> bool:
    """Whether our error is that of torch.func.

    Before torch 2.12, torch.func's vmap refuses checkpoint itself, in words of its own.
    """
    return type(mine) is type(theirs) and (
        str(mine) == str(theirs) or "vmap over _NoopSaveInputs" in str(theirs)
    )


def fault(p: Program, way: Way, T: Any) -> str:
    """What is wrong with a program called in a way, in words; "" where nothing is, "no truth: ..."
    where PyTorch itself raises.
    """
    expected = truth(p, way)
    try:
        run = Run(p, way, T)
        actual: Any = [run.result(k) for k in range(CALLS)]
    except Exception as error:
        actual = error
    if isinstance(expected, Exception):
        if (
            "once_differentiable" in str(expected)
            and not isinstance(actual, RuntimeError)
            and not has_leaves(p, way)
        ):
            return f"{expected!r} expected, got {actual!r}"
        return f"no truth: {expected!r}"
    if way.inner == "forward" and any(m.once for m in p.used):
        return "no truth: it pulls back where forward mode has a rule that can be differentiated"
    if (
        isinstance(actual, RuntimeError)
        and "once_differentiable" in str(actual)
        and any(m.once for m in p.used)
    ):
        return (
            "no truth: PyTorch gives a second derivative without what backward has hidden, and "
            "here that is refused"
        )
    if isinstance(actual, Exception):
        return "" if refused_by_torch_func(p, way, actual) else f"raises {actual!r}"
    wrong = difference(actual, expected)
    # if PyTorch runs it: a mapped tensor requires no grad, and a module calls no hook for it
    if wrong and p.hooks and way is WAYS["vmap"]:
        of_torch = truth(p, way, torch.func)
        return wrong if isinstance(of_torch, Exception) else difference(actual, of_torch)
    return wrong


def difference(actual: list[Any], expected: list[Any]) -> str:
    """The first difference between the results of calls, in words; "" where there is none."""
    for k, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        for i, (a, e) in enumerate(zip(mine, theirs, strict=True)):
            if a is None and e is None:
                continue
            a, e = (
                (torch.zeros_like(e) if a is None else a),
                (torch.zeros_like(a) if e is None else e),
            )
            if not e.isfinite().all():
                return (
                    "no truth: the numbers overflow, and what becomes of them depends on rounding"
                )
            if (
                a.shape != e.shape
                or a.dtype != e.dtype
                or not torch.allclose(a, e, rtol=1e-6, atol=1e-9, equal_nan=True)
            ):
                return f"call {k}, result {i}: {a.tolist()} for {e.tolist()}"
    return ""


def shrunk(p: Program, way: Way, T: Any, attempts: int = 40) -> Program:
    """A smaller program that is wrong in the same way."""
    k = 0
    while k < len(p.units) and attempts:
        smaller = p.without(k)
        attempts -= 1
        if smaller.source != p.source:
            found = fault(smaller, way, T)
            if found and not found.startswith("no truth"):
                p = smaller
                continue
        k += 1
    for result in [name for unit in p.units for name in unit.defines]:
        smaller = dataclasses.replace(p, result=result)
        found = fault(smaller, way, T)
        if found and not found.startswith("no truth"):
            return smaller
    return p
