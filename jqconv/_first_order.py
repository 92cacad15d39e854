"""A mark on what can be differentiated once.

Straight-through derivatives live in custom rules, and JAX differentiates those rules in turn by
tracing the forward one, where rounding cuts every path: a second derivative would come out as a
silent zero. The forward rules therefore pass their result through this mark, which refuses.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

first_order_p = Primitive("first_order")


def first_order(result: jax.Array, *sources: jax.Array) -> jax.Array:
    """Return `result`; differentiating it for any of `sources` raises TypeError.

    It costs nothing: it lowers to `result` alone.
    """
    marked: jax.Array = first_order_p.bind(result, *sources)
    return marked


def _batch(operands: Any, dims: Any) -> tuple[jax.Array, Any]:
    # The sources may be mapped over other axes than the result, which they do not enter.
    return first_order_p.bind(*operands), dims[0]


def _refuse(primals: Any, tangents: Any) -> NoReturn:
    raise TypeError(
        "jqconv has first derivatives in reverse mode only (jax.grad, jax.vjp, once): rounding "
        "is passed straight through, which has no second derivative"
    )


first_order_p.def_impl(lambda result, *_: result)
first_order_p.def_abstract_eval(lambda result, *_: result)
mlir.register_lowering(first_order_p, lambda ctx, result, *_: [result])
batching.primitive_batchers[first_order_p] = _batch
ad.primitive_jvps[first_order_p] = _refuse
