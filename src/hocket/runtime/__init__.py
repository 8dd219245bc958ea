"""Execute plans on real devices: `prepare` chooses the strategy of a plan, `run` trains with it.

Start reading at `hocket.runtime.prepare`; ``docs/how-to/runtime.md`` lists the guarantees.
"""
