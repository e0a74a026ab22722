"""The page of `tokensieve ui`, in Gradio. What it shows is worked out by the files beside it."""

from __future__ import annotations

import html
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import gradio as gr
from PIL import Image

from tokensieve.errors import OptionError, TokensieveError
from tokensieve.methods.registry import list_methods
from tokensieve.tasks.playground import records
from tokensieve.tasks.playground.encoder import CLASSES, ENGINES, Look, Playground
from tokensieve.tasks.viewer import Request
from tokensieve.utils.images import read_image

__all__ = ["Pages", "build_app", "launch"]

_UPLOAD = 20 * 2**20  # bytes of one photo
_NOT_ALONE = {"learned", "cdpruner"}  # need an adapter, or a text
_CSS = """
.gradio-container { max-width: 1180px !important; margin: 0 auto; }
#ts-title h1 { font-weight: 650; letter-spacing: -0.02em; margin: .2em 0 0; }
#ts-title p { opacity: .75; margin: .1em 0 .6em; }
.ts-table, .ts-table th, .ts-table td { border: 0 !important; }
.ts-table { width: 100%; margin: .4em 0 0; border-collapse: collapse; font-size: .92em;
  font-variant-numeric: tabular-nums; }
.ts-table th, .ts-table td { text-align: right; padding: .28em .5em; }
.ts-table td { border-top: 1px solid var(--border-color-primary) !important; }
.ts-table th:first-child, .ts-table td:first-child { text-align: left; overflow-wrap: anywhere; }
.ts-scroll { overflow-x: auto; }
.ts-facts { display: flex; flex-wrap: wrap; gap: .4em .6em; margin: .2em 0 .6em; }
.ts-facts span { background: var(--background-fill-secondary); border: 1px solid var(--border-color-primary);
  border-radius: 8px; padding: .25em .6em; font-size: .92em; }
.ts-facts b { font-weight: 650; }
.ts-name { font-weight: 650; font-size: 1.05em; margin-bottom: .3em; }
.ts-problem { border-left: 3px solid #d97706; padding: .4em .7em; overflow-wrap: anywhere; }
.ts-bars { width: 100%; height: 88px; display: block; }
footer { display: none !important; }
"""
_HINT = "<p style='opacity:.7'>{}</p>"
_NO_REID = """Start with a trained model: <code>tokensieve ui --reid runs/reid/best.safetensors</code>.
<code>tokensieve train reid --config configs/synthetic/DeMo_SDTPS.yml</code> makes one."""
_NO_RUNS = """Start with a folder of results: <code>tokensieve ui --runs runs/demo/runs</code>.
<code>tokensieve demo</code> makes one."""


@dataclass(frozen=True)
class Pages:
    """What the page is made of. asking, reid, runs: None leaves that tab with a line that says how to fill it."""

    encoder: Playground
    samples: Sequence[Path] = ()
    asking: Callable[[], Any] | None = None
    reid: Any = None
    runs: Path | None = None


def build_app(pages: Pages) -> Any:
    """The page as gr.Blocks, ready to launch."""
    with gr.Blocks(title="tokensieve", analytics_enabled=False, delete_cache=(600, 600)) as app:
        gr.Markdown(
            "# tokensieve\nWhich patches a method keeps, what that saves, and what it costs.", elem_id="ts-title"
        )
        with gr.Tabs():
            with gr.Tab("Photo"):
                _photo_tab(pages)
            with gr.Tab("Question"):
                _question_tab(pages)
            with gr.Tab("Re-identification"):
                _reid_tab(pages)
            with gr.Tab("Results"):
                _results_tab(pages)
    return app


def launch(app: Any, host: str, port: int, quiet: bool = False, block: bool = True) -> Any:
    """Serve the page; localhost unless another host is named."""
    fonts, mono = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]  # none is fetched
    theme = gr.themes.Soft(primary_hue="teal", neutral_hue="slate", font=fonts, font_mono=mono)
    queued = app.queue(max_size=64, default_concurrency_limit=2)
    try:
        return queued.launch(
            server_name=host, server_port=port, share=False, quiet=quiet, prevent_thread_lock=not block,
            show_error=True, max_file_size=_UPLOAD, css=_CSS, theme=theme, enable_monitoring=False,
        )  # fmt: skip
    except OSError as error:
        if "port" not in str(error):
            raise
        raise OptionError(f"--port {port} on {host} is taken, or cannot be opened: give another --port") from None


def _told(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, with what a user did wrong as one friendly line on the page."""

    @wraps(call)
    def wrapped(*args: Any) -> Any:
        try:
            return call(*args)
        except TokensieveError as error:
            raise gr.Error(html.escape(" ".join(str(error).split())), duration=12, print_exception=False) from None

    return wrapped


def _read(file: str | None) -> Image.Image:
    if not file:
        raise OptionError("photo: drop one, or choose a sample")
    if Path(file).stat().st_size > _UPLOAD:
        raise OptionError(f"photo: at most {_UPLOAD // 2**20} MB")
    return read_image(Path(file).read_bytes(), f"photo {Path(file).name}", upright=True)


# -- a photo, two methods side by side ---------------------------------------------------------------------------------


def _photo_tab(pages: Pages) -> None:
    methods = [name for name in list_methods("encoder") if name not in _NOT_ALONE and name != "two_stage"]
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            file = gr.File(label="Photo", file_types=["image"], type="filepath", height=120, elem_id="ts-photo")
            if pages.samples:
                paths = [str(path) for path in pages.samples]
                samples = gr.Gallery(paths, label="Samples", columns=4, height=110, allow_preview=False,
                                     object_fit="cover", interactive=False, elem_id="ts-samples")  # fmt: skip

                def chosen(event: gr.SelectData) -> str:
                    return paths[event.index]

                samples.select(chosen, None, file)
            keep = gr.Slider(5, 100, value=40, step=5, label="Patches kept, %", elem_id="ts-keep")
            one = gr.Dropdown(methods, value="sieve", label="Method", elem_id="ts-one")
            other = gr.Dropdown(["(none)", *methods], value="tome", label="Beside it", elem_id="ts-other")
            with gr.Accordion("More", open=False):
                at = gr.Textbox("", label="Blocks where patches leave, such as 3,6,9", placeholder="the method's own")
                engine = gr.Dropdown(list(ENGINES), value="torch", label="Time on this engine",
                                     info="another engine than torch exports the model first")  # fmt: skip
                names = gr.Textbox(", ".join(CLASSES), label="Class names", lines=2,
                                   visible=pages.encoder.can_predict)  # fmt: skip
        with gr.Column(scale=3, min_width=320), gr.Row():
            left, right = _column("one"), _column("other")
    inputs = [file, keep, one, other, at, engine, names]
    outputs = [*left, *right]

    def look(file: str, keep: float, one: str, other: str, at: str, engine: str, names: str) -> list[Any]:
        photo = _read(file)
        blocks = _blocks(at)
        classes = names.split(",") if names else []
        shown: list[Any] = []
        for method in (one, other):
            if method == "(none)":
                shown += [None, None, ""]
                continue
            try:
                found = pages.encoder.look(photo, Request(method, keep=keep / 100, at=blocks), classes, engine)
            except TokensieveError as error:  # of this method alone: the one beside it may well do it
                shown += [None, None, f"<div class='ts-problem'>{html.escape(str(error))}</div>"]
                continue
            shown += [found.kept, found.scores, _facts(found)]
        return shown

    call = _told(look)
    for trigger in (file.change, keep.change, one.change, other.change, engine.change):
        trigger(call, inputs, outputs, show_progress="minimal", trigger_mode="always_last")
    for box in (at, names):
        box.submit(call, inputs, outputs, show_progress="minimal")


def _column(name: str) -> list[Any]:
    with gr.Column(min_width=300):
        options: Any = {"interactive": False, "buttons": ["download", "fullscreen"]}
        kept = gr.Image(label="Kept patches", elem_id=f"ts-{name}-kept", **options)
        facts = gr.HTML(elem_id=f"ts-{name}-facts")
        with gr.Accordion("Scores at the first cut", open=False):
            scores = gr.Image(show_label=False, elem_id=f"ts-{name}-scores", **options)
    return [kept, scores, facts]


def _blocks(text: str) -> list[int] | None:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else None
    except ValueError:
        raise OptionError(f"blocks {text!r}: whole numbers, as in 3,6,9") from None


def _facts(look: Look) -> str:
    """Figures, tokens for each block and predictions of one look, as HTML; what a user typed is escaped."""
    facts = {
        "kept": look.count,
        "cosine to all patches": f"{look.cosine:.3f}",
        f"time, {look.engine}": f"{look.milliseconds:.0f} ms of {look.milliseconds_full:.0f}",
        "GMACs": f"{look.gmacs:.1f} of {look.gmacs_full:.1f}",
    }
    head = "".join(f"<span>{html.escape(name)} <b>{html.escape(value)}</b></span>" for name, value in facts.items())
    name = f"<div class='ts-name'>{html.escape(look.label)}</div><div class='ts-facts'>{head}</div>"
    blocks = f"<div>Tokens leaving each block</div>{_bars(look.tokens, look.tokens_full)}"
    return name + blocks + _prediction_table(look)


def _bars(tokens: Sequence[int], full: Sequence[int]) -> str:
    most, width = max(full), 100 / len(tokens)
    bars = []
    for block, pair in enumerate(zip(full, tokens, strict=True)):
        for count, opacity in zip(pair, (0.14, 1), strict=True):
            high = 60 * count / most
            place = f"x='{block * width + 0.6:.2f}' y='{64 - high:.2f}' width='{width - 1.2:.2f}' height='{high:.2f}'"
            about = f"<title>block {block}: {count}</title>"
            bars.append(f"<rect {place} fill='var(--color-accent)' opacity='{opacity}'>{about}</rect>")
    return (
        f"<svg class='ts-bars' viewBox='0 0 100 64' preserveAspectRatio='none' role='img' "
        f"aria-label='tokens leaving each block: {', '.join(map(str, tokens))}'>{''.join(bars)}</svg>"
    )


def _prediction_table(look: Look) -> str:
    if not look.predictions:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{100 * before:.1f} %</td><td>{100 * after:.1f} %</td></tr>"
        for name, before, after in look.predictions[:5]
    )
    head = "<tr><th>class</th><th>all patches</th><th>reduced</th></tr>"
    return f"<div class='ts-scroll'><table class='ts-table'>{head}{rows}</table></div>"


# -- a question --------------------------------------------------------------------------------------------------------


def _question_tab(pages: Pages) -> None:
    if pages.asking is None:
        gr.HTML(_HINT.format('This page needs transformers: <code>pip install "tokensieve[transformers]"</code>'))
        return
    loaded: list[Any] = []  # when the first question is asked
    methods = [
        name for name in dict.fromkeys([*list_methods("projector"), *list_methods("decoder")])
        if name not in {"merger", "pruner", "two_stage", "learned"}
    ]  # fmt: skip
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            file = gr.File(label="Picture", file_types=["image"], type="filepath", height=120, elem_id="ts-scene")
            sample = gr.Button("A sample picture", elem_id="ts-sample")
            question = gr.Textbox("What colour is the circle?", label="Question", elem_id="ts-question")
            method = gr.Dropdown(methods, value="divprune", label="Method")
            keep = gr.Slider(5, 100, value=35, step=5, label="Vision tokens kept, %")
            go = gr.Button("Ask", variant="primary", elem_id="ts-ask")
        with gr.Column(scale=3, min_width=320):
            answer = gr.HTML(elem_id="ts-answer")
            gallery = gr.Gallery(label="What each cut kept", columns=3, object_fit="contain", elem_id="ts-cuts")

    def ask(file: str, question: str, method: str, keep: float) -> tuple[str, list[Any]]:
        if not loaded:
            loaded.append(pages.asking() if pages.asking else None)
        found = loaded[0].ask(_read(file), question, Request(method, keep=keep / 100))
        cells = (
            (f"all {found.tokens_full} tokens", found.before, found.milliseconds_full),
            (f"{found.tokens:.0f} on layer average", found.after, found.milliseconds),
        )
        rows = "".join(
            f"<tr><td>{tokens}</td><td>{html.escape(text)}</td><td>{time:.0f} ms</td></tr>"
            for tokens, text, time in cells
        )
        head = "<tr><th>vision tokens</th><th>answer</th><th>time</th></tr>"
        facts = f"<div class='ts-facts'><span>language model MACs saved <b>{100 * found.saved:.0f} %</b></span>"
        facts += f"<span>model <b>{html.escape(loaded[0].name)}</b></span></div>"
        table = f"<div class='ts-scroll'><table class='ts-table'>{head}{rows}</table></div>"
        return facts + table, [(picture, label) for label, picture in found.kept]

    def draw() -> str:
        from tokensieve.tasks.playground.vlm import sample_scene

        path = Path(tempfile.mkdtemp(prefix="tokensieve-")) / "sample-scene.png"
        sample_scene(random.randrange(10_000)).save(path)
        return str(path)

    sample.click(draw, None, file)
    call = _told(ask)
    go.click(call, [file, question, method, keep], [answer, gallery])
    question.submit(call, [file, question, method, keep], [answer, gallery])


# -- re-identification, and results ------------------------------------------------------------------------------------


def _reid_tab(pages: Pages) -> None:
    if pages.reid is None:
        gr.HTML(_HINT.format(_NO_REID))
        return
    names = records.query_names(pages.reid)
    query = gr.Dropdown(names, value=names[0], label="Query, from the hardest to the easiest", elem_id="ts-query")
    shown = gr.HTML(records.query_page(pages.reid, names[0]), elem_id="ts-matches")
    query.change(lambda name: records.query_page(pages.reid, name), query, shown)


def _results_tab(pages: Pages) -> None:
    if pages.runs is None:
        gr.HTML(_HINT.format(_NO_RUNS))
        return
    folder = pages.runs
    again = gr.Button("Read the folder again", size="sm")
    shown = gr.HTML(records.framed(records.report_of(folder)), elem_id="ts-results")
    again.click(_told(lambda: records.framed(records.report_of(folder))), None, shown)
