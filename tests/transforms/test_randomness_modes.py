"""Random operators inside transforms: the three kinds of randomness, seeds, generators, and the
distributions themselves.
"""

from __future__ import annotations

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import nn

from torchfunc_jax import chunk_vmap, functionalize, grad, jet, jit, random_numbers, vmap

# name -> a function of one lane [6] that draws; every one gives a floating tensor
OPERATORS = {
    "rand": lambda x: torch.rand(6),
    "rand_like": lambda x: torch.rand_like(x),
    "randn": lambda x: torch.randn(6),
    "randn_like": lambda x: torch.randn_like(x),
    "randint": lambda x: torch.randint(0, 1000, (6,)).float(),
    "randint_like": lambda x: torch.randint_like(x, 0, 1000),
    "randperm": lambda x: torch.randperm(64).float(),
    "bernoulli": lambda x: torch.bernoulli(torch.full((64,), 0.5)),
    "bernoulli_p": lambda x: torch.bernoulli(torch.zeros(64), 0.5),
    "normal": lambda x: torch.normal(torch.zeros(6), torch.ones(6)),
    "normal_float": lambda x: torch.normal(0.0, 1.0, (6,)),
    "multinomial": lambda x: torch.multinomial(torch.ones(64), 32).float(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "geometric_": lambda x: torch.empty_like(x.expand(11, 6)).geometric_(0.1),
    "bernoulli_": lambda x: torch.empty_like(x.expand(11, 6)).bernoulli_(0.5),
    "random_": lambda x: torch.empty_like(x).random_(1000),
    "poisson": lambda x: torch.poisson(torch.full((64,), 5.0)),
    "binomial": lambda x: torch.binomial(torch.full((64,), 10.0), torch.full((64,), 0.5)),
    "dropout": lambda x: F.dropout(torch.ones(64), 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(torch.ones(64), 0.5, training=True),
    "feature_dropout": lambda x: F.dropout2d(torch.ones(2, 32, 2, 2), 0.5),
    "gumbel_softmax": lambda x: F.gumbel_softmax(torch.cat([x] * 10)),
    "sdpa_dropout": lambda x: F.scaled_dot_product_attention(
        torch.ones(1, 4, 8), torch.ones(1, 4, 8), torch.eye(4, 8)[None], dropout_p=0.5
    ),
    "Uniform.rsample": lambda x: torch.distributions.Uniform(torch.zeros(6), 1.0).rsample(),
    "Gamma.sample": lambda x: torch.distributions.Gamma(torch.ones(6), torch.ones(6)).sample(),
    "Dirichlet.rsample": lambda x: torch.distributions.Dirichlet(torch.ones(6)).rsample(),
    "Categorical.sample": lambda x: (
        torch.distributions.Categorical(torch.ones(64)).sample((8,)).float()
    ),
    "lstm_dropout": lambda x: _lstm(torch.ones(3, 1, 4))[0],
}
_lstm = nn.LSTM(4, 16, num_layers=2, dropout=0.5).requires_grad_(False)
x = torch.zeros(4, 6)


def all_equal(t):
    return bool((t == t[:1]).all())


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("compile", [lambda f: f, jit], ids=["eager", "jit"])
def test_three_kinds(name, compile):
    f = OPERATORS[name]
    if name == "Dirichlet.rsample" and compile is not jit:
        # a Function of PyTorch's old kind: torch.func refuses it
        with pytest.raises(RuntimeError, match="setup_context"):
            vmap(f)(x)
        return
    with pytest.raises(RuntimeError, match="randomness error mode"):
        compile(vmap(f))(x)
    assert all_equal(compile(vmap(f, randomness="same"))(x))
    drawn = compile(vmap(f, randomness="different"))(x)
    assert not all_equal(drawn)
    assert drawn.shape == (4, *functionalize(f)(x[0]).shape)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_seed_repeats_a_run_and_calls_differ(name):
    compiled = jit(vmap(OPERATORS[name], randomness="different"))
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(3)
    torch.testing.assert_close(compiled(x), first, rtol=0, atol=0)
    assert not torch.equal(first, second)


def test_same_draws_the_same_in_every_chunk():
    noise = vmap(lambda a: a + torch.rand(()), randomness="same", chunk_size=2)
    assert all_equal(noise(torch.zeros(5)))
    assert all_equal(
        chunk_vmap(lambda a: a + torch.rand(()), randomness="same", chunks=3)(torch.zeros(5))
    )
    assert (
        len(
            set(
                vmap(lambda a: a + torch.rand(()), randomness="different", chunk_size=2)(
                    torch.zeros(5)
                ).tolist()
            )
        )
        == 5
    )


def test_nested_kinds():
    def draw(outer, inner):
        return vmap(vmap(lambda a: a + torch.rand(()), randomness=inner), randomness=outer)(
            torch.zeros(3, 4)
        )

    assert len(set(draw("different", "different").flatten().tolist())) == 12
    mixed = draw("different", "same")
    assert all_equal(mixed.T)
    assert not all_equal(mixed)
    mixed = draw("same", "different")
    assert all_equal(mixed)
    assert not all_equal(mixed.T)
    with pytest.raises(RuntimeError, match="randomness error mode"):
        draw("error", "different")


def test_draws_within_one_call_differ():
    def twice(a):
        return torch.rand(5), torch.rand(5)

    for f in (vmap(twice, randomness="same"), jit(vmap(twice, randomness="different"))):
        one, two = f(x)
        assert not torch.equal(one, two)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("randomness", ["no vmap", "different"])
def test_draws_before_and_after_one_that_jax_traces_by_itself(randomness, compiled):
    generator = torch.Generator().manual_seed(3)

    def noise(a):
        return torch.stack([a + torch.rand(6), a + torch.rand(6, generator=generator)])

    def f(a):
        return jet(noise, (a,), ((a,),))[0], noise(a)

    run = functionalize(f) if randomness == "no vmap" else vmap(f, randomness=randomness)
    with random_numbers("jax"):
        first, second = (jit(run) if compiled else run)(x[0] if randomness == "no vmap" else x[:1])
    assert torch.cat([first, second]).unique().numel() == 24


def test_explicit_generator():
    g = torch.Generator()
    f = vmap(lambda a: torch.rand(6, generator=g), randomness="different")
    for run in (f, jit(f)):
        g.manual_seed(5)
        first, second = run(x), run(x)
        g.manual_seed(5)
        torch.testing.assert_close(run(x), first, rtol=0, atol=0)
        assert not torch.equal(first, second)
        assert not all_equal(first)


def test_the_default_generator_moves_only_when_drawn_from():
    state = torch.get_rng_state()
    jit(vmap(torch.sin))(x)
    vmap(grad(lambda a: a.sum()))(x)
    assert torch.equal(torch.get_rng_state(), state)


N = 20000
LAWS = {
    "uniform": (lambda: torch.rand(N), scipy.stats.uniform()),
    "normal": (lambda: torch.randn(N), scipy.stats.norm()),
    "exponential": (lambda: torch.empty(N).exponential_(2.0), scipy.stats.expon(scale=0.5)),
    "cauchy": (lambda: torch.empty(N).cauchy_(1.0, 2.0), scipy.stats.cauchy(1.0, 2.0)),
    "log_normal": (
        lambda: torch.empty(N).log_normal_(0.5, 0.25),
        scipy.stats.lognorm(0.25, scale=torch.tensor(0.5).exp().item()),
    ),
    "gamma": (
        lambda: torch.distributions.Gamma(torch.full((N,), 2.5), 1.0).sample(),
        scipy.stats.gamma(2.5),
    ),
    "beta": (
        lambda: torch.distributions.Beta(torch.full((N,), 2.0), torch.full((N,), 3.0)).sample(),
        scipy.stats.beta(2, 3),
    ),
    "student": (
        lambda: torch.distributions.StudentT(torch.full((N,), 5.0)).sample(),
        scipy.stats.t(5),
    ),
    "gumbel": (
        lambda: torch.distributions.Gumbel(torch.zeros(N), torch.ones(N)).sample(),
        scipy.stats.gumbel_r(),
    ),
    "laplace": (
        lambda: torch.distributions.Laplace(torch.zeros(N), torch.ones(N)).sample(),
        scipy.stats.laplace(),
    ),
}
COUNTS = {
    "bernoulli": (lambda: torch.bernoulli(torch.full((N,), 0.3)), scipy.stats.bernoulli(0.3)),
    "poisson": (lambda: torch.poisson(torch.full((N,), 4.0)), scipy.stats.poisson(4)),
    "binomial": (
        lambda: torch.binomial(torch.full((N,), 12.0), torch.full((N,), 0.4)),
        scipy.stats.binom(12, 0.4),
    ),
    "geometric": (lambda: torch.empty(N).geometric_(0.2), scipy.stats.geom(0.2)),
    "randint": (lambda: torch.randint(3, 17, (N,)).float(), scipy.stats.randint(3, 17)),
    "dropout": (lambda: (F.dropout(torch.ones(N), 0.25) > 0).float(), scipy.stats.bernoulli(0.75)),
}


def drawn(f):
    torch.manual_seed(11)
    return functionalize(lambda a: f())(torch.zeros(1)).double().numpy()


@pytest.mark.parametrize("name", LAWS)
def test_continuous_law(name):
    f, law = LAWS[name]
    assert scipy.stats.kstest(drawn(f), law.cdf).pvalue > 1e-3


@pytest.mark.parametrize("name", COUNTS)
def test_discrete_law(name):
    f, law = COUNTS[name]
    values = drawn(f)
    assert abs(values.mean() - law.mean()) < 5 * law.std() / N**0.5
    assert abs(values.var() / law.var() - 1) < 0.1
    assert set(values[:50]) <= set(range(200))


def test_dropout_scales_what_it_keeps_and_its_gradient_uses_the_same_mask():
    torch.manual_seed(0)
    g, y = vmap(
        lambda a: (lambda out: (out.grad_mask, out.value))(_Dropped(a)), randomness="different"
    )(torch.ones(3, 50))
    assert torch.equal(g, y)
    assert set(y.flatten().tolist()) == {0.0, 2.0}


class _Dropped:
    def __init__(self, a):
        def f(a):
            y = F.dropout(a, 0.5)
            return y.sum(), y

        self.grad_mask, self.value = grad(f, has_aux=True)(a)


@pytest.mark.parametrize("source", ["torch", "jax"])
def test_values_that_python_asks_for_have_the_numbers_of_the_result(source):
    asked, runs = [], []

    def f(x):
        runs.append(x)
        y = F.dropout(x + 1, 0.5)
        asked.append(y.sum().item())
        z = F.dropout(y, 0.5)
        asked.append(float(f"{(z + torch.rand(5)).sum():.6f}") if z.sum() > -1 else 0.0)
        asked.append(y.max().item())
        return y.sum(), (y.sum(), z, y.max())

    with random_numbers(source):
        torch.manual_seed(0)
        for k in range(3):
            asked.clear(), runs.clear()
            _, (first, z, last) = grad(f, has_aux=True)(torch.arange(5.0) + k)
            assert len(runs) == 1
            assert asked[0] == first and asked[2] == last
            assert z.sum() < asked[1] < z.sum() + 5
