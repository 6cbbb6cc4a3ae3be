"""Operators of neural networks: layers, activation functions, losses."""
