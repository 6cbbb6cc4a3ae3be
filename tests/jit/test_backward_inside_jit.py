"""backward(), zero_grad and optimizers inside of a jitted function, compared with the function
itself; transforms refuse backward().
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.utils.checkpoint import checkpoint

import torchfunc_jax
from torchfunc_jax import jit, random_numbers

_OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adam with a tensor as its rate": lambda p: torch.optim.AdamW(p, torch.tensor(0.05).double()),
    "adam": lambda p: torch.optim.Adam(p, 0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
}


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.first(x).tanh())


def _with(*does):
    """What a step makes of (model, optimizer, x), one thing after another;
    the loss is its result.
    """

    def step(m, o, x):
        loss = m(x).pow(2).mean()
        for do in does:
            do(m, o, x, loss)
        return loss.detach()

    return step


def _backward(m, o, x, loss):
    loss.backward()


def _step(m, o, x, loss):
    o.step()


def _zero(m, o, x, loss):
    o.zero_grad()


def _zero_in_place(m, o, x, loss):
    m.zero_grad(set_to_none=False)


def _assigned(m, o, x, loss):
    for p, g in zip(m.parameters(), torch.autograd.grad(loss, [*m.parameters()]), strict=True):
        p.grad = g


def _twice(m, o, x, loss):
    loss.backward(create_graph=True)
    slope = sum((p.grad**2).sum() for p in m.parameters())
    o.zero_grad()
    slope.backward()


def _asked(m, o, x, loss):
    grad = m.first.weight.grad
    (loss if grad is None else loss * grad.sum().cos()).backward()


# name: (what the jitted step does, what is done between two calls)
INSIDE = {
    "backward": (_with(_backward), None),
    "zero_grad between": (_with(_backward), lambda m, o: o.zero_grad()),
    "zero_grad in place between": (_with(_backward), lambda m, o: m.zero_grad(set_to_none=False)),
    "step between": (_with(_zero, _backward), lambda m, o: o.step()),
    "whole": (_with(_zero, _backward, _step), None),
    "zero_grad in place": (_with(_zero_in_place, _backward, _step), None),
    "zero_grad last": (_with(_backward, _step, _zero), None),
    "accumulated": (
        _with(_zero, lambda m, o, x, loss: loss.backward(retain_graph=True), _backward, _step),
        None,
    ),
    "clipped": (
        _with(
            _zero,
            _backward,
            lambda m, o, x, loss: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
            _step,
        ),
        None,
    ),
    "two orders": (_with(_zero, _twice, _step), None),
    "assigned": (_with(_assigned, _step), None),
    "asked for": (_with(_asked), None),
    "inputs": (_with(lambda m, o, x, loss: loss.backward(inputs=[m.first.weight])), None),
    "of a vector": (lambda m, o, x: m(x).backward(gradient=torch.full_like(x, 2.0)), None),
    "autograd.backward": (
        lambda m, o, x: torch.autograd.backward([m(x).sum(), m(x)], [None, x]),
        None,
    ),
    "deleted between": (
        _with(_backward),
        lambda m, o: [setattr(m.first.weight, "grad", None), delattr(m.last.bias, "grad")],
    ),
    "replaced between": (
        _with(_backward),
        lambda m, o: setattr(m.first.weight, "grad", torch.ones(2, 2).double()),
    ),
    "frozen": (_with(_zero, _backward, _step), lambda m, o: m.first.bias.requires_grad_(False)),
}
_ALL = [
    (name, optimizer)
    for name in INSIDE
    for optimizer in (_OPTIMIZERS if name in ("whole", "step between") else ["momentum"])
]


@pytest.mark.thin(4)
@pytest.mark.parametrize("argument", [False, True], ids=["captured", "module argument"])
@pytest.mark.parametrize("name, optimizer", _ALL)
@pytest.mark.filterwarnings("ignore:Using backward")
def test_training_inside_leaves_what_the_function_leaves(name, optimizer, argument):
    does, between = INSIDE[name]
    found = []
    for wrap in (jit, lambda f: f):
        torch.manual_seed(0)
        m = _Tied().double()
        o = _OPTIMIZERS[optimizer](m.parameters())
        given = wrap(lambda module, x, o=o: does(module, o, x))
        captured = wrap(lambda x, m=m, o=o: does(m, o, x))
        left = []
        for n in (3, 3, 3, 4, 3):
            x = torch.randn(n, 2).double()
            left.append(given(m, x) if argument else captured(x))
            left += [None if p.grad is None else p.grad.clone() for p in m.parameters()] + [
                p.detach().clone() for p in m.parameters()
            ]
            if between is not None:
                between(m, o)
        found.append(left)
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-9)


# -- gradients that torch.autograd takes inside of a jitted function -------------------------------
class _Squared(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


def _cond(T, true_fn, false_fn, operands):
    return (
        torch.cond(_YES, true_fn, false_fn, operands) if T is torchfunc_jax else true_fn(*operands)
    )


def _scan(T, f, carry, xs):
    if T is torchfunc_jax:
        return torch._higher_order_ops.scan(f, carry, xs)
    ys = []
    for x in xs:
        carry, y = f(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


def _map(T, f, xs):
    return (
        torch._higher_order_ops.map(f, xs)
        if T is torchfunc_jax
        else torch.stack([f(x) for x in xs])
    )


_YES, _AT = torch.tensor(True), torch.tensor(2)
_V = torch.linspace(0.1, 0.4, 4).double()
_SQUARE = torch.linspace(0.5, 1.5, 16).double().reshape(4, 4).sin()
_WEIGHT = nn.Parameter(torch.linspace(1, 2, 16).double().reshape(4, 4).cos())
_LAYER = nn.Linear(4, 4).double()
# name -> (what is computed of y [4], which the function inside captures; whether y is a tensor, and
# not only a factor)
THROUGH = {
    "vmap": (lambda T, y: T.vmap(lambda v: (v * y).sin())(_V), False),
    "vmap of vmap": (lambda T, y: T.vmap(T.vmap(lambda v: v * y * y))(_SQUARE), False),
    "grad": (lambda T, y: T.grad(lambda v: (v**3 * y).sum())(_V), False),
    "vmap of grad": (lambda T, y: T.vmap(T.grad(lambda v: (v**3 * y).sum()))(_V), False),
    "grad of vmap": (
        lambda T, y: T.grad(lambda v: T.vmap(lambda u: (u * y) ** 2)(v).sum())(_V),
        False,
    ),
    "jvp": (lambda T, y: T.jvp(lambda v: v**2 * y, (_V,), (_V,))[1], False),
    "tangent": (lambda T, y: T.jvp(lambda v: v**2, (_V,), (y,))[1], True),
    "vjp": (lambda T, y: T.vjp(lambda v: v**2 * y, _V)[1](_V)[0], False),
    "jacrev": (lambda T, y: T.jacrev(lambda v: v**2 * y)(_V), False),
    "jacfwd": (lambda T, y: T.jacfwd(lambda v: v**2 * y)(_V), False),
    "hessian": (lambda T, y: T.hessian(lambda v: (v**3 * y).sum())(_V), False),
    "cond": (lambda T, y: _cond(T, lambda v: v * y**2, lambda v: v * y, (_V,)), False),
    "operand of cond": (lambda T, y: _cond(T, lambda v: v**2, lambda v: v, (y,)), True),
    "scan": (lambda T, y: _scan(T, lambda c, v: (c + v * y, c * y), _V, _V)[1], False),
    "map": (lambda T, y: _map(T, lambda v: v * y**2, _V), False),
    "vmap of cond": (
        lambda T, y: T.vmap(lambda v: _cond(T, lambda u: u * y**2, lambda u: u * y, (v,)))(_V),
        False,
    ),
    "cond of vmap": (
        lambda T, y: _cond(
            T, lambda v: T.vmap(lambda u: u * y**2)(v), lambda v: T.vmap(lambda u: u * y)(v), (_V,)
        ),
        False,
    ),
    "checkpoint": (lambda T, y: checkpoint(lambda v: v * y**2, _V, use_reentrant=False), False),
    "vmap of a Function": (lambda T, y: T.vmap(lambda v: _Squared.apply(v * y))(_V), True),
    "jit": (
        lambda T, y: (jit if T is torchfunc_jax else lambda f: f)(lambda v: v * y**2)(_V),
        False,
    ),
    "functional_call": (
        lambda T, y: T.functional_call(_LAYER, {"weight": _WEIGHT, "bias": y}, (_SQUARE,)),
        True,
    ),
    "write in vmap": (lambda T, y: T.vmap(lambda v: (v * y).mul_(y))(_V), True),
}
# name -> how y is a part of x [4, 4], or of a captured parameter
PARTS = {
    "row": lambda x: x[0],
    "computed": lambda x: x.sin()[1],
    "at a place": lambda x: x[_AT],
    "column": lambda x: x.select(1, _AT),
    "parameter": lambda x: _WEIGHT[1] * x.sum(),
    "parameter at a place": lambda x: _WEIGHT[_AT],
    "written": lambda x: (y := x * 1, y[_AT].mul_(x[1]))[0][_AT],
}


class _Late:
    """A factor that is computed of x anew wherever it is used."""

    def __init__(self, of, x):
        self.of, self.x = of, x

    def __rmul__(self, other):
        return other * self.of(self.x)

    def __mul__(self, other):
        return self.of(self.x) * other

    def __pow__(self, k):
        return self.of(self.x) ** k


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    "part",
    [
        p if p in ("row", "parameter at a place") else pytest.param(p, marks=pytest.mark.slow)
        for p in PARTS
    ],
)
@pytest.mark.parametrize(
    "name, inside",
    [
        (name, inside)
        for name, (_, whole) in THROUGH.items()
        for inside in (False, True)[: 2 - whole]
    ],
)
def test_the_gradient_goes_back_through(name, part, inside):
    through = THROUGH[name][0]

    def gradients(T, x):
        x = x.detach().requires_grad_()
        out = through(T, _Late(PARTS[part], x) if inside else PARTS[part](x))
        total = (
            out * torch.linspace(1, 2, out.numel(), dtype=torch.float64).reshape(out.shape)
        ).sum() + (x**2).sum()
        first = torch.autograd.grad(total, [x, _WEIGHT], create_graph=True, materialize_grads=True)
        return *first, *torch.autograd.grad((first[0] ** 2).sum(), x)

    for k in range(2):
        x = _SQUARE + k
        torch.testing.assert_close(
            jit(lambda x: gradients(torchfunc_jax, x))(x),
            gradients(torch.func, x),
            rtol=1e-7,
            atol=1e-9,
        )


AT_A_PLACE = {
    "index": lambda x, i: x[i],
    "index of columns": lambda x, i: x[:, i],
    "from the end": lambda x, i: x[-i],
    "write": lambda x, i: (y := x * 1, y.__setitem__(i, y[0] * 3))[0],
    "write to columns": lambda x, i: (y := x * 1, y.__setitem__((slice(None), i), x[:, 0] * 3))[0],
    "select": lambda x, i: torch.select(x, 1, i),
    "narrow": lambda x, i: torch.narrow(x, 0, i, 2),
    "narrow columns": lambda x, i: x.narrow(1, i, 2),
    "write to a part": lambda x, i: (y := x * 1, y.narrow(0, i, 2).mul_(x[0]))[0],
    "write to a row": lambda x, i: (y := x * 1, y[i].mul_(x[0]))[0],
    "add to a row": lambda x, i: (y := x * 1, y[i].add_(x[0]), y[i].mul_(2))[0],
    "part of a part": lambda x, i: (y := x * 1, y.narrow(0, i, 2)[0].narrow(0, i, 2).mul_(x[0, 0]))[
        0
    ],
    "read before and after": lambda x, i: (y := x * 1, r := y[i], y.mul_(2), r * y)[3],
    "read before and after of a row": lambda x, i: (y := x * 1, r := y[i], r.mul_(x[0]), r * y)[3],
}


@pytest.mark.parametrize("argument", [False, True])
@pytest.mark.parametrize("name", AT_A_PLACE)
def test_the_gradient_goes_back_through_a_part_at_a_place(name, argument):
    def gradients(x, i):
        x = x.detach().requires_grad_()
        out = AT_A_PLACE[name](x, i) ** 2
        total = (
            out * torch.linspace(1, 2, out.numel(), dtype=torch.float64).reshape(out.shape)
        ).sum() + x.sum()
        (first,) = torch.autograd.grad(total, x, create_graph=True)
        return first, *torch.autograd.grad((first**2).sum(), x)

    fast = jit(gradients)
    for k in (1, 0, 2):
        i = torch.tensor(k)
        found = fast(_SQUARE, i) if argument else jit(lambda x, i=i: gradients(x, i))(_SQUARE)
        torch.testing.assert_close(found, gradients(_SQUARE, i), rtol=1e-7, atol=1e-9)


def test_the_gradient_goes_back_through_a_product_with_a_complex_number():
    def gradients(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad((x + 2j * x.sin()).abs().sum(), x)

    torch.testing.assert_close(jit(gradients)(_SQUARE), gradients(_SQUARE))


RECURRENT = {
    "lstm": nn.LSTM(4, 5),
    "lstm, two layers both ways": nn.LSTM(4, 5, 2, bidirectional=True, batch_first=True),
    "lstm without biases": nn.LSTM(4, 5, bias=False),
    "projected lstm": nn.LSTM(4, 5, proj_size=3),
    "gru": nn.GRU(4, 5, 2),
    "rnn": nn.RNN(4, 5),
}


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recurrent_layers_are_trained_inside(name, dtype):
    module = copy.deepcopy(RECURRENT[name]).to(dtype)

    def step(x):
        outputs, last = module(x)
        (
            outputs.sin().sum()
            + sum(h.pow(2).sum() for h in (last if isinstance(last, tuple) else [last]))
        ).backward()
        return outputs.detach()

    found = []
    for f in (jit(step), step):
        module.zero_grad()
        outs = [f(torch.linspace(-1, 1, n * 12, dtype=dtype).reshape(3, n, 4)) for n in (2, 3, 2)]
        found.append((outs, [p.grad.clone() for p in module.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_a_training_step_is_compiled_once_and_its_optimizer_may_go_on_outside():
    m = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(m.parameters(), 0.1)

    def step(x):
        optimizer.zero_grad()
        m(x).sum().backward()
        optimizer.step()

    fast = jit(step)
    for k in range(3):
        fast(torch.ones(2) * k)
        assert type(m.weight.grad) is torch.Tensor
        torch.testing.assert_close(m.weight.grad, torch.full((1, 2), float(k)))
    optimizer.step()
    assert len(fast.programs()) == 1


@pytest.mark.parametrize("argument", [True, False], ids=["an argument", "a captured tensor"])
def test_a_gradient_that_is_removed_is_gone_after_each_call(argument):
    w = torch.ones(3, requires_grad=True)

    def step(x):
        (x if argument else w).grad = None
        return (x * w).sum()

    fast = jit(step)
    for k in range(3):
        x = torch.full((3,), float(k), requires_grad=True)
        x.grad, w.grad = torch.ones(3), torch.ones(3)
        fast(x)
        assert ((x.grad is None), (w.grad is None)) == (argument, not argument)


def _of_argument(wrap):
    f = wrap(lambda x: ((x**2).sum().backward(), x.grad)[1])
    for k in range(2):
        x = (torch.arange(3.0) + k).requires_grad_()
        first, before = f(x), x.grad
        yield first.clone(), first is before
        yield f(x) is before, before
        x.grad = None
        yield f(x), x.grad


def _of_two(wrap):
    f = wrap(lambda x, *, y: (x * y[0]).sum().backward())
    x, y = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    f(x, y=[y])
    f(y, y=[y])  # one tensor is both
    yield x.grad, y.grad


def _one_tensor_twice(wrap):
    f = wrap(lambda x, *, y: (x * y[0]).sum().backward())
    x = torch.full((2,), 3.0, requires_grad=True)
    for _ in range(2):
        f(x, y=[x])  # also at the first call
    x.register_hook(lambda g: g * 2)
    f(x, y=[x])
    yield x.grad


def _captured_too(wrap):
    w = torch.ones(2, requires_grad=True)
    f = wrap(lambda x: (x * x * w).sum().backward())
    for _ in range(3):
        f(w)
        yield w.grad.clone()


def _graph_from_outside(wrap):
    w, v = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    f = wrap(lambda x, inputs: (x * x * v).sum().backward(inputs=[v] if inputs else None))
    for k in range(4):
        f(w * k, k > 1)
        yield w.grad, v.grad.clone()


def _asked_of_argument(wrap):
    f = wrap(lambda x: (x * x).sum().backward() if x.grad is None else x.grad * 2)
    x = torch.ones(2, requires_grad=True)
    yield f(x), f(x), x.grad
    x.grad = torch.full((2,), 7.0)
    yield f(x)


def _hook_steps(wrap):
    w = torch.ones(2, requires_grad=True)

    def hook(p):
        with torch.no_grad():
            p.sub_(p.grad)
        p.grad = None

    w.register_post_accumulate_grad_hook(hook)
    f = wrap(lambda x: (w * x).sum().backward())
    yield f(torch.ones(2)), f(torch.full((2,), 3.0)), w.detach(), w.grad


def _with_a_number(wrap):
    w = torch.ones(2, requires_grad=True)
    f = wrap(lambda x, k: (w * x * k).sum().backward())
    for k in range(8):
        f(torch.ones(2), 0.5 * k)
        yield w.grad.clone()
    assert wrap is not jit or len(f.programs()) < 5


LEAVES = [
    _of_argument,
    _of_two,
    _one_tensor_twice,
    _captured_too,
    _graph_from_outside,
    _asked_of_argument,
    _hook_steps,
    _with_a_number,
]


@pytest.mark.parametrize("case", LEAVES)
def test_grad_of_arguments_and_captured_leaves(case):
    torch.testing.assert_close([*case(jit)], [*case(lambda f: f)])


_X = torch.ones(3)
TRANSFORMS = {
    "grad": lambda T, f: T.grad(f)(_X),
    "vmap": lambda T, f: T.vmap(f)(torch.ones(2, 3)),
    "vjp": lambda T, f: T.vjp(f, _X),
    "jvp": lambda T, f: T.jvp(f, (_X,), (_X,)),
    "jacrev": lambda T, f: T.jacrev(f)(_X),
    "jacfwd": lambda T, f: T.jacfwd(f)(_X),
    "hessian": lambda T, f: T.hessian(f)(_X),
    "linearize": lambda T, f: T.linearize(f, _X),
    "vmap of jit": lambda T, f: T.vmap(jit(f))(_X),
    "functional": lambda T, f: T.grad_and_value(f)(_X),
}


@pytest.mark.parametrize("backward", [torch.Tensor.backward, torch.autograd.backward])
@pytest.mark.parametrize("held", [None, torch.ones(3)], ids=["no grad", "a grad"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_refuse_backward_before_anything_is_changed(name, held, backward):
    w = torch.ones(3, requires_grad=True)
    w.grad = held

    def f(x):
        out = (w * x).sum()
        backward(out)
        return out

    for call in (
        lambda: TRANSFORMS[name](torchfunc_jax, f),
        lambda: jit(lambda: TRANSFORMS[name](torchfunc_jax, f))(),
    ):
        with pytest.raises(RuntimeError, match=r"backward\(\) called inside a functorch transform"):
            call()
        assert w.grad is held
    assert held is None or torch.equal(held, torch.ones(3))


@pytest.mark.parametrize(
    "inner",
    [
        lambda f, x: torch.cond(x.sum() > 0, f, f, (x,)),
        lambda f, x: torch.utils.checkpoint.checkpoint(f, x, use_reentrant=False),
    ],
)
def test_backward_in_a_part_of_the_program_that_jax_traces_itself_is_refused(inner):
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="a tensor from outside"):
        jit(lambda x: inner(lambda x: ((w * x).sum().backward(), x * 1)[1], x))(_X)
    assert w.grad is None


# -- tensors that are written after they were saved ------------------------------------------------
def _written_after_it_was_saved(x):
    y = x * 2
    part = y[1:]
    z = y * y
    part.mul_(3)
    y.sin_()
    return (z * y).sum()


def _value(x):
    with allow_mutation_on_saved_tensors():
        return _written_after_it_was_saved(x)


def _trained_on_it(x):
    w = x.detach().clone().requires_grad_()
    with allow_mutation_on_saved_tensors():
        return torch.autograd.grad(_written_after_it_was_saved(w), w)[0]


def _without_a_write(x):
    """The gradient; PyTorch's own is wrong, because it takes part, which begins at another address,
    for other memory than y's.
    """
    w = x.detach().clone().requires_grad_()
    y = w * 2
    return torch.autograd.grad((y * y * torch.cat([y[:1], y[1:] * 3]).sin()).sum(), w)[0]


@pytest.mark.parametrize("way", ["as it is", "in PyTorch"])
def test_allow_mutation_on_saved_tensors(way):
    def with_way(f):
        return f if way == "as it is" else lambda x: f(x.as_strided(x.shape, x.stride()))

    value, trained = with_way(_value), with_way(_trained_on_it)
    for x in (torch.tensor([0.3, -0.7, 1.1]), torch.tensor([2.0, 0.1, -0.4])):
        lanes = torch.stack([x, x + 1])
        torch.testing.assert_close(jit(value)(x), value(x))
        torch.testing.assert_close(torchfunc_jax.functionalize(value)(x), value(x))
        torch.testing.assert_close(torchfunc_jax.vmap(value)(lanes), torch.func.vmap(value)(lanes))
        torch.testing.assert_close(
            torchfunc_jax.jvp(value, (x,), (x,)), torch.func.jvp(value, (x,), (x,))
        )
        torch.testing.assert_close(jit(trained)(x), _without_a_write(x))
        torch.testing.assert_close(torchfunc_jax.functionalize(trained)(x), trained(x))
        for differentiate in (torchfunc_jax.grad, torchfunc_jax.jacrev):
            with pytest.raises(RuntimeError, match="saved tensor hooks"):
                differentiate(value)(x)


#: Draws in transforms inside of a step, whose gradients torch's graph takes.
DRAWS = {
    "a number for each lane": lambda T, w, x: T.vmap(
        lambda r: r * w * torch.rand(3).double(), randomness="different"
    )(x),
    "one for all lanes": lambda T, w, x: T.vmap(
        lambda r: r * w * torch.randn(3).double(), randomness="same"
    )(x),
    "dropout": lambda T, w, x: T.vmap(
        lambda r: nn.functional.dropout(r * w, 0.5), randomness="different"
    )(x),
    "two, and one between": lambda T, w, x: (
        T.vmap(lambda r: nn.functional.dropout(r * w), randomness="different")(x)
        * torch.rand(3)
        * T.vmap(lambda r: r * w + torch.rand(3), randomness="same")(x)
    ),
    "a gradient with dropout": lambda T, w, x: T.grad(
        lambda v: (nn.functional.dropout(v) * w * v).sin().sum()
    )(x),
    "a Jacobian with noise": lambda T, w, x: T.jacrev(
        lambda v: (v.sum(0) * w * torch.rand(3)).sin()
    )(x),
}


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("numbers", ["torch", "jax"])
@pytest.mark.parametrize("name", DRAWS)
def test_gradients_have_the_random_numbers_of_their_values(name, numbers, twice):
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)

    def step(T, w):
        w = w.clone().requires_grad_()
        y = DRAWS[name](T, w, x).pow(2).sum()
        (g,) = torch.autograd.grad(y, w, create_graph=twice)
        if twice:
            (g,) = torch.autograd.grad(g.sin().sum(), w)
        return y.detach(), g.detach(), torch.rand(2)

    w = torch.tensor([0.5, -0.7, 1.1], dtype=torch.float64)
    fast = jit(lambda w: step(torchfunc_jax, w))

    def seeded(call, *args):
        torch.manual_seed(0)
        with random_numbers(numbers):
            return call(*args)

    if numbers == "torch":
        for k in range(3):
            found, expected = seeded(fast, w * (k + 1)), seeded(step, torch.func, w * (k + 1))
            torch.testing.assert_close(found, expected)
    elif not twice:  # differences of values that the same numbers make
        gradient = seeded(fast, w)[1]
        for k, e in enumerate(1e-6 * torch.eye(3, dtype=torch.float64)):
            difference = seeded(fast, w + e)[0] - seeded(fast, w - e)[0]
            torch.testing.assert_close(difference / 2e-6, gradient[k], rtol=1e-5, atol=1e-7)


def _loss_of_gradients(x, w):
    x.requires_grad_(True)
    (g,) = torch.autograd.grad((x * w).sin().sum(), x, create_graph=True)
    return (g**2).sum()


def _backward_by_an_argument(x, w):
    x.requires_grad_()
    loss = (x * w).pow(2).sum()
    loss.backward()
    return loss.detach()


def _set_and_taken_back(x, w):
    x.requires_grad_()
    y = (x * w).sum()
    x.requires_grad_(False)
    return y


def _set_without_grad(x, w):
    with torch.no_grad():
        x.requires_grad = True
    return x * 2


#: Functions of an argument and a parameter that make the argument require grad.
FLAGGED = {
    "energy": lambda x, w: (x.requires_grad_() * w).sin().sum(),
    "of gradients": _loss_of_gradients,
    "backward": _backward_by_an_argument,
    "taken back": _set_and_taken_back,
    "no_grad": _set_without_grad,
    "detached": lambda x, w: (x.requires_grad_() * w).detach(),
}


@pytest.mark.parametrize("name", FLAGGED)
def test_arguments_that_the_function_makes_require_grad(name):
    def run(wrap):
        found, w = [], torch.tensor([0.3, -0.5, 2.0], dtype=torch.float64, requires_grad=True)
        call = wrap(lambda x: FLAGGED[name](x, w))
        for k in range(3):
            x = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64) * (k + 1)
            for _ in range(2):
                w.grad = None
                y = call(x)
                if y.requires_grad:
                    y.sum().backward()
                found.append([y.detach(), y.requires_grad, x.requires_grad, x.grad, w.grad])
        return found

    torch.testing.assert_close(run(jit), run(lambda f: f), equal_nan=True)


FORCES = {
    "jvp": lambda T, f, x: T.jvp(f, (x,), (torch.ones_like(x),))[1],
    "jacfwd": lambda T, f, x: T.vmap(T.jacfwd(f))(x),
    "jacrev": lambda T, f, x: T.vmap(T.jacrev(f))(x),
    "grad": lambda T, f, x: T.grad(lambda x: f(x).sum())(x),
    "hessian": lambda T, f, x: T.vmap(T.hessian(lambda x: f(x).sum()))(x),
    "one of two": lambda T, f, x: T.grad_and_value(lambda x: f(x).sum())(x)[0],
}


@pytest.mark.parametrize("name", FORCES)
def test_parameters_on_which_a_force_does_not_depend_are_not_changed(name):
    """AdamW would decay a last bias that had a gradient of zeros."""

    def trained(T, wrap):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)

        def step(x):
            optimizer.zero_grad()
            loss = FORCES[name](T, net, x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        call = wrap(step)
        losses = [call(torch.linspace(-1, k, 6).double().reshape(3, 2)) for k in range(3)]
        assert net[2].bias.grad is None
        return losses, [p.detach() for p in net.parameters()]

    torch.testing.assert_close(trained(torchfunc_jax, jit), trained(torch.func, lambda f: f))
