"""Vision-language models: vision tokens leave before the language model (stage 1) and between its layers (stage 2).

    handle.py   attach, the handle, budgets, cost          modules.py  the classes that models carry while attached
    stage1.py   which image is where, what stays of each   layer.py    a layer that may be a cut, verified by numbers
    forward.py  one forward through the layers             memory.py   what a generation remembers, on its cache
    soft.py     a forward to train through                 stats.py    tokens, bytes and seconds of the last generation

What differs between models is in `models/families/vlm`. No class is patched and no model library is imported.
"""

from tokensieve.models.decoder.handle import VlmAttachment, VlmHandle, attach_vlm, is_vlm

__all__ = ["VlmAttachment", "VlmHandle", "attach_vlm", "is_vlm"]
