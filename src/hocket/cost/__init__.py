"""Costs: the one place where predictions come from.

`costs` holds op and transfer times; `roofline` and `efficiency` predict op times, `profile` and
`measure` measure them, `host` adds launch times, `parallel` has closed forms for transformers.
"""
