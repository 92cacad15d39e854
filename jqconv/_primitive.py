"""The primitives fprop, dgrad and wgrad.

Each in one order: bind, abstract evaluation, lowerings, batching, and last the rules that refuse
differentiation (the derivatives are :mod:`jqconv._vjp`'s custom VJP).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jqconv import _algorithm, _choice, _forms, _native, _policy, _reference
from jqconv._algorithm import Algorithm
from jqconv._sharding import equally_varying
from jqconv._spec import MAX_ELEMENTS, ConvSpec

# --- bind -----------------------------------------------------------------------------------------

fprop_p = Primitive("jqconv_fprop")
dgrad_p = Primitive("jqconv_dgrad")
wgrad_p = Primitive("jqconv_wgrad")

PRIMITIVES = {"fprop": fprop_p, "dgrad": dgrad_p, "wgrad": wgrad_p}
_REFERENCES: dict[str, Callable[..., jax.Array]] = {
    "fprop": _reference.fprop,
    "dgrad": _reference.dgrad,
    "wgrad": _reference.wgrad,
}


def conv(
    spec: ConvSpec,
    algorithm: Algorithm | None,
    *operands: jax.Array,
    pinned: bool = False,
    in_place: bool = True,
) -> jax.Array:
    """Bind the primitive of ``spec.direction``.

    Parameters
    ----------
    spec : ConvSpec
        What to compute.
    algorithm : Algorithm or None
        How; None leaves it to the device that runs the program.
    *operands : Array
        Those of ``spec.operands``, in order.
    pinned : bool, default False
        Whether a device without `algorithm` is an error rather than a reason to choose again.
    in_place : bool, default True
        Whether the result may be written over a residual like it. XLA copies one that is needed
        later, so that this is for one that is not.
    """
    result: jax.Array = PRIMITIVES[spec.direction].bind(
        *equally_varying(operands),
        spec=spec,
        algorithm=algorithm,
        pinned=pinned,
        in_place=in_place and spec.operands.get("residual") == spec.result,
    )
    return result


@functools.lru_cache(maxsize=4096)
def _compiled(primitive: Primitive, **params: Any) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(primitive.bind, **params))


def _eager(
    primitive: Primitive, *operands: jax.Array, spec: ConvSpec, algorithm: Any, **params: Any
) -> jax.Array:
    if algorithm is None and not spec.empty and _runs_on_gpu(operands):
        algorithm = _choice.settle(spec)  # now, or the next call would compile what this one found
    with jax.disable_jit(False):
        return _compiled(primitive, spec=spec, algorithm=algorithm, **params)(*operands)


def _runs_on_gpu(operands: Sequence[jax.Array]) -> bool:
    devices = [d for operand in operands for d in getattr(operand, "devices", set)()]
    if not devices:  # NumPy arrays, which go where JAX's default is
        return _choice.target_gpu() is not None
    return all(device.platform == "gpu" for device in devices)


# --- abstract evaluation --------------------------------------------------------------------------


def _abstract(*avals: Any, spec: ConvSpec, **how: Any) -> Any:
    expected = spec.operands
    given = [(aval.shape, aval.dtype.name) for aval in avals]
    if given != list(expected.values()):
        raise TypeError(f"{spec.direction} takes {expected}, got {given}")
    shape, dtype = spec.result
    like = avals[0]  # for the mesh and the manual axes, which all operands share
    sharding = like.sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(shape)))
    return like.update(shape=shape, dtype=np.dtype(dtype), weak_type=False, sharding=sharding)


# --- lowerings ------------------------------------------------------------------------------------


def _reference_lowering(ctx: Any, *operands: Any, spec: ConvSpec, **how: Any) -> Any:
    """Lower to jax.lax: every backend but CUDA."""
    reference = functools.partial(_REFERENCES[spec.direction], spec)
    return mlir.lower_fun(reference, multiple_results=False)(ctx, *operands)


def _cuda_lowering(
    ctx: Any, *operands: Any, spec: ConvSpec, algorithm: Algorithm | None, **how: bool
) -> Any:
    """Lower to the native handler, or to jax.lax in floating point where cuDNN cannot run it."""
    if (
        algorithm is None
        and not spec.empty
        and not ctx.module_context.lowering_parameters.for_export
    ):
        algorithm = _choice.settle(spec)
    if _algorithm.runs_on_cudnn(spec) and not _native.is_built():
        _native.warn_missing()
    if _takes_xla_form(spec, algorithm):
        function = functools.partial(_xla_form, spec)
    else:
        function = functools.partial(_cudnn_form, spec, algorithm, **how)
    return mlir.lower_fun(function, multiple_results=False)(ctx, *operands)


def _takes_xla_form(spec: ConvSpec, algorithm: Algorithm | None) -> bool:
    if algorithm is not None and not spec.empty:
        return algorithm.form == "xla"
    return not (_native.is_built() and _algorithm.runs_on_cudnn(spec))


def _xla_form(spec: ConvSpec, *operands: jax.Array) -> jax.Array:
    return _REFERENCES[spec.direction](spec, *operands, carrier=_reference.gpu_carrier(spec))


def _cudnn_form(
    spec: ConvSpec, algorithm: Algorithm | None, *operands: jax.Array, **how: bool
) -> jax.Array:
    if algorithm is None:
        return _handler(spec, "", _policy.settings().workspace_limit, *operands, **how)
    shape = _forms.present(spec, algorithm.form)
    core, named = _algorithm.core_of(spec, algorithm)
    prepared = shape.prepare(_forms.named(spec, operands))
    y = _handler(core, str(named), named.workspace, *_forms.in_order(core, prepared), **how)
    return shape.finish(y)


def _handler(
    spec: ConvSpec,
    algorithm: str,
    workspace: int,
    *operands: jax.Array,
    pinned: bool,
    in_place: bool,
) -> jax.Array:
    """Call cuDNN for a core."""
    aliases = {list(spec.operands).index("residual"): 0} if in_place else {}
    call = jax.ffi.ffi_call(
        f"jqconv_{spec.direction}_v1",
        (
            jax.ShapeDtypeStruct(*spec.result),
            jax.ShapeDtypeStruct((max(workspace, 1),), jnp.uint8),
        ),
        input_output_aliases=aliases,
    )
    y, _ = call(*operands, spec=str(spec), algorithm=algorithm, pinned=pinned)
    return y


# --- batching -------------------------------------------------------------------------------------

#: The axes of a convolution that a mapped axis can be folded into, and where each tensor has them:
#: the batch, the output channels, the input channels. "k" is any vector of output channels.
_FOLDS: tuple[dict[str, int], ...] = ({"x": 0, "y": 0}, {"w": 0, "y": 3, "k": 0}, {"x": 3, "w": 3})

_ROLES = {"dy": "y", "residual": "y", "multiplier": "k", "bias": "k"}


def _batch(
    operands: Sequence[jax.Array],
    dims: Sequence[Any],
    *,
    spec: ConvSpec,
    algorithm: Algorithm | None,
    pinned: bool,
    in_place: bool,
) -> tuple[jax.Array, int]:
    """Run a mapped convolution as one wider one where there is such a thing, else as a loop.

    The loop is left with a kernel and its activations, or scales, mapped together: as one
    convolution that would be a grouped one, for which kernels are slow or missing.
    """
    mapped = {
        name: jnp.moveaxis(operand, dim, 0)
        for name, operand, dim in zip(spec.operands, operands, dims, strict=True)
        if dim is not None
    }
    given = dict(zip(spec.operands, operands, strict=True)) | mapped
    size = len(next(iter(mapped.values())))
    shape, dtype = spec.result
    if size == 0:
        return jnp.zeros((0, *shape), dtype), 0

    for fold in _FOLDS:
        wider = _widen(spec, fold, size)
        if wider is None or not _carried(spec, mapped) <= fold.keys():
            continue
        # The wider spec is another one: what was chosen for the old is no choice for it.
        chosen = _choice.choose(wider, algorithm if pinned else None)
        folded = [
            _fold(given[name], fold.get(_role(spec, name)), size, name in mapped)
            for name in spec.operands
        ]
        y = conv(wider, chosen, *folded, pinned=pinned, in_place=in_place)
        return _unfold(y, fold[_result_role(spec)], size)

    def one(slices: dict[str, jax.Array]) -> jax.Array:
        operands = (given | slices).values()
        return conv(spec, algorithm, *operands, pinned=pinned, in_place=in_place)

    return jax.lax.map(one, mapped), 0


def _carried(spec: ConvSpec, mapped: dict[str, jax.Array]) -> set[str]:
    """Roles that a fold has to have: those of the mapped operands and of the result."""
    return {_role(spec, name) for name in mapped} | {_result_role(spec)}


def _role(spec: ConvSpec, name: str) -> str:
    """``x``, ``w``, ``y`` or ``k``; a scalar is its own role, which no fold has."""
    scalar = spec.operands[name][0] == ()
    return name if scalar else _ROLES.get(name, name)


def _result_role(spec: ConvSpec) -> str:
    return {"fprop": "y", "dgrad": "x", "wgrad": "w"}[spec.direction]


def _widen(spec: ConvSpec, fold: dict[str, int], size: int) -> ConvSpec | None:
    """Return `spec` with the folded axis `size` times as long, or None if there is none such."""
    if spec.groups > 1 and fold is not _FOLDS[0]:
        return None  # channels of different groups would have to interleave

    def widen(shape: tuple[int, ...], axis: int | None) -> Any:
        return tuple(n * size if i == axis else n for i, n in enumerate(shape))

    y_shape = widen(spec.y_shape, fold.get("y"))
    x_shape, w_shape = widen(spec.x_shape, fold.get("x")), widen(spec.w_shape, fold.get("w"))
    if max(map(math.prod, (x_shape, w_shape, y_shape))) > MAX_ELEMENTS:
        return None
    return dataclasses.replace(spec, x_shape=x_shape, w_shape=w_shape)


def _fold(operand: jax.Array, axis: int | None, size: int, is_mapped: bool) -> jax.Array:
    """Merge the leading mapped axis into `axis`; repeat what has that axis but is not mapped."""
    if axis is None:
        return operand
    if not is_mapped:
        operand = jnp.broadcast_to(operand, (size, *operand.shape))
    moved = jnp.moveaxis(operand, 0, axis)
    return moved.reshape(
        *moved.shape[:axis], size * moved.shape[axis + 1], *moved.shape[axis + 2 :]
    )


def _unfold(y: jax.Array, axis: int, size: int) -> tuple[jax.Array, int]:
    shape = (*y.shape[:axis], size, y.shape[axis] // size, *y.shape[axis + 1 :])
    return y.reshape(shape), axis


# --- differentiation ------------------------------------------------------------------------------


def _refuse(primitive: Primitive, primals: Any, tangents: Any, **params: Any) -> NoReturn:
    raise TypeError(
        f"{primitive.name} has no derivative of its own: differentiate jqconv.conv2d, once and in "
        "reverse mode (jax.grad, jax.vjp); qconv2d is for inference"
    )


# --- register -------------------------------------------------------------------------------------

for _p in PRIMITIVES.values():
    _p.def_impl(functools.partial(_eager, _p))
    _p.def_abstract_eval(_abstract)
    mlir.register_lowering(_p, _reference_lowering)
    mlir.register_lowering(_p, _cuda_lowering, platform="cuda")
    batching.primitive_batchers[_p] = _batch
    ad.primitive_jvps[_p] = functools.partial(_refuse, _p)
