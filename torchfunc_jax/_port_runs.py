"""Both sides of a comparison with a port: output, loss, gradients, buffers and the steps of an
optimizer, as outcomes that can be compared.

Gradients and what an optimizer makes of the parameters are compared in the port's own arrays, so
that each of them takes its own steps.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from bridge.convert import trees
from bridge.modules import as_tensor
from torchfunc_jax._parity_compare import Outcome, shown_error
from torchfunc_jax._parity_transforms import direction, has_derivatives
from torchfunc_jax._ports import Arrays, Port, PortError, Variables

#: The rules that torch.optim and optax have under a name.
OPTIMIZERS: dict[str, dict[str, float]] = {
    "sgd": {"lr": 1e-2, "momentum": 0.9},
    "adam": {"lr": 1e-3},
}


def optimizers(optimizer: str | tuple[Any, Any]) -> tuple[Callable[..., Any], Any]:
    """(a function of parameters that makes an optimizer of torch.optim,
    an optimizer of optax's).
    """
    if not isinstance(optimizer, str):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise ValueError(
            f"optimizer: expected one of {', '.join(OPTIMIZERS)}, or a pair (a function of "
            f"parameters that makes torch's, optax's), got {optimizer!r}"
        )
    try:
        import optax
    except ImportError as error:
        raise PortError(
            "optimizer: its steps need optax, which is not installed: pip install optax; or steps=0"
        ) from error
    numbers = OPTIMIZERS[optimizer]
    theirs = getattr(torch.optim, {"sgd": "SGD", "adam": "Adam"}[optimizer])
    ours = getattr(optax, optimizer)(
        **{"learning_rate" if name == "lr" else name: value for name, value in numbers.items()}
    )
    return lambda params: theirs(params, **numbers), ours


class Case(NamedTuple):
    """What both sides are called with; the tensors have the dtype in which they are compared.

    Attributes:
        loss: torch's and the port's, each of (output, *targets); None: the output if it is one
            number, else the mean of its numbers, each times a number of its own.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: tuple[Callable[..., Any], Callable[..., Any]] | None
    targets: tuple[Any, ...]
    steps: int
    train: bool

    def cast(self, dtype: torch.dtype) -> Case:
        """With floating-point tensors of this dtype."""
        one = lambda x: (
            x.detach().to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        )
        args, kwargs, targets = (
            trees.map_leaves(one, tree) for tree in (self.args, self.kwargs, self.targets)
        )
        return self._replace(args=args, kwargs=kwargs, targets=targets)


def outputs(tree: Any, path: str = "output") -> Iterator[tuple[str, Any]]:
    """The tensors or arrays of an output, with their places; dicts by sorted keys, dataclasses as
    dicts, so that both sides agree.
    """
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type | Mapping):
        tree = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield from outputs(tree[key], f"{path}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for i, below in enumerate(tree):
            yield from outputs(below, f"{path}[{i}]")
    elif isinstance(tree, torch.Tensor | jax.Array | np.ndarray):
        yield path, tree


# -- torch's side ----------------------------------------------------------------------------------
def values_of(module: nn.Module) -> dict[str, np.ndarray]:
    """Copies of a module's parameters and buffers."""
    return {
        name: t.detach().cpu().numpy().copy()
        for name, t in (*module.named_parameters(), *module.named_buffers())
    }


def torch_loss(case: Case, out: Any) -> torch.Tensor | None:
    if case.loss is not None:
        return case.loss[0](out, *case.targets)
    found = [x for _, x in outputs(out) if has_derivatives(x)]
    if not found:
        return None
    return (
        found[0].reshape(())
        if len(found) == 1 and found[0].numel() == 1
        else sum((x * direction(x)).mean() for x in found)
    )


def torch_side(
    module: nn.Module, case: Case, port: Port, make: Callable[..., Any], seed: int
) -> Outcome:
    """The outcome of the module, which is not changed; in the dtype of its tensors."""
    module, outcome = copy.deepcopy(module).train(case.train), Outcome()
    args, kwargs = trees.map_leaves(
        lambda x: (
            x.clone().requires_grad_(x.is_floating_point()) if isinstance(x, torch.Tensor) else x
        ),
        (case.args, case.kwargs),
    )
    inputs = {name: x for name, x in _inputs(args, kwargs) if has_derivatives(x)}
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = make(trained) if trained and case.steps else None
    torch.manual_seed(seed)
    before = torch.get_rng_state()
    losses = []
    for step in range(max(case.steps, 1)):
        out = module(*args, **kwargs)
        loss = torch_loss(case, out)
        if step == 0:
            outcome.drew = not torch.equal(before, torch.get_rng_state())
            outcome.parts |= {name: x.detach().clone() for name, x in outputs(out)}
        if loss is None:
            break
        module.zero_grad()
        grads = torch.autograd.grad(loss, [*trained, *inputs.values()], allow_unused=True)
        zeros = [
            torch.zeros_like(x) if g is None else g
            for x, g in zip([*trained, *inputs.values()], grads, strict=True)
        ]
        for p, g in zip(trained, zeros, strict=False):
            p.grad = g
        if step == 0:
            outcome.parts["loss"] = loss.detach().clone()
            by_tensor = {id(p): g.numpy() for p, g in zip(trained, zeros, strict=False)}
            gradients = port.place(
                {
                    name: by_tensor[id(p)]
                    for name, p in module.named_parameters()
                    if id(p) in by_tensor
                }
            ).params
            counts = port.counts()
            outcome.parts |= {
                f"gradient of {port.name(path)}": as_tensor(g / counts[path])
                for path, g in gradients.items()
            }
            outcome.parts |= {
                f"gradient of {name}": g
                for name, g in zip(inputs, zeros[len(trained) :], strict=True)
            }
            outcome.parts |= _buffers(port, port.place(values_of(module)).state, module)
        losses.append(loss.detach())
        if optimizer is not None:
            optimizer.step()
    if optimizer is not None and losses:
        outcome.parts |= _trained(
            port, losses[1:], port.place(values_of(module)).params, case.steps
        )
    return outcome


def with_biased_variances(
    theirs: Outcome, ours: Outcome, module: nn.Module, case: Case, port: Port
) -> tuple[Outcome, list[str]]:
    """Torch's outcome with the running variances of Flax's batch norm where the port has those, and
    their names.

    Flax's follow the variance of the batch itself; torch's that times n / (n - 1), for n values of
    a channel.
    """
    called = copy.deepcopy(module).train()
    norms = {
        name: m
        for name, m in called.named_modules()
        if isinstance(m, _BatchNorm) and m.track_running_stats
    }
    if not norms:
        return theirs, []
    counts: dict[str, int] = {}
    for name, m in norms.items():
        m.register_forward_pre_hook(
            lambda m, args, name=name: counts.update({name: args[0].numel() // args[0].shape[1]})
        )
    before = values_of(module)
    called(*case.args, **case.kwargs)
    after = values_of(called)
    for name, count in counts.items():
        momentum = norms[name].momentum
        kept = (
            1 - (1 / float(norms[name].num_batches_tracked) if momentum is None else momentum)
        ) * before[f"{name}.running_var"]
        after[f"{name}.running_var"] = (
            kept + (after[f"{name}.running_var"] - kept) * (count - 1) / count
        )
    parts, names = dict(theirs.parts), []
    for part, biased in _buffers(port, port.place(after).state, module).items():
        if (
            part in parts
            and part in ours.parts
            and (ours.parts[part] - biased).abs().max()
            < (ours.parts[part] - parts[part]).abs().max()
        ):
            parts[part] = biased.to(parts[part].dtype)
            names.append(part.partition(" ")[0])
    return dataclasses.replace(theirs, parts=parts), names


def _inputs(args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    for key, tree in (*enumerate(args), *kwargs.items()):
        for path, x in zip(
            trees.paths(trees.flatten(tree)[1]), trees.flatten(tree)[0], strict=True
        ):
            yield f"input[{key!r}]" + "".join(f"[{step!r}]" for step in path), x


def _buffers(port: Port, state: Arrays, module: nn.Module) -> dict[str, torch.Tensor]:
    known = dict(module.named_buffers())
    return {
        f"{port.name(path)} after a call": as_tensor(x)
        for path, x in state.items()
        if (port.convert is not None or port.labels.get(path) in known)
        and jnp.issubdtype(x.dtype, jnp.inexact)
    }


def _trained(
    port: Port, losses: Sequence[Any], params: Arrays, steps: int
) -> dict[str, torch.Tensor]:
    found = {f"loss of step {i + 2}": as_tensor(x) for i, x in enumerate(losses)}
    return found | {
        f"{port.name(path)} after {steps} steps": as_tensor(x) for path, x in params.items()
    }


# -- the port's side -------------------------------------------------------------------------------
class PortSide:
    """A port with the module's values, for one dtype and mode.

    Args:
        last: whether feature maps have their channels in the last dimension here; in torch they are
            in dimension 1.
        shapes: of the module's outputs.
        rule: the optimizer of optax's; None: no steps are taken.
    """

    def __init__(
        self,
        port: Port,
        case: Case,
        variables: Variables,
        last: bool,
        shapes: Sequence[tuple[int, ...]],
        rule: Any,
        seed: int,
    ) -> None:
        self.port, self.case, self.variables, self.last, self.shapes, self.rule = (
            port,
            case,
            variables,
            last,
            shapes,
            rule,
        )
        self.leaves, self.spec = jax.tree.flatten(given((case.args, case.kwargs), last))
        self.inputs = {i: x for i, x in enumerate(self.leaves) if isinstance(x, jax.Array)}
        self.floats = {i: x for i, x in self.inputs.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
        self.targets = given(case.targets, False)
        self.key = jax.random.key(seed)

    def call(
        self, variables: Variables, inputs: Mapping[int, Any], key: jax.Array
    ) -> tuple[Any, Arrays]:
        """(output, state after the call); inputs: of the arguments' leaves, some or all arrays. JAX
        can trace it.
        """
        args, kwargs = jax.tree.unflatten(
            self.spec, [inputs.get(i, x) for i, x in enumerate(self.leaves)]
        )
        return self.port.call(variables, args, kwargs, self.case.train, key)

    def in_torchs_layout(self, out: Any) -> list[Any]:
        """The output's arrays, with channels where torch has them."""
        arrays = [x for _, x in outputs(out)]
        if not self.last or len(arrays) != len(self.shapes):
            return arrays
        return [
            _second(x) if x.ndim > 2 and _second(x).shape == shape else x
            for x, shape in zip(arrays, self.shapes, strict=True)
        ]

    def _loss(
        self, params: Arrays, floats: Mapping[int, Any], state: Arrays, key: jax.Array
    ) -> tuple[Any, Any]:
        out, state = self.call(Variables(params, state), floats, key)
        if self.case.loss is not None:
            return jnp.asarray(self.case.loss[1](out, *self.targets)), (out, state)
        found = [x for x in self.in_torchs_layout(out) if jnp.issubdtype(x.dtype, jnp.inexact)]
        if len(found) == 1 and found[0].size == 1:
            return found[0].reshape(()), (out, state)
        weights = [direction(torch.empty(x.shape)).numpy().astype(x.dtype) for x in found]
        return sum((jnp.mean(x * w) for x, w in zip(found, weights, strict=True)), jnp.zeros(())), (
            out,
            state,
        )

    def _step(self, params: Arrays, state: Arrays, optimizer: Any) -> Any:
        (loss, (out, state)), grads = jax.value_and_grad(self._loss, argnums=(0, 1), has_aux=True)(
            params, self.floats, state, self.key
        )
        if self.rule is not None:
            updates, optimizer = self.rule.update(grads[0], optimizer, params)
            params = {path: (x + updates[path]).astype(x.dtype) for path, x in params.items()}
        return loss, self.in_torchs_layout(out), state, grads, params, optimizer

    def outcome(self, names: Sequence[str]) -> Outcome:
        """The outcome; names: of the module's outputs."""
        outcome, losses = Outcome(), []
        params, state = self.variables
        optimizer = self.rule.init(params) if self.rule is not None else None
        step = jax.jit(self._step)
        for i in range(max(self.case.steps, 1)):
            loss, out, state, grads, params, optimizer = step(params, state, optimizer)
            if i == 0:
                labels = (
                    names
                    if len(names) == len(out)
                    else [f"output of the port, {k}" for k in range(len(out))]
                )
                outcome.parts |= {name: as_tensor(x) for name, x in zip(labels, out, strict=True)}
                if self.case.loss is None and not any(
                    jnp.issubdtype(x.dtype, jnp.inexact) for x in out
                ):
                    return outcome
                outcome.parts["loss"] = as_tensor(loss)
                outcome.parts |= {
                    f"gradient of {self.port.name(path)}": as_tensor(g)
                    for path, g in grads[0].items()
                }
                inputs = [
                    name
                    for name, x in _inputs(self.case.args, self.case.kwargs)
                    if has_derivatives(x)
                ]
                outcome.parts |= {
                    f"gradient of {name}": as_tensor(_second(g) if self.last and g.ndim > 2 else g)
                    for name, g in zip(inputs, grads[1].values(), strict=True)
                }
                outcome.parts |= _buffers(self.port, state, self.port.module)
            losses.append(loss)
        if self.rule is not None:
            outcome.parts |= _trained(self.port, losses[1:], params, self.case.steps)
        return outcome

    def draw(self) -> Callable[[], Outcome]:
        """A function that calls the port with another key each time, and gives the output."""
        call = jax.jit(
            lambda key: self.in_torchs_layout(self.call(self.variables, self.floats, key)[0])
        )
        keys = iter(jax.random.split(self.key, 2**16))
        return lambda: Outcome(
            {f"output {i}": as_tensor(x) for i, x in enumerate(call(next(keys)))}
        )


def torch_draw(module: nn.Module, case: Case) -> Callable[[], Outcome]:
    """A function that calls the module, with the buffers that it has now, and gives the output."""

    def call() -> Outcome:
        out = copy.deepcopy(module).train(case.train)(*case.args, **case.kwargs)
        return Outcome({f"output {i}": x for i, (_, x) in enumerate(outputs(out))})

    return call


def given(tree: Any, last: bool) -> Any:
    """Arguments as the port gets them."""

    def one(x: Any) -> Any:
        x = jnp.asarray(x.detach().cpu().numpy()) if isinstance(x, torch.Tensor) else x
        return jnp.moveaxis(x, 1, -1) if last and isinstance(x, jax.Array) and x.ndim > 2 else x

    return trees.map_leaves(one, tree)


def _second(x: Any) -> Any:
    """An array whose last dimension is moved to place 1."""
    return jnp.moveaxis(x, -1, 1)


def has_convolutions(module: nn.Module) -> bool:
    return any(
        isinstance(m, _ConvNd) or type(m).__module__.endswith("pooling") for m in module.modules()
    )


def channels_last(
    port: Callable[[bool], PortSide],
    module: nn.Module,
    shapes: Sequence[tuple[int, ...]],
    asked: bool | None,
) -> PortSide:
    """The port's side with its arguments in the layout that it takes; it is asked by shapes alone.

    Args:
        port: makes the side for channels in the last dimension, or in torch's.
        asked: the user's answer.

    Raises:
        PortError: it can be called in neither.
    """
    errors: list[Exception] = []
    fitting: list[PortSide] = []
    for last in (
        (asked,)
        if asked is not None
        else (True, False)
        if has_convolutions(module)
        else (False, True)
    ):
        try:
            side = port(last)
            found = jax.eval_shape(
                lambda side=side: side.in_torchs_layout(
                    side.call(side.variables, side.floats, side.key)[0]
                )
            )
        except Exception as error:
            errors.append(error)
            continue
        fitting.append(side)
        if [tuple(x.shape) for x in found] == list(shapes):
            return side
    if fitting:
        return fitting[0]
    if isinstance(errors[0], PortError):
        raise errors[0]
    said = (
        ""
        if len(errors) < 2
        else (
            "\n  It was tried with the arguments as they are, and with their channels last; "
            "channels_last=True or False tries one."
        )
    )
    raise PortError(
        f"port: with the module's arguments it raised {shown_error(errors[0])}{said}"
    ) from errors[0]
