"""export(model, path), and a model on an engine without a file that stays. Imports all engines."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.engines.about import About, describe
from tokensieve.engines.base import Engine
from tokensieve.engines.feature import Feature, capture, image_size
from tokensieve.engines.load import load_engine
from tokensieve.engines.names import ENDINGS, check_engine
from tokensieve.engines.onnx_engine import save_model, write_onnx
from tokensieve.engines.openvino_engine import read_onnx, write_openvino
from tokensieve.engines.parity import TOLERANCE, Parity, compare
from tokensieve.engines.photos import real_images
from tokensieve.engines.preprocess import Preprocess, find_preprocess
from tokensieve.engines.quantize import quantize as quantized
from tokensieve.engines.torch_engine import CompiledEngine, TorchEngine, save_program
from tokensieve.errors import DataError, OptionError, UnsupportedModelError
from tokensieve.records import check_writable
from tokensieve.utils.images import image_files, read_image

__all__ = ["export", "make_engine", "parity_of"]

_FILES = {".onnx": (".onnx.data",), ".xml": (".bin",), ".pt2": ()}  # what may stand beside the file


def export(
    model: nn.Module,
    path: str | Path,
    *,
    quantize: str | None = None,
    calibrate: Tensor | str | Path | Sequence[str | Path] | None = None,
    with_kept: bool = False,
    preprocess: object = None,
    size: tuple[int, int] | None = None,
    name: str | None = None,
    tolerance: float = TOLERANCE,
    threads: int | None = None,
) -> Engine:
    """Write an image encoder, attached or untouched, to a file that needs nothing else, and return it as an engine.

    path: ends in .onnx (ONNX Runtime), .xml (OpenVINO; the weights go to a .bin beside it) or .pt2 (torch.export). The
        files are written whole or not at all.
    quantize: "int8" (activations by their range in each batch) or "int8-static" (ranges from `calibrate`).
    calibrate: photos: a tensor (P, 3, H, W) of prepared images, a folder, or image files. They also are what the result
        is compared on. None: photographs that come with the package.
    with_kept: a second output, the indices (B, K) of the patches that remain at the end.
    preprocess: a `tokensieve.engines.preprocess.Preprocess` or a transform of torchvision's, for the metadata. None:
        what the model says itself.
    size: height and width of the images, where the model does not say.
    tolerance: the largest relative difference to torch that a float file may have; beyond it nothing is written.
    """
    path = Path(path)
    if path.suffix not in ENDINGS:
        raise OptionError(f"{path}: give a name that ends in {', '.join(ENDINGS)}")
    engine = ENDINGS[path.suffix]
    check_engine(engine, quantize, threads)
    if quantize == "int8-static" and calibrate is None:
        raise OptionError("quantize='int8-static' needs calibrate=: a folder of photos")
    check_writable(path)
    feature, about, photos = _prepare(model, with_kept, preprocess, size, name, quantize, calibrate)
    with _evaluating(feature), _beside(path) as draft:
        _write(feature, about, photos, draft, engine, threads)
        ready = load_engine(draft, threads)
        found = _checked(feature, ready, photos, tolerance, "nothing was written")
        del ready  # before its file is renamed
    engine_of_file = load_engine(path, threads)
    engine_of_file.parity = found
    return engine_of_file


def make_engine(
    model: nn.Module,
    engine: str,
    *,
    quantize: str | None = None,
    calibrate: Tensor | str | Path | Sequence[str | Path] | None = None,
    with_kept: bool = False,
    preprocess: object = None,
    size: tuple[int, int] | None = None,
    name: str | None = None,
    threads: int | None = None,
) -> Engine:
    """A model on an engine by its name (see `ENGINES`), without a file that stays. Arguments as in `export`."""
    check_engine(engine, quantize, threads)
    if quantize == "int8-static" and calibrate is None:
        raise OptionError("quantize='int8-static' needs calibrate=: a folder of photos")
    with torch.inference_mode(False):  # tensors of inference mode cannot be traced
        feature, about, photos = _prepare(model, with_kept, preprocess, size, name, quantize, calibrate)
        if engine == "torch":
            return TorchEngine(feature, about, None, threads)
        if engine == "compile":
            return CompiledEngine(feature, about, threads)
        ending = next(ending for ending, its in ENDINGS.items() if its == engine)
        with _evaluating(feature), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            draft = Path(folder, f"model{ending}")
            _write(feature, about, photos, draft, engine, threads)
            ready = load_engine(draft, threads)
            ready.parity = _checked(feature, ready, photos, TOLERANCE, "it is not run there")
    ready.path = None
    return ready


@torch.inference_mode()
def parity_of(module: Feature | Engine, engine: Engine, photos: Tensor) -> Parity:
    """The features of an engine against those of a module, both run on the photos (P, 3, H, W) as one batch."""
    wanted = module.run(photos)[0] if isinstance(module, Engine) else module(photos)[0]
    return compare(wanted, engine.run(photos)[0])


def _checked(feature: Feature, engine: Engine, photos: Tensor, tolerance: float, so: str) -> Parity:
    """The parity of an engine; a float one beyond `tolerance` is refused."""
    found = parity_of(feature, engine, photos)
    if engine.about.quantize is None and found.difference > tolerance:
        what = " with ".join(word for word in (engine.about.model, engine.about.method) if word)
        raise UnsupportedModelError(
            f"{what} differs on {engine.name} from torch by {found.difference:.2g} of the largest feature (allowed: "
            f"{tolerance:g}; lowest cosine {found.cosine:.6f}): {so}"
        )
    return found


def _prepare(
    model: nn.Module, with_kept: bool, preprocess: object, size: tuple[int, int] | None, name: str | None,
    quantize: str | None, calibrate: Any,
) -> tuple[Feature, About, Tensor]:  # fmt: skip
    """The module to capture, its facts, and the photos."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"export takes a torch module, not {type(model).__name__}")
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        raise UnsupportedModelError("export takes a model on the CPU: call model.cpu() first")
    if any(parameter.dtype != torch.float32 for parameter in model.parameters() if parameter.is_floating_point()):
        raise UnsupportedModelError("export takes a model in float32: call model.float() first")
    feature = Feature(model, with_kept)
    found = find_preprocess(model, preprocess)
    size = size or (found.size if found is not None else image_size(model))
    photos = _photos(calibrate, size, found)
    with _evaluating(feature), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an untouched budget reduces nothing is in the facts
        out = feature(photos[:2])
        if out[0].dim() != 2:
            raise UnsupportedModelError(
                f"export takes a model with one feature per image, (B, E); {type(model).__name__} gives "
                f"{tuple(out[0].shape)}"
            )
        about = describe(model, name or type(model).__name__, size, found, with_kept)
    return feature, dataclasses.replace(about, quantize=quantize), photos


def _photos(given: Any, size: tuple[int, int], preprocess: Preprocess | None) -> Tensor:
    if given is None:
        return real_images(size, preprocess)
    if isinstance(given, Tensor):
        if given.dim() != 4 or tuple(given.shape[1:]) != (3, *size) or len(given) < 2:
            raise OptionError(
                f"calibrate of shape {tuple(given.shape)}: give at least two images (P, 3, {size[0]}, {size[1]})"
            )
        return given.float()
    if preprocess is None:
        raise OptionError("calibrate: how this model's images are prepared is not known: give preprocess= too")

    paths = [given] if isinstance(given, str | Path) else list(given)
    files = [file for path in map(Path, paths) for file in (image_files(path) if path.is_dir() else [path])]
    if len(files) < 2:
        raise DataError(f"calibrate: {len(files)} photos in {', '.join(map(str, paths))}; at least two are needed")
    return torch.stack([preprocess(read_image(file)) for file in files])


def _write(feature: Feature, about: About, photos: Tensor, path: Path, engine: str, threads: int | None) -> None:
    """The files of one engine at `path`."""
    program = capture(feature, photos[:2])
    if engine == "torch":
        save_program(program, path, about)
        return
    if engine == "onnxruntime" and about.quantize is None:
        write_onnx(program, path, about)
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        source = Path(folder, "float.onnx")
        write_onnx(program, source, about)
        if about.quantize is None:
            write_openvino(read_onnx(source), path, about)
            return
        model, about = quantized(source, about, photos, engine, threads)
        if engine == "openvino":
            write_openvino(model, path, about)
        else:
            save_model(model, path)


@contextmanager
def _evaluating(feature: Feature) -> Iterator[None]:
    """In eval mode; each module's own mode afterwards."""
    before = [(module, module.training) for module in feature.modules()]
    feature.eval()
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A name in a new folder beside `path`; afterwards its files take their places, the model itself last."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.{os.getpid()}.", dir=path.parent) as folder:
        draft = Path(folder, path.name)
        yield draft
        for ending in _FILES[path.suffix]:
            beside = draft.with_suffix(ending)
            if beside.exists():
                shutil.move(beside, path.with_suffix(ending))
            elif ending.endswith(".data"):
                path.with_suffix(ending).unlink(missing_ok=True)  # of a larger model that was there before
        draft.replace(path)
