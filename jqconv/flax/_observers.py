"""Observers: from the values that pass by during calibration to a scale.

An observer's state is one float32 vector, so that it is saved, sharded and updated like any other
variable. Scales are symmetric: a magnitude of ``127 * scale`` gets code 127.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jqconv._qtensor import magnitude, scale_from
from jqconv._sharding import gathered

#: Bins of a histogram of magnitudes, and how many clipping points are tried for the least error.
_BINS, _CANDIDATES = 2048, 100


class Observer(abc.ABC):
    """What makes a scale of observed values."""

    @abc.abstractmethod
    def init(self) -> jax.Array:
        """Return the state of an observer that has seen nothing."""

    @abc.abstractmethod
    def update(self, state: jax.Array, x: jax.Array) -> jax.Array:
        """Return the state after `x`, a float array of any shape."""

    @abc.abstractmethod
    def limit(self, state: jax.Array) -> jax.Array:
        """Return the magnitude that is to get code 127; 0 if only zeros, or nothing, were seen."""

    def scale(self, state: jax.Array) -> jax.Array:
        """Return the scale: 1 if nothing was seen, or nothing but zeros or next to it."""
        return scale_from(self.limit(state))


@dataclasses.dataclass(frozen=True)
class AbsMax(Observer):
    """The largest magnitude ever seen: nothing is clipped."""

    def init(self) -> jax.Array:
        """Return the state of an observer that has seen nothing."""
        return jnp.zeros(1)

    def update(self, state: jax.Array, x: jax.Array) -> jax.Array:
        """Return the state after `x`."""
        return jnp.maximum(state, magnitude(x))

    def limit(self, state: jax.Array) -> jax.Array:
        """Return the largest magnitude."""
        return state[0]


@dataclasses.dataclass(frozen=True)
class MovingAverage(Observer):
    """An exponential moving average of the largest magnitude of each batch.

    Parameters
    ----------
    momentum : float, default 0.9
        The weight of what was seen before.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum!r} must be at least 0 and below 1")

    def init(self) -> jax.Array:
        """Return the state of an observer that has seen nothing: the sum and its weight."""
        return jnp.zeros(2)

    def update(self, state: jax.Array, x: jax.Array) -> jax.Array:
        """Return the state after `x`; an empty batch says nothing."""
        if not x.size:
            return state
        seen = jnp.stack([magnitude(x), jnp.ones(())])
        return self.momentum * state + (1 - self.momentum) * seen

    def limit(self, state: jax.Array) -> jax.Array:
        """Return the average, corrected for the first batches' small weight."""
        total, weight = state
        return total / jnp.where(weight > 0, weight, 1.0)


@dataclasses.dataclass(frozen=True)
class _Histogram(Observer):
    """Counts of magnitudes. The range is a power of two, and doubles where that is needed."""

    def init(self) -> jax.Array:
        """Return the state of an observer that has seen nothing: the range, and counts."""
        return jnp.zeros(1 + _BINS)

    def update(self, state: jax.Array, x: jax.Array) -> jax.Array:
        """Return the state after `x`."""
        x = gathered(x)
        before, counts = state[0], state[1:]
        after = jnp.maximum(before, _power_of_two(magnitude(x)))
        # Each bin of the old range falls into one bin of a range that is 2**n times as wide.
        ratio = jnp.where(before > 0, after / before, 1.0)
        merged = jnp.zeros(_BINS).at[(_upto(_BINS) / ratio).astype(int)].add(counts)
        place = jnp.abs(x).ravel().astype(jnp.float32) / jnp.where(after > 0, after, 1.0) * _BINS
        bins = jnp.minimum(place.astype(int), _BINS - 1)
        # Counted in integers: float32 stops counting by ones at 2**24.
        seen = jnp.zeros(_BINS, jnp.int32).at[bins].add(1)
        return jnp.concatenate([after[None], merged + seen.astype(jnp.float32)])


@dataclasses.dataclass(frozen=True)
class Percentile(_Histogram):
    """The magnitude that a percentage of all values stays below: outliers are clipped.

    Parameters
    ----------
    percent : float, default 99.99
        The percentage.
    """

    percent: float = 99.99

    def __post_init__(self) -> None:
        if not 0 < self.percent <= 100:
            raise ValueError(f"percent={self.percent!r} must be above 0 and at most 100")

    def limit(self, state: jax.Array) -> jax.Array:
        """Return the upper edge of the bin that the percentile falls into."""
        # Counted from above: beside all the small values float32 would not notice a few large ones.
        above = jnp.cumsum(jnp.append(state[1:], 0.0)[::-1])[::-1]
        total = above[0]
        index = jnp.argmax(above[1:] <= total * (1 - self.percent / 100))
        edge = state[0] * ((index.astype(jnp.float32) + 1) / _BINS)
        return jnp.where(total > 0, edge, 0.0)


@dataclasses.dataclass(frozen=True)
class MSE(_Histogram):
    """The clipping point with the least squared error of rounding and clipping together."""

    def limit(self, state: jax.Array) -> jax.Array:
        """Return the best of 100 points between a hundredth of the largest magnitude and it."""
        counts = state[1:]
        # In units of the range: squares of the values themselves could leave float32.
        edges = (_upto(_BINS) + 1) / _BINS
        centers = edges - 1 / (2 * _BINS)
        largest = jnp.max(jnp.where(counts > 0, edges, 0.0))
        limits = largest * (_upto(_CANDIDATES) + 1) / _CANDIDATES
        steps = jnp.where(limits > 0, limits / 127, 1.0)[:, None]
        codes = jnp.clip(jnp.round(centers[None] / steps), 0, 127)
        errors = jnp.sum(counts[None] * (centers[None] - codes * steps) ** 2, axis=1)
        return state[0] * limits[jnp.argmin(errors)]


ObserverLike: TypeAlias = "str | Observer"

#: Observers by name.
OBSERVERS: dict[str, type[Observer]] = {
    "absmax": AbsMax,
    "moving_average": MovingAverage,
    "percentile": Percentile,
    "mse": MSE,
}


def as_observer(observer: ObserverLike) -> Observer:
    """Return an observer given by name or as itself."""
    if isinstance(observer, Observer):
        return observer
    if not isinstance(observer, str) or observer not in OBSERVERS:
        raise ValueError(
            f"observer={observer!r} is unknown; use one of {', '.join(OBSERVERS)}, or an Observer "
            "such as Percentile(99.9)"
        )
    return OBSERVERS[observer]()


def kernel_scale(kernel: jax.Array, observer: Observer, *, per_channel: bool) -> jax.Array:
    """Return the scale of a kernel (HWIO): one for each output channel, or one.

    Parameters
    ----------
    kernel : Array
        Float, of shape ``(kh, kw, C / groups, K)``.
    observer : Observer
        What chooses it; with few values to a channel a histogram finds little to clip.
    per_channel : bool
        Whether output channels have scales of their own.

    Returns
    -------
    Array
        float32 of shape ``(K,)`` or ``()``.
    """

    def scale(values: jax.Array) -> jax.Array:
        return observer.scale(observer.update(observer.init(), values))

    return jax.vmap(scale, in_axes=-1)(kernel) if per_channel else scale(kernel)


def _upto(n: int) -> jax.Array:
    return jnp.arange(n, dtype=jnp.float32)


def _power_of_two(x: jax.Array) -> jax.Array:
    """Return the least power of two that is no less than `x`; 0 of 0."""
    # Not by exp2, which XLA rounds.
    fraction, exponent = jnp.frexp(x)
    return jnp.where(fraction == 0.5, x, jnp.ldexp(jnp.sign(x), exponent))
