"""What a process of tests finds loaded that is forked: imported by the fork server, once.

A first optimiser imports PyTorch's compiler, which takes as long as PyTorch itself, and a first
plan loads kernels.
"""

import contextlib
import gc

import torch._dynamo  # noqa: F401

import hocket.runtime.synthetic_training
import hocket.training  # noqa: F401
from hocket.api.planned import plan_graph
from hocket.graph.generators import generate

# It only saves time: whatever is wrong is for the tests to find.
with contextlib.suppress(Exception):
    plan_graph(generate("chain", 3, 0), "1xt4")
# What is forked looks for garbage among its own things.
gc.freeze()
