"""Times the programs of docs/jobs beside what people do today, and beside the same by hand in JAX.

    python benchmarks/jobs.py                              every job: tables
    python benchmarks/jobs.py --page                       and put each table into its page,
                                                           docs/jobs/<job>.md
    python benchmarks/jobs.py --only samplers,solvers      some of them
    python benchmarks/jobs.py --small --seconds 0          sizes of a test
    python benchmarks/jobs.py --json                       the results as JSON on stdout

A row is a task; its systems take turns, and the median counts: milliseconds of a call, or what a
call gets done in a second. In a turn, a call of less than a tenth of a second is made twice, and
the second counts. The first call, with tracing and compiling, is a column of its own. What
needs a library that is not installed (pyro-ppl, torchdiffeq, mace-torch, peft) is left out, and so
is a system that fails, which is said. Numbers are compared with those of the task's first system.
Results are written to benchmarks/results/, a file for each job and machine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import linen
from readme import describe, keep
from run import milliseconds, parser_of, say, slug
from torch import nn

import bridge
from torchfunc_jax._machine import machine

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs" / "jobs"
sys.path.insert(0, str(DOCS))

import environments  # noqa: E402
import force_fields  # noqa: E402
import populations  # noqa: E402
import samplers  # noqa: E402
import solvers  # noqa: E402
import surrogates  # noqa: E402


class Task(NamedTuple):
    """A row of a table.

    Attributes:
        name: what is computed.
        unit: "ms", the time of a call, or what of it is counted per second.
        systems: name -> a function that prepares the system, and returns a call of it without
            arguments. The call returns, when it is done, (count, numbers): how much was done, and
            numbers to compare, or None.
        tolerance: of these numbers, relative to the largest.
    """

    name: str
    unit: str
    systems: dict[str, Callable[[], Callable[[], tuple[float, Any]]]]
    tolerance: float = 1e-3


Call = Callable[[], tuple[float, Any]]


def compiled(function: Callable[..., Any], *args: Any) -> Call:
    """A call of a JAX function with these arguments, by a program."""
    program = jax.jit(function)
    return lambda: (1, jax.block_until_ready(program(*args)))


def arrays(tree: Any) -> Any:
    return jax.tree.map(lambda t: jnp.asarray(t.detach().numpy()), tree)


# -- samplers --------------------------------------------------------------------------------------
def sampling(small: bool) -> list[Task]:
    """Effective samples per second of the coordinate that has fewest, warm-up included; four
    chains.
    """
    warmup, draws, chains = (20, 20, 2) if small else (300, 500, 4)

    def pyro(module: nn.Module) -> Call:
        """One chain after another, in this process."""
        from pyro.infer import MCMC, NUTS

        params = dict(module.named_parameters())
        potential = lambda values: -torch.func.functional_call(module, values)
        start = {name: p.detach().clone() for name, p in params.items()}

        def call() -> tuple[float, None]:
            found = []
            for _ in range(chains):
                sampler = MCMC(
                    NUTS(potential_fn=potential),
                    num_samples=draws,
                    warmup_steps=warmup,
                    initial_params=start,
                    disable_progbar=True,
                )
                sampler.run()
                found.append(sampler.get_samples())
            return samplers.effective(
                {name: np.stack([x[name].numpy() for x in found]) for name in params}
            ), None

        return call

    def ours(make: Callable[..., Any], module: nn.Module) -> Call:
        sample, seeds = make(module, chains, warmup, draws), iter(range(10**6))
        return lambda: (samplers.effective(jax.device_get(sample(next(seeds)))), None)

    def by_hand(module: samplers.Logistic) -> Call:
        x, y = arrays((module.inputs, module.labels))

        def potential(at: Any) -> jax.Array:
            logits = x @ at["weight"] + at["bias"]
            likelihood = (
                y * jax.nn.log_sigmoid(logits) + (1 - y) * jax.nn.log_sigmoid(-logits)
            ).sum()
            return (at["weight"] ** 2).sum() / 8 + at["bias"] ** 2 / 8 - likelihood

        start = arrays(dict(module.named_parameters()))
        sample, seeds = (
            samplers.numpyro_nuts(potential, start, chains, warmup, draws),
            iter(range(10**6)),
        )
        return lambda: (samplers.effective(jax.device_get(sample(next(seeds)))), None)

    def systems(module: nn.Module) -> dict[str, Callable[[], Call]]:
        return {
            "Pyro's NUTS": lambda: pyro(module),
            "BlackJAX, the torch module": lambda: ours(samplers.with_blackjax, module),
            "NumPyro, the torch module": lambda: ours(samplers.with_numpyro, module),
        }

    logistic, process = (
        samplers.logistic_data(200, features=3),
        samplers.process_data(30, torch.float32),
    )
    return [
        Task(
            "logistic regression, 200 rows",
            "effective samples",
            {**systems(logistic), "NumPyro, by hand in JAX": lambda: by_hand(logistic)},
        ),
        Task("Gaussian process, 30 points", "effective samples", systems(process)),
    ]


# -- solvers ---------------------------------------------------------------------------------------
def solving(small: bool) -> list[Task]:
    """The loss of 16 solutions and its gradient by the field's parameters."""
    starts, times, wanted = solvers.spirals(*((2, 3) if small else (16, 20)))
    torch.manual_seed(0)
    field = solvers.Field()

    def theirs() -> Call:
        from torchdiffeq import odeint

        begin, at, ends = (torch.tensor(np.asarray(x)) for x in (starts, times, wanted))
        params = list(field.parameters())

        def call() -> Any:
            found = odeint(field, begin, at, rtol=1e-6, atol=1e-6).transpose(0, 1)
            loss = (found - ends).square().mean()
            return 1, [
                np.asarray(loss.detach()),
                *[g.numpy() for g in torch.autograd.grad(loss, params)],
            ]

        return call

    def loss(solve: Callable[..., Any]) -> Callable[..., Any]:
        def value(params: Any) -> Any:
            found = jax.vmap(lambda start: solvers.solution(solve, params, {}, start, times))(
                starts
            )
            return ((found - wanted) ** 2).mean()

        def both(params: Any) -> list[Any]:
            value_, gradient = jax.value_and_grad(value)(params)
            return [value_, *[gradient[name] for name, _ in field.named_parameters()]]

        return both

    def ours() -> Call:
        apply, params, _ = bridge.function(field)
        return compiled(loss(apply), params)

    def by_hand() -> Call:
        def apply(p: Any, state: Any, t: Any, y: Any) -> Any:
            hidden = jnp.tanh(p["layers.0.weight"] @ y**3 + p["layers.0.bias"])
            return p["layers.2.weight"] @ hidden + p["layers.2.bias"], state

        return compiled(loss(apply), bridge.params(field))

    systems = {
        "torchdiffeq": theirs,
        "diffrax, the torch module": ours,
        "diffrax, by hand in JAX": by_hand,
    }
    return [Task("16 starts, loss and gradient", "ms", systems, 1e-2)]


# -- environments ----------------------------------------------------------------------------------
class FlaxPolicy(linen.Module):
    """``environments.Policy`` in Flax; its BatchNorm counts nothing."""

    @linen.compact
    def __call__(self, x: jax.Array, training: bool) -> Any:
        x = linen.BatchNorm(
            use_running_average=not training, momentum=0.99, use_bias=False, use_scale=False
        )(x)
        actor, critic = (
            linen.Sequential(
                [linen.Dense(64), linen.tanh, linen.Dense(64), linen.tanh, linen.Dense(n)]
            )
            for n in (2, 1)
        )
        return actor(x), critic(x)[:, 0]


def flax_agent() -> environments.Agent:
    policy = FlaxPolicy()

    def init(key: jax.Array) -> Any:
        found = policy.init(key, jnp.zeros((1, 4)), False)
        return found["params"], found["batch_stats"]

    def act(params: Any, state: Any, x: jax.Array) -> Any:
        _, state = policy.apply(
            {"params": params, "batch_stats": state}, x, True, mutable=["batch_stats"]
        )
        logits, values = policy.apply({"params": params, **state}, x, False)
        return logits, values, state["batch_stats"]

    def loss(params: Any, state: Any, batch: environments.Batch) -> jax.Array:
        logits, values = policy.apply(
            {"params": params, "batch_stats": state}, batch.observations, False
        )
        logs = jax.nn.log_softmax(logits)
        ratio = jnp.exp(
            jnp.take_along_axis(logs, batch.actions[:, None], 1)[:, 0] - batch.log_probs
        )
        gain = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std(ddof=1) + 1e-8)
        clipped = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()
        return (
            -clipped
            + 0.5 * ((values - batch.returns) ** 2).mean()
            + 0.01 * (jnp.exp(logs) * logs).sum(-1).mean()
        )

    return environments.Agent(init, act, loss)


def torch_loop(settings: environments.Settings) -> Call:
    """One seed of the same in PyTorch alone: the environments are a batch of tensors."""

    def move(state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, v, angle, spin = state.unbind(1)
        push = (torch.where(action == 1, 10.0, -10.0) + 0.05 * spin**2 * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * push) / (
            0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1)
        )
        state = state + 0.02 * torch.stack(
            [v, push - 0.05 * turn * angle.cos() / 1.1, spin, turn], 1
        )
        fallen = (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 12 * torch.pi / 180)
        return torch.where(
            fallen[:, None], torch.rand_like(state) * 0.1 - 0.05, state
        ), fallen.float()

    def call() -> tuple[float, None]:
        policy = environments.Policy()
        optimizer = torch.optim.Adam(policy.parameters(), settings.rate)
        places = torch.rand(settings.environments, 4) * 0.1 - 0.05
        for _ in range(settings.updates):
            rows: list[Any] = []
            with torch.no_grad():
                for _ in range(settings.steps):
                    policy.train()(places)
                    logits, values = policy.eval()(places)
                    actions = torch.distributions.Categorical(logits=logits, validate_args=False)
                    action = actions.sample()
                    after, fallen = move(places, action)
                    rows.append((places, action, actions.log_prob(action), values, fallen))
                    places = after
                observations, actions_, log_probs, values, fallen = (
                    torch.stack(x) for x in zip(*rows, strict=True)
                )
                following, later, advantages = (
                    policy(places)[1],
                    torch.zeros(settings.environments),
                    [],
                )
                for value, end in zip(values.flip(0), fallen.flip(0), strict=True):
                    later = (
                        1
                        + settings.discount * (1 - end) * (following + settings.trace * later)
                        - value
                    )
                    following = value
                    advantages.append(later)
                gain = torch.stack(advantages[::-1])
            flat = [
                x.flatten(0, 1) for x in (observations, actions_, log_probs, gain, gain + values)
            ]
            for _ in range(settings.epochs):
                for part in torch.randperm(len(flat[0])).view(settings.parts, -1):
                    optimizer.zero_grad()
                    environments.loss(
                        policy, environments.Batch(*[x[part] for x in flat])
                    ).backward()  # type: ignore[no-untyped-call]
                    nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
                    optimizer.step()
        return settings.updates * settings.steps * settings.environments, None

    return call


def playing(small: bool) -> list[Task]:
    """PPO on the cart and pole: steps of an environment per second, training included."""
    settings = (
        environments.Settings(updates=1, environments=2, steps=4, parts=2, epochs=1)
        if small
        else environments.Settings(updates=10)
    )
    seeds = 2 if small else 16

    def training(agent: environments.Agent) -> Call:
        program = jax.jit(jax.vmap(lambda key: environments.train(agent, settings, key)[1]))
        count = seeds * settings.updates * settings.steps * settings.environments

        def call() -> tuple[float, None]:
            jax.block_until_ready(program(jax.random.split(jax.random.key(0), seeds)))
            return count, None

        return call

    return [
        Task(
            "PPO, 16 seeds at once (PyTorch: one)",
            "steps",
            {
                "PyTorch": lambda: torch_loop(settings),
                "JAX, the torch policy": lambda: training(
                    environments.torch_agent(environments.Policy())
                ),
                "JAX, a Flax policy": lambda: training(flax_agent()),
            },
        )
    ]


# -- force fields ----------------------------------------------------------------------------------
def schnet_by_hand(module: nn.Module) -> Callable[..., jax.Array]:
    """``energy(positions, strain)`` of ``force_fields.SchNet``, written in JAX."""
    p, depth = arrays(dict(module.state_dict())), len(module.layers)
    sender, receiver = p["edges"]

    def linear(x: jax.Array, name: str) -> jax.Array:
        return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0.0)

    def network(x: jax.Array, name: str) -> jax.Array:
        return linear(jax.nn.softplus(linear(x, f"{name}.0")), f"{name}.2")

    def energy(positions: jax.Array, strain: jax.Array) -> jax.Array:
        positions = positions + positions @ (strain + strain.T) / 2
        apart = positions[sender] - positions[receiver]
        distances = jnp.sqrt((apart**2).sum(1))
        radial = jnp.exp(-4 * (distances[:, None] - p["centers"]) ** 2)
        near = jnp.where(
            distances < module.cutoff, 0.5 * (jnp.cos(jnp.pi * distances / module.cutoff) + 1), 0.0
        )
        features = p["embedding.weight"][p["species"]]
        for name in (f"layers.{k}" for k in range(depth)):
            messages = linear(features, f"{name}.before")[sender]
            messages = messages * network(radial, f"{name}.filter") * near[:, None]
            mixed = jnp.zeros_like(features).at[receiver].add(messages)
            features = features + network(mixed, f"{name}.after")
        return network(features, "energies").sum()

    return energy


def forces(small: bool) -> list[Task]:
    """Ethanol, in float64."""
    molecule = force_fields.ethanol()

    def schnet() -> nn.Module:
        torch.manual_seed(0)
        return force_fields.SchNet(
            molecule.species, molecule.edges, *((4, 4, 1) if small else ())
        ).double()

    def mace() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            torch.manual_seed(0)
            return force_fields.Mace(molecule.species, molecule.edges, 2 if small else 16)
        finally:
            torch.set_default_dtype(before)

    def torch_forces(make: Callable[[], nn.Module]) -> Call:
        module = make()

        def call() -> Any:
            x, strain = (
                molecule.positions.clone().requires_grad_(),
                torch.zeros(3, 3, dtype=torch.float64, requires_grad=True),
            )
            energy = module(x, strain)
            slope, virial = torch.autograd.grad(energy, (x, strain))
            return 1, [energy.detach().numpy(), -slope.numpy(), virial.numpy()]

        return call

    def torch_hessian(make: Callable[[], nn.Module], vectorize: bool) -> Call:
        module = make()
        return lambda: (
            1,
            torch.autograd.functional.hessian(
                module, molecule.positions, vectorize=vectorize
            ).numpy(),
        )

    def in_jax(energy: Callable[..., jax.Array], what: Callable[..., Any]) -> Call:
        positions = jnp.asarray(molecule.positions.numpy())
        return compiled(lambda x: jax.tree.leaves(what(energy, x)), positions)

    def ours(make: Callable[[], nn.Module], what: Callable[..., Any]) -> Call:
        return in_jax(force_fields.energy_of(make()), what)

    def by_hand(what: Callable[..., Any]) -> dict[str, Callable[[], Call]]:
        return {"JAX, by hand": lambda: in_jax(schnet_by_hand(schnet()), what)}

    tasks = []
    for name, make in {"SchNet": schnet, "MACE": mace}.items():
        hand = by_hand if make is schnet else lambda what: {}
        tasks += [
            Task(
                f"{name}, energy, forces and virial",
                "ms",
                {
                    "PyTorch": lambda make=make: torch_forces(make),
                    "JAX, the torch module": lambda make=make: ours(make, force_fields.properties),
                    **hand(force_fields.properties),
                },
                1e-10,
            ),
            Task(
                f"{name}, Hessian",
                "ms",
                {
                    "PyTorch": lambda make=make: torch_hessian(make, False),
                    "PyTorch, vectorize=True": lambda make=make: torch_hessian(make, True),
                    "JAX, the torch module": lambda make=make: ours(make, force_fields.hessian),
                    **hand(force_fields.hessian),
                },
                1e-10,
            ),
        ]
    return tasks


# -- surrogates ------------------------------------------------------------------------------------
def simulating(small: bool) -> list[Task]:
    """The loss of 8 simulations of 50 steps, and its gradient by the network's parameters."""
    data, steps = surrogates.starts(*((2, 4) if small else (8, 32))), 3 if small else 50
    ends = jax.vmap(lambda start: surrogates.simulate(surrogates.by_formula, start, 0.1, steps))(
        data
    )
    torch.manual_seed(0)
    module = surrogates.Reaction()

    def theirs() -> Call:
        start, wanted = torch.tensor(np.asarray(data)), torch.tensor(np.asarray(ends))
        rate = lambda u: 0.1 * (u.roll(1, 1) - 2 * u + u.roll(-1, 1)) + module(u)

        def call() -> Any:
            u = start
            for _ in range(steps):
                u = u + 0.02 * rate(u + 0.01 * rate(u))
            loss = (u - wanted).square().mean()
            return 1, [
                loss.detach().numpy(),
                *[g.numpy() for g in torch.autograd.grad(loss, list(module.parameters()))],
            ]

        return call

    def loss(reaction: Callable[..., Any]) -> Callable[..., Any]:
        def value(params: Any) -> jax.Array:
            run = lambda start: surrogates.simulate(
                lambda u: reaction(params, u), start, 0.1, steps
            )
            return ((jax.vmap(run)(data) - ends) ** 2).mean()

        def both(params: Any) -> list[Any]:
            value_, gradient = jax.value_and_grad(value)(params)
            return [value_, *[gradient[name] for name, _ in module.named_parameters()]]

        return both

    def ours() -> Call:
        apply, params, state = bridge.function(module)
        return compiled(loss(lambda params, u: apply(params, state, u)[0]), params)

    def by_hand() -> Call:
        def reaction(p: Any, u: jax.Array) -> jax.Array:
            x = u[..., None]
            for k in (0, 2, 4):
                x = x @ p[f"layers.{k}.weight"].T + p[f"layers.{k}.bias"]
                x = jnp.tanh(x) if k < 4 else x
            return x[..., 0]

        return compiled(loss(reaction), bridge.params(module))

    systems = {"PyTorch": theirs, "JAX, the torch module": ours, "JAX, by hand": by_hand}
    return [Task("8 simulations of 50 steps, loss and gradient", "ms", systems)]


# -- populations -----------------------------------------------------------------------------------
def adapting(small: bool) -> list[Task]:
    """A step of Adam of 32 LoRA adapters on a base of two layers of 512, each adapter on 64 rows of
    its own.
    """
    members, rows, hidden = (2, 2, 8) if small else (32, 64, 512)
    inputs, labels = populations.batches(members, rows)

    def made() -> list[nn.Module]:
        torch.manual_seed(0)
        return populations.adapters(populations.Base(hidden=hidden), members)

    def theirs() -> Call:
        modules = made()
        optimizers = [
            torch.optim.Adam([p for p in module.parameters() if p.requires_grad], 1e-3)
            for module in modules
        ]

        def call() -> Any:
            for k, module in enumerate(modules):
                optimizers[k].zero_grad()
                nn.functional.cross_entropy(module(inputs[k]), labels[k]).backward()
                optimizers[k].step()
            return 1, None

        return call

    def ours() -> Call:
        trainer = populations.trainer_of(made(), 1e-3)
        used = trainer.compiled_step(inputs, labels, own=True).memory_analysis()
        say(
            f"  base {populations.size(trainer.state.shared)} bytes, adapters "
            f"{populations.size(trainer.state.params)}, temporary {used.temp_size_in_bytes}"
        )

        def call() -> Any:
            trainer.step(inputs, labels, own=True)
            return 1, None

        return call

    return [
        Task(
            "32 adapters, a step",
            "ms",
            {"PyTorch, one after another": theirs, "JAX, the torch modules": ours},
        )
    ]


JOBS = {
    "samplers": sampling,
    "solvers": solving,
    "environments": playing,
    "force_fields": forces,
    "surrogates": simulating,
    "populations": adapting,
}


def distance(found: Any, truth: Any) -> float:
    """The largest difference, relative to the largest number of its array."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
    return max(
        (
            float(
                np.abs(np.asarray(a) - np.asarray(b)).max() / (np.abs(np.asarray(b)).max() + 1e-12)
            )
            for a, b in pairs
        ),
        default=0.0,
    )


def timed(call: Call) -> tuple[float, float]:
    """(count, seconds) of one call."""
    start = time.perf_counter()
    count, _ = call()
    return count, time.perf_counter() - start


def measure(task: Task, seconds: float) -> dict[str, dict[str, float]]:
    """System -> first_s, the seconds of the first call; value, in the task's unit; calls."""
    calls: dict[str, Call] = {}
    out: dict[str, dict[str, float]] = {}
    truth = None
    for name, prepare in task.systems.items():
        try:
            call = prepare()
            start = time.perf_counter()
            _, numbers = call()
            first = time.perf_counter() - start
        except Exception as error:  # one system without a result must not cost the others theirs
            say(f"  {name}: {type(error).__name__}: {str(error)[:300]}")
            continue
        truth = numbers if truth is None else truth
        if numbers is not None and distance(numbers, truth) > task.tolerance:
            say(f"  {name}: wrong by {distance(numbers, truth):.1e}")
            continue
        calls[name], out[name] = call, {"first_s": first}
    values: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds * len(calls)
    while calls and (time.perf_counter() < end or len(values[next(iter(calls))]) < 3):
        for name, call in calls.items():
            count, taken = timed(call)
            # torch's threads spin for a while after a call, and take a core from the next system
            if taken < 0.1:
                count, taken = timed(call)
            values[name].append(1e3 * taken if task.unit == "ms" else count / taken)
    for name, found in values.items():
        out[name] |= {"value": statistics.median(found), "calls": len(found)}
    return out


def table(results: dict[str, Any]) -> str:
    """The results of one job in Markdown."""
    lines = ["| | | first call | then |", "| --- | --- | ---: | ---: |"]
    for row in results["rows"]:
        unit = (
            (lambda v: f"{milliseconds(v)} ms")
            if row["unit"] == "ms"
            else lambda v, row=row: f"{v:,.0f} {row['unit']}/s"
        )
        for name, one in row["systems"].items():
            lines.append(
                f"| {row['task']} | {name} | {one['first_s']:.1f} s | {unit(one['value'])} |"
            )
    return "\n".join(
        [
            *lines,
            "",
            f"{describe(results['machine'])}. Medians. Every number is in `{results['file']}`.",
        ]
    )


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = parser_of(__doc__, JOBS, 10.0, "docs/jobs")
    parser.add_argument(
        "--small", action="store_true", help="sizes of a test, whose times say nothing"
    )
    options = parser.parse_args(argv)
    names = options.only.split(",")
    if unknown := set(names) - set(JOBS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(JOBS)}")
    where, found = machine(), []
    for name in names:
        path = options.output / f"jobs-{name.replace('_', '-')}-{slug(where)}.json"
        shown = (
            path.relative_to(HERE.parent).as_posix()
            if path.is_relative_to(HERE.parent)
            else path.name
        )
        results: dict[str, Any] = {"machine": where, "file": shown, "rows": []}
        with jax.enable_x64(name == "force_fields"), bridge.compiling.correctly():
            for task in JOBS[name](options.small):
                say(f"{name}: {task.name} ...")
                results["rows"].append(
                    {
                        "task": task.name,
                        "unit": task.unit,
                        "systems": measure(task, options.seconds),
                    }
                )
        found.append(keep("jobs", results, table(results), path, options, DOCS / f"{name}.md"))
    return found


if __name__ == "__main__":
    main()
