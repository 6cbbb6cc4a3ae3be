"""Parity with a port: a torch module beside a port of it to JAX or Flax; what differs, and the
first layer that does.

Users import it from ``torchfunc_jax.testing``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from torchfunc_jax import _port_runs as runs
from torchfunc_jax._parity_compare import Difference, Options, Outcome, compare, shown_error
from torchfunc_jax._parity_random import alike, drawn
from torchfunc_jax._parity_runs import derived
from torchfunc_jax._port_layers import (
    Departure,
    Step,
    layer_shown,
    output_departure,
    owner,
    port_steps,
    torch_steps,
)
from torchfunc_jax._port_runs import Case, PortSide
from torchfunc_jax._ports import LAYOUTS, Port, PortError, Variables, kind_of

MODES = ("eval", "train")
DTYPES = ("float64", "float32")
_SIDES = ("torch", "the port")
#: How far apart numbers may be that are the same value on both sides.
_SAME_VALUE = {"float64": 1e-9, "float32": 1e-5, "some float32": 2e-6}


@dataclasses.dataclass(frozen=True, slots=True)
class PortCheck:
    """The comparison of a port in one dtype and mode.

    Attributes:
        dtype, mode: "float64" or "float32"; "eval" or "train".
        difference: the first one; None if there is none.
        largest: the largest absolute difference between values.
        agreed: what agreed, in words.
        departure: where the difference begins; None if there is none, or if it could not be found.

    Example:
        >>> import torch
        >>> from torchfunc_jax.testing import port_parity
        >>> (check,) = port_parity(
        ...     torch.nn.Tanh(),
        ...     lambda params, x: x / 2,
        ...     torch.ones(3),
        ...     modes=["eval"],
        ...     dtypes=["float64"],
        ... ).checks
        >>> check.dtype, check.mode, check.difference.where
        ('float64', 'eval', 'output')
    """

    dtype: str
    mode: str
    difference: Difference | None
    largest: float | None
    agreed: str
    departure: Departure | None


@dataclasses.dataclass(frozen=True, slots=True)
class PortReport:
    """What ``port_parity`` has found; ``print`` shows it.

    Attributes:
        checks: one for each dtype and mode.
        names: a path in the port -> the name of the module's tensor that is there; {} if a function
            has made the port's arrays.
        missing: name of a parameter of the module that the port does not have -> why.
        notes: what was not compared, and why.

    Example:
        >>> import torch
        >>> from torchfunc_jax.testing import port_parity
        >>> report = port_parity(
        ...     torch.nn.Linear(3, 2), lambda p, x: x @ p["weight"].T + p["bias"], torch.randn(4, 3)
        ... )
        >>> report.equal, len(report.checks)
        (True, 2)
    """

    checks: tuple[PortCheck, ...]
    names: Mapping[str, str]
    missing: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.missing and all(c.difference is None for c in self.checks)

    @property
    def departure(self) -> Departure | None:
        """Where the port begins to differ, in the first check that has found it; None if nothing
        differs.
        """
        return next((c.departure for c in self.checks if c.departure is not None), None)

    def sentences(self) -> list[str]:
        """What differs, where that begins, and the notes."""
        said = [f"{name}: the port does not have it: {why}" for name, why in self.missing.items()]
        said += [
            f"{c.dtype}, {c.mode}: {c.difference}" for c in self.checks if c.difference is not None
        ]
        if self.departure is not None:
            said.append(f"{'Surely' if self.departure.sure else 'Probably'}, {self.departure.text}")
        return [*said, *self.notes]

    def __str__(self) -> str:
        equal = [f"{c.dtype}, {c.mode}: {c.agreed}" for c in self.checks if c.difference is None]
        return "\n".join([*equal, *self.sentences()])


def port_parity(
    module: nn.Module,
    port: Any,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | Callable[[dict[str, jax.Array]], Any] | None = None,
    variables: Any = None,
    layout: str | None = None,
    channels_last: bool | None = None,
    loss: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    targets: Sequence[Any] = (),
    optimizer: str | tuple[Any, Any] = "sgd",
    steps: int = 5,
    dtypes: Sequence[str] = DTYPES,
    modes: Sequence[str] = MODES,
    rtol: float | None = None,
    atol: float | None = None,
    draws: int = 500,
    seed: int = 0,
) -> PortReport:
    """Compare a torch module with a port of it to JAX or Flax, and find the first layer that
    differs.

    The port gets the module's values. Outputs, the loss, the gradients of parameters and inputs,
    the buffers after a call (a batch norm's statistics), and five steps of an optimizer
    (torch.optim's beside optax's) are compared, in float64 and float32, in eval and train mode. If
    the module draws random numbers, as dropout does in train mode, the distributions of outputs are
    compared there instead.

    Args:
        module: the torch module; it is not changed.
        port: a module of flax.linen or flax.nnx, its class, a function that makes it, or a function
            ``apply(params, *args)``. A function whose second parameter is called state, buffers or
            batch_stats is called as ``apply(params, state, *args)`` and returns (output, state). A
            parameter called train, training, is_training, deterministic, inference or
            use_running_average gets the mode, one called key, rng or rngs a key.
        args, kwargs: the module's arguments; arrays of the same shapes are the port's.
        names: which tensor is which array, where ``bridge.flax.name_map`` cannot know: its rules,
            {torch's name: path in the port}; or a function from {torch's name: array} to what the
            port takes.
        variables: an example of what a port that is a function takes, params or (params, state), or
            the function that makes it, of no arguments or of a key. Without it, it gets {torch's
            name: array}, in torch's layouts.
        layout: "flax" (kernels transposed, channels last) or "torch": how the port keeps its
            arrays, where shapes leave it open.
        channels_last: whether tensors of more than two dimensions have their channels last in the
            port; None: as its shapes fit.
        loss: torch's and the port's, each of (output, *targets); else the output itself if it is
            one number, or the mean of its numbers, each times another number.
        targets: tensors for the loss.
        optimizer: "sgd" (with momentum), "adam", or a pair: a function of parameters that makes
            torch's, and optax's.
        steps: of the optimizer; 0: none.
        dtypes: "float64", "float32"; layers are compared in the first one.
        modes: "eval", "train".
        rtol, atol: tolerances, by default as those of ``parity``.
        draws: the number of calls of a random module.
        seed: of random numbers.

    Returns:
        PortReport: ``.equal``, ``.checks``, and ``.departure``, the first layer that differs.

    Raises:
        PortError: the port's arrays are not those of the module, or it cannot be called.
        ValueError: a dtype, mode, layout or optimizer is none of these.

    Source: ``torch.testing.assert_close``;
    https://flax.readthedocs.io/en/latest/guides/converting_and_upgrading/convert_pytorch_to_flax.html

    Example:
        >>> import torch
        >>> from flax import nnx
        >>> from torchfunc_jax.testing import port_parity
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
        >>> class Port(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.dense, self.norm = (
        ...             nnx.Linear(3, 4, rngs=rngs),
        ...             nnx.LayerNorm(4, epsilon=1e-6, rngs=rngs),
        ...         )
        ...
        ...     def __call__(self, x):
        ...         return self.norm(self.dense(x))
        >>> report = port_parity(net, Port, torch.randn(5, 3))
        >>> report.equal, report.departure.layer, report.departure.what
        (False, '1', 'layer_norm')
    """
    for name, asked, known in (
        ("dtypes", dtypes, DTYPES),
        ("modes", modes, MODES),
        ("layout", [layout or "flax"], LAYOUTS),
    ):
        wrong = [x for x in ([asked] if isinstance(asked, str) else asked) if x not in known]
        if wrong or not asked:
            raise ValueError(
                f"{name}: expected {' or '.join(map(repr, known))}, got "
                f"{wrong[0] if wrong else asked!r}"
            )
    dtypes, modes = ([x] if isinstance(x, str) else list(x) for x in (dtypes, modes))
    case = Case(args, dict(kwargs or {}), loss, tuple(targets), steps, False)
    options = Options(rtol, atol, allow_empty=True, sides=_SIDES, nearer=True)
    with torch.random.fork_rng():
        comparison = _Comparison(
            module,
            port,
            case,
            names,
            variables,
            layout,
            channels_last,
            optimizer,
            options,
            draws,
            seed,
        )
        return comparison.report(dtypes, modes)


class _Comparison:
    """A module and a port, before a dtype and a mode are chosen."""

    def __init__(
        self,
        module: nn.Module,
        port: Any,
        case: Case,
        names: Any,
        variables: Any,
        layout: str | None,
        last: bool | None,
        optimizer: Any,
        options: Options,
        draws: int,
        seed: int,
    ) -> None:
        self.module, self.port, self.case, self.last = module, port, case, last
        self.given = names, variables, layout
        self.rules = runs.optimizers(optimizer) if case.steps else (None, None)
        self.options, self.draws, self.seed = options, draws, derived("port", seed)
        self.notes: dict[str, None] = {}
        self.theirs = functools.cache(self._theirs)
        self.side = functools.cache(self._side)
        self.ports = functools.cache(self._port)
        self.kinds = functools.cache(self._kind)

    def report(self, dtypes: Sequence[str], modes: Sequence[str]) -> PortReport:
        dtypes = self._that_run(dtypes)
        port = self.side(dtypes[0], "eval").port
        if self.case.steps and any((x > 1).any() for x in port.counts().values()):
            self.case, self.rules = self.case._replace(steps=0), (None, None)
            self.side.cache_clear()
            self.notes[
                (
                    "The optimizer's steps were not compared: an array of the port, as a bias of "
                    "Flax's recurrent cells, is the sum of two tensors, and torch trains both."
                )
            ] = None
        if not port.kind.has_mode and len(modes) > 1:
            modes = ["eval"]
            if self._has_modes(dtypes[0]):
                self.notes[
                    (
                        "Only eval mode was compared: the port's call takes no train, training or "
                        "deterministic."
                    )
                ] = None
        checks = [self._check(dtype, mode) for mode in modes for dtype in dtypes]
        return PortReport(tuple(checks), dict(port.labels), dict(port.missing), tuple(self.notes))

    def _that_run(self, dtypes: Sequence[str]) -> list[str]:
        """The dtypes in which the port can be called; raises its error if there is none."""
        found, errors = [], []
        for dtype in dtypes:
            try:
                self.side(dtype, "eval")
                found.append(dtype)
            except PortError as error:
                errors.append(error)
        if not found:
            raise errors[0]
        self.notes |= {
            f"The port was not compared in {dtype}: {error}": None
            for dtype in dtypes
            if dtype not in found
            for error in errors
        }
        return found

    # -- the two sides -----------------------------------------------------------------------------
    def _cast(self, dtype: str) -> tuple[nn.Module, Case]:
        kind = getattr(torch, dtype)
        return copy.deepcopy(self.module).to(kind), self.case.cast(kind)

    def _side(self, dtype: str, mode: str) -> PortSide:
        module, case = self._cast(dtype)
        case = case._replace(train=mode == "train")
        try:
            out = copy.deepcopy(module).eval()(*case.args, **case.kwargs)
        except Exception as error:
            raise PortError(f"module: its call raised {shown_error(error)}") from error
        shapes = [tuple(x.shape) for _, x in runs.outputs(out)]
        with jax.enable_x64(dtype == "float64"):

            def made(last: bool) -> PortSide:
                port = self.ports(dtype, last)
                placed = port.place(runs.values_of(module))
                return PortSide(
                    port,
                    case,
                    placed,
                    last,
                    shapes,
                    self.rules[1] if placed.params else None,
                    self.seed % 2**31,
                )

            side = runs.channels_last(made, module, shapes, self.last)
            self.last = side.last
            return side

    def _kind(self, last: bool) -> Any:
        return kind_of(
            self.port, self.given[1], *runs.given((self.case.args, self.case.kwargs), last)
        )

    def _port(self, dtype: str, last: bool) -> Port:
        return Port(self.kinds(last), self._cast(dtype)[0], self.given[0], self.given[2])

    def _theirs(self, dtype: str, mode: str) -> Outcome:
        side = self.side(dtype, mode)
        with jax.enable_x64(dtype == "float64"):
            return runs.torch_side(
                self._cast(dtype)[0], side.case, side.port, self.rules[0], self.seed
            )

    def _exact(self, mode: str) -> Outcome:
        """Torch's outcome in float64; one without values if the port has no arrays in float64."""
        try:
            return self.theirs("float64", mode)
        except PortError:
            return Outcome()

    def _has_modes(self, dtype: str) -> bool:
        """Whether the module computes something else in train mode."""
        module, case = self._cast(dtype)
        before = runs.values_of(module)
        found = [
            [x for _, x in runs.outputs(module.train(train)(*case.args, **case.kwargs))]
            for train in (False, True)
        ]
        return any(not torch.equal(x, y) for x, y in zip(*found, strict=True)) or any(
            not np.array_equal(x, before[name]) for name, x in runs.values_of(module).items()
        )

    # -- one comparison ----------------------------------------------------------------------------
    def _check(self, dtype: str, mode: str) -> PortCheck:
        side = self.side(dtype, mode)
        theirs = self.theirs(dtype, mode)
        with jax.enable_x64(dtype == "float64"):
            if theirs.drew:
                return self._by_distribution(dtype, mode, side)
            try:
                ours = side.outcome([name for name in theirs.parts if name.startswith("output")])
            except PortError:
                raise
            except Exception as error:
                raise PortError(f"port: in {mode} mode it raised {shown_error(error)}") from error
            if mode == "train":
                theirs, names = runs.with_biased_variances(
                    theirs, ours, self._cast(dtype)[0], side.case, side.port
                )
                self.notes |= dict.fromkeys(
                    (
                        f"{name} follows the biased variance of a batch in the port, as in Flax's "
                        "BatchNorm, and in torch the unbiased one, which is n / (n - 1) times it; "
                        "this was not counted as a difference."
                    )
                    for name in names
                )
        if not all(bool(x.isfinite().all()) for name, x in theirs.parts.items() if _of_steps(name)):
            self.notes[
                (
                    "The optimizer's steps were not compared where torch's lead to numbers that "
                    "are not finite; give a loss, or an optimizer with a smaller learning rate."
                )
            ] = None
            theirs, ours = (
                dataclasses.replace(
                    o, parts={name: x for name, x in o.parts.items() if not _of_steps(name)}
                )
                for o in (theirs, ours)
            )
        found = compare(theirs, ours, self.options, lambda: self._exact(mode), "port")
        tolerance = _SAME_VALUE[dtype]
        if dtype == "float64" and found.difference is not None and found.difference.kind == "value":
            with jax.enable_x64(True):
                narrow = next(
                    (
                        s
                        for s in self._port_steps(side)
                        if s.narrow and s.value is not None and s.from_inputs
                    ),
                    None,
                )
            if narrow is not None:
                tolerance = _SAME_VALUE["some float32"]
                options = dataclasses.replace(
                    self.options,
                    rtol=self.options.rtol or tolerance,
                    atol=self.options.atol or tolerance,
                )
                found = compare(theirs, ours, options, lambda: self._exact(mode), "port")
                self.notes[
                    (
                        f"In float64 the port goes on in float32 at {narrow.line}: the tolerance "
                        f"there is {tolerance:.0e}."
                    )
                ] = None
        if found.difference is None:
            return PortCheck(dtype, mode, None, found.largest, _agreed(theirs), None)
        with jax.enable_x64(dtype == "float64"):
            departure = self._departure(found.difference, side, dtype, tolerance)
        return PortCheck(dtype, mode, found.difference, found.largest, "", departure)

    def _by_distribution(self, dtype: str, mode: str, side: PortSide) -> PortCheck:
        module, case = self._cast(dtype)
        case = case._replace(train=mode == "train")
        torch.manual_seed(self.seed)
        pair = [
            drawn(call, self.draws, name, lambda i: None)
            for call, name in ((runs.torch_draw(module, case), _SIDES[0]), (side.draw(), _SIDES[1]))
        ]
        found = next((d for d in pair if isinstance(d, Difference)), None)
        result = None if found is not None else alike(pair[0], pair[1], self.options, 4)  # type: ignore[arg-type]
        difference = found if result is None else result.difference
        if difference is None:
            return PortCheck(dtype, mode, None, None, result.agreed, None)
        steps = [
            s
            for s in torch_steps(copy.deepcopy(module).train(case.train), case.args, case.kwargs)
            if s.draws
        ]
        layers = list(dict.fromkeys(s.layer for s in steps))
        text = (
            "the layers that draw random numbers are "
            + ", ".join(layer_shown(module, name) for name in layers)
            + "."
        )
        return PortCheck(
            dtype,
            mode,
            difference,
            None,
            "",
            Departure(layers[0], steps[0].what, steps[0].line, None, False, text),
        )

    # -- where it differs --------------------------------------------------------------------------
    def _departure(
        self, difference: Difference, side: PortSide, dtype: str, tolerance: float
    ) -> Departure | None:
        module, case = self._cast(dtype)
        module.train(side.case.train)
        if difference.kind == "dtype":
            return None
        if difference.where.startswith("output"):
            return self._output_departure(module, side, tolerance)
        steps = torch_steps(copy.deepcopy(module), case.args, case.kwargs)
        order = {name: i for i, s in reversed(list(enumerate(steps))) for name in s.params}
        differing = [difference.where, *difference.others]
        if difference.where == "loss":
            return Departure(
                "",
                "loss",
                None,
                None,
                True,
                "the outputs agree, and the loss does not: the fault is in the loss.",
            )
        if difference.where.endswith("after a call"):
            name = difference.where.partition(" ")[0]
            layer, own = owner(module, name)
            rule = (
                " In torch, running = (1 - momentum) * running + momentum * batch."
                if own.startswith("running_")
                else ""
            )
            return Departure(
                layer,
                own,
                None,
                None,
                True,
                (
                    f"outputs and gradients agree, and {own} of {layer_shown(module, layer)} does "
                    f"not: the port updates it otherwise.{rule}"
                ),
            )
        if difference.where.startswith("gradient of "):
            names = [
                where.removeprefix("gradient of ").partition(" ")[0]
                for where in differing
                if where.startswith("gradient of ")
            ]
            known = [name for name in names if name in order]
            if not known:
                return Departure(
                    "",
                    "gradient",
                    None,
                    None,
                    False,
                    (
                        "the outputs and the gradients of the parameters agree, and those of the "
                        "inputs do not: it is before the first layer."
                    ),
                )
            last = max(known, key=lambda name: order[name])
            layer, own = owner(module, last)
            return Departure(
                layer,
                own,
                None,
                None,
                False,
                (
                    "the outputs agree, and gradients do not. Of the parameters with another "
                    f"gradient, {last} is used last, in {layer_shown(module, layer)}: going "
                    "backward, the difference begins there, or between it and the next "
                    "parameters."
                ),
            )
        name = difference.where.partition(" ")[0]
        layer, own = owner(module, name)
        tied = self._tied(side.port)
        return Departure(
            layer,
            own,
            None,
            None,
            False,
            (
                f"the first gradients agree, and what the optimizer makes of {difference.where} "
                f"does not.{tied}"
            ),
        )

    @staticmethod
    def _tied(port: Port) -> str:
        names = list(port.labels.values())
        twice = sorted({name for name in names if names.count(name) > 1})
        return (
            (
                f" {', '.join(twice)} is one tensor in torch, and several arrays in the port, "
                "which are trained apart."
            )
            if twice
            else ""
        )

    @staticmethod
    def _port_steps(side: PortSide) -> list[Step]:
        params, state = side.variables
        call = lambda arrays, inputs: side.call(
            Variables({p: arrays[p] for p in params}, {p: arrays[p] for p in state}),
            inputs,
            side.key,
        )[0]
        return port_steps(call, {**params, **state}, side.port.labels, side.inputs)

    def _output_departure(
        self, module: nn.Module, side: PortSide, tolerance: float
    ) -> Departure | None:
        theirs = torch_steps(copy.deepcopy(module), side.case.args, side.case.kwargs)
        found = output_departure(module, theirs, self._port_steps(side), tolerance)
        if found is None:
            return Departure(
                "",
                "order",
                None,
                None,
                False,
                (
                    "every value that the module computes is in the port too, so the output has "
                    "the same numbers in another order: look at transposes and reshapes."
                ),
            )
        turned = self._turned(module, side, found)
        return (
            found if turned is None else dataclasses.replace(found, text=f"{found.text} {turned}")
        )

    def _turned(self, module: nn.Module, side: PortSide, found: Departure) -> str | None:
        """Whether the outputs agree once a square weight of the layer is transposed."""
        if found.layer == "" and not dict(module.named_parameters(recurse=False)):
            return None
        values = runs.values_of(module)
        for name, p in module.get_submodule(found.layer).named_parameters(
            prefix=found.layer, recurse=False
        ):
            if p.dim() == 2 and p.shape[0] == p.shape[1]:
                placed: Variables = side.port.place({**values, name: values[name].T.copy()})
                out = side.in_torchs_layout(side.call(placed, side.floats, side.key)[0])
                side.port.place(values)
                expected = [
                    x.detach()
                    for _, x in runs.outputs(
                        copy.deepcopy(module)(*side.case.args, **side.case.kwargs)
                    )
                ]
                if all(
                    np.allclose(x, y.numpy(), rtol=1e-5, atol=1e-6)
                    for x, y in zip(out, expected, strict=True)
                ):
                    return f"With {name} transposed the outputs agree" + (
                        '; if the port keeps its weights in torch\'s layout, say layout="torch".'
                        if side.port.map is not None
                        else "."
                    )
        return None


def _of_steps(name: str) -> bool:
    return name.startswith("loss of step") or name.endswith(" steps")


def _agreed(outcome: Outcome) -> str:
    """What an outcome has, in words."""
    kinds = [
        word
        for word, start in (("outputs", "output"), ("loss", "loss"), ("gradients", "gradient of "))
        if any(name.startswith(start) for name in outcome.parts)
    ]
    kinds += [
        word
        for word, end in (("buffers", " after a call"), ("optimizer's steps", " steps"))
        if any(name.endswith(end) for name in outcome.parts)
    ]
    return f"equal: {', '.join(kinds)}"
