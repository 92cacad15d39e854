"""The layer: a float convolution that learns how to be an int8 one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.nnx.nn import linear as nnx_linear
from jax.typing import DTypeLike

from jqconv import _reference
from jqconv._algorithm import AlgorithmLike, ConvAlgorithms
from jqconv._conv import as_grad_dtype, conv2d
from jqconv._epilogue import activate_and_quantize
from jqconv._qtensor import QTensor, magnitude
from jqconv._spec import Activation, as_padding, as_pair
from jqconv.flax._frozen import as_floats_or_codes, flat, float_dtype, freezing, steps, unflat
from jqconv.flax._observers import ObserverLike, as_observer, kernel_scale
from jqconv.flax._state import Quant, StepSize, scale_of, set_scale

Mode: TypeAlias = Literal["float", "observe", "train", "compare"]
Output: TypeAlias = Literal["float", "int8"]


class QConv(nnx.Conv):
    """A 2-D convolution that runs in int8: `flax.nnx.Conv` with activation, residual and scales.

    Takes the arguments of `flax.nnx.Conv`, whose parameters and meaning it has, so that it loads
    that layer's checkpoints. What it computes hangs on `mode`, which the functions of
    :mod:`jqconv.flax` set for a whole model:

    ``"float"``
        ``activation(norm(conv(x) + bias) + residual)`` in floating point, as it is made.
    ``"observe"``
        Likewise, and statistics of input and output are collected (:func:`calibrate`).
    ``"train"``
        The same quantized, through :func:`jqconv.conv2d`: quantization-aware training, and the
        numbers that the frozen layer computes.
    ``"compare"``
        In float, and the error that quantization would make here is measured
        (:func:`sensitivity`).

    Parameters
    ----------
    in_features, out_features : int
        Channels.
    kernel_size : pair of int
        Height and width.
    strides, kernel_dilation : int or pair of int, default 1
        For height and width.
    padding : str, int or pairs, default "SAME"
        ``"SAME"``, ``"VALID"``, an int, or one int or pair for each of height and width.
    feature_group_count : int, default 1
        Groups.
    use_bias : bool, default True
        Whether there is a bias.
    dtype, param_dtype, precision, kernel_init, bias_init, rngs, kernel_metadata, bias_metadata
        As for `flax.nnx.Conv`. `precision` is that of the float modes.
    input_dilation, mask, conv_general_dilated, promote_dtype, preferred_element_type
        Of `flax.nnx.Conv`; only their defaults are supported.
    activation : str or (str, float), optional
        Fused into the kernel; see :func:`jqconv.qconv2d`.
    norm : flax.nnx.Module, optional
        A BatchNorm between the convolution and the residual. It trains as anywhere, unfused;
        :func:`fold_batch_norm` folds it into kernel and bias, which freezing needs.
    output : {"float", "int8"}, default "float"
        Whether the quantized modes return a float array or a QTensor, for the next layer in int8.
    observer : str or Observer, default "mse"
        How scales of input and output are made in calibration: ``"absmax"``,
        ``"moving_average"``, ``"percentile"``, ``"mse"``, or an Observer with its options.
    kernel_observer : str or Observer, default "absmax"
        Likewise for the kernel.
    per_channel : bool, default True
        Whether each output channel's kernel has a scale of its own.
    learned_scales : bool, default False
        Whether scales are parameters that training changes (learned step sizes, through their
        logarithms; see :class:`StepSize`).
    grad_dtype : dtype, default bfloat16
        What the backward convolutions, and the cotangents that reach them, are carried in.
    algorithm : optional
        As for :func:`jqconv.conv2d`.

    Raises
    ------
    ValueError
        For what it does not do: other ranks than two spatial axes, input dilation, masks,
        circular, reflecting or causal padding, functions of one's own.

    Examples
    --------
    >>> layer = QConv(8, 16, (3, 3), activation="relu", rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((1, 4, 4, 8))).shape
    (1, 4, 4, 16)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: int | Sequence[int] | None = 1,
        *,
        padding: Any = "SAME",
        input_dilation: int | Sequence[int] | None = 1,
        kernel_dilation: int | Sequence[int] | None = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask: jax.Array | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        precision: Any = None,
        kernel_init: Any = nnx_linear.default_kernel_init,
        bias_init: Any = nnx_linear.default_bias_init,
        conv_general_dilated: Callable[..., Any] = jax.lax.conv_general_dilated,
        promote_dtype: Any = dtypes.promote_dtype,
        preferred_element_type: Any = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        activation: str | tuple[str, float] | None = None,
        norm: nnx.Module | None = None,
        output: Output = "float",
        observer: ObserverLike = "mse",
        kernel_observer: ObserverLike = "absmax",
        per_channel: bool = True,
        learned_scales: bool = False,
        grad_dtype: DTypeLike = jnp.bfloat16,
        algorithm: AlgorithmLike = None,
    ) -> None:
        _check_supported(
            kernel_size,
            padding,
            input_dilation=(input_dilation, (None, 1, (1, 1), [1, 1])),
            mask=(mask, (None,)),
            conv_general_dilated=(conv_general_dilated, (jax.lax.conv_general_dilated,)),
            promote_dtype=(promote_dtype, (dtypes.promote_dtype,)),
            preferred_element_type=(preferred_element_type, (None,)),
        )
        _check_groups(in_features, out_features, feature_group_count)
        _check_geometry(kernel_size, strides, padding, kernel_dilation)
        _check_norm(norm, out_features)
        ConvAlgorithms.parse(algorithm)  # raises if it is none
        if output not in get_args(Output):
            raise ValueError(f"output={output!r} must be one of {', '.join(get_args(Output))}")
        super().__init__(
            in_features,
            out_features,
            _as_tuples(kernel_size),
            _as_tuples(strides),
            padding=_as_tuples(padding),
            kernel_dilation=_as_tuples(kernel_dilation),
            feature_group_count=feature_group_count,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.mode: Mode = "float"
        self.activation = Activation.parse(activation)
        self.norm = nnx.data(norm)
        self.output = output
        self.observer = as_observer(observer)
        self.kernel_observer = as_observer(kernel_observer)
        self.per_channel = per_channel
        self.grad_dtype = as_grad_dtype(grad_dtype)
        self.algorithm = algorithm
        scale = StepSize if learned_scales else Quant
        self.x_scale, self.out_scale = scale(jnp.ones(())), scale(jnp.ones(()))
        self.kernel_scale = scale(jnp.ones((out_features,) if per_channel else ()))
        for variable in (self.x_scale, self.out_scale, self.kernel_scale):
            set_scale(variable, jnp.ones(variable.shape))
        self.x_seen = Quant(self.observer.init())
        self.out_seen = Quant(self.observer.init())
        self.largest = Quant(jnp.zeros(2))  # magnitudes of input and output
        self.sqnr = Quant(jnp.zeros(2))  # sums of squares, of output and error

    def __call__(
        self,
        inputs: QTensor | jax.Array,
        out_sharding: Any = None,
        *,
        residual: QTensor | jax.Array | None = None,
    ) -> Any:
        """Convolve.

        Parameters
        ----------
        inputs : QTensor or Array
            Of shape ``(..., H, W, C)`` with any number of leading axes.
        out_sharding : optional
            As for `flax.nnx.Conv`, in the float modes.
        residual : QTensor or Array, optional
            Of the output's shape, added before the activation.

        Returns
        -------
        QTensor or Array
            A QTensor in the quantized modes with ``output="int8"``.
        """
        check_mode(self.mode)
        if hasattr(out_sharding, "dtype"):
            raise TypeError("the second argument is out_sharding; a residual goes by its name")
        inputs = as_floats_or_codes(inputs)
        if residual is not None:
            _check_residual(residual, inputs)
        model = freezing.get()
        if model is None and self.mode != "train":
            return self._in_float(inputs, residual, out_sharding)
        if out_sharding is not None:
            raise ValueError("out_sharding is not supported by a quantized convolution")
        x, r = flat(inputs), None if residual is None else flat(residual)
        y = self._quantized(x, r) if model is None else model.freeze(self, x, r)
        return unflat(y, inputs.shape[:-3])

    # The modes.

    def _in_float(self, inputs: Any, residual: Any, out_sharding: Any) -> jax.Array:
        x = _as_float(inputs)
        v = self._before_activation(super().__call__(x, out_sharding=out_sharding), residual)
        y = _reference.activate(self.activation, v)
        if self.mode == "observe":
            self._observe(x, y)
        if self.mode == "compare":
            self._compare(x, residual, y)
        return y

    def _before_activation(self, v: jax.Array, residual: Any) -> jax.Array:
        """Return what stands between the convolution and the activation, in float."""
        if self.norm is not None:
            v = self.norm(v)
        if residual is not None:
            if residual.shape != v.shape:
                raise ValueError(
                    f"residual has shape {tuple(residual.shape)}, expected that of the output, "
                    f"{v.shape}: broadcast it"
                )
            v = v + _as_float(residual).astype(v.dtype)
        return v

    def _observe(self, x: jax.Array, y: jax.Array) -> None:
        x, y = jax.lax.stop_gradient((x, y))
        self.x_seen[...] = self.observer.update(self.x_seen[...], x)
        self.out_seen[...] = self.observer.update(self.out_seen[...], y)
        # No observer need tell zeros from nothing, or keep a NaN: this does.
        magnitudes = jnp.stack([magnitude(x), magnitude(y)])
        self.largest[...] = jnp.maximum(self.largest[...], magnitudes)

    def _compare(self, x: jax.Array, residual: Any, y: jax.Array) -> None:
        q = self._quantized(flat(x), None if residual is None else flat(residual))
        # In steps of the output: the squares of small or large values would leave float32.
        step = scale_of(self.out_scale)
        y, q = (a.astype(jnp.float32) / step for a in (y, _as_float(unflat(q, x.shape[:-3]))))
        squares = [jnp.sum(jnp.square(a)) for a in (y, q - y)]
        self.sqnr[...] = self.sqnr[...] + jnp.stack(squares)

    def _quantized(self, x: QTensor | jax.Array, residual: Any) -> QTensor | jax.Array:
        out_scale = scale_of(self.out_scale) if self.output == "int8" else None
        if self.norm is None:
            return self._conv2d(
                x, residual=residual, out_scale=out_scale, activation=self.activation
            )
        v = self._before_activation(jnp.asarray(self._conv2d(x)), residual)
        if out_scale is None:
            return _reference.activate(self.activation, v)
        codes, view = activate_and_quantize(self.activation, v, out_scale)
        return QTensor(codes, out_scale, fq=view)

    def _conv2d(self, x: QTensor | jax.Array, **epilogue: Any) -> QTensor | jax.Array:
        is_float = epilogue.get("out_scale") is None
        return conv2d(
            x,
            self.kernel[...].astype(jnp.float32),
            None if self.bias is None else self.bias[...],
            x_scale=None if isinstance(x, QTensor) else scale_of(self.x_scale),
            w_scale=scale_of(self.kernel_scale),
            strides=steps(self.strides),
            padding=self.padding,  # type: ignore[arg-type]  # checked when the layer was made
            dilation=steps(self.kernel_dilation),
            groups=self.feature_group_count,
            out_dtype=float_dtype(self, x) if is_float else None,
            grad_dtype=self.grad_dtype,
            algorithm=self.algorithm,
            **epilogue,
        )

    # Calibration.

    def forget(self) -> None:
        """Forget what was observed."""
        self.x_seen[...] = self.observer.init()
        self.out_seen[...] = self.observer.init()
        self.largest[...] = jnp.zeros(2)

    @property
    def has_scales(self) -> bool:
        """Whether the scales are others than those that the layer is made with."""
        scales = self.x_scale, self.kernel_scale, self.out_scale
        return any(bool(jnp.any(scale_of(scale) != 1)) for scale in scales)

    def set_scales(self) -> None:
        """Make scales of what was observed, and of the kernel as it is now."""
        set_scale(self.x_scale, self.observer.scale(self.x_seen[...]))
        set_scale(self.out_scale, self.observer.scale(self.out_seen[...]))
        kernel = self.kernel[...].astype(jnp.float32)
        of_kernel = kernel_scale(kernel, self.kernel_observer, per_channel=self.per_channel)
        set_scale(self.kernel_scale, of_kernel)

    @classmethod
    def from_conv(cls, conv: nnx.Conv, **options: Any) -> QConv:
        """Return a layer with the parameters of a float one, the very variables.

        Parameters
        ----------
        conv : flax.nnx.Conv
            The float layer.
        **options
            Those of quantization, such as `output` or `observer`.

        Raises
        ------
        ValueError
            If `conv` does what a QConv does not.
        """
        if type(conv) is not nnx.Conv:
            raise ValueError(
                f"a {type(conv).__name__} is no plain nnx.Conv: what it computes is its own"
            )
        if conv.kernel.ndim != 2 + len(conv.kernel_size):
            raise ValueError(
                f"its kernel of shape {conv.kernel.shape} holds several layers, stacked by "
                "nnx.vmap: use a list of layers"
            )
        given = {
            name: getattr(conv, name)
            for name in (
                "padding",
                "input_dilation",
                "kernel_dilation",
                "feature_group_count",
                "use_bias",
                "mask",
                "dtype",
                "param_dtype",
                "precision",
                "conv_general_dilated",
                "promote_dtype",
                "preferred_element_type",
            )
        }
        layer = cls(
            conv.in_features,
            conv.out_features,
            conv.kernel_size,
            conv.strides,
            # Made only to be replaced: nothing random, nothing computed.
            kernel_init=nnx.initializers.zeros_init(),
            rngs=nnx.Rngs(0),
            **given,
            **options,
        )
        layer.kernel, layer.bias = conv.kernel, conv.bias
        return layer


def _as_tuples(value: Any) -> Any:
    """Return lists as tuples: what describes a model is hashed."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def check_mode(mode: str) -> None:
    """Refuse what is no mode of a QConv."""
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r} must be one of {', '.join(get_args(Mode))}")


def _check_supported(kernel_size: Any, padding: Any, **given: tuple[Any, tuple[Any, ...]]) -> None:
    if isinstance(kernel_size, int) or len(kernel_size) != 2:
        raise ValueError(
            f"kernel_size={kernel_size!r}: QConv is two-dimensional; give (height, width), and "
            "keep flax.nnx.Conv for other ranks"
        )
    if isinstance(padding, str) and padding.upper() not in ("SAME", "VALID"):
        raise ValueError(
            f"padding={padding!r} is not supported by QConv: use 'SAME', 'VALID', ints or pairs, "
            "pad before it, or keep flax.nnx.Conv"
        )
    for name, (value, supported) in given.items():
        if not any(value is one or (one is not None and value == one) for one in supported):
            raise ValueError(f"{name} is not supported by QConv; keep flax.nnx.Conv for it")


def _check_groups(in_features: int, out_features: int, groups: int) -> None:
    if groups < 1 or in_features % groups or out_features % groups:
        raise ValueError(
            f"feature_group_count={groups} must divide in_features={in_features} and "
            f"out_features={out_features}"
        )


def _check_norm(norm: Any, out_features: int) -> None:
    if norm is not None and not isinstance(norm, nnx.Module):
        raise TypeError(f"norm must be a flax.nnx.Module, such as a BatchNorm, got {norm!r}")
    features = getattr(norm, "num_features", out_features)
    if features != out_features:
        raise ValueError(f"norm is of {features} features, expected out_features={out_features}")


def _check_geometry(kernel_size: Any, strides: Any, padding: Any, dilation: Any) -> None:
    pairs = as_pair(steps(strides), "strides", 1), as_pair(steps(dilation), "kernel_dilation", 1)
    as_padding(padding, (1, 1), as_pair(kernel_size, "kernel_size", 1), *pairs)


def _check_residual(residual: Any, inputs: Any) -> None:
    kind = getattr(residual, "dtype", None)
    if kind is None or not (isinstance(residual, QTensor) or jnp.issubdtype(kind, jnp.floating)):
        raise TypeError(
            "residual must be a float array or a QTensor, got "
            + (type(residual).__name__ if kind is None else f"an array of {kind}")
        )
    if len(residual.shape) != len(inputs.shape):
        raise ValueError(
            f"residual has shape {tuple(residual.shape)} and inputs {tuple(inputs.shape)}: it "
            "must have the output's shape; broadcast it"
        )


def _as_float(x: QTensor | jax.Array) -> jax.Array:
    return x.dequantize() if isinstance(x, QTensor) else jnp.asarray(x)
