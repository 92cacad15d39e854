"""From a trained float model to an int8 one: quantize, calibrate, look, freeze."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm.auto import tqdm

from jqconv._qtensor import QTensor
from jqconv._table import Table
from jqconv.flax._frozen import Freezing, Int8Conv, freezing
from jqconv.flax._qconv import Mode, QConv, check_mode
from jqconv.flax._walk import modules, name_of, replace, state_kept, watching

#: Magnitudes of activations between which float32 holds their scales, and those times a kernel's.
_SMALLEST, _LARGEST = 1e-30, 1e30

# --- reports --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """How much of each layer's output is lost to int8; see :func:`sensitivity`.

    Parameters
    ----------
    sqnr : dict of str to float
        For each layer by its path: the signal-to-quantization-noise ratio in decibels.
    """

    sqnr: dict[str, float]

    def __str__(self) -> str:
        rows = sorted(self.sqnr.items(), key=lambda item: item[1])
        return str(Table(("layer", "SQNR dB"), tuple((name, f"{db:.1f}") for name, db in rows)))

    def __repr__(self) -> str:
        return str(self)

    def plot(self, ax: Any = None) -> Any:
        """Draw the layers' ratios as bars, in the model's order.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; new axes by default.

        Returns
        -------
        matplotlib.axes.Axes
            The axes.

        Raises
        ------
        ImportError
            Without matplotlib.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("Sensitivity.plot draws with matplotlib; install it") from error
        if ax is None:
            height = 1 + 0.2 * len(self.sqnr)
            _, ax = plt.subplots(figsize=(7, height), layout="constrained")
        ax.barh(list(self.sqnr), list(self.sqnr.values()))
        ax.invert_yaxis()
        ax.set(xlabel="SQNR, dB", title="int8 against float, layer by layer")
        return ax


# --- layers ---------------------------------------------------------------------------------------


def qconvs(model: nnx.Module) -> dict[str, QConv]:
    """Return the QConv layers of `model` by path, each once."""
    return {name_of(path): layer for path, layer in modules(model) if isinstance(layer, QConv)}


def set_mode(model: nnx.Module, mode: Mode) -> None:
    """Set the mode of every QConv in `model`; see :class:`QConv`.

    Scales are not looked at: in mode ``"train"`` those of a new layer are 1.

    Raises
    ------
    ValueError
        If there is no such mode.
    """
    check_mode(mode)
    for layer in qconvs(model).values():
        layer.mode = mode


# --- the pipeline ---------------------------------------------------------------------------------


def quantize(
    model: nnx.Module,
    *example: Any,
    skip: Collection[str] | Callable[[str, nnx.Conv], bool] = (),
    first_in_float: bool = False,
    last_in_float: bool = False,
    **options: Any,
) -> Table:
    """Replace every convolution of `model` that jqconv can run by a :class:`QConv`, in place.

    Nothing is quantized yet: the layers are in float, with the parameters that they had.
    :func:`calibrate` comes next. Activations and additions around the convolutions stay where they
    are; a model that is written with QConv has them inside, and passes int8 from layer to layer.

    Parameters
    ----------
    model : flax.nnx.Module
        A model, not itself a convolution.
    *example
        Arguments of the model, which tell the first and the last convolution; not needed else.
    skip : collection of str, or callable
        Paths of convolutions to leave alone, as the report names them; or a function of the path
        and the layer that says so.
    first_in_float, last_in_float : bool, default False
        Whether to leave the first or the last convolution that the model calls alone: they are
        often the most sensitive ones.
    **options
        Those of QConv that all layers can have: `output`, `observer`, `kernel_observer`,
        `per_channel`, `learned_scales`, `grad_dtype`, `algorithm`.

    Returns
    -------
    Table
        Every convolution, what became of it, and why.

    Raises
    ------
    TypeError
        If `model` is no module, `skip` is a str, or there is no such option.
    ValueError
        If `model` is a convolution itself, a path in `skip` is no convolution of the model, an
        option is wrong, or the first or the last convolution is asked for without an example.
    """
    _check_contains(model)
    _check_options(options)
    QConv(1, 1, (1, 1), rngs=nnx.Rngs(0), **options)  # raises what is wrong with the options
    found = modules(model)
    convs: dict[str, Any] = {
        name_of(path): conv
        for path, conv in found
        if isinstance(conv, nnx.Conv | nnx.ConvTranspose) and not isinstance(conv, QConv)
    }
    if isinstance(skip, str):
        raise TypeError(f"skip={skip!r} is one str; give a collection of paths: skip=[{skip!r}]")
    if not callable(skip) and (unknown := sorted(map(str, set(skip) - convs.keys()))):
        raise ValueError(
            f"skip names {', '.join(unknown)}, but the convolutions are {', '.join(convs)}"
        )
    ends: dict[int, str] = {}
    if first_in_float or last_in_float:
        first, last = _first_and_last(model, convs.values(), example)
        ends |= {id(last): "the last convolution"} if last_in_float else {}
        ends |= {id(first): "the first convolution"} if first_in_float else {}
    wrapped = [p for p, m in found if isinstance(m, nnx.WeightNorm | nnx.SpectralNorm)]
    remade = {id(m) for path, m in found if any(path[: len(p)] == p for p in wrapped)}
    replacements, rows = {}, []
    for name, conv in convs.items():
        skipped = skip(name, conv) if callable(skip) else name in skip
        reason = "skipped as asked" if skipped else ends.get(id(conv), "")
        if not reason and id(conv) in remade:
            reason = "its kernel is made anew in every call"
        if not reason:
            try:
                replacements[id(conv)] = QConv.from_conv(conv, **options)
            except ValueError as error:
                reason = str(error)
        rows.append((name, "float" if reason else "int8", reason))
    replace(model, replacements)
    return Table(("convolution", "runs in", "why"), tuple(rows))


def _first_and_last(
    model: Any, convs: Collection[nnx.Module], example: tuple[Any, ...]
) -> tuple[nnx.Module, nnx.Module]:
    """Return the convolutions that the model calls first and last."""
    if not example:
        raise ValueError(
            "which convolution is the first, and which the last, shows when the model runs: give "
            "an example, quantize(model, images, first_in_float=True)"
        )
    with watching(convs) as calls, state_kept(model):
        model(*example)
    known = set(map(id, convs))
    if not calls or any(id(call.module) not in known for call in calls):
        raise ValueError(
            "the model calls no convolution for the example, or some inside nnx.jit, nnx.remat or "
            "nnx.scan, where it cannot be told which: name those to leave in float with skip="
        )
    return calls[0].module, calls[-1].module


def calibrate(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    call: Callable[[Any, Any], Any] | None = None,
    progress: bool = True,
) -> None:
    """Choose every scale of `model` from what passes through it, and let it compute quantized.

    The QConv layers run in float and observe; then they have scales, and are in mode ``"train"``.
    Put layers that behave differently in training, such as BatchNorm, into evaluation before.

    Parameters
    ----------
    model : flax.nnx.Module
        With QConv layers. What they observed before is forgotten.
    batches : iterable
        Inputs; a few hundred typical examples are enough.
    call : callable, optional
        How to run the model on a batch; ``model(batch)`` by default. It is compiled with
        `nnx.jit`, so a batch holds arrays and nothing else.
    progress : bool, default True
        Whether to show a progress bar on stderr.

    Raises
    ------
    TypeError
        If `batches` is one array: images, not batches of them.
    ValueError
        If the model has no QConv, there are no batches, a layer was not reached or saw only zeros,
        or values that are not finite, or beyond 1e30, reached one.
    """
    layers = _layers_of(model)
    _check_batches(batches)
    for layer in layers.values():
        layer.forget()
    bar = tqdm(batches, desc="calibrating", unit="batch", disable=not progress)
    if _run_in(model, "observe", bar, call) == 0:
        raise ValueError("there are no batches to calibrate with")
    largest = {name: np.asarray(layer.largest[...]) for name, layer in layers.items()}
    wild = [name for name, magnitudes in largest.items() if not (magnitudes <= _LARGEST).all()]
    if wild:
        raise ValueError(
            f"values that are not finite (or beyond {_LARGEST:.0e}) reached {', '.join(wild)} "
            "during calibration: find the NaN or infinity in the batches or the parameters"
        )
    idle = [name for name, (of_input, _) in largest.items() if of_input <= _SMALLEST]
    if idle:
        raise ValueError(
            f"no values reached {', '.join(idle)} during calibration (or only zeros, or next to "
            "it): call the model so that every QConv runs, or take those out"
        )
    for layer in layers.values():
        layer.set_scales()
    set_mode(model, "train")


def sensitivity(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    call: Callable[[Any, Any], Any] | None = None,
) -> Sensitivity:
    """Measure what int8 costs each layer of a calibrated model, given float inputs.

    Parameters
    ----------
    model : flax.nnx.Module
        After :func:`calibrate`, in evaluation. Its modes are as before afterwards.
    batches : iterable
        Inputs.
    call : callable, optional
        As for :func:`calibrate`.

    Returns
    -------
    Sensitivity
        Ratios in decibels: ``10 * log10(sum(y**2) / sum((q - y)**2))``, with y the layer's float
        output and q the quantized one. Prints as a table, the worst layer first.

    Raises
    ------
    TypeError
        If `batches` is one array: images, not batches of them.
    ValueError
        If the model has no QConv, a layer has no scales yet, or there are no batches.
    """
    layers = _layers_of(model)
    fresh = [name for name, layer in layers.items() if not layer.has_scales]
    if fresh:
        raise ValueError(f"{', '.join(fresh)} has no scales yet: calibrate the model first")
    _check_batches(batches)
    for layer in layers.values():
        layer.sqnr[...] = jnp.zeros(2)
    if _run_in(model, "compare", batches, call) == 0:
        raise ValueError("there are no batches to compare on (an iterator gives them only once)")
    return Sensitivity({name: _decibels(*layer.sqnr[...]) for name, layer in layers.items()})


def freeze(model: nnx.Module, *example: Any, **kwargs: Any) -> None:
    """Replace every QConv of a calibrated model by its int8 layer, in place.

    The model is run on `example`, so that each layer meets the scale of what it is given: kernels
    are then packed, and multipliers and biases computed, for good. It is run once more on other
    numbers, which no scale may depend on. No convolution is computed, nor an algorithm searched
    for.

    Parameters
    ----------
    model : flax.nnx.Module
        After :func:`calibrate`, trained further or not.
    *example, **kwargs
        Arguments of the model; one example is enough, its values do not matter.

    Raises
    ------
    TypeError
        If `model` is no module.
    ValueError
        If the model has no QConv or is one, a layer is not calibrated or not reached by the
        example, computes something of its own, is called twice with different scales, or is given
        a QTensor whose scale depends on its numbers.
    """
    _check_contains(model)
    layers = _layers_of(model)
    floating = [name for name, layer in layers.items() if layer.mode != "train"]
    if floating:
        raise ValueError(
            f"{', '.join(floating)} not in mode 'train' but {layers[floating[0]].mode!r}: "
            "calibrate the model before freezing it"
        )
    strange = [n for n, layer in layers.items() if type(layer).__call__ is not QConv.__call__]
    if strange:
        raise ValueError(
            f"{', '.join(strange)} is of a class with a __call__ of its own, which the int8 layer "
            "would not have: put what it does into a module around a QConv"
        )
    frozen: dict[int, Int8Conv] = {}
    inputs = (example, kwargs)
    for number, (args, named) in enumerate([inputs, _other_numbers(inputs)]):
        token = freezing.set(Freezing(frozen, number))
        try:
            with state_kept(model):
                model(*args, **named)
        finally:
            freezing.reset(token)
    missed = [name for name, layer in layers.items() if id(layer) not in frozen]
    if missed:
        raise ValueError(
            f"the example did not reach {', '.join(missed)}: give one that does. (A layer inside "
            "nnx.jit, nnx.remat or nnx.scan is not reached: take those off for freezing.)"
        )
    replace(model, frozen)


def _other_numbers(example: Any) -> Any:
    """Return the example with other floats in its arrays."""

    def other(leaf: Any) -> Any:
        is_array = isinstance(leaf, (jax.Array, np.ndarray)) and leaf.ndim > 0
        return leaf * 2 + 1 if is_array and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    whole = (QTensor, nnx.Module, nnx.Rngs)
    return jax.tree.map(other, example, is_leaf=lambda node: isinstance(node, whole))


def _run_in(
    model: nnx.Module,
    mode: Mode,
    batches: Iterable[Any],
    call: Callable[[Any, Any], Any] | None,
) -> int:
    """Run the model on every batch with its layers in `mode`; return how many there were.

    The layers' modes are as before afterwards.
    """
    layers = qconvs(model).values()
    before = [layer.mode for layer in layers]
    run = call or (lambda model, batch: model(batch))
    step = nnx.jit(lambda model, batch: (run(model, batch), None)[1])
    set_mode(model, mode)
    count = 0
    try:
        for batch in batches:
            step(model, batch)
            count += 1
    finally:
        for layer, mode_before in zip(layers, before, strict=True):
            layer.mode = mode_before
    return count


def _layers_of(model: nnx.Module) -> dict[str, QConv]:
    layers = qconvs(model)
    if not layers:
        if any(isinstance(module, Int8Conv) for _, module in modules(model)):
            raise ValueError("the model is frozen already")
        raise ValueError("the model has no QConv: write it with them, or call quantize first")
    stacked = [name for name, layer in layers.items() if layer.kernel.ndim != 4]
    if stacked:
        raise ValueError(
            f"{', '.join(stacked)} holds several layers, stacked by nnx.vmap, which would have to "
            "share scales: use a list of layers"
        )
    return layers


#: What `quantize` gives to every layer; the rest belongs to one.
_OPTIONS = (
    "output",
    "observer",
    "kernel_observer",
    "per_channel",
    "learned_scales",
    "grad_dtype",
    "algorithm",
)


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in ("norm", "activation"):
            raise ValueError(f"{name} belongs to one layer: write the model with QConv for it")
        if name not in _OPTIONS:
            raise TypeError(f"quantize has no option {name!r}; they are {', '.join(_OPTIONS)}")


def _check_batches(batches: Any) -> None:
    if hasattr(batches, "shape"):
        raise TypeError(
            f"batches is one array, of shape {tuple(batches.shape)}: give a list of batches, "
            "[images]"
        )


def _check_contains(model: nnx.Module) -> None:
    """Refuse a layer itself: nothing could be put in its place."""
    if isinstance(model, nnx.Conv):
        raise ValueError(
            f"the model is itself a {type(model).__name__}, whose place nothing can take: put it "
            "into a module, such as nnx.Sequential"
        )


def _decibels(signal: jax.Array, noise: jax.Array) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(float(signal) / float(noise)) if signal > 0 else -math.inf
