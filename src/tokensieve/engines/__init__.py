"""Where an image encoder runs: torch, torch.compile, ONNX Runtime, OpenVINO. Export, load, quantise.

    engine = tokensieve.export(model, "vit.onnx")        # an attached or untouched model
    features = engine(images)                            # (B, 3, H, W) -> (B, E)
    engine = tokensieve.load_engine("vit.onnx")          # in another process, without the model

Imports models and below.
"""
