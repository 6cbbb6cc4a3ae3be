"""scan_blocks: equal blocks compiled once give what they give one by one, and blocks or calls that
differ are refused by name.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from agreement import Traces, floats, same
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import bridge
from bridge import block_programs
from torchfunc_jax import functional_call, grad, jit, jvp, scan_blocks, vmap

DEPTH, WIDTH = 5, 4


class Block(nn.Module):
    """Attention, a residual and a perceptron; ``number`` differs between blocks,
    and is not read.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.down(nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    """Calls its blocks one after the other, as ``step`` says."""

    def __init__(
        self, make: Callable[[int], nn.Module], step: Callable[..., Any], depth: int = DEPTH
    ) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(make(k) for k in range(depth))
        self.step = step
        self.double().requires_grad_()
        with torch.no_grad():
            for k, p in enumerate(self.parameters()):
                p.copy_(
                    torch.randn(p.shape, generator=torch.Generator().manual_seed(k), dtype=p.dtype)
                    / 3
                )

    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.step(self.layers, self.first(x), *args)


def one_by_one(layers: Any, x: torch.Tensor, *args: Any) -> torch.Tensor:
    for layer in layers:
        x = layer(x, *args)
    return x


def with_states(layers: Any, x: torch.Tensor, mask: Any = None) -> Any:
    states = [x]
    for k in range(len(layers)):
        x = layers[k](x, mask=mask)
        states.append(x)
    return x, states


def of_tuples(layers: Any, x: torch.Tensor) -> Any:
    pair, seen = (x, x.sum(-1)), []
    for layer in layers:
        *pair, name = layer(*pair)
        seen.append(name)
    return pair, seen


class Pair(nn.Module):
    """Carries two tensors, and returns a Python value too."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> Any:
        y = self.lin(x).tanh()
        return y, total + y.sum(-1), "pair"


class Normed(nn.Module):
    """Writes to its buffers, and is a block in training mode."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.tanh()) + x


class Dropped(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.lin(x)) * torch.rand_like(x)


class Recurrent(nn.Module):
    """An LSTM notices that its parameters were replaced, and keeps a list of them."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


class Reading(nn.Module):
    """Reads its number, which does not change its program."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.lin, self.scales = (
            number,
            nn.Linear(WIDTH, WIDTH),
            [torch.full((), 2.0 + number, dtype=torch.float64)],
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) * self.scales[0] if self.number >= 0 else x


class Parametrized(nn.Module):
    """Each parametrized module has a class of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.lin = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lin(x).tanh()


TABLE = nn.Parameter(floats(WIDTH, WIDTH))


class Sharing(nn.Module):
    """All blocks have one table; each returns what it was given, too."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.table, self.scale = TABLE, nn.Parameter(torch.ones(WIDTH))
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ self.table * self.scale)


X = floats(3, 6, WIDTH)
MASK = torch.ones(6, 6, dtype=torch.bool).tril()
#: name -> (model, its further arguments)
MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "a transformer with a mask": lambda: (Model(Block, one_by_one), (MASK,)),
    "hidden states, by index and keyword": lambda: (Model(Block, with_states), (MASK,)),
    "two tensors and a string": lambda: (Model(Pair, of_tuples), ()),
    "LSTMs": lambda: (Model(Recurrent, one_by_one), ()),
    "parametrized weights": lambda: (Model(Parametrized, one_by_one), ()),
    "an attribute that is read": lambda: (Model(Reading, one_by_one), ()),
    "one parameter of all blocks": lambda: (Model(Sharing, one_by_one), ()),
    "a Sequential": lambda: (
        nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
        ).double(),
        (),
    ),
}


def loss_of(model: nn.Module) -> Callable[..., Any]:
    def loss(params: dict[str, Any], x: Any, *args: Any) -> Any:
        out = functional_call(model, params, (x, *args))
        leaves = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        return sum((k + 1) * t.square().mean() for k, t in enumerate(leaves)), leaves

    return loss


def params_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.thin(4)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str, remat: bool) -> None:
    model, args = MODELS[name]()
    params = params_of(model)
    found = jit(scan_blocks(model, remat=remat)(grad(loss_of(model), has_aux=True)))(
        params, X, *args
    )
    same(
        found,
        torch.func.grad(loss_of(model), has_aux=True)(params, X, *args),
        rtol=1e-10,
        atol=1e-10,
    )


@pytest.mark.parametrize("name", ["a transformer with a mask", "one parameter of all blocks"])
def test_backward_and_double_backward(name: str) -> None:
    model, args = MODELS[name]()

    def run(f: Any) -> Any:
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(f(x, *args).sin().sum(), x, create_graph=True)
        grads = torch.autograd.grad(first.square().sum(), [*model.parameters()], allow_unused=True)
        model.zero_grad()
        f(x, *args).sin().sum().backward()
        return first, grads, [p.grad for p in model.parameters()]

    with sdpa_kernel(SDPBackend.MATH):  # torch 2.15's attention on CPUs has no second derivative
        expected = run(model)
    same(run(jit(scan_blocks(model)(lambda *a: model(*a)))), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("transform", ["vmap", "jvp", "per sample", "ensemble", "eager"])
def test_under_transforms(transform: str) -> None:
    model, args = MODELS["a transformer with a mask"]()
    params = params_of(model)
    if transform == "ensemble":
        params = {k: torch.stack([p, 2 * p, p.sin()]) for k, p in params.items()}

    def made(api: Any, scanned: Any) -> Any:
        f = scanned(lambda p, x: loss_of(model)(p, x, *args)[0])
        if transform == "vmap":
            return api.vmap(f, in_dims=(None, 0))(params, X)
        if transform == "jvp":
            return api.jvp(lambda x: f(params, x), (X,), (X.cos(),))
        if transform == "per sample":
            return api.vmap(api.grad(f), in_dims=(None, 0))(params, X)
        if transform == "ensemble":
            return api.vmap(api.grad(f), in_dims=(0, None))(params, X)
        return f(params, X)

    class Ours:
        vmap, jvp, grad = staticmethod(vmap), staticmethod(jvp), staticmethod(grad)

    with sdpa_kernel(SDPBackend.MATH):  # torch 2.15's attention on CPUs has no forward mode
        expected = made(torch.func, lambda f: f)
    same(jit(lambda: made(Ours, scan_blocks(model)))(), expected, rtol=1e-9, atol=1e-9)
    # un-jitted, the blocks run one by one
    same(made(Ours, scan_blocks(model)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("training", [True, False])
def test_buffers_are_written(training: bool) -> None:
    models = [Model(Normed, one_by_one).train(training) for _ in range(2)]
    fast, x = jit(scan_blocks(models[0])(models[0].forward)), floats(6, WIDTH)
    for scale in (1, 3):
        same(fast(scale * x), models[1](scale * x), rtol=1e-10, atol=1e-10)
    same(models[0].state_dict(), models[1].state_dict())


def test_random_numbers_are_those_of_torch() -> None:
    model = Model(Dropped, one_by_one)
    fast = jit(scan_blocks(model)(model.forward))
    for seed in (0, 1):
        torch.manual_seed(seed)
        mine, state = [fast(X), fast(X)], torch.get_rng_state()
        torch.manual_seed(seed)
        same(mine, [model(X), model(X)], rtol=1e-10, atol=1e-10)
        assert torch.equal(state, torch.get_rng_state()) and not torch.equal(mine[0], mine[1])


@pytest.mark.parametrize("remat", [False, True])
def test_keys_differ_between_blocks(remat: bool) -> None:
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * torch.rand_like(x) + 0 * x

    model = Model(lambda _: Noise(), lambda layers, x: [x := layer(x) for layer in layers]).float()
    values = bridge.params(model)

    def run(params: Any, key: Any) -> Any:
        with bridge.compiling.correctly(), scan_blocks(model, "layers", remat=remat):
            return bridge.call(model, params, {}, (jnp.zeros(WIDTH),), rng=key)[0]

    outs = [jax.jit(run)(values, jax.random.key(seed)) for seed in (0, 0, 1)]
    same([torch.tensor(x.tolist()) for x in outs[0]], [torch.tensor(x.tolist()) for x in outs[1]])
    drawn = [tuple(v.tolist()) for v in [*outs[0], *outs[2]]]
    assert len(set(drawn)) == len(drawn) == 2 * DEPTH
    slopes = jax.jit(jax.grad(lambda p: sum(v.sum() for v in run(p, jax.random.key(0)))))(values)
    for k, v in enumerate(outs[0]):  # the backward pass has the same numbers
        assert jnp.allclose(slopes[f"layers.{k}.scale"] * values[f"layers.{k}.scale"], v.sum())


def test_in_a_jax_jit() -> None:
    model, args = MODELS["a transformer with a mask"]()
    params = params_of(model)
    with jax.enable_x64(True), bridge.compiling.correctly():
        values = {k: bridge.to_jax(v) for k, v in params.items()}

        def loss(p: Any) -> Any:
            with scan_blocks(model, "layers"):
                return jnp.square(
                    bridge.call(model, p, {}, (bridge.to_jax(X), bridge.to_jax(args[0])))[0]
                ).mean()

        found = jax.jit(jax.grad(loss))(values)
    expected = torch.func.grad(lambda p: functional_call(model, p, (X, *args)).square().mean())(
        params
    )
    same({k: bridge.to_torch(found[k]) for k in expected}, expected, rtol=1e-10, atol=1e-10)


def test_python_and_programs_do_not_grow() -> None:
    """Each block but two is only looked at: its Python does not run, and the program is as long as
    for fewer blocks.
    """
    operations = []
    for depth in (4, 12):
        calls = Traces(lambda x: x.tanh())
        model = Model(
            lambda _, calls=calls: nn.Sequential(nn.Linear(WIDTH, WIDTH), _Called(calls)),
            one_by_one,
            depth,
        )
        fast = jit(
            scan_blocks(model, "layers")(
                grad(lambda p, model=model: functional_call(model, p, (X,)).sum())
            )
        )
        fast(params_of(model))
        assert calls.count == 2
        operations.append(fast.programs()[0].operations)
    assert operations[0] == operations[1]


class _Called(nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(x)


def test_the_module_is_as_before() -> None:
    model, args = MODELS["a transformer with a mask"]()
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    jit(scan_blocks(model)(model.forward))(X, *args)
    with pytest.raises(RuntimeError, match="of another structure"):
        jit(
            scan_blocks(model)(
                lambda: [layer(X, *[MASK] * (k > 2)) for k, layer in enumerate(model.layers)]
            )
        )()
    after = {name: dict(m.__dict__) for name, m in model.named_modules()}
    assert before == after and all(
        type(m).__name__ == "Block" and type(m) is Block for m in model.layers
    )


# -- what is refused -------------------------------------------------------------------------------
class Scaled(nn.Module):
    def __init__(self, number: int, how: str) -> None:
        super().__init__()
        self.number, self.how = number, how
        self.lin = nn.Linear(
            WIDTH,
            WIDTH + 1 if how == "shape" and number == 3 else WIDTH,
            bias=how != "bias" or number != 3,
        )
        if how == "class" and number == 3:
            self.lin = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        if how == "parametrization" and number == 3:
            nn.utils.parametrizations.weight_norm(self.lin)
        if how == "mode" and number == 3:
            self.lin.eval()
        self.drop = nn.Dropout(0.1)
        self.kept = [floats(WIDTH) + number] if how != "tensors" else (floats(WIDTH) + number,)
        if how == "hooks" and number == 2:
            self.lin.register_forward_hook(lambda *_: None)
        if how == "mode":
            self.drop.train(number != 3)

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        y = self.drop(x) if self.how == "mode" else self.lin(x)
        if self.how == "constant":
            return y * (1 + self.number / 10)
        if self.how == "control":
            return y.sin() if self.number < 3 else y
        if self.how == "tensors":
            return y + self.kept[0]
        if self.how == "attribute":
            self.last = y
        if self.how == "list":
            self.kept.append(y)
        if self.how == "argument":
            x.mul_(2)
        if self.how == "rule":
            return _Scaling.apply(y, self.number)
        if self.how == "outside":
            OUTSIDE.add_(1)
        if self.how == "dtype":
            return y.float().double() if self.number < 0 else y.to(torch.float32)
        return y


OUTSIDE = torch.zeros(())


class _Scaling(torch.autograd.Function):
    """Its forward is the same for all factors, its backward is not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: int) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        return cotangent * ctx.factor, None


def each_with(argument: Callable[[int, torch.Tensor], Any]) -> Callable[..., Any]:
    def step(layers: Any, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(layers):
            x = layer(x, argument(k, x))
        return x

    return step


def between(change: Callable[[int, torch.Tensor, Any], torch.Tensor]) -> Callable[..., Any]:
    def step(layers: Any, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(layers):
            x = change(k, layer(x), layers)
        return x

    return step


def wrote(k: int, x: torch.Tensor, layers: Any) -> torch.Tensor:
    if k == 2:
        with torch.no_grad():
            layers[3].lin.weight.mul_(2)
    return x


REFUSED: dict[str, tuple[str, Callable[..., Any], str]] = {
    "another shape": (
        "shape",
        one_by_one,
        r"layers\.3 differs from layers\.1: the shape of lin\.weight is \[5, 4\], not \[4, 4\]",
    ),
    "no bias": ("bias", one_by_one, r"layers\.3 differs .* \['lin\.bias'\] are None"),
    "another class": ("class", one_by_one, r"layers\.3 differs .* submodules"),
    "another mode": (
        "mode",
        one_by_one,
        r"layers\.3 has another program than layers\.1, which reads .*drop\.training",
    ),
    "a parametrization": ("parametrization", one_by_one, r"layers\.3 differs .* submodules"),
    "hooks": ("hooks", one_by_one, r"layers\.2 differs .* lin has other forward hooks"),
    "a constant": (
        "constant",
        one_by_one,
        r"layers\.2 has another program than layers\.1, which reads number: mul has other operands",
    ),
    "control flow": (
        "control",
        one_by_one,
        r"layers\.3 has another program than layers\.1, which reads number: it has",
    ),
    "a rule's constant": (
        "rule",
        one_by_one,
        r"layers\.2 has another program than layers\.1, which reads number",
    ),
    "tensors in a tuple": (
        "tensors",
        one_by_one,
        r"layers\.2 has another program .* kept: it uses another tensor from outside",
    ),
    "an attribute is set": ("attribute", one_by_one, r"changes its attribute last"),
    "a list grows": ("list", one_by_one, r"changes its attribute kept"),
    "an argument is written": (
        "argument",
        one_by_one,
        r"layers\.1 writes to a tensor that is not its own",
    ),
    "a tensor from outside is written": (
        "outside",
        one_by_one,
        r"layers\.1 writes to a tensor that is not its own",
    ),
    "another dtype": ("dtype", one_by_one, r"float32"),
    "a number that differs": (
        "",
        each_with(lambda k, x: k),
        r"argument 1 of layers\.2 is not the one that the blocks before took",
    ),
    "a tensor that is made anew": (
        "",
        each_with(lambda k, x: torch.ones(3) * k),
        r"argument 1 of layers\.2 is not the one",
    ),
    "work between the blocks": (
        "",
        between(lambda k, x, _: x + 1),
        r"argument 0 of layers\.2 is not",
    ),
    "work after a block": (
        "",
        between(lambda k, x, _: x + 1 if k == 2 else x),
        r"argument 0 of layers\.3 is not what layers\.2 returned",
    ),
    "a write between the blocks": (
        "",
        between(lambda k, x, _: x.mul_(2) if k == 2 else x),
        r"argument 0 of layers\.3 is not what",
    ),
    "a write to a later block": (
        "",
        between(wrote),
        r"parameters or buffers of layers\.3 are changed",
    ),
    "some of the blocks": (
        "",
        lambda layers, x: one_by_one(list(layers)[:4], x),
        r"layers\.4 and the blocks after it are not called",
    ),
    "another order": (
        "",
        lambda layers, x: one_by_one(list(layers)[::-1], x),
        r"layers\.4 is called before layers\.0",
    ),
    "a block twice": (
        "",
        lambda layers, x: one_by_one([layers[0], layers[1], layers[1]], x),
        r"layers\.1 is called where layers\.2 comes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_is_refused(name: str) -> None:
    how, step, message = REFUSED[name]
    model = Model(lambda k: Scaled(k, how), step)
    with pytest.raises(RuntimeError, match=message):
        jit(scan_blocks(model, "layers")(model.forward))(X[0].clone())


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        (list, lambda kept, y: kept.append(y.sum())),
        (dict, lambda kept, y: kept.update(total=kept.get("total", 0) + y.sum())),
        (types.SimpleNamespace, lambda kept, y: setattr(kept, "total", y.sum())),
        (lambda: types.SimpleNamespace(all=[]), lambda kept, y: kept.all.append(y.sum())),
        (lambda: types.SimpleNamespace(calls=0), lambda kept, y: vars(kept).update(calls=1)),
    ],
)
def test_an_argument_that_blocks_change_is_refused(argument: Any, change: Any) -> None:
    class Block(nn.Linear):
        def forward(self, x: torch.Tensor, kept: Any) -> torch.Tensor:
            y = super().forward(x)
            change(kept, y)
            return y

    blocks = nn.ModuleList([Block(2, 2) for _ in range(4)])

    def run(x: torch.Tensor) -> torch.Tensor:
        kept = argument()
        return functools.reduce(lambda x, block: block(x, kept), blocks, x)

    with (
        bridge.scan_blocks(blocks, ""),
        pytest.raises(RuntimeError, match="scan_blocks: 0 changes one of its arguments"),
    ):
        jit(run)(torch.ones(2))
    torch.testing.assert_close(jit(run)(torch.ones(2)), run(torch.ones(2)))


def test_a_rule_that_differs_and_an_attribute_that_does_not_matter() -> None:
    model = Model(lambda k: Scaled(k, "none"), one_by_one)
    same(jit(scan_blocks(model, "layers")(model.forward))(X), model(X), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("module", "names", "message"),
    [
        (
            nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3)),
            (),
            "has no nn.ModuleList or nn.Sequential of at least 3 equal",
        ),
        (Model(Block, one_by_one), ("first",), "got 'first'; Model has 'layers'"),
        (Model(Block, one_by_one), ("blocks",), "got 'blocks'; Model has 'layers'"),
        (nn.Sequential(*[nn.Linear(2, 2)] * 3), ("",), "one block is at two places of ''"),
    ],
)
def test_names_that_are_refused(module: nn.Module, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message), scan_blocks(module, *names):
        pass


def test_a_tensor_from_outside_that_differs_from_block_to_block_is_refused() -> None:
    layers, factors = nn.ModuleList(Times() for _ in range(4)), [torch.ones(4) for _ in range(4)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer, factor in zip(layers, factors, strict=True):
            x = layer(x, factor)
        return x

    with pytest.raises(
        RuntimeError, match=r"argument 1 of layers\.2 is not the one that the blocks before took"
    ):
        jit(scan_blocks(nn.ModuleDict({"layers": layers}), "layers")(forward))(torch.ones(2, 4))


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * factor


# -- by itself -------------------------------------------------------------------------------------
DEEP = 9


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of these tests are smaller than those that become a loop by themselves."""
    monkeypatch.setattr(block_programs, "_FEWEST_OPERATIONS", 0)


def test_small_blocks_stay_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    large = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    for block, loop in ((nn.Linear(8, 8), False), (large, True)):
        model = nn.Sequential(*[copy.deepcopy(block) for _ in range(DEEP)]).eval()
        assert as_loops(model, floats(2, 3, 8).float()) == loop


SEEN: list[int] = []


class Noting(nn.Module):
    """Does something beside its result, as ``how`` says."""

    def __init__(self, number: int, how: str) -> None:
        super().__init__()
        self.number, self.how, self.calls = number, how, 0
        self.lin, self.kept = nn.Linear(WIDTH, WIDTH), [0]

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if self.how == "its argument":
            x.mul_(1.5)
        y = self.lin(x).tanh() + 0
        if self.how == "a counter":
            self.calls += 1
        if self.how == "a list of its own":
            self.kept.append(self.number)
        if self.how == "a list of the file":
            SEEN.append(self.number)
        if self.how == "a list among the arguments":
            rest[0].append(y.detach())
        if self.how == "a tensor from outside":
            OUTSIDE.add_(1)
        if self.how == "a number that is read":
            y = y * (1 + self.number / 10)
        if self.how == "a rate that grows":
            y = y if self.number < 4 else y.sin()
        if self.how == "a hook on a gradient":
            y.register_hook(lambda g: SEEN.append(self.number))
        return y


def deep(step: Callable[..., Any] = one_by_one, make: Callable[[int], nn.Module] = Block) -> Model:
    return Model(make, step, DEEP)


def as_loops(model: nn.Module, *args: Any) -> bool:
    """Whether the blocks of a model become a loop, whose program is as long for more blocks."""
    return bool(lengths_of_loops(model, *args))


def lengths_of_loops(model: nn.Module, *args: Any) -> list[int]:
    """How many blocks each loop runs through: all, or all but the first."""
    jaxpr = jit(lambda *given: model(*given)).jaxpr(*args)
    lengths = [e.params["length"] for e in jaxpr.eqns if e.primitive.name == "scan"]
    return [length for length in lengths if length in (DEEP - 1, DEEP)]


@pytest.mark.parametrize(
    ("make", "step", "args"),
    [
        (Block, one_by_one, (MASK,)),
        (Block, with_states, (MASK,)),
        (Pair, of_tuples, ()),
        (Recurrent, one_by_one, ()),
        (Parametrized, one_by_one, ()),
        (Sharing, one_by_one, ()),
    ],
)
def test_deep_models_are_loops_by_themselves(make: Any, step: Any, args: tuple[Any, ...]) -> None:
    model = deep(step, make)
    params = params_of(model)
    assert as_loops(model, X, *args)
    fast = jit(grad(loss_of(model), has_aux=True))
    for x in (X, X.sin()):  # the second call runs what the first has compiled
        same(
            fast(params, x, *args),
            torch.func.grad(loss_of(model), has_aux=True)(params, x, *args),
            rtol=1e-12,
            atol=1e-12,
        )


def masked_later(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for k, block in enumerate(layers):
        x = block(x, MASK if k else MASK.clone())
    return x


def changed_between(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for k, block in enumerate(layers):
        x = block(x) if k else block(x).mul_(2)
    return x


def written_between(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for k, block in enumerate(layers):
        x = block(x)
        if not k:
            next(layers[0].parameters()).data.mul_(0.5)
    return x


def detached_first(layers: Any, x: torch.Tensor) -> torch.Tensor:
    return one_by_one(layers, x.detach())


def hooked_first(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for k, block in enumerate(layers):
        x = block(x)
        if not k:
            x.register_hook(lambda g: g * 3)
    return x


@pytest.mark.parametrize(
    ("make", "step", "args", "length"),
    [
        (Block, one_by_one, (MASK,), DEEP),
        (Block, with_states, (MASK,), DEEP),
        (Block, masked_later, (), DEEP - 1),
        (Block, changed_between, (), DEEP - 1),
        (Block, written_between, (), DEEP - 1),
        (Block, detached_first, (), DEEP - 1),
        (Block, hooked_first, (), DEEP - 1),
        (Dropped, one_by_one, (), DEEP - 1),
        (Normed, one_by_one, (), DEEP - 1),
    ],
)
def test_the_first_block_belongs_to_the_loop_where_it_can(
    make: Any, step: Any, args: tuple[Any, ...], length: int
) -> None:
    found = []
    for wrapped in (lambda f: f, jit):
        torch.manual_seed(0)
        model = deep(step, make)
        x = (floats(6, WIDTH) if make is Normed else X.clone()).requires_grad_()

        def run(x: torch.Tensor, model: Any = model) -> Any:
            out = model(x, *args)
            out = out if isinstance(out, tuple) else (out,)
            return out, torch.autograd.grad(
                out[0].sin().sum(), [*model.parameters()], allow_unused=True
            )

        if wrapped is jit and step not in (written_between, hooked_first):
            assert lengths_of_loops(model, x, *args) == [length]
            torch.manual_seed(0)
            model.load_state_dict(deep(step, make).state_dict())
        torch.manual_seed(0)
        fast = wrapped(run)
        found.append(([fast(x), fast(2 * x)], model.state_dict()))
    # the gradients of nine norms, one after the other, are sums of much larger numbers
    same(found[1], found[0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("which", [0, 1, 4, DEEP - 1])
@pytest.mark.parametrize("how", ["autograd.grad", "retain_grad", "a hook", "a hook in a transform"])
def test_gradients_of_what_deep_blocks_hand_on(how: str, which: int) -> None:
    model = deep()

    def run(x: torch.Tensor) -> Any:
        states = [x]
        for block in model.layers:
            states.append(block(states[-1]))
            if how.startswith("a hook") and len(states) == which + 2:
                states[-1].register_hook(lambda g: 3 * g)
        loss = states[-1].sin().sum()
        if how == "a hook in a transform":
            return loss
        if how == "autograd.grad":
            return torch.autograd.grad(loss, [states[which + 1], x])
        if how == "retain_grad":
            states[which + 1].retain_grad()
            loss.backward()
            return states[which + 1].grad
        return torch.autograd.grad(loss, x)

    x = X.clone().requires_grad_()
    if how == "a hook in a transform":
        same(jit(grad(run))(X), torch.func.grad(run)(X), rtol=1e-12, atol=1e-12)
    else:
        expected = run(x)
        model.zero_grad()
        same(jit(run)(X.clone().requires_grad_()), expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_what_blocks_of_a_wanted_loop_hand_on_are_refused() -> None:
    model = deep()

    def run(x: torch.Tensor) -> Any:
        states = [x]
        for block in model.layers:
            states.append(block(states[-1]))
        return torch.autograd.grad(states[-1].sum(), states[3])

    with pytest.raises(RuntimeError, match="gradient is asked for of what a block hands on"):
        jit(scan_blocks(model, "layers")(run))(X.clone().requires_grad_())


@pytest.mark.parametrize("transform", ["vmap", "jvp", "per sample", "ensemble", "backward"])
def test_deep_models_under_transforms(transform: str) -> None:
    model = deep(make=Pair, step=of_tuples)
    params = params_of(model)

    def loss(p: Any, x: Any) -> Any:
        return loss_of(model)(p, x)[0]

    def made(api: Any, jitted: Any) -> Any:
        many = {k: torch.stack([p, 2 * p, p.sin()]) for k, p in params.items()}
        if transform == "vmap":
            return jitted(api.vmap(loss, in_dims=(None, 0)))(params, X)
        if transform == "jvp":
            return jitted(lambda x, t: api.jvp(lambda x: loss(params, x), (x,), (t,)))(X, X.cos())
        if transform == "per sample":
            return jitted(api.vmap(api.grad(loss), in_dims=(None, 0)))(params, X)
        if transform == "ensemble":
            return jitted(api.vmap(api.grad(loss), in_dims=(0, None)))(many, X)
        x = X.clone().requires_grad_()
        out = jitted(lambda x: model(x)[0])(x)
        (first,) = torch.autograd.grad(out[0].sin().sum(), x, create_graph=True)
        model.zero_grad()
        (first.square().sum() + out[1].sum()).backward()
        return first, [p.grad for p in model.parameters()]

    class Ours:
        vmap, jvp, grad = staticmethod(vmap), staticmethod(jvp), staticmethod(grad)

    same(made(Ours, jit), made(torch.func, lambda f: f), rtol=1e-12, atol=1e-12)


def test_deep_models_draw_and_write_as_in_torch() -> None:
    noisy, normed = deep(make=Dropped), [deep(make=Normed) for _ in range(2)]
    assert as_loops(noisy, X) and as_loops(normed[0], floats(6, WIDTH))
    fast, normal = jit(noisy.forward), jit(normed[0].forward)
    torch.manual_seed(0)
    mine, state = [fast(X), fast(X)], torch.get_rng_state()
    torch.manual_seed(0)
    same(mine, [noisy(X), noisy(X)], rtol=1e-12, atol=1e-12)
    assert torch.equal(state, torch.get_rng_state()) and not torch.equal(mine[0], mine[1])
    for scale in (1, 3):
        x = scale * floats(6, WIDTH)
        same(normal(x), normed[1](x), rtol=1e-12, atol=1e-12)
        same(normed[0].state_dict(), normed[1].state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "how",
    [
        "a counter",
        "a list of its own",
        "a list of the file",
        "a list among the arguments",
        "a tensor from outside",
        "its argument",
        "a number that is read",
        "a rate that grows",
        "a hook on a gradient",
    ],
)
def test_what_deep_blocks_do_beside_their_result_is_done_for_each(how: str) -> None:
    models = [deep(make=lambda k: Noting(k, how)) for _ in range(2)]
    found = []
    for model, wrapped in zip(models, (jit, lambda f: f), strict=True):
        SEEN.clear()
        OUTSIDE.zero_()
        run, taken = wrapped(lambda *args, model=model: model(*args)), []
        for scale in (1, 2):
            model.zero_grad()
            given = [] if how == "a list among the arguments" else None
            run(scale * X, *([given] if given is not None else [])).sum().backward()
            taken += [*(given or []), *[p.grad for p in model.parameters()]]
        found.append(
            (taken, list(SEEN), OUTSIDE.clone(), [(b.calls, b.kept) for b in model.layers])
        )
    same(found[0][0], found[1][0], rtol=1e-12, atol=1e-12)
    same(found[0][2], found[1][2])
    assert found[0][3] == found[1][3]
    # its Python runs when the program is made, as all of a jitted function's
    if how != "a hook on a gradient":
        assert found[0][1] == found[1][1]


@pytest.mark.parametrize("whose", ["the blocks'", "a layer's inside"])
def test_hooks_of_deep_blocks_are_called_for_each(whose: str) -> None:
    model, calls = deep(make=Recurrent), []
    for block in model.layers:
        (block if whose == "the blocks'" else block.cell).register_forward_hook(
            lambda *_: calls.append(1)
        )
    same(jit(model.forward)(X), model(X), rtol=1e-12, atol=1e-12)
    assert len(calls) == 2 * DEEP and as_loops(model, X) == (whose == "the blocks'")


def frozen(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for k, layer in enumerate(layers):
        with torch.set_grad_enabled(k > 3):
            x = layer(x)
    return x


@pytest.mark.parametrize(
    "step",
    [
        frozen,
        lambda layers, x: one_by_one(list(layers)[:7], x),
        lambda layers, x: one_by_one(list(layers)[::-1], x),
        lambda layers, x: one_by_one([layers[0], *layers], x),
        lambda layers, x: one_by_one(layers, one_by_one(layers, x)),
        lambda layers, x: sum(layer(x * k) for k, layer in enumerate(layers)),
        lambda layers, x: sum(layer(x) for layer in layers),
        lambda layers, x: [x := layer(x) + (k == 5) for k, layer in enumerate(layers)],
    ],
)
def test_deep_blocks_that_are_called_in_other_ways(step: Any) -> None:
    models = [deep(step, lambda k: Scaled(k, "none")) for _ in range(2)]
    found = []
    for model, wrapped in zip(models, (jit, lambda f: f), strict=True):
        outs = wrapped(lambda x, model=model: model(x))(X)
        sum(out.sum() for out in (outs if isinstance(outs, list) else [outs])).backward()
        found.append((outs, [p.grad for p in model.parameters()]))
    same(
        [x for x in found[0][1] if x is not None],
        [x for x in found[1][1] if x is not None],
        rtol=1e-12,
        atol=1e-12,
    )
    assert [x is None for x in found[0][1]] == [x is None for x in found[1][1]]
    assert all("forward" not in block.__dict__ for block in models[0].layers)


def test_errors_of_deep_blocks_are_those_of_one_by_one() -> None:
    model = deep(make=lambda k: nn.Linear(WIDTH, WIDTH))
    with pytest.raises(RuntimeError, match=r"reduction dim|shape"):
        jit(model.forward)(floats(2, WIDTH + 1))
    assert all("forward" not in block.__dict__ for block in model.layers)
    same(jit(model.forward)(X), model(X), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("which", [0, 4])
def test_a_block_with_a_forward_of_its_own_runs_it(which: int) -> None:
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEEP)]
    ).double()
    fast = jit(lambda x: model(x))
    for change in (False, True):
        if change:
            model[which].forward = lambda x: 3 * x
        same(fast(X), model(X), rtol=1e-10, atol=1e-10)
    if which:
        with pytest.raises(RuntimeError, match="a forward of its own"):
            jit(scan_blocks(model)(lambda x: model(x)))(X)
