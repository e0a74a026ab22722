"""The CLIP benchmark with token reduction, on top of the `clip_benchmark` package: its parser, its runs, its metrics.

How clip_benchmark is entered and left, for one `tokensieve eval`:

    cli/eval.py
      |  flags.py        our flags, and clip_benchmark's own parser for the rest      -> SieveConfig, its arguments
      |  upstream.expand its own list of runs: models x datasets x languages          -> one Namespace a run
      v
    run.run_job(job)                          one run, one result file
      |  session.Session                      the model: loaded once, twinned, attached, timed
      |  upstream.model_type(session.load)    registered as a model type, so that it comes back with the method on it
      |  benchmark_patches                    its metrics corrected where they fail here: put back afterwards
      v
    clip_benchmark.cli.run(args)   ------------ theirs: data, prompts, loops, metrics ------------
      |  calls session.load(...)              -> the reduced model
      |  calls model.encode_image(images)     -> speed.Speed, with the untouched model right beside
      v
    run: its JSON + our flat keys             written whole; nothing of clip_benchmark stays changed

Beside this path: probe.py (linear probe without CUDA), captions.py (greedy captions, scorers that are there),
stream*.py and shards.py (big webdatasets), sweep*.py (many runs), extract.py (features), align.py and select.py.

Importing this folder imports no torch. Imports engines, models, methods, core and records.
"""
