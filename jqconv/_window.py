"""Windows over height and width: what a pooling layer sees, and where its gradient goes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jqconv._qtensor import CODE_RANGE
from jqconv._spec import Padding, Pair, as_padding, as_pair, output_size

#: Most taps of a window whose largest element is looked for tap by tap in the backward pass.
_FEW_TAPS = 16


@dataclasses.dataclass(frozen=True)
class Window:
    """Where the windows over the height and width of ``(..., H, W, C)`` lie."""

    size: Pair
    shape: Pair
    strides: Pair
    padding: Padding

    @classmethod
    def over(cls, x_shape: tuple[int, ...], shape: Any, strides: Any, padding: Any) -> Self:
        """Return the windows that a user describes."""
        if len(x_shape) < 3:
            raise ValueError(f"x has shape {x_shape}, expected (..., H, W, C)")
        size = x_shape[-3], x_shape[-2]
        shape = as_pair(shape, "window_shape", 1)
        strides = (1, 1) if strides is None else as_pair(strides, "strides", 1)
        return cls(size, shape, strides, as_padding(padding, size, shape, strides, (1, 1)))

    def maximum(self, x: ArrayLike) -> jax.Array:
        array = jnp.asarray(x)
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        lowest = -np.inf if floating else CODE_RANGE[array.dtype.name][0]
        return self._reduce(array, lowest, lax.max)

    def routed_maximum(self, x: jax.Array) -> jax.Array:
        """Return the same of floats, with a derivative that is fast where windows are small.

        XLA's own fills a tensor with zeros and scatters into it.
        """
        few = max(math.prod(self.shape), math.prod(self.strides)) <= _FEW_TAPS
        return _routed_maximum(self, x) if few else self.maximum(x)

    def total(self, x: ArrayLike) -> jax.Array:
        return self._reduce(jnp.asarray(x), 0, lax.add)

    def average(self, x: ArrayLike, *, count_include_pad: bool) -> jax.Array:
        array = jnp.asarray(x)
        total = self.total(array.astype(jnp.float32) if array.dtype.itemsize < 4 else array)
        counts = jnp.asarray(self.counts(count_include_pad, total.ndim), total.dtype)
        return (total / counts).astype(array.dtype)

    def counts(self, count_include_pad: bool, rank: int) -> np.ndarray:
        """Return how many elements each window has, ready to meet an array of `rank`."""
        if count_include_pad:
            return np.asarray(math.prod(self.shape))
        by_axis = map(_covered, self.size, self.shape, self.strides, self.padding)
        counts = np.multiply.outer(*by_axis)[..., None]
        return counts.reshape((1,) * (rank - 3) + counts.shape)

    def check_covered(self) -> None:
        """Refuse windows that lie wholly in the padding."""
        if not self.counts(False, 3).all():
            raise ValueError(
                f"padding={self.padding} puts windows of {self.shape} beside the {self.size} "
                "elements of x, where there is no code to return; pad by less than the window"
            )

    def winners(self, x: jax.Array) -> jax.Array:
        """Return which tap of every window is the first to see the largest of its elements."""
        leading = ((0, 0),) * (x.ndim - 3)
        x = jnp.pad(x, (*leading, *self.padding, (0, 0)), constant_values=-np.inf)
        largest, winner = jnp.asarray(-np.inf, x.dtype), jnp.asarray(0, jnp.int8)
        for tap, position in enumerate(self._taps()):
            rows, columns = map(self._seen, (0, 1), position)
            seen = x[..., rows, columns, :]
            winner = jnp.where(seen > largest, jnp.int8(tap), winner)
            largest = jnp.maximum(seen, largest)
        return winner

    def route(self, winner: jax.Array, ct: jax.Array) -> jax.Array:
        """Return the cotangent of x: at each window's winner that of the window.

        By what is left of a position on dividing by the stride: positions that are alike in that
        lie under the same taps, and neighbours under neighbouring windows.
        """
        grid = jnp.stack(
            [
                jnp.stack([self._routed(winner, ct, (r, c)) for c in range(self.strides[1])], -2)
                for r in range(self.strides[0])
            ],
            -4,
        )
        *leading, m, s, n, t, channels = grid.shape
        height, width = self.size
        return grid.reshape(*leading, m * s, n * t, channels)[..., :height, :width, :]

    def _routed(self, winner: jax.Array, ct: jax.Array, rest: Pair) -> jax.Array:
        """Return the cotangent of every position that leaves `rest` on dividing by the strides."""
        zero = jnp.zeros((), ct.dtype)
        shape = [self._strides_in_x(axis) for axis in (0, 1)]
        total = jnp.zeros((*ct.shape[:-3], *shape, ct.shape[-1]), ct.dtype)
        for tap, position in enumerate(self._taps()):
            rows, columns = map(self._places, (0, 1), rest, position)
            if rows and columns:
                leading = [(0, 0, 0)] * (ct.ndim - 3)
                seen = jnp.where(winner == tap, ct, zero)
                total += lax.pad(seen, zero, [*leading, rows, columns, (0, 0, 0)])
        return total

    def _places(self, axis: int, rest: int, position: int) -> tuple[int, int, int] | None:
        """Return the padding that puts windows where they see such positions through a tap.

        None where they see none.
        """
        window, remainder = divmod(rest + self.padding[axis][0] - position, self.strides[axis])
        if remainder:
            return None
        return -window, self._strides_in_x(axis) + window - self.windows[axis], 0

    def _strides_in_x(self, axis: int) -> int:
        return -(-self.size[axis] // self.strides[axis])

    @property
    def windows(self) -> Pair:
        """How many windows there are along height and width."""
        rows, columns = map(output_size, self.size, self.shape, self.strides, self.padding, (1, 1))
        return rows, columns

    def _taps(self) -> Iterator[Pair]:
        rows, columns = map(range, self.shape)
        return itertools.product(rows, columns)

    def _seen(self, axis: int, position: int) -> slice:
        """Return what all windows see of the padded axis through a tap."""
        last = position + (self.windows[axis] - 1) * self.strides[axis]
        return slice(position, max(last + 1, 0), self.strides[axis])

    def _reduce(self, x: jax.Array, init: float, operation: Callable[..., Any]) -> jax.Array:
        leading = (1,) * (x.ndim - 3)
        return lax.reduce_window(
            x,
            np.asarray(init, x.dtype),
            operation,
            window_dimensions=(*leading, *self.shape, 1),
            window_strides=(*leading, *self.strides, 1),
            padding=(*((0, 0) for _ in leading), *self.padding, (0, 0)),
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _routed_maximum(window: Window, x: jax.Array) -> jax.Array:
    return window.maximum(x)


def _routed_maximum_fwd(window: Window, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return window.maximum(x), window.winners(x)


def _routed_maximum_bwd(window: Window, winner: jax.Array, ct: jax.Array) -> tuple[jax.Array]:
    # The barrier keeps XLA from finding the winner of every window anew for each of its taps.
    return (window.route(lax.optimization_barrier(winner), ct),)


_routed_maximum.defvjp(_routed_maximum_fwd, _routed_maximum_bwd)


def _covered(size: int, window: int, stride: int, pad: Pair) -> np.ndarray:
    """Return how many of `size` elements each window along an axis covers."""
    starts = np.arange(output_size(size, window, stride, pad, 1)) * stride - pad[0]
    return np.maximum(np.minimum(starts + window, size) - np.maximum(starts, 0), 0)
