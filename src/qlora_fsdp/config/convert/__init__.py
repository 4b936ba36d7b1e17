"""`qlora-fsdp convert FILE`: a run's file of axolotl, LLaMA-Factory or TRL as one of `--config`.

Each project's file names its settings in a module of its own, which goes through them one after the other and says of
each what it is here, or why it is nothing. What none of them knows is named too.
"""
