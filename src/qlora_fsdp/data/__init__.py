"""From rows to batches, one stage per file: read → row → format → tokenize → cache → sequences → batch → prefetch.

`prepare_data` (run_data.py) runs the stages up to the cache once per node, and every rank maps the result into memory.
With data.streaming, `open_stream` (stream.py) runs them without a cache, while the model is trained.
"""
