"""The benchmark: what a reduction gains in wall-clock time, next to what its MACs make possible.

Importing this folder imports no torch; `run` does. Imports adapters, methods, zoo and results.

    config.py   what to measure, checked        speed.py    models x batches x methods x budgets
    models.py   the models by name              share.py    selection's share of the time as N grows
    timing.py   interleaved measuring           memory.py   peak memory, each in a fresh process
    run.py      all of it into one record       vlm.py      a LLaVA's prefill, decoding and cache
"""
