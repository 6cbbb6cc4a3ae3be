"""Operators that make tensors, copy them or change their shape."""
