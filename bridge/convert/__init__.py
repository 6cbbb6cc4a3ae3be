"""One tensor, one dtype, one tree: from torch to JAX and back."""
