"""Special functions: error functions, the gamma family, Bessel functions,
orthogonal polynomials.
"""
