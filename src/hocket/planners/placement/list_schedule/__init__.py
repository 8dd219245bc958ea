"""List scheduling with communication and memory: the loop that m-ETF and m-SCT share.

Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020; the ideas go
back to Hwang et al. (earliest task first, 1989) and Hanen and Munier (favourite children, 1995).

A clock moves from event to event. An op is *ready* when all its predecessors have ended. Its
*earliest start* on a device is the time from which its inputs could be on the device and the device
is free. At each instant every free device offers the ready op with the smallest (earliest start,
rank) whose earliest start is not after the clock; the offer with the smallest (earliest start,
rank, device) is committed; this repeats until there is no offer, then the clock moves on. The rank
of an op is its position in breadth-first topological order. An op never starts before the instant
at which it was chosen.

**Transfers.** A tensor is sent once to each device and stays known there. The missing tensors of
one edge arrive one after another, starting when the producer has ended and the queues of sender and
receiver are free; edges are estimated independently of each other. Only a commit really sends, in
order of tensors, and advances both queues. With parallel transfers there are no queues, and each
tensor arrives independently. A parameter is owned by the first op (or group) that reads it and is
stored on that op's device; the batch is on every device.

**Groups.** Ops that no legal plan may separate (`bound_ops`) share a device: the one on which the
first of them is committed. That commit also reserves all memory that the group holds until the end
of the step: parameters and states that it reads, gradients and outputs that it makes.

**Memory.** A device is excluded while an op does not fit: its workspace and results, copies of its
inputs that are not there yet, and the reservation of its group. Tensors that exist before the step
are added to the device's peak too, since they were there when the peak occurred. Results and their
copies are released when all readers have ended.

**Awake devices** (m-SCT only). A free device stays awake for the favourite child of its last op if
all predecessors of the favourite have started, no other device could start the favourite earlier,
and the favourite is ready or can start here after waiting at most the time of one transfer of that
edge. Of the ops that could start by now on every device that can hold them, an awake device runs
the one that could do so first; if there is none, it runs only the favourite. It waits until a known
time at most, so nothing starves.

A naive loop looks at every ready op on every device after every commit. Here each device keeps its
ready ops in heaps (`schedule_queues`) whose keys are lower bounds: they only grow when queues
advance, so a key is recomputed when it reaches the top; when a tensor arrives on a device, the keys
of its ready readers there are recomputed. An op enters the heaps of a device only after one of the
tensors that the op reads could have been sent there. O(ops · devices · log(ready ops)) at worst; in
practice little more than the heaps of the devices that hold an op's inputs are touched.
"""
