"""A small LLaVA of the real classes, the scenes and questions it is trained and evaluated on, and your own questions.

    scenes.py     images and the truth about them   questions.py  what is asked about them
    processor.py  words and pixels to tensors       small.py      the model, and how its weights begin
    packing.py    many questions, one image         teach.py      its lessons and its examination
    muon.py       the optimiser                     base.py       the recipe, on the one training loop
    data.py       JSONL sets and scoring            default.py    the shipped model

Importing this folder imports no torch. Imports training and results.
"""
