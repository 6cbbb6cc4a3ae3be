"""One side of a parity check: the function under torch.func or under this library, run on copies,
and each call's outcome.
"""

from __future__ import annotations

import copy
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

import bridge
from bridge import private
from bridge.convert import trees
from bridge.programs import closure_scan
from torchfunc_jax._parity_compare import Outcome
from torchfunc_jax._parity_transforms import Make, direction, has_derivatives

_BRIDGE = os.path.dirname(bridge.__file__)
#: The factor of a second call's numbers, on which the program that the first call compiled has to
#: run too.
OTHER = 0.75


def derived(*what: Any) -> int:
    """A seed made by a hash, so that seed 0 here draws other numbers than torch.manual_seed(0)
    does.
    """
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "big") >> 1


class Side:
    """A function under a transform of one library; its module, if it is one, is a copy."""

    def __init__(
        self,
        api: Any,
        make: Make,
        fn: Any,
        args: Any,
        kwargs: Any,
        compiled: Callable[[Any], Any] = lambda f: f,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.fn = copy.deepcopy(fn) if isinstance(fn, nn.Module) else fn
        self.api, self.make, self.compiled, self.around = api, make, compiled, around
        self.inputs = (args, kwargs or {})
        self.function: Callable[..., Any] | None = None
        self.start = _State(self.fn)

    def calls(self, seeds: list[int], watch: bool = False) -> list[Outcome]:
        """A call on the inputs and, with two seeds, a call with other numbers in the inputs and the
        module's parameters.
        """
        outcomes = []
        for i, seed in enumerate(seeds):
            if i:
                self.start.train()
            outcomes.append(self.call(seed, (1.0, OTHER)[i], watch))
        return outcomes

    def call(self, seed: int | None, factor: float = 1.0, watch: bool = False) -> Outcome:
        """One call on fresh copies of the inputs; seed None: generators keep their state; watch:
        note whether our code runs.
        """
        outcome = Outcome()
        inputs = _fresh(self.inputs, factor, reseed=seed is None)
        before = _fresh(inputs)
        generators = [g for g in trees.flatten(inputs)[0] if isinstance(g, torch.Generator)]
        if seed is not None:
            torch.manual_seed(seed)
        drawn = _generator_states(generators)
        ran: list[bool] = []
        try:
            with self.around():
                if self.function is None:
                    self.function = self.compiled(self.make(self.api, self.fn))
                with _watched(ran) if watch else nullcontext():
                    output = self.function(*inputs[0], **inputs[1])
        except (Exception, SystemExit) as error:
            outcome.error = error
            return outcome
        finally:
            outcome.in_ours = not watch or bool(ran)
            outcome.drew = any(
                not torch.equal(a, b) for a, b in zip(drawn, _generator_states(generators))
            )
        self._note(outcome, output, inputs)
        names = [
            (f"input[{key!r}]", value, old)
            for key, value, old in (
                *((i, v, o) for i, (v, o) in enumerate(zip(inputs[0], before[0], strict=True))),
                *((k, v, before[1][k]) for k, v in inputs[1].items()),
            )
        ]
        outcome.changed = self.start.changed() or any(
            not _identical(value, old) for _, value, old in names
        )
        outcome.parts.update({name: _opened(value) for name, value, _ in names})
        for name, value, _ in names:
            for x in trees.flatten(value)[0]:
                if isinstance(x, torch.Tensor) and x.grad is not None:
                    outcome.parts[f"{name}.grad"] = x.grad.clone()
        outcome.parts.update(self.start.now())
        return outcome

    def _note(self, outcome: Outcome, output: Any, inputs: Any) -> None:
        """Note the output, and its gradients by torch's autograd."""
        outcome.parts["output"] = _opened(output)
        outs = [x for x in trees.flatten(output)[0] if has_derivatives(x) and x.requires_grad]
        wanted = {
            f"input[{key!r}]{list(path) if path else ''}": x
            for key, tree in (*enumerate(inputs[0]), *inputs[1].items())
            for path, x in zip(trees.paths(trees.flatten(tree)[1]), trees.flatten(tree)[0])
        }
        wanted = {
            k: x
            for k, x in {**wanted, **self.start.tensors()}.items()
            if has_derivatives(x) and x.requires_grad
        }
        if not outs or not wanted:
            return
        try:
            with self.around():
                grads = torch.autograd.grad(
                    outs,
                    list(wanted.values()),
                    list(map(direction, outs)),
                    retain_graph=True,
                    allow_unused=True,
                )
        except Exception as error:
            outcome.no_gradient = error
            return
        outcome.parts.update(
            {f"gradient of {name}": g for name, g in zip(wanted, grads, strict=True)}
        )

    def restore(self) -> None:
        """Restore the first values of the module and the captured tensors."""
        self.start.restore()


def in_float64(make: Make, api: Any, fn: Any, args: Any, kwargs: Any, seeds: list[int]) -> Outcome:
    """PyTorch's outcome of the last of ``calls`` with all floating-point numbers in float64, or an
    outcome with its error.
    """
    widened = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}

    def one(x: Any) -> Any:
        if isinstance(x, nn.Module):
            return copy.deepcopy(x).double()
        return (
            x.detach().to(widened.get(x.dtype, torch.float64)).requires_grad_(x.requires_grad)
            if has_derivatives(x)
            else x
        )

    default = torch.get_default_dtype()
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for t in _captured(fn).values():
            if has_derivatives(t) and t.is_leaf and not t.is_inference():
                held.append((t, t.data))
                t.data = t.data.to(widened.get(t.dtype, torch.float64))
        torch.set_default_dtype(torch.float64)
        side = Side(
            api, make, one(fn), *(trees.map_leaves(one, tree) for tree in (args, kwargs or {}))
        )
        return side.calls(seeds)[-1]
    except Exception as error:
        return Outcome(error=error)
    finally:
        torch.set_default_dtype(default)
        for t, data in held:
            t.data = data


# -- the module's and captured tensors -------------------------------------------------------------
def _captured(fn: Any) -> dict[str, torch.Tensor]:
    """The tensors that a function captures, by a name for the report."""
    found: dict[str, torch.Tensor] = {}
    for t, place in closure_scan.scan(fn).tensors.values():
        # the function keeps a tensor that a transform made in an earlier call
        if private.without_memory(t):
            continue
        key = place.key if isinstance(place.key, str) else f"of shape {tuple(t.shape)}"
        name = f"captured tensor {key}"
        found[name if name not in found else f"{name} ({len(found)})"] = t
    return found


class _State:
    """The parameters and buffers of a module, or the captured tensors of a function, as they were
    when this was made.
    """

    def __init__(self, fn: Any) -> None:
        self.module = fn if isinstance(fn, nn.Module) else None
        self.fn = fn
        self.places = (
            []
            if self.module is None
            else [
                (f"state[{'.'.join(filter(None, (prefix, name)))!r}]", m, name, t)
                for prefix, m in self.module.named_modules(remove_duplicate=False)
                for name, t in (*m.named_parameters(recurse=False), *m.named_buffers(recurse=False))
            ]
        )
        self.first = {name: t.detach().clone() for name, t in self._originals().items()}
        self.grads = {name: t.grad for name, t in self._originals().items() if t.is_leaf}

    def _originals(self) -> dict[str, torch.Tensor]:
        return (
            {name: t for name, _, _, t in self.places}
            if self.module is not None
            else _captured(self.fn)
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The present tensors, by name."""
        if self.module is None:
            return _captured(self.fn)
        return {
            name: x
            for name, m, key, _ in self.places
            if isinstance(x := getattr(m, key, None), torch.Tensor)
        }

    def changed(self) -> bool:
        """Whether a tensor was replaced or has other values than at first."""
        now = self.tensors()
        return now.keys() != self.first.keys() or any(
            not _identical(t, self.first[name]) for name, t in now.items()
        )

    def now(self) -> dict[str, torch.Tensor]:
        """Copies of the present tensors and of their ``.grad``."""
        now = {
            name: t.detach().clone().requires_grad_(t.requires_grad)
            for name, t in self.tensors().items()
        }
        grads = {
            f"{name}.grad": t.grad.clone()
            for name, t in self.tensors().items()
            if t.is_leaf and t.grad is not None
        }
        return now | grads

    @torch.no_grad()
    def restore(self) -> None:
        for _, m, key, t in self.places:
            if getattr(m, key, None) is not t:
                setattr(m, key, t)
        for name, t in self._originals().items():
            if name in self.first and not _identical(t, self.first[name]):
                t.copy_(self.first[name])
            if name in self.grads and t.grad is not self.grads[name]:
                t.grad = self.grads[name]

    @torch.no_grad()
    def train(self) -> None:
        """Change the module's parameters, as an optimizer's step would; captured tensors belong to
        the caller and are not changed.
        """
        for t in {
            id(t): t for *_, t in self.places if isinstance(t, nn.Parameter) and has_derivatives(t)
        }.values():
            t.mul_(OTHER)


# -- copies ----------------------------------------------------------------------------------------
def _fresh(tree: Any, factor: float = 1.0, reseed: bool = False) -> Any:
    """A copy of a tree with floating-point numbers multiplied by factor; reseed: its generators get
    seeds from torch's default one.

    The same leaf twice is the same copy twice, tensors that share memory share it in the copy,
    requires_grad and strides stay.
    """
    memo: dict[Any, Any] = {}

    def one(x: Any) -> Any:
        if id(x) not in memo:
            memo[id(x)] = _copied(x, factor, reseed, memo)
        return memo[id(x)]

    return trees.map_leaves(one, tree)


def _copied(x: Any, factor: float, reseed: bool, memo: dict[Any, Any]) -> Any:
    if isinstance(x, nn.Module | np.ndarray):
        return copy.deepcopy(x)
    if isinstance(x, torch.Generator):
        generator = torch.Generator(x.device)
        generator.set_state(x.get_state())
        return generator.manual_seed(int(torch.randint(2**62, ()))) if reseed else generator
    if not isinstance(x, torch.Tensor):
        return x
    if (
        type(x) not in (torch.Tensor, nn.Parameter)
        or x.layout is not torch.strided
        or x.is_conj()
        or x.is_neg()
        or not x.numel()
    ):
        new = x.detach().clone()
        new = new * factor if factor != 1.0 and has_derivatives(x) else new
    else:
        key = x.untyped_storage().data_ptr(), x.dtype
        if key not in memo:
            memory = (
                torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage()).clone()
            )
            memo[key] = memory * factor if factor != 1.0 and has_derivatives(x) else memory
        new = torch.empty(0, dtype=x.dtype, device=x.device).set_(
            memo[key].untyped_storage(), x.storage_offset(), x.shape, x.stride()
        )
    return (
        nn.Parameter(new, x.requires_grad)
        if isinstance(x, nn.Parameter)
        else new.requires_grad_(x.requires_grad)
    )


def _opened(tree: Any) -> Any:
    """The tree as it is now: tensors and arrays copied, and a module as its class and its state,
    which can be compared.
    """

    def one(x: Any) -> Any:
        if isinstance(x, nn.Module):
            return {"class": type(x).__name__, **_State(x).now()}
        if type(x) in (torch.Tensor, nn.Parameter):
            return x.detach().clone().requires_grad_(x.requires_grad)
        # its state counts draws, and this library draws differently
        return "a generator" if isinstance(x, torch.Generator) else x

    return trees.map_leaves(one, tree)


def _identical(x: Any, y: Any) -> bool:
    """Whether the tensors, arrays and modules in two trees of one structure hold the same bits."""
    (a, spec), (b, other) = trees.flatten(_opened(x)), trees.flatten(_opened(y))
    if spec != other:
        return False
    for v, w in zip(a, b, strict=True):
        if isinstance(v, torch.Tensor) and not (
            v.shape == w.shape
            and v.dtype == w.dtype
            and torch.equal(v.isnan(), w.isnan())
            and torch.equal(v.nan_to_num(), w.nan_to_num())
        ):
            return False
        if isinstance(v, np.ndarray) and not np.array_equal(v, w, equal_nan=v.dtype.kind in "fc"):
            return False
    return True


# -- what a call does beside its output ------------------------------------------------------------
def _generator_states(given: list[torch.Generator]) -> list[torch.Tensor]:
    states = [torch.get_rng_state(), *(g.get_state() for g in given)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return states


@contextmanager
def _watched(ran: list[bool]) -> Iterator[None]:
    """Append to ran when this thread calls code of the bridge, or if a profiler is on, because then
    that cannot be seen.
    """
    if sys.getprofile() is not None:
        ran.append(True)
        yield
        return

    def look(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_BRIDGE):
            ran.append(True)
            sys.setprofile(None)

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)
