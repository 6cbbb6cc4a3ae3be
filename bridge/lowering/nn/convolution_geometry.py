"""The sizes of a convolution: image, kernel, output, stride, padding and dilation."""

from __future__ import annotations

from typing import NamedTuple


class Geometry(NamedTuple):
    """The spatial side of a convolution, one int for each dimension."""

    image: tuple[int, ...]
    kernel: tuple[int, ...]
    out: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def paddings(self) -> list[tuple[int, int]]:
        """(low, high) of each dimension of the image such that exactly ``out`` windows fit; high
        may be negative.

        For a symbolic image it is the padding itself: XLA leaves out by itself what no window
        reads.
        """
        spans = zip(
            self.image, self.kernel, self.out, self.stride, self.padding, self.dilation, strict=True
        )
        return [
            (
                p,
                p
                if not isinstance(n, int) and t == (n + 2 * p - (k - 1) * d - 1) // s + 1
                else (t - 1) * s + (k - 1) * d + 1 - n - p,
            )
            for n, k, t, s, p, d in spans
        ]
