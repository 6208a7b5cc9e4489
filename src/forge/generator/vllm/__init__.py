"""Generation with vLLM: its own engine in a process of its own, fed with weights from our store.

`engine.VllmEngine` is the engine. Nothing here imports vLLM before an engine is started.
"""
