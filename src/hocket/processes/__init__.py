"""Processes of our own: started, watched, named and ended in one place, without PyTorch.

A `crew.Crew` is a few Python programs that do one piece of work for the process that started them;
`child.live` and `child.serve` are their side of it. What may be relied on:

* Nothing is left. When the crew is closed, and also when the process that started it is killed, all
  of its processes and all that descends from them are ended, whatever they do or have started.
* What is said arrives whole, in order, or not at all: frames of JSON and raw buffers of any size,
  both ways at once, never code; what a program prints is never taken for a frame.
* Who fails is named: which process, what it was doing, and of what it died, a signal, want of
  memory, an exit code, silence, or an error with its message, else the last words of its standard
  error; of several, the one that failed first and not those that it took along.
* Slow is not dead: each process gives signs of life from a thread of its own, and one that gives
  none counts as stopped only when the system, too, sees nothing of it at work.
* Nobody waits for ever: `Crew.hear` takes a time limit, and no call waits for a process that is
  stopped or gone.

`start` has the one place where such processes are made, also those that are to outlive this one
(`start.start_module`), and `system` what Linux tells of processes.
"""
