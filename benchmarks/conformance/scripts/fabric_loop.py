"""Lightning Fabric: an own loop with accumulation, clipping, two optimizers, saved and loaded states, log calls."""

from dataclasses import dataclass

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchmetrics.aggregation import MeanMetric
from torchmetrics.classification import Accuracy

torch.set_default_dtype(torch.float64)


@dataclass
class Sample:
    text: torch.Tensor
    length: int
    target: int


class Sentences(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.samples = []
        for _ in range(count):
            length = int(torch.randint(2, 9, (1,), generator=generator))
            text = torch.randint(1, 25, (length,), generator=generator)
            self.samples.append(Sample(text, length, int(text.sum() % 3)))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.samples[i]


def collate(samples):
    text = nn.utils.rnn.pad_sequence([s.text for s in samples], batch_first=True)
    return Sample(text, torch.tensor([s.length for s in samples]), torch.tensor([s.target for s in samples]))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(25, 10, padding_idx=0)
        self.norm = nn.BatchNorm1d(10)
        self.gru = nn.GRU(10, 8, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, 3)

    def forward(self, text, length):
        x = self.norm(self.embed(text).transpose(1, 2)).transpose(1, 2)
        packed = nn.utils.rnn.pack_padded_sequence(x, length.cpu(), batch_first=True, enforce_sorted=False)
        _, hidden = self.gru(packed)
        return self.out(F.dropout(torch.cat(list(hidden), -1), 0.2, self.training))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, logits):
        return logits / self.temperature


def validate(fabric, model, scale, loader, accuracy, mean):
    model.eval()
    with torch.no_grad():
        for batch in loader:
            logits = scale(model(batch.text, batch.length))
            accuracy(logits, batch.target)
            mean(F.cross_entropy(logits, batch.target, reduction="none"))
    model.train()
    found = {"accuracy": accuracy.compute(), "loss": mean.compute()}
    accuracy.reset(), mean.reset()
    return found


def main():
    logger = CSVLogger("runs", name="fabric")
    fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
    fabric.launch()
    fabric.seed_everything(21, verbose=False)
    with fabric.init_module():
        model, scale = Reader(), Scale()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    slow = torch.optim.SGD(scale.parameters(), lr=5e-2, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    scale, slow = fabric.setup(scale, slow)
    train, val = DataLoader(Sentences(53, 0), 6, shuffle=True, collate_fn=collate), DataLoader(Sentences(19, 1), 7, collate_fn=collate)
    train, val = fabric.setup_dataloaders(train, val)
    accuracy, mean = Accuracy(task="multiclass", num_classes=3), MeanMetric()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    state = {"model": model, "optimizer": optimizer, "scale": scale, "slow": slow, "step": 0, "epoch": 0}
    for epoch in range(3):
        for index, batch in enumerate(train):
            accumulating = index % 2 != 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                logits = model(batch.text, batch.length)
                loss = F.cross_entropy(scale(logits), batch.target) / 2
                fabric.backward(loss)
            if not accumulating:
                norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step(), slow.step()
                optimizer.zero_grad(), slow.zero_grad()
                state["step"] += 1
                fabric.log_dict({"loss": loss.item(), "norm": norm.item()}, step=state["step"])
                fabric.print(f"step {state['step']} loss {loss:.10g} norm {norm:.10g}")
        scheduler.step()
        found = validate(fabric, model, scale, val, accuracy, mean)
        found = fabric.all_reduce(found, reduce_op="mean")
        fabric.print(f"epoch {epoch} accuracy {found['accuracy']:.10g} loss {found['loss']:.10g} T {scale.temperature.item():.10g}")
        state["epoch"] = epoch
        fabric.save(f"epoch-{epoch}.ckpt", state)
        fabric.barrier()
    remainder = fabric.load("epoch-1.ckpt", state)
    found = validate(fabric, model, scale, val, accuracy, mean)
    fabric.print(f"loaded {state['epoch']} {state['step']} {remainder} loss {found['loss'].item():.10g}")
    gathered = fabric.all_gather(torch.arange(3))
    fabric.print(gathered.shape, fabric.world_size, fabric.broadcast({"rank": fabric.global_rank}))
    logger.finalize("success")
    with open(f"{logger.log_dir}/metrics.csv") as file:
        lines = file.read().split()
        print(len(lines), *sorted(lines[0].split(",")))
    print(f"norms {sum(p.norm() for p in model.parameters()).item():.10g}")


if __name__ == "__main__":
    main()
