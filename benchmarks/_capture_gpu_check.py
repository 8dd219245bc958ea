import sys, time, traceback
sys.path.insert(0, "src")
import numpy as np, torch
import transformers
print(torch.__version__, transformers.__version__)
from hocket.capture import capture, capture_program, load_model, execute, named_tensors
from hocket.graph import Role
def peak(g):
    root=list(range(g.num_tensors))
    for t,b in enumerate(g.alias_of.tolist()): root[t]=root[b] if b>=0 else t
    held={root[t] for t in np.flatnonzero(g.is_held)}
    last={}
    for op in range(g.num_ops):
        for t in (*g.made_by(op),*g.reads_of(op).tolist()): last[root[t]]=op
    freed=[0]*g.num_ops
    for t,op in last.items():
        if t not in held: freed[op]+=int(g.held_bytes[t])
    cur=pk=0; at=0
    for op in range(g.num_ops):
        cur+=sum(int(g.held_bytes[t]) for t in g.made_by(op))
        if cur>pk: pk,at=cur,op
        cur-=freed[op]
    base=int(g.held_bytes[g.tensor_producer<0].sum())
    return (base+pk)/2**20, base/2**20, g.op_names[at]
for name,kw in [("gpt2",dict(batch=8,seq=1024)),("bert-large",dict(batch=8,seq=512)),("resnet152",dict(batch=32)),("moe-12x32",{}),("llama-1b",dict(batch=2,seq=512)),("t5-base",dict(batch=8,seq=512)),("vit-base",{}),("mixtral-small",dict(batch=2,seq=512)),("gpt2-xl",dict(batch=8,seq=1024)),("lstm",dict(batch=128,seq=50)),("inception-v3",{}),("gnmt-4",dict(batch=32,seq=10))]:
    try:
        m,b=load_model(name,**kw)
        t=time.time(); g=capture(m,b,name=name,device="cuda"); dt=time.time()-t
        f=capture(m,b,name=name,device="cuda",repeat=False)
        print(f"{name} {g.num_ops} ops {dt:.2f}s identical {g.content_hash==f.content_hash} flops {g.flops.sum()/1e12:.2f}T stamped {g.meta['stamped_ops']} predicted MiB {peak(g)}", flush=True)
        del m,b
        m,b=load_model(name,**kw,device="cuda")
        opt=torch.optim.AdamW(m.parameters(),fused=True)
        for i in range(3):
            opt.zero_grad(set_to_none=True)
            torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); t=time.time()
            out=m(**b); out=out if isinstance(out,torch.Tensor) else out.loss
            out.backward(); opt.step(); torch.cuda.synchronize()
            real=torch.cuda.max_memory_allocated()/2**20
        p=peak(g)[0]
        print(f"   measured {real:.1f} MiB  predicted {p:.1f}  error {100*(p/real-1):.2f}%  step {1e3*(time.time()-t):.1f} ms", flush=True)
        opt=None; out=None
        if name in ("gpt2","moe-12x32","mixtral-small"):
            _,prog=capture_program(m,b,device="cuda")
            torch.manual_seed(3); ex=execute(prog,named_tensors(m,b))
            torch.manual_seed(3); m.zero_grad(set_to_none=True); o=m(**b); o=o if isinstance(o,torch.Tensor) else o.loss; o.backward()
            err=max(((ex.gradients[n]-p.grad).abs().max()/(p.grad.abs().max()+1e-12)).item() for n,p in m.named_parameters() if p.grad is not None)
            print("   replay loss", o.item(), ex.outputs[0].item(), "grad rel err", err)
            del ex,o
        m=b=None; torch.cuda.empty_cache()
    except Exception as e:
        print(name,"FAIL"); traceback.print_exc(limit=-3); m=b=opt=out=None; torch.cuda.empty_cache()
