"""Worker processes: start, watch, identify failures and shut down, without PyTorch.

A `worker_group.WorkerGroup` runs a few Python programs for the process that started them;
`child.live` and `child.serve` are the workers' side. Guarantees:

* No process is left. When the group is closed, or when the process that started it is killed, all
  workers and all of their descendants are ended.
* Messages arrive whole and in order, or not at all: frames of JSON and raw buffers of any size, in
  both directions at once, never code. Printed output is never taken for a frame.
* The root cause of a failure is named: the worker, its last activity, and the signal, lack of
  memory, exit code, silence or error that ended it. Of several failures, the first one counts.
* Slow is not dead: each worker sends heartbeats from a thread of its own, and counts as stopped
  only if the system, too, reports no activity.
* No call waits forever: `WorkerGroup.receive` takes a time limit, and no call waits for a process
  that is stopped or gone.

`start` is the one place where processes are created, also those that outlive this one
(`start.start_module`); `system` reads process states from Linux.
"""
