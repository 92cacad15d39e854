"""BatchNorm folded into the convolution before it, for inference."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqconv._qtensor import QTensor, magnitude, over_last
from jqconv._table import Table
from jqconv.flax._model import qconvs
from jqconv.flax._qconv import QConv
from jqconv.flax._state import scale_of, set_scale
from jqconv.flax._walk import Watched, modules, name_of, replace, watching

#: How far the folded model may be from the model, against the largest magnitude of its output, by
#: what it computes in. (Folding itself is done in float32.)
_ROUNDING = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}


class Identity(nnx.Module):
    """What is left where a BatchNorm was folded away: returns its first argument."""

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return `x`."""
        return x


def fold_batch_norm(model: nnx.Module, *example: Any, **kwargs: Any) -> Table:
    """Fold every BatchNorm that follows a convolution into it, in place.

    With ``factor = scale / sqrt(var + epsilon)``, of the BatchNorm's scale, bias and running
    statistics::

        kernel = kernel * factor        bias = (bias - mean) * factor + norm_bias

    The `norm` of a :class:`QConv` belongs to it. Elsewhere it is found by running the model once
    which one follows which: a BatchNorm is folded where its input is the very array that a
    convolution returned, and stays where that would change what the model computes, as where the
    convolution's output goes elsewhere too.

    Parameters
    ----------
    model : flax.nnx.Module
        In evaluation (``model.eval()``), where its BatchNorms use their running averages.
    *example, **kwargs
        Arguments of the model, typical ones: what it returns for them is what folding is checked
        by, and only that. Of a model with several paths, take one that runs them all.

    Returns
    -------
    Table
        Every BatchNorm and the convolution that it went into, or why it stayed.

    Raises
    ------
    TypeError
        If `model` is no module.
    ValueError
        If a BatchNorm uses the batch's statistics, a convolution has one scale for all channels
        already, or the model returns no floats to check by for the example, NaN, or others each
        time.

    Examples
    --------
    >>> rngs = nnx.Rngs(0)
    >>> model = nnx.Sequential(nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, rngs=rngs))
    >>> model.eval()
    >>> fold_batch_norm(model, jnp.ones((1, 8, 8, 3)))
    batch norm  folded into  why
    ----------  -----------  ---
    layers.1    layers.0
    """
    named = {name_of(path): module for path, module in modules(model)}
    norms = {name: m for name, m in named.items() if isinstance(m, nnx.BatchNorm)}
    convs = {id(m): name for name, m in named.items() if isinstance(m, nnx.Conv)}
    for name, norm in norms.items():
        if not norm.use_running_average:
            raise ValueError(
                f"{name} uses the statistics of the batch; put the model into evaluation first, "
                "with model.eval()"
            )
    owners = {id(m.norm): m for m in named.values() if isinstance(m, QConv) and m.norm is not None}
    watched = [m for m in named.values() if isinstance(m, nnx.Conv | nnx.BatchNorm)]

    def run() -> Any:
        # A GPU's TF32 is coarser than the difference that is looked for.
        with jax.default_matmul_precision("highest"):
            return model(*example, **kwargs)

    with _telling(norms.values()):
        with watching(module for module in watched if id(module) not in owners) as calls:
            before = run()
        _check_comparable(before)
        found = {
            name: (owners[id(norm)], "") if id(norm) in owners else _conv_before(norm, calls)
            for name, norm in norms.items()
        }
        foldings = [_Folding(conv, norms[n]) for n, (conv, _) in found.items() if conv is not None]
        _check_scales(foldings, convs)
        rounding = _rounding(model, foldings, before, calls)
        changes = _changes(model, foldings, before, run, rounding)
    foldings = [folding for folding in foldings if id(folding.norm) not in changes]
    changes |= _changes(model, foldings, run(), run, rounding)
    for folding in foldings:
        if id(folding.norm) not in changes:
            folding.do(model)
    rows = []
    for name, (conv, why) in found.items():
        if conv is not None and (change := changes.get(id(norms[name]))) is not None:
            why, conv = _reason(change, conv.kernel.dtype), None
        rows.append((name, "" if conv is None else convs[id(conv)], why))
    return Table(("batch norm", "folded into", "why"), tuple(rows))


def _reason(change: float, kernel_dtype: Any) -> str:
    if not math.isfinite(change):
        return "a number of the folded kernel or bias would leave their dtype"
    narrow = "" if kernel_dtype.itemsize >= 4 else f" Or is it {kernel_dtype}? Fold in float32."
    return (
        "the model would compute something else: does the convolution's output go elsewhere?"
        f"{narrow} (off by {change:.1f} times what rounding does)"
    )


@contextlib.contextmanager
def _telling(norms: Collection[nnx.BatchNorm]) -> Iterator[None]:
    """Give BatchNorms numbers, for the scope, by which a wrong folding shows.

    One that was not trained multiplies by 1, or by 0, and could be folded anywhere: a model would
    fold otherwise before its checkpoint is restored than after. Here every channel is scaled, by
    turns down and up, so that a deep network keeps its magnitudes.
    """
    variables: list[Any] = [norm.var for norm in norms]
    variables += [norm.scale for norm in norms if norm.scale is not None]
    before = [variable[...] for variable in variables]
    try:
        for norm in norms:
            var = norm.var[...]
            turns = jnp.where(jnp.arange(var.shape[-1]) % 2, 0.8, 1.2)
            norm.var[...] = ((var + norm.epsilon) / turns**2 - norm.epsilon).astype(var.dtype)
            if norm.scale is not None:
                norm.scale[...] = jnp.where(norm.scale[...] == 0, 1, norm.scale[...])
        yield
    finally:
        for variable, numbers in zip(variables, before, strict=True):
            variable[...] = numbers


def _check_comparable(output: Any) -> None:
    floats = _floats(output)
    if not any(leaf.size for leaf in floats):
        raise ValueError(
            "the model returns no floats for the example, by which to check that folding changes "
            "nothing: give one of at least one image, of a model that returns logits"
        )
    if any(bool(jnp.isnan(leaf).any()) for leaf in floats):
        raise ValueError(
            "the model returns NaN for the example, by which nothing can be checked: find it in "
            "the example or the parameters"
        )


def _check_scales(foldings: Iterable[_Folding], names: Mapping[int, str]) -> None:
    for folding in foldings:
        conv = folding.conv
        if isinstance(conv, QConv) and not conv.per_channel and conv.has_scales:
            raise ValueError(
                f"{names[id(conv)]} has one scale for all channels of its kernel, which folding "
                "would make differ: fold before calibrating, or use per_channel=True"
            )


def _conv_before(norm: nnx.BatchNorm, calls: list[Watched]) -> tuple[nnx.Conv | None, str]:
    """Return the convolution that `norm` can be folded into; None and why where there is none."""
    given = [call.x for call in calls if call.module is norm]
    if not given:
        return None, "the example does not reach it, or inside nnx.jit, nnx.remat or nnx.scan"
    if len(given) != 1:
        return None, f"called {len(given)} times"
    (x,) = given
    conv = next((c.module for c in calls if c.y is x and isinstance(c.module, nnx.Conv)), None)
    if conv is None:
        return None, "its input is not a convolution's output"
    if sum(call.module is conv for call in calls) != 1:
        return None, "the convolution before it is called more than once"
    if isinstance(conv, QConv) and (conv.activation or conv.norm):
        return None, "the QConv before it has a norm or an activation of its own in between"
    if norm.axis not in (-1, x.ndim - 1):
        return None, f"it normalizes axis {norm.axis}, not the channels"
    return conv, ""


class _Folding:
    """One BatchNorm and the convolution that it goes into, and the way back."""

    def __init__(self, conv: nnx.Conv, norm: nnx.BatchNorm) -> None:
        self.conv, self.norm, self.identity = conv, norm, Identity()
        # The bias itself, which folding replaces: it may be of another layer too.
        self.kernel, self.bias, self.use_bias = conv.kernel[...], conv.bias, conv.use_bias
        self.kernel_scale = conv.kernel_scale[...] if isinstance(conv, QConv) else None
        owned = isinstance(conv, QConv) and conv.norm is norm
        self.owner: Any = conv if owned else None

    def do(self, model: nnx.Module) -> None:
        _fold(self.conv, self.norm)
        if self.owner is not None:
            self.owner.norm = None
        replace(model, {id(self.norm): self.identity})

    def undo(self, model: nnx.Module) -> None:
        conv = self.conv
        conv.kernel[...] = self.kernel
        conv.bias, conv.use_bias = self.bias, self.use_bias
        if isinstance(conv, QConv):
            conv.kernel_scale[...] = self.kernel_scale
        replace(model, {id(self.identity): self.norm})
        if self.owner is not None:
            self.owner.norm = self.norm


def _changes(
    model: nnx.Module,
    foldings: Sequence[_Folding],
    before: Any,
    run: Callable[[], Any],
    rounding: float,
) -> dict[int, float]:
    """Return by the id of its norm how far each folding that changes the model takes it.

    That is from `before`, what the model returns, in units of `rounding`. It is left as it is.
    """

    def off(*tried: _Folding) -> float:
        done = []
        try:
            for folding in tried:
                done.append(folding)
                folding.do(model)
            return _difference(before, run()) / rounding
        finally:
            for folding in reversed(done):
                folding.undo(model)

    if not foldings or off(*foldings) <= 1:
        return {}
    if not off() <= 1:
        raise ValueError(
            "the model returns something else each time, so that nothing shows whether folding "
            "changes it: put it into evaluation, with model.eval(), to turn Dropout off"
        )
    # Some convolution's output goes elsewhere too, or much is rounded: see what each one does.
    changes = {id(folding.norm): off(folding) for folding in foldings}
    return {norm: change for norm, change in changes.items() if not change <= 1}


def _fold(conv: nnx.Conv, norm: nnx.BatchNorm) -> None:
    scale = 1.0 if norm.scale is None else norm.scale[...].astype(jnp.float32)
    shift = 0.0 if norm.bias is None else norm.bias[...].astype(jnp.float32)
    factor = scale * jax.lax.rsqrt(norm.var[...].astype(jnp.float32) + norm.epsilon)
    kernel = conv.kernel[...]
    bias = jnp.zeros(()) if conv.bias is None else conv.bias[...].astype(jnp.float32)
    folded = kernel.astype(jnp.float32) * over_last(factor, kernel.ndim)
    conv.kernel[...] = folded.astype(kernel.dtype)
    if isinstance(conv, QConv) and conv.per_channel:  # its codes stay what they are, or become 0
        rescale = jnp.where(factor == 0, 1.0, jnp.abs(factor))
        set_scale(conv.kernel_scale, scale_of(conv.kernel_scale) * rescale)
    # A variable of its own: the one that there was may be kept elsewhere, to take this back.
    bias = (bias - norm.mean[...].astype(jnp.float32)) * factor + shift
    conv.bias = nnx.data(nnx.Param(bias.astype(kernel.dtype)))
    conv.use_bias = True


def _rounding(
    model: nnx.Module, foldings: Iterable[_Folding], before: Any, calls: list[Watched]
) -> float:
    """Return how far apart two ways to compute the same may be: by the coarsest dtype in it."""
    if any(layer.mode == "train" for layer in qconvs(model).values()):
        return 5e-2  # codes may move at ties
    arrays = _floats((before, [call.y for call in calls], [f.kernel for f in foldings]))
    return max(_ROUNDING.get(array.dtype.name, 5e-2) for array in arrays)


def _difference(before: Any, after: Any) -> float:
    """Return how far two outputs, trees of arrays, are apart, against the largest magnitude."""

    def of(a: jax.Array, b: jax.Array) -> float:
        finite = jnp.isfinite(a)
        a, b = (jnp.where(finite | (a != b), x.astype(jnp.float32), 0.0) for x in (a, b))
        largest, off = magnitude(jnp.where(finite, a, 0.0)), magnitude(a - b)
        return float(jnp.where(off == 0, 0.0, off / largest))

    pairs = zip(_floats(before), _floats(after), strict=True)
    return float(np.max([of(a, b) for a, b in pairs if a.size]))  # NaN where one is


def _floats(tree: Any) -> list[jax.Array]:
    """Return the float arrays of a tree, and QTensors as such."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, QTensor))
    arrays = [x.dequantize() if isinstance(x, QTensor) else x for x in leaves]
    return [jnp.asarray(x) for x in arrays if _is_float(x)]


def _is_float(x: Any) -> bool:
    return isinstance(x, float) or jnp.issubdtype(getattr(x, "dtype", int), jnp.floating)
