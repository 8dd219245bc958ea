"""Times of the nets and parts that `cifar_gpu.py` has left, on a machine that does nothing else.

    python benchmarks/classes/cifar_latency.py FOLDER/vgg19-0 ...

One image, one thread: the whole net in eager torch and in ONNX Runtime, each part in ONNX Runtime,
and an answer of all parts over processes (median of 300, wall time).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cifar
import numpy as np
import torch

from hocket.classes.artefact import read_folder
from hocket.classes.fit import eager_latency_s
from hocket.classes.rehearsal import rehearsed
from hocket.classes.serving.front_end import FrontEnd, ServeOptions
from hocket.classes.session import latency_s, open_session

for name in sys.argv[1:]:
    path = Path(name)
    folder = read_folder(path)
    image = np.zeros((1, 3, 32, 32), np.float32)
    whole_s = latency_s(open_session(path / "whole.onnx"), image)
    net = getattr(cifar, path.name.partition("-")[0])()
    eager_s = eager_latency_s(net, torch.zeros(1, 3, 32, 32))
    part_s = [latency_s(open_session(model), image) for model in folder.models]
    answers = {}
    for spin_s in (0.0, 0.02):
        with FrontEnd(folder, ServeOptions(spin_s=spin_s)) as front_end:
            took = [front_end.predict(image[0]).took_s for _ in range(320)][20:]
        answers[str(spin_s)] = {
            "p50_s": float(np.median(took)),
            "p99_s": float(np.quantile(took, 0.99)),
        }
    told = {
        "net": path.name, "whole_s": whole_s, "eager_s": eager_s, "part_s": part_s,
        "over_eager": eager_s / max(part_s), "over_whole": whole_s / max(part_s),
        "answer_by_spin_s": answers, "predicted_s": rehearsed(folder).answer_s,
    }  # fmt: skip
    print(json.dumps(told), flush=True)
