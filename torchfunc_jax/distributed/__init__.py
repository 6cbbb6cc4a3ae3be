"""Several processes: ``initialize`` brings them together, and ``utils`` has torch.distributed's
utilities for both frameworks.
"""

from bridge.processes import initialize
from torchfunc_jax.distributed import utils

__all__ = ["initialize", "utils"]
