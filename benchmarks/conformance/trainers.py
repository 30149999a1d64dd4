"""Trainers on two ranks beside their own run on one device: every printed loss and gradient norm of 20 steps.

    python -m benchmarks.conformance.trainers [framework or model ...] [--float32]

transformers' Trainer, Accelerate, Fabric and Lightning train GPT-2, BERT and ResNet, tiny and of random
weights, with accumulation, clipping, evaluation, saving and resuming, by batches of which the last one has a
single sample: the second rank has none of it. On one device they run as they are, on two ranks by fxdp.

Trainer's numbers are compared as it prints them, with 4 digits; the others print what their user lets them,
here 9 decimals. transformers computes losses in float32 otherwise, so models in float64 are kept in float64;
`--float32` leaves all as users have it, with 4 digits of all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.capture.zoo import keep_float64

STEPS = 20
SAMPLES = 17
BATCH = 4
VOCABULARY = 40
EAGER = {"backend": "eager"}
_GPT2 = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
_BERT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic"}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, **_GPT2)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(vocab_size=VOCABULARY, **_BERT)),
    "resnet": lambda: hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=5, **_RESNET)),
}


def model_and_data(name: str, dtype: torch.dtype) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """The same on each rank; of sentences, another number of tokens counts in each."""
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    if name == "resnet":
        images, kinds = torch.randn(SAMPLES, 3, 16, 16, dtype=dtype), torch.randint(0, 5, (SAMPLES,))
        return model, [{"pixel_values": x, "labels": y} for x, y in zip(images, kinds, strict=True)]
    rows = []
    for i in range(SAMPLES):
        ids = torch.randint(1, VOCABULARY, (8,))
        labels = ids.clone()
        labels[: i % 5] = -100
        rows.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})
    return model, rows


class Printed:
    """What a run prints."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.form = ".9f" if dtype is torch.float64 else ".4g"
        self.lines: list[str] = []

    def __call__(self, *values: Any) -> None:
        self.lines.append(" ".join(format(float(value), self.form) for value in values))


def trainer(name: str, dtype: torch.dtype, folder: str, world: int, compiled: bool) -> list[str]:
    """transformers' Trainer: 20 steps, and once more from the checkpoint after step 13."""
    model, data = model_and_data(name, dtype)
    args = hf.TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, per_device_train_batch_size=BATCH // world,
        per_device_eval_batch_size=BATCH // world, gradient_accumulation_steps=2, max_steps=STEPS,
        learning_rate=1e-2, max_grad_norm=0.5, logging_steps=1, eval_strategy="steps", eval_steps=10,
        save_strategy="steps", save_steps=13,
    )  # fmt: skip
    made = hf.Trainer(model, args, train_dataset=data, eval_dataset=data[:5])
    if compiled:
        from fxdp.integrations.transformers import compile_trainer

        made = compile_trainer(made, **EAGER)
    rows: list[dict[str, float]] = []
    for checkpoint in (None, f"{folder}/checkpoint-13"):
        made.train(resume_from_checkpoint=checkpoint)
        rows += made.state.log_history
    shown = ("loss", "grad_norm", "eval_loss", "train_loss")
    return [f"{key} {row[key]:.4g}" for row in rows for key in shown if key in row]


def accelerate(name: str, dtype: torch.dtype, folder: str, world: int, compiled: bool) -> list[str]:
    """A loop by Accelerate, two epochs, and two more from what was saved after the first two."""
    from accelerate import Accelerator, DataLoaderConfiguration

    from fxdp.integrations.accelerate import compile_accelerator

    order = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=order)
    accelerator = compile_accelerator(accelerator, **EAGER) if compiled else accelerator
    model, data = model_and_data(name, dtype)
    loaders = [DataLoader(data, BATCH // world, shuffle=shuffle) for shuffle in (True, False)]  # type: ignore[var-annotated,arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, *loaders)
    printed = Printed(dtype)

    def epoch() -> None:
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                norm = 0.0
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            printed(loss, norm)
        model.eval()
        with torch.no_grad():
            found = [accelerator.gather_for_metrics(model(**batch)["logits"]) for batch in held_out]
        printed(torch.cat(found).square().mean(), len(torch.cat(found)))

    for _ in range(2):
        epoch()
    accelerator.save_state(f"{folder}/state")
    epoch()
    accelerator.load_state(f"{folder}/state")
    for _ in range(2):
        epoch()
    return printed.lines


def fabric(name: str, dtype: torch.dtype, folder: str, world: int, compiled: bool) -> list[str]:
    """A loop by Fabric, four epochs, and two from what was saved after the second."""
    from lightning.fabric import Fabric

    from fxdp.integrations.lightning import FxdpFabricStrategy

    torch.manual_seed(0)
    strategy: Any = FxdpFabricStrategy(**EAGER) if compiled else "auto"
    made = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    made.launch()
    plain, data = model_and_data(name, dtype)
    model, optimizer = made.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    loader: Any = made.setup_dataloaders(DataLoader(data, BATCH // world, shuffle=True))  # type: ignore[arg-type]
    state = {"model": model, "optimizer": optimizer}
    printed = Printed(dtype)

    def epoch() -> None:
        for i, batch in enumerate(loader):
            waits = i % 2 == 0 and i < len(loader) - 1
            with made.no_backward_sync(model, enabled=waits):
                loss = model(**batch)["loss"]
                made.backward(loss)
            norm: Any = 0.0
            if not waits:
                norm = made.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
            printed(loss, norm)
        model.eval()
        with torch.no_grad():
            printed(*[model(**batch)["loss"] for batch in loader])
        model.train()

    for count in range(4):
        epoch()
        if count == 1:
            made.save(f"{folder}/state.ckpt", state)
    made.load(f"{folder}/state.ckpt", state)
    for _ in range(2):
        epoch()
    return printed.lines


def lightning(name: str, dtype: torch.dtype, folder: str, world: int, compiled: bool) -> list[str]:
    """Lightning's Trainer, two epochs, and two more from their checkpoint."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import LambdaCallback

    from fxdp.integrations.lightning import FxdpStrategy

    printed = Printed(dtype)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.data = model_and_data(name, dtype)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.net(**batch)["loss"])

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            printed(nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    shows = LambdaCallback(
        on_train_batch_end=lambda made, *_: printed(made.callback_metrics["loss"]),
        on_validation_end=lambda made, _: printed(made.callback_metrics["val_loss"]),
    )
    for epochs, resume in ((2, None), (4, f"{folder}/after-2.ckpt")):
        torch.manual_seed(0)
        strategy: Any = FxdpStrategy(**EAGER) if compiled else "auto"
        made = Trainer(
            accelerator="cpu", devices=world, strategy=strategy, default_root_dir=folder, max_epochs=epochs,
            accumulate_grad_batches=2, gradient_clip_val=0.5, num_sanity_val_steps=0, callbacks=[shows],
            logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        module = Module()
        loaders = [DataLoader(module.data, BATCH // world, shuffle=shuffle) for shuffle in (True, False)]  # type: ignore[var-annotated,arg-type]
        made.fit(module, *loaders, ckpt_path=resume)
        made.save_checkpoint(f"{folder}/after-{epochs}.ckpt")
    return printed.lines


FRAMEWORKS = {f.__name__: f for f in (trainer, accelerate, fabric, lightning)}


def one_run(framework: str, name: str, dtype: torch.dtype, folder: str) -> None:
    """One cell of the table, in the process of one rank; what it prints goes into a file."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    where = f"{folder}/{world}"
    keeps = keep_float64() if dtype is torch.float64 else contextlib.nullcontext()
    with warnings.catch_warnings(), keeps:
        warnings.simplefilter("ignore")
        lines = FRAMEWORKS[framework](name, dtype, where, world, world > 1)
    Path(f"{where}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(lines))


def compared(framework: str, name: str, flags: list[str]) -> str:
    """One cell of the table, in words."""
    with tempfile.TemporaryDirectory() as folder:
        module = ["-m", "benchmarks.conformance.trainers", "--cell", framework, name, folder, *flags]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        for words in (module, [*torchrun, *module]):
            done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
            if done.returncode:
                return f"failed: {done.stderr.strip().splitlines()[-1] if done.stderr else ''}\n{done.stderr}"
        files = [Path(folder, f"{name}.json") for name in ("1-0", "2-0", "2-1")]
        one, first, second = (json.loads(file.read_text()) for file in files)
    apart = [(a, b) for a, b in zip(one, first, strict=False) if a != b]
    if len(one) != len(first) or first != second or apart:
        return f"{len(apart)} of {len(one)} differ{f', first {apart[0]}' if apart else ''}"
    return f"all {len(one)} lines equal"


def main() -> None:
    """Print a line for each framework and model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join([*FRAMEWORKS, *MODELS])} (default: all)")
    parser.add_argument("--float32", action="store_true", help="all numbers as users have them")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.cell:
        framework, name, folder = asked.cell
        one_run(framework, name, torch.float32 if asked.float32 else torch.float64, folder)
        return
    if unknown := set(asked.names) - {*FRAMEWORKS, *MODELS}:
        parser.error(f"no {sorted(unknown)}; there are {', '.join([*FRAMEWORKS, *MODELS])}")
    flags = ["--float32"] if asked.float32 else []
    for framework in [name for name in FRAMEWORKS if name in asked.names] or FRAMEWORKS:
        for name in [name for name in MODELS if name in asked.names] or MODELS:
            print(f"{framework:10} {name:6} {compared(framework, name, flags)}", flush=True)


if __name__ == "__main__":
    main()
