"""Fine-tuning by transformers' Trainer: padding to the longest text, accumulation, a schedule, metrics.

    python examples/finetune_trainer.py
    fxdp run --nproc 2 examples/finetune_trainer.py

Both print the same numbers. A small BERT learns to fill gaps in lines of Python's standard library and is
saved; then a classifier is made of it, and fine-tuned to tell comments and docstrings from code.
"""

import argparse
import inspect
import logging
import random
import tempfile

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

logging.disable(logging.WARNING)
set_seed(0)
torch.set_default_dtype(torch.float64)

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=240)
parser.add_argument("--epochs", type=int, default=1)
asked = parser.parse_args()
lines = [line.strip()[:30] for line in inspect.getsource(argparse).splitlines() if line.strip()]
lines = random.Random(0).sample(lines, asked.samples * 3 // 2)
PAD, GAP = 0, 1


def is_prose(line: str) -> int:
    """Whether a line is a comment, or text of a docstring: here, one that ends like a sentence."""
    return int(line.startswith("#") or line.endswith((".", ",")) or '"""' in line)


def samples(chosen: list[str]) -> list[dict[str, torch.Tensor]]:
    """Lines as tokens, one for each character."""
    return [
        {"input_ids": torch.tensor([min(ord(c), 127) for c in line]), "labels": torch.tensor(is_prose(line))}
        for line in chosen
    ]


def padded(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch as wide as its longest line."""
    ids = pad_sequence([sample["input_ids"] for sample in batch], batch_first=True, padding_value=PAD)
    labels = torch.stack([sample["labels"] for sample in batch])
    return {"input_ids": ids, "attention_mask": ids.ne(PAD).long(), "labels": labels}


def gapped(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch in which every fifth character is to be guessed."""
    found = padded(batch)
    ids = found["input_ids"]
    gaps = ids.ne(PAD) & (torch.arange(ids.size(1)) % 5 == 2)
    return {**found, "input_ids": ids.masked_fill(gaps, GAP), "labels": ids.masked_fill(~gaps, -100)}


class Printed(TrainerCallback):
    """Print what is logged, without times."""

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        """Print numbers that do not depend on the clock."""
        print({k: round(v, 9) for k, v in logs.items() if "runtime" not in k and "per_second" not in k})


def metrics(prediction) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """How many lines are told right."""
    return {"right": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def trainer(model: torch.nn.Module, folder: str, **options) -> Trainer:  # type: ignore[no-untyped-def]
    """A Trainer that prints, and writes nothing."""
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=16, gradient_accumulation_steps=2, learning_rate=3e-3,
        lr_scheduler_type="cosine", warmup_steps=2, logging_steps=3, num_train_epochs=asked.epochs,
        eval_strategy="epoch" if "eval_dataset" in options else "no", save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    made = Trainer(model, arguments, callbacks=[Printed()], **options)
    made.remove_callback(PrinterCallback)
    return made


config = BertConfig(
    vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=32,
)  # fmt: skip
train, test = samples(lines[: asked.samples]), samples(lines[asked.samples :])
with tempfile.TemporaryDirectory() as folder:
    filler = BertForMaskedLM(config)
    trainer(filler, folder, data_collator=gapped, train_dataset=train).train()
    filler.save_pretrained(folder)
    classifier = BertForSequenceClassification.from_pretrained(folder, num_labels=2)
    data = {"train_dataset": train, "eval_dataset": test}
    trainer(classifier, folder, data_collator=padded, compute_metrics=metrics, **data).train()
print(f"norms {sum(p.norm().item() for p in classifier.parameters()):.9f}")
