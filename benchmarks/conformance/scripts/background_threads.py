"""Threads beside training: batches fetched by a thread, pictures drawn and files written by others, a profiler, FLOPs."""

import atexit
import io
import json
import pickle
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

torch.set_default_dtype(torch.float64)
torch.manual_seed(14)
OUT = Path("figures")
OUT.mkdir(exist_ok=True)
atexit.register(lambda: print("bye", len(list(OUT.iterdir()))))


class BackgroundGenerator(threading.Thread):
    def __init__(self, generator, max_prefetch=2):
        super().__init__(daemon=True)
        self.queue, self.generator = queue.Queue(max_prefetch), generator
        self.start()

    def run(self):
        for item in self.generator:
            self.queue.put(item)
        self.queue.put(None)

    def __iter__(self):
        while (item := self.queue.get()) is not None:
            yield item


class DataLoaderX(DataLoader):
    def __iter__(self):
        return iter(BackgroundGenerator(super().__iter__(), max_prefetch=3))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 1)
        self.shapes = {}

    def forward(self, x):
        with record_function("features"):
            h = F.hardswish(self.norm(self.conv(x)))
        self.shapes[tuple(x.shape[1:])] = h.shape[-1]
        return self.head(F.adaptive_max_pool2d(h, 1).flatten(1)).squeeze(1)


def draw(history, name):
    figure, axis = plt.subplots(figsize=(2, 2))
    axis.plot([h[0] for h in history], label="loss")
    axis.scatter(range(len(history)), [float(h[1]) for h in history])
    figure.savefig(OUT / name)
    plt.close(figure)
    return name


def to_picture(array):
    array = (array * 40 + 128).clip(0, 255).astype("uint8").transpose(1, 2, 0)
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format="PNG")
    return np.asarray(Image.open(buffer)).sum()


x = torch.randn(39, 3, 6, 6)
y = x.amax(dim=(1, 2, 3)) - x.mean(dim=(1, 2, 3))
loader = DataLoaderX(TensorDataset(x, y), batch_size=8, shuffle=True)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
history, pool, jobs = [], ThreadPoolExecutor(2), []
writer = queue.Queue()


def write_lines():
    with open("events.jsonl", "w") as file:
        while (event := writer.get()) is not None:
            file.write(json.dumps(event) + "\n")


thread = threading.Thread(target=write_lines)
thread.start()
lock = threading.Lock()
with FlopCounterMode(display=False) as counter:
    model(x[:5]).sum().backward()
print("flops", counter.get_total_flops(), model.shapes)
model.zero_grad()
for epoch in range(3):
    traced = epoch == 1
    context = (
        profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=2), record_shapes=True)
        if traced
        else nullcontext()
    )
    with context as prof, torch.autograd.set_detect_anomaly(epoch == 2):
        for data, target in loader:
            optimizer.zero_grad()
            out = model(data)
            loss = F.smooth_l1_loss(out, target)
            loss.backward()
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            optimizer.step()
            with lock:
                history.append((loss.detach(), norm))
            writer.put({"epoch": epoch, "loss": loss.item(), "n": len(data)})
            if traced:
                prof.step()
        jobs.append(pool.submit(to_picture, data[0].numpy()))
        jobs.append(pool.submit(lambda o, t: np.abs(o - t).mean(), out.detach().numpy(), target.numpy()))
    if traced:
        names = {event.key for event in prof.key_averages()}
        print("profiled", "features" in names)
    print(f"epoch {epoch} loss {loss:.10g} norm {norm:.10g}", *("%.10g" % h[0] for h in history[-2:]))
writer.put(None)
thread.join()
print("threads", " ".join(f"{job.result():.10g}" for job in jobs))
print("events", sum(json.loads(line)["n"] for line in open("events.jsonl")))
print(draw(history, "loss.png"), (OUT / "loss.png").stat().st_size > 1000)
pickled = pickle.loads(pickle.dumps({"history": history, "data": data, "model": model}))
print(f"pickled {pickled['data'].sum().item():.10g} {max(h[0] for h in pickled['history']).item():.10g}")
np.savez(OUT / "last.npz", data=data, out=out.detach().numpy(), names=np.array(["a", "b"]))
with np.load(OUT / "last.npz") as saved:
    print(f"saved {saved['data'].std():.10g} {saved['out'].mean():.10g} {np.asarray(target).max():.10g}")
rows = sorted(zip(target.tolist(), list(out.detach())), key=lambda pair: pair[1], reverse=True)
print("best", *(f"{t:.8g}/{o:.8g}" for t, o in rows[:2]), isinstance(data, torch.Tensor))
with torch.autograd.graph.save_on_cpu():
    loss = model(data).pow(2).mean()
loss.backward()
print(f"norms {sum(p.grad.norm().item() for p in model.parameters()):.10g}")
