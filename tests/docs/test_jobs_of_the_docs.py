"""The programs of docs/jobs in small sizes: torch models in JAX's samplers, solvers, simulations,
beside PyTorch, formulas, quadrature.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import bridge

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "jobs"))

import environments  # noqa: E402
import force_fields  # noqa: E402
import populations  # noqa: E402
import samplers  # noqa: E402
import solvers  # noqa: E402
import surrogates  # noqa: E402

Tree = dict[str, Any]


def stacked(trees: list[Tree]) -> Tree:
    return {name: np.stack([np.asarray(tree[name]) for tree in trees]) for name in trees[0]}


# -- samplers --------------------------------------------------------------------------------------
def quadrature(
    module: nn.Module, ranges: dict[str, tuple[float, float]], count: int = 40
) -> dict[str, tuple[float, float]]:
    """The posterior mean and standard deviation of parameters that are numbers, from the density on
    a grid, computed by PyTorch.
    """
    axes = [torch.linspace(*ends, count, dtype=torch.float64) for ends in ranges.values()]
    points = torch.cartesian_prod(*axes)
    like = dict(module.named_parameters())
    with torch.no_grad():
        at = [
            {
                name: x.to(like[name]).reshape(like[name].shape)
                for name, x in zip(ranges, point, strict=True)
            }
            for point in points
        ]
        weights = (
            torch.stack([functional_call(module, values) for values in at]).double().softmax(0)
        )
    # the grid is wide enough
    assert (
        weights.reshape([count] * len(axes))[0].sum()
        < 1e-3
        > weights.reshape([count] * len(axes))[-1].sum()
    )
    mean = weights @ points
    deviation = (weights @ (points - mean) ** 2).sqrt()
    return {name: (m.item(), d.item()) for name, m, d in zip(ranges, mean, deviation, strict=True)}


def process() -> nn.Module:
    module = samplers.process_data(15)
    module.log_noise.requires_grad_(False).fill_(-1.0)
    return module


DENSITIES: dict[str, tuple[Callable[[], nn.Module], dict[str, tuple[float, float]]]] = {
    "logistic regression": (
        lambda: samplers.logistic_data(40),
        {"weight": (-2.0, 4.0), "bias": (-3.0, 2.0)},
    ),
    "Gaussian process": (process, {"log_length": (-2.5, 3.0), "log_scale": (-2.5, 3.0)}),
}


SAMPLERS = {"blackjax": samplers.with_blackjax, "numpyro": samplers.with_numpyro}
FAST = ("blackjax", "Gaussian process")  # the others compile for as long


@pytest.mark.parametrize(
    ("library", "density"),
    [
        pytest.param(*way, marks=[] if way == FAST else pytest.mark.slow)
        for way in itertools.product(SAMPLERS, DENSITIES)
    ],
)
def test_posteriors(library: str, density: str) -> None:
    pytest.importorskip(library)
    make, ranges = DENSITIES[density]
    module = make()
    with jax.enable_x64(next(module.parameters()).dtype == torch.float64):
        found = SAMPLERS[library](module, chains=4, warmup=200, draws=500)(0)
    assert set(found) == set(ranges)
    for name, (mean, deviation) in quadrature(module, ranges).items():
        values = np.asarray(found[name], np.float64).reshape(4, 500)
        assert abs(values.mean() - mean) < 0.2 * deviation and values.std() == pytest.approx(
            deviation, rel=0.15
        ), name
        assert values.mean(1).std() < 0.3 * deviation  # the chains agree


# -- solvers ---------------------------------------------------------------------------------------
def test_a_field_in_diffrax() -> None:
    """Of a linear field, whose solution is an exponential of its matrix: solutions of several
    starts, and the gradient of the matrix.
    """
    pytest.importorskip("diffrax")

    class Linear(nn.Linear):
        def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(y)

    field = Linear(2, 2, bias=False).double()
    starts, times = (
        torch.tensor([[1.0, 0.0], [0.5, -2.0], [3.0, 1.0]], dtype=torch.float64),
        torch.linspace(0, 2, 5, dtype=torch.float64),
    )
    exact = torch.einsum(
        "tij,bj->bti", torch.matrix_exp(times[:, None, None] * field.weight), starts
    )
    exact.sin().sum().backward()
    with jax.enable_x64(True), bridge.compiling.correctly():
        apply, params, state = bridge.function(field)

        def value(params: Tree) -> Any:
            run = lambda start: solvers.solution(
                apply, params, state, start, jnp.asarray(times.numpy()), tolerance=1e-9
            )
            found = jax.vmap(run)(jnp.asarray(starts.numpy()))
            return jnp.sin(found).sum(), found

        gradient, found = jax.jit(jax.grad(value, has_aux=True))(params)
    np.testing.assert_allclose(found, exact.detach(), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(gradient["weight"], field.weight.grad, rtol=1e-6)


@pytest.mark.slow
def test_a_field_is_learned() -> None:
    pytest.importorskip("diffrax")
    _, losses = solvers.fit(solvers.Field(), *solvers.spirals(4, 5), steps=200)
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("solve", [solvers.least_squares, solvers.with_lbfgs])
def test_residuals(solve: Callable[[nn.Module], Tree]) -> None:
    if solve is solvers.least_squares:
        pytest.importorskip("optimistix")
    with jax.enable_x64(True):
        found = solve(solvers.decays(30))
    np.testing.assert_allclose(found["amplitudes"], [2.0, 0.5], rtol=1e-4)
    np.testing.assert_allclose(np.exp(found["log_rates"]), [0.5, 4.0], rtol=1e-4)


# -- environments ----------------------------------------------------------------------------------
SMALL = environments.Settings(updates=2, environments=4, steps=6, parts=2, epochs=2)


def test_a_policy_acts_in_a_scan_as_in_torch() -> None:
    policy = environments.Policy(hidden=8)
    agent = environments.torch_agent(policy)
    params, state = agent.init(jax.random.key(0))
    observations = jax.random.normal(jax.random.key(1), (3, 5, 4)) * 3
    _, (logits, values) = jax.lax.scan(
        lambda s, x: (lambda a, b, s: (s, (a, b)))(*agent.act(params, s, x)), state, observations
    )
    bridge.load(policy, params, state)
    for t, x in enumerate(torch.tensor(np.asarray(observations))):
        policy.train()(x)
        expected = policy.eval()(x)
        for found, wanted in zip((logits[t], values[t]), expected, strict=True):
            np.testing.assert_allclose(found, wanted.detach(), rtol=1e-4, atol=1e-5)


def test_the_policys_loss_and_gradient() -> None:
    policy = environments.Policy(hidden=8).eval()
    agent = environments.torch_agent(policy)
    batch = environments.Batch(
        torch.randn(7, 4),
        torch.arange(7) % 2,
        torch.full((7,), -0.7),
        torch.randn(7),
        torch.randn(7),
    )
    value = environments.loss(policy, batch)
    value.backward()
    _, params, state = bridge.function(policy)
    arrays = jax.tree.map(lambda t: jnp.asarray(t.numpy()), batch)
    found, gradient = jax.jit(jax.value_and_grad(agent.loss))(params, state, arrays)
    np.testing.assert_allclose(found, value.detach(), rtol=1e-5)
    for name, p in policy.named_parameters():
        np.testing.assert_allclose(gradient[name], p.grad, rtol=1e-3, atol=1e-6)


class Recurrent(nn.Module):
    """Logits of an observation, and the hidden state for the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.actor = nn.LSTMCell(4, 6), nn.Linear(6, 2)

    def forward(self, observation: torch.Tensor, hidden: Any) -> Any:
        hidden = self.cell(observation, hidden)
        return self.actor(hidden[0]), hidden


def test_a_recurrent_policy_keeps_its_hidden_state_in_the_carry() -> None:
    """Each environment is a lane with a hidden state of its own, and the gradient goes back through
    time.
    """
    policy, observations = Recurrent(), torch.randn(5, 3, 4)  # steps, environments
    apply, params, state = bridge.function(policy)

    def loss(params: Any, observations: Any) -> Any:
        def step(hidden: Any, observation: Any) -> Any:
            (logits, hidden), _ = apply(params, state, observation, hidden)
            return hidden, logits

        return jax.lax.scan(step, (jnp.zeros(6), jnp.zeros(6)), observations)[1]

    lanes = jax.vmap(loss, in_axes=(None, 1), out_axes=1)
    arrays = jnp.asarray(observations.numpy())
    gradient, logits = jax.jit(
        jax.grad(lambda p: (jnp.sin(lanes(p, arrays)).sum(), lanes(p, arrays)), has_aux=True)
    )(params)
    hidden, expected = (torch.zeros(3, 6), torch.zeros(3, 6)), []
    for observation in observations:
        out, hidden = policy(observation, hidden)
        expected.append(out)
    torch.stack(expected).sin().sum().backward()
    np.testing.assert_allclose(logits, torch.stack(expected).detach(), rtol=1e-4, atol=1e-5)
    for name, p in policy.named_parameters():
        np.testing.assert_allclose(gradient[name], p.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_each_seed_is_trained_as_by_itself() -> None:
    agent = environments.torch_agent(environments.Policy(hidden=8))
    (params, state), stood = environments.train_seeds(agent, SMALL, seeds=3)
    with bridge.compiling.correctly():
        alone, one = jax.jit(lambda key: environments.train(agent, SMALL, key))(
            jax.random.split(jax.random.key(0), 3)[1]
        )
    np.testing.assert_allclose(stood[1], one)
    for lanes, single in zip(jax.tree.leaves((params, state)), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(lanes[1], single, rtol=1e-3, atol=1e-4)
    assert (np.asarray(state["normalize.num_batches_tracked"]) == 2 * SMALL.steps).all()


@pytest.mark.slow
def test_the_pole_stands_longer() -> None:
    _, stood = environments.train_seeds(
        environments.torch_agent(environments.Policy()), environments.Settings(updates=15), seeds=4
    )
    assert stood[:, 0].mean() < 40 and stood[:, -1].mean() > 150


# -- force fields ----------------------------------------------------------------------------------
def schnet(molecule: Any) -> nn.Module:
    return force_fields.SchNet(
        molecule.species, molecule.edges, width=8, basis=6, layers=2
    ).double()


def mace(molecule: Any) -> nn.Module:
    pytest.importorskip("mace")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return force_fields.Mace(molecule.species, molecule.edges, channels=4)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("make", [schnet, pytest.param(mace, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_energies_forces_virials_and_hessians(make: Callable[[Any], nn.Module]) -> None:
    molecule = force_fields.ethanol()
    module = make(molecule)
    x, strain = (
        molecule.positions.clone().requires_grad_(),
        torch.zeros(3, 3, dtype=torch.float64, requires_grad=True),
    )
    energy = module(x, strain)
    slope, virial = torch.autograd.grad(energy, (x, strain), create_graph=True)
    columns = (
        [torch.autograd.grad(s, x, retain_graph=True)[0] for s in slope.flatten()]
        if make is schnet
        else []
    )
    with jax.enable_x64(True), bridge.compiling.correctly():
        function, positions = (
            force_fields.energy_of(module),
            jnp.asarray(molecule.positions.numpy()),
        )
        found = jax.jit(lambda x: force_fields.properties(function, x))(positions)
        for ours, wanted in zip(found, (energy, -slope, virial), strict=True):
            np.testing.assert_allclose(ours, wanted.detach(), rtol=1e-11, atol=1e-12)
        if columns:
            second = jax.jit(lambda x: force_fields.hessian(function, x))(positions)
            np.testing.assert_allclose(
                second, torch.stack(columns).reshape(9, 3, 9, 3), rtol=1e-10, atol=1e-11
            )


def test_molecular_dynamics() -> None:
    """The steps are those of a loop in torch, and the energy is kept."""
    molecule, steps, step = force_fields.ethanol(), 20, 0.5 * force_fields.FEMTOSECOND
    module = schnet(molecule)
    masses, key = molecule.masses, jax.random.key(0)
    with jax.enable_x64(True), bridge.compiling.correctly():
        energy, positions = force_fields.energy_of(module), jnp.asarray(molecule.positions.numpy())
        velocities = (
            torch.tensor(np.asarray(jax.random.normal(key, (9, 3))))
            * (force_fields.KELVIN * 300 / masses[:, None]).sqrt()
        )
        path, whole = jax.jit(
            lambda x: force_fields.dynamics(
                energy, x, jnp.asarray(masses.numpy()), 300.0, steps, 0.5, key
            )
        )(positions)

    def forces(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return -torch.autograd.grad(module(x), x)[0]

    x = molecule.positions
    force = forces(x)
    for t in range(steps):
        velocities = velocities + 0.5 * step * force / masses[:, None]
        x = x + step * velocities
        force = forces(x)
        velocities = velocities + 0.5 * step * force / masses[:, None]
        np.testing.assert_allclose(path[t], x, rtol=1e-10, atol=1e-12)
    assert abs(whole - whole[0]).max() < 1e-5


# -- surrogates ------------------------------------------------------------------------------------
def by_torch(
    module: nn.Module, start: torch.Tensor, diffusion: torch.Tensor, steps: int
) -> torch.Tensor:
    rate = lambda u: diffusion * (u.roll(1) - 2 * u + u.roll(-1)) + module(u)
    for _ in range(steps):
        start = start + 0.02 * rate(start + 0.01 * rate(start))
    return start


WITHOUT_TORCH = """
import sys
import jax, numpy as np
sys.modules["torch"] = sys.modules["bridge"] = None  # an import of them would raise
loaded = np.load(sys.argv[2])
call = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read())).call
params = {name: loaded[name] for name in loaded if name not in ("start", "slope", "end")}
end, slope = jax.value_and_grad(lambda d: call(params, loaded["start"], d).std())(np.float32(0.1))
np.testing.assert_allclose(end, loaded["end"], rtol=1e-4)
np.testing.assert_allclose(slope, loaded["slope"], rtol=1e-3)
"""


def test_a_simulation_with_a_network_and_its_export(tmp_path: Path) -> None:
    """Beside a loop in torch: the end, the gradient by a constant of the simulation; and the same
    by a process that cannot import torch.
    """
    pytest.importorskip("flatbuffers")
    module, diffusion = surrogates.Reaction(hidden=4), torch.tensor(0.1, requires_grad=True)
    start = torch.tensor(np.asarray(surrogates.starts(1, 8)[0]))
    end = by_torch(module, start, diffusion, 10).std(unbiased=False)
    end.backward()
    surrogates.save(module, tmp_path / "simulation.stablehlo", places=8, steps=10)
    arrays = {name: p.detach().numpy() for name, p in module.named_parameters()}
    np.savez(
        tmp_path / "arrays.npz",
        **arrays,
        start=start.numpy(),
        end=end.detach().numpy(),
        slope=diffusion.grad.numpy(),
    )
    command = [
        sys.executable,
        "-c",
        WITHOUT_TORCH,
        str(tmp_path / "simulation.stablehlo"),
        str(tmp_path / "arrays.npz"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr


@pytest.mark.slow
def test_a_network_learns_through_a_simulation() -> None:
    _, losses = surrogates.fit(
        surrogates.Reaction(), surrogates.starts(4, 8), updates=500, steps=30
    )
    assert losses[-1] < 0.01 * losses[0]


# -- populations -----------------------------------------------------------------------------------
def test_adapters_on_one_base() -> None:
    """8 LoRA adapters of peft, trained at once for 20 steps: each as by itself in torch, and the
    base is neither copied nor changed.
    """
    pytest.importorskip("peft")
    members, rows, hidden = 8, 4, 256
    modules = populations.adapters(populations.Base(hidden=hidden), members)
    rates = np.logspace(-3, -2, members).astype(np.float32)
    inputs, labels = populations.batches(members, rows)
    trainer = populations.trainer_of(modules, rates)
    state = trainer.state
    assert all("lora" in name for name in state.params)
    assert not any("lora" in name for name in state.shared)
    used = trainer.compiled_step(inputs, labels, own=True).memory_analysis()
    base, batch = populations.size(state.shared), inputs.nbytes + labels.nbytes
    of_members = populations.size((state.params, state.optimizer))
    assert used.argument_size_in_bytes < 1.1 * (base + of_members + batch)
    # a copy for each member would take eight times as much
    assert used.temp_size_in_bytes < base
    history = torch.stack([trainer.step(inputs, labels, own=True) for _ in range(20)])
    for k, module in enumerate(modules):
        frozen = {n: p.detach().clone() for n, p in module.named_parameters() if "lora" not in n}
        optimizer = torch.optim.Adam(
            [p for p in module.parameters() if p.requires_grad], lr=float(rates[k])
        )
        for number in range(20):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(inputs[k]), labels[k])
            loss.backward()
            optimizer.step()
            assert history[number, k].item() == pytest.approx(loss.item(), rel=1e-3, abs=1e-5)
        found = trainer.ensemble[k].state_dict()
        for name, p in module.state_dict().items():
            if name in frozen:
                assert torch.equal(found[name], frozen[name])
            torch.testing.assert_close(found[name], p, rtol=1e-2, atol=2e-4)


def test_every_page_has_its_program_and_its_test() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "jobs").glob("*.md")}
    programs = {path.stem for path in (ROOT / "docs" / "jobs").glob("*.py")}
    assert pages - {"index"} == programs
    source = Path(__file__).read_text()
    assert all(
        f"{name}." in source
        and f"({name}.py)" in (ROOT / "docs" / "jobs" / f"{name}.md").read_text()
        for name in programs
    )
