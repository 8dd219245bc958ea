"""``hocket.priority.wrap``: gradients in the order in which the next forward pass needs them.

torch.distributed.init_process_group("gloo")          # or "hocket"
hocket.priority.wrap(model, optimizer)
for batch in batches:                                  # the loop stays as it is
    loss = loss_of(model(batch))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

Every rank ends with the same parameters as after synchronous training on the averaged gradients.
docs/how-to/priority.md says when it helps.
"""

# ruff: noqa: E402

from __future__ import annotations

from hocket.base.extras import require

require("torch", "propagation by priority")

from hocket.runtime.collectives.priority_sync import Propagation, wrap

__all__ = ["Propagation", "wrap"]
