"""A page in the browser: try methods on photos, ask a vision-language model, look at results.

Serves on this machine alone unless --host says otherwise. Stop it with Ctrl-C.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

EPILOG = """examples:
  tokensieve ui
  tokensieve ui --model ViT-B-32 --pretrained vit_b_32.pt
  tokensieve ui --runs runs/demo/runs --reid runs/reid/best.safetensors"""


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="vit-s14-minilm", metavar="NAME",
        help="vit-s14-minilm, the embedded CLIP (the default); vit-s14; or a model of open_clip")  # fmt: skip
    add("--pretrained", metavar="FILE", help="the checkpoint of an open_clip model")
    add("--runs", type=Path, metavar="DIR", help="results of eval or sweep, for the page of results")
    add("--reid", type=Path, metavar="FILE", help="a checkpoint of `tokensieve train reid`, for its page")
    add("--data", type=Path, metavar="DIR", help="with --reid: the set (default: what it was trained on)")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="(default: 127.0.0.1, this machine alone)")
    add("--port", type=int, default=7860, metavar="N", help="(default: 7860)")


def run(args: Namespace) -> int:
    from tokensieve.errors import MissingMaterialError, OptionError

    if not 1 <= args.port <= 65535:
        raise OptionError(f"--port {args.port}: 1 to 65535")
    if args.data is not None and args.reid is None:
        raise OptionError("--data goes with --reid")
    for flag, path in (("--runs", args.runs), ("--reid", args.reid)):
        if path is not None and not path.exists():
            raise MissingMaterialError(f"{flag} {path}: there is no such file or folder")
    from tokensieve.tasks.playground.app import build_app, launch

    launch(build_app(pages_of(args)), args.host, args.port)
    return 0


def pages_of(args: Namespace) -> Any:
    """What the flags ask for, loaded."""
    import importlib.util

    from tokensieve.errors import MissingMaterialError
    from tokensieve.tasks.playground.app import Pages
    from tokensieve.tasks.playground.encoder import load_playground
    from tokensieve.tasks.viewer import sample_photos

    try:
        samples = sample_photos()
    except MissingMaterialError:
        samples = []  # the page says to drop a photo
    asking: Any = None
    reid: Any = None
    if importlib.util.find_spec("transformers") is not None:
        from tokensieve.tasks.playground.vlm import load_asking

        asking = load_asking
    if args.reid is not None:
        from tokensieve.tasks.playground.records import reid_queries

        reid = reid_queries(args.reid, args.data)
    return Pages(load_playground(args.model, args.pretrained), samples, asking, reid, args.runs)
