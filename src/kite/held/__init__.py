"""An engine that has come as far as it gets without the base's weights, and waits there until it is let on.

`gate` is where it waits, used inside the engine's process; `loader` is vLLM's way there. Who lets it on is
`kite.engine.gate`.
"""
