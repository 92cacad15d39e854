"""The convolutions of a traced function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core as jex_core

from jqconv import _choice, _primitive
from jqconv._algorithm import Algorithm
from jqconv._spec import ConvSpec


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """One distinct convolution of a function, and how often it stands there.

    Parameters
    ----------
    spec : ConvSpec
        The convolution.
    algorithm : Algorithm or None
        What it will run; None where that is not chosen yet.
    pinned : bool
        Whether the caller named the algorithm.
    count : int
        How many equations are this convolution; one in a loop's body counts once.
    """

    spec: ConvSpec
    algorithm: Algorithm | None
    pinned: bool
    count: int


def convolutions(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Occurrence]:
    """Trace `fn` and return its convolutions in the order of their first appearance.

    Nothing is searched for or run: `args` may be ``jax.ShapeDtypeStruct``.
    """
    # A jitted function knows which of its arguments are static.
    trace = getattr(fn, "trace", None)
    jaxpr = trace(*args, **kwargs).jaxpr if trace else jax.make_jaxpr(fn)(*args, **kwargs)
    counts: dict[tuple[ConvSpec, Algorithm | None, bool], int] = {}
    for params in _equations(jaxpr.jaxpr):
        key = params["spec"], params["algorithm"], params["pinned"]
        counts[key] = counts.get(key, 0) + 1
    return [
        # What was chosen after this part of the function was traced and cached counts too.
        Occurrence(spec, algorithm or _choice.choose(spec), pinned, count)
        for (spec, algorithm, pinned), count in counts.items()
    ]


def _equations(jaxpr: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of every convolution of `jaxpr`, and of those inside it."""
    for equation in jaxpr.eqns:
        if equation.primitive in _primitive.PRIMITIVES.values():
            yield equation.params
            continue
        for value in equation.params.values():
            for inner in _jaxprs(value):
                yield from _equations(inner)


def _jaxprs(value: Any) -> Iterator[Any]:
    """Yield the jaxprs in a parameter: itself, or in a sequence of branches."""
    if isinstance(value, jex_core.ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, jex_core.Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _jaxprs(item)
