"""One call of a transform: arguments cross in, results and writes cross out, torch's autograd goes back through it."""
