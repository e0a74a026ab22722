"""Importing tokensieve corrects torchvision beside a CPU torch, and loads no torch itself."""

import subprocess
import sys


def _run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_open_clip_imports_after_tokensieve_and_torch_is_not_loaded_early():
    done = _run(
        "import tokensieve, sys; assert 'torch' not in sys.modules; import torchvision; print(torchvision.__name__)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torchvision"


def test_the_finder_steps_aside():
    code = (
        "import tokensieve, sys, importlib; import torchvision;"
        "assert not any('BeforeTorchvision' in type(f).__name__ for f in sys.meta_path);"
        "importlib.reload(tokensieve);"
        "assert not any('BeforeTorchvision' in type(f).__name__ for f in sys.meta_path)"
    )
    done = _run(code)
    assert done.returncode == 0, done.stderr
