"""Use from Python: importing the package and opening a backbone leaves the process as it was."""

import subprocess
import sys

import pytest

# Libraries first: what they do to the process when they are imported is theirs.
CODE = """
import atexit, multiprocessing.util, signal, warnings
{libraries}

def state():
    return {{
        "torch threads": torch.get_num_threads(),
        "torch interop threads": torch.get_num_interop_threads(),
        "torch settings": (torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(),
                           torch.get_default_dtype(), torch.backends.cudnn.benchmark),
        "OpenCV threads": cv2.getNumThreads(),
        "exit hooks": atexit._ncallbacks(),
        "finalizers": len(multiprocessing.util._finalizer_registry),
        "signals": {{n: signal.getsignal(n) for n in signal.valid_signals()}},
        "warnings": list(warnings.filters),
    }}

torch.set_num_threads(3)
cv2.setNumThreads(3)
before = state()
{action}
after = state()
changed = {{name: (before[name], after[name]) for name in before if before[name] != after[name]}}
assert {expected}, changed
"""
LIBRARIES = (
    "import cv2, numpy, PIL.Image, safetensors.torch, timm, torch, torch.utils.data, torchvision"
)


def run(action: str, expected: str) -> None:
    code = CODE.format(libraries=LIBRARIES, action=action, expected=expected)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_load_backbone_leaves_the_process_as_it_was() -> None:
    run("import instdisc; instdisc.load_backbone('random:resnet18')", "not changed")


@pytest.mark.slow
def test_importing_the_loaders_does_so_too() -> None:
    run("import instdisc.features.extract, instdisc.features.store", "not changed")
    run("import instdisc; instdisc.embed", "not changed")


@pytest.mark.slow
def test_the_first_loader_with_workers_registers_their_end() -> None:
    build = "from instdisc.images.loading import build_loader\n"
    run(build + "build_loader([1], [[0]], 0)", "set(changed) == {'OpenCV threads'}")
    twice = "build_loader([1], [[0]], 1); build_loader([1], [[0]], 1)"
    run(
        build + twice,
        "set(changed) == {'OpenCV threads', 'finalizers'}"
        " and after['finalizers'] == before['finalizers'] + 1",
    )
