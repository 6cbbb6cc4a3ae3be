"""The optimizers of torch.optim by name, with its defaults and its numbers, and Optax's, as update
rules of one member.

A rule of torch.optim's is a function of one parameter (``_Leaf``); ``find`` makes of it the rule of
a tree of parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch

Tree = Any
Numbers = Mapping[str, Any]


class Optimizer(NamedTuple):
    """An update rule of one member.

    Attributes:
        init: (params, numbers by name) -> state.
        update: (gradients, state, params, numbers by name, whether the member takes the step) ->
            (params, state) after it.
        numbers: the numbers that may differ from member to member, with their defaults.
    """

    init: Callable[[Tree, Numbers], Tree]
    update: Callable[[Tree, Tree, Tree, Numbers, jax.Array], tuple[Tree, Tree]]
    numbers: Numbers


class _Leaf(NamedTuple):
    """The rule of one parameter.

    Attributes:
        slots: from the options, the names of what is kept for each parameter; an array like it,
            zero at first.
        update: (gradient, parameter, slots by name, numbers, the step's number from 1, options,
            keep) -> (new parameter, new slots). ``keep`` makes of new slots those of before if the
            member does not take the step. The rule reads its new slots after it: what XLA stores is
            then what the parameter is computed from, and slots are neither computed twice nor
            copied.
        numbers: with torch.optim's defaults.
        options: True or False each, with torch.optim's defaults.
    """

    slots: Callable[[Mapping[str, Any]], Sequence[str]]
    update: Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
    numbers: Numbers
    options: Mapping[str, bool] = {}


# -- the rules of torch.optim ----------------------------------------------------------------------
def _mean(old: jax.Array, new: jax.Array, weight: Any) -> jax.Array:
    return weight * old + (1 - weight) * new


def _sgd(g, p, s, h, t, o, keep):
    g = g + h["weight_decay"] * p
    if "buffer" not in s:
        return p - h["lr"] * g, {}
    # without momentum the buffer is the gradient itself, as if it were the first one
    buffer = jnp.where(
        (t == 1) | (h["momentum"] == 0), g, h["momentum"] * s["buffer"] + (1 - h["dampening"]) * g
    )
    s = keep({"buffer": buffer})
    return p - h["lr"] * (g + h["momentum"] * s["buffer"] if o["nesterov"] else s["buffer"]), s


def _adam(g, p, s, h, t, o, keep):
    a, b = h["betas"]
    if o["decoupled_weight_decay"]:
        p = p * (1 - h["lr"] * h["weight_decay"])
    else:
        g = g + h["weight_decay"] * p
    after = {"mean": _mean(s["mean"], g, a), "square": _mean(s["square"], g * g, b)}
    if o["amsgrad"]:
        after["largest"] = jnp.maximum(s["largest"], after["square"])
    after = keep(after)
    below = jnp.sqrt(after["largest" if o["amsgrad"] else "square"]) / jnp.sqrt(1 - b**t) + h["eps"]
    return p - h["lr"] / (1 - a**t) * after["mean"] / below, after


def _adamax(g, p, s, h, t, o, keep):
    (a, b), g = h["betas"], g + h["weight_decay"] * p
    s = keep(
        {
            "mean": _mean(s["mean"], g, a),
            "largest": jnp.maximum(b * s["largest"], jnp.abs(g) + h["eps"]),
        }
    )
    return p - h["lr"] / (1 - a**t) * s["mean"] / s["largest"], s


def _nadam(g, p, s, h, t, o, keep):
    a, b = h["betas"]
    if o["decoupled_weight_decay"]:
        p = p * (1 - h["lr"] * h["weight_decay"])
    else:
        g = g + h["weight_decay"] * p
    now, then = (a * (1 - 0.5 * 0.96 ** (k * h["momentum_decay"])) for k in (t, t + 1))
    product = jnp.where(t == 1, 1.0, s["product"]) * now
    s = keep(
        {"mean": _mean(s["mean"], g, a), "square": _mean(s["square"], g * g, b), "product": product}
    )
    below = jnp.sqrt(s["square"] / (1 - b**t)) + h["eps"]
    return p - h["lr"] * (
        (1 - now) / (1 - s["product"]) * g + then / (1 - s["product"] * then) * s["mean"]
    ) / below, s


def _radam(g, p, s, h, t, o, keep):
    a, b = h["betas"]
    if o["decoupled_weight_decay"]:
        p = p * (1 - h["lr"] * h["weight_decay"])
    else:
        g = g + h["weight_decay"] * p
    s = keep({"mean": _mean(s["mean"], g, a), "square": _mean(s["square"], g * g, b)})
    limit = 2 / (1 - b) - 1
    length = limit - 2 * t * b**t / (1 - b**t)
    known = jnp.maximum(length, 5.0)
    rectified = jnp.sqrt((known - 4) * (known - 2) * limit / ((limit - 4) * (limit - 2) * known))
    scale = jnp.where(
        length > 5, rectified * jnp.sqrt(1 - b**t) / (jnp.sqrt(s["square"]) + h["eps"]), 1.0
    )
    return p - h["lr"] / (1 - a**t) * s["mean"] * scale, s


def _rmsprop(g, p, s, h, t, o, keep):
    g = g + h["weight_decay"] * p
    after = {"square": _mean(s["square"], g * g, h["alpha"])}
    if o["centered"]:
        after["mean"] = _mean(s["mean"], g, h["alpha"])
    after = keep(after)
    variance = after["square"] - after["mean"] ** 2 if o["centered"] else after["square"]
    change = g / (jnp.sqrt(variance) + h["eps"])
    if "buffer" in s:
        after |= keep({"buffer": h["momentum"] * s["buffer"] + change})
        change = after["buffer"]
    return p - h["lr"] * change, after


def _adagrad(g, p, s, h, t, o, keep):
    g = g + h["weight_decay"] * p
    s = keep({"total": jnp.where(t == 1, h["initial_accumulator_value"], s["total"]) + g * g})
    return p - h["lr"] / (1 + (t - 1) * h["lr_decay"]) * g / (jnp.sqrt(s["total"]) + h["eps"]), s


def _adadelta(g, p, s, h, t, o, keep):
    g = g + h["weight_decay"] * p
    after = keep({"square": _mean(s["square"], g * g, h["rho"])})
    change = jnp.sqrt(s["changes"] + h["eps"]) / jnp.sqrt(after["square"] + h["eps"]) * g
    return p - h["lr"] * change, after | keep(
        {"changes": _mean(s["changes"], change * change, h["rho"])}
    )


def _rprop(g, p, s, h, t, o, keep):
    (less, more), (least, most) = h["etas"], h["step_sizes"]
    sign = jnp.sign(g * s["before"])
    size = jnp.where(t == 1, h["lr"], s["size"]) * jnp.where(
        sign > 0, more, jnp.where(sign < 0, less, 1.0)
    )
    s = keep({"before": jnp.where(sign < 0, 0.0, g), "size": jnp.clip(size, least, most)})
    return p - jnp.sign(s["before"]) * s["size"], s


_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_MOMENTS = {"amsgrad": False, "decoupled_weight_decay": False}


def _moments(options: Mapping[str, Any]) -> Sequence[str]:
    return ("mean", "square", "largest") if options["amsgrad"] else ("mean", "square")


_RULES: dict[str, _Leaf] = {
    "sgd": _Leaf(
        lambda o: ("buffer",) if o["momentum"] else (),
        _sgd,
        {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0},
        {"nesterov": False},
    ),
    "adam": _Leaf(_moments, _adam, _ADAM, _MOMENTS),
    "adamw": _Leaf(
        _moments, _adam, _ADAM | {"weight_decay": 1e-2}, _MOMENTS | {"decoupled_weight_decay": True}
    ),
    "adamax": _Leaf(lambda o: ("mean", "largest"), _adamax, _ADAM | {"lr": 2e-3}),
    "nadam": _Leaf(
        lambda o: ("mean", "square", "product"),
        _nadam,
        _ADAM | {"lr": 2e-3, "momentum_decay": 4e-3},
        {"decoupled_weight_decay": False},
    ),
    "radam": _Leaf(lambda o: ("mean", "square"), _radam, _ADAM, {"decoupled_weight_decay": False}),
    "rmsprop": _Leaf(
        lambda o: ("square", *["mean"] * o["centered"], *["buffer"] * o["momentum"]),
        _rmsprop,
        {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0},
        {"centered": False},
    ),
    "adagrad": _Leaf(
        lambda o: ("total",),
        _adagrad,
        {
            "lr": 1e-2,
            "lr_decay": 0.0,
            "weight_decay": 0.0,
            "initial_accumulator_value": 0.0,
            "eps": 1e-10,
        },
    ),
    "adadelta": _Leaf(
        lambda o: ("square", "changes"),
        _adadelta,
        {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
    ),
    "rprop": _Leaf(
        lambda o: ("before", "size"),
        _rprop,
        {"lr": 1e-2, "etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)},
    ),
}


# -- rules of a tree of parameters -----------------------------------------------------------------
def find(optimizer: str | Callable[..., Any] | Any, given: Mapping[str, Any]) -> Optimizer:
    """The update rule of an optimizer.

    Args:
        optimizer: a name of torch.optim's ("adam"), a function that makes one of Optax's
            (``optax.adam``), or what it returns.
        given: the numbers and options that the user gives by name; True and False are options.

    Raises:
        ValueError: there is no such optimizer.
        TypeError: it has no such number or option.
    """
    options = {name: value for name, value in given.items() if isinstance(value, bool | str)}
    numbers = {name: value for name, value in given.items() if name not in options}
    if isinstance(optimizer, str):
        return _by_name(optimizer.lower(), numbers, options)
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        if given:
            raise TypeError(
                f"{', '.join(given)}: this optimizer has its numbers already; pass the function "
                "that makes it, such as optax.adam, and the numbers beside it"
            )
        return _of_optax(lambda: optimizer, {}, {})
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if issubclass(kind, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer: expected torch.optim's by name, {kind.__name__.lower()!r}, and its "
            "numbers beside it, got "
            f"{'the class' if isinstance(optimizer, type) else 'an instance'}"
        )
    if not callable(optimizer):
        raise TypeError(
            "optimizer: expected a name, or an optimizer of Optax's or a function that makes one, "
            f"got {type(optimizer)}"
        )
    return _of_optax(optimizer, numbers, options)


def _by_name(name: str, numbers: Numbers, given: Mapping[str, Any]) -> Optimizer:
    if name not in _RULES:
        raise ValueError(
            f"optimizer: expected one of {', '.join(sorted(_RULES))}, or an "
            f"optimizer of Optax's, got {name!r}"
        )
    leaf = _RULES[name]
    for key, value in {**numbers, **given}.items():
        if key not in leaf.numbers and key not in leaf.options:
            raise TypeError(
                f"optimizer: {name!r} has no {key!r}; it has "
                f"{', '.join([*leaf.numbers, *leaf.options])}"
            )
        if (key in given) != (key in leaf.options):
            raise TypeError(
                f"{key}: expected {'True or False' if key in leaf.options else 'numbers'}, "
                f"got {value!r}"
            )
        if isinstance(value, Mapping):
            raise TypeError(
                f"{key}: expected a number or one for each member, got a dict; for groups of "
                "parameters use optax.partition"
            )
    numbers = {key: _paired(key, value, leaf.numbers[key]) for key, value in numbers.items()}
    options: dict[str, Any] = {**leaf.options, **given, "momentum": "momentum" in numbers}
    slots = leaf.slots(options)

    def init(params: Tree, numbers: Numbers) -> Tree:
        return {
            "count": jnp.zeros((), jnp.int32),
            **{slot: jax.tree.map(jnp.zeros_like, params) for slot in slots},
        }

    def update(
        grads: Tree, state: Tree, params: Tree, numbers: Numbers, take: jax.Array
    ) -> tuple[Tree, Tree]:
        count = state["count"] + 1
        kept: dict[str, dict[str, jax.Array]] = {slot: {} for slot in slots}
        after = {}
        for key, p in params.items():
            # numbers such as eps are too small for half precision
            wide = jnp.promote_types(p.dtype, jnp.float32)
            h = jax.tree.map(lambda x, wide=wide: x.astype(wide), dict(numbers))
            own = {slot: state[slot][key].astype(wide) for slot in slots}

            def keep(
                new: dict[str, jax.Array], old: dict[str, jax.Array] = own
            ) -> dict[str, jax.Array]:
                return {slot: jnp.where(take, x, old[slot]) for slot, x in new.items()}

            new, own = leaf.update(
                grads[key].astype(wide), p.astype(wide), own, h, count.astype(wide), options, keep
            )
            after[key] = jnp.where(take, new.astype(p.dtype), p)
            for slot in slots:
                kept[slot][key] = own[slot].astype(p.dtype)
        return after, {"count": jnp.where(take, count, state["count"]), **kept}

    return Optimizer(init, update, {**leaf.numbers, **numbers})


def _paired(name: str, value: Any, default: Any) -> Any:
    """A tuple where the default is one, and elsewhere none: other sequences are numbers of the
    members.
    """
    if not isinstance(default, tuple):
        return list(value) if isinstance(value, tuple) else value
    if not isinstance(value, tuple | list) or len(value) != len(default):
        raise TypeError(
            f"{name}: expected a tuple of {len(default)}, each a number or one for each member, "
            f"got {value!r}"
        )
    return tuple(value)


def _of_optax(make: Callable[..., Any], numbers: Numbers, options: Mapping[str, Any]) -> Optimizer:
    named = {"learning_rate" if name == "lr" else name: value for name, value in numbers.items()}
    if given := {**named, **options}:
        known = inspect.signature(make).parameters
        unknown = [name for name in given if name not in known]
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            raise TypeError(
                f"optimizer: {getattr(make, '__name__', make)} has no {unknown[0]!r}; it has "
                f"{', '.join(known)}"
            )

    def made(numbers: Numbers) -> Any:
        own = {"learning_rate" if name == "lr" else name: value for name, value in numbers.items()}
        return make(**own, **options)

    def update(
        grads: Tree, state: Tree, params: Tree, numbers: Numbers, take: jax.Array
    ) -> tuple[Tree, Tree]:
        changes, after = made(numbers).update(grads, state, params)
        state = jax.tree.map(
            lambda new, old: jnp.where(take, new.astype(old.dtype), old), after, state
        )
        return jax.tree.map(
            lambda p, c: jnp.where(take, (p + c).astype(p.dtype), p), params, changes
        ), state

    return Optimizer(lambda params, numbers: made(numbers).init(params), update, dict(numbers))
