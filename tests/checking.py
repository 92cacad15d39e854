"""Comparisons that say what differs, and by how much, before they fail."""

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqconv


@contextlib.contextmanager
def refused(kind, *words):
    """The block raises this kind of error, and the message holds every word."""
    with pytest.raises(kind) as caught:
        yield
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"the message lacks {missing}: {caught.value}"


def run_python(*arguments, **environment):
    """Run Python in another process, on the jqconv that is being tested.

    Python looks in the working folder first. In a checkout that is the sources, which hold no
    extension; so the process works where this one's jqconv lies.
    """
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=pathlib.Path(jqconv.__file__).parents[1],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


MOVED_FRACTION = 1e-4  # of int8 elements may move by one where a float32 rounding meets a tie


@dataclasses.dataclass(frozen=True)
class Moved:
    """How far integer results lie from the oracle's."""

    count: int
    size: int
    furthest: int

    @property
    def fraction(self) -> float:
        return self.count / max(self.size, 1)


def moved(actual, expected) -> Moved:
    difference = np.abs(_values(actual) - _values(expected))
    return Moved(int((difference > 0).sum()), difference.size, int(difference.max(initial=0)))


def assert_same_codes(actual, expected, dtype="int8"):
    """Bit for bit."""
    _assert_form(actual, expected, dtype)
    distance = moved(actual, expected)
    assert distance.count == 0, (
        f"{distance.count} of {distance.size} codes differ, by up to {distance.furthest}"
    )


def assert_close_codes(actual, expected, dtype="int8"):
    """At most one step apart, on fewer than MOVED_FRACTION of the elements."""
    _assert_form(actual, expected, dtype)
    distance = moved(actual, expected)
    assert distance.furthest <= 1, (
        f"codes differ by up to {distance.furthest} ({distance.count} of {distance.size})"
    )
    assert distance.fraction < MOVED_FRACTION, (
        f"{distance.count} of {distance.size} codes moved by one"
    )


def ulps(actual, expected, magnitude) -> float:
    """The worst error in roundings: the output type's of the value, float32's of the terms."""
    if not np.size(expected):
        return 0.0
    unit = _epsilon(actual.dtype) * np.abs(expected) + _epsilon(np.float32) * np.asarray(magnitude)
    error = np.abs(_values(actual) - expected)
    return float(
        np.max(np.where(error == 0, 0, error / np.maximum(unit, np.finfo(np.float32).tiny)))
    )


def assert_within_ulps(actual, expected, magnitude, limit, dtype="float32"):
    _assert_form(actual, expected, dtype)
    assert np.isfinite(_values(actual)).all(), "the result has values that are not finite"
    worst = ulps(actual, expected, magnitude)
    assert worst <= limit, f"off by {worst:.2f} ulp, the limit is {limit}"


def relative_error(actual, expected) -> float:
    """||actual - expected|| / ||expected||"""
    actual, expected = _values(actual), _values(expected)
    size = np.linalg.norm(expected)
    return (
        float(np.linalg.norm(actual - expected) / size) if size else float(np.linalg.norm(actual))
    )


def assert_relative(actual, expected, limit, what="gradient"):
    assert np.shape(actual) == np.shape(expected), (
        f"{what}: shape {np.shape(actual)}, not {np.shape(expected)}"
    )
    error = relative_error(actual, expected)
    assert error < limit, f"{what}: relative error {error:.2e}, the limit is {limit}"


def _assert_form(actual, expected, dtype):
    assert actual.dtype == jnp.dtype(dtype), f"dtype {actual.dtype}, not {dtype}"
    assert actual.shape == np.shape(expected), f"shape {actual.shape}, not {np.shape(expected)}"


def _epsilon(dtype) -> float:
    return float(jnp.finfo(dtype).eps)


def _values(a) -> np.ndarray:
    return np.asarray(a).astype(np.float64)


def equations_of(jaxpr):
    """Every equation of a jaxpr and of the jaxprs that its equations hold."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from equations_of(inner)


def _is_jaxpr(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
