"""Split a classifier by class: each part keeps only what its classes need, to answer sooner.

    a trained net ─ embeddings ─▶ groups ─ scores ─▶ widths ─ cut, retrain, calibrate ─▶ a folder

`split` makes the folder and `serving` answers requests from it; `codes` assigns classes to several
workers, so that workers may die without loss of a class.
"""
