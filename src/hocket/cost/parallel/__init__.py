"""Memory, traffic and time of a transformer's parallel training, in closed form.

`step` predicts step times, `memory` peaks, both for many configs at once; `stages` and
`stage_memory` give the costs of single stages; `calibrate` fits coefficients to measured runs.
"""
