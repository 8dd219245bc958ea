"""Execute plans on real devices: `prepare` maps a plan to a strategy, `run` trains with one.

Start with `hocket.runtime.prepare`; ``docs/how-to/runtime.md`` says what is promised.
"""
