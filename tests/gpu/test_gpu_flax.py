"""Frozen networks on the device: what is in memory, and that they are those of the CPU."""

import math
import re

import jax
import numpy as np
import pytest
from flax import nnx

import examples
import jqconv.flax as jf

pytestmark = pytest.mark.gpu

resnet50 = examples.load("resnet50")
IMAGES = np.asarray(resnet50.natural(jax.random.key(0), 4, 64))
CLASSES = 24


def frozen_model():
    model = resnet50.ResNet50(nnx.Rngs(0), classes=CLASSES, blocks=(1, 2), width=32)
    resnet50.trained_looking(model, IMAGES)
    jf.fold_batch_norm(model, IMAGES[:1])
    jf.calibrate(model, [IMAGES], progress=False)
    jf.freeze(model, IMAGES[:1])
    return model


def served(model):
    graph, state = nnx.split(model)
    return jax.jit(lambda state, images: nnx.merge(graph, state)(images)), state


def in_memory(compiled):
    """The tensors that a program writes, those of its custom calls too: (dtype, shape)."""
    text = compiled.as_text()
    # What is inside a fusion, or says how a reduction adds, is in registers.
    inside = set(re.findall(r"(?:kind=\w+, calls|to_apply)=%?([\w.-]+)", text))
    found, computation = [], ""
    for line in text.splitlines():
        if begins := re.match(r"(?:ENTRY )?%?([\w.-]+) .*{$", line):
            computation = begins[1]
        _, _, rest = line.partition(" = ")
        if computation in inside or not rest or re.search(r" (parameter|bitcast)\(", rest):
            continue
        result = re.split(r" [a-z][\w-]*\(", rest, maxsplit=1)[0]
        for dtype, shape in re.findall(r"([a-z]+\d+)\[([\d,]*)\]", result):
            found.append((dtype, tuple(map(int, filter(None, shape.split(","))))))
    return found


def test_a_frozen_network_writes_int8_and_touches_no_kernel():
    model = frozen_model()
    run, state = served(model)
    written = in_memory(run.lower(state, IMAGES).compile())
    assert ("s8", (4, 32, 32, 32)) in written, "the stem's output, for one"

    floats = [shape for dtype, shape in written if dtype in ("f32", "bf16", "f16")]
    logits = len(IMAGES) * CLASSES
    assert all(math.prod(shape) in (1, logits) for shape in floats), floats
    kernels = [leaf.shape for leaf in jax.tree.leaves(state) if leaf.ndim == 4]
    touched = {tuple(sorted(shape)) for _, shape in written if len(shape) == 4}
    assert not touched & {tuple(sorted(shape)) for shape in kernels}


def test_a_network_quantized_on_a_cpu_runs_here(tmp_path):
    """Through a checkpoint, and with the same numbers."""
    ocp = pytest.importorskip("orbax.checkpoint")
    with jax.default_device(jax.devices("cpu")[0]):
        graph, state = nnx.split(frozen_model())
        want = np.asarray(nnx.merge(graph, state)(IMAGES))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "model", state)
    empty = jax.tree.map(lambda leaf: jax.device_put(np.zeros_like(leaf), jax.devices()[0]), state)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "model", empty)
    run, _ = served(nnx.merge(graph, restored))
    assert resnet50.decibels(want, np.asarray(run(restored, IMAGES))) > 40
