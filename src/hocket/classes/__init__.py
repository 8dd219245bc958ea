"""One classifier split by class, each part cut to its classes, for answers in less time.

    a trained net ─ embeddings ─▶ groups ─ scores ─▶ widths ─ cut, retrain, calibrate ─▶ a folder

`split` makes the folder, `serving` answers from it; `codes` lets workers die without a lost answer.
"""
