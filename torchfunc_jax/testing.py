"""Parity as a tool: run a function under torch.func and under this library, and report where the
two differ.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from bridge.convert import trees
from bridge.record.programs import cold_by
from torchfunc_jax._parity_compare import (
    Difference,
    Found,
    Options,
    Outcome,
    compare,
    definition,
    shown_error,
)
from torchfunc_jax._parity_random import Draws, alike, drawn, varying
from torchfunc_jax._parity_runs import OTHER, Side, derived, in_float64
from torchfunc_jax._parity_transforms import Make, Transform, has_derivatives, named
from torchfunc_jax._port_layers import Departure
from torchfunc_jax._ports import PortError
from torchfunc_jax._vmap import name_of
from torchfunc_jax.patching import ORIGINAL, OURS, patch
from torchfunc_jax.port_parity import PortCheck, PortReport, port_parity


class ParityError(AssertionError):
    """torch.func and torchfunc_jax do not agree, or nothing was compared; the message says where
    first.

    Attributes:
        checks: all of ``parity``'s checks.

    Example:
        >>> import torch
        >>> from torchfunc_jax.testing import ParityError, assert_parity
        >>> try:
        ...     assert_parity(
        ...         lambda x, w: (x @ w).sum(), torch.ones(3), transforms=["grad"], jit=False
        ...     )
        ... except ParityError as error:
        ...     print(str(error).splitlines()[0])
        <lambda> under grad, eager: both sides raised, so nothing was compared
    """

    checks: Sequence[Check] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One comparison.

    Attributes:
        transform: its name.
        mode: "eager" or "jit".
        difference: the first difference in words; None if there is none.
        largest: the largest absolute difference between values; None if no values were compared.
        agreed: the common result: "same values", "random, same numbers", "both raise
            RuntimeError", ...
        details: the difference as data; None if there is none.
        notes: remarks on a comparison that did not fail.
        compared: False if PyTorch ran on both sides, so that the comparison means nothing.

    Example:
        >>> import torch
        >>> from torchfunc_jax.testing import parity
        >>> (check,) = parity(torch.sin, torch.ones(2), transforms=["vmap"], jit=False)
        >>> check.agreed, check.largest < 1e-6
        ('same values', True)
    """

    transform: str
    mode: str
    difference: str | None
    largest: float | None
    agreed: str = ""
    details: Difference | None = None
    notes: tuple[str, ...] = ()
    compared: bool = True


def parity(
    fn: Callable[..., Any],
    *args: Any,
    transforms: str | Sequence[Transform] = ("call",),
    kwargs: dict[str, Any] | None = None,
    jit: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
    check_values: bool = True,
    check_strides: bool = False,
    may_do_more: bool = False,
    raises: type[BaseException] | tuple[type[BaseException], ...] | None = None,
    allow_empty: bool = False,
    draws: int = 1000,
    seed: int = 0,
    progress: Callable[[float, float, str], None] | None = None,
) -> list[Check]:
    """Run a function under torch.func's transforms and under ours, and compare the results.

    The comparison covers the outputs (structure, dtypes, layouts, shapes, devices, requires_grad,
    values), their gradients if they require grad, and changes in place: of inputs, a module's
    parameters and buffers, captured tensors, ``.grad``. Floating-point values may differ by a
    tolerance, which is smaller for an output whose numbers are all smaller than 1. Integers must be
    equal, and NaN equals only NaN. Each function is called twice, the second time with its
    floating-point inputs and its module's parameters multiplied by 0.75, so that the program that
    the first call compiled runs on other numbers.

    A function is random if it draws from a generator of torch's, or if two runs from one seed
    differ. If both libraries draw the same numbers, the numbers are compared. Otherwise the
    distributions of many draws are compared, and equal distributions are reported as different in
    fewer than one of a million runs. The check's ``agreed`` tells which comparison was made.

    The check also fails if both sides raise without ``raises``, or if there is nothing to compare.

    Args:
        fn: a function of tensors, or an nn.Module (each side gets a copy of it).
        args, kwargs: its arguments, trees of tensors and other values; each call gets copies.
        transforms: each is a name from torch.func ("grad", "vmap", "jacrev", "vjp", ...), a nesting
            of names with options ("vmap(grad, in_dims=(0, None))"), "call" for the function itself
            (our side runs inside ``patch()``), or a function that takes torch.func or torchfunc_jax
            and fn, and returns a function.
        jit: compare ``jit`` of the transformed function too.
        rtol, atol: tolerances for floating-point values; by dtype if not given.
        check_values: False to compare only structure, shapes and types.
        check_strides: compare strides of outputs.
        may_do_more: a call that torch.func refuses may work here.
        raises: the exception class that both sides must raise, or several.
        allow_empty: accept an output without tensors, with only empty tensors, or with only NaN.
        draws: the number of calls of a random function on each side if its numbers differ.
        seed: seeds torch's generators before each run; the numbers are not those of
            ``torch.manual_seed(seed)``.
        progress: called with the amount done, the whole amount, and a description of the next step.

    Returns:
        list[Check]: one for each transform and mode.

    Raises:
        ValueError: there is no transform, a transform is not a name in torch.func, or draws < 100;
            ``cold`` is "torch".

    Source: ``torch.testing.assert_close``, for the way differences are described.

    Example:
        >>> import torch
        >>> from torchfunc_jax.testing import parity
        >>> [
        ...     (c.transform, c.mode, c.difference)
        ...     for c in parity(torch.sin, torch.ones(2), transforms=["vmap"])
        ... ]
        [('vmap', 'eager', None), ('vmap', 'jit', None)]
        >>> (check,) = parity(torch.sin, torch.ones(2), torch.ones(2), jit=False, raises=TypeError)
        >>> check.agreed
        'both raise TypeError'
    """
    pairs = [named(t) for t in ([transforms] if isinstance(transforms, str) else transforms)]
    if not pairs:
        raise ValueError("transforms: expected at least one, got none; nothing would be compared")
    if draws < 100:
        raise ValueError(
            f"draws: expected at least 100, got {draws}; fewer cannot tell distributions apart"
        )
    if cold_by() == "torch":
        raise ValueError(
            'parity: with cold="torch" PyTorch would be compared with itself; call it outside of '
            'that, or in cold("jax")'
        )
    options = _Settings(
        Options(rtol, atol, check_values, check_strides, may_do_more, raises, allow_empty),
        jit,
        draws,
        seed,
        len(pairs),
        progress,
    )
    checks: list[Check] = []
    with torch.random.fork_rng():
        for i, (name, make) in enumerate(pairs):
            checks += _Comparison(name, make, fn, args, kwargs, options, i).checks()
    return checks


def assert_parity(fn: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Assert that a function has the same results under torch.func's transforms and under ours,
    with and without ``jit``.

    Args:
        fn, args, options: as in ``parity``.

    Raises:
        ParityError: (an AssertionError) the results differ; the message has the transform, the
            place in the output and the difference.
        ValueError: as in ``parity``.

    Source: ``torch.testing.assert_close``.

    Example:
        >>> import torch
        >>> from torchfunc_jax.testing import assert_parity
        >>> assert_parity(
        ...     lambda x: (x**2).sum(),
        ...     torch.randn(3, 2),
        ...     transforms=["grad", "vmap(grad)", "hessian"],
        ... )
        >>> assert_parity(
        ...     lambda x: x.reshape(5), torch.ones(3), transforms=["vmap"], raises=RuntimeError
        ... )
    """
    __tracebackhide__ = True
    checks = parity(fn, *args, **options)
    failure = failed(checks)
    if failure is not None:
        error = ParityError(f"{name_of(fn)} {failure}")
        error.checks = checks
        raise error


def assert_port_parity(module: nn.Module, port: Any, *args: Any, **options: Any) -> None:
    """Assert that a port of a module to JAX or Flax computes, and learns, what the module does.

    Args:
        module, port, args, options: as in ``port_parity``.

    Raises:
        ParityError: (an AssertionError) they differ; the message has the first difference and the
            layer where it begins.
        PortError, ValueError: as in ``port_parity``.

    Source: ``torch.testing.assert_close``.

    Example:
        >>> import torch
        >>> from torchfunc_jax.testing import assert_port_parity
        >>> assert_port_parity(
        ...     torch.nn.Linear(3, 2), lambda p, x: x @ p["weight"].T + p["bias"], torch.randn(4, 3)
        ... )
    """
    __tracebackhide__ = True
    report = port_parity(module, port, *args, **options)
    if not report.equal:
        raise ParityError(f"the port differs\n{report}")


def failed(checks: Sequence[Check]) -> str | None:
    """A description of the failed checks; None if all agree and at least one compared something.

    Args:
        checks: the result of ``parity``.

    Example:
        >>> import torch
        >>> from torchfunc_jax.testing import failed, parity
        >>> failed(parity(torch.sin, torch.ones(2), transforms=["vmap"])) is None
        True
        >>> print(failed(parity(torch.sin, torch.ones(2), transforms=["call"], jit=False)))
        was not compared: PyTorch ran on both sides, because the function calls no transform;
        compare a transform of it, or jit
    """
    wrong = [c for c in checks if c.difference is not None]
    if wrong:
        text = f"under {wrong[0].transform}, {wrong[0].mode}: {wrong[0].difference}"
        if len(checks) > 1:
            shown = [
                ", ".join(f"{c.transform} {c.mode}" for c in some)
                for some in (wrong, [c for c in checks if c.difference is None])
            ]
            text += f"\n  {len(wrong)} of {len(checks)} checks failed: {shown[0]}." + (
                f" These agree: {shown[1]}." if shown[1] else ""
            )
        return text
    if not any(c.compared for c in checks):
        return f"was not compared: {_TORCH_TWICE}; compare a transform of it, or jit"
    return None


_TORCH_TWICE = "PyTorch ran on both sides, because the function calls no transform"
_CHANGES = (
    "Two calls under torch.func from one seed differ, and draw no random number of torch's: the "
    "function changes a Python object that outlives the call, such as a global, a list or an "
    "attribute, or it draws from another generator. Set the object back at the start of the "
    "function, or pass it as an argument."
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Settings:
    judge: Options
    jit: bool
    draws: int
    seed: int
    transforms: int
    progress: Callable[[float, float, str], None] | None

    @property
    def modes(self) -> int:
        return 1 + self.jit


class _Comparison:
    """One transform of a function, under both libraries."""

    def __init__(
        self,
        name: str,
        make: Make,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        settings: _Settings,
        number: int,
    ) -> None:
        self.name, self.make, self.fn, self.args, self.kwargs = name, make, fn, args, kwargs
        self.settings, self.number = settings, number
        self.seeds = [derived("run", settings.seed, i) for i in (0, 1)]
        self.exact = functools.cache(self._in_float64)
        where = definition(fn)
        self.function = name_of(fn) + (f" ({where})" if where else "")

    def checks(self) -> list[Check]:
        """A check for each mode."""
        self._tell(0, "torch.func")
        reference = self._theirs()
        self.theirs = reference.calls(self.seeds)
        reference.restore()
        self.random = self._is_random(reference)
        return [
            self._check(i, mode) for i, mode in enumerate(("eager", "jit")[: self.settings.modes])
        ]

    def _theirs(self) -> Side:
        return Side(ORIGINAL, self.make, self.fn, self.args, self.kwargs)

    def _ours(self, mode: str) -> Side:
        compiled = OURS.jit if mode == "jit" else lambda f: f
        return Side(
            OURS,
            self.make,
            self.fn,
            self.args,
            self.kwargs,
            compiled,
            patch if self.name == "call" else nullcontext,
        )

    def _is_random(self, reference: Side) -> bool:
        """Whether torch.func's side draws random numbers, from torch's generators or from others
        (then two runs differ).
        """
        first = self.theirs[0]
        if first.error is not None:
            return False
        again = self._theirs()
        second = again.call(self.seeds[0])
        again.restore()
        options = dataclasses.replace(
            self.settings.judge, values=True, allow_empty=True, raises=None
        )
        self.repeats = compare(first, second, options, Outcome, "").difference is None
        return first.drew or not self.repeats

    def _check(self, number: int, mode: str) -> Check:
        self._tell((1 + number) / (1 + self.settings.modes), f"torchfunc_jax, {mode}")
        side = self._ours(mode)
        watch = self.name == "call" and mode == "eager"
        ours = side.calls(self.seeds, watch)
        side.restore()
        found, notes = self._judge(ours, side)
        random = self.random and self.settings.judge.values
        if (
            random
            and found.difference is not None
            and found.difference.kind in ("value", "structure", "shape")
        ):
            found = self._by_distribution(ours[0], side, mode, number)
            side.restore()
        elif random and found.difference is None and found.agreed == "same values":
            found.agreed = "random, same numbers"
        if found.difference is not None and random and not self.theirs[0].drew:
            text = f"{found.difference.text}\n  {_CHANGES}"
            found.difference = dataclasses.replace(found.difference, text=text)
        text = None if found.difference is None else str(found.difference)
        if text is None and not any(o.in_ours or o.error for o in ours):
            return Check(
                self.name, mode, None, None, "not compared", None, (f"{_TORCH_TWICE}.",), False
            )
        return Check(self.name, mode, text, found.largest, found.agreed, found.difference, notes)

    def _judge(self, ours: list[Outcome], side: Side) -> tuple[Found, tuple[str, ...]]:
        """Compare both calls, one after the other."""
        options = self.settings.judge
        found = compare(self.theirs[0], ours[0], options, lambda: self.exact(0), self.function)
        if (
            found.difference is not None
            or self.theirs[0].error is not None
            or options.raises is not None
        ):
            return found, ()
        if self.theirs[1].error is not None:
            why = shown_error(self.theirs[1].error)
            return found, (
                (
                    f"It was called once: with its numbers multiplied by {OTHER}, torch.func "
                    f"raised {why}."
                ),
            )
        options = dataclasses.replace(options, allow_empty=True)
        second = compare(self.theirs[1], ours[1], options, lambda: self.exact(1), self.function)
        if second.difference is not None:
            text = (
                f"{second.difference.text}\n  The first call agrees; this is the second one, on "
                f"numbers multiplied by {OTHER}."
            )
            second.difference = dataclasses.replace(second.difference, text=text)
            return second, ()
        found.largest = max(
            (v for v in (found.largest, second.largest) if v is not None), default=None
        )
        return found, self._notes()

    def _notes(self) -> tuple[str, ...]:
        notes = []
        error = self.theirs[0].no_gradient
        if error is not None:
            notes.append(
                "Gradients of the output were not compared: torch's autograd raised "
                f"{shown_error(error)}."
            )
        same = dataclasses.replace(
            self.settings.judge, rtol=0.0, atol=0.0, values=True, allow_empty=True, raises=None
        )
        first, second = (Outcome({"output": o.parts["output"]}) for o in self.theirs)
        if (
            not self.random
            and self._has_floats()
            and compare(first, second, same, Outcome, "").difference is None
        ):
            notes.append(
                "The output does not depend on the numbers in the arguments: multiplied by "
                f"{OTHER}, they give the same."
            )
        return tuple(notes)

    def _has_floats(self) -> bool:
        return any(
            has_derivatives(x) and bool(x.detach().any())
            for x in trees.flatten((self.args, self.kwargs))[0]
        )

    def _by_distribution(self, first: Outcome, side: Side, mode: str, number: int) -> Found:
        """Compare the distributions of a random function whose numbers are not PyTorch's."""
        settings = self.settings
        theirs = self._draws_of_theirs()
        if isinstance(theirs, Difference):
            return Found(theirs)
        options = dataclasses.replace(settings.judge, values=False, shapes=not varying(theirs))
        found = compare(self.theirs[0], first, options, Outcome, self.function)
        if found.difference is not None:
            return found
        if self.repeats:
            again = side.call(self.seeds[0])
            side.restore()
            changed = compare(
                first,
                again,
                dataclasses.replace(settings.judge, allow_empty=True),
                Outcome,
                self.function,
            ).difference
            if changed is not None:
                text = (
                    f"{changed.where} is random, and torch.manual_seed repeats torch.func's "
                    "numbers, but not torchfunc_jax's"
                )
                return Found(Difference("repetition", text, changed.where))
        ours = self._draw(side, "torchfunc_jax", (1 + number) / (1 + settings.modes), mode)
        if isinstance(ours, Difference):
            return Found(ours)
        return alike(theirs, ours, settings.judge, settings.transforms * settings.modes)

    def _draws_of_theirs(self) -> Draws | Difference:
        if not hasattr(self, "_kept"):
            self._kept = self._draw(self._theirs(), "torch.func", 0.0, "reference")
        return self._kept

    def _draw(self, side: Side, name: str, done: float, mode: str) -> Draws | Difference:
        torch.manual_seed(derived("draws", self.settings.seed, name, mode, self.number))

        def call() -> Outcome:
            side.restore()
            return side.call(None)

        def step(i: int) -> None:
            if i % 10 == 0:
                self._tell(
                    done + i / self.settings.draws / (1 + self.settings.modes),
                    f"{name}, draw {i} of {self.settings.draws}",
                )

        found = drawn(call, self.settings.draws, name, step)
        side.restore()
        return found

    def _in_float64(self, call: int) -> Outcome:
        return in_float64(
            self.make, ORIGINAL, self.fn, self.args, self.kwargs, self.seeds[: call + 1]
        )

    def _tell(self, share: float, what: str) -> None:
        if self.settings.progress is not None:
            self.settings.progress(
                self.number + share, self.settings.transforms, f"{self.name}: {what}"
            )


__all__ = [
    "Check",
    "Departure",
    "Difference",
    "ParityError",
    "PortCheck",
    "PortError",
    "PortReport",
    "Transform",
    "assert_parity",
    "assert_port_parity",
    "failed",
    "parity",
    "port_parity",
]
