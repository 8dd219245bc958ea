"""Split a classifier by class: each part keeps only what its classes need, and so answers sooner.

    trained net ─ embeddings ─▶ groups ─ scores ─▶ widths ─ cut, retrain, calibrate ─▶ a folder

`split` writes the folder, and `serving` answers requests from it. `codes` assigns each class to
several workers, so that workers may die without loss of a class.
"""
