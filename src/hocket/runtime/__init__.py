"""Carry out plans on real devices: one process with streams, or one process per device.

Start with `hocket.runtime.session.run_plan`; ``docs/how-to/runtime.md`` says what is promised.
"""
