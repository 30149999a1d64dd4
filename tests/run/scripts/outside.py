"""Input, programs, processes, data bases, files, ranks of its own; loaders without a length, two batches."""

import bz2
import csv
import gzip
import multiprocessing
import os
import random
import shelve
import sqlite3
import subprocess
import sys
import tempfile
import uuid

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

torch.set_default_dtype(torch.float64)


def write_square(number):
    with open("children.txt", "a") as file:
        file.write(f"{number}\n")
    return number * number


class Stream(IterableDataset):
    """Samples without a number."""

    def __iter__(self):
        return ((torch.full((3,), float(i)), i) for i in range(7))


class Pair(nn.Module):
    """A module of two batches."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, one, two):
        return self.linear(one).mean(0) + self.linear(two).std(0), self.linear(one) @ self.linear(two).T


def text_and_programs():
    print("hello", input("name? "), *(line.strip() for line in sys.stdin))
    print(subprocess.run("echo once >> programs.txt; echo out; exit 3", shell=True, capture_output=True))
    output = os.popen("echo out; exit 2")
    print(os.system("echo system >> programs.txt"), output.read(), output.close())
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cat:
        cat.stdin.write("x\ny\n")
        cat.stdin.close()
        print([line.strip() for line in cat.stdout], cat.wait(), cat.poll())
    for command in (["sleep", "9"], ["no-such-program"]):
        try:
            subprocess.run(command, timeout=0.1)
        except (subprocess.TimeoutExpired, FileNotFoundError) as error:
            print(type(error).__name__, getattr(error, "cmd", ""))


def processes():
    for how in ("fork", "spawn"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            print(pool.map(write_square, range(3)))


def data_bases():
    for name in ("old.db", "new.db"):
        with sqlite3.connect(name) as base:
            base.execute("create table if not exists runs (loss real)")
            base.execute("insert into runs values (0.5)")
        print(name, sqlite3.connect(name).execute("select count(*) from runs").fetchone())
    with shelve.open("shelf") as shelf:
        shelf["runs"] = shelf.get("runs", 0) + 1
        print(shelf["runs"], sorted(name for name in os.listdir() if "shelf" in name))
    with bz2.open("log.bz2", "at") as file:
        file.write("once\n")
    with bz2.open("log.bz2", "rt") as file:
        print(file.read())
    return csv.writer(open("left_open.txt", "w")), gzip.open("left_open.gz", "wt")


def imported_late():
    random.seed(3)
    from rich import theme  # noqa: F401  (draws a number while it is imported)

    print(random.random())


def files_of_packages():
    os.mkdir("tokens")
    path = os.path.join("tokens", "tokenizer.json")
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(path)
    with tempfile.NamedTemporaryFile("w", dir="tokens", delete=False) as file:
        file.write("written at once")
    os.replace(file.name, os.path.join("tokens", "atomic.txt"))
    print(os.path.isfile(path), Tokenizer.from_file(path).get_vocab_size(), sorted(os.listdir("tokens")))
    torch.jit.script(nn.Linear(1, 1)).save("scripted.pt")
    print(type(torch.jit.load("scripted.pt")).__name__)


def batches():
    random.seed()
    drawn = [np.random.default_rng().random(), uuid.uuid4().int / 2**128, random.Random().random()]
    drawn = torch.tensor([*drawn, random.random()])  # without a seed, and so other ones at each run
    for (values,) in DataLoader(TensorDataset(drawn.clone()), 4):
        print((values == drawn).tolist(), type(values).__module__)
    torch.manual_seed(0)
    model = Pair()
    loaders = [DataLoader(TensorDataset(torch.randn(n, 3)), n // 2) for n in (6, 10)]
    for (one,), (two,) in zip(*loaders, strict=True):
        mean, product = model(one, two)
        (mean.sum() + product.square().mean()).backward()
        print(product.shape, f"{product.sum().item():.9f} {model.linear.weight.grad.norm().item():.9f}")
    for program in (torch.jit.trace(model, (one, two)), torch.export.export(model, (one, two)).module()):
        print(f"{program(one, two)[1].sum().item():.9f}")
    _, derived = torch.func.linearize(lambda x: (x.sin() * two.mean()).sum(), one)
    print(f"{derived(one).item():.9f}")
    for workers in (0, 1):
        for inputs, numbers in DataLoader(Stream(), 3, num_workers=workers):  # the last has fewer than ranks
            print(numbers.tolist(), f"{model.linear(inputs).sum().item():.9f}")


def own_ranks(rank, world):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=rank, world_size=world)
    print(dist.is_initialized(), dist.get_rank(), dist.get_world_size())
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for (data,) in DataLoader(TensorDataset(torch.randn(7, 3)), 5):
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        print(f"{loss.item() / dist.get_world_size():.9f}")
    dist.barrier()
    dist.destroy_process_group()
    print(dist.is_initialized(), list(model.state_dict()))


def refused():
    """What is for ranks, and not for one device; by `fxdp run` alone."""
    from torch.distributed.fsdp import fully_shard

    def read_rank():
        os.system("true")  # so that no rank fails before another has come here
        return os.environ["LOCAL_RANK"]

    for act in (
        lambda: torch.multiprocessing.spawn(own_ranks, (2,), nprocs=2),
        lambda: dist.init_process_group("gloo", world_size=4, rank=0),
        lambda: subprocess.Popen(["true"], env={"WORLD_SIZE": "2"}),
        lambda: subprocess.run("torchrun --nproc-per-node 2 a/train.py", shell=True),
        lambda: fully_shard(nn.Linear(2, 2)),
        lambda: os.popen("cat", "w"),
    ):
        try:
            act()
            print("not refused")
        except RuntimeError as error:
            print(error)
    read_rank()


if __name__ == "__main__":
    text_and_programs()
    processes()
    rows, text = data_bases()
    files_of_packages()
    rows.writerow(["never closed"])
    text.write("never closed")
    imported_late()
    batches()
    own_ranks(0, 1)
    if sys.argv[1:] == ["refused"]:
        refused()
