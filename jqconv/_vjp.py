"""The differentiable core of conv2d: codes, scales and float views in, codes or floats out.

A custom VJP. Its forward rule looks up the algorithms of fprop, dgrad and wgrad; they travel in
the residuals as static metadata, and the backward rule runs what it finds there. The residuals are
codes and bits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jqconv import _choice, _primitive, _reference
from jqconv._algorithm import Algorithm, ConvAlgorithms
from jqconv._epilogue import hides, slope_of_codes, step_size_grad
from jqconv._first_order import first_order
from jqconv._qtensor import CODE_RANGE, over_last, pack_mask, sum_to_scale, unpack_mask
from jqconv._residuals import keep, mark, marked
from jqconv._spec import Activation, ConvSpec, Direction


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static about one conv2d."""

    spec: ConvSpec
    algorithms: ConvAlgorithms  # those that the caller gave: pinned
    grad_dtype: str
    x_zero: int
    carries_view: bool

    @property
    def quantized(self) -> bool:
        """Whether the output is codes."""
        return self.spec.y_dtype in CODE_RANGE


class Operands(NamedTuple):
    """What conv2d can be differentiated for, and the codes. Kernels are OHWI.

    A view is None where its tensor is frozen.
    """

    x: Any
    x_scale: Any
    x_view: Any
    w: Any
    w_scale: Any
    w_view: Any
    bias: Any
    residual: Any
    residual_scale: Any
    residual_view: Any
    out_scale: Any


def _forward(
    call: Call, ops: Operands, *, in_place: bool = True
) -> tuple[jax.Array, jax.Array | None]:
    """Return the output, codes or floats, and the codes' float view where one is carried."""
    y = fprop(call.spec, call.algorithms, _fold_scales(call, ops), in_place=in_place)
    return y, y.astype(jnp.float32) * ops.out_scale if call.carries_view else None


def fprop(
    spec: ConvSpec, algorithms: ConvAlgorithms, named: dict[str, Any], **how: bool
) -> jax.Array:
    """Run `spec` on operands by name, with the algorithm given or chosen."""
    operands = [named[name] for name in spec.operands]
    algorithm = _choice.choose(spec, algorithms.fprop)
    pinned = algorithms.fprop is not None
    return _primitive.conv(spec, algorithm, *operands, pinned=pinned, **how)


def _fold_scales(call: Call, ops: Operands) -> dict[str, Any]:
    """Return fprop's operands: the output's scale folded through a homogeneous activation."""
    value = _value_operands(call, ops)
    if ops.out_scale is None:
        return value
    inverse = 1.0 / ops.out_scale
    if call.spec.out_multiplier:
        return value | {"out_multiplier": inverse}
    value["multiplier"] = value["multiplier"] * inverse
    if value["bias"] is not None:
        value["bias"] = value["bias"] * inverse
    scale = value["residual_scale"]
    value["residual_scale"] = inverse if scale is None else scale * inverse
    return value


def _value_operands(call: Call, ops: Operands) -> dict[str, Any]:
    """Return the operands of v, in real units: ``v = acc * multiplier + bias + residual * scale``.

    The zero point of x enters through the bias.
    """
    multiplier = ops.x_scale * ops.w_scale
    return {
        "x": ops.x,
        "w": ops.w,
        "multiplier": multiplier,
        "bias": with_zero_point(ops.bias, call.x_zero, ops.w, multiplier),
        "residual": ops.residual,
        "residual_scale": ops.residual_scale,
    }


def with_zero_point(bias: Any, x_zero: int, w: jax.Array, multiplier: jax.Array) -> Any:
    """Return `bias` with what the zero point of x adds, for a kernel in OHWI.

    ``-x_zero * sum(w)`` is the same for every output of a channel.
    """
    if not x_zero:
        return bias
    sums = jnp.sum(w, axis=(1, 2, 3), dtype=jnp.int32)
    correction = -multiplier * (x_zero * sums).astype(jnp.float32)
    return correction if bias is None else bias + correction


class _Saved(NamedTuple):
    """The residuals. Tensors are codes or bits; floats are scales and vectors.

    The exception is a float residual operand, kept where its scale is differentiated or v is
    recomputed. The structure depends on the call alone; see _residuals.
    """

    algorithms: ConvAlgorithms  # chosen by the forward rule, run by the backward rule; static
    wanted: jax.Array  # the operands that are differentiated, as a mark
    ops: Operands  # without views; empty where not needed
    codes: Any  # the output, if it is codes
    active: Any  # else, where a piecewise-linear activation is active, as bits


def _conv_fwd(call: Call, ops: Operands) -> tuple[Any, _Saved]:
    perturbed = frozenset(name for name, op in ops._asdict().items() if _is_perturbed(op))
    ops = Operands(*(None if op is None else op.value for op in ops))
    if perturbed and call.quantized and not call.carries_view:
        raise TypeError(
            f"differentiating conv2d for {', '.join(sorted(perturbed))} through an int8 output "
            "whose x and w are frozen codes: give x or w as a float array with its scale, or as "
            "a QTensor with a float view (quantize makes one), or leave out_scale out"
        )
    # A residual is most often the input of another layer, which keeps it for its own gradient.
    y, view = _forward(call, ops, in_place=False)
    saved = _save(call, ops, _wanted(ops, perturbed), y)
    sources = [getattr(ops, name) for name in sorted(perturbed)]
    if view is not None:
        return (y, first_order(view, *sources)), saved
    return (first_order(y, *sources), None), saved


def _is_perturbed(operand: Any) -> bool:
    """Whether an operand is differentiated; codes made from floats are marked but cannot be."""
    return (
        operand is not None
        and operand.perturbed
        and jnp.issubdtype(operand.value.dtype, jnp.floating)
    )


def _wanted(ops: Operands, perturbed: frozenset[str]) -> frozenset[str]:
    """Return the operands that get a cotangent.

    A view takes the gradient of its tensor; the scale beside it then takes none.
    """
    tensors = ("x", "w", "residual")
    viewed = {f"{name}_scale" for name in tensors if getattr(ops, f"{name}_view") is not None}
    return perturbed - viewed


def _needs(wanted: Collection[str], direction: Direction) -> bool:
    """Whether a gradient among `wanted` comes out of `direction`."""
    tensor = {"dgrad": "x", "wgrad": "w"}[direction]
    return f"{tensor}_view" in wanted or f"{tensor}_scale" in wanted


def _recomputes(call: Call, wanted: Collection[str]) -> bool:
    """Whether the backward rule needs v, the value before the activation."""
    return hides(call.spec.activation, call.quantized) or "out_scale" in wanted


def _choose(call: Call) -> ConvAlgorithms:
    """Choose the algorithms of all three directions."""
    given = call.algorithms

    def backward(direction: Direction) -> Algorithm | None:
        spec = call.spec.backward(direction, call.grad_dtype)
        return _choice.choose(spec, getattr(given, direction))

    return ConvAlgorithms(
        fprop=_choice.choose(call.spec, given.fprop),
        dgrad=backward("dgrad"),
        wgrad=backward("wgrad"),
    )


def _save(call: Call, ops: Operands, wanted: frozenset[str], y: jax.Array) -> _Saved:
    """Keep what the backward rule will read, and nothing else."""
    recomputes = _recomputes(call, wanted)
    needed = {
        "x": recomputes or _needs(wanted, "wgrad") or "x_scale" in wanted,
        "w": recomputes or _needs(wanted, "dgrad") or "w_scale" in wanted,
        "bias": recomputes,
        "residual": recomputes or "residual_scale" in wanted,
    }
    given = {name: getattr(ops, name) for name in needed}
    kept = {n: None if op is None else keep(needed[n], op) for n, op in given.items()}
    views = dict.fromkeys(("x_view", "w_view", "residual_view"))
    active = None if call.quantized else _active(call.spec.activation, y)
    return _Saved(
        algorithms=_choose(call),
        wanted=mark(wanted, Operands._fields),
        ops=ops._replace(**kept, **views),
        codes=y if call.quantized else None,
        active=None if active is None else pack_mask(active),
    )


def _active(activation: Activation | None, y: jax.Array) -> jax.Array | None:
    """Return where a piecewise-linear activation has slope 1, as its float output tells."""
    match activation and activation.name:
        case "relu":
            return y > 0
        case "relu6":
            return (y > 0) & (y < 6)
        case "leaky_relu":
            return y >= 0
    return None


def _conv_bwd(call: Call, saved: _Saved, cotangents: Any) -> tuple[Operands]:
    """Return the cotangents of the operands.

    With ``dv`` the cotangent of v, ``x̂`` and ``ŵ`` the numbers that the codes stand for::

        du = dv * w_scale                            d bias     = sum dv
        dx̂ = dgrad(du, w)                            d residual = dv * residual_scale
        dŵ = wgrad(x, du) * (x_scale / w_scale)

    Codes are exact in bf16, so the scales are applied around the convolutions; once, so that both
    read one tensor.
    """
    y_bar, view_bar = cotangents
    dy = view_bar if call.quantized else y_bar
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        return (Operands(*[None] * len(Operands._fields)),)
    dy = dy.astype(_carrier(call))
    wanted = marked(saved.wanted, Operands._fields)
    recomputes = _recomputes(call, wanted)
    late = not (call.quantized or recomputes)
    if not late:
        dy, saved = _reached(dy, saved)
    v = _recompute(call, saved.ops) if recomputes else None
    dy = dy.astype(jnp.float32)
    dv = dy * _slope(call, saved, v, dy.shape)

    du = (dv * over_last(saved.ops.w_scale, dv.ndim)).astype(call.grad_dtype)
    if late:  # so that what makes dy, a norm's derivative perhaps, makes du as well
        du, saved = _reached(du, saved)
    ops, algorithms = saved.ops, saved.algorithms
    grads: dict[str, Any] = {}
    dx = _dgrad(call, algorithms, ops, du) if _needs(wanted, "dgrad") else None
    dw = _wgrad(call, algorithms, ops, du) if _needs(wanted, "wgrad") else None
    # XLA would else run all of dgrad before it comes back for wgrad, and hold every du until then.
    dx, dw = lax.optimization_barrier((dx, dw))
    if dx is not None:
        dx = dx.astype(jnp.float32)
        grads["x_view"] = dx
        if "x_scale" in wanted:
            grads["x_scale"] = jnp.sum(dx * (ops.x.astype(jnp.float32) - call.x_zero))
    if dw is not None:
        scale = jnp.broadcast_to(ops.x_scale / ops.w_scale, dw.shape[:1])
        dw = dw.astype(jnp.float32) * scale[:, None, None, None]
        grads["w_view"] = dw
        if "w_scale" in wanted:
            terms = jnp.moveaxis(dw * ops.w.astype(jnp.float32), 0, -1)
            grads["w_scale"] = sum_to_scale(terms, ops.w_scale)
    grads["bias"] = jnp.sum(dv, axis=(0, 1, 2))
    grads["residual_view"] = dv
    if "residual" in wanted:
        scaled = dv if ops.residual_scale is None else dv * ops.residual_scale
        grads["residual"] = scaled.astype(call.spec.residual)
    if "residual_scale" in wanted:
        grads["residual_scale"] = jnp.sum(dv * ops.residual.astype(jnp.float32))
    if "out_scale" in wanted:
        grads["out_scale"] = step_size_grad(call.spec.activation, saved.codes, ops.out_scale, v, dy)
    return (Operands(*(grads[f] if f in wanted else None for f in Operands._fields)),)


def _reached(gradient: jax.Array, saved: _Saved) -> tuple[jax.Array, _Saved]:
    """Return both, the codes not to be read before `gradient` is there.

    XLA would else make the wide copies of all codes early, and hold them.
    """
    tensors = saved.ops.x, saved.ops.w, saved.codes
    gradient, (x, w, codes) = lax.optimization_barrier((gradient, tensors))
    return gradient, saved._replace(ops=saved.ops._replace(x=x, w=w), codes=codes)


def _recompute(call: Call, ops: Operands) -> jax.Array:
    """Return v, before the activation: the one tensor that is cheaper to make than to keep."""
    spec = dataclasses.replace(
        call.spec,
        y_dtype="float32",
        activation=None,
        out_multiplier=False,
        residual_scale=ops.residual_scale is not None,
    )
    return fprop(spec, ConvAlgorithms(), _value_operands(call, ops))


def _carrier(call: Call) -> str:
    """Return the dtype in which gradients come from one convolution to the next.

    That of dgrad's result, which is then read as it is; but none whose range is small.
    """
    return "float32" if call.grad_dtype == "float16" else call.grad_dtype


def _dgrad(call: Call, algorithms: ConvAlgorithms, ops: Operands, du: jax.Array) -> jax.Array:
    spec = call.spec.backward("dgrad", call.grad_dtype)
    pinned = call.algorithms.dgrad is not None
    return _primitive.conv(spec, algorithms.dgrad, du, ops.w.astype(spec.w_dtype), pinned=pinned)


def _wgrad(call: Call, algorithms: ConvAlgorithms, ops: Operands, du: jax.Array) -> jax.Array:
    spec = call.spec.backward("wgrad", call.grad_dtype)
    # At most 255 in magnitude with its zero point taken off: exact in every grad_dtype.
    x = ops.x.astype(spec.x_dtype) - jnp.asarray(call.x_zero, spec.x_dtype)
    pinned = call.algorithms.wgrad is not None
    return _primitive.conv(spec, algorithms.wgrad, x, du, pinned=pinned)


def _slope(call: Call, saved: _Saved, v: Any, shape: tuple[int, ...]) -> jax.Array | float:
    """Return ``d y / d v``, with the output's rounding passed through and its clipping as 0."""
    act = call.spec.activation
    if call.quantized:
        return slope_of_codes(act, saved.codes, saved.ops.out_scale, v)
    if act is None:
        return 1.0
    if act.smooth:
        return _reference.activation_slope(act, v)
    return jnp.where(unpack_mask(saved.active, shape), 1.0, act.negative_slope)


_fused_conv = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_fused_conv.defvjp(_conv_fwd, _conv_bwd, symbolic_zeros=True)


# As _qtensor._quantize: for jax.shard_map outside of jit, and one dispatch instead of many. Its
# trace shows the algorithms known when it was made; what runs is settled when it is lowered.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def fused_conv(call: Call, ops: Operands) -> tuple[jax.Array, jax.Array | None]:
    """Return the output, codes or floats, and the codes' float view where one is carried."""
    return _fused_conv(call, ops)
