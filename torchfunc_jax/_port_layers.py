"""Where a port departs from its module: the first layer whose output is none of the values that the
port computes.

Both sides run once, the module under a mode that sees each call of a torch function, the port
equation by equation. Two values are the same if their numbers are, in whatever order: layouts and
shapes need not agree. A port may compute otherwise on its way, so a value that is missing tells
something only if none that is computed from it is found.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import Literal
from torch import nn
from torch.overrides import TorchFunctionMode

from bridge import private_jax
from bridge.convert import trees
from bridge.errors import is_users, shown_line
from torchfunc_jax import _port_runs, _ports

_HERE = __file__
_OURS = (_HERE, _ports.__file__, _port_runs.__file__)
_UNROLLED = 64  # the longest loop whose steps are looked at one by one
_RANDOM = {"random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"}


@dataclasses.dataclass(frozen=True, slots=True)
class Departure:
    """The first place at which a port computes something else.

    Attributes:
        layer: the name of the module's layer, as in ``named_modules``; "" is the module itself.
        what: the torch function, buffer or parameter that differs there: "softmax", "running_mean".
        line: the line of the module's code that calls it, if it is not torch's own.
        port_line: the line of the port's code that computes the first value that the module does
            not.
        sure: True if what goes into it is in the port and what comes out is not. False if code
            before the layer may be the cause.
        text: all of it in sentences.

    Example:
        >>> import jax, torch
        >>> from torchfunc_jax.testing import port_parity
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 2))
        >>> def apply(params, x):
        ...     x = jax.nn.gelu(x @ params["0.weight"].T + params["0.bias"], approximate=True)
        ...     return x @ params["2.weight"].T + params["2.bias"]
        >>> found = port_parity(net, apply, torch.randn(5, 3)).departure
        >>> found.layer, found.what, found.sure
        ('1', 'gelu', True)
    """

    layer: str
    what: str
    line: str | None
    port_line: str | None
    sure: bool
    text: str


class Step(NamedTuple):
    """A computed value.

    Attributes:
        layer, what, line: where it is computed: the layer, the function, the line of the user's
            code.
        value: its numbers, sorted; None if they are too few or all alike, so that they say nothing.
        sources: the steps that its operands come from.
        before: all steps that it depends on, as the bits of a number.
        params: names of the module's parameters among its operands.
        moves: of a step of torch's, whether it has the numbers of one of its operands.
        draws: whether it depends on random numbers.
        from_inputs: whether it depends on the arguments.
        narrow: of a step of the port's, whether it has fewer than 64 bits.
    """

    layer: str
    what: str
    line: str | None
    value: np.ndarray | None
    sources: tuple[int, ...]
    before: int
    params: tuple[str, ...]
    moves: bool
    draws: bool
    from_inputs: bool
    narrow: bool = False


def sorted_numbers(x: Any) -> np.ndarray | None:
    """The numbers of an array in order; None if they say nothing."""
    x = np.asarray(x)
    if x.dtype.kind != "f" or not x.size:
        return None
    x = np.sort(x.astype(np.float64), axis=None)
    # a single number such as 0, 1 or 0.5
    common = x[0] == x[-1] if x.size > 1 else float(x[0] * 1024).is_integer()
    return None if common else x


class _Known:
    """A set of values."""

    def __init__(self, values: Iterable[np.ndarray | None], tolerance: float) -> None:
        self.by_size: dict[int, list[np.ndarray]] = defaultdict(list)
        self.tolerance = tolerance
        for x in values:
            if x is not None:
                self.by_size[x.size].append(x)

    def __contains__(self, x: np.ndarray) -> bool:
        return any(alike(x, y, self.tolerance) for y in self.by_size[x.size])


def alike(x: np.ndarray, y: np.ndarray, tolerance: float) -> bool:
    """Whether two sorted arrays have the same numbers."""
    if x.size != y.size:
        return False
    scale = np.abs(x[np.isfinite(x)]).max(initial=0.0)
    with np.errstate(invalid="ignore"):
        return bool(
            ((np.abs(x - y) <= tolerance * scale) | (x == y) | (np.isnan(x) & np.isnan(y))).all()
        )


def first_missing(steps: Sequence[Step], other: Sequence[Step], tolerance: float) -> int | None:
    """The first step whose value the other side does not have, nor any that is computed from it;
    None if there is none.
    """
    known = _Known((s.value for s in other), tolerance)
    found = [None if s.value is None else s.value in known for s in steps]
    explained = 0  # the steps from which a value that was found is computed
    for i in reversed(range(len(steps))):
        if found[i]:
            explained |= steps[i].before | (1 << i)
    for i, s in enumerate(steps):
        if found[i] is False and not explained >> i & 1 and s.from_inputs:
            return i
    return None


# -- torch's steps ---------------------------------------------------------------------------------
class _Calls(TorchFunctionMode):
    """Notes each call of a torch function while a module runs."""

    def __init__(self, module: nn.Module, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.made: dict[int, int] = {}  # id of a tensor -> the step that it comes from
        self.kept: list[torch.Tensor] = []  # so that an id is of one tensor
        self.inputs = {id(x) for x in inputs}
        self.params = {id(p): name for name, p in module.named_parameters()}
        self.stack: list[str] = []
        for name, m in module.named_modules():
            m.register_forward_pre_hook(lambda m, args, name=name: self.stack.append(name))
            m.register_forward_hook(
                lambda m, args, out: self.stack.pop() and None, always_call=True
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in trees.flatten((args, kwargs or {}))[0] if isinstance(x, torch.Tensor)]
        before = (
            [sorted_numbers(x.detach()) if x.is_floating_point() else None for x in given]
            if self.stack
            else []
        )
        state = torch.get_rng_state()
        out = func(*args, **(kwargs or {}))
        if not self.stack:
            return out
        for x in (x for x in trees.flatten(out)[0] if isinstance(x, torch.Tensor)):
            sources = tuple(self.made[id(g)] for g in given if id(g) in self.made)
            value = sorted_numbers(x.detach()) if x.is_floating_point() else None
            moves = value is not None and any(
                b is not None and alike(value, b, 0.0) for b in before
            )
            self.steps.append(
                Step(
                    self.stack[-1],
                    getattr(func, "__name__", str(func)).strip("_"),
                    _line(sys._getframe(1)),
                    value,
                    sources,
                    _before(self.steps, sources),
                    tuple(self.params[id(g)] for g in given if id(g) in self.params),
                    moves,
                    not torch.equal(state, torch.get_rng_state()),
                    any(id(g) in self.inputs for g in given)
                    or any(self.steps[s].from_inputs for s in sources),
                )
            )
            self.made[id(x)] = len(self.steps) - 1
            self.kept.append(x)
        return out


def _before(steps: Sequence[Step], sources: Iterable[int]) -> int:
    found = 0
    for s in sources:
        found |= steps[s].before | 1 << s
    return found


def _line(frame: Any) -> str | None:
    """The user's line in the module's forward: none if torch's own code calls torch's function."""
    while frame is not None and frame.f_code.co_filename != _HERE:
        if is_users(frame.f_code.co_filename):
            return shown_line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def torch_steps(module: nn.Module, args: Any, kwargs: Any) -> list[Step]:
    """The steps of a call; hooks are left in the module."""
    inputs = [x for x in trees.flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    with _Calls(module, inputs) as calls:
        module(*args, **kwargs)
    return calls.steps


# -- the port's steps ------------------------------------------------------------------------------
class _Operand(NamedTuple):
    """A value in the port: an array, the step that it comes from, and its name if it is a parameter
    or an input.
    """

    value: Any
    step: int | None = None
    name: str | None = None


_INPUT = "an input"


def port_steps(
    call: Callable[[Any, Any], Any],
    arrays: Mapping[str, Any],
    names: Mapping[str, str],
    inputs: Any,
) -> list[Step]:
    """The steps of ``call(arrays, inputs)``; names: a path of an array -> the name of the module's
    tensor that it is.
    """
    closed = jax.make_jaxpr(call)(arrays, inputs)
    # as JAX flattens a dict
    known = [names.get(path, path) for path in sorted(arrays)] + [_INPUT] * len(
        jax.tree.leaves(inputs)
    )
    steps: list[Step] = []

    def run(*leaves: Any) -> list[Any]:
        steps.clear()
        operands = [_Operand(x, None, name) for x, name in zip(leaves, known, strict=True)]
        values: list[Any] = []
        _run(closed.jaxpr, list(map(_Operand, closed.consts)), operands, steps, values, None)
        return values

    values = jax.jit(run)(*jax.tree.leaves((arrays, inputs)))
    return [
        s._replace(value=None if x is None else sorted_numbers(x))
        for s, x in zip(steps, values, strict=True)
    ]


def _run(
    jaxpr: Any, consts: Any, operands: Any, steps: list[Step], values: list[Any], line: str | None
) -> list[_Operand]:
    """Evaluates a jaxpr, and notes its steps and their values; a value that is not of
    floating-point numbers is None.
    """
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))
    read = lambda v: _Operand(v.val) if isinstance(v, Literal) else known[v]
    for eqn in jaxpr.eqns:
        name, given = eqn.primitive.name, list(map(read, eqn.invars))
        here = line or _port_line(eqn)
        if (inner := private_jax.called(eqn)[1]) is not None:
            consts = list(map(_Operand, getattr(inner, "consts", ())))
            outs = _run(getattr(inner, "jaxpr", inner), consts, given, steps, values, here)
            known.update(zip(eqn.outvars, outs, strict=True))
            continue
        if name == "scan" and 0 < eqn.params["length"] <= _UNROLLED:
            known.update(zip(eqn.outvars, _unrolled(eqn, given, steps, values, line), strict=True))
            continue
        with eqn.ctx.manager:
            out = eqn.primitive.bind(
                *[x.value for x in given], **eqn.primitive.get_bind_params(eqn.params)
            )
        for v, x in zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True):
            sources = tuple(g.step for g in given if g.step is not None)
            named = tuple(g.name for g in given if g.name is not None)
            draws = name in _RANDOM or any(steps[s].draws for s in sources)
            depends = _INPUT in named or any(steps[s].from_inputs for s in sources)
            steps.append(
                Step(
                    "",
                    name,
                    here,
                    None,
                    sources,
                    _before(steps, sources),
                    named,
                    False,
                    draws,
                    depends,
                    x.dtype.itemsize < 8,
                )
            )
            values.append(x if jnp.issubdtype(x.dtype, jnp.floating) else None)
            known[v] = _Operand(x, len(steps) - 1)
    return list(map(read, jaxpr.outvars))


def _unrolled(
    eqn: Any, given: Sequence[_Operand], steps: list[Step], values: list[Any], line: str | None
) -> list[_Operand]:
    """The results of a scan, whose steps are noted each time: layers of a model may be the steps of
    a loop.
    """
    body, consts, carried = private_jax.scanned(eqn)
    fixed, carry, rows = (
        given[:consts],
        list(given[consts : consts + carried]),
        given[consts + carried :],
    )
    bound = list(map(_Operand, getattr(eqn.params["jaxpr"], "consts", ())))
    length, kept = eqn.params["length"], []
    for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
        outs = _run(
            body,
            bound,
            [*fixed, *carry, *(x._replace(value=x.value[i]) for x in rows)],
            steps,
            values,
            line,
        )
        carry, each = outs[:carried], outs[carried:]
        kept.append(each)
    kept = kept[::-1] if eqn.params["reverse"] else kept
    return [
        *carry,
        *(x[-1]._replace(value=jnp.stack([y.value for y in x])) for x in zip(*kept, strict=True)),
    ]


def _port_line(eqn: Any) -> str | None:
    """The user's line in the port: of a function that JAX has traced before, the outermost
    equation's counts.
    """
    for file, _, number in private_jax.frames(eqn):
        if file in _OURS:
            return None
        if is_users(file):
            return shown_line(file, number)
    return None


# -- what differs ----------------------------------------------------------------------------------
def output_departure(
    module: nn.Module, theirs: Sequence[Step], ours: Sequence[Step], tolerance: float
) -> Departure | None:
    """Where outputs begin to differ; None if the values of both sides are the same."""
    i, j = first_missing(theirs, ours, tolerance), first_missing(ours, theirs, tolerance)
    step, port = None if i is None else theirs[i], None if j is None else ours[j]
    line = None if port is None else port.line
    where = (
        ""
        if line is None
        else f" The first value that the port computes and the module does not is at {line}."
    )
    before = theirs if step is None else [s for k, s in enumerate(theirs) if step.before >> k & 1]
    if (
        port is not None
        and any(s.draws and s.from_inputs and (s.line == line or j in s.sources) for s in ours)
        and not any(s.draws for s in theirs)
    ):
        passing = [s for s in before if s.moves and "dropout" in s.what]
        at = passing[-1] if passing else step or theirs[-1]
        does = "passes its input on" if passing else "draws none"
        text = (
            "the port draws random numbers, and in this mode the module does not: "
            f"{shown(module, at)}, {does}.{where}"
        )
        return Departure(at.layer, at.what, at.line, line, bool(passing), text)
    if port is not None and (
        step is None
        or (_is_product(step) and not _uses(ours, j, step.params) and port.what != "pad")
    ):
        inputs = [ours[s].value for s in port.sources]
        same = [
            s
            for s in before
            if any(
                x is not None and s.value is not None and alike(s.value, x, tolerance)
                for x in inputs
            )
        ]
        if not same and step is not None:
            text = (
                "the port goes on computing with the module's input, before "
                f"{shown(module, step)}.{where}"
            )
            return Departure(step.layer, step.what, step.line, line, False, text)
        if same:
            after = "the end of the module" if step is None else shown(module, step)
            text = (
                f"the port goes on computing with the output of {shown(module, same[-1])}, before "
                f"{after}.{where}"
            )
            return Departure(
                same[-1].layer,
                same[-1].what,
                same[-1].line,
                line,
                step is None or not step.params,
                text,
            )
    if step is None:
        return None
    known = _Known((s.value for s in ours), tolerance)
    sure = all(theirs[s].value is None or theirs[s].value in known for s in step.sources)
    text = f"the first difference is in {shown(module, step)}: " + (
        "its input is in the port, its output is not."
        if sure
        else (
            "its output is not in the port. Nor is its input, though what else is computed from "
            "that is: code just before it may be the cause."
        )
    )
    return Departure(step.layer, step.what, step.line, line, sure, text + where)


def _is_product(step: Step) -> bool:
    """Whether it multiplies its input with a parameter before it does anything else."""
    return bool(step.params) and (
        "linear" in step.what
        or "conv" in step.what
        or step.what in ("matmul", "embedding", "einsum")
    )


def _uses(steps: Sequence[Step], i: int | None, params: Iterable[str]) -> bool:
    """Whether a step depends on one of these parameters; yes if no step is known to."""
    given = set(params)
    users = [k for k, s in enumerate(steps) if given & set(s.params)]
    return not users or (i is not None and any(k == i or steps[i].before >> k & 1 for k in users))


def shown(module: nn.Module, step: Step) -> str:
    """``layer 'fc' (Linear), linear at model.py:12: ...``"""
    return f"{layer_shown(module, step.layer)}, {step.what}" + (
        f" at {step.line}" if step.line else ""
    )


def layer_shown(module: nn.Module, layer: str) -> str:
    kind = type(module.get_submodule(layer)).__name__
    return f"layer {layer!r} ({kind})" if layer else f"the forward of {kind}"


def owner(module: nn.Module, name: str) -> tuple[str, str]:
    """The layer of a parameter or buffer, and its own name there; an array that has only a name of
    the port's is the whole module's.
    """
    layer, _, own = name.rpartition(".")
    return (
        (layer, own)
        if name in dict((*module.named_parameters(), *module.named_buffers()))
        else ("", name)
    )
