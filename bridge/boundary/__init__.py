"""One call of a transform: arguments cross in, results and writes cross out, and torch's autograd
differentiates through it.
"""
