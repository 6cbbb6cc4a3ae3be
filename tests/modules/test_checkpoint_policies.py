"""What is kept for the backward pass by a policy, JAX's or PyTorch's: in torch.utils.checkpoint and
in scan_blocks, by the operations of the programs and by the memory that XLA plans for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from agreement import Traces, floats, same
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import bridge
from torchfunc_jax import checkpoint_policy, functional_call, grad, grad_and_value, jit, scan_blocks

POLICIES = jax.checkpoint_policies
WIDTH, DEPTH = 32, 5


class Block(nn.Module):
    """Two products and two sines, none of which is kept if the block is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x.sin()).sin())


class Model(nn.Module):
    def __init__(self, depth: int = DEPTH, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (
                checkpoint(layer, x, use_reentrant=False, **self.options)
                if self.options
                else layer(x)
            )
        return x


X = floats(256, WIDTH).float()
TRUE = torch.func.grad_and_value(lambda p: functional_call(Model(), p, (X,)).square().mean())(
    {name: p.detach() for name, p in Model().named_parameters()}
)


def loss_of(model: nn.Module) -> Callable[..., Any]:
    return lambda params: functional_call(model, params, (X,)).square().mean()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


# -- torch.utils.checkpoint ------------------------------------------------------------------------
def save_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy: Any) -> dict[str, Any]:
    return {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}


#: options of torch.utils.checkpoint -> (products, sines) of a block that are computed again; the
#: last product's value is not asked for
OPTIONS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "none": ({"debug": False}, (1, 2)),
    "JAX keeps nothing": ({"context_fn": checkpoint_policy(POLICIES.nothing_saveable)}, (1, 2)),
    "JAX keeps products": ({"context_fn": checkpoint_policy(POLICIES.dots_saveable)}, (0, 2)),
    "JAX keeps all": ({"context_fn": checkpoint_policy(POLICIES.everything_saveable)}, (0, 0)),
    "PyTorch keeps products": (selective(save_products), (0, 2)),
    "PyTorch keeps sines": (selective([torch.ops.aten.sin.default]), (1, 0)),
    "PyTorch keeps by a bool": (selective(lambda _, op, *args, **kwargs: "sin" in str(op)), (1, 0)),
    "PyTorch keeps nothing": (selective([]), (1, 2)),
}


def operations(model: nn.Module) -> tuple[int, int]:
    """(products, sines) of the program of the loss and its gradients, per block."""
    text = jit(grad_and_value(loss_of(model))).lower(values(model)).as_text()
    return text.count("stablehlo.dot_general") // DEPTH, text.count("stablehlo.sine") // DEPTH


@pytest.mark.parametrize("name", OPTIONS)
def test_what_a_policy_keeps_is_not_computed_again(name: str) -> None:
    options, (products, sines) = OPTIONS[name]
    model, plain = Model(**options), operations(Model())
    assert operations(model) == (plain[0] + products, plain[1] + sines)
    fast = jit(grad_and_value(loss_of(model)))
    same(fast(values(model)), TRUE, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["JAX keeps products", "PyTorch keeps products"])
def test_elsewhere_the_values_are_the_same(name: str) -> None:
    model = Model(**OPTIONS[name][0])
    same(grad_and_value(loss_of(model))(values(model)), TRUE, rtol=1e-5, atol=1e-6)
    for run in (model, jit(model)):
        model.zero_grad()
        run(X).square().mean().backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        same(found, TRUE[0], rtol=1e-5, atol=1e-6)


def test_another_policy_is_another_program() -> None:
    asked = []

    def policy(primitive: Any, *avals: Any, **params: Any) -> bool:
        asked.append(primitive.name)
        return True

    model = Model(1, context_fn=checkpoint_policy(POLICIES.nothing_saveable))
    fast = jit(grad(loss_of(model)))
    first = fast(values(model))
    assert not asked
    model.options["context_fn"] = checkpoint_policy(policy)
    same(fast(values(model)), first, rtol=1e-5, atol=1e-7)
    assert {"dot_general", "sin"} <= {*asked}
    assert len(fast.programs()) == 2


@pytest.mark.slow
def test_models_of_transformers_hand_policies_on() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    tokens, products, first = torch.arange(12).reshape(2, 6), {}, None
    for name in ("none", "JAX keeps nothing", "JAX keeps products", "PyTorch keeps products"):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**sizes, **heads)
        model = transformers.LlamaForCausalLM(config).train()
        if name != "none":
            model.gradient_checkpointing_enable({"use_reentrant": False, **OPTIONS[name][0]})

        def loss(params: Any, model: nn.Module = model) -> torch.Tensor:
            options = {"labels": tokens, "attention_mask": torch.ones_like(tokens)}
            return functional_call(model, params, (tokens,), {**options, "use_cache": False}).loss

        fast = jit(grad(loss))
        text = fast.lower(values(model)).as_text()
        products[name] = text.count("stablehlo.dot_general")
        found = fast(values(model))
        first = first or found
        same(found, first, rtol=1e-4, atol=1e-6)
    assert products["none"] < products["JAX keeps nothing"]
    # each block has seven layers, of which the last one's value is not asked for
    assert products["JAX keeps nothing"] - products["JAX keeps products"] >= 12
    assert products["JAX keeps nothing"] - products["PyTorch keeps products"] >= 12


def test_a_context_is_entered_around_the_function() -> None:
    """One that is no selective policy: PyTorch enters it too."""
    seen = []

    class Seen:
        def __enter__(self) -> None:
            seen.append("in")

        def __exit__(self, *_: Any) -> None:
            seen.append("out")

    body = Traces(lambda x: x.sin())
    f = lambda x: checkpoint(
        body, x, use_reentrant=False, context_fn=lambda: (Seen(), Seen())
    ).sum()
    same(jit(grad(f))(X), X.cos())
    assert seen == ["in", "out"] * body.count and body.count


def test_an_error_leaves_no_mode_behind() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("of the function")

    with pytest.raises(ArithmeticError, match="of the function"):
        jit(lambda x: checkpoint(wrong, x, use_reentrant=False, **selective(save_products)))(X)
    same(jit(lambda x: x.sin())(X), X.sin())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: checkpoint_policy("dots_saveable"),
            "policy: expected one of jax.checkpoint_policies, or a function.*, got 'dots_saveable'",
        ),
        (
            lambda: scan_blocks(Model(), remat="dots_saveable").__enter__(),
            "remat: expected a bool or one of jax.checkpoint_policies, got 'dots_saveable'",
        ),
    ],
)
def test_what_is_no_policy(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


# -- loops over blocks -----------------------------------------------------------------------------
def test_memory_of_a_loop_by_its_policy() -> None:
    """A block keeps its input, (256, 32) numbers, or also its first product, (256, 128) numbers, or
    all.
    """
    unit = X.numel() * 4 * (DEPTH - 1)  # bytes of the inputs of all blocks of the loop
    memory = {}
    for name, remat in {
        "no": False,
        "again": True,
        "products": POLICIES.dots_saveable,
        "all": POLICIES.everything_saveable,
        "nothing": POLICIES.nothing_saveable,
    }.items():
        model = Model()
        fast = jit(scan_blocks(model, "layers", remat=remat)(grad_and_value(loss_of(model))))
        same(fast(values(model)), TRUE, rtol=1e-5, atol=1e-6)
        planned = fast.lower(values(model)).compile().memory_analysis()
        memory[name] = planned.temp_size_in_bytes / unit
    assert memory["nothing"] == pytest.approx(memory["again"], rel=0.02)
    assert memory["all"] == pytest.approx(memory["no"], rel=0.02)
    assert memory["products"] > memory["again"] + 3.5, memory  # the value of the first product
    assert memory["no"] > memory["products"] + 3.5, memory  # that of its sine, at least


def test_a_policy_that_moves_values_to_the_host() -> None:
    """It goes to JAX as it is, and JAX's program moves them; whether there is such a memory, XLA
    says when it compiles.
    """
    model = Model()
    policy = POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host")

    def loss(params: Any, x: Any) -> Any:
        with scan_blocks(model, "layers", remat=policy):
            return (bridge.call(model, params, {}, (x,))[0] ** 2).mean()

    with bridge.compiling.correctly():
        program = jax.make_jaxpr(jax.grad(loss))(bridge.params(model), X.numpy())
    assert f"f32<host>[{DEPTH},256,{4 * WIDTH}]" in str(program)
