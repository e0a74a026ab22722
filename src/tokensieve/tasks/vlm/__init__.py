"""Vision-language models: a small LLaVA of the real classes, its questions, its data."""
