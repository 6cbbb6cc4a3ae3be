"""Every module of PyTorch's own module database, in training and in evaluation: values, gradients,
stacked parameters, buffers.

Compared with the same module called by plain PyTorch and differentiated by torch.autograd, in
float64, jitted and not.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from agreement import same
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import torchfunc_jax
from bridge.errors import DataDependentError

pytestmark = pytest.mark.sweep

DTYPE = torch.float64
FAST = 1  # inputs a module in `make test`; `make test-all` takes every one of up to
# inputs; of more (LinearCrossEntropyLoss has 857, all combinations of its options) it takes each
# seventh
MOST = 200


def needs_values(module: torch.nn.Module, args: Any, check: str, way: str) -> bool:
    """Targets put end to end are cut by their lengths: where those are arguments of a jitted
    function, an error says so.
    """
    ends = (
        isinstance(module, torch.nn.CTCLoss)
        and args[1].dim() == 1
        and isinstance(args[3], torch.Tensor)
    )
    return ends and way == "jit" and check == "forward"


MODULES = {info.name: info for info in module_db}
WAYS = {"eager": lambda f: f, "jit": torchfunc_jax.jit}


def cases(
    name: str, training: bool
) -> Iterator[tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any], str]]:
    """Modules made as the database says, with the arguments to call each one with."""
    info = MODULES[name]
    for given in info.module_inputs_func(
        info, device="cpu", dtype=DTYPE, requires_grad=False, training=training
    ):
        torch.manual_seed(0)
        made = given.constructor_input
        module = info.module_cls(*made.args, **made.kwargs).to(DTYPE).train(training)
        args, kwargs = given.forward_input.args, given.forward_input.kwargs
        if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
            module(*args, **kwargs)
        for m in module.modules():
            if getattr(m, "dropout", None) and isinstance(m.dropout, float):
                m.dropout = 0.0
            if isinstance(m, torch.nn.Dropout):
                m.p = 0.0
        if name.startswith("nn.FractionalMaxPool"):  # the numbers it would draw, given
            n, x = int(name[-2]), args[0]
            module._random_samples = torch.rand(
                1 if x.dim() == n + 1 else x.shape[0], x.shape[-n - 1], n, dtype=DTYPE
            )
        yield module.requires_grad_(False), args, kwargs, given.desc


def state(module: torch.nn.Module, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """The module's parameters, scaled, and its buffers, all copied."""
    found = {k: v.clone() * scale for k, v in module.named_parameters()}
    return found | {k: v.clone() for k, v in module.named_buffers()}


def call(module: torch.nn.Module) -> Callable[..., Any]:
    def run(values: dict[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
        return torch.func.functional_call(module, values, args, kwargs)

    return run


def scalar(out: Any) -> torch.Tensor:
    """A number that every floating output moves, each element differently."""
    parts = [
        o for o in pytree.tree_leaves(out) if isinstance(o, torch.Tensor) and o.is_floating_point()
    ]
    return sum(
        (
            o
            * torch.linspace(0.5, 1.5, max(o.numel(), 1), dtype=o.dtype)[: o.numel()].reshape(
                o.shape
            )
        ).sum()
        for o in parts
    )


def floating(tree: Any) -> list[torch.Tensor]:
    return [
        x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_floating_point()
    ]


def replaced(tree: Any, values: list[torch.Tensor]) -> Any:
    source = iter(values)
    return pytree.tree_map(
        lambda x: next(source) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, tree
    )


def check_forward(module: Any, args: Any, kwargs: Any, way: Callable[..., Any]) -> None:
    if way is not torchfunc_jax.jit:
        return  # without a transform nothing of ours runs; check_gradient compares values too
    mine, theirs = state(module), state(module)
    got = way(call(module))(mine, args, kwargs)
    same(got, torch.func.functional_call(copy.deepcopy(module), theirs, args, kwargs))
    same(mine, theirs)  # running statistics, counters


def check_gradient(module: Any, args: Any, kwargs: Any, way: Callable[..., Any]) -> None:
    tree = ({k: v.clone() for k, v in module.named_parameters()}, args, kwargs)
    leaves = [x.detach().clone() for x in floating(tree)]
    if isinstance(module, torch.nn.SoftMarginLoss):  # not differentiable with respect to its target
        tree = (tree[0], args[:1], kwargs)
        leaves = leaves[:1]
    buffers = {k: v.clone() for k, v in module.named_buffers()}

    def value(
        leaves: list[torch.Tensor], buffers: Any, functional_call: Any = torch.func.functional_call
    ) -> torch.Tensor:
        params, given, kwargs = replaced(tree, leaves)
        return scalar(
            functional_call(module, (params, buffers), (*given, *args[len(given) :]), kwargs)
        )

    active = [x.clone().requires_grad_() for x in leaves]
    out = value(active, {k: v.clone() for k, v in buffers.items()})
    if not out.requires_grad:
        return
    expected = torch.autograd.grad(out, active, allow_unused=True, materialize_grads=True)
    same(way(torchfunc_jax.grad_and_value(value))(leaves, buffers), (list(expected), out.detach()))


def check_stacked(module: Any, args: Any, kwargs: Any, way: Callable[..., Any]) -> None:
    members = [state(module, 1.0), state(module, 1.1)]
    if not members[0]:
        return
    stacked = {k: torch.stack([m[k] for m in members]) for k in members[0]}
    run = call(module)
    mapped = torchfunc_jax.vmap(
        lambda values: floating(run(values, args, kwargs)), randomness="same"
    )
    got = way(mapped)(stacked)
    outs = [
        floating(torch.func.functional_call(copy.deepcopy(module), m, args, kwargs))
        for m in members
    ]
    same(got, [torch.stack(o) for o in zip(*outs, strict=True)])
    same(stacked, {k: torch.stack([m[k] for m in members]) for k in members[0]})


CHECKS = {"forward": check_forward, "gradient": check_gradient, "stacked": check_stacked}


def run(name: str, training: bool, every: bool) -> None:
    inputs = list(enumerate(itertools.islice(cases(name, training), None if every else FAST)))
    for i, (module, args, kwargs, desc) in inputs[:: 7 if len(inputs) > MOST else 1]:
        for check_name, check in CHECKS.items():
            for way_name, way in WAYS.items():
                try:
                    if needs_values(module, args, check_name, way_name):
                        with pytest.raises(DataDependentError, match="_ctc_loss"):
                            check(module, args, kwargs, way)
                        continue
                    check(module, args, kwargs, way)
                except Exception as error:
                    raise AssertionError(
                        f"{name}, input {i} {desc}, {check_name}, {way_name}: "
                        f"{type(error).__name__}: {error}"
                    ) from error


SPLIT = [
    (name, training)
    for name, info in MODULES.items()
    for training in ((True, False) if info.train_and_eval_differ else (True,))
]


@pytest.mark.thin(10)
@pytest.mark.parametrize(("name", "training"), SPLIT)
def test_first_inputs(name: str, training: bool) -> None:
    run(name, training, every=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "training"), SPLIT)
def test_every_input(name: str, training: bool) -> None:
    run(name, training, every=True)
