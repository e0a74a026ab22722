"""The CLIP benchmark with token reduction, on top of the `clip_benchmark` package: its parser, its runs, its metrics.

    config.py     what to reduce            upstream.py   clip_benchmark: import, parser, runs, temporary changes
    load.py       models, with clear errors session.py    one run's model: loaded, reduced, timed
    speed.py      img/s inside the run      mended.py     its metrics where they fail here
    probe.py      linear probe              captions.py   captions without beam search, scorers that are there
    run.py        one run into one file     sweep.py      many of them into one folder

Importing this folder imports no torch. Imports adapters, methods, core and results.
"""
