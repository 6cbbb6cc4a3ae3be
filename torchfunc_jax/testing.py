"""Parity as a tool: run a function under torch.func and under this library, and say where the two differ."""
from __future__ import annotations

import ast
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import torchfunc_jax
from bridge import trees
from torchfunc_jax._vmap import name_of
from torchfunc_jax.patching import ORIGINAL, patch

#: A transform: "grad", "vmap(grad, in_dims=(None, 0))", or a function of (torch.func or torchfunc_jax, fn) that returns a function.
Transform = str | Callable[[Any, Callable[..., Any]], Callable[..., Any]]

# How far two implementations of the same operators may be apart: (relative, absolute)
_TOLERANCES = {torch.float64: (1e-9, 1e-9), torch.float32: (2e-5, 2e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (2e-2, 2e-2)}
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}


class ParityError(AssertionError):
    """torch.func and torchfunc_jax do not agree; the message says where first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One comparison.

    Attributes:
        transform: its name.
        mode: "eager" or "jit".
        difference: the first difference in words; None where there is none.
        largest: the largest absolute difference of values seen; None where no values were compared.
        agreed: what both did: "same values", or "both raise RuntimeError".
    """

    transform: str
    mode: str
    difference: str | None
    largest: float | None
    agreed: str = ""


@dataclasses.dataclass(slots=True)
class _Outcome:
    """What a run did: returned or raised, and what became of its inputs and of the module it called."""

    output: Any = None
    inputs: Any = None
    state: Any = None
    error: Exception | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Options:
    rtol: float | None
    atol: float | None
    values: bool
    strides: bool
    may_do_more: bool


def parity(
    fn: Callable[..., Any],
    *args: Any,
    transforms: Sequence[Transform] = ("call",),
    kwargs: dict[str, Any] | None = None,
    jit: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
    check_values: bool = True,
    check_strides: bool = False,
    may_do_more: bool = False,
    seed: int = 0,
) -> list[Check]:
    """Run a function under torch.func's transforms and under ours, and compare what comes out.

    Values, tree structure, dtypes, shapes, devices and requires_grad of the outputs are compared, the class of what is raised, inputs
    that were changed in place, and a module's parameters and buffers.

    Args:
        fn: a function of tensors, or an nn.Module (each run gets a copy of it).
        args, kwargs: its arguments, trees of tensors and other values; each run gets copies.
        transforms: each a name from torch.func ("grad", "vmap", "jacrev", "vjp", ...), a nesting of names with options
            ("vmap(grad, in_dims=(None, 0))"), "call" for the function itself (ours then inside ``patch()``), or a function that takes
            torch.func or torchfunc_jax and fn, and returns a function.
        jit: compare ``jit`` of it too.
        rtol, atol: tolerances; by dtype if not given.
        check_values: False for random functions, whose numbers differ.
        check_strides: compare strides of outputs.
        may_do_more: what torch.func refuses may work here.
        seed: for ``torch.manual_seed`` before each run.

    Returns:
        list[Check]: one for each transform and mode.

    Raises:
        ValueError: a transform that is no name of torch.func's.

    Source: ``torch.testing.assert_close``, for the way differences are described.

    Example:
        >>> import torch
        >>> from torchfunc_jax.testing import parity
        >>> [(c.transform, c.mode, c.difference) for c in parity(torch.sin, torch.ones(2), transforms=["vmap"])]
        [('vmap', 'eager', None), ('vmap', 'jit', None)]
    """
    options = _Options(rtol, atol, check_values, check_strides, may_do_more)
    checks = []
    for transform in transforms:
        name, make = _named(transform)
        run = functools.partial(_run, make, fn, args, kwargs, seed)
        theirs = run(ORIGINAL)
        with patch() if name == "call" else nullcontext():
            runs = [("eager", run(torchfunc_jax))]
            if jit:
                runs.append(("jit", run(torchfunc_jax, torchfunc_jax.jit)))
        checks += [Check(name, mode, *_compare(theirs, ours, options)) for mode, ours in runs]
    return checks


def assert_parity(fn: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Assert that a function does the same under torch.func's transforms and under ours, eagerly and compiled.

    Args:
        fn, args, options: as ``parity``'s.

    Raises:
        ParityError: an AssertionError whose message tells the transform, the place in the output and the first difference.
        ValueError: a transform that is no name of torch.func's.

    Source: ``torch.testing.assert_close``.

    Example:
        >>> import torch
        >>> from torchfunc_jax.testing import assert_parity
        >>> assert_parity(lambda x: (x ** 2).sum(), torch.randn(3, 2), transforms=["grad", "vmap(grad)", "hessian"])
    """
    __tracebackhide__ = True
    for check in parity(fn, *args, **options):
        if check.difference is not None:
            raise ParityError(f"{name_of(fn)} under {check.transform}, {check.mode}: {check.difference}")


# -- transforms by name ------------------------------------------------------------------------------------------------------------
def _vjp(api: Any, f: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        rest, diff = _differentiable(f, args)
        out, pull = api.vjp(rest, *diff)
        return out, pull(trees.map_leaves(_direction, out))

    return run


def _pushed(name: str) -> Callable[[Any, Callable[..., Any]], Callable[..., Any]]:
    def transform(api: Any, f: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            rest, diff = _differentiable(f, args)
            tangents = trees.map_leaves(_direction, tuple(diff))
            if name == "jvp":
                return api.jvp(rest, tuple(diff), tangents)
            out, push = api.linearize(rest, *diff)
            return out, push(*tangents)

        return run

    return transform


def _differentiable(f: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Any]]:
    """f of its floating arguments only, and those."""
    where = [i for i, a in enumerate(args) if all(_has_derivatives(x) for x in trees.flatten(a)[0])]

    def rest(*diff: Any) -> Any:
        every = list(args)
        for i, value in zip(where, diff, strict=True):
            every[i] = value
        return f(*every)

    return rest, [args[i] for i in where]


def _has_derivatives(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _direction(x: torch.Tensor) -> torch.Tensor:
    """A tangent or cotangent without symmetries, the same wherever it is computed."""
    return torch.arange(1, x.numel() + 1, device=x.device).cos().to(x.dtype).reshape(x.shape)


# Those whose results are functions, or that take more than a function: run to the end, with made-up directions
_WHOLE = {"call": lambda api, f: f, "vjp": _vjp, "jvp": _pushed("jvp"), "linearize": _pushed("linearize")}
_NAMES = ("chunk_vmap", "functionalize", "grad", "grad_and_value", "hessian", "jacfwd", "jacrev", "vmap")


def _named(transform: Transform) -> tuple[str, Callable[[Any, Any], Any]]:
    if not isinstance(transform, str):
        return name_of(transform), transform
    try:
        return transform, _parsed(ast.parse(transform.strip(), mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"transforms: {transform!r} is no nesting of torch.func's transforms: {error}") from None


def _parsed(node: ast.AST) -> Callable[[Any, Any], Any]:
    if isinstance(node, ast.Name) and node.id in _WHOLE:
        return _WHOLE[node.id]
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return lambda api, f: getattr(api, node.id)(f)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) <= 1:
        inner = _parsed(node.args[0]) if node.args else _WHOLE["call"]
        options = {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg}
        name = node.func.id
        if name in _WHOLE and not options:
            return lambda api, f: _WHOLE[name](api, inner(api, f))
        if name in _NAMES:
            return lambda api, f: getattr(api, name)(inner(api, f), **options)
    raise ValueError(f"expected one of {', '.join((*_WHOLE, *_NAMES))}, got {ast.unparse(node)}")


# -- running -----------------------------------------------------------------------------------------------------------------------
def _run(make: Any, fn: Any, args: Any, kwargs: Any, seed: int, api: Any, compiled: Callable[[Any], Any] = lambda f: f) -> _Outcome:
    if isinstance(fn, nn.Module):
        fn = copy.deepcopy(fn)
    inputs = _fresh((args, kwargs or {}))
    outcome = _Outcome()
    torch.manual_seed(seed)
    try:
        outcome.output = compiled(make(api, fn))(*inputs[0], **inputs[1])
    except Exception as error:
        outcome.error = error
        return outcome
    outcome.inputs = inputs
    outcome.state = dict(fn.state_dict()) if isinstance(fn, nn.Module) else None
    return outcome


def _fresh(tree: Any) -> Any:
    """A copy of a tree: the same tensor twice is the same copy twice; requires_grad and strides stay."""
    memo: dict[int, Any] = {}

    def one(x: Any) -> Any:
        if id(x) not in memo:
            if isinstance(x, torch.Tensor):
                memo[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
            else:
                memo[id(x)] = copy.deepcopy(x) if isinstance(x, nn.Module) else x
        return memo[id(x)]

    return trees.map_leaves(one, tree)


# -- comparing ---------------------------------------------------------------------------------------------------------------------
def _compare(theirs: _Outcome, ours: _Outcome, options: _Options) -> tuple[str | None, float | None, str]:
    if theirs.error is not None and ours.error is not None:
        if isinstance(ours.error, type(theirs.error)):
            return None, None, f"both raise {type(theirs.error).__name__}"
        return f"torch.func raised {_shown(theirs.error)}, torchfunc_jax raised {_shown(ours.error)}", None, ""
    if ours.error is not None:
        return f"torch.func returned, torchfunc_jax raised {_shown(ours.error)}", None, ""
    if theirs.error is not None:
        return (None, None, "works, torch.func does not") if options.may_do_more else (
            f"torch.func raised {_shown(theirs.error)}, torchfunc_jax returned", None, ""
        )
    largest: list[float] = []
    for what, a, b in (("output", theirs.output, ours.output), ("input", theirs.inputs, ours.inputs), ("state", theirs.state, ours.state)):
        for difference in _differences(what, a, b, options, largest):
            return difference, max(largest, default=None), ""
    return None, max(largest, default=None), "same values" if options.values else "same shapes and types"


def _shown(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:400]}"


def _differences(what: str, theirs: Any, ours: Any, options: _Options, largest: list[float]) -> Iterator[str]:
    """The differences of two trees, one after the other; the size of each pair's goes to largest."""
    a, spec_a = trees.flatten(theirs)
    b, spec_b = trees.flatten(ours)
    if spec_a != spec_b:
        yield f"{what} has another structure: torch.func {spec_a or '*'}, torchfunc_jax {spec_b or '*'}"
        return
    for path, x, y in zip(trees.paths(spec_a), a, b, strict=True):
        both = isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
        difference = _tensors(x, y, what, options, largest) if both else _others(x, y)
        if difference:
            yield f"{what}{_shown_path(path)} differs in {difference}"


def _shown_path(path: tuple[Any, ...]) -> str:
    """The way to a leaf as one would write it: [0]['weight'].field"""
    return "".join(f".{step}" if isinstance(step, trees.Field) else f"[{step!r}]" for step in path)


def _others(x: Any, y: Any) -> str | None:
    if type(x) is not type(y):
        return f"type: torch.func {type(x).__name__}, torchfunc_jax {type(y).__name__}"
    if isinstance(x, nn.Module) or x is y or x == y or (x != x and y != y):
        return None
    return f"value: torch.func {x!r}, torchfunc_jax {y!r}"


def _tensors(x: torch.Tensor, y: torch.Tensor, what: str, options: _Options, largest: list[float]) -> str | None:
    for name in ("dtype", "shape", "device", "requires_grad"):
        a, b = getattr(x, name), getattr(y, name)
        if a != b:
            return f"{name}: torch.func {_plain(a)}, torchfunc_jax {_plain(b)}"
    if options.strides and what == "output" and x.stride() != y.stride():
        return f"strides: torch.func {x.stride()}, torchfunc_jax {y.stride()}"
    return _values(x.detach(), y.detach(), options, largest) if options.values else None


def _plain(x: Any) -> Any:
    return tuple(x) if isinstance(x, torch.Size) else x


def _values(x: torch.Tensor, y: torch.Tensor, options: _Options, largest: list[float]) -> str | None:
    if not _has_derivatives(x):
        rtol = atol = 0.0
        wide = torch.int64 if x.dtype is not torch.uint64 else torch.float64
    else:
        rtol, atol = _TOLERANCES.get(_PARTS.get(x.dtype, x.dtype), (0.1, 0.1))
        wide = torch.complex128 if x.is_complex() else torch.float64
    rtol, atol = options.rtol if options.rtol is not None else rtol, options.atol if options.atol is not None else atol
    a, b = x.to(wide), y.to(wide)
    same = a == b
    if wide is not torch.int64:
        same |= a.isnan() & b.isnan()
    apart = torch.where(same, 0, (a - b).abs()).double()
    finite = apart[apart.isfinite()]
    largest.append(float(finite.max()) if finite.numel() else 0.0)
    wrong = ~(same | (apart <= atol + rtol * a.abs()))
    count = int(wrong.sum())
    if not count:
        return None
    worst = int(torch.where(wrong, apart.nan_to_num(nan=float("inf")), -1).argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), x.shape)) if x.dim() else ()
    at = f"value at {list(place)}" if place else "value"
    many = f", {count} of {x.numel()} elements are wrong" if x.numel() > 1 else ""
    allowed = f" (allowed: {atol:g} + {rtol:g} of the value)" if rtol or atol else ""
    return f"{at}: torch.func {x[place].item()!r}, torchfunc_jax {y[place].item()!r}{many}{allowed}"
