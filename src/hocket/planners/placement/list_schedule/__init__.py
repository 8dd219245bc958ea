"""List scheduling with communication and memory: the loop that m-ETF and m-SCT share.

Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020; the ideas go
back to Hwang et al. (earliest task first, 1989) and Hanen and Munier (favourite children, 1995).

A clock moves from event to event. An op is *ready* when all its predecessors have ended. It could
start on a device when its data could be there and the device is free: its *earliest start*. At each
instant every free device offers the ready op with the smallest (earliest start, rank) that could
start by now; of all offers the smallest (earliest start, rank, device) is committed; this repeats
until there is no offer, then the clock moves on. The rank is the position in breadth-first
topological order. An op never starts before the instant at which it was chosen.

**Transfers.** A tensor is sent once to each device and stays known there. What is still to be sent
over one edge arrives, one tensor after another, from the moment when the producer has ended and the
sender's and the receiver's queue are free; edges are estimated independently of each other. Only a
commit really sends, in order of tensors, and moves both queues. With parallel transfers there are
no queues, and each tensor arrives on its own. A parameter is owned by the first op (or group)
that reads it and lives on its device; the batch is on every device.

**Groups.** Ops that no legal plan may separate (`bound_ops`) share a device: the one on which the
first of them is committed. That commit also takes what the group holds until the end: parameters
and states that it reads, gradients and outputs that it makes.

**Memory.** A device is excluded while an op does not fit: its workspace and results, copies that
must come, and what its group takes. What exists before the step is counted at the device's peak
too, since it was there at that moment. Results and their copies are released when all readers have
ended.

**Awake devices** (m-SCT only). A free device stays awake for the favourite child of its last op if
all predecessors of the favourite have started, no other device could start it earlier, and it is
ready or its start here is at most one transfer of that edge away. An awake device takes, of the ops
that could start by now on every device that can hold them, the one that could do so first;
otherwise only the favourite. It waits at most until a time that is known, so nothing starves.

A naive loop looks at every ready op on every device after every commit. Here each device keeps its
ready ops in heaps (`queues`) whose keys are lower bounds: they only grow when queues move, so a key
is computed anew when it comes to the top; when a tensor arrives somewhere, the keys of its ready
readers there are set again. A device does not even hear of an op before one of the tensors that the
op reads could have been sent to it. O(ops · devices · log(ready ops)) at worst, in practice little
more than the heaps of the devices that hold an op's data.
"""
