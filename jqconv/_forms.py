"""Forms: other convolutions that compute the same numbers, some of them much faster.

cuDNN's speed hangs on details that the result does not: 129 channels cost 66 times what 128 do,
a stem of 3 channels 5 times what it could. A form rewrites a convolution step by step into one
that cuDNN likes, its *core*, with what happens to the operands before and to the result after::

    int8, bf16, fp16     as it is, by the operands' dtype
    padded64             channels padded with zeros to multiples of 16, 32, 64 or 128
    padded_c64           likewise the input channels alone
    widened              int8 values carried as bf16, exact up to 1024 products
    space_to_depth       strides turned into channels
    dense                groups turned into a kernel with zeros between them
    dense+padded64+...   several steps, in the order of application
    xla                  no core: the lax lowering

Names of steps make up an algorithm's form. The numbers are the same: zeros add nothing to an
integer sum, and every step leaves the epilogue alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jqconv._spec import ConvSpec

Operands: TypeAlias = dict[str, jax.Array]

#: Forms without a step, by the dtype that they need.
BASE_FORMS = {"int8": "int8", "bfloat16": "bf16", "float16": "fp16"}

#: Multiples that channels may be padded to.
MULTIPLES = (16, 32, 64, 128)

#: Most products of integers in int8 that a float32 accumulator sums exactly in any order.
_WIDENED_PRODUCTS = 1024

#: Most elements of a dense kernel: beyond, its zeros cost more than the groups did.
_DENSE_ELEMENTS = 2**24


@dataclasses.dataclass(frozen=True)
class Step:
    """One rewriting: the convolution after it, and what it does to operands and result."""

    spec: ConvSpec
    prepare: Callable[[Operands], Operands]
    finish: Callable[[jax.Array], jax.Array] = lambda y: y


@dataclasses.dataclass(frozen=True)
class Presentation:
    """A convolution in a form: the core that cuDNN runs, and how to get there and back."""

    core: ConvSpec
    steps: tuple[Step, ...]

    def prepare(self, operands: Operands) -> Operands:
        """Return the core's operands."""
        for step in self.steps:
            operands = step.prepare(operands)
        return operands

    def finish(self, y: jax.Array) -> jax.Array:
        """Return the convolution's result from the core's."""
        for step in reversed(self.steps):
            y = step.finish(y)
        return y


def present(spec: ConvSpec, form: str) -> Presentation:
    """Return `spec` in `form`.

    Raises
    ------
    ValueError
        If `spec` has no such form.
    """
    steps: list[Step] = []
    core = spec
    base = BASE_FORMS.get(spec.x_dtype)
    for name in [] if form == base else form.split("+"):
        step = _step(core, name, spec.products)
        if step is None:
            raise ValueError(f"form {form!r} does not fit the convolution: no step {name!r} here")
        steps.append(step)
        core = step.spec
    if core.x_dtype not in BASE_FORMS or core.x_dtype != core.w_dtype:
        raise ValueError(f"cuDNN has no form for operands of {core.x_dtype} and {core.w_dtype}")
    return Presentation(core, tuple(steps))


def forms(spec: ConvSpec, multiples: Sequence[int] = MULTIPLES) -> list[str]:
    """Return the forms of `spec`, the plainest first, without ``"xla"``.

    Channels are padded to any of `multiples`.
    """
    base = BASE_FORMS.get(spec.x_dtype)
    if base is None or spec.w_dtype != spec.x_dtype or spec.empty:
        return []
    if spec.direction != "fprop":
        return [base]
    heads: list[list[str]] = [[]]
    if spec.groups > 1:
        heads.append(["dense"])
    if spec.strides != (1, 1) and spec.x_shape[3] <= 16:
        heads.append(["space_to_depth"])
    found = []
    for head in heads:
        if head and not _fits(spec, head):
            continue
        for pad in _paddings(spec, head, multiples):
            for tail in ([], ["widened"]):
                steps = [*head, *pad, *tail]
                if _fits(spec, steps):
                    found.append("+".join(steps) or base)
    return found


def _paddings(spec: ConvSpec, head: list[str], multiples: Sequence[int]) -> list[list[str]]:
    """Return no padding and, for odd channels, each that makes another convolution."""
    core = present(spec, "+".join(head)).core if head else spec
    if core.groups > 1:
        return [[]]
    c, k = _channels(core)
    found: dict[tuple[int, int], list[str]] = {(c, k): []}
    for multiple in multiples:  # the largest names it, where several come to the same
        found[_up(c, multiple), k] = [f"padded_c{multiple}"]
        found[_up(c, multiple), _up(k, multiple)] = [f"padded{multiple}"]
    return list((found | {(c, k): []}).values())


def _fits(spec: ConvSpec, steps: list[str]) -> bool:
    try:
        present(spec, "+".join(steps) or BASE_FORMS[spec.x_dtype])
    except ValueError:
        return False
    return True


def _step(spec: ConvSpec, name: str, products: int) -> Step | None:
    """Return the step called `name` from `spec`, None where there is none such.

    `products` are those of the original: steps may add zeros, which no sum notices.
    """
    if spec.direction != "fprop":
        return None
    if name == "widened":
        return _widened(spec) if products <= _WIDENED_PRODUCTS else None
    if name == "dense":
        return _dense(spec)
    if name == "space_to_depth":
        return _space_to_depth(spec)
    for multiple in MULTIPLES:
        if name == f"padded{multiple}":
            return _padded(spec, multiple, multiple)
        if name == f"padded_c{multiple}":
            return _padded(spec, multiple, 1)
    return None


def _widened(spec: ConvSpec) -> Step | None:
    """Carry int8 as bf16, which holds each value exactly."""
    if spec.x_dtype != "int8" or spec.y_dtype == "int32":
        return None
    core = dataclasses.replace(spec, x_dtype="bfloat16", w_dtype="bfloat16")

    def prepare(operands: Operands) -> Operands:
        x, w = operands["x"], operands["w"]
        return operands | {"x": x.astype(jnp.bfloat16), "w": w.astype(jnp.bfloat16)}

    return Step(core, prepare)


def _padded(spec: ConvSpec, c_multiple: int, k_multiple: int) -> Step | None:
    """Pad input and output channels with zeros, and cut the result."""
    (c, k), (_, r, s, _) = _channels(spec), spec.w_shape
    c_to, k_to = _up(c, c_multiple), _up(k, k_multiple)
    if spec.groups > 1 or (c_to, k_to) == (c, k):
        return None
    core = _replace(spec, x_shape=(*spec.x_shape[:3], c_to), w_shape=(k_to, r, s, c_to))
    if core is None:
        return None

    def prepare(operands: Operands) -> Operands:
        wanted = core.operands
        return {name: _pad_to(operand, wanted[name][0]) for name, operand in operands.items()}

    return Step(core, prepare, lambda y: y if k == k_to else _cut_channels(y, k))


def _dense(spec: ConvSpec) -> Step | None:
    """Turn groups into one kernel over all channels, zero between different groups."""
    (c, k), (_, r, s, c_group) = _channels(spec), spec.w_shape
    if spec.groups == 1 or math.prod((k, r, s, c)) > _DENSE_ELEMENTS:
        return None
    core = _replace(spec, w_shape=(k, r, s, c), groups=1)
    if core is None:
        return None

    def prepare(operands: Operands) -> Operands:
        group_of_k = jnp.arange(k) // (k // spec.groups)
        group_of_c = jnp.arange(c) // c_group
        same = (group_of_k[:, None] == group_of_c[None])[:, None, None, :]
        w = operands["w"]
        return operands | {"w": jnp.where(same, jnp.tile(w, spec.groups), jnp.zeros((), w.dtype))}

    return Step(core, prepare)


def _space_to_depth(spec: ConvSpec) -> Step | None:
    """Turn a stride into channels: each becomes ``stride_h * stride_w`` of an unstrided image.

    The window grows with zeros to a multiple of the stride; the image is padded, and cut, to just
    what the windows read.
    """
    if spec.strides == (1, 1) or spec.dilation != (1, 1) or spec.groups > 1 or spec.empty:
        return None
    (n, h, w, c), (k, r, s, _), (_, p, q, _) = spec.x_shape, spec.w_shape, spec.y_shape
    (sh, sw), ((top, _), (left, _)) = spec.strides, spec.padding
    r_to, s_to = _up(r, sh), _up(s, sw)
    h_to, w_to = (p - 1) * sh + r_to, (q - 1) * sw + s_to
    core = _replace(
        spec,
        x_shape=(n, h_to // sh, w_to // sw, sh * sw * c),
        w_shape=(k, r_to // sh, s_to // sw, sh * sw * c),
        strides=(1, 1),
        padding=((0, 0), (0, 0)),
    )
    if core is None:
        return None

    def prepare(operands: Operands) -> Operands:
        zero = jnp.zeros((), operands["x"].dtype)
        rows, cols = (top, h_to - h - top, 0), (left, w_to - w - left, 0)
        x = lax.pad(operands["x"], zero, ((0, 0, 0), rows, cols, (0, 0, 0)))
        kernel = _pad_to(operands["w"], (k, r_to, s_to, c))
        return operands | {"x": _blocks(x, sh, sw), "w": _blocks(kernel, sh, sw)}

    return Step(core, prepare)


def _blocks(x: jax.Array, height: int, width: int) -> jax.Array:
    """Move blocks of the two spatial axes into the channels."""
    n, h, w, c = x.shape
    split = x.reshape(n, h // height, height, w // width, width, c)
    return split.transpose(0, 1, 3, 2, 4, 5).reshape(n, h // height, w // width, -1)


def _pad_to(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Pad every axis at its end with zeros."""
    if x.shape == tuple(shape):
        return x
    if x.dtype.itemsize == 1 and x.shape[-1] % 4 == 0 and shape[-1] % 4 == 0:
        return _as_bytes(_pad_to(_as_words(x), (*shape[:-1], shape[-1] // 4)), x.dtype)
    return jnp.pad(x, [(0, to - n) for n, to in zip(x.shape, shape, strict=True)])


def _cut_channels(y: jax.Array, channels: int) -> jax.Array:
    if y.dtype.itemsize == 1 and y.shape[-1] % 4 == 0 and channels % 4 == 0:
        return _as_bytes(_as_words(y)[..., : channels // 4], y.dtype)
    return y[..., :channels]


# XLA moves what it pads and cuts element by element: four bytes at a time are twice as fast.


def _as_words(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 4), jnp.int32)


def _as_bytes(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    split = lax.bitcast_convert_type(words, dtype)
    return split.reshape(*words.shape[:-1], -1)


def _replace(spec: ConvSpec, **changes: object) -> ConvSpec | None:
    """Return the changed spec; None where it is none, having too many elements or products."""
    try:
        return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]
    except ValueError:
        return None


def _channels(spec: ConvSpec) -> tuple[int, int]:
    return spec.x_shape[3], spec.w_shape[0]


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def named(spec: ConvSpec, operands: Iterable[jax.Array]) -> Operands:
    """Return the operands of `spec`, given in its order, by name."""
    return dict(zip(spec.operands, operands, strict=True))


def in_order(spec: ConvSpec, operands: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Return the operands of `spec`, given by name, in its order."""
    return [operands[name] for name in spec.operands]
