"""Facts about the built-in methods, as their classes have them: said here too, so that a list needs no torch.

A test holds them against the classes. Imports nothing.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BUILT_IN", "STAGES", "Facts"]

STAGES = ("encoder", "projector", "decoder")  # inside a vision encoder; between it and a language model; inside that


class Facts(NamedTuple):
    """module: under tokensieve.methods. summary: one line. paper: arXiv id. stages: where it can work."""

    module: str
    cls: str
    summary: str
    paper: str = ""
    stages: tuple[str, ...] = STAGES


_ENCODER, _PROJECTOR, _DECODER = (("encoder",), ("projector",), ("decoder",))

BUILT_IN: dict[str, Facts] = {
    "random": Facts("random", "Random", "random patches, a draw for each image: the control every method must beat"),
    "grid": Facts("grid", "Grid", "evenly spaced patches"),
    "anchor": Facts("anchor", "Anchor", "k anchors by CLS attention, then importance to them and diversity from them"),
    "evit": Facts("evit", "EViT", "top by CLS attention, the rest fused into one token", "2202.07800", _ENCODER),
    "tome": Facts("tome", "ToMe", "merge the most similar pairs of two alternating sets", "2210.09461"),
    "pitome": Facts("pitome", "PiToMe", "merge where the energy of redundancy is high, protect the rest", "2405.16148"),
    "divprune": Facts("divprune", "DivPrune", "greedy max-min diversity, one cut", "2503.02175"),
    "vispruner": Facts("vispruner", "VisPruner", "important by CLS attention, then duplicates removed", "2412.01818"),
    "cdpruner": Facts("cdpruner", "CDPruner", "determinantal choice conditioned on a text, one cut", "2506.10967"),
    "sieve": Facts("sieve", "SieveMethod", "ours: merge what a more important patch stands for already"),
    "learned": Facts(
        "trained.learned", "Learned", "ours: sieve, corrected and priced by training; needs adapter=FILE", "", _ENCODER
    ),
    "visionzip": Facts(
        "visionzip", "VisionZip", "dominant by CLS attention, the rest into contextual tokens", "2412.04467", _PROJECTOR
    ),
    "prumerge": Facts(
        "prumerge", "PruMerge", "CLS-attention outliers, the rest merged into them by keys", "2403.15388", _PROJECTOR
    ),
    "fastv": Facts("fastv", "FastV", "top by the last token's attention, before layer 2", "2403.06764", _DECODER),
    "pyramiddrop": Facts(
        "pyramiddrop", "PyramidDrop", "top by the last token's attention, in steps", "2410.17247", _DECODER
    ),
    "sparsevlm": Facts(
        "sparsevlm", "SparseVLM", "top by the text's attention, some dropped recycled", "2410.04417", _DECODER
    ),
    "prior_tr": Facts(
        "prior_tr",
        "PriorTR",
        "top by the last token's attention against that of a token before the question",
        "2606.24156",
        _DECODER,
    ),
    "v2drop": Facts(
        "v2drop", "V2Drop", "drop what changes least from layer to layer, in steps", "2509.01552", _DECODER
    ),
    "otprune": Facts("otprune", "OTPrune", "a set distributed as all tokens are, by a log det, one cut", "2602.20205"),
    "merger": Facts(
        "trained.merger", "Merger", "ours: learned centres that take in the rest, needs adapter=FILE", "", _PROJECTOR
    ),
    "pruner": Facts(
        "trained.pruner", "Pruner", "ours: learned heads that read the question, needs adapter=FILE", "", _DECODER
    ),
    "two_stage": Facts(
        "two_stage", "TwoStage", "one method before the language model and one inside it", "", _PROJECTOR + _DECODER
    ),
}
