"""Converts tensors, dtypes and trees from torch to JAX and back."""
