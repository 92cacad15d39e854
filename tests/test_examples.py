"""The examples run as users start them."""

import pathlib
import re
import struct
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"


def test_mnist_trains_and_reports(tmp_path):
    command = [sys.executable, EXAMPLES / "mnist.py", "--epochs", "1", "--train-size", "512"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

    accuracies = re.search(r"accuracy, seed 0 +([\d.]+)% +([\d.]+)% +([\d.]+)%", done.stdout)
    assert accuracies, done.stdout
    # Better than guessing, after 16 steps; and int8 close to float.
    in_float, calibrated, trained = map(float, accuracies.groups())
    assert in_float > 20
    assert abs(in_float - calibrated) < 5
    assert abs(in_float - trained) < 10

    sizes = re.search(r"weights, bytes +([\d,]+) +([\d,]+) +([\d,]+)", done.stdout)
    assert sizes, done.stdout
    float_bytes, *int8_bytes = (int(text.replace(",", "")) for text in sizes.groups())
    assert all(3.5 < float_bytes / size < 4 for size in int8_bytes)
    agreeing = re.search(r"frozen, it reads as it was trained to on (\d+) of 1000", done.stdout)
    assert agreeing, done.stdout
    assert int(agreeing[1]) >= 998  # another order of float32 factors moves ties

    picture = (tmp_path / "mnist.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(picture) > 20_000
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 800
    assert height > 400
