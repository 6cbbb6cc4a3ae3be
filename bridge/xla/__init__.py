"""What XLA makes of our programs: how they are written for it, compiled, found again and stored.

- ``products``: rewrites products and sums into forms that XLA computes faster, or more exactly.
- ``vector_products``, ``fusions``: the same for a program that is compiled fast.
- ``block_calls``: runs loops over equal blocks as calls of one compiled block after the other.
- ``tiers``: compiles a program fast at first, and well in a thread if it has been used for a while.
- ``executables``: finds what is compiled by what it computes.
- ``disk``: stores compiled programs in the user's cache folder for the next process.
"""
