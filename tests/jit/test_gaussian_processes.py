"""Programs that ask whether a factorization failed, and whether two tensors are equal, as
gpytorch's models do, in a trace.
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

import bridge
from torchfunc_jax import functional_call, grad, hessian, jit, vmap

N = 12
INPUTS = torch.linspace(0, 3, N, dtype=torch.float64)
TARGETS = torch.sin(2 * INPUTS)


def distances(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Squared distances, as gpytorch computes them: its diagonal is exact where both are equal."""
    found = (a[:, None] - b).square()
    return found.fill_diagonal_(0) if torch.equal(a, b) else found


def factor(kernel: torch.Tensor) -> torch.Tensor:
    """The Cholesky factor, as linear_operator computes it:
    with jitter where there is none without.
    """
    found, info = torch.linalg.cholesky_ex(kernel)
    if not torch.any(info):
        return found
    return torch.linalg.cholesky(kernel + 1e-3 * torch.eye(len(kernel), dtype=kernel.dtype))


class Covariance(torch.autograd.Function):
    """A kernel with a derivative of its own, which gets the inputs twice."""

    @staticmethod
    def forward(ctx, a, b, length):
        squares = distances(a / length, b / length)
        kernel = (-squares / 2).exp()
        ctx.save_for_backward(squares * kernel / length)
        return kernel

    @staticmethod
    def backward(ctx, given):
        return None, None, (given * ctx.saved_tensors[0]).sum()


def density(logs: torch.Tensor, kernel=Covariance.apply) -> torch.Tensor:
    """The log density of the targets for logarithms of the length and the noise, [2]."""
    length, noise = logs.exp()
    lower = factor(kernel(INPUTS, INPUTS, length) + noise * torch.eye(N, dtype=torch.float64))
    solved = torch.linalg.solve_triangular(lower, TARGETS[:, None], upper=False)
    return -solved.square().sum() / 2 - lower.diagonal().log().sum()


def plain(a, b, length):
    return (-distances(a / length, b / length) / 2).exp()


@pytest.mark.parametrize("kernel", [Covariance.apply, plain])
def test_a_density_by_cholesky_ex_and_equal(kernel):
    def f(logs):
        return density(logs, kernel)

    logs = torch.tensor([[0.1, -1.0], [-0.3, -2.0], [0.4, -0.5]], dtype=torch.float64)
    leaf = logs.clone().requires_grad_()
    want = torch.stack([f(row) for row in leaf])
    (slope,) = torch.autograd.grad(want.sum(), leaf)
    torch.testing.assert_close(jit(f)(logs[0]), want[0].detach())
    torch.testing.assert_close(jit(grad(f))(logs[0]), slope[0])
    torch.testing.assert_close(jit(vmap(grad(f)))(logs), slope)
    if kernel is plain:  # a Function whose backward saves no input has no second derivative
        torch.testing.assert_close(
            jit(hessian(f))(logs[0]), torch.autograd.functional.hessian(f, logs[0])
        )


@pytest.mark.parametrize("negate", [False, True])
def test_a_factorization_that_fails_raises(negate):
    @jit
    def f(matrix):
        found, info = torch.linalg.cholesky_ex(matrix)
        failed = torch.any(info) if negate else info.any()
        return found if not failed else found * 0

    eye = torch.eye(3)
    torch.testing.assert_close(f(4 * eye), 2 * eye)
    with pytest.raises(
        torch.linalg.LinAlgError, match="as if each matrix could be factored, and one could not"
    ):
        f(-eye)
    torch.testing.assert_close(f(9 * eye), 3 * eye)


def test_in_a_program_of_the_users_a_failed_factorization_is_nan():
    class Factor(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.eye(3))

        def forward(self):
            return factor(self.matrix)

    apply, params, state = bridge.function(Factor())
    found = jax.jit(lambda params: apply(params, state)[0])({"matrix": -params["matrix"]})
    assert bool(jnp.isnan(found).any())


def test_other_truths_stay_unknown():
    for ask in (
        lambda x: torch.any(x > 0),
        lambda x: torch.equal(x, x + 0),
        lambda x: torch.equal(x * 2, x * 3),
        lambda x: torch.equal(x, x.flip(0)),
        lambda x: torch.any(torch.linalg.cholesky_ex(x)[0]),
        lambda x: torch.equal(torch.rand_like(x), torch.rand_like(x)),
    ):
        with pytest.raises(bridge.errors.DataDependentError):
            jit(lambda x, ask=ask: x if ask(x) else -x)(torch.eye(3))


def test_equal_computations_are_equal_unless_they_are_nan():
    @jit
    def f(x):
        return x + 1 if torch.equal((x * 2).sin(), (x * 2).sin()) else x

    x = torch.randn(4)
    torch.testing.assert_close(f(x), x + 1)
    with pytest.raises(RuntimeError, match=r"torch.equal: .* they are NaN"):
        f(torch.tensor([1.0, float("nan")]))


def exact_gp():
    """(module, its log density) of gpytorch's model as it is."""
    gpytorch = pytest.importorskip("gpytorch")

    class Model(gpytorch.models.ExactGP):
        def __init__(self, inputs, targets, likelihood):
            super().__init__(inputs, targets, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(
                self.mean_module(x), self.covar_module(x)
            )

    class Density(nn.Module):
        def __init__(self):
            super().__init__()
            likelihood = gpytorch.likelihoods.GaussianLikelihood()
            self.likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(
                likelihood, Model(INPUTS, TARGETS, likelihood).double()
            )
            self.double().train()

        def forward(self):
            return self.likelihood(self.likelihood.model(INPUTS), TARGETS)

    return Density()


def test_gpytorch_as_it_is():
    gpytorch, module = pytest.importorskip("gpytorch"), exact_gp()
    params = {name: p.detach() for name, p in module.named_parameters()}

    def f(params):
        # it compares the inputs with those of the training, which lie in the same memory
        with gpytorch.settings.debug(False):
            return functional_call(module, params, ())

    want = module()
    slopes = dict(zip(params, torch.autograd.grad(want, list(module.parameters())), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(jit(f)(params), want.detach())
        torch.testing.assert_close(jit(grad(f))(params), slopes)
        lanes = {name: torch.stack([p, p + 0.3, p - 0.2]) for name, p in params.items()}
        each = [{name: t[k] for name, t in lanes.items()} for k in range(3)]
        torch.testing.assert_close(
            jit(vmap(f))(lanes), torch.stack([functional_call(module, p, ()) for p in each])
        )
        torch.testing.assert_close(
            jit(vmap(grad(f)))(lanes)["likelihood.likelihood.noise_covar.raw_noise"],
            torch.stack(
                [jit(grad(f))(p)["likelihood.likelihood.noise_covar.raw_noise"] for p in each]
            ),
        )
        # its kernel is an autograd.Function without setup_context
        for transform in (vmap, torch.func.vmap):
            with pytest.raises(RuntimeError, match="must override the setup_context staticmethod"):
                transform(f)(lanes)
        with jax.enable_x64(True):
            apply, values, state = bridge.function(exact_gp())
            found = jax.jit(jax.vmap(jax.grad(lambda p: apply(p, state)[0])))(
                jax.tree.map(lambda x: jnp.stack([x, x]), values)
            )
            leaves = jax.tree_util.tree_flatten_with_path(found)[0]
            named = {
                jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves
            }
            assert len(named) == len(slopes)
            for name, x in named.items():
                torch.testing.assert_close(
                    torch.tensor(x.tolist(), dtype=torch.float64)[1], slopes[name]
                )
