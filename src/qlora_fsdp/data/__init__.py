"""From rows to batches, one stage per file: read → row → format → tokenize → cache → sequences → batch → prefetch.

`prepare_data` (run_data.py) runs the stages up to the cache once per node, and every rank maps the result into memory.
With data.streaming, `open_stream` (streams/stream.py) runs them without a cache, while the model is trained. files/
finds and reads the files of rows, chats/ knows what chat templates write, and cleaning/ leaves rows out.
"""
