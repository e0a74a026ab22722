"""LLaVA-style models: vision tokens leave between tower and projector (stage 1) and between decoder layers (stage 2).

    handle.py   attach, the handle, budgets, cost          modules.py  the classes that instances carry while attached
    stage1.py   images -> fewer features                   run.py      one forward through the decoder, with its cuts
    memory.py   what a generation remembers, on its cache  stats.py    tokens, bytes and seconds of the last generation

No class is patched and no model library is imported: models are recognised by the names of their parts.
"""

from tokensieve.models.decoder.handle import VlmAttachment, VlmHandle, attach_vlm, is_vlm

__all__ = ["VlmAttachment", "VlmHandle", "attach_vlm", "is_vlm"]
