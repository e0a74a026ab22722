"""The only rooms that know open_clip, timm or transformers: attach a method to a model, and remove it without a trace.

`engine` runs blocks with a cut between attention and MLP; one small file a family says where its parts are.
Imports methods and core. No model library is imported: models are recognised by the names of their parts.
"""

from tokensieve.models.attach import Attachment, attach, attachment_of

__all__ = ["Attachment", "attach", "attachment_of"]
