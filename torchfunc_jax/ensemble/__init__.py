"""Ensembles of torch models on one device or many."""
from torchfunc_jax.ensemble.processes import LOST, ProcessError, initialize, launch

__all__ = ["LOST", "ProcessError", "initialize", "launch"]
