"""Matrix products, factorizations and Fourier transforms."""
