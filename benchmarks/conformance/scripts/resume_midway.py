"""A command line with subcommands and YAML: saved and resumed within an epoch, states of generators, CSV, JSON."""

import argparse
import csv
import dataclasses
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

torch.set_default_dtype(torch.float64)
DEFAULTS = """
model: {hidden: 14, dropout: 0.15}
optim: {name: AdamW, lr: 8e-3}
data: {samples: 47, batch_size: 9}
epochs: 3
seed: 31
"""


@dataclasses.dataclass
class State:
    epoch: int = 0
    batch: int = 0
    step: int = 0
    best: float = float("inf")


class Writer:
    """Scalars as lines of JSON."""

    def __init__(self, folder):
        self.file = open(Path(folder) / "events.jsonl", "a")

    def add_scalar(self, tag, value, step):
        self.file.write(json.dumps({"tag": tag, "value": float(value), "step": step}) + "\n")

    def add_histogram(self, tag, values, step):
        counts, _ = np.histogram(values.detach().cpu().numpy(), bins=4)
        self.add_scalar(f"{tag}/max", counts.max(), step)

    def close(self):
        self.file.close()


class Trainer:
    def __init__(self, config, folder):
        self.config, self.folder, self.state = config, Path(folder), State()
        random.seed(config["seed"]), np.random.seed(config["seed"]), torch.manual_seed(config["seed"])
        data = config["data"]
        x = torch.randn(data["samples"], 6)
        self.data = TensorDataset(x, (x**2).sum(1, keepdim=True).sqrt())
        hidden = config["model"]["hidden"]
        self.model = nn.Sequential(
            nn.Linear(6, hidden),
            nn.BatchNorm1d(hidden),
            nn.Mish(),
            nn.Dropout(config["model"]["dropout"]),
            nn.Linear(hidden, 1),
        )
        self.optimizer = getattr(torch.optim, config["optim"]["name"])(
            self.model.parameters(), lr=float(config["optim"]["lr"])
        )
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=4),
             torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 14)],
            milestones=[4],
        )  # fmt: skip

    def save(self, name):
        path = self.folder / name
        torch.save(
            {
                "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(), "state": dataclasses.asdict(self.state),
                "rng": (torch.get_rng_state(), np.random.get_state(), random.getstate()),
            },
            path.with_suffix(".tmp"),
        )  # fmt: skip
        os.replace(path.with_suffix(".tmp"), path)
        for old in sorted(self.folder.glob("step_*.pt"), key=lambda p: int(p.stem.split("_")[1]))[:-2]:
            old.unlink()

    def load(self, path):
        saved = torch.load(path, map_location="cpu", weights_only=False)
        for name in ("model", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(saved[name])
        self.state = State(**saved["state"])
        torch.set_rng_state(saved["rng"][0])
        np.random.set_state(saved["rng"][1])
        random.setstate(saved["rng"][2])

    def loader(self, epoch):
        generator = torch.Generator()
        generator.manual_seed(self.config["seed"] * 1000 + epoch)
        return DataLoader(self.data, self.config["data"]["batch_size"], shuffle=True, generator=generator)

    def train(self, stop_at=None):
        writer, state = Writer(self.folder), self.state
        with open(self.folder / "log.csv", "a", newline="") as file:
            log = csv.writer(file)
            while state.epoch < self.config["epochs"]:
                self.model.train()
                for i, (x, y) in enumerate(tqdm(self.loader(state.epoch), disable=not sys.stderr.isatty())):
                    if i < state.batch:
                        continue
                    x = x + 0.05 * random.random() * torch.from_numpy(np.random.randn(*x.shape))
                    loss = nn.functional.huber_loss(self.model(x), y)
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    self.scheduler.step()
                    state.batch, state.step = i + 1, state.step + 1
                    log.writerow([state.step, repr(loss.item()), self.scheduler.get_last_lr()[0]])
                    writer.add_scalar("train/loss", loss, state.step)
                    if state.step % 4 == 0:
                        writer.add_histogram("weights", self.model[0].weight, state.step)
                        self.save(f"step_{state.step}.pt")
                    if stop_at == state.step:
                        writer.close()
                        return
                state.epoch, state.batch = state.epoch + 1, 0
                if (value := self.evaluate()) < state.best:
                    state.best = value
                    self.save("best.pt")
        writer.close()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        errors = [(self.model(x) - y).abs() for x, y in DataLoader(self.data, 20)]
        return torch.cat(errors).mean().item()


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train")
    train.add_argument("folder")
    train.add_argument("--stop-at", type=int)
    train.add_argument("--resume", action="store_true")
    commands.add_parser("show").add_argument("folder")
    args = parser.parse_args(argv)
    config = yaml.safe_load(DEFAULTS)
    for item in args.set:
        keys, value = item.split("=")
        *path, last = keys.split(".")
        node = config
        for key in path:
            node = node[key]
        node[last] = yaml.safe_load(value)
    if args.command == "show":
        with open(os.path.join(args.folder, "log.csv")) as file:
            rows = list(csv.reader(file))
        print(*(f"{step} {float(loss):.10g} {float(rate):.10g}" for step, loss, rate in rows), sep="\n")
        with open(os.path.join(args.folder, "events.jsonl")) as file:
            events = [json.loads(line) for line in file]
        print(len(events), f"{sum(e['value'] for e in events):.10g}", sorted(os.listdir(args.folder)))
        return 0
    os.makedirs(args.folder, exist_ok=True)
    with open(os.path.join(args.folder, "config.yaml"), "w") as file:
        yaml.safe_dump(config, file)
    trainer = Trainer(config, args.folder)
    if args.resume:
        newest = max(Path(args.folder).glob("step_*.pt"), key=lambda p: int(p.stem.split("_")[1]))
        trainer.load(newest)
        print(f"resumed {newest.name} {trainer.state}")
    trainer.train(args.stop_at)
    print(f"{args.folder} {trainer.state.step} best {trainer.state.best:.10g} now {trainer.evaluate():.10g}")
    return 0


if __name__ == "__main__":
    main(["train", "whole"])
    main(["train", "parts", "--stop-at", "8"])
    main(["train", "parts", "--resume"])
    for folder in ("whole", "parts"):
        main(["show", folder])
    main(["--set", "optim.name=RAdam", "--set", "epochs=1", "--set", "data.batch_size=16", "train", "other"])
    sys.exit(main(["show", "other"]))
