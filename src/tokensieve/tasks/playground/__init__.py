"""`tokensieve ui`: a page in the browser to try methods on photos, ask a vision-language model, and look at results.

    encoder.py   what a method keeps of a photo, and what that does to feature, predictions, time and MACs
    vlm.py       a question about a photo, answered with all vision tokens and with fewer
    records.py   the report's page for a folder of records; ranked lists of a re-identification query
    app.py       the page, in Gradio

The first three know nothing of Gradio, keep no picture between calls, and are tested by themselves.
"""
