"""Energies, forces, virials and Hessians of torch force fields in JAX, and molecular dynamics in a
scan: a SchNet of our own, and MACE.

    python docs/jobs/force_fields.py

Everything is in float64. A force field is a module that takes positions [atoms, 3] and a strain [3,
3] and returns the energy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from torch import nn

import bridge

KELVIN = 8.617333e-5  # in electronvolts; lengths are in Angstroms, masses in daltons
FEMTOSECOND = 1 / 10.18050571  # in units of Angstrom * sqrt(dalton / electronvolt)


class Interaction(nn.Module):
    """SchNet's: features of neighbours, weighted by a network of their distance, are added up for
    each atom.
    """

    def __init__(self, width: int, basis: int) -> None:
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(basis, width), nn.Softplus(), nn.Linear(width, width))
        self.before = nn.Linear(width, width, bias=False)
        self.after = nn.Sequential(nn.Linear(width, width), nn.Softplus(), nn.Linear(width, width))

    def forward(
        self, features: torch.Tensor, edges: torch.Tensor, radial: torch.Tensor, near: torch.Tensor
    ) -> torch.Tensor:
        sender, receiver = edges
        messages = self.before(features)[sender] * self.filter(radial) * near[:, None]
        return features + self.after(torch.zeros_like(features).index_add(0, receiver, messages))


class SchNet(nn.Module):
    """The energy of a molecule, by https://arxiv.org/abs/1706.08566; species: [atoms], edges: [2,
    pairs], all pairs that may come near.
    """

    def __init__(
        self,
        species: torch.Tensor,
        edges: torch.Tensor,
        width: int = 32,
        basis: int = 16,
        layers: int = 3,
        cutoff: float = 5.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Interaction(width, basis) for _ in range(layers))
        self.energies = nn.Sequential(nn.Linear(width, width), nn.Softplus(), nn.Linear(width, 1))
        self.cutoff = cutoff
        self.register_buffer("centers", torch.linspace(0, cutoff, basis))
        self.register_buffer("species", species)
        self.register_buffer("edges", edges)

    def forward(self, positions: torch.Tensor, strain: torch.Tensor | None = None) -> torch.Tensor:
        if strain is not None:
            positions = positions + positions @ (strain + strain.T) / 2
        sender, receiver = self.edges
        distances = (positions[sender] - positions[receiver]).norm(dim=1)
        radial = torch.exp(-4 * (distances[:, None] - self.centers) ** 2)
        near = torch.where(
            distances < self.cutoff, 0.5 * (torch.cos(torch.pi * distances / self.cutoff) + 1), 0.0
        )
        features = self.embedding(self.species)
        for layer in self.layers:
            features = layer(features, self.edges, radial, near)
        return self.energies(features).sum()


class Properties(NamedTuple):
    """Of a molecule: energy [], forces [atoms, 3], virial [3, 3], the derivative of the energy by
    the strain.
    """

    energy: Any
    forces: Any
    virial: Any


def energy_of(module: nn.Module) -> Callable[..., jax.Array]:
    """``energy(positions, strain)``, for JAX, of a module as it is now."""
    apply, params, state = bridge.function(module)
    return lambda positions, strain: apply(params, state, positions, strain)[0]


def properties(energy: Callable[..., jax.Array], positions: jax.Array) -> Properties:
    value, (slope, virial) = jax.value_and_grad(energy, argnums=(0, 1))(
        positions, jnp.zeros((3, 3))
    )
    return Properties(value, -slope, virial)


def hessian(energy: Callable[..., jax.Array], positions: jax.Array) -> jax.Array:
    """The second derivatives [atoms, 3, atoms, 3] of the energy: forward over reverse, all columns
    at once.
    """
    return jax.hessian(energy)(positions, jnp.zeros((3, 3)))


def dynamics(
    energy: Callable[..., jax.Array],
    positions: jax.Array,
    masses: jax.Array,
    temperature: float,
    steps: int,
    step: float,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Velocity Verlet with a step in femtoseconds: the positions [steps, atoms, 3], and the whole
    energy [steps], which is to be kept.
    """
    step, mass = step * FEMTOSECOND, masses[:, None]
    force = lambda positions: -jax.grad(energy)(positions, jnp.zeros((3, 3)))
    velocities = jax.random.normal(key, positions.shape) * jnp.sqrt(KELVIN * temperature / mass)

    def verlet(carry: Any, _: None) -> Any:
        positions, velocities, forces = carry
        velocities = velocities + 0.5 * step * forces / mass
        positions = positions + step * velocities
        forces = force(positions)
        velocities = velocities + 0.5 * step * forces / mass
        return (positions, velocities, forces), (
            positions,
            0.5 * (mass * velocities**2).sum() + energy(positions, jnp.zeros((3, 3))),
        )

    return jax.lax.scan(verlet, (positions, velocities, force(positions)), length=steps)[1]


class Mace(nn.Module):
    """pip's MACE with the edges of one molecule, all pairs: its energy of positions [atoms, 3] and
    a strain [3, 3].
    """

    def __init__(self, species: torch.Tensor, edges: torch.Tensor, channels: int = 8) -> None:
        # before e3nn, whose files PyTorch reads only with a setting of MACE's
        from mace.modules import MACE, interaction_classes
        from e3nn import o3  # isort: skip

        super().__init__()
        known, kinds = torch.unique(species, return_inverse=True)
        block = interaction_classes["RealAgnosticResidualInteractionBlock"]
        self.model = MACE(
            r_max=5.0,
            num_bessel=8,
            num_polynomial_cutoff=5,
            max_ell=2,
            interaction_cls=block,
            interaction_cls_first=block,
            num_interactions=2,
            num_elements=len(known),
            hidden_irreps=o3.Irreps(f"{channels}x0e + {channels}x1o"),
            MLP_irreps=o3.Irreps("16x0e"),
            atomic_energies=torch.zeros(len(known), dtype=torch.float64),
            avg_num_neighbors=8,
            atomic_numbers=known.tolist(),
            correlation=2,
            gate=nn.functional.silu,
            radial_MLP=[16, 16],
        )
        self.register_buffer("attributes", nn.functional.one_hot(kinds).double())
        self.register_buffer("edges", edges)

    def forward(self, positions: torch.Tensor, strain: torch.Tensor | None = None) -> torch.Tensor:
        if strain is not None:
            positions = positions + positions @ (strain + strain.T) / 2
        count, zeros = len(positions), torch.zeros(self.edges.shape[1], 3, dtype=torch.float64)
        data = {
            "positions": positions,
            "node_attrs": self.attributes,
            "edge_index": self.edges,
            "shifts": zeros,
            "unit_shifts": zeros,
            "batch": torch.zeros(count, dtype=torch.int64),
            "ptr": torch.tensor([0, count]),
            "cell": torch.zeros(3, 3, dtype=torch.float64),
            "head": torch.zeros(1, dtype=torch.int64),
        }
        return self.model(data, compute_force=False)["energy"][0]


class Molecule(NamedTuple):
    """species, positions and masses of atoms, and all pairs of them."""

    species: torch.Tensor
    positions: torch.Tensor
    masses: torch.Tensor
    edges: torch.Tensor


def ethanol() -> Molecule:
    species = torch.tensor([6, 6, 8, 1, 1, 1, 1, 1, 1])
    positions = torch.tensor(
        [
            [-0.748, 0.015, 0.024],
            [0.558, 0.420, -0.278],
            [1.294, -0.520, 0.405],
            [-1.293, -0.202, -0.901],
            [-1.263, 0.754, 0.600],
            [-0.699, -0.934, 0.609],
            [0.716, 1.404, 0.137],
            [0.773, 0.359, -1.332],
            [1.125, -1.388, 0.014],
        ],
        dtype=torch.float64,
    )
    masses = torch.where(species == 1, 1.008, torch.where(species == 6, 12.011, 15.999)).double()
    pairs = torch.arange(9)
    sender, receiver = pairs.repeat_interleave(9), pairs.repeat(9)
    return Molecule(
        species, positions, masses, torch.stack([sender, receiver])[:, sender != receiver]
    )


def main() -> None:
    torch.manual_seed(0)
    molecule = ethanol()
    with jax.enable_x64(True), bridge.compiling.correctly():
        energy = energy_of(SchNet(molecule.species, molecule.edges).double())
        positions = jnp.asarray(molecule.positions.numpy())
        found = jax.jit(lambda x: properties(energy, x))(positions)
        print(
            f"energy {found.energy:.6f} eV, largest force {abs(found.forces).max():.4f} eV/A, "
            f"virial {jnp.trace(found.virial):.4f} eV"
        )
        values = jnp.linalg.eigvalsh(
            jax.jit(lambda x: hessian(energy, x))(positions).reshape(27, 27)
        )
        print(
            f"the Hessian has {int((abs(values) < 1e-10).sum())} eigenvalues "
            "that are zero, of the translations"
        )
        masses = jnp.asarray(molecule.masses.numpy())
        _, whole = jax.jit(lambda x, key: dynamics(energy, x, masses, 300.0, 2000, 0.5, key))(
            positions, jax.random.key(0)
        )
        print(f"a picosecond at 300 K: the energy changes by {abs(whole - whole[0]).max():.1e} eV")


if __name__ == "__main__":
    main()
