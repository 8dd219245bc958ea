"""Draft."""

from __future__ import annotations

import numpy as np

from hocket.arrays import FloatArray
from hocket.planners.favourites.net import Net


def descend_to(net: Net, n, t0=2.0,t1=0.05, mode=0) -> FloatArray:
    from hocket.planners.favourites.descent_kernels import Descent, descend

    num_ops, num_edges = len(net.op_s), len(net.src)
    descent = Descent(
        favour=net.is_free.astype(np.float64),
        weight=np.zeros(num_edges),
        start_s=np.zeros(num_ops),
        flow=np.zeros(num_ops),
        chosen=np.full(num_ops, -1, dtype=np.int32),
        taken=np.full(num_ops, -1, dtype=np.int32),
    )
    guess_s = float(net.op_s.mean() + net.cost_s.mean())
    steps=2/(np.arange(n)+2)
    temps=np.geomspace(t0,t1,n)
    descend(net, descent, guess_s, temps,steps)
    return descent.favour

def sweeps(net,favour,k,cut):
    from hocket.planners.favourites.sweep_kernels import Way,Cuts,sweep_back_and_forth,longest_path
    from hocket.compiled.containers import table
    num_ops=len(net.op_s)
    head=np.zeros(num_ops); tail=np.zeros(num_ops)
    L=longest_path(net,favour,head)
    if not k: return L
    outs=np.bincount(net.src,favour,num_ops); ins=np.bincount(net.dst,favour,num_ops)
    deg=int(max(np.diff(net.in_ptr).max(),np.diff(net.out_ptr).max()))
    cuts=Cuts(favour,np.zeros(deg),np.zeros(deg))
    back=Way(net.out_ptr,net.out_edge,table(net.dst[net.out_edge],np.int32),head,tail,outs,ins)
    forth=Way(net.in_ptr,table(np.arange(len(net.src)),np.int32),net.src,tail,head,ins,outs)
    return sweep_back_and_forth(net,back,forth,cuts,L,k,cut)
